"""Strategies: a function of (draw, limits) that decides where every piece goes. Nothing moves to another step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlord.core.plan import Draw, LoadingPlan, Pieces, cut_pieces
from overlord.errors import PlanError
from overlord.planning.balancing import balance_greedy, slabs
from overlord.planning.costs import sequence_cost

SLACK = 0.95
"""The microbatch count leaves one part in twenty free: a balancer without slack only fills bins."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must respect."""

    num_buckets: int
    """Consumers of the backbone: the data-parallel groups."""
    context_length: int
    microbatch_tokens: int
    microbatches: int | None
    pad_multiple: int


def greedy_balance(draw: Draw, limits: Limits) -> LoadingPlan:
    """Give every bucket an equal share of cost in every microbatch."""
    pieces, padded, costs = _measure(draw, limits)
    for count in _microbatch_counts(padded, limits):
        bins = balance_greedy(costs, padded, limits.num_buckets * count, limits.microbatch_tokens)
        if bins is not None:
            load = np.bincount(bins, weights=costs.astype(np.float64), minlength=limits.num_buckets * count)
            places = slabs(load.astype(np.int64), limits.num_buckets, count)[bins]
            return _finish(draw, pieces, places, count, limits)
    raise _no_room(draw, padded, limits)


def round_robin(draw: Draw, limits: Limits) -> LoadingPlan:
    """Deal pieces to buckets in drawing order and fill microbatches one after the other: what loaders do today."""
    pieces, padded, _ = _measure(draw, limits)
    bucket = np.arange(len(padded)) % limits.num_buckets
    microbatch = np.zeros(len(padded), np.int64)
    for one in range(limits.num_buckets):
        mine = bucket == one
        microbatch[mine] = _next_fit(padded[mine], limits.microbatch_tokens)
    count = int(microbatch.max(initial=0)) + 1
    if limits.microbatches is not None and count > limits.microbatches:
        raise _no_room(draw, padded, limits)
    count = limits.microbatches or count
    return _finish(draw, pieces, bucket * count + microbatch, count, limits)


def pad_lengths(lengths: npt.NDArray[np.integer], multiple: int) -> Int64s:
    """Round lengths up to a multiple.

    Example:
        >>> pad_lengths(np.array([1, 4, 5]), 4).tolist()
        [4, 4, 8]
    """
    return -(-lengths.astype(np.int64) // multiple) * multiple


def _measure(draw: Draw, limits: Limits) -> tuple[Pieces, Int64s, Int64s]:
    pieces = cut_pieces(draw.meta["tokens"], limits.context_length)
    padded = pad_lengths(pieces.length, limits.pad_multiple)
    return pieces, padded, sequence_cost(padded)


def _microbatch_counts(padded: Int64s, limits: Limits) -> range:
    if limits.microbatches is not None:
        return range(limits.microbatches, limits.microbatches + 1)
    total, room = int(padded.sum()), limits.num_buckets * limits.microbatch_tokens
    least = max(1, -(-total // room))
    first = least if least == 1 and total <= SLACK * room else max(1, int(np.ceil(total / (SLACK * room))))
    # Greedy places every piece once each bin is at most half full.
    return range(first, 2 * least + 2)


def _next_fit(padded: Int64s, capacity: int) -> Int64s:
    out = np.empty(len(padded), np.int64)
    current, used = 0, 0
    for i, size in enumerate(padded.tolist()):
        if used + size > capacity and used:
            current, used = current + 1, 0
        used += size
        out[i] = current
    return out


def _finish(draw: Draw, pieces: Pieces, places: Int64s, count: int, limits: Limits) -> LoadingPlan:
    # Inside a microbatch the drawing order is kept.
    order = np.argsort(places, kind="stable")
    offsets = np.zeros(limits.num_buckets * count + 1, np.int64)
    np.cumsum(np.bincount(places, minlength=limits.num_buckets * count), out=offsets[1:])
    return LoadingPlan(
        draw=draw,
        pieces=pieces.take(order),
        bin_offsets=offsets,
        num_buckets=limits.num_buckets,
        num_microbatches=count,
        pad_multiple=limits.pad_multiple,
        global_loss_tokens=int(draw.meta["loss_tokens"].sum()),
    )


def _no_room(draw: Draw, padded: Int64s, limits: Limits) -> PlanError:
    return PlanError(
        f"step {draw.step}: {len(padded)} pieces of {int(padded.sum())} tokens do not fit into {limits.num_buckets} "
        f"data-parallel ranks x {limits.microbatches or 'any number of'} microbatches of {limits.microbatch_tokens} "
        "tokens; a rank would run out of memory. Raise batch.microbatches or batch.microbatch_tokens, or lower the "
        "global batch."
    )
