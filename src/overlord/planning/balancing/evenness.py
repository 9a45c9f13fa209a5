"""How evenly a plan loads the ranks: costs of every microbatch, and what they mean for the time of a step. No I/O."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.planning.costs import CostFunction, as_costs

Floats = npt.NDArray[np.float64]


def rank_loads(plan: LoadingPlan, tree: ClientPlaceTree, cost: CostFunction) -> Floats:
    """Return the cost of every microbatch as one rank bears it: [bucket, microbatch].

    Ranks that share a sequence bear equal parts of it: all context-parallel ranks of a DP bucket, or the block of
    ranks that hybrid data parallelism spreads it over.
    """
    sharing: Any = plan.cp_sizes if plan.cp_sizes is not None else 1 if plan.axis == "CP" else tree.cp
    share = as_costs(cost, plan.in_batch) / sharing
    sums = np.zeros(len(plan.bin_offsets) - 1)
    filled = np.flatnonzero(np.diff(plan.bin_offsets))
    if len(filled):
        sums[filled] = np.add.reduceat(share, plan.bin_offsets[filled])
    return sums.reshape(plan.num_buckets, plan.num_microbatches)


def positions(plan: LoadingPlan) -> int:
    """Return the positions that a plan delivers: tokens, their padding, and the dummies of empty microbatches."""
    sharing: Any = 1 if plan.cp_sizes is None else plan.cp_sizes
    empty = np.diff(plan.bin_offsets).reshape(plan.num_buckets, -1) == 0
    dummies = empty & (np.arange(plan.num_microbatches) < plan.microbatch_counts[:, None])
    return int((plan.in_batch // sharing).sum()) + int(dummies.sum()) * max(plan.pad_multiple, plan.bin_multiple)


def over_ranks(loads: npt.NDArray[Any]) -> float:
    """Return the largest cost of a rank over the mean of all, from costs [rank, microbatch].

    Example:
        >>> over_ranks(np.array([[2.0, 1.0], [1.0, 0.0]]))
        1.5
    """
    return _ratio(float(loads.sum(axis=1).max(initial=0.0)), loads)


def in_lockstep(loads: npt.NDArray[Any]) -> float:
    """Return the time of a step whose ranks wait for each other after every microbatch, over that of even ranks.

    Example:
        >>> in_lockstep(np.array([[2.0, 1.0], [1.0, 2.0]]))
        1.3333333333333333
    """
    return _ratio(float(loads.max(axis=0, initial=0.0).sum()), loads)


def in_pipeline(loads: npt.NDArray[Any], stages: int, microbatches: int | None = None) -> float:
    """Return the time of the slowest pipeline over that of even ranks with equal microbatches.

    A pipeline of p stages runs its microbatches one after the other, and its largest p - 1 times more.

    Args:
        loads: Costs [rank, microbatch].
        stages: Stages of a pipeline.
        microbatches: How many the even ranks have; by default as many as these. Ratios can be compared only by the
            same number.

    Example:
        >>> in_pipeline(np.array([[2.0, 2.0], [3.0, 1.0]]), stages=2)
        1.1666666666666667
    """
    even = 1 + (stages - 1) / (microbatches or loads.shape[1])
    return _ratio(float(_pipelines(loads, stages).max(initial=0.0)) / even, loads)


def step_time(loads: npt.NDArray[Any], *, stages: int = 1, per_microbatch: float = 0.0, free: bool = False) -> float:
    """Return the time of a step in units of cost.

    Args:
        loads: Costs [rank, microbatch] as one rank bears them.
        stages: Pipeline stages; with more than one, the slowest pipeline decides.
        per_microbatch: What a microbatch costs whatever is in it.
        free: Whether ranks run through their microbatches without waiting for each other after each.
    """
    busy = np.where(loads > 0, loads + per_microbatch, 0.0)
    if stages > 1:
        return float(_pipelines(busy, stages).max(initial=0.0))
    return float(busy.sum(axis=1).max(initial=0.0)) if free else float(busy.max(axis=0, initial=0.0).sum())


def runs_free(plan: LoadingPlan) -> bool:
    """Whether the ranks have different numbers of microbatches, so that they cannot wait for each other after each."""
    return plan.counts is not None and len(np.unique(plan.counts)) > 1


def encoder_loads(plan: LoadingPlan, tree: ClientPlaceTree, cost: CostFunction, patches_per_token: int) -> Floats:
    """Return what encoding images costs each rank of the world.

    Without a plan for the encoder, images are encoded on the first rank of those that hold their tokens.
    """
    images, runs = plan.draw.images, plan.encoder
    whole = as_costs(cost, images.length.astype(np.int64) * patches_per_token).astype(np.float64)
    if runs is not None:
        image = plan.draw.image_at(runs.pieces.sample, runs.pieces.start)[0]
        part = runs.pieces.length / images.length[image]
        return np.bincount(runs.buckets, whole[image] * part, tree.world_size).astype(np.float64)
    held = np.arange(len(plan.pieces)) if plan.first_ranks is None else np.flatnonzero(plan.first_ranks == plan.buckets)
    keys = (plan.pieces.sample[held].astype(np.int64) << 32) + plan.pieces.start[held]
    order = np.argsort(keys)
    places = (images.sample.astype(np.int64) << 32) + images.start
    piece = held[order[np.searchsorted(keys[order], places, side="right") - 1]]
    heads = np.array([ranks[0] for ranks in tree.nodes(plan.axis)])
    return np.bincount(heads[plan.buckets[piece]], whole, tree.world_size).astype(np.float64)


def _pipelines(loads: npt.NDArray[Any], stages: int) -> Floats:
    return loads.sum(axis=1) + (stages - 1) * loads.max(axis=1, initial=0.0)


def _ratio(value: float, loads: npt.NDArray[Any]) -> float:
    mean = float(loads.sum(axis=1).mean()) if len(loads) else 0.0
    return value / mean if mean > 0 else 1.0
