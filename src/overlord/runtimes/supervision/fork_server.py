"""A fork server: one process that has everything imported, and forks the workers, readers or roles of a host.

How it works: `ForkServer` starts a process that imports a module; that module's `preload()`, if there is one, runs
once. For every child, the server forks and calls the module's `serve(connection)` in it, where the connection is one
end of a socket pair whose other end the caller of `fork()` has. A child is there within milliseconds, and shares the
memory of the imported libraries. `multiprocessing`'s fork server would not do: a process can have only one, and it
neither kills a child, nor tells its exit code, nor ends its children with a SIGKILL of the process that asked for them.

The server itself is forked too, where its process called `start_template` before it had threads: a copy of it, which
has everything imported. Elsewhere, and where the template is lost, it is started with `python -m` of this file.

Rules of this file:
1. The server has one thread and runs no code of a user, so that a fork is safe.
2. All of them end with the process that started the server, however it ends: its end of a pipe closes, and the kernel
   signals the whole process group. A child that is stopped gets the SIGKILL that the kernel sends when the server ends.
3. A server that was lost, or that is stopped or hangs, is killed with its children and replaced by the next fork.
4. A connection is closed only by the part of the service that owns it. What ends a child shuts its connections down,
   which wakes the threads that wait there: closed under another thread, a descriptor could become another file.
5. A child that was killed may be blocked in the kernel, and end only when a device answers. It is not waited for: it
   executes no further instruction of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from overlord.core.client_messages import Message
from overlord.core.messages import EndChildren, ForkAnswer, ForkChild, ForkServerFor, WorkerMessage
from overlord.core.ragged import RowBatch
from overlord.errors import OverlordError, ServiceLost, SpecError
from overlord.runtimes.supervision.blame import (
    Blame,
    CallClock,
    CallLimits,
    ChildLost,
    Overdue,
    blame_for,
    never_runs_again,
)
from overlord.runtimes.supervision.child import (
    LIMITS,
    Backoff,
    ChildProcess,
    Limits,
    die_with_parent,
    exit_status,
    name_process,
)
from overlord.runtimes.supervision.early_start import ONE_THREAD, signal_at_end, start_python
from overlord.runtimes.transport.codec import Garbled, OnSilence
from overlord.runtimes.transport.role_codec import receive_message, receive_rows, send_message, send_rows

T = TypeVar("T")

_START_TRIES = 5
"""Fork servers that may be lost in a row before a fork fails."""
_END_S = 0.5
"""How long a child that was killed is waited for, where it is blocked in the kernel."""


class ForkedChild(ChildProcess):
    """A child of a fork server, and a socket to it."""

    def __init__(self, server: ForkServer, number: int, pid: int, connection: socket.socket) -> None:
        super().__init__(pid)
        self._server = server
        self._number = number
        self._lock = threading.Lock()
        self._end_lock = threading.Lock()
        self._ending = False
        self._blame: Blame | None = None
        self._late = False
        self._peak_bytes = 0
        self._calls: dict[CallClock, socket.socket] = {}
        """The calls under way, oldest first, with their connections."""
        self._handle = _handle_of(pid)
        self.connection = connection

    @property
    def server_runs(self) -> bool:
        """Whether nothing is known that ended it; this looks at nothing."""
        return not self._ending and self._server.runs(self._number)

    @property
    def alive(self) -> bool:
        """Whether it waits at the other end, for a child from which no answer is due."""
        return self.waits_at(self.connection)

    def waits_at(self, connection: socket.socket) -> bool:
        """Whether it waits at the other end of a connection that only the caller uses, with no answer due."""
        if not self.server_runs:
            return False
        try:
            connection.setblocking(False)
            connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass  # its end was torn down, as a kill does
        return False  # it closed the connection, or sends without being asked

    def exchange(
        self, head: WorkerMessage, rows: RowBatch, limits: CallLimits, what: str, connection: socket.socket
    ) -> tuple[WorkerMessage, RowBatch]:
        """Send rows and wait for the answer, on a further connection to the child.

        Raises:
            ChildLost: It ended, or did not answer in time; it is killed then.
        """

        def exchange(talk: socket.socket, tick: OnSilence) -> tuple[WorkerMessage, RowBatch]:
            send_rows(talk, head, rows, tick)
            return receive_rows(talk, tick)

        return self.within(limits, what, exchange, connection)

    def within(
        self, limits: CallLimits, what: str, exchange: Callable[[socket.socket, OnSilence], T],
        connection: socket.socket | None = None,
    ) -> T:  # fmt: skip
        """Let it be asked something that must be answered in time.

        Args:
            limits: How long it may take.
            what: What it does meanwhile, for messages.
            exchange: Asks, and returns the answer; it is given the connection, and what to call while nothing comes.
            connection: A further connection to the child; by default the first one.

        Raises:
            ChildLost: It ended, sent something else than an answer, or did not answer in time; it is killed then.
        """
        talk, clock = connection or self.connection, CallClock(self.pid, limits, what)
        with self._lock:
            self._calls[clock] = talk
            ended = self._ending
        try:
            if not ended:
                talk.settimeout(clock.tick_s)
                return exchange(talk, lambda: clock.tick(first=self._is_first(clock)))
        except Overdue as late:
            self.end(str(late), late.blame, late=late.blame is Blame.ITSELF)
        except (Garbled, SpecError) as error:
            self.end(f"its answer makes no sense: {error}", Blame.ITSELF)
        except (ServiceLost, OSError):
            pass  # the connection broke: it has ended, or another thread has ended it
        finally:
            clock.done()
            with self._lock:
                del self._calls[clock]
        self.end()
        raise self.loss

    def _is_first(self, clock: CallClock) -> bool:
        """Whether no call is older: the child works on that one."""
        with self._lock:
            return next(iter(self._calls)) is clock

    @property
    def loss(self) -> ChildLost:
        """How it ended, for a caller that waited for it."""
        how = self.killed_for or ("it was lost" if self.code is None else exit_status(self.code))
        blame = self._blame or blame_for(self.code)
        return ChildLost(how, blame, late=self._late, code=self.code, peak_bytes=self._peak_bytes)

    def end(self, reason: str = "", blame: Blame | None = None, *, late: bool = False) -> None:
        """Kill it if it lives, and wait for its end; a thread that waits for an answer is woken.

        Args:
            reason: Why, in words; by default how it ended says so.
            blame: Whose fault that is; by default its exit code says so.
            late: Whether it exceeded its time limit.
        """
        with self._end_lock:  # of two callers that notice its end, both know how it ended
            if self._ending:
                return
            with self._lock:
                self._ending = True
            self._blame, self._late = blame, late
            self.killed_for = self.killed_for or reason
            self._kill_and_wait()
            code, self._peak_bytes = self._server.reap(self._number, self.pid)
            self.note_end(code)
            with self._lock:
                waiting = [self.connection, *self._calls.values()]
            for connection in waiting:
                with contextlib.suppress(OSError):  # its end is closed already
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, and close the connection; only the owner of the connection may do so."""
        self.end("it was ended by the service", Blame.OUTSIDE)
        self.connection.close()

    def _kill_and_wait(self) -> None:
        """Kill it by a handle, which never means another process, and wait until it runs no further instruction."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            while not ended.poll(1000 * _END_S) and not never_runs_again(self.pid):
                pass  # it needs a core for its end
        finally:
            os.close(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            os.close(self._handle)  # type: ignore[arg-type]


def _handle_of(pid: int) -> int | None:
    """Return a handle of a process that was just forked; None where the system has none, or the process is gone."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None


