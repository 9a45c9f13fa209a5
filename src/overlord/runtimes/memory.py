"""Giving memory back: what the allocators keep after a burst of large, short-lived objects."""

from __future__ import annotations

import ctypes

import pyarrow as pa


def give_back_freed_memory() -> None:
    """Return freed pages to the system: opening files leaves holes that glibc and Arrow would keep for ever."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def few_arenas() -> None:
    """Let malloc keep two arenas: with one for each of many threads, what they free stays with the process."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_ARENA_MAX, 2)


_ARENA_MAX = -8
"""M_ARENA_MAX of malloc.h."""
