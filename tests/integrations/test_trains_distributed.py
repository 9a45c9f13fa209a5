"""Four real processes train a vision-language model on `vlm_hybrid` plans as one process does, one sample at a time."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from tiny_models import (
    HIDDEN,
    Patches,
    alone,
    apart,
    deliver,
    descend,
    job_with_pictures,
    model_with_pictures,
    read_batch,
    sum_of,
    train_pictures,
)
from torch import Tensor

import overlord as ol
from overlord.integrations.torch_loader import DataLoader, exchange_images

WORLD, STEPS = 4, 3

pytestmark = pytest.mark.timeout(300)  # four processes that import torch, on a machine that may be busy


@dataclass(frozen=True)
class Scenario:
    """A mesh, a plan and a layout; all of four ranks."""

    mesh: dict[str, int]
    strategy: dict[str, Any]
    layout: dict[str, Any] = field(default_factory=dict)
    tensors: bool = False
    """Whether ranks take torch's face of the stream."""


SCENARIOS = {
    "routed": Scenario({"dp": 2, "cp": 2}, {}),
    "split": Scenario({"dp": 2, "cp": 2}, {"split": True}, {"slicing": "whole_zigzag"}, tensors=True),
    "copies": Scenario({"cp": 2, "tp": 2}, {"split": True}, {"keys": "megatron", "sequence_parallel": True}),
    "broadcast": Scenario({"dp": 2, "tp": 2}, {"split": True, "broadcast": ("TP",)}, {"rows": "padded"}),
}


# ---- one rank


