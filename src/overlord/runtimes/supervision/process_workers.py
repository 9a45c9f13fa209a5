"""Process workers: functions that hold the interpreter, or may kill it, run over rows in processes of their own.

Rules of this file:
1. Results do not depend on how many workers there are, which were killed meanwhile, or how rows were cut into runs.
2. A row is given up only when it was alone with a fresh worker and that worker died or hung, twice: a slow machine and
   the kernel's out-of-memory killer hit innocent rows, but hardly the same one twice.
3. A worker that dies while no row runs (at its start, at rest) is no fault of a row: it is replaced, and past a few
   tries that is an error.
4. A function that exceeds its time limit for several rows in succession, with no row done in between, hangs: that is an
   error of the function, not of rows, and trying every row of a source twice would never end.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import cloudpickle
import numpy as np

from overlord.core.messages import LoadFunction, RowsFailed, RowsMade, RunFunction, WorkerMessage
from overlord.core.ragged import RowBatch, concat_rows, num_rows, slice_rows
from overlord.errors import ClosedError, OverlordError, ServiceLost, SpecError, ToleranceError
from overlord.runtimes.supervision.child import LIMITS, Limits
from overlord.runtimes.supervision.fork_server import ChildLost, ForkedChild, ForkServer
from overlord.runtimes.transport.role_codec import receive_rows, send_rows

logger = logging.getLogger("overlord")

RUN_ROWS = 32
"""Rows that are sent at a time: few enough to be run one by one when a worker dies of them."""
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
        self.asked = False
        """Whether an answer is still to come; such a worker can be asked nothing else."""

    def ask(self, message: WorkerMessage, rows: RowBatch, seconds: float) -> tuple[WorkerMessage, RowBatch]:
        """Ask it and wait for the answer.

        Raises:
            ChildLost: when it ended, or did not answer in time.
            _WorkerLost: when its fork server was lost.
        """
        self.asked = True
        try:
            answer = self.child.exchange(message, rows, seconds)
        except ChildLost as loss:
            if loss.code is None and not loss.hung:
                raise _WorkerLost(str(loss)) from None
            raise
        self.asked = False
        return answer


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
        self.count = max(1, min(count, len(os.sched_getaffinity(0))))
        self.limits = limits
        self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="overlord-process-workers")
        self._slots = threading.BoundedSemaphore(self.count)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._server = ForkServer("overlord.runtimes.supervision.process_workers", limits)
        self._closed = False

    def isolate(self, function: Callable[[RowBatch], RowBatch], name: str, deadline: float = 60.0) -> Isolated:
        """Return the function, to be run in the workers.

        Args:
            function: Pure; gives as many rows as it takes, each from its own row alone.
            deadline: Seconds after which a worker that has not answered is taken for hung.

        Raises:
            SpecError: when the function cannot be sent to another process.
        """
        try:
            code = cloudpickle.dumps(function)
        except Exception as error:  # whatever a user's object raises when it is pickled
            raise SpecError(
                f"{name}: the function cannot be sent to a worker process ({type(error).__name__}: {error}); no sample "
                "could be made. Let it hold only what pickles (open files and locks do not), or set process=False."
            ) from error
        return Isolated(self, code, name, deadline)

    def each(self, function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """Apply a function that waits for workers to every item, side by side; results in order."""
        self.check_open()
        if len(items) == 1:
            return [function(items[0])]
        try:
            return list(self._threads.map(function, items))
        except RuntimeError:
            self.check_open()  # closed meanwhile: no thread takes anything on
            raise

    @contextlib.contextmanager
    def borrow(self, *, fresh: bool) -> Iterator[_Worker]:
        """Lend a worker, one that has run nothing yet if `fresh`; waits until one is free.

        Raises:
            _WorkerLost: when none can be started.
        """
        with self._slots:
            worker = self._take(fresh)
            try:
                yield worker
            finally:
                with self._lock:
                    good = not (worker.asked or self._closed)
                    if good:
                        self._idle.append(worker)
                if not good:
                    worker.child.end()

    @property
    def resting(self) -> tuple[int, ...]:
        """Process ids of the workers that are there and have nothing to do."""
        with self._lock:
            return tuple(worker.child.pid for worker in self._idle)

    def check_open(self) -> None:
        """Raise ClosedError once the pool is closed."""
        if self._closed:
            raise ClosedError("the process workers are closed; launch the service again.")

    def close(self) -> None:
        """Kill the workers, whatever they do, and wait for the threads that wait for them."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        self._server.close()
        for worker in idle:
            worker.child.end()
        self._threads.shutdown(wait=True)

    def __enter__(self) -> ProcessWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, fresh: bool) -> _Worker:
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        if idle is not None:
            if idle.child.alive and not fresh:
                return idle
            idle.child.end()
        self.check_open()
        try:
            return _Worker(self._server.fork())
        except ServiceLost as error:
            raise _WorkerLost(str(error)) from None


