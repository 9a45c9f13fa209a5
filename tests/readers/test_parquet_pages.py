"""Rows from the middle of a Parquet row group, by the pages that they lie in: the same, whatever wrote the file."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import fs

from overlord.errors import ReaderError
from overlord.readers import parquet, parquet_pages
from overlord.readers.index import IndexCache
from overlord.readers.parquet_pages import StoredBytes
from overlord.readers.source_files import SourceFiles

from .conftest import read_block, rows_of

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
ROWS = 900


def table(rows: int = ROWS) -> pa.Table:
    """Return a table of every shape a column can have, with nulls in most of them."""

    def some(make: Any) -> list[Any]:
        return [None if n % 7 == 3 else make(n) for n in range(rows)]

    return pa.table(
        {
            "text": pa.array(some(lambda n: f"{n} é" * (n % 11)), pa.string()),
            "word": pa.array(some(lambda n: f"w{n % 3}"), pa.string()).dictionary_encode(),
            "jpg": pa.array(some(lambda n: {"bytes": bytes([n % 256]) * (n % 50), "path": f"{n}"}), IMAGE),
            "ids": pa.array(some(lambda n: list(range(n % 40))), pa.list_(pa.int32())),
            "flags": pa.array(some(lambda n: [n % 2 == 0] * (n % 3)), pa.large_list(pa.bool_())),
            "box": pa.array([[n, n + 0.5] for n in range(rows)], pa.list_(pa.float32(), 2)),
            "deep": pa.array(some(lambda n: [[n] * (n % 3)] * (n % 4)), pa.list_(pa.list_(pa.int64()))),
            "score": pa.array(some(lambda n: n / 2), pa.float32()),
            "good": pa.array(some(lambda n: n % 2 == 0), pa.bool_()),
            "when": pa.array(some(lambda n: n), pa.timestamp("ms")),
            "chat": pa.array(some(lambda n: [{"role": "user", "content": "é" * (n % 50)}] * (n % 3))),
            "meta": pa.array(some(lambda n: {"lang": "en", "n": {"deep": n, "l": [n, None]}})),
            "images": pa.array(some(lambda n: [{"bytes": bytes(n % 9), "path": None}] * (n % 4)), pa.list_(IMAGE)),
            "id": pa.array(range(rows), pa.int64()),
            "nothing": pa.nulls(rows),
        }
    )


def check(path: Path, open_source: Any, **options: Any) -> None:
    """Compare parts of every row group with the same rows of a whole read."""
    source = open_source(path, **options)
    luck = np.random.default_rng(0)
    for block, count in enumerate(source.blocks(0).rows.tolist()):
        whole = read_block(source, 0, block, batch_rows=97)
        ranges = [(0, 1), (0, count), (count - 1, count), *(sorted(luck.integers(0, count + 1, 2)) for _ in range(6))]
        ranges += [(int(at), min(count, int(at) + 5)) for at in luck.integers(0, count, 12)]
        for start, stop in ranges:
            if start < stop:
                rows = [r for b in source.stream(0, block, skip=start, stop=stop, batch_rows=64) for r in rows_of(b)]
                assert str(rows) == str(whole[start:stop]), (start, stop)


@pytest.fixture
def only_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a row group is read from its beginning."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("the row group is read from its beginning")

    monkeypatch.setattr(parquet, "_from_beginning", refuse)


@pytest.mark.parametrize(
    ("version", "dictionary", "codec", "index"),
    [
        *itertools.product(["1.0", "2.0"], [True, False], ["snappy", "none"], [True, False]),
        *(("1.0", True, codec, False) for codec in ("zstd", "gzip", "brotli", "lz4")),
        *(("2.0", False, codec, False) for codec in ("zstd", "gzip", "brotli", "lz4")),
    ],
)
@pytest.mark.usefixtures("only_pages")
def test_parts_are_those_of_the_whole(
    version: str, dictionary: bool, codec: str, index: bool, tmp_path: Path, open_source
):
    path = tmp_path / "x.parquet"
    pq.write_table(
        table(), path, data_page_version=version, use_dictionary=dictionary, compression=codec, write_page_index=index,
        data_page_size=300, write_batch_size=11, dictionary_pagesize_limit=700, row_group_size=600,
    )  # fmt: skip
    check(path, open_source)
    source = open_source(path)
    assert source.blocks(0).rows.tolist() == [600, 300] and source._index(0).seeks.all()


@pytest.mark.usefixtures("only_pages")
@pytest.mark.parametrize("columns", [["meta.lang"], ["meta.n.deep", "id"], ["images", "jpg"], ["chat"], ["meta"]])
def test_only_the_columns_that_are_read(columns: list[str], tmp_path: Path, open_source):
    pq.write_table(table(), tmp_path / "x.parquet", data_page_size=300, write_batch_size=5)
    check(tmp_path / "x.parquet", open_source, columns=columns)


@pytest.mark.usefixtures("only_pages")
@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent / "data" / "parquet").glob("*.parquet")), ids=lambda p: p.stem
)
def test_files_of_other_writers(path: Path, open_source):
    """Of polars, DuckDB, fastparquet and arrow-rs, with pages as small as they write them (`data/parquet/make.py`)."""
    check(path, open_source)
    assert open_source(path)._index(0).seeks.all()


def test_where_pages_are_large_the_footer_tells(tmp_path: Path, open_source):
    """Images as pyarrow writes them, and with small pages; nothing else decides."""
    images = pa.table({"jpg": pa.array([bytes(50_000)] * 200, pa.binary()), "id": range(200)})
    for name, options in (("large", {}), ("small", {"write_batch_size": 8}), ("plain", {"compression": "none"})):
        pq.write_table(images, tmp_path / f"{name}.parquet", use_dictionary=False, **options)
    seeks = {n: open_source(tmp_path / f"{n}.parquet")._index(0).seeks.tolist() for n in ("large", "small", "plain")}
    assert seeks == {"large": [0], "small": [1], "plain": [0]}
    assert open_source(tmp_path / "large.parquet", columns=["id"])._index(0).seeks.tolist() == [1]


def test_a_map_is_not_read_by_its_pages(tmp_path: Path, open_source):
    maps = pa.array([[(f"k{n}", n)] * (n % 3) for n in range(400)], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"m": maps}), tmp_path / "x.parquet", data_page_size=100, write_batch_size=5)
    check(tmp_path / "x.parquet", open_source)
    assert not open_source(tmp_path / "x.parquet")._index(0).seeks.any()


def test_pages_that_are_not_what_the_footer_says_are_no_rows(tmp_path: Path, open_source):
    """The row group is read from its beginning then, and pyarrow judges."""
    path = tmp_path / "x.parquet"
    pq.write_table(table().select(["text", "id"]), path, data_page_size=300, write_batch_size=11, use_dictionary=False)
    whole = read_block(open_source(path), 0, 0)
    data = bytearray(path.read_bytes())
    chunk = pq.read_metadata(path).row_group(0).column(1)
    data[chunk.data_page_offset + 2] ^= 0x40  # the size of the first page of "id"
    path.write_bytes(data)
    source = open_source(path)
    with pytest.raises(ReaderError, match=r"x.parquet cannot be read at row 400"):
        list(source.stream(0, 0, skip=400, stop=410, batch_rows=5))
    source = open_source(path, columns=["text"])
    rows = [r["text"] for b in source.stream(0, 0, skip=400, stop=410, batch_rows=5) for r in rows_of(b)]
    assert rows == [row["text"] for row in whole[400:410]]


def test_a_remote_row_group_is_fetched_in_few_requests(tmp_path: Path, open_source, monkeypatch):
    path = tmp_path / "x.parquet"
    pq.write_table(table(4000).select(["text", "ids", "id"]), path, data_page_size=2000, write_batch_size=20)
    source = open_source(path)
    source.files[0] = dataclasses.replace(
        source.files[0], filesystem=fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), location="x.parquet"
    )
    source.blocks(0)
    reads: list[tuple[int, int]] = []
    read = StoredBytes._read
    monkeypatch.setattr(
        StoredBytes, "_read", lambda one, begin, end: reads.append((begin, end)) or read(one, begin, end)
    )
    rows = [r["id"] for b in source.stream(0, 0, skip=3000, stop=3100, batch_rows=50) for r in rows_of(b)]
    assert rows == list(range(3000, 3100)) and len(reads) == 1


@pytest.mark.usefixtures("only_pages")
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_pages_of_a_large_remote_row_group_are_found_by_their_index(
    version: str, tmp_path: Path, open_source, monkeypatch
):
    path = tmp_path / "x.parquet"
    pq.write_table(
        table(), path, data_page_size=300, write_batch_size=11, write_page_index=True, data_page_version=version
    )
    monkeypatch.setattr(parquet_pages, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(parquet_pages, "_GAP_BYTES", 0)
    reads: list[int] = []
    read = StoredBytes._read
    monkeypatch.setattr(
        StoredBytes, "_read", lambda one, begin, end: reads.append(end - begin) or read(one, begin, end)
    )
    columns = ["text", "ids", "chat", "id"]
    whole = read_block(open_source(path, columns=columns), 0, 0)
    for start, stop in ((0, 1), (100, 190), (500, 501), (890, 900)):
        source = open_source(path, columns=columns)
        elsewhere = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
        source.files[0] = dataclasses.replace(source.files[0], filesystem=elsewhere, location="x.parquet")
        source._plain_reader._tables = parquet_pages.PageTables()  # type: ignore[attr-defined]
        reads.clear()
        rows = [r for b in source.stream(0, 0, skip=start, stop=stop, batch_rows=64) for r in rows_of(b)]
        assert str(rows) == str(whole[start:stop])
        assert len(reads) <= 5 + 2 * 5, "an index, a dictionary and a run of pages of each leaf column"
        assert stop - start > 80 or sum(reads) < path.stat().st_size / 3


RAGGED = st.lists(st.one_of(st.none(), st.lists(st.integers(0, 3), max_size=40)), min_size=1, max_size=300)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=RAGGED,
    size=st.integers(1, 90),
    batch=st.integers(1, 20),
    codec=st.sampled_from(["none", "zstd"]),
    data=st.data(),
)
@pytest.mark.usefixtures("only_pages")
def test_rows_of_lists_are_counted_in_pages_of_any_size(rows, size, batch, codec, data, tmp_path_factory):
    """Pages of version 1 begin anywhere, also inside a row."""
    path = tmp_path_factory.mktemp("lists") / "x.parquet"
    column = pa.array(rows, pa.list_(pa.int32()))
    pq.write_table(
        pa.table({"ids": column}), path, data_page_size=size, write_batch_size=batch, compression=codec,
        use_dictionary=data.draw(st.booleans()),
    )  # fmt: skip
    source = SourceFiles("web", [str(path)], cache=IndexCache(path.parent / "cache"), pause=lambda _: None)
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    found = [row["ids"] for b in source.stream(0, 0, skip=start, stop=stop, batch_rows=64) for row in rows_of(b)]
    assert found == [row or [] for row in rows[start:stop]]
