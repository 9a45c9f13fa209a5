"""One process of a service, from its start to its end, and the pulse by which its launcher knows that it is not hung.

Rules of this file:
1. Nothing here waits for the process longer than it is told to: a stopped process reads and writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlord.errors import OverlordError, ServiceLost, error_named
from overlord.runtimes.doors import BEAT, knock
from overlord.runtimes.opening import Progress
from overlord.runtimes.service_main import CLOSED, REWOUND, SERVED
from overlord.runtimes.wire import receive, send

BEAT_EVERY_S = 1.0
LAST_WORDS_S = 5.0
"""How long a process that has closed its output may take to be gone."""


class Incarnation:
    """A service process."""

    def __init__(
        self, module: str, environment: Mapping[str, str], folder: Path, keeps_folder: int, bundle: bytes
    ) -> None:
        """Start it.

        Args:
            module: What runs in it.
            environment: What it is told there unless this process's own says otherwise.
            folder: The service's folder.
            keeps_folder: The pipe by which the folder is kept; the process holds it too.
            bundle: The job and the options.
        """
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C must not reach it; the closing pipe does
            pass_fds=[keeps_folder],
            # Few malloc arenas: with one for each of its threads, what they free stays with the process.
            env={"MALLOC_ARENA_MAX": "2", **environment, **os.environ, "PYTHONPATH": paths},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._into, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        for fd in (self._into, self._out):
            os.set_blocking(fd, False)
        parts = (os.fsencode(folder), str(keeps_folder).encode(), bundle)
        self._to_send = memoryview(b"".join(struct.pack("<Q", len(part)) + part for part in parts))
        self._said = b""
        self._reason = ""
        self._ready_at: float | None = None
        self._ended_at = 0.0
        self.address: str | None = None
        """Where it serves, when it does."""
        self.error: OverlordError | None = None
        """What it cannot go on for, in its own words."""
        self.ended: str | None = None
        """How it ended, when it has."""
        self.left_in_peace = False
        """Whether it was asked to end."""
        self.served = -1
        """The newest step that a client is known to have come to."""
        self.rewound = False
        """Whether it ends because all ranks go back to an earlier step."""
        self.heard_at = time.monotonic()
        """When it last said something."""
        self.has_spoken = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal, and has not been let go on."""
        if self.ended is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return False  # it was waited for a moment ago

    def steady(self, seconds: float) -> bool:
        """Whether it served for so long, before it ended."""
        return self._ready_at is not None and self._ended_at - self._ready_at >= seconds

    def turn(self, timeout_s: float | None, others: Sequence[int], progress: Progress | None) -> None:
        """Tell it what is left to tell, and hear what it says, until something happens.

        Args:
            timeout_s: How long to wait for something to happen; None for as long as it takes.
            others: Descriptors that may have something to read too.
            progress: Told how far the start is.
        """
        if self.ended is not None:
            return
        poll = select.poll()  # `select.select` takes no descriptor beyond 1023
        poll.register(self._out, select.POLLIN)
        for fd in others:
            poll.register(fd, select.POLLIN)
        if self._to_send:
            poll.register(self._into, select.POLLOUT)
        happened = dict(poll.poll(None if timeout_s is None else 1000 * timeout_s))
        if self._into in happened:
            self._tell()
        if self._out in happened:
            self._hear(progress)
        if self.ended is None and self._process.poll() is not None:
            self._hear(progress)  # its children may hold its output open; what it said is there
            self._note_end()

    def kill(self, reason: str) -> None:
        """Kill it, and say so when it is asked how it ended."""
        self._reason = reason
        self._process.kill()

    def end(self, patience_s: float) -> None:
        """Close the pipe that keeps it alive; kill it if it does not go."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if not self._to_send:
            with contextlib.suppress(OSError):  # it is gone already
                os.write(self._into, CLOSED)
        self._process.stdin.close()
        self._process.stdout.close()
        if self._process.poll() is None and patience_s:
            self._process.send_signal(signal.SIGCONT)  # one that was stopped can only end when it runs
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                pass  # killed below
        self._process.kill()
        self._process.wait()
        self._note_end()

    def _tell(self) -> None:
        try:
            self._to_send = self._to_send[os.write(self._into, self._to_send) :]
        except BlockingIOError:
            pass  # it is asked again when there is room
        except BrokenPipeError:
            self._to_send = memoryview(b"")  # it died while starting; its end says how

    def _hear(self, progress: Progress | None) -> None:
        try:
            part = os.read(self._out, 1 << 16)
        except BlockingIOError:
            return
        if not part:
            try:
                self._process.wait(LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                self.kill("closed its output and was killed")
                self._process.wait()
            self._note_end()
            return
        self.heard_at, self.has_spoken = time.monotonic(), True
        *lines, self._said = (self._said + part).split(b"\n")
        for line in lines:
            self._understand(json.loads(line), progress)

    def _understand(self, event: dict[str, Any], progress: Progress | None) -> None:
        if "ready" in event:
            self.address, self._ready_at = event["ready"], time.monotonic()
        elif "error" in event:
            self.error = error_named(event["error"], event["message"])
        elif event.get("progress", [None])[0] == SERVED:
            self.served = max(self.served, int(event["progress"][1]))
        elif event.get("progress", [None])[0] == REWOUND:
            self.rewound = True
        elif "progress" in event and progress is not None:
            progress(*event["progress"])

    def _note_end(self) -> None:
        code = self._process.returncode
        if self.ended is None:
            self._ended_at = time.monotonic()
            self.ended = self._reason or how_it_ended(code)
            self.left_in_peace = not self._reason and code in (0, -signal.SIGTERM)


class Pulse:
    """Asks a service every second whether it is there, over a connection of its own."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._connection: socket.socket | None = None
        self._in_flight = False
        self._unanswered_since: float | None = None
        self._next_at = 0.0

    @property
    def listens_to(self) -> list[int]:
        """The descriptor that an answer would come on."""
        return [self._connection.fileno()] if self._connection is not None and self._in_flight else []

    def silent_s(self, now: float) -> float:
        """How long there has been no answer."""
        return 0.0 if self._unanswered_since is None else now - self._unanswered_since

    def excuse(self, now: float) -> None:
        """Begin to count anew: it was the asker who was away."""
        if self._unanswered_since is not None:
            self._unanswered_since = now

    def beat(self, address: str, now: float) -> None:
        """Ask, if it is time."""
        if self._in_flight or now < self._next_at:
            return
        if self._unanswered_since is None:
            self._unanswered_since = now
        self._next_at = now + BEAT_EVERY_S
        try:
            if self._connection is None:
                self._connection = knock(address)
                self._connection.settimeout(self._patience_s)
            send(self._connection, {"op": BEAT})
            self._in_flight = True
        except (OSError, ServiceLost):
            self.close()  # and try anew at the next beat

    def hear(self) -> None:
        """Take the answer, if there is one."""
        if self._connection is None or not self._in_flight:
            return
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(0):
            return
        try:
            receive(self._connection)
            self._unanswered_since = None
            self._in_flight = False
        except (OSError, ServiceLost):
            self.close()

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()
        self._connection, self._in_flight = None, False


def how_it_ended(code: int) -> str:
    """Return what an exit code says.

    Example:
        >>> how_it_ended(-9), how_it_ended(3)
        ('was killed by SIGKILL', 'ended with code 3')
    """
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
