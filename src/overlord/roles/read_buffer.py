"""The read buffer of one source, and the reader that fills it.

    ReadBuffer   chunks of measured rows, in the source's order, until a plan pops them
    GroupReader  reads one group in its keyed order: k streams merged, or a small group held whole

Rules of this file:
1. A chunk never crosses a group. Chunks are a cache: what is missing is read again.
2. Rows before `release` are not needed by a later step and are dropped chunk by chunk. The metadata of the last of them
   is kept: the replacement of a planner plans the steps since the last snapshot again, and would otherwise read whole
   groups again for lengths that were measured a moment ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from overlord.core.order import FileBlocks, Group, rows_per_read
from overlord.core.ragged import RowBatch, concat_rows, num_bytes, num_rows, slice_rows, take_rows
from overlord.core.samples import FILE_SHIFT, Cursor, MetaArray
from overlord.errors import ReaderError

Int64s = npt.NDArray[np.int64]

KNOWN_BYTES = 128 << 10
"""Bytes of metadata that each loader keeps of dropped rows."""
ITEM_COLUMNS = ("media_start", "media_length")
"""Columns of a chunk that belong to the metadata of its rows."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one group."""

    epoch: int
    group: int
    offset: int
    meta: MetaArray
    kept: RowBatch
    margin: tuple[int, int] = (0, 0)
    """Tokens before and after an image's placeholders that are never cut off from it."""

    @property
    def stop(self) -> int:
        """The offset after the last row."""
        return self.offset + len(self.meta)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.meta.nbytes + num_bytes(self.kept)


class ReadBuffer:
    """Chunks by position."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[int, int], list[Chunk]] = {}
        self._known: deque[Chunk] = deque()
        self._known_bytes = 0
        self.nbytes = 0

    def add(self, chunk: Chunk) -> None:
        """Keep a chunk."""
        self._chunks.setdefault((chunk.epoch, chunk.group), []).append(chunk)
        self.nbytes += chunk.nbytes

    def covering(self, cursor: Cursor) -> Chunk | None:
        """Return the chunk that holds the row at a cursor."""
        for chunk in self._chunks.get((cursor.epoch, cursor.group), ()):
            if chunk.offset <= cursor.offset < chunk.stop:
                return chunk
        return None

    def bytes_from(self, cursor: Cursor) -> int:
        """Return the bytes of chunks that reach beyond a cursor."""
        return sum(
            chunk.nbytes
            for key, chunks in self._chunks.items()
            if key >= cursor[:2]
            for chunk in chunks
            if key > cursor[:2] or chunk.stop > cursor.offset
        )

    def describing(self, cursor: Cursor) -> Chunk | None:
        """Return a chunk with the metadata of the row at a cursor; the row itself may have been dropped from it."""
        found = self.covering(cursor)
        if found is None:
            for chunk in self._known:
                if (chunk.epoch, chunk.group) == cursor[:2] and chunk.offset <= cursor.offset < chunk.stop:
                    return chunk
        return found

    def release(self, before: Cursor) -> None:
        """Drop the chunks that end before a cursor."""
        for key in list(self._chunks):
            if key > before[:2]:
                continue
            keep = [c for c in self._chunks[key] if key == before[:2] and c.stop > before.offset]
            for chunk in self._chunks[key]:
                if not any(chunk is one for one in keep):
                    self.nbytes -= chunk.nbytes
                    self._remember(chunk)
            if keep:
                self._chunks[key] = keep
            else:
                del self._chunks[key]

    def _remember(self, chunk: Chunk) -> None:
        items = {name: chunk.kept[name] for name in ITEM_COLUMNS if name in chunk.kept}
        self._known.append(replace(chunk, kept=items))
        self._known_bytes += self._known[-1].nbytes
        while self._known_bytes > KNOWN_BYTES:
            self._known_bytes -= self._known.popleft().nbytes


def gather(picks: list[tuple[Chunk, npt.NDArray[np.int64]]]) -> RowBatch:
    """Return the kept columns of picked rows (chunk, rows in the chunk), concatenated."""
    return concat_rows([take_rows(chunk.kept, rows) for chunk, rows in picks])


class Blocks(Protocol):
    """The files of one source, block by block."""

    def blocks(self, file: int) -> FileBlocks:
        """Return the blocks of a file, indexing it if needed."""
        ...

    def stream(self, file: int, block: int, *, skip: int, stop: int | None, batch_rows: int) -> Iterator[RowBatch]:
        """Yield the rows of a block in file order; with `stop`, those of a part of it."""
        ...

    def row_base(self, file: int, block: int) -> int:
        """Return the first row of a block, counted from the start of its file."""
        ...

    def forget(self) -> None:
        """Drop the indices held in memory."""
        ...


class GroupReader:
    """Reads the rows of one group; its position only moves forward."""

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
                    held.append(stream)  # its rows may be views of a mapped file: keep it open until they are copied
            self._whole = concat_rows(parts)
        base = np.cumsum(self.group.rows) - self.group.rows
        return take_rows(self._whole, base[slots] + rows)

    def _read_streams(self, slots: Int64s, rows: Int64s) -> RowBatch:
        # Rows of the k blocks are interleaved: take the rows of each block from its stream at once, then restore the
        # order.
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
