"""Whose fault a lost process was: crashes and endless loops count, kills, stops, storage and short memory do not."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.core.messages import RunFunction, SharedRows
from overlord.core.ragged import Ragged, RowBatch
from overlord.runtimes.supervision import blame
from overlord.runtimes.supervision.child import Limits
from overlord.runtimes.supervision.process_workers import ProcessWorkers
from overlord.runtimes.transport.codec import Garbled, frame_of, send_frame
from overlord.runtimes.transport.role_codec import RowMemory

# As the functions of a script travel: by value. A fresh worker would else import this file, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def quick(**limits: float) -> Limits:
    """Return limits of which some are shorter, for tests that wait until they are exceeded."""
    found = Limits(1.0)
    for name, value in limits.items():
        setattr(found, name, value)
    return found


def numbers(rows: RowBatch) -> list[int]:
    return np.asarray(rows["n"]).tolist()


@pytest.mark.parametrize("deadline", [None, 60.0])
def test_rows_of_a_stopped_worker_run_again(deadline):
    """The deadline of a user's function does not count the time that its worker was stopped."""

    def stop_once(rows):
        if 7 in rows["n"].tolist() and not marks.exists():
            marks.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return {"n": rows["n"] * 2}

    with ProcessWorkers(2, quick()) as pool:
        marks = Path(os.environ.get("TMPDIR", "/tmp")) / f"stopped-{os.getpid()}-{deadline}"
        marks.unlink(missing_ok=True)
        made, killed = pool.isolate(stop_once, name="stop", deadline=deadline)({"n": np.arange(20)})
        assert marks.exists()
        marks.unlink()
    assert killed == [] and numbers(made) == [2 * n for n in range(20)]


def test_a_row_that_never_ends_is_found_by_its_processor_time():
    """In a source without a deadline, among rows that are done; the limit counts no second of waiting."""

    def spin(rows):
        while 7 in rows["n"].tolist():
            pass
        return {"n": rows["n"] * 2}

    with ProcessWorkers(1, quick(run_cpu=0.5)) as pool:
        made, killed = pool.isolate(spin, name="spin", deadline=None)({"n": np.arange(10)})
    assert killed == [(7, "killed its worker twice: no answer within 0.5 s of processor time")]
    assert numbers(made) == [2 * n for n in range(10) if n != 7]


@pytest.mark.slow
def test_a_worker_that_waits_for_storage_is_replaced_and_past_a_few_tries_it_is_an_error(tmp_path):
    def wait(rows):
        (tmp_path / str(os.getpid())).touch()
        if len(list(tmp_path.iterdir())) <= patience:
            time.sleep(1000)
        return {"n": rows["n"] * 2}

    patience = 2
    with ProcessWorkers(1, quick(idle=0.5)) as pool:
        made, killed = pool.isolate(wait, name="wait", deadline=None)({"n": np.arange(4)})
    assert killed == [] and numbers(made) == [0, 2, 4, 6]
    patience = 1000
    why = r"wait: 5 workers in a row waited for storage in vain .*it sleeps"
    with ProcessWorkers(1, quick(idle=0.2)) as pool, pytest.raises(ol.SourceError, match=why):
        pool.isolate(wait, name="wait", deadline=None)({"n": np.arange(4)})


def test_workers_that_are_always_killed_end_in_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(blame, "MOST_LOSSES", 10)
    monkeypatch.setattr(blame, "LOSSES_S", 0.1)

    def die(rows):
        os.kill(os.getpid(), signal.SIGKILL)

    with (
        ProcessWorkers(1) as pool,
        pytest.raises(ol.OverlordError, match=r"processes were lost within .* without any progress .*SIGKILL.*kill"),
    ):
        pool.isolate(die, name="die", deadline=None)({"n": np.arange(4)})


