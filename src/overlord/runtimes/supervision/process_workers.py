"""Process workers: functions that hold the interpreter, or may kill it, run over rows in processes of their own.

Rules of this file:
1. Results do not depend on how many workers there are, which were killed meanwhile, or how rows were cut into runs.
2. A row is given up only when it was alone with a worker, then with a fresh one, and both died or hung: a slow machine
   and the kernel's out-of-memory killer hit innocent rows, but hardly the same one twice.
3. A worker that dies while no row runs (at its start, at rest) is no fault of a row: it is replaced, and past a few
   tries that is an error.
4. A function that exceeds its time limit for several rows in succession, with no row done in between, hangs: that is an
   error of the function, not of rows, and trying every row of a source twice would never end.
5. A worker runs one thing at a time. The next one waits in its second line meanwhile, so that it need not wait for the
   service: with 16 workers a thread gets the interpreter lock 5 ms after an answer. What has a time limit waits in no
   line: its time would begin before it does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import mmap
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import numpy.typing as npt

from overlord.core.messages import (
    LoadFunction,
    MapMemory,
    RowsFailed,
    RowsMade,
    RunFunction,
    ServeCaller,
    SharedRows,
    WorkerMessage,
)
from overlord.core.ragged import (
    Ragged,
    RowBatch,
    concat_rows,
    copied_rows,
    num_rows,
    offsets_of,
    slice_rows,
)
from overlord.core.samples import padded
from overlord.errors import ClosedError, OverlordError, ServiceLost, SpecError, ToleranceError, error_named
from overlord.runtimes.supervision.child import LIMITS, Limits, usable_cpus
from overlord.runtimes.supervision.fair_threads import FairThreads
from overlord.runtimes.supervision.fork_server import ChildLost, ForkedChild, ForkServer
from overlord.runtimes.supervision.work_clock import Spent, WorkClock, note_help
from overlord.runtimes.transport.codec import OnSilence, receive_frame
from overlord.runtimes.transport.role_codec import (
    RowMemory,
    copied_bytes,
    from_frame,
    receive_message,
    rows_from,
    send_message,
)
from overlord.runtimes.transport.shared_memory import Segment, find_segment, read_only_view, round_up, shared_heap
from overlord.runtimes.transport.user_code import by_value
from overlord.transforms.samples.images import warm_images
from overlord.transforms.samples.per_sample import Place
from overlord.transforms.samples.tokenize import TokenizerFile, load_tokenizer

logger = logging.getLogger("overlord")

MEMORY_BYTES = 1 << 20
"""Shared memory of a worker, for questions and for answers, at first."""
MOST_MEMORY_BYTES = 64 << 20
RUN_BYTES = 4 << 20
"""What the rows of one run may become at most: it stays in shared memory until it is taken."""
RUN_S = 0.1
"""How long a run of rows should take: callers take turns after it, and all of it is done again when a worker dies."""
LEAST_RUN_S = 0.01
"""A shorter run costs as much to hand over as to do."""
HAND_OVER_S = 0.003
"""How long a run should take at least, for each worker of the pool. The service's interpreter needs about half of this
to hand one run over, and hands over one at a time: with shorter runs workers wait for it. Profiled with 16 workers."""
RUN_ROWS = 32, 256
"""Rows that are sent at a time at most, before it is known what a row costs and after."""
LINES = 2
"""Threads that may have asked a worker something at once."""
LOOK_AFTER_S = 0.1
"""How long a worker may have rested before it is looked at whether it is still there."""
TRIES = 3
"""Workers that may be lost in a row without any fault of a row."""
HANGS = 3
"""Rows in succession that are given up because of the time limit before the function itself is taken to hang."""

Poisoned = list[tuple[int, str]]
"""(row, why it is given up) of every row that killed its worker twice."""

T = TypeVar("T")


class _WorkerLost(Exception):
    """A worker was lost without a fault of the rows; the text says how."""


class _Worker:
    """A worker process, and what it was sent."""

    def __init__(self, child: ForkedChild) -> None:
        self.child = child
        self.functions: set[str] = set()
        """The keys of the functions that it has loaded."""
        self.lines = [_Line(self, child.connection)]
        """Those that no thread uses."""
        self.using = 0
        """How many lines are taken: all of them by a thread that is alone with it."""
        self.free_at = 0.0
        """When it is expected to have done what it was asked."""
        self.used_at = 0.0
        """When it last answered."""

    def open_lines(self) -> None:
        """Open the other lines.

        Raises:
            ServiceLost: when it has ended.
        """
        try:
            for _ in range(LINES - 1):
                ours, theirs = socket.socketpair()
                self.lines.append(_Line(self, ours))
                with theirs:
                    send_message(self.child.connection, ServeCaller(), [theirs.fileno()])
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kill it if it lives, and let go of its memory; a thread that waits for an answer is told."""
        self.child.end()
        for line in self.lines:
            line.close()


