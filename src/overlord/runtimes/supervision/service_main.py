"""What every service process does: reads the job from its launcher's pipe, serves, and ends with that pipe.

Rules of this file:
1. Standard input holds the folder, the descriptor that keeps it, and the bundle, and then nothing until the end.
2. Standard output holds one JSON line an event: progress, alive (as long as it is starting), ready, error. Whatever is
   printed goes to the log.
3. A launcher that closes the service writes one byte first. The end of the input without it is the end of the launcher
   itself, and clients are told that instead.
4. The folder is the launcher's. It is removed when launcher and service are both gone, also by a SIGKILL: each holds
   one end of a pipe, and a shell waits for its last holder (`cleanup.remove_when_gone`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from overlord.errors import OverlordError, Rewound, ServiceLost
from overlord.runtimes.launching.deployment import Progress
from overlord.runtimes.supervision.child import LIMITS
from overlord.runtimes.supervision.cleanup import raise_file_limit

ALIVE_EVERY_S = 1.0
"""How often a process that starts gives a sign of life."""
SERVED = "serving steps"
"""The name of the progress event for a step that a client has come to."""
REWOUND = "going back"
"""That of a process that ends because all ranks go back to an earlier step: it is started again."""
CLOSED = b"c"
"""What a launcher writes that closes the service."""

Serving = Callable[[bytes, Path, Progress], AbstractContextManager[str]]
"""Starts what a bundle describes; the context gives the address, and its end is the end of the service. An
OverlordError that is raised in the context ends there: clients that wait are told it, by default a ClosedError."""


def settle_in() -> None:
    """Set up a process that roles run in."""
    # A decoder that comes back from C waits for the interpreter; the default interval costs it up to 5 ms.
    sys.setswitchinterval(0.0005)
    logging.basicConfig(format="overlord: %(levelname)s: %(message)s", level=logging.WARNING)
    raise_file_limit()
    wanted = os.environ.get("OVERLORD_LOG", "").upper()
    if wanted in logging.getLevelNamesMapping():
        logging.getLogger("overlord").setLevel(wanted)


def run_service(serving: Serving) -> None:
    """Be the service process of a launcher."""
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever prints from here on goes to the log, not into the protocol
    settle_in()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's, which closes the pipe

    def tell(event: dict[str, Any]) -> None:
        try:
            events.write(json.dumps(event).encode() + b"\n")
        except BrokenPipeError:
            pass  # the launcher is gone; the end of the input pipe is seen below

    given = _read_bundle(sys.stdin.buffer)
    if given is None:
        return
    folder, keeps_folder, bundle = given
    os.set_inheritable(keeps_folder, False)  # it must end with this process, and not with one that this one starts
    end = _End()

    def progress(what: str, done: int, of: int) -> None:
        tell({"progress": (what, done, of)})
        if what == REWOUND:
            end.come(Rewound("the service goes back to an earlier step and is being started again; ask again"))

    try:
        with _signs_of_life(tell) as stop, serving(bundle, folder, progress) as address:
            stop()  # from now on heartbeats are answered
            end.listen()  # an engine may have taken the signals for itself
            tell({"ready": address, "pid": os.getpid()})
            end.wait()
            if end.why is not None:
                raise end.why
    except OverlordError as error:
        tell({"error": type(error).__name__, "message": str(error)})


@contextmanager
def _signs_of_life(tell: Callable[[dict[str, Any]], None]) -> Iterator[Callable[[], None]]:
    """Write every second that this process lives, as long as it has no socket that could be asked."""
    ready = threading.Event()

    def tick() -> None:
        tell({"alive": True})
        while not ready.wait(ALIVE_EVERY_S):
            tell({"alive": True})

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield ready.set
    finally:
        ready.set()
        thread.join()


class _End:
    """Comes when the launcher closes the service or is gone, or with a SIGTERM."""

    def __init__(self) -> None:
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
        signal.signal(signal.SIGTERM, lambda *_: self.come(ended))

    def come(self, why: OverlordError | None) -> None:
        """Let it come."""
        self.why = why
        os.write(self._stop, b"!")

    def wait(self) -> None:
        """Wait for it."""
        os.read(self._stopped, 1)

    def _watch_launcher(self) -> None:
        # The descriptor, not sys.stdin: a thread inside its lock would abort the interpreter's end after a SIGTERM.
        closed = os.read(0, 1) == CLOSED
        gone = ServiceLost(
            f"the process that launched the service is gone, and process {os.getpid()}, which served, ends with it; no "
            "more data will come. Launch again with state='latest', or from your last checkpoint."
        )
        self.come(None if closed else gone)
        time.sleep(LIMITS.orphaned_service)
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
