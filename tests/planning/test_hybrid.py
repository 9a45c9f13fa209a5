"""Blocks of ranks: aligned, all of one mind about the order, within the cap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SpecError
from overlord.planning.balancing.microbatches import buddy_lpt, hybrid_microbatches, ranks_needed

CAP = 64
lengths = st.lists(st.integers(1, 8 * CAP), max_size=60).map(lambda found: np.array(found, np.int64))


def llm_cost(tokens: np.ndarray) -> np.ndarray:
    return tokens * tokens + 25_400 * tokens


def test_ranks_needed_vector():
    tokens = [1, 4096, 4097, 8192, 8193, 16384, 16385, 32768]
    assert ranks_needed(tokens, 4096).tolist() == [1, 1, 2, 2, 4, 4, 8, 8]
    assert ranks_needed([0], 4096).tolist() == [1]


@given(lengths, st.sampled_from([8, 16, 24]))
def test_blocks_are_aligned_and_loads_add_up(tokens, num_ranks):
    costs, cp = tokens * tokens, ranks_needed(tokens, CAP)
    first, load = buddy_lpt(costs, cp, num_ranks)
    assert (first % cp == 0).all() and (first + cp <= num_ranks).all()
    expected = np.zeros(num_ranks, np.int64)
    for at, size, cost in zip(first.tolist(), cp.tolist(), costs.tolist(), strict=True):
        expected[at : at + size] += -(-cost // size)
    assert load.tolist() == expected.tolist()


@given(lengths, st.sampled_from([8, 16, 24]), st.booleans())
def test_ranks_of_a_block_list_the_same_items_in_the_same_order(tokens, num_ranks, equal_counts):
    costs, cp = tokens * tokens + 10 * tokens, ranks_needed(tokens, CAP)
    placed = hybrid_microbatches(costs, tokens, cp, num_ranks, CAP, equal_counts=equal_counts)
    schedule = [[[] for _ in range(count)] for count in placed.num_microbatches.tolist()]
    for item, (first, size) in enumerate(zip(placed.first_rank.tolist(), cp.tolist(), strict=True)):
        assert first % size == 0
        for rank in range(first, first + size):
            schedule[rank][placed.microbatch[item]].append(item)
    assert sum(len(one) for rank in schedule for one in rank) == cp.sum()
    if equal_counts:
        assert len(set(placed.num_microbatches.tolist())) == 1
    for rank in schedule:
        sizes = [{int(cp[item]) for item in microbatch} for microbatch in rank if microbatch]
        assert all(len(one) == 1 for one in sizes)
        # From the largest block to the smallest: with that, ranks of a block have done the same before it.
        flat = [next(iter(one)) for one in sizes]
        assert flat == sorted(flat, reverse=True)
        for microbatch in rank:
            assert sum(int(tokens[item]) for item in microbatch) <= CAP * max(
                (int(cp[i]) for i in microbatch), default=1
            )
    for item, (first, size) in enumerate(zip(placed.first_rank.tolist(), cp.tolist(), strict=True)):
        upto = int(placed.microbatch[item]) + 1
        assert all(schedule[rank][:upto] == schedule[first][:upto] for rank in range(first, first + size))


@pytest.mark.parametrize(("count", "num_ranks"), [(512, 64), (2048, 64), (4096, 256)])
def test_near_the_bound(count, num_ranks):
    tokens = np.random.default_rng(0).lognormal(6.5, 1.2, count).clip(16, 32768).astype(np.int64)
    costs, cp = llm_cost(tokens), ranks_needed(tokens, 4096)
    _, load = buddy_lpt(costs, cp, num_ranks)
    assert load.max() <= 1.02 * max(costs.sum() / num_ranks, (costs / cp).max())


def test_equal_counts_need_no_more_microbatches_than_free_ones():
    tokens = np.random.default_rng(0).lognormal(6.5, 1.2, 2048).clip(16, 32768).astype(np.int64)
    costs, cp = llm_cost(tokens), ranks_needed(tokens, 4096)
    free, even = (hybrid_microbatches(costs, tokens, cp, 64, 4096, equal_counts=one) for one in (False, True))
    assert even.num_microbatches.max() <= free.num_microbatches.max()


@pytest.mark.parametrize(("count", "num_ranks"), [(512, 64), (2048, 64), (4096, 256)])
def test_ranks_that_meet_at_every_microbatch_wait_little(count, num_ranks):
    tokens = np.random.default_rng(0).lognormal(6.5, 0.6, count).clip(16, 32768).astype(np.int64)
    costs, cp = llm_cost(tokens), ranks_needed(tokens, 4096)
    placed = hybrid_microbatches(costs, tokens, cp, num_ranks, 4096, equal_counts=True)
    load = np.zeros((num_ranks, placed.num_microbatches[0]), np.int64)
    for first, size, microbatch, cost in zip(placed.first_rank, cp, placed.microbatch, costs, strict=True):
        load[first : first + size, microbatch] += -(-cost // size)
    assert load.max(axis=0).sum() <= 1.03 * max(costs.sum() / num_ranks, (costs / cp).max())


def test_what_cannot_be_placed_is_explained():
    one = np.ones(1, np.int64)
    with pytest.raises(SpecError, match="6 ranks are no multiple of the cp size 4"):
        buddy_lpt(one, 4 * one, 6)
    with pytest.raises(SpecError, match="a cp size is 3"):
        buddy_lpt(one, 3 * one, 6)
    with pytest.raises(SpecError, match="item 0 has 9 tokens for 2 ranks of 4"):
        hybrid_microbatches(one, 9 * one, 2 * one, 2, 4, equal_counts=False)
    with pytest.raises(SpecError, match="the cap is 0"):
        ranks_needed([1], 0)
