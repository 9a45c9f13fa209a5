"""Ranges of remote objects on disk: shared, limited, never torn, and never the only copy."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from overlord.cli.main import app
from overlord.readers.files import StoredFile, list_files
from overlord.readers.remote import fetching, range_cache
from overlord.readers.remote.fetching import MOST_RANGE_BYTES, fetcher
from overlord.readers.remote.range_cache import RangeCache
from overlord.readers.remote.range_files import ahead_queue
from overlord.testing.object_server import ObjectServer

MB = 1 << 20
DATA = random.Random(3).randbytes(16 * MB)
OPTIONS = {"access_key": "key", "secret_key": "secret"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    folder = tmp_path / "served" / "bucket"
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.jsonl").write_bytes(DATA[number:] + DATA[:number])
    with ObjectServer(tmp_path / "served") as running:
        yield running


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher.cache_clear()
    ahead_queue.cache_clear()
    monkeypatch.setattr(fetching, "_FIRST_PAUSE_S", 0.01)


def files_of(server: ObjectServer, cache: RangeCache, names: str = "*") -> list[StoredFile]:
    options = {"endpoint_override": server.url, **OPTIONS}
    files = list_files([f"s3://bucket/{names}.jsonl"], options)
    cache.keep_for([file.remote for file in files if file.remote])
    return [replace(file, ranges=cache) for file in files]


def content(file: StoredFile, step: int = 300_000) -> bytes:
    parts: list[bytes] = []
    with file.open() as native:
        while part := native.read(step):
            parts.append(part)
    return b"".join(parts)


def expected(file: StoredFile) -> bytes:
    number = int(file.path.rpartition("/")[2].partition(".")[0])
    return DATA[number:] + DATA[:number]


def entries(cache: RangeCache) -> list[Path]:
    return [path for path in (cache.folder / "objects").rglob("*-*") if not path.name.endswith(".part")]


def test_a_second_epoch_asks_for_nothing(server: ObjectServer, tmp_path: Path):
    cache = RangeCache(tmp_path / "cache", 1 << 30)
    files = files_of(server, cache)
    assert all(content(file) == expected(file) for file in files)
    server.counts.clear()
    assert all(content(file, 1_234_567) == expected(file) for file in files)
    assert server.counts == {}
    other = RangeCache(tmp_path / "cache", 1 << 30)  # another process, and another launch
    assert all(content(file) == expected(file) for file in files_of(server, other))
    assert set(server.counts) == {"LIST"}
    assert cache.usage() == (4, len(entries(cache)), 4 * len(DATA))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_limit_leaves_as_many_hits_as_fit(share: float, server: ObjectServer, tmp_path: Path):
    limit = int(4 * len(DATA) * share)
    cache = RangeCache(tmp_path / "cache", limit)
    files = files_of(server, cache)
    bytes_of: list[int] = []
    chance = random.Random(5)
    for _ in range(4):
        server.counts.clear()
        cache.keep_for([file.remote for file in files if file.remote], begins=True)
        chance.shuffle(files)
        for file in files:
            with file.open() as native:
                for at in chance.sample(range(0, len(DATA), 2 * MB), 8):
                    assert native.ranges.fetch([(at, at + 2 * MB)])[0] == expected(file)[at : at + 2 * MB]
            assert cache.usage()[2] <= limit
        bytes_of.append(server.counts["bytes"])
    assert bytes_of[0] <= 1.1 * 4 * len(DATA)  # on a busy host a late request may be sent twice
    # What is being read has room, too: a quarter of all at a time, of which the share is there already.
    most = (1 - share + 0.25 * (1 - share) + 0.06) * 4 * len(DATA)
    assert all(nbytes <= most for nbytes in bytes_of[1:]), bytes_of


def test_what_no_running_process_reads_goes_first(server: ObjectServer, tmp_path: Path):
    ended = RangeCache(tmp_path / "cache", 40 * MB)
    (old,) = files_of(server, ended, "0")
    assert content(old) == expected(old) and ended._live is not None
    os.close(ended._live)  # as the end of a process does
    cache = RangeCache(tmp_path / "cache", 40 * MB)
    files = files_of(server, cache, "[1-3]")
    for file in files[:2]:
        assert content(file) == expected(file)
    kept = cache.names()
    assert kept[files[0].path][1] == kept[files[1].path][1] == 16 * MB
    assert kept.get(old.path, (0, 0))[1] < 16 * MB


def test_no_process_makes_others_lose_what_they_have_room_for(server: ObjectServer, tmp_path: Path):
    large = RangeCache(tmp_path / "cache" / "remote", 1 << 30)
    files = files_of(server, large)
    small = RangeCache(tmp_path / "cache" / "remote", 20 * MB)
    for file in files_of(server, small):
        content(file)
    assert large.usage()[2] == 4 * len(DATA)
    assert range_cache.range_cache(tmp_path / "cache").limit in (20 * MB, 1 << 30)  # that of the last one
    assert range_cache.range_cache(tmp_path / "other").limit == 4 << 30
    assert large._live is not None
    os.close(large._live)  # that process has ended
    content(replace(files[0], ranges=small))
    (tmp_path / "served" / "bucket" / "5.jsonl").write_bytes(DATA)
    content(files_of(server, small, "5")[0])
    assert large.usage()[2] <= 20 * MB


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "zeros", "head"])
def test_a_damaged_entry_is_fetched_again(damage: str, server: ObjectServer, tmp_path: Path):
    cache = RangeCache(tmp_path / "cache", 1 << 30)
    file = files_of(server, cache)[0]
    assert content(file) == expected(file)
    for path in entries(cache):
        held = bytearray(path.read_bytes())
        match damage:
            case "flip":
                held[len(held) // 2] ^= 1
            case "cut":
                del held[len(held) // 2 :]
            case "empty":
                held.clear()
            case "zeros":
                held[len(held) // 2 :] = bytes(len(held) - len(held) // 2)
            case _:
                held[30] ^= 1
        path.write_bytes(held)
    assert content(file) == expected(file)
    assert fetcher().counters.report()["damaged"] > 0
    assert content(file) == expected(file)  # of a damaged entry, what was read before the damage is gone as well
    server.counts.clear()
    assert content(file) == expected(file) and not server.counts


def test_another_version_has_entries_of_its_own(server: ObjectServer, tmp_path: Path):
    cache = RangeCache(tmp_path / "cache", 1 << 30)
    file = files_of(server, cache)[0]
    assert content(file) == expected(file)
    (tmp_path / "served" / "bucket" / "0.jsonl").write_bytes(bytes(len(DATA)))
    assert content(file) == expected(file)  # what was listed is still there
    assert content(files_of(server, cache)[0]) == bytes(len(DATA))


READ = """
import hashlib, sys
from dataclasses import replace
from pathlib import Path
from overlord.readers.files import list_files
from overlord.readers.remote.range_cache import RangeCache
url, folder = sys.argv[1:3]
cache = RangeCache(Path(folder), 1 << 30)
digest = hashlib.sha256()
for file in list_files(["s3://bucket/*.jsonl"], {"endpoint_override": url, "access_key": "a", "secret_key": "b"}):
    with replace(file, ranges=cache).open() as native:
        while part := native.read(300_000):
            digest.update(part)
