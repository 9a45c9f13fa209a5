"""The workers of a SourceLoader: they work ahead at once, in any number, and nobody sees it in the samples."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.conftest import write_ids

import overlord as ol
from overlord.core.memory_account import MemoryAccount
from overlord.core.messages import MetaRequest
from overlord.core.order import BEGIN
from overlord.core.samples import Cursor, Part
from overlord.errors import OverlordError
from overlord.roles.poisoned_rows import PoisonedRows
from overlord.roles.source_loader import SourceLoader
from overlord.runtimes.hosts.loader_fleet import LoaderFleet, make_fleet
from overlord.runtimes.hosts.prefetch import POOL_READS, Executors, SourceWorkers, ThreadPriorityExecutor, ThreadWorkers
from overlord.runtimes.hosts.step_server import Checked, StepServer
from overlord.runtimes.launching.deployment import open_files, prepare
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.runtimes.supervision import blame
from overlord.stores.journal import Journal
from overlord.stores.places import open_place


class Slow:
    """A function that takes a while, and knows how many of it run at once."""

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds = seconds
        self.running = self.most = self.calls = 0
        self.broken = False
        self._lock = threading.Lock()

    def __call__(self, row: dict) -> dict:
        with self._lock:
            self.running += 1
            self.calls += 1
            self.most = max(self.most, self.running)
        time.sleep(self.seconds)
        with self._lock:
            self.running -= 1
        return {"tokens": row["ids"][:5]}


@pytest.fixture
def executors():
    executors = Executors.of_threads(2, 32)
    yield executors
    executors.close()


def fleet_of(
    folder: Path, slow: Slow, executors: Executors, workers: int, rows: int = 400, files: int = 4
) -> LoaderFleet:
    for number in range(files if not (folder / "a").exists() else 0):
        write_ids(folder / "a" / f"{number:03}.jsonl", np.full(rows // files, 5), number * 1000)
    sample = ol.Custom(slow, columns=["ids"], process=False, name="slow", code_digest="1")
    job = ol.Job(
        sources=[ol.Source("a", str(folder / "a"), sample=sample, shuffle_bytes=2048)],
        batch=ol.Batch(32, global_samples=8),
    )
    options = ServiceOptions(mesh=ol.ClientPlaceTree(), cache=str(folder / "cache"), workers={"a": workers})
    prepared = prepare(job, options)
    files = open_files(prepared, [0], executors.callers)
    verdicts = PoisonedRows(Journal(open_place(str(folder / "store")), lambda: None))
    return make_fleet(prepared, files, verdicts, executors)


def walk(fleet: LoaderFleet, rows: int, count: int = 24, between=lambda at: None) -> np.ndarray:
    """Ask for metadata in order, as a planner does, and return all of it."""
    cursor, found, at = Cursor(0, BEGIN, 0), [], 0
    while at < rows:
        (delta,) = fleet.summary_buffer([MetaRequest(0, cursor, count)])
        found.append(delta.meta)
        cursor, at = delta.next_cursor, at + len(delta.meta)
        between(at)
    return np.concatenate(found)


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_as_many_work_at_once_as_there_are_and_the_samples_are_the_same(
    tmp_path: Path, executors, workers: int
) -> None:
    slow = Slow()
    found = walk(fleet_of(tmp_path, slow, executors, workers), 400)
    assert slow.most == workers
    alone = walk(fleet_of(tmp_path, Slow(0.0), Executors.of_caller(), 1), 400)
    assert found.tobytes() == alone.tobytes()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_source_whose_storage_does_not_answer_is_named(tmp_path: Path, executors, monkeypatch, workers: int) -> None:
    """Also where no process of its own reads it, as with JSON lines and a few threads."""
    monkeypatch.setattr(blame, "LATE_S", 0.2)
    answers, read, found = threading.Event(), SourceLoader.read, []

    def hang(*given):
        answers.wait(60)
        return read(*given)

    monkeypatch.setattr(SourceLoader, "read", hang)
    fleet = fleet_of(tmp_path, Slow(0.0), executors, workers)
    planner = threading.Thread(target=lambda: found.append(walk(fleet, 400)))
    planner.start()
    until = time.monotonic() + 30

    def late() -> list[str]:  # workers of other tests of this process may wait for a free CPU
        return [call for call in blame.late_calls() if "source 'a'" in call]

    while not (told := late()) and time.monotonic() < until:
        time.sleep(0.01)
    answers.set()
    planner.join(60)
    assert len(told) == 1 and "rows of source 'a' have been read for 0 s: its storage is slow" in told[0]
    assert len(found[0]) == 400 and late() == []


def test_workers_come_and_go_while_rows_are_asked_for(tmp_path: Path, executors) -> None:
    slow = Slow()
    fleet = fleet_of(tmp_path, slow, executors, 1)
    seen: dict[int, int] = {}

    def change(at: int) -> None:
        wanted = {0: 1, 1: 6, 2: 2, 3: 0}[min(3, at // 150)]  # with none, whoever asks works
        before = fleet.status()[0]["workers"]
        if before != wanted:
            fleet.resize({0: wanted})
            if wanted < before:
                time.sleep(0.5)  # those that were at work end their stretch
            slow.most = slow.running
        seen[wanted] = max(seen.get(wanted, 0), slow.most)

    found = walk(fleet, 600, between=change)
    assert seen[1] == 1 and 2 < seen[6] <= 6 and seen[2] <= 2
    alone = walk(fleet_of(tmp_path, Slow(0.0), Executors.of_caller(), 1), 600)
    assert found.tobytes() == alone.tobytes()


def test_what_fails_ahead_is_met_by_whoever_needs_it_and_nothing_hangs(tmp_path: Path, executors) -> None:
    fleet = fleet_of(tmp_path, Slow(0.0), executors, 4)
    pool = fleet._pools[0]
    read, broken = pool.loader.read, threading.Event()

    def failing(wanted):
        if broken.is_set() and any(cursor.offset > 0 for cursor, _, _ in wanted):
            raise OSError("the disk is gone")
        return read(wanted)

    pool.loader.read = failing  # type: ignore[method-assign]
    broken.set()
    with pytest.raises((OSError, OverlordError), match="the disk is gone"):
        walk(fleet, 400)
    broken.clear()
    alone = walk(fleet_of(tmp_path, Slow(0.0), Executors.of_caller(), 1), 400)
    assert walk(fleet, 400).tobytes() == alone.tobytes()


def test_a_source_that_rests_holds_nothing_and_works_on_nothing(tmp_path: Path, executors) -> None:
    slow = Slow()
    fleet = fleet_of(tmp_path, slow, executors, 8)
    walk(fleet, 48)
    assert fleet.buffer_bytes > 0
    fleet.rest({0: Cursor(-1, -1, -1)})
    time.sleep(0.3)
    calls = slow.calls
    time.sleep(0.3)
    assert (fleet.buffer_bytes, slow.calls) == (0, calls)


def test_a_part_of_the_groups_is_prepared_and_any_row_can_be_asked_for(tmp_path: Path, executors) -> None:
    fleet = fleet_of(tmp_path, Slow(0.0), executors, 4)
    fleet.resize({0: 4}, {0: Part(1, 3)})
    alone = walk(fleet_of(tmp_path, Slow(0.0), Executors.of_caller(), 1), 400)
    assert walk(fleet, 400).tobytes() == alone.tobytes()


def test_what_was_done_is_counted(tmp_path: Path, executors) -> None:
    fleet = fleet_of(tmp_path, Slow(0.004), executors, 4)
    walk(fleet, 200)
    status = fleet.status()[0]
    assert status["workers"] == 4 and status["samples_prepared"] >= 200
    assert 0.004 <= status["busy_s"] / status["samples_prepared"] < 0.2
    assert 0 < status["waited_s"] < status["busy_s"]


def test_a_source_that_comes_while_the_status_is_told(tmp_path: Path, executors, monkeypatch) -> None:
    fleet = fleet_of(tmp_path, Slow(0.0), executors, 1)
    (pool,) = fleet._pools.values()

    def come_meanwhile(work):
        fleet.add(7, pool)
        return work(pool.loader)

    monkeypatch.setattr(pool, "alone", come_meanwhile)
    assert list(fleet.status()) == [0]


def test_leaf_work_is_shared_and_what_fails_there_is_raised() -> None:
    executor = ThreadPriorityExecutor(8, "test")
    workers, slow = SourceWorkers(executor), Slow()
    workers.count = 5
    assert workers.map(lambda n: (slow({"ids": [1]}), n)[1] * 2, range(40)) == [2 * n for n in range(40)]
    assert slow.most == 5

    def fails(number: int) -> int:
        raise ValueError(f"number {number}")

    with pytest.raises(ValueError, match="number"):
        workers.map(fails, range(3))
    executor.close()
    assert workers.map(str, range(3)) == ["0", "1", "2"]


def test_what_is_due_first_goes_first_and_what_is_waited_for_before_that() -> None:
    executor, gate, done = ThreadPriorityExecutor(1, "test"), threading.Event(), list[str]()
    executor.submit(lambda: (gate.wait(5.0), None)[1])
    calls = {name: executor.submit(lambda name=name: done.append(name), due) for name, due in
             (("late", 9.0), ("soon", 2.0), ("latest", 20.0), ("now", 0.0), ("as soon", 2.0))}  # fmt: skip
    executor.hurry(calls["latest"])
    executor.hurry(calls["latest"])
    gate.set()
    calls["late"].result(5.0)
    executor.close()
    assert done == ["now", "latest", "soon", "as soon", "late"]


def test_lanes_that_close_leave_nobody_waiting() -> None:
    executor, gate = ThreadPriorityExecutor(1, "test"), threading.Event()
    first = executor.submit(lambda: (gate.wait(5.0), None)[1])
    behind = executor.submit(lambda: None)
    threading.Timer(0.1, gate.set).start()
    executor.close()
    assert first.done() and behind.cancelled()
    executor.hurry(behind)
    assert executor.submit(lambda: None) is None


def test_a_source_that_is_waited_for_does_not_stand_behind_those_that_read_ahead(tmp_path: Path) -> None:
    executors = Executors.of_threads(2, 1)
    try:
        ahead = [
            executors.prefetch.submit(lambda: time.sleep(0.05), time.perf_counter() + 3600)  # due in an hour
            for _ in range(300)
        ]
        fleet = fleet_of(tmp_path, Slow(0.001), executors, 2)
        assert len(walk(fleet, 200)) >= 200
        assert sum(one.done() for one in ahead if one is not None) < 150
    finally:
        executors.close()


def test_workers_are_called_for_work_and_not_for_nothing(tmp_path: Path, executors, monkeypatch) -> None:
    calls, submit = [], executors.prefetch.submit
    monkeypatch.setattr(executors.prefetch, "submit", lambda work, due=0.0: (calls.append(due), submit(work, due))[1])
    slow = Slow(0.004)
    fleet = fleet_of(tmp_path, slow, executors, 8)
    walk(fleet, 400)
    assert slow.most == 8
    # A call for each stretch, of which none is longer than 0.1 s, for each of the groups, and some for nothing.
    assert len(calls) < slow.calls


@pytest.mark.parametrize("count", [5, 24, 150])
def test_a_request_goes_on_over_many_small_groups_also_where_a_pool_measures_them(
    tmp_path: Path, executors, count: int
) -> None:
    alone = walk(fleet_of(tmp_path, Slow(0.0), Executors.of_caller(), 1, files=40), 390, 1)[:390]
    fleet = fleet_of(tmp_path, Slow(0.0), executors, 1, files=40)
    pool = fleet._pools[0]
    pool._pool = 4  # as where rows are measured in process workers
    pool._tell_loader()
    asked: list[int] = []
    measure = pool.loader.measure
    pool.loader.measure = lambda stretches: (asked.append(len(stretches)), measure(stretches))[1]  # type: ignore[method-assign]
    found = walk(fleet, 390, count)[:390]
    assert found.tobytes() == alone.tobytes()
    assert count < 100 or max(asked) > 1, "small groups are measured together"


@pytest.mark.parametrize("workers", [1, 3])
def test_two_workers_never_read_in_one_group_at_the_same_time(tmp_path: Path, executors, workers: int) -> None:
    """One that has measured must not free a group that another one reads in: rows would take each other's places."""
    fleet = fleet_of(tmp_path, Slow(0.0), executors, workers)
    pool = fleet._pools[0]
    pool._pool = 4
    pool._tell_loader()
    inside: set[tuple[int, int]] = set()
    twice: list[tuple[int, int]] = []
    reads: list[int] = []
    reading: set[int] = set()
    read, measure, turn = pool.loader.read, pool.loader.measure, itertools.count()

    def slow_read(wanted):
        keys = {cursor[:2] for cursor, _, _ in wanted}
        twice.extend(keys & inside)
        inside.update(keys)
        reading.add(id(keys))
        reads.append(len(reading))
        time.sleep(0.002 * (next(turn) % 4))
        try:
            return read(wanted)
        finally:
            reading.discard(id(keys))
            inside.difference_update(keys)

    def slow_measure(stretches):
        time.sleep(0.001 * (next(turn) % 7))
        return measure(stretches)

    pool.loader.read, pool.loader.measure = slow_read, slow_measure
    found = walk(fleet, 390, 5)
    assert twice == []
    assert 1 < max(reads) <= max(workers, POOL_READS) + 1, "and a request that reads by itself"
    assert pool._reads == 0
    alone = walk(fleet_of(tmp_path, Slow(0.0), Executors.of_caller(), 1), 390, 1)
    assert found[:390].tobytes() == alone[:390].tobytes()


