"""Golden streams: digests that must never change by accident, on any machine, Python or numpy.

They were the same on aarch64 with Python 3.11 and on x86-64 with Python 3.12. A change here breaks the resume
of every saved state: it needs a new FINGERPRINT_VERSION and a line in the CHANGELOG.
"""

from __future__ import annotations

import json

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
    "tokens": (
        "84b9c12995990f4c708afcc743d31853",
        "a376db3eb2c0ec8da4c86e03bb0d30c3",
        "3e256c3945e9fad0649ac93dea39207d",
    ),
}


def job_of(kind, folder) -> ol.Job:
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
