"""A source that cannot be read any more: the run stops, or goes on without it until it is back."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import threading
import time

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from tests.conftest import write_ids

import overlord as ol
from overlord.runtimes.hosts import loader_fleet, shared_planner
from overlord.stores.places import open_place
from overlord.stores.store import newest_lineage

SAMPLE = ol.Text("ids", tokenized=True)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(5)
    for name in "abc":
        for number in range(4):
            write_ids(tmp_path / name / f"{number}.jsonl", 1 + rng.integers(0, 30, 12), number * 1000)
    return tmp_path


def job_of(folder, names="abc", **fields) -> ol.Job:
    sources = [ol.Source(name, str(folder / name), sample=SAMPLE, shuffle_bytes=300) for name in names]
    return ol.Job(sources, batch=ol.Batch(32, global_samples=6), seed=1, **fields)


class Disk:
    """A folder of a source that can be taken away and brought back as it was."""

    def __init__(self, folder, name):
        self._here, self._away = folder / name, folder / f"away-{name}"

    def unplug(self):
        self._here.rename(self._away)

    def plug_in(self):
        self._away.rename(self._here)


def sources_of(step) -> set[str]:
    return {sample.source for batch in step.microbatches for sample in batch.meta.sample_ids}


def plain(state):
    return json.loads(json.dumps(state, sort_keys=True))


@pytest.mark.parametrize("where", ["inline", "local"], indirect=True)
@pytest.mark.slow_but_inline
def test_by_default_the_run_stops(folder, tmp_path, where):
    with ol.launch(job_of(folder), cache=str(tmp_path / "cache"), **where) as service, service.client() as client:
        Disk(folder, "b").unplug()
        with pytest.raises(ol.ReaderError, match="is gone"):
            for _ in range(20):
                list(next(client).microbatches)


def test_a_source_that_vanishes_is_parked_and_returns(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shared_planner, "SOURCE_RETURN_S", 0.0)
    disk, store = Disk(folder, "b"), tmp_path / "store"
    options = {"runtime": "inline", "cache": str(tmp_path / "cache"), "on_source_failure": "park"}
    drawn, states = {}, {}
    with (
        caplog.at_level(logging.WARNING, "overlord"),
        ol.launch(job_of(folder), store=store, **options) as service,
    ):
        client = service.client()
        for step in range(30):  # planned and not read: what is promised is another test
            if step == 3:
                disk.unplug()
            if step == 18:
                disk.plug_in()
            states[step] = plain(client._feed.state(step))
            draw = service.plan_raw(step).draw
            drawn[step] = ({draw.names[number] for number in draw.source}, draw.digest)
            parked = service.status()["sources"]["b"]["parked"]
            assert ("b" in drawn[step][0]) == (parked is None)
            if step == 17:
                since = parked["since"]
                assert "is gone" in parked["why"] and states[step]["changes"][0]["failed"]
    assert 3 < since < 17
    back = next(step for step in range(18, 30) if "b" in drawn[step][0])
    assert back in (18, 19), "the first look after it is there again may come behind the plan of that step"
    there = [True] * since + [False] * (back - since) + [True] * (30 - back)
    assert [("b" in names) for names, _ in drawn.values()] == there
    found = newest_lineage(open_place(str(store))).records
    records = [r for r in found if r["kind"] in ("change.park", "change.return")]
    assert [(r["kind"], r["at"]) for r in records] == [("change.park", since), ("change.return", back)]
    assert f"source 'b' is parked from step {since} on" in caplog.text and f"it returns at step {back}" in caplog.text
    options["on_source_failure"] = "stop"  # what is journaled needs no fault any more
    for at, until in ((since + 1, back), (since + 3, back), (back + 1, 30)):
        with ol.launch(job_of(folder), state=states[at], **options) as service:
            assert [service.plan_raw(s).draw.digest for s in range(at, until)] == [
                drawn[s][1] for s in range(at, until)
            ]


def test_a_replay_agrees_on_what_was_parked(folder, tmp_path, monkeypatch):
    for name in ("planner.CACHED_PLANS", "planner.KEPT_REPLAYED"):
        monkeypatch.setattr(f"overlord.roles.{name}", 1)
    disk = Disk(folder, "b")
    options = {"runtime": "inline", "cache": str(tmp_path / "cache"), "on_source_failure": "reweight"}
    with ol.launch(job_of(folder), **options) as service:
        service.plan_raw(2)
        disk.unplug()
        digests = [service.plan_raw(step).draw.digest for step in range(3, 16)]
        assert service.status()["sources"]["b"]["parked"]
        disk.plug_in()
        assert [service.plan_raw(step).draw.digest for step in range(3, 16)] == digests


def test_the_local_service_parks_and_takes_back(folder, tmp_path, capfd):
    disk = Disk(folder, "b")
    options = {"cache": str(tmp_path / "cache"), "on_source_failure": "park", "prefetch": 2}
    with ol.launch(job_of(folder), **options) as service, service.client() as client:
        next(client)
        disk.unplug()
        back = threading.Timer(3.0, disk.plug_in)  # promised samples may have to wait for it
        back.start()
        steps = [next(client) for _ in range(25)]
        for step in steps:
            list(step.microbatches)
        assert service.status()["sources"]["b"]["parked"]["since"] <= 25
        assert "b" not in sources_of(steps[-1])
        back.join()
        at = service.return_source("b")
        steps = [next(client) for _ in range(at - client.next_step + 1)]
        assert "b" in sources_of(steps[-1])
    assert "source 'b' is parked from step" in capfd.readouterr().err


def test_reweight_returns_only_when_asked(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_planner, "SOURCE_RETURN_S", 0.0)
    disk = Disk(folder, "b")
    options = {"runtime": "inline", "cache": str(tmp_path / "cache"), "on_source_failure": "reweight"}
    with ol.launch(job_of(folder), **options) as service:
        disk.unplug()
        plans = [service.plan_raw(step) for step in range(16)]
        disk.plug_in()
        plans += [service.plan_raw(step) for step in range(16, 20)]
        assert plans[-1].draw.weights == (1, 0, 1)
        assert service.return_source("b") == 20
        assert service.plan_raw(20).draw.weights == (1, 1, 1)


def test_a_promised_sample_is_waited_for(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(loader_fleet, "TRY_EVERY_S", 0.05)
    disk = Disk(folder, "a")
    options = {"runtime": "inline", "cache": str(tmp_path / "cache"), "on_source_failure": "reweight"}
    with ol.launch(job_of(folder, "a"), runtime="inline", cache=str(tmp_path / "cache")) as service:
        client = service.client()
        expected = [[batch.digest() for batch in next(client).microbatches] for _ in range(3)]
    with (
        caplog.at_level(logging.WARNING, "overlord"),
        ol.launch(job_of(folder, "a"), **options) as service,
        service.client() as client,
    ):
        service.plan_raw(2)
        for pool in service._runtime.role("loader host 0")._fleet._pools.values():
            pool.loader._buffer = type(pool.loader._buffer)()  # as after a restart: nothing of it has been read
        disk.unplug()
        threading.Timer(0.5, disk.plug_in).start()
        began = time.monotonic()
        found = [[batch.digest() for batch in next(client).microbatches] for _ in range(3)]
    assert found == expected and time.monotonic() - began > 0.4
    assert "promised" in caplog.text


def test_when_all_are_parked_the_error_says_so(folder, tmp_path):
    options = {"runtime": "inline", "cache": str(tmp_path / "cache"), "on_source_failure": "park"}
    with ol.launch(job_of(folder, "ab"), **options) as service, service.client() as client:
        next(client)
        for name in "ab":
            Disk(folder, name).unplug()
        with pytest.raises(ol.PlanError, match=r"parked: 'a' since step \d+ \(.*is gone"):
            for step in range(30):
                service.plan_raw(step)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_bucket_that_stops_answering(tmp_path, folder, monkeypatch):
    monkeypatch.setattr("overlord.readers.source_files._FIRST_PAUSE_S", 0.01)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys)
    client.create_bucket(Bucket="parking")  # servers of one process share their buckets
    for number in range(20):  # more than is read ahead
        out = io.BytesIO()
        rows = [[1000 * number + i] * (i % 17 + 1) for i in range(30)]
        pq.write_table(pa.table({"ids": pa.array(rows, pa.list_(pa.int32()))}), out, row_group_size=10)
        client.put_object(Bucket="parking", Key=f"data/{number}.parquet", Body=out.getvalue())
    storage = {
        "access_key": "testing", "secret_key": "testing", "region": "us-east-1", "scheme": "http",
        "endpoint_override": f"{host}:{port}", "connect_timeout": 0.2, "request_timeout": 0.5,
    }  # fmt: skip
    remote = ol.Source("s3", "s3://parking/data/*.parquet", sample=SAMPLE, shuffle_bytes=500, storage_options=storage)
    job = job_of(folder, "ab")
    job = job.replace(sources=[*job.sources, remote])
    options = {"runtime": "inline", "cache": str(tmp_path / "cache"), "on_source_failure": "park", "cache_bytes": 0}
    with ol.launch(job, **options) as service:
        service.plan_raw(1)
        server.stop()
        for step in range(2, 300):
            weights = service.plan_raw(step).draw.weights
            if service.status()["sources"]["s3"]["parked"] is not None:
                break
        assert weights == (1, 1, 0), "the step is drawn without the bucket"
        assert service.status()["sources"]["s3"]["parked"]["since"] == step


@pytest.mark.parametrize("kill", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stream_whose_sources_are_all_parked_waits_for_one_to_return(ids_job, cache, kill):
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        next(client)
        at = max(service.park_source(name) for name in ("a", "b", "c"))
        while client.next_step < at:
            next(client)
        if kill:
            os.kill(service.pid, signal.SIGKILL)
        late: list[int] = []
        waiting = threading.Thread(target=lambda: late.append(next(client).index))
        waiting.start()
        waiting.join(3.0 if kill else 1.0)
        assert waiting.is_alive(), "it waits, and does not fail"
        assert service.return_source("b") == at
        waiting.join(30.0)
        assert late == [at]


@pytest.mark.slow
def test_a_source_returns_where_the_stream_stopped_though_a_crash_came_between(ids_job, cache):
    """Steps that may have been handed out before a crash do not change, but none was where no source could be drawn."""
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        next(client)
        at = max(service.park_source(name) for name in ("a", "b", "c"))
        os.kill(service.pid, signal.SIGKILL)
        assert service.return_source("b") == at
        while client.next_step <= at:
            next(client)


@pytest.mark.parametrize("becomes", ["gone", "replaced"])
def test_a_service_that_dies_goes_on_without_a_parked_source_whose_files_are_away(folder, tmp_path, becomes, caplog):
    options = {"runtime": "inline", "cache": str(tmp_path / "cache"), "on_source_failure": "park"}
    job, disk, store = job_of(folder), Disk(folder, "b"), tmp_path / "store"

    def order(service: ol.Service, steps: range) -> list[str]:
        return [service.plan_raw(step).draw.digest for step in steps]

    with ol.launch(job, store=store, **options) as service:
        service.plan_raw(1)
        disk.unplug()
        found = order(service, range(18))
        since = service.status()["sources"]["b"]["parked"]["since"]
        assert 1 < since < 18
        if becomes == "replaced":
            write_ids(folder / "b" / "0.jsonl", [5] * 12, 7000)
        service._runtime.crash()  # the snapshot is that of step 0: the steps before the park cannot be drawn again
        found += order(service, range(18, 24))
        assert service.status()["sources"]["b"]["parked"]["since"] == since
        assert "source 'b' is parked, and the stream goes on without it" in caplog.text
        service.return_source("b", at_step=60)
        service.plan_raw(60)
        why = service.status()["sources"]["b"]["parked"]["why"]
        assert ("not those that the stream began with" if becomes == "replaced" else "matches no file") in why
        if becomes == "replaced":
            (folder / "b" / "0.jsonl").unlink()
            (folder / "b").rmdir()
        state = service.client()._feed.state(70)
        disk.plug_in()
        back = service.return_source("b")
        assert "b" in service.plan_raw(back).draw.names
    disk.unplug()
    with ol.launch(job, state=state, **options) as service:  # by hand, with the files still gone
        assert set(np.unique(service.plan_raw(70).draw.source)) == {0, 2}
    disk.plug_in()
    with ol.launch(job, runtime="inline", cache=str(tmp_path / "cache")) as service:
        service.park_source("b", at_step=since)
        assert order(service, range(24)) == found


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"loader_hosts": 2}], ids=["local", "processes"])
def test_real_processes_are_replaced_while_a_parked_source_is_away(folder, tmp_path, how):
    disk = Disk(folder, "b")
    with ol.launch(job_of(folder), cache=str(tmp_path / "cache"), **how) as service, service.client() as client:
        at = service.park_source("b")
        while client.next_step < at + 2:
            list(next(client).microbatches)
        disk.unplug()
        for host in service.status()["hosts"] or [{"role": "loader", "pid": service.pid}]:
            if host["role"].startswith("loader"):
                os.kill(host["pid"], signal.SIGKILL)
        for _ in range(12):
            assert sources_of(next(client)) == {"a", "c"}
        disk.plug_in()
        at = service.return_source("b")
        steps = [next(client) for _ in range(at - client.next_step + 1)]
        assert "b" in sources_of(steps[-1])