def test_a_request_that_waits_while_its_source_is_dropped_is_answered(tmp_path: Path, executors) -> None:
    fleet = fleet_of(tmp_path, Slow(0.01), executors, 2)
    pool, done = fleet._pools[0], threading.Event()
    measure, met = pool.loader.measure, threading.Event()

    def dropped_meanwhile(stretches):
        found = measure(stretches)
        if not met.is_set():
            met.set()
            pool.rest(Cursor(-1, -1, -1))
        return found

    pool.loader.measure = dropped_meanwhile
    threading.Thread(target=lambda: (walk(fleet, 60, 60), done.set()), daemon=True).start()
    assert done.wait(20.0) and met.is_set()


@pytest.mark.parametrize("known", ["labels", "checked"])
def test_nothing_is_planned_behind_the_first_step_while_a_client_waits_for_it(known: str) -> None:
    """Its media take all cores then; once they are decoded, planning runs ahead for good."""
    server = StepServer(
        None, SimpleNamespace(first_step=0), None,  # type: ignore[arg-type]
        ranks_of=lambda tree: [0], prefetch=2, memory=MemoryAccount(1), read_bytes=lambda: 0,
    )  # fmt: skip

    def planned(wanted: dict[int, set[int]]) -> list[int]:
        return [step for step in wanted if server._may_run_ahead(step, wanted)]

    assert planned({0: set(), 1: set()}) == [0, 1], "no client is there yet"
    assert planned({0: {0}, 1: {0}, 2: {0}}) == [0]
    found = 5 if known == "labels" else Checked(None, frozenset({0}), 5, {})  # type: ignore[arg-type]
    getattr(server._cache, known)[0] = found
    assert planned({0: {0}, 1: {0}, 2: {0}}) == [0, 1, 2]
    getattr(server._cache, known).clear()
    assert planned({3: {0}, 4: {0}}) == [3, 4]


