"""The shuffle inside one large row group, as pyarrow writes it, against the same rows in small row groups.

Text, token lists and images, 14 MB or more each, with the default `shuffle_bytes` of 4 MiB. An epoch of either file is
read, tokenized or decoded, packed and handed to a client on the inline runtime, in turns; the unpacking of the large
group to disk is part of its time. The figure is the worst ratio of samples/s. The run fails if more than 2 % of
the rows of an epoch are followed by their old neighbour, if a row is missing or comes twice, if epochs are alike, if a
stream that is resumed anywhere differs, or if the memory (PSS) by which a reading process grows is above both
`shuffle_bytes` and what small row groups take: allocators keep some of what unpacking a page took, in either case.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
from tokenizers import Tokenizer, models, pre_tokenizers

import overlord as ol
from benchmarks.measuring import arguments, publish

KINDS = ("text", "tokens", "images")
SMALL_BYTES = 256 << 10
STEP_SAMPLES = 64
SHUFFLE_BYTES = 4 << 20
MOST_NEIGHBOURS = 0.02
MOST_ALIKE = 0.05
"""Rows in the same place in two epochs: what is unpacked begins with its first rows in both."""

_HELD = """
import ctypes, gc, sys
from pathlib import Path
import psutil
import pyarrow as pa
from overlord.core.order import NO_GROUP, DataFile, SourceOrder
from overlord.readers.index import IndexCache
from overlord.readers.source_files import SourceFiles
from overlord.roles.source_loader import GroupReader

def pss():
    # The share of a library changes whenever another process that uses it comes or goes.
    return sum(part.pss for part in psutil.Process().memory_maps() if ".so" not in part.path)

def read(path, most):
    source = SourceFiles("s", [path], cache=IndexCache(Path(path).parent / "held"))
    files = [DataFile(file.path, file.size) for file in source.files]
    order = SourceOrder(0, "s", files, shuffle_bytes=int(sys.argv[2]), index=source.first_blocks)
    at, held = order.first_group(0), 0
    while at != NO_GROUP and most:
        reader, most = GroupReader(order.group(0, at), source, 0), most - 1
        while reader.offset < reader.group.num_rows:
            reader.read(64)
        held = max(held, pss())
        at = order.next_group(0, at)
    return held

read(sys.argv[1], 2)
gc.collect()
pa.default_memory_pool().release_unused()
ctypes.CDLL(None).malloc_trim(0)  # what the first reads freed must not hide what the next ones hold
before = pss()
print(read(sys.argv[1], 40) - before)
"""


def table_of(kind: str, rows: int) -> pa.Table:
    """Make rows of one kind."""
    random = np.random.default_rng(0)
    if kind == "text":
        words = np.array([f"w{n}" for n in range(500)])
        return pa.table({"text": [" ".join(words[random.integers(0, 500, 250)]) for _ in range(rows)]})
    if kind == "tokens":
        lengths = random.integers(200, 1200, rows)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        values = pa.array(random.integers(0, 1 << 30, int(offsets[-1])), pa.int32())
        return pa.table({"ids": pa.ListArray.from_arrays(pa.array(offsets), values)})
    images = []
    for _ in range(rows):
        pixels = random.integers(0, 255, (24, 24, 3), np.uint8).repeat(10, 0).repeat(10, 1)
        images.append(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=90, colorspace="RGB"))
    return pa.table({"jpg": pa.array(images, pa.binary()), "text": [f"w{n % 500}" for n in range(rows)]})


def job_of(folder: Path, kind: str, name: str) -> ol.Job:
    """Return the job that reads one of the files."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<image>": 1, **{f"w{n}": n + 2 for n in range(500)}}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    sample = {
        "text": ol.Text("text"),
        "tokens": ol.Text("ids", tokenized=True),
        "images": ol.ImageText("jpg", "text", patch=16, merge=2, size=224),
    }[kind]
    return ol.Job(
        sources=[ol.Source(kind, str(folder / f"{kind}-{name}.parquet"), sample=sample, shuffle_bytes=SHUFFLE_BYTES)],
        tokenizer=None if kind == "tokens" else str(folder / "tokenizer.json"),
        batch=ol.Batch(2048, global_samples=STEP_SAMPLES),
    )


