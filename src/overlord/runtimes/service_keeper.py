"""Keeps a service process up: starts it, listens to its heart, and starts it again when it dies or hangs.

Rules of this file:
1. One thread watches what the process says, whether it lives, and whether it answers. It knows nothing of the
   `ServiceProcess` it works for, whose end ends it.
2. A deliberate end stays: `close()`, a SIGTERM to the service, the end of the launcher. So does the end of a service
   that says an error of its own: it would say it again.
3. The folder is there exactly as long as the service may come back, or a file in it says why it will not.
4. There is one process at a time: the last one is gone for good before the next is started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from overlord.errors import ClosedError, Fenced, OverlordError, ServiceLost, StoreError
from overlord.runtimes.barrier import write_failure
from overlord.runtimes.incarnation import Incarnation, Pulse
from overlord.runtimes.leftovers import remove_when_gone
from overlord.runtimes.opening import Progress

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
