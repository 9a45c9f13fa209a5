"""Prefetching: the workers of each SourceLoader, and the threads of a host that all of them share.

PrefetchPool        one SourceLoader with its workers, which read and measure rows ahead of the requests
PriorityExecutor    the threads that workers run on; work that is due first goes first, so that a source that is
nearly used up does not wait behind hundreds that have read far ahead
Executors           all executors of one host
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from overlord.core.messages import LoaderOrder, MetaDelta, MetaRequest, Payload
from overlord.core.order import BEGIN, NO_GROUP, Group, SourceOrder
from overlord.core.samples import WHOLE, Cursor, Part
from overlord.errors import ReaderError, SourceError
from overlord.roles.source_loader import AHEAD_BYTES, LoaderCounters, SourceLoader, Staged, rows_at_once
from overlord.runtimes.supervision.blame import noted_read
from overlord.runtimes.supervision.work_clock import Spent, WorkClock, note_help
from overlord.scaling.profiles import AHEAD
from overlord.transforms.samples.per_sample import Workers

T = TypeVar("T")


class PriorityExecutor(Protocol):
    """Runs work in the order in which it is due."""

    def submit(self, work: Callable[[], None], due: float = 0.0) -> Future[None] | None:
        """Run something in the background; None where the executor is closed.

        Args:
            work: What is to be done.
            due: When it is needed, by `time.perf_counter`; 0 where a caller waits for it now.
        """
        ...

    def hurry(self, waited_for: Future[None]) -> None:
        """Run something that was submitted before all that no caller waits for."""
        ...


class ThreadPriorityExecutor:
    """A pool of threads for the workers of all sources of a host."""

    def __init__(self, most: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(most, thread_name_prefix=name)
        self._closed = False
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], None], Future[None]]] = []
        """A heap: (due, number of the call, work, its future); what is hurried is in it twice."""

    def submit(self, work: Callable[[], None], due: float = 0.0) -> Future[None] | None:
        """Run something in a thread, behind what is due earlier."""
        done: Future[None] = Future()
        return done if self._add(work, due, done) else None

    def hurry(self, waited_for: Future[None]) -> None:
        """Run something before all that no caller waits for, if it does not run yet."""
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
        """Run what is due first: there are as many calls of this as entries in the heap."""
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


class InlineExecutor:
    """Runs everything in the caller, one after the other: what is submitted meanwhile comes behind it."""

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


class SourceWorkers:
    """Decodes the samples of one source: as many items at once as the source has workers."""

    def __init__(self, executor: PriorityExecutor) -> None:
        self._executor = executor
        self.count = 1
        self.spent = Spent()
        """What threads other than the caller have spent."""
        self._lock = threading.Lock()

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Apply the function to every item; the caller is one of the workers."""
        given = list(items)

        def help_out(work: Callable[[], None]) -> None:
            clock = WorkClock()
            work()
            with self._lock:
                self.spent = self.spent.plus(clock.spent())

        return _side_by_side(
            function, given, lambda work: self._executor.submit(lambda: help_out(work)), min(self.count, len(given)) - 1
        )


def _side_by_side(
    function: Callable[[Any], T],
    items: Sequence[Any],
    submit: Callable[[Callable[[], None]], Future[None] | None],
    helpers: int,
) -> list[T]:
    """Apply a function to every item; results in order. The caller works too, with at most so many helpers."""
    shared = _SharedWork(function, items, submit)
    shared.work(helpers)
    done, failed, started = shared.done, shared.failed, shared.started
    began = time.perf_counter()
    while started and not (failed and all(at in done for at in range(min(failed)))):  # of several errors, the first
        helper = started.pop(0)
        if helper is not None and not helper.cancel():
            helper.result()
    note_help(time.perf_counter() - began, Spent())  # what the helpers spend is counted by themselves
    if failed:
        raise failed.pop(min(failed))
    return [done[at] for at in range(len(items))]


