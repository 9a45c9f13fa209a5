"""A tiny language model trained on long and short sequences by hybrid data parallelism, with FSDP2 or without.

A sequence that fits one rank stays there, a longer one is computed by a ring of several; ranks have as many
microbatches as their work needs. It takes the text sources of a job file, on CPUs or on GPUs.

    make demo-long
    .venv/bin/torchrun --nproc-per-node 4 examples/train_long.py overlord-demo/job.yaml --steps 10
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import overlord as ol
from overlord.integrations.torch_hdp import HybridParallel
from overlord.integrations.torch_loader import DataLoader, TorchBatch
from overlord.integrations.torch_ring import ring_attention

CONTEXT, VOCABULARY, WIDTH, HEADS, GROUPS, LAYERS = 1024, 4096, 64, 4, 2, 3


class Layer(nn.Module):
    """One layer of a transformer; its attention is computed over all ranks that share the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (HEADS + 2 * GROUPS, -1))
        q, k, v = heads.split([HEADS, GROUPS, GROUPS], dim=1)
        x = x + self.out(ring_attention(rotated(q, angles), rotated(k, angles), v.contiguous()).flatten(1))
        return x + self.down(nn.functional.silu(self.up(self.norms[1](x))))


def rotated(heads: Tensor, angles: Tensor) -> Tensor:
    """Turn queries and keys by their positions (RoPE)."""
    a, b = heads.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None].to(heads.dtype), angles.sin()[:, None].to(heads.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class LongModel(nn.Module):
    """A small decoder that returns the loss of every token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        size = WIDTH // HEADS
        rates = 10_000 ** (-torch.arange(size // 2, device=ids.device) * 2 / size)
        x, angles = self.embed(ids), positions[:, None] * rates
        for layer in self.layers:
            x = layer(x, angles)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")


def long_job(job: ol.Job) -> ol.Job:
    """Return a job of the text sources alone, in steps of long and short sequences."""
    text = [source for source in job.sources if isinstance(source.sample, ol.Text)]
    batch = ol.Batch(CONTEXT, global_tokens=8 * CONTEXT, microbatch_tokens=CONTEXT)
    return job.replace(sources=text, mixture=ol.Mixture(), batch=batch, overlength="split")


def hybrid(gigabytes: float) -> ol.strategies.hdp:
    """Return the strategy; with a bandwidth to the host, sequences need fewer ranks where copies are hidden.

    Bytes and time of a layer are about those of this small model; measure yours (see docs/long-context.md).
    """
    if not gigabytes:
        return ol.strategies.hdp()
    layer = ol.costs.CostModel(alpha=1e-8, beta=1e-3)  # ms of its forward
    hidden = ol.costs.Offload(LAYERS, act_bytes_per_token=64 * WIDTH, bandwidth=1e9 * gigabytes, time=layer)
    return ol.strategies.hdp(offload=hidden)


def token_losses(model: nn.Module, batch: TorchBatch) -> Tensor:
    """Return the loss of this rank's tokens; where ranks share sequences the layout has shifted labels too."""
    ids, positions = batch["input_ids"][0], batch["position_ids"][0]
    if "shift_labels" in batch:
        labels = batch["shift_labels"][0]
    else:
        labels = nn.functional.pad(batch["labels"], (0, 1), value=-100)[0, 1:]
    return model(ids, positions, labels)


def add_by_source(table: Tensor, batch: TorchBatch, losses: Tensor) -> None:
    """Add the summed loss of every source: the slices of all segments lie one behind the other."""
    lengths = np.diff(batch.meta.cu_seqlens) // batch.meta.local_cp_size
    source = torch.as_tensor(np.repeat(batch.meta.source_ids, lengths), device=losses.device)
    real = source >= 0  # not those of a dummy
    table[:, 0].index_add_(0, source[real], losses.detach()[real].double())
    table[:, 1].index_add_(0, source[real], (losses.detach()[real] > 0).double())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", help="a job file with text sources")
    parser.add_argument("--steps", type=int, default=10, help="steps to train")
    parser.add_argument("--mesh", help="such as dp=2,cp=2 (default: all ranks along cp)")
    parser.add_argument("--wrapper", choices=["fsdp2", "replicated"], default="fsdp2", help="where parameters are")
    host = "keep activations of long sequences on the host, to which so many GB/s can be copied"
    parser.add_argument("--offload", type=float, default=0.0, metavar="GB_S", help=host)
    parser.add_argument("--save", type=Path, help="a folder for the checkpoint after the last step")
    parser.add_argument("--resume", type=Path, help="a checkpoint to continue from, of any mesh")
    parser.add_argument("--json", type=Path, help="a file for one line a step")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = ol.ClientPlaceTree.parse(options.mesh or f"cp={dist.get_world_size()}")
    job = long_job(ol.load_job(options.job))
    model = LongModel().to("cuda" if cuda else "cpu")
    if options.wrapper == "fsdp2":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with DataLoader(job, mesh=mesh, strategy=hybrid(options.offload)) as loader:
        if options.resume:
            load(options.resume, model, optimizer, loader)
        hdp = HybridParallel(loader)
        for step in loader:
            line = train_step(hdp, step, model, optimizer)
            if dist.get_rank() == 0:
                loader.report(step.index, {f"loss/{name}": mean for name, mean in line["sources"].items()})
                show(line, options.json)
            if step.index + 1 == options.steps:
                break
        if options.save:
            save(options.save, model, optimizer, loader)
        dist.barrier()
    dist.destroy_process_group()


def train_step(hdp: HybridParallel, step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Train on one step; return its loss, the loss of each source, and the rings of this rank."""
    device = next(model.parameters()).device
    table = torch.zeros(len(step.source_names), 2, dtype=torch.float64, device=device)
    done: list[tuple[list[int], float]] = []
    half = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()
    for batch in hdp.microbatches(step, model):
        with half:
            losses = token_losses(model, batch)
        hdp.backward(losses.sum())
        add_by_source(table, batch, losses)
        done.append((list(batch.meta.ranks), batch.meta.offload_ratio))
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(table, group=hdp.group)
    everywhere: list[Any] = [None] * len(hdp.ranks)
    dist.all_gather_object(everywhere, done, group=hdp.group)
    means = {n: total / labels for n, (total, labels) in zip(step.source_names, table.tolist(), strict=True) if labels}
    loss = float(table[:, 0].sum()) / max(1, step.global_loss_tokens)
    rings, shares = ([[one[at] for one in rank] for rank in everywhere] for at in (0, 1))
    return {"step": step.index, "loss": loss, "sources": means, "rings": rings, "offloaded": shares}


def show(line: dict[str, Any], file: Path | None) -> None:
    """Print a step: its loss, and how many microbatches which ranks computed together."""
    shared = Counter(
        "+".join(map(str, ring)) for rank, one in enumerate(line["rings"]) for ring in one if ring[0] == rank
    )
    work = ", ".join(f"{count} on {ranks}" for ranks, count in shared.items())
    most = max(share for rank in line["offloaded"] for share in rank)
    host = f"; up to {most:.0%} of the activations on the host" if most else ""
    print(f"step {line['step']:3d}  loss {line['loss']:.4f}  microbatches: {work}{host}", flush=True)
    if file is not None:
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    """Write a checkpoint that any mesh can load."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "data": loader}, checkpoint_id=folder)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    """Continue from a checkpoint."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments, "data": loader}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


if __name__ == "__main__":
    main()
