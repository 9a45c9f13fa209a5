"""DGraph: primitives, refusals, lineage; nothing lost or doubled under any strategy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.core.draw import Pieces
from overlord.core.plan import order_in_bins, plan_from_bytes, plan_to_bytes
from overlord.planning.checking import check_plan, run_strategy

TREE = ol.ClientPlaceTree(dp=4, cp=2, tp=2)
ALL = {
    "vanilla": ol.strategies.vanilla(),
    "backbone": ol.strategies.backbone_balance(),
    "sum": ol.strategies.backbone_balance(objective="sum", level="inter"),
    "pipeline": ol.strategies.backbone_balance(objective="pipeline"),
    "intra": ol.strategies.backbone_balance(level="intra"),
    "karmarkar_karp": ol.strategies.backbone_balance(method="karmarkar_karp"),
    "zigzag": ol.strategies.backbone_balance(method="zigzag"),
    "groups": ol.strategies.backbone_balance(group_size=2),
    "long_short": ol.strategies.long_short(),
    "vlm": ol.strategies.vlm_hybrid(),
    "vlm group": ol.strategies.vlm_hybrid(scope="group", split=True, broadcast=("TP",)),
    "hdp": ol.strategies.hdp(),
    "hdp equal": ol.strategies.hdp(equal_counts=True),
}


def buffer_of(lengths, images=(), context=1024, cap=None, media=("image_tokens", "images"), **extra):
    sources = {"web": np.asarray(lengths)}
    if len(images):
        images = np.asarray(images)
        sources["coyo"] = {"tokens": images + 5, media[0]: images, media[1]: np.ones(len(images), int)}
    return ol.summary_buffer(sources, context_length=context, microbatch_tokens=cap, **extra)


meshes = st.builds(
    ol.ClientPlaceTree,
    dp=st.integers(1, 5),
    cp=st.sampled_from([1, 2, 4]),
    tp=st.integers(1, 3),
    order=st.sampled_from(["pp-dp-cp-tp", "dp-pp-tp-cp", "tp-cp-dp-pp"]),
)


@pytest.mark.parametrize("name", ALL)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    st.lists(st.integers(1, 900), max_size=20),
    meshes,
    st.sampled_from([1024, 2048]),
)
def test_nothing_is_lost_doubled_or_too_large(name, lengths, images, tree, cap):
    buffer = buffer_of(lengths, images, cap=cap)
    plan = run_strategy(ALL[name], buffer, tree)  # checks coverage and capacity
    taken = np.bincount(plan._once("sample"), plan._once("length"), len(buffer))
    assert taken.tolist() == buffer.meta["tokens"].tolist()
    assert plan.total_tokens == buffer.meta["tokens"].sum()
    assert plan.global_loss_tokens == buffer.meta["loss_tokens"].sum()
    again = plan_from_bytes(plan_to_bytes(plan))
    assert again.digest == plan.digest and again.draw.digest == buffer.draw.digest
    del again.__dict__["digest"], again.draw.__dict__["digest"]
    assert again.digest == plan.digest


@given(st.lists(st.integers(1, 1024), min_size=4, max_size=50), st.randoms(use_true_random=False))
def test_a_plan_is_the_same_every_time(lengths, random):
    for strategy in ALL.values():
        made = {run_strategy(strategy, buffer_of(lengths), TREE).digest for _ in range(2)}
        assert len(made) == 1


def test_every_primitive_returns_a_new_graph():
    first = ol.DGraph.from_buffer(buffer_of([5, 3, 4]), TREE)
    names = [edge.primitive for edge in first.mix().distribute("dp").cost(ol.costs.tokens).balance().edges]
    assert names == ["from_buffer", "mix", "distribute", "cost", "balance"]
    assert len(first.edges) == 1 and first.axis is None
    with pytest.raises(AttributeError):
        first.axis = "DP"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda g: g.balance(), r"balance: it is not known which ranks consume.*distribute"),
        (lambda g: g.distribute("DP").balance(), r"balance: it is not known what a sample costs.*cost\(\.\.\)"),
        (lambda g: g.distribute("DP").cost(ol.costs.tokens).plan(), r"no place yet.*balance"),
        (lambda g: g.plan(), "which ranks consume"),
        (lambda g: g.distribute("XP"), "axis"),
        (lambda g: g.distribute("PP"), "Use 'DP', 'CP' or 'WORLD'"),
        (lambda g: g.distribute("WORLD"), "need the same tokens"),
        (lambda g: g.distribute("DP", group_size=0), "group_size is 0"),
        (lambda g: g.mix(["nope"]), "no source is called 'nope'"),
        (lambda g: g.cost(5), "not a function"),
        (lambda g: g.distribute("DP").cost(lambda n: n[:1]), "cost"),
        (lambda g: g.distribute("DP").cost(lambda n: n * np.nan), "cost"),
        (lambda g: g.distribute("DP").cost(ol.costs.tokens).balance("magic"), "magic"),
        (lambda g: g.distribute("DP").cost(ol.costs.tokens).balance(objective="speed"), "speed"),
        (lambda g: g.distribute("DP").cost(ol.costs.tokens).balance(level="deep"), "deep"),
        (lambda g: g.broadcast_at("EP"), "Use 'TP', 'CP' or 'DP'"),
        (lambda g: g.distribute("DP").cost(ol.costs.tokens).split(), "context parallelism"),
        (lambda g: g.where([True]), "for each of the 3 items"),
        (lambda g: g.mix(5), "not a list of names"),
        (lambda g: g.distribute("DP", group_size="x"), "group_size is 'x'"),
        (lambda g: g.distribute("DP").placed([0, 0, 0], "a"), "num_microbatches is 'a'"),
        (lambda g: g.trace(5), "not a sample id"),
        (lambda g: ol.DGraph.from_buffer(g.buffer, TREE, modality="images").toward("x"), "no plan of this step"),
        (lambda g: g.distribute("DP").placed([0, 99, 1], 1), "bins 0 to 3"),
        (lambda g: ol.DGraph.from_buffer(g.buffer, TREE, modality="sound"), "modality is 'sound'"),
        (lambda g: ol.DGraph.from_buffer(5, TREE), "got int"),
        (lambda g: g.trace("web:0:77@0"), "is not in step 0"),
        (lambda g: g.trace("nonsense"), "source:file:row@epoch"),
        (lambda g: g.visualize("png"), "png"),
    ],
)
def test_nonsense_is_refused(wrong, message):
    graph = ol.DGraph.from_buffer(buffer_of([5, 3, 4]), TREE)
    with pytest.raises(ol.SpecError, match=message):
        wrong(graph)


def test_what_does_not_fit_is_an_error_that_names_the_remedy():
    buffer = buffer_of([1000] * 9, microbatches=1)
    with pytest.raises(ol.PlanError, match=r"9 pieces of 9000 tokens do not fit.*Raise batch.microbatches"):
        run_strategy(ol.strategies.backbone_balance(), buffer, ol.ClientPlaceTree(dp=2))
    with pytest.raises(ol.PlanError, match="needs 4 ranks"):
        run_strategy(ol.strategies.hdp(), buffer_of([1000]), ol.ClientPlaceTree(dp=1, cp=3))


def test_microbatch_counts_follow_the_virtual_pipeline():
    tree = ol.ClientPlaceTree(pp=4, dp=2, vpp=2)
    for strategy in (ALL["backbone"], ALL["pipeline"], ALL["vanilla"]):
        assert run_strategy(strategy, buffer_of([700] * 11), tree).num_microbatches % 4 == 0


def test_the_lineage_of_a_sample():
    graph = ol.DGraph.from_buffer(buffer_of([50, 2000, 7]), TREE).mix().distribute("DP").cost(ol.costs.llama_12b)
    told = str(graph.balance("greedy").broadcast_at("TP").trace("web:0:1@0"))
    assert told.splitlines()[0] == "web:0:1@0"
    for part in (
        "source ",
        "row 1 of file 0",
        "2000 tokens",
        "bucket",
        "tokens 0 to 1023",
        "tokens 1024 to 1999",
        "fetched by",
    ):
        assert part in told, part
    assert "not in this graph" in str(graph.where(graph.items.sample == 0).trace("web:0:1@0"))


def test_long_and_short_sequences_do_not_share_a_microbatch():
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(600, 1025, 20), rng.integers(1, 200, 300)])
    plan = run_strategy(ol.strategies.long_short(threshold=512), buffer_of(lengths), ol.ClientPlaceTree(dp=4))
    for microbatch in range(plan.num_microbatches):
        kinds = {bool(n >= 512) for bucket in range(4) for n in plan.bin(bucket, microbatch).length}
        assert len(kinds) <= 1


def test_reorder_puts_the_longest_first_or_keeps_the_drawing_order():
    graph = ol.DGraph.from_buffer(buffer_of([3, 9, 5, 7]), ol.ClientPlaceTree()).distribute("DP").cost(ol.costs.tokens)
    assert graph.balance().plan().pieces.length.tolist() == [9, 7, 5, 3]
    assert graph.balance(reorder=False).plan().pieces.length.tolist() == [3, 9, 5, 7]


def test_hybrid_plans_say_everything_a_rank_needs():
    rng = np.random.default_rng(1)
    lengths = rng.lognormal(5, 1.2, 200).clip(1, 1024).astype(int)
    tree = ol.ClientPlaceTree(dp=2, cp=4)
    plan = run_strategy(ol.strategies.hdp(), buffer_of(lengths), tree)
    assert plan.axis == "CP" and plan.num_buckets == 8
    orders: dict[int, list] = {bucket: [] for bucket in range(8)}
    for bucket in range(8):
        for microbatch in range(int(plan.microbatch_counts[bucket])):
            chosen = plan.bin_range(bucket, microbatch)
            assert len(set(plan.cp_sizes[chosen].tolist())) == 1, "one cp size in a microbatch"
            assert plan.padded[chosen].sum() // plan.cp_sizes[chosen.start] <= 1024 // 4
            orders[bucket] += list(
                zip(plan.pieces.sample[chosen].tolist(), plan.cp_sizes[chosen].tolist(), strict=True)
            )
    for sample, size, first in zip(plan.pieces.sample, plan.cp_sizes, plan.first_ranks, strict=True):
        assert first % size == 0
        block = [[s for s, n in orders[rank] if n >= size] for rank in range(first, first + size)]
        assert all(order == block[0] for order in block), "every rank of a block runs the same things in the same order"
        assert sum((int(sample), int(size)) in orders[rank] for rank in range(8)) == size
    pairs = zip(plan.pieces.length.tolist(), plan.cp_sizes.tolist(), strict=True)
    assert plan.padded.tolist() == [-(-n // (2 * c)) * 2 * c if c > 1 else n for n, c in pairs]
    equal = run_strategy(ol.strategies.hdp(equal_counts=True), buffer_of(lengths), tree)
    assert len(set(equal.microbatch_counts.tolist())) == 1


def test_a_wrong_plan_is_found():
    buffer = buffer_of([600, 3000, 50])
    tree = ol.ClientPlaceTree(dp=2)
    plan = run_strategy(ol.strategies.backbone_balance(), buffer, tree)

    def with_pieces(**columns):
        parts = {n: getattr(plan.pieces, n).copy() for n in ("sample", "start", "length")}
        for name, change in columns.items():
            change(parts[name])
        return dataclasses.replace(plan, pieces=Pieces(**parts))

    def double(column):
        column[column == 2] = 0

    def stretch(column):
        column[np.argmin(column)] += 1

    def move(column):
        column[np.flatnonzero(column == 1024)[0]] = 0

    for wrong, message in (
        (with_pieces(sample=double), "lost|doubled"),
        (with_pieces(length=stretch), "doubled"),
        (with_pieces(start=move), "overlap"),
        (dataclasses.replace(plan, num_buckets=1, num_microbatches=plan.num_microbatches * 2), "buckets over DP"),
    ):
        with pytest.raises(ol.PlanError, match=message):
            check_plan(wrong, buffer, tree)
    wider = dataclasses.replace(plan, broadcast=("EP",))
    for wrong, message in (
        (dataclasses.replace(plan, bin_offsets=np.zeros_like(plan.bin_offsets)), "bin_offsets do not cut"),
        (dataclasses.replace(plan, bin_offsets=plan.bin_offsets[:-1]), "bin_offsets are not"),
        (dataclasses.replace(plan, counts=np.zeros(2, np.int32)), "leave out microbatches"),
        (dataclasses.replace(plan, counts=np.ones(3, np.int32)), "one whole number for each bucket"),
        (dataclasses.replace(plan, axis="TP"), "which the mesh"),
        (wider, "broadcast along 'EP'"),
        (dataclasses.replace(plan, num_microbatches=0), "not a number of buckets"),
        (dataclasses.replace(plan, cp_sizes=np.ones(len(plan.pieces), np.int32)), "belong together"),
        (with_pieces(length=lambda column: column.__setitem__(0, -5)), "no length"),
        (
            dataclasses.replace(plan, pieces=Pieces(plan.pieces.sample.astype(float), *[plan.pieces.start] * 2)),
            "column sample is not",
        ),
        (dataclasses.replace(plan, draw=dataclasses.replace(plan.draw, step=5)), "another draw"),
    ):
        with pytest.raises(ol.PlanError, match=message):
            check_plan(wrong, buffer, tree)
    with pytest.raises(ol.PlanError, match="pad_multiple is 1"):
        narrow = ol.ClientPlaceTree(dp=2, cp=2)
        made = run_strategy(ol.strategies.backbone_balance(), buffer, narrow)
        check_plan(dataclasses.replace(made, pad_multiple=1), buffer, narrow)
    with pytest.raises(ol.PlanError, match="another draw"):
        check_plan(plan, buffer_of([600, 2999]), tree)


def test_wrong_blocks_are_found():
    buffer, tree = buffer_of([900, 100, 50, 700, 30, 20] * 4), ol.ClientPlaceTree(dp=2, cp=4)
    plan = run_strategy(ol.strategies.hdp(), buffer, tree)
    shared = int(np.flatnonzero(plan.cp_sizes > 1)[0])

    def with_column(name, at, value):
        column = getattr(plan, name).copy()
        column[at] = value
        return dataclasses.replace(plan, **{name: column})

    for wrong in (
        with_column("cp_sizes", shared, 1),
        with_column("cp_sizes", slice(None), 2),
        with_column("cp_sizes", slice(None), 0),
        with_column("first_ranks", shared, 1),
        dataclasses.replace(plan, first_ranks=None),
    ):
        with pytest.raises(ol.PlanError, match="wrong plan"):
            check_plan(wrong, buffer, tree)
    swapped = plan.pieces.sample.copy()
    swapped[[shared, -1]] = swapped[[-1, shared]]
    with pytest.raises(ol.PlanError, match="wrong plan"):
        check_plan(dataclasses.replace(plan, pieces=dataclasses.replace(plan.pieces, sample=swapped)), buffer, tree)


def test_a_strategy_cannot_change_what_was_drawn():
    def greedy_hands(buffer, tree):
        buffer.source[:] = 0
        return ol.strategies.backbone_balance()(buffer, tree)

    def other_tokens(buffer, tree):
        buffer.meta["tokens"][:] = 1
        return ol.strategies.backbone_balance()(buffer, tree)

    def leaving(buffer, tree):
        raise SystemExit(3)

    for strategy, error in ((greedy_hands, "read-only"), (other_tokens, "read-only"), (leaving, "SystemExit")):
        with pytest.raises(ol.PlanError, match=error):
            run_strategy(strategy, buffer_of([3, 4]), TREE)


@pytest.mark.parametrize("name", ["vanilla", "hdp", "backbone", "long_short"])
def test_a_fixed_number_of_microbatches_is_kept_or_refused(name):
    tree = ol.ClientPlaceTree(dp=2, cp=2)
    plan = run_strategy(ALL[name], buffer_of([500] * 4, microbatches=5), tree)
    assert plan.num_microbatches == 5 and set(plan.microbatch_counts.tolist()) == {5}
    with pytest.raises(ol.PlanError, match="do not fit"):
        run_strategy(ALL[name], buffer_of([900] * 40, microbatches=2), tree)


def test_expert_parallelism_gets_equal_counts():
    tree = ol.ClientPlaceTree(dp=4, ep=4)
    plan = run_strategy(ol.strategies.hdp(), buffer_of([900, 20, 1000, 30, 500, 600, 7] * 5), tree)
    assert len(set(plan.microbatch_counts.tolist())) == 1


def test_more_bins_than_sixteen_bits():
    places = np.array([70_000, 3, 65_536, 70_000, 3])
    assert order_in_bins(places).tolist() == [1, 4, 2, 0, 3]
    assert order_in_bins(places, np.array([1, 2, 3, 4, 5])).tolist() == [4, 1, 2, 3, 0]


def test_low_level_hooks():
    buffer = buffer_of([5, 3, 4], [2])
    plan = ol.plan_raw(buffer, ol.ClientPlaceTree(dp=2), bucket=[1, 0, 1, 0], microbatch=[0, 0, 1, 0])
    assert [pieces.sample.tolist() for pieces in ol.constructor_do_plan(plan, 1)] == [[0], [2]]
    order = ol.loader_do_plan(plan, "coyo")
    assert order.meta["tokens"].tolist() == [7] and order.source == 1
    for wrong, message in (
        (lambda: ol.plan_raw(buffer, TREE, bucket=[0, 1]), "for each of the 4 samples"),
        (lambda: ol.plan_raw(buffer, TREE, bucket=[0, 1, 2, 9]), "bucket 9 does not exist"),
        (lambda: ol.plan_raw(buffer, TREE, bucket=[0, 1, 2, -1]), "bucket -1"),
        (lambda: ol.constructor_do_plan(plan, 2), "bucket 2 is not in the plan"),
        (lambda: ol.loader_do_plan(plan, "wbe"), "Did you mean 'web'"),
        (lambda: ol.summary_buffer({}, context_length=8), "no sample"),
        (lambda: ol.summary_buffer({"a": {"token": [1]}}, context_length=8), "'token' is unknown"),
        (lambda: ol.summary_buffer({"a": [0]}, context_length=8), "from 1 to"),
        (lambda: ol.summary_buffer({"a": [2**31]}, context_length=8), "from 1 to"),
        (lambda: ol.summary_buffer([5], context_length=8), "not a mapping"),
        (lambda: ol.summary_buffer({"a": [5]}, context_length=0), "context_length is 0"),
        (lambda: ol.summary_buffer({"a": {"tokens": [5], "images": [1, 2]}}, context_length=8), "for each of the 1"),
        (lambda: ol.summary_buffer({"a": {"tokens": [5], "image_tokens": [9]}}, context_length=8), "more tokens"),
        (lambda: ol.plan_raw(None, TREE, bucket=[0]), "got NoneType"),
        (lambda: ol.plan_raw(buffer, TREE, bucket=[0] * 4, microbatch=[10**9] * 4), "microbatch 1000000000"),
        (lambda: ol.plan_raw(buffer, TREE, bucket=[0] * 4, broadcast=None), "broadcast is None"),
        (lambda: ol.loader_do_plan(plan, 99), "below 2"),
        (lambda: ol.loader_do_plan(plan, None), "source is None"),
        (lambda: ol.constructor_do_plan(plan, "x"), "bucket x"),
        (lambda: ol.strategies.curriculum([(0, None)]), "curriculum"),
        (lambda: ol.strategies.curriculum(5), "curriculum"),
        (lambda: ol.strategies.long_short(threshold="x"), "threshold is 'x'"),
    ):
        with pytest.raises(ol.SpecError, match=message):
            wrong()


def test_bytes_that_are_no_plan_are_refused():
    with pytest.raises(ol.StateError, match="not a plan"):
        plan_from_bytes(b"something else entirely")
