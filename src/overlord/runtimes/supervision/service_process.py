"""A service seen from the process that launched it: starts its process, keeps it up, asks it, ends it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlord.errors import ClosedError, Fenced, OverlordError, Rewound, ServiceLost, SpecError, StoreError, error_named
from overlord.job.specs import Job
from overlord.roles.client import Client
from overlord.runtimes.client_feed import ask_once, connect_local, opened, write_failure
from overlord.runtimes.launching.deployment import Progress
from overlord.runtimes.launching.launch_options import LaunchOptions
from overlord.runtimes.launching.owner_asks import OwnerAsks
from overlord.runtimes.supervision.cleanup import remove_when_gone
from overlord.runtimes.supervision.service_main import CLOSED, REWOUND, SERVED
from overlord.runtimes.transport.bundle import pack
from overlord.runtimes.transport.doors import BEAT, knock
from overlord.runtimes.transport.wire import receive, send

# --------------------------------------------------------------------------------------------------------------
# One process of a service, from its start to its end, and the pulse by which its launcher knows that it is not hung.
#
# Rules of this file:
# 1. Nothing here waits for the process longer than it is told to: a stopped process reads and writes nothing.


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


# --------------------------------------------------------------------------------------------------------------
# Keeps a service process up: starts it, listens to its heart, and starts it again when it dies or hangs.
#
# Rules of this file:
# 1. One thread watches what the process says, whether it lives, and whether it answers. It knows nothing of the
#    `ServiceProcess` it works for, whose end ends it.
# 2. A deliberate end stays: `close()`, a SIGTERM to the service, the end of the launcher. So does the end of a
#    service
#    that says an error of its own: it would say it again.
# 3. The folder is there exactly as long as the service may come back, or a file in it says why it will not.
# 4. There is one process at a time: the last one is gone for good before the next is started.


TURN_S = 0.5
"""How often the watching thread looks around when nothing happens."""
AWAY_S = 2.0
"""If it did not come to look for so long, this very process was stopped or busy, and the service is not to blame."""
STARTING_BEATS = 4
"""A process that is started again may be silent for so many heartbeats: opening sources keeps it busy."""
FIRST_SIGN_S = 60.0
"""How long the interpreter of a process that is started again may take to come up, on a host with much to do."""
MOST_RESTARTS = 5
"""Restarts in a row without a new step served, after which a service is given up."""
REWOUND_S = 3.0
"""How long a service that goes back to an earlier step may take to end."""
STEADY_S = 12.0
"""A service that ran for so long did not fail because it was started."""

logger = logging.getLogger("overlord")


@dataclass(frozen=True, slots=True)
class Order:
    """How a service process is started."""

    module: str
    environment: dict[str, str]
    first: bytes
    """What it is told the first time."""
    again: bytes
    """What it is told when it comes in the place of one that died."""
    close_s: float
    """How long it may take to close before it is killed."""
    heartbeat_s: float


AGAIN_S = 1.0
"""How much longer each further try to start a service again is put off."""


class ServiceKeeper:
    """The process of one service, whichever it is by now."""

    def __init__(self, order: Order, folder: Path) -> None:
        self._order = order
        self._folder = folder
        self._keeps_folder = remove_when_gone(folder)
        self._changed = threading.Condition()
        self._up = self._closing = False
        self._ended: OverlordError | None = None
        self._wake_reader, self._wake = os.pipe()
        self._thread: threading.Thread | None = None
        self._failures: list[str] = []
        self._served = -1
        self.restarts = 0
        """How often the process was started again."""
        self._process = self._start(order.first)

    @property
    def pid(self) -> int:
        """The process that serves now, or the last one that did."""
        return self._process.pid

    @property
    def starts_again(self) -> bool:
        """Whether the process is gone, and another one is on its way."""
        with self._changed:
            return not self._up and not self._closing and self._ended is None

    def begin(self, progress: Progress | None) -> str:
        """Wait until the service is ready for the first time, and watch it from then on; return its address."""
        process = self._process
        while process.address is None:
            if process.error is not None:
                raise process.error
            if process.ended is not None:
                raise ServiceLost(
                    f"the service process {process.ended} before it was ready; nothing has run. Its messages stand "
                    "above; if it was killed, the host may be out of memory."
                )
            self._judge_start(process, time.monotonic())
            if process.ended is None:
                process.turn(TURN_S, [], progress)
        self._up = True
        self._thread = threading.Thread(target=self._watch, name="overlord-keeper", daemon=True)
        self._thread.start()
        return process.address

    def wait_up(self) -> None:
        """Wait until the service runs.

        Raises:
            ClosedError: when it was closed.
            OverlordError: when it will not run again, as it was told.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._up or self._closing or self._ended is not None)
            if self._closing:
                raise ClosedError("the service is closed; launch it again.")
            if self._ended is not None:
                raise type(self._ended)(*self._ended.args)  # a fresh one: tracebacks of several askers must not mix

    def close(self) -> None:
        """End the service and remove everything it had."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        os.write(self._wake, b"!")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._process.end(self._order.close_s)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._keeps_folder.close()
        os.close(self._wake)
        os.close(self._wake_reader)

    def _start(self, bundle: bytes) -> Incarnation:
        order = self._order
        return Incarnation(order.module, order.environment, self._folder, self._keeps_folder.fileno(), bundle)

    # -- watching ------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing:
            self._follow(self._process)
            if self._closing or self._is_over(self._process):
                return
            self._restart()

    def _follow(self, process: Incarnation) -> None:
        """Return when a process is gone, having seen to it if it hangs."""
        beat_s = self._order.heartbeat_s
        looked_at = time.monotonic()
        ends_at: float | None = None
        with contextlib.closing(Pulse(beat_s)) as pulse:
            while not self._closing and process.ended is None:
                now = time.monotonic()
                if now - looked_at > AWAY_S:
                    pulse.excuse(now)
                    process.heard_at = now
                looked_at = now
                if process.rewound:
                    # What counts is on disk: one that takes long to end is killed, as trainers wait for the next one.
                    ends_at = ends_at or now + REWOUND_S
                    if now > ends_at:
                        process.kill("took long to end and was killed")
                elif process.address is not None:
                    silent_s, allowed_s = pulse.silent_s(now), 2 * beat_s
                    pulse.beat(process.address, now)
                    self._note_up()
                    if silent_s > allowed_s:
                        process.kill(f"hung for {silent_s:.1f} s and was killed")
                else:
                    self._judge_start(process, now)
                process.turn(TURN_S, [self._wake_reader, *pulse.listens_to], None)
                pulse.hear()

    def _judge_start(self, process: Incarnation, now: float) -> None:
        """Kill a process that gives no sign of life while it starts."""
        beat_s, silent_s = self._order.heartbeat_s, now - process.heard_at
        quick = process.has_spoken or process.is_stopped
        if silent_s > (STARTING_BEATS * beat_s if quick else max(FIRST_SIGN_S, 2 * beat_s)):
            process.kill(f"hung for {silent_s:.1f} s while it started, and was killed")

    def _note_up(self) -> None:
        if not self._up:
            with self._changed:
                self._up = True
                self._changed.notify_all()
            logger.warning("the service runs again, as process %d; nothing of the stream is lost", self._process.pid)

    def _is_over(self, process: Incarnation) -> bool:
        """Whether the service does not come back: it was ended, it says so itself, or it dies again and again."""
        with self._changed:
            self._up = False
        ended = process.ended or "is gone"
        if process.rewound and process.error is None:  # it ended to begin again at an earlier step
            self._failures = ["all ranks went back to an earlier step"]
            self._served = -1
            return False
        if self.restarts and _may_pass(process.error):  # a store that is away comes back; a role may die once more
            logger.warning("the service could not be started again: %s. It is tried once more", process.error)
            if isinstance(process.error, StoreError):
                self._failures.clear()
            self._failures.append(str(process.error))
            time.sleep(min(AGAIN_S * len(self._failures), 5.0))
            if len(self._failures) <= MOST_RESTARTS:
                return False
        if process.error is not None:
            told = str(process.error)
            if self.restarts:
                told = f"the service died ({self._failures[-1]}) and cannot be started again: {told}"
            self._give_up(type(process.error)(told))
        elif process.left_in_peace:
            shutil.rmtree(self._folder, ignore_errors=True)  # so that no client waits for it
            self._end(
                ServiceLost(
                    f"the service process {process.pid} was ended by a SIGTERM; no more data will come. Launch again "
                    "from the last state."
                )
            )
        else:
            if process.served > self._served or process.steady(STEADY_S):
                self._failures.clear()
            self._served = max(self._served, process.served)
            self._failures.append(ended)
            if len(self._failures) <= MOST_RESTARTS:
                return False
            self._give_up(
                ServiceLost(
                    f"the service process ended {len(self._failures)} times in a row without serving a new step "
                    f"({'; '.join(self._failures)}), and is not started again; no more data will come. Its messages "
                    "stand on the standard error of the launcher; if it was killed, the host may be out of memory. "
                    "Launch again from the last state when that is mended."
                )
            )
        return True

    def _restart(self) -> None:
        self.restarts += 1
        if not self._process.rewound:
            logger.warning(
                "the service process %d %s; it is started again (restart %d), and clients wait for it",
                self._process.pid, self._process.ended, self.restarts,
            )  # fmt: skip
        self._process.end(0.0)
        try:
            self._process = self._start(self._order.again)
        except OSError as error:
            self._process.ended = f"could not be started again ({error})"
            time.sleep(TURN_S)

    def _give_up(self, error: OverlordError) -> None:
        logger.error("%s", error)
        try:
            write_failure(self._folder, error)
        except OSError as failed:  # clients must not wait for a file that cannot be written
            logger.error("this cannot be told to the clients in %s: %s", self._folder, failed)
            shutil.rmtree(self._folder, ignore_errors=True)
        self._end(error)

    def _end(self, error: OverlordError) -> None:
        with self._changed:
            self._ended = error
            self._changed.notify_all()


def _may_pass(error: OverlordError | None) -> bool:
    """Whether what kept a service from starting again may be over the next time."""
    if isinstance(error, StoreError):
        return not isinstance(error, Fenced)
    return isinstance(error, ServiceLost) or type(error) is OverlordError


# --------------------------------------------------------------------------------------------------------------


CLOSE_S = 15.0
"""How long a closing service may take before it is killed."""
RAY_WORDS = {
    "RAY_DEDUP_LOGS": "0", "RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
}  # fmt: skip
"""Ray takes lines that differ in numbers for repetitions, but two bad samples are two; it gives actors less of a busy
CPU than other processes; it warns of its plans; and any call after its end starts another cluster."""
RAY_CLOSE_S = 60.0
"""How long the end of a cluster service may take."""
ASK_AGAIN_S = 0.1
"""How long to wait before asking again a service that broke off: by then its keeper knows why."""


class ServiceProcess(OwnerAsks):
    """A service whose process was started by this one, and is started again when it dies or hangs."""

    def __init__(
        self,
        module: str,
        job: Job,
        options: LaunchOptions,
        progress: Progress | None,
        *,
        close_s: float = CLOSE_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        again = dataclasses.replace(options, recover=True)
        order = Order(
            module, dict(environment or {}), pack(job, options), pack(job, again), close_s, options.heartbeat_s
        )
        self._keeper = ServiceKeeper(order, _service_folder())
        self._seen: dict[str, Any] | None = None
        self._finalizer = weakref.finalize(self, self._keeper.close)
        try:
            self.address = self._keeper.begin(progress)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The service's process id."""
        return self._keeper.pid

    @property
    def restarts(self) -> int:
        """How often the service's process was started again."""
        return self._keeper.restarts

    def client(self, rank: int, step: int | None = None) -> Client:
        """Return the client of one rank in this process."""
        self._wait_up()
        return connect_local(self.address, rank, step)

    def status(self) -> dict[str, Any]:
        """Return what every role holds and has met; while the service is started again, what was last seen of it.

        `["service"]["state"]` is "up", "starting again", or "failed" where a role cannot be replaced (`["why"]`).

        Raises:
            ServiceLost: when the service does not come back.
        """
        state = "up"
        while True:
            if self._seen is not None and self._keeper.starts_again:
                state = "starting again"
                break
            self._wait_up()
            try:
                self._seen = opened(ask_once(self.address, {"op": "status"}))["status"]
                break
            except ServiceLost:
                time.sleep(ASK_AGAIN_S)
        why = self._seen.get("failed")
        about = {"pid": self.pid, "restarts": self.restarts, "state": "failed" if why else state, "why": why}
        return {"hosts": [], "faults": []} | self._seen | {"service": about, "restarts": self.restarts}

    def close(self) -> None:
        """End the service and remove everything it had."""
        self._finalizer()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Ask the service; every message may be asked twice, so who is interrupted by its death asks again."""
        while True:
            self._wait_up()
            try:
                reply = ask_once(self.address, message)
            except ServiceLost:
                time.sleep(ASK_AGAIN_S)
                continue
            if reply.get("error") == Rewound.__name__:
                time.sleep(ASK_AGAIN_S)
                continue
            return opened(reply)

    def _wait_up(self) -> None:
        """Wait until the service runs; raise why it will not."""
        if not self._finalizer.alive:
            raise ClosedError("the service is closed; launch it again.")
        self._keeper.wait_up()


def ray_service(job: Job, options: LaunchOptions, progress: Progress | None) -> ServiceProcess:
    """Start a service on a Ray cluster.

    Raises:
        SpecError: when Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise SpecError(
            "launch: runtime is 'ray', and Ray is not installed; nothing could run. Install it with "
            "`pip install 'overlord-data[ray]'`, or use runtime='local' on one host."
        )
    return ServiceProcess(
        "overlord.runtimes.transport.ray_cluster", job, options, progress, close_s=RAY_CLOSE_S, environment=RAY_WORDS
    )


def _service_folder() -> Path:
    """Make a folder whose sockets have short paths: the kernel takes no more than 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="overlord-"))
    if len(os.fsencode(folder)) <= 40:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="overlord-", dir="/tmp"))
