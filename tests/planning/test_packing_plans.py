"""Packing: nothing lost or doubled, as full as the naive rules make it, dealt so that like costs meet; golden plans."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest
from examples.demo.demo_data import demo_job
from hypothesis import example, given
from hypothesis import strategies as st

import overlord as ol
from overlord.core.draw import Buffer, Draw, Limits
from overlord.core.samples import META, PLAIN
from overlord.planning.balancing.packing import PackMethod, concat_split, pack
from overlord.planning.checking import run_strategy

METHODS = get_args(PackMethod)
instances = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(0, capacity), max_size=40), st.just(capacity))
)


def naive_first_fit(lengths, capacity):
    rooms, bins = [], []
    for length in lengths:
        chosen = next((b for b, room in enumerate(rooms) if room >= length), len(rooms))
        if chosen == len(rooms):
            rooms.append(capacity)
        rooms[chosen] -= length
        bins.append(chosen)
    return bins


def naive_best_fit(lengths, capacity):
    rooms, bins = [], [0] * len(lengths)
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [(room, b) for b, room in enumerate(rooms) if room >= lengths[item]]
        chosen = min(fitting)[1] if fitting else len(rooms)
        if chosen == len(rooms):
            rooms.append(capacity)
        rooms[chosen] -= lengths[item]
        bins[item] = chosen
    return bins


def fewest_bins(lengths, capacity):
    """Try every placement, bins being opened in order."""
    best = len(lengths)

    def place(item, rooms):
        nonlocal best
        if len(rooms) >= best and item < len(lengths):
            return
        if item == len(lengths):
            best = min(best, len(rooms))
            return
        for b in range(len(rooms)):
            if rooms[b] >= lengths[item]:
                place(item + 1, [*rooms[:b], rooms[b] - lengths[item], *rooms[b + 1 :]])
        place(item + 1, [*rooms, capacity - lengths[item]])

    place(0, [])
    return best


# ---- pack


@pytest.mark.parametrize("method", ["best_fit", "first_fit"])
@given(instances)
def test_every_item_has_a_bin_and_no_bin_is_overfull(method, instance):
    lengths, capacity = instance
    bins = pack(lengths, capacity, method)
    assert bins.dtype == np.int64 and len(bins) == len(lengths)
    assert sorted(set(bins.tolist())) == list(range(len(set(bins.tolist()))))
    assert np.bincount(bins, lengths).max(initial=0) <= capacity


@given(instances)
def test_first_fit_is_the_naive_first_fit(instance):
    assert pack(*instance, "first_fit").tolist() == naive_first_fit(*instance)


@given(instances)
def test_best_fit_is_the_naive_best_fit_of_falling_lengths(instance):
    assert pack(*instance).tolist() == naive_best_fit(*instance)


@pytest.mark.parametrize(("low", "high"), [(1, 1000), (300, 700), (450, 520), (1, 40)])
def test_both_are_the_naive_ones_where_many_bins_are_open(low, high):
    lengths = np.random.default_rng(low).integers(low, high, 3000).tolist()
    assert pack(lengths, 1000).tolist() == naive_best_fit(lengths, 1000)
    assert pack(lengths, 1000, "first_fit").tolist() == naive_first_fit(lengths, 1000)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(12, 20))
def test_best_fit_is_near_the_fewest_bins(lengths, capacity):
    assert pack(lengths, capacity).max() + 1 <= 11 / 9 * fewest_bins(lengths, capacity) + 1


def test_a_capacity_beyond_all_items_is_one_bin():
    assert pack([3, 5], 2**70).tolist() == [0, 0]
    assert pack([], 4).tolist() == [] and pack([0, 0], 4).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack([3, 9], 8), "item 1 takes 9, a bin holds 8"),
        (lambda: pack([3], 0), "capacity is 0"),
        (lambda: pack([3], 8, "concat"), "concat_split"),
        (lambda: pack([3], 8, "best_fti"), "Did you mean 'best_fit'"),
        (lambda: pack([3.5], 8), "float64"),
        (lambda: pack([[3]], 8), r"shape \(1, 1\)"),
        (lambda: pack([3, -1], 8), r"lengths\[1\] is -1"),
        (lambda: pack([2**61, 2**61], 2**62), "larger units"),
        (lambda: concat_split([3], 8, [1]), "whole has type int64"),
        (lambda: concat_split([3, 4], 8, [True]), r"shape \(1,\)"),
        (lambda: concat_split([9], 8, [True]), "item 0 takes 9"),
        (lambda: concat_split([8], 9, [True], 5), "a bin holds 5"),
        (lambda: concat_split([3], 8, multiple=0), "multiple is 0"),
        (lambda: concat_split([3], 8, multiple=9), "padded to 9"),
        (lambda: concat_split([3], 8, longest=0), "longest is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ol.SpecError, match=message):
        call()


# ---- concat_split


@st.composite
def streams(draw):
    multiple = draw(st.sampled_from([1, 2, 4]))
    capacity = draw(st.integers(multiple, 40))
    room = capacity - capacity % multiple
    items = draw(st.lists(st.tuples(st.integers(0, 90), st.booleans()), max_size=25))
    lengths = [min(length, room) if whole else length for length, whole in items]
    return lengths, capacity, [whole for _, whole in items], multiple, draw(st.none() | st.integers(multiple, 30))


@given(streams())
@example(([20], 16, [False], 4, 6))  # the longest piece is no multiple
@example(([9, 5], 8, [False, True], 4, None))
def test_pieces_cover_every_item_in_order_and_no_bin_is_overfull(stream):
    lengths, capacity, whole, multiple, longest = stream
    item, start, length, bins = concat_split(lengths, capacity, np.array(whole, bool), multiple, longest=longest)
    covered = [(i, t) for i, s, n in zip(item, start, length, strict=True) for t in range(s, s + n)]
    assert covered == [(i, t) for i, n in enumerate(lengths) for t in range(n)]
    assert (length > 0).all()
    padded = -(-length // multiple) * multiple
    assert np.bincount(bins, padded).max(initial=0) <= capacity
    assert bins.tolist() == sorted(bins.tolist()) and set(bins.tolist()) == set(range(bins.max(initial=-1) + 1))
    for i, s, n in zip(item, start, length, strict=True):
        if whole[i]:
            assert (s, n) == (0, lengths[i])
        else:
            assert s % multiple == 0, "an item is only cut at multiples"
            assert longest is None or n <= longest


@given(streams())
def test_a_bin_is_closed_only_when_it_must_be(stream):
    lengths, capacity, whole, multiple, _ = stream
    item, _, length, bins = concat_split(lengths, capacity, np.array(whole, bool), multiple)
    room = capacity - capacity % multiple
    used = np.bincount(bins, -(-length // multiple) * multiple).astype(int)
    for b in range(len(used) - 1):
        following = int(np.argmax(bins == b + 1))
        needed = -(-int(length[following]) // multiple) * multiple
        assert used[b] == room or (whole[item[following]] and used[b] + needed > room)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=25), st.integers(1, 40))
def test_without_whole_items_every_bin_but_the_last_is_full(lengths, capacity):
    *_, length, bins = concat_split(lengths, capacity)
    assert (np.bincount(bins, length)[:-1] == capacity).all()


# ---- plans


def buffer_of(lengths, whole=(), context=64, cap=None, **limits):
    """A step of plain text, and of samples that must not be cut."""
    meta = np.zeros(len(lengths) + len(whole), META)
    meta["tokens"], meta["row"] = [*lengths, *whole], np.arange(len(meta))
    meta["loss_tokens"] = meta["tokens"] - -(-meta["tokens"] // context)  # as the draw counts: one less a piece
    meta["flags"][: len(lengths)] = PLAIN
    return Buffer(
        Draw(0, ("web",), np.zeros(len(meta), np.int32), meta, (1.0,)), Limits(context, cap or context, **limits)
    )


meshes = st.builds(
    lambda dp, cp, vpp: ol.ClientPlaceTree(pp=2 if vpp > 1 else 1, dp=dp, cp=cp, vpp=vpp),
    st.integers(1, 5), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]),
)  # fmt: skip
steps = st.builds(
    buffer_of,
    st.lists(st.integers(1, 200), min_size=1, max_size=40),
    st.lists(st.integers(1, 200), max_size=20),
    cap=st.sampled_from([64, 72, 128]),
)


@pytest.mark.parametrize("method", METHODS)
@given(steps, meshes)
def test_plans_are_right_and_have_no_more_microbatches_than_bins_need(method, buffer, tree):
    plan = run_strategy(ol.strategies.packed(method=method), buffer, tree)  # loses, doubles or overfills nothing
    filled = int((np.diff(plan.bin_offsets) > 0).sum())
    each = tree.dp * tree.microbatch_multiple
    assert plan.num_microbatches * tree.dp == -(-filled // each) * each
    if method != "concat":
        naive = {"best_fit": naive_best_fit, "first_fit": naive_first_fit}[method]
        graph = ol.DGraph.from_buffer(buffer, tree).distribute("DP")
        needed = max(naive(graph.padded.tolist(), buffer.limits.microbatch_tokens)) + 1
        assert plan.num_microbatches * tree.dp == -(-needed // each) * each
        assert filled == needed or (tree.dp == 1 and filled > needed), "a single rank needs no bins for equal counts"


ALONE = {
    "default": ol.strategies.backbone_balance(),
    "sum": ol.strategies.backbone_balance(objective="sum", level="inter"),
    "intra": ol.strategies.backbone_balance(level="intra"),
    "vanilla": ol.strategies.vanilla(),
    **{method: ol.strategies.packed(method=method) for method in METHODS},
}


@pytest.mark.parametrize("name", ALONE)
@given(buffer=steps, vpp=st.sampled_from([1, 2]))
def test_one_rank_gets_no_microbatch_without_a_label(name, buffer, vpp):
    """Its mean loss would not be a number; pieces of one token have no label."""
    tree = ol.ClientPlaceTree(pp=vpp, vpp=vpp)
    plan = run_strategy(ALONE[name], buffer, tree)
    labels = plan.loads(plan.pieces.length.astype(np.int64) - 1)[0]
    if int((plan.pieces.length > 1).sum()) >= plan.num_microbatches:
        assert labels.all()


def test_a_full_microbatch_that_leaves_no_slack_gets_no_empty_one_beside_it():
    """The smallest count that leaves slack is two, and the second would be empty."""
    full = buffer_of([63], cap=64)
    assert run_strategy(ALONE["default"], full, ol.ClientPlaceTree()).num_microbatches == 1
    assert run_strategy(ALONE["default"], buffer_of([63, 63], cap=64), ol.ClientPlaceTree(dp=2)).num_microbatches == 1


@pytest.mark.parametrize("method", METHODS)
@given(steps, meshes)
def test_microbatches_of_like_cost_meet(method, buffer, tree):
    graph = ol.DGraph.from_buffer(buffer, tree).mix().distribute("DP").cost(ol.costs.llama_12b).pack(method)
    assert (graph.loads[:, :-1].min(axis=0) >= graph.loads[:, 1:].max(axis=0)).all()
    assert graph.loads.sum() == graph.costs.sum()


@given(steps, meshes)
def test_concat_cuts_plain_text_only_and_counts_the_labels(buffer, tree):
    context = buffer.limits.context_length
    plan = run_strategy(ol.strategies.packed(method="concat"), buffer, tree)
    pieces = plan.pieces
    assert pieces.length.max() <= context
    plain = buffer.meta["flags"][pieces.sample] == PLAIN
    assert (pieces.start[~plain] % context == 0).all(), "the rest is cut at the context, as without packing"
    assert (pieces.start[plain] % plan.pad_multiple == 0).all()
    assert plan.global_loss_tokens == int((pieces.length - 1).sum())


def test_a_long_text_is_not_cut_at_the_context_as_well():
    plan = run_strategy(ol.strategies.packed(method="concat"), buffer_of([10, 150]), ol.ClientPlaceTree(dp=1))
    order = np.lexsort((plan.pieces.start, plan.pieces.sample))
    assert plan.pieces.length[order].tolist() == [10, 54, 64, 32]


def test_dummies_fill_the_last_round():
    plan = run_strategy(ol.strategies.packed(), buffer_of([64] * 5), ol.ClientPlaceTree(dp=4))
    assert plan.num_microbatches == 2
    assert np.diff(plan.bin_offsets).reshape(4, 2).T.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]


def test_a_fixed_number_of_microbatches_is_kept_or_refused():
    tree = ol.ClientPlaceTree(dp=2)
    assert run_strategy(ol.strategies.packed(), buffer_of([64] * 5, microbatches=4), tree).num_microbatches == 4
    with pytest.raises(ol.PlanError, match="5 pieces of 320 tokens do not fit into 2"):
        run_strategy(ol.strategies.packed(), buffer_of([64] * 5, microbatches=2), tree)


def test_a_piece_larger_than_a_microbatch_is_refused_unless_it_may_be_cut():
    plain, whole = (Limits(64, 48), buffer_of([60])), (Limits(64, 48), buffer_of([], [60]))
    buffers = [dataclasses.replace(buffer, limits=limits) for limits, buffer in (plain, whole)]
    tree = ol.ClientPlaceTree()
    assert run_strategy(ol.strategies.packed(method="concat"), buffers[0], tree).pieces.length.tolist() == [48, 12]
    for buffer, method in ((buffers[0], "best_fit"), (buffers[1], "concat")):
        with pytest.raises(ol.PlanError, match="1 pieces of 60 tokens do not fit"):
            run_strategy(ol.strategies.packed(method=method), buffer, tree)


def test_microbatches_end_where_the_ranks_can_share_them():
    limits = Limits(64, 100, slicing="contiguous", rank_multiple=8)
    for method in METHODS:
        buffer = dataclasses.replace(buffer_of([50, 46, 3, 2, 60]), limits=limits)
        plan = run_strategy(ol.strategies.packed(method=method), buffer, ol.ClientPlaceTree(cp=4))
        assert plan.loads(plan.padded).max() <= 96, "100 tokens would be padded to 128 for 4 ranks of 8"


TREE = ol.ClientPlaceTree(dp=2, cp=2)


def graph_of(axis="DP", modality="tokens", tree=TREE, **options):
    buffer = ol.summary_buffer(
        {"coyo": {"tokens": [9, 20], "images": [1, 1], "image_tokens": [4, 9]}}, context_length=64
    )
    return ol.DGraph.from_buffer(buffer, tree, modality=modality).distribute(axis, **options).cost(ol.costs.tokens)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: graph_of().pack("worst_fit"), "method is 'worst_fit'"),
        (lambda: graph_of("CP").pack(), "tokens over CP"),
        (lambda: graph_of("WORLD", "images").pack(), "images over WORLD"),
        (lambda: graph_of(group_size=1).pack(), "group_size is 1"),
        (lambda: dataclasses.replace(graph_of(), costs=None).pack(), r"Call cost\(..\) before pack"),
        (lambda: dataclasses.replace(graph_of(), axis=None).pack(), "Call distribute"),
    ],
)
def test_a_graph_that_cannot_be_packed_is_refused(call, message):
    with pytest.raises(ol.SpecError, match=message):
        call()


def test_pieces_with_a_row_of_their_own_are_not_concatenated():
    buffer = dataclasses.replace(buffer_of([50, 30]), limits=Limits(64, 128, row_tokens=64))
    graph = ol.DGraph.from_buffer(buffer, ol.ClientPlaceTree()).distribute("DP").cost(ol.costs.tokens)
    assert graph.pack("best_fit").plan().num_microbatches == 1
    with pytest.raises(ol.SpecError, match="a row of its own"):
        graph.pack("concat")


def test_the_demos_samples_fill_microbatches_of_8k(demo_files, cache):
    job = demo_job(demo_files).replace(batch=ol.Batch(8192, global_tokens=2**20))
    with ol.launch(job, runtime="inline", cache=cache) as service:
        buffer = service.summary_buffer(0)
    plan = run_strategy(ol.strategies.packed(), buffer, ol.ClientPlaceTree())
    assert plan.total_tokens / (plan.num_microbatches * 8192) >= 0.98


# ---- golden plans: where pieces go must never change by accident, on any machine

GOLDEN = {
    "best_fit": "b718074ce6c5ac3c3d3afcd01d088df7",
    "first_fit": "afad5ac8ab7886520763a4171b81452c",
    "concat": "7e1ab9d067fa2e40ecd08f5d77fe5aa7",
}


def golden_buffer():
    """Lengths from integer arithmetic alone: no random generator of any numpy version is asked."""
    numbers = np.arange(1, 401)
    text = numbers * numbers * 7919 % 4093 + numbers % 13 + 1
    return buffer_of(text.tolist(), (numbers[:120] * 104729 % 700 + 5).tolist(), context=4096, cap=8192)


@pytest.mark.parametrize("method", METHODS)
def test_golden_plan(method):
    plan = run_strategy(ol.strategies.packed(method=method), golden_buffer(), ol.ClientPlaceTree(dp=4, cp=2, tp=2))
    assert plan.digest == GOLDEN[method]
