"""Every argument of `balance` is used or refused, on every axis and for every kind of items."""

from __future__ import annotations

import numpy as np
import pytest

import overlord as ol

TREE = ol.ClientPlaceTree(dp=4, cp=2)
RNG = np.random.default_rng(5)
LENGTHS = np.minimum(RNG.lognormal(6, 1, 96).astype(int) + 1, 4000)
KINDS = ["DP", "CP", "images"]


def graph_of(kind: str, group_size: int | None = None) -> ol.DGraph:
    """Return a costed graph of tokens over DP or CP, or of images over WORLD."""
    images = {"tokens": LENGTHS + 5, "image_tokens": LENGTHS, "images": np.ones(len(LENGTHS), int)}
    buffer = ol.summary_buffer({"coyo": images}, context_length=4096)
    graph = ol.DGraph.from_buffer(buffer, TREE, modality="images" if kind == "images" else "tokens").mix()
    graph = graph.distribute({"images": "WORLD"}.get(kind, kind), group_size=group_size)
    return graph.cost(ol.costs.tokens if kind == "images" else ol.costs.causal_lm(layers=2, hidden=64))


def digest_of(kind: str, *given, group_size: int | None = None, **named) -> str:
    return graph_of(kind, group_size).balance(*given, **named).plan().digest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "nonsense", [{"method": "nonsense"}, {"method": 5}, {"objective": "nonsense"}, {"level": "nonsense"}], ids=str
)
def test_nonsense_is_refused(kind, nonsense):
    with pytest.raises(ol.SpecError, match=r"nonsense|method is 5"):
        digest_of(kind, **nonsense)


@pytest.mark.parametrize("kind", KINDS)
def test_the_method_decides(kind):
    """Also over CP and on images."""
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


def test_the_objective_over_cp_is_what_the_counts_say():
    assert digest_of("CP") == digest_of("CP", objective="lockstep") == digest_of("CP", equal_counts=True)
    assert digest_of("CP", objective="sum") == digest_of("CP", equal_counts=False) != digest_of("CP")
    assert digest_of("CP", level="interleaved") == digest_of("CP")


def test_groups_are_used():
    for kind in ("DP", "images"):
        assert digest_of(kind, group_size=2) != digest_of(kind), kind
        assert digest_of(kind, group_size=99) == digest_of(kind), "one group of all"


@pytest.mark.parametrize(
    ("kind", "given", "why"),
    [
        ("CP", {"objective": "pipeline"}, "objective is 'pipeline'"),
        ("CP", {"objective": "sum", "equal_counts": True}, "objective is 'sum'.*not both"),
        ("CP", {"objective": "lockstep", "equal_counts": False}, "objective is 'lockstep'"),
        ("CP", {"level": "inter"}, "level is 'inter'.*fills its own"),
        ("CP", {"group_size": 2}, "group_size is 2.*blocks of any ranks"),
        ("DP", {"equal_counts": True}, "equal_counts is True.*as many microbatches of tokens over DP"),
        ("images", {"equal_counts": False}, "equal_counts is False"),
        ("images", {"objective": "sum"}, "objective is 'sum'.*one microbatch"),
        ("images", {"level": "intra"}, "level is 'intra'.*one microbatch"),
    ],
)
def test_what_would_be_ignored_is_refused(kind, given, why):
    with pytest.raises(ol.SpecError, match=f"balance: {why}"):
        digest_of(kind, **given)


def test_images_near_their_tokens_have_no_groups():
    buffer = graph_of("DP").buffer
    tokens = ol.DGraph.from_buffer(buffer, TREE).distribute("DP").cost(ol.costs.tokens).balance().plan()
    images = ol.DGraph.from_buffer(buffer, TREE, modality="images").distribute("WORLD", group_size=2)
    with pytest.raises(ol.SpecError, match=r"group_size is 2.*near their tokens"):
        images.cost(ol.costs.tokens).toward(tokens).balance()
