"""Spills: blocks that a format can only decode in one large piece, kept on disk while they are read.

Rules of this file:
1. A spill is an unnamed file: nothing is left behind, however the process ends.
2. A process decodes one block at a time: the peak of memory is that of one block, not of every open stream.
3. The rows come back exactly as they were written, column by column and type by type.
4. A block that is read in parts is decoded once for all of them.

How it works: the rows of a block are written as consecutive Arrow IPC messages, one per record batch, into a temporary
file, which is then mapped; closing the handle leaves only the mapping. Reading looks up the record batch of a row by
bisection and yields views of the mapping. Pages are released on the way, so that a spill takes disk and page cache but
hardly any memory of the process.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.types as pt
from pyarrow import ipc

from overlord.core.order import MAX_STREAMS, SPAN_BYTES
from overlord.core.ragged import Ragged, RowBatch, num_bytes, slice_rows
from overlord.errors import ReaderError
from overlord.readers.reader import Rows, reason_of

BATCH_BYTES = 256 << 10
"""About how many bytes are decoded at a time while a block is written."""
RELEASE_BYTES = 128 << 10
"""How many bytes are read before their pages are released."""

_UNNOTICED_BYTES = 3 << 19
_STREAM_BYTES = 64 << 10
_KEPT_BLOCKS = 4
_ONE_AT_A_TIME = threading.Lock()


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
    with _ONE_AT_A_TIME:
        block = _write(batches, place)
    if block is not None:
        yield from block.rows(0, block.num_rows, batch_rows)


class SpilledBlock:
    """The rows of one block on disk, readable from any row. Threads may share it.

    Args:
        mapped: The file: record batches as messages of Arrow IPC.
        schema: Their schema.
        places: Where each message begins, and where the last one ends.
        first_rows: The first row of each record batch, and the number of rows of the block.
    """

    def __init__(self, mapped: mmap.mmap, schema: pa.Schema, places: list[int], first_rows: list[int]) -> None:
        self._mapped = mapped
        self._buffer = pa.py_buffer(mapped)
        self._schema = schema
        self._places = places
        self._first_rows = first_rows

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

        Pages are released on the way and when the generator is closed: copy the rows before closing it.
        """
        passed = 0
        try:
            for number in range(bisect.bisect_right(self._first_rows, start) - 1, len(self._places) - 1):
                first, end = self._first_rows[number : number + 2]
                if first >= stop:
                    break
                message = self._buffer.slice(self._places[number], self._places[number + 1] - self._places[number])
                rows = _to_rows(ipc.read_record_batch(ipc.read_message(pa.BufferReader(message)), self._schema))
                for at in range(max(start, first), min(stop, end), batch_rows):
                    part = slice_rows(rows, at - first, min(at + batch_rows, stop, end) - first)
                    yield part
                    passed += num_bytes(part)
                    if passed >= RELEASE_BYTES:
                        self._release_pages()
                        passed = 0
        finally:
            self._release_pages()

    def _release_pages(self) -> None:
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
        with _ONE_AT_A_TIME:
            found = self.find(key)
            if found is not None:
                return found
            self._make_room(place.size)  # before writing, to use no more disk than necessary
            found = _write(decode(), place)
        if found is not None:
            with self._lock:
                self._blocks[key] = found
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


def most_kept(total: int, largest: int) -> int:
    """Return how many bytes the spilled blocks of a source take on disk, at most.

    Example:
        >>> most_kept(total=100 << 20, largest=60 << 20) >> 20, most_kept(total=10 << 30, largest=1 << 30) >> 20
        (100, 4096)
    """
    return min(total, max(2 * SPAN_BYTES, _KEPT_BLOCKS * largest))


def _write(batches: Rows, place: SpillPlace) -> SpilledBlock | None:
    """Write all rows of a block; the caller holds `_ONE_AT_A_TIME`."""
    with contextlib.closing(batches):
        block = _write_batches(batches, place)
    # The memory pool keeps freed memory; a block decoded by another thread would add to it.
    pa.default_memory_pool().release_unused()
    return block


def _write_batches(batches: Iterator[RowBatch], place: SpillPlace) -> SpilledBlock | None:
    schema: pa.Schema | None = None
    places, first_rows = [0], [0]
    with contextlib.ExitStack() as stack:
        with _disk_errors(place):
            place.folder.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(tempfile.TemporaryFile(dir=place.folder))
        for batch in batches:  # errors of the decoder are not errors of the disk
            record = _to_arrow(batch)
            schema = record.schema
            message = record.serialize()
            with _disk_errors(place):
                handle.write(message)
            places.append(places[-1] + message.size)
            first_rows.append(first_rows[-1] + record.num_rows)
        if schema is None:
            return None
        with _disk_errors(place):
            handle.flush()
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    return SpilledBlock(mapped, schema, places, first_rows)


def _to_arrow(rows: RowBatch) -> pa.RecordBatch:
    arrays: list[pa.Array] = []
    for column in rows.values():
        if isinstance(column, Ragged):
            first, last = int(column.offsets[0]), int(column.offsets[-1])
            offsets = pa.array(column.offsets - first)
            arrays.append(pa.LargeListArray.from_arrays(offsets, pa.array(column.values[first:last])))
        else:
            arrays.append(pa.array(column))
    return pa.RecordBatch.from_arrays(arrays, names=list(rows))


def _to_rows(record: pa.RecordBatch) -> RowBatch:
    rows: RowBatch = {}
    for name, array in zip(record.schema.names, record.columns, strict=True):
        if pt.is_large_list(array.type):
            rows[name] = Ragged(array.values.to_numpy(zero_copy_only=False), array.offsets.to_numpy())
        else:
            rows[name] = array.to_numpy(zero_copy_only=False)
    return rows


@contextlib.contextmanager
def _disk_errors(place: SpillPlace) -> Iterator[None]:
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
