"""What work costs on a busy host: seconds of a processor and of waiting, not of waiting for a core."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from overlord.core.ragged import RowBatch
from overlord.runtimes.supervision.process_workers import ProcessWorkers
from overlord.runtimes.supervision.work_clock import Spent, WorkClock, _helped, note_help


@contextlib.contextmanager
def busy_host(processes: int = 8):
    """Have all cores taken by others."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        time.sleep(0.2)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def compute(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def compute_and_wait(rows: RowBatch) -> RowBatch:
    for _ in np.asarray(rows["n"]):
        compute(0.02)
        time.sleep(0.01)
    return {"n": np.asarray(rows["n"])}


def test_waiting_for_a_core_is_no_cost():
    with busy_host():
        began, clock = time.perf_counter(), WorkClock()
        compute(0.15)
        time.sleep(0.05)
        spent, wall = clock.spent(), time.perf_counter() - began
    assert 0.14 < spent.cpu_s < 0.3
    assert wall > 1.5 * spent.seconds, "the host was busy"
    assert spent.seconds < 0.15 + 0.05 + 0.5 * (wall - 0.2), "most of what was waited for a core is not counted"


@pytest.mark.slow
def test_work_of_a_process_worker_counts_as_it_says():
    with ProcessWorkers(2) as pool:
        isolated = pool.isolate(compute_and_wait, name="compute")
        isolated({"n": np.arange(2)})
        with busy_host():
            clock = WorkClock()
            isolated({"n": np.arange(10)})
            spent = clock.spent()
    assert 0.2 <= spent.cpu_s < 0.4
    assert 0.1 <= spent.waited_s < 0.5


def test_help_is_counted_by_thread_and_only_within():
    note_help(5.0, Spent(3.0, 1.0))
    clock = WorkClock()
    note_help(0.0, Spent(2.0, 1.0))
    spent = clock.spent()
    assert spent.cpu_s == pytest.approx(2.0, abs=0.01) and spent.waited_s == pytest.approx(1.0, abs=0.05)


def test_a_forked_process_counts_its_own_waiting_for_a_core():
    WorkClock().spent()  # the thread's file is open
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            WorkClock().spent()
            os.write(write, str(os.readlink(f"/proc/self/fd/{_helped.schedstat.fd}")).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 200).decode().startswith(f"/proc/{child}/task/{child}/")
    os.close(read)
    os.close(write)


def test_the_file_of_a_thread_closes_with_it():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        thread = threading.Thread(target=lambda: WorkClock().spent())
        thread.start()
        thread.join()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