def test_calls_that_wait_run_at_once_and_those_that_do_not_stay_with_the_caller():
    workers, slow, threads = ThreadWorkers(4, "overlord-test"), Slow(0.02), set()

    def quick(item: int) -> int:
        threads.add(threading.get_ident())
        return item * item

    try:
        assert workers.map(quick, range(100)) == [item * item for item in range(100)]
        assert threading.get_ident() in threads
        assert workers.map(slow, [{"ids": [item]} for item in range(12)]) == [{"tokens": [item]} for item in range(12)]
        assert slow.most == 4, "the caller and three helpers"
        assert workers.map(quick, []) == []
    finally:
        workers.close()


def test_results_are_free_without_a_garbage_collection():
    """Those of a step are hundreds of megabytes, and a collection may be minutes away."""
    workers = ThreadWorkers(4, "overlord-test")
    gc.disable()
    try:
        found = workers.map(np.zeros, range(1, 50))
        kept = [weakref.ref(one) for one in found]
        del found
        assert [one() for one in kept] == [None] * 49
    finally:
        gc.enable()
        workers.close()


def test_the_first_of_several_errors_is_raised_and_no_further_call_is_begun():
    workers, begun = ThreadWorkers(4, "overlord-test"), []

    def fail(item: int) -> int:
        begun.append(item)
        time.sleep(0.01)
        if item >= 1:
            raise OverlordError(str(item))
        return item

    try:
        with pytest.raises(OverlordError, match=r"^1$"):
            workers.map(fail, range(1000))
        assert len(begun) < 12
    finally:
        workers.close()
