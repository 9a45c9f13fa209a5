"""The read buffer of one source: chunks of measured rows, in the source's order, until a plan pops them.

Rules of this file:
1. A chunk never crosses a group. Chunks are a cache: what is missing is read again.
2. Rows before `release` will not be asked for by a later step and are dropped chunk by chunk. What is known of the last
   of them stays: a planner in the place of another plans the steps since the last snapshot again, and groups would be
   read anew for lengths that were measured a moment ago.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import RowBatch, concat_rows, num_bytes, take_rows
from overlord.core.samples import Cursor, MetaArray

KNOWN_BYTES = 128 << 10
"""What is remembered of rows that were let go of, of each loader."""
ITEM_COLUMNS = ("media_start", "media_length")
"""Columns of a chunk that belong to what is known of its rows."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one group."""

    epoch: int
    group: int
    offset: int
    meta: MetaArray
    kept: RowBatch
    margin: tuple[int, int] = (0, 0)
    """Tokens before and behind an image's placeholders that are never cut off from it."""

    @property
    def stop(self) -> int:
        """The offset behind the last row."""
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
        """Return a chunk with what is known of the row at a cursor; the row itself may be gone from it."""
        found = self.covering(cursor)
        if found is None:
            for chunk in self._known:
                if (chunk.epoch, chunk.group) == cursor[:2] and chunk.offset <= cursor.offset < chunk.stop:
                    return chunk
        return found

    def release(self, before: Cursor) -> None:
        """Drop the chunks that lie wholly before a cursor."""
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
    """Return the kept columns of picked rows (chunk, rows in the chunk), one behind the other."""
    return concat_rows([take_rows(chunk.kept, rows) for chunk, rows in picks])
