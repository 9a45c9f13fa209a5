"""Rows that a format can only decode in one large piece, kept on disk while a stream reads them.

Rules of this file:
1. A spill is a file without a name: whatever happens to the process, nothing is left behind.
2. One block is decoded at a time in a process: the peak is that of one block, not of every open stream.
3. The rows are those that were put in, column by column and type by type.
"""

from __future__ import annotations

import contextlib
import mmap
import shutil
import tempfile
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.types as pt
from pyarrow import ipc

from overlord.core.ragged import Ragged, RowBatch, num_rows, slice_rows
from overlord.errors import ReaderError
from overlord.readers.reader import reason_of

BATCH_BYTES = 256 << 10
"""About how much is decoded at a time while a block is written."""
RELEASE_BYTES = 128 << 10
"""How many bytes are read before the pages behind them are handed back."""

_UNNOTICED_BYTES = 3 << 19
_STREAM_BYTES = 64 << 10
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, slots=True)
class SpillPlace:
    """Where a block goes, and what to say when there is no room for it."""

    folder: Path
    what: str
    """The block, for messages: "row group 3 of a.parquet"."""
    size: int
    """About how many bytes it takes."""


def is_too_much(held: int, row_bytes: float, batch_rows: int) -> bool:
    """Tell whether a stream that holds so much would break the budget of a shuffle.

    The order counts a stream as its rows, once as read and once as decoded. Up to 1.5 MiB are let pass:
    writing and reading a block again costs more than that is worth.

    Example:
        >>> is_too_much(64 << 20, 200e3, 1), is_too_much(64 << 20, 200e3, 256), is_too_much(1 << 20, 100, 1)
        (True, False, False)
    """
    return held > max(_UNNOTICED_BYTES, 2 * batch_rows * row_bytes + _STREAM_BYTES)


def spill_rows(row_bytes: float) -> int:
    """Return how many rows of a block to decode at a time."""
    return max(1, int(BATCH_BYTES / max(row_bytes, 1.0)))


def spilled(batches: Generator[RowBatch, None, None], place: SpillPlace, batch_rows: int) -> Iterator[RowBatch]:
    """Yield the same rows, all of them written to disk before the first is given.

    Args:
        batches: Decodes the block; closed when it is written, so that what it holds is freed.
        place: Where the block goes.
        batch_rows: How many rows to yield at a time at most.

    Raises:
        ReaderError: The folder cannot be written, or its disk is full.
    """
    with _ONE_AT_A_TIME, contextlib.closing(batches):
        mapped = _write(batches, place)
        # The pool keeps what it freed; the next block would come on top of it in another thread's heap.
        pa.default_memory_pool().release_unused()
    if mapped is not None:
        for batch in _read(mapped):
            size = num_rows(batch)
            for start in range(0, size, batch_rows):
                yield slice_rows(batch, start, min(start + batch_rows, size))


def _write(batches: Iterator[RowBatch], place: SpillPlace) -> mmap.mmap | None:
    first = next(batches, None)
    if first is None:
        return None
    record = _to_arrow(first)
    with contextlib.ExitStack() as stack:
        with _disk_errors(place):
            place.folder.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(tempfile.TemporaryFile(dir=place.folder))
        sink = pa.PythonFile(handle, mode="w")
        writer = ipc.new_stream(sink, record.schema)
        with _disk_errors(place):
            writer.write_batch(record)
        for batch in batches:  # an error of the decoder is not one of this disk
            record = _to_arrow(batch)
            with _disk_errors(place):
                writer.write_batch(record)
        with _disk_errors(place):
            writer.close()
            handle.flush()
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)


def _read(mapped: mmap.mmap) -> Iterator[RowBatch]:
    passed = 0
    for record in ipc.open_stream(pa.BufferReader(pa.py_buffer(mapped))):
        yield _to_rows(record)
        passed += record.nbytes
        if passed >= RELEASE_BYTES and hasattr(mapped, "madvise"):
            mapped.madvise(mmap.MADV_DONTNEED)  # views of the pages stay valid and fault in again
            passed = 0


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