class ForkServer:
    """The process that forks children of one kind; it starts with the first of them.

    Args:
        module: What it imports; its `preload(*preloads)` runs once, its `serve` in every child.
    """

    def __init__(self, module: str, limits: Limits = LIMITS) -> None:
        self._module = module
        self.preloads: Sequence[str] = ()
        """What its `preload` is given."""
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | _ForkedServer | None = None
        self._control: socket.socket | None = None
        self._number = 0
        """How many servers there were."""
        self._answers = 0
        """What the present one has answered."""
        self._lost = False
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Its process id, which is also the id of the process group of its children; None before the first fork."""
        return None if self._process is None else self._process.pid

    def fork(self) -> ForkedChild:
        """Start a child; a server that is lost meanwhile is replaced a few times.

        Raises:
            ServiceLost: when servers are lost again and again, this one is closed, or the host starts no process.
        """
        backoff = Backoff(0.02, 0.5)
        for tries in itertools.count(1):
            ours, theirs = socket.socketpair()
            try:
                with theirs, self._lock:
                    self._check_running()
                    answer = self._ask(ForkChild(), [theirs.fileno()])
                    number = self._number
                if answer.error is not None:
                    raise ServiceLost(f"it cannot be forked: {answer.error}")
                return ForkedChild(self, number, answer.pid, ours)
            except _ServerLost as error:
                ours.close()
                if tries == _START_TRIES or self._closed:
                    raise ServiceLost(
                        f"{error}, {tries} times in a row. The log says more; the host may be out of memory or "
                        "processes: free some"
                    ) from error
            except BaseException:
                ours.close()
                raise
            backoff.pause()
        raise AssertionError("unreachable")

    def runs(self, number: int) -> bool:
        """Whether this server, and no later one, is up."""
        return number == self._number and not self._lost

    def reap(self, number: int, pid: int) -> tuple[int | None, int]:
        """Kill a child if it lives; return its exit code, None where it is not known, and the most memory it used."""
        with self._lock:
            try:
                if self.runs(number):
                    answer = self._ask(EndChildren([pid]))
                    return answer.codes[0], answer.peak_bytes[0]
            except ServiceLost:
                pass
            return None, 0

    def close(self) -> None:
        """Kill it and all its children, and wait for them."""
        self._closed = True
        if self._lock.acquire(timeout=self._limits.fork_close):  # else a caller waits for an answer that does not come
            try:
                # The server ends its children itself: whichever process inherits them may leave zombies.
                if self._process is not None and not self._lost:
                    self._ask(EndChildren(), within_s=self._limits.fork_close)
            except ServiceLost:
                pass  # the whole group is killed below
            finally:
                self._lost = True
                self._lock.release()
        self._kill_group()
        with self._lock:
            self._dispose()

    def _check_running(self) -> None:
        if self._closed:
            raise ServiceLost("the fork server is closed")
        if self._process is None or self._lost:
            self._dispose()
            self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._answers = 0
        with theirs:
            self._process = _template.start(self._module, theirs, self.preloads) if _template is not None else None
            self._process = self._process or start_python(
                ["-m", "overlord.runtimes.supervision.fork_server", self._module, str(theirs.fileno()), *self.preloads],
                ONE_THREAD,
                [theirs.fileno()],
                stdout=2,  # whatever a function prints goes to the log
                process_group=0,
            )
        self._number += 1
        self._lost = False

    def _dispose(self) -> None:
        if self._process is None:
            return
        self._kill_group()
        assert self._control is not None and self._process.stdin is not None
        self._control.close()
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it was killed, but is blocked in the kernel
            self._process.wait(self._limits.fork_close)
        self._process = None

    def _kill_group(self) -> None:
        try:
            if self._process is not None:
                os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the whole group has ended

    def _ask(self, message: Message, fds: Sequence[int] = (), within_s: float | None = None) -> ForkAnswer:
        """Ask the server, with the lock held.

        Raises:
            _ServerLost: when it has ended, or does not answer; it and its children are killed then.
        """
        assert self._control is not None and self._process is not None
        within_s = within_s or (self._limits.fork if self._answers else self._limits.fork_first)
        limits = CallLimits(elapsed_s=within_s, stopped_s=min(within_s, self._limits.stopped_silence))
        what = "starts or ends a worker" if self._answers else "starts up, to start workers"
        clock = CallClock(self._process.pid, limits, what)
        try:
            self._control.settimeout(clock.tick_s)
            send_message(self._control, message, fds, clock.tick)
            answer = receive_message(self._control, clock.tick)[0]
            if not isinstance(answer, ForkAnswer):
                raise ServiceLost("it answers something else")
            self._answers += 1
            return answer
        except (OverlordError, OSError, Overdue) as error:
            self._lost = True
            self._kill_group()
            raise _ServerLost(f"the fork server is gone: {error}") from error
        finally:
            clock.done()


class _ServerLost(ServiceLost):
    """A fork server has ended or hangs."""


# --------------------------------------------------------------------------------------------------------------
# The template: a copy of a process, made before it had threads, that forks the servers.


class _ForkedServer:
    """A fork server that the template forked; it looks as one that was started here."""

    def __init__(self, pid: int, line: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(line, "wb", buffering=0)
        try:
            self._handle: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._handle = None  # it is gone

    def wait(self, timeout: float) -> None:
        """Wait for its end, which the template collects, but not longer than so many seconds."""
        if self._handle is not None:
            ended = select.poll()
            ended.register(self._handle, select.POLLIN)
            ended.poll(1000 * timeout)
            os.close(self._handle)
            self._handle = None


class _Template:
    """The process that forks servers, as the process that made it asks it."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self._pid = pid
        self._control = control
        self._control.settimeout(LIMITS.fork)
        self._lock = threading.Lock()
        self._lost = False

    def start(self, module: str, control: socket.socket, preloads: Sequence[str]) -> _ForkedServer | None:
        """Fork a server for a module, with its control socket; None where the template is gone."""
        line, ours = os.pipe()
        try:
            with self._lock:
                answer = self._ask(ForkServerFor(module, tuple(preloads)), [control.fileno(), line])
            if answer is not None and answer.error is None:
                with contextlib.suppress(OSError):  # it is gone
                    signal_at_end(line, signal.SIGKILL, -answer.pid)  # also while it does not run yet
                server = _ForkedServer(answer.pid, ours)
                ours = -1
                return server
        finally:
            os.close(line)
            if ours >= 0:
                os.close(ours)
        return None

    def _ask(self, message: Message, fds: Sequence[int]) -> ForkAnswer | None:
        """Ask the template, with the lock held; None where it is gone."""
        if self._lost:
            return None
        try:
            send_message(self._control, message, fds)
            answer: ForkAnswer = receive_message(self._control)[0]
            return answer
        except ServiceLost:
            self._lost = True
            # One that only hangs would fork the server later, beside the one that is started instead of it.
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            return None


