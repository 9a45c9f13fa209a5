"""JSON lines: a block is a run of whole lines of about 1 MiB.

A line that is not UTF-8, not an object, or lacks a wanted column is a bad row; blank lines are no rows.

    JsonlReader    yields parsed rows
    LineReader     yields lines, which are parsed where their samples are made: `ParseLines` makes rows of them
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from overlord.core.ragged import (
    BAD_COLUMN,
    NOT_PARSED,
    NOT_UTF8,
    TOO_LARGE,
    Kind,
    Ragged,
    RowBatch,
    no_value,
    offsets_of,
    other_kind,
    sizes_column,
)
from overlord.readers.files import ByteStream, StoredFile, verify_unchanged
from overlord.readers.reader import BLOCK_BYTES, HEAD_ROWS, BlockIndex, CompressibleReader
from overlord.readers.unpacked import PlainFile

_INT64 = range(-(1 << 63), 1 << 63)
_LOCAL_CHUNK_BYTES = 64 << 10
_REMOTE_CHUNK_BYTES = 256 << 10
_INDEX_CHUNK_BYTES = 256 << 10
_MOST_CHUNK_BYTES = 16 << 20
_HEAD_BYTES = 4 << 20
"""The head of a file, at most; a longer first line is still read completely."""
_HEAD_PASSED_BYTES = 1 << 30
"""Bytes of a line that is too long which are passed over to look at the lines after it, where only a head is read."""
_HEAD_BLANK_BYTES = 4 << 20
"""Bytes of blank lines that are passed over where only a head is read: a small compressed file may hold gigabytes."""
_MOST_VALUES = 1 << 24
"""Values in a line of JSON: objects in Python take far more memory than `[],[],[],..`."""
_PASSED_OVER = b"-"
"""Stands for a line that is not held in memory; it is not blank, so that it counts as a row."""
_BLANKS = bytes(range(33))
_NEWLINE = 10
_NO_END = 1 << 62
_LINES = "=lines"
"""The column of lines that are not parsed; "=" keeps its name apart from those of a source's columns."""


