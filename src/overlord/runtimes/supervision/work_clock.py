"""What work costs: seconds of a processor and seconds of waiting for storage or servers, whatever else the host does.

Time on the wall would not do: where many workers share a few cores, each waits for a core most of the time, and would
look many times as slow as it is. So the time that a thread was ready to run and had no core counts for nothing. Threads
that wait for a process worker or a reader process count what that process says it has spent.

Where the system does not tell how long a thread waited for a core (/proc/thread-self/schedstat), that time is counted
as waiting; so is waiting for the interpreter lock, which is short where heavy work runs in process workers.
"""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple


class Spent(NamedTuple):
    """What some work took."""

    cpu_s: float = 0.0
    """Seconds of a processor."""
    waited_s: float = 0.0
    """Seconds of waiting for storage, servers or other programs."""

    @property
    def seconds(self) -> float:
        """Seconds that it takes one worker that has a core."""
        return self.cpu_s + self.waited_s

    def plus(self, other: Spent) -> Spent:
        """Return what both took together."""
        return Spent(self.cpu_s + other.cpu_s, self.waited_s + other.waited_s)

    def times(self, factor: float) -> Spent:
        """Return what so much more of it takes."""
        return Spent(factor * self.cpu_s, factor * self.waited_s)


class _Schedstat:
    """A thread's file of how long it was ready and had no core; open, since opening it takes most of the time."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class _Helped(threading.local):
    """What this thread has waited for other processes so far, and what they have spent for it meanwhile."""

    wall_s = 0.0
    spent = Spent()
    schedstat: _Schedstat | None = None


_helped = _Helped()


def note_help(wall_s: float, spent: Spent) -> None:
    """Note that the calling thread waited for another process, and what that process has spent for it."""
    _helped.wall_s += wall_s
    _helped.spent = _helped.spent.plus(spent)


class WorkClock:
    """Counts what the calling thread has spent since it was made, and other processes for it.

    Example:
        >>> clock = WorkClock()
        >>> time.sleep(0.02)
        >>> spent = clock.spent()
        >>> spent.waited_s >= 0.01 and spent.cpu_s < 0.01
        True
    """

    def __init__(self) -> None:
        self._before = _helped.wall_s, _helped.spent
        self._queued, self._cpu, self._wall = _own_queued_s(), time.thread_time(), time.perf_counter()

    def spent(self) -> Spent:
        """Return what was spent."""
        wall, cpu = time.perf_counter() - self._wall, time.thread_time() - self._cpu
        helped_s, (cpu_before, waited_before) = _helped.wall_s - self._before[0], self._before[1]
        waited = max(wall - helped_s - cpu - (_own_queued_s() - self._queued), 0.0)
        return Spent(cpu + _helped.spent.cpu_s - cpu_before, waited + _helped.spent.waited_s - waited_before)


def _own_queued_s() -> float:
    """Return how long this thread was ready and had no core so far."""
    file = _helped.schedstat
    try:
        if file is None or file.process != os.getpid():  # that of a thread which was forked belongs to its parent
            file = _helped.schedstat = _Schedstat()
        return 1e-9 * int(os.pread(file.fd, 64, 0).split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0  # no such file on this system


def queued_s(thread: str) -> float:
    """Return how long the thread of a path under /proc was ready and had no core so far."""
    try:
        file = os.open(f"/proc/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)  # a third of the time of `open`
        try:
            return 1e-9 * int(os.read(file, 64).split()[1])
        finally:
            os.close(file)
    except (OSError, IndexError, ValueError):
        return 0.0  # no such file on this system, or a thread that has just ended
