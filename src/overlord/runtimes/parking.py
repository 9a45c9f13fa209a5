"""What a runtime does about a source that cannot be read: waits for promised samples, looks whether it is back.

Rules of this file:
1. The clock is here and not in the roles. What follows from it is a journaled change, so that a replay needs no clock.
2. A sample that was planned stays promised: whoever must hand it over keeps trying.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from overlord.errors import ReaderError, SourceError, SpecError
from overlord.job.launch_words import OnSourceFailure
from overlord.roles.planner import Planner

logger = logging.getLogger("overlord")

RETURN_S = 30.0
"""How long after it was parked a source is looked at; twice as long after each look that found it away."""
LONGEST_S = 600.0
TRY_EVERY_S = 1.0
"""How often promised samples are tried again."""
WARN_EVERY_S = 60.0

T = TypeVar("T")


class Patience:
    """Tries again and again to read what is promised, until it is told to give up."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def until_read(self, read: Callable[[], T]) -> T:
        """Return what a reader gives, whenever that is.

        Raises:
            ReaderError: when the service ends before.
        """
        warn_at = 0.0
        while True:
            try:
                return read()
            except (ReaderError, SourceError) as error:
                if self._ended.is_set():
                    raise
                if time.monotonic() >= warn_at:
                    warn_at = time.monotonic() + WARN_EVERY_S
                    logger.warning("samples that are promised cannot be read, and are waited for: %s", error)
                self._ended.wait(TRY_EVERY_S)

    def end(self) -> None:
        """Give up waiting."""
        self._ended.set()


class ReturnWatch:
    """Looks now and then whether parked sources can be read again, and lets them return."""

    def __init__(self, planner: Planner, policy: OnSourceFailure) -> None:
        self._planner = planner
        self._policy = policy
        self._next_look: dict[str, tuple[float, float]] = {}
        self._told: set[str] = set()

    def due(self) -> list[str]:
        """Return the parked sources that it is time to look at; tell of those that were parked since the last call."""
        parked = {
            name: one for name, one in self._planner.sources.parked(self._planner.next_step).items() if one.failed
        }
        for name in parked.keys() - self._told:
            ends = "It returns when it can be read." if self._policy == "park" else "It returns by return_source."
            logger.warning(
                "source %r is parked from step %d on, the others take its share: %s. %s",
                name, parked[name].since, parked[name].why, ends,
            )  # fmt: skip
        self._told = set(parked)
        now = time.monotonic()
        known = self._next_look
        self._next_look = {name: known.get(name, (now + RETURN_S, RETURN_S)) for name in parked}
        return [name for name, (at, _) in self._next_look.items() if at <= now] if self._policy == "park" else []

    def looked(self, name: str, found: bool) -> None:
        """Let a source return that can be read again; otherwise look again later."""
        pause = min(2 * self._next_look.get(name, (0.0, RETURN_S))[1], LONGEST_S)
        self._next_look[name] = (time.monotonic() + pause, pause)
        if found and name in self._planner.sources.parked(self._planner.next_step):
            try:
                step = self._planner.sources.give_back(name)
            except SpecError as error:  # somebody has said otherwise for that very step
                logger.warning("source %r can be read again and does not return: %s", name, error)
                return
            logger.warning("source %r can be read again: it returns at step %d", name, step)

    def look(self) -> None:
        """Look at everything that is due, in the caller."""
        for name in self.due():
            self.looked(name, self._planner.can_read(name))
