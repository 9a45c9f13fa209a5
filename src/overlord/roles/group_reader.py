"""Reads one group of a source in its keyed order: k streams merged, or a small group held whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from overlord.core.order import FileBlocks, Group, rows_per_read
from overlord.core.ragged import RowBatch, concat_rows, num_rows, slice_rows, take_rows
from overlord.core.samples import FILE_SHIFT
from overlord.errors import ReaderError

Int64s = npt.NDArray[np.int64]


class Blocks(Protocol):
    """The files of one source, block by block."""

    def blocks(self, file: int) -> FileBlocks:
        """Return the blocks of a file, indexing it if needed."""
        ...

    def stream(self, file: int, block: int, *, skip: int, stop: int | None, batch_rows: int) -> Iterator[RowBatch]:
        """Yield the rows of a block front to back; with `stop`, those of a part of it."""
        ...

    def row_base(self, file: int, block: int) -> int:
        """Return the row of the file at which a block begins."""
        ...

    def forget(self) -> None:
        """Drop the indices held in memory."""
        ...


class GroupReader:
    """A position inside a group that only moves forward."""

    def __init__(self, group: Group, files: Blocks, offset: int) -> None:
        self.group = group
        self.offset = offset
        self._files = files
        self._streams: dict[int, _BlockStream] = {}
        self._whole: RowBatch | None = None
        self._base = np.array(
            [
                (int(f) << FILE_SHIFT) + files.row_base(int(f), int(b)) + int(first)
                for f, b, first in zip(group.files, group.blocks, group.first, strict=True)
            ],
            np.int64,
        )

    def read(self, count: int) -> tuple[RowBatch, Int64s]:
        """Return the next rows of the group and their row numbers (file << 32 | row)."""
        slots, rows = self.group.locate(self.offset, count)
        self.offset += len(slots)
        batch = self._read_whole(slots, rows) if self.group.whole else self._read_streams(slots, rows)
        return batch, self._base[slots] + rows

    def _read_whole(self, slots: Int64s, rows: Int64s) -> RowBatch:
        if self._whole is None:
            parts: list[RowBatch] = []
            held: list[_BlockStream] = []
            for slot, count in enumerate(self.group.rows.tolist()):
                stream = self._open(slot, 0)
                parts.append(stream.take(count))
                if self.group.is_part[slot]:
                    held.append(stream)  # its rows may be views of a file: it hands the pages back once they are copied
            self._whole = concat_rows(parts)
        base = np.cumsum(self.group.rows) - self.group.rows
        return take_rows(self._whole, base[slots] + rows)

    def _read_streams(self, slots: Int64s, rows: Int64s) -> RowBatch:
        order = np.argsort(slots, kind="stable")
        used, first, counts = np.unique(slots[order], return_index=True, return_counts=True)
        parts: list[RowBatch] = []
        for slot, at, count in zip(used.tolist(), first.tolist(), counts.tolist(), strict=True):
            if slot not in self._streams:
                self._streams[slot] = self._open(slot, int(rows[order[at]]))
            parts.append(self._streams[slot].take(count))
            if rows[order[at]] + count == self.group.rows[slot]:
                del self._streams[slot]
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        joined = concat_rows(parts)
        return joined if len(used) == 1 else take_rows(joined, place)

    def _open(self, slot: int, skip: int) -> _BlockStream:
        file, block = int(self.group.files[slot]), int(self.group.blocks[slot])
        size = 256 if self.group.whole else rows_per_read(self.group.row_bytes)
        first = int(self.group.first[slot])
        stop = first + int(self.group.rows[slot]) if self.group.is_part[slot] else None
        return _BlockStream(self._files.stream(file, block, skip=first + skip, stop=stop, batch_rows=size), file, block)


class _BlockStream:
    """Takes any number of rows at a time from a stream of batches."""

    def __init__(self, batches: Iterator[RowBatch], file: int, block: int) -> None:
        self._batches = batches
        self._rest: RowBatch | None = None
        self._where = f"block {block} of file {file}"

    def take(self, count: int) -> RowBatch:
        parts: list[RowBatch] = []
        while count > 0:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                raise ReaderError(
                    f"{self._where} has fewer rows than its index says; the stream would lose samples. The file "
                    "changed while it was read: restore it, or start a new run."
                )
            size = num_rows(batch)
            used = min(size, count)
            parts.append(slice_rows(batch, 0, used))
            self._rest = slice_rows(batch, used, size) if used < size else None
            count -= used
        return concat_rows(parts)
