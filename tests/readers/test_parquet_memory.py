"""Row groups with pages too large for a shuffle: spilled to disk, row by row the same, within the budget."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import fs

from overlord.core.ragged import Ragged, RowBatch
from overlord.errors import ReaderError
from overlord.readers import arrow, parquet, spill
from overlord.readers.index import IndexCache
from overlord.readers.source_files import SourceFiles

from .conftest import read_all, read_block, rows_of

SHUFFLE_BYTES = 16 << 20


def images(count: int, size: int = 200_000) -> pa.Table:
    random = np.random.default_rng(count)
    return pa.table({"jpg": pa.array([random.bytes(size) for _ in range(count)], pa.binary())})


def mixed(rows: int) -> pa.Table:
    """Return a table of every shape a column can have, with nulls in most of them."""

    def some(make: Any) -> list[Any]:
        return [None if n % 7 == 3 else make(n) for n in range(rows)]

    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.table(
        {
            "text": pa.array(some(lambda n: "é" * (n % 11)), pa.string()),
            "word": pa.array(some(lambda n: f"w{n % 3}"), pa.string()).dictionary_encode(),
            "jpg": pa.array(some(lambda n: {"bytes": bytes([n % 256]) * n, "path": None}), image),
            "ids": pa.array(some(lambda n: list(range(n % 5))), pa.list_(pa.int32())),
            "flags": pa.array(some(lambda n: [n % 2 == 0] * (n % 3)), pa.large_list(pa.bool_())),
            "score": pa.array(some(lambda n: n / 2), pa.float32()),
            "half": pa.array([np.float16(n % 100) for n in range(rows)], pa.float16()),
            "good": pa.array(some(lambda n: n % 2 == 0), pa.bool_()),
            "when": pa.array(some(lambda n: n), pa.timestamp("ms")),
            "chat": pa.array(some(lambda n: [{"role": "user", "content": "é" * n}] * (n % 3))),
            "nothing": pa.nulls(rows),
        }
    )


def types_of(batch: RowBatch) -> dict[str, Any]:
    return {k: (type(c), c.values.dtype if isinstance(c, Ragged) else c.dtype) for k, c in batch.items()}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    compression=st.sampled_from(["snappy", "zstd", "none"]),
    dictionary=st.booleans(),
    rows=st.integers(1, 60),
    group_rows=st.sampled_from([4, 1000]),
    batch_rows=st.sampled_from([1, 3, 16, 100]),
    written_bytes=st.sampled_from([64, spill.BATCH_BYTES]),
    data=st.data(),
)
def test_spilled_rows_are_those_of_the_row_group(
    compression: str,
    dictionary: bool,
    rows: int,
    group_rows: int,
    batch_rows: int,
    written_bytes: int,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
):
    folder = tmp_path_factory.mktemp("rows")
    options = {"compression": compression, "use_dictionary": dictionary, "row_group_size": group_rows}
    pq.write_table(mixed(rows), folder / "x.parquet", **options)
    source = SourceFiles("web", [str(folder / "x.parquet")], cache=IndexCache(folder / "cache"))
    block = data.draw(st.integers(0, len(source.blocks(0).rows) - 1))
    skip = data.draw(st.integers(0, int(source.blocks(0).rows[block])))
    found: list[list[RowBatch]] = []
    monkeypatch.setattr(spill, "BATCH_BYTES", written_bytes)
    for spills in (False, True):
        monkeypatch.setattr(arrow, "is_too_much", lambda *_, answer=spills: answer)
        found.append(list(source.stream(0, block, skip=skip, batch_rows=batch_rows)))
    plain, spilled = ([row for batch in batches for row in rows_of(batch)] for batches in found)
    assert str(plain) == str(spilled) and len(plain) == int(source.blocks(0).rows[block]) - skip
    assert [types_of(b) for b in found[0][:1]] == [types_of(b) for b in found[1][:1]]


@pytest.mark.parametrize(
    ("options", "spills"),
    [
        ({}, True),
        ({"use_dictionary": False}, True),
        ({"compression": "zstd", "use_dictionary": False}, True),
        ({"compression": "none"}, True),
        ({"compression": "none", "use_dictionary": False}, False),
    ],
)
def test_only_what_pyarrow_must_copy_whole_is_spilled(options: Any, spills: bool, tmp_path: Path, open_source, cache):
    pq.write_table(images(20), tmp_path / "x.parquet", **options)
    source = open_source(tmp_path / "x.parquet")
    stream = source.stream(0, 0, batch_rows=1)
    next(stream)
    assert cache.scratch.exists() == spills
    assert [row["jpg"] for row in read_all(source)] == images(20)["jpg"].to_pylist()


def test_pages_that_must_be_fetched_are_spilled_whatever_they_are(tmp_path: Path, open_source, cache):
    pq.write_table(images(20), tmp_path / "x.parquet", compression="none", use_dictionary=False)
    source = open_source(tmp_path / "x.parquet")
    elsewhere = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    source.files[0] = dataclasses.replace(source.files[0], filesystem=elsewhere, location="x.parquet")
    rows = read_block(source, 0, 0, skip=2, batch_rows=1)
    assert [row["jpg"] for row in rows] == images(20)["jpg"].to_pylist()[2:] and cache.scratch.exists()


def test_a_small_row_group_is_never_spilled(tmp_path: Path, open_source, cache):
    pq.write_table(images(40, 30_000), tmp_path / "x.parquet", row_group_size=20)
    read_all(open_source(tmp_path / "x.parquet"), batch_rows=1)
    assert not cache.scratch.exists()


@pytest.mark.parametrize("group_rows", [30, 15])
def test_the_estimate_is_what_pyarrow_holds(group_rows: int, tmp_path: Path):
    pq.write_table(images(30), tmp_path / "x.parquet", row_group_size=group_rows)
    file = pq.ParquetFile(tmp_path / "x.parquet", memory_map=True)
    before = pa.total_allocated_bytes()
    batches = file.iter_batches(1, row_groups=[0], use_threads=False)
    next(batches)
    held = pa.total_allocated_bytes() - before
    assert parquet.held_bytes(file.metadata, [0], is_local=True) == pytest.approx(held, rel=0.1)


def test_a_spill_has_no_name_and_ends_with_its_stream(tmp_path: Path, open_source, cache):
    pq.write_table(images(20), tmp_path / "x.parquet")
    descriptors = len(os.listdir("/proc/self/fd"))
    stream = open_source(tmp_path / "x.parquet").stream(0, 0, batch_rows=1)
    next(stream)
    assert list(cache.scratch.iterdir()) == []
    stream.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_no_block_waits_for_another_but_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spill, "_DECODING", spill._Room(100))
    inside = [threading.Event() for _ in range(3)]
    go_on = threading.Event()

    def decode(number: int) -> Iterator[RowBatch]:
        inside[number].set()
        assert go_on.wait(20)
        yield {"n": np.full(2, number)}

    def rows(number: int, size: int) -> list[int]:
        place = spill.SpillPlace(tmp_path / "new", "row group", size)
        return [n for batch in spill.spilled(decode(number), place, 2) for n in batch["n"].tolist()]  # type: ignore[arg-type]

    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(rows, number, 50) for number in (0, 1)]
        assert inside[0].wait(20) and inside[1].wait(20), "one waits for the other"
        third = pool.submit(rows, 2, 1000)  # more than there is room for at all: it waits until there is all of it
        assert not inside[2].wait(0.05)
        go_on.set()
        assert [task.result() for task in (*first, third)] == [[0, 0], [1, 1], [2, 2]]


def test_threads_that_need_the_same_block_wait_for_the_one_that_decodes_it(tmp_path: Path):
    blocks, decoded = spill.SpilledBlocks(), list[int]()

    def decode() -> Iterator[RowBatch]:
        decoded.append(1)
        time.sleep(0.02)
        yield {"n": np.arange(9)}

    def add(_: int) -> spill.SpilledBlock | None:
        return blocks.add("key", decode, spill.SpillPlace(tmp_path / "new", "row group", 9))  # type: ignore[arg-type]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(add, range(8)))
    assert len(decoded) == 1 and all(one is found[0] for one in found)


def test_a_decoder_that_fails_frees_the_way_and_is_retried(tmp_path: Path, open_source):
    pq.write_table(images(20), tmp_path / "x.parquet")
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    data[10:4000] = b"\xff" * 3990
    (tmp_path / "x.parquet").write_bytes(data)
    with pytest.raises(ReaderError, match=r"x.parquet cannot be read at row 0 of block 0"):
        read_block(open_source(tmp_path / "x.parquet"), 0, 0, batch_rows=1)
    assert spill._DECODING._free == spill.DECODED_BYTES


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Let no file grow beyond 1 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_says_how_much_was_needed_and_where(tmp_path: Path, open_source, cache, request):
    pq.write_table(images(20), tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet")
    source.blocks(0)
    request.getfixturevalue("small_disk")
    with pytest.raises(ReaderError) as caught:
        read_block(source, 0, 0, batch_rows=1)
    message = str(caught.value)
    assert f"row group 0 of {tmp_path / 'x.parquet'} has to be kept on disk" in message
    assert f"{cache.scratch} cannot take it" in message and "about 3.8 MiB are needed" in message
    assert "Set cache= to a folder on a larger disk" in message


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, open_source, cache):
    pq.write_table(images(20), tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet")
    source.blocks(0)
    cache.scratch.write_text("in the way")
    with pytest.raises(ReaderError, match=r"index-cache/spill cannot take it: .*File exists"):
        read_block(source, 0, 0, batch_rows=1)


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_a_compressed_record_batch_is_spilled(new: Any, compression: str | None, tmp_path: Path, open_source, cache):
    table = images(20).append_column("word", pa.array(["a", "b"] * 10).dictionary_encode())
    with new(tmp_path / "x.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    with pa.memory_map(str(tmp_path / "x.arrow")) as native:
        assert arrow._is_compressed(native) == (compression is not None)
    rows = read_block(open_source(tmp_path / "x.arrow"), 0, 0, skip=3, batch_rows=1)
    assert [row["jpg"] for row in rows] == table["jpg"].to_pylist()[3:]
    assert [row["word"] for row in rows] == [b"b", b"a"] * 8 + [b"b"]
    assert cache.scratch.exists() == (compression is not None)


MEASURE = """
import gc, json, sys, threading
from pathlib import Path
import psutil
from overlord.core.order import NO_GROUP, DataFile, SourceOrder
from overlord.readers.index import IndexCache
from overlord.readers.source_files import SourceFiles
from overlord.roles.source_loader import GroupReader

