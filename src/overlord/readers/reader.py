"""What a file format must be able to do, and the words all formats share.

One format a file; the table of formats is in `formats`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import RowBatch
from overlord.errors import SourceError
from overlord.readers.filesystems import StoredFile

BLOCK_BYTES = 1 << 20
"""How large a block of a format without blocks of its own becomes."""

Kind = Literal["bytes", "json", "int", "float", "int_list", "float_list", "bytes_list"]
"""What a column holds. Bytes (or text) and json text are Ragged uint8, lists are Ragged, the rest arrays.

A list of byte strings (the images of a row) is two columns: its items one behind the other as Ragged uint8, and
under the name `sizes_column(column)` the bytes of each as Ragged int64."""


class DamagedFile(OSError):
    """The bytes of a file are not what its format asks for; the message completes "cannot read x: "."""


Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """Where the blocks of one file are: parallel arrays, read from the cache."""

    rows: Int64s
    bytes: Int64s
    """Decompressed bytes in the columns that are read."""
    start: Int64s
    """Where the block begins; what that means is the format's own affair."""
    stop: Int64s
    first_row: Int64s
    """Row of the file at which the block begins."""

    @classmethod
    def of(cls, blocks: Sequence[tuple[int, int, int, int]]) -> BlockIndex:
        """Build from one (rows, bytes, start, stop) a block.

        Example:
            >>> BlockIndex.of([(3, 30, 0, 40), (2, 20, 40, 70)]).first_row.tolist()
            [0, 3]
        """
        table = np.array(blocks, np.int64).reshape(-1, 4).T
        rows = np.ascontiguousarray(table[0])
        return cls(rows, table[1].copy(), table[2].copy(), table[3].copy(), np.cumsum(rows) - rows)


class Reader(Protocol):
    """Reads one format. Stateless: everything it needs is in the arguments, so threads may share it."""

    @property
    def name(self) -> str:
        """The name of the format."""
        ...

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Find the blocks of a file.

        Raises:
            SourceError: A column is missing, or the file is not what its name says.
        """
        ...

    def stream(
        self,
        file: StoredFile,
        index: BlockIndex,
        block: int,
        *,
        columns: Mapping[str, Kind],
        skip: int,
        batch_rows: int,
        scratch: Path | None,
    ) -> Iterator[RowBatch]:
        """Yield the rows of one block front to back after skipping `skip`, at most `batch_rows` at a time.

        Every batch has the wanted columns and `BAD_COLUMN`: why the bytes of a row make no sense, 0 where they do.
        The stream holds about twice what it yields at a time; what has to be decoded in larger pieces is
        kept in `scratch`, a folder on a disk, which is made when it is needed. Without a folder it holds what it must:
        the caller writes the rows to disk itself.

        Raises:
            ReaderError: There is no room in `scratch`.
        """
        ...

    def divides(self, file: StoredFile) -> bool:
        """Tell whether blocks of a file may have any size, so that a shuffle cuts large ones into parts.

        Blocks that this package cuts itself have about `BLOCK_BYTES` and are not divided.
        """
        ...

    def seeks(self, file: StoredFile) -> bool:
        """Tell whether a stream that skips rows is as cheap as one that begins there; else parts are spilled."""
        ...

    def columns(self, file: StoredFile) -> list[str]:
        """Return the columns of a file (for previews, lint and error messages)."""
        ...

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return what the wanted columns hold, None where the file's head does not tell.

        A column that the head does not even name is left out.
        """
        ...


def reason_of(error: BaseException) -> str:
    """Return a short quote of an error: its first sentence, at most 160 characters.

    Example:
        >>> reason_of(OSError("Disk on fire. Detail: many words"))
        'Disk on fire'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.split(". ")[0].split(" Detail:")[0].rstrip(".")
    return text if len(text) <= 160 else text[:157] + "..."


def unreadable(file: StoredFile, reason: str) -> SourceError:
    """Return the error for a file that cannot be understood before it is streamed."""
    return SourceError(
        f"cannot read {file.path}: {reason}; no sample of this file can be used. "
        "Copy the file again, or leave it out of the source's paths."
    )


def missing_column(path: str, column: str, available: Sequence[str]) -> SourceError:
    """Return the error for a column that a file does not have.

    Example:
        >>> print(missing_column("a.parquet", "txet", ["text", "id"]))
        a.parquet has no column 'txet' (it has: text, id); its rows would have no value. Did you mean 'text'?
    """
    close = difflib.get_close_matches(column, available, 1)
    shown = ", ".join(available[:20]) + (", ..." if len(available) > 20 else "")
    advice = f"Did you mean {close[0]!r}?" if close else "Name one of these in the source's sample."
    return SourceError(
        f"{path} has no column {column!r} (it has: {shown or 'none'}); its rows would have no value. {advice}"
    )
