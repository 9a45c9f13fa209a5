"""Parquet: columns, sizes, footers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numba.core import event as numba_events

from overlord.core.ragged import Ragged
from overlord.errors import ReaderError, SourceError
from overlord.readers.parquet_footer import read_footer, warm_footer

from .conftest import read_all

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def test_every_column_type_becomes_what_numpy_can_hold(tmp_path: Path, open_source):
    table = pa.table(
        {
            "text": pa.array(["a", "", "bcé"]),
            "large": pa.array([b"x", b"yy", b""], pa.large_binary()),
            "word": pa.array(["u", "v", "u"]).dictionary_encode(),
            "ids": pa.array([[1, 2], [], [3]], pa.large_list(pa.int32())),
            "box": pa.array([[0.5, 1], [2, 3], [4, 5]], pa.list_(pa.float32(), 2)),
            "score": pa.array([0.5, 1.5, 2.5], pa.float32()),
            "small": pa.array([1, 2, 3], pa.uint8()),
            "flag": pa.array([True, False, True]),
            "when": pa.array([1, 2, 3], pa.timestamp("ms")),
            "image": pa.array([{"bytes": b"jpg", "path": None}] * 3, IMAGE),
            "meta": pa.array([{"lang": "en", "n": {"deep": 4}}] * 3),
            "messages": pa.array([[{"role": "user", "content": "é"}], [], [{"role": "x", "content": "y"}]]),
            "images": pa.array([[{"bytes": b"\xff", "path": "p"}]] * 3, pa.list_(IMAGE)),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet", columns=[*table.column_names, "meta.lang", "meta.n.deep"])
    row = read_all(source)[0]
    assert row == {
        "text": b"a",
        "large": b"x",
        "word": b"u",
        "ids": [1, 2],
        "box": [0.5, 1.0],
        "score": 0.5,
        "small": 1,
        "flag": True,
        "when": 1,
        "image": b"jpg",
        "meta": b'{"lang":"en","n":{"deep":4}}',
        "messages": '[{"role":"user","content":"é"}]'.encode(),
        "images": b"\xff",
        "__sizes__.images": [1],
        "meta.lang": b"en",
        "meta.n.deep": 4,
        "__bad__": False,
    }
    (batch,) = source.stream(0, 0, batch_rows=10)
    assert isinstance(batch["ids"], Ragged) and batch["ids"].values.dtype == np.int32
    assert batch["score"].dtype == np.float32
    assert source.kinds()["messages"] == "json" and source.kinds()["box"] == "float_list"


def test_a_null_is_a_bad_row_with_an_empty_value(tmp_path: Path, open_source):
    table = pa.table(
        {
            "text": ["a", None, "c", "d"],
            "ids": pa.array([[1], [2], None, [4, None]], pa.list_(pa.int64())),
            "image": pa.array([{"bytes": b"1"}, {"bytes": b"2"}, {"bytes": b"3"}, None], IMAGE),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    rows = read_all(open_source(tmp_path / "x.parquet"))
    assert [row["text"] for row in rows] == [b"a", b"", b"c", b"d"]
    assert [row["ids"] for row in rows] == [[1], [2], [], [4, 0]]
    assert [row["image"] for row in rows] == [b"1", b"2", b"3", b""]
    assert [row["__bad__"] for row in rows] == [False, True, True, True]


def test_a_list_of_binary_is_its_bytes_and_their_sizes(tmp_path: Path, open_source):
    lists = [[b"a", b"bcd"], [], None, [b"", b"e"], [b"f", None], [b"gh"]]
    images = [row and [None if i is None else {"bytes": i, "path": "p"} for i in row] for row in lists]
    table = pa.table(
        {
            "raw": pa.array(lists, pa.list_(pa.binary())),
            "images": pa.array(images, pa.large_list(IMAGE)),
            "words": pa.array([["x"]] * 6, pa.list_(pa.string())),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet")
    assert source.kinds() == {"raw": "bytes_list", "images": "bytes_list", "words": "json"}
    rows = read_all(source, batch_rows=4)  # the second batch is a slice: its offsets do not begin at 0
    assert [row["raw"] for row in rows] == [b"abcd", b"", b"", b"e", b"f", b"gh"]
    assert [row["__sizes__.raw"] for row in rows] == [[1, 3], [], [], [0, 1], [1, 0], [2]]
    assert [row["__bad__"] for row in rows] == [False, False, False, False, True, False]  # no list: no items, no fault
    assert [row["__sizes__.images"] for row in rows] == [row["__sizes__.raw"] for row in rows]
    assert [row["images"] for row in rows] == [row["raw"] for row in rows]


def test_bytes_of_a_block_count_only_the_columns_that_are_read(tmp_path: Path, open_source):
    image = [{"bytes": bytes([n]) * 1000, "path": "p" * 50_000} for n in range(10)]
    pq.write_table(pa.table({"id": list(range(10)), "image": pa.array(image, IMAGE)}), tmp_path / "x.parquet")
    size = open_source(tmp_path / "x.parquet", columns=["image"]).blocks(0).bytes[0]
    assert 10_000 <= size < 13_000


@pytest.mark.parametrize("groups", [1, 14, 15, 16, 200])
def test_a_cut_footer_says_the_same_as_the_whole(groups: int, tmp_path: Path):
    path = tmp_path / "x.parquet"
    table = pa.table({f"c{c}": np.arange(groups * 3) for c in range(12)})
    pq.write_table(table, path, row_group_size=3)
    whole = pq.read_metadata(path)
    with pa.memory_map(str(path)) as native:
        footer = read_footer(native, path.stat().st_size)
    assert footer.num_row_groups == whole.num_row_groups == groups
    for group in range(groups):
        part = footer.metadata(group, group + 1)
        assert part.row_group(0).to_dict() == whole.row_group(group).to_dict()
        assert part.schema.equals(whole.schema)


def test_a_footer_is_read_by_the_kernels_that_were_loaded_for_it(tmp_path: Path):
    """Bytes of a file are read-only, for which numba compiles other code."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a"] * 100}), path)
    warm_footer()
    seen = numba_events.RecordingListener()
    with numba_events.install_listener("numba:compile", seen), pa.memory_map(str(path)) as native:
        read_footer(native, path.stat().st_size)
    assert not seen.buffer