print(digest.hexdigest(), flush=True)
"""


def reader(server: ObjectServer, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", READ, server.url, str(cache)], stdout=subprocess.PIPE, text=True)


def test_two_processes_share_a_cache_and_fetch_once(server: ObjectServer, tmp_path: Path):
    server.latency_s = 0.05
    both = [reader(server, tmp_path / "cache") for _ in range(2)]
    digests = {process.communicate(timeout=60)[0] for process in both}
    assert len(digests) == 1 and all(process.returncode == 0 for process in both)
    assert server.counts["bytes"] <= 1.1 * 4 * len(DATA)


def test_a_process_that_is_killed_leaves_no_entry_in_the_way(server: ObjectServer, tmp_path: Path):
    server.faults.hold = threading.Event()
    process = reader(server, tmp_path / "cache")
    while not list(tmp_path.glob("cache/objects/*/*/.*.part")):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    server.faults.hold.set()
    cache = RangeCache(tmp_path / "cache", 1 << 30)
    assert all(content(file) == expected(file) for file in files_of(server, cache))
    assert not list(tmp_path.glob("cache/objects/*/*/.*.part"))


def test_a_process_that_is_stopped_is_not_waited_for_for_ever(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(range_cache, "_MOST_WAIT_S", 0.2)
    cache = RangeCache(tmp_path / "cache", 1 << 30)
    file = files_of(server, cache)[0]
    assert file.remote is not None
    claim = cache.claim(file.remote, 0, 8 * MB)  # of a process that does not go on
    assert claim is not None
    with pytest.raises(range_cache.BeingFetched):
        cache.claim(file.remote, 0, 8 * MB)
    assert content(file) == expected(file)
    claim.fill(memoryview(DATA[: 8 * MB]))  # nor does it disturb when it does
    assert content(file) == expected(file) and cache.is_on


def test_a_full_disk_turns_the_cache_off(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    cache = RangeCache(tmp_path / "cache", 1 << 30)
    files = files_of(server, cache)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(range_cache, "_write_all", full)
    assert all(content(file) == expected(file) for file in files)
    assert [record.message for record in caplog.records if "cannot be written" in record.message] == [
        f"the cache of remote files in {tmp_path / 'cache'} cannot be written (No space left on device): nothing is "
        "kept there from now on, and what is read again is fetched again. Free some of the disk, or set a smaller "
        "cache_bytes."
    ]
    assert not entries(cache) and not list(tmp_path.glob("cache/objects/*/*/.*.part"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_small_disk_that_is_full(server: ObjectServer, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("this host lets nothing be mounted")
    try:
        cache = RangeCache(disk / "cache", 1 << 30)
        assert all(content(file) == expected(file) for file in files_of(server, cache))
        assert not cache.is_on
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_folder_that_is_removed_while_files_are_read(server: ObjectServer, tmp_path: Path):
    cache = RangeCache(tmp_path / "cache", 1 << 30)
    for file in files_of(server, cache):
        with file.open() as native:
            data = native.read(6 * MB)
            shutil.rmtree(cache.folder)
            assert data + native.read() == expected(file)
        assert content(file) == expected(file)
    assert cache.is_on


def test_entries_that_cannot_be_opened_are_fetched(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = RangeCache(tmp_path / "cache", 1 << 30)
    file = files_of(server, cache)[0]
    content(file)

    def no_more_files(*_: Any) -> None:
        return None

    monkeypatch.setattr(cache, "_read_entry", no_more_files)
    assert content(file) == expected(file)


def test_what_is_kept_is_private(server: ObjectServer, tmp_path: Path):
    cache = RangeCache(tmp_path / "cache", 1 << 30)
    content(files_of(server, cache)[0])
    for path in [cache.folder, *cache.folder.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_what_is_fetched_ahead_is_not_fetched_again(server: ObjectServer, tmp_path: Path):
    server.latency_s = 0.05
    cache = RangeCache(tmp_path / "cache", 1 << 30)
    file = files_of(server, cache)[1]
    assert file.remote is not None
    server.counts.clear()
    ahead_queue().put(file.remote, cache, [(0, 6 * MB), (6 * MB, 12 * MB)])
    with file.open() as native:
        assert native.read_at(12 * MB, 0) == expected(file)[: 12 * MB]
    assert server.counts["GET"] == 2 and server.counts["bytes"] == 12 * MB
    assert MOST_RANGE_BYTES == 8 * MB and fetcher()._held == 0


def test_the_command_shows_and_clears_it(server: ObjectServer, tmp_path: Path):
    cache = RangeCache(tmp_path / "cache" / "remote", 1 << 30)
    content(files_of(server, cache)[2])
    run = CliRunner().invoke
    shown = run(app, ["sources", "cache", "--cache", str(tmp_path / "cache")])
    assert (
        shown.exit_code == 0
        and "s3://bucket/2.jsonl" in shown.output
        and "1 remote file, 16.8\N{NARROW NO-BREAK SPACE}MB" in shown.output
    )
    found = json.loads(run(app, ["sources", "cache", "--cache", str(tmp_path / "cache"), "--json"]).output)
    assert found["bytes"] == len(DATA) and found["freed"] is None and found["files"][0]["bytes"] == len(DATA)
    found = json.loads(run(app, ["sources", "cache", "--clear", "--cache", str(tmp_path / "cache"), "--json"]).output)
    assert (found["freed"], found["bytes"], found["files"]) == (len(DATA), 0, [])
    empty = run(app, ["sources", "cache", "--cache", str(tmp_path / "nothing")])
    assert empty.exit_code == 0 and "0 remote files, 0" in empty.output and not (tmp_path / "nothing").exists()
