"""Sources behind an object store that answers after 25 ms, against the same files on the local disk.

The store is a server on the loopback device in a process of its own; it counts requests. Every run of a service begins
with an empty cache, unless it says otherwise.

    first step    8 and 306 Parquet sources of 24 MB (row groups of 8 MB): seconds from `launch` to the first step, and
                  requests a source up to then
    feed          texts of 3,000 characters and JPEGs, as in `feed`: rates of rounds that alternate, after a warm-up
    faults        the same texts, while 1 % of the requests are answered 503, cut short, of a wrong length, or after 5 s
                  of silence: the rate, and whether the digests of the stream are those of the local files
    epochs        requests for bytes of later epochs, over those of the first one: with room for all on disk, with half;
                  64 files of 16 MB, four windows of the shuffle: the window that is read needs room beside what is kept
    bytes         what the fetcher of one process takes alone, without reading rows

The rate of the local files is what the cores allow; the store shares the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol
from benchmarks.feed import TARGET, consume, write_images, write_texts, write_tokenizer
from benchmarks.measuring import arguments, publish
from overlord.readers.files import list_files
from overlord.readers.remote.fetching import MOST_RANGE_BYTES, fetcher
from overlord.testing import stream_digests

LATENCY_S = 0.025
FAULTS = 0.01
FEED_BAR, FAULTS_BAR, REQUESTS_BAR, HALF_BAR, BYTES_BAR = 0.9, 0.8, 4.0, 0.55, 4.0
WARM_UP_S = 3.0
OPTIONS = {"access_key": "reader", "secret_key": "of nothing"}


@dataclass(frozen=True)
class Store:
    """A running server."""

    port: int

    @property
    def options(self) -> dict[str, str]:
        """Storage options of a source that it holds."""
        return {"endpoint_override": f"http://127.0.0.1:{self.port}", **OPTIONS}

    def counts(self, *, again: bool = False) -> dict[str, int]:
        """Return what was requested; count anew with `again`."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/-/counts", method="POST" if again else "GET")
        with urllib.request.urlopen(request) as answer:
            return dict(json.load(answer))


