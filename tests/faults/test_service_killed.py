"""Kill -9 and SIGSTOP of the service process: trainers wait, and go on with the very stream they had."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import overlord as ol
from tests.conftest import write_ids

Seen = list[tuple[int, str, list[str]]]
"""(index, plan digest, digests of the microbatches) of every step."""

PAUSE_S = 0.02


def consume(client: ol.Client, steps: int, each: Callable[[ol.Client, Any], None] | None = None) -> Seen:
    seen: Seen = []
    for step in client:
        seen.append((step.index, step.plan_digest, [batch.digest() for batch in step.microbatches]))
        if each is not None:
            each(client, step)
        if len(seen) == steps:
            break
    return seen


def undisturbed(job: ol.Job, cache: str, ranks: int, steps: int, each: Any = None) -> list[Seen]:
    """The same stream with nobody dying."""
    found: list[Seen] = []
    for rank in range(ranks):  # one after the other: reports of the first rank hold for the others
        with ol.launch(job, mesh=ol.ClientPlaceTree(dp=ranks), runtime="inline", cache=cache) as service:
            found.append(consume(service.client(rank), steps, each))
    return found


def train_slowly(client: ol.Client, step: Any) -> None:
    time.sleep(PAUSE_S)


def hit(service: ol.Service, how: signal.Signals) -> None:
    """Send a signal to the service process; to the next one, where it has ended and the next is not started yet."""
    while True:
        pid = service._runtime.pid
        try:
            os.kill(pid, how)
            while how is signal.SIGSTOP and psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)  # the signal is on its way, and it may answer until then
            return
        except (ProcessLookupError, psutil.NoSuchProcess):
            time.sleep(0.001)


def all_ranks(service: ol.Service, ranks: int, steps: int, each: Any = train_slowly) -> list[Any]:
    """Begin to consume on threads; return what will have been seen."""
    pool = ThreadPoolExecutor(ranks)
    clients = [service.client(rank) for rank in range(ranks)]
    futures = [pool.submit(consume, client, steps, each) for client in clients]
    pool.shutdown(wait=False)
    return futures


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=["kill", "stop"]
)
def test_the_stream_goes_on(ids_job, cache, how):
    steps, ranks = 60, 2
    expected = undisturbed(ids_job, cache, ranks, steps)
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=ranks), cache=cache, heartbeat=0.5) as service:
        futures = all_ranks(service, ranks, steps)
        time.sleep(random.Random(how).uniform(0.1, 0.7))
        hit(service, how)
        assert [future.result(60) for future in futures] == expected
        assert service.status()["restarts"] == 1


def test_the_status_tells_that_a_service_is_started_again(ids_job, cache):
    with ol.launch(ids_job, cache=cache) as service:
        next(service.client())
        before = service.status()
        assert before["service"]["state"] == "up"
        hit(service, signal.SIGKILL)
        told, until = [], time.monotonic() + 60
        while not told or told[-1]["service"]["restarts"] == 0 or told[-1]["service"]["state"] != "up":
            assert time.monotonic() < until
            told.append(service.status())
            time.sleep(0.01)
        away = [one for one in told if one["service"]["state"] == "starting again"]
        assert away and all(one["sources"] == before["sources"] for one in away)
        assert told[-1]["service"] | {"pid": 0} == {"pid": 0, "restarts": 1, "state": "up", "why": None}


@pytest.mark.slow
def test_what_a_client_holds_and_asks_after_a_kill(ids_job, cache):
    """Arrays over the kill; microbatches, state and the step in hand after it."""
    with ol.launch(ids_job, runtime="inline", cache=cache) as service:
        client = service.client()
        expected = consume(client, 6)
        with_state = client.state_dict()
        later = consume(client, 6)
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        found = consume(client, 4)
        lazy = next(client)
        held = lazy.microbatches[0]
        time.sleep(0.5)  # the next step is built, and comes to hand with the step that follows
        step = next(client)
        assert step.microbatches[0]  # with it the client asks for the step behind
        time.sleep(0.5)
        hit(service, signal.SIGSTOP)
        hit(service, signal.SIGKILL)
        began = time.monotonic()
        in_hand = next(client)
        assert [batch.digest() for batch in in_hand.microbatches] == later[0][2]
        waited = time.monotonic() - began
        assert held.digest() == expected[4][2][0]
        for opened in (lazy, step):
            digests = [batch.digest() for batch in opened.microbatches]
            found.append((opened.index, opened.plan_digest, digests))
        assert found == expected
        assert waited < 0.5 * (time.monotonic() - began), "a step in hand does not wait for the start, as others do"
        rest = consume(client, 5)
        assert [(in_hand.index, in_hand.plan_digest, [b.digest() for b in in_hand.microbatches]), *rest] == later
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        consume(client, 6)
        hit(service, signal.SIGKILL)
        assert client.state_dict() == with_state


@pytest.mark.slow
def test_a_second_trainer_is_still_told(ids_job, cache, caplog):
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        consume(client, 3)
        hit(service, signal.SIGKILL)
        consume(client, 3)
        assert "has a client" not in caplog.text and "begins again" not in caplog.text
        ol.connect(service.address, 0).close()
        assert "rank 0 of" in caplog.text and "has a client in this process already" in caplog.text


@pytest.mark.slow
def test_changes_and_questions_wait_for_the_restart(ids_job, cache):
    def run(disturb: Callable[[ol.Service], None], **where: Any) -> list[str]:
        with ol.launch(ids_job, cache=cache, **where) as service, service.client() as client:
            consume(client, 5)
            assert service.set_mixture({"a": 1, "b": 5, "c": 1}, at_step=20) == 20
            disturb(service)
            # A planner that came back does not know how far its predecessor had promised: up to what it had reserved.
            assert service.skip_steps(2, at_step=70) == 70
            return [digest for _, digest, _ in consume(client, 75)]

    assert run(lambda service: hit(service, signal.SIGKILL)) == run(lambda service: None, runtime="inline")


@pytest.mark.slow
def test_a_restart_that_fails_tells_the_clients(tmp_path, cache):
    rows = write_ids(tmp_path / "a.jsonl", [5] * 40)
    job = ol.Job(
        [ol.Source("a", str(rows), sample=ol.Text("ids", tokenized=True))], batch=ol.Batch(32, global_samples=4)
    )
    with ol.launch(job, cache=cache) as service:
        clients = [service.client(), service.client()]
        for client in clients:
            next(client)
        rows.unlink()
        hit(service, signal.SIGKILL)
        for client in clients:
            with pytest.raises(ol.SourceError, match=r"was killed by SIGKILL\) and cannot be started again.*a\.jsonl"):
                consume(client, 3)
        for ask in (service.status, service.client, lambda: ol.connect(service.address, 0)):
            with pytest.raises(ol.SourceError, match="cannot be started again"):
                ask()


def reporting(metrics: Callable[[int], dict[str, float]]) -> Callable[[ol.Client, Any], None]:
    def report(client: ol.Client, step: Any) -> None:
        client.report(step.index, metrics(step.index))
        time.sleep(PAUSE_S / 4)

    return report


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_reports_and_a_learned_mixture(ids_job, cache, seed):
    sources = [source.replace(weight=None) for source in ids_job.sources]
    job = ids_job.replace(sources=sources, mixture=ol.Mixture({"a": 3, "b": 1, "c": 2}, learn="odm"), lag=6)
    metrics = lambda step: {f"loss/{name}": 2.0 + (step * 7 + n) % 5 for n, name in enumerate("abc")}  # noqa: E731
    expected = undisturbed(job, cache, 1, 60, reporting(metrics))[0]
    chance = random.Random(seed)
    with ol.launch(job, cache=cache, heartbeat=0.5) as service:
        future = all_ranks(service, 1, 60, reporting(metrics))[0]
        for how in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            time.sleep(chance.uniform(0.0, 0.3))
            hit(service, how)
            restarts = service._runtime.restarts
            while service._runtime.restarts == restarts:
                time.sleep(0.01)
        assert future.result(60) == expected


TRAINER = """
import json, sys, time
import overlord as ol
address, rank, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
seen = []
with ol.connect(address, rank) as client:
    print("attached", flush=True)
    for step in client:
        seen.append([step.index, step.plan_digest, [batch.digest() for batch in step.microbatches]])
        time.sleep(0.02)
        if len(seen) == steps:
            break
