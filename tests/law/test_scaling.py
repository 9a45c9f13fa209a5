"""Workers that come and go change nothing of the stream, stay within their budget, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import ray_started, start_ray, write_ids

import overlord as ol
from overlord.core.plan import chain_digest
from overlord.reports.live import held_up_by
from overlord.testing.digests import Trainers, digests_of

MESH = ol.ClientPlaceTree(dp=2)
STEPS = 90
SWITCH, BACK = 20, 45
STEP_S = 0.03
CPUS = 16
SCALED = {"scaling": ol.Scaling(interval_s=0.1, patience=2, window=2), "budget": ol.Budget(cpus=CPUS)}
PROCESSES = {"runtime": "local", "loader_hosts": 1}


def source_of(folder: Path, name: str, seconds: float) -> ol.Source:
    """A source of several groups, of which each sample takes a while."""

    def slowly(row, seconds=seconds):
        time.sleep(seconds)
        return {"tokens": row["ids"]}

    for number in range(0 if (folder / name).exists() else 12):
        write_ids(folder / name / f"{number}.jsonl", [5 + (7 * at + number) % 19 for at in range(40)], 1000 * number)
    sample = ol.Custom(slowly, columns=["ids"], process=False, name=name, code_digest=name)
    return ol.Source(name, str(folder / name), sample=sample, shuffle_bytes=0 if name == "photos" else 1 << 15)


def job_of(folder: Path, *, photo_s: float = 0.0, text_s: float = 0.0) -> ol.Job:
    """Mostly text, then mostly photos, then text again; the stream is the same however long they take."""
    cheap, dear = {"text": 0.97, "photos": 0.03}, {"text": 0.4, "photos": 0.6}
    return ol.Job(
        sources=[source_of(folder, "text", text_s), source_of(folder, "photos", photo_s)],
        mixture=ol.Mixture.stages([(0, cheap), (SWITCH, dear), (BACK, cheap)]),
        batch=ol.Batch(64, global_samples=16),
        seed=5,
        lag=8,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scaling")


@pytest.fixture(scope="module")
def quick(folder) -> ol.Job:
    return job_of(folder)


@pytest.fixture(scope="module")
def slow(folder) -> ol.Job:
    return job_of(folder, photo_s=0.03, text_s=0.0005)


@dataclass
class Seen:
    """What came, and how the service did meanwhile."""

    steps: list[list[str]] = field(default_factory=list)
    workers: list[dict[str, int]] = field(default_factory=list)
    loaders: list[dict[str, int]] = field(default_factory=list)
    """Processes of loader hosts that are up."""
    events: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Any] | None = None

    def digest(self) -> str:
        return chain_digest([one for step in self.steps for one in step])


def train(
    service, steps: int, *, state_at: int = -1, pause_s: float = STEP_S, before=lambda service, step: None
) -> Seen:
    """Take steps on all ranks, at some pace."""
    seen, trainers = Seen(), Trainers(service)
    for _ in range(steps):
        at = trainers.next_step
        before(service, at)
        if at == state_at:
            seen.state = trainers.first.state_dict()
        began = time.monotonic()
        opened = trainers.step()
        seen.steps.append([opened[0].order_digest, opened[0].plan_digest])
        seen.steps[-1] += [one for step in opened for one in digests_of(step)]
        if pause_s and at % 4 == 0:
            note(service, seen)
        time.sleep(max(0.0, pause_s - (time.monotonic() - began)))
    trainers.close()
    return seen


def note(service, seen: Seen) -> None:
    status = service.status()
    seen.workers.append({name: source["workers"] for name, source in status["sources"].items()})
    hosts = status.get("hosts", ())
    seen.loaders.append({one["role"]: one["pid"] for one in hosts if one["role"].startswith("loader") and one["up"]})
    seen.events = status["scaling"]["events"]


@pytest.fixture(scope="module")
def expected(quick, cache) -> Seen:
    with ol.launch(quick, mesh=MESH, runtime="inline", cache=cache) as service:
        return train(service, STEPS, pause_s=0.0, state_at=30)


def until(holds, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.1)
    return holds()


# -- a number of workers that stays ---------------------------------------------------------------------


@pytest.mark.slow_on_ray
@pytest.mark.parametrize(
    "loaders",
    [pytest.param(2, marks=pytest.mark.slow), 5, pytest.param({"text": 2, "photos": 4}, marks=pytest.mark.slow)],
    ids=str,
)
def test_any_number_of_workers(quick, cache, expected, where, loaders):
    with ol.launch(quick, mesh=MESH, **where, loaders_per_source=loaders, cache=cache) as service:
        found = train(service, 40, pause_s=0.0)
        if where["runtime"] != "inline":
            note(service, found)
            wanted = {"text": 1, "photos": 1} | (
                loaders if isinstance(loaders, dict) else dict.fromkeys(("text", "photos"), loaders)
            )
            assert found.workers[-1] == wanted
    assert found.steps == expected.steps[:40]


# -- workers that come and go ---------------------------------------------------------------------------


def check_scaled(seen: Seen) -> None:
    """There were several changes; the photos got workers and gave them back; no source had more than there are."""
    photos = [event for event in seen.events if event["source"] == "photos"]
    assert any(event["after"] > event["before"] for event in photos), seen.events
    assert any(event["after"] < event["before"] for event in photos), seen.events
    peak = max(workers["photos"] for workers in seen.workers)
    assert peak >= 3 and seen.workers[-1]["photos"] < peak, [workers["photos"] for workers in seen.workers]
    for workers in seen.workers:
        # The only worker of a source that is hardly busy takes no CPU of its own.
        singles = sum(count == 1 for count in workers.values())
        assert sum(workers.values()) <= CPUS + singles, workers


@pytest.mark.parametrize(
    "runs",
    [
        {"runtime": "local"},
        PROCESSES,
        pytest.param({"runtime": "ray"}, marks=pytest.mark.ray),
    ],
    ids=["local", "processes", "ray"],
)
@pytest.mark.slow
def test_the_stream_is_the_same_with_scaling_and_resumes(slow, cache, expected, runs, request):
    if runs["runtime"] == "ray":
        runs = {**runs, "address": request.getfixturevalue("ray_address")}
    with ol.launch(slow, mesh=MESH, **runs, **SCALED, cache=cache) as service:
        found = train(service, STEPS, state_at=30)

        def given_back() -> bool:
            note(service, found)
            return found.workers[-1]["photos"] < max(workers["photos"] for workers in found.workers)

        until(given_back)  # a busy machine counts its intervals late
    assert found.steps == expected.steps
    check_scaled(found)
    assert found.state == expected.state
    with ol.launch(slow, mesh=MESH, **runs, **SCALED, state=found.state, cache=cache) as service:
        assert train(service, 30).steps == expected.steps[30:60]


@pytest.mark.slow
def test_constant_weights_never_scale_while_the_host_is_loaded(folder, cache):
    """Sources that compute take longer on a busy host, and cost no more: what counts are seconds of a processor."""

    def compute(row):
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            sum(row["ids"])
        return {"tokens": row["ids"]}

    sources = []
    for name in ("papers", "books"):
        source_of(folder, name, 0.0)
        sample = ol.Custom(compute, columns=["ids"], process=True, name=name, code_digest=name)
        sources.append(ol.Source(name, str(folder / name), sample=sample, shuffle_bytes=1 << 15))
    job = ol.Job(sources=sources, batch=ol.Batch(64, global_samples=8), seed=5)
    scaling = ol.Scaling(interval_s=0.25, patience=2, window=2)
    spinning: list[subprocess.Popen[bytes]] = []

    def load(service, step: int) -> None:
        if step == 10:  # four processes for each core: a stretch takes about five times as long from here on
            command = [sys.executable, "-c", "while True: pass"]
            spinning.extend(subprocess.Popen(command) for _ in range(4 * len(os.sched_getaffinity(0))))

    with ol.launch(job, mesh=MESH, scaling=scaling, budget=ol.Budget(cpus=CPUS), cache=cache) as service:
        try:
            found = train(service, 30, pause_s=0.25, before=load)
        finally:
            for process in spinning:
                process.kill()
                process.wait()
    assert found.events == [] and all(set(workers.values()) == {1} for workers in found.workers)


@pytest.mark.slow
def test_hosts_are_woken_and_end_when_nobody_needs_them(slow, cache, expected):
    with ol.launch(slow, mesh=MESH, **PROCESSES, **SCALED, cache=cache) as service:
        before = {child.pid for child in psutil.Process(service.pid).children(recursive=True)}
        found = train(service, STEPS)
        woken = {pid for hosts in found.loaders for pid in hosts.values()} - set(found.loaders[0].values())
        assert woken, found.workers

        def calm() -> bool:
            note(service, found)
            return len(found.loaders[-1]) == 1

        assert until(calm), found.events
        assert until(lambda: not any(psutil.pid_exists(pid) for pid in woken))
        children = psutil.Process(service.pid).children(recursive=True)
        assert until(lambda: {one.pid for one in children if one.is_running()} <= before)
    assert found.steps == expected.steps


TRAINER_NODE = {"resources": {"overlord_trainer": 1}}
NODES = [{**TRAINER_NODE, "num_cpus": 3}, {**TRAINER_NODE, "num_cpus": 2}, {"num_cpus": 8}]
"""Two hosts of trainers, full with planner, constructors and a loader host of one CPU each, and one that is idle."""

IDLE = """
import logging, sys
import ray
from ray._private.state import available_resources_per_node
ray.init(sys.argv[1], logging_level=logging.ERROR)
print(max(node.get("CPU", 0.0) for node in available_resources_per_node().values()))
"""


def idle_cpus(address: str) -> float:
    """Return the idle CPUs of the host that has most of them."""
    command = [sys.executable, "-W", "ignore", "-c", IDLE, address]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed in the move"])
def test_an_idle_host_is_used_when_the_hosts_of_trainers_are_full(slow, cache, expected, tmp_path, killed):
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        start_ray(owner.pid, tmp_path / "nodes", NODES)
        where = {"runtime": "ray", "address": ray_started(tmp_path / "nodes"), "ranks_per_host": 1, "threads": 1}
        options = {**SCALED, "budget": ol.Budget(cpus=8, workers_per_actor=2)}
        further: list[dict[str, Any]] = []
        left: list[float] = []
        with ol.launch(slow, mesh=MESH, **where, **options, cache=cache) as service:
            loaders = [one for one in service.status()["hosts"] if one["role"].startswith("loader")]
            beside = {one["node"] for one in loaders}
            assert len(loaders) == len(beside) == 2

            def look(service, step):
                hosts = service.status()["hosts"]
                found = [one for one in hosts if one["role"] in ("loader host 2", "loader host 3") and one["pid"]]
                if found and not further:
                    left.append(idle_cpus(where["address"]))
                    if killed:
                        os.kill(found[0]["pid"], signal.SIGKILL)
                further.extend(found)

            found = train(service, STEPS, before=look)
            assert further, found.events
            assert {one["node"] for one in further}.isdisjoint(beside), "the idle host"
            assert left[0] in (6.0, 7.0), "a CPU of it is reserved for each"

            def given_back() -> bool:
                note(service, found)
                return len(found.loaders[-1]) == 2 and idle_cpus(where["address"]) == 8.0

            assert until(given_back, 40.0), found.events
        assert found.steps == expected.steps
    finally:
        owner.kill()
        owner.wait()


def change(newcomer: ol.Source):
    """A source comes, another one is parked, returns, and one goes; each at a step of its own."""

    def before(service, step):
        if step == 5:
            assert service.add_source(newcomer, weight=0.5, at_step=28) == 28
        if step == 8:
            service.park_source("photos", at_step=34)
        if step == 10:
            service.return_source("photos", at_step=40)
        if step == 30:
            service.remove_source("new", at_step=64)

    return before


@pytest.mark.parametrize(
    "runs", [pytest.param({"runtime": "local"}, marks=pytest.mark.slow), PROCESSES], ids=["local", "processes"]
)
@pytest.mark.slow
def test_sources_come_and_go_while_workers_do(quick, slow, cache, tmp_path, runs):
    for number in range(4):
        write_ids(tmp_path / "new" / f"{number}.jsonl", [9] * 60, 1000 * number)
    newcomer = ol.Source("new", str(tmp_path / "new"), sample=ol.Text("ids", tokenized=True), shuffle_bytes=0)
    before = change(newcomer)
    with ol.launch(quick, mesh=MESH, runtime="inline", cache=cache) as service:
        alone = train(service, 75, pause_s=0.0, before=before)
    with ol.launch(slow, mesh=MESH, **runs, **SCALED, cache=cache) as service:
        found = train(service, 75, before=before)
    assert found.steps == alone.steps
    assert {event["source"] for event in found.events} >= {"photos"}
    assert any("new" in workers for workers in found.workers)


# -- the bottleneck ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "runs",
    [pytest.param({"runtime": "local"}, marks=pytest.mark.slow), pytest.param(PROCESSES, marks=pytest.mark.nightly)],
    ids=["local", "processes"],
)
def test_the_source_that_everybody_waits_for_is_named(folder, cache, runs):
    job = job_of(folder, photo_s=0.05).replace(mixture=ol.Mixture({"text": 0.5, "photos": 0.5}))
    with ol.launch(job, **runs, cache=cache, metrics=0) as service, service.client() as client:
        assert not service.status()["scaling"]["on"]
        found, end = None, time.monotonic() + 30
        while found is None and time.monotonic() < end:
            pause = time.monotonic() + 5.0
            while time.monotonic() < pause:  # a status request waits too, but trains nothing meanwhile
                next(client)
            status = service.status()
            found = held_up_by(status)
        assert service.metrics is not None
        with urllib.request.urlopen(service.metrics, timeout=30) as answer:
            told = answer.read().decode()
    short = [one["words"] for host in status["pressure"].values() for one in host["short_of"]]
    if short:  # on a host that other tests keep busy, more workers would not help
        assert found is not None and found.startswith(short[0]) and "photos" not in found
    else:
        assert 'overlord_bottleneck_workers_needed{source="photos"}' in told, told
        assert found is not None and found.startswith("source 'photos' is the bottleneck: it has 1 worker"), found
