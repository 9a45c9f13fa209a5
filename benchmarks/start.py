"""Time from `launch` to the first step of a `local` service over many sources, and the samples/s behind it.

    parquet       306 sources, one file of 24 MB each, in row groups of 8 MB (snappy, text), as the paper has many
    one group     20 sources of one row group of 256 MB each
    gzip          306 sources of .jsonl.gz that hold 50 MB of lines each

Files are in the page cache; the kernels and the tokenizer are cached, the index of the files is not. A source is one of
a few files, linked under a name of its own: what a file is indexed and read with does not know of the others. What all
processes of the service have written to disk until the first step is read from /proc, and of the folder of the cache.
The rate is that of the steps behind the first, with 306 sources against 16 of them, in turns.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol
from benchmarks.feed import write_tokenizer
from benchmarks.measuring import arguments, publish

SOURCES, FEW, LARGE = 306, 16, 20
BARS = {"parquet": 6.0, "one_group": 3.0, "gzip": 8.0}
"""Seconds to the first step, on two cores that have nothing else to do."""
RATE_BAR = 0.95
WRITTEN_BAR_MB = 4.0
"""The indices of the files, and the journal."""
STEP_SAMPLES = 2 * SOURCES
WORDS = np.array(["a", "picture", "of", "number", "with", "some", "words", "below", "it"])


def texts(megabytes: float, seed: int) -> list[str]:
    """Return rows of words, so many megabytes in all."""
    luck = np.random.default_rng(seed)
    vocabulary = [f"{word}{number}" for word in WORDS.tolist() for number in range(400)]
    rows: list[str] = []
    left = megabytes * 1e6
    while left > 0:
        rows.append(" ".join(vocabulary[at] for at in luck.integers(0, len(vocabulary), int(luck.integers(50, 900)))))
        left -= len(rows[-1])
    return rows


def write_file(path: Path, rows: list[str], group_mb: float) -> None:
    """Write a Parquet file in row groups of about so many megabytes, or lines that are compressed."""
    if path.suffix == ".parquet":
        table = pa.table({"text": rows, "id": np.arange(len(rows))})
        mean = sum(map(len, rows)) / len(rows)
        pq.write_table(table, path, row_group_size=max(1, int(group_mb * 1e6 / mean)))
    else:
        with gzip.open(path, "wt", compresslevel=1, encoding="utf-8") as handle:
            handle.writelines(json.dumps({"text": text}) + "\n" for text in rows)


def write_sources(folder: Path, count: int, megabytes: float, group_mb: float, suffix: str) -> ol.Job:
    """Write sources of one file each: a few files, and links to them."""
    folder.mkdir()
    written = [folder / f"file{number}{suffix}" for number in range(min(count, 4))]
    for number, path in enumerate(written):
        write_file(path, texts(megabytes, number), group_mb)
    sources: list[ol.Source] = []
    for number in range(count):
        path = folder / f"s{number:03d}{suffix}"
        os.link(written[number % len(written)], path)
        sources.append(ol.Source(path.name.partition(".")[0], str(path), sample=ol.Text("text")))
    batch = ol.Batch(2048, global_samples=min(STEP_SAMPLES, 2 * max(count, FEW)))
    return ol.Job(sources=sources, tokenizer=write_tokenizer(folder), batch=batch)


def written_bytes(root: psutil.Process) -> int:
    """Return what the processes of a service have written to files, other than what they have removed again."""
    processes = [root, *root.children(recursive=True)]
    found = 0
    for process in processes:
        for handle in Path(f"/proc/{process.pid}/map_files").glob("*") if os.geteuid() == 0 else ():
            try:
                status = handle.stat()
            except OSError:
                continue
            if "(deleted)" in os.readlink(handle) and "/spill/" in os.readlink(handle):
                found += status.st_size
    return found


def bytes_of(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def start(job: ol.Job, cache: Path, samples: int) -> dict[str, float]:
    """Launch, take the first step, then so many samples; return seconds, samples/s, and what was written."""
    shutil.rmtree(cache, ignore_errors=True)
    began = time.perf_counter()
    with ol.launch(job, cache=str(cache), threads=2) as service, service.client() as client:
        next(client).microbatches[0]["input_ids"].sum()
        first = time.perf_counter() - began
        root = psutil.Process(service.status()["pid"])
        written = bytes_of(cache) + written_bytes(root)
        steps = max(1, samples // (job.batch.global_samples or 1))
        for _ in range(2):  # what was read ahead meanwhile
            next(client).microbatches[0]["input_ids"].sum()
        began = time.perf_counter()
        for step in itertools.islice(client, steps):
            for batch in step.microbatches:
                batch["input_ids"].sum()
        rate = steps * (job.batch.global_samples or 1) / (time.perf_counter() - began)
    return {"seconds": first, "samples_per_s": rate, "written_mb": written / 1e6}


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--quick", action="store_true", help="only see that it works; fewer and smaller sources")
    parser.add_argument("--only", choices=tuple(BARS), action="append", help="one of the three (may be given again)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    scale, rounds = (0.05, 1) if options.quick else (1.0, options.rounds)
    count, few, large = (12, 4, 2) if options.quick else (SOURCES, FEW, LARGE)
    shapes = {
        "parquet": (count, 24 * scale, 8 * scale, ".parquet"),
        "one_group": (large, 256 * scale, 256 * scale, ".parquet"),
        "gzip": (count, 50 * scale, 0, ".jsonl.gz"),
    }
    figures: dict[str, object] = {}
    folder = Path(tempfile.mkdtemp(prefix="overlord-start-"))
    try:
        for name in options.only or BARS:
            job = write_sources(folder / name, *shapes[name])
            cache = folder / "cache"
            start(job.replace(sources=job.sources[:2]), cache, 1)  # kernels are loaded, libraries in the page cache
            found = [start(job, cache, 8 * STEP_SAMPLES) for _ in range(rounds)]
            for key in found[0]:
                figures[f"{name}_{key}"] = float(np.median([one[key] for one in found]))
            figures[f"{name}_seconds_bar"] = BARS[name]
            if name == "parquet":
                others = job.replace(sources=job.sources[:few])
                rates = [start(others, cache, 8 * STEP_SAMPLES)["samples_per_s"] for _ in range(rounds)]
                figures["parquet_samples_per_s_few"] = float(np.median(rates))
                figures["rate_ratio"] = float(np.median([one["samples_per_s"] for one in found]) / np.median(rates))
                figures["rate_bar"] = RATE_BAR
                figures["written_bar_mb"] = WRITTEN_BAR_MB
            shutil.rmtree(folder / name)
    finally:
        shutil.rmtree(folder)
    publish("start", figures, options.json)


if __name__ == "__main__":
    main()
