"""The read buffer of one source: chunks of measured rows, in the source's order, until a plan pops them.

Rules of this file:
1. A chunk never crosses a group. Chunks are a cache: what is missing is read again.
2. Rows before `release` will not be asked for by a later step and are dropped chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import RowBatch, concat_rows, num_bytes, take_rows
from overlord.core.samples import Cursor, MetaArray


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

    def release(self, before: Cursor) -> None:
        """Drop the chunks that lie wholly before a cursor."""
        for key in list(self._chunks):
            if key > before[:2]:
                continue
            keep = [c for c in self._chunks[key] if key == before[:2] and c.stop > before.offset]
            self.nbytes -= sum(c.nbytes for c in self._chunks[key]) - sum(c.nbytes for c in keep)
            if keep:
                self._chunks[key] = keep
            else:
                del self._chunks[key]


def gather(picks: list[tuple[Chunk, npt.NDArray[np.int64]]]) -> RowBatch:
    """Return the kept columns of picked rows (chunk, rows in the chunk), one behind the other."""
    return concat_rows([take_rows(chunk.kept, rows) for chunk, rows in picks])