class _SharedWork:
    """Items that a caller and its helpers take one after another.

    A helper is submitted by the first item of the caller, the next by that of the helper, and so on. Where items take
    no time, as with hundreds of sources that have read ahead, the caller has done all of them before the first helper
    has the interpreter lock: a future and a change of threads for each would cost more than the items. Where they wait,
    the next helper is there at once.

    An object, and no function that names itself: results in a circle of references wait for the garbage collector, and
    those of a step are hundreds of megabytes.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        submit: Callable[[Callable[[], None]], Future[None] | None],
    ) -> None:
        self._function, self._items, self._submit = function, items, submit
        self._left = iter(range(len(items)))  # `next` and `append` are one instruction each: no lock is needed
        self.started: list[Future[None] | None] = []
        self.done: dict[int, Any] = {}
        self.failed: dict[int, BaseException] = {}

    def work(self, helpers: int) -> None:
        """Take items until none is left, with at most so many helpers."""
        while not self.failed and (at := next(self._left, None)) is not None:
            if helpers > 0 and at + 1 < len(self._items):
                self.started.append(self._submit(functools.partial(self.work, helpers - 1)))
                helpers = 0
            try:
                self.done[at] = self._function(self._items[at])
            except BaseException as error:
                self.failed[at] = error


class SerialWorkers:
    """Does everything in the caller, one item after the other."""

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Apply the function to every item."""
        return [function(item) for item in items]

    def close(self) -> None:
        """Nothing runs here by itself."""


class ThreadWorkers:
    """A few threads, one of them the caller's: for calls that wait, or release the interpreter while they work."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Apply the function to every item; results in order."""
        given = list(items)
        return _side_by_side(function, given, self._pool.submit, min(self._threads, len(given)) - 1)

    def close(self) -> None:
        """Wait for running work and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class CountedWorkers(ThreadWorkers):
    """Threads for decoding, whose time on a processor is spent for the caller; they wait for no storage."""

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Apply the function to every item; results in order."""

        def counted(item: Any) -> tuple[T, float]:
            began = time.thread_time()
            return function(item), time.thread_time() - began

        given, began = list(items), time.perf_counter()
        done = [counted(given[0])] if len(given) == 1 else list(self._pool.map(counted, given))
        note_help(time.perf_counter() - began, Spent(sum(cpu_s for _, cpu_s in done)))
        return [result for result, _ in done]


LOADER_THREADS = 16
"""Calls to the loaders of one host that may wait for storage at the same time."""


@dataclass(frozen=True, slots=True)
class Executors:
    """The executors of one host."""

    callers: Workers
    """For calls to loaders, which wait for I/O."""
    leaf: Workers
    """For decoding, of sources without workers of their own."""
    prefetch: PriorityExecutor
    """For the workers of sources."""

    @classmethod
    def of_caller(cls) -> Executors:
        """Let the caller do everything."""
        return cls(SerialWorkers(), SerialWorkers(), InlineExecutor())

    @classmethod
    def of_threads(cls, threads: int, workers: int) -> Executors:
        """Use threads: so many for decoding, and at most so many for the workers of sources."""
        return cls(
            ThreadWorkers(LOADER_THREADS, "overlord-loaders"),
            CountedWorkers(threads, "overlord-workers"),
            ThreadPriorityExecutor(workers, "overlord-prefetch"),
        )

    def close(self) -> None:
        """End the threads."""
        for one in (self.prefetch, self.leaf, self.callers):
            one.close()  # type: ignore[union-attr]  # those of a caller have nothing to end


# --------------------------------------------------------------------------------------------------------------
# The workers of one SourceLoader: they read and measure stretches of rows ahead of what is asked for.
#
#     reach       the groups of the order that are worked on: as many as there are workers, from the position on
#     stretch     some rows of a group: one worker reads them, then measures them while another one reads on
#     position    where the last request ended; only requests move it
#
# How it works: a request moves the position and, where rows are missing, waits until a worker has prepared them, or
# prepares them itself if no worker will. `_kick` submits one worker at a time: once it has taken its stretch it submits
# the next, up to the wanted number. A worker (`_work`) reads and measures one stretch, or finds the group that comes
# next, and then ends, so that workers of other sources get their turn. With slow transforms the workers share a group;
# with slow files each has a group of its own. Their number can change between any two stretches.
#
# Rules of this part:
# 1. What is prepared here is a cache: nothing of it changes the stream, and the request for rows that failed ahead
#    reads them again, and raises the error.
# 2. Only the source's own lock is held here, and never while something is read or measured.
# 3. A worker that finds nothing to do ends; the next request submits it again.


