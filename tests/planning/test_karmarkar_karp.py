"""Largest differencing with sparse tuples, against the textbook with dense ones."""

from __future__ import annotations

import heapq

import numpy as np
from benchmarks.balance import makespan_bound
from hypothesis import given
from hypothesis import strategies as st

from overlord.planning.balancing.methods import balance_karmarkar_karp, loads


def spread_of_textbook(costs, num_bins) -> int:
    heap = [(-cost, number, [cost, *[0] * (num_bins - 1)]) for number, cost in enumerate(sorted(costs, reverse=True))]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, one, first = heapq.heappop(heap)
        _, other, second = heapq.heappop(heap)
        sums = sorted((a + b for a, b in zip(first, reversed(second), strict=True)), reverse=True)
        heapq.heappush(heap, (sums[-1] - sums[0], min(one, other), [one - sums[-1] for one in sums]))
    return heap[0][2][0]


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=60), st.integers(2, 9))
def test_differs_as_little_as_the_textbook(costs, num_bins):
    costs = np.array(costs, np.int64)
    bins = balance_karmarkar_karp(costs, np.zeros(len(costs), np.int64), num_bins, 0)
    load = loads(costs, bins, num_bins)
    assert load.sum() == costs.sum()
    # Where sums are equal the two may go on with other bins, so they may differ by a little, but rarely.
    assert load.max() - load.min() <= max(2 * spread_of_textbook(costs, num_bins), costs.max())


def test_textbook_example():
    costs = np.array([8, 7, 6, 5, 4], np.int64)
    load = loads(costs, balance_karmarkar_karp(costs, costs * 0, 2, 0), 2)
    assert sorted(load.tolist()) == [14, 16]


@given(st.lists(st.integers(1, 10**9), min_size=10, max_size=200, unique=True), st.integers(2, 9))
def test_distinct_items_give_the_textbooks_spread(costs, num_bins):
    costs = np.array(costs, np.int64)
    load = loads(costs, balance_karmarkar_karp(costs, costs * 0, num_bins, 0), num_bins)
    assert load.max() - load.min() == spread_of_textbook(costs, num_bins)


def test_overfull_bins_give_up_their_cheapest_items():
    costs, sizes = np.array([9, 8, 2, 1], np.int64), np.array([5, 1, 4, 5], np.int64)
    bins = balance_karmarkar_karp(costs, sizes, 2, 9)
    assert loads(sizes, bins, 2).max() <= 9
    assert balance_karmarkar_karp(costs, sizes, 2, 7) is None


def test_more_bins_than_items_and_many_bins():
    costs = np.array([3, 2, 1], np.int64)
    assert len(set(balance_karmarkar_karp(costs, costs * 0, 5, 0).tolist())) == 3
    costs = np.random.default_rng(0).integers(1, 10**6, 20_000)
    bins = balance_karmarkar_karp(costs, costs * 0, 4096, 0)
    assert loads(costs, bins, 4096).max() <= 1.05 * makespan_bound(costs, 4096)
