"""kill -9 of process workers and reader processes at random: every row is made again, and the stream is the same."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import psutil
import pytest

import overlord as ol
from overlord.testing import digest_service, stream_digests

STEPS = 30


def workers_of(service: ol.Service) -> list[psutil.Process]:
    """Return the processes that compute for a service: children of its fork servers, which are forked from a copy."""
    found = []
    for copy in psutil.Process(service.pid).children():
        for server in copy.children():
            found += server.children()
    return found


@pytest.mark.parametrize(
    "seed, threads",
    [(0, 4), (1, 2), pytest.param(2, 4, marks=pytest.mark.slow), pytest.param(3, 4, marks=pytest.mark.slow)],
)
def test_workers_killed_at_random_change_nothing(mixed_job, cache, seed, threads):
    expected = stream_digests(mixed_job, steps=STEPS, cache=cache)
    rng, over, killed = random.Random(seed), threading.Event(), []
    with ol.launch(mixed_job, cache=cache, threads=threads) as service:

        def kill() -> None:
            # Far enough apart that no row meets two of them: it would be given up, as one that kills its workers.
            while not over.wait(rng.uniform(0.3, 0.6)):
                with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                    worker = rng.choice(workers_of(service))
                    worker.kill()
                    killed.append(worker.pid)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            found = digest_service(service, steps=STEPS, before=lambda *_: time.sleep(0.1))
        finally:
            over.set()
            killer.join()
        assert sum(source["bad"] for source in service.status()["sources"].values()) == 0
    assert found == expected
    assert len(killed) >= 3