_template: _Template | None = None


def start_template() -> None:
    """Fork a copy of this process that forks servers; call it before any thread is started."""
    global _template
    if not hasattr(os, "pidfd_open"):
        return
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        _template = _Template(pid, ours)
        return
    _template = None
    code = 1
    try:
        die_with_parent()
        name_process("template")
        _keep_only(theirs.fileno())
        _be_template(theirs)
        code = 0
    finally:
        os._exit(code)


def _keep_only(fd: int) -> None:
    """Close what a copied process holds open: pipes whose end others wait for. What it prints goes to the log."""
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for other in [int(name) for name in os.listdir("/proc/self/fd")]:
        if other > 2 and other != fd:
            try:
                os.close(other)
            except OSError:
                pass  # the one that listed them


def _be_template(control: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects servers that have ended
    gc.collect()
    gc.freeze()
    while True:
        try:
            message, fds = receive_message(control)
        except ServiceLost:
            return
        try:
            pid = os.fork()
        except OSError as error:
            for fd in fds:
                os.close(fd)
            send_message(control, ForkAnswer(error=str(error.strerror or error)))
            continue
        if pid == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            os.dup2(fds[1], 0)
            os.close(fds[1])
            _run_server(message.module, socket.socket(fileno=fds[0]), message.preloads)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # also here: it may be killed as a group before it comes to that
        send_message(control, ForkAnswer(pid))


# --------------------------------------------------------------------------------------------------------------
# The process itself.

Serve = Callable[[socket.socket], None]


def _run_server(module: str, control: socket.socket, preloads: Sequence[str]) -> NoReturn:
    """Be the fork server of a module; never return."""
    code = 1
    name_process("fork-server")
    try:
        served = importlib.import_module(module)
        getattr(served, "preload", lambda *_: None)(*preloads)
        run(control, served.serve)
        code = 0
    except BaseException:
        sys.stderr.write(traceback.format_exc())
    finally:
        os._exit(code)


def run(control: socket.socket, serve: Serve) -> None:
    """Fork and end children as the control socket says, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's
    end_with_parent()
    faulthandler.enable()  # where a child crashed is worth a few lines in the log
    children: set[int] = set()
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page it shares with the server
    while True:
        try:
            message, fds = receive_message(control)
            send_message(control, _answer(control, message, fds, children, serve))
        except ServiceLost:
            return


def end_with_parent() -> None:
    """Let the kernel kill this process group once no process holds the other end of standard input.

    A thread that watches the pipe would not do: a function that never releases the interpreter would keep it waiting,
    and so would a SIGSTOP.
    """
    line = os.dup(0)
    signal_at_end(line, signal.SIGKILL, -os.getpgrp())
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # a function that reads standard input finds it empty
    ended = select.poll()
    ended.register(line, select.POLLHUP)
    if ended.poll(0):  # the parent was gone before the kernel was asked to signal its end
        os._exit(1)  # as the signal would: nothing is printed, nothing has been begun


def _answer(
    control: socket.socket, message: ForkChild | EndChildren, fds: list[int], children: set[int], serve: Serve
) -> ForkAnswer:
    if isinstance(message, EndChildren):
        pids = sorted(children) if message.pids is None else message.pids
        ends = [_end(pid, children) for pid in pids]
        for other in list(children):
            _collect(other, children)  # one that was killed before, and has ended since
        return ForkAnswer(codes=tuple(code for code, _ in ends), peak_bytes=tuple(peak for _, peak in ends))
    try:
        pid = os.fork()
    except OSError as error:
        os.close(fds[0])
        return ForkAnswer(error=str(error.strerror or error))
    if pid == 0:
        control.close()
        os.set_inheritable(fds[0], False)  # a program that the function starts must not keep the connection open
        die_with_parent()
        _run_child(socket.socket(fileno=fds[0]), serve)
    os.close(fds[0])
    children.add(pid)
    return ForkAnswer(pid)


def _end(pid: int, children: set[int]) -> tuple[int | None, int]:
    """Kill a child and wait for its end; return its exit code and the most memory that it used."""
    if pid not in children:
        return None, 0
    # Killed first: a child that has closed its socket may be alive. One that is dead keeps its own status.
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 2 * _END_S
    while (found := _collect(pid, children)) is None:
        if time.monotonic() > until and never_runs_again(pid):
            return None, 0
        time.sleep(0.001)
    return found


def _collect(pid: int, children: set[int]) -> tuple[int, int] | None:
    """Return the exit code of a child and the most memory that it used; None where it has not ended."""
    found, status, usage = os.wait4(pid, os.WNOHANG)
    if not found:
        return None
    children.discard(pid)
    return os.waitstatus_to_exitcode(status), 1024 * usage.ru_maxrss


def _run_child(connection: socket.socket, serve: Serve) -> NoReturn:
    """Be a child until its connection closes; never return into the server's loop."""
    code = 1
    try:
        serve(connection)
        code = 0
    except SystemExit as end:  # the function called sys.exit
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.stderr.write(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _run_server(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
