"""The interface of file formats, and types and errors that all of them share.

There is one module per format; the table of formats is `source_files.FORMATS`.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from overlord.core.ragged import Kind, RowBatch
from overlord.errors import ReaderError, SourceError, shortened
from overlord.readers.files import ByteStream, StoredFile, compression_of_name

BLOCK_BYTES = 1 << 20
"""Size of the blocks in formats that have none of their own."""
HEAD_ROWS = 256
"""Rows of a file that decide the kinds of its columns, in formats without a schema."""

_FIRST_BYTES = 8 << 20
"""What is fetched ahead of a compressed file."""
_LOCAL_WINDOW_BYTES = 4 << 10
_REMOTE_WINDOW_BYTES = 256 << 10

Rows = Generator[RowBatch, None, None]
"""Rows of a block, a batch at a time."""


class DamagedFile(OSError):
    """The bytes of a file violate its format; the message completes "cannot read x: "."""


Int64s = npt.NDArray[np.int64]
UNKNOWN: Int64s = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """Where the blocks of one file are: parallel arrays, read from the cache."""

    rows: Int64s
    bytes: Int64s
    """Decompressed bytes in the columns that are read."""
    start: Int64s
    """Where the block begins; the meaning depends on the format."""
    stop: Int64s
    first_row: Int64s
    """Row of the file at which the block begins."""
    seeks: Int64s = field(default_factory=lambda: UNKNOWN)
    """1 where rows of the block are reached without those before them, 0 where it is unpacked from its beginning. The
    order of a source depends on it, so it follows from the content of the file alone."""

    @classmethod
    def of(cls, blocks: Sequence[tuple[int, int, int, int]], seeks: Sequence[bool] | None = None) -> BlockIndex:
        """Build from (rows, bytes, start, stop) of each block; without `seeks`, those are what the reader says.

        Example:
            >>> BlockIndex.of([(3, 30, 0, 40), (2, 20, 40, 70)]).first_row.tolist()
            [0, 3]
        """
        table = np.array(blocks, np.int64).reshape(-1, 4).T
        rows = np.ascontiguousarray(table[0])
        reached = UNKNOWN if seeks is None else np.array(seeks, np.int64)
        return cls(rows, table[1].copy(), table[2].copy(), table[3].copy(), np.cumsum(rows) - rows, reached)

    def completed(self, seeks: Callable[[], bool]) -> BlockIndex:
        """Return the index with what its reader says of all blocks of a file, where it says nothing of each."""
        return self if len(self.seeks) else replace(self, seeks=np.full(len(self.rows), seeks(), np.int64))


SEEKABLE_BLOCK_BYTES = 16 << 20
"""Size of the blocks in formats where any row is reached at once. It is larger than a shuffle usually is, so that
blocks are cut into parts: rows of a group then come from many places. And an index of terabytes stays small."""


def blocks_of_sizes(sizes: Iterable[Int64s], *, whole: bool = False, block_bytes: int | None = None) -> BlockIndex:
    """Return blocks whose start and stop are rows; sizes of rows come in runs.

    Args:
        sizes: Bytes of the rows.
        whole: Whether there is one block only.
        block_bytes: About how large blocks are; `SEEKABLE_BLOCK_BYTES` if it is None.

    Example:
        >>> blocks_of_sizes([np.array([9 << 20, 9 << 20]), np.array([20])]).rows.tolist()
        [2, 1]
    """
    step = block_bytes or SEEKABLE_BLOCK_BYTES
    firsts, before = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    rows, total, last = 0, 0, -1
    for run in sizes:
        if len(run):
            starts = np.cumsum(run)
            end = total + int(starts[-1])
            starts += total - run
            final = 0 if whole else int(starts[-1]) // step
            # A block begins with the first row at or behind a multiple of its size.
            new = np.unique(np.searchsorted(starts, np.arange(last + 1, final + 1) * step))
            firsts.append(rows + new)
            before.append(starts[new])
            rows, total, last = rows + len(run), end, final
    bounds, bytes_before = np.concatenate([*firsts, [rows]]), np.concatenate([*before, [total]])
    start, stop = bounds[:-1].copy(), bounds[1:].copy()
    return BlockIndex(stop - start, np.diff(bytes_before), start, stop, start)


class Reader(Protocol):
    """Reads one format. Stateless: everything it needs is in the arguments, so threads may share it.

    A class of the user's own (`format="module:Class"`) may also have `suffixes`, the ends of the names of files that
    are data in a folder, in lower case; and `native`, True where native code decodes the files, which are then read in
    reader processes. A method `ranges(file, index, block, columns)` tells which bytes of a file a block takes, so that
    those of remote files are fetched ahead. `overlord.testing.check_reader` tries it.
    """

    name: str
    """The name of the format; the user's own get theirs from the source."""

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

        Every batch has the wanted columns and `BAD_COLUMN`: why a row is bad, 0 for a good one. The stream holds about
        twice what it yields at a time; what has to be decoded in larger pieces is spilled to `scratch`, a folder that
        is created when needed. Without a folder everything is held in memory: the caller writes the rows to disk.

        Raises:
            ReaderError: There is no room in `scratch`.
        """
        ...

    def divides(self, file: StoredFile) -> bool:
        """Return whether blocks of a file may have any size, so that a shuffle cuts large ones into parts.

        Blocks of about `BLOCK_BYTES` that the reader makes itself are not cut.
        """
        ...

    def seeks(self, file: StoredFile) -> bool:
        """Return whether skipping rows of a block costs nothing; otherwise a block that is read in parts is spilled."""
        ...

    def columns(self, file: StoredFile) -> list[str]:
        """Return the columns of a file (for previews, lint and error messages)."""
        ...

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return the kinds of the wanted columns, None where the file's head has no value of a column.

        A column that the head does not name is left out.
        """
        ...