logger = logging.getLogger("overlord")


WORKER_BYTES = 8 << 20
"""What one worker may hold ahead at most; a group that is larger is prepared as it is used."""
STRETCH_S = 0.1
"""A stretch should not take a worker much longer: a request for its first row waits for all of it."""
REQUESTS_AHEAD = AHEAD
"""How many requests like the last ones are prepared ahead: more would be wasted when the mixture turns away."""
POOL_STRETCHES = 8
"""Stretches of a source that are under way at once at least, where they are measured in the host's pool, or as many as
it has workers. With one at a time they would stand idle while the next one is read; with 8 for 16 workers, plans wait
for rows that stand behind images that are being decoded. Profiled with 16 workers: 0.7 and 0.9 of their work."""
POOL_READS = 2
"""Of those, stretches that are read at once: one read with 16 workers waits 6 of its 8 ms for the interpreter lock."""
POOL_REQUESTS_AHEAD = 8
"""The same for a pool: with four, workers wait for the next stretch while the last request is planned. Two workers on
two cores make 0.91 of their work instead of 0.85 with texts, and 0.86 instead of 0.83 with images."""
POOL_BYTES = 32 << 20, 6 << 20
"""What a source may hold ahead if a pool measures its rows: in all at least, and for each worker of the pool."""
POOL_CHUNK_BYTES, MOST_CHUNK_BYTES = 768 << 10, 16 << 20
"""Bytes of a stretch for each worker of a pool, and in all: a stretch costs the service's interpreter about the same.
With 16 workers and 12 MB instead of 4, an image of 135 KB costs it 0.21 ms instead of 0.28."""
FIRST_PAUSE_S = 60.0
"""Seconds between the first request and the second, as long as there is none: a source that is asked for the first time
comes before the others have read ahead."""
FEW_ROWS = 32
"""So many rows tell what a row costs."""

_Key = tuple[int, int]
"""(epoch, group)."""


@dataclass(slots=True)
class _Reach:
    """A group that is worked on."""

    key: _Key
    group: Group
    next: int
    """The first row that no worker has taken."""


@dataclass(frozen=True, slots=True)
class _Task:
    """A stretch that a worker or a request has taken."""

    key: _Key
    group: Group
    begin: int
    stop: int


