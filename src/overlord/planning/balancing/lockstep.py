"""The lockstep objective: buckets wait for one another at every microbatch, so the sum of the slowest counts.

A slab is one microbatch of all buckets. While the largest waiting item costs more than an even share, the next slab
gets the height of that item and is filled up to it, within the capacity. When no item exceeds the even share, the
remaining items are spread evenly over the remaining slabs.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from overlord.planning.balancing.greedy import NO_LIMIT, Int64s, Queue, balance_greedy, fill, fits_at_all, loads

_EVENLY, _BY_SLAB, _SPREAD = 0, 1, 2
"""Once no item exceeds the even share: fill all remaining slabs together; one by one; leave them to another method."""
SMALL = 1 << 16
"""Up to this many items, filling slab by slab is tried too: it takes a few milliseconds and is sometimes better."""


def fill_slabs(
    costs: Int64s,
    sizes: Int64s,
    num_buckets: int,
    num_microbatches: int,
    capacity: int,
    spread: Callable[[Int64s, Int64s, int, int], Int64s | None] | None = None,
) -> Int64s | None:
    """Return the bin of each item in D * M bins that make even slabs, or None where the items do not fit.

    The bins still have to be dealt to buckets: `deal_slabs`.

    Args:
        costs: What each item takes of time.
        sizes: What each item takes of the capacity.
        num_buckets: D, the bins of a slab.
        num_microbatches: M, the slabs.
        capacity: The most a bin may hold.
        spread: What spreads the items over the even slabs (default: greedy).

    Example:
        >>> fill_slabs(np.array([9, 4, 3, 2, 1, 1]), np.ones(6, np.int64), 2, 2, 3).tolist()
        [0, 1, 1, 1, 2, 3]
    """
    num_bins = num_buckets * num_microbatches
    if not fits_at_all(sizes, num_bins, capacity):
        return None
    best, least = None, NO_LIMIT
    ways = (_SPREAD,) if spread else (_EVENLY, _BY_SLAB) if len(costs) <= SMALL else (_EVENLY,)
    for way in ways:
        queue = Queue(costs, sizes)
        slab = _water_fill(*queue.arrays, num_buckets, num_microbatches, capacity, way, queue.bins)
        bins = queue.in_order()
        if spread and slab < num_microbatches:
            rest = np.flatnonzero(bins < 0)
            found = spread(costs[rest], sizes[rest], num_bins - slab * num_buckets, capacity)
            if found is not None:
                bins[rest] = found + slab * num_buckets
        if bins.min(initial=0) >= 0:
            height = slab_heights(loads(costs, bins, num_bins), num_buckets)
            if height < least:
                best, least = bins, height
    return balance_greedy(costs, sizes, num_bins, capacity) if best is None else best


def slab_heights(load: Int64s, num_buckets: int) -> int:
    """Return the sum of the slabs' maxima when bins of similar load share a slab, which is the least possible.

    Example:
        >>> slab_heights(np.array([9, 1, 8, 2]), 2)
        11
    """
    return int(np.sort(load)[::-1][::num_buckets].sum())


def deal_slabs(load: Int64s, num_buckets: int, num_microbatches: int, stages: int = 1) -> Int64s:
    """Deal D * M bins to (bucket, microbatch): bins of similar load share a microbatch, buckets end up even.

    Args:
        load: The cost of each bin.
        num_buckets: D.
        num_microbatches: M.
        stages: Pipeline stages p: a bucket's heaviest bin counts p times.

    Returns:
        For each bin its place bucket * M + microbatch.

    Example:
        >>> deal_slabs(np.array([9, 1, 8, 2]), 2, 2).tolist()
        [0, 1, 2, 3]
    """
    slabs = np.argsort(-load, kind="stable").reshape(num_microbatches, num_buckets)
    place = np.empty(len(load), np.int64)
    place[slabs[0]] = np.arange(num_buckets) * num_microbatches
    sums = load[slabs[0]] * stages
    for microbatch in range(1, num_microbatches):
        bins = slabs[microbatch]
        buckets = np.argsort(sums, kind="stable")  # the heaviest bin goes to the lightest bucket
        place[bins] = buckets * num_microbatches + microbatch
        sums[buckets] += load[bins]
    return place


@numba.njit(nogil=True, cache=True)
def _water_fill(
    costs: Int64s,
    sizes: Int64s,
    after: Int64s,
    tree: Int64s,
    num_buckets: int,
    num_microbatches: int,
    capacity: int,
    way: int,
    bins: Int64s,
) -> int:
    """Fill slabs from the highest to the lowest; return how many were filled."""
    n, rest, slab, head = len(costs), np.int64(0), 0, 0
    for i in range(n):
        rest += costs[i]
    while slab < num_microbatches:
        while head < n and bins[head] >= 0:
            head += 1
        if head == n:
            return num_microbatches
        left = num_microbatches - slab
        share = -(-rest // (num_buckets * left))
        if way == _SPREAD and costs[head] <= share:
            return slab
        at_once = left if way != _BY_SLAB and costs[head] <= share else 1
        limit = NO_LIMIT if at_once == left else max(costs[head], share + share // 50)
        load, room = np.zeros(at_once * num_buckets, np.int64), np.full(at_once * num_buckets, capacity, np.int64)
        rest -= fill(costs, sizes, after, tree, limit, load, room, bins, slab * num_buckets)
        slab += at_once
    return slab
