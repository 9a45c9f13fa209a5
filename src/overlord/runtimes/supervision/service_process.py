"""The service process: as its launcher sees it (started, watched, started again, called, ended), and what runs in it.

How it works: `ServiceSupervisor` starts the process and sends it the job on its standard input. Until the process has
an address, the lines it writes on its standard output are its signs of life; from then on a heartbeat over a connection
of its own asks for them. One thread waits for all of it, and kills a process that is silent for too long. When the
process ends, `_is_over` decides: a deliberate end stays, and so does an error that the service itself reported, since
it would report it again; otherwise the process is started again, until five restarts in a row served no new step.

Rules of this file:
1. Nothing here waits for the process without a limit: one that is stopped neither reads nor writes.
2. A deliberate end stays: `close()`, a SIGTERM to the service, the end of the launcher.
3. The folder is there exactly as long as the service may come back, or a file in it says why it will not.
4. There is one process at a time: the last one is gone before the next is started.
5. The watching thread has no reference to the `ServiceProcess`, whose end ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import logging
import math
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from overlord.core.client_messages import Beat, Failure, GetStatus, Request
from overlord.core.messages import ServiceOptionsKept, ServiceProgress, ServiceReady, ServiceStarts
from overlord.errors import ClosedError, Fenced, OverlordError, Rewound, ServiceLost, SpecError, StoreError, pip_install
from overlord.job.specs import Job
from overlord.roles.client import Client
from overlord.runtimes.client_feed import STARTING, ask_once, connect, write_failure, write_start
from overlord.runtimes.launching.service_options import KeepOptions, Progress, ServiceOptions, pack
from overlord.runtimes.supervision.child import (
    LIMITS,
    Backoff,
    ChildProcess,
    Limits,
    Liveness,
    Restarts,
    is_stopped,
    name_process,
)
from overlord.runtimes.supervision.cleanup import set_up_process
from overlord.runtimes.supervision.early_start import start_service, take_started
from overlord.runtimes.transport.codec import error_of, failure_of, raised, receive, send
from overlord.runtimes.transport.file_limits import out_of_files
from overlord.runtimes.transport.listener import connect_socket

R = TypeVar("R")

logger = logging.getLogger("overlord")

BEAT_EVERY_S = 1.0
"""How often a service that has an address is asked for a heartbeat."""
LOOK_EVERY_S = 0.5
"""How often the watching thread looks at the process when nothing happens."""
MOST_RESTARTS = 5
"""Restarts in a row without a new step served, after which a service is given up."""
ALIVE_EVERY_S = 1.0
"""How often a service process that starts gives a sign of life."""
SERVED = "serving steps"
"""The name of the progress event for a step that a client has come to."""
REWOUND = "going back"
"""That of a process that ends because all ranks go back to an earlier step: it is started again."""
REASON_LINES = 6
"""Lines of the traceback of a failed start that its launcher is told."""
CLOSED = b"c"
"""What a launcher writes that closes the service."""
RAY_ENVIRONMENT = {
    "RAY_DEDUP_LOGS": "0", "RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
}  # fmt: skip
"""Ray takes lines that differ in numbers for repetitions, but two bad samples are two; it gives actors less of a busy
CPU than other processes; it warns of its plans; and any call after its end starts another cluster."""
OWN_CLUSTER = {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Of a cluster that is started for one service on one host: requests need a token, and with this switch (the default on
macOS and Windows) Ray listens on the loopback address; otherwise it listens on all addresses of the host."""
LEAST_RAY = (2, 52)
"""The first version whose ports can ask for a token; before, whatever reached one could run code as the user."""


ServiceEvent = ServiceStarts | ServiceProgress | ServiceReady | ServiceOptionsKept | Failure
_events = msgspec.json.Decoder(ServiceEvent)

Serving = Callable[[bytes, Path, Progress, KeepOptions], AbstractContextManager[str]]
"""Starts what a bundle describes; the context gives the address, and its end is the end of the service. An
OverlordError that is raised in the context ends there: clients that wait are told it, by default a ClosedError."""


