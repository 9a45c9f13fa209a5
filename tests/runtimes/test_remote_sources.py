"""Services over an object store: the stream of the local files, whatever the store does, and asked for once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.reports.live import remote_words
from overlord.runtimes.autoscaling.metrics import metrics_of
from overlord.testing import stream_digests
from overlord.testing.object_server import FAULTS, ObjectServer, ServerFaults

STEPS = 24


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one bucket, which no test changes."""
    served = tmp_path_factory.mktemp("served")
    folder = served / "bucket"
    folder.mkdir()
    random = np.random.default_rng(1)
    for number in range(3):
        rows = [random.integers(0, 50_000, random.integers(100, 900)).tolist() for _ in range(400)]
        pq.write_table(pa.table({"ids": rows}), folder / f"{number}.parquet", row_group_size=150)
        lines = "\n".join(json.dumps({"ids": row}) for row in rows)
        (folder / f"{number}.jsonl").write_text(lines)
    return served


@pytest.fixture
def server(served: Path) -> Iterator[ObjectServer]:
    with ObjectServer(served, faults=ServerFaults(silence_s=0.5)) as running:
        yield running


def job_of(where: str, **options: Any) -> ol.Job:
    sample = ol.Text("ids", tokenized=True)
    sources = [ol.Source(kind, f"{where}/*.{kind}", sample=sample, **options) for kind in ("parquet", "jsonl")]
    return ol.Job(sources, batch=ol.Batch(1024, global_samples=64), max_steps=STEPS)


def remote_job(server: ObjectServer, **keys: str) -> ol.Job:
    options = {"endpoint_override": server.url, **(keys or {"access_key": "a", "secret_key": "b"})}
    return job_of("s3://bucket", storage_options=options)


# Four services each; the next test has the same stream from a service of its own process.
@pytest.mark.parametrize("runtime", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_the_stream_is_that_of_the_local_files_and_is_fetched_once(
    runtime: Any, server: ObjectServer, served: Path, tmp_path: Path
):
    def digests(job: ol.Job, cache: str, **options: Any):
        return stream_digests(job, steps=STEPS, runtime=runtime, cache=str(tmp_path / cache), **options)

    here = digests(job_of(str(served / "bucket")), "local")
    assert here == digests(remote_job(server), "remote")
    assert server.counts["LIST"] == 2 and server.counts["GET"] > 0
    server.counts.clear()
    assert here == digests(remote_job(server), "remote") and server.counts == {"LIST": 2}
    assert here == digests(remote_job(server), "none", cache_bytes=0)
    assert not (tmp_path / "none" / "remote").exists()


def test_faults_of_the_store_change_nothing_and_are_counted(server: ObjectServer, served: Path, tmp_path: Path):
    here = stream_digests(job_of(str(served / "bucket")), steps=STEPS, runtime="inline", cache=str(tmp_path / "local"))
    server.faults.choose = lambda number: FAULTS[number // 3 % len(FAULTS)] if number % 3 == 1 else None
    cache = str(tmp_path / "remote")
    assert here == stream_digests(remote_job(server), steps=STEPS, runtime="local", cache=cache)
    assert sum(server.counts[name] for name in FAULTS) > 3


def test_what_was_asked_is_in_the_status(server: ObjectServer, tmp_path: Path):
    with ol.launch(remote_job(server), cache=str(tmp_path / "cache")) as service, service.client() as client:
        for _ in client:
            pass
        status = service.status()
    remote = status["remote"]
    assert remote["requests"] >= sum(server.counts[name] for name in ("GET", "LIST", "HEAD"))
    assert remote["bytes"] == server.counts["bytes"] and 0 < remote["p50_s"] <= remote["p99_s"]
    assert remote["hits"] > 0 and remote["damaged"] == 0
    assert str(remote_words(remote)).startswith("remote files: ")
    found = {sample.name: sample.value for metric in metrics_of(status) for sample in metric.samples}
    assert found["overlord_remote_requests_total"] == remote["requests"]
    assert found["overlord_remote_latency_p99_seconds"] == remote["p99_s"]


def test_a_run_outlives_credentials_that_expire(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    keys = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))

    def renew(token: str) -> None:
        keys.write_text(f"[default]\naws_access_key_id = a\naws_secret_access_key = b\naws_session_token = {token}\n")
        server.faults.token = token

    renew("first")
    server.faults.choose = lambda number: renew("second") if number == 8 else None
    job = job_of("s3://bucket", storage_options={"endpoint_override": server.url})
    with ol.launch(job, cache=str(tmp_path / "cache"), cache_bytes=0) as service, service.client() as client:
        assert sum(1 for _ in client) == STEPS and service.status()["remote"]["refreshed"] >= 1
    assert server.counts["refused"] >= 1
