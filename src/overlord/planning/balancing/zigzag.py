"""Cheap placements: zigzag (largest first, forward and back over the bins) and round-robin, which ignores costs.

Zigzag is even only where many items share a bin. Round-robin is the baseline: loading without a plan.
"""

from __future__ import annotations

import numba
import numpy as np

from overlord.planning.balancing.greedy import Int64s, fits_at_all, largest_first, place_rest

_SKIPS = 32


def balance_zigzag(costs: Int64s, sizes: Int64s, num_bins: int, capacity: int) -> Int64s | None:
    """Return the bin of each item, dealt largest first to bins 0 .. k-1, k-1 .. 0, ..; None without room.

    A full bin is skipped; an item that fits none of the next bins is placed greedily.

    Example:
        >>> balance_zigzag(np.array([5, 4, 3, 2]), np.zeros(4, np.int64), 2, 0).tolist()
        [0, 1, 1, 0]
    """
    if not fits_at_all(sizes, num_bins, capacity):
        return None
    order = largest_first(costs)
    bins = np.full(len(costs), -1, np.int64)
    _deal_zigzag(sizes, order, num_bins, capacity, bins)
    return place_rest(costs, sizes, num_bins, capacity, bins)


def deal(sizes: Int64s, num_buckets: int, capacity: int) -> tuple[Int64s, Int64s]:
    """Deal items to buckets round-robin; each bucket fills one microbatch after the other. Returns both of each item.

    Example:
        >>> bucket, microbatch = deal(np.array([6, 1, 5, 1]), 2, 10)
        >>> bucket.tolist(), microbatch.tolist()
        ([0, 1, 0, 1], [0, 0, 1, 0])
    """
    return np.arange(len(sizes)) % num_buckets, _next_fit(sizes, num_buckets, capacity)


@numba.njit(nogil=True, cache=True)
def _deal_zigzag(sizes: Int64s, order: Int64s, num_bins: int, capacity: int, bins: Int64s) -> None:
    room = np.full(num_bins, capacity, np.int64)
    turn = 0
    for item in order:
        for skip in range(min(_SKIPS, 2 * num_bins)):
            place = (turn + skip) % (2 * num_bins)
            chosen = place if place < num_bins else 2 * num_bins - 1 - place
            if room[chosen] >= sizes[item]:
                bins[item] = chosen
                room[chosen] -= sizes[item]
                turn = place + 1
                break


@numba.njit(nogil=True, cache=True)
def _next_fit(sizes: Int64s, num_buckets: int, capacity: int) -> Int64s:
    microbatch = np.zeros(num_buckets, np.int64)
    used = np.zeros(num_buckets, np.int64)
    out = np.empty(len(sizes), np.int64)
    for i in range(len(sizes)):
        bucket = i % num_buckets
        if used[bucket] > 0 and used[bucket] + sizes[i] > capacity:
            microbatch[bucket] += 1
            used[bucket] = 0
        used[bucket] += sizes[i]
        out[i] = microbatch[bucket]
    return out
