"""What the workers of a host's sources run on: a pool of threads that they share, or the caller.

Where there are more workers than threads, work that is due first goes first: a source that is nearly used up does not
wait behind hundreds that have read far ahead.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Lanes(Protocol):
    """What workers run on."""

    def submit(self, work: Callable[[], None], due: float = 0.0) -> Future[None] | None:
        """Run something beside the caller; None where that is not possible any more.

        Args:
            work: What is to be done.
            due: When somebody needs it, by `time.perf_counter`; 0 where somebody waits for it now.
        """
        ...

    def hurry(self, waited_for: Future[None]) -> None:
        """Somebody waits now for what was submitted: it goes before all that nobody waits for."""
        ...


class ThreadLanes:
    """A pool of threads for the workers of all sources of a host."""

    def __init__(self, most: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(most, thread_name_prefix=name)
        self._closed = False
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], None], Future[None]]] = []
        """A heap: (due, number of the call, work, what tells of it); what is hurried is in it twice."""

    def submit(self, work: Callable[[], None], due: float = 0.0) -> Future[None] | None:
        """Run something in a thread, behind what is due earlier."""
        done: Future[None] = Future()
        return done if self._add(work, due, done) else None

    def hurry(self, waited_for: Future[None]) -> None:
        """Let something go before all that nobody waits for, if it does not run yet."""
        with self._lock:
            work = next((one[2] for one in self._waiting if one[3] is waited_for and one[0] > 0), None)
        if work is not None and not waited_for.running():
            self._add(work, 0.0, waited_for)

    def _add(self, work: Callable[[], None], due: float, done: Future[None]) -> bool:
        with self._lock:
            heapq.heappush(self._waiting, (due, next(self._count), work, done))
        try:
            if not self._closed:
                self._pool.submit(self._first)
                return True
        except RuntimeError:  # it was closed a moment ago
            pass
        done.cancel()
        return False

    def _first(self) -> None:
        """Do what is due first: there are as many calls of this as things that wait."""
        with self._lock:
            _, _, work, done = heapq.heappop(self._waiting)
            begun = done.running() or done.done()
            if begun or not done.set_running_or_notify_cancel():
                return
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def close(self) -> None:
        """End the threads when they have done what they are doing."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for _, _, _, done in self._waiting:
                done.cancel()


class CallerLanes:
    """Everything in the caller, one after the other: what is called while something runs comes behind it."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = False

    def submit(self, work: Callable[[], None], due: float = 0.0) -> Future[None] | None:
        """Run something now, or behind what runs, whenever it is due."""
        self._waiting.append(work)
        done: Future[None] = Future()
        done.set_result(None)
        if not self._running:
            self._running = True
            try:
                while self._waiting:
                    self._waiting.popleft()()
            finally:
                self._running = False
        return done

    def hurry(self, waited_for: Future[None]) -> None:
        """Do nothing: it has run."""

    def close(self) -> None:
        """Nothing runs here by itself."""


class CrewWorkers:
    """Does the leaf work of one source (decoding): as many items at once as the source has workers."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.count = 1
        self.helped_s = 0.0
        """Seconds that others than the caller worked."""

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Apply the function to every item; the caller is one of the workers."""
        given = list(items)
        done: dict[int, T] = {}
        left, lock = iter(range(len(given))), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    at = next(left, None)
                if at is None:
                    return
                done[at] = function(given[at])

        def help_out() -> None:
            began = time.perf_counter()
            work()
            self.helped_s += time.perf_counter() - began

        helpers = [self._lanes.submit(help_out) for _ in range(min(self.count, len(given)) - 1)]
        work()
        for helper in helpers:
            if helper is not None and not helper.cancel():
                helper.result()
        return [done[at] for at in range(len(given))]
