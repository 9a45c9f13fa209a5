"""Process workers: functions that hold the interpreter, or may kill it, run over rows in processes of their own.

Rules of this file:
1. Results do not depend on how many workers there are, who was killed meanwhile, or how rows were cut into runs.
2. A row is judged only when it was alone with a fresh worker and that worker died or hung, twice: a slow machine and
   the kernel's out-of-memory killer hit innocent rows, but hardly the same one twice.
3. What dies while no row runs (at its start, at rest) is nobody's fault: it is replaced, and past a few tries an error.
4. A function that exceeds its time limit for several rows in succession, with no row done in between, hangs: that is an
   error of the function, not of rows, and trying every row of a source twice would never end.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import cloudpickle
import numpy as np

from overlord.core.ragged import RowBatch, concat_rows, num_rows, slice_rows
from overlord.errors import ClosedError, OverlordError, ServiceLost, SpecError, ToleranceError
from overlord.runtimes.transport.frames import receive_rows, send_rows
from overlord.runtimes.transport.nursery import Nursery, WorkerProcess

logger = logging.getLogger("overlord")

RUN_ROWS = 32
"""Rows that are sent at a time: few enough to be run one by one when a worker dies of them."""
LOAD_S = 120.0
"""How long a worker may take to load a function: it may import a large library."""
TRIES = 3
"""So many workers may be lost in a row without any fault of a row."""
HANGS = 3
"""Rows in succession that are given up because of the time limit before the function itself is taken to hang."""
_TICKS = 16
"""A wait is counted in so many parts, so that a host that was suspended meanwhile loses one of them and no more."""

Judged = list[tuple[int, str]]
"""(row, why it is given up) of every row that killed its worker twice."""

T = TypeVar("T")


class _Died(Exception):
    """A worker ended, or did not answer in time, while it ran rows; the text says which."""


class _Hung(_Died):
    """A worker did not answer in time."""


class _Broken(Exception):
    """A worker was lost without a fault of the rows; the text says how."""


class _Patience:
    """Gives up after some seconds without an answer."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._left = _TICKS
        self._seconds = seconds
        connection.settimeout(seconds / _TICKS)

    def tick(self) -> None:
        """Count one part of the wait."""
        self._left -= 1
        if self._left <= 0:
            raise TimeoutError(f"no answer within {self._seconds:g} s")


