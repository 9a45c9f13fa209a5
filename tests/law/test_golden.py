"""Golden streams: digests that must never change by accident, on any machine, Python or numpy.

They were the same on aarch64 with Python 3.11 and on x86-64 with Python 3.12. A change here breaks the resume
of every saved state: it needs a new FINGERPRINT_VERSION and a line in the CHANGELOG.

"cut" and "ramp" came with version 4 of the fingerprint: blocks larger than `shuffle_bytes` are cut into parts of half a
page, and what is unpacked begins with small groups. The others are those of version 3: their order did not change.
"""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pytest

import overlord as ol
from overlord.testing import stream_digests

MESH = ol.ClientPlaceTree(dp=2, cp=2)
GOLDEN = {
    "whole": (
        "a3f197a9084ff4fac6b306b72f86b081",
        "75421052f16bb1f77150def7581b143b",
        "eaec9cd2d51db1d77ae90177bb5d6a6e",
    ),
    "streamed": (
        "6a96139d99daa17af3697958af5e1aeb",
        "a1de59d9ee41e0d5b791e3aa1579e633",
        "365738123da4ba44bd0b235e54d23fbe",
    ),
    "cut": (
        "641a378824cd2131afb9fad2df0ea6bd",
        "ec92a11794db79441dde12ffa02a9034",
        "66f89987f479216088ceff325617fa38",
    ),
    "ramp": (
        "a5924c28c9ea72ad9343906ad40362db",
        "5732c011a7b7c2c5345dcf60b74f88e0",
        "98c69655edc2cbd32838d5e241aa7a01",
    ),
    "tokens": (
        "84b9c12995990f4c708afcc743d31853",
        "a376db3eb2c0ec8da4c86e03bb0d30c3",
        "3e256c3945e9fad0649ac93dea39207d",
    ),
}


def large_blocks(kind, folder) -> ol.Job:
    """Blocks that are larger than `shuffle_bytes`: an Arrow file, or compressed lines."""
    rows = [list(range(1, n % 60 + 2)) for n in range(2000)]
    if kind == "cut":
        schema = pa.schema([("ids", pa.list_(pa.int32()))])
        with pa.ipc.new_file(folder / "a.arrow", schema) as writer:
            writer.write_batch(pa.record_batch([pa.array(rows, pa.list_(pa.int32()))], schema=schema))
    else:
        for number in range(3):
            lines = "\n".join(json.dumps({"ids": ids}) for ids in rows[number * 100 :])
            (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    source = ol.Source("a", str(folder), sample=ol.Text("ids", tokenized=True), shuffle_bytes=40_000)
    return ol.Job(sources=[source], batch=ol.Batch(64, global_samples=128), seed=3)


def job_of(kind, folder) -> ol.Job:
    if kind in ("cut", "ramp"):
        return large_blocks(kind, folder)
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"ids": list(range(1, n % 60 + 2))}) for n in range(500)))
    sample = ol.Text("ids", tokenized=True)
    if kind == "whole":
        return ol.Job(
            sources=[ol.Source("a", str(folder / "a.jsonl"), sample=sample)], batch=ol.Batch(64, global_samples=32)
        )
    for name, files in (("many", 5), ("few", 2)):
        (folder / name).mkdir()
        for number in range(files):
            (folder / name / f"{number}.jsonl").write_text(
                (folder / "a.jsonl").read_text()[: 9000 + 700 * number] + "\n"
            )
    both = [ol.Source(n, str(folder / n), sample=sample, shuffle_bytes=9000, tolerance=1) for n in ("many", "few")]
    if kind == "streamed":
        return ol.Job(
            sources=both, mixture=ol.Mixture({"many": 2, "few": 1}), batch=ol.Batch(64, global_samples=32), seed=5
        )
    mixture = ol.Mixture.linear({"many": {0: 1, 9: 0.2}, "few": {0: 0.5}}, level="token", granularity="substep")
    return ol.Job(sources=both, mixture=mixture, batch=ol.Batch(16, global_tokens=900), overlength="split", seed=1)


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_stream(kind, tmp_path, cache):
    found = stream_digests(job_of(kind, tmp_path), mesh=MESH, steps=10, cache=cache)
    assert (found.order, found.plan, found.content) == GOLDEN[kind]
