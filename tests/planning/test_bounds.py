"""Bounds hold: never above the best of all placements of small instances."""

from __future__ import annotations

import itertools

import numpy as np
from benchmarks.balance import makespan_bound
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.planning.balancing.balance import place
from overlord.planning.balancing.evenness import lockstep_bound
from overlord.planning.balancing.methods import loads


def best_of_all(costs, sizes, num_buckets, num_microbatches, capacity) -> int | None:
    """Return the least sum of slab maxima over all placements that fit."""
    num_bins = num_buckets * num_microbatches
    choices = np.array(list(itertools.product(range(num_bins), repeat=len(costs))))
    load, size = (np.stack([(choices == b) @ one for b in range(num_bins)], axis=1) for one in (costs, sizes))
    falling = -np.sort(-load[(size <= capacity).all(axis=1)], axis=1)
    return int(falling[:, ::num_buckets].sum(axis=1).min()) if len(falling) else None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), min_size=1, max_size=6),
    st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 4), (1, 3)]),
    st.integers(1, 24),
    st.booleans(),
)
def test_lockstep_bound_is_never_above_the_optimum(pairs, shape, capacity, by_length):
    sizes = np.array([size for _, size in pairs], np.int64)
    costs = sizes * sizes + 5 * sizes if by_length else np.array([cost for cost, _ in pairs], np.int64)
    best = best_of_all(costs, sizes, *shape, capacity)
    if best is None:
        assert place(costs, sizes, *shape, capacity) is None
        return
    assert lockstep_bound(costs, sizes, *shape, capacity) <= best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=7), st.integers(1, 3))
def test_makespan_bound_is_never_above_the_optimum(costs, num_bins):
    costs = np.array(costs, np.int64)
    best = best_of_all(costs, costs * 0, num_bins, 1, 0)
    assert makespan_bound(costs, num_bins) <= best


def test_a_cap_raises_the_bound():
    costs, sizes = np.array([16, 16, 9, 1], np.int64), np.array([4, 4, 3, 1], np.int64)
    free, capped = (lockstep_bound(costs, sizes, 2, 2, capacity) for capacity in (100, 4))
    # Without a cap one slab of height 21 takes all; with it the 9 needs a slab of its own.
    assert free == 21
    assert capped == 25
    assert best_of_all(costs, sizes, 2, 2, 4) == 25


def test_height_limits_what_stands_beside_the_largest():
    # Room beside the largest item cannot be used without making its slab higher.
    tokens = np.array([32] * 8 + [4] * 120, np.int64)
    costs = tokens * tokens + 30 * tokens
    plain = costs[0] + (costs.sum() - 8 * costs[0] - 8 * 4 * 34) / 8
    assert lockstep_bound(costs, tokens, 8, 4, 36) > plain


def test_nothing_costs_nothing():
    nothing = np.zeros(0, np.int64)
    assert makespan_bound(nothing, 3) == lockstep_bound(nothing, nothing, 2, 2, 5) == 0
    assert loads(nothing, nothing, 2).tolist() == [0, 0]


def test_two_of_the_largest_items_share_a_bin():
    assert makespan_bound([5, 5, 5, 1], 2) == 10
