"""What the workers of a host's sources run on: a pool of threads that they share, or the caller."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Lanes(Protocol):
    """What workers run on."""

    def submit(self, work: Callable[[], None]) -> Future[None] | None:
        """Run something beside the caller; None where that is not possible any more."""
        ...


class ThreadLanes:
    """A pool of threads for the workers of all sources of a host."""

    def __init__(self, most: int, name: str) -> None:
        self.most = most
        self._pool = ThreadPoolExecutor(most, thread_name_prefix=name)
        self._closed = False

    def submit(self, work: Callable[[], None]) -> Future[None] | None:
        """Run something in a thread."""
        try:
            return None if self._closed else self._pool.submit(work)
        except RuntimeError:  # it was closed a moment ago
            return None

    def close(self) -> None:
        """End the threads when they have done what they are doing."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)


class CallerLanes:
    """Everything in the caller, one after the other: what is called while something runs comes behind it."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = False

    def submit(self, work: Callable[[], None]) -> Future[None] | None:
        """Run something now, or behind what runs."""
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
