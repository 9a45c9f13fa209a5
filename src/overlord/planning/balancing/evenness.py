"""How evenly a plan loads the ranks, what that means for the time of a step, and a lower bound for any placement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.planning.costs import CostFunction, as_costs

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


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
    """Return the time of a step in which ranks meet after every microbatch, over that of even ranks.

    Example:
        >>> in_lockstep(np.array([[2.0, 1.0], [1.0, 2.0]]))
        1.3333333333333333
    """
    return _ratio(float(loads.max(axis=0, initial=0.0).sum()), loads)


def in_pipeline(loads: npt.NDArray[Any], stages: int, microbatches: int | None = None) -> float:
    """Return the time of the slowest pipeline over that of even ranks with equal microbatches.

    A pipeline of p stages runs its microbatches one after the other, and its largest p - 1 times more. Ratios can be
    compared only by the same number of microbatches of the even ranks; by default they have as many as these.

    Example:
        >>> in_pipeline(np.array([[2.0, 2.0], [3.0, 1.0]]), stages=2)
        1.1666666666666667
    """
    even = 1 + (stages - 1) / (microbatches or loads.shape[1])
    return _ratio(float(_pipelines(loads, stages).max(initial=0.0)) / even, loads)


def step_time(loads: npt.NDArray[Any], *, stages: int = 1, per_microbatch: float = 0.0, free: bool = False) -> float:
    """Return the time of a step in units of cost, from costs [rank, microbatch] as one rank bears them.

    With more than one pipeline stage the slowest pipeline decides; `free` ranks do not wait for each other after each
    microbatch, which costs `per_microbatch` whatever is in it.
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
    if plan.encoder is not None:
        runs, media = plan.encoder.pieces, plan.draw.media
        of = media.length[plan.draw.media_at(runs.sample, runs.start)[0]]
        whole = as_costs(cost, of.astype(np.int64) * patches_per_token).astype(np.float64)
        return np.bincount(plan.encoder.buckets, whole * (runs.length / of), tree.world_size).astype(np.float64)
    images = plan.draw.images
    whole = as_costs(cost, images.length.astype(np.int64) * patches_per_token).astype(np.float64)
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


# The lower bound of the lockstep time of any placement under a capacity.


_PRICES = (0.0, 0.5, 0.9)
_STEPS = 24
_SPLITS = 12
_GOLDEN = 0.6180339887498949


