"""Karmarkar-Karp: repeatedly combines the two partial solutions with the largest spread, large bins on small ones.

A partial solution stores only its nonempty bins, so the early ones are short.
"""

from __future__ import annotations

import numba
import numpy as np

from overlord.planning.balancing.greedy import Int64s, balance_greedy, fits_at_all, largest_first, place_rest


def balance_karmarkar_karp(costs: Int64s, sizes: Int64s, num_bins: int, capacity: int) -> Int64s | None:
    """Return the bin of each item by largest differencing, or None where the items do not fit.

    Differencing ignores the capacity. The cheapest items of overfull bins are removed and placed greedily; if that
    fails, all items are placed greedily.

    Example:
        >>> balance_karmarkar_karp(np.array([8, 7, 6, 5, 4]), np.zeros(5, np.int64), 2, 0).tolist()
        [0, 1, 0, 1, 1]
    """
    if not fits_at_all(sizes, num_bins, capacity):
        return None
    if num_bins == 1 or len(costs) <= 1:
        return balance_greedy(costs, sizes, num_bins, capacity)
    order = largest_first(costs)
    bins = np.empty(len(costs), np.int64)
    bins[order] = _difference(costs[order], num_bins)
    _give_up(sizes, order, num_bins, capacity, bins)
    return place_rest(costs, sizes, num_bins, capacity, bins)


@numba.njit(nogil=True, cache=True)
def _give_up(sizes: Int64s, order: Int64s, num_bins: int, capacity: int, bins: Int64s) -> None:
    room = np.full(num_bins, capacity, np.int64)
    for item in order:
        if room[bins[item]] >= sizes[item]:
            room[bins[item]] -= sizes[item]
        else:
            bins[item] = -1


@numba.njit(nogil=True, cache=True)
def _comes_first(key: Int64s, one: int, other: int) -> bool:
    return key[one] > key[other] or (key[one] == key[other] and one < other)


@numba.njit(nogil=True, cache=True)
def _sink(heap: Int64s, key: Int64s, end: int) -> None:
    at, moving = 0, heap[0]
    while True:
        child = 2 * at + 1
        if child >= end:
            break
        if child + 1 < end and _comes_first(key, heap[child + 1], heap[child]):
            child += 1
        if not _comes_first(key, heap[child], moving):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moving


@numba.njit(nogil=True, cache=True)
def _difference(costs: Int64s, num_bins: int) -> Int64s:
    """Return the bin of each item; costs must fall.

    A solution is identified by its first item. Its bins are consecutive in the pool (`begin`, `count`), by falling
    load; a bin is identified by one of its items, and `leader` links every other item of the bin to it (union-find).
    The heap orders solutions by their largest load, which is their spread: the least load of a full solution is
    subtracted. An iteration pops the largest solution, combines it with the new largest one, and puts the result at the
    root. A combined solution is written in place if the second one is a single item and there is room behind the first
    (`_absorb`), else at the top of the pool (`_combine`), which is compacted when it is full.
    """
    n = len(costs)
    leader, heap, key = np.arange(n), np.arange(n), costs.copy()
    begin, count = np.arange(n), np.ones(n, np.int64)
    pool_load, pool_name = np.empty(4 * n, np.int64), np.empty(4 * n, np.int64)
    pool_load[:n], pool_name[:n] = costs, np.arange(n)
    top, end = n, n
    while end > 1:
        one = heap[0]
        end -= 1
        heap[0] = heap[end]
        _sink(heap, key, end)
        other = heap[0]
        first, width = begin[one], count[one]
        grows = width < num_bins and first + width == top < len(pool_load)
        if count[other] == 1 and (width == num_bins or grows):
            value, name = pool_load[begin[other]], pool_name[begin[other]]
            width = _absorb(pool_load[first:], pool_name[first:], width, num_bins, value, name, leader)
            top += grows
        else:
            if top + width + count[other] > len(pool_load):
                pool_load, pool_name, top = _compact(pool_load, pool_name, begin, count, heap[:end], one)
            first = top
            width = _combine(pool_load, pool_name, begin[one], width, begin[other], count[other], top, num_bins, leader)
            top += width
        name = min(one, other)
        begin[name], count[name], key[name], heap[0] = first, width, pool_load[first], name
        _sink(heap, key, end)
    return _number_bins(leader)


@numba.njit(nogil=True, cache=True)
def _absorb(load: Int64s, name: Int64s, width: int, num_bins: int, value: int, item: int, leader: Int64s) -> int:
    """Add one item to a solution, in place; return its number of bins."""
    if width == num_bins:
        leader[item] = name[width - 1]
        value, item = value + load[width - 1], name[width - 1]
        width -= 1
    at = width
    while at > 0 and load[at - 1] < value:
        load[at], name[at] = load[at - 1], name[at - 1]
        at -= 1
    load[at], name[at] = value, item
    width += 1
    if width == num_bins:
        least = load[width - 1]
        for at in range(width):
            load[at] -= least  # only differences matter
    return width


@numba.njit(nogil=True, cache=True)
def _combine(
    load: Int64s,
    name: Int64s,
    one: int,
    one_width: int,
    other: int,
    other_width: int,
    top: int,
    num_bins: int,
    leader: Int64s,
) -> int:
    """Write two combined solutions to the top of the pool, largest bin on smallest; return the number of bins."""
    width = min(num_bins, one_width + other_width)
    sums, names = np.empty(width, np.int64), np.empty(width, np.int64)
    for at in range(width):
        opposite = width - 1 - at
        sums[at] = load[one + at] if at < one_width else load[other + opposite]
        names[at] = name[one + at] if at < one_width else name[other + opposite]
        if at < one_width and opposite < other_width:
            sums[at] += load[other + opposite]
            leader[name[other + opposite]] = names[at]
    least = sums.min() if width == num_bins else 0
    order = np.argsort(-sums, kind="mergesort")
    for at in range(width):
        load[top + at] = sums[order[at]] - least
        name[top + at] = names[order[at]]
    return width


@numba.njit(nogil=True, cache=True)
def _compact(
    load: Int64s, name: Int64s, begin: Int64s, count: Int64s, heap: Int64s, one: int
) -> tuple[Int64s, Int64s, int]:
    """Copy the solutions in use into a new pool; they have at most one bin per item, so it has room."""
    new_load, new_name, top = np.empty_like(load), np.empty_like(name), 0
    for at in range(-1, len(heap)):
        solution = one if at < 0 else heap[at]
        first, width = begin[solution], count[solution]
        new_load[top : top + width] = load[first : first + width]
        new_name[top : top + width] = name[first : first + width]
        begin[solution] = top
        top += width
    return new_load, new_name, top


@numba.njit(nogil=True, cache=True)
def _number_bins(leader: Int64s) -> Int64s:
    number, bins, used = np.full(len(leader), -1, np.int64), np.empty(len(leader), np.int64), 0
    for item in range(len(leader)):
        name = item
        while leader[name] != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        if number[name] < 0:
            number[name] = used
            used += 1
        bins[item] = number[name]
    return bins
