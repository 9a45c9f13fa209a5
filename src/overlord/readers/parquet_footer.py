"""Cuts the footer of a Parquet file down to the row groups that are needed, before pyarrow parses it.

A footer of 1,000 row groups and 20 columns is 2.3 MB on disk and 18 MB once pyarrow has parsed it, for
every open stream. A footer is a list of row groups between a schema and further fields (Thrift, compact
protocol), so a footer of one row group is three slices of it, and takes a few kilobytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from overlord.core.kernels import kernel
from overlord.readers.reader import DamagedFile, Int64s

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"PAR1"
_TAIL_BYTES = 64 << 10
"""Bytes that are read from the end of a file first: most footers are smaller."""
_ROW_GROUPS_FIELD = 4
_LIST_OF_STRUCTS = 0x0C
_MAX_DEPTH = 64
MOST_FIELDS = 20
"""Fields of a struct that are looked at."""
_LIST, _STRUCT = 9, 12


@dataclass(frozen=True, slots=True)
class Footer:
    """The bytes of a footer and where its row groups are in them."""

    data: bytes
    list_at: int
    """Where the list of row groups begins."""
    bounds: Int64s
    """Where each row group begins, and where the last one ends."""

    @property
    def num_row_groups(self) -> int:
        """How many row groups the file has."""
        return len(self.bounds) - 1

    def row_group(self, number: int) -> RowGroup:
        """Return the part of the footer that is of one row group."""
        begin, end = int(self.bounds[number]), int(self.bounds[number + 1])
        return RowGroup(self.data[: self.list_at], self.data[begin:end], self.data[int(self.bounds[-1]) :])

    def metadata(self, first: int, stop: int) -> pq.FileMetaData:
        """Return the metadata of a file that has only row groups first .. stop."""
        begin, end = int(self.bounds[first]), int(self.bounds[stop])
        return parse_footer(
            self.data[: self.list_at]
            + list_header(stop - first)
            + self.data[begin:end]
            + self.data[int(self.bounds[-1]) :]
        )


@dataclass(frozen=True, slots=True)
class RowGroup:
    """What a footer says of one row group, and of all of them."""

    head: bytes
    """What is before the row groups: the schema."""
    data: bytes
    """The row group."""
    rest: bytes
    """What is behind the row groups: further metadata."""

    def metadata(self) -> pq.FileMetaData:
        """Return the metadata of a file that has only this row group."""
        return parse_footer(self.head + list_header(1) + self.data + self.rest)

    def columns(self) -> list[ColumnChunk]:
        """Return what is said of each leaf column.

        Raises:
            DamagedFile: The footer is damaged.
        """
        numbers = np.frombuffer(self.data, np.uint8)
        fields = spans_of(numbers, 0)
        if fields[1, 0] != _LIST:
            raise DamagedFile("the footer is damaged")
        count, inner, at = _list_start(numbers, int(fields[1, 1]))
        bounds = np.empty(min(count, len(numbers)) + 1, np.int64)
        if inner != _STRUCT or not _row_group_bounds(numbers, at, bounds):
            raise DamagedFile("the footer is damaged")
        return [ColumnChunk(numbers, int(at)) for at in bounds[:-1]]


class ColumnChunk:
    """What a footer says of one leaf column of a row group: the fields that pyarrow does not tell, and their bytes."""

    def __init__(self, data: Bytes, at: int) -> None:
        self._data = data
        self._chunk = spans_of(data, at)
        has_meta = self._chunk[3, 0] == _STRUCT
        self._meta = spans_of(data, int(self._chunk[3, 1])) if has_meta else np.zeros_like(self._chunk)
        self.is_elsewhere = bool(self._chunk[1, 0] or self._chunk[8, 0] or self._chunk[9, 0] or not has_meta)
        """Whether it is encrypted, or in another file."""
        self.codec = self._number(4)
        self.num_values = self._number(5)
        self.uncompressed = self._number(6)
        self.size = self._number(7)
        """Bytes of all of its pages, as they are stored."""
        data_at, dictionary_at = self._number(9), self._number(11)
        self.begin = min(data_at, dictionary_at) if dictionary_at > 0 else data_at
        """Where its first page is in the file."""
        self.encodings = self._numbers(2)
        self.page_index = _int(data, self._chunk[4]), _int(data, self._chunk[5])
        """Where the index of its pages is in the file, and its bytes; 0 where there is none."""

    @property
    def end(self) -> int:
        """Where its last page ends."""
        return self.begin + self.size

    def raw(self, field: int) -> bytes:
        """Return the bytes of a field of its metadata."""
        _, begin, end = self._meta[field].tolist()
        return self._data[begin:end].tobytes()

    def pages(self) -> dict[tuple[int, int], int] | None:
        """Return how many pages there are of each (type, encoding), None where the writer did not say."""
        if self._meta[13, 0] != _LIST:
            return None
        found: dict[tuple[int, int], int] = {}
        count, inner, at = _list_start(self._data, int(self._meta[13, 1]))
        for _ in range(count if inner == _STRUCT else 0):
            fields = spans_of(self._data, int(at))
            kind, encoding, pages = (_int(self._data, fields[n]) for n in (1, 2, 3))
            found[kind, encoding] = found.get((kind, encoding), 0) + pages
            at = _skip_struct(self._data, at)
        return found

    def _number(self, field: int) -> int:
        return _int(self._data, self._meta[field])

    def _numbers(self, field: int) -> list[int]:
        kind, begin, end = self._meta[field].tolist()
        if kind != _LIST:
            return []
        count, _, at = _list_start(self._data, begin)
        found: list[int] = []
        while len(found) < count and at < end:
            value, at = varint(self._data, at)
            found.append(int(value >> 1) ^ -int(value & 1))
        return found


def spans_of(data: Bytes, at: int) -> Int64s:
    """Return (type, begin, end) of the value of each field of a struct; type 0 where it has none of that number.

    Raises:
        DamagedFile: There is no such struct.
    """
    fields = np.empty((MOST_FIELDS, 3), np.int64)
    if field_spans(data, at, fields) < 0:
        raise DamagedFile("the footer is damaged")
    return fields


def page_locations(data: Bytes) -> Int64s:
    """Return (offset, bytes with the header, first row) of every page, from the index of the pages of a column chunk.

    Raises:
        DamagedFile: It is no such index.
    """
    fields = spans_of(data, 0)
    count, inner, at = _list_start(data, int(fields[1, 1]))
    bounds = np.empty(min(count, len(data)) + 1, np.int64)
    if fields[1, 0] != _LIST or inner != _STRUCT or not _row_group_bounds(data, at, bounds):
        raise DamagedFile("the index of pages is damaged")
    rows = [[_int(data, spans_of(data, int(at))[n]) for n in (1, 2, 3)] for at in bounds[:-1]]
    return np.array(rows, np.int64).reshape(-1, 3)


def _int(data: Bytes, span: Int64s) -> int:
    kind, begin, _ = span.tolist()
    if not 4 <= kind <= 6:
        return 0
    value, _ = varint(data, begin)
    return int(value >> 1) ^ -int(value & 1)


def read_footer(native: pa.NativeFile, size: int) -> Footer:
    """Read the footer of a file and find its row groups.

    Raises:
        DamagedFile: It is not a Parquet file, it is encrypted, or its end is damaged.
    """
    data = _footer_bytes(native, size)
    numbers = np.frombuffer(data, np.uint8)
    at, count, list_at = _find_row_groups(numbers)
    if at < 0:
        raise DamagedFile("the footer is damaged")
    bounds = np.empty(count + 1, np.int64)
    if not _row_group_bounds(numbers, at, bounds):
        raise DamagedFile("the footer is damaged")
    return Footer(data, int(list_at), bounds)


def read_row_group(native: pa.NativeFile, size: int, index_start: Int64s, index_stop: Int64s, block: int) -> RowGroup:
    """Return what the footer says of one row group from its position in the footer, which the index has."""
    tail, length = _tail(native, size)
    begin = size - 8 - length
    list_at = int(index_start[0]) - len(list_header(len(index_start)))
    slices = [(0, list_at), (int(index_start[block]), int(index_stop[block])), (int(index_stop[-1]), length)]
    if length + 8 <= len(tail):
        whole = tail[-8 - length : -8]
        head, group, rest = (whole[first:stop] for first, stop in slices)
    else:
        head, group, rest = (native.read_at(stop - first, begin + first) for first, stop in slices)
    return RowGroup(head, group, rest)


def warm_footer() -> None:
    """Load the kernels of this file."""
    nothing = np.frombuffer(b"\0", np.uint8)  # read-only, as footers are: numba compiles for that
    _find_row_groups(nothing)
    _row_group_bounds(nothing, 0, np.zeros(1, np.int64))
    field_spans(nothing, 0, np.empty((MOST_FIELDS, 3), np.int64))
    _list_start(nothing, 0)
    varint(nothing, 0)
    _skip_struct(nothing, 0)


def _tail(native: pa.NativeFile, size: int) -> tuple[bytes, int]:
    """Return the last bytes of a file and the length of its footer."""
    if size < 12:
        raise DamagedFile("it is too short to be a Parquet file")
    tail = native.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
    if tail[-4:] == b"PARE":
        raise DamagedFile("its footer is encrypted")
    if tail[-4:] != _MAGIC:
        raise DamagedFile("it does not end as a Parquet file does, so it is cut short or another format")
    length = int.from_bytes(tail[-8:-4], "little")
    if length + 8 > size:
        raise DamagedFile(f"its footer claims {length} bytes, more than the file has")
    return tail, length


def _footer_bytes(native: pa.NativeFile, size: int) -> bytes:
    tail, length = _tail(native, size)
    return tail[-8 - length : -8] if length + 8 <= len(tail) else native.read_at(length, size - 8 - length)


def parse_footer(data: bytes) -> pq.FileMetaData:
    """Return a footer as pyarrow reads it."""
    whole = _MAGIC + data + len(data).to_bytes(4, "little") + _MAGIC
    try:
        return pq.read_metadata(pa.BufferReader(whole))
    except UnicodeDecodeError as error:  # a column's name is damaged
        raise DamagedFile("the footer is damaged") from error


def list_header(count: int) -> bytes:
    """Return what begins a list of so many structs."""
    if count < 15:
        return bytes([count << 4 | _LIST_OF_STRUCTS])
    out = [0xF0 | _LIST_OF_STRUCTS]
    while count >= 0x80:
        out.append(count & 0x7F | 0x80)
        count >>= 7
    return bytes([*out, count])


@kernel
def varint(data, at):  # type: ignore[no-untyped-def]
    """Return (value, position after it); the position is -1 past the end of the data."""
    value, shift = np.int64(0), 0
    while at < len(data) and shift < 63:
        byte = np.int64(data[at])
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    if at < len(data):  # the tenth byte of a 64-bit number
        return value, at + 1
    return value, -1


@kernel
def _list_start(data, at):  # type: ignore[no-untyped-def]
    """Return (count, type of the elements, position of the first one)."""
    if at >= len(data):
        return 0, 0, -1
    head = np.int64(data[at])
    count, at = head >> 4, at + 1
    if count == 15:
        count, at = varint(data, at)
    return count, head & 15, at


@kernel
def _field(data, at, last):  # type: ignore[no-untyped-def]
    """Return (field number, type, position of the value); type 0 ends the struct."""
    if at >= len(data):
        return 0, 0, -1
    head = np.int64(data[at])
    at += 1
    if head >> 4 or head & 15 == 0:
        return last + (head >> 4), head & 15, at
    number, at = varint(data, at)
    return (number >> 1) ^ -(number & 1), head & 15, at


@kernel
def _skip_leaf(data, at, kind, in_list):  # type: ignore[no-untyped-def]
    """Return the position after a value that is no container, or -1."""
    if kind == 1 or kind == 2:
        at += 1 if in_list else 0  # a bool field is in its type, a bool element is a byte
    elif kind == 3:
        at += 1
    elif kind == 4 or kind == 5 or kind == 6:
        _, at = varint(data, at)
    elif kind == 7:
        at += 8
    elif kind == 8:
        length, at = varint(data, at)
        if at < 0 or length < 0 or length > len(data) - at:
            return -1
        at += length
    else:
        return -1
    return at if 0 <= at <= len(data) else -1


@kernel
def _skip_struct(data, at):  # type: ignore[no-untyped-def]
    """Return the position after a struct with its first field at `at`, or -1 if it is damaged."""
    # An explicit stack instead of recursion: a level is a list (elements left, their type) or a struct (-1). Every
    # iteration reads one element or field header; containers push a level, leaves are skipped by their length.
    left = np.zeros(_MAX_DEPTH, np.int64)
    kinds = np.zeros(_MAX_DEPTH, np.int64)
    depth = 0
    left[0] = -1
    while depth >= 0:
        in_list = left[depth] >= 0
        if in_list:
            if left[depth] == 0:
                depth -= 1
                continue
            left[depth] -= 1
            kind = kinds[depth]
        else:
            _, kind, at = _field(data, at, 0)
            if at < 0:
                return -1
            if kind == 0:
                depth -= 1
                continue
        if kind == 12 or kind == 9 or kind == 10:
            depth += 1
            if depth == _MAX_DEPTH:
                return -1
            left[depth] = -1
            if kind != 12:
                left[depth], kinds[depth], at = _list_start(data, at)
        else:
            at = _skip_leaf(data, at, kind, in_list)
        if at < 0:
            return -1
    return at


@kernel
def _skip_value(data, at, kind):  # type: ignore[no-untyped-def]
    """Return the position after the value of a field, or -1."""
    if kind == 12:
        return _skip_struct(data, at)
    if kind != 9 and kind != 10:
        return _skip_leaf(data, at, kind, False)
    count, inner, at = _list_start(data, at)
    if at < 0 or count < 0 or count > len(data):
        return -1
    for _ in range(count):
        at = _skip_struct(data, at) if inner == 12 else _skip_leaf(data, at, inner, True)
        if at < 0:
            return -1
    return at


@kernel
def field_spans(data, at, fields):  # type: ignore[no-untyped-def]
    """Write (type, begin, end) of each field of a struct; return the position after the struct, or -1."""
    fields[:] = 0
    last = 0
    while True:
        last, kind, at = _field(data, at, last)
        if at < 0 or kind == 0:
            return at
        begin, at = at, _skip_value(data, at, kind)
        if at < 0:
            return -1
        if 0 < last < len(fields):
            fields[last, 0], fields[last, 1], fields[last, 2] = kind, begin, at


@kernel
def _find_row_groups(data):  # type: ignore[no-untyped-def]
    """Return (position of the first row group, how many there are, position of their list)."""
    at, last = 0, 0
    while True:
        last, kind, at = _field(data, at, last)
        if at < 0 or kind == 0:
            return -1, 0, 0
        if kind == 9 and last == _ROW_GROUPS_FIELD:
            count, inner, first = _list_start(data, at)
            if first < 0 or count < 0 or count > len(data) or (inner != 12 and count):
                return -1, 0, 0
            return first, count, at
        at = _skip_value(data, at, kind)
        if at < 0:
            return -1, 0, 0


@kernel
def _row_group_bounds(data, at, bounds):  # type: ignore[no-untyped-def]
    bounds[0] = at
    for number in range(len(bounds) - 1):
        at = _skip_struct(data, at)
        if at < 0:
            return False
        bounds[number + 1] = at
    return True