@contextlib.contextmanager
def store(folder: Path, faults: float = 0.0) -> Iterator[Store]:
    """Serve a folder, whose folders are buckets, in another process."""
    command = [sys.executable, "-m", "overlord.testing.object_server", str(folder)]
    command += ["--latency", str(LATENCY_S), "--faults", str(faults)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Store(int(process.stdout.readline()))
        finally:
            process.kill()


Where = Callable[[str], dict[str, Any]]
"""Given the path of files below the bucket, the path and the storage options of a source."""


def local(folder: Path) -> Where:
    """Return where files of the disk are."""
    return lambda path: {"path": str(folder / "bucket" / path)}


def remote(served: Store) -> Where:
    """Return where files of a store are."""
    return lambda path: {"path": f"s3://bucket/{path}", "storage_options": served.options}


# -- the first step ------------------------------------------------------------------------------------------------


def write_sources(folder: Path, count: int, groups: int, rows: int) -> None:
    """Write one file of some row groups, under many names."""
    luck = np.random.default_rng(1)
    lengths = luck.integers(100, 1900, groups * rows)
    table = pa.table({"ids": pa.array([luck.integers(0, 50_000, n, np.int32) for n in lengths])})
    path = folder / "bucket" / "first.bin"
    pq.write_table(table, path, row_group_size=rows, compression="none", use_dictionary=False)
    for number in range(count):
        (folder / "bucket" / f"s{number:03d}.parquet").symlink_to(path)


def first_step(where: Where, count: int, cache: Path) -> float:
    """Return the seconds to the first step of a service over so many sources."""
    sample = ol.Text("ids", tokenized=True)
    sources = [ol.Source(f"s{n:03d}", **where(f"s{n:03d}.parquet"), sample=sample, weight=1.0) for n in range(count)]
    job = ol.Job(sources=sources, batch=ol.Batch(2048, global_samples=2 * count))
    began = time.perf_counter()
    with ol.launch(job, cache=str(cache)) as service, service.client() as client:
        next(client).microbatches[0]
        return time.perf_counter() - began


# -- the feed ------------------------------------------------------------------------------------------------------


def write_feed(folder: Path, pictures: int, copies: int) -> None:
    """Write texts and pictures as Parquet, and their tokenizers."""
    bucket = folder / "bucket"
    for kind in ("texts", "images"):
        (bucket / kind).mkdir(parents=True)
    texts = write_texts(folder)
    (folder / "texts.jsonl").unlink()
    shutil.move(folder / "tokenizer.json", folder / "texts.json")
    for number in range(copies):
        turned = texts[number:] + texts[:number]
        pq.write_table(pa.table({"text": turned}), bucket / "texts" / f"{number:02d}.parquet", row_group_size=1000)
    write_images(bucket / "images", pictures)
    shutil.move(write_tokenizer(folder), folder / "images.json")


def feed_job(kind: str, where: Where, folder: Path, step_samples: int) -> ol.Job:
    """Return the job that reads them."""
    text, picture = ol.Text("text"), ol.ImageText("jpg", "caption", patch=16, merge=2, size=TARGET)
    return ol.Job(
        sources=[ol.Source(kind, **where(f"{kind}/*.parquet"), sample=text if kind == "texts" else picture)],
        tokenizer=str(folder / f"{kind}.json"),
        batch=ol.Batch(4096, global_samples=step_samples, microbatch_tokens=16384),
    )


def fed(kind: str, where: Where, folder: Path, seconds: float) -> float:
    """Return what a service delivers a second: pictures or tokens."""
    cache = Path(tempfile.mkdtemp(dir=folder))
    try:
        with (
            ol.launch(feed_job(kind, where, folder, 64), prefetch=4, cache=str(cache)) as service,
            service.client() as client,
        ):
            consume(client, min(WARM_UP_S, seconds), "image" if kind == "images" else "text")
            done, took = consume(client, seconds, "image" if kind == "images" else "text")
            return done / took
    finally:
        shutil.rmtree(cache)


def compare_feeds(folder: Path, seconds: float, rounds: int) -> dict[str, Any]:
    """Return the rates from the store over those from the disk."""
    figures: dict[str, Any] = {}
    with store(folder) as served, store(folder, FAULTS) as faulty:
        for kind in ("texts", "images"):
            here, there, failing = [], [], []
            served.counts(again=True)
            for _ in range(rounds):
                here.append(fed(kind, local(folder), folder, seconds))
                there.append(fed(kind, remote(served), folder, seconds))
                if kind == "texts":
                    failing.append(fed(kind, remote(faulty), folder, seconds))
            counts = served.counts()
            figures |= {
                f"ratio_{kind}": float(np.mean(there) / np.mean(here)), f"local_{kind}_rounds": here,
                f"remote_{kind}_rounds": there,
                f"requests_per_gb_{kind}": counts["GET"] / max(counts["bytes"], 1) * 1e9,
            }  # fmt: skip
            if failing:
                figures |= {"ratio_faults": float(np.mean(failing) / np.mean(here)), "faulty_rounds": failing}
        figures["faults_met"] = sum(faulty.counts().get(name, 0) for name in ("503", "cut", "short", "silence"))
        figures["ratio"] = min(figures["ratio_texts"], figures["ratio_images"])

        def digests(where: Where) -> Any:
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                return stream_digests(feed_job("texts", where, folder, 64), steps=40, runtime="local", cache=cache)

        figures["same_digests"] = digests(local(folder)) == digests(remote(faulty))
    return figures


# -- epochs --------------------------------------------------------------------------------------------------------


def epochs(folder: Path, count: int, rows: int) -> dict[str, Any]:
    """Return the requests of later epochs over those of the first."""
    luck = np.random.default_rng(2)
    (folder / "bucket" / "epochs").mkdir()
    table = pa.table({"ids": pa.array([luck.integers(0, 50_000, 500, np.int32) for _ in range(rows)])})
    path = folder / "bucket" / "epoch.bin"
    pq.write_table(table, path, row_group_size=rows // 2, compression="none", use_dictionary=False)
    for number in range(count):
        (folder / "bucket" / "epochs" / f"{number:02d}.parquet").symlink_to(path)
    total = count * path.stat().st_size
    step = 512
    steps = count * rows // step

    def gets(times: int, room: int) -> int:
        served.counts(again=True)
        source = ol.Source("s", **remote(served)("epochs/*.parquet"), sample=ol.Text("ids", tokenized=True))
        job = ol.Job(sources=[source], batch=ol.Batch(512, global_samples=step), max_steps=times * steps)
        cache = tempfile.mkdtemp(dir=folder)
        with ol.launch(job, cache=cache, cache_bytes=room) as service, service.client() as client:
            for _ in client:
                pass
        shutil.rmtree(cache)
        return served.counts().get("GET", 0)

    with store(folder) as served:
        first, all_kept, half_kept = gets(1, 4 * total), gets(3, 4 * total), gets(3, total // 2)
    return {
        "epoch_mb": total / 1e6, "epoch_gets": first, "gets_all_kept": max(0, all_kept - first) / (2 * first),
        "gets_half_kept": (half_kept - first) / (2 * first),
    }  # fmt: skip


# -- bytes alone ---------------------------------------------------------------------------------------------------


def bytes_alone(folder: Path, gigabytes: float) -> float:
    """Return how many GB/s one process fetches."""
    path = folder / "bucket" / "large.parquet"
    with path.open("wb") as handle:
        handle.truncate(512 << 20)
    with store(folder) as served:
        remote_file = list_files(["s3://bucket/large.parquet"], served.options)[0].remote
        assert remote_file is not None
        ranges = [(at, at + MOST_RANGE_BYTES) for at in range(0, 512 << 20, MOST_RANGE_BYTES)]
        began, done = time.perf_counter(), 0
        while done < gigabytes * 1e9:
            futures = [fetcher().fetch(remote_file, start, stop) for start, stop in ranges]
            done += sum(len(future.result()) for future in futures)
        return done / 1e9 / (time.perf_counter() - began)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="only see that it works, with less data and fewer sources")
    parser.add_argument("--only", choices=("first", "feed", "epochs", "bytes"), help="one part of it")
    options = parser.parse_args()
    figures = measure(options)
    publish("remote", figures, options.json)


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Measure all parts, or the one that was chosen."""
    quick = options.quick
    figures: dict[str, object] = {
        "bar": FEED_BAR, "faults_bar": FAULTS_BAR, "requests_bar": REQUESTS_BAR, "half_bar": HALF_BAR,
        "none_bar": 0.0, "bytes_bar": BYTES_BAR, "load_before": os.getloadavg()[0],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bucket").mkdir()
        if options.only in (None, "first"):
            counts = (2, 4) if quick else (8, 306)
            write_sources(folder, counts[-1], 3, 100 if quick else 2000)
            with store(folder) as served:
                for shown, count in zip((8, 306), counts, strict=True):
                    figures[f"local_first_s_{shown}"] = first_step(local(folder), count, folder / f"local{count}")
                    served.counts(again=True)
                    figures[f"first_s_{shown}"] = first_step(remote(served), count, folder / f"remote{count}")
                    asked = served.counts()
                    requests = sum(asked.get(kind, 0) for kind in ("GET", "HEAD", "LIST"))
                    figures[f"requests_a_source_{shown}"] = requests / count
                    figures[f"mb_a_source_{shown}"] = asked.get("bytes", 0) / count / 1e6
        if options.only in (None, "feed"):
            write_feed(folder, 256 if quick else 4096, 2 if quick else 24)
            figures |= compare_feeds(folder, options.seconds, options.rounds)
        if options.only in (None, "epochs"):
            figures |= epochs(folder, 2 if quick else 64, 1024 if quick else 8192)
        if options.only in (None, "bytes"):
            figures["bytes_gb_s"] = bytes_alone(folder, 0.5 if quick else 8.0)
    return figures


if __name__ == "__main__":
    main()