@dataclass(frozen=True, slots=True)
class StartOrder:
    """How a service process is started."""

    module: str
    environment: Mapping[str, str]
    first: bytes
    """The job and the options for the first process."""
    again: Callable[[Mapping[str, Mapping[str, Any]]], bytes]
    """Returns those for a process that replaces one that died, from the storage options that it had been given."""
    close_s: float
    """How long it may take to close before it is killed."""
    limits: Limits


class ServiceChild(ChildProcess):
    """One service process, from its start to its end.

    Args:
        keeps_folder: The pipe whose end removes the folder; the process holds it too.
        started: The process, where it waits for its job already.
    """

    def __init__(
        self, order: StartOrder, bundle: bytes, folder: Path, keeps_folder: int,
        started: subprocess.Popen[bytes] | None = None,
    ) -> None:  # fmt: skip
        self._process = started or start_service(order.module, order.environment, keeps_folder)
        self._folder, self._again = folder, bundle is not order.first
        self._noted_at = -math.inf
        super().__init__(self._process.pid)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._into, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        for fd in (self._into, self._out):
            os.set_blocking(fd, False)
        parts = (os.fsencode(folder), str(keeps_folder).encode(), bundle)
        self._to_send = memoryview(b"".join(struct.pack("<Q", len(part)) + part for part in parts))
        self._received = b""
        self._limits = order.limits
        self._ready_at = self._ended_at = 0.0
        self._heartbeat: socket.socket | None = None
        self._beat_asked, self._beat_due = False, 0.0
        self.liveness = Liveness(
            order.limits.service_first_sign, order.limits.service_starting_silence, time.monotonic()
        )
        self.address: str | None = None
        """Where it serves, when it does."""
        self.error: OverlordError | None = None
        """The error for which it cannot go on, as it reported it."""
        self.served = -1
        """The newest step that a client is known to have come to."""
        self.kept: dict[str, Mapping[str, Any]] = {}
        """Storage options of sources that were added while it ran."""
        self.rewound = False
        """Whether it ends because all ranks go back to an earlier step."""
        self.doing: str | None = None
        """What it does while it starts; None when it serves."""
        self._note_start("its process loads what it needs")

    @property
    def lived_s(self) -> float:
        """How long it served before it ended."""
        return self._ended_at - self._ready_at if self._ready_at else 0.0

    @property
    def was_asked_to_end(self) -> bool:
        """Whether it ended because it was asked to."""
        return not self.killed_for and self.code in (0, -signal.SIGTERM)

    def exchange(self, timeout_s: float, others: Sequence[int], progress: Progress | None) -> None:
        """Send what is left to send, and read what it writes, when something happens or the time is over.

        Args:
            others: Further descriptors that may become readable.
        """
        if self.ended is not None:
            return
        poll = select.poll()  # `select.select` takes no descriptor beyond 1023
        beat = self._heartbeat.fileno() if self._heartbeat is not None and self._beat_asked else -1
        for fd in (self._out, *others, *([beat] if beat >= 0 else [])):
            poll.register(fd, select.POLLIN)
        if self._to_send:
            poll.register(self._into, select.POLLOUT)
        happened = dict(poll.poll(1000 * timeout_s))
        if beat in happened:
            self._receive_heartbeat()
        if self._into in happened:
            self._send()
        if self._out in happened:
            self._read(progress)
        if self.ended is None and self._process.poll() is not None:
            self._read(progress)  # its children may hold its output open; what it wrote is there
            self.note_end(self._process.returncode)

    def kill_if_it_hangs(self, now: float) -> None:
        """Kill it when it has been silent for too long."""
        starting = self.address is None
        # One that is stopped by a signal while its interpreter starts is not given the time that a busy host takes.
        limit_s = self._limits.service_starting_silence if starting and is_stopped(self.pid) else None
        if self.liveness.hangs(now, limit_s=limit_s):
            while_it = " while it started, and was killed" if starting else " and was killed"
            self.kill(f"hung for {self.liveness.silent_s(now):.1f} s{while_it}")

    def ask_for_heartbeat(self, now: float) -> None:
        """Ask it for a sign of life once a second, when it has an address."""
        if self.address is None or self._beat_asked or now < self._beat_due:
            return
        self.liveness.expect(now)
        self._beat_due = now + BEAT_EVERY_S
        try:
            if self._heartbeat is None:
                self._heartbeat = connect_socket(self.address)
                self._heartbeat.settimeout(self._limits.role_silence)
            send(self._heartbeat, Beat())
            self._beat_asked = True
        except (OSError, ServiceLost):
            self._close_heartbeat()  # it is tried again with the next one
        except OverlordError as error:  # this process has no descriptor left, which says nothing of the service
            logger.warning("%s", error)
            self.liveness.excuse(now)

    def end(self, wait_s: float) -> None:
        """Close the pipe that keeps it alive; kill it if it is not gone in time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if not self._to_send:
            with contextlib.suppress(OSError):  # it is gone already
                os.write(self._into, CLOSED)
        self._process.stdin.close()
        self._process.stdout.close()
        if self._process.poll() is None and wait_s:
            self._process.send_signal(signal.SIGCONT)  # one that was stopped can only end when it runs
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
                self._process.wait(wait_s)
        self._process.kill()
        self.note_end(self._process.wait())

    def note_end(self, code: int | None) -> None:
        """Note that it has ended, and when."""
        self._ended_at = self._ended_at or time.monotonic()
        self._close_heartbeat()
        super().note_end(code)

    def _receive_heartbeat(self) -> None:
        assert self._heartbeat is not None
        try:
            receive(self._heartbeat)
            self.liveness.heard(time.monotonic(), expect=False)
            self._beat_asked = False
        except (OSError, ServiceLost):
            self._close_heartbeat()

    def _close_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._heartbeat, self._beat_asked = None, False

    def _send(self) -> None:
        try:
            self._to_send = self._to_send[os.write(self._into, self._to_send) :]
        except BlockingIOError:
            pass  # it is tried again when there is room
        except BrokenPipeError:
            self._to_send = memoryview(b"")  # it died while starting; its end says how

    def _read(self, progress: Progress | None) -> None:
        try:
            part = os.read(self._out, 1 << 16)
        except BlockingIOError:
            return
        if not part:
            try:
                self._process.wait(self._limits.last_output)
            except subprocess.TimeoutExpired:
                self.kill("closed its output and was killed")
            self.note_end(self._process.wait())
            return
        now = time.monotonic()
        if self.address is None:
            self.liveness.heard(now)
        *lines, self._received = (self._received + part).split(b"\n")
        for line in lines:
            self._take(_events.decode(line), now, progress)

    def _take(self, event: ServiceEvent, now: float, progress: Progress | None) -> None:
        if isinstance(event, ServiceReady):
            self.address, self._ready_at, self.doing = event.address, now, None
            (self._folder / STARTING).unlink(missing_ok=True)
            self.liveness = Liveness(self._limits.service_silence, self._limits.service_silence, now)
            self.liveness.heard(now, expect=False)  # the heartbeat asks from now on
        elif isinstance(event, Failure):
            self.error = error_of(event)
        elif isinstance(event, ServiceOptionsKept):
            self.kept[event.name] = event.options
        elif isinstance(event, ServiceProgress):
            if event.what == SERVED:
                self.served = max(self.served, event.done)
            elif event.what == REWOUND:
                self.rewound = True
            else:
                self._note_start(f"{event.what}, {event.done:,} of {event.of:,}" if event.of > 1 else event.what)
                if progress is not None:
                    progress(event.what, event.done, event.of)

    def _note_start(self, doing: str) -> None:
        """Note what it does while it starts, also for clients that wait for it; they look now and then."""
        if self.address is not None:
            return
        changed = self.doing is None or self.doing.partition(",")[0] != doing.partition(",")[0]
        self.doing = doing
        if changed or time.monotonic() - self._noted_at > LOOK_EVERY_S:
            self._noted_at = time.monotonic()
            with contextlib.suppress(OSError):  # a disk that is full: clients learn less
                write_start(self._folder, doing, again=self._again)


class ServiceSupervisor:
    """The process of one service, and those that replace it."""

    def __init__(self, order: StartOrder) -> None:
        self._order = order
        started = take_started(order.module, order.environment)
        self._folder, self._keeps_folder = started.folder, started.keeps_folder
        self._changed = threading.Condition()
        self._up = self._closing = False
        self._closed = threading.Event()
        self._ended: OverlordError | None = None
        self._wake_reader, self._wake = os.pipe()
        self._thread: threading.Thread | None = None
        self._restarts = Restarts(MOST_RESTARTS, order.limits.service_steady)
        self._backoff = Backoff(1.0, 5.0, self._sleep)
        self._served = -1
        self._kept: dict[str, Mapping[str, Any]] = {}
        self._process = self._start(order.first, started.process)

    @property
    def pid(self) -> int:
        """The process that serves now, or the last one that did."""
        return self._process.pid

    @property
    def restarts(self) -> int:
        """How often the process was started again."""
        return self._restarts.count

    @property
    def doing(self) -> str | None:
        """What a process that starts is doing."""
        return self._process.doing

    @property
    def starts_again(self) -> bool:
        """Whether the process is gone, and is being replaced."""
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
            process.kill_if_it_hangs(time.monotonic())
            process.exchange(LOOK_EVERY_S, [], progress)
        self._up = True
        self._thread = threading.Thread(target=self._watch, name="overlord-service-supervisor", daemon=True)
        self._thread.start()
        return process.address

    def wait_up(self) -> None:
        """Wait until the service runs.

        Raises:
            ClosedError: when it was closed.
            OverlordError: when it will not run again: the error that it reported.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._up or self._closing or self._ended is not None)
            if self._closing:
                raise ClosedError("the service is closed; launch it again.")
            if self._ended is not None:
                raise type(self._ended)(*self._ended.args)  # a fresh one: tracebacks of several callers must not mix

    def close(self) -> None:
        """End the service and remove everything it had."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        try:
            os.write(self._wake, b"!")
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()
            self._process.end(self._order.close_s)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._keeps_folder.close()
            os.close(self._wake)
            os.close(self._wake_reader)
        finally:
            self._closed.set()

    def wait_closed(self) -> None:
        """Wait for a `close` that another thread began; not for ever, since that thread may be this one."""
        self._closed.wait(self._order.close_s)

    def _start(self, bundle: bytes, started: subprocess.Popen[bytes] | None = None) -> ServiceChild:
        return ServiceChild(self._order, bundle, self._folder, self._keeps_folder.fileno(), started)

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)

    # -- watching ------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing:
            self._follow(self._process)
            if self._closing or self._is_over(self._process):
                return
            self._restart()

    def _follow(self, process: ServiceChild) -> None:
        """Return when a process is gone, having killed it if it hangs."""
        limits = self._order.limits
        looked_at = time.monotonic()
        ends_at: float | None = None
        while not self._closing and process.ended is None:
            now = time.monotonic()
            if now - looked_at > limits.away:
                process.liveness.excuse(now)
            looked_at = now
            if process.rewound:
                # Its state is on disk: one that takes long to end is killed, as trainers wait for the next one.
                ends_at = ends_at or now + limits.rewind
                if now > ends_at:
                    process.kill("took long to end and was killed")
            else:
                process.kill_if_it_hangs(now)
                process.ask_for_heartbeat(now)
                self._note_up(process)
            process.exchange(LOOK_EVERY_S, [self._wake_reader], None)

    def _note_up(self, process: ServiceChild) -> None:
        if not self._up and process.address is not None:
            self._backoff.reset()
            with self._changed:
                self._up = True
                self._changed.notify_all()
            logger.warning("the service runs again, as process %d; nothing of the stream is lost", process.pid)

    def _is_over(self, process: ServiceChild) -> bool:
        """Whether the service does not come back: it was ended, it reported an error, or it dies again and again."""
        with self._changed:
            self._up = False
        restarts = self._restarts
        if process.rewound and process.error is None:  # it ended to begin again at an earlier step
            restarts.failed("all ranks went back to an earlier step", progress=True)
            self._served = -1
            return False
        if restarts.count and _may_pass(process.error):  # a store that is away comes back; a role may die once more
            logger.warning("the service could not be started again: %s. It is tried once more", process.error)
            store_is_away = isinstance(process.error, StoreError)
            restarts.failed(str(process.error), progress=store_is_away)
            if store_is_away:
                self._backoff.reset()
            self._backoff.pause()
            if not restarts.exhausted:
                return False
        if process.error is not None:
            why = str(process.error)
            if restarts.count:
                why = f"the service died ({restarts.failures[-1]}) and cannot be started again: {why}"
            self._give_up(type(process.error)(why))
        elif process.was_asked_to_end:
            shutil.rmtree(self._folder, ignore_errors=True)  # so that no client waits for it
            self._end(
                ServiceLost(
                    f"the service process {process.pid} was ended by a SIGTERM; no more data will come. Launch again "
                    "from the last state."
                )
            )
        else:
            restarts.failed(process.ended or "is gone", process.lived_s, progress=process.served > self._served)
            self._served = max(self._served, process.served)
            if not restarts.exhausted:
                return False
            self._give_up(
                ServiceLost(
                    f"the service process ended {len(restarts.failures)} times in a row without serving a new step "
                    f"({'; '.join(restarts.failures)}), and is not started again; no more data will come. Its messages "
                    "stand on the standard error of the launcher; if it was killed, the host may be out of memory. "
                    "Launch again from the last state when that is mended."
                )
            )
        return True

    def _restart(self) -> None:
        self._restarts.count += 1
        if not self._process.rewound:
            logger.warning(
                "the service process %d %s; it is started again (restart %d), and clients wait for it",
                self._process.pid, self._process.ended, self.restarts,
            )  # fmt: skip
        self._process.end(0.0)
        self._kept |= self._process.kept
        try:
            self._process = self._start(self._order.again(self._kept))
        except OSError as error:
            self._process.ended = f"could not be started again ({error})"
            self._sleep(LOOK_EVERY_S)

    def _give_up(self, error: OverlordError) -> None:
        logger.error("%s", error)
        try:
            write_failure(self._folder, error)
        except OSError as failed:  # clients must not wait for a file that cannot be written
            logger.error("clients in %s cannot be told this: %s", self._folder, failed)
            shutil.rmtree(self._folder, ignore_errors=True)
        self._end(error)

    def _end(self, error: OverlordError) -> None:
        with self._changed:
            self._ended = error
            self._changed.notify_all()


def _may_pass(error: OverlordError | None) -> bool:
    """Whether the error that kept a service from starting again may be over the next time."""
    if isinstance(error, StoreError):
        return not isinstance(error, Fenced)
    return isinstance(error, ServiceLost) or type(error) is OverlordError


class ServiceProcess:
    """A service whose process was started by this one, and is started again when it dies or hangs."""

    def __init__(
        self,
        module: str,
        job: Job,
        options: ServiceOptions,
        progress: Progress | None,
        *,
        close_s: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:

        def again(kept: Mapping[str, Mapping[str, Any]]) -> bytes:
            given = {**options.source_options, **kept}
            return pack(job, dataclasses.replace(options, recover=True, source_options=given))

        limits = Limits(options.heartbeat_s)
        close_s = close_s or limits.service_close
        order = StartOrder(module, environment or {}, pack(job, options), again, close_s, limits)
        try:
            self._supervisor = ServiceSupervisor(order)
        except OSError as error:
            raise out_of_files(error, "no service process can be started") or error from error
        self._seen: dict[str, Any] | None = None
        self._finalizer = weakref.finalize(self, self._supervisor.close)
        try:
            self.address = self._supervisor.begin(progress)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The service's process id."""
        return self._supervisor.pid

    @property
    def restarts(self) -> int:
        """How often the service's process was started again."""
        return self._supervisor.restarts

    def client(self, rank: int, step: int | None = None) -> Client:
        """Return the client of one rank in this process."""
        self._wait_up()
        return connect(self.address, rank, step)

    def status(self) -> dict[str, Any]:
        """Return what every role holds and has met; while the service is started again, what was last seen of it.

        `["service"]["state"]` is "up", "starting again", or "failed" where a role cannot be replaced (`["why"]`).

        Raises:
            ServiceLost: when the service does not come back.
        """
        state, backoff = "up", Backoff(0.1, 1.0)
        while True:
            if self._seen is not None and self._supervisor.starts_again:
                state = "starting again"
                break
            self._wait_up()
            try:
                self._seen = raised(ask_once(self.address, GetStatus())).content
                break
            except ServiceLost:
                backoff.pause()  # by then its supervisor has noticed the end
        why = self._seen.get("failed")
        about = {"pid": self.pid, "restarts": self.restarts, "state": "failed" if why else state, "why": why}
        about |= {} if state == "up" else {"doing": self._supervisor.doing}
        return {"hosts": [], "faults": [], "waits": []} | self._seen | {"service": about, "restarts": self.restarts}

    def close(self) -> None:
        """End the service and remove everything it had; of two threads that close it, both return when it is gone."""
        self._finalizer()
        self._supervisor.wait_closed()

    def ask(self, request: Request[R]) -> R:
        """Call the service; calls are idempotent, so one that is interrupted by its death is made again."""
        backoff = Backoff(0.1, 1.0)
        while True:
            self._wait_up()
            with contextlib.suppress(ServiceLost):  # it is called again below
                reply = ask_once(self.address, request)
                if not isinstance(reply, Failure) or reply.error != Rewound.__name__:
                    return raised(reply)
            backoff.pause()

    def _wait_up(self) -> None:
        """Wait until the service runs; raise why it will not."""
        if not self._finalizer.alive:
            raise ClosedError("the service is closed; launch it again.")
        self._supervisor.wait_up()


