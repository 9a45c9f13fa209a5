"""Slabs: filled, measured and dealt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.planning.balancing.balance import deal_slabs, fill_slabs, slab_heights
from overlord.planning.balancing.evenness import lockstep_bound
from overlord.planning.balancing.methods import balance_karmarkar_karp, balance_zigzag, loads

shapes = st.tuples(st.integers(1, 6), st.integers(1, 5))


@given(st.data(), shapes, st.integers(1, 8))
def test_dealing_gives_every_bin_a_place_of_its_own_and_keeps_the_least_height(data, shape, stages):
    count = shape[0] * shape[1]
    load = np.array(data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count)), np.int64)
    places = deal_slabs(load, *shape, stages)
    assert sorted(places.tolist()) == list(range(count))
    table = np.empty(count, np.int64)
    table[places] = load
    table = table.reshape(shape)
    assert table.max(axis=0).sum() == slab_heights(load, shape[0])
    assert (np.diff(table, axis=1) <= 0).all()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), shapes)
def test_without_a_capacity_slabs_are_at_most_the_mean_and_the_largest(costs, shape):
    costs = np.array(costs, np.int64)
    bins = fill_slabs(costs, costs * 0, *shape, 0)
    height = slab_heights(loads(costs, bins, shape[0] * shape[1]), shape[0])
    assert lockstep_bound(costs, costs * 0, *shape, 0) <= height <= costs.sum()


def test_one_large_item_makes_one_high_slab():
    costs = np.array([1000, *[10] * 150], np.int64)
    bins = fill_slabs(costs, costs * 0, 2, 4, 0)
    # Flat bins would be 1000 and seven times about 214: the slabs 1000 + 3 * 214.
    assert slab_heights(loads(costs, bins, 8), 2) <= 1260


@pytest.mark.parametrize("spread", [balance_karmarkar_karp, balance_zigzag])
def test_even_slabs_can_be_left_to_another_method(spread):
    tokens = np.random.default_rng(0).lognormal(6.5, 1.2, 2048).clip(16, 8192).astype(np.int64)
    costs, capacity = tokens * tokens + 25_400 * tokens, int(2 * tokens.sum() / 256)
    bins = fill_slabs(costs, tokens, 32, 8, capacity, spread)
    assert loads(tokens, bins, 256).max() <= capacity
    bound = lockstep_bound(costs, tokens, 32, 8, capacity)
    assert slab_heights(loads(costs, bins, 256), 32) <= 1.06 * bound


def test_items_that_slabs_have_no_room_for_are_placed_flat():
    sizes = np.array([6, 6, 4, 4, 3, 3, 3, 3], np.int64)
    costs = np.array([8, 7, 6, 5, 4, 3, 2, 1], np.int64)
    bins = fill_slabs(costs, sizes, 2, 2, 10)
    assert bins is None or loads(sizes, bins, 4).max() <= 10
    assert fill_slabs(costs, sizes, 2, 2, 7) is None
