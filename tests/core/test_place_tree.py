"""The mesh: where each rank stands, and what is said about a mesh that cannot be."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from overlord.core.place_tree import AXES, ClientPlaceTree, Coords
from overlord.errors import SpecError

sizes = st.integers(1, 5)
orders = st.sampled_from(["-".join(p) for p in itertools.permutations(AXES)])
trees = st.builds(ClientPlaceTree, pp=sizes, dp=sizes, cp=sizes, tp=sizes, order=orders)
levels = st.sampled_from(["PP", "DP", "dp_replicate", "DP_SHARD", "CP", "TP", "World"])
broadcasts = st.sets(st.sampled_from(["PP", "DP", "dp_replicate", "DP_SHARD", "CP", "TP"]))


@st.composite
def rich_trees(draw: st.DrawFn) -> ClientPlaceTree:
    """Trees that use every field."""
    tree = draw(trees)
    tree = dataclasses.replace(
        tree,
        dp=tree.dp * draw(st.integers(1, 3)),
        dp_replicate=tree.dp,
        ep=draw(st.sampled_from([1, tree.cp, tree.dp])),
        vpp=draw(st.integers(1, 3)) if tree.pp > 1 else 1,
    )
    if tree.vpp > 1:
        tree = dataclasses.replace(tree, microbatch_group=draw(st.none() | st.integers(1, 8)))
    module = draw(
        st.none() | st.sampled_from([ClientPlaceTree(dp=tree.world_size), ClientPlaceTree(tp=tree.world_size)])
    )
    return dataclasses.replace(tree, modules={} if module is None else {"encoder": module})


def test_default_order() -> None:
    tree = ClientPlaceTree(pp=2, dp=3, cp=4, tp=5)
    assert tree.world_size == 120
    assert tree.rank(pp=1, dp=2, cp=3, tp=4) == 4 + 5 * (3 + 4 * (2 + 3 * 1))
    assert tree.coords(0) == Coords(0, 0, 0, 0) and tree.coords(119) == Coords(pp=1, dp=2, cp=3, tp=4)
    assert ClientPlaceTree(2, 3, 4, 5) == tree


def test_another_order() -> None:
    tree = ClientPlaceTree(dp=2, tp=2, order="tp-cp-pp-dp")
    assert [tree.coords(r).dp for r in range(4)] == [0, 1, 0, 1]
    assert tree.consumers("DP", 1) == [1, 3]
    assert str(tree) == "pp=1 dp=2 cp=1 tp=2 order=tp-cp-pp-dp"


@given(trees)
def test_ranks_and_coordinates_are_one_to_one(tree: ClientPlaceTree) -> None:
    for rank in range(tree.world_size):
        assert tree.rank(**dataclasses.asdict(tree.coords(rank))) == rank


@given(trees)
def test_buckets_partition_the_ranks(tree: ClientPlaceTree) -> None:
    buckets = [tree.consumers("DP", dp) for dp in range(tree.dp)]
    assert sorted(itertools.chain(*buckets)) == list(range(tree.world_size))
    assert {len(b) for b in buckets} == {tree.world_size // tree.dp}
    assert all(tree.coords(r).dp == dp for dp, bucket in enumerate(buckets) for r in bucket)


@given(rich_trees())
def test_the_short_form_sizes_and_pickle_read_back(tree: ClientPlaceTree) -> None:
    assert ClientPlaceTree.parse(str(tree)) == tree
    assert ClientPlaceTree.from_sizes(tree.sizes()) == tree
    again = pickle.loads(pickle.dumps(tree))
    assert again == tree and hash(again) == hash(tree)


def test_parse() -> None:
    assert ClientPlaceTree.parse("dp=2,cp=2, tp=2") == ClientPlaceTree(dp=2, cp=2, tp=2)
    assert ClientPlaceTree.parse("") == ClientPlaceTree()
    assert ClientPlaceTree.from_sizes({"dp": 2}) == ClientPlaceTree(dp=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "ddp=2",
            ["mesh 'ddp=2': unknown axis 'ddp'", "get no data", "Did you mean 'dp'?", "pp, dp, cp, tp"],
        ),
        ("dp=two", ["dp is 'two', not a whole number", "dp=2"]),
        ("dp=2.5", ["dp is '2.5', not a whole number"]),
        ("dp", ["'dp' is not axis=size", "'dp=2,cp=2,tp=2'"]),
        ("dp=2,dp=4", ["dp is given twice"]),
        ("dp=0", ["dp is 0", "at least 1", "Write dp=1"]),
    ],
)
def test_parse_refuses(text: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        ClientPlaceTree.parse(text)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": -1}, ["tp is -1", "at least 1"]),
        ({"tp": 2.0}, ["tp is 2.0", "whole number"]),
        ({"tp": True}, ["tp is True"]),
        ({"tp": "2"}, ["tp is '2'"]),
        ({"order": "dp-tp"}, ["order is 'dp-tp'", "each of pp, dp, cp, tp once", "leave it out"]),
        ({"order": None}, ["order is None"]),
    ],
)
def test_sizes_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        ClientPlaceTree(**fields)
    for word in words:
        assert word in str(caught.value)


def test_coordinates_outside_are_refused() -> None:
    tree = ClientPlaceTree(dp=2)
    with pytest.raises(SpecError, match=r"rank 2 is not in the mesh .* ranks 0 to 1; it would get no data"):
        tree.coords(2)
    with pytest.raises(SpecError, match=r"dp=2 is not in the mesh .*: dp goes from 0 to 1"):
        tree.rank(dp=2)


def test_world_size() -> None:
    tree = ClientPlaceTree(dp=4, cp=2, tp=2)
    tree.check_world_size(16)
    with pytest.raises(SpecError) as caught:
        tree.check_world_size(8)
    assert str(caught.value) == (
        "mesh pp=1 dp=4 cp=2 tp=2 has 16 ranks but the world has 8; no rank would consume some of "
        "the buckets, and the other ranks would wait. Make pp*dp*cp*tp equal to the number of ranks; "
        "dp=2 would fit."
    )
    with pytest.raises(SpecError, match="world has 18; ranks beyond the mesh would get no data"):
        tree.check_world_size(18)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClientPlaceTree().dp = 3  # type: ignore[misc]


def test_megatron_and_torchtitan_defaults_agree() -> None:
    megatron = ClientPlaceTree.from_megatron(world_size=120, tp=5, cp=4, pp=2)
    assert megatron == ClientPlaceTree(pp=2, dp=3, cp=4, tp=5)
    for pp, dp, cp, tp in itertools.product(range(2), range(3), range(4), range(5)):
        rank = tp + 5 * (cp + 4 * (dp + 3 * pp))
        assert megatron.rank(pp=pp, dp=dp, cp=cp, tp=tp) == rank == ((pp * 3 + dp) * 4 + cp) * 5 + tp
        assert megatron.bucket_of("CP", rank) == cp + 4 * dp


def test_megatrons_other_order() -> None:
    tree = ClientPlaceTree.from_megatron("tp-cp-ep-pp-dp", tp=2, cp=3, ep=6, dp=2, pp=5, vpp=2)
    assert (tree.ep, tree.vpp, tree.microbatch_multiple, tree.is_lockstep) == (6, 2, 5, True)
    for pp, dp, cp, tp in itertools.product(range(5), range(2), range(3), range(2)):
        assert tree.rank(pp=pp, dp=dp, cp=cp, tp=tp) == tp + 2 * (cp + 3 * (pp + 5 * dp))
    assert ClientPlaceTree.from_megatron("tp-dp", world_size=8, tp=2) == ClientPlaceTree(dp=4, tp=2)
    assert ClientPlaceTree.from_megatron() == ClientPlaceTree()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"world_size": 10, "tp": 4}, ["world_size is 10", "multiple of tp*cp*pp = 4*1*1 = 4", "no data"]),
        ({"world_size": 8, "dp": 3}, ["pp*dp*cp*tp is 3, but world_size is 8", "Leave dp out"]),
        ({"order": "tp-xp"}, ["order is 'tp-xp'", "fastest first", "'tp-cp-ep-dp-pp'"]),
        ({"order": "tp-tp"}, ["order is 'tp-tp'", "each once"]),
        ({"order": 3}, ["order is 3"]),
        ({"order": "tp-dp", "cp": 2}, ["without cp, but cp is 2", "Name cp in order"]),
        ({"order": "tp", "world_size": 2}, ["without dp", "Name dp"]),
        ({"tp": 0}, ["tp is 0", "at least 1"]),
        ({"world_size": "8"}, ["world_size is '8'", "whole number"]),
        ({"ep": 3, "dp": 4}, ["ep is 3", "dp*cp is 4"]),
    ],
)
def test_megatron_settings_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        ClientPlaceTree.from_megatron(**settings)
    for word in words:
        assert word in str(caught.value)


@given(rich_trees(), levels)
def test_every_rank_is_in_one_bucket_of_each_axis(tree: ClientPlaceTree, axis: str) -> None:
    nodes = tree.nodes(axis)
    assert len(nodes) == tree.num_buckets(axis) and len({len(ranks) for ranks in nodes}) == 1
    assert sorted(itertools.chain(*nodes)) == list(range(tree.world_size))
    assert nodes == [tree.consumers(axis, bucket) for bucket in range(len(nodes))]
    buckets = tree.buckets_of(axis)
    assert buckets.dtype == np.int32
    assert buckets.tolist() == [tree.bucket_of(axis, rank) for rank in range(tree.world_size)]
    assert all(rank in nodes[bucket] for rank, bucket in enumerate(buckets))


@given(rich_trees())
def test_coordinates_of_all_ranks_at_once(tree: ClientPlaceTree) -> None:
    at = tree.coordinates()
    assert all(values.dtype == np.int32 and values.shape == (tree.world_size,) for values in at.values())
    for rank in range(tree.world_size):
        here = tree.coords(rank)
        assert Coords(*(int(at[axis][rank]) for axis in AXES)) == here
        assert (at["dp_replicate"][rank], at["dp_shard"][rank]) == divmod(here.dp, tree.dp_shard)
        assert tree.grid()[here.pp, here.dp, here.cp, here.tp] == rank


def test_buckets_of_the_paper() -> None:
    tree = ClientPlaceTree(pp=2, dp=2, cp=2, tp=2)
    assert [tree.num_buckets(axis) for axis in ("DP", "CP", "WORLD", "PP", "TP")] == [2, 4, 16, 2, 8]
    assert tree.consumers("CP", 3) == [6, 7, 14, 15]
    assert tree.consumers("WORLD", 5) == [5]
    assert tree.consumers("pp", 1) == list(range(8, 16))
    assert [tree.head(bucket) for bucket in range(2)] == [0, 4]


@given(rich_trees(), levels, broadcasts)
@example(ClientPlaceTree(dp=2, dp_replicate=2), "DP_SHARD", {"dp_replicate"})  # its buckets are those of all dp
def test_broadcasts_reach_every_rank(tree: ClientPlaceTree, axis: str, broadcast: set[str]) -> None:
    fetchers = tree.fetchers(axis, broadcast)
    assert fetchers == [rank for rank in range(tree.world_size) if tree.fetches(rank, broadcast)]
    shared = {name.lower() for name in broadcast}
    shared |= {"dp_replicate", "dp_shard"} if "dp" in shared else set()
    own = [values for name, values in tree.coordinates().items() if name not in shared | {"dp"}]
    groups = list(zip(*(values.tolist() for values in own), strict=True)) or [()] * tree.world_size
    assert len(fetchers) == len(set(groups)) == len({groups[rank] for rank in fetchers})
    for rank in fetchers[:4]:
        group = [other for other in range(tree.world_size) if groups[other] == groups[rank]]
        assert tree.fetched_buckets(axis, rank, broadcast) == sorted({tree.bucket_of(axis, r) for r in group})


def test_fetching_ranks() -> None:
    tree = ClientPlaceTree(pp=2, dp=2, cp=2, tp=2)
    assert tree.fetchers() == list(range(0, 16, 2))
    assert tree.fetchers(broadcast=("TP", "CP")) == [0, 4, 8, 12]
    assert tree.fetchers(broadcast=["dp"]) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert tree.fetchers(broadcast=()) == list(range(16))
    assert tree.fetchers(broadcast="TP") == tree.fetchers()
    assert tree.fetched_buckets("DP", 4) == [1] and tree.fetched_buckets("DP", 5) == []
    assert tree.fetched_buckets("WORLD", 4) == [4, 5]
    assert tree.fetched_buckets("DP", 0, ("TP", "CP", "DP")) == [0, 1]


def test_modules() -> None:
    tree = ClientPlaceTree(pp=2, dp=2, tp=2)
    assert tree.module() is tree.module("backbone") is tree
    assert tree.module("encoder") == ClientPlaceTree(dp=8)
    half = ClientPlaceTree(dp=4, tp=2)
    mixed = ClientPlaceTree(dp=8, modules={"vision": half, "audio": ClientPlaceTree(dp=8)})
    assert mixed.module("vision") == half and mixed.module_names == ("audio", "vision")
    assert mixed == ClientPlaceTree(dp=8, modules={"audio": ClientPlaceTree(dp=8), "vision": half})
    assert {mixed: 1}[dataclasses.replace(mixed)] == 1
    assert str(mixed) == "pp=1 dp=8 cp=1 tp=1 audio.dp=8 vision.dp=4 vision.tp=2"
    assert ClientPlaceTree.from_sizes({"dp": 8, "modules": {"vision": "dp=4,tp=2", "audio": {"dp": 8}}}) == mixed


def test_extras_are_shown_only_where_used() -> None:
    assert str(ClientPlaceTree(dp=4, ep=2, dp_replicate=2)) == "pp=1 dp=4 cp=1 tp=1 dp_replicate=2 ep=2"
    assert ClientPlaceTree(dp=4).sizes() == {"pp": 1, "dp": 4, "cp": 1, "tp": 1}
    tree = ClientPlaceTree.parse("pp=2,vpp=2,microbatch_group=4")
    assert tree.microbatch_multiple == 4 and str(tree).endswith("vpp=2 microbatch_group=4")
    assert ClientPlaceTree(pp=2).microbatch_multiple == 1
    assert ClientPlaceTree(dp=6, dp_replicate=2).dp_shard == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dp": 4, "dp_replicate": 3}, ["dp_replicate is 3", "dp is 4", "dp counts all replicas"]),
        ({"ep": 0}, ["ep is 0"]),
        ({"dp": 2, "cp": 2, "ep": 3}, ["ep is 3", "dp*cp is 4", "divides"]),
        ({"vpp": 2}, ["vpp is 2, but pp is 1", "Leave vpp out"]),
        ({"pp": 2, "microbatch_group": 2}, ["microbatch_group is 2, but vpp is 1"]),
        ({"pp": 2, "vpp": 2, "microbatch_group": 0}, ["microbatch_group is 0"]),
        ({"dp": 8, "modules": {"encoder": ClientPlaceTree(dp=4)}}, ["modules['encoder']", "4 ranks", "(dp=8)"]),
        ({"modules": {"backbone": ClientPlaceTree()}}, ["'backbone' is the tree itself"]),
        ({"modules": {"a b": ClientPlaceTree()}}, ["the name 'a b'", "one word"]),
        ({"modules": {"encoder": 8}}, ["modules['encoder'] is 8", "ClientPlaceTree(dp=8)"]),
        ({"modules": 8}, ["modules is 8", "mapping"]),
        (
            {"modules": {"encoder": ClientPlaceTree(modules={"encoder": ClientPlaceTree()})}},
            ["without modules of its own"],
        ),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        ClientPlaceTree(**fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda tree: tree.nodes("DDP"), ["axis 'DDP'", "Did you mean 'DP'?", "WORLD"]),
        (lambda tree: tree.num_buckets("EP"), ["axis 'EP'", "no data of its own"]),
        (lambda tree: tree.buckets_of(None), ["axis None"]),
        (lambda tree: tree.bucket_of("DP", 99), ["rank 99 is not in the mesh"]),
        (lambda tree: tree.bucket_of("DP", "x"), ["rank is 'x', not a whole number"]),
        (lambda tree: tree.consumers("CP", 4), ["bucket 4", "CP buckets 0 to 3", "no rank would consume"]),
        (lambda tree: tree.head(2), ["dp=2 is not in the mesh"]),
        (lambda tree: tree.fetchers("XP"), ["axis 'XP'"]),
        (lambda tree: tree.fetchers(broadcast=("WORLD",)), ["axis 'WORLD'"]),
        (lambda tree: tree.fetches(0, 3), ["broadcast is 3", "('TP',)"]),
        (lambda tree: tree.module("encodr"), ["module 'encodr'", "Did you mean 'encoder'?", "backbone, encoder"]),
        (lambda tree: tree.with_axis(xp=2), ["axis 'xp'", "Known axes"]),
        (lambda tree: tree.with_axis(dp=0), ["dp is 0"]),
        (lambda tree: tree.grow("DP", 0), ["grow dp by 0", "1 or more"]),
        (lambda tree: tree.grow("WORLD", 1), ["axis 'WORLD'"]),
        (lambda tree: tree.shrink("DP", 2), ["shrink dp by 2 would leave dp=0", "by 1 at most"]),
        (lambda tree: tree.shrink("PP"), ["pp cannot shrink any more"]),
        (lambda tree: tree.from_sizes({"modules": 3}), ["modules is 3, not a mapping"]),
        (lambda tree: tree.parse("encoder.xp=3"), ["module 'encoder': unknown axis 'xp'"]),
        (lambda tree: tree.parse("modules=3"), ["not axis=size"]),
        (lambda tree: tree.parse(None), ["mesh is None, not text", "'dp=2,cp=2,tp=2'"]),
        (lambda tree: tree.parse(b"dp=2"), ["mesh is b'dp=2', not text"]),
        (lambda tree: tree.from_sizes([1]), ["mesh is [1], not a mapping", "{dp: 2, tp: 2}"]),
        (lambda tree: tree.from_sizes("dp=2", what="job.yaml"), ["job.yaml is 'dp=2', not a mapping"]),
        (lambda tree: tree.from_sizes({5: 2}), ["unknown axis 5"]),
        (lambda tree: tree.module([]), ["module [] is not in the mesh", "no rank would consume"]),
        (lambda tree: tree.check_world_size(None), ["world_size is None", "8 ranks", "Give the number of ranks"]),
        (lambda tree: tree.check_world_size("x"), ["world_size is 'x'"]),
        (lambda tree: tree.check_world_size([]), ["world_size is []"]),
        (lambda tree: tree.check_world_size(8.0), ["world_size is 8.0"]),
        (lambda tree: tree.check_world_size(True), ["world_size is True"]),
    ],
)
def test_wrong_questions_are_answered_in_words(wrong: Any, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        wrong(ClientPlaceTree(dp=2, cp=2, tp=2))
    for word in words:
        assert word in str(caught.value)


@given(trees, st.sampled_from(AXES), st.integers(1, 4))
def test_edits_go_back(tree: ClientPlaceTree, axis: str, by: int) -> None:
    tree = dataclasses.replace(tree, modules={"encoder": ClientPlaceTree(dp=tree.world_size)})
    grown = tree.grow(axis.upper(), by)
    assert getattr(grown, axis) == getattr(tree, axis) + by and grown.order == tree.order
    assert grown.module("encoder") == ClientPlaceTree(dp=grown.world_size)
    assert grown.shrink(axis, by) == tree
    assert tree.with_axis(**{axis: getattr(grown, axis)}) == grown


def test_edits_and_modules() -> None:
    plain = ClientPlaceTree(dp=4, tp=2)
    assert plain.grow("dp", 2) == ClientPlaceTree(dp=6, tp=2)
    assert plain.grow("dp", 2).module("encoder").dp == 12 and plain.grow("dp").module_names == ()
    half = ClientPlaceTree(dp=4, tp=2)
    tree = dataclasses.replace(plain, modules={"encoder": half})
    with pytest.raises(SpecError, match=r"with 16 ranks instead of 8, modules\['encoder'\] .* no longer fits"):
        tree.with_axis(dp=8)
    assert tree.with_axis(dp=8, tp=1).module("encoder") == half
    larger = ClientPlaceTree(dp=8, tp=2)
    assert tree.with_axis(dp=8, modules={"encoder": larger}).module("encoder") == larger
    sharded = dataclasses.replace(plain, modules={"encoder": ClientPlaceTree(dp=8, dp_replicate=4)})
    with pytest.raises(SpecError, match=r"modules\['encoder'\] would follow to 6 ranks: mesh: dp_replicate is 4"):
        sharded.with_axis(dp=3)


def test_a_large_mesh_is_answered_by_arrays() -> None:
    tree = ClientPlaceTree(pp=8, dp=64, cp=8, tp=8, order="dp-pp-cp-tp")
    assert tree.world_size == 32768
    assert np.bincount(tree.buckets_of("CP")).tolist() == [64] * 512
    assert np.array_equal(tree.buckets_of("CP"), tree.coordinates()["cp"] + 8 * tree.coordinates()["dp"])
    assert len(tree.fetchers()) == 4096
