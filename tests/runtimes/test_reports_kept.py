"""What trainers report is kept: in `status()`, `history()` and metrics, over a crash and a resume, within a bound."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

import overlord as ol
from overlord.runtimes.autoscaling.metrics import metrics_of


def eventually(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def train(client: ol.Client, steps: int) -> None:
    for _ in range(steps):
        step = next(client)
        client.report(step.index, {"loss": 4.0 - step.index / 64, "loss/a": 0.1})


def test_reports_survive_a_crash_and_a_resume(ids_job, cache, tmp_path):
    with ol.launch(ids_job, cache=cache, store=tmp_path) as service, service.client() as client:
        train(client, 30)
        eventually(lambda: "balance" in service.status()["measured"])
        status = service.status()
        assert status["reports"]["loss"] == {"step": 29, "value": 4.0 - 29 / 64}
        assert status["reports"]["loss/a"]["value"] == 0.1
        assert status["measured"]["balance"] == 1.0  # of one rank
        os.kill(service.pid, signal.SIGKILL)
        train(client, 5)
        found = service.history(["loss", "share/a"])
        assert found["reports"]["loss"]["step"] == list(range(35))
        assert found["reports"]["loss"]["mean"] == [4.0 - step / 64 for step in range(35)]
        assert found["measured"]["share/a"]["mean"] == [pytest.approx(0.5)]
        exposed = list(metrics_of(service.status()))
    registry = CollectorRegistry()
    registry.register(type("Found", (Collector,), {"collect": lambda self: exposed})())
    text = generate_latest(registry).decode()
    assert 'overlord_report{name="loss"} 3.46875' in text
    assert 'overlord_report_step{name="loss/a"} 34.0' in text
    for state, steps in (("latest", 35), (20, 20), (client_state(ids_job, cache, 5), 5)):
        options = {"runtime": "inline", "cache": cache, "store": tmp_path, "state": state}
        with ol.launch(ids_job, **options) as again:
            assert again.history()["reports"]["loss"]["step"] == list(range(steps))
    with ol.launch(ids_job, runtime="inline", cache=cache, store=tmp_path) as fresh:
        assert fresh.history()["reports"] == {}
    assert {len(list(lineage.glob("history-*"))) for lineage in tmp_path.glob("lineage-*")} == {1}


def client_state(job: ol.Job, cache: str, steps: int) -> dict[str, object]:
    with ol.launch(job, runtime="inline", cache=cache) as service, service.client() as client:
        for _ in range(steps):
            next(client)
        return client.state_dict()


def test_a_damaged_history_costs_no_step(ids_job, cache, tmp_path: Path):
    with ol.launch(ids_job, runtime="inline", cache=cache, store=tmp_path) as service, service.client() as client:
        train(client, 20)
        want = next(client).order_digest
    for path in tmp_path.rglob("history-*"):
        path.write_bytes(path.read_bytes()[:-7])
    with ol.launch(ids_job, runtime="inline", cache=cache, store=tmp_path, state=20) as service:
        assert next(service.client()).order_digest == want
        assert service.status()["reports"]["loss"]["step"] == 19  # the journal has them
