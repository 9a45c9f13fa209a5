"""A tiny text encoder trained on contrastive pairs that two hooks build from the demo's text: the loop to copy.

    make setup demo
    .venv/bin/python examples/train_pairs.py overlord-demo/job.yaml --steps 30

Each document becomes two crops of itself (`pair_hooks.py`). The loss is InfoNCE: a crop must find the other crop of its
document among all crops of its microbatch. Tokens that belong to no crop do not count.
"""

from __future__ import annotations

import argparse

import torch
from pair_hooks import pair_column, two_crops
from torch import nn

import overlord as ol
from overlord.integrations.torch_loader import DataLoader, TorchBatch

TEMPERATURE = 0.05


class TinyEncoder(nn.Module):
    """The mean of the embeddings of a crop, projected to the unit sphere."""

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.project = nn.Linear(width, width)

    def forward(self, input_ids: torch.Tensor, pair_ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors of all crops, [pairs, 2, width]: anchors and positives."""
        inside = pair_ids >= 0
        crops, number = torch.unique(pair_ids[inside], return_inverse=True)
        sums = torch.zeros(len(crops), self.embed.embedding_dim).index_add_(0, number, self.embed(input_ids[inside]))
        means = sums / torch.bincount(number, minlength=len(crops)).unsqueeze(1)
        return nn.functional.normalize(self.project(means), dim=1).view(-1, 2, means.shape[1])


def contrast(model: nn.Module, batch: TorchBatch) -> tuple[torch.Tensor, int, int]:
    """Return the summed loss of a microbatch, how many anchors found their positive, and the number of pairs."""
    vectors = model(batch["input_ids"], batch["pair_ids"])
    if len(vectors) < 2:  # without another document there is nothing to tell a positive from
        return 0.0 * vectors.sum(), 0, 0
    scores = vectors[:, 0] @ vectors[:, 1].T / TEMPERATURE
    wanted = torch.arange(len(scores))
    losses = nn.functional.cross_entropy(scores, wanted, reduction="sum")
    return losses, int((scores.argmax(dim=1) == wanted).sum()), len(scores)


def pairs_job(job: ol.Job) -> ol.Job:
    """Return a job of the text sources alone, in steps of whole documents that two CPU cores can train on."""
    text = [source for source in job.sources if isinstance(source.sample, ol.Text)]
    batch = ol.Batch(256, global_samples=128, microbatch_tokens=8192)
    return job.replace(sources=text, mixture=ol.Mixture(), batch=batch, overlength="truncate")


def train(job: ol.Job, steps: int, **options: object) -> list[float]:
    """Train, and return the loss of each step."""
    torch.manual_seed(0)
    model = TinyEncoder(4096)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    curve: list[float] = []
    with DataLoader(job, loader_do_plan=two_crops, constructor_do_plan=pair_column, **options) as loader:
        for step in loader:
            sums = [contrast(model, batch) for batch in step.microbatches]
            pairs = max(1, sum(count for _, _, count in sums))
            loss = torch.stack([losses for losses, _, _ in sums]).sum() / pairs
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
            share = sum(hits for _, hits, _ in sums) / pairs
            print(f"step {step.index:3d}  loss {curve[-1]:.4f}  found {share:.0%} of {pairs} pairs", flush=True)
            if len(curve) == steps:
                break
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", help="a job file with text sources")
    parser.add_argument("--steps", type=int, default=30, help="steps to train")
    options = parser.parse_args()
    train(pairs_job(ol.load_job(options.job)), options.steps)


if __name__ == "__main__":
    main()