class Gathered(torch.autograd.Function):
    """The rows of all ranks of a group, one behind the other; each gets back the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
        dist.all_gather(counts, torch.tensor([len(rows)]), group=group)
        sizes = [int(count) for count in counts]
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded, group=group)
        me = dist.get_rank(group)
        ctx.mine, ctx.group = slice(sum(sizes[:me]), sum(sizes[: me + 1])), group
        return torch.cat([one[:size] for one, size in zip(found, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed[ctx.mine], None


class Shared(torch.autograd.Function):
    """The rows of the first rank of a group, on all its ranks; it gets back the gradients of all."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.first, ctx.own = group, dist.get_rank(group) == 0, rows.shape
        count = torch.tensor([len(rows)])
        dist.broadcast(count, group_src=0, group=group)
        found = rows.clone() if ctx.first else rows.new_empty((int(count), HIDDEN))
        dist.broadcast(found, group_src=0, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return (summed if ctx.first else summed.new_zeros(ctx.own)), None


def groups_of(mesh: ol.ClientPlaceTree, rank: int) -> dict[str, Any]:
    """The process groups along CP and TP that a rank is in; every rank makes all of them."""
    mine = {}
    for axis, keys in (("cp", ("dp", "tp")), ("tp", ("dp", "cp"))):
        members: dict[tuple[int, ...], list[int]] = {}
        for other in range(mesh.world_size):
            at = mesh.coords(other)
            members.setdefault(tuple(getattr(at, key) for key in keys), []).append(other)
        for ranks in members.values():
            group = dist.new_group(ranks)
            if rank in ranks:
                mine[axis] = group
    return mine


def microbatches_of(step: Any, group: Any, broadcast: bool) -> list[tuple[dict[str, Any], Any]]:
    """The batches of a step, with what is known of them; from the first tensor-parallel rank where that broadcasts."""
    assert step.fetches == (not broadcast or dist.get_rank(group) == 0)
    if not broadcast:
        return [(dict(batch), batch.meta) for batch in step.microbatches]
    found: list[Any] = []
    for batch in step.microbatches:
        assert step.fetches or not dict(batch)
        names = ("local_cp_size", "cu_seqlens", "image_positions", "image_rows")
        meta = SimpleNamespace(**{name: getattr(batch.meta, name) for name in names})
        box = [(dict(batch), meta)]
        dist.broadcast_object_list(box, group_src=0, group=group)
        found += box
    return found


def train_rank(rank: int, scenario: Scenario, address: str) -> tuple[list[float], Tensor]:
    """Train as one rank of a mesh; all ranks come to the same weights."""
    mesh, layout = ol.ClientPlaceTree(**scenario.mesh), ol.Layout(**scenario.layout)
    at, groups, broadcast = mesh.coords(rank), groups_of(mesh, rank), "broadcast" in scenario.strategy
    model, losses = model_with_pictures(), []
    weights = list(model.parameters())
    with DataLoader(address, rank=rank) if scenario.tensors else ol.connect(address, rank) as stream:
        for step, _ in zip(stream, range(STEPS), strict=False):
            images = step.encoder
            lengths = np.diff(np.asarray(images["cu_seqlens"]))
            patches = Patches.of(images["pixel_values"], lengths, layout, images["image_ids"], images["image_offsets"])
            (made,) = model.encoder([patches], lambda rows: Gathered.apply(rows[0], None))
            received = exchange_images(made, images)
            if broadcast:
                received = Shared.apply(received, groups["tp"])
            # Also a rank that holds no image of the step takes its part in the way back.
            parts = [0 * received.sum()]
            for batch, meta in microbatches_of(step, groups["tp"], broadcast):
                part = read_batch(batch, meta, layout, at.cp)
                rows = received[torch.tensor(meta.image_rows)]
                part = replace(part, places=torch.tensor(meta.image_positions), rows=rows)
                parts.append(model.language([part], lambda rows: Gathered.apply(rows[0], groups["cp"])))
            # Tensor-parallel ranks compute the same here, so each counts for its share.
            loss = sum_of(parts) / step.global_loss_tokens / mesh.tp
            gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            for tensor in (total := loss.detach().clone(), *gradients):
                dist.all_reduce(tensor)
            descend(weights, gradients)
            losses.append(float(total))
    return losses, torch.cat([weight.detach().flatten() for weight in weights])


def rank_main(rank: int, folder: str, addresses: dict[str, str]) -> None:
    """What one process does: every scenario in turn."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=WORLD, timeout=limit)
    for name, address in addresses.items():
        torch.save(train_rank(rank, SCENARIOS[name], address), f"{folder}/{name}-{rank}.pt")
    dist.destroy_process_group()


# ---- all of them


def ranks_per_image(plan: ol.LoadingPlan) -> np.ndarray:
    """Over how many ranks each image of a step is spread."""
    pieces = plan.encoder.pieces
    image, _ = plan.draw.media_at(pieces.sample, pieces.start)
    pairs = np.unique(np.stack([image, plan.encoder.buckets]), axis=1)
    return np.bincount(pairs[0])


@pytest.fixture(scope="module")
def trained(demo_files, cache, tmp_path_factory) -> Iterator[tuple[Path, dict[str, list[np.ndarray]]]]:
    """Where the ranks left what they came to in every scenario, and how their images were spread."""
    folder, job = tmp_path_factory.mktemp("ranks"), job_with_pictures(demo_files)
    with ExitStack() as stack:
        services = {}
        for name, scenario in SCENARIOS.items():
            strategy, mesh = ol.strategies.vlm_hybrid(**scenario.strategy), ol.ClientPlaceTree(**scenario.mesh)
            service = ol.launch(job, mesh=mesh, strategy=strategy, layout=ol.Layout(**scenario.layout), cache=cache)
            services[name] = stack.enter_context(service)
        spread = {name: [ranks_per_image(s.plan_raw(n)) for n in range(STEPS)] for name, s in services.items()}
        addresses = {name: service.address for name, service in services.items()}
        processes.spawn(rank_main, (str(folder), addresses), nprocs=WORLD)
    return folder, spread


@pytest.fixture(scope="module")
def one_by_one(demo_files, cache):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    job = job_with_pictures(demo_files)
    found = train_pictures(deliver(job, cache, strategy=alone, steps=STEPS), apart(job, ol.Layout()))
    torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.slow
def test_ranks_train_as_one_process_does(name, trained, one_by_one):
    folder, spread = trained
    split = SCENARIOS[name].strategy.get("split", False)
    assert (max(int(ranks.max()) for ranks in spread[name]) > 1) == split  # an image on several ranks, or none
    for rank in range(WORLD):
        losses, weights = torch.load(folder / f"{name}-{rank}.pt")
        assert losses == pytest.approx(one_by_one[0], rel=1e-9)
        torch.testing.assert_close(weights, one_by_one[1], rtol=1e-8, atol=1e-10)