print(json.dumps(seen))
"""


def start_trainers(service: ol.Service, ranks: Sequence[int], steps: int) -> list[subprocess.Popen[str]]:
    trainers = [
        subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(service.address), str(rank), str(steps)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    for trainer in trainers:
        assert trainer.stdout is not None and trainer.stdout.readline() == "attached\n"
    return trainers


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_hits_also_during_the_restart(mixed_job, cache, seed):
    """Trainers in other processes and on threads; every second hit comes while the service is being started again."""
    ranks, steps = 4, 50
    expected = undisturbed(mixed_job, cache, ranks, steps)
    chance = random.Random(seed)
    with ol.launch(mixed_job, mesh=ol.ClientPlaceTree(dp=ranks), cache=cache, heartbeat=0.5) as service:
        processes = start_trainers(service, (2, 3), steps)
        futures = all_ranks(service, 2, steps)
        for number in range(4):
            time.sleep(chance.uniform(0.0, 0.5) if number % 2 else chance.uniform(0.3, 1.0))
            hit(service, chance.choice([signal.SIGKILL, signal.SIGSTOP]))
            restarts = service._runtime.restarts
            while service._runtime.restarts == restarts:
                time.sleep(0.01)
        found = [future.result(120) for future in futures]
        for process in processes:
            out, _ = process.communicate(timeout=120)
            found.append([tuple(step) for step in json.loads(out)])
        assert found == expected
        assert service.status()["restarts"] >= 4


@pytest.mark.slow
def test_a_crash_loop_ends_with_a_message(tmp_path, cache):
    trigger = tmp_path / "trigger"

    def fn(row: dict[str, Any], path: str = str(trigger)) -> dict[str, Any]:
        if os.path.exists(path):
            os._exit(7)
        return {"tokens": [1, 2]}

    rows = write_ids(tmp_path / "a.jsonl", [3] * 300)
    source = ol.Source("a", str(rows), sample=ol.Custom(fn, columns=["n"], process=False), shuffle_bytes=0)
    with ol.launch(ol.Job([source], batch=ol.Batch(32, global_samples=4)), cache=cache) as service:
        client = service.client()
        next(client)
        trigger.touch()
        hit(service, signal.SIGKILL)
        with pytest.raises(ol.ServiceLost, match=r"6 times in a row.*SIGKILL; (ended with code 7(; |\))){5}") as caught:
            consume(client, 80)
        with pytest.raises(ol.ServiceLost) as again:
            service.status()
        assert str(again.value) == str(caught.value)
        assert service._runtime.restarts == 5


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", [{}, {"loader_hosts": 2}, {"shadows": True}], ids=["one", "hosts", "shadows"])
def test_one_that_serves_between_its_deaths_is_no_crash_loop(ids_job, cache, where):
    with ol.launch(ids_job, cache=cache, **where) as service, service.client() as client:
        for number in range(7):
            consume(client, 4, train_slowly)
            time.sleep(0.3)  # progress comes with the heartbeats of the roles
            hit(service, signal.SIGKILL)
            assert service.status()["restarts"] == number + 1
        assert client.next_step == 28


@pytest.mark.slow
def test_threads_of_a_closed_client_do_not_wait_for_ever(ids_job, cache):
    with ol.launch(ids_job, cache=cache, heartbeat=30.0) as service:
        client = service.client()
        consume(client, 3)
        hit(service, signal.SIGSTOP)
        met: list[BaseException] = []

        def ask() -> None:
            try:
                client.state_dict()
            except BaseException as error:
                met.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.3)
        client._feed._closed = True  # as `close()` of another thread begins
        thread.join(30)
        hit(service, signal.SIGCONT)
        assert [type(error) for error in met] == [ol.ClosedError]


@pytest.mark.slow
def test_a_folder_that_goes_ends_the_wait(ids_job, cache, caplog, monkeypatch):
    monkeypatch.setattr("overlord.runtimes.client_feed.FIRST_WARNING_S", 0.1)
    service = ol.launch(ids_job, cache=cache)
    client = service.client()
    consume(client, 3)
    folder = Path(str(service.address).removeprefix("unix://"))
    threading.Timer(1.0, service.close).start()
    hit(service, signal.SIGKILL)
    with pytest.raises((ol.ServiceLost, ol.ClosedError), match=r"is gone|was closed"):
        consume(client, 10_000)
    service.close()
    assert not folder.exists()
    assert "rank 0 (step, at step" in caplog.text and "waits for the service at" in caplog.text


@pytest.mark.slow
def test_a_service_that_comes_back_late_does_not_look_for_its_first_steps(ids_job, cache):
    """Its first step is not kept any more, and nobody needs it; nor does one who asks for it stop the others."""
    with ol.launch(ids_job, cache=cache, keep=16) as service, service.client() as client:
        consume(client, 60)
        hit(service, signal.SIGKILL)
        time.sleep(4)  # nobody asks: what it does by itself must not fail
        assert [index for index, _, _ in consume(client, 3)] == [60, 61, 62]
        with ol.connect(service.address, 0) as late, pytest.raises(ol.SpecError, match="not kept any more"):
            next(late)
        assert [index for index, _, _ in consume(client, 3)] == [63, 64, 65]


@pytest.mark.slow
def test_a_lease_is_longer_than_what_the_heartbeat_allows(ids_job, cache):
    """The launcher waits for two heartbeats before it takes a service for dead; its roles must not end before."""
    with ol.launch(ids_job, cache=cache, loader_hosts=2, heartbeat=20.0) as service, service.client() as client:
        consume(client, 3)
        time.sleep(2)  # a lease begins with the first beat
        before = {host["role"]: host["pid"] for host in service.status()["hosts"]}
        hit(service, signal.SIGSTOP)
        time.sleep(34)  # longer than the lease that holds for short heartbeats
        hit(service, signal.SIGCONT)
        consume(client, 20)
        time.sleep(1)
        assert {host["role"]: host["pid"] for host in service.status()["hosts"]} == before
        assert service.status()["restarts"] == 0 and service.status()["faults"] == []
