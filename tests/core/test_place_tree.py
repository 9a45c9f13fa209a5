"""The mesh: where each rank stands, and what is said about a mesh that cannot be."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.core.place_tree import AXES, ClientPlaceTree, Coords
from overlord.errors import SpecError

sizes = st.integers(1, 5)
orders = st.sampled_from(["-".join(p) for p in itertools.permutations(AXES)])
trees = st.builds(ClientPlaceTree, pp=sizes, dp=sizes, cp=sizes, tp=sizes, order=orders)


def test_default_order() -> None:
    tree = ClientPlaceTree(pp=2, dp=3, cp=4, tp=5)
    assert tree.world_size == 120
    assert tree.rank(pp=1, dp=2, cp=3, tp=4) == 4 + 5 * (3 + 4 * (2 + 3 * 1))
    assert tree.coords(0) == Coords(0, 0, 0, 0) and tree.coords(119) == Coords(pp=1, dp=2, cp=3, tp=4)
    assert ClientPlaceTree(2, 3, 4, 5) == tree


def test_another_order() -> None:
    tree = ClientPlaceTree(dp=2, tp=2, order="tp-cp-pp-dp")
    assert [tree.coords(r).dp for r in range(4)] == [0, 1, 0, 1]
    assert tree.ranks_of_bucket(1) == [1, 3]
    assert str(tree) == "pp=1 dp=2 cp=1 tp=2 order=tp-cp-pp-dp"


@given(trees)
def test_ranks_and_coordinates_are_one_to_one(tree: ClientPlaceTree) -> None:
    for rank in range(tree.world_size):
        assert tree.rank(**dataclasses.asdict(tree.coords(rank))) == rank


@given(trees)
def test_buckets_partition_the_ranks(tree: ClientPlaceTree) -> None:
    buckets = [tree.ranks_of_bucket(dp) for dp in range(tree.dp)]
    assert sorted(itertools.chain(*buckets)) == list(range(tree.world_size))
    assert {len(b) for b in buckets} == {tree.world_size // tree.dp}
    assert all(tree.coords(r).dp == dp for dp, bucket in enumerate(buckets) for r in bucket)


@given(trees)
def test_the_short_form_reads_back(tree: ClientPlaceTree) -> None:
    assert ClientPlaceTree.parse(str(tree)) == tree


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
        "mesh pp=1 dp=4 cp=2 tp=2 has 16 ranks but the world has 8; some buckets would have nobody to "
        "consume them and the others would wait. Make pp*dp*cp*tp equal to the number of ranks; "
        "dp=2 would fit."
    )
    with pytest.raises(SpecError, match="world has 18; ranks beyond the mesh would get no data"):
        tree.check_world_size(18)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClientPlaceTree().dp = 3  # type: ignore[misc]


def test_draw() -> None:
    assert ClientPlaceTree(pp=2, dp=2).draw().splitlines() == [
        "pp=2 dp=2 cp=1 tp=1 (4 ranks)",
        "|-- dp 0: ranks 0, 2",
        "`-- dp 1: ranks 1, 3",
    ]
    assert ClientPlaceTree().draw().splitlines() == ["pp=1 dp=1 cp=1 tp=1 (1 rank)", "`-- dp 0: ranks 0"]
    many = ClientPlaceTree(dp=1024).draw().splitlines()
    assert len(many) == 14 and many[9] == "|   .. 1012 more" and many[-1] == "`-- dp 1023: ranks 1023"
