"""A nursery seen from outside: one process that forks workers (or roles), and each one's end of a socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from overlord.errors import ServiceLost
from overlord.runtimes.transport.wire import receive, send

ANSWER_S = 120.0
"""How long the nursery may take to answer; at first it imports everything that its workers share."""


LATER_S = 10.0
"""How long it may take once it has answered: one that is stopped is as good as dead."""
END_S = 2.0
"""How long it may take to end its workers before all are killed from outside."""


class WorkerProcess:
    """One worker: its socket, its process id, and the functions it has been sent."""

    def __init__(self, nursery: Nursery, pid: int, connection: socket.socket) -> None:
        self._nursery = nursery
        self._ended = False
        self.pid = pid
        self.connection = connection
        self.functions: set[str] = set()
        self.asked = False
        """Whether an answer is still to come; such a worker can be asked nothing else."""

    @property
    def alive(self) -> bool:
        """Whether it still waits at the other end, for a worker that has nothing to do."""
        if self._ended or self._nursery.lost:
            return False
        self.connection.setblocking(False)
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass  # its end was torn down, as a kill does
        return False  # closed, or speaks unasked

    def end(self) -> int | None:
        """Kill it if need be; return its exit code (negative: the signal), or None when nobody knows it."""
        if self._ended:
            return None
        self._ended = True
        self.connection.close()
        return self._nursery.reap(self.pid)


class Nursery:
    """The process that forks workers, and has their memory in common with them."""

    def __init__(self, module: str = "overlord.runtimes.supervision.worker_main") -> None:
        self._lock = threading.Lock()
        self._closed = False
        self.lost = False
        """Whether it has failed; its workers are lost with it."""
        self._control, theirs = socket.socketpair()
        self._control.settimeout(ANSWER_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # the life line: it closes with this process, whatever ends that
                stdout=2,  # whatever a function prints goes to the log
                process_group=0,
                # Each worker has a core of its own: a library that starts a thread for each core would only crowd it.
                env={
                    "OMP_NUM_THREADS": "1",
                    "MALLOC_ARENA_MAX": "2",
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                },
            )

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of the process group of all its workers."""
        return self._process.pid

    def fork(self) -> WorkerProcess:
        """Start a worker.

        Raises:
            ServiceLost: when the nursery is gone, or the host lets it start no further process.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                answer = self._ask({"op": "fork"}, [theirs.fileno()])
            if "error" in answer:
                raise ServiceLost(f"it cannot be forked: {answer['error']}")
        except BaseException:
            ours.close()
            raise
        return WorkerProcess(self, answer["pid"], ours)

    def reap(self, pid: int) -> int | None:
        """Kill a worker if it lives, and return its exit code; None when the nursery is gone."""
        try:
            return int(self._ask({"op": "reap", "pid": pid}, [])["code"])
        except ServiceLost:
            return None

    def close(self) -> None:
        """Kill it and all its workers, and wait for them."""
        if self._lock.acquire(timeout=END_S):  # else somebody waits for an answer that does not come
            try:
                self._end_workers()
            finally:
                self._lock.release()
        self.lost = True
        if self._closed:
            return
        self._closed = True
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the whole group has ended
        with self._lock:
            self._control.close()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()

    def _end_workers(self) -> None:
        """Let it end its workers itself: they are its children, and whoever else inherits them may leave zombies."""
        if self.lost:
            return
        self.lost = True
        self._control.settimeout(END_S)
        try:
            send(self._control, {"op": "end"})
            receive(self._control)
        except (ServiceLost, OSError):
            pass  # the kill of the whole group follows

    def _ask(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        with self._lock:
            if self.lost:
                raise ServiceLost("the process that forks workers is gone")
            try:
                send(self._control, message, fds)
                answer = receive(self._control)[0]
                self._control.settimeout(LATER_S)
                return answer
            except (ServiceLost, OSError) as error:
                self.lost = True
                raise ServiceLost(f"the process that forks workers is gone: {error}") from error