def lockstep_bound(
    costs: npt.ArrayLike, sizes: npt.ArrayLike, num_buckets: int, num_microbatches: int, capacity: int
) -> int:
    """Return a lower bound of sum_m max_d c over D buckets x M microbatches, with bins of at most the capacity.

    Number the slabs by falling height, h_1 >= .. >= h_M. No two items above half the capacity share a bin, so
    of the (m - 1) * D + 1 costliest of them one is in a slab of each of m slabs: h_m is at least the last one's cost.
    Any j slabs hold at most G(j) of all cost W (see `_Knapsack`), so the other slabs' heights add up to at least
    (W - G(j)) / D. G(j) grows with h_1; the bound is the least over all h_1 of the largest over all j.

    Example:
        >>> lockstep_bound([9, 1, 1, 1], [4, 1, 1, 1], 2, 2, 4)
        9
        >>> lockstep_bound([9, 9, 9, 1], [4, 4, 4, 1], 2, 2, 4)
        18
    """
    cost, size = np.asarray(costs, np.int64), np.asarray(sizes, np.int64)
    if len(cost) == 0:
        return 0
    sack = _Knapsack(cost, size, num_buckets, capacity)
    single = np.sort(cost[2 * size > capacity])[::-1][::num_buckets][:num_microbatches]
    lows = np.zeros(num_microbatches)
    lows[: len(single)] = single
    lows[0] = cost.max()
    total, start = float(cost.sum()), float(cost.max())
    firm = max(total / num_buckets, float(lows.sum()))

    def rest(slabs: int, height: float) -> float:
        others = max((total - sack.most(slabs, height)) / num_buckets, float(lows[slabs:].sum()))
        return float(lows[1:slabs].sum()) + others

    def largest(low: float, high: float, slabs: list[int]) -> float:
        return max([firm, low] + [low + rest(j, high) for j in slabs])

    # Only the most binding counts of slabs are used: fewer make the bound lower, never wrong.
    counts = sorted(range(1, num_microbatches), key=lambda j: -rest(j, np.inf))[:2]
    ranges = [(largest(start, np.inf, counts), start, np.inf)]
    # If the least h_1 gives no higher bound than an unlimited h_1, the height does not bind.
    limits = largest(start, start, counts) > ranges[0][0] * (1 + 1e-6)
    for _ in range(_SPLITS if limits else 0):
        bound, low, high = ranges.pop(ranges.index(min(ranges)))
        # h_1 is unknown: split the range of h_1 that has the least bound.
        middle = 1.25 * low if high == np.inf else (low + high) / 2
        ranges += [(max(bound, largest(*part, counts)), *part) for part in ((low, middle), (middle, high))]
    # Lowered by more than the rounding error of floats; the bounded value is an integer.
    return max(-(-int(cost.sum()) // num_buckets), int(cost.max()), math.ceil(min(ranges)[0] * (1 - 1e-9)))


@dataclass(frozen=True, slots=True)
class _Small:
    """Items of which several may share a bin, by falling cost per size."""

    density: Floats
    cost_so_far: Floats
    size_so_far: Floats
    free: float
    """Cost of the items without size."""

    @classmethod
    def of(cls, costs: Int64s, sizes: Int64s) -> _Small:
        some = sizes > 0
        cost, size = costs[some].astype(np.float64), sizes[some].astype(np.float64)
        order = np.argsort(-cost / size, kind="stable")
        sums = [np.concatenate(([0.0], np.cumsum(one[order]))) for one in (cost, size)]
        return cls((cost / size)[order], sums[0], sums[1], float(costs[~some].sum()))


class _Knapsack:
    """The most cost that some slabs hold, each bin within capacity and height.

    Items above half the capacity are large: one to a bin. Give small items any price p of size and q of cost. Those
    in the bins cost sum(c - p s - q c) + p sum(s) + q sum(c). The first is at most the sum of all positive ones. The
    others are limited bin by bin: beside a large item i, s by capacity - s_i and c by the height - c_i, and c / s lies
    between the least and the largest there is. So every pair of prices bounds the cost; the best one found is taken.
    """

    def __init__(self, costs: Int64s, sizes: Int64s, num_buckets: int, capacity: int) -> None:
        large = 2 * sizes > capacity
        self.small = _Small.of(costs[~large], sizes[~large])
        # A bin without a large item counts as one with a large item of cost and size 0.
        self.large_cost = np.concatenate(([0.0], costs[large]))
        self.large_room = capacity - np.concatenate(([0.0], sizes[large]))
        self.total = float(costs.sum())
        self.num_buckets = num_buckets

    def most(self, slabs: int, height: float) -> float:
        """Return a bound of the cost that so many slabs of at most this height hold."""
        bins = slabs * self.num_buckets
        best = min(self.total, bins * height)
        highest = float(self.small.density[0]) if len(self.small.density) else 0.0
        for price in _PRICES if height < np.inf else (0.0,):
            # The bound is convex in the price of size: golden section.
            low, high = 0.0, highest
            for _ in range(_STEPS):
                one, two = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
                values = self._bound(bins, height, one, price), self._bound(bins, height, two, price)
                low, high = (low, two) if values[0] < values[1] else (one, high)
                best = min(best, *values)
        return best

    def _bound(self, bins: int, height: float, size_price: float, cost_price: float) -> float:
        small = self.small
        count = int(np.searchsorted(-small.density, -size_price / (1 - cost_price)))
        supply = (1 - cost_price) * (small.cost_so_far[count] + small.free) - size_price * small.size_so_far[count]
        room, left = self.large_room, height - self.large_cost
        worth = self.large_cost.copy()
        if len(small.density):
            least = float(small.density[-1])
            worth += size_price * (np.minimum(room, left / least) if least > 0 else room)
        if cost_price:
            most = left if small.free or not len(small.density) else np.minimum(left, small.density[0] * room)
            worth += cost_price * most
        gains = worth[1:] - worth[0]
        gains = gains[gains > 0]
        if len(gains) > bins:
            gains = np.partition(gains, len(gains) - bins)[len(gains) - bins :]
        return float(supply + bins * worth[0] + gains.sum())