class Isolated:
    """A function in process workers; made by `ProcessWorkers.isolate`."""

    def __init__(self, pool: ProcessWorkers, code: bytes, name: str, deadline: float) -> None:
        self._pool = pool
        self._code = np.frombuffer(code, np.uint8)
        self._key = hashlib.blake2b(code, digest_size=8).hexdigest()
        self._name = name
        self._deadline = deadline
        self._lock = threading.Lock()
        self._hung = 0
        """Rows that exceeded the time limit since the last one that was done."""

    def __call__(self, rows: RowBatch) -> tuple[RowBatch, Poisoned]:
        """Return what the surviving rows became, in order, and the rows that killed their worker twice.

        Raises:
            SpecError: when a worker cannot load the function.
            ToleranceError: when the function hangs whatever row it gets.
            OverlordError: when the function raises (a fault of one row is the function's to catch), or no worker
                starts.
            ClosedError: when the pool is closed meanwhile.
        """
        self._count_hangs(0)
        count = num_rows(rows)
        size = max(1, min(RUN_ROWS, -(-count // self._pool.count)))
        runs = [(start, min(start + size, count)) for start in range(0, max(count, 1), size)]
        done = self._pool.each(lambda run: self._run(rows, *run), runs)
        made = [part for parts, _ in done for part in parts]
        if not made:
            made = [self._try(slice_rows(rows, 0, 0))]  # every row was poisoned; the columns are still asked for
        return concat_rows(made), [one for _, poisoned in done for one in poisoned]

    def _run(self, rows: RowBatch, start: int, stop: int) -> tuple[list[RowBatch], Poisoned]:
        """Run some rows together; if that kills the worker, one by one."""
        if stop - start != 1:
            try:
                return [self._try(slice_rows(rows, start, stop))], []
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
                made.append(self._alone(slice_rows(rows, row, row + 1)))
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
            f"{self._deadline:g} s, each tried twice, and no other row was; the source would never yield a sample. Run "
            "the function on one row by itself and mend it, or raise the deadline= of the sample if it needs longer."
        )

    def _alone(self, row: RowBatch) -> RowBatch:
        """Run one row; it may kill one worker, but not a second one that has run nothing else."""
        try:
            return self._try(row)
        except ChildLost as death:
            logger.warning("%s: a worker was lost with one row (%s); it runs once more", self._name, death)
            self._count_hangs(0)  # another thread may have found out meanwhile
        return self._try(row, fresh=True)

    def _try(self, rows: RowBatch, *, fresh: bool = False) -> RowBatch:
        """Run rows in one worker; workers that are lost for other reasons are replaced a few times."""
        for tries in itertools.count(1):
            try:
                with self._pool.borrow(fresh=fresh) as worker:
                    self._load(worker)
                    made = self._apply(worker, rows)
                with self._lock:
                    self._hung = 0 if num_rows(rows) and self._hung < HANGS else self._hung
                return made
            except _WorkerLost as loss:
                self._pool.check_open()
                if tries == TRIES:
                    raise OverlordError(
                        f"{self._name}: {TRIES} worker processes were lost before they ran a row ({loss}); no "
                        "sample could be made. The log says more; the host may be out of memory or processes. Free "
                        "some, or set process=False to run the function in the service itself."
                    ) from None
                logger.warning("%s: a worker process was lost (%s); another is started", self._name, loss)
        raise AssertionError("unreachable")

    def _load(self, worker: _Worker) -> None:
        """Send the function, once to each worker."""
        if self._key in worker.functions:
            return
        try:
            answer, _ = worker.ask(LoadFunction(self._key), {"code": self._code}, self._pool.limits.load_function)
        except ChildLost as death:
            raise _WorkerLost(f"while it loaded the function: {death}") from None
        if isinstance(answer, RowsFailed):
            raise SpecError(
                f"{self._name}: a worker process cannot load the function ({answer.reason}); no sample could be "
                "made. Let it import only what the launching process finds on its path, or set process=False."
            )
        worker.functions.add(self._key)

    def _apply(self, worker: _Worker, rows: RowBatch) -> RowBatch:
        try:
            answer, made = worker.ask(RunFunction(self._key), rows, self._deadline)
        except ChildLost:
            self._pool.check_open()  # then it was the closing pool that killed it
            raise
        if isinstance(answer, RowsFailed):
            raise OverlordError(
                f"{self._name}: the function failed as a whole, not for a single row ({answer.reason}); no sample "
                "could be made. Its traceback stands in the log."
            )
        if not made or any(len(column) != num_rows(rows) for column in made.values()):
            raise OverlordError(
                f"{self._name}: the function made { ({k: len(v) for k, v in made.items()}) } rows of {num_rows(rows)}; "
                "they could not be told apart. It must give one row for each that it takes."
            )
        return made


# --------------------------------------------------------------------------------------------------------------
# In the worker process.


def serve(connection: socket.socket) -> None:
    """Load functions and run them over rows, until the other side closes the connection."""
    functions: dict[str, Any] = {}
    while True:
        try:
            head, rows = receive_rows(connection)
        except ServiceLost:
            return
        try:
            made: RowBatch = {}
            if isinstance(head, LoadFunction):
                # Code from the launching process, on its way to one of its own roles.
                functions[head.key] = cloudpickle.loads(np.asarray(rows["code"]).tobytes())
            elif isinstance(head, RunFunction):
                made = functions[head.key](rows)
            send_rows(connection, RowsMade(), made)
        except ServiceLost:
            return
        except Exception as error:  # whatever the user's code raises is an answer
            sys.stderr.write(traceback.format_exc())  # in one piece: other workers write to the same log
            send_rows(connection, RowsFailed(type(error).__name__, f"{type(error).__name__}: {error}"), {})
