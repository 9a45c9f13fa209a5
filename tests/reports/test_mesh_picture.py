"""The mesh drawn: today's text for flat meshes, nested levels, and an SVG that stands alone."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.core.place_tree import DRAWN_LINES, ClientPlaceTree
from overlord.reports.mesh_picture import DRAWN_RANKS

SVG = "{http://www.w3.org/2000/svg}"


def test_flat_meshes_have_one_line_a_bucket() -> None:
    assert ClientPlaceTree().draw().splitlines() == ["pp=1 dp=1 cp=1 tp=1 (1 rank)", "`-- dp 0: ranks 0"]
    assert ClientPlaceTree(dp=2, tp=2, order="tp-pp-dp-cp").draw().splitlines()[1:] == [
        "|-- dp 0: ranks 0, 2",
        "`-- dp 1: ranks 1, 3",
    ]
    assert len(ClientPlaceTree(dp=16).draw().splitlines()) == 17
    many = ClientPlaceTree(dp=1024).draw().splitlines()
    assert len(many) == 14 and many[9] == "|   .. 1012 more" and many[-1] == "`-- dp 1023: ranks 1023"


def test_levels_are_nested() -> None:
    tree = ClientPlaceTree(pp=2, dp=2, cp=2, tp=2, modules={"encoder": ClientPlaceTree(dp=16)})
    assert tree.draw().splitlines() == [
        "pp=2 dp=2 cp=2 tp=2 encoder.dp=16 (16 ranks)",
        "|-- pp 0: ranks 0-7",
        "|   |-- dp 0: ranks 0-3",
        "|   |   |-- cp 0: ranks 0-1",
        "|   |   `-- cp 1: ranks 2-3",
        "|   `-- dp 1: ranks 4-7",
        "|       |-- cp 0: ranks 4-5",
        "|       `-- cp 1: ranks 6-7",
        "`-- pp 1: ranks 8-15",
        "    |-- dp 0: ranks 8-11",
        "    |   |-- cp 0: ranks 8-9",
        "    |   `-- cp 1: ranks 10-11",
        "    `-- dp 1: ranks 12-15",
        "        |-- cp 0: ranks 12-13",
        "        `-- cp 1: ranks 14-15",
        "module encoder: pp=1 dp=16 cp=1 tp=1",
    ]


def test_large_meshes_open_the_first_node_of_a_level() -> None:
    assert ClientPlaceTree(pp=4, dp=64, cp=4, tp=8, dp_replicate=8).draw().splitlines() == [
        "pp=4 dp=64 cp=4 tp=8 dp_replicate=8 (8192 ranks)",
        "|-- pp 0: ranks 0-2047",
        "|   |-- replicate 0: ranks 0-255",
        "|   |   |-- dp 0: ranks 0-31",
        "|   |   |   |-- cp 0: ranks 0-7",
        "|   |   |   |-- cp 1: ranks 8-15",
        "|   |   |   |-- cp 2: ranks 16-23",
        "|   |   |   `-- cp 3: ranks 24-31",
        "|   |   |-- dp 1: ranks 32-63",
        "|   |   |   .. 5 more",
        "|   |   `-- dp 7: ranks 224-255",
        "|   |-- replicate 1: ranks 256-511",
        "|   |   .. 5 more",
        "|   `-- replicate 7: ranks 1792-2047",
        "|-- pp 1: ranks 2048-4095",
        "|-- pp 2: ranks 4096-6143",
        "`-- pp 3: ranks 6144-8191",
    ]


def test_buckets_of_the_second_replica_go_on_counting() -> None:
    lines = ClientPlaceTree(dp=4, dp_replicate=2).draw().splitlines()
    assert lines[4:] == ["`-- replicate 1: ranks 2-3", "    |-- dp 2: ranks 2", "    `-- dp 3: ranks 3"]
    assert ClientPlaceTree(dp=2, dp_replicate=2).draw().splitlines()[1:] == ["|-- dp 0: ranks 0", "`-- dp 1: ranks 1"]


def test_scattered_ranks_are_cut() -> None:
    line = ClientPlaceTree(dp=2, tp=64, order="pp-cp-tp-dp").draw().splitlines()[1]
    assert line == "|-- dp 0: ranks 0, 2, 4, 6, 8, 10, 12, 14, .. 126"


sizes = st.sampled_from([1, 2, 3, 8, 30])


@settings(max_examples=50, deadline=None)
@given(st.builds(ClientPlaceTree, pp=sizes, dp=sizes, cp=sizes, tp=sizes))
def test_drawings_of_any_mesh_stay_small_and_well_formed(tree: ClientPlaceTree) -> None:
    assert len(tree.draw().splitlines()) <= DRAWN_LINES + 1
    root = ET.fromstring(tree.to_svg())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    cells = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "ol-cell"]
    assert len(cells) == tree.world_size if tree.world_size <= DRAWN_RANKS else 1 <= len(cells) <= DRAWN_RANKS
    for rect in root.iter(f"{SVG}rect"):
        assert 0 <= float(rect.get("x", 0)) <= width - float(rect.attrib["width"])
        assert 0 <= float(rect.get("y", 0)) <= height - float(rect.attrib["height"])
    assert {part.get("class") for part in root.iter(f"{SVG}rect")} >= {"ol-page", "ol-cell"}


def test_svg_shows_every_rank_of_a_small_mesh_in_nested_boxes() -> None:
    tree = ClientPlaceTree(pp=2, dp=2, cp=2, tp=2, order="dp-pp-tp-cp", ep=2)
    root = ET.fromstring(tree.to_svg())
    ranks = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "ol-rank"]
    assert ranks == [str(rank) for rank in tree.grid().ravel()]
    stage = root.find(f"{SVG}g")
    assert stage is not None
    inside = [group.findtext(f"{SVG}title") for group in stage.iter(f"{SVG}g")]
    assert inside[0] == "pp 0: ranks 0-3, 8-11" and inside[1] == "dp 0: ranks 0-3" and len(inside) == 7


def test_svg_stands_alone_and_can_be_read_aloud() -> None:
    tree = ClientPlaceTree(pp=2, dp=64, tp=8, vpp=2, ep=4, modules={"encoder": ClientPlaceTree(dp=1024)})
    svg = tree.to_svg()
    root = ET.fromstring(svg)
    assert [child.tag for child in root][:3] == [f"{SVG}title", f"{SVG}desc", f"{SVG}style"]
    named = {root[0].attrib["id"], root[1].attrib["id"]}
    assert root.attrib["role"] == "img" and set(root.attrib["aria-labelledby"].split()) == named
    assert root[0].text == f"Mesh {tree}"
    for words in ("1024 ranks in 2 pipeline stages, each of 64 data-parallel buckets", "lockstep", "multiples of 2"):
        assert words in (root[1].text or "")
    assert "+60 more, to dp 63" in svg and "module encoder: pp=1 dp=1024 cp=1 tp=1" in svg
    assert "prefers-color-scheme:dark" in svg
    for foreign in ("<script", "href", "url(", "@import", "@font-face"):
        assert foreign not in svg
    assert tree._repr_svg_() == svg


@pytest.mark.parametrize("tree", [ClientPlaceTree(), ClientPlaceTree(dp=4)])
def test_an_encoder_that_was_not_given_is_named_as_such(tree: ClientPlaceTree) -> None:
    assert f"module encoder: pp=1 dp={tree.dp} cp=1 tp=1 (not given: dp over all ranks)" in tree.to_svg()
