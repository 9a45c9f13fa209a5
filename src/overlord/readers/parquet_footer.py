"""Cuts the footer of a Parquet file down to the row groups that are needed, before pyarrow parses it.

A footer of 1,000 row groups and 20 columns is 2.3 MB on disk and 18 MB once pyarrow has parsed it, for
every open stream. A footer is a list of row groups between a schema and further fields (Thrift, compact
protocol), so a footer of one row group is three slices of it, and takes a few kilobytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from overlord.core.kernels import kernel
from overlord.readers.reader import DamagedFile, Int64s

_MAGIC = b"PAR1"
_TAIL_BYTES = 64 << 10
"""Bytes that are read from the end of a file first: most footers are smaller."""
_ROW_GROUPS_FIELD = 4
_LIST_OF_STRUCTS = 0x0C
_MAX_DEPTH = 64


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

    def metadata(self, first: int, stop: int) -> pq.FileMetaData:
        """Return the metadata of a file that has only row groups first .. stop."""
        begin, end = int(self.bounds[first]), int(self.bounds[stop])
        return _parse(
            self.data[: self.list_at]
            + _list_header(stop - first)
            + self.data[begin:end]
            + self.data[int(self.bounds[-1]) :]
        )


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


def read_block_metadata(
    native: pa.NativeFile, size: int, index_start: Int64s, index_stop: Int64s, block: int
) -> pq.FileMetaData:
    """Return the metadata of one row group from its position in the footer, which the index has."""
    tail, length = _tail(native, size)
    begin = size - 8 - length
    list_at = int(index_start[0]) - len(_list_header(len(index_start)))
    slices = [(0, list_at), (int(index_start[block]), int(index_stop[block])), (int(index_stop[-1]), length)]
    if length + 8 <= len(tail):
        whole = tail[-8 - length : -8]
        head, group, rest = (whole[first:stop] for first, stop in slices)
    else:
        head, group, rest = (native.read_at(stop - first, begin + first) for first, stop in slices)
    return _parse(head + _list_header(1) + group + rest)


def warm_footer() -> None:
    """Load the kernels of this file."""
    nothing = np.frombuffer(b"\0", np.uint8)  # read-only, as footers are: numba compiles for that
    _find_row_groups(nothing)
    _row_group_bounds(nothing, 0, np.zeros(1, np.int64))


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


def _parse(data: bytes) -> pq.FileMetaData:
    whole = _MAGIC + data + len(data).to_bytes(4, "little") + _MAGIC
    try:
        return pq.read_metadata(pa.BufferReader(whole))
    except UnicodeDecodeError as error:  # a column's name is damaged
        raise DamagedFile("the footer is damaged") from error


def _list_header(count: int) -> bytes:
    if count < 15:
        return bytes([count << 4 | _LIST_OF_STRUCTS])
    out = [0xF0 | _LIST_OF_STRUCTS]
    while count >= 0x80:
        out.append(count & 0x7F | 0x80)
        count >>= 7
    return bytes([*out, count])


@kernel
def _varint(data, at):  # type: ignore[no-untyped-def]
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
        count, at = _varint(data, at)
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
    number, at = _varint(data, at)
    return (number >> 1) ^ -(number & 1), head & 15, at


@kernel
def _skip_leaf(data, at, kind, in_list):  # type: ignore[no-untyped-def]
    """Return the position after a value that is no container, or -1."""
    if kind == 1 or kind == 2:
        at += 1 if in_list else 0  # a bool field is in its type, a bool element is a byte
    elif kind == 3:
        at += 1
    elif kind == 4 or kind == 5 or kind == 6:
        _, at = _varint(data, at)
    elif kind == 7:
        at += 8
    elif kind == 8:
        length, at = _varint(data, at)
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
def _find_row_groups(data):  # type: ignore[no-untyped-def]
    """Return (position of the first row group, how many there are, position of their list)."""
    at, last = 0, 0
    while True:
        last, kind, at = _field(data, at, last)
        if at < 0 or kind == 0:
            return -1, 0, 0
        if kind == 9:
            list_at = at
            count, inner, at = _list_start(data, at)
            if at < 0 or count < 0 or count > len(data):
                return -1, 0, 0
            if last == _ROW_GROUPS_FIELD:
                return (at, count, list_at) if inner == 12 or count == 0 else (-1, 0, 0)
            for _ in range(count):
                at = _skip_struct(data, at) if inner == 12 else _skip_leaf(data, at, inner, True)
                if at < 0:
                    return -1, 0, 0
        else:
            at = _skip_struct(data, at) if kind == 12 else _skip_leaf(data, at, kind, False)
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
