"""Reader processes: a file that ends its reader costs a process; innocent streams lose and double no row."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc
from tests.readers.conftest import read_all

import overlord as ol
from overlord.core.ragged import concat_rows, num_rows
from overlord.readers.index import IndexCache
from overlord.readers.source_files import SourceFiles
from overlord.runtimes.supervision.reader_processes import ReaderProcesses

ROWS = 120


def table(rows: int = ROWS) -> pa.Table:
    return pa.table(
        {
            "text": [f"row {n} ünï" for n in range(rows)],
            "ids": [list(range(n % 7)) for n in range(rows)],
            "kind": pa.array([f"k{n % 3}" for n in range(rows)]).dictionary_encode(),
            "chat": [[{"role": "user", "content": f"x{n}"}] for n in range(rows)],
            "images": [[b"a" * n, b"b"] for n in range(rows)],
            "n": list(range(rows)),
        }
    )


def write(path: Path, rows: int = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table(rows), path, row_group_size=40)
    else:
        new = ipc.new_stream if "stream" in path.name else ipc.new_file
        with new(path, table(rows).schema) as writer:
            writer.write_table(table(rows), max_chunksize=40)
    return path


def make_deadly(path: Path) -> None:
    """Flip one bit of a Parquet footer so that pyarrow aborts: a column becomes required, its statistics do not."""
    data, times = path.read_bytes(), os.stat(path)
    deadly = re.sub(rb"([\x25\x35])\x02\x18\x04text", b"\\1\x00\x18\x04text", data)
    assert len(deadly) == len(data) and deadly != data
    with path.open("r+b") as handle:  # in place, as an overwritten file is
        handle.write(deadly)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture(scope="module")
def pool() -> Iterator[ReaderProcesses]:
    readers = ReaderProcesses(2)
    yield readers
    readers.close()


def open_isolated(pool: ReaderProcesses, path: Path, **options: Any) -> SourceFiles:
    options.setdefault("columns", table(1).schema.names)
    cache = IndexCache(path.parent / "cache")
    return SourceFiles("web", [str(path)], cache=cache, isolate=pool.isolate, pause=lambda _: None, **options)


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_rows_are_those_of_the_reader_itself(name: str, tmp_path: Path, pool: ReaderProcesses) -> None:
    path = write(tmp_path / name)
    direct = SourceFiles("web", [str(path)], cache=IndexCache(tmp_path / "other"), columns=table(1).schema.names)
    isolated = open_isolated(pool, path)
    assert isolated.kinds() == direct.kinds()
    assert isolated.blocks(0).bytes.tolist() == direct.blocks(0).bytes.tolist()
    assert read_all(isolated) == read_all(direct)
    everything = open_isolated(pool, path, columns=None)
    assert everything.columns() == table(1).schema.names


@pytest.mark.parametrize("name", ["a.jsonl", "a.tar"])  # compressed lines are unpacked by the service
def test_rows_that_python_parses_are_the_same_in_a_process_and_survive_its_death(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "a.tar":
        with tarfile.open(path, "w") as archive:
            for n in range(ROWS):
                member = tarfile.TarInfo(f"{n:04d}.txt")
                member.size = 40
                archive.addfile(member, io.BytesIO(f"{n:040d}".encode()))
    else:
        lines = "".join(json.dumps({"txt": f"row {n} ünï"}) + "\n" if n % 9 else "no row\n" for n in range(ROWS))
        path.write_bytes(lines.encode())
    direct = SourceFiles("web", [str(path)], cache=IndexCache(tmp_path / "other"), columns=["txt"])
    readers = ReaderProcesses(4, parses=True)
    try:
        isolated = open_isolated(readers, path, columns=["txt"])
        assert read_all(isolated) == read_all(direct)
        (pid,) = readers.pids  # it was read there
        stream, found = isolated.stream(0, 0, batch_rows=7), list[Any]()
        found.append(next(stream))
        os.kill(pid, signal.SIGKILL)
        found += stream
        assert sum(map(num_rows, found)) == int(direct.blocks(0).rows[0])
        assert (
            concat_rows(found)["txt"].values.tobytes()
            == concat_rows(list(direct.stream(0, 0, batch_rows=7)))["txt"].values.tobytes()
        )
        assert read_all(isolated) == read_all(direct)
    finally:
        readers.close()


def test_a_wrong_column_is_refused_in_the_same_words(tmp_path: Path, pool: ReaderProcesses) -> None:
    with pytest.raises(ol.SourceError, match=r"has no column 'txet'.*Did you mean 'text'"):
        open_isolated(pool, write(tmp_path / "a.parquet"), columns=["txet"]).kinds()


def test_a_damaged_file_is_an_error_of_ours(tmp_path: Path, pool: ReaderProcesses) -> None:
    path = write(tmp_path / "a.parquet")
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    path.write_bytes(data)
    with pytest.raises(ol.ReaderError, match=r"source 'web': .*a.parquet cannot be read at row 0 of block 0"):
        read_all(open_isolated(pool, path))


def test_a_file_that_ends_its_reader_is_named_and_the_service_lives(
    tmp_path: Path, pool: ReaderProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = write(tmp_path / "good.parquet"), write(tmp_path / "bad" / "bad.parquet")
    make_deadly(bad)
    beside = open_isolated(pool, good).stream(0, 0, batch_rows=7)
    first = next(beside)
    damaged = open_isolated(pool, bad)
    with pytest.raises(ol.ReaderError, match=r"the index of .*bad.parquet ended the process .* 2 times .*SIGABRT"):
        damaged.blocks(0)
    rest = [row for batch in (first, *beside) for row in np.asarray(batch["n"]).tolist()]
    assert rest == list(range(40)), "a stream beside it goes on where it was"
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "bad.parquet: a reader process was lost" in warnings[0].message


def test_a_block_that_ends_its_reader_is_named(
    tmp_path: Path, pool: ReaderProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.parquet")
    files = open_isolated(pool, path)
    stream = files.stream(0, 0, batch_rows=7)
    next(stream)
    make_deadly(path)
    for _ in range(2):
        with pytest.raises(
            ol.ReaderError, match=r"block 1 of .*a.parquet ended the process .* on_source_failure='park'"
        ):
            next(files.stream(0, 1, batch_rows=7))
    assert len([r for r in caplog.records if "was lost" in r.message]) == 1, "the verdict is remembered"


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow"])
def test_a_file_truncated_while_it_is_read_is_an_error(name: str, tmp_path: Path, pool: ReaderProcesses) -> None:
    rows = 40_000  # many pages of memory, most of them not read yet
    path = tmp_path / name
    wide = pa.table({"text": [f"{n:0100d}" for n in range(rows)]})
    if name == "a.parquet":
        pq.write_table(wide, path, compression="none", use_dictionary=False)
    else:
        with ipc.new_file(path, wide.schema) as writer:
            writer.write_table(wide)
    files = open_isolated(pool, path, columns=["text"])
    stream = files.stream(0, 0, batch_rows=100)
    next(stream)
    os.truncate(path, 4096)  # what was mapped behind this ends the process that touches it
    with pytest.raises(ol.ReaderError, match=r"has 4096 bytes where the listing found|cannot be read at row"):
        for _ in stream:
            pass
    assert read_all(open_isolated(pool, write(tmp_path / "next" / "b.parquet")))


def test_killed_readers_cost_no_row(tmp_path: Path, pool: ReaderProcesses) -> None:
    files = open_isolated(pool, write(tmp_path / "a.parquet", 800))
    expected = [row["n"] for row in read_all(files)]
    done, killed = threading.Event(), list[int]()

    def kill() -> None:
        while not done.wait(0.5) and len(killed) < 5:
            for pid in pool.pids:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with ThreadPoolExecutor(4) as threads:
            for rows in threads.map(lambda _: read_all(files, 2), range(4)):
                assert [row["n"] for row in rows] == expected
    finally:
        done.set()
        killer.join()
    assert killed


def test_a_stream_that_is_dropped_is_let_go(tmp_path: Path, pool: ReaderProcesses) -> None:
    files = open_isolated(pool, write(tmp_path / "a.parquet"))
    read_all(files)
    (pid,) = pool.pids
    for _ in range(8):
        stream = files.stream(0, 0, batch_rows=1)
        next(stream)
        del stream
    gc.collect()
    read_all(files)
    mapped = [m for m in psutil.Process(pid).memory_maps(grouped=False) if m.path.endswith("a.parquet")]
    assert len(mapped) <= 1


def test_nothing_is_left_when_they_close(tmp_path: Path) -> None:
    readers = ReaderProcesses(2)
    files = open_isolated(readers, write(tmp_path / "a.parquet"))
    stream = files.stream(0, 0, batch_rows=7)
    next(stream)
    (pid,) = readers.pids
    readers.close()
    with pytest.raises(ol.ClosedError):
        next(stream)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("what", ["stop", "park"])
def test_a_service_outlives_a_deadly_file(what: str, tmp_path: Path) -> None:
    for name in "ab":
        for number in range(3):
            path = tmp_path / name / f"{number}.parquet"
            path.parent.mkdir(exist_ok=True)
            pq.write_table(pa.table({"text": [[n] * (1 + n % 9) for n in range(120)]}), path, row_group_size=40)
    sample = ol.Text("text", tokenized=True)
    sources = [ol.Source(name, str(tmp_path / name), sample=sample, shuffle_bytes=300) for name in "ab"]
    job = ol.Job(sources, batch=ol.Batch(32, global_samples=8), seed=1)
    options: dict[str, Any] = {"cache": str(tmp_path / "cache"), "on_source_failure": what, "prefetch": 1}
    with ol.launch(job, mesh=ol.ClientPlaceTree(dp=1), runtime="local", **options) as service:
        client = iter(service.client(rank=0))
        next(client)
        for number in range(3):
            make_deadly(tmp_path / "b" / f"{number}.parquet")
        if what == "stop":
            with pytest.raises(ol.OverlordError, match=r"source 'b'|/b/\d.parquet"):
                for _ in range(60):
                    next(client)
        else:
            seen = [
                {sample.source for batch in next(client).microbatches for sample in batch.meta.sample_ids}
                for _ in range(60)
            ]
            assert seen[-1] == {"a"} and service.status()["sources"]["b"]["parked"]
        assert service.status()["sources"]["a"]


@pytest.mark.parametrize(
    "command",
    [
        ["run", "--steps", "2"],
        *(pytest.param(words, marks=pytest.mark.slow) for words in (["explain"], ["sources", "lint"])),
    ],
)
def test_a_command_names_the_file_that_ends_its_reader(command: list[str], tmp_path: Path, mixed_job: ol.Job) -> None:
    make_deadly(write(tmp_path / "bad.parquet"))
    job = tmp_path / "job.yaml"
    job.write_text(
        "sources:\n  - {name: web, path: bad.parquet, sample: {kind: text, column: text}}\n"
        f"tokenizer: {mixed_job.tokenizer}\n"
        "batch: {context_length: 16, global_samples: 4}\n"
    )
    verb = command[:1] if command[0] != "sources" else command[:2]
    line = [sys.executable, "-m", "overlord", *verb, str(job), *command[len(verb) :], "--cache", str(tmp_path / "c")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100)
    assert done.returncode in (1, 2), done.stdout + done.stderr
    told = " ".join((done.stdout + done.stderr).split())
    assert "bad.parquet" in told and "damaged" in told and "Traceback" not in told, told
