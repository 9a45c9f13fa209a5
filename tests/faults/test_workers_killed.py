"""kill -9 of process workers and reader processes at random: every row is made again, and the stream is the same."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import psutil
import pytest

import overlord as ol

STEPS = 20


def workers_of(service: ol.Service) -> list[psutil.Process]:
    """Return the processes that compute for a service: children of its fork servers, which are forked from a copy."""
    found = []
    for copy in psutil.Process(service.pid).children():
        for server in copy.children():
            found += server.children()
    return found


@pytest.mark.parametrize(
    ("seed", "threads", "pause_s", "kills"),
    [
        (0, 3, 0.3, 5),
        pytest.param(1, 2, 0.05, 20, marks=pytest.mark.slow),
        pytest.param(2, 4, 0.02, 100, marks=pytest.mark.slow),
        *(
            pytest.param(seed, threads, pause_s, 500, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])
            for seed, (threads, pause_s) in enumerate([(2, 0.1), (3, 0.1), (2, 0.02), (3, 0.01)])
        ),
    ],
)
def test_workers_killed_at_random_change_nothing(mixed_job, cache, seed, threads, pause_s, kills):
    """One at a time, at any rate: rows meet any number of kills, and none is given up for it."""
    rng, over, killed = random.Random(seed), threading.Event(), []
    with ol.launch(mixed_job, cache=cache, threads=threads) as service:

        def kill() -> None:
            while len(killed) < kills and not over.wait(rng.uniform(0, 2 * pause_s)):
                with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                    worker = rng.choice(workers_of(service))
                    worker.kill()
                    killed.append(worker.pid)

        killer = threading.Thread(target=kill)
        killer.start()
        client = iter(service.client(rank=0))
        found = []
        try:
            steps = max(STEPS, kills // 5)
            while len(found) < steps:
                while len(killed) * steps < kills * len(found):
                    time.sleep(0.005)  # as far as the kills have come: all of them are to fall into the run
                step = next(client)
                found.append((step.plan_digest, [batch.digest() for batch in step.microbatches]))
        finally:
            over.set()
            killer.join()
        assert sum(source["bad"] for source in service.status()["sources"].values()) == 0
    with ol.launch(mixed_job, cache=cache, runtime="inline") as service:
        for expected, step in zip(found, service.client(rank=0), strict=False):
            assert (step.plan_digest, [batch.digest() for batch in step.microbatches]) == expected, step.index