process, held, peak = psutil.Process(), [], [0]

def pss():
    # The share of a library changes whenever another process that uses it comes or goes.
    return sum(part.pss for part in process.memory_maps() if ".so" not in part.path)

def read(path, shuffle_bytes):
    source = SourceFiles("web", [path], cache=IndexCache(Path(path).parent / "cache"))
    files = [DataFile(file.path, file.size) for file in source.files]
    order = SourceOrder(0, "web", files, shuffle_bytes=shuffle_bytes, index=source.blocks)
    rows, at = 0, order.first_group(0)
    while at != NO_GROUP:
        reader = GroupReader(order.group(0, at), source, 0)
        while reader.offset < reader.group.num_rows:
            rows += len(reader.read(16)[0]["__bad__"])
            held.append(pss())
        at = order.next_group(0, at)
    return rows

read(sys.argv[1], 1 << 20)
gc.collect()
before, done = pss(), threading.Event()
held.clear()

def watch():
    while not done.wait(0.02):
        peak[0] = max(peak[0], pss())

watcher = threading.Thread(target=watch)
watcher.start()
rows = read(sys.argv[2], int(sys.argv[3]))
done.set()
watcher.join()
print(json.dumps({"rows": rows, "steady": max(held) - before, "peak": max(peak[0], *held) - before}))
"""


def measure(tmp_path: Path, files: int, rows: int) -> dict[str, int]:
    for folder, count, each in (("small", 2, 3), ("large", files, rows)):
        (tmp_path / folder).mkdir()
        table = images(each)
        for number in range(count):
            pq.write_table(table, tmp_path / folder / f"{number}.parquet")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), str(SHUFFLE_BYTES)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
        text=True,
    )
    return json.loads(done.stdout)


def test_the_shuffle_of_large_pages_stays_within_its_budget(tmp_path: Path):
    found = measure(tmp_path, files=8, rows=80)
    assert found["rows"] == 640
    # Without spilling it is 264 MiB: 8 streams that hold a page of 16 MB twice.
    assert found["steady"] <= SHUFFLE_BYTES
    assert found["peak"] <= 4 * 16_000_000, "more than one row group is decoded at a time"


def test_the_shuffle_inside_one_large_row_group_stays_within_its_budget(tmp_path: Path):
    found = measure(tmp_path, files=1, rows=200)  # 40 MB
    assert found["rows"] == 200
    assert found["steady"] <= SHUFFLE_BYTES
    assert found["peak"] <= 4 * 40_000_000


@pytest.mark.slow
def test_the_memory_of_a_shuffle_does_not_grow_with_the_row_groups(tmp_path: Path):
    found = measure(tmp_path, files=8, rows=320)
    assert found["rows"] == 2560
    assert found["steady"] <= SHUFFLE_BYTES
    assert found["peak"] <= 4 * 64_000_000
