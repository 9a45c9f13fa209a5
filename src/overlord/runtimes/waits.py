"""How long the trainers of a host waited for their batches: the sign that loaders cannot keep up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class WaitMeter:
    """Seconds in which anybody waited; asked under the lock of whoever it belongs to.

    Example:
        >>> now, changed = iter([10.0, 13.0]), threading.Condition()
        >>> meter = WaitMeter(lambda: next(now))
        >>> with changed:
        ...     meter.wait(changed, 0.001)
        >>> meter.seconds()
        3.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting = 0
        self._since = 0.0
        self._before = 0.0

    def wait(self, changed: threading.Condition, timeout_s: float | None = None) -> None:
        """Wait until something has changed, and count the time."""
        if not self._waiting:
            self._since = self._clock()
        self._waiting += 1
        try:
            changed.wait(timeout_s)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._before += self._clock() - self._since

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._before + (self._clock() - self._since if self._waiting else 0.0)
