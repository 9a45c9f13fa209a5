"""A whole source: order, digest, files that change, and I/O errors."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from overlord.core.order import NO_GROUP, DataFile, SourceOrder
from overlord.core.ragged import Ragged, RowBatch, take_rows
from overlord.errors import ReaderError
from overlord.readers import source_files, spill
from overlord.readers.files import StoredFile
from overlord.readers.jsonl import JsonlReader
from overlord.readers.source_files import SourceFiles
from overlord.readers.unpacked import UnpackedFile
from overlord.roles.source_loader import GroupReader, read_together

from .conftest import read_all, read_block, rows_of


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


def write_one_block(path: Path, name: str) -> Path:
    """Write 600 rows of 2 KB as one block of some format."""
    texts = [f"{n:04}" * 500 for n in range(600)]
    table = pa.table({"text": texts, "n": range(600)})
    file = path / name
    if name.endswith(".parquet"):
        pq.write_table(table, file)
    elif name.endswith(".arrow"):
        compression = "zstd" if "zstd" in name else None
        with pa.ipc.new_file(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_table(table)
    elif name.endswith(".jsonl.gz"):
        file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()))
    else:
        with tarfile.open(file, "w:gz") as tar:
            for row in table.to_pylist():
                for end, payload in (("text", row["text"].encode()), ("n", b"%d" % row["n"])):
                    info = tarfile.TarInfo(f"{row['n']:03}.{end}")
                    info.size = len(payload)
                    tar.addfile(info, io.BytesIO(payload))
    return file


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.zstd.arrow", "x.jsonl.gz", "x.tar.gz"])
def test_a_large_block_of_any_format_is_shuffled_and_decoded_once(name: str, tmp_path: Path, open_source, monkeypatch):
    source = open_source(write_one_block(tmp_path, name), columns=["text", "n"])
    streams: list[int] = []
    plain = type(source._reader).stream
    monkeypatch.setattr(
        type(source._reader), "stream", lambda *args, **options: streams.append(1) or plain(*args, **options)
    )
    unpacked: list[int] = []
    find = UnpackedFile._find
    monkeypatch.setattr(UnpackedFile, "_find", lambda file: unpacked.append(1) or find(file))
    files = [DataFile(file.path, file.size) for file in source.files]
    order = SourceOrder(0, "web", files, shuffle_bytes=256 << 10, index=source.first_blocks)
    for epoch in (0, 1):
        numbers, group = [], order.first_group(epoch)
        while group != NO_GROUP:
            reader = GroupReader(order.group(epoch, group), source, 0)
            while reader.offset < reader.group.num_rows:
                rows, places = reader.read(7)
                assert [row["text"] for row in rows_of(rows)] == [b"%04d" % n * 500 for n in places]
                assert [int(row["n"]) for row in rows_of(rows)] == places.tolist()
                numbers += places.tolist()
            group = order.next_group(epoch, group)
        assert sorted(numbers) == list(range(600))
        assert np.mean(np.diff(numbers) == 1) < 0.03
    if source._is_unpacked(0):
        assert len(unpacked) == 1, "the file is unpacked again"
    elif not source._reaches(0, 0):
        assert len(streams) == 1, "the block is decoded again"


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.zstd.arrow", "x.jsonl.gz"])
def test_groups_of_parts_that_are_read_together_are_as_each_alone(name: str, tmp_path: Path, open_source, monkeypatch):
    source = open_source(write_one_block(tmp_path, name), columns=["text", "n"])
    files = [DataFile(file.path, file.size) for file in source.files]
    order = SourceOrder(0, "web", files, shuffle_bytes=256 << 10, index=source.first_blocks)
    first = order.first_group(0)
    groups = [order.group(0, group) for group in (first, order.next_group(0, first))]
    found: list[bool] = []
    pick = source.pick
    monkeypatch.setattr(source, "pick", lambda *where: found.append((rows := pick(*where)) is not None) or rows)
    together = read_together([GroupReader(group, source, 3) for group in groups], [9, 4])
    assert found == [not source._reaches(0, 0) and not source._is_unpacked(0)], (
        "only spilled blocks are looked up row by row"
    )
    monkeypatch.setattr(source, "pick", lambda *where: None)
    for (rows, numbers), group, count in zip(together, groups, (9, 4), strict=True):
        alone, expected = GroupReader(group, source, 3).read(count)
        assert numbers.tolist() == expected.tolist() and len(numbers) == count
        assert rows_of(rows) == rows_of(alone)
        assert {name: column.dtype for name, column in rows.items() if isinstance(column, np.ndarray)} == {
            name: column.dtype for name, column in alone.items() if isinstance(column, np.ndarray)
        }


def test_parts_of_a_block_are_dropped_with_the_indices(tmp_path: Path, open_source):
    source = open_source(write_one_block(tmp_path, "x.zstd.arrow"), columns=["n"])
    source.blocks(0)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert [row["n"] for batch in source.stream(0, 0, skip=5, stop=9, batch_rows=3) for row in rows_of(batch)] == [
        5, 6, 7, 8
    ]  # fmt: skip
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    source.forget()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_parts_of_a_remote_file_fetch_it_once(tmp_path: Path, open_source, monkeypatch):
    source = open_source(write_one_block(tmp_path, "x.zstd.arrow"), columns=["n", "text"])
    elsewhere = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    source.files[0] = dataclasses.replace(source.files[0], filesystem=elsewhere, location="x.zstd.arrow")
    source.blocks(0)
    opened: list[str] = []
    plain, check = StoredFile.open, source_files.verify_unchanged
    monkeypatch.setattr(StoredFile, "open", lambda file: opened.append("open") or plain(file))
    monkeypatch.setattr(source_files, "verify_unchanged", lambda file: opened.append("look") or check(file))
    for start in range(0, 600, 10):
        batches = source.stream(0, 0, skip=start, stop=start + 10, batch_rows=10)
        assert [row["n"] for batch in batches for row in rows_of(batch)] == list(range(start, start + 10))
    assert opened == ["look", "open"]


def test_parts_are_read_by_many_threads_and_the_block_is_decoded_once(tmp_path: Path, open_source, monkeypatch):
    source = open_source(write_one_block(tmp_path, "x.zstd.arrow"), columns=["n", "text"])
    source.blocks(0)
    written: list[str] = []
    write_block = spill._write
    monkeypatch.setattr(
        spill, "_write", lambda batches, place: written.append(place.what) or write_block(batches, place)
    )

    def part(start: int) -> list[int]:
        return [row["n"] for b in source.stream(0, 0, skip=start, stop=start + 10, batch_rows=4) for row in rows_of(b)]

    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(part, range(0, 600, 10)))
    assert [n for found in parts for n in found] == list(range(600)) and len(written) == 1


def test_blocks_kept_for_their_parts_stay_within_a_bound(tmp_path: Path, open_source, monkeypatch):
    monkeypatch.setattr(spill, "SPAN_BYTES", 4 << 20)
    (tmp_path / "d").mkdir()
    for number in range(12):
        shutil.copyfile(write_one_block(tmp_path, "x.zstd.arrow"), tmp_path / "d" / f"{number}.arrow")
    source = open_source(tmp_path / "d", columns=["n", "text"])
    for file in (*range(12), *range(12)):
        next(source.stream(file, 0, skip=5, stop=9, batch_rows=3))
        kept = source._spilled._blocks
        assert sum(block.nbytes for block in kept.values()) <= 8 << 20 and (file, 0) in kept
    assert len(kept) >= 4
    monkeypatch.setattr(spill, "SPAN_BYTES", 1)  # blocks that are larger than the bound: two spans of two blocks
    for file in range(12):
        next(source.stream(file, 0, skip=5, stop=9, batch_rows=3))
    assert len(source._spilled._blocks) == 4


def group_rows(number: int) -> RowBatch:
    """Return 100 rows of 10 KB each, and the columns of other kinds."""
    values = np.random.default_rng(number).integers(0, 255, 1_000_000).astype(np.uint8)
    return {
        "jpg": Ragged(values, np.arange(0, 1_000_001, 10_000)),
        "ids": Ragged(np.arange(100, dtype=np.int32), np.r_[0, np.full(100, 100)]),
        "n": np.arange(100.0),
    }


def test_groups_beyond_the_budget_are_on_disk_and_give_the_same_rows(tmp_path: Path):
    groups = spill.HeldGroups(tmp_path / "new", room=lambda: 3_100_000)
    held = [groups.hold(group_rows(number)) for number in range(3)]
    assert groups.nbytes > 3_000_000, "what fits the budget stays in memory"
    held[0].take(np.array([1]))  # the second one is now the least recently read
    held += [groups.hold(group_rows(number)) for number in range(3, 5)]
    assert [one.nbytes > 0 for one in held] == [True, False, False, True, True]
    assert groups.nbytes <= 3_100_000 and list((tmp_path / "new").iterdir()) == []
    asked = np.array([99, 3, 3, 0, 57])
    for number, one in enumerate(held):
        rows, wanted = one.take(asked), take_rows(group_rows(number), asked)
        assert rows["n"].dtype == np.float64 and rows_equal(rows, wanted)
    del one
    held.clear()
    assert groups.nbytes == 0


def rows_equal(rows: RowBatch, others: RowBatch) -> bool:
    return list(rows) == list(others) and all(
        np.array_equal(column.values, other.values) and np.array_equal(column.offsets, other.offsets)
        if isinstance(column, Ragged) and isinstance(other, Ragged)
        else np.array_equal(column, other)  # type: ignore[arg-type]
        for column, other in zip(rows.values(), others.values(), strict=True)
    )


def test_groups_stay_in_memory_where_the_disk_is_full(tmp_path: Path, caplog):
    (tmp_path / "spill").write_text("in the way")
    groups = spill.HeldGroups(tmp_path / "spill", room=lambda: 0)
    held = [groups.hold(group_rows(number)) for number in range(3)]
    assert groups.nbytes > 3_000_000 and rows_equal(held[0].take(np.arange(100)), group_rows(0))
    assert len(caplog.records) == 1 and "stay in memory" in caplog.text and "spill cannot take it" in caplog.text
