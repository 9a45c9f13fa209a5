"""Records of `tf.train.Example`, as columns, without TensorFlow: TFRecord and ArrayRecord files hold them.

An Example is a protobuf message: a map from names to lists of bytes, of floats or of whole numbers. The kernels below
walk the encoded messages and decode the wanted lists for many records at a time; they follow no length out of its
record, so damaged records are bad rows. A list that has one value in each of the first rows is a plain column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.kernels import kernel
from overlord.core.ragged import (
    BAD_COLUMN,
    NOT_WHOLE,
    Array,
    Kind,
    Ragged,
    RowBatch,
    gather_runs,
    no_value,
    offsets_of,
    other_kind,
    sizes_column,
)
from overlord.readers.reader import Int64s, missing_column

RECORD = "record"
"""The column of whole records, for those that are no Examples."""
Bytes = npt.NDArray[np.uint8]
_BYTES, _FLOATS, _INTS = 1, 2, 3
"""Fields of a Feature, which tell what its list holds."""
_KINDS: dict[int, tuple[Kind, Kind]] = {
    _BYTES: ("bytes", "bytes_list"),
    _FLOATS: ("float", "float_list"),
    _INTS: ("int", "int_list"),
}


def example_columns(data: Bytes, begins: Int64s, sizes: Int64s) -> dict[str, Kind | None]:
    """Return the columns of some records and their kinds; where there is none, they are no Examples."""
    names: dict[str, None] = {}
    for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True):
        keys = _keys(data, begin, begin + size)
        names.update((bytes(data[a:b]).decode("utf-8", "replace"), None) for a, b in keys.tolist())
    return {name: kind_of_column(data, begins, sizes, name) for name in names} or {RECORD: "bytes"}


def require_features(known: Mapping[str, Kind | None], columns: Sequence[str], path: str) -> None:
    """Check that a file has the wanted columns, given those of its head; whole records are always there.

    Raises:
        SourceError: A column is missing.
    """
    for column in columns:
        if column not in known and column != RECORD:
            raise missing_column(path, column, list(known))


def kind_of_column(data: Bytes, begins: Int64s, sizes: Int64s, name: str) -> Kind | None:
    """Return the kind of a column in some records, None if none has a value."""
    found, at, length = _find(data, begins, sizes, _key(name))
    for code in _KINDS:
        rows = found == code
        if rows.any():
            counts, bad = _count(data, at[rows], length[rows], code)
            return _KINDS[code][int((counts[~bad] != 1).any())]
    return None


def example_rows(
    data: Bytes, begins: Int64s, sizes: Int64s, whole: npt.NDArray[np.bool_], columns: Mapping[str, Kind]
) -> RowBatch:
    """Return the wanted columns of some records; those that are not whole, or lack a column, are bad rows."""
    rows: RowBatch = {}
    marks = np.where(whole, 0, NOT_WHOLE).astype(np.int16)
    for number, (column, kind) in enumerate(columns.items()):
        found, at, length = _find(data, begins, sizes, _key(column))
        if column == RECORD and kind == "bytes" and not (found > 0).any():
            kept = np.where(whole, sizes, 0)
            rows[column] = Ragged(gather_runs(data, begins, kept), offsets_of(kept))
            continue
        wrong = _decode(rows, column, kind, (data, np.where(whole, found, 0), at, length))
        wrong = np.where(wrong == 1, other_kind(number), np.where(wrong == 2, no_value(number), 0))
        marks = np.where(marks == 0, np.where(found < 0, NOT_WHOLE, wrong), marks).astype(np.int16)
    rows[BAD_COLUMN] = marks
    return rows


def _decode(rows: RowBatch, column: str, kind: Kind, lists: tuple[Bytes, Int64s, Int64s, Int64s]) -> Int64s:
    """Add a column to rows; return which of them hold something else (1), or nothing (2)."""
    data, found, at, length = lists
    code = next((code for code, kinds in _KINDS.items() if kind in kinds), 0)
    single = code > 0 and kind == _KINDS[code][0]
    # Whole numbers are taken where a column is one of floats.
    codes = (_FLOATS, _INTS) if code == _FLOATS else (code,)
    fits = (found == codes[0]) | (found == codes[-1])
    counts, bad = np.zeros(len(found), np.int64), np.zeros(len(found), np.bool_)
    for one in codes:
        some = found == one
        counts[some], bad[some] = _count(data, at[some], length[some], one)
    bad |= fits & single & (counts != 1)
    fits &= ~bad
    counts[~fits] = 0
    offsets = offsets_of(counts)
    if code == _BYTES:
        places, items = _items(data, at, np.where(fits, length, 0), int(offsets[-1]))
        values = gather_runs(data, places, items)
        rows[column] = Ragged(values, offsets_of(items)[offsets])
        if not single:
            rows[sizes_column(column)] = Ragged(items, offsets)
    else:
        values = np.empty(int(offsets[-1]), np.float64 if code == _FLOATS else np.int64)
        for one in codes:
            some = np.flatnonzero(fits & (found == one))
            _numbers(data, at[some], length[some], one, offsets[some], values)
        rows[column] = Ragged(values, offsets)
        if single:
            rows[column] = plain = np.zeros(len(found), values.dtype)
            plain[fits] = values
    return np.where(fits, 0, np.where(found == 0, 2, 1))


def _key(name: str) -> Bytes:
    return np.frombuffer(name.encode(), np.uint8)


# Kernels. A varint is seven bits a byte, the lowest first; a field is a varint with its number and its wire type, and
# its value: a varint (0), 8 bytes (1), a length and as many bytes (2), or 4 bytes (5).


_jit: Any = kernel
_DAMAGED = -1


@_jit
def _varint(data: Bytes, at: int, stop: int) -> tuple[int, int]:
    """Return a varint and where it ends; -1 where it does not end inside."""
    value, shift = np.uint64(0), np.uint64(0)
    while at < stop and shift < np.uint64(64):
        byte = np.uint64(data[at])
        at += 1
        value |= (byte & np.uint64(127)) << shift
        if byte < np.uint64(128):
            return np.int64(value), at  # type: ignore[return-value]
        shift += np.uint64(7)
    return 0, _DAMAGED


@_jit
def _field(data: Bytes, at: int, stop: int) -> tuple[int, int, int, int]:
    """Return the number and wire type of a field, and where its value begins and ends; -1 where it is damaged."""
    tag, at = _varint(data, at, stop)
    if at < 0:
        return 0, 0, 0, _DAMAGED
    number, wire, begin, end = tag >> 3, tag & 7, at, _DAMAGED
    if wire == 0:
        _, end = _varint(data, at, stop)
    elif wire == 1:
        end = at + 8
    elif wire == 5:
        end = at + 4
    elif wire == 2:
        size, begin = _varint(data, at, stop)
        if begin >= 0 and 0 <= size <= stop - begin:
            end = begin + size
    return number, wire, begin, end if end <= stop else _DAMAGED


@_jit
def _entry(data: Bytes, at: int, stop: int) -> tuple[int, int, int, int, int]:
    """Return where the key and the feature of an entry of the map are, and whether it is damaged."""
    key, key_end, value, value_end = at, at, at, at
    while at < stop:
        number, wire, begin, end = _field(data, at, stop)
        if end < 0:
            return 0, 0, 0, 0, 1
        if wire == 2 and number == 1:
            key, key_end = begin, end
        elif wire == 2 and number == 2:
            value, value_end = begin, end
        at = end
    return key, key_end, value, value_end, 0


@_jit
def _keys(data: Bytes, at: int, stop: int) -> Int64s:
    """Return where the names of the features of an Example begin and end; none if it is no Example."""
    found = [(0, 0)][:0]
    while at < stop:
        number, wire, begin, end = _field(data, at, stop)
        if end < 0:
            return np.zeros((0, 2), np.int64)
        if number == 1 and wire == 2:
            inner = begin
            while inner < end:
                number, wire, begin, last = _field(data, inner, end)
                if last < 0:
                    return np.zeros((0, 2), np.int64)
                if number == 1 and wire == 2:
                    key, key_end, _, _, wrong = _entry(data, begin, last)
                    if wrong:
                        return np.zeros((0, 2), np.int64)
                    found.append((key, key_end))
                inner = last
        at = end
    out = np.zeros((len(found), 2), np.int64)
    for n in range(len(found)):
        out[n, 0], out[n, 1] = found[n]
    return out


@_jit
def _same(data: Bytes, at: int, stop: int, key: Bytes) -> bool:
    if stop - at != len(key):
        return False
    for n in range(len(key)):  # noqa: SIM110 (numba compiles no generator)
        if data[at + n] != key[n]:
            return False
    return True


@_jit
def _feature(data: Bytes, at: int, stop: int) -> tuple[int, int, int]:
    """Return what the list of a feature holds and where it is; the last one counts, as protobuf merges messages."""
    code, list_at, list_end = 0, at, at
    while at < stop:
        number, wire, begin, end = _field(data, at, stop)
        if end < 0:
            return _DAMAGED, 0, 0
        if wire == 2 and 1 <= number <= 3:
            code, list_at, list_end = number, begin, end
        at = end
    return code, list_at, list_end


@_jit
def _find(data: Bytes, begins: Int64s, sizes: Int64s, key: Bytes) -> tuple[Int64s, Int64s, Int64s]:
    """Return for every record what its feature holds (0: there is none, -1: it is damaged), where, and its bytes."""
    codes, places, lengths = np.zeros_like(begins), np.zeros_like(begins), np.zeros_like(begins)
    for row in range(len(begins)):
        at, stop = begins[row], begins[row] + sizes[row]
        while at < stop:
            number, wire, begin, end = _field(data, at, stop)
            if end < 0:
                codes[row] = _DAMAGED
                break
            inner = begin if number == 1 and wire == 2 else end
            while inner < end:
                number, wire, begin, last = _field(data, inner, end)
                if last < 0:
                    codes[row] = _DAMAGED
                    break
                if number == 1 and wire == 2:
                    name, name_end, value, value_end, wrong = _entry(data, begin, last)
                    if wrong:
                        codes[row] = _DAMAGED
                        break
                    if _same(data, name, name_end, key):
                        code, list_at, list_end = _feature(data, value, value_end)
                        codes[row], places[row], lengths[row] = code, list_at, list_end - list_at
                        if code < 0:
                            break
                inner = last
            if codes[row] < 0:
                break
            at = end
    return codes, places, lengths


@_jit
def _count(data: Bytes, places: Int64s, lengths: Int64s, code: int) -> tuple[Int64s, npt.NDArray[np.bool_]]:
    """Return how many values each list has, and which lists are damaged."""
    counts, bad = np.zeros_like(places), np.zeros(len(places), np.bool_)
    for row in range(len(places)):
        at, stop = places[row], places[row] + lengths[row]
        while at < stop:
            number, wire, begin, end = _field(data, at, stop)
            if end < 0:
                bad[row] = True
                break
            if number == 1:
                if code == 1 and wire == 2:
                    counts[row] += 1
                elif code == 2 and wire == 2 and (end - begin) % 4 == 0:
                    counts[row] += (end - begin) // 4
                elif (code == 2 and wire == 5) or (code == 3 and wire == 0):
                    counts[row] += 1
                elif code == 3 and wire == 2:
                    ends = 0
                    for n in range(np.uint64(begin), np.uint64(end)):
                        ends += data[n] < 128
                    counts[row] += ends
                    bad[row] |= end > begin and data[end - 1] >= 128
                else:
                    bad[row] = True
            at = end
    return counts, bad


@_jit
def _items(data: Bytes, places: Int64s, lengths: Int64s, count: int) -> tuple[Int64s, Int64s]:
    """Return where the items of lists of bytes are, and their sizes."""
    starts, sizes = np.zeros(count, np.int64), np.zeros(count, np.int64)
    item = 0
    for row in range(len(places)):
        at, stop = places[row], places[row] + lengths[row]
        while at < stop:
            number, _, begin, end = _field(data, at, stop)
            if number == 1:
                starts[item], sizes[item] = begin, end - begin
                item += 1
            at = end
    return starts, sizes


@_jit
def _numbers(data: Bytes, places: Int64s, lengths: Int64s, code: int, offsets: Int64s, out: Array) -> None:
    """Write the values of lists of numbers, which `_count` has checked, from their offsets on."""
    word = np.zeros(1, np.uint32)
    for row in range(len(places)):
        at, stop, to = places[row], places[row] + lengths[row], np.uint64(offsets[row])
        while at < stop:
            number, _, begin, end = _field(data, at, stop)
            while number == 1 and begin < end:
                if code == 2:
                    word[0] = 0
                    for n in range(4):
                        word[0] |= np.uint32(data[begin + n]) << np.uint32(8 * n)
                    out[to] = word.view(np.float32)[0]
                    begin += 4
                else:
                    byte = np.uint64(data[np.uint64(begin)])
                    begin += 1
                    value, shift = byte & np.uint64(127), np.uint64(7)
                    while byte >= np.uint64(128):
                        byte = np.uint64(data[np.uint64(begin)])
                        begin += 1
                        value |= (byte & np.uint64(127)) << (shift & np.uint64(63))
                        shift += np.uint64(7)
                    out[to] = np.int64(value)
                to += np.uint64(1)
            at = end
