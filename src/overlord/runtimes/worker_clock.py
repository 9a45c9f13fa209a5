"""A clock for the work of one worker: the seconds that it takes where it has a core, and how many of them need one.

Rules of this file:
1. Seconds are time on the wall, less what was waited for a core; or of the processor, where threads of a library share
   the work. A worker is sized as one that has its core: on a busy host it would otherwise look many times slower than
   it is.
2. Both count this process and the process workers that work for it. Programs that a function starts itself are seen as
   waiting: nobody counts what they take.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Took(NamedTuple):
    """What some work took."""

    seconds: float = 0.0
    """Of one worker that has a core."""
    cpu_s: float = 0.0
    """Of them, seconds of a processor."""

    def and_also(self, other: Took) -> Took:
        """Return what both took together."""
        return Took(self.seconds + other.seconds, self.cpu_s + other.cpu_s)


class Clock:
    """What was taken since it was made.

    Args:
        helpers: Tells the ids of the processes that work for this one; they rest whenever it is asked.

    Example:
        >>> clock = Clock()
        >>> time.sleep(0.02)
        >>> took = clock.took()
        >>> took.seconds >= 0.015 and took.cpu_s <= took.seconds
        True
    """

    def __init__(self, helpers: Callable[[], Sequence[int]] = tuple) -> None:
        self._helpers = helpers
        before = helpers()
        self._queued = _queued_s(("self", *before))
        self._helped = {pid: _processor_s(pid) for pid in before}
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def took(self) -> Took:
        """Return what was taken."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        now = self._helpers()
        # What was started meanwhile, a process or a thread, has done all it did for this work; what has ended is gone.
        cpu += sum(max(_processor_s(pid) - self._helped.get(pid, 0.0), 0.0) for pid in now)
        queued = sum(waited - self._queued.get(who, 0.0) for who, waited in _queued_s(("self", *now)).items())
        # Threads of a tokenizer wait beside one another, and this one may have waited while it asked: what is taken off
        # may be too much.
        return Took(max(wall - queued, cpu), cpu)


def _processor_s(pid: int) -> float:
    """Return the seconds of a processor that a process had, threads that have ended counted; 0 where it is gone."""
    clock = ctypes.c_int()
    # What /proc and psutil tell comes in hundredths of a second, which is longer than most samples take.
    if ctypes.CDLL(None).clock_getcpuclockid(ctypes.c_int(pid), ctypes.byref(clock)):
        return 0.0
    try:
        return time.clock_gettime(clock.value)
    except OSError:
        return 0.0  # it has ended just now


def _queued_s(processes: Iterable[int | str]) -> dict[str, float]:
    """Return how long each thread of some processes was ready and had no core; nothing where the system does not tell.

    By thread: one that ends takes what it had waited with it, and a sum of all would fall.
    """
    found: dict[str, float] = {}
    for process in processes:
        try:
            threads = os.listdir(f"/proc/{process}/task")
        except OSError:
            continue  # no such folder on this system, or a process that has just ended
        for thread in threads:
            try:
                with open(f"/proc/{process}/task/{thread}/schedstat", "rb") as file:
                    found[thread] = 1e-9 * int(file.read().split()[1])
            except (OSError, IndexError, ValueError):
                continue  # no such file on this system, or a thread that has just ended
    return found
