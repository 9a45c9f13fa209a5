"""Reading where a crash costs a process and not the service: files whose format is decoded by native code.

A damaged or hostile Parquet or Arrow file can end the process that reads it (a segmentation fault, an abort), and so
can a mapped file that is truncated while it is read (SIGBUS). Such files are opened in reader processes only; the
service gets columns whose offsets it checks.

How a crash is attributed: a process reads for many callers at once, so all that waited for an answer are suspects. Each
of them reads again, from the row it had come to, in a process of its own. What ends that one too is at fault: the
caller gets a ReaderError that names the file and the block, and the source stops or is parked like one whose storage
fails. Streams that were open but asked for nothing are opened again elsewhere and never count. Whose fault an end was
is decided as for process workers (blame.py): a process that was killed or stopped from outside proves nothing, and its
callers read again, as often as it takes.

No read waits for ever. A process that uses no processor while callers wait for it waits for storage or a server: it is
replaced, and past a few tries that is an error of the storage. A read that takes too long although its process works is
a suspect as above; in a process of its own it has a limit of processor time. The rows do not depend on any of this.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import cloudpickle
import numpy as np
from msgspec.structs import replace

from overlord.core.messages import (
    NextRows,
    ReadBlock,
    ReaderRequest,
    ReadHead,
    ReadRows,
    RowsFailed,
    RowsMade,
    ServeCaller,
    WorkerMessage,
)
from overlord.core.ragged import Kind, RowBatch, num_bytes, num_rows
from overlord.errors import ClosedError, ReaderError, ServiceLost, SourceError
from overlord.readers.files import StoredFile, verify_unchanged
from overlord.readers.parquet_footer import warm_footer
from overlord.readers.parquet_pages import warm_pages
from overlord.readers.reader import BlockIndex, DamagedFile, Reader, reason_of
from overlord.readers.remote.fetching import fetcher
from overlord.readers.source_files import begin_to_fetch, reader_of, rows_of_block
from overlord.runtimes.supervision.blame import Blame, CallLimits, ChildLost, Losses, TooManyLosses
from overlord.runtimes.supervision.child import LIMITS, Limits, name_process
from overlord.runtimes.supervision.fork_server import ForkedChild, ForkServer
from overlord.runtimes.supervision.work_clock import Spent, WorkClock, note_help
from overlord.runtimes.transport.role_codec import receive_message, receive_rows, send_message, send_rows
from overlord.runtimes.transport.shared_memory import FreedMemory
from overlord.runtimes.transport.user_code import by_value

logger = logging.getLogger("overlord")

NATIVE = ("parquet", "arrow")
"""Formats that pyarrow decodes. The others are parsed by Python and numpy, which raise where these crash; a reader of
the user's own says so with an attribute `native`."""
PARSED = ("jsonl", "tar")
"""Formats that Python parses row by row. With 16 workers that tokenize, parsing JSON lines took a fifth of the time
of the service's interpreter, which limits the feed there. Most lines are not parsed by readers at all: see
`SourceFiles.unparsed`."""
CRASHES = 2
"""Processes that may end over one block: one that was shared, and one of its own."""
STORAGE_TRIES = 3
"""Processes that may wait for storage in vain before a block yields its next rows."""
THREADS_PER_PROCESS = 4
MOST_PROCESSES = 4
_FAILURES = {"SourceError": SourceError, "ReaderError": ReaderError}


