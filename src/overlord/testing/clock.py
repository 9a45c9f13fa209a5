"""A clock that stands still until somebody sleeps."""

from __future__ import annotations

from overlord.runtimes.transport.direct import Clock


class FakeClock(Clock):
    """Seconds that pass only when somebody sleeps: what takes minutes is tested in no time.

    Example:
        >>> clock = FakeClock()
        >>> clock.sleep(90.0)
        >>> clock.now()
        90.0
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Return the seconds so far."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let time pass; it never goes back."""
        self._now += max(0.0, seconds)
