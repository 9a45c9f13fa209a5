"""Dealing items out without looking at what they cost: what loaders do when nobody plans."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def deal(sizes: Int64s, num_buckets: int, capacity: int) -> tuple[Int64s, Int64s]:
    """Deal items to buckets in turn; each bucket fills one microbatch after the other. Returns both of each item.

    Example:
        >>> bucket, microbatch = deal(np.array([6, 1, 5, 1]), 2, 10)
        >>> bucket.tolist(), microbatch.tolist()
        ([0, 1, 0, 1], [0, 0, 1, 0])
    """
    return np.arange(len(sizes)) % num_buckets, _next_fit(sizes, num_buckets, capacity)


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
