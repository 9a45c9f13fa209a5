"""Shared memory without names: segments are anonymous files passed by descriptor.

No name means nothing can be left behind: the kernel frees a segment when the last process that maps
it is gone, however it went. Segments are reused, since fresh pages cost more than the copy into them.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from overlord.errors import ClosedError

_STEP = 1 << 16


class Segment:
    """One mapped piece of shared memory of the serving process."""

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self.reusable = True
        self.fd = _anonymous_file()
        os.ftruncate(self.fd, capacity)
        self._map = mmap.mmap(self.fd, capacity)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        _segments[_address(self.memory)] = self

    def close(self) -> None:
        """Let go of it; processes that still map it keep their view."""
        _segments.pop(_address(self.memory), None)
        self.memory = np.empty(0, np.uint8)
        try:
            self._map.close()
        except BufferError:
            pass  # an array still looks into it; the mapping goes when that array does
        os.close(self.fd)


_segments: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
"""Those that are open, by the address of their memory."""


def find_segment(places: Sequence[npt.NDArray[np.uint8]]) -> tuple[Segment, npt.NDArray[np.int64]] | None:
    """Return the segment that all of some arrays lie in, and where in it each begins; None where there is none."""
    base = places[0].base if places else None
    if not isinstance(base, np.ndarray) or any(place.base is not base for place in places):
        return None
    segment = _segments.get(_address(base))
    if segment is None or segment.memory is not base:
        return None
    return segment, np.array([_address(place) for place in places], np.int64) - _address(base)


def _address(array: npt.NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])


class Arena:
    """Hands out segments, takes them back, and knows how many bytes are in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Segment] = []
        self._used: dict[int, tuple[Segment, int]] = {}
        self._used_bytes = self._idle_bytes = 0  # counted as they change: a step may have thousands of segments
        self._next = 0
        self._closed = False
        self.gone = 0
        """Segments that were closed for good so far."""

    @property
    def used_bytes(self) -> int:
        """Capacity of the segments in use."""
        with self._lock:
            return self._used_bytes

    def take(self, nbytes: int) -> Segment:
        """Return a segment of at least so many bytes, held once."""
        capacity = round_up(nbytes)
        with self._lock:
            fitting = [s for s in self._idle if capacity <= s.capacity <= 2 * capacity]
            if fitting:
                segment = min(fitting, key=lambda s: s.capacity)
                self._idle.remove(segment)
                self._idle_bytes -= segment.capacity
            else:
                segment = Segment(self._next, capacity)
                self._next += 1
            self._used[segment.number] = (segment, 1)
            self._used_bytes += segment.capacity
            return segment

    def alive(self, number: int) -> bool:
        """Whether a segment is still there, in use or waiting for reuse."""
        with self._lock:
            return number in self._used or any(s.number == number for s in self._idle)

    def hold(self, number: int) -> None:
        """Hold a segment once more."""
        with self._lock:
            if self._closed:
                raise ClosedError("the service was closed while a client took a batch.")
            segment, holds = self._used[number]
            self._used[number] = (segment, holds + 1)

    def release(self, number: int, *, reuse: bool = True) -> None:
        """Let go once; the last release makes the segment reusable.

        Without `reuse` it is never written again: a process that has detached may still look at it.
        """
        with self._lock:
            if self._closed:
                return  # everything was let go of at once
            segment, holds = self._used[number]
            segment.reusable = segment.reusable and reuse
            if holds > 1:
                self._used[number] = (segment, holds - 1)
                return
            del self._used[number]
            self._used_bytes -= segment.capacity
            if not segment.reusable:
                segment.close()
                self.gone += 1
                return
            self._idle.append(segment)
            self._idle_bytes += segment.capacity
            # A few of what is in use will be needed again soon; more than that is given back.
            most = self._used_bytes // 4 + 2 * segment.capacity
            while self._idle_bytes > most:
                oldest = self._idle.pop(0)
                self._idle_bytes -= oldest.capacity
                oldest.close()
                self.gone += 1

    def close(self) -> None:
        """Close every segment."""
        with self._lock:
            self._closed = True
            for segment in [*self._idle, *(s for s, _ in self._used.values())]:
                segment.close()
            self._idle.clear()
            self._used.clear()
            self._used_bytes = self._idle_bytes = 0


HEAP_BYTES = 4 << 30
"""Address space of a heap: what does not fit lies in memory of the process alone."""
HEAP_LEAST = 64 << 10
"""Smaller arrays are not worth a place in the heap."""
HEAP_IDLE = 16 << 20
"""So much freed memory is kept for reuse, and as much as is in use: with half of that, a feed of images gives pages
back and takes fresh ones all the time, for 6 % of what its service spends."""


