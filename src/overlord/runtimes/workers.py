"""Who does leaf work: the caller itself, or a few threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class SerialWorkers:
    """Does everything in the caller, one after the other."""

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Apply the function to every item."""
        return [function(item) for item in items]


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
