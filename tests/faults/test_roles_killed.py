"""kill -9 and SIGSTOP of every role of a service in several processes: the trainers get the very same stream."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

import overlord as ol
from overlord.core.plan import chain_digest
from overlord.testing import StreamDigests, stream_digests

MESH = ol.ClientPlaceTree(dp=2)
STEPS = 40


@pytest.fixture(scope="module")
def expected(ids_job, cache) -> StreamDigests:
    return stream_digests(ids_job, mesh=MESH, steps=STEPS, cache=cache)


def consume(service, pause_s: float, at_step=None) -> StreamDigests:
    """Train on all ranks for some steps; return what came."""
    clients = [service.client(rank) for rank in range(MESH.world_size)]
    order, plan, content = [], [], []
    for step in range(STEPS):
        if at_step is not None:
            at_step(step)
        opened = [next(client) for client in clients]
        order.append(opened[0].order_digest)
        plan.append(opened[0].plan_digest)
        for one in opened:
            content += [batch.digest() for batch in one.microbatches]
        time.sleep(pause_s)
    return StreamDigests(chain_digest(order), chain_digest(plan), chain_digest(content), len(order))


def strike(service, role: str, signum: int) -> bool:
    """Send a signal to the process of a role, if it has one now."""
    found = [host for host in service.status()["hosts"] if host["role"].startswith(role) and host["up"]]
    if found:
        os.kill(found[0]["pid"], signum)
    return bool(found)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_loader_with_a_shadow(ids_job, cache, expected, signum):
    with ol.launch(ids_job, mesh=MESH, shadows=True, heartbeat=1.0, cache=cache) as service:

        def at_step(step):
            if step == 10:
                assert strike(service, "loader host 0", signum)

        assert consume(service, 0.02, at_step) == expected
        faults = service.status()["faults"]
        assert all(0 <= fault["step"] <= service.status()["planner"]["next_step"] for fault in faults)
        assert [fault["role"] for fault in faults] == ["loader host 0"]
        assert faults[0]["promoted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["planner", "constructor host 0", "loader host 1"])
@pytest.mark.parametrize("shadows", [False, True])
def test_every_role(ids_job, cache, expected, role, signum, shadows):
    with ol.launch(ids_job, mesh=MESH, shadows=shadows, loader_hosts=2, heartbeat=1.0, cache=cache) as service:

        def at_step(step):
            if step in (7, 23):
                strike(service, role, signum)

        assert consume(service, 0.05, at_step) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_anybody_at_any_moment(ids_job, cache, expected, seed):
    """Also two at once, a loader with its shadow, and successors while they start."""
    luck = random.Random(seed)
    with ol.launch(ids_job, mesh=MESH, shadows=True, loader_hosts=3, heartbeat=1.0, cache=cache) as service:
        done = threading.Event()

        def trouble():
            while not done.wait(luck.uniform(0.05, 2.0)):
                up = [host for host in service.status()["hosts"] if host["up"]]
                for host in luck.sample(up, min(len(up), luck.choice([1, 1, 2, 3]))):
                    try:
                        os.kill(host["pid"], luck.choice([signal.SIGKILL, signal.SIGSTOP]))
                    except ProcessLookupError:
                        pass

        thread = threading.Thread(target=trouble)
        thread.start()
        try:
            assert consume(service, 0.1) == expected
        finally:
            done.set()
            thread.join()
