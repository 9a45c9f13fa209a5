"""Who does the work of one host: the caller itself, or threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from overlord.roles.ports import Workers
from overlord.runtimes.lanes import CallerLanes, Lanes, ThreadLanes

T = TypeVar("T")


class SerialWorkers:
    """Does everything in the caller, one after the other."""

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Apply the function to every item."""
        return [function(item) for item in items]

    def close(self) -> None:
        """Nothing runs here by itself."""


class ThreadWorkers:
    """Does leaf work on a few threads; decoders and tokenizers let go of the interpreter while they work."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Apply the function to every item; results in order."""
        return list(self._pool.map(function, items))

    def close(self) -> None:
        """Wait for running work and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


LOADER_THREADS = 16
"""Calls to the loaders of one host that may wait for storage at the same time."""


@dataclass(frozen=True, slots=True)
class Hands:
    """Who does what on one host."""

    callers: Workers
    """Calls to loaders side by side: they wait for I/O."""
    leaf: Workers
    """Decoding and the like, of sources whose workers are not counted."""
    lanes: Lanes
    """The workers of sources that are counted."""

    @classmethod
    def of_caller(cls) -> Hands:
        """Let the caller do everything, one after the other."""
        return cls(SerialWorkers(), SerialWorkers(), CallerLanes())

    @classmethod
    def of_threads(cls, threads: int, lanes: int) -> Hands:
        """Start threads: so many for leaf work, and at most so many for counted workers."""
        return cls(
            ThreadWorkers(LOADER_THREADS, "overlord-loaders"),
            ThreadWorkers(threads, "overlord-workers"),
            ThreadLanes(lanes, "overlord-lane"),
        )

    def close(self) -> None:
        """End the threads."""
        for one in (self.lanes, self.leaf, self.callers):
            one.close()  # type: ignore[union-attr]  # those of a caller have nothing to end
