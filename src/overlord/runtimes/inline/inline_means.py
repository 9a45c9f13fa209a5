"""The means of a role that is an object of this process: no threads, a time of its own, and a store that may fail.

Rules of this file:
1. Whatever is done to a store may fail, or be the last thing the role does. Its files are closed then as the kernel
   closes them: what was written is there, and nothing else.
2. What is done to a store has a name that a test can speak of: "store.write", "store.append" and so on.
3. A write for which there is no room has written half of what it should have.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol

from overlord.errors import StoreError
from overlord.runtimes.hosts.cluster_role import Means
from overlord.runtimes.hosts.planner_host import Pace
from overlord.runtimes.hosts.prefetch import Executors, SerialWorkers
from overlord.runtimes.launching.deployment import IsolateReader
from overlord.storage import StorageOptions
from overlord.stores.places import Appender, Place, open_place
from overlord.transforms.samples.per_sample import Isolate, Workers

StoreFailure = Literal["", "store_errors", "full_disk"]
"""How a write to a store fails, if it does."""


class Touch(Protocol):
    """Lets a role do something to its store, which is told how it fails."""

    def __call__(self, what: str, work: Callable[[StoreFailure], Any]) -> Any:
        """Do it, unless whoever does it is killed before."""
        ...


class SerialMeans(Means):
    """The means of a role that has neither threads nor processes, and may be killed.

    Args:
        isolate: Stands in for process workers.
        pace: How it waits.
        touch: Does what the role does to its store.
    """

    def __init__(self, isolate: Isolate | None, pace: Pace, touch: Touch) -> None:
        self._isolate = isolate
        self._pace = pace
        self._touch = touch
        self._places: list[MortalPlace] = []

    def workers(self, count: int, name: str, ends: contextlib.ExitStack) -> Workers:
        return SerialWorkers()

    def hands(self, threads: int, lanes: int, ends: contextlib.ExitStack) -> Executors:
        return Executors.of_caller()

    def isolate(self, count: int, ends: contextlib.ExitStack) -> Isolate | None:
        return self._isolate

    def isolate_reader(self, threads: int, ends: contextlib.ExitStack) -> IsolateReader | None:
        return None

    def open_place(self, store: str, options: StorageOptions | None = None) -> Place:
        place = MortalPlace(open_place(store, options), self._touch)
        self._places.append(place)
        return place

    def pace(self) -> Pace:
        return self._pace

    def drop(self) -> None:
        """Let go of what the kernel lets go of when a process is killed."""
        for place in self._places:
            place.drop()


class InlinePace(Pace):
    """Waiting lets time pass for everybody."""

    threads = False

    def __init__(self, now: Callable[[], float], pass_time: Callable[[float], None]) -> None:
        self._now = now
        self._pass_time = pass_time

    def now(self) -> float:
        return self._now()

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        self._pass_time(seconds)
        return True


class MortalPlace:
    """A place that fails when a test says so.

    Args:
        place: The place itself.
        touch: Does everything that is done to it.
    """

    def __init__(self, place: Place, touch: Touch) -> None:
        self._place = place
        self._touch = touch
        self._open: list[Appender] = []
        self.name = place.name
        self.can_append = place.can_append

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        self._touch("store.write", self._or_fails(lambda: self._place.write(name, data)))

    def create(self, name: str, data: bytes) -> str | None:
        """Write a file that nobody has written."""
        return self._touch("store.create", self._or_fails(lambda: self._place.create(name, data)))

    def open_append(self, name: str) -> Appender:
        """Open a new file to append to."""

        def opened() -> Appender:
            appender = self._place.open_append(name)
            self._open.append(appender)
            return _MortalAppender(self, appender)

        return self._touch("store.open_append", self._or_fails(opened))

    def read(self, name: str) -> bytes | None:
        """Return what a file holds."""
        return self._touch("store.read", lambda failure: self._place.read(name))

    def exists(self, name: str) -> bool:
        """Whether somebody has created a file of this name."""
        return self._touch("store.exists", lambda failure: self._place.exists(name))

    def names(self, folder: str = "") -> dict[str, int]:
        """Return the names in a folder."""
        return self._touch("store.names", lambda failure: self._place.names(folder))

    def written_at(self, name: str) -> float | None:
        """Return when a file was written."""
        return self._touch("store.written_at", lambda failure: self._place.written_at(name))

    def delete(self, name: str) -> None:
        """Remove a file or a folder."""
        self._touch("store.delete", self._or_fails(lambda: self._place.delete(name)))

    def append(self, appender: Appender, data: bytes) -> None:
        """Append to a file; half of it where there is no room."""

        def put(failure: StoreFailure) -> None:
            if failure == "full_disk":
                appender.append(data[: len(data) // 2])
            self._or_fails(lambda: appender.append(data))(failure)

        self._touch("store.append", put)

    def let_go(self, appender: Appender) -> None:
        """Close a file."""
        if appender in self._open:
            self._open.remove(appender)
            appender.close()

    def drop(self) -> None:
        """Close what is open, as the kernel does when a process is killed."""
        while self._open:
            self._open.pop().close()

    def _or_fails(self, work: Callable[[], Any]) -> Callable[[StoreFailure], Any]:
        def done(failure: StoreFailure) -> Any:
            if not failure:
                return work()
            why = "No space left on device" if failure == "full_disk" else "it answers 500"
            raise StoreError(
                f"the store {self.name!r} cannot be written ({why}); no step can be planned that could not be resumed. "
                "A test has asked for this: take the fault out of its script."
            )

        return done


class _MortalAppender:
    """One open file of a place that may fail."""

    def __init__(self, place: MortalPlace, appender: Appender) -> None:
        self._place = place
        self._appender = appender

    def append(self, data: bytes) -> None:
        self._place.append(self._appender, data)

    def close(self) -> None:
        self._place.let_go(self._appender)