def test_workers_that_are_killed_as_they_start_are_replaced_as_often_as_it_takes(monkeypatch):
    """A kill hits any moment, also between a fork and the first message; that is no error of the function."""
    with ProcessWorkers(1) as pool:
        fork, killed = pool._server.fork, []

        def fork_and_kill():
            child = fork()
            if len(killed) < 8:
                killed.append(child.pid)
                os.kill(child.pid, signal.SIGKILL)
                while child.alive:
                    time.sleep(0.001)
            return child

        monkeypatch.setattr(pool._server, "fork", fork_and_kill)
        made, lost = pool.isolate(lambda rows: {"n": rows["n"] * 2}, name="double", deadline=None)({"n": np.arange(4)})
    assert len(killed) == 8 and lost == [] and numbers(made) == [0, 2, 4, 6]


def test_a_kill_between_rows_is_no_error_and_a_crash_there_is_one(tmp_path):
    """Where every row was given up, the function still runs over none of them, for its columns."""

    def deadly(rows):
        if len(rows["n"]) > 0:
            os._exit(3)
        if crashes:
            os._exit(4)
        (tmp_path / str(os.getpid())).touch()
        if len(list(tmp_path.iterdir())) < 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"n": rows["n"] * 2}

    crashes = False
    with ProcessWorkers(1) as pool:
        made, given_up = pool.isolate(deadly, name="deadly", deadline=None)({"n": np.arange(2)})
        assert [row for row, _ in given_up] == [0, 1] and numbers(made) == []
        assert len(list(tmp_path.iterdir())) == 6
        crashes = True
        for count in (2, 0):
            with pytest.raises(ol.OverlordError, match=r"deadly: 3 worker processes were lost without a row .*code 4"):
                pool.isolate(deadly, name="deadly", deadline=None)({"n": np.arange(count)})


class _Limited:
    """A function of the pool that uses more memory than its control group allows, for one row."""

    only_reads, tokenizer = True, None

    def __init__(self, group: str, wanted: int) -> None:
        self.group, self.wanted = group, wanted

    def prepare(self) -> None:
        Path(self.group, "cgroup.procs").write_text(str(os.getpid()))

    def __call__(self, rows):
        if 2 in rows["n"].tolist():
            np.ones(self.wanted, np.uint8)
        return {"n": rows["n"] * 2}


@pytest.fixture
def memory_group(monkeypatch):
    """A control group with little memory, where this process may make one."""
    top = Path("/sys/fs/cgroup")
    old = (top / "memory").exists()
    group = (top / "memory" if old else top) / f"overlord-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(700 << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    # What workers may use is judged by the groups of the service: here only the workers are in this one.
    monkeypatch.setattr(blame, "control_groups", lambda _: iter([group]))
    yield str(group)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


@pytest.mark.slow
def test_a_row_that_needs_more_memory_than_there_is_gets_a_verdict(memory_group):
    """It was ended twice by the kernel, alone in a fresh worker with room, for what it used itself."""
    with ProcessWorkers(2) as pool:
        run = pool.isolate(_Limited(memory_group, 2 << 30), name="large", deadline=None)
        made, killed = run({"n": np.arange(6)})
    assert [row for row, _ in killed] == [2] and "needs more memory than this host has" in killed[0][1]
    assert numbers(made) == [0, 2, 6, 8, 10]


@pytest.mark.slow
def test_a_fork_server_that_is_lost_during_a_start_is_replaced(monkeypatch):
    """Killed and stopped; only where no server starts at all is it an error, which says what to do."""

    def double(rows):
        return {"n": rows["n"] * 2}

    with ProcessWorkers(1, quick()) as pool:
        run = pool.isolate(double, name="double", deadline=None)
        for ending in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            assert numbers(run({"n": np.arange(3)})[0]) == [0, 2, 4]
            server = psutil.Process(pool._server.pid)
            for worker in server.children():
                worker.kill()
            server.send_signal(ending)
        assert numbers(run({"n": np.arange(3)})[0]) == [0, 2, 4]
    with ProcessWorkers(1, quick()) as pool:
        monkeypatch.setattr(pool._server, "_module", "overlord.there_is_no_such_module")
        why = r"lost before they ran a row .*the fork server is gone.*5 times in a row.*out of memory or processes"
        with pytest.raises(ol.OverlordError, match=why):
            pool.isolate(double, name="double", deadline=None)({"n": np.arange(3)})


