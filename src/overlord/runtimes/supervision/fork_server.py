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
3. A server that was lost is replaced by the next fork; its children are lost with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from overlord.core.client_messages import Message
from overlord.core.messages import EndChildren, ForkAnswer, ForkChild, ForkServerFor, WorkerMessage
from overlord.core.ragged import RowBatch
from overlord.errors import ServiceLost
from overlord.runtimes.supervision.child import (
    LIMITS,
    ChildProcess,
    Limits,
    die_with_parent,
    exit_status,
    name_process,
)
from overlord.runtimes.supervision.early_start import ONE_THREAD, signal_at_end, start_python
from overlord.runtimes.transport.codec import OnSilence
from overlord.runtimes.transport.role_codec import receive_message, receive_rows, send_message, send_rows

T = TypeVar("T")

_TICKS = 16
"""A wait is counted in so many parts, so that a host that was suspended meanwhile loses one of them and no more."""


class ChildLost(Exception):
    """A child ended, or did not answer in time; the text says which.

    Args:
        how: In words.
        hung: Whether it was killed because it did not answer in time.
        code: Its exit code; None where its fork server is gone.
    """

    def __init__(self, how: str, *, hung: bool = False, code: int | None = None) -> None:
        super().__init__(how)
        self.hung = hung
        self.code = code


class ForkedChild(ChildProcess):
    """A child of a fork server, and a socket to it."""

    def __init__(self, server: ForkServer, number: int, pid: int, connection: socket.socket) -> None:
        super().__init__(pid)
        self._server = server
        self._number = number
        self._end_lock = threading.Lock()
        self._ending = False
        self._hung = False
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
        connection.setblocking(False)
        try:
            connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass  # its end was torn down, as a kill does
        return False  # it closed the connection, or sends without being asked

    def exchange(
        self, head: WorkerMessage, rows: RowBatch, seconds: float | None, connection: socket.socket | None = None
    ) -> tuple[WorkerMessage, RowBatch]:
        """Send rows and wait for the answer, on a further connection to the child if one is given.

        Raises:
            ChildLost: It ended, or did not answer in time; it is killed then.
        """

        def exchange(talk: socket.socket, tick: OnSilence) -> tuple[WorkerMessage, RowBatch]:
            send_rows(talk, head, rows, tick)
            return receive_rows(talk, tick)

        return self.within(seconds, exchange, connection)

    def within(
        self, seconds: float | None, exchange: Callable[[socket.socket, OnSilence], T],
        connection: socket.socket | None = None,
    ) -> T:  # fmt: skip
        """Let it be asked something that must be answered in time.

        Raises:
            ChildLost: It ended, or did not answer in time; it is killed then.
        """
        talk, left = connection or self.connection, _TICKS

        def tick() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                raise TimeoutError(f"no answer within {seconds:g} s")

        talk.settimeout(seconds and seconds / _TICKS)
        try:
            return exchange(talk, tick)
        except TimeoutError as late:
            self.end(str(late), hung=True)
        except ServiceLost:
            self.end()
        raise self.loss

    @property
    def loss(self) -> ChildLost:
        """How it ended, for a caller that waited for it."""
        how = self.killed_for or ("it was lost" if self.code is None else exit_status(self.code))
        return ChildLost(how, hung=self._hung, code=self.code)

    def end(self, reason: str = "", *, hung: bool = False) -> None:
        """Kill it if it lives, for a reason if there is one, and wait for its end."""
        with self._end_lock:  # of two callers that notice its end, both know how it ended
            if not self._ending:
                self._ending, self._hung = True, hung
                self.killed_for = self.killed_for or reason
                self.connection.close()
                self.note_end(self._server.reap(self._number, self.pid))


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
        self._lost = False
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Its process id, which is also the id of the process group of its children; None before the first fork."""
        return None if self._process is None else self._process.pid

    def fork(self) -> ForkedChild:
        """Start a child.

        Raises:
            ServiceLost: when the server is gone or closed, or the host lets it start no further process.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                self._check_running()
                answer = self._ask(ForkChild(), [theirs.fileno()])
                number = self._number
            if answer.error is not None:
                raise ServiceLost(f"it cannot be forked: {answer.error}")
        except BaseException:
            ours.close()
            raise
        return ForkedChild(self, number, answer.pid, ours)

    def runs(self, number: int) -> bool:
        """Whether this server, and no later one, is up."""
        return number == self._number and not self._lost

    def reap(self, number: int, pid: int) -> int | None:
        """Kill a child if it lives, and return its exit code; None when its server is gone."""
        with self._lock:
            try:
                return self._ask(EndChildren([pid])).codes[0] if self.runs(number) else None
            except ServiceLost:
                return None

    def close(self) -> None:
        """Kill it and all its children, and wait for them."""
        self._closed = True
        if self._lock.acquire(timeout=self._limits.fork_close):  # else a caller waits for an answer that does not come
            try:
                # The server ends its children itself: whichever process inherits them may leave zombies.
                if self._process is not None and not self._lost:
                    assert self._control is not None
                    self._control.settimeout(self._limits.fork_close)
                    self._ask(EndChildren())
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
        self._control.settimeout(self._limits.fork_first)
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
        self._process.wait()
        self._process = None

    def _kill_group(self) -> None:
        try:
            if self._process is not None:
                os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the whole group has ended

    def _ask(self, message: Message, fds: Sequence[int] = ()) -> ForkAnswer:
        """Ask the server, with the lock held."""
        assert self._control is not None
        try:
            send_message(self._control, message, fds)
            answer: ForkAnswer = receive_message(self._control)[0]
            self._control.settimeout(self._limits.fork)  # one that is stopped is as good as dead
            return answer
        except ServiceLost as error:
            self._lost = True
            raise ServiceLost(f"the fork server is gone: {error}") from error


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

    def wait(self) -> None:
        """Wait for its end, which the template collects."""
        if self._handle is not None:
            ended = select.poll()
            ended.register(self._handle, select.POLLIN)
            ended.poll()
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
                if self._lost:
                    return None
                send_message(self._control, ForkServerFor(module, tuple(preloads)), [control.fileno(), line])
                answer: ForkAnswer = receive_message(self._control)[0]
            if answer.error is None:
                with contextlib.suppress(OSError):  # it is gone
                    signal_at_end(line, signal.SIGKILL, -answer.pid)  # also while it does not run yet
                server = _ForkedServer(answer.pid, ours)
                ours = -1
                return server
        except ServiceLost:
            self._lost = True
            # One that only hangs would fork the server later, beside the one that is started instead of it.
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        finally:
            os.close(line)
            if ours >= 0:
                os.close(ours)
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
        return ForkAnswer(codes=tuple(_end(pid, children) for pid in pids))
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


def _end(pid: int, children: set[int]) -> int:
    # Killed first: a child that has closed its socket may be alive. One that is dead keeps its own status.
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    children.discard(pid)
    return os.waitstatus_to_exitcode(status)


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