def ray_service(job: Job, options: ServiceOptions, progress: Progress | None) -> ServiceProcess:
    """Start a service on a Ray cluster.

    Raises:
        SpecError: when Ray is not installed, or too old.
    """
    if importlib.util.find_spec("ray") is None:
        raise SpecError(
            "launch: runtime is 'ray', and Ray is not installed; nothing could run. Install it with "
            f"`{pip_install('ray')}`, or use runtime='local' on one host."
        )
    found = importlib.metadata.version("ray")
    if tuple(int(part) for part in found.split(".")[:2] if part.isdecimal()) < LEAST_RAY:
        least = ".".join(map(str, LEAST_RAY))
        raise SpecError(
            f"launch: runtime is 'ray', and Ray {found} is installed, whose ports cannot ask for a token: other "
            f"users of the network could run code as you. Install Ray {least} or newer, or use runtime='local' on one "
            "host."
        )
    environment = dict(RAY_ENVIRONMENT)
    if options.cluster is not None and options.cluster.address is None:
        # In the environment, which only this user can read; Ray itself would write a token that all users can read.
        environment |= OWN_CLUSTER | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return ServiceProcess(
        "overlord.runtimes.transport.ray_cluster", job, options, progress,
        close_s=Limits(options.heartbeat_s).ray_close, environment=environment,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------
# In the service process, which reads the job from its launcher's pipe, serves, and ends with that pipe.
#
# Standard input holds the folder, the descriptor that keeps it, and the bundle. A launcher that closes the service
# writes one byte more. The end of the input without it is the end of the launcher, and clients are told that instead.
# Standard output holds one JSON line for each `ServiceEvent`. Whatever is printed goes to the log. The folder is
# removed when launcher and service are both gone, also by a SIGKILL: each holds one end of a pipe, and a shell waits
# for its last holder (`cleanup.remove_when_gone`).


def run_service(serving: Serving, orphaned_s: float = LIMITS.orphaned_service) -> None:
    """Be the service process of a launcher.

    Args:
        serving: Serves the job.
        orphaned_s: How long the end may take if the launcher is gone. The next one waits for this process to leave the
            store.
    """
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever prints from here on goes to the log, not into the protocol
    set_up_process()
    name_process("service")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's, which closes the pipe

    def tell(event: ServiceEvent) -> None:
        try:
            events.write(msgspec.json.encode(event) + b"\n")
        except BrokenPipeError:
            pass  # the launcher is gone; the end of the input pipe is seen below

    given = _read_bundle(sys.stdin.buffer)
    if given is None:
        return
    folder, keeps_folder, bundle = given
    os.set_inheritable(keeps_folder, False)  # it must end with this process, and not with one that this one starts
    stopping = _StopRequest(orphaned_s)

    def progress(what: str, done: int, of: int) -> None:
        tell(ServiceProgress(what, done, of))
        if what == REWOUND:
            stopping.request(Rewound("the service goes back to an earlier step and is being started again; ask again"))

    ready = False

    def keep(name: str, options: Mapping[str, Any]) -> None:
        tell(ServiceOptionsKept(name, dict(options)))

    try:
        with _signs_of_life(tell) as started, serving(bundle, folder, progress, keep) as address:
            started()  # from now on heartbeats are answered
            stopping.listen()  # an engine may have taken the signals for itself
            tell(ServiceReady(address))
            ready = True
            stopping.wait()
            if stopping.why is not None:
                raise stopping.why
    except OverlordError as error:
        tell(failure_of(error))
    except Exception as error:
        if not ready:  # later it is a crash like any other, and the service is started again
            tell(failure_of(OverlordError(_reason_of_failed_start(error))))
        raise


def _reason_of_failed_start(error: Exception) -> str:
    """Return the last lines of an error that no part of the service expects."""
    lines = traceback.format_exc().strip().splitlines()[-REASON_LINES:]
    return (
        f"the service process {os.getpid()} failed while it started ({type(error).__name__}: {error}); nothing is "
        "served. Its log is on the standard error of the launcher, and ends with:\n" + "\n".join(lines)
    )


@contextmanager
def _signs_of_life(tell: Callable[[ServiceEvent], None]) -> Iterator[Callable[[], None]]:
    """Write every second that this process lives, as long as it has no socket that could be asked."""
    ready = threading.Event()

    def tick() -> None:
        tell(ServiceStarts())
        while not ready.wait(ALIVE_EVERY_S):
            tell(ServiceStarts())

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield ready.set
    finally:
        ready.set()
        thread.join()


class _StopRequest:
    """The request to stop: the launcher closes the service or is gone, a SIGTERM, or a rewind."""

    def __init__(self, orphaned_s: float) -> None:
        self._orphaned_s = orphaned_s
        self.why: OverlordError | None = None
        """What clients are told; None where the service was closed by its launcher."""
        # Not an Event: its lock may be held by the very thread that a signal interrupts, which would wait for itself.
        self._stopped, self._stop = os.pipe()
        self.listen()
        threading.Thread(target=self._watch_launcher, daemon=True).start()

    def listen(self) -> None:
        """Listen for SIGTERM."""
        ended = ServiceLost(
            f"the service process {os.getpid()} was ended by a SIGTERM; no more data will come. Launch again with "
            "state='latest', or from your last checkpoint."
        )
        signal.signal(signal.SIGTERM, lambda *_: self.request(ended))

    def request(self, why: OverlordError | None) -> None:
        """Have `wait` return."""
        self.why = why
        os.write(self._stop, b"!")

    def wait(self) -> None:
        """Wait for the request."""
        os.read(self._stopped, 1)

    def _watch_launcher(self) -> None:
        # The descriptor, not sys.stdin: a thread inside its lock would abort the interpreter's end after a SIGTERM.
        closed = os.read(0, 1) == CLOSED
        gone = ServiceLost(
            f"the process that launched the service is gone, and process {os.getpid()}, which served, ends with it; no "
            "more data will come. Launch again with state='latest', or from your last checkpoint."
        )
        self.request(None if closed else gone)
        time.sleep(LIMITS.closed_service if closed else self._orphaned_s)
        os._exit(1)  # something hangs; the kernel cleans up


def _read_bundle(pipe: BinaryIO) -> tuple[Path, int, bytes] | None:
    parts: list[bytes] = []
    for _ in range(3):
        head = pipe.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        parts.append(pipe.read(length))
        if not length or len(parts[-1]) < length:
            return None  # the launcher is gone
    return Path(os.fsdecode(parts[0])), int(parts[1]), parts[2]
