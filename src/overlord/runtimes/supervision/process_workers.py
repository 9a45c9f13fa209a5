"""Process workers: functions that hold the interpreter, or may kill it, run over rows in processes of their own.

Rules of this file:
1. Results do not depend on how many workers there are, which were killed or stopped meanwhile, or how rows were cut
   into runs.
2. A row is given up only when it was alone with a worker, then alone with a fresh one, and both ended by their own
   fault: a crash, an exit, or a time limit (see blame.py). Of the time limit only the deadline of a user's function
   counts seconds; every other one counts processor time: a minute for a row, or 100 times what rows of the function
   cost, if that is more.
3. A worker that was killed or stopped from outside proves nothing. Its rows run again, in halves, so that they get
   through however often workers are killed; that ends only after very many losses without any progress of the pool.
4. Nor does a worker prove anything that the out-of-memory killer ended, as it may choose any process. Rows are given up
   for their memory when they were the only thing that ran in the pool, in a fresh worker with room, and the kernel
   ended two such workers for what they used themselves (`MemoryTrial`).
5. A worker that waits for storage and uses no processor is replaced, and its rows run again; past a few tries that is
   an error of the storage.
6. A worker that ends by its own fault while no row runs (at its start, while it loads a function) is no fault of a row:
   it is replaced, and past a few tries that is an error.
7. A function that exceeds its time limit for several rows in succession, with no row done in between, hangs: that is an
   error of the function, not of rows, and trying every row of a source twice would never end.
8. A worker runs one thing at a time. The next one waits in its second line meanwhile, so that it need not wait for the
   service: with 16 workers a thread gets the interpreter lock 5 ms after an answer. What has a deadline in seconds
   waits in no line: its time would begin before it does.
9. A line is closed by the last thread that uses its worker, and never under another thread.
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
import resource
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
from overlord.errors import (
    ClosedError,
    OverlordError,
    ServiceLost,
    SourceError,
    SpecError,
    ToleranceError,
    error_named,
)
from overlord.runtimes.supervision.blame import (
    Blame,
    CallLimits,
    ChildLost,
    Losses,
    MemoryTrial,
    TooManyLosses,
    oom_kills,
)
from overlord.runtimes.supervision.child import LIMITS, Limits, name_process, usable_cpus
from overlord.runtimes.supervision.fair_threads import FairThreads
from overlord.runtimes.supervision.fork_server import ForkedChild, ForkServer
from overlord.runtimes.supervision.work_clock import Spent, WorkClock, note_help
from overlord.runtimes.transport.codec import OnSilence
from overlord.runtimes.transport.role_codec import (
    RowMemory,
    copied_bytes,
    receive_message,
    rows_from,
    send_message,
)
from overlord.runtimes.transport.shared_memory import Segment, find_segment, read_only_view, round_up, shared_heap
from overlord.runtimes.transport.user_code import by_value
from overlord.transforms.samples.images import warm_images
from overlord.transforms.samples.per_sample import OUT_OF_MEMORY, Place
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
"""Workers that may be lost in a row before they run a row, by their own fault."""
STORAGE_TRIES = 5
"""Workers that may wait for storage in vain, in a row."""
TIMES_COST = 100
"""How much more processor time than rows usually cost a run of them may take."""
HANGS = 3
"""Rows in succession that are given up because of the time limit before the function itself is taken to hang."""

Poisoned = list[tuple[int, str]]
"""(row, why it is given up) of every row that killed its worker twice."""

T = TypeVar("T")


class _WorkerLost(Exception):
    """A worker was lost before it ran a row, or could not be started; the text says how."""

    def __init__(self, how: str, blame: Blame = Blame.ITSELF) -> None:
        super().__init__(how)
        self.blame = blame


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
            ChildLost: when it has ended.
        """
        try:
            for _ in range(LINES - 1):
                ours, theirs = socket.socketpair()
                self.lines.append(_Line(self, ours))
                with theirs:
                    send_message(self.child.connection, ServeCaller(), [theirs.fileno()])
        except ServiceLost:
            self.child.end()  # how it ended says whose fault that was
            self.close()
            raise self.child.loss from None
        except BaseException:
            self.close()
            raise

    def end(self) -> None:
        """Kill it if it lives; threads that wait for an answer are woken."""
        self.child.end("it was ended by the service", Blame.OUTSIDE)

    def close(self) -> None:
        """End it and let go of its memory, once no thread uses it."""
        self.end()
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
        self, message: WorkerMessage, rows: RowBatch, limits: CallLimits, what: str, fds: Sequence[int] = ()
    ) -> tuple[WorkerMessage, RowBatch]:
        """Ask the worker and wait for the answer, whose columns are overwritten by the next one.

        Raises:
            ChildLost: when it ended, did not answer in time, or its answer makes no sense.
            _WorkerLost: when there is no memory for the question.
        """
        self.asked = True
        answer = self.worker.child.within(
            limits, what, lambda talk, tick: self._exchange(message, rows, fds, talk, tick), self._connection
        )
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
        answer, rows, nbytes = self._memory.receive_answer(talk, tick)
        self._answer_bytes = max(self._answer_bytes, nbytes)
        return answer, rows

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
        self._only: int | None = None
        """The thread that alone may use a worker now."""
        self._oom_kills = oom_kills()
        self._closed = False
        self.losses = Losses()
        """Workers that were lost from outside."""

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
        users, check = not getattr(function, "only_reads", False), getattr(function, "check", None)
        return Isolated(self, code, name, deadline, users=users, check=check)

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
    def borrow(self, expected_s: float, *, alone: bool, fresh: bool = False, only: bool = False) -> Iterator[_Line]:
        """Lend a line to a worker to a thread of `each`.

        Args:
            expected_s: Seconds for which it will be used, about.
            alone: Whether no other thread may use the worker meanwhile.
            fresh: Whether it must be a worker that has run nothing yet; `alone`, then.
            only: Whether no other worker may be used meanwhile; `fresh`, then.

        Raises:
            _WorkerLost: when none can be started.
        """
        with self._nothing_else() if only else contextlib.nullcontext():
            line = self._take(expected_s, alone, fresh)
            try:
                yield line
            finally:
                self._give_back(line, LINES if alone else 1)

    @contextlib.contextmanager
    def _nothing_else(self) -> Iterator[None]:
        """Wait until no worker is used, and let no other thread use one."""
        me = threading.get_ident()
        with self._changed:
            while not self._closed and (
                self._only is not None or self._starting or any(worker.using for worker in self._workers)
            ):
                self._changed.wait()
            self.check_open()
            self._only = me
        try:
            yield
        finally:
            with self._changed:
                self._only = None
                self._changed.notify_all()

    def _give_back(self, line: _Line, using: int) -> None:
        worker = line.worker
        with self._changed:
            worker.using -= using
            worker.used_at = time.monotonic()
            worker.lines.append(line)
            enough = not worker.using and len(self._workers) > self.count
            if (line.asked or self._closed or enough) and worker in self._workers:
                self._workers.remove(worker)
            gone = worker not in self._workers
            last = gone and not worker.using
            self._changed.notify_all()
        if gone:
            worker.end()
        if last:
            worker.close()

    def suspects_memory(self) -> bool:
        """Whether the kernel has ended a process because memory ran out since this was last asked."""
        with self._changed:
            before, self._oom_kills = self._oom_kills, oom_kills()
            return (self._oom_kills or 0) > (before or 0)

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
            workers, self._workers = self._workers, []
            idle = [worker for worker in workers if not worker.using]
            self._changed.notify_all()
        self._server.close()
        for worker in workers:
            worker.end()
        for worker in idle:
            worker.close()
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
                worker = self._wait_for_one(alone, fresh)
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
            line.asked = True  # it is gone: no other thread may use it
            self._give_back(line, LINES if alone else 1)

    def _wait_for_one(self, alone: bool, fresh: bool) -> _Worker | None:
        """Wait until there is a worker for a thread; None: it may start one. First come, first served."""
        if fresh:
            while not self._closed and self._only not in (None, threading.get_ident()):
                self._changed.wait()
            return None
        turn = object()
        self._queue.append(turn)
        try:
            while not self._closed:
                if self._queue[0] is turn and self._only is None:
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
        except ChildLost as loss:
            raise _WorkerLost(str(loss), loss.blame) from None
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

    No late write can spoil a place: a worker that is given up was killed before its rows run again, and has ended, or
    is blocked in the kernel and will end there. No system call of a decoder writes into a place, so nothing that the
    kernel still does for it can either.
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
        self,
        pool: ProcessWorkers,
        code: bytes,
        name: str,
        deadline: float | None,
        *,
        users: bool = True,
        check: Callable[[RowBatch], None] | None = None,
    ) -> None:
        self._pool = pool
        self._check = check
        """Raises ValueError for what the function never makes: a worker whose memory is damaged answers anything."""
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
        self._waited_in_vain = 0
        """Workers that waited for storage in vain since the last row that was done."""
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
            made = self._pool.each(self._run_none, [nothing], run_s)
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
        """Run some rows together; if that costs a worker, in parts."""
        if stop == start:
            return [self._run_none(given)], []
        if stop - start == 1 and self._timed:
            return self._run_one(given, start, spent)
        try:
            return [self._try(given.cut(start, stop), spent, alone=self._timed)], []
        except ChildLost as loss:
            innocent = self._is_innocent(loss)
            how = "in halves" if innocent else "one by one"
            logger.warning(
                "%s: a worker was lost with %d rows (%s); they run again %s", self._name, stop - start, loss, how
            )
        if stop - start == 1:
            return self._run_one(given, start, spent)
        if innocent:
            middle = (start + stop) // 2
            done = [self._run(given, *part, spent) for part in ((start, middle), (middle, stop))]
        else:
            done = [self._run_one(given, row, spent) for row in range(start, stop)]
        return [part for parts, _ in done for part in parts], [one for _, poisoned in done for one in poisoned]

    def _run_none(self, none: _Given) -> RowBatch:
        """Run the function over no row, for its columns; workers that are lost meanwhile are replaced (rules 3 and 6).

        Raises:
            OverlordError: when it ends its workers.
        """
        faults = 0
        while True:
            try:
                return self._try(none, [], alone=faults > 0)
            except ChildLost as loss:
                faults += not self._is_innocent(loss)
                if faults == TRIES:
                    raise OverlordError(
                        f"{self._name}: {TRIES} worker processes were lost without a row ({loss}); no sample could be "
                        "made. The function must take a batch of no rows, and give its columns."
                    ) from None
                logger.warning("%s: a worker was lost without a row (%s); another is started", self._name, loss)

    def _run_one(self, given: _Given, row: int, spent: list[Spent]) -> tuple[list[RowBatch], Poisoned]:
        """Run one row alone, until it is done or has ended two workers by its own fault (rules 2 to 4)."""
        one = given.cut(row, row + 1)
        faults = starved = 0
        only = False
        for tries in itertools.count():
            trial = MemoryTrial() if only else None
            try:
                return [self._try(one, spent, alone=True, fresh=faults > 0 or only, only=only)], []
            except ChildLost as loss:
                if trial is not None and trial.convicts(loss):
                    starved += 1
                    if starved == 2:
                        peak = f"{loss.peak_bytes / 1e9:.1f} GB"
                        return [], [(row, f"{OUT_OF_MEMORY}: it was ended twice, the second time at {peak}")]
                elif self._is_innocent(loss):
                    only = only or (loss.killed and self._pool.suspects_memory())
                else:
                    faults += 1
                    self._count_hangs(int(loss.late and faults == 2))
                    if faults == 2:
                        return [], [(row, f"killed its worker twice: {loss}")]
                level = logging.DEBUG if tries and loss.blame is Blame.OUTSIDE else logging.WARNING
                logger.log(level, "%s: a worker was lost with one row (%s); it runs once more", self._name, loss)
        raise AssertionError("unreachable")

    def _is_innocent(self, loss: ChildLost) -> bool:
        """Whether a worker was lost without a fault of the rows; pause before they run again.

        Raises:
            SourceError: when workers wait for storage in vain again and again.
            OverlordError: when very many were lost without any progress.
        """
        if loss.blame is Blame.ITSELF:
            return False
        if loss.blame is Blame.STORAGE:
            with self._lock:
                self._waited_in_vain += 1
                if self._waited_in_vain >= STORAGE_TRIES:
                    raise SourceError(
                        f"{self._name}: {self._waited_in_vain} workers in a row waited for storage in vain ({loss}); "
                        "going on without these rows would change the stream. See to the storage or the server that "
                        "the rows are read from, and start again from the last checkpoint."
                    )
        self._pause(loss)
        return True

    def _pause(self, loss: Exception) -> None:
        """Pause after a worker was lost from outside."""
        self._pool.check_open()
        try:
            self._pool.losses.add(loss)
        except TooManyLosses as many:
            raise OverlordError(
                f"{self._name}: no sample could be made: {many}. They were killed from outside: by the system, if the "
                "host is out of memory, or by another program. Free memory, or find what kills them, and start again "
                "from the last checkpoint."
            ) from None

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

    def _try(
        self, given: _Given, spent: list[Spent], *, alone: bool = False, fresh: bool = False, only: bool = False
    ) -> RowBatch:
        """Run rows in one worker; workers that cannot be started, or end while they load the function, are replaced.

        Raises:
            ChildLost: when the worker was lost with the rows.
        """
        expected_s, tries = num_rows(given.rows) * self._row_s, 0
        while True:
            try:
                with self._pool.borrow(expected_s, alone=alone or fresh, fresh=fresh, only=only) as line:
                    self._load(line)
                    made = line.kept(self._apply(line, given, spent))
                self._pool.losses.progressed()
                with self._lock:
                    self._waited_in_vain = 0
                    self._hung = 0 if num_rows(given.rows) and self._hung < HANGS else self._hung
                return made
            except _WorkerLost as loss:
                self._pool.check_open()
                tries += loss.blame is Blame.ITSELF
                if tries == TRIES:
                    raise OverlordError(
                        f"{self._name}: {TRIES} worker processes were lost before they ran a row ({loss}); no "
                        "sample could be made. The log says more; the host may be out of memory or processes. Free "
                        + ("some, or set process=False to run it in the service itself." if self._users else "some.")
                    ) from None
                logger.warning("%s: a worker process was lost (%s); another is started", self._name, loss)
                self._pause(loss)
                alone = True  # what stood in its other line may have killed it

    def _check_made(self, line: _Line, made: RowBatch, count: int) -> None:
        """Check an answer of a function of overlord's own, which makes no mistakes.

        Raises:
            ChildLost: when it makes no sense: the worker is out of order, and is ended.
        """
        try:
            if any(len(column) != count for column in made.values()):
                raise ValueError(f"{ ({k: len(v) for k, v in made.items()}) } rows of {count}")
            if self._check is not None:
                self._check(made)
        except Exception as error:  # whatever damaged bytes make of numpy, JSON or UTF-8
            line.asked = True  # it is asked nothing else
            raise ChildLost(f"its answer makes no sense: {error}", Blame.ITSELF) from None

    def _limits(self, rows: int) -> CallLimits:
        """Return how long a worker may take for so many rows."""
        of = self._pool.limits
        if self._deadline is not None:
            return CallLimits(elapsed_s=self._deadline, stopped_s=of.stopped_silence)
        cpu_s = max(of.run_cpu, TIMES_COST * rows * self._row_s)
        return CallLimits(cpu_s=cpu_s, idle_s=of.idle, stopped_s=of.stopped_silence)

    def _load(self, line: _Line) -> None:
        """Send the function, once to each worker."""
        if self._key in line.worker.functions:
            return
        limits = CallLimits(elapsed_s=self._pool.limits.load_function, stopped_s=self._pool.limits.stopped_silence)
        try:
            answer, _ = line.ask(LoadFunction(self._key), {"code": self._code}, limits, f"loads {self._name!r}")
        except ChildLost as loss:
            if loss.blame is not Blame.ITSELF:
                raise
            raise _WorkerLost(f"while it loaded the function: {loss}") from None
        if isinstance(answer, RowsFailed):
            raise SpecError(
                f"{self._name}: a worker process cannot load the function ({answer.reason}); no sample could be "
                "made. Let it import only what the launching process finds on its path, or set process=False."
            )
        line.worker.functions.add(self._key)

    def _apply(self, line: _Line, given: _Given, spent: list[Spent]) -> RowBatch:
        rows, places = given
        limits, what = self._limits(num_rows(rows)), f"runs {num_rows(rows)} rows of {self._name!r}"
        try:
            if places is None:
                answer, made = line.ask(RunFunction(self._key), rows, limits, what)
            else:
                answer, made = line.ask(*places.question(self._key, rows), limits, what, places.descriptors)
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
        if not self._users:
            self._check_made(line, made, num_rows(rows))
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


def limit_memory() -> None:
    """Let this process take half of the host's memory: a row that makes a function take more must not end others.

    Shared memory does not count. The hard limit stays, so that a user's function may ask for more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    if soft == resource.RLIM_INFINITY or soft > half:
        resource.setrlimit(resource.RLIMIT_DATA, (half, hard))


def serve(connection: socket.socket) -> None:
    """Load functions and run them over rows, until the other side closes a connection."""
    name_process("worker")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have workers of their own
    limit_memory()
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
            if isinstance(error, MemoryError):
                reason = "out of memory: a worker may take half of what the host has, and less if others took the rest"
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
