"""What Prometheus is told: real scrapes of running services, read by Prometheus' own parser."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

import overlord as ol
from overlord.runtimes.autoscaling import metrics
from overlord.runtimes.autoscaling.metrics import MetricsServer

Figures = dict[tuple[str, ...], float]


def scrape(url: str) -> Figures:
    """Return every sample by its name and the values of its labels, these in the order of their names."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    assert all(family.name.startswith("overlord_") and family.documentation for family in families)
    found = [sample for family in families for sample in family.samples]
    return {(sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value for sample in found}


def test_metrics_are_the_status(ids_job, cache):
    mesh = ol.ClientPlaceTree(dp=2)
    with ol.launch(ids_job, mesh=mesh, cache=cache, metrics=0) as service:
        assert service.metrics is not None and service.metrics.startswith("http://127.0.0.1:")
        clients = [service.client(rank) for rank in range(2)]
        for _ in range(3):
            for client in clients:
                next(client)
        next(clients[1])
        found, status = scrape(service.metrics), service.status()
        assert found["overlord_up",] == 1
        assert found["overlord_clients",] == 2
        assert (found["overlord_client_step_min",], found["overlord_client_step_max",]) == (2, 3)
        assert found["overlord_next_step",] >= 4
        assert found["overlord_store_failing",] == 0
        for name, source in status["sources"].items():
            assert found["overlord_source_planned_share", name] == source["planned_share"]
            assert 0 < found["overlord_source_samples_total", name] <= source["samples"]
            assert found["overlord_source_workers", name] == 1
            assert found["overlord_source_parked", name] == 0
        assert not any(key[0] == "overlord_bottleneck_workers_needed" for key in found)
        service.park_source(ids_job.names[0])
        url = service.metrics
    assert service.metrics is None
    with pytest.raises(OSError, match="refused"):
        scrape(url)


@pytest.mark.slow
def test_roles_and_a_service_that_is_started_again(ids_job, cache):
    with ol.launch(ids_job, cache=cache, loader_hosts=1, metrics=0) as service, service.client() as client:
        next(client)
        before = scrape(service.metrics)
        assert before["overlord_role_up", "this host", "planner"] == 1
        assert before["overlord_service_restarts_total",] == 0
        os.kill(service.pid, signal.SIGKILL)
        end = time.monotonic() + 60
        seen = []
        while time.monotonic() < end:
            seen.append(scrape(service.metrics)["overlord_up",])
            if 0 in seen and seen[-1] == 1:
                break
            time.sleep(0.02)
        assert 0 in seen and seen[-1] == 1, seen[-5:]
        next(client)
        assert scrape(service.metrics)["overlord_service_restarts_total",] == 1


def test_one_that_is_gone_is_told_as_down():
    def gone():
        raise ol.ServiceLost("it is gone; nobody answers")

    door = MetricsServer("localhost:0")
    assert scrape(door.url)["overlord_up",] == 0  # there is none yet
    door.tell(gone)
    assert scrape(door.url)["overlord_up",] == 0
    door.close()


def test_connections_that_send_no_request_are_few_and_end(monkeypatch):
    monkeypatch.setattr(metrics, "REQUEST_S", 1.0, raising=False)
    door, threads = MetricsServer(0), threading.active_count()
    port = int(door.url.rsplit(":", 1)[1].partition("/")[0])
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(40)]
        time.sleep(0.5)
        assert threading.active_count() <= threads + 16
        for one in many:
            with contextlib.suppress(OSError):
                one.sendall(b"GET /metrics HTTP/1.1\r\n")
            with contextlib.suppress(ConnectionError):
                assert one.recv(1) == b""
        assert scrape(door.url)["overlord_up",] == 0
    door.close()


def test_however_many_ask_the_service_is_asked_now_and_then(monkeypatch):
    monkeypatch.setattr(metrics, "ASK_EVERY_S", 60.0, raising=False)
    asked = []

    def gone():
        asked.append(1)
        raise ol.ServiceLost("it is gone; nobody answers")

    door = MetricsServer(0)
    door.tell(gone)
    for _ in range(20):
        assert scrape(door.url)["overlord_up",] == 0
    door.close()
    assert len(asked) == 1


@pytest.mark.parametrize("wrong", [True, -1, 70000, "here", "host:", "1.5", 9400.0, ["9400"]])
def test_what_is_no_address_is_refused(ids_job, cache, wrong):
    with pytest.raises(ol.SpecError, match=r"launch: metrics is .*Give a port such as 9400"):
        ol.launch(ids_job, cache=cache, metrics=wrong)


def test_an_address_that_is_taken_is_told_before_anything_runs(ids_job, cache, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ol.SpecError, match=rf"metrics is {port}, where no server can listen .*in use"):
            ol.launch(ids_job, cache=cache, metrics=port, store=tmp_path / "store")
    assert not (tmp_path / "store").exists()
    with pytest.raises(ol.SpecError, match="no server can listen"):
        ol.launch(ids_job, cache=cache, metrics="no-such-host.invalid:0")


def test_inline_has_nobody_to_answer(ids_job, cache):
    with pytest.raises(ol.SpecError, match="metrics is 9400 and runtime is 'inline'"):
        ol.launch(ids_job, cache=cache, runtime="inline", metrics=9400)


def test_a_launch_that_fails_lets_go_of_the_port(ids_job, cache, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = ids_job.model_copy(update={"sources": (ids_job.sources[0].replace(path=str(tmp_path / "none")),)})
    with pytest.raises(ol.OverlordError):
        ol.launch(job, cache=cache, metrics=port)
    MetricsServer(port).close()


def test_who_wants_no_metrics_needs_no_client_of_prometheus():
    code = "import overlord, sys; assert not any(name.startswith('prometheus') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
