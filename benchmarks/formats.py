"""Formats that are read in place: a Megatron dataset of 10 million documents, and the rate of token rows by format.

    start    from `launch` to the first microbatch, with no index in the cache, against the same job on 1,000 documents;
             the memory (PSS of all processes) that the larger one costs beyond that; and that every document is known.
    rate     tokens/s of rows of about 500 tokens that a service delivers to a client, against the same rows as Parquet.

Both files of the dataset are in the page cache: what a cold disk or an object store takes to read 12 to 20 bytes a
document comes on top.
"""

from __future__ import annotations

import json
import shutil
import statistics
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol
from benchmarks.measuring import arguments, publish

DOCUMENTS = 10_000_000
FEW = 1_000
RATE_ROWS = 40_000
RATE_TOKENS = 500
BAR_S, BAR_MB, BAR_RATE = 3.0, 100.0, 0.8


def write_megatron(prefix: Path, lengths: np.ndarray) -> None:
    """Write token rows as Megatron does: uint16, one sequence a document."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, int(lengths.sum()), np.uint16)
    tokens.tofile(prefix.with_suffix(".bin"))
    places = (np.cumsum(lengths) - lengths) * 2
    with prefix.with_suffix(".idx").open("wb") as index:
        index.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        for array in (lengths.astype(np.int32), places.astype(np.int64), np.arange(len(lengths) + 1, dtype=np.int64)):
            array.tofile(index)


def write_parquet(path: Path, prefix: Path, lengths: np.ndarray) -> None:
    """Write the rows of a Megatron dataset as Parquet."""
    tokens = np.fromfile(prefix.with_suffix(".bin"), np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens.astype(np.int32)))
    pq.write_table(pa.table({"tokens": rows}), path, row_group_size=2_000)


def write_mds(path: Path, prefix: Path, lengths: np.ndarray) -> None:
    """Write the rows of a Megatron dataset as an MDS shard: one column of arrays of uint16."""
    tokens = np.fromfile(prefix.with_suffix(".bin"), np.uint16)
    ends = np.cumsum(lengths)
    parts = [
        struct.pack("<IBH", 3 + 2 * n, 1 << 2 | 1, n) + tokens[end - n : end].tobytes()
        for n, end in zip(lengths.tolist(), ends.tolist(), strict=True)
    ]
    columns = {"column_names": ["tokens"], "column_encodings": ["ndarray:uint16"], "column_sizes": [None]}
    config = json.dumps({"version": 2, "format": "mds", **columns}).encode()
    places = 4 * (len(parts) + 2) + len(config) + np.cumsum([0, *map(len, parts)])
    path.write_bytes(np.array([len(parts), *places], np.uint32).tobytes() + config + b"".join(parts))


def job_of(path: Path, tokens: int) -> ol.Job:
    """Return a job of one source of token rows."""
    source = ol.Source("web", str(path), sample=ol.Text("tokens", tokenized=True))
    return ol.Job([source], batch=ol.Batch(4096, global_tokens=tokens, microbatch_tokens=8192))


def first_batch(path: Path, cache: Path) -> tuple[float, float]:
    """Return seconds from launch to the first microbatch, and MB of the service then."""
    shutil.rmtree(cache, ignore_errors=True)
    began = time.perf_counter()
    with ol.launch(job_of(path, 8192), cache=str(cache)) as service:
        next(service.client()).microbatches[0]
        seconds = time.perf_counter() - began
        root = psutil.Process(service.status()["pid"])
        return seconds, sum(one.memory_full_info().pss for one in (root, *root.children(recursive=True))) / 2**20


def rate(path: Path, cache: Path, seconds: float) -> float:
    """Return the tokens/s that a client takes from a service."""
    with ol.launch(job_of(path, 2**18), cache=str(cache)) as service:
        client, tokens, began = service.client(), 0, 0.0
        for number, step in enumerate(client):
            if number == 8:  # what was prefetched meanwhile does not count
                tokens, began = 0, time.perf_counter()
            tokens += sum(int(batch["input_ids"].size) for batch in step.microbatches)
            if number > 8 and time.perf_counter() - began >= seconds:
                return tokens / (time.perf_counter() - began)
    raise AssertionError("a stream without end has ended")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="documents of the large dataset")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement of a rate")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="overlord-formats-"))
    try:
        rng = np.random.default_rng(1)
        write_megatron(folder / "few", rng.integers(20, 120, FEW))
        write_megatron(folder / "many", rng.integers(20, 120, options.documents))
        lengths = rng.integers(1, 2 * RATE_TOKENS, RATE_ROWS)
        write_megatron(folder / "rate", lengths)
        write_parquet(folder / "rate.parquet", folder / "rate", lengths)
        write_mds(folder / "rate.mds", folder / "rate", lengths)
        few, many = [], []
        rates: dict[str, list[float]] = {"bin": [], "mds": [], "parquet": []}
        for _ in range(options.rounds):
            few.append(first_batch(folder / "few.bin", folder / "cache"))
            many.append(first_batch(folder / "many.bin", folder / "cache"))
            for end, found in rates.items():
                found.append(rate(folder / f"rate.{end}", folder / "cache", options.seconds))
    finally:
        shutil.rmtree(folder)
    megatron, mds, parquet = (statistics.median(rates[end]) for end in ("bin", "mds", "parquet"))
    publish(
        "formats",
        {
            "baseline": "the same job on 1,000 documents; the same rows as Parquet",
            "documents": options.documents,
            "first_batch_s": statistics.median(seconds for seconds, _ in many),
            "first_batch_s_of_1000": statistics.median(seconds for seconds, _ in few),
            "bar_s": BAR_S,
            "further_mb": statistics.median(mb for _, mb in many) - statistics.median(mb for _, mb in few),
            "bar_mb": BAR_MB,
            "megatron_tokens_per_s": megatron,
            "mds_tokens_per_s": mds,
            "parquet_tokens_per_s": parquet,
            "ratio": min(megatron, mds) / parquet,
            "bar": BAR_RATE,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
