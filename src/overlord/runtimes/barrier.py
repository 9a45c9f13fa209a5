"""Where a client waits for a service that may come back: how long, what it says meanwhile, and when it gives up.

Rules of this file:
1. The folder of a service is there as long as somebody will start it again. A client waits as long as that, and no
   longer; of a cluster's folder, which goes with the constructor host of this machine, it also waits for the return.
2. What a service was given up for is written in its folder; whoever waits raises it.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from overlord.errors import OverlordError, ServiceLost, error_named
from overlord.runtimes.doors import path_of

FAILED = "failed"
"""The file in a service's folder that says why it will not come back."""
RETURN_S = 30.0
"""How long the folder of a cluster's host may be away."""
FIRST_WARNING_S = 5.0
NEXT_WARNING_S = 30.0
PAUSES_S = (0.02, 0.5)
"""The first and the longest pause between two attempts."""

logger = logging.getLogger("overlord")


class Barrier:
    """One wait of a client for its service."""

    def __init__(self, address: str, *, several_doors: bool, what: str) -> None:
        """Begin to wait.

        Args:
            address: The service's.
            several_doors: Whether the address is a folder with the doors of a cluster's host.
            what: What the client wants, for the warnings.
        """
        self._address = address
        self._several = several_doors
        self._what = what
        path = path_of(address)
        self._folder = path if several_doors else path.parent
        self._began = self._seen = time.monotonic()
        self._warn_at = self._began + FIRST_WARNING_S
        self._pause_s = PAUSES_S[0]

    @property
    def waited_s(self) -> float:
        """How long it has been."""
        return time.monotonic() - self._began

    def wait(self, error: Exception) -> None:
        """Wait a moment before the next attempt.

        Args:
            error: What the last attempt met.

        Raises:
            ServiceLost: when the service will not come back.
            OverlordError: what it was given up for, as its launcher wrote it down.
        """
        failed = why_it_failed(self._folder)
        if failed is not None:
            raise failed
        now = time.monotonic()
        if self._folder.exists():
            self._seen = now
        elif not self._several or now - self._seen > RETURN_S:
            raise ServiceLost(
                f"the service at {self._address} is gone ({error}); no more data will come. Why stands on the "
                "standard error of the process that launched it. Launch again from the last state."
            ) from error
        if now >= self._warn_at:
            self._warn_at = now + NEXT_WARNING_S
            logger.warning(
                "%s waits for the service at %s since %.0f s; its launcher should be starting it again (%s)",
                self._what, self._address, self.waited_s, error,
            )  # fmt: skip
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSES_S[1])


def write_failure(folder: Path, error: OverlordError) -> None:
    """Write down why a service will not come back; the file appears whole or not at all."""
    scratch = folder / f"{FAILED}.tmp"
    scratch.write_text(json.dumps({"error": type(error).__name__, "message": str(error)}), encoding="utf-8")
    scratch.replace(folder / FAILED)


def why_it_failed(folder: Path) -> OverlordError | None:
    """Return why the service of a folder will not come back, if that is so.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> why_it_failed(folder)
        >>> write_failure(folder, ServiceLost("it died six times"))
        >>> why_it_failed(folder)
        ServiceLost('it died six times')
    """
    try:
        told = json.loads((folder / FAILED).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return error_named(told["error"], told["message"])
