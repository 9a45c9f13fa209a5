"""Spills: rows on disk while they are read: blocks that a format can only decode in one large piece, and shuffle groups
beyond what a host holds of them in memory.

Rules of this file:
1. A spill is an unnamed file: nothing is left behind, however the process ends.
2. What is being decoded is bounded by bytes: the peak of memory is not that of every open stream. A block waits for no
   other one, but for room.
3. The rows come back exactly as they were written, column by column and type by type.
4. A block that is read in parts is decoded once for all of them.
5. Which groups are in memory depends on time; what is read from them does not.

How it works: the arrays of a block are written batch by batch into a temporary file, which is then mapped; closing the
handle leaves only the mapping. Reading looks up the batch of a row by bisection and yields views of the mapping.
Pages are released on the way, so that a spill takes disk and page cache but hardly any memory of the process.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import mmap
import shutil
import tempfile
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from overlord.core.kernels import kernel
from overlord.core.order import MAX_STREAMS, SPAN_BYTES
from overlord.core.ragged import (
    Array,
    Ragged,
    RowBatch,
    concat_rows,
    gather_columns,
    num_bytes,
    num_rows,
    slice_rows,
    take_rows,
)
from overlord.errors import ReaderError
from overlord.readers.reader import Int64s, Rows, reason_of
from overlord.storage import make_private

logger = logging.getLogger("overlord")

BATCH_BYTES = 256 << 10
"""About how many bytes are decoded at a time while a block is written."""
RELEASE_BYTES = 256 << 10
"""How many bytes are read before their pages are released."""

DECODED_BYTES = 128 << 20
"""Bytes of blocks that are decoded at the same time, at most, or one block."""

_UNNOTICED_BYTES = 3 << 19
_STREAM_BYTES = 64 << 10
_KEPT_BLOCKS = 4
_ALIGNMENT = 8

Column = tuple[str, np.dtype[Any], bool]
"""A column of a spilled block: its name, the type of its values, and whether it is ragged."""


class _Room:
    """Bytes of blocks that a process decodes at the same time, at most, or one block."""

    def __init__(self, most_bytes: int) -> None:
        self._most = self._free = most_bytes
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Wait until there is room for so many bytes."""
        size = min(max(size, 0), self._most)
        with self._changed:
            self._changed.wait_for(lambda: size <= self._free)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


_DECODING = _Room(DECODED_BYTES)


@dataclass(frozen=True, slots=True)
class SpillPlace:
    """The folder of a spill, and what an error says if there is no space for it."""

    folder: Path
    what: str
    """The block, for messages: "row group 3 of a.parquet"."""
    size: int
    """About how many bytes it takes."""


def is_too_much(held: int, row_bytes: float, batch_rows: int) -> bool:
    """Return whether a stream that holds so many bytes would exceed the budget of a shuffle.

    The order counts a stream as its rows, once as read and once as decoded. Up to 1.5 MiB are accepted:
    writing and reading the block again would cost more than that memory is worth.

    Example:
        >>> is_too_much(64 << 20, 200e3, 1), is_too_much(64 << 20, 200e3, 256), is_too_much(1 << 20, 100, 1)
        (True, False, False)
    """
    return held > max(_UNNOTICED_BYTES, 2 * batch_rows * row_bytes + _STREAM_BYTES)


def spill_rows(row_bytes: float) -> int:
    """Return how many rows of a block to decode at a time."""
    return max(1, int(BATCH_BYTES / max(row_bytes, 1.0)))


def spilled(batches: Rows, place: SpillPlace, batch_rows: int) -> Iterator[RowBatch]:
    """Yield the same rows; all of them are written to disk before the first is yielded.

    Args:
        batches: Decodes the block; closed once it is written, to free its memory.
        place: Where the block is written.
        batch_rows: How many rows to yield at a time at most.

    Raises:
        ReaderError: The folder cannot be written, or its disk is full.
    """
    block = _write(batches, place)
    if block is not None:
        yield from block.rows(0, block.num_rows, batch_rows)