class ReaderProcesses:
    """The reader processes of one host, started when a file is first read; threads may share them.

    Args:
        threads: How many threads of the service decode and read; there are fewer processes than that.
        parses: Whether formats that could be read in the service as well are read here too, to leave it the time.
    """

    def __init__(self, threads: int, limits: Limits = LIMITS, *, parses: bool = False) -> None:
        self._parses = parses
        self._count = max(1, min(MOST_PROCESSES, threads // THREADS_PER_PROCESS))
        self._lock = threading.Lock()
        self._server = ForkServer("overlord.runtimes.supervision.reader_processes", limits)
        self._shared: dict[int, _ReaderProcess] = {}
        self._turn = itertools.count()
        self._retired: collections.deque[_ReaderProcess] = collections.deque()
        self._closed = False
        self.limits = limits
        self.losses = Losses()
        """Processes that were lost from outside."""
        self.numbers = itertools.count()
        """Numbers of streams."""
        self.damaged: dict[str, tuple[float, str]] = {}
        """What has ended processes, when and how: promised samples are asked for every second."""

    def isolate(self, reader: Reader) -> Reader:
        """Return a reader of the same format that reads in these processes, if the format needs it."""
        if reader.name in NATIVE or getattr(reader, "native", False):
            return IsolatedReader(self, reader)
        return StreamingReader(self, reader) if self._parses and reader.name in PARSED else reader

    def shared(self) -> _ReaderProcess:
        """Return a process that others use as well."""
        with self._lock:
            self._end_retired()
            place = next(self._turn) % self._count
            process = self._shared.get(place)
            if process is None or process.lost:
                process = self._shared[place] = self._start()
            return process

    def alone(self) -> _ReaderProcess:
        """Start a process for one caller, which gives it back with `retire`."""
        with self._lock:
            self._end_retired()
            return self._start()

    def retire(self, process: _ReaderProcess) -> None:
        """Let a process end; callable from a finalizer, which must not wait for a lock."""
        self._retired.append(process)

    def check_open(self) -> None:
        """Raise ClosedError once they are closed."""
        if self._closed:
            raise ClosedError("the reader processes are closed; launch the service again.")

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of those that are shared."""
        with self._lock:
            return tuple(process.pid for process in self._shared.values() if not process.lost)

    def close(self) -> None:
        """Kill the processes, whatever they do."""
        with self._lock:
            self._closed = True
            processes = [*self._shared.values(), *self._retired]
            self._shared.clear()
            self._retired.clear()
        self._server.close()
        for process in processes:
            process.end()

    def _start(self) -> _ReaderProcess:
        self.check_open()
        try:
            return _ReaderProcess(self._server.fork())
        except ServiceLost as error:
            self.check_open()
            raise ReaderError(
                f"no reader process can be started ({error}); Parquet and Arrow files cannot be read. Free memory or "
                "processes of the host, and start again from the last checkpoint."
            ) from None

    def _end_retired(self) -> None:
        while self._retired:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._retired.popleft().end()


class _ReaderProcess:
    """One reader process, and a connection for every caller that waits for it."""

    def __init__(self, child: ForkedChild) -> None:
        self._child = child
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._dropped: collections.deque[int] = collections.deque()
        self.lost = False
        self.pid = child.pid

    def ask(
        self, request: ReadHead | ReadBlock | ReadRows | NextRows, rows: RowBatch, limits: CallLimits, what: str
    ) -> tuple[WorkerMessage, RowBatch]:
        """Ask and wait for the answer.

        Raises:
            ChildLost: when the process is gone, was late, or what it answers makes no sense.
        """
        connection = self._connect()
        dropped: list[int] = []
        while self._dropped:
            with contextlib.suppress(IndexError):  # another thread was faster
                dropped.append(self._dropped.popleft())
        began = time.perf_counter()
        try:
            request = replace(request, dropped=tuple(dropped))
            answer = self._child.exchange(request, rows, limits, what, connection)
        except BaseException:
            connection.close()
            self.end()
            raise
        with self._lock:
            if self.lost:
                connection.close()
            else:
                self._idle.append(connection)
        if isinstance(answer[0], RowsMade):
            note_help(time.perf_counter() - began, Spent(answer[0].cpu_s, answer[0].waited_s))
            fetcher().counters.merge(answer[0].fetched)
        return answer

    def drop(self, stream: int) -> None:
        """Let go of a stream with the next question; callable from a finalizer, which must not wait for a lock."""
        self._dropped.append(stream)

    def end(self) -> None:
        """Kill it, if it lives."""
        with self._lock:
            self.lost = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        self._child.end("it was ended by the service", Blame.OUTSIDE)
        with self._lock:  # a thread that asks for a further connection has it
            self._child.close()

    def _connect(self) -> socket.socket:
        with self._lock:
            if not self.lost and self._idle:
                return self._idle.pop()
            if not self.lost:
                ours, theirs = socket.socketpair()
                try:
                    with theirs:
                        self._child.connection.setblocking(False)  # so many that none fits are left by one that hangs
                        send_message(self._child.connection, ServeCaller(), [theirs.fileno()])
                    return ours
                except (ServiceLost, OSError):
                    ours.close()
        self.end()
        # It ended before it was asked: what it was asked for is no suspect.
        raise ChildLost(str(self._child.loss), Blame.OUTSIDE)


class _ReadAttempts:
    """Where one file or block is read next, after processes were lost with it."""

    def __init__(self, pool: ReaderProcesses, file: StoredFile, what: str) -> None:
        self._pool = pool
        self._file = file
        self._what = what
        self._crashes = 0
        self._waited_in_vain = 0
        known = pool.damaged.get(what)
        if known is not None and time.monotonic() < known[0] + pool.limits.damaged_file:
            raise ReaderError(known[1])

    @contextlib.contextmanager
    def process(self) -> Iterator[_ReaderProcess]:
        """Lend a process: a shared one, or one of its own once it is a suspect."""
        if not self._crashes:
            yield self._pool.shared()
            return
        process = self._pool.alone()
        try:
            yield process
        finally:
            self._pool.retire(process)

    def ask(
        self, process: _ReaderProcess, request: ReadHead | ReadBlock | ReadRows | NextRows, rows: RowBatch
    ) -> tuple[RowsMade, RowBatch]:
        """Ask a process that was lent.

        Raises:
            ChildLost: when it was lost.
            SourceError, ReaderError, OSError: as the reader raised it.
        """
        limits = self._pool.limits
        # The processor time of a process that others use as well is theirs too.
        elapsed_s, cpu_s = (None, limits.read) if self._crashes else (limits.read, None)
        allowed = CallLimits(elapsed_s, cpu_s, limits.idle, limits.stopped_silence)
        answer = _checked(process.ask(request, rows, allowed, f"reads {self._what}"))
        self._pool.losses.progressed()
        self._waited_in_vain = 0
        return answer

    def lost(self, loss: ChildLost) -> None:
        """Return if it may be read once more, after a pause where that helps.

        Raises:
            ReaderError: It has ended too many processes, or the file has changed.
            SourceError: The storage does not answer.
            ClosedError: when it was the closing service that ended the process.
        """
        self._pool.check_open()
        verify_unchanged(self._file)  # a mapped file that was truncated ends the process as a damaged one does
        if loss.blame is Blame.ITSELF:
            self._count_crash(loss)
        if loss.blame is Blame.STORAGE:
            self._waited_in_vain += 1
            if self._waited_in_vain >= STORAGE_TRIES:
                raise SourceError(
                    f"{self._what} cannot be read: the storage does not answer. {self._waited_in_vain} processes in a "
                    f"row waited for it in vain ({loss}); going on without it would change the stream. See to the disk "
                    "or server that holds the file, and start again from the last checkpoint."
                )
        level = logging.DEBUG if loss.blame is Blame.OUTSIDE else logging.WARNING
        logger.log(level, "%s: a reader process was lost (%s); it is read once more", self._what, loss)
        if loss.blame is Blame.ITSELF:
            return
        try:
            self._pool.losses.add(loss)
        except TooManyLosses as many:
            raise ReaderError(
                f"{self._what} cannot be read: {many}; going on without it would change the stream. The host may be "
                "out of memory: free some, or find what kills the processes, and start again from the last checkpoint."
            ) from None

    def _count_crash(self, loss: ChildLost) -> None:
        self._crashes += 1
        if self._crashes < CRASHES:
            return
        why = (
            f"{self._what} ended the process that read it {CRASHES} times ({loss}): the file is damaged, or made to do "
            "harm; going on without it would change the stream. Copy or write the file again, or take it out of the "
            "source's paths and start a new run; launch with on_source_failure='park' to go on without such sources."
        )
        self._pool.damaged[self._what] = time.monotonic(), why
        raise ReaderError(why)


class IsolatedReader:
    """Reads one format in reader processes."""

    def __init__(self, pool: ReaderProcesses, reader: Reader) -> None:
        self._pool = pool
        self._reader = reader
        self.name = reader.name

    def divides(self, file: StoredFile) -> bool:
        """Tell whether blocks may have any size."""
        return self._reader.divides(file)

    def seeks(self, file: StoredFile) -> bool:
        """Tell that single rows are not read one by one: each would be a question to a process."""
        return False

    def rows(
        self, file: StoredFile, index: BlockIndex, block: int, *, columns: Mapping[str, Kind], start: int, stop: int
    ) -> RowBatch:
        """Return rows start .. stop of a block."""
        request = ReadRows(format=self.name, block=block, columns=dict(columns), start=start, stop=stop)
        return self._ask_once(f"block {block} of {file.path}", request, file, index)[1]

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Find the blocks of a file."""
        _, found = self._ask_head("index", file, columns)
        return BlockIndex(**{name: np.asarray(found[name], np.int64) for name in BlockIndex.__slots__})  # type: ignore[arg-type]

    def columns(self, file: StoredFile) -> list[str]:
        """Return the names of the top-level fields."""
        return list(self._ask_head("columns", file, ())[0].names)

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return what the wanted columns hold."""
        return self._ask_head("kinds", file, columns)[0].kinds

    def stream(
        self,
        file: StoredFile,
        index: BlockIndex,
        block: int,
        *,
        columns: Mapping[str, Kind],
        skip: int,
        batch_rows: int,
        scratch: Path | None,
    ) -> Iterator[RowBatch]:
        """Yield the rows of one block, whatever happens to the processes that read them."""
        attempts = _ReadAttempts(self._pool, file, f"block {block} of {file.path}")
        given = _given(file, index)
        while True:
            with attempts.process() as process:
                number = next(self._pool.numbers)
                opened = ReadBlock(
                    stream=number, format=self.name, block=block, columns=dict(columns), skip=skip,
                    batch_rows=batch_rows, scratch=None if scratch is None else str(scratch),
                )  # fmt: skip
                try:
                    answer, rows = attempts.ask(process, opened, given)
                    while not answer.end:
                        skip += num_rows(rows)
                        yield rows
                        answer, rows = attempts.ask(process, NextRows(stream=number), {})
                    return
                except ChildLost as loss:
                    attempts.lost(loss)
                finally:
                    process.drop(number)

    def fetch_ahead(self, file: StoredFile, index: BlockIndex, blocks: Sequence[int], columns: Sequence[str]) -> None:
        """Let a process fetch blocks of a remote file into the cache; it answers when it knows where they are."""
        attempts = _ReadAttempts(self._pool, file, f"the head of {file.path}")
        request = ReadHead(what="ahead", format=self.name, columns=tuple(columns), blocks=tuple(blocks))
        with attempts.process() as process:
            attempts.ask(process, request, _given(file, index))

    def _ask_head(
        self, what: Literal["index", "columns", "kinds"], file: StoredFile, columns: Sequence[str]
    ) -> tuple[RowsMade, RowBatch]:
        named = f"{'the index' if what == 'index' else 'the head'} of {file.path}"
        return self._ask_once(named, ReadHead(what=what, format=self.name, columns=tuple(columns)), file, None)

    def _ask_once(
        self, what: str, request: ReadHead | ReadRows, file: StoredFile, index: BlockIndex | None
    ) -> tuple[RowsMade, RowBatch]:
        attempts = _ReadAttempts(self._pool, file, what)
        given = _given(file, index)
        while True:
            with attempts.process() as process:
                try:
                    return attempts.ask(process, request, given)
                except ChildLost as loss:
                    attempts.lost(loss)


class StreamingReader(IsolatedReader):
    """Streams rows from reader processes; heads and indices, which are read once, are read in the service."""

    def seeks(self, file: StoredFile) -> bool:
        """Tell whether skipping rows of a block costs nothing."""
        return self._reader.seeks(file)

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Find the blocks of a file."""
        return self._reader.index(file, columns)

    def columns(self, file: StoredFile) -> list[str]:
        """Return the columns of a file."""
        return self._reader.columns(file)

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return what the wanted columns hold."""
        return self._reader.kinds(file, columns)


def _given(file: StoredFile, index: BlockIndex | None) -> RowBatch:
    return {"given": np.frombuffer(by_value((file, index)), np.uint8)}


def _checked(answer: tuple[WorkerMessage, RowBatch]) -> tuple[RowsMade, RowBatch]:
    """Return an answer that has rows.

    Raises:
        SourceError, ReaderError: as the reader raised it.
        OSError: when the file could not be read.
    """
    head, rows = answer
    if isinstance(head, RowsFailed):
        raise _FAILURES.get(head.error, DamagedFile)(head.reason)
    if not isinstance(head, RowsMade):
        raise DamagedFile("the reader process answers something else than rows")
    lengths = {name: len(column) for name, column in rows.items()}
    if len(set(lengths.values())) > 1:
        raise DamagedFile(f"the reader process answers columns of different lengths: {lengths}")
    return head, rows


# --------------------------------------------------------------------------------------------------------------
# In the reader process.
#
# Rules of this part:
# 1. Answers are typed messages and raw columns, never pickles: a process that a file has taken over must not reach the
#    service.
# 2. Many callers wait for storage at the same time: each has a connection, and a thread here.


_freed = FreedMemory(every_bytes=64 << 20)
Streams = dict[int, Iterator[RowBatch]]
Answer = tuple[RowsMade | RowsFailed, RowBatch]


def preload() -> None:
    """Compile the kernels that read the footers and pages of Parquet files once, for all that are forked."""
    warm_footer()
    warm_pages()


def serve(control: socket.socket) -> None:
    """Serve every connection that is handed over, until the service closes the first one."""
    name_process("reader")
    with contextlib.suppress(OSError):  # a host without it has no say in what the kernel ends when memory runs out
        Path("/proc/self/oom_score_adj").write_text("500")
    streams: Streams = {}
    while True:
        try:
            _, fds = receive_message(control)
        except ServiceLost:
            return
        caller = socket.socket(fileno=fds[0])
        threading.Thread(target=_serve_caller, args=(caller, streams), daemon=True).start()


def _serve_caller(caller: socket.socket, streams: Streams) -> None:
    with caller:
        try:
            while True:
                _serve_request(caller, streams)
        except ServiceLost:
            return


def _serve_request(caller: socket.socket, streams: Streams) -> None:
    # A function, so that no thread keeps the rows of its last answer while it waits for the next request.
    head, rows = receive_rows(caller)
    assert isinstance(head, ReaderRequest), "a service asks its own reader processes"
    for stream in head.dropped:
        streams.pop(stream, None)
    clock = WorkClock()
    answer, made = _answer(head, rows, streams)
    if isinstance(answer, RowsMade):
        spent = clock.spent()
        fetched = fetcher().counters.take()
        answer = replace(answer, cpu_s=spent.cpu_s, waited_s=spent.waited_s, fetched=fetched)
    send_rows(caller, answer, made)
    _freed.add(num_bytes(made))


def _answer(request: ReaderRequest, rows: RowBatch, streams: Streams) -> Answer:
    try:
        return _next(request.stream, streams) if isinstance(request, NextRows) else _open(request, rows, streams)
    except (SourceError, ReaderError) as error:
        return RowsFailed(type(error).__name__, str(error)), {}
    except Exception as error:  # whatever pyarrow or a parser makes of bytes that are not what they should be
        if not isinstance(error, OSError):
            sys.stderr.write(traceback.format_exc())  # in one piece: other threads write to the same log
        return RowsFailed("read", reason_of(error)), {}


def _open(request: ReaderRequest, rows: RowBatch, streams: Streams) -> Answer:
    # From the service that started this process: the file with its filesystem, and the index of its blocks.
    file, index = cloudpickle.loads(np.asarray(rows["given"]).tobytes())
    if isinstance(request, ReadHead):
        reader = reader_of(request.format)
        if request.what == "columns":
            return RowsMade(names=tuple(reader.columns(file))), {}
        if request.what == "kinds":
            return RowsMade(kinds=dict(reader.kinds(file, request.columns))), {}
        if request.what == "ahead":
            begin_to_fetch(reader, file, index, request.blocks, request.columns)
            return RowsMade(), {}
        found = reader.index(file, request.columns)
        found = found.completed(lambda: reader.seeks(file))
        return RowsMade(), {name: getattr(found, name) for name in BlockIndex.__slots__}
    if isinstance(request, ReadRows):
        reader = reader_of(request.format)
        return RowsMade(), rows_of_block(
            reader, file, index, request.block, columns=request.columns, start=request.start, stop=request.stop
        )
    assert isinstance(request, ReadBlock)
    streams[request.stream] = reader_of(request.format).stream(
        file,
        index,
        request.block,
        columns=request.columns,
        skip=request.skip,
        batch_rows=request.batch_rows,
        scratch=Path(request.scratch) if request.scratch else None,
    )
    return _next(request.stream, streams)


def _next(number: int, streams: Streams) -> Answer:
    try:
        return RowsMade(), next(streams[number])
    except BaseException as error:
        del streams[number]
        if isinstance(error, StopIteration):
            return RowsMade(end=True), {}
        raise
