"""`loaders_per_source="auto"` starts the actors of the plan, in processes and on Ray, and the stream is the same."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest
from tests.conftest import write_ids

import overlord as ol
from overlord.launch_spec import LaunchOptions
from overlord.runtimes.autoscaling.profiling import profile_job, read_profile, write_profile
from overlord.runtimes.autoscaling.sizing import plan_loaders
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.scaling.profiles import Profile, Spread
from overlord.testing import StreamDigests, digest_service, stream_digests

MESH = ol.ClientPlaceTree(dp=2)
STEPS = 24
SECONDS = {"audio": 0.08, "code": 0.0002, "photos": 0.04, "web": 0.0003}
BUDGET = ol.Budget(cpus=10, workers_per_source=6, workers_per_actor=3, memory="4GiB", memory_per_actor="1GiB")
"""Audio and photos are divided over actors of at most three workers; the two of text share one."""


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> ol.Job:
    """Four sources of several groups each."""
    folder = tmp_path_factory.mktemp("partitioned")
    for name in SECONDS:
        for number in range(6):
            write_ids(
                folder / name / f"{number}.jsonl", [3 + (5 * at + number) % 17 for at in range(20)], 1000 * number
            )
    sample = ol.Text("ids", tokenized=True)
    sources = [ol.Source(name, str(folder / name), sample=sample, shuffle_bytes=0) for name in SECONDS]
    return ol.Job(sources=sources, batch=ol.Batch(64, global_samples=10), seed=5)


@pytest.fixture(scope="module")
def profile(job, cache, tmp_path_factory) -> str:
    """A real profile of the job's files, with seconds that do not depend on how busy this machine is."""
    options = ServiceOptions(mesh=MESH, cache=cache)
    found = profile_job(job, options, when="2030-01-01T00:00:00+00:00", samples=4, seconds=1.0)
    assert not found.failed
    told = (
        dataclasses.replace(one, transform=Spread.of([SECONDS[one.name]]), cpu_share=1.0, handover_s=0.0)
        for one in found.profile.sources
    )
    path = tmp_path_factory.mktemp("profile") / "job.profile.json"
    write_profile(path, Profile(tuple(told)))
    return str(path)


@pytest.fixture(scope="module")
def expected(job, cache) -> StreamDigests:
    return stream_digests(job, mesh=MESH, steps=STEPS, cache=cache)


def planned(job: ol.Job, profile: str, **launch):
    return plan_loaders(job, LaunchOptions(mesh=MESH, budget=BUDGET, **launch), read_profile(Path(profile))).found


def check_fleet(status, plan) -> None:
    """The loader hosts are the actors of the plan, with its sources; sources have its workers."""
    loaders = [host for host in status["hosts"] if host["role"].startswith("loader")]
    assert [host["sources"] for host in loaders] == [len(actor.sources) for actor in plan.actors]
    assert [host["bytes"] for host in loaders] == [actor.bytes for actor in plan.actors]
    assert {n: one["workers"] for n, one in status["sources"].items()} == {a.name: a.workers for a in plan.allotments}


def test_the_plan_is_one_worth_testing(job, profile):
    plan = planned(job, profile)
    kinds = {one.name: one.parallelism for one in plan.allotments}
    assert kinds == {"audio": "data", "photos": "worker", "web": "source", "code": "source"}
    assert len(plan.actors) == 4


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "killed"])
def test_processes_of_one_host(job, cache, profile, expected, killed):
    launched = {"mesh": MESH, "loaders_per_source": "auto", "profile": profile, "budget": BUDGET, "threads": 1}
    with ol.launch(job, **launched, runtime="local", cache=cache, heartbeat=2.0) as service:
        check_fleet(service.status(), planned(job, profile, threads=1))

        def before(service, step):
            if killed and step in (6, 14):  # each holds a part of the source that is divided
                name = "loader host 1" if step == 6 else "loader host 2"
                host = next(one for one in service.status()["hosts"] if one["role"] == name)
                os.kill(host["pid"], signal.SIGKILL)

        assert digest_service(service, steps=STEPS, before=before) == expected
        if killed:
            check_fleet(service.status(), planned(job, profile, threads=1))


@pytest.mark.slow
@pytest.mark.ray
def test_actors_on_ray_are_placed_with_their_cpus_and_bytes(job, cache, profile, expected, ray_address):
    launched = {"mesh": MESH, "loaders_per_source": "auto", "profile": profile, "budget": BUDGET}
    on_ray = {"runtime": "ray", "address": ray_address, "ranks_per_host": 1}
    plan = planned(job, profile, **on_ray)
    with ol.launch(job, **launched, **on_ray, cache=cache) as service:
        status = service.status()
        check_fleet(status, plan)
        placed = {one["role"]: one for one in status["ray"]["placement"]}
        actors = [placed[f"loader host {actor.number}"] for actor in plan.actors]
        assert [one["cpus"] for one in actors] == pytest.approx([actor.cpus for actor in plan.actors], abs=0.1)
        trainers = {placed[f"constructor host {number}"]["node"] for number in (0, 1)}
        assert {one["node"] for one in actors} == trainers, "sidecars first, and all of them used"
        audio = [placed[f"loader host {n}"]["node"] for n in plan.allotments[job.names.index("audio")].actors]
        assert len(set(audio)) == len(audio), "a divided source is on several hosts"
        assert digest_service(service, steps=STEPS) == expected


def test_a_shadow_takes_over_an_actor(job, cache, profile, expected):
    launched = {"mesh": MESH, "loaders_per_source": "auto", "profile": profile, "budget": BUDGET, "shadows": ["audio"]}
    with ol.launch(job, **launched, runtime="local", cache=cache, threads=1, heartbeat=2.0) as service:
        plan = planned(job, profile, shadows=["audio"], threads=1)
        (held,) = plan.allotments[job.names.index("audio")].actors

        def before(service, step):
            if step == 8:
                host = next(one for one in service.status()["hosts"] if one["role"] == f"loader host {held}")
                os.kill(host["pid"], signal.SIGKILL)

        assert digest_service(service, steps=STEPS, before=before) == expected
        assert service.status()["faults"][0]["promoted"] == 1


@pytest.mark.slow
def test_workers_come_and_go_from_what_the_partition_started(job, cache, profile, expected):
    launched = {"mesh": MESH, "loaders_per_source": "auto", "profile": profile, "budget": BUDGET, "threads": 1}
    scaling = ol.Scaling(interval_s=0.1, patience=2, window=2)
    with ol.launch(job, **launched, scaling=scaling, runtime="local", cache=cache) as service:
        check_fleet(service.status(), planned(job, profile, scaling=True, threads=1))
        assert digest_service(service, steps=STEPS, before=lambda service, step: time.sleep(0.1)) == expected
        # The sources are quick in truth, so workers are given back: what is started is where scaling goes on from.
        assert any(one["after"] < one["before"] for one in service.status()["scaling"]["events"])
