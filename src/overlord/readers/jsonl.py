"""JSON lines: a block is a run of whole lines of about 1 MiB, or the whole of a compressed file.

A line that is not UTF-8, not an object, or lacks a wanted column is a bad row; blank lines are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlord.core.ragged import RowBatch
from overlord.readers.filesystems import ByteStream, StoredFile
from overlord.readers.json_columns import HEAD_ROWS, RowBuilder, kind_of_values, parse_object, reach
from overlord.readers.reader import BLOCK_BYTES, BlockIndex, Kind
from overlord.readers.suffixes import compression_of_name

_LOCAL_CHUNK_BYTES = 64 << 10
_REMOTE_CHUNK_BYTES = 256 << 10
_INDEX_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 4 << 20
"""How far into a file its head may reach; a line longer than that is still read whole."""
_BLANKS = bytes(range(33))


class JsonlReader:
    """Reads JSON lines. In its index, start and stop are offsets in the decompressed bytes."""

    name = "jsonl"

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Find the blocks of a file; lines are counted, not parsed."""
        whole = compression_of_name(file.path) is not None
        blocks: list[tuple[int, int, int, int]] = []
        start, at, rows = 0, 0, 0
        with file.open_stream(compression_of_name(file.path)) as native:
            for length, blank in _line_lengths(native):
                at += length
                rows += not blank
                if at - start >= BLOCK_BYTES and not whole:
                    blocks.append((rows, at - start, start, at))
                    start, rows = at, 0
        if rows:
            blocks.append((rows, at - start, start, at))
        return BlockIndex.of(blocks)

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
        """Yield the rows of one block; skipped lines are not parsed."""
        builder = RowBuilder(columns)
        for line in _lines(file, int(index.start[block]), int(index.stop[block])):
            if skip:
                skip -= 1
                continue
            row = parse_object(line)
            if row is None:
                builder.append_bad()
            else:
                builder.append([reach(row, column) for column in columns])
            if len(builder) == batch_rows:
                yield builder.finish()
        if len(builder):
            yield builder.finish()

    def divides(self, file: StoredFile) -> bool:
        """Tell whether a file is compressed: then it is one block."""
        return compression_of_name(file.path) is not None

    def seeks(self, file: StoredFile) -> bool:
        """Tell that rows before a part have to be read."""
        return False

    def columns(self, file: StoredFile) -> list[str]:
        """Return the keys of the objects in the head of the file, in the order they appear."""
        return list(dict.fromkeys(key for row in _head(file) for key in row))

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return what the wanted columns hold, by the head of the file."""
        head = _head(file)
        found: dict[str, Kind | None] = {}
        for column in columns:
            values = [reach(row, column) for row in head]
            if any(value is not None for value in values) or any(column in row for row in head):
                found[column] = kind_of_values(values)
        return found


def why_no_row(file: StoredFile) -> str | None:
    """Return why no line of a file's head is a row; None where all lines are blank."""
    first = next(_lines(file, 0, None), None)
    if first is None:
        return None
    text = first.decode("utf-8-sig", "replace").strip()
    if text.startswith("["):
        return "it holds a JSON array, and JSON lines are read: one object a line, without commas between them"
    return f"none of its first lines is a JSON object (line 1 begins with {text[:40]!r})"


def _head(file: StoredFile) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    read = 0
    for line in _lines(file, 0, None):
        row = parse_object(line)
        if row is not None:
            rows.append(row)
        read += len(line)
        if len(rows) == HEAD_ROWS or read >= _HEAD_BYTES:
            break
    return rows


def _lines(file: StoredFile, start: int, stop: int | None) -> Iterator[bytes]:
    """Yield the lines of a range that are not blank, without their ends."""
    compression = compression_of_name(file.path)
    chunk_bytes = _LOCAL_CHUNK_BYTES if file.is_local or compression else _REMOTE_CHUNK_BYTES
    with _open(file, start) as native:
        left = stop - start if stop is not None else file.size
        parts: list[bytes] = []
        while chunk := native.read(chunk_bytes if compression else min(chunk_bytes, left)):
            left -= len(chunk)
            head, newline, rest = chunk.partition(b"\n")
            parts.append(head)
            if not newline:
                continue
            lines = [b"".join(parts), *rest.split(b"\n")]
            parts = [lines.pop()]
            del chunk, head, rest  # lines wait here to be asked for: once is enough
            yield from (line for line in lines if line.strip(_BLANKS))
        last = b"".join(parts)
        if last.strip(_BLANKS):
            yield last


@contextlib.contextmanager
def _open(file: StoredFile, start: int) -> Iterator[ByteStream]:
    compression = compression_of_name(file.path)
    if compression is not None:  # one block, which begins at 0
        with file.open_stream(compression) as stream:
            yield stream
        return
    with file.open() as native:
        native.seek(start)
        yield native


def _line_lengths(native: ByteStream) -> Iterator[tuple[int, bool]]:
    """Yield (bytes with the newline, whether it is blank) of every line, without holding a line."""
    length, blank = 0, True
    while chunk := native.read(_INDEX_CHUNK_BYTES):
        lines = chunk.split(b"\n")
        for line in lines[:-1]:
            yield length + len(line) + 1, blank and not line.strip(_BLANKS)
            length, blank = 0, True
        length += len(lines[-1])
        blank = blank and not lines[-1].strip(_BLANKS)
    if length:
        yield length, blank
