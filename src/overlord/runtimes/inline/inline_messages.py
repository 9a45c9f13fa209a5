"""Messages between roles of one process, what may become of them, and the time they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from overlord.runtimes.inline.inline_means import StoreFailure
from overlord.runtimes.transport.frames import Frame
from overlord.runtimes.transport.switchboard import Sender


class Clock(Protocol):
    """Seconds that pass only when somebody sleeps."""

    def now(self) -> float:
        """Return the seconds so far."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        ...


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one message."""

    lost: bool = False
    """It never arrives."""
    answer_lost: bool = False
    """It arrives, and its answer does not."""
    twice: bool = False
    """It arrives twice: the second one late, where there is a delay."""
    delay_s: float = 0.0
    """It arrives late, perhaps behind later ones."""
    kills: Literal["", "before", "after"] = ""
    """Who gets it dies of it: before the work, or between the work and the answer."""
    everybody: bool = False
    """The whole service dies of it, not only who gets it."""
    fails: StoreFailure = ""
    """How it fails, where it is not a message but something that is done to a store."""


DELIVERED = Fate()


class Weather(Protocol):
    """Decides what happens to messages, and what happens as time passes."""

    def fate(self, sender: str, to: str, method: str) -> Fate:
        """Return what becomes of a message."""
        ...

    def apart(self, one: str, other: str) -> bool:
        """Whether nothing gets from one to the other at the moment."""
        ...

    def passing(self) -> None:
        """Learn that time has passed."""
        ...


class Gone(BaseException):
    """Unwinds a role that was killed in the middle of what it did."""


@dataclass(slots=True, eq=False)
class Letter:
    """A message on its way."""

    method: str
    frame: Frame
    blob: Any
    sender: Sender
    work: Callable[[], Frame] | None = None
    """What is done instead of calling a method."""
    answer: Frame | None = None
    gone: str | None = None
    fate: Fate = DELIVERED
