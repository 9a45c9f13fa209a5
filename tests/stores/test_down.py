"""A store that is down pauses planning; nothing that was promised is lost, and the stream goes on when it is back."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

import overlord as ol
from overlord.core.client_messages import Done, GetStatus, Report
from overlord.core.messages import STORE_DOWN, HostNews, Waiting
from overlord.errors import Fenced
from overlord.runtimes.hosts.peers import PLANNER
from overlord.runtimes.hosts.shared_planner import Pace
from overlord.runtimes.launching.inline_service import InlineService
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.runtimes.transport.direct import CallerEnvironment
from overlord.stores.owners import claim
from overlord.stores.places import LocalPlace, open_place
from overlord.stores.store import newest_lineage


def wait_for(condition, seconds=20.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


class Host:
    """The planner's host of a job, in this process."""

    def __init__(self, job, store, cache, **more):
        options = ServiceOptions(**{"mesh": ol.ClientPlaceTree()} | more, cache=cache, store=str(store), service="it")
        self.service = InlineService(
            job, options, environment=CallerEnvironment(Pace())
        )  # the planner's host has its threads
        self.host = self.service.role(PLANNER).host

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.service.close()

    def plan(self, step):
        return self.host.plan(step, HostNews({0: step}, {0: step}))

    def store(self):
        return self.host.ask(GetStatus()).content["store"]


@pytest.fixture
def syncs(monkeypatch):
    """The names of the threads that wait for the disk."""
    found: list[str] = []
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def counted(descriptor, real=real):
            found.append(threading.current_thread().name)
            real(descriptor)

        monkeypatch.setattr(os, name, counted)
    return found


def test_without_feedback_nothing_waits_for_the_disk(ids_job, cache, tmp_path, syncs):
    with Host(ids_job, tmp_path, cache) as host:
        syncs.clear()
        for step in range(300):
            host.plan(step)
            time.sleep(0.005)  # a trainer trains; the writer writes
        names = set(syncs)
        wait_for(lambda: newest_lineage(open_place(str(tmp_path))).newest.step >= 200)
    assert names == {"overlord_write_loop"}


def test_a_store_that_is_away_pauses_planning(ids_job, cache, tmp_path, caplog):
    store = tmp_path / "store"
    with Host(ids_job, store, cache) as host:
        plans = [host.plan(step) for step in range(18)]
        wait_for(lambda: newest_lineage(open_place(str(store))).newest.step >= 16)
        store.rename(tmp_path / "away")
        reported: list[Done] = []
        reporter = threading.Thread(target=lambda: reported.append(host.host.ask(Report(17, {"loss": 1.0}))))
        reporter.start()
        wait_for(lambda: host.store()["error"] is not None)
        assert "is gone" in host.store()["error"] or "cannot be" in host.store()["error"]
        assert host.plan(18) == Waiting(STORE_DOWN)
        assert host.plan(17).digest == plans[17].digest, "what is planned is handed out"
        time.sleep(0.3)
        assert not reported, "a report waits until it is written down"
        (tmp_path / "away").rename(store)
        reporter.join(20)
        assert reported == [Done()]
        wait_for(lambda: host.store()["error"] is None)
        assert host.plan(18).step == 18
    assert caplog.text.count("planning pauses at step 18") == 1
    assert "the store works again" in caplog.text
    reports = [r for r in newest_lineage(open_place(str(store))).records if r["kind"] == "report"]
    assert [(r["step"], r["metrics"]) for r in reports] == [(17, {"loss": 1.0})]


def test_a_service_that_lost_its_store_ends(ids_job, cache, tmp_path):
    with Host(ids_job, tmp_path, cache) as host:
        host.plan(0)
        claim(open_place(str(tmp_path)), "it")
        with pytest.raises(Fenced, match="a successor has taken over"):
            host.host.ask(Report(0, {}))
        for _ in range(2):
            with pytest.raises(Fenced):
                host.plan(1)
        assert "taken over" in host.store()["error"]


class Failing(LocalPlace):
    """A folder that fails when it is told to."""

    fails = False

    def write(self, name, data):
        self._look()
        super().write(name, data)

    def open_append(self, name):
        return _File(self, super().open_append(name))

    def _look(self):
        if self.fails:
            raise ol.StoreError("the store cannot be written (Read-only file system).")