class _Line:
    """A connection to a worker, with the memory of what is asked and answered there."""

    def __init__(self, worker: _Worker, connection: socket.socket) -> None:
        self.worker = worker
        self.asked = False
        """Whether an answer is still to come; such a worker can be asked nothing else."""
        self._connection = connection
        self._memory: RowMemory | None = None
        self._answer_bytes = 0

    def ask(
        self, message: WorkerMessage, rows: RowBatch, seconds: float | None, fds: Sequence[int] = ()
    ) -> tuple[WorkerMessage, RowBatch]:
        """Ask the worker and wait for the answer, whose columns are overwritten by the next one.

        Raises:
            ChildLost: when it ended, or did not answer in time.
            _WorkerLost: when its fork server was lost.
        """
        self.asked = True
        try:
            answer = self.worker.child.within(
                seconds, lambda talk, tick: self._exchange(message, rows, fds, talk, tick), self._connection
            )
        except ChildLost as loss:
            if loss.code is None and not loss.hung:
                raise _WorkerLost(str(loss)) from None
            raise
        self.asked = False
        return answer

    @property
    def waits(self) -> bool:
        """Whether the worker is there, and waits to be asked."""
        return self.worker.child.waits_at(self._connection)

    def close(self) -> None:
        """Let go of the memory."""
        self._connection.close()
        self._memory = None

    def kept(self, rows: RowBatch) -> RowBatch:
        """Return an answer that the next one does not overwrite."""
        return rows if self._memory is None else self._memory.kept(rows)

    def _exchange(
        self, message: WorkerMessage, rows: RowBatch, fds: Sequence[int], talk: socket.socket, tick: OnSilence
    ) -> tuple[WorkerMessage, RowBatch]:
        self._make_room(rows, talk, tick)
        assert self._memory is not None
        send_message(talk, self._memory.ask(message, rows), fds, tick)
        frame, _ = receive_frame(talk, tick)
        found = from_frame(frame)
        if isinstance(found, SharedRows):
            return self._memory.answer_of(found)
        self._answer_bytes = max(self._answer_bytes, sum(padded(array.nbytes) for array in frame[1:]))
        return rows_from(found)

    def _make_room(self, rows: RowBatch, talk: socket.socket, tick: OnSilence) -> None:
        """Give the worker memory for a question with some rows and for answers as large as the last ones."""
        heap = shared_heap()
        nbytes = copied_bytes(rows, heap.memory)
        # What is larger travels by socket: memory that was given stays with the worker.
        needed = min(nbytes + nbytes // 8 + 4096, MOST_MEMORY_BYTES), min(self._answer_bytes, MOST_MEMORY_BYTES)
        if self._memory is not None and self._memory.fits(*needed):
            return
        asked, answered = (round_up(max(size, MEMORY_BYTES)) for size in needed)
        segments: list[Segment] = []
        try:
            try:
                for number, size in enumerate((asked, answered)):
                    segments.append(Segment(number, size))
            except OSError as error:
                raise _WorkerLost(f"no shared memory could be had for it: {error.strerror or error}") from None
            fds = [*(segment.fd for segment in segments), heap.fd]
            send_message(talk, MapMemory(asked, answered, len(heap.memory)), fds, tick)
            self._memory = RowMemory(segments[0].memory, segments[1].memory, heap.memory)
        finally:
            for segment in segments:
                os.close(segment.fd)  # the mapping stays


class ProcessWorkers:
    """A few worker processes, started when they are first needed; several threads may use them at once.

    Args:
        count: Most workers at a time; more than there are cores would only take turns.

    Example:
        >>> def halve(rows):
        ...     return {"n": np.asarray(rows["n"]) // 2}
        >>> with ProcessWorkers(2) as pool:
        ...     isolated = pool.isolate(halve, name="halve")
        ...     isolated({"n": np.array([2, 4, 6])})
        ({'n': array([1, 2, 3])}, [])
    """

    def __init__(self, count: int, limits: Limits = LIMITS) -> None:
        self.count = max(1, min(count, usable_cpus()))
        self.limits = limits
        self._threads = FairThreads(self.count, lines=-(-self.count // 2))
        self._changed = threading.Condition()
        self._workers: list[_Worker] = []
        self._starting = 0
        """Workers that are being forked."""
        self._queue: deque[object] = deque()
        """The threads that wait for a worker, as they came."""
        self._server = ForkServer("overlord.runtimes.supervision.process_workers", limits)
        self._closed = False

    def isolate(self, function: Callable[..., RowBatch], name: str, deadline: float | None = 60.0) -> Isolated:
        """Return the function, to be run in the workers.

        Args:
            function: Pure; gives as many rows as it takes, each from its own row alone.
            deadline: Seconds after which a worker that has not answered is taken for hung; None: it never is.

        Raises:
            SpecError: when the function cannot be sent to another process.
        """
        try:
            code = by_value(function)
        except Exception as error:  # whatever a user's object raises when it is pickled
            raise SpecError(
                f"{name}: the function cannot be sent to a worker process ({type(error).__name__}: {error}); no sample "
                "could be made. Let it hold only what pickles (open files and locks do not), or set process=False."
            ) from error
        file = getattr(function, "tokenizer", None)
        if file is not None:
            loaded = json.dumps([file.path, list(file.reserved), file.digest])
            self._server.preloads = list(dict.fromkeys([*self._server.preloads, loaded]))
        return Isolated(self, code, name, deadline, users=not getattr(function, "only_reads", False))

    def each(self, function: Callable[[Any], T], items: Sequence[Any], item_s: float, owner: object = None) -> list[T]:
        """Apply a function that borrows a worker to every item, side by side; results in order.

        Args:
            function: Takes an item.
            items: The items.
            item_s: Seconds that an item is expected to take.
            owner: What takes turns with others; its calls are done as they came. By default the call itself.
        """
        self.check_open()
        try:
            return self._threads.map(function, items, item_s, owner)
        except RuntimeError:
            self.check_open()  # closed meanwhile: no thread takes anything on
            raise

    @contextlib.contextmanager
    def borrow(self, expected_s: float, *, alone: bool, fresh: bool = False) -> Iterator[_Line]:
        """Lend a line to a worker to a thread of `each`.

        Args:
            expected_s: Seconds for which it will be used, about.
            alone: Whether no other thread may use the worker meanwhile.
            fresh: Whether it must be a worker that has run nothing yet; `alone`, then.

        Raises:
            _WorkerLost: when none can be started.
        """
        line = self._take(expected_s, alone, fresh)
        worker = line.worker
        try:
            yield line
        finally:
            with self._changed:
                worker.using -= LINES if alone else 1
                worker.used_at = time.monotonic()
                worker.lines.append(line)
                good = not (line.asked or self._closed) and (worker.using or len(self._workers) <= self.count)
                if not good and worker in self._workers:
                    self._workers.remove(worker)
                self._changed.notify_all()
            if not good:
                worker.end()

    @property
    def free(self) -> int:
        """How many workers could begin at once; at least one."""
        return self._threads.free

    @property
    def resting(self) -> tuple[int, ...]:
        """Process ids of the workers that are there and have nothing to do."""
        with self._changed:
            return tuple(worker.child.pid for worker in self._workers if not worker.using)

    def check_open(self) -> None:
        """Raise ClosedError once the pool is closed."""
        if self._closed:
            raise ClosedError("the process workers are closed; launch the service again.")

    def close(self) -> None:
        """Kill the workers, whatever they do, and wait for the threads that wait for them."""
        with self._changed:
            self._closed = True
            idle = [worker for worker in self._workers if not worker.using]
            self._workers = []
            self._changed.notify_all()
        self._server.close()
        for worker in idle:
            worker.end()
        self._threads.close()

    def __enter__(self) -> ProcessWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, expected_s: float, alone: bool, fresh: bool) -> _Line:
        while True:
            with self._changed:
                worker = None if fresh else self._wait_for_one(alone)
                self.check_open()
                begins = time.monotonic()
                if worker is None:
                    self._starting += 1
                else:
                    busy, unused_s = worker.using > 0, begins - worker.used_at
                    worker.using += LINES if alone else 1
                    worker.free_at = max(begins, worker.free_at) + expected_s if busy else begins + expected_s
                    line = worker.lines.pop()
            if worker is None:
                return self._start(begins + expected_s, LINES if alone else 1)
            # One that has just answered is not looked at: if it died since, its rows run again, as always.
            if busy or (unused_s < LOOK_AFTER_S and worker.child.server_runs) or line.waits:
                return line
            with self._changed:
                if worker in self._workers:
                    self._workers.remove(worker)
                self._changed.notify_all()
            worker.end()
            line.close()

    def _wait_for_one(self, alone: bool) -> _Worker | None:
        """Wait until there is a worker for a thread; None: it may start one. First come, first served."""
        turn = object()
        self._queue.append(turn)
        try:
            while not self._closed:
                if self._queue[0] is turn:
                    found = next((one for one in reversed(self._workers) if not one.using), None)
                    if found is not None or len(self._workers) + self._starting < self.count:
                        return found
                    with_line = [one for one in self._workers if one.using < LINES and not alone]
                    if with_line:
                        return min(with_line, key=lambda one: one.free_at)
                self._changed.wait()
            return None
        finally:
            self._queue.remove(turn)
            self._changed.notify_all()

    def _start(self, free_at: float, using: int) -> _Line:
        """Fork a worker."""
        started: _Worker | None = None
        try:
            worker = _Worker(self._server.fork())
            worker.open_lines()
            worker.using, worker.free_at = using, free_at
            line = worker.lines.pop()
            started = worker
            return line
        except ServiceLost as error:
            raise _WorkerLost(str(error)) from None
        finally:
            with self._changed:
                self._starting -= 1
                if started is not None:
                    self._workers.append(started)
                self._changed.notify_all()


_PLACES, _FILLED = "=places", "=filled"
"""Columns beside the rows: where the place of each begins and how long it is, and what was written there."""


class _Places:
    """Where a function writes what rows become: in shared memory that workers map, or in what they send back.

    A worker that is given up was killed and has ended before its rows run again: no late write can spoil a place.
    """

    def __init__(
        self,
        arrays: Sequence[Place],
        segment: Segment | None,
        begin: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
    ) -> None:
        self.arrays = arrays
        self._segment = segment
        self._begin, self._sizes = begin, sizes

    @classmethod
    def of(cls, arrays: Sequence[Place]) -> _Places:
        """Look where some arrays are."""
        sizes = np.array([len(place) for place in arrays], np.int64)
        segment, begin = find_segment(arrays) or (None, offsets_of(sizes)[:-1])
        return cls(arrays, segment, begin, sizes)

    @property
    def rows_at_once(self) -> int:
        """How many rows may run together: what is sent back stays in shared memory until it is copied."""
        return RUN_ROWS[1] if self._segment is not None else max(1, RUN_BYTES // int(self._sizes.max(initial=1)))

    @property
    def descriptors(self) -> list[int]:
        """What goes along with a question."""
        return [] if self._segment is None or not self.arrays else [self._segment.fd]

    def cut(self, start: int, stop: int) -> _Places:
        """Return the places of some rows."""
        begin = self._begin[start:stop]
        if self._segment is None:
            begin = begin - begin[:1]
        return _Places(self.arrays[start:stop], self._segment, begin, self._sizes[start:stop])

    def question(self, key: str, rows: RowBatch) -> tuple[RunFunction, RowBatch]:
        """Return the message to a worker, and the rows with their places beside them."""
        first = int(self._begin.min()) if len(self._begin) else 0
        first -= first % mmap.ALLOCATIONGRANULARITY
        end = int((self._begin + self._sizes).max(initial=first))
        table = np.stack([self._begin - first, self._sizes], axis=1)
        return RunFunction(key, first, end - first), {**rows, _PLACES: table}


class _Given(NamedTuple):
    """What a function is run over."""

    rows: RowBatch
    places: _Places | None

    def cut(self, start: int, stop: int) -> _Given:
        """Return some of the rows."""
        return _Given(slice_rows(self.rows, start, stop), None if self.places is None else self.places.cut(start, stop))


class Isolated:
    """A function in process workers; made by `ProcessWorkers.isolate`."""

    def __init__(
        self, pool: ProcessWorkers, code: bytes, name: str, deadline: float | None, *, users: bool = True
    ) -> None:
        self._pool = pool
        self._users = users
        """Whether it is a function of the user: it can run in the service instead."""
        self._code = np.frombuffer(code, np.uint8)
        self._key = hashlib.blake2b(code, digest_size=8).hexdigest()
        self._name = name
        self._deadline = deadline
        self._timed = deadline is not None
        self._lock = threading.Lock()
        self._hung = 0
        """Rows that exceeded the time limit since the last one that was done."""
        self._row_s = 0.0
        """What a row takes, about; 0 where none was done."""

    def __call__(self, rows: RowBatch, places: Sequence[Place] | None = None) -> tuple[RowBatch, Poisoned]:
        """Return what the surviving rows became, in order, and the rows that killed their worker twice.

        Args:
            rows: The rows.
            places: For a function that takes them, where it writes what each row becomes. If all of them lie in one
                segment of shared memory, workers write straight into it.

        Raises:
            SpecError: when a worker cannot load the function.
            ToleranceError: when the function hangs whatever row it gets.
            OverlordError: when the function raises (a fault of one row is the function's to catch), or no worker
                starts.
            ClosedError: when the pool is closed meanwhile.
        """
        self._count_hangs(0)
        given = None if places is None else _Places.of(places)
        runs, run_s = self._runs(num_rows(rows), RUN_ROWS[1] if given is None else given.rows_at_once)
        with self._counted() as spent:
            done = self._pool.each(lambda run: self._run(_Given(rows, given), run[0], run[1], spent), runs, run_s, self)
        made = [part for parts, _ in done for part in parts]
        if not made:
            nothing = _Given(rows, given).cut(0, 0)  # every row was poisoned; the columns are still asked for
            made = self._pool.each(lambda rows: self._try(rows, []), [nothing], run_s)
        return concat_rows(made), [one for _, poisoned in done for one in poisoned]

    @contextlib.contextmanager
    def _counted(self) -> Iterator[list[Spent]]:
        """Count what workers have spent as spent for the calling thread."""
        spent: list[Spent] = []
        began = time.perf_counter()
        try:
            yield spent
        finally:
            note_help(time.perf_counter() - began, functools.reduce(Spent.plus, spent, Spent()))

    def _runs(self, count: int, most: int = RUN_ROWS[1]) -> tuple[list[tuple[int, int]], float]:
        """Cut rows into runs: among all workers that are free, no shorter than is worth while, nor longer than a turn.

        Returns the runs, and the seconds that one takes.
        """
        longest = min(most, RUN_ROWS[bool(self._row_s)])
        if self._row_s:
            longest = min(longest, int(RUN_S / self._row_s))
        worth_s = min(RUN_S, max(LEAST_RUN_S, HAND_OVER_S * self._pool.count))
        least = min(longest, int(worth_s / self._row_s)) if self._row_s else 1
        size = max(1, least, min(longest, -(-count // self._pool.free)))
        return [(start, min(start + size, count)) for start in range(0, max(count, 1), size)], size * self._row_s

    def _run(self, given: _Given, start: int, stop: int, spent: list[Spent]) -> tuple[list[RowBatch], Poisoned]:
        """Run some rows together; if that kills the worker, one by one."""
        if stop - start != 1 or not self._timed:
            try:
                return [self._try(given.cut(start, stop), spent, alone=self._timed)], []
            except ChildLost as death:
                logger.warning(
                    "%s: a worker was lost with %d rows (%s); they run again one by one",
                    self._name,
                    stop - start,
                    death,
                )
        made: list[RowBatch] = []
        poisoned: Poisoned = []
        for row in range(start, stop):
            try:
                made.append(self._alone(given.cut(row, row + 1), spent))
            except ChildLost as death:
                self._count_hangs(int(death.hung))
                poisoned.append((row, f"killed its worker twice: {death}"))
        return made, poisoned

    def _count_hangs(self, rows: int) -> None:
        """Count rows that exceeded the time limit; raise once the function is taken to hang, and ever after."""
        with self._lock:
            self._hung += rows
            if self._hung < HANGS:
                return
        raise ToleranceError(
            f"the function {self._name!r} hangs: {HANGS} rows in succession were not done within its time limit of "
            f"{self._deadline or 0:g} s, each tried twice, and no other row was; the source would never yield a "
            "sample. Run the function on one row by itself and mend it, or raise the deadline= of the sample if it "
            "needs longer."
        )

    def _alone(self, row: _Given, spent: list[Spent]) -> RowBatch:
        """Run one row; it may kill one worker, but not a second one that has run nothing else."""
        try:
            return self._try(row, spent, alone=True)
        except ChildLost as death:
            logger.warning("%s: a worker was lost with one row (%s); it runs once more", self._name, death)
            self._count_hangs(0)  # another thread may have found out meanwhile
        return self._try(row, spent, fresh=True)

    def _try(self, given: _Given, spent: list[Spent], *, alone: bool = False, fresh: bool = False) -> RowBatch:
        """Run rows in one worker; workers that are lost for other reasons are replaced a few times."""
        for tries in itertools.count(1):
            try:
                with self._pool.borrow(num_rows(given.rows) * self._row_s, alone=alone or fresh, fresh=fresh) as line:
                    self._load(line)
                    made = line.kept(self._apply(line, given, spent))
                with self._lock:
                    self._hung = 0 if num_rows(given.rows) and self._hung < HANGS else self._hung
                return made
            except _WorkerLost as loss:
                self._pool.check_open()
                if tries == TRIES:
                    raise OverlordError(
                        f"{self._name}: {TRIES} worker processes were lost before they ran a row ({loss}); no "
                        "sample could be made. The log says more; the host may be out of memory or processes. Free "
                        + ("some, or set process=False to run it in the service itself." if self._users else "some.")
                    ) from None
                logger.warning("%s: a worker process was lost (%s); another is started", self._name, loss)
                alone = True  # what stood in its other line may have killed it
        raise AssertionError("unreachable")

    def _load(self, line: _Line) -> None:
        """Send the function, once to each worker."""
        if self._key in line.worker.functions:
            return
        try:
            answer, _ = line.ask(LoadFunction(self._key), {"code": self._code}, self._pool.limits.load_function)
        except ChildLost as death:
            raise _WorkerLost(f"while it loaded the function: {death}") from None
        if isinstance(answer, RowsFailed):
            raise SpecError(
                f"{self._name}: a worker process cannot load the function ({answer.reason}); no sample could be "
                "made. Let it import only what the launching process finds on its path, or set process=False."
            )
        line.worker.functions.add(self._key)

    def _apply(self, line: _Line, given: _Given, spent: list[Spent]) -> RowBatch:
        rows, places = given
        try:
            if places is None:
                answer, made = line.ask(RunFunction(self._key), rows, self._deadline)
            else:
                answer, made = line.ask(*places.question(self._key, rows), self._deadline, places.descriptors)
        except ChildLost:
            self._pool.check_open()  # then it was the closing pool that killed it
            raise
        if isinstance(answer, RowsFailed) and not self._users:
            raise error_named(answer.error, f"{self._name}: {answer.reason}")
        if isinstance(answer, RowsFailed):
            raise OverlordError(
                f"{self._name}: the function failed as a whole, not for a single row ({answer.reason}); no sample "
                "could be made. Its traceback stands in the log."
            )
        if isinstance(answer, RowsMade):
            took = Spent(answer.cpu_s, answer.waited_s)
            spent.append(took)
            # Not by the clock on the wall: on a busy host rows would seem to cost more, and be sent by ever fewer.
            row_s = max(took.seconds, 1e-7) / max(num_rows(rows), 1)
            self._row_s += (row_s - self._row_s) / 4 if self._row_s else row_s
        filled = made.pop(_FILLED, None)
        if places is not None and isinstance(filled, Ragged) and len(filled) == num_rows(rows):
            for row, place in enumerate(places.arrays):
                place[:] = filled[row]
        if not made or any(len(column) != num_rows(rows) for column in made.values()):
            raise OverlordError(
                f"{self._name}: the function made { ({k: len(v) for k, v in made.items()}) } rows of {num_rows(rows)}; "
                "they could not be told apart. It must give one row for each that it takes."
            )
        return made


# --------------------------------------------------------------------------------------------------------------
# In the worker process.


def preload(*tokenizers: str) -> None:
    """Load what all workers use once: tokenizers as JSON of (path, reserved ids), and the kernels of images."""
    for given in tokenizers:
        path, reserved, digest = json.loads(given)
        with contextlib.suppress(Exception):  # the worker that needs it says what is wrong
            load_tokenizer(TokenizerFile(path, tuple(reserved), digest))
    warm_images()


def _mapped(fd: int, nbytes: int, begin: int = 0, *, populate: bool = False) -> npt.NDArray[np.uint8]:
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)  # only Linux has it
    try:
        return np.frombuffer(mmap.mmap(fd, nbytes, flags=flags, offset=begin), np.uint8)
    finally:
        os.close(fd)


def _run_into_places(function: Any, head: RunFunction, rows: RowBatch, fds: Sequence[int]) -> RowBatch:
    """Run a function that writes into places: in the memory that came along, or in memory that is sent back."""
    table = np.asarray(rows.pop(_PLACES))
    # Where most pages are written, all are mapped at once: a fault for each takes twice as long.
    dense = head.nbytes < 2 * int(table[:, 1].sum())
    memory = _mapped(fds[0], head.nbytes, head.begin, populate=dense) if fds else np.empty(head.nbytes, np.uint8)
    made = function(rows, [memory[begin : begin + size] for begin, size in table.tolist()])
    return made if fds else {**made, _FILLED: Ragged(memory, offsets_of(table[:, 1]))}


def serve(connection: socket.socket) -> None:
    """Load functions and run them over rows, until the other side closes a connection."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have workers of their own
    functions: dict[str, Any] = {}
    lines = {connection.fileno(): _ServedLine(connection, functions)}
    asked = select.poll()
    asked.register(connection, select.POLLIN)
    while True:
        for fd, _ in asked.poll():
            try:
                further = lines[fd].serve()
            except ServiceLost:
                return
            if further is not None:
                _further.append(further)
                lines[further.fileno()] = _ServedLine(further, functions)
                asked.register(further, select.POLLIN)


_further: list[socket.socket] = []
"""Further lines, open until the process ends: one that closed before would have it killed, and its exit code lost."""


class _ServedLine:
    """A line, in the worker."""

    def __init__(self, connection: socket.socket, functions: dict[str, Any]) -> None:
        self._connection = connection
        self._functions = functions
        self._memory: RowMemory | None = None

    def serve(self) -> socket.socket | None:
        """Answer the next message; return a further line, if it brings one.

        Raises:
            ServiceLost: when the other side is gone.
        """
        message, fds = receive_message(self._connection)
        if isinstance(message, ServeCaller):
            os.set_inheritable(fds[0], False)
            return socket.socket(fileno=fds[0])
        if isinstance(message, MapMemory):
            asked, answered, heap = fds
            self._memory = RowMemory(
                _mapped(asked, message.asked_bytes),
                _mapped(answered, message.answer_bytes),
                read_only_view(heap, message.heap_bytes),
            )
            return None
        assert self._memory is not None, "it is told of its memory first"
        try:
            answer, made = self._run(message, fds)
            told = self._memory.answer(answer, made)
        except Exception as error:  # whatever the user's code raises is an answer
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, OverlordError):
                reason = str(error)
            else:
                sys.stderr.write(traceback.format_exc())  # in one piece: other workers write to the same log
            told = self._memory.answer(RowsFailed(type(error).__name__, reason), {})
        send_message(self._connection, told)
        return None

    def _run(self, message: Any, fds: Sequence[int]) -> tuple[RowsMade, RowBatch]:
        assert self._memory is not None
        clock = WorkClock()
        head, rows = self._memory.question_of(message) if isinstance(message, SharedRows) else rows_from(message)
        made: RowBatch = {}
        if isinstance(head, LoadFunction):
            # Code from the launching process, on its way to one of its own roles.
            self._functions[head.key] = function = cloudpickle.loads(np.asarray(rows["code"]).tobytes())
            if getattr(function, "only_reads", False):  # one of overlord's own, made from a source
                with contextlib.suppress(Exception):  # the first rows raise it again, and their caller is told
                    function.prepare()
        elif isinstance(head, RunFunction):
            function = self._functions[head.key]
            if not getattr(function, "only_reads", False):
                rows = copied_rows(rows)  # a user's function may keep or change them; the memory is used again
            made = _run_into_places(function, head, rows, fds) if _PLACES in rows else function(rows)
        spent = clock.spent()
        return RowsMade(cpu_s=spent.cpu_s, waited_s=spent.waited_s), made