class JsonlReader(CompressibleReader):
    """Reads JSON lines. In its index, start and stop are offsets in the decompressed bytes."""

    name = "jsonl"

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Find the blocks of a file; lines are counted, not parsed."""
        with file.open_stream(file.compression) as native:
            return BlockIndex.of(list(self.find_blocks(file, native, columns)))

    def find_blocks(
        self, file: StoredFile, native: ByteStream, columns: Sequence[str]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield (rows, bytes, start, stop) of the blocks of a stream, each as soon as its end is read."""
        start, at, rows = 0, 0, 0
        for length, blank in _line_lengths(native):
            at += length
            rows += not blank
            if at - start >= BLOCK_BYTES:
                yield rows, at - start, start, at
                start, rows = at, 0
        if rows:
            yield rows, at - start, start, at

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
        lines = itertools.islice(_lines(file, int(index.start[block]), int(index.stop[block])), skip, None)
        return batches_of((_cells(line, columns) for line in lines), columns, batch_rows)

    def columns(self, file: StoredFile) -> list[str]:
        """Return the keys of the objects in the head of the file, in the order they appear."""
        return list(dict.fromkeys(key for row in _head(file) for key in row))

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return the kinds of the wanted columns, by the head of the file."""
        head = _head(file)
        found: dict[str, Kind | None] = {}
        for column in columns:
            values = [reach(row, column) for row in head]
            if any(value is not None for value in values) or any(column in row for row in head):
                found[column] = kind_of_values(values)
        return found


class LineReader(JsonlReader):
    """Reads the lines of files as they are: finding their ends takes little time."""

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
        """Yield the lines of one block."""
        parts: list[bytes] = []  # of a line whose end has not come, and then what comes up to the last end of a chunk
        held, large = 0, False  # bytes of that line so far, and whether they are too many
        row_bytes = int(index.bytes[block]) // max(int(index.rows[block]), 1)
        nbytes = min(batch_rows * row_bytes, _MOST_CHUNK_BYTES)
        for chunk in itertools.chain(_chunks(file, int(index.start[block]), int(index.stop[block]), nbytes), [b"\n"]):
            cut = chunk.rfind(b"\n") + 1
            parts.append(chunk[:cut] if cut else chunk)
            if not cut:
                held += len(chunk)
                if held > file.max_row_bytes:  # what is left of the line is passed over; it is no row
                    parts, large = [_PASSED_OVER], True
                continue
            if large:
                parts[-1] = chunk[chunk.index(b"\n") : cut]
            data = bytearray().join(parts)  # it can be written to: numba would compile kernels anew for other arrays
            parts, held = [chunk[cut:]], len(chunk) - cut
            values = np.frombuffer(data, np.uint8)
            begins = np.concatenate([[0], np.flatnonzero(values == _NEWLINE) + 1])
            blank = values[begins[:-1]] < len(_BLANKS)
            for at in np.flatnonzero(blank).tolist():
                blank[at] = not data[begins[at] : begins[at + 1]].strip(_BLANKS)
            marks = np.where(np.diff(begins) - 1 > file.max_row_bytes, TOO_LARGE, 0).astype(np.int16)
            marks[0] = TOO_LARGE if large else marks[0]
            large = False
            # Blank lines are a part of the row before them, where `ParseLines` does not look at them.
            offsets, marks = np.concatenate([begins[:-1][~blank], begins[-1:]])[skip:], marks[~blank][skip:]
            skip = max(0, skip - int((~blank).sum()))
            for at in range(0, len(offsets) - 1, batch_rows):
                lines = Ragged(values, offsets[at : at + batch_rows + 1])
                yield {_LINES: lines, BAD_COLUMN: marks[at : at + batch_rows]}


def _chunks(file: StoredFile, start: int, stop: int, nbytes: int) -> Iterator[bytes]:
    """Yield the bytes of a range, about so many at a time."""
    if not file.is_local:
        with file.open() as native:
            native.seek(start)
            while start < stop and (chunk := native.read(min(_REMOTE_CHUNK_BYTES, stop - start))):
                start += len(chunk)
                yield chunk
        return
    while start < stop:
        # Opened for every chunk: the streams of hundreds of sources would hold more files than a process may open.
        with file.open() as native:
            chunk = native.read_at(min(max(_LOCAL_CHUNK_BYTES, nbytes), stop - start), start)
        if not isinstance(file, PlainFile):
            verify_unchanged(file)  # so it is not cut short, and the chunk is not empty
        start += len(chunk)
        yield chunk


@dataclass(frozen=True, slots=True)
class ParseLines:
    """Makes rows of lines that a LineReader has read. It is sent to process workers.

    Example:
        >>> rows = {"=lines": Ragged.from_rows([b'{"text": "a"}', b"{oops"]), "__bad__": np.zeros(2, np.int16)}
        >>> found = ParseLines({"text": "bytes"})(rows)
        >>> bytes(found["text"].values), found["__bad__"].tolist() == [0, NOT_PARSED]
        (b'a', True)
    """

    columns: Mapping[str, Kind]
    """The columns that are read."""

    def __call__(self, rows: RowBatch) -> RowBatch:
        """Return the rows; one that is marked as bad is not looked at."""
        lines, marks = rows[_LINES], np.asarray(rows[BAD_COLUMN])
        assert isinstance(lines, Ragged)
        data, begin = lines.compact().values.tobytes(), (lines.offsets - lines.offsets[0]).tolist()
        builder = RowBuilder(self.columns)
        for at, mark in enumerate(marks.tolist()):
            line = data[begin[at] : begin[at + 1]].partition(b"\n")[0]
            builder.add(NOT_PARSED if mark else _cells(line, self.columns))
        parsed = builder.finish()
        return parsed | {BAD_COLUMN: np.where(marks, marks, np.asarray(parsed[BAD_COLUMN]))}


def why_no_row(file: StoredFile) -> str | None:
    """Return why the first lines of a file are not rows; None if all lines are blank."""
    first = next(_lines(file, 0, None, _HEAD_PASSED_BYTES), b"")
    if first is None:
        return f"its first line has more than max_row_bytes={file.max_row_bytes} of the source"
    if not first:
        return None
    wrong = _not_utf8(first)
    if wrong is not None:
        return (
            f"it is not UTF-8 (byte {wrong} of line 1 is {first[wrong : wrong + 1]!r}); convert it, for instance with "
            "`iconv -f latin1 -t utf-8`"
        )
    text = first.decode("utf-8-sig", "replace").strip()
    if text.startswith("["):
        return "it holds a JSON array, and JSON lines are read: one object a line, without commas between them"
    shown = repr(first[:20])[1:] if "\N{REPLACEMENT CHARACTER}" in text[:40] else repr(text[:40])
    return f"none of its first lines is a JSON object (line 1 begins with {shown})"


def _head(file: StoredFile) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    read = 0
    for line in _lines(file, 0, None, _HEAD_PASSED_BYTES):
        row = None if line is None else parse_object(line)
        if row is not None:
            rows.append(row)
        read += 0 if line is None else len(line)
        if len(rows) == HEAD_ROWS or read >= _HEAD_BYTES:
            break
    return rows


def _lines(file: StoredFile, start: int, stop: int | None, most_passed: int | None = None) -> Iterator[bytes | None]:
    """Yield the lines of a range that are not blank, without their ends; None for one with more than `max_row_bytes`.

    Such a line is passed over without being held in memory; one with more than `most_passed` bytes is the last one.
    With `most_passed`, the lines also end where too many blank ones follow one another.
    """
    compression = file.compression
    chunk_bytes = _LOCAL_CHUNK_BYTES if file.is_local or compression else _REMOTE_CHUNK_BYTES
    with _open(file, start) as native:
        # A line may span several chunks: `parts` collects the beginning of a line until its newline comes.
        left = stop - start if stop is not None else _NO_END if compression else file.size
        parts, held, blank = list[bytes](), 0, 0
        while chunk := native.read(min(chunk_bytes, left)):
            left -= len(chunk)
            head, newline, rest = chunk.partition(b"\n")
            held += len(head)
            parts.append(head)
            if held > file.max_row_bytes:
                parts.clear()
                if most_passed is not None and held > most_passed:
                    yield None
                    return
            if not newline:
                continue
            lines: list[bytes | None] = [b"".join(parts) if held <= file.max_row_bytes else None]
            parts = rest.split(b"\n")
            lines += parts[:-1]
            del parts[:-1], chunk, head, rest  # the generator may be suspended here for long: keep the lines only once
            held = len(parts[0])
            for line in lines:
                if line is None or len(line) > file.max_row_bytes:
                    yield None
                elif line.strip(_BLANKS):
                    yield line
                else:
                    blank += len(line) + 1
                    continue
                blank = 0
            if most_passed is not None and blank > _HEAD_BLANK_BYTES:
                return
        last = b"".join(parts)
        if held > file.max_row_bytes:
            yield None
        elif last.strip(_BLANKS):
            yield last


@contextlib.contextmanager
def _open(file: StoredFile, start: int) -> Iterator[ByteStream]:
    if file.compression is not None:
        with file.open_stream(file.compression) as stream:
            while start and (passed := stream.read(min(start, _INDEX_CHUNK_BYTES))):
                start -= len(passed)
            yield stream
        return
    with file.open() as native:
        native.seek(start)
        yield native


def _line_lengths(native: ByteStream) -> Iterator[tuple[int, bool]]:
    """Yield (bytes with the newline, whether it is blank) of every line, without keeping a line in memory."""
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


# From parsed JSON values to columns; also used for the json members of tar shards. JSON has no schema: the kind of a
# column is decided once, from the head of a source, and a row that does not fit it is bad. So all batches of a source
# have the same columns of the same types.


_decode = msgspec.json.Decoder().decode
_BEGINS = (b"[", b"{", b",")
"""Every value but the first of all has one of them before it; texts may hold them too."""


def _cells(line: bytes | None, columns: Iterable[str]) -> list[Any] | int:
    """Return the values of a line, or why it is no row, as a mark of `BAD_COLUMN`."""
    if line is None:
        return TOO_LARGE
    row = parse_object(line)
    if row is None:
        return NOT_PARSED if _not_utf8(line) is None else NOT_UTF8
    return [reach(row, column) for column in columns]


def _not_utf8(data: bytes) -> int | None:
    """Return where some bytes are not UTF-8; None where all are."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line of UTF-8, or None if there is none.

    Example:
        >>> parse_object(b'{"a": 1}'), parse_object(b"[1]"), parse_object(b"{oops")
        ({'a': 1}, None, None)
    """
    value = parse_value(line)
    return value if isinstance(value, dict) else None


def parse_value(data: bytes) -> Any:
    """Return the JSON value in some bytes of UTF-8, or None if there is none, or it is of more than `_MOST_VALUES`."""
    if len(data) > _MOST_VALUES and sum(map(data.count, _BEGINS)) > _MOST_VALUES:
        return None
    try:
        return _decode(data)
    except (ValueError, RecursionError):
        # msgspec takes a quarter of the time; json also takes a byte-order mark, NaN, infinity and lone surrogates.
        try:
            return json.loads(data.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return None


def reach(value: Any, column: str) -> Any:
    """Return the value of a column in an object, or None; a dot reaches into nested objects.

    Example:
        >>> reach({"meta": {"lang": "en"}}, "meta.lang")
        'en'
    """
    if not isinstance(value, dict):
        return None
    if column in value:
        return value[column]
    head, dot, rest = column.partition(".")
    return reach(value.get(head), rest) if dot else None


def kind_of_value(value: Any) -> Kind | None:
    """Return the kind of one value; None for null and an empty list."""
    match value:
        case None | []:
            return None
        case bool() | int():
            return "int"
        case float():
            return "float"
        case str() | bytes():
            return "bytes"
        case list() if all(type(item) is int for item in value):
            return "int_list"
        case list() if all(type(item) in (int, float) for item in value):
            return "float_list"
        case _:
            return "json"


def kind_of_values(values: Iterable[Any]) -> Kind | None:
    """Return the kind of a column: that of its first value with a kind, widened to float if a later one is.

    Example:
        >>> kind_of_values([None, 1, 0.5])
        'float'
    """
    kinds: list[Kind] = [kind for kind in map(kind_of_value, values) if kind is not None]
    if not kinds:
        return None
    wider: dict[Kind, Kind] = {"int": "float", "int_list": "float_list"}
    return wider[kinds[0]] if wider.get(kinds[0]) in kinds else kinds[0]


class RowBuilder:
    """Collects rows of Python values into a batch of columns.

    Example:
        >>> builder = RowBuilder({"text": "bytes", "stars": "int"})
        >>> builder.append(["good", 5])
        >>> builder.append(["no stars", None])
        >>> builder.finish()["__bad__"].tolist() == [0, no_value(1)]
        True
    """

    def __init__(self, columns: Mapping[str, Kind]) -> None:
        self._kinds = dict(columns)
        self._cells: list[list[Any]] = [[] for _ in columns]
        self._marks: list[int] = []

    def __len__(self) -> int:
        return len(self._marks)

    def append(self, values: Sequence[Any]) -> None:
        """Add a row, one value per column; None or a value of another kind makes it a bad row."""
        encoded = [_encode(value, kind) for value, kind in zip(values, self._kinds.values(), strict=True)]
        for cells, cell, kind in zip(self._cells, encoded, self._kinds.values(), strict=True):
            cells.append(_EMPTY[kind] if cell is None else cell)
        wrong = next((at for at, cell in enumerate(encoded) if cell is None), None)
        self._marks.append(0 if wrong is None else no_value(wrong) if values[wrong] is None else other_kind(wrong))

    def add(self, values: Sequence[Any] | int) -> None:
        """Add a row; a number is the mark of one that could not be read."""
        self.append([None] * len(self._kinds) if isinstance(values, int) else values)
        if isinstance(values, int):
            self._marks[-1] = values

    def finish(self) -> RowBatch:
        """Return the batch and begin the next one."""
        batch: RowBatch = {}
        for (name, kind), cells in zip(self._kinds.items(), self._cells, strict=True):
            if kind == "bytes_list":
                batch[name] = _column("bytes", [b"".join(cell) for cell in cells])
                batch[sizes_column(name)] = _column("int_list", [[len(item) for item in cell] for cell in cells])
            else:
                batch[name] = _column(kind, cells)
        batch[BAD_COLUMN] = np.array(self._marks, np.int16)
        self._cells = [[] for _ in self._kinds]
        self._marks = []
        return batch


def batches_of(rows: Iterable[Sequence[Any] | int], columns: Mapping[str, Kind], batch_rows: int) -> Iterator[RowBatch]:
    """Yield rows of values as batches of columns; a number is the mark of a row that could not be read."""
    builder = RowBuilder(columns)
    for row in rows:
        builder.add(row)
        if len(builder) == batch_rows:
            yield builder.finish()
    if len(builder):
        yield builder.finish()


_EMPTY: dict[Kind, Any] = {
    "bytes": b"",
    "json": b"",
    "int": 0,
    "float": 0.0,
    "int_list": (),
    "float_list": (),
    "bytes_list": (),
}


def _column(kind: Kind, cells: list[Any]) -> Any:
    if kind in ("bytes", "json"):
        values = np.frombuffer(b"".join(cells), np.uint8)
        return Ragged(values, offsets_of([len(cell) for cell in cells]))
    dtype = np.int64 if kind.startswith("int") else np.float64
    if kind in ("int", "float"):
        return np.array(cells, dtype)
    flat = np.fromiter((item for cell in cells for item in cell), dtype)
    return Ragged(flat, offsets_of([len(cell) for cell in cells]))


def _encode(value: Any, kind: Kind) -> Any:
    """Return a cell of this kind, or None if the value is of another."""
    match kind:
        case "bytes":
            return value if isinstance(value, bytes) else _utf8(value)
        case "json":
            return _json_text(value) if isinstance(value, dict | list) else None
        case "int":
            return _int64(value)
        case "float":
            return _float64(value)
        case "bytes_list":  # members of an archive; JSON has no bytes
            return value if isinstance(value, list) else None
        case "int_list" | "float_list":
            if not isinstance(value, list):
                return None
            one = _int64 if kind == "int_list" else _float64
            cells = [one(item) for item in value]
            return None if any(cell is None for cell in cells) else cells


def _json_text(value: Any) -> bytes | None:
    try:
        return _utf8(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    except RecursionError:  # it was nested just deeply enough to be parsed
        return None


def _utf8(value: Any) -> bytes | None:
    if not isinstance(value, str):
        return None
    try:
        return value.encode()
    except UnicodeEncodeError:  # half a surrogate pair: possible in JSON, not in UTF-8
        return None


def _int64(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return int(value) if isinstance(value, int) and value in _INT64 else None


def _float64(value: Any) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
