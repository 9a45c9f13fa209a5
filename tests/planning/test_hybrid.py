"""Blocks of ranks: neighbours that run the same items at the same number, within the cap, near the bound."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from benchmarks.balance import HYBRID, KINDS, cost_of, make_lengths
from benchmarks.schedules import first_ranks, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.errors import PlanError, SpecError
from overlord.planning.balancing.balance import place
from overlord.planning.balancing.hybrid import buddy_lpt, hybrid_microbatches, ranks_needed
from overlord.planning.checking import run_strategy

CAP = 64
lengths = st.lists(st.integers(1, 8 * CAP), max_size=60).map(lambda found: np.array(found, np.int64))
objectives = st.sampled_from(["sum", "lockstep", "pipeline"])


def llm_cost(tokens: np.ndarray) -> np.ndarray:
    return tokens * tokens + 25_400 * tokens


def test_ranks_needed_vector():
    tokens = [1, 4096, 4097, 8192, 8193, 16384, 16385, 32768]
    assert ranks_needed(tokens, 4096).tolist() == [1, 1, 2, 2, 4, 4, 8, 8]
    assert ranks_needed(tokens, 4096, "any").tolist() == [1, 1, 2, 2, 3, 4, 5, 8]
    assert ranks_needed([768 << 10], 8192, "any").tolist() == [96]
    assert ranks_needed([0], 4096).tolist() == [1]
    # Two chunks of equal length to a rank: an odd token of its room stays free.
    assert ranks_needed([5, 9, 13], 5, "any").tolist() == [1, 3, 4]


@given(lengths, st.sampled_from([8, 16, 24]))
def test_blocks_are_aligned_and_loads_add_up(tokens, num_ranks):
    costs, cp = tokens * tokens, ranks_needed(tokens, CAP)
    first, load = buddy_lpt(costs, cp, num_ranks)
    assert (first % cp == 0).all() and (first + cp <= num_ranks).all()
    expected = np.zeros(num_ranks, np.int64)
    for at, size, cost in zip(first.tolist(), cp.tolist(), costs.tolist(), strict=True):
        expected[at : at + size] += -(-cost // size)
    assert load.tolist() == expected.tolist()


def schedule_of(placed):
    """The items of each microbatch of each rank."""
    schedule = [[[] for _ in range(count)] for count in placed.num_microbatches.tolist()]
    columns = (placed.first_rank.tolist(), placed.cp_size.tolist(), placed.microbatch.tolist())
    for item, (first, size, microbatch) in enumerate(zip(*columns, strict=True)):
        assert first >= 0 and size >= 1
        for rank in range(first, first + size):
            schedule[rank][microbatch].append(item)
    return schedule


@settings(max_examples=200, deadline=None)
@given(
    lengths,
    st.sampled_from([8, 11, 12, 16, 24]),
    objectives,
    st.booleans(),
    st.sampled_from(["aligned", "any"]),
    st.sampled_from([1, 3]),
    st.sampled_from([CAP, CAP + 1]),
    st.booleans(),
)
def test_every_item_once_within_the_cap(tokens, num_ranks, objective, equal, blocks, multiple, cap, linear):
    costs = tokens if linear else tokens * tokens + 10 * tokens
    options = {"objective": objective, "equal_counts": equal, "blocks": blocks, "multiple": multiple}
    if objective == "sum" and blocks == "aligned" and num_ranks % int(ranks_needed(tokens, cap).max(initial=1)):
        assert hybrid_microbatches(costs, tokens, num_ranks, cap, **options) is None
        return
    placed = hybrid_microbatches(costs, tokens, num_ranks, cap, **options)
    schedule, size = schedule_of(placed), placed.cp_size.astype(np.int64)
    assert sum(len(one) for rank in schedule for one in rank) == size.sum()
    assert (size >= ranks_needed(tokens, cap, "any")).all()
    assert all(len(rank) % multiple == 0 for rank in schedule)
    if equal:
        assert len(set(placed.num_microbatches.tolist())) == 1
    if blocks == "aligned":
        assert not (size & (size - 1)).any() and not (placed.first_rank % size).any()
    for rank, mine in enumerate(schedule):
        for microbatch, items in enumerate(mine):
            firsts = {(int(placed.first_rank[item]), int(size[item])) for item in items}
            assert len(firsts) <= 1, "a microbatch has one block"
            for first, width in firsts:
                assert all(schedule[one][microbatch] == items for one in range(first, first + width))
                held = [-(-int(tokens[i]) // (2 * width)) * 2 if width > 1 else int(tokens[i]) for i in items]
                assert sum(held) <= cap and first <= rank < first + width
    # Nothing waits in a circle, also in pipelines: every rank takes its microbatches by number.
    simulate(placed.loads(costs), first_ranks(placed), placed.num_microbatches, stages=3)


@given(lengths, st.sampled_from([8, 12]), st.sampled_from(["aligned", "any"]))
def test_the_time_without_meetings_is_that_of_the_events(tokens, num_ranks, blocks):
    placed = hybrid_microbatches(tokens * tokens, tokens, num_ranks, CAP, objective="lockstep", blocks=blocks)
    load = placed.loads(tokens * tokens)
    free = placed.free_time(tokens * tokens)
    assert free == pytest.approx(simulate(load, first_ranks(placed), placed.num_microbatches))
    assert load.sum(axis=1).max(initial=0) <= free <= load.max(axis=0, initial=0).sum()


@given(lengths, st.sampled_from([8, 16, 24]))
def test_ranks_of_a_nested_block_have_done_the_same_before_it(tokens, num_ranks):
    placed = hybrid_microbatches(tokens * tokens + 10 * tokens, tokens, num_ranks, CAP)
    schedule = schedule_of(placed)
    for item, (first, size) in enumerate(zip(placed.first_rank.tolist(), placed.cp_size.tolist(), strict=True)):
        upto = int(placed.microbatch[item]) + 1
        assert all(schedule[rank][:upto] == schedule[first][:upto] for rank in range(first, first + size))


@pytest.mark.parametrize(("count", "num_ranks"), [(512, 64), (2048, 64), (4096, 256)])
def test_near_the_bound(count, num_ranks):
    tokens = make_lengths("lognormal", count)
    costs, cp = llm_cost(tokens), ranks_needed(tokens, 4096)
    _, load = buddy_lpt(costs, cp, num_ranks)
    assert load.max() <= 1.02 * max(costs.sum() / num_ranks, (costs / cp).max())


@pytest.mark.parametrize("blocks", ["aligned", "any"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "num_ranks"), HYBRID)
def test_ranks_that_meet_at_every_microbatch_wait_little(count, num_ranks, kind, blocks):
    tokens = make_lengths(kind, count)
    costs = cost_of(tokens)
    options = {"objective": "lockstep", "equal_counts": True, "blocks": blocks}
    placed = hybrid_microbatches(costs, tokens, num_ranks, 4096, **options)
    assert placed.loads(costs).max(axis=0).sum() <= 1.01 * costs.sum() / num_ranks
    # As few rounds as the tokens leave room for, or half as many more.
    assert placed.num_microbatches.max() <= 1.5 * np.ceil(tokens.sum() / (0.95 * 4096 * num_ranks))


@pytest.mark.parametrize(("num_ranks", "widest"), [(12, 12), (96, 96), (6, 6), (3, 3)])
def test_blocks_of_any_number(num_ranks, widest):
    """One sequence takes every rank, others 3 and 6 of them: powers of two could not be cut from these ranks."""
    cap, rng = 4096, np.random.default_rng(0)
    tokens = np.concatenate(([widest * cap], rng.lognormal(7.5, 1, 40 * num_ranks).clip(16, 3 * cap)))
    tokens = tokens.astype(np.int64)
    for objective in ("sum", "lockstep"):
        placed = hybrid_microbatches(tokens, tokens, num_ranks, cap, objective=objective, blocks="any")
        assert placed.cp_size[0] == widest
        time = placed.free_time(tokens) if objective == "sum" else placed.loads(tokens).max(axis=0).sum()
        assert time <= 1.05 * tokens.sum() / num_ranks


def test_96_ranks_for_one_and_32_for_short_ones():
    tokens = np.array([768 << 10] + [8192] * 32)
    placed = hybrid_microbatches(tokens, tokens, 128, 8192, blocks="any")
    assert placed.cp_size.tolist() == [96] + [1] * 32
    assert placed.num_microbatches.tolist() == [1] * 128
    assert placed.free_time(tokens) == 8192


@pytest.mark.parametrize("seed", range(20))
def test_any_blocks_are_no_slower_than_powers_of_two(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.lognormal(rng.uniform(6, 8), rng.uniform(0.5, 2), 600).clip(16, 8 * 4096).astype(np.int64)
    costs = tokens * tokens + int(rng.choice([1, 24_576, 1_000_000])) * tokens
    nested, free = (hybrid_microbatches(costs, tokens, 24, 4096, blocks=blocks) for blocks in ("aligned", "any"))
    times = [simulate(one.loads(costs), first_ranks(one), one.num_microbatches) for one in (nested, free)]
    assert times[1] <= times[0] * (1 + 1e-12)


@pytest.mark.parametrize("stages", [2, 4])
def test_pipelines_are_faster_than_data_parallel_groups(stages):
    """Lengths with the tail of code, up to 256K, in a simulated schedule."""
    ranks, cap, cp = 64, 8192, 32
    tokens = np.random.default_rng(0).lognormal(7, 2, 2048).clip(16, cp * cap).astype(np.int64)
    costs = cost_of(tokens)
    placed = hybrid_microbatches(costs, tokens, ranks, cap, objective="pipeline")
    time = simulate(placed.loads(costs), first_ranks(placed), placed.num_microbatches, stages)
    count, groups = int(placed.num_microbatches.max()), ranks // cp
    places = place(costs, tokens, groups, count, cp * cap, objective="pipeline", stages=stages)
    load = np.bincount(places, costs, groups * count).astype(np.int64).reshape(groups, count) // cp
    alone = np.tile(np.arange(groups)[:, None], (1, count))
    assert time <= simulate(load, alone, np.full(groups, count), stages)
    bound = costs.sum() / ranks + (stages - 1) * max(costs.sum() / ranks / count, costs.max() / ranks)
    assert time <= 1.05 * bound


def test_lockstep_without_equal_counts_ends_ranks_that_have_nothing_left():
    tokens = np.array([64, 64, 64, 64, 64, 60])
    free, even = (
        hybrid_microbatches(tokens, tokens, 4, 64, objective="lockstep", equal_counts=one, widen=False)
        for one in (False, True)
    )
    assert sorted(free.num_microbatches.tolist()) == [1, 1, 2, 2]
    assert even.num_microbatches.tolist() == [2, 2, 2, 2]


def test_what_may_not_be_widened_is_not():
    tokens = make_lengths("heavy", 512)
    for objective in ("lockstep", "pipeline"):
        placed = hybrid_microbatches(cost_of(tokens), tokens, 64, 32_768, objective=objective, widen=False)
        assert (placed.cp_size == 1).all()


@pytest.mark.parametrize("method", ["karmarkar_karp", "zigzag", lambda costs, num, sizes, capacity: costs % num])
def test_another_method_places_short_items(method):
    tokens = np.array([40, 30, 20, 10, 200, 5, 6, 7])
    asked = {} if isinstance(method, str) else {"called": 0}

    def counted(costs, num_bins, sizes, capacity):
        asked["called"] += 1
        return method(costs, num_bins, sizes, capacity)

    given_method = method if isinstance(method, str) else counted
    placed = hybrid_microbatches(tokens, tokens, 8, 128, objective="lockstep", method=given_method)
    assert placed is not None
    assert sum(len(one) for rank in schedule_of(placed) for one in rank) == placed.cp_size.sum()
    assert asked.get("called", 1)


# Through the strategy, on meshes with stages and tensor parallelism.


def buffer(microbatch_tokens=8192, **limits):
    steps = np.arange(1, 301)
    return ol.summary_buffer(
        {"web": steps * steps * 7919 % 4093 + 1, "books": 2000 + steps[:30] * 104_729 % 6100},
        context_length=8192,
        microbatch_tokens=microbatch_tokens,
        **limits,
    )


MESHES = {
    "dp2 cp3": ol.ClientPlaceTree(dp=2, cp=3),
    "cp6": ol.ClientPlaceTree(cp=6),
    "pp2 dp2 cp2 tp2": ol.ClientPlaceTree(pp=2, dp=2, cp=2, tp=2),
    "pp4 dp3 cp2": ol.ClientPlaceTree(pp=4, dp=3, cp=2),
    "vpp": ol.ClientPlaceTree(pp=2, dp=2, cp=2, vpp=2, microbatch_group=3),
    "ep": ol.ClientPlaceTree(pp=2, dp=4, cp=2, ep=4),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "options", [{}, {"equal_counts": True}, {"objective": "lockstep"}, {"objective": "sum"}], ids=str
)
def test_plans_on_meshes(mesh, options):
    tree = MESHES[mesh]
    strategy = ol.strategies.hdp(blocks="any", **options)
    if tree.is_lockstep and options == {"objective": "sum"}:
        with pytest.raises(SpecError, match=r"ranks with equal counts of microbatches .* meet in each"):
            run_strategy(strategy, buffer(), tree)
        return
    plan = run_strategy(strategy, buffer(), tree)  # which checks every sample, cap and block
    assert plan.axis == "CP" and plan.num_buckets == tree.dp * tree.cp
    assert all(count % tree.microbatch_multiple == 0 for count in plan.microbatch_counts.tolist())
    if "equal_counts" in options or tree.is_lockstep:
        assert len(set(plan.microbatch_counts.tolist())) == 1
    for bucket in range(plan.num_buckets):  # all stages of a pipeline have its microbatches
        assert {tree.coords(rank).pp for rank in tree.consumers("CP", bucket)} == set(range(tree.pp))
    assert run_strategy(strategy, buffer(), tree).digest == plan.digest


def test_each_pipeline_has_its_own_number_of_microbatches():
    tree = ol.ClientPlaceTree(pp=2, dp=2, cp=2)
    plan = run_strategy(ol.strategies.hdp(objective="sum"), buffer(), tree)
    assert len(set(plan.microbatch_counts.tolist())) > 1


def test_a_fixed_number_of_microbatches_is_kept():
    tree = ol.ClientPlaceTree(dp=2, cp=3)
    needed = run_strategy(ol.strategies.hdp(equal_counts=True, blocks="any"), buffer(), tree).num_microbatches
    for options in ({"equal_counts": True}, {}):
        plan = run_strategy(ol.strategies.hdp(blocks="any", **options), buffer(microbatches=needed + 2), tree)
        assert plan.microbatch_counts.tolist() == [needed + 2] * 6
        with pytest.raises(PlanError, match="do not fit"):
            run_strategy(ol.strategies.hdp(blocks="any", **options), buffer(microbatches=2), tree)


def test_what_cannot_be_placed_is_explained():
    one = np.ones(1, np.int64)
    with pytest.raises(SpecError, match="6 ranks are no multiple of the cp size 4"):
        buddy_lpt(one, 4 * one, 6)
    with pytest.raises(SpecError, match="a cp size is 3"):
        buddy_lpt(one, 3 * one, 6)
    with pytest.raises(SpecError, match="the cap is 0"):
        ranks_needed([1], 0)
    with pytest.raises(SpecError, match="two chunks of an item; give at least 2"):
        ranks_needed([2], 1)
    with pytest.raises(PlanError, match=r"needs 4 ranks .* 6 ranks cannot be cut into blocks of 4.* use blocks=any"):
        run_strategy(ol.strategies.hdp(), buffer(), ol.ClientPlaceTree(dp=2, cp=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "pipeline"}, "has one stage; it would be ignored"),
        ({"objective": "sum", "equal_counts": True}, "meet in each; it would be ignored. Use objective='lockstep'"),
        ({"blocks": "odd"}, "blocks is 'odd', which is unknown"),
    ],
)
def test_arguments_without_effect_are_refused(options, message):
    graph = ol.DGraph.from_buffer(buffer(), ol.ClientPlaceTree(dp=2, cp=2)).mix()
    with pytest.raises(SpecError, match=message):
        graph.distribute("CP").cost(ol.costs.tokens).balance(**options)
    with pytest.raises(SpecError, match="blocks is 'any', and no blocks of ranks are made for tokens over DP"):
        graph.distribute("DP").cost(ol.costs.tokens).balance(blocks="any")


# Offloading: a sequence needs fewer ranks where a share of its activations waits on the host.


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 512), min_size=1, max_size=40),
    st.sampled_from([{}, {"blocks": "any"}, {"equal_counts": True}, {"objective": "lockstep", "blocks": "any"}]),
    st.integers(1, 40),
    st.floats(1e3, 1e7),
)
def test_offloaded_plans_fit_hide_their_copies_and_need_no_more_ranks(tokens, options, layers, bandwidth):
    time = ol.costs.CostModel(alpha=1e-6, beta=1e-4)
    offload = ol.costs.Offload(layers, act_bytes_per_token=2, bandwidth=bandwidth, time=time)
    tree, cap = ol.ClientPlaceTree(cp=8), 512 // 8
    made = ol.summary_buffer({"web": tokens}, context_length=512, microbatch_tokens=512)
    plain, plan = (run_strategy(ol.strategies.hdp(offload=one, **options), made, tree) for one in (None, offload))
    assert plain.offload is None and plan.offload is not None and (layers > 2 or not plan.offload.any())
    assert run_strategy(ol.strategies.hdp(offload=offload, **options), made, tree).digest == plan.digest
    needed = ranks_needed(tokens, cap, options.get("blocks", "aligned"))
    for at in np.flatnonzero(np.diff(plan.bin_offsets)).tolist():
        pieces = slice(int(plan.bin_offsets[at]), int(plan.bin_offsets[at + 1]))
        length, width, share = plan.pieces.length[pieces], int(plan.cp_sizes[pieces.start]), plan.offload[at] / 1e6
        held = int((plan.padded[pieces] // width).sum())
        assert (held > cap) == (share > 0)  # nothing waits on the host that fits the device
        kept = (min(2, layers) + (1 - share) * (layers - min(2, layers))) / layers
        assert kept * length.sum() <= width * cap + 1 or not share
        copied = (share - 2e-6) * 2 * length.sum()  # shares are whole millionths
        assert copied / bandwidth <= time.microbatch_time(length) / 1e3
        if not options:
            assert (needed[plan.pieces.sample[pieces]] >= width).all()


def test_a_sequence_a_little_longer_than_a_rank_holds_stays_on_one():
    """What one H200 hides of 10k tokens is enough for ranks of 8k; of 16k it is not, and then nothing is copied."""
    layer = ol.costs.CostModel(alpha=1.55e-8, beta=4.8e-4)
    offload = ol.costs.Offload(layers=32, act_bytes_per_token=153_000, bandwidth=54e9, time=layer)
    made = ol.summary_buffer({"web": [10_240] * 8 + [16_000] * 2}, context_length=65_536, microbatch_tokens=65_536)
    plain, plan = (
        run_strategy(ol.strategies.hdp(offload=one), made, ol.ClientPlaceTree(cp=8)) for one in (None, offload)
    )
    assert set(plain.cp_sizes.tolist()) == {2}
    assert set(plan.cp_sizes[plan.pieces.length == 10_240].tolist()) == {1}
    assert set(plan.cp_sizes[plan.pieces.length == 16_000].tolist()) == {2}
    (share,) = set(plan.offload[plan.offload > 0].tolist())
    # 2,048 of 10,240 tokens do not fit, and two of 32 layers stay on the device whatever is offloaded.
    assert share == math.ceil(1_000_000 * (2048 / 10_240) * 32 / 30) <= 1_000_000 * offload.hidden([10_240])[0]


def test_a_wrong_share_on_the_host_is_refused():
    tree, made = ol.ClientPlaceTree(cp=8), ol.summary_buffer({"web": [512]}, context_length=512, microbatch_tokens=512)
    offload = ol.costs.Offload(8, act_bytes_per_token=1, bandwidth=1e9, time=ol.costs.CostModel(0, 1e-6))
    plan = ol.strategies.hdp(offload=offload)(made, tree)
    wrong = {
        "one whole number for each microbatch": plan.offload.astype(float),
        "no shares in millionths": plan.offload + 1_000_000,
        "a microbatch holds": plan.offload // 2,
        "keep different shares": plan.offload + (np.arange(len(plan.offload)) == 1),
    }
    for words, column in wrong.items():
        with pytest.raises(PlanError, match=words):
            run_strategy(lambda b, t, c=column: dataclasses.replace(plan, offload=c), made, tree)
