"""Threads that take turns with the calls that wait for them.

How it works: every call has some items, and belongs to an owner (a function of one source). The owner whose calls have
had the least time is next, with an item of its first call. So a few rows that the next plan waits for do not stand
behind all the images of the steps before it, and of two stretches of a source the one that is due first is done first:
with turns between them both would be there at the end of the second, and the workers idle until then.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from overlord.errors import ClosedError, OverlordError

WORKER_THREAD = "overlord-process-workers"
"""The name of the threads, which talk to process workers."""

T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    """Items that a function is applied to, for a caller that waits for all of them."""

    function: Callable[[Any], Any]
    items: Sequence[Any]
    item_s: float
    """What an item is expected to take."""
    results: list[Any]
    begun: int = 0
    running: int = 0
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def left(self) -> int:
        """Items that are still to be begun."""
        return 0 if self.error is not None else len(self.items) - self.begun


class FairThreads:
    """As many threads as there are workers, and a few more, whose items wait until a worker is free.

    Args:
        workers: How many items really run at once.
        lines: How many more threads there are.
    """

    def __init__(self, workers: int, lines: int = 0) -> None:
        self._workers = workers
        self._count = workers + lines
        self._changed = threading.Condition()
        self._calls: dict[object, deque[_Call]] = {}
        """By owner, the calls with items that are not begun, as they came."""
        self._waiting: list[tuple[float, int, object]] = []
        """A heap of the owners: (seconds that its calls have had, number of its turn, owner)."""
        self._turns = itertools.count()
        self._clock = 0.0
        """What the owner of the last turn had had: a new one begins there."""
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._closed = False

    def map(self, function: Callable[[Any], T], items: Sequence[Any], item_s: float, owner: object = None) -> list[T]:
        """Apply the function to every item; results in order. The first error ends the call."""
        if not items:
            return []
        call = _Call(function, items, item_s, [None] * len(items))
        owner = call.done if owner is None else owner
        with self._changed:
            if self._closed:
                raise RuntimeError("the threads are closed")
            if not self._threads:
                self._start()
            if owner not in self._calls:
                self._calls[owner] = deque()
                heapq.heappush(self._waiting, (self._clock, next(self._turns), owner))
            self._calls[owner].append(call)
            self._changed.notify(len(items))
        call.done.wait()
        try:
            if call.error is not None:
                raise call.error
            return call.results
        finally:
            del call  # it holds the error, whose traceback holds this frame

    @property
    def free(self) -> int:
        """How many workers have nothing to do, or will have once the items that wait are taken; at least one."""
        with self._changed:
            waiting = sum(call.left for calls in self._calls.values() for call in calls)
            return max(1, self._workers - self._running - waiting)

    def close(self) -> None:
        """Let what runs end; calls with items that were not begun fail."""
        with self._changed:
            self._closed = True
            for call in itertools.chain.from_iterable(self._calls.values()):
                call.error = call.error or ClosedError("the process workers are closed; launch the service again.")
                if not call.running:
                    call.done.set()
            self._calls.clear()
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        """Start the threads; where the host has no room for all of them, those that there are do the work."""
        try:
            for _ in range(self._count):
                # A daemon: a pool that was never closed must not keep the interpreter from ending.
                thread = threading.Thread(target=self._work, name=WORKER_THREAD, daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            if not self._threads:
                raise OverlordError(
                    f"no thread can be started for the process workers ({error}); no sample could be made. The host is "
                    "out of processes or threads: free some, or raise its limit."
                ) from error

    def _work(self) -> None:
        while (turn := self._next()) is not None:
            call, at = turn
            try:
                call.results[at] = call.function(call.items[at])
            except BaseException as error:
                with self._changed:
                    call.error = call.error or error
            with self._changed:
                self._running -= 1
                call.running -= 1
                if not call.running and (call.error is not None or call.begun == len(call.items)):
                    call.done.set()
            del turn, call  # rows and results would live as long as this thread waits

    def _next(self) -> tuple[_Call, int] | None:
        with self._changed:
            while True:
                while not self._waiting:
                    if self._closed:
                        return None
                    self._changed.wait()
                had, _, owner = heapq.heappop(self._waiting)
                calls = self._calls[owner]
                while calls and not calls[0].left:  # those that an error has ended
                    calls.popleft()
                if calls:
                    break
                del self._calls[owner]
            self._clock = max(self._clock, had)
            call = calls[0]
            call.begun += 1
            call.running += 1
            self._running += 1
            if not call.left:
                calls.popleft()
            if calls:
                heapq.heappush(self._waiting, (had + call.item_s, next(self._turns), owner))
            else:
                del self._calls[owner]
            return call, call.begun - 1