@kernel
def _locate(
    words: Int64s, first_rows: Int64s, begins: Int64s, itemsizes: Int64s, rows: Int64s, at: Int64s, begin: Int64s,
    sizes: Int64s,
) -> None:  # fmt: skip
    for number in range(len(rows)):
        row, place = rows[number], at[number]
        batch = np.searchsorted(first_rows, row, side="right") - 1
        inside = row - first_rows[batch]
        array = 0
        for column in range(len(itemsizes)):
            size = itemsizes[column]
            if size < 0:
                begin[column, place], sizes[column, place] = begins[batch, array] - size * inside, -size
                array += 1
                continue
            offset = begins[batch, array] // 8 + inside
            begin[column, place] = begins[batch, array + 1] + size * words[offset]
            sizes[column, place] = size * (words[offset + 1] - words[offset])
            array += 2


class SpilledBlock:
    """The rows of one block on disk, readable from any row. Threads may share it.

    Args:
        mapped: The file: the arrays of one batch after the other.
        batches: The columns of each batch, and where their arrays begin: two of a ragged column, offsets and values.
        first_rows: The first row of each batch, and the number of rows of the block.
    """

    def __init__(
        self, mapped: mmap.mmap, batches: list[tuple[tuple[Column, ...], array[int]]], first_rows: list[int]
    ) -> None:
        self._mapped = mapped
        self._batches = batches
        self._first_rows = first_rows
        alike = bool(batches) and all(columns is batches[0][0] for columns, _ in batches)
        self.columns = batches[0][0] if alike else None
        """Those of all batches; None if they have different ones."""
        self._begins = np.array([begins for _, begins in batches], np.int64) if alike else None
        """[batches, arrays]: where every array begins."""
        self._itemsizes = np.array([dtype.itemsize * (1 if ragged else -1) for _, dtype, ragged in self.columns or ()])
        """Negative for columns that are not ragged."""
        self._first_rows_of = np.array(first_rows, np.int64)
        self.move_to(mapped)

    def move_to(self, mapped: mmap.mmap) -> None:
        """Read from another mapping of the same file."""
        self._mapped = mapped
        self._memory, self._words = np.frombuffer(mapped, np.uint8), np.frombuffer(mapped, np.int64, len(mapped) // 8)

    @property
    def num_rows(self) -> int:
        """Rows of the block."""
        return self._first_rows[-1]

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return len(self._mapped)

    def rows(self, start: int, stop: int, batch_rows: int) -> Iterator[RowBatch]:
        """Yield rows start .. stop, at most `batch_rows` at a time: views of the file.

        Pages are released on the way and when the generator is closed: rows that are copied later are read once more.
        """
        passed = 0
        try:
            for number in range(bisect.bisect_right(self._first_rows, start) - 1, len(self._batches)):
                first, end = self._first_rows[number : number + 2]
                if first >= stop:
                    break
                rows = self._batch(number)
                for at in range(max(start, first), min(stop, end), batch_rows):
                    part = slice_rows(rows, at - first, min(at + batch_rows, stop, end) - first)
                    yield part
                    passed += num_bytes(part)
                    if passed >= RELEASE_BYTES:
                        self.release()
                        passed = 0
        finally:
            # Also after a row or two: the page cache may map 2 MB around a row that is touched.
            self.release()

    def locate(self, rows: Int64s, at: Int64s, begin: Int64s, sizes: Int64s) -> npt.NDArray[np.uint8]:
        """Find some rows of the block; return the memory that they lie in.

        Call `release` when they are copied: until then all pages that were touched stay in memory.

        Args:
            rows: The rows, in any order.
            at: Their places in the tables.
            begin: [columns, places]: where each row of each column begins in the memory, which is written here.
            sizes: The same for its bytes.

        Raises:
            ReaderError: The block has fewer rows, so its file is not what it was.
        """
        assert self._begins is not None, "a block whose batches differ is read as a stream"
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.num_rows:
            raise ReaderError(
                f"row {int(rows.max())} of a block was asked for, and it has {self.num_rows} rows; its file was "
                "changed since it was indexed. Put the file back, or start a new run."
            )
        _locate(self._words, self._first_rows_of, self._begins, self._itemsizes, rows, at, begin, sizes)
        return self._memory

    def take(self, rows: Int64s) -> RowBatch:
        """Return copies of the given rows, in that order; of a block whose batches differ they come in rising order."""
        try:
            if self.columns is not None:
                places = np.arange(len(rows))
                begin, sizes = np.empty((2, len(self.columns), len(rows)), np.int64)
                memory = self.locate(rows, places, begin, sizes)
                return gather_columns(self.columns, [(memory, places)], begin, sizes)
            batch_of = np.searchsorted(self._first_rows, rows, side="right") - 1
            used, starts = np.unique(batch_of, return_index=True)
            parts = zip(used.tolist(), np.split(rows, starts[1:]), strict=True)
            return concat_rows([take_rows(self._batch(n), part - self._first_rows[n]) for n, part in parts])
        finally:
            self.release()

    def _batch(self, number: int) -> RowBatch:
        # No parsing: where parts have a row or two, as those of images, a message of Arrow IPC took most of the time.
        count = self._first_rows[number + 1] - self._first_rows[number]
        columns, begins = self._batches[number]
        places, rows = iter(begins), RowBatch()
        for name, dtype, ragged in columns:
            if ragged:
                offsets = np.frombuffer(self._mapped, np.int64, count + 1, next(places))
                rows[name] = Ragged(np.frombuffer(self._mapped, dtype, int(offsets[-1]), next(places)), offsets)
            else:
                rows[name] = np.frombuffer(self._mapped, dtype, count, next(places))
        return rows

    def release(self) -> None:
        """Let go of the pages that were read."""
        if hasattr(self._mapped, "madvise"):
            self._mapped.madvise(mmap.MADV_DONTNEED)  # views of the pages stay valid and fault in again


class SpilledBlocks:
    """Spilled blocks of one source that are read in parts: each is decoded once and kept while its parts are needed.

    The order of a source reads all parts of a span of blocks (at most `SPAN_BYTES`, or two blocks) before it goes on to
    the next span; workers that read ahead may be in two spans at once. So the most recently used blocks are kept: up to
    twice `SPAN_BYTES`, or four blocks. A block that is dropped while a thread reads it lives until the thread is done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Hashable, SpilledBlock] = OrderedDict()
        self._writing: dict[Hashable, threading.Lock] = {}

    def find(self, key: Hashable) -> SpilledBlock | None:
        """Return a block that is kept."""
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return self._blocks.get(key)

    def add(self, key: Hashable, decode: Callable[[], Rows], place: SpillPlace) -> SpilledBlock | None:
        """Decode a block and keep it, unless another thread has done so; None if it has no rows.

        Raises:
            ReaderError: The folder cannot be written, or its disk is full.
        """
        with self._lock:
            writing = self._writing.setdefault(key, threading.Lock())
        with writing:  # other threads that need this block wait here, and find it
            found = self.find(key)
            if found is not None:
                return found
            self._make_room(place.size)  # before writing, to use no more disk than necessary
            found = _write(decode(), place)
            with self._lock:
                if found is not None:
                    self._blocks[key] = found
                self._writing.pop(key, None)
        return found

    def forget(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._blocks.clear()

    def _make_room(self, size: int) -> None:
        with self._lock:
            size += sum(block.nbytes for block in self._blocks.values())
            while len(self._blocks) >= _KEPT_BLOCKS and (size > 2 * SPAN_BYTES or len(self._blocks) >= 2 * MAX_STREAMS):
                size -= self._blocks.popitem(last=False)[1].nbytes


class SpilledFiles:
    """Whole files of one source in one spill, so that any row of them is reached at once. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handle: Any = None
        self._end = 0
        self._files: dict[int, SpilledBlock] = {}

    def rows(self, file: int, decode: Callable[[], Rows], place: SpillPlace) -> SpilledBlock:
        """Return the rows of a file, which is decoded and written when it is first asked for.

        Raises:
            ReaderError: The folder cannot be written, or its disk is full.
        """
        with self._lock:
            if file not in self._files:
                if self._handle is None:
                    self._handle = scratch_file(place)
                    weakref.finalize(self, self._handle.close)
                with contextlib.closing(decode()) as batches:
                    batches_at, first_rows, self._end = _append(self._handle, batches, place, self._end)
                with disk_errors(place):
                    self._handle.flush()
                    mapped = mmap.mmap(self._handle.fileno(), 0, access=mmap.ACCESS_COPY)  # as `_write_batches`
                self._files[file] = SpilledBlock(mapped, batches_at, first_rows)
                for block in self._files.values():  # one mapping for all: each holds a descriptor
                    block.move_to(mapped)
            return self._files[file]

    def forget(self) -> None:
        """Drop all files; the disk is freed when no thread reads them any more."""
        with self._lock:
            if self._handle is not None:
                self._handle.close()
            self._handle, self._end = None, 0
            self._files.clear()


class HeldRows:
    """The rows of a shuffle group, in memory or on disk. Threads may share it.

    Args:
        rows: All of them.
        clock: Counts the reads of all groups of the process.
    """

    def __init__(self, rows: RowBatch, clock: Iterator[int]) -> None:
        self._rows: RowBatch | SpilledBlock = rows
        self._clock = clock
        self.used = next(clock)
        """When it was last read, by the clock."""
        self.nbytes = num_bytes(rows)
        """Bytes in memory."""

    def take(self, rows: Int64s) -> RowBatch:
        """Return copies of the given rows, in that order."""
        self.used = next(self._clock)
        held = self._rows  # another thread may be spilling them
        return held.take(rows) if isinstance(held, SpilledBlock) else take_rows(held, rows)

    def spill(self, folder: Path) -> None:
        """Move the rows to disk; rows that are being read stay until they are copied.

        Raises:
            ReaderError: The folder cannot be written, or its disk is full.
        """
        if not isinstance(self._rows, SpilledBlock):
            block = _write_batches(iter([self._rows]), SpillPlace(folder, "a shuffle group", self.nbytes))
            self._rows, self.nbytes = block or self._rows, 0


class HeldGroups:
    """The shuffle groups that a process reads: the most recently read are in memory, the others on disk.

    Every source that is drawn has a group of up to its `shuffle_bytes`, and most sources of many are drawn rarely. A
    group that is being added stays in memory, however large it is.

    Args:
        folder: Where groups are spilled.
        room: Returns how many bytes of them may be in memory; other groups are spilled, the least recently read first.
    """

    def __init__(self, folder: Path, room: Callable[[], int]) -> None:
        self._folder = folder
        self._room = room
        self._nbytes = 0
        self._lock = threading.Lock()
        self._clock = itertools.count()
        self._groups: weakref.WeakSet[HeldRows] = weakref.WeakSet()
        self._disk_failed = False

    def hold(self, rows: RowBatch) -> HeldRows:
        """Hold the rows of a group for as long as the caller has a reference to what is returned."""
        new = HeldRows(rows, self._clock)
        with self._lock:
            others = sorted((one for one in self._groups if one.nbytes), key=lambda one: one.used)
            self._groups.add(new)
            total, room = new.nbytes + sum(one.nbytes for one in others), self._room()
            for one in others:
                if total <= room or self._disk_failed:
                    break
                total -= one.nbytes
                self._spill(one)
        return new

    @property
    def nbytes(self) -> int:
        """Bytes of the groups that are in memory; as they were a moment ago, while a group is being spilled."""
        if self._lock.acquire(blocking=False):
            try:
                self._nbytes = sum(one.nbytes for one in self._groups)
            finally:
                self._lock.release()
        return self._nbytes

    def _spill(self, group: HeldRows) -> None:
        try:
            group.spill(self._folder)
        except ReaderError as error:
            self._disk_failed = True
            logger.warning("shuffle groups stay in memory from now on, beyond what the budget allows them: %s", error)


def warm_spill() -> None:
    """Load the kernels that look rows up."""
    with tempfile.TemporaryFile() as handle:
        handle.write(np.array([0, 1, 0], np.int64).tobytes())
        handle.flush()
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    block = SpilledBlock(mapped, [((("", np.dtype(np.uint8), True),), array("q", [0, 16]))], [0, 1])
    begin, sizes, rows = np.empty((1, 1), np.int64), np.empty((1, 1), np.int64), np.zeros(1, np.int64)
    memory = block.locate(rows, rows, begin, sizes)
    gather_columns(block.columns or (), [(memory, rows)], begin, sizes)


def most_kept(total: int, largest: int) -> int:
    """Return how many bytes the spilled blocks of a source take on disk, at most.

    Example:
        >>> most_kept(total=100 << 20, largest=60 << 20) >> 20, most_kept(total=10 << 30, largest=1 << 30) >> 20
        (100, 4096)
    """
    return min(total, max(2 * SPAN_BYTES, _KEPT_BLOCKS * largest))


def _write(batches: Rows, place: SpillPlace) -> SpilledBlock | None:
    """Write all rows of a block, once there is room to decode it."""
    with _DECODING.taken(place.size), contextlib.closing(batches):
        block = _write_batches(batches, place)
    # The memory pool keeps freed memory; a block decoded by another thread would add to it.
    pa.default_memory_pool().release_unused()
    return block


def scratch_file(place: SpillPlace) -> Any:
    """Return a file without a name, open for reading and writing."""
    with disk_errors(place):
        make_private(place.folder)
        return tempfile.TemporaryFile(dir=place.folder)


def _append(
    handle: Any, batches: Iterator[RowBatch], place: SpillPlace, end: int
) -> tuple[list[tuple[tuple[Column, ...], array[int]]], list[int], int]:
    """Write rows behind those of a file; return the arguments of a SpilledBlock of them, and the new end."""
    columns: tuple[Column, ...] = ()
    written: list[tuple[tuple[Column, ...], array[int]]] = []
    first_rows = [0]
    with disk_errors(place):
        handle.seek(end)  # what was written behind it belongs to an attempt that failed
    for batch in batches:  # errors of the decoder are not errors of the disk
        found = tuple((name, _values(column).dtype, isinstance(column, Ragged)) for name, column in batch.items())
        columns = columns if columns == found else found  # one tuple for all batches
        begins = array("q")
        for part in _arrays(batch):
            begins.append(end)
            with disk_errors(place):
                handle.write(part.data)
                handle.write(bytes(-part.nbytes % _ALIGNMENT))
            end += part.nbytes + -part.nbytes % _ALIGNMENT
        written.append((columns, begins))
        first_rows.append(first_rows[-1] + num_rows(batch))
    return written, first_rows, end


def _write_batches(batches: Iterator[RowBatch], place: SpillPlace) -> SpilledBlock | None:
    with scratch_file(place) as handle:
        written, first_rows, end = _append(handle, batches, place, 0)
        if not end:
            return None
        with disk_errors(place):
            handle.flush()
            # Private, so that its arrays count as writable: numba would compile its kernels anew for others.
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    return SpilledBlock(mapped, written, first_rows)


def _values(column: Array | Ragged) -> Array:
    return column.values if isinstance(column, Ragged) else column


def _arrays(rows: RowBatch) -> Iterator[Array]:
    for column in rows.values():
        if isinstance(column, Ragged):
            first, last = int(column.offsets[0]), int(column.offsets[-1])
            yield np.ascontiguousarray(column.offsets - first, np.int64)
            yield _as_bytes(column.values[first:last])
        else:
            yield _as_bytes(column)


def _as_bytes(values: Array) -> Array:
    return np.ascontiguousarray(values).view(np.uint8)  # the buffer protocol knows no datetime64


@contextlib.contextmanager
def disk_errors(place: SpillPlace) -> Iterator[None]:
    """Turn what a disk raises into a ReaderError that says how much was needed, and where."""
    try:
        yield
    except OSError as error:
        raise ReaderError(
            f"{place.what} has to be kept on disk while it is read, and {place.folder} cannot take it: "
            f"{reason_of(error)} (about {_mebibytes(place.size)} are needed, {_free(place.folder)} are free); "
            "held in memory, it would break the budget of the shuffle. Set cache= to a folder on a larger disk, "
            "or write the files with small pages and without a dictionary."
        ) from error


def _free(folder: Path) -> str:
    nearest = next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))
    return _mebibytes(shutil.disk_usage(nearest).free)


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