class ProcessWorkers:
    """A few worker processes, started when they are first needed; several threads may use them at once.

    Example:
        >>> def halve(rows):
        ...     return {"n": np.asarray(rows["n"]) // 2}
        >>> with ProcessWorkers(2) as pool:
        ...     isolated = pool.isolate(halve, name="halve")
        ...     isolated({"n": np.array([2, 4, 6])})
        ({'n': array([1, 2, 3])}, [])
    """

    def __init__(self, count: int) -> None:
        self.count = max(1, min(count, len(os.sched_getaffinity(0))))
        """Most workers at a time; more than there are cores would only take turns."""
        self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="overlord-process-workers")
        self._slots = threading.BoundedSemaphore(self.count)
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._nursery: Nursery | None = None
        self._closed = False

    def isolate(self, function: Callable[[RowBatch], RowBatch], name: str, deadline: float = 60.0) -> Isolated:
        """Return the function, to be run in the workers.

        Args:
            function: Pure; gives as many rows as it takes, each from its own row alone.
            name: Its name in messages.
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
    def borrow(self, *, fresh: bool) -> Iterator[WorkerProcess]:
        """Lend a worker, one that has run nothing yet if `fresh`; waits until one is free.

        Raises:
            _Broken: when none can be started.
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
                    worker.end()

    @property
    def resting(self) -> tuple[int, ...]:
        """Process ids of the workers that are there and have nothing to do."""
        with self._lock:
            return tuple(worker.pid for worker in self._idle)

    def check_open(self) -> None:
        """Raise ClosedError once the pool is closed."""
        if self._closed:
            raise ClosedError("the process workers are closed; launch the service again.")

    def close(self) -> None:
        """Kill the workers, whatever they do, and wait for the threads that wait for them."""
        with self._lock:
            self._closed = True
            nursery, idle = self._nursery, self._idle
            self._nursery, self._idle = None, []
        if nursery is not None:
            nursery.close()
        for worker in idle:
            worker.end()
        self._threads.shutdown(wait=True)

    def __enter__(self) -> ProcessWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, fresh: bool) -> WorkerProcess:
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        if idle is not None:
            if idle.alive and not fresh:
                return idle
            idle.end()
        with self._lock:
            self.check_open()
            if self._nursery is not None and self._nursery.lost:
                self._nursery.close()
                self._nursery = None
            if self._nursery is None:
                self._nursery = Nursery()
            nursery = self._nursery
        try:
            return nursery.fork()
        except ServiceLost as error:
            raise _Broken(str(error)) from None


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

    def __call__(self, rows: RowBatch) -> tuple[RowBatch, Judged]:
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
            made = [self._try(slice_rows(rows, 0, 0))]  # every row was judged; the columns are still asked for
        return concat_rows(made), [one for _, judged in done for one in judged]

    def _run(self, rows: RowBatch, start: int, stop: int) -> tuple[list[RowBatch], Judged]:
        """Run some rows together; if that kills the worker, one by one."""
        if stop - start != 1:
            try:
                return [self._try(slice_rows(rows, start, stop))], []
            except _Died as death:
                logger.warning(
                    "%s: a worker was lost with %d rows (%s); they run again one by one",
                    self._name,
                    stop - start,
                    death,
                )
        made: list[RowBatch] = []
        judged: Judged = []
        for row in range(start, stop):
            try:
                made.append(self._alone(slice_rows(rows, row, row + 1)))
            except _Died as death:
                self._count_hangs(int(isinstance(death, _Hung)))
                judged.append((row, f"killed its worker twice: {death}"))
        return made, judged

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
        except _Died as death:
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
            except _Broken as loss:
                self._pool.check_open()
                if tries == TRIES:
                    raise OverlordError(
                        f"{self._name}: {TRIES} worker processes were lost before they ran a row ({loss}); no "
                        "sample could be made. The log says more; the host may be out of memory or processes. Free "
                        "some, or set process=False to run the function in the service itself."
                    ) from None
                logger.warning("%s: a worker process was lost (%s); another is started", self._name, loss)
        raise AssertionError("unreachable")

    def _load(self, worker: WorkerProcess) -> None:
        """Send the function, once to each worker."""
        if self._key in worker.functions:
            return
        try:
            answer, _ = _ask(worker, {"op": "load", "function": self._key}, {"code": self._code}, LOAD_S)
        except _Died as death:
            raise _Broken(f"while it loaded the function: {death}") from None
        if "error" in answer:
            raise SpecError(
                f"{self._name}: a worker process cannot load the function ({answer['error']}); no sample could be "
                "made. Let it import only what the launching process finds on its path, or set process=False."
            )
        worker.functions.add(self._key)

    def _apply(self, worker: WorkerProcess, rows: RowBatch) -> RowBatch:
        try:
            answer, made = _ask(worker, {"op": "run", "function": self._key}, rows, self._deadline)
        except _Died:
            self._pool.check_open()  # then it was the closing pool that killed it
            raise
        if "error" in answer:
            raise OverlordError(
                f"{self._name}: the function failed as a whole, not for a single row ({answer['error']}); no sample "
                "could be made. Its traceback stands in the log."
            )
        if not made or any(len(column) != num_rows(rows) for column in made.values()):
            raise OverlordError(
                f"{self._name}: the function made { ({k: len(v) for k, v in made.items()}) } rows of {num_rows(rows)}; "
                "they could not be told apart. It must give one row for each that it takes."
            )
        return made


def _ask(
    worker: WorkerProcess, message: dict[str, Any], rows: RowBatch, seconds: float
) -> tuple[dict[str, Any], RowBatch]:
    patience = _Patience(worker.connection, seconds)
    worker.asked = True
    try:
        send_rows(worker.connection, message, rows, patience.tick)
        answer = receive_rows(worker.connection, patience.tick)
    except TimeoutError as late:
        worker.end()
        raise _Hung(str(late)) from None
    except ServiceLost as error:
        code = worker.end()
        if code is None:
            raise _Broken(str(error)) from None
        raise _Died(describe_exit(code)) from None
    worker.asked = False
    return answer


def describe_exit(code: int) -> str:
    """Return an exit code in words, negative ones as signals."""
    if code >= 0:
        return f"exit code {code}"
    named = {int(one): one.name for one in signal.Signals}
    return f"signal {-code} ({named.get(-code, 'unknown')})"
