"""Compressed files of lines and archives, unpacked front to back into a nameless file, as far as their rows are needed.

Rules of this file:
1. A compressed file is read as the same file would be that is not compressed: its blocks are found while it is
   unpacked, and are those that a scan of the whole file finds.
2. Nothing is unpacked twice while the file is held. A file that failed on the way is unpacked again from its beginning.
3. Threads may share a file: one of them unpacks, the others wait for what they need.
"""

from __future__ import annotations

import dataclasses
import mmap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from overlord.core.order import LANES, SPAN_BYTES
from overlord.readers.files import ByteStream, Compression, StoredFile, verify_unchanged
from overlord.readers.reader import BlockIndex
from overlord.readers.spill import SpillPlace, disk_errors, scratch_file

FindBlocks = Callable[[ByteStream], Iterator[tuple[int, int, int, int]]]
"""Yields (rows, bytes, start, stop) of the blocks of a stream, each as soon as its end is read."""


@dataclass(frozen=True, slots=True)
class PlainFile(StoredFile):
    """What was unpacked of a file, as a file that is not compressed."""

    mapped: Any = field(default=None, repr=False, compare=False)

    @property
    def is_local(self) -> bool:
        return True

    @property
    def compression(self) -> Compression | None:
        return None

    def open(self) -> pa.NativeFile:
        return pa.BufferReader(pa.py_buffer(self.mapped))


class UnpackedFile:
    """One compressed file.

    Args:
        file: The file.
        find_blocks: Finds its blocks.
        place: Where it is unpacked.
    """

    def __init__(self, file: StoredFile, find_blocks: FindBlocks, place: SpillPlace) -> None:
        self._file = file
        self._find_blocks = find_blocks
        self._place = place
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._handle: Any = None
        self._mapped: mmap.mmap | None = None
        self._finding: Iterator[tuple[int, int, int, int]] | None = None
        self._blocks: list[tuple[int, int, int, int]] = []
        self._index = BlockIndex.of([])
        self._complete = False

    @property
    def nbytes(self) -> int:
        """Bytes that were unpacked, up to the last block that was found."""
        return self._blocks[-1][3] if self._blocks else 0

    def blocks(self, count: int) -> tuple[BlockIndex, bool]:
        """Return the first blocks, so many if there are as many, and whether these are all.

        Raises:
            ReaderError: The folder cannot be written, its disk is full, or the file has changed.
            Exception: Whatever reading or unpacking raises.
        """
        with self._lock:
            if len(self._blocks) < count and not self._complete:
                try:
                    self._unpack(count)
                except BaseException:
                    if self._handle is not None:
                        self._handle.close()  # what others have mapped stays
                    self._begin()
                    raise
            if len(self._index.rows) < len(self._blocks):
                self._index = BlockIndex.of(self._blocks, [False] * len(self._blocks))
            return self._index, self._complete

    def plain(self, stop: int) -> StoredFile:
        """Return what was unpacked as a file: at least so many bytes, which end a block that was found."""
        with self._lock:
            if self._mapped is None or len(self._mapped) < stop:
                with disk_errors(self._place):
                    self._handle.flush()
                    self._mapped = mmap.mmap(self._handle.fileno(), 0, access=mmap.ACCESS_READ)
            given = {one.name: getattr(self._file, one.name) for one in dataclasses.fields(StoredFile)}
            return PlainFile(**given | {"size": len(self._mapped)}, mapped=self._mapped)

    def release(self) -> None:
        """Let go of the pages that were read."""
        if self._mapped is not None and hasattr(self._mapped, "madvise"):
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def _unpack(self, count: int) -> None:
        if self._finding is None:
            verify_unchanged(self._file)
            self._handle = scratch_file(self._place)
            weakref.finalize(self, self._handle.close)
            self._finding = self._find()
        while len(self._blocks) < count and not self._complete:
            block = next(self._finding, None)
            if block is None:
                self._complete = True
            else:
                self._blocks.append(block)
        verify_unchanged(self._file)

    def _find(self) -> Iterator[tuple[int, int, int, int]]:
        handle, place = self._handle, self._place
        with self._file.open_stream(self._file.compression) as native:
            yield from self._find_blocks(_Copying(native, handle, place))


class _Copying:
    """A stream whose bytes are written to a file as they are read."""

    def __init__(self, native: ByteStream, handle: Any, place: SpillPlace) -> None:
        self._native, self._handle, self._place = native, handle, place

    def read(self, count: int, /) -> bytes:
        """Return the next bytes."""
        data = self._native.read(count)
        with disk_errors(self._place):
            self._handle.write(data)
        return data


class UnpackedFiles:
    """The unpacked files of one source. Threads may share it.

    The order reads `LANES` files side by side; workers that read ahead may have come to the next ones. So the most
    recently used are kept: up to twice `SPAN_BYTES`, or twice as many files.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[int, UnpackedFile] = OrderedDict()

    def of(self, number: int, new: Callable[[], UnpackedFile]) -> UnpackedFile:
        """Return a file by its number, to be unpacked from its beginning if it is not held."""
        with self._lock:
            if number not in self._files:
                self._files[number] = new()
            self._files.move_to_end(number)
            total = sum(file.nbytes for file in self._files.values())
            while len(self._files) > 2 * LANES and total > 2 * SPAN_BYTES:
                total -= self._files.popitem(last=False)[1].nbytes
            return self._files[number]

    def forget(self) -> None:
        """Drop all files; those that a thread reads live until it is done."""
        with self._lock:
            self._files.clear()