def test_a_damaged_footer_is_named(tmp_path: Path, open_source):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a"] * 100}), path)
    good = path.read_bytes()
    for broken, reason in (
        (good[:-20], "it does not end as a Parquet file does"),
        (b"PAR1", "too short to be a Parquet file"),
        (good[:-8] + b"\xff\xff\xff\x7fPAR1", "its footer claims 2147483647 bytes"),
        (good[:-4] + b"PARE", "its footer is encrypted"),
    ):
        path.write_bytes(broken)
        with pytest.raises(SourceError, match=r"x.parquet") as caught:
            open_source(path, columns=["text"]).blocks(0)
        assert reason in str(caught.value) and "Copy the file again" in str(caught.value)


def test_no_damage_to_a_footer_crashes_the_process(tmp_path: Path, open_source):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a"] * 100, "n": range(100)}), path, row_group_size=10)
    good = path.read_bytes()
    length = int.from_bytes(good[-8:-4], "little")
    random = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(good)
        data[len(data) - 8 - int(random.integers(1, length))] = int(random.integers(0, 256))
        path.write_bytes(data)
        try:
            open_source(path, columns=["text"]).blocks(0)
        except SourceError:
            continue


def test_a_damaged_page_stops_the_stream_and_is_no_bad_row(tmp_path: Path, open_source):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": [str(n) * 50 for n in range(1000)]}), path, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[200:4000] = b"\xff" * 3800
    path.write_bytes(data)
    source = open_source(path, columns=["text"])
    with pytest.raises(ReaderError, match=r"x.parquet cannot be read at row 0 of block 0"):
        read_all(source)


def test_a_missing_column_is_named_with_what_there_is(tmp_path: Path, open_source):
    pq.write_table(pa.table({"text": ["a"], "caption": ["b"]}), tmp_path / "x.parquet")
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path / "x.parquet", columns=["captoin"]).blocks(0)
    assert "no column 'captoin' (it has: text, caption)" in str(caught.value)
    assert "Did you mean 'caption'?" in str(caught.value)


def test_a_column_missing_in_a_later_file_is_found_when_it_is_indexed(tmp_path: Path, open_source):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "1.parquet")
    source = open_source(tmp_path, columns=["text"])
    source.blocks(0)
    with pytest.raises(SourceError, match=r"1\.parquet has no column 'text'"):
        source.blocks(1)


def test_files_that_disagree_on_a_type_are_refused(tmp_path: Path, open_source):
    pq.write_table(pa.table({"label": ["a"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"label": [1]}), tmp_path / "1.parquet")
    with pytest.raises(ReaderError, match=r"'label' of .*1.parquet holds int64, which reads as 'int'"):
        read_all(open_source(tmp_path))


def test_rows_are_the_same_after_the_pages_behind_them_are_released(tmp_path: Path, open_source):
    images = [bytes([n]) * 300_000 for n in range(30)]
    table = pa.table({"jpg": pa.array(images, pa.binary())})
    pq.write_table(table, tmp_path / "x.parquet", compression="none", use_dictionary=False)
    held = list(open_source(tmp_path / "x.parquet").stream(0, 0, batch_rows=2))
    assert [bytes(batch["jpg"][row]) for batch in held for row in range(2)] == images
