"""A tiny language model trained on the demo's text under torchrun: the loop to copy.

It takes the text sources of a job file and a batch that two CPU cores can train on.

    make setup demo
    .venv/bin/torchrun --nproc-per-node 2 examples/train_text.py overlord-demo/job.yaml --steps 20
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

import overlord as ol
from overlord.companions import LayerBalance, balance_groups
from overlord.integrations.torch_loader import DataLoader, TorchBatch


class TinyModel(nn.Module):
    """Predicts the next token from the current one: enough to see a loss fall."""

    def __init__(self, vocabulary: int, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def token_losses(model: nn.Module, batch: TorchBatch) -> torch.Tensor:
    """Return the loss of every token; labels are unshifted, as Hugging Face models take them."""
    logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")


def text_job(job: ol.Job) -> ol.Job:
    """Return a job of the text sources alone, each with an equal share of the tokens, in smaller steps."""
    text = [source for source in job.sources if isinstance(source.sample, ol.Text)]
    return job.replace(sources=text, mixture=ol.Mixture(level="token"), batch=ol.Batch(512, global_tokens=16_384))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", help="a job file with text sources")
    parser.add_argument("--steps", type=int, default=20, help="steps to train")
    rules = ("report", "llr", "sigmoid", "tempbalance", "alphadecay")
    parser.add_argument("--balance", choices=rules, help="measure the layers and balance them (docs/layer-balance.md)")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    job = text_job(ol.load_job(options.job))
    model = TinyModel(4096)
    optimizer = torch.optim.AdamW(balance_groups(model), lr=3e-3)
    balance = LayerBalance(model, optimizer, options.balance, every=5) if options.balance else None
    with DataLoader(job, mesh=ol.ClientPlaceTree(dp=dist.get_world_size())) as loader:
        for step in loader:
            sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
            total = torch.zeros(())
            labels = max(1, step.global_loss_tokens)  # 0 where all samples of a step are broken
            for batch in step.microbatches:
                losses = token_losses(model, batch)
                # Every rank divides by the same number, so it does not matter who got which sample.
                (losses.sum() / labels).backward()
                total += losses.sum().detach()
                add_by_source(sums, batch, losses.detach())
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            dist.all_reduce(total)
            means = mean_losses(sums, job.names)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                metrics = balance.metrics() if balance else {}
                loader.report(step.index, metrics | {f"loss/{name}": mean for name, mean in means.items()})
                print(f"step {step.index:3d}  loss {total.item() / labels:.4f}", flush=True)
            if step.index + 1 == options.steps:
                break
        dist.barrier()
    dist.destroy_process_group()


def add_by_source(sums: dict[str, list[float]], batch: TorchBatch, losses: torch.Tensor) -> None:
    """Add the summed loss and the number of labels of every source."""
    bounds = batch["cu_seq_lens_q"].tolist()
    for source, start, stop in zip(batch.meta.source_ids.tolist(), bounds, bounds[1:], strict=False):
        if source >= 0:
            part = losses[start : stop - 1]
            found = sums[batch.meta.source_names[source]]
            found[0] += float(part.sum())
            found[1] += float((batch["labels"][0, start + 1 : stop] != -100).sum())


def mean_losses(sums: dict[str, list[float]], names: list[str]) -> dict[str, float]:
    """Return the mean loss of every source that has labels in this step, over all ranks."""
    table = torch.tensor([sums.get(name, [0.0, 0.0]) for name in names], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(table)  # a rank alone has seen only its own samples
    return {name: total / labels for name, (total, labels) in zip(names, table.tolist(), strict=True) if labels > 0}


if __name__ == "__main__":
    main()
