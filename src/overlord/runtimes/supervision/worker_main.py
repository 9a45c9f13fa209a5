"""The worker processes of a host: one nursery that has everything imported, and the workers it forks.

Rules of this file:
1. A worker runs one function over some rows at a time; what kills it must kill nothing else.
2. The nursery has one thread and runs no code of a user, so that a fork is cheap, safe and shares its memory.
3. All of them die with the service: its end of a pipe closes, and the kernel ends the whole process group.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from overlord.core.ragged import RowBatch
from overlord.errors import ServiceLost
from overlord.runtimes.transport.frames import receive_rows, send_rows
from overlord.runtimes.transport.wire import receive, send

Serve = Callable[[socket.socket], None]
"""What a forked process does with its end of a socket."""


def run_nursery(serve: Serve) -> None:
    """Be a nursery: its control socket is the descriptor named by the first argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's
    hold_life_line()
    faulthandler.enable()  # where a worker crashed is worth a few lines in the log
    workers: set[int] = set()
    gc.collect()
    gc.freeze()  # a collection in a worker would touch, and so copy, every page it shares with the nursery
    while True:
        try:
            message, fds = receive(control)
            send(control, _answer(control, message, fds, workers, serve))
        except ServiceLost:
            return


def hold_life_line() -> None:
    """Let the kernel end this process group once nobody holds the other end of standard input.

    A thread that watches the pipe would not do: a function that never lets go of the interpreter would keep it waiting.
    """
    line = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # a function that reads standard input finds it empty
    fcntl.fcntl(line, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
    ended = select.poll()
    ended.register(line, select.POLLHUP)
    if ended.poll(0):  # the service was gone before the kernel was asked to tell
        sys.exit(1)


def _answer(
    control: socket.socket, message: dict[str, Any], fds: list[int], workers: set[int], serve: Serve
) -> dict[str, Any]:
    if message["op"] == "reap":
        return {"code": _end(int(message["pid"]), workers)}
    if message["op"] == "end":
        return {"codes": [_end(pid, workers) for pid in sorted(workers)]}
    try:
        pid = os.fork()
    except OSError as error:
        os.close(fds[0])
        return {"error": str(error.strerror or error)}
    if pid == 0:
        control.close()
        os.set_inheritable(fds[0], False)  # a program that the function starts must not keep the connection open
        _die_with_parent()
        _live(socket.socket(fileno=fds[0]), serve)
    os.close(fds[0])
    workers.add(pid)
    return {"pid": pid}


def _end(pid: int, workers: set[int]) -> int:
    # Killed first: a worker that has closed its socket may be alive. One that is dead keeps its own status.
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    workers.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _die_with_parent() -> None:
    """Have the kernel kill this process when the nursery ends: also one that is stopped, which no other signal ends."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""


def _live(connection: socket.socket, serve: Serve) -> NoReturn:
    """Be a worker until the service closes the connection; never return into the nursery's loop."""
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
            if head["op"] == "load":
                # Code from the launching process, on its way to one of its own roles.
                functions[head["function"]] = cloudpickle.loads(np.asarray(rows["code"]).tobytes())
            else:
                made = functions[head["function"]](rows)
            send_rows(connection, {}, made)
        except ServiceLost:
            return
        except Exception as error:  # the border to the user's code: the service must learn what became of its question
            sys.stderr.write(traceback.format_exc())  # in one piece: other workers write to the same log
            send_rows(connection, {"error": f"{type(error).__name__}: {error}"}, {})


if __name__ == "__main__":
    run_nursery(serve)
