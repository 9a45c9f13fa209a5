"""Objects fetched in ranges, against a server that fails on demand."""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from overlord.errors import ReaderError, SourceError, SpecError
from overlord.readers.files import StoredFile, list_files, verify_unchanged
from overlord.readers.remote import fetching
from overlord.readers.remote.fetching import RangeLost, fetcher
from overlord.testing.object_server import Fault, ObjectServer, ServerFaults

from .conftest import read_all

DATA = random.Random(7).randbytes(24_000_000)
OPTIONS = {"access_key": "key", "secret_key": "secret"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    (tmp_path / "served" / "bucket" / "data").mkdir(parents=True)
    (tmp_path / "served" / "bucket" / "data" / "a.bin").write_bytes(DATA)
    with ObjectServer(tmp_path / "served", faults=ServerFaults(silence_s=1.0)) as running:
        yield running


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins with a fetcher that has seen nothing, and does not wait long between attempts."""
    fetcher.cache_clear()
    monkeypatch.setattr(fetching, "_FIRST_PAUSE_S", 0.01)


def options_of(server: ObjectServer) -> dict[str, Any]:
    return {"endpoint_override": server.url, **OPTIONS}


def stored(server: ObjectServer, name: str = "data/a.bin", scheme: str = "s3", **options: Any) -> StoredFile:
    if scheme == "s3":
        return list_files([f"s3://bucket/{name}"], options_of(server) | options, format="jsonl")[0]
    if scheme == "gs":
        options = {"endpoint_override": server.url, "anonymous": True} | options
        return list_files([f"gs://bucket/{name}"], options, format="jsonl")[0]
    return list_files([f"{server.url}/bucket/{name}"], format="jsonl")[0]


def every(number: int, *faults: Fault) -> Callable[[int], Fault | None]:
    return lambda count: faults[count // number % len(faults)] if count % number == 0 else None


@pytest.mark.parametrize("scheme", ["s3", "gs", "http"])
def test_any_range_is_what_is_there(scheme: str, server: ObjectServer):
    chance = random.Random(1)
    with stored(server, scheme=scheme).open() as native:
        for _ in range(60):
            at = chance.randrange(len(DATA))
            count = chance.choice([1, 10, 70_000, 3_000_000])
            assert native.read_at(min(count, len(DATA) - at), at) == DATA[at : at + count]
        native.seek(len(DATA) - 5)
        assert native.read() == DATA[-5:] and native.read(10) == b""


def test_what_is_read_front_to_back_takes_few_requests(server: ObjectServer):
    file = stored(server)
    server.counts.clear()
    digest = hashlib.sha256()
    with file.open_stream() as native:
        while chunk := native.read(100_000):
            digest.update(chunk)
    assert digest.digest() == hashlib.sha256(DATA).digest()
    assert server.counts["GET"] <= 6 and server.counts["bytes"] == len(DATA)
    assert fetcher()._held == 0


def test_one_small_read_fetches_little(server: ObjectServer):
    file = stored(server)
    server.counts.clear()
    with file.open() as native:
        assert native.read_at(8, len(DATA) - 8) == DATA[-8:]
    assert server.counts == {"GET": 1, "bytes": 8}


def test_many_places_of_a_file_are_read_at_the_same_time(server: ObjectServer):
    file = stored(server)
    server.counts.clear()
    with file.open() as native:
        starts = [0, 6_000_000, 12_000_000, 18_000_000]
        for at in range(0, 6_000_000, 250_000):
            for start in starts:
                assert native.read_at(250_000, start + at) == DATA[start + at : start + at + 250_000]
    assert server.counts["GET"] <= 24 and server.counts["bytes"] <= 1.3 * len(DATA)


def test_hundreds_of_open_files_hold_little(server: ObjectServer):
    file = stored(server)
    opened = [file.open() for _ in range(300)]
    for at in range(0, 3_000_000, 200_000):
        for native in opened:
            assert native.read_at(1000, at) == DATA[at : at + 1000]
    held = fetcher()._held
    for native in opened:
        native.close()
    assert held < 2.5 * fetching.BUDGET_BYTES and fetcher()._held == 0


def test_ranges_that_are_asked_for_together_are_joined(server: ObjectServer):
    file = stored(server)
    server.counts.clear()
    with file.open() as native:
        ranges = [(10_000_000, 10_100_000), (0, 5), (100, 2000), (10_150_000, 10_200_000)]
        parts = native.ranges.fetch(ranges)
        with pytest.raises(OSError, match=r"bytes 5 to 24000001 are not in a file of 24000000 bytes"):
            native.ranges.fetch([(5, len(DATA) + 1)])
        native.ranges.will_read(-5, 3)
    assert [bytes(part) for part in parts] == [DATA[start:stop] for start, stop in ranges]
    assert server.counts["GET"] == 2


def test_a_listing_takes_one_request(server: ObjectServer, tmp_path: Path):
    for number in range(30):
        (tmp_path / "served" / "bucket" / "data" / f"{number}.jsonl").write_text('{"a": 1}')
    for path, requests, count in (
        ("data/*.jsonl", {"LIST": 1}, 30),
        ("data/3.jsonl", {"HEAD": 1}, 1),
        ("data", {"LIST": 1}, 30),
        ("data/", {"LIST": 1}, 30),
        ("**/1?.jsonl", {"LIST": 1}, 10),
    ):
        server.counts.clear()
        files = list_files([f"s3://bucket/{path}"], options_of(server))
        assert len(files) == count and server.counts == requests, path
        assert all(file.remote is not None and file.remote.etag for file in files)
    google = list_files(["gs://bucket/data/*.jsonl"], {"endpoint_override": server.url, "anonymous": True})
    assert len(google) == 30


@pytest.mark.parametrize("fault", ["503", "cut", "short", "silence"])
def test_a_request_that_fails_is_repeated(fault: Fault, server: ObjectServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetching, "_SLOWEST_BYTES_S", 1 << 40)
    server.faults.choose = every(3, fault)
    file = stored(server, request_timeout=0.3)
    with file.open() as native:
        assert native.read() == DATA
        for at in range(0, len(DATA), 3_000_000):
            assert native.read_at(1000, at) == DATA[at : at + 1000]
    counts = fetcher().counters.report()
    assert server.counts[fault] > 0 and counts["retries"] >= server.counts[fault] - counts["hedges"] > 0


def test_a_late_request_is_sent_a_second_time(server: ObjectServer, monkeypatch: pytest.MonkeyPatch):
    file = stored(server)
    server.faults.silence_s = 20.0
    with file.open() as native:
        for at in range(0, 60_000_00, 200_000):
            native.ranges.fetch([(at, at + 1000)])
        server.faults.choose = lambda number: "silence" if number == 30 else None
        began = time.perf_counter()
        assert bytes(native.ranges.fetch([(50, 1050)])[0]) == DATA[50:1050]
    assert time.perf_counter() - began < 5 and fetcher().counters.report()["hedges"] == 1


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_busy_server_is_given_the_pause_that_it_asks_for(scheme: str, server: ObjectServer):
    file = stored(server, scheme=scheme)
    server.counts.clear()
    server.faults.retry_after = "2"
    server.faults.busy_until = time.monotonic() + 1.5
    with file.open() as native:
        assert native.read_at(10, 0) == DATA[:10]
    # The refused request, one that looks for the pause, and the one that comes after it: not one of those that the
    # pauses of the tests (10 ms at first) would have made meanwhile.
    assert server.counts == {"503": 2, "GET": 1, "bytes": fetching.MOST_RANGE_BYTES >> 7}
    assert fetching._seconds_of("1") == 1.0 and fetching._seconds_of("soon") == 0.0


def test_a_server_that_always_fails_ends_in_words(server: ObjectServer):
    server.faults.choose = lambda _: "503"
    file = stored(server)
    with (
        file.open() as native,
        pytest.raises(RangeLost, match=r"of s3://bucket/data/a.bin did not come in 6 attempts: .*503"),
    ):
        native.read_at(10, 0)


def test_requests_are_repeated_for_as_long_as_retry_time_limit_says(server: ObjectServer):
    file = stored(server, scheme="gs", retry_time_limit=2)
    server.faults.choose = lambda _: "503"
    began = time.perf_counter()
    with file.open() as native, pytest.raises(RangeLost, match=r"did not come in \d+ attempts"):
        native.read_at(10, 0)
    assert time.perf_counter() - began >= 2 and server.counts["503"] > fetching._ATTEMPTS


@pytest.mark.parametrize("path", ["s3://bucket/data/*.bin", "s3://bucket/data/a.bin"])
def test_a_store_that_never_answers_a_listing_ends_in_words(path: str, server: ObjectServer):
    server.latency_s = 5.0
    with pytest.raises(SourceError, match=rf"cannot list '{re.escape(path)}': .*timed out"):
        list_files([path], options_of(server) | {"request_timeout": 0.05}, format="jsonl")


@pytest.mark.parametrize(
    ("scheme", "option"), [("gs", "project_id"), ("s3", "allow_bucket_creation"), ("s3", "allow_delayed_open")]
)
def test_options_that_act_on_writing_only_are_refused(scheme: str, option: str):
    value = "p" if option == "project_id" else True
    with pytest.raises(SpecError, match=rf"storage option '{option}' is unknown for {scheme} files"):
        list_files([f"{scheme}://bucket/a.jsonl"], {option: value})


def test_a_file_that_failed_can_be_read_again(server: ObjectServer):
    server.faults.choose = lambda _: "503"
    with stored(server).open() as native:
        with pytest.raises(RangeLost):
            native.read_at(10, 0)
        server.faults.choose = lambda _: None
        assert native.read_at(10, 0) == DATA[:10]


def test_a_listing_is_repeated_and_ends_in_words(server: ObjectServer):
    server.__exit__(None, None, None)
    with pytest.raises(SourceError, match=r"cannot list 's3://bucket/data/a.bin': .*Connection refused"):
        stored(server)


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_an_object_that_is_replaced_is_never_mixed(scheme: str, server: ObjectServer, tmp_path: Path):
    path = tmp_path / "served" / "bucket" / "data" / "a.bin"
    file = stored(server, scheme=scheme)
    with file.open() as native:
        assert native.read_at(10, 0) == DATA[:10]
        path.write_bytes(bytes(len(DATA)))
        with pytest.raises(ReaderError, match=r"a.bin was written to after it was listed; .*start a new run"):
            native.read_at(10, 9_000_000)
        path.write_bytes(b"12345")
        with pytest.raises(ReaderError, match=r"a.bin has 5 bytes where the listing found 24000000"):
            native.read_at(10, 18_000_000)
        path.unlink()
        with pytest.raises(ReaderError, match=r"a.bin is gone"):
            native.read_at(10, 20_000_000)
    verify_unchanged(file)  # it asks nothing: requests do


def test_parquet_of_a_replaced_object_stops_with_its_name(server: ObjectServer, tmp_path: Path, open_source):
    path = tmp_path / "served" / "bucket" / "data" / "a.parquet"
    table = pa.table({"text": [f"row {n} " * 50 for n in range(5000)]})
    pq.write_table(table, path, row_group_size=1000, compression="none")
    source = open_source("s3://bucket/data/a.parquet", columns=["text"], storage_options=options_of(server))
    source.blocks(0)
    pq.write_table(table.slice(1), path, row_group_size=1000, compression="none")
    with pytest.raises(ReaderError, match=r"s3://bucket/data/a.parquet has .* bytes where the listing found"):
        read_all(source)


def test_keys_that_expire_are_read_anew(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    keys = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))

    def write(token: str) -> None:
        keys.write_text(f"[default]\naws_access_key_id = a\naws_secret_access_key = b\naws_session_token = {token}\n")

    write("first")
    server.faults.token = "first"
    (file,) = list_files(["s3://bucket/data/a.bin"], {"endpoint_override": server.url}, format="jsonl")
    with file.open() as native:
        assert native.read_at(10, 0) == DATA[:10]
        server.faults.token = "second"
        timer = threading.Timer(0.05, write, ["second"])
        timer.start()
        assert native.read_at(10, 9_000_000) == DATA[9_000_000:][:10]
        timer.join()
    assert fetcher().counters.report()["refreshed"] >= 1
    server.faults.token = "third"
    with file.open() as native, pytest.raises(OSError, match=r"the credentials are refused \(.*403 Forbidden"):
        native.read_at(10, 0)


def test_a_token_of_an_http_server(server: ObjectServer):
    server.faults.token = "secret"
    url = f"{server.url}/bucket/data/a.bin"
    with pytest.raises(SourceError, match=r"cannot list .*credentials are refused"):
        list_files([url], format="jsonl")
    (file,) = list_files([url], {"token": "secret"}, format="jsonl")
    with file.open() as native:
        assert native.read_at(3, 0) == DATA[:3]
    assert "secret" not in repr(file)


def test_what_an_http_server_cannot_do_is_refused(server: ObjectServer):
    with pytest.raises(SourceError, match=r"an HTTP server lists no folders. Name each file by its URL"):
        list_files([f"{server.url}/bucket/data/*.jsonl"])
    with pytest.raises(SourceError, match=r"matches no file"):
        list_files([f"{server.url}/bucket/data/b.jsonl"])
    with pytest.raises(SpecError, match=r"has a query; objects of HTTP servers are named by their path"):
        list_files([f"{server.url}/bucket/data/a.jsonl?X-Amz-Signature=abc"])
    with pytest.raises(SpecError, match=r"'region' is unknown for http files; .*Allowed are: .*token"):
        list_files([f"{server.url}/bucket/data/a.jsonl"], {"region": "x"})


def test_names_with_special_characters(server: ObjectServer, tmp_path: Path):
    names = ["a b.jsonl", "100%.jsonl", "ü+#.jsonl", "x=1&y.jsonl"]
    for name in names:
        (tmp_path / "served" / "bucket" / "data" / name).write_text(json.dumps({"a": name}))
    files = list_files(["s3://bucket/data/*.jsonl"], options_of(server))
    assert {file.path for file in files} == {f"s3://bucket/data/{name}" for name in names}
    for file in files:
        with file.open() as native:
            assert json.loads(native.read())["a"] == file.path.rpartition("/")[2]


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_sources_are_read_through_faults(scheme: str, server: ObjectServer, tmp_path: Path, open_source):
    rows = [{"text": f"text {n} " * 100} for n in range(2000)]
    folder = tmp_path / "served" / "bucket" / "data"
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), folder / "b.parquet", row_group_size=300)
    server.faults.choose = every(4, "503", "cut", "short")
    for name in ("a.jsonl", "b.parquet"):
        path = f"s3://bucket/data/{name}" if scheme == "s3" else f"{server.url}/bucket/data/{name}"
        more = {"storage_options": options_of(server)} if scheme == "s3" else {}
        source = open_source(path, columns=["text"], **more)
        assert [row["text"].decode() for row in read_all(source)] == [row["text"] for row in rows]