def test_a_connection_that_is_shut_down_under_a_waiting_thread_is_a_lost_worker():
    """Two threads ask one worker; it is killed while the second is about to: both rows run again."""

    def slow(rows):
        time.sleep(0.01)
        return {"n": rows["n"] * 2}

    with ProcessWorkers(2) as pool:
        run, over, errors = pool.isolate(slow, name="slow", deadline=None), threading.Event(), []

        def ask() -> None:
            while not over.is_set():
                try:
                    made, killed = run({"n": np.arange(8)})
                    assert killed == [] and numbers(made) == [2 * n for n in range(8)]
                except BaseException as error:
                    errors.append(error)
                    return

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            time.sleep(0.02)
            for worker in psutil.Process(pool._server.pid).children()[:1] if pool._server.pid else ():
                worker.kill()
        over.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_a_worker_that_answers_nonsense_is_lost_and_its_row_found():
    """As one whose memory a hostile file has damaged: here it writes into its own connections."""

    def babble(rows):
        if 3 in rows["n"].tolist():
            for fd in range(3, 64):
                try:
                    socket.socket(fileno=os.dup(fd)).send(b"overlord" * 100)
                except OSError:
                    continue
        return {"n": rows["n"] * 2}

    with ProcessWorkers(1) as pool:
        made, killed = pool.isolate(babble, name="babble", deadline=None)({"n": np.arange(6)})
    assert [row for row, _ in killed] == [3] and "makes no sense" in killed[0][1]
    assert numbers(made) == [0, 2, 4, 8, 10]


def consumed(rows: RowBatch) -> None:
    """Touch everything that an answer holds, as kernels do."""
    for column in rows.values():
        if isinstance(column, Ragged):
            assert all(len(column[row]) == column.lengths[row] for row in range(len(column)))
        elif not isinstance(column, np.ndarray):
            column.gathered()
        else:
            column.tobytes()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_answer_is_refused_or_stays_within_its_memory(data):
    blocks = [np.frombuffer(mmap.mmap(-1, 1 << 14), np.uint8) for _ in range(2)]
    service, worker = RowMemory(*blocks), RowMemory(*blocks)
    asked: RowBatch = {"same": np.arange(40, dtype=np.uint8), "words": Ragged.from_rows([b"ab", b"", b"cde"])}
    head, rows = worker.question_of(service.ask(RunFunction("f"), asked))
    rows["more"] = Ragged.from_rows([np.arange(5), np.arange(0), np.arange(3)], np.int32)
    rows["grid"] = np.ones((3, 6), np.int64)
    told = worker.answer(head, rows)
    assert isinstance(told, SharedRows)
    frame = frame_of(told)
    damaged = bytearray(frame[0])
    for _ in range(data.draw(st.integers(0, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    for _ in range(data.draw(st.integers(0, 4))):
        blocks[1][data.draw(st.integers(0, 600))] = data.draw(st.integers(0, 255))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(theirs, [bytes(damaged), *frame[1:]])
        try:
            _, found, _ = service.receive_answer(ours, lambda: None)
        except Garbled:
            return
    consumed(service.kept(found))


def test_a_late_call_says_when_its_process_only_waits_for_a_core(monkeypatch):
    """On a host whose cores are full "it is running" would be read as a process that is stuck in a loop."""
    told = iter([blame._Seen("R", 0.1, 0.0), blame._Seen("R", 0.2, 9.0)])
    monkeypatch.setattr(blame, "_look_at", lambda pid: next(told))
    clock = blame.CallClock(1, blame.CallLimits(), "starts up")
    clock.tick()
    assert str(clock).endswith("while it starts up; it is running")
    clock.tick()
    assert str(clock).endswith("while it starts up; it waits for a free CPU")
