"""Formats that are read in place: a Megatron dataset of 10 million documents, and the rate of token rows by format.

    start    from `launch` to the first microbatch, with no index in the cache, against the same job on 1,000 documents:
             seconds, and what the larger one costs beyond it in seconds of processors and in memory (PSS).
    rate     tokens/s of rows of about 500 tokens that a service delivers to a client, against the same rows as Parquet.
             Lance and ArrayRecord are measured where their libraries are installed.

Both files of the dataset are in the page cache: what a cold disk or an object store takes to read 12 to 20 bytes a
document comes on top.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol
from benchmarks.measuring import arguments, publish
from overlord.readers.hooked.tfrecord import _TABLES, _masked_crc

DOCUMENTS = 10_000_000
FEW = 1_000
RATE_ROWS = 40_000
RATE_TOKENS = 500
_WRITE_LANCE = """
import sys, lance, pyarrow.parquet as pq
lance.write_dataset(pq.read_table(sys.argv[1] + "/rate.parquet"), sys.argv[1] + "/rate.lance", max_rows_per_file=10_000)
"""
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


def example_of(tokens: np.ndarray) -> bytes:
    """Return token ids below 2**21 as a `tf.train.Example` with one feature."""

    def field(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2]) + varint(len(value)) + value

    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)

    wide = tokens.astype(np.uint32)
    seven = np.stack([wide & 127, wide >> 7 & 127, wide >> 14], axis=1).astype(np.uint8)
    count = 1 + (wide >= 1 << 7) + (wide >= 1 << 14)
    seven[:, 0] |= np.where(count > 1, 128, 0).astype(np.uint8)
    seven[:, 1] |= np.where(count > 2, 128, 0).astype(np.uint8)
    packed = seven[np.arange(3) < count[:, None]].tobytes()
    return field(1, field(1, field(1, b"tokens") + field(2, field(3, field(1, packed)))))


def write_tfrecord(path: Path, rows: list[np.ndarray]) -> None:
    """Write rows as TFRecord."""

    def crc(data: bytes) -> bytes:
        return int(_masked_crc(np.frombuffer(data, np.uint8), 0, len(data), _TABLES)).to_bytes(4, "little")

    with path.open("wb") as out:
        for row in rows:
            record = example_of(row)
            length = struct.pack("<Q", len(record))
            out.write(length + crc(length) + record + crc(record))


def write_arrayrecord(path: Path, rows: list[np.ndarray]) -> None:
    """Write rows as ArrayRecord, a few records a group, as its documents advise for training."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(example_of(row))
    writer.close()


def write_litdata(folder: Path, rows: list[np.ndarray]) -> None:
    """Write rows as chunks of litdata for its TokensLoader."""
    folder.mkdir()
    config = {"compression": None, "data_format": ["no_header_numpy:5"], "item_loader": "TokensLoader"}
    (folder / "index.json").write_text(json.dumps({"chunks": [], "config": {**config, "data_spec": None}}))
    for number, first in enumerate(range(0, len(rows), 8_000)):
        some = rows[first : first + 8_000]
        places = 4 * (len(some) + 2) + np.cumsum([0, *(row.nbytes for row in some)])
        head = np.array([len(some), *places], np.uint32).tobytes()
        (folder / f"chunk-0-{number}.bin").write_bytes(head + b"".join(row.tobytes() for row in some))


def job_of(path: Path, tokens: int) -> ol.Job:
    """Return a job of one source of token rows."""
    source = ol.Source("web", str(path), sample=ol.Text("tokens", tokenized=True))
    return ol.Job([source], batch=ol.Batch(4096, global_tokens=tokens, microbatch_tokens=8192))


def first_batch(path: Path, cache: Path) -> tuple[float, float, float]:
    """Return seconds from launch to the first microbatch, MB of the service then, and seconds of processors."""
    shutil.rmtree(cache, ignore_errors=True)
    began = time.perf_counter()
    with ol.launch(job_of(path, 8192), cache=str(cache)) as service:
        next(service.client()).microbatches[0]
        seconds = time.perf_counter() - began
        root = psutil.Process(service.status()["pid"])
        pids = (root, *root.children(recursive=True))
        used = sum(sum(one.cpu_times()[:2]) for one in pids)
        return seconds, sum(one.memory_full_info().pss for one in pids) / 2**20, used


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
        ends = np.cumsum(lengths)
        rows = np.split(np.fromfile(folder / "rate.bin", np.uint16), ends[:-1])
        write_tfrecord(folder / "rate.tfrecord", rows)
        write_litdata(folder / "rate.litdata", rows)
        rates: dict[str, list[float]] = {"parquet": [], "bin": [], "mds": [], "tfrecord": [], "litdata": []}
        if importlib.util.find_spec("array_record") is not None:
            write_arrayrecord(folder / "rate.arrayrecord", rows)
            rates["arrayrecord"] = []
        if importlib.util.find_spec("lance") is not None:
            # It warns of every fork of a process that has imported it: it is written elsewhere.
            subprocess.run([sys.executable, "-c", _WRITE_LANCE, str(folder)], check=True)
            rates["lance"] = []
        few, many = [], []
        for _ in range(options.rounds):
            few.append(first_batch(folder / "few.bin", folder / "cache"))
            many.append(first_batch(folder / "many.bin", folder / "cache"))
            for end, found in rates.items():
                found.append(rate(folder / f"rate.{end}", folder / "cache", options.seconds))
    finally:
        shutil.rmtree(folder)
    found_rates = {{"bin": "megatron"}.get(end, end): statistics.median(some) for end, some in rates.items()}
    parquet = found_rates.pop("parquet")
    publish(
        "formats",
        {
            "baseline": "the same job on 1,000 documents; the same rows as Parquet",
            "documents": options.documents,
            "first_batch_s": statistics.median(one[0] for one in many),
            "first_batch_s_of_1000": statistics.median(one[0] for one in few),
            "bar_s": BAR_S,
            "further_cpu_s": statistics.median(one[2] for one in many) - statistics.median(one[2] for one in few),
            "pss_mb": statistics.median(one[1] for one in many),
            "further_mb": statistics.median(one[1] for one in many) - statistics.median(one[1] for one in few),
            "bar_mb": BAR_MB,
            "parquet_tokens_per_s": parquet,
            **{f"{name}_tokens_per_s": found for name, found in found_rates.items()},
            **{f"{name}_ratio": found / parquet for name, found in found_rates.items()},
            "ratio": min(found_rates.values()) / parquet,
            "bar": BAR_RATE,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