class _File:
    def __init__(self, place, file):
        self.place, self.file, self.close = place, file, file.close

    def append(self, data):
        self.place._look()
        self.file.append(data)


def test_inline_tries_for_a_while_and_can_be_asked_again(ids_job, cache, tmp_path, monkeypatch):
    monkeypatch.setattr("overlord.runtimes.transport.direct.STORE_PATIENCE_S", 0.2)
    places = []
    monkeypatch.setattr(
        "overlord.runtimes.hosts.role_host.open_place", lambda *_: places.append(Failing(tmp_path)) or places[0]
    )
    with ol.launch(ids_job, runtime="inline", cache=cache, store=tmp_path) as service, service.client() as client:
        steps = [next(client) for _ in range(3)]
        Failing.fails = True
        try:
            with pytest.raises(ol.StoreError, match="Read-only"):
                client.report(2, {"loss": 1.0})
            with pytest.raises(ol.StoreError, match="Read-only"):
                for _ in range(40):
                    steps.append(next(client))
        finally:
            Failing.fails = False
        client.report(2, {"loss": 1.0})
        steps += [next(client) for _ in range(5)]
    assert len(steps) >= 8
    assert [step.index for step in steps] == list(range(len(steps)))


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_folder_that_is_read_only_is_explained(ids_job, cache, tmp_path):
    (tmp_path / "store").mkdir(mode=0o500)
    with pytest.raises(ol.StoreError, match="cannot be written"):
        ol.launch(ids_job, runtime="inline", cache=cache, store=tmp_path / "store")


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no disk can be mounted here; a Place that fails stands in for it in the tests above")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_pauses_a_service(ids_job, cache, small_disk: Path):
    expected = []
    with ol.launch(ids_job, runtime="inline", cache=cache) as service, service.client() as client:
        expected = [next(client).order_digest for _ in range(60)]
    with ol.launch(ids_job, cache=cache, store=small_disk / "store") as service:
        client = service.client()
        found = [next(client).order_digest for _ in range(10)]
        ballast = small_disk / "ballast"
        with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        done = threading.Event()

        def train():
            for step in range(10, 60):
                found.append(next(client).order_digest)
                client.report(step, {"loss": float(step)})
            done.set()

        threading.Thread(target=train, daemon=True).start()
        wait_for(lambda: service.status()["store"]["error"] is not None)
        assert "No space left" in service.status()["store"]["error"]
        assert not done.is_set()
        ballast.unlink()
        assert done.wait(60)
    assert found == expected
    records = newest_lineage(open_place(str(small_disk / "store"))).records
    assert sorted({record["step"] for record in records if record["kind"] == "report"}) == list(range(10, 60))


def test_a_planner_that_waits_for_a_loader_keeps_its_store(ids_job, cache, tmp_path, monkeypatch):
    monkeypatch.setattr("overlord.stores.owners.BEAT_S", 0.1)
    with Host(ids_job, tmp_path, cache) as host, host.host.alone():  # as while a step is planned
        (tmp_path / "alive").unlink(missing_ok=True)
        wait_for(lambda: (tmp_path / "alive").exists(), 5)


def test_a_successor_does_not_run_ahead_of_ranks_it_has_not_heard(ids_job, cache, tmp_path, monkeypatch):
    mesh = ol.ClientPlaceTree(dp=2)
    first = Host(ids_job, tmp_path, cache, mesh=mesh)
    for step in range(40):
        first.host.plan(step, HostNews({0: step, 1: 5}, {0: step, 1: 5}))
    with Host(ids_job, tmp_path, cache, mesh=mesh, recover=True) as host:
        checkpoints = host.host.planner.checkpoints
        host.host.tell(HostNews({0: 39}, {0: 39}), 0)
        assert checkpoints.passed == 0
        host.host.tell(HostNews({1: 5}, {1: 5}), 1)
        assert checkpoints.passed == 5
    with Host(ids_job, tmp_path, cache, mesh=mesh, recover=True) as host:
        monkeypatch.setattr("overlord.runtimes.hosts.shared_planner.RETURN_S", 0.0)
        host.host.tell(HostNews({0: 39}, {0: 39}), 0)
        assert host.host.planner.checkpoints.passed == 39, "no rank that never attached is waited for"
    first.service.close()
