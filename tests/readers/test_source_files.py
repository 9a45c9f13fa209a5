"""A whole source: order, digest, files that change, and I/O errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from overlord.core.order import DataFile, SourceOrder
from overlord.core.ragged import RowBatch
from overlord.errors import ReaderError
from overlord.readers.jsonl import JsonlReader
from overlord.readers.source_files import SourceFiles

from .conftest import read_all, read_block


def write(folder: Path, files: int = 3, rows: int = 10) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        table = pa.table({"n": list(range(number * rows, (number + 1) * rows)), "text": ["x"] * rows})
        pq.write_table(table, folder / f"{number:02}.parquet", row_group_size=4)
    return folder


def test_the_order_of_a_source_reaches_every_row_once(tmp_path: Path, open_source):
    source = open_source(write(tmp_path / "d"), columns=["n"])
    files = [DataFile(f.path, f.size) for f in source.files]
    order = SourceOrder(0, "web", files, shuffle_bytes=1 << 20, index=source.blocks)
    group = order.group(0, order.first_group(0))
    slots, rows = group.locate(0, group.num_rows)
    seen = [
        read_block(source, int(group.files[slot]), int(group.blocks[slot]), int(row))[0]["n"]
        for slot, row in zip(slots, rows, strict=True)
    ]
    assert sorted(seen) == list(range(30))


def test_the_facts_of_a_source(tmp_path: Path, open_source):
    source = open_source(write(tmp_path / "d"))
    assert source.columns() == ["n", "text"] and source.format == "parquet"
    assert source.total_bytes == sum(p.stat().st_size for p in (tmp_path / "d").iterdir())
    assert source.kinds() == {"n": "int", "text": "bytes"}
    assert [source.row_base(0, block) for block in range(3)] == [0, 4, 8]


def test_the_digest_survives_a_move_and_notices_other_files(tmp_path: Path, open_source):
    digest = open_source(write(tmp_path / "d")).listing_digest()
    shutil.copytree(tmp_path / "d", tmp_path / "else" / "where", copy_function=shutil.copyfile)
    assert open_source(tmp_path / "else" / "where").listing_digest() == digest
    (tmp_path / "else" / "where" / "02.parquet").rename(tmp_path / "else" / "where" / "03.parquet")
    assert open_source(tmp_path / "else" / "where").listing_digest() != digest
    assert open_source(tmp_path / "d" / "00.parquet").listing_digest() != digest


def test_a_file_that_vanishes_or_changes_stops_the_stream(tmp_path: Path, open_source):
    source = open_source(write(tmp_path / "d"), columns=["n"])
    source.blocks(0), source.blocks(1)
    (tmp_path / "d" / "00.parquet").unlink()
    shutil.copyfile(tmp_path / "d" / "02.parquet", tmp_path / "d" / "01.parquet")
    for file, found in ((0, "00.parquet is gone"), (1, "01.parquet (was written to|has .* bytes)")):
        with pytest.raises(ReaderError, match=found):
            read_block(source, file, 0)


class FailingReader(JsonlReader):
    """Fails when it has given so many rows, as often as it is told to."""

    def __init__(self, after: int, times: int) -> None:
        self.after, self.times, self.skips = after, times, []

    def stream(self, *args: Any, skip: int, **options: Any) -> Iterator[RowBatch]:
        self.skips.append(skip)
        for given, batch in enumerate(super().stream(*args, skip=skip, **options)):
            if given >= self.after and self.times:
                self.times -= 1
                raise OSError("connection reset by peer")
            yield batch


def failing_source(tmp_path: Path, cache: Any, reader: FailingReader) -> tuple[SourceFiles, list[float]]:
    (tmp_path / "x.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(10)))
    pauses: list[float] = []
    source = SourceFiles("web", [str(tmp_path / "x.jsonl")], cache=cache, columns=["n"], pause=pauses.append)
    source._reader = reader
    return source, pauses


def test_an_io_error_is_retried_from_where_the_stream_was(tmp_path: Path, cache):
    reader = FailingReader(after=3, times=2)
    source, pauses = failing_source(tmp_path, cache, reader)
    assert [row["n"] for row in read_block(source, 0, 0, skip=1, batch_rows=1)] == list(range(1, 10))
    assert reader.skips == [1, 4, 7] and len(pauses) == 2


def test_an_io_error_that_stays_stops_the_run(tmp_path: Path, cache):
    reader = FailingReader(after=0, times=100)
    source, pauses = failing_source(tmp_path, cache, reader)
    with pytest.raises(ReaderError) as caught:
        read_block(source, 0, 0, skip=2)
    assert "source 'web'" in str(caught.value) and "x.jsonl cannot be read at row 2 of block 0" in str(caught.value)
    assert "connection reset by peer; going on without it would change the stream" in str(caught.value)
    assert pauses == sorted(pauses) and len(pauses) == 3


def test_rows_that_do_not_come_are_noticed(tmp_path: Path, cache):
    class ShortReader(JsonlReader):
        def stream(self, *args: Any, **options: Any) -> Iterator[RowBatch]:
            yield next(super().stream(*args, **options))

    source, _ = failing_source(tmp_path, cache, FailingReader(0, 0))
    source._reader = ShortReader()
    with pytest.raises(ReaderError, match=r"its index promises 10 rows and 7 were found"):
        read_block(source, 0, 0)


def test_a_source_is_read_by_many_threads_at_once(tmp_path: Path, open_source):
    source = open_source(write(tmp_path / "d", files=20), columns=["n"])
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda file: read_block(source, file, 0), range(20)))
    assert [row["n"] for block in rows for row in block] == [f * 10 + n for f in range(20) for n in range(4)]
    assert len(read_all(source)) == 200