@dataclass(slots=True)
class _Pace:
    """How requests come: how large, and how often."""

    rows: int = 0
    """Of a request."""
    at: float = 0.0
    """When the last one came."""
    every_s: float = 0.0
    """Seconds between two."""

    def asked(self, count: int, now: float) -> None:
        """Count a request."""
        self.every_s += (now - self.at - self.every_s) / 4 if self.at else 0.0
        self.rows, self.at = max(count, 7 * self.rows // 8), now

    def due(self, ahead: int) -> float:
        """Return when so many rows are used up, if requests go on as they came."""
        return self.at + (self.every_s or FIRST_PAUSE_S) * ahead / max(self.rows, 1)


class PrefetchPool:
    """One SourceLoader with its workers, safe to be asked from several threads.

    Args:
        loader: The loader.
        scout: The order of its source, for the workers alone.
        executor: What workers run on; None where the caller does everything when it is needed.
        workers: How many there are at first.
        helpers: Finish its samples, where that depends on the number of workers.
        pool: Workers of the host's pool, if rows are measured there. Then several stretches are always under way, but
            more than one group is only held for a second worker.
    """

    def __init__(
        self,
        loader: SourceLoader,
        scout: SourceOrder | None = None,
        executor: PriorityExecutor | None = None,
        workers: int = 1,
        helpers: SourceWorkers | None = None,
        pool: int = 0,
    ) -> None:
        self.loader = loader
        self._pool = pool
        self._scout = scout
        self._executor = executor if scout is not None else None
        self._changed = threading.Condition(threading.RLock())
        self._wanted = workers
        self._running = 0
        self._scouting = self._spoiled = self._resting = False
        self._position: Cursor | None = None
        self._part = WHOLE
        self._pace = _Pace()
        self._calling = False  # a worker was submitted and does not run yet; it submits the next one
        self._called: Future[None] | None = None
        self._end_of: int | None = None
        """The epoch in which there is no further group to work on."""
        self._reach: list[_Reach] = []
        self._reading: set[_Key] = set()
        self._reads = 0
        """Stretches that are being read."""
        self._taken: dict[_Key, list[tuple[int, int]]] = {}
        self._helpers = helpers
        self.handed_over = 0
        """Bytes handed over."""
        self._spent = Spent()
        """What workers and callers have spent on reading, measuring and finishing."""
        self._took = Spent()
        """What of it went into reading and measuring."""
        self._waited_s = 0.0
        """Seconds that planner and constructors were held up by this source, in requests that were answered."""
        self._waiting: dict[int, float] = {}
        """Since when requests that are not answered yet wait, by the threads that ask."""
        self._counted = LoaderCounters(0, set(), set())
        self.prepared = 0
        """Samples measured."""
        self._tell_loader()

    def resize(self, workers: int, part: Part | None = None) -> None:
        """Change the number of workers, and which groups they work on ahead."""
        with self._changed:
            self._wanted = workers
            if part is not None and part != self._part:
                self._part, self._reach, self._end_of = part, [], None
            self._tell_loader()
            self._kick()

    @property
    def _at_once(self) -> int:
        """Stretches that may be under way."""
        return max(self._wanted, POOL_STRETCHES, self._pool) if self._pool and self._wanted else self._wanted

    @property
    def _groups(self) -> int:
        """Groups that may be worked on: also the one that comes next, where stretches are made by the pool."""
        return max(self._wanted, 2) if self._pool else self._wanted

    def _tell_loader(self) -> None:
        self.loader.open_groups = self._groups + 1 if self._executor is not None else 1
        if self._helpers is not None:
            self._helpers.count = max(1, self._wanted)

    # -- what is asked of a loader ------------------------------------------------------------------

    def summary_buffer(self, request: MetaRequest) -> MetaDelta:
        """Tell what is known of some samples; waits until the workers have them."""
        began = time.perf_counter()
        self._waiting[threading.get_ident()] = began
        with self._changed:
            self._pace.asked(request.count, began)
        # Rows before `at` are there; `left` are missing, unless the epoch ends before.
        at, left = request.cursor, request.count
        moved: Cursor | None = None
        try:
            while True:
                with self._changed:
                    if self._resting:  # what was there is dropped
                        self._resting, at, left = False, request.cursor, request.count
                    if self._executor is None:
                        return self._asked(request)
                    at, left, group = self._there(at, left)
                    if not left:
                        return self._asked(request)
                    if at != moved:
                        self._move_to(at)
                        moved = at
                    if self._comes(at[:2], at.offset):
                        if self._calling and self._called is not None:
                            self._executor.hurry(self._called)  # before workers of sources that no request waits for
                            self._called = None
                        self._changed.wait(STRETCH_S)
                        continue
                    tasks = [self._take(at[:2], group, at.offset, at.offset + self._rows_at_once(group, left))]
                    self._reads += 1
                try:
                    self._do(tasks)
                except (ReaderError, SourceError):
                    if left == request.count:
                        raise
                    with self._changed:  # what comes before is told; the request for the next row meets the error
                        return self._asked(dataclasses.replace(request, count=request.count - left))
                self._spoiled = False
        finally:
            self._waited_s += time.perf_counter() - self._waiting.pop(threading.get_ident())

    @property
    def waited_s(self) -> float:
        """Seconds that planner and constructors were held up by this source, by now."""
        now = time.perf_counter()
        return self._waited_s + sum(now - began for began in list(self._waiting.values()))

    def counters(self, within_s: float) -> LoaderCounters:
        """Return what the loader has counted; what it had before, where it cannot be asked in time: it may hang."""
        if self._changed.acquire(timeout=max(within_s, 0.0)):
            try:
                self._counted = self.loader.counters
            finally:
                self._changed.release()
        return self._counted

    def _there(self, at: Cursor, left: int) -> tuple[Cursor, int, Group]:
        """Pass over rows that are measured; return the first that is not, how many are missing, and its group."""
        at, group = self.loader.wake(at)
        while True:
            stop = min(at.offset + left, group.num_rows)
            offset = self.loader.missing(at, stop)
            left -= offset - at.offset
            at = at._replace(offset=offset)
            if not left or offset < stop:
                return at, left, group
            at, ended = self.loader.after_group(at)
            if ended or self._part != WHOLE:
                return at, 0, group
            group = self.loader.group(at)

    def pop(self, order: LoaderOrder) -> Staged:
        """Let planned samples leave the read buffer."""
        with self._changed:
            popped = self.loader.loader_do_plan(order)
        return popped()  # others need not wait while rows are copied

    def finish(self, staged: Staged) -> Payload:
        """Finish planned samples, and count what went wrong."""
        clock = WorkClock()
        done = self.loader.finish(staged)
        with self._changed:
            self._spent = self._spent.plus(clock.spent())
            payload = self.loader.hand_over(staged, done)
            self.handed_over += payload.nbytes
            return payload

    def alone(self, work: Callable[[SourceLoader], T]) -> T:
        """Do something with the loader under its lock."""
        with self._changed:
            return work(self.loader)

    def rest(self, cursor: Cursor) -> None:
        """Drop what is held, and work on nothing until the next request."""
        with self._changed:
            self._position, self._reach, self._resting, self._end_of = None, [], True, None
            self.loader.rest(cursor)

    def work(self) -> dict[str, Any]:
        """Return what was done here, without waiting for the lock."""
        spent = self._spent.plus(self._helpers.spent) if self._helpers else self._spent
        return {
            "workers": self._wanted,
            "samples_prepared": self.prepared,
            "busy_s": round(spent.seconds, 4),
            "cpu_s": round(spent.cpu_s, 4),
            "waited_s": round(self.waited_s, 4),
            "handed_over_bytes": self.handed_over,
        }

    def _asked(self, request: MetaRequest) -> MetaDelta:
        before = self.loader.seen
        clock = WorkClock() if self._executor is None else None  # else a worker has read and measured them
        delta = self.loader.summary_buffer(request, one_group=self._part != WHOLE)  # other hosts have the next groups
        if clock is not None:
            self._spent = self._spent.plus(clock.spent())
        self.prepared += self.loader.seen - before
        self._move_to(delta.next_cursor)
        return delta

    # -- workers ------------------------------------------------------------------------------------

    def _move_to(self, position: Cursor) -> None:
        """Work from here on."""
        if self._executor is None:
            return
        self._position = position
        key = position[:2]
        while self._reach and self._reach[0].key < key:
            self._reach.pop(0)
        if self._reach and self._reach[0].key != key and self._part.has(position.group) and position.group != BEGIN:
            self._reach, self._end_of = [], None  # it went back
        if self._reach and self._reach[0].key == key:
            self._reach[0].next = max(self._reach[0].next, position.offset)
        self._kick()

    def _kick(self) -> None:
        """Submit a worker, if there is work and room for one, and none is submitted already."""
        if self._executor is None or self._calling or self._running >= self._at_once or not self._has_work():
            return
        self._running += 1
        self._calling = True
        self._called = self._executor.submit(self._work, self._pace.due(self._rows_ahead()))
        if self._called is None:
            self._running -= 1
            self._executor = None  # the host is closing: requests do the work themselves

    def _work(self) -> None:
        """Do one stretch, or look for the next group; then give way to the workers of other sources."""
        with self._changed:
            tasks = self._next() if self._running <= self._at_once else []
            scouts = not tasks and self._running <= self._at_once and self._may_scout()
            self._scouting |= scouts
            self._calling = False
            self._kick()
        try:
            if tasks:
                self._do(tasks)
            elif scouts:
                self._look_ahead()
        except Exception as error:  # rule 1: the request for these rows meets the same error
            logger.debug("source %s: working ahead failed: %s", self.loader.name, error)
            with self._changed:
                self._spoiled = True
        finally:
            with self._changed:
                self._running -= 1
                self._kick()
                self._changed.notify_all()

    def _do(self, tasks: Sequence[_Task]) -> None:
        """Read and measure stretches, and keep them."""
        clock, unread = WorkClock(), True
        try:
            with noted_read(self.loader.name):
                stretches = self.loader.read(
                    [(Cursor(*task.key, task.begin), task.group, task.stop - task.begin) for task in tasks]
                )
            with self._changed:
                unread = False
                self._reading.difference_update(task.key for task in tasks)
                self._reads -= 1
                self._kick()  # requests are not told: they wait until rows are measured
            measured = self.loader.measure(stretches)
            with self._changed:
                self.prepared += sum(len(stretch.numbers) for stretch in stretches)
                if not self._resting:
                    for one in measured:
                        self.loader.keep(one)
        finally:
            with self._changed:
                took = clock.spent()
                self._took, self._spent = self._took.plus(took), self._spent.plus(took)
                if unread:  # a group that was read is another worker's by now: two must never read in it together
                    self._reading.difference_update(task.key for task in tasks)
                    self._reads -= 1
                for task in tasks:
                    self._taken[task.key].remove((task.begin, task.stop))
                    if not self._taken[task.key]:
                        del self._taken[task.key]
                self._changed.notify_all()

    def _look_ahead(self) -> None:
        """Find the groups that come next, which may mean that files are indexed."""
        try:
            while self._look_at_next():
                pass
        finally:
            with self._changed:
                self._scouting = False

    def _look_at_next(self) -> bool:
        """Find the group that comes next; return whether another one is wanted."""
        with self._changed:
            position, last = self._position, self._reach[-1] if self._reach else None
        if position is None:
            return False
        key, begin = (last.key, 0) if last else (position[:2], position.offset)
        with self.loader.reading():
            found = self._follow(key, begin, inclusive=last is None)
        with self._changed:
            # A request may have moved the position meanwhile; then what was found may not be what comes next.
            if self._position is None or (self._reach[-1] if self._reach else None) is not last:
                return False
            if found is None:
                self._end_of = position.epoch
                return False
            self._reach.append(found)
            return self._pool > 0 and self._reaches_little()

    def _follow(self, key: _Key, begin: int, *, inclusive: bool) -> _Reach | None:
        """Return the group at a key, or the next one behind it, among those that are worked on here."""
        assert self._scout is not None
        epoch, number = key
        empty = 0
        while empty < 2:
            if number == BEGIN:
                number = self._scout.first_group(epoch)
            elif not inclusive:
                number, begin = self._scout.next_group(epoch, number), 0
            if number == NO_GROUP and self._repeats(epoch):
                epoch, number, begin, inclusive, empty = epoch + 1, BEGIN, 0, True, empty + 1
                continue
            if number == NO_GROUP:
                return None
            if self._part.has(number):
                return _Reach((epoch, number), self._scout.group(epoch, number), begin)
            inclusive = False
        return None

    def _repeats(self, epoch: int) -> bool:
        """Whether to work on beyond an epoch: not beyond the first, which may be the last."""
        position = self._position
        return position is not None and 0 < epoch <= position.epoch

    def _has_work(self) -> bool:
        if self._position is None or self._spoiled:
            return False
        if self._rows_ahead() >= self._most_ahead():
            return False
        pooled = max(POOL_BYTES[0], POOL_BYTES[1] * self._pool) if self._pool else 0
        room = self.loader.ahead_bytes(self._position) < max(pooled, WORKER_BYTES * max(self._wanted, 1))
        if self._pool and self._reads >= max(self._wanted, POOL_READS):
            return False
        return room and (self._next_place() is not None or self._may_scout())

    def _most_ahead(self) -> int:
        """Return how many rows may be prepared ahead: none, as long as other sources may not have their first ones."""
        if self._pace.rows and not self._pace.every_s:
            return self._pace.rows
        if self._pool and self._wanted == 1:
            row_bytes = max(self._reach[0].group.row_bytes, 1.0) if self._reach else 1.0
            return max(POOL_REQUESTS_AHEAD * self._pace.rows, 1, min(FEW_ROWS, int(AHEAD_BYTES / row_bytes)))
        least = self._wanted * _least_ahead(self._row_s() if self.prepared >= FEW_ROWS else 0.0)
        return max(REQUESTS_AHEAD * self._pace.rows, least)

    def _row_s(self) -> float:
        """Return what it takes to read and measure a row; for a pool, which shares the rows, with all its workers."""
        return max(self._took.seconds, 1e-9) / max(self.prepared, 1) / max(self._pool, 1)

    def _rows_ahead(self) -> int:
        assert self._position is not None
        here = [one.next - self._position.offset for one in self._reach[:1] if one.key == self._position[:2]]
        return sum(here) + sum(one.next for one in self._reach[len(here) :])

    def _may_scout(self) -> bool:
        position = self._position
        # The first epoch may be the last: the second one is begun by a request.
        begun = position is not None and (position.group != BEGIN or position.epoch != 1)
        more = begun and self._end_of != (position and position.epoch)
        return more and self._reaches_little() and not self._scouting

    def _reaches_little(self) -> bool:
        """Whether there are too few groups to work on: for a pool, groups without the rows that it may prepare."""
        if len(self._reach) < self._groups:
            return True
        left = sum(one.group.num_rows - one.next for one in self._reach)
        return self._pool > 0 and left < self._most_ahead() - self._rows_ahead()

    def _next_place(self) -> _Reach | None:
        """Return the first group that a worker could read on in."""
        unfinished = 0
        for one in self._reach[: None if self._pool else self._groups]:
            free = one.key not in self._reading
            if free:
                one.next = self.loader.missing(Cursor(*one.key, one.next), one.group.num_rows)
            if one.next < one.group.num_rows:
                if free:
                    return one
                unfinished += 1
                if self._pool and unfinished >= self._groups:
                    break  # no more groups are open than are kept: another one would be opened again and again
        return None

    def _next(self) -> list[_Task]:
        """Take a stretch; for a pool, as many small groups as are worth sending there together."""
        tasks: list[_Task] = []
        wanted = self._most_ahead() - self._rows_ahead() if self._pool else 0
        while (place := self._next_place()) is not None:
            rows = self._rows_at_once(place.group, wanted) - sum(task.stop - task.begin for task in tasks)
            if tasks and (rows <= 0 or not self._pool):
                break
            tasks.append(self._take(place.key, place.group, place.next, place.next + rows))
        self._reads += bool(tasks)
        return tasks

    def _rows_at_once(self, group: Group, wanted: int) -> int:
        """Return how many rows make a stretch, if so many are wanted."""
        rows = rows_at_once(group, wanted, min(POOL_CHUNK_BYTES * self._pool, MOST_CHUNK_BYTES))
        if self._executor is not None and self.prepared >= FEW_ROWS:
            rows = min(rows, int(STRETCH_S / self._row_s()))
        elif self._executor is not None:
            rows = min(rows, FEW_ROWS // 8)  # how long they take is not known yet
        return max(1, rows)

    def _take(self, key: _Key, group: Group, begin: int, stop: int) -> _Task:
        stop = min(stop, group.num_rows)
        self._reading.add(key)
        self._taken.setdefault(key, []).append((begin, stop))
        for one in self._reach:
            if one.key == key:
                one.next = max(one.next, stop)
        return _Task(key, group, begin, stop)

    def _comes(self, key: _Key, at: int) -> bool:
        """Whether a worker has taken a row, reads on in its group, or will take it next."""
        if any(begin <= at < stop for begin, stop in self._taken.get(key, ())) or key in self._reading:
            return True
        if self._spoiled or not self._part.has(key[1]):
            return False
        reached = next((one for one in self._reach if one.key == key), None)
        return self._running > 0 and self._executor is not None and (reached is None or reached.next <= at)


def _least_ahead(row_s: float) -> int:
    """Return how many rows a worker has ahead at least: few, where they are slow; 0 seconds: not known yet."""
    return max(4, min(2 * FEW_ROWS, int(8 * STRETCH_S / row_s))) if row_s else 2 * FEW_ROWS
