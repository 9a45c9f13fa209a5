"""Back-pressure: a slow trainer bounds what is held ahead of it; a fast one among slow ones still gets its data."""

from __future__ import annotations

import threading
import time

import pytest
from tests.conftest import write_ids

import overlord as ol

MIB = 1 << 20


def held(service) -> int:
    return sum(service.status()["memory"]["held"].values())


@pytest.mark.slow
def test_a_slow_trainer_bounds_what_is_held(mixed_job, cache):
    with ol.launch(mixed_job, cache=cache, prefetch=8, budget=4 * MIB) as service, service.client() as client:
        step = next(client)
        largest = 2 * sum(batch.nbytes for batch in step.microbatches)
        seen = [held(service) for _ in range(400)]
        # The budget, one step that a waiting client needs beyond it, and what the readers hold ahead.
        assert max(seen) < 4 * MIB + 3 * largest + 8 * MIB
        assert service.status()["planner"]["next_step"] <= 1 + 8 + 1
        digests = [next(client).plan_digest for _ in range(12)]
    with ol.launch(mixed_job, cache=cache, runtime="inline") as service:
        client = service.client()
        assert [next(client).plan_digest for _ in range(13)][1:] == digests


def test_the_step_before_makes_room_for_the_one_behind(tmp_path, cache):
    """A trainer holds the step that it computes; what it has done with must not take the room of the next one."""
    source = ol.Source("ids", str(write_ids(tmp_path / "ids.jsonl", [64] * 512)), sample=ol.Text("ids", tokenized=True))
    job = ol.Job(sources=[source], batch=ol.Batch(64, global_samples=64, microbatch_tokens=1024))

    def settled(service: ol.Service) -> int:
        """Return the bytes of views once they have not changed for a while: what is wanted is built."""
        found, since = -1, time.monotonic()
        while time.monotonic() < since + 0.5:
            now = service.status()["memory"]["held"]["views"]
            found, since = now, since if now == found else time.monotonic()
        return found

    with ol.launch(job, cache=cache, prefetch=1) as service, service.client() as client:
        seen: list[int] = []
        for step in client:
            assert all(batch["input_ids"].size for batch in step.microbatches)
            seen.append(settled(service))
            if step.index == 4:
                break
    assert max(seen) == seen[0]  # this step and the next


def test_a_budget_smaller_than_one_step_still_feeds(mixed_job, cache):
    mesh = ol.ClientPlaceTree(dp=2, cp=2)
    with ol.launch(mixed_job, cache=cache, mesh=mesh, prefetch=4, budget=1) as service:
        clients = [service.client(rank) for rank in range(4)]
        for index in range(6):
            for client in clients:
                step = next(client)
                assert step.index == index
                assert all(batch["input_ids"].size for batch in step.microbatches)


def test_ranks_in_threads_at_their_own_pace(mixed_job, cache):
    mesh = ol.ClientPlaceTree(dp=2, tp=2)
    seen: dict[int, list[str]] = {}

    def train(service, rank):
        with service.client(rank) as client:
            seen[rank] = [b.digest() for _, s in zip(range(10), client, strict=False) for b in s.microbatches]

    with ol.launch(mixed_job, cache=cache, mesh=mesh, budget=8 * MIB) as service:
        threads = [threading.Thread(target=train, args=(service, rank)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert seen[0] != seen[2]


def test_a_rank_that_comes_late_gets_the_whole_stream(ids_job, cache):
    with ol.launch(ids_job, cache=cache, mesh=ol.ClientPlaceTree(dp=2)) as service:
        with service.client(0) as early:
            first = [next(early).plan_digest for _ in range(40)]
        with service.client(1) as late:
            assert [next(late).plan_digest for _ in range(40)] == first


def test_old_steps_can_be_looked_at_again(ids_job, cache):
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        steps = [next(client) for _ in range(15)]
        found = [[batch.digest() for batch in step.microbatches] for step in reversed(steps)]
    with ol.launch(ids_job, cache=cache, runtime="inline") as service:
        client = service.client()
        expected = [[batch.digest() for batch in next(client).microbatches] for _ in range(15)]
    assert found[::-1] == expected
