"""kill -9 and SIGSTOP of every role on Ray, and a node that goes: the trainers get the very same stream."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

import overlord as ol
from tests.conftest import ray_started, start_ray
from tests.faults.test_roles_killed import MESH, consume, expected, strike  # noqa: F401 - a fixture

pytestmark = pytest.mark.ray

ROLES = [
    pytest.param("planner", signal.SIGKILL, (7, 23), marks=pytest.mark.slow),
    pytest.param("planner", signal.SIGSTOP, (7, 23), marks=pytest.mark.nightly),
    pytest.param("constructor host 0", signal.SIGKILL, (7, 23), marks=pytest.mark.nightly),
    pytest.param("constructor host 0", signal.SIGSTOP, (7, 23), marks=pytest.mark.slow),
    ("loader host 1", signal.SIGKILL, (7,)),
    pytest.param("loader host 1", signal.SIGKILL, (7, 23), marks=pytest.mark.slow),
    pytest.param("loader host 1", signal.SIGSTOP, (7, 23), marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("role", "signum", "steps"), ROLES)
def test_every_role(ids_job, cache, expected, ray_address, role, signum, steps):  # noqa: F811
    options = {"runtime": "ray", "address": ray_address, "threads": 1, "loader_hosts": 2, "heartbeat": 2.0}
    with ol.launch(ids_job, mesh=MESH, shadows=role == "planner", cache=cache, **options) as service:

        def at_step(step):
            if step in steps:
                strike(service, role, signum)

        assert consume(service, 0.05, at_step) == expected


@pytest.mark.slow
@pytest.mark.parametrize("role", ["planner", "constructor host 1"])
def test_roles_of_two_trainer_hosts(ids_job, cache, expected, ray_address, role):  # noqa: F811
    """Each of them has a slice of the plan, and its planner is gone when a loader needs another one."""
    options = {"runtime": "ray", "address": ray_address, "threads": 1, "loader_hosts": 2, "heartbeat": 2.0}
    with ol.launch(ids_job, mesh=MESH, ranks_per_host=MESH.world_size // 2, cache=cache, **options) as service:

        def at_step(step):
            if step in (7, 23):
                strike(service, role, signal.SIGKILL)

        assert consume(service, 0.05, at_step) == expected


@pytest.mark.slow
def test_the_service_process(ids_job, cache, expected, ray_address):  # noqa: F811
    """Ray's own driver: its actors go with it, and the launcher starts all of them again."""
    options = {"runtime": "ray", "address": ray_address, "threads": 1, "heartbeat": 2.0}
    with ol.launch(ids_job, mesh=MESH, cache=cache, **options) as service:

        def at_step(step):
            if step == 12:
                os.kill(service.status()["service"]["pid"], signal.SIGKILL)

        assert consume(service, 0.05, at_step) == expected


def moved_of(status, away):
    return next(host for host in status["hosts"] if host["role"] == away["role"])


@pytest.mark.slow
def test_a_node_that_goes(ids_job, cache, expected, tmp_path):  # noqa: F811
    """Ray takes 12 s and more to notice; the beats of its roles stop at once."""
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        start_ray(owner.pid, tmp_path / "nodes")
        address = ray_started(tmp_path / "nodes")
        options = {"runtime": "ray", "address": address, "threads": 1, "loader_hosts": 3, "heartbeat": 2.0}
        with ol.launch(ids_job, mesh=MESH, shadows=True, cache=cache, **options) as service:
            status = service.status()
            here = next(host["node"] for host in status["hosts"] if host["role"] == "planner")
            away = next(host for host in status["hosts"] if host["node"] != here)
            waits = []

            def at_step(step):
                if step == 10:
                    (tmp_path / "nodes.gone.tmp").write_text(away["node"])
                    (tmp_path / "nodes.gone.tmp").rename(tmp_path / "nodes.gone")
                waits.append(time.monotonic())

            assert consume(service, 0.2, at_step) == expected
            end = time.monotonic() + 60  # shadows fed the stream; the successor may still be coming up
            while not moved_of(after := service.status(), away)["up"] and time.monotonic() < end:
                time.sleep(0.2)
        assert away["role"] in [fault["role"] for fault in after["faults"]]
        longest = max(b - a for a, b in itertools.pairwise(waits))
        assert longest < 12, "faster than Ray alone"
        moved = moved_of(after, away)
        assert moved["up"] and moved["node"] != away["node"]
    finally:
        owner.kill()
        owner.wait()
