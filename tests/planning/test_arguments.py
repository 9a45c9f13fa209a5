"""Every argument of every primitive is used or refused, on every axis and for every modality."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import overlord as ol
from overlord.planning.checking import run_strategy

TREE = ol.ClientPlaceTree(dp=4, cp=2)
RNG = np.random.default_rng(5)
LENGTHS = np.minimum(RNG.lognormal(6, 1, 96).astype(int) + 1, 4000)
MEDIA = {"images": ("image_tokens", "images"), "videos": ("clip_tokens", "clips"), "audio": ("audio_tokens", "sounds")}
KINDS = ["DP", "CP", *MEDIA]
OFFLOAD = ol.costs.Offload(8, act_bytes_per_token=1, bandwidth=1e9, time=ol.costs.CostModel(0, 1e-6))


@functools.cache
def buffer_of(media: str = "images", attention: float | None = None):
    """Return a buffer of samples with one image, clip or sound each."""
    tokens, count = MEDIA[media]
    held = {"tokens": LENGTHS + 5, tokens: LENGTHS, count: np.ones(len(LENGTHS), int)}
    metrics = None if attention is None else {"attention": attention}
    return ol.summary_buffer({"coyo": held}, context_length=4096, metrics=metrics)


def graph_of(kind: str, group_size: int | None = None) -> ol.DGraph:
    """Return a costed graph of tokens over DP or CP, or of media over WORLD."""
    buffer = buffer_of(kind if kind in MEDIA else "images")
    graph = ol.DGraph.from_buffer(buffer, TREE, modality=kind if kind in MEDIA else "tokens").mix()
    graph = graph.distribute("WORLD" if kind in MEDIA else kind, group_size=group_size)
    return graph.cost(ol.costs.tokens if kind in MEDIA else ol.costs.causal_lm(layers=2, hidden=64))


def digest_of(kind: str, *given, group_size: int | None = None, **named) -> str:
    return graph_of(kind, group_size).balance(*given, **named).plan().digest


def backbone(graph: ol.DGraph) -> ol.LoadingPlan:
    tokens = ol.DGraph.from_buffer(graph.buffer, TREE).distribute("DP")
    return tokens.cost(ol.costs.tokens).balance().plan()


# -- nonsense, of any type, for every argument ---------------------------------------------------

GRAPHS = {kind: graph_of(kind) for kind in KINDS}
TOKENS = {id(graph): backbone(graph) for graph in GRAPHS.values()}
CALLS = {
    "from_buffer.modality": lambda g, v: ol.DGraph.from_buffer(g.buffer, TREE, modality=v),
    "mix.sources": lambda g, v: g.mix(v),
    "where.chosen": lambda g, v: g.where(v),
    "distribute.axis": lambda g, v: g.distribute(v),
    "distribute.group_size": lambda g, v: g.distribute(g.axis, group_size=v),
    "cost.fn": lambda g, v: g.cost(v),
    "split.parts": lambda g, v: g.split(v),
    "toward.backbone": lambda g, v: g.toward(v),
    "toward.scope": lambda g, v: g.toward(TOKENS[id(g)], v),
    "balance.method": lambda g, v: g.balance(v),
    "balance.objective": lambda g, v: g.balance(objective=v),
    "balance.level": lambda g, v: g.balance(level=v),
    "balance.reorder": lambda g, v: g.balance(reorder=v),
    "balance.equal_counts": lambda g, v: g.balance(equal_counts=v),
    "balance.blocks": lambda g, v: g.balance(blocks=v),
    "balance.offload": lambda g, v: g.balance(offload=v),
    "pack.method": lambda g, v: g.pack(v),
    "placed.places": lambda g, v: g.placed(v, 1),
    "placed.num_microbatches": lambda g, v: g.placed(np.zeros(len(g.items), int), v),
    "broadcast_at.axis": lambda g, v: g.broadcast_at(v),
    "visualize.format": lambda g, v: g.visualize(v),
    "trace.sample": lambda g, v: g.trace(v),
}
LEFT_OUT = {"mix.sources", "distribute.group_size", "split.parts", "balance.objective", "balance.level",
            "balance.reorder", "balance.equal_counts", "balance.blocks", "balance.offload"}  # fmt: skip
"""Arguments for which None means that they are left out."""
WHOLE = {"distribute.group_size", "split.parts", "placed.num_microbatches"}
"""Arguments that may be a whole number of at least 1."""
FLAGS = {"balance.reorder", "balance.equal_counts"}
junk = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=True), st.binary(max_size=3),
    st.text("abcxyz ", min_size=1, max_size=8), st.lists(st.text("abc", min_size=1), max_size=2),
    st.dictionaries(st.text("abc", min_size=1), st.integers(), max_size=2), st.just(object()),
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("argument", CALLS)
@given(value=junk)
def test_nonsense_is_refused_with_words(argument, kind, value):
    assume(not (argument in LEFT_OUT and value is None))
    assume(not (argument in WHOLE and isinstance(value, int) and not isinstance(value, bool) and value >= 1))
    assume(not (argument in FLAGS and isinstance(value, bool)))
    with pytest.raises(ol.SpecError) as refused:
        CALLS[argument](GRAPHS[kind], value)
    assert len(str(refused.value)) > 40


# -- what is legal changes the plan ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "nonsense", [{"method": "nonsense"}, {"method": 5}, {"objective": "nonsense"}, {"level": "nonsense"}], ids=str
)
def test_nonsense_is_named(kind, nonsense):
    with pytest.raises(ol.SpecError, match=r"nonsense|method is 5"):
        digest_of(kind, **nonsense)


@pytest.mark.parametrize("kind", KINDS)
def test_the_method_decides(kind):
    names = ("greedy", "karmarkar_karp", "zigzag")
    assert len({digest_of(kind, name) for name in names}) == len(names)
    asked = []

    def mine(costs, num_bins, sizes, capacity):
        asked.append((len(costs), num_bins))
        return ol.balance(costs, num_bins, "greedy", sizes, capacity)

    digest_of(kind, mine)
    assert asked, "a function of the user is called"
    if kind == "CP":
        equal, free = (digest_of("CP", mine, equal_counts=one) for one in (True, False))
        assert equal != free and len(asked) > 2


@pytest.mark.parametrize("group_size", [None, 2])
@pytest.mark.parametrize("level", ["interleaved", "inter", "intra"])
@pytest.mark.parametrize("objective", [None, "sum", "lockstep", "pipeline"])
def test_a_users_method_is_called_for_every_objective_and_level(objective, level, group_size):
    asked = []

    def mine(costs, num_bins, sizes, capacity):
        asked.append(num_bins)
        return ol.balance(costs, num_bins, "zigzag", sizes, capacity)

    if level == "intra" and objective in ("sum", "pipeline"):
        with pytest.raises(ol.SpecError, match=f"objective is '{objective}'.*level='intra'"):
            digest_of("DP", mine, objective=objective, level=level, group_size=group_size)
        return
    plan = digest_of("DP", mine, objective=objective, level=level, group_size=group_size)
    assert asked and plan != digest_of("DP", "greedy", objective=objective, level=level, group_size=group_size)


@pytest.mark.parametrize("equal_counts", [True, False])
@pytest.mark.parametrize(
    "method", ["karmarkar_karp", "zigzag", lambda costs, num_bins, *_: np.arange(len(costs)) % num_bins]
)
def test_methods_over_cp_keep_what_a_plan_promises(method, equal_counts):
    plan = graph_of("CP").balance(method, equal_counts=equal_counts).plan()
    seen = np.bincount(plan.pieces.sample, minlength=len(LENGTHS))
    assert (seen >= 1).all()
    assert (plan.counts.max() == plan.counts.min()) or not equal_counts


def test_objectives_and_levels_of_tokens():
    assert len({digest_of("DP", objective=one) for one in ("sum", "lockstep", "pipeline")}) == 3
    assert len({digest_of("DP", level=one) for one in ("interleaved", "inter", "intra")}) == 3
    assert digest_of("DP") == digest_of("DP", objective="lockstep", level="interleaved")
    assert digest_of("DP", level="intra") == digest_of("DP", level="intra", objective="lockstep")


def test_offloading_over_cp_decides():
    assert digest_of("CP", offload=OFFLOAD) != digest_of("CP")


def test_the_objective_over_cp_is_what_the_counts_say():
    assert digest_of("CP") == digest_of("CP", objective="lockstep") == digest_of("CP", equal_counts=True)
    assert digest_of("CP", objective="sum") == digest_of("CP", equal_counts=False) != digest_of("CP")
    assert digest_of("CP", level="interleaved") == digest_of("CP")


@pytest.mark.parametrize("kind", ["DP", *MEDIA])
def test_groups_are_used(kind):
    assert digest_of(kind, group_size=2) != digest_of(kind)
    assert digest_of(kind, group_size=99) == digest_of(kind), "one group of all"


TIGHT = [350, 300, 200, 450, 450, 350, 200, 250, 300, 50, 50, 250]
"""Lengths that fit four microbatches of 840 tokens, but not with equal costs."""


@pytest.mark.parametrize(("axis", "objective"), [("DP", "lockstep"), ("DP", "sum"), ("CP", "lockstep")])
@pytest.mark.parametrize("method", ["karmarkar_karp", "zigzag"])
def test_a_method_that_finds_no_room_and_becomes_greedy_says_so(method, axis, objective):
    def balanced(cap, method):
        buffer = ol.summary_buffer({"web": TIGHT}, context_length=500, microbatch_tokens=cap, microbatches=2)
        graph = ol.DGraph.from_buffer(buffer, ol.ClientPlaceTree(dp=2)).distribute(axis).cost(lambda n: n * n)
        return graph.balance(method, objective=objective)

    roomy, tight = balanced(8000, method), balanced(840, method)
    assert roomy.notes == roomy.plan().notes == balanced(8000, "greedy").notes == ()
    (note,) = tight.notes
    assert note == f"{method} would exceed batch.microbatch_tokens, so all pieces were placed greedily."
    assert tight.plan().notes == (note,)
    assert note.rstrip(".") in tight.edges[-1].detail
    assert note.rstrip(".") in str(tight.trace(tight.buffer.draw.sample_id(0)))


def test_groups_without_room_that_become_one_group_say_so():
    buffer = ol.summary_buffer(
        {"web": [60, 60, 60, 60, 40, 40, 40, 40]}, context_length=100, microbatch_tokens=100, microbatches=1
    )

    def notes_of(group_size, **named):
        graph = ol.DGraph.from_buffer(buffer, ol.ClientPlaceTree(dp=4)).distribute("DP", group_size=group_size)
        return graph.cost(ol.costs.tokens).balance(**named).plan().notes

    assert notes_of(2) == notes_of(None) == notes_of(9) == ()
    for level in ("interleaved", "intra"):
        (note,) = notes_of(3, level=level)
        assert note.startswith("groups of 3 buckets have no room") and "balanced as one group" in note


@pytest.mark.parametrize("kind", ["DP", "CP"])
def test_reorder_decides_the_order_in_a_microbatch(kind):
    assert digest_of(kind) == digest_of(kind, reorder=True) != digest_of(kind, reorder=False)


@pytest.mark.parametrize("kind", MEDIA)
def test_axes_scopes_costs_and_sources_of_media(kind):
    graph, tokens = graph_of(kind), backbone(graph_of(kind))
    plans = [graph.distribute(axis).balance().plan() for axis in ("DP", "CP", "WORLD")]
    assert [plan.num_buckets for plan in plans] == [4, 8, 8]
    near = [graph.toward(tokens, scope).balance().plan().digest for scope in ("world", "group")]
    assert len({*near, graph.balance().plan().digest}) == 3
    assert graph.cost(lambda lengths: np.ones(len(lengths))).balance().plan().digest != graph.balance().plan().digest
    assert len(graph.where(LENGTHS > 500).items) == int((LENGTHS > 500).sum())


@pytest.mark.parametrize("kind", ["images", "videos"])
def test_parts_of_a_split_are_used(kind):
    graph = graph_of(kind)
    assert len(graph.split(2).items) == 2 * len(graph.items) - int((LENGTHS == 1).sum())
    assert graph.split(2).balance().plan().digest != graph.balance().split(3).balance().plan().digest
    with pytest.raises(ol.SpecError, match="plan: the samples have no place yet"):
        graph.balance().split(2).plan()


def test_lengths_are_patches_of_images_and_frames_of_sounds():
    seen = {}
    for kind in KINDS:
        graph_of(kind).cost(lambda lengths, at=kind: seen.setdefault(at, lengths))
    assert (seen["images"] == LENGTHS * 4).all() and (seen["videos"] == LENGTHS * 4).all(), "patches of a token"
    assert (seen["audio"] == LENGTHS * 4).all(), "mel frames of a token"
    assert (seen["DP"][: len(LENGTHS)] >= LENGTHS + 5).all()


@pytest.mark.parametrize(
    ("kind", "given", "why"),
    [
        ("CP", {"objective": "pipeline"}, "objective is 'pipeline'.*one stage"),
        ("CP", {"objective": "sum", "equal_counts": True}, "objective is 'sum'.*meet in each"),
        ("CP", {"objective": "pipeline", "equal_counts": True}, "objective is 'pipeline'.*meet in each"),
        ("CP", {"level": "inter"}, "level is 'inter'.*fills its own"),
        ("CP", {"group_size": 2}, "group_size is 2.*blocks of any ranks"),
        ("DP", {"equal_counts": True}, "equal_counts is True.*as many microbatches of tokens over DP"),
        ("DP", {"blocks": "any"}, "blocks is 'any'.*no blocks of ranks"),
        ("DP", {"offload": OFFLOAD}, "offload is given, and no blocks of ranks are made for tokens over DP"),
        *(
            (kind, given, why)
            for kind in MEDIA
            for given, why in (
                ({"equal_counts": False}, "equal_counts is False"),
                ({"blocks": "aligned"}, "blocks is 'aligned'.*no blocks of ranks"),
                ({"objective": "sum"}, f"objective is 'sum', and {kind}.*one microbatch"),
                ({"level": "intra"}, "level is 'intra'.*one microbatch"),
                ({"reorder": True}, "reorder is True.*one microbatch"),
            )
        ),
    ],
)
def test_what_would_be_ignored_is_refused(kind, given, why):
    with pytest.raises(ol.SpecError, match=f"balance: {why}"):
        digest_of(kind, **given)


@pytest.mark.parametrize("kind", MEDIA)
def test_media_refuse_what_only_tokens_have(kind):
    graph, tokens = graph_of(kind), backbone(graph_of(kind))
    with pytest.raises(ol.SpecError, match=r"group_size is 2.*near their tokens"):
        graph_of(kind, group_size=2).toward(tokens).balance()
    with pytest.raises(ol.SpecError, match=r"method is 'zigzag'.*near their tokens"):
        graph.toward(tokens).balance("zigzag")
    with pytest.raises(ol.SpecError, match=f"broadcast_at: the graph is of {kind}"):
        graph.balance().broadcast_at("TP")
    with pytest.raises(ol.SpecError, match=f"pack: the graph is of {kind}"):
        graph.pack()
    with pytest.raises(ol.SpecError, match=r"placed: num_microbatches is 2.*encoded in one"):
        graph.placed(np.zeros(len(graph.items), int), 2)
    with pytest.raises(ol.SpecError, match=r"placed: toward\(\) is given"):
        graph.toward(tokens).placed(np.zeros(len(graph.items), int), 1)
    with pytest.raises(ol.SpecError, match="placed: group_size is given"):
        graph_of("DP", group_size=2).placed(np.zeros(len(LENGTHS), int), 1)
    with pytest.raises(ol.SpecError, match="a sound is one window" if kind == "audio" else "tokens are split by"):
        graph_of("audio" if kind == "audio" else "DP").split()


@pytest.mark.parametrize("kind", MEDIA)
def test_media_follow_only_a_plan_over_the_groups_of_their_mesh(kind):
    graph = graph_of(kind)
    shared = ol.strategies.hdp()(graph.buffer, TREE)
    larger = ol.strategies.backbone_balance()(graph.buffer, ol.ClientPlaceTree(dp=64))
    for plan, found in ((shared, "8 buckets of CP"), (larger, "64 buckets of DP")):
        with pytest.raises(ol.SpecError, match=f"toward: the backbone is distributed over {found}.*axis='DP'"):
            graph.toward(plan).balance()


def test_broadcasts_of_tokens():
    tree = ol.ClientPlaceTree(dp=2, cp=2, tp=2)
    for axis, bucket, fetched in (("DP", 1, "fetched by 0, 1, 2, 3"), ("CP", 2, "fetched by 0, 1")):
        graph = ol.DGraph.from_buffer(buffer_of(), tree).distribute(axis).cost(ol.costs.tokens).balance()
        plans = [graph.broadcast_at(name).plan() for name in ("TP", "CP", "DP")]
        assert len({plan.digest for plan in (*plans, graph.plan())}) == 4
        there = graph.places // graph.num_microbatches == bucket
        item = int(np.flatnonzero(there if graph.cp_sizes is None else there & (graph.cp_sizes == 1))[0])
        named = graph.buffer.draw.sample_id(int(graph.items.sample[item]))
        assert "fetched by" not in str(graph.trace(str(named)))
        assert fetched in str(graph.broadcast_at("DP").trace(str(named)))


# -- plans of several encoders ------------------------------------------------------------------------


def encoder_plans(buffer, tree, **changes):
    plans = ol.strategies.vlm_hybrid(audio=ol.costs.tokens)(buffer, tree)
    return plans | changes


def test_sounds_and_images_have_encoders_of_their_own():
    sounds = {"tokens": [60] * 8, "audio_tokens": [50, 10, 20, 40, 30, 30, 20, 50], "sounds": [1] * 8}
    images = {"tokens": [70] * 4, "image_tokens": [9, 64, 25, 36], "images": [1] * 4}
    clips = {"tokens": [90] * 2, "clip_tokens": [80, 12], "clips": [1] * 2}
    buffer = ol.summary_buffer({"a": sounds, "b": images, "c": clips, "d": [30]}, context_length=128)
    tree = ol.ClientPlaceTree(dp=2, tp=2)
    plan = run_strategy(ol.strategies.vlm_hybrid(audio=ol.costs.tokens), buffer, tree)
    assert sorted(plan.encoder.pieces.length.tolist()) == [9, 12, 25, 36, 64, 80], "clips with the images"
    assert plan.audio_encoder.loads(plan.audio_encoder.pieces.length.astype(np.int64)).sum(axis=1).max() <= 70
    assert plan.audio_routing.length.sum() == 250 * tree.tp and plan.routing.length.sum() == 226 * tree.tp
    assert plan.digest != run_strategy(ol.strategies.vlm_hybrid(), buffer, tree).digest
    graphs = {name: ol.DGraph.from_buffer(buffer, tree, modality=name) for name in ("tokens", *MEDIA)}
    assert [len(graph.items) for graph in graphs.values()] == [15, 6, 2, 8]
    assert [len(graph.mix(["a", "d"]).items) for graph in graphs.values()] == [9, 0, 0, 8]
    lost = graphs["videos"].distribute("WORLD").cost(ol.costs.tokens).balance()
    for changes, why in (
        ({"encoder": lost.plan()}, "samples are lost"),
        ({"audio_encoder": encoder_plans(buffer, tree)["encoder"]}, "audio_encoder sounds"),
        ({"encoder": encoder_plans(buffer, tree)["audio_encoder"]}, "encoder images"),
        ({"video_encoder": lost.plan()}, "not a plan"),
    ):
        with pytest.raises(ol.PlanError, match=why):
            run_strategy(lambda b, t, changes=changes: encoder_plans(b, t, **changes), buffer, tree)


def test_columns_of_media_are_checked():
    with pytest.raises(ol.SpecError, match="columns of several"):
        ol.summary_buffer({"a": {"tokens": [9], "image_tokens": [3], "sounds": [1]}}, context_length=16)
    with pytest.raises(ol.SpecError, match="clip or sound has more tokens"):
        ol.summary_buffer({"a": {"tokens": [9], "audio_tokens": [30], "sounds": [1]}}, context_length=16)


# -- costs that follow the trainer's reports ----------------------------------------------------------


def by_report(lengths, metrics):
    return lengths * (1 + metrics.get("attention", 0.0) * lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cost_function_sees_what_was_reported(kind):
    told = buffer_of(kind if kind in MEDIA else "images", 2.0)
    graph = GRAPHS[kind].cost(by_report)
    assert graph.costs.tolist() == GRAPHS[kind].cost(lambda lengths: lengths).costs.tolist()
    modality = kind if kind in MEDIA else "tokens"
    heard = ol.DGraph.from_buffer(told, TREE, modality=modality).distribute(graph.axis).cost(by_report)
    assert heard.costs.tolist() == GRAPHS[kind].cost(lambda lengths: lengths * (1 + 2.0 * lengths)).costs.tolist()
    assert heard.balance().plan().digest != graph.balance().plan().digest


@pytest.mark.parametrize("metrics", [5, {"loss": "high"}, {"loss": float("nan")}, [("loss", 1.0)]])
def test_metrics_that_are_no_report_are_refused(metrics):
    with pytest.raises(ol.SpecError, match="metrics are"):
        ol.summary_buffer({"web": [5]}, context_length=8, metrics=metrics)