class CompressibleReader:
    """What readers of JSON lines and tar shards share: a compressed file is unpacked, and read as one that is not."""

    def ranges(self, file: StoredFile, index: BlockIndex, block: int, columns: Sequence[str]) -> list[tuple[int, int]]:
        """Return the bytes of a block; the first ones of a compressed file, which is read ahead from there."""
        if compression_of_name(file.path) is not None:
            return [(0, min(file.size, _FIRST_BYTES))]
        return [(int(index.start[block]), int(index.stop[block]))]

    def divides(self, file: StoredFile) -> bool:
        """Return whether a file is compressed: then its blocks are read in parts, as they are unpacked."""
        return file.compression is not None

    def seeks(self, file: StoredFile) -> bool:
        """Return False: the rows before a part have to be read."""
        return False


class SeekableReader:
    """What readers share that reach any row at once, and make blocks of about `BLOCK_BYTES` themselves."""

    def divides(self, file: StoredFile) -> bool:
        """Return False: blocks are small."""
        return False

    def seeks(self, file: StoredFile) -> bool:
        """Return True: skipped rows are not read."""
        return True


class FileBytes(Protocol):
    """The bytes of a file, decompressed."""

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes at an offset, fewer at the end."""
        ...


class RandomBytes:
    """Bytes at any offset, read through a window: one request serves many small members."""

    def __init__(self, native: pa.NativeFile, size: int, window_bytes: int) -> None:
        self._native = native
        self._size = size
        self._window_bytes = window_bytes
        self._window = b""
        self._window_at = 0

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes, fewer at the end of the file."""
        if at > self._size:
            raise cut_short(self._size)
        if not self._window_at <= at <= at + count <= self._window_at + len(self._window):
            self._window = self._native.read_at(min(max(count, self._window_bytes), self._size - at), at)
            self._window_at = at
        return self._window[at - self._window_at :][:count]


class ForwardBytes:
    """Bytes of a stream that can only go forward (a compressed file)."""

    def __init__(self, native: ByteStream) -> None:
        self._native = native
        self._at = 0

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes, fewer at the end; `at` must not decrease."""
        while self._at < at:
            passed = self._native.read(min(at - self._at, 1 << 20))
            if not passed:
                raise cut_short(self._at)
            self._at += len(passed)
        parts: list[bytes] = []
        while count:
            part = self._native.read(count)
            if not part:
                break
            parts.append(part)
            count -= len(part)
            self._at += len(part)
        return b"".join(parts)


def random_bytes(file: StoredFile, native: pa.NativeFile) -> RandomBytes:
    """Return the bytes of an open file, with a window that suits where it is stored."""
    return RandomBytes(native, file.size, _LOCAL_WINDOW_BYTES if file.is_local else _REMOTE_WINDOW_BYTES)


@contextlib.contextmanager
def open_bytes(file: StoredFile) -> Iterator[FileBytes]:
    """Open a file that may be compressed as a whole; then its bytes can only be read front to back."""
    if file.compression is not None:
        with file.open_stream(file.compression) as native:
            yield ForwardBytes(native)
        return
    with file.open() as native:
        yield random_bytes(file, native)


def cut_short(at: int) -> DamagedFile:
    """Return the error for a file that ends too early."""
    return DamagedFile(f"it is cut short at byte {at}")


def read_exactly(data: FileBytes, at: int, count: int) -> bytes:
    """Return `count` bytes at an offset.

    Raises:
        DamagedFile: The file ends before they do.
    """
    found = data.read(at, count)
    if len(found) < count:
        raise cut_short(at + len(found))
    return found


def reason_of(error: BaseException) -> str:
    """Return a short quote of an error: its first sentence, at most 160 characters.

    Example:
        >>> reason_of(OSError("Disk on fire. Detail: many words"))
        'Disk on fire'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return shortened(text.split(". ")[0].split(" Detail:")[0])


def unreadable(file: StoredFile, reason: str) -> SourceError:
    """Return the error for a file that cannot be indexed or has no usable schema."""
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


def require_kind(found: Kind | None, wanted: Kind, *, path: str, column: str, holds: str) -> None:
    """Check that a column of a file reads as the source's column does; whole numbers may be read as floats.

    Raises:
        ReaderError: It does not; `holds` says what the file has instead.
    """
    if found not in (None, wanted) and (found, wanted) not in (("int", "float"), ("int_list", "float_list")):
        raise ReaderError(
            f"column {column!r} of {path} holds {holds}, which reads as {found!r}, but in the first file of the source "
            f"it reads as {wanted!r}; their rows cannot be mixed. Write the files with one type, or make them two "
            "sources."
        )
