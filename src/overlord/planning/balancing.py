"""Balancing: items with costs into bins, the largest bin as small as possible. Integers in, bins out."""

from __future__ import annotations

from typing import Literal

import numba
import numpy as np
import numpy.typing as npt

from overlord.errors import PlanError, SpecError

Int64s = npt.NDArray[np.int64]


def balance(
    costs: npt.ArrayLike,
    num_bins: int,
    method: Literal["greedy"] = "greedy",
    sizes: npt.ArrayLike | None = None,
    capacity: int | None = None,
) -> Int64s:
    """Return the bin of each item: largest item first, always into the least loaded bin that has room.

    Ties go to the earlier item and the lower bin, so every machine gives the same answer.

    Args:
        costs: What each item adds to its bin (integers; floats are rounded).
        num_bins: How many bins there are.
        method: "greedy".
        sizes: What each item takes of the bin's capacity (default: nothing).
        capacity: The most a bin may hold in sizes.

    Example:
        >>> balance([5, 4, 3, 2], 2).tolist()
        [0, 1, 1, 0]
    """
    if method != "greedy":
        raise SpecError(f"balance: method is {method!r}, which is unknown; use 'greedy'.")
    if num_bins < 1:
        raise SpecError(f"balance: num_bins is {num_bins}, nothing could be placed; give at least 1.")
    cost = np.rint(np.asarray(costs)).astype(np.int64)
    size = np.zeros(len(cost), np.int64) if sizes is None else np.asarray(sizes, np.int64)
    room = np.iinfo(np.int64).max if capacity is None else int(capacity)
    bins = balance_greedy(cost, size, num_bins, room)
    if bins is None:
        raise PlanError(
            f"balance: {len(cost)} items of {int(size.sum())} in all do not fit into {num_bins} bins of {room}; "
            "use more bins or a larger capacity."
        )
    return bins


def balance_greedy(costs: Int64s, sizes: Int64s, num_bins: int, capacity: int) -> Int64s | None:
    """Return the bin of each item, or None when greedy finds no room for one."""
    order = np.lexsort((np.arange(len(costs)), -sizes, -costs))
    bins = np.full(len(costs), -1, np.int64)
    return bins if _longest_first(costs, sizes, order, num_bins, capacity, bins) else None


@numba.njit(nogil=True, cache=True)
def _sift_down(heap: Int64s, load: Int64s, at: int, end: int) -> None:
    moving = heap[at]
    while True:
        child = 2 * at + 1
        if child >= end:
            break
        right = child + 1
        if right < end and (
            load[heap[right]] < load[heap[child]]
            or (load[heap[right]] == load[heap[child]] and heap[right] < heap[child])
        ):
            child = right
        if load[heap[child]] < load[moving] or (load[heap[child]] == load[moving] and heap[child] < moving):
            heap[at] = heap[child]
            at = child
        else:
            break
    heap[at] = moving


@numba.njit(nogil=True, cache=True)
def _longest_first(costs: Int64s, sizes: Int64s, order: Int64s, num_bins: int, capacity: int, bins: Int64s) -> bool:
    load = np.zeros(num_bins, np.int64)
    room = np.full(num_bins, capacity, np.int64)
    heap = np.arange(num_bins)
    for item in order:
        chosen = heap[0]
        if room[chosen] < sizes[item]:
            # The least loaded bin is full (many short pieces): look at the others in order of load.
            chosen = -1
            for b in range(num_bins):
                if room[b] >= sizes[item] and (chosen < 0 or load[b] < load[chosen]):
                    chosen = b
            if chosen < 0:
                return False
        bins[item] = chosen
        load[chosen] += costs[item]
        room[chosen] -= sizes[item]
        at = 0
        while heap[at] != chosen:
            at += 1
        _sift_down(heap, load, at, num_bins)
    return True


def slabs(load: Int64s, num_buckets: int, num_microbatches: int) -> Int64s:
    """Deal D * M bins to (bucket, microbatch): bins of like load share a microbatch, buckets end up even.

    Returns:
        For each bin its place bucket * M + microbatch.

    Example:
        >>> slabs(np.array([9, 1, 8, 2]), 2, 2).tolist()
        [0, 1, 2, 3]
    """
    order = np.lexsort((np.arange(len(load)), -load)).reshape(num_microbatches, num_buckets)
    place = np.empty(len(load), np.int64)
    sums = np.zeros(num_buckets, np.int64)
    for microbatch, bins in enumerate(order):
        buckets = np.lexsort((np.arange(num_buckets), sums))  # the heaviest bin goes to the lightest bucket
        place[bins] = buckets * num_microbatches + microbatch
        sums[buckets] += load[bins]
    return place
