"""SIGSTOP of the processes that compute and read: each is replaced within seconds, and the stream is the same."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import psutil
import pytest

import overlord as ol
from overlord.testing import digest_service, stream_digests

STEPS = 20


def kinds_of(service: ol.Service) -> dict[str, list[psutil.Process]]:
    """Return the processes under a service by what they do: readers offer themselves to the out-of-memory killer."""
    found: dict[str, list[psutil.Process]] = {"template": [], "worker": [], "reader": [], "worker server": []}
    found["reader server"] = []
    for template in psutil.Process(service.pid).children():
        found["template"].append(template)
        for server in template.children():
            children = server.children()
            adjusted = [Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip() for child in children]
            kind = "reader" if "500" in adjusted else "worker"
            found[kind] += children
            found[f"{kind} server"].append(server)
    return found


@pytest.mark.parametrize(
    ("kind", "threads"),
    [
        ("worker", 2),
        *(
            pytest.param(kind, 2, marks=pytest.mark.slow)
            for kind in ("reader", "worker server", "reader server", "template")
        ),
        pytest.param("worker", 3, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_process_is_replaced_and_changes_nothing(mixed_job, cache, kind, threads):
    """All of a kind, again and again; a stop that lasts, as a debugger or an operator leaves it."""
    expected = stream_digests(mixed_job, steps=STEPS, cache=cache)
    stopped: set[int] = set()
    with ol.launch(mixed_job, cache=cache, threads=threads, heartbeat=1.0) as service:

        def stop(_: ol.Service, step: int) -> None:
            if step in (3, 12):
                for process in kinds_of(service)[kind]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.suspend()
                        stopped.add(process.pid)

        found = digest_service(service, steps=STEPS, before=stop)
        assert sum(source["bad"] for source in service.status()["sources"].values()) == 0
    assert found == expected
    assert stopped
    until = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in stopped) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in stopped), "it is left behind"


@pytest.mark.slow
def test_status_and_log_name_a_process_that_does_not_answer(mixed_job, cache, capfd):
    """Until it is replaced: here after a minute, as on hosts that are known to be slow."""
    with ol.launch(mixed_job, cache=cache, threads=2, heartbeat=60.0, prefetch=1) as service:
        client = iter(service.client(rank=0))
        next(client)
        assert service.status()["waits"] == []
        workers = kinds_of(service)["worker"]
        for worker in workers:
            worker.suspend()
        over = threading.Event()

        def train() -> None:
            while not over.is_set():
                next(client)

        trainer = threading.Thread(target=train, daemon=True)
        trainer.start()
        until = time.monotonic() + 60
        while not (waits := service.status()["waits"]) and time.monotonic() < until:
            time.sleep(0.2)
        assert waits, "nothing says what the run waits for"
        assert any(f"process {worker.pid} has not answered for " in waits[0] for worker in workers)
        # A worker may be stopped before it has loaded what a source needs.
        assert any(what in waits[0] for what in ("rows of '", "it loads '")) and "it is stopped (SIGSTOP)" in waits[0]
        logged = ""
        while "it is stopped (SIGSTOP)" not in logged and time.monotonic() < until:
            time.sleep(0.2)
            logged += capfd.readouterr().err
        assert "it is stopped (SIGSTOP)" in logged
        for worker in workers:
            worker.resume()
        while service.status()["waits"] and time.monotonic() < until:
            time.sleep(0.2)
        over.set()
        trainer.join(60)
        assert not trainer.is_alive() and service.status()["waits"] == []