def samples_per_s(job: ol.Job, rows: int, cache: str) -> float:
    """Consume an epoch; return samples/s."""
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client, steps = service.client(), rows // STEP_SAMPLES
        start = time.perf_counter()
        for _ in range(steps):
            for batch in next(client).microbatches:
                batch["input_ids"].shape  # noqa: B018
        return steps * STEP_SAMPLES / (time.perf_counter() - start)


def drawn(job: ol.Job, steps: range, cache: str, state: dict[str, object] | None = None) -> np.ndarray:
    """Return (epoch, row) of every sample of some steps, in the order in which they are drawn."""
    with ol.launch(job, runtime="inline", cache=cache, state=state) as service:
        meta = np.concatenate([service.plan_raw(step).draw.meta for step in steps])
        return np.stack([meta["epoch"], meta["row"]])


def check_order(job: ol.Job, rows: int, cache: str) -> float:
    """Return the share of rows followed by their old neighbour; fail where the order is not what it must be."""
    name, steps = job.names[0], 2 * rows // STEP_SAMPLES
    found = drawn(job, range(steps), cache)
    first, second = (found[1][found[0] == epoch] for epoch in (0, 1))
    if sorted(first) != list(range(rows)) or len(set(second.tolist())) != len(second):
        sys.exit(f"{name}: a row is missing or comes twice in an epoch")
    if np.mean(first[: len(second)] == second) > MOST_ALIKE:
        sys.exit(f"{name}: two epochs have the same order")
    for at in (1, steps // 3, steps // 2):
        with ol.launch(job, runtime="inline", cache=cache) as service:
            client = service.client()
            for _ in range(at):
                next(client)
            state = json.loads(json.dumps(client.state_dict()))
        again = drawn(job, range(at, at + 4), cache, state)
        if again.tolist() != found[:, at * STEP_SAMPLES : (at + 4) * STEP_SAMPLES].tolist():
            sys.exit(f"{name}: resumed before step {at}, the stream is another one")
    return float(np.mean(np.diff(first) == 1))


def held_bytes(path: Path) -> int:
    """Return by how much the memory of a process grows while it reads a file: the most between two groups."""
    command = [sys.executable, "-c", _HELD, str(path), str(SHUFFLE_BYTES)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="overlord-shuffle-"))
    figures: dict[str, object] = {"baseline": "the same rows in row groups of about 256 KiB"}
    ratios: list[float] = []
    try:
        for kind in KINDS:
            rows = {"text": 12_000, "tokens": 6_400, "images": 960}[kind] // (2 if options.quick else 1)
            rows -= rows % STEP_SAMPLES
            table, cache = table_of(kind, rows), str(folder / "cache")
            small_rows = max(1, rows * SMALL_BYTES // table.nbytes)
            pq.write_table(table, folder / f"{kind}-one.parquet", row_group_size=rows)
            pq.write_table(table, folder / f"{kind}-small.parquet", row_group_size=small_rows)
            one, small = (job_of(folder, kind, name) for name in ("one", "small"))
            neighbours = check_order(one, rows, cache)
            if neighbours > MOST_NEIGHBOURS:
                sys.exit(f"{kind}: {neighbours:.1%} of the rows are followed by their old neighbour")
            held, usual = (held_bytes(folder / f"{kind}-{name}.parquet") for name in ("one", "small"))
            if held > max(SHUFFLE_BYTES, usual):
                sys.exit(f"{kind}: {held} bytes are held, more than shuffle_bytes and {usual} of small row groups")
            samples_per_s(small, rows, cache)  # kernels are compiled, indices are built
            rounds = [[samples_per_s(job, rows, cache) for job in (one, small)] for _ in range(options.rounds)]
            speed, base = np.median(np.array(rounds), axis=0).tolist()
            ratios.append(speed / base)
            figures |= {
                f"{kind}_mb": table.nbytes / 1e6,
                f"{kind}_samples_per_s": speed,
                f"{kind}_small_groups_samples_per_s": base,
                f"{kind}_ratio": speed / base,
                f"{kind}_followed_by_old_neighbour": neighbours,
                f"{kind}_held_over_shuffle_bytes": held / SHUFFLE_BYTES,
                f"{kind}_small_groups_held_over_shuffle_bytes": usual / SHUFFLE_BYTES,
            }
    finally:
        shutil.rmtree(folder)
    publish("shuffle", {**figures, "ratio": min(ratios), "bar": 0.8}, options.json)


if __name__ == "__main__":
    main()