class SharedHeap:
    """Arrays in one file of memory that process workers map once: rows that lie here are sent to them by their place.

    An array is freed when the last view of it is gone; its pages are reused, since fresh ones cost more than the copy
    into them. A worker looks at an array only while it is asked, and the thread that asks holds the array.
    """

    def __init__(self, capacity: int = HEAP_BYTES) -> None:
        self.fd = _anonymous_file()
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, capacity)  # a page takes memory once it is touched
        self._map = mmap.mmap(self.fd, capacity)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._lock = threading.Lock()
        self._idle: list[tuple[int, int]] = []
        """(begin, end) of free ranges with pages, in rising order; no two touch."""
        self._bare = [(0, capacity)]
        """Those without."""
        self._used = self._idle_bytes = 0
        self._gone: deque[tuple[int, int]] = deque()
        """Ranges of arrays that are gone: the garbage collector, which may run under the lock, takes no lock."""

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return an array of so many bytes, in memory of the process alone where it is small or the heap is full."""
        if nbytes < HEAP_LEAST:
            return np.empty(nbytes, np.uint8)
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._collect()
            begin = _take(self._idle, size)
            self._idle_bytes -= 0 if begin is None else size
            if begin is None:
                begin = _take(self._bare, size)
            if begin is None:
                self._give_back(0)
                begin = _take(self._bare, size)
            if begin is None:
                return np.empty(nbytes, np.uint8)
            self._used += size
        return np.asarray(_InHeap(self.memory[begin : begin + nbytes], self._gone, (begin, begin + size)))

    def spanning(self, arrays: Sequence[npt.NDArray[Any]]) -> tuple[npt.NDArray[np.uint8], list[int]] | None:
        """Return an array that reaches over some arrays, and where each begins in it; None if one is not here."""
        base, capacity = _address(self.memory), len(self.memory)
        begins = [_address(array) - base for array in arrays]
        if not all(0 <= begin < capacity for begin in begins):
            return None
        return np.asarray(_InHeap(self.memory, arrays)), begins

    def _collect(self) -> None:
        while self._gone:
            begin, end = self._gone.popleft()
            self._used -= end - begin
            self._idle_bytes += end - begin
            _give(self._idle, begin, end)
        self._give_back(self._used + HEAP_IDLE)

    def _give_back(self, most: int) -> None:
        """Return the pages of free ranges to the system until at most so many bytes are left."""
        while self._idle_bytes > most:
            begin, end = self._idle.pop()
            self._idle_bytes -= end - begin
            if hasattr(mmap, "MADV_REMOVE"):
                self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)
            _give(self._bare, begin, end)


class _InHeap:
    """What all views of an array in a heap refer to, and no other array does.

    Args:
        memory: Where the array lies; it is taken for writable.
        held: What it holds besides: the arrays that it spans, or the list of ranges that its own is put into at last.
        place: Its range.
    """

    __slots__ = ("__array_interface__", "_held", "_memory", "_place")

    def __init__(self, memory: npt.NDArray[np.uint8], held: Any, place: tuple[int, int] | None = None) -> None:
        self.__array_interface__ = {**memory.__array_interface__, "data": (_address(memory), False)}
        self._memory, self._held, self._place = memory, held, place

    def __del__(self) -> None:
        if self._place is not None:
            self._held.append(self._place)


def _take(ranges: list[tuple[int, int]], size: int) -> int | None:
    """Take so many bytes from the first range that has them."""
    for at, (begin, end) in enumerate(ranges):
        if end - begin >= size:
            ranges[at : at + 1] = [(begin + size, end)] if end - begin > size else []
            return begin
    return None


def _give(ranges: list[tuple[int, int]], begin: int, end: int) -> None:
    """Put a range among others, joined with those that it touches."""
    at = bisect.bisect(ranges, (begin, end))
    low, high = at, at
    if low and ranges[low - 1][1] == begin:
        low, begin = low - 1, ranges[low - 1][0]
    if high < len(ranges) and ranges[high][0] == end:
        high, end = high + 1, ranges[high][1]
    ranges[low:high] = [(begin, end)]


def read_only_view(fd: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Map memory of another process to be read, and close its descriptor.

    A decoder that writes out of bounds because of a hostile image ends this process, and no other row is damaged. The
    array says that it can be written: arrays that cannot be are another type to compiled kernels.
    """
    try:
        return np.asarray(_InHeap(np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), np.uint8), None))
    finally:
        os.close(fd)


@functools.cache
def shared_heap() -> SharedHeap:
    """Return the heap of this process: a small one where its address space is limited (`ulimit -v`)."""
    for capacity in (HEAP_BYTES, HEAP_BYTES >> 6):
        with contextlib.suppress(OSError):
            return SharedHeap(capacity)
    return SharedHeap(mmap.PAGESIZE)


def round_up(nbytes: int) -> int:
    """Round a size up so that sizes that differ a little share segments.

    Example:
        >>> round_up(1), round_up(1_000_000)
        (65536, 1048576)
    """
    step = max(_STEP, 1 << max(0, nbytes.bit_length() - 4))
    return max(step, -(-nbytes // step) * step)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("overlord", os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix="overlord-")  # hosts without memfd: a file that is unlinked at once
    os.unlink(path)
    return fd


# --------------------------------------------------------------------------------------------------------------
# Giving memory back: what the allocators keep after a burst of large, short-lived objects.


def give_back_freed_memory() -> None:
    """Return freed pages to the system: opening files leaves holes that glibc and Arrow would keep for ever."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


class FreedMemory:
    """Returns freed pages to the system once so many bytes were allocated and freed. Threads may share it."""

    def __init__(self, every_bytes: int) -> None:
        self._every = every_bytes
        self._freed = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that were freed."""
        self._freed += nbytes  # two threads may lose a count: it is only somewhat later then
        if self._freed >= self._every:
            self._freed = 0
            give_back_freed_memory()


def few_arenas() -> None:
    """Let malloc keep two arenas: with one for each of many threads, what they free stays with the process."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_ARENA_MAX, 2)


_ARENA_MAX = -8
"""M_ARENA_MAX of malloc.h."""
