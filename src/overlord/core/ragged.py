"""Ragged arrays: many variable-length rows as one values array and one offsets array.

Everything that crosses a role border has this shape; there are no per-sample Python objects on
the hot path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from overlord.core.kernels import kernel

Array = npt.NDArray[Any]
Kind = Literal["bytes", "json", "int", "float", "int_list", "float_list", "bytes_list"]
"""The kind of a column. Bytes (or text) and json text are Ragged uint8, lists are Ragged, the rest arrays.

A list of byte strings (the images of a row) is two columns: the concatenated items as Ragged uint8, and under the name
`sizes_column(column)` the bytes of each as Ragged int64."""


# Indices are unsigned: for signed ones numba looks whether they count from the end, and LLVM then copies byte by byte,
# which takes ten times as long; so does an assignment of slices. Nothing checks such indices, and they come from files
# and peers: so each kernel checks a run before it copies it, and returns whether all runs lay inside their arrays.


@kernel
def _gather(values: Array, offsets: Array, rows: Array, out: Array) -> bool:
    at, end = np.uint64(0), np.uint64(len(out))
    for row in rows:
        if not 0 <= row < len(offsets) - 1 or not 0 <= offsets[row] <= offsets[row + 1] <= len(values):
            return False
        start, stop = np.uint64(offsets[row]), np.uint64(offsets[row + 1])
        if stop - start > end - at:
            return False
        for i in range(stop - start):
            out[at + np.uint64(i)] = values[start + np.uint64(i)]
        at += stop - start
    return True


@kernel
def _copy_runs(values: Array, starts: Array, lengths: Array, places: Array, out: Array) -> bool:
    for run in range(len(starts)):
        length = lengths[run]
        if length == 0:  # such a run may begin anywhere: at -1 where a row has no value
            continue
        if length < 0 or not 0 <= starts[run] <= len(values) - length or not 0 <= places[run] <= len(out) - length:
            return False
        start, place = np.uint64(starts[run]), np.uint64(places[run])
        for i in range(np.uint64(length)):
            out[place + np.uint64(i)] = values[start + np.uint64(i)]
    return True


@kernel
def _copy_some(memory: Array, rows: Array, starts: Array, offsets: Array, out: Array) -> bool:
    for row in rows:
        if not 0 <= row < len(starts) or not 0 <= offsets[row] <= offsets[row + 1] <= len(out):
            return False
        length = offsets[row + 1] - offsets[row]
        if length > 0 and not 0 <= starts[row] <= len(memory) - length:
            return False
        start, low = np.uint64(starts[row]), np.uint64(offsets[row])
        for i in range(np.uint64(length)):
            out[low + np.uint64(i)] = memory[start + np.uint64(i)]
    return True


def _check_copied(inside: bool) -> None:
    """Raise IndexError where a kernel found a run outside of its arrays."""
    if not inside:
        raise IndexError("a row lies outside the memory it is copied from or to: its offsets are damaged")


def _seen(*arrays: Array) -> tuple[Array, ...]:
    """Return read-only views of what a kernel only reads.

    Arrays from another process are read-only, which is another type to numba: it would compile the kernel once more for
    each combination of them.
    """
    views = tuple(array.view() for array in arrays)
    for view in views:
        view.flags.writeable = False
    return views


def _words(array: Array) -> Array:
    """Return numbers of any type as unsigned integers of their size: what kernels that only copy are compiled for."""
    return array.view(f"u{array.itemsize}")


def warm_ragged() -> None:
    """Compile or load the kernels of this file, for values of every size."""
    for size in (1, 2, 4, 8):
        rows = Ragged(np.ones(2, f"u{size}"), np.arange(3))
        rows.take(np.array([1, 0]))
        gather_runs(rows.values, np.zeros(1, np.int64), np.ones(1, np.int64))
    one = np.zeros((1, 1), np.int64)
    gather_columns([("", np.dtype(np.uint8), True)], [(np.zeros(1, np.uint8), one[0])], one, one)


def gather_runs(values: Array, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Array:
    """Return runs of an array one behind the other.

    Example:
        >>> gather_runs(np.arange(9, dtype=np.uint8), np.array([6, 1]), np.array([3, 2])).tolist()
        [6, 7, 8, 1, 2]
    """
    offsets = offsets_of(lengths)
    out = np.empty(int(offsets[-1]), values.dtype)
    _check_copied(_copy_runs(*_seen(_words(values), starts, np.asarray(lengths, np.int64), offsets[:-1]), _words(out)))
    return out


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths.

    Example:
        >>> words = Ragged.from_rows([b"ab", b"", b"cde"])
        >>> words.lengths.tolist()
        [2, 0, 3]
        >>> bytes(words.take(np.array([2, 0])).values)
        b'cdeab'
    """

    values: Array
    offsets: npt.NDArray[np.int64]
    """One more than there are rows; row i is values[offsets[i]:offsets[i + 1]]."""

    @classmethod
    def from_rows(cls, rows: Sequence[bytes | Array], dtype: Any = np.uint8) -> Ragged:
        """Build from Python rows (bytes, or arrays of one dtype)."""
        arrays = [np.frombuffer(r, np.uint8) if isinstance(r, bytes) else np.asarray(r, dtype) for r in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return cls(values, offsets_of([len(a) for a in arrays]))

    @classmethod
    def empty(cls, dtype: Any = np.uint8) -> Ragged:
        """Return a ragged array with no rows."""
        return cls(np.empty(0, dtype), np.zeros(1, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of every row."""
        return self.offsets[1:] - self.offsets[:-1]  # np.diff takes ten times as long for a few rows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows themselves (a slice of a larger array counts only its own)."""
        return int(self.offsets[-1] - self.offsets[0]) * self.values.itemsize + self.offsets.nbytes

    def slice(self, start: int, stop: int) -> Ragged:
        """Return rows start..stop without copying values."""
        return Ragged(self.values, self.offsets[start : stop + 1])

    def compact(self) -> Ragged:
        """Return the same rows without the values before and behind them, which are not copied."""
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        return Ragged(self.values[first:last], self.offsets - first)

    def take(self, rows: npt.NDArray[np.integer]) -> Ragged:
        """Return the given rows, in that order, copied into one piece."""
        offsets = offsets_of(self.lengths[rows])
        out = np.empty(int(offsets[-1]), self.values.dtype)
        self.take_into(rows, out)
        return Ragged(out, offsets)

    def take_runs(
        self,
        rows: npt.NDArray[np.integer],
        counts: npt.NDArray[np.int64],
        starts: npt.NDArray[np.integer],
        lengths: npt.NDArray[np.integer],
    ) -> Ragged:
        """Return some runs of values of the given rows, as rows: of rows[i] the next counts[i] of all runs.

        Example:
            >>> rows = Ragged.from_rows([b"abcd", b"efg"])
            >>> kept = rows.take_runs(np.array([1, 0]), np.array([0, 2]), np.array([0, 3]), np.array([2, 1]))
            >>> (kept.lengths.tolist(), bytes(kept.values))
            ([0, 3], b'abd')
        """
        row = np.repeat(np.arange(len(rows)), counts)
        wide = lengths.astype(np.int64)
        values = gather_runs(self.values, self.offsets[:-1][rows][row] + starts, wide)
        return Ragged(values, offsets_of(np.bincount(row, wide, len(rows)).astype(np.int64)))

    def take_into(self, rows: npt.NDArray[np.integer], out: Array) -> None:
        """Copy the given rows, one behind the other, into `out`."""
        _check_copied(_gather(*_seen(_words(self.values), self.offsets, np.asarray(rows, np.int64)), _words(out)))

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """Join ragged arrays of one dtype row-wise."""
        # Arrays from another host are read-only; numba would compile the kernels a second time for them.
        if len(parts) == 1 and parts[0].offsets[0] == 0 and parts[0].values.flags.writeable:
            return parts[0]
        values = [p.values[p.offsets[0] : p.offsets[-1]] for p in parts]
        lengths = [p.lengths for p in parts]
        if not parts:
            return Ragged.empty()
        return Ragged(_joined(values), offsets_of(np.concatenate(lengths)))


@dataclass(frozen=True, slots=True)
class Scattered:
    """Rows that lie anywhere in some memory, and are copied only where they are needed in one piece.

    Example:
        >>> words = Scattered.of(Ragged.from_rows([b"ab", b"", b"cde"]), np.array([2, 0]))
        >>> bytes(words.slice(0, 1).gathered().values)
        b'cde'
    """

    memory: npt.NDArray[np.uint8]
    begin: npt.NDArray[np.int64]
    """The first byte of every row."""
    sizes: npt.NDArray[np.int64]
    """Bytes of every row."""
    dtype: np.dtype[Any]
    """Of the values of the rows."""

    @classmethod
    def of(cls, rows: Ragged, chosen: npt.NDArray[np.integer] | slice) -> Scattered:
        """Return some rows of a ragged array, where they are."""
        size = rows.values.itemsize
        begin, lengths = rows.offsets[:-1][chosen] * size, rows.lengths[chosen] * size
        return cls(np.ascontiguousarray(rows.values).view(np.uint8), begin, lengths, rows.values.dtype)

    def __len__(self) -> int:
        return len(self.begin)

    def __getitem__(self, row: int) -> Array:
        return self.memory[self.begin[row] : self.begin[row] + self.sizes[row]].view(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in one piece, with their offsets."""
        return int(self.sizes.sum()) + 8 * (len(self) + 1)

    def slice(self, start: int, stop: int) -> Scattered:
        """Return rows start..stop."""
        return Scattered(self.memory, self.begin[start:stop], self.sizes[start:stop], self.dtype)

    def gathered(self, out: npt.NDArray[np.uint8] | None = None) -> Ragged:
        """Return the rows one behind the other, in memory that is given or new."""
        offsets = offsets_of(self.sizes)
        out = np.empty(int(offsets[-1]), np.uint8) if out is None else out[: int(offsets[-1])]
        _check_copied(_copy_runs(*_seen(self.memory, self.begin, self.sizes, offsets[:-1]), out))
        return Ragged(out.view(self.dtype), offsets // self.dtype.itemsize)


def _joined(parts: list[Array]) -> Array:
    """Return arrays one behind the other; neighbours in one array (of rows that were cut into runs) are not copied."""
    whole = parts[0].base
    if not isinstance(whole, np.ndarray) or whole.ndim != 1 or whole.dtype != parts[0].dtype:
        return np.concatenate(parts)
    begin = end = _address(parts[0])
    for part in parts:
        sealed = not (part.flags.c_contiguous and part.flags.writeable)
        if sealed or part.base is not whole or part.dtype != whole.dtype or _address(part) != end:
            return np.concatenate(parts)
        end += part.nbytes
    first, last = ((address - _address(whole)) // whole.itemsize for address in (begin, end))
    return whole[first:last] if whole.flags.writeable and whole.flags.c_contiguous else np.concatenate(parts)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def offsets_of(lengths: Any) -> npt.NDArray[np.int64]:
    """Return the offsets of rows with these lengths.

    Example:
        >>> offsets_of([2, 0, 3]).tolist()
        [0, 2, 2, 5]
    """
    lengths = np.asarray(lengths, np.int64)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def expand_ranges(starts: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Return starts[0], starts[0]+1, .. for every (start, length), one behind the other.

    Example:
        >>> expand_ranges(np.array([5, 0]), np.array([2, 3])).tolist()
        [5, 6, 0, 1, 2]
    """
    offsets = offsets_of(lengths)
    return np.arange(offsets[-1]) + np.repeat(np.asarray(starts, np.int64) - offsets[:-1], lengths)


BAD_COLUMN = "__bad__"
"""An int16 column that every reader adds: 0 for a good row, else why it is bad: `NOT_PARSED`, `NOT_WHOLE`,
`NO_PARTNER`, `TOO_LARGE`, `NOT_UTF8`, `no_value(k)` or `other_kind(k)`, where k counts the requested columns."""
NOT_PARSED = 1
NOT_WHOLE = -1
NO_PARTNER = -2
TOO_LARGE = -3
NOT_UTF8 = -4
_REASONS = {
    NOT_PARSED: "the line is not a JSON object in UTF-8",
    NOT_WHOLE: "it is damaged: its columns do not add up to its size, or its checksum is another",
    NO_PARTNER: "no row of the joined dataset has the key of this row",
    TOO_LARGE: "it has more bytes than max_row_bytes of its source, and is not read",
    NOT_UTF8: "the line is not UTF-8; convert the file, for instance with `iconv -f latin1 -t utf-8`",
}


def no_value(column: int) -> int:
    """Return the mark in `BAD_COLUMN` of a row where the k-th column is missing or null."""
    return 2 + 2 * column


def other_kind(column: int) -> int:
    """Return the mark in `BAD_COLUMN` of a row where the k-th column has another type than the source's column."""
    return 3 + 2 * column


def unread_rows(rows: RowBatch) -> list[tuple[int, str]]:
    """Return the rows that a reader marked bad, each with the reason.

    Example:
        >>> batch = {"text": Ragged.from_rows([b"a", b"", b""]), BAD_COLUMN: np.array([0, 1, no_value(0)])}
        >>> unread_rows(batch)
        [(1, 'the line is not a JSON object in UTF-8'), (2, "column 'text' is missing or null in this row")]
    """
    marks = np.asarray(rows[BAD_COLUMN])
    columns = [name for name in rows if name != BAD_COLUMN and not name.startswith(sizes_column(""))]
    found: list[tuple[int, str]] = []
    for row in np.flatnonzero(marks).tolist():
        column, other = divmod(int(marks[row]) - no_value(0), 2)
        if int(marks[row]) in _REASONS or column >= len(columns):
            found.append((row, _REASONS.get(int(marks[row]), _REASONS[NOT_PARSED])))
        elif other:
            found.append((row, f"column {columns[column]!r} holds a value of another type than in the rows before"))
        else:
            found.append((row, f"column {columns[column]!r} is missing or null in this row"))
    return found


def sizes_column(column: str) -> str:
    """Return the name of the column that a reader adds to a list of byte strings: the bytes of each item.

    Such a list (the images of a row) is two ragged columns: all items of a row one behind the other, and their sizes.

    Example:
        >>> sizes_column("images")
        '__sizes__.images'
    """
    return f"__sizes__.{column}"


RowBatch = dict[str, "Ragged | Array"]
"""Some rows of a source as columns: binary, text and list columns are Ragged, numbers are arrays.

What is sent to process workers may also have columns that are Scattered; those of bytes may arrive as such."""


class SharedMemory(Protocol):
    """Memory for rows that other processes see too."""

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return an array of so many bytes; it may be of this process alone."""
        ...

    def spanning(self, arrays: Sequence[Array]) -> tuple[npt.NDArray[np.uint8], list[int]] | None:
        """Return an array that reaches over some arrays, and where each begins in it; None if one is not here."""
        ...


RowsInPlace = dict[str, "Scattered | Array"]
"""Some rows of a source as columns, those of binary, text and lists not yet in one piece."""


def gather_rows(parts: Sequence[tuple[RowsInPlace, npt.NDArray[np.int64]]]) -> RowBatch:
    """Return the rows of all parts in one batch, copied once; with each part come the places of its rows there.

    Example:
        >>> words = Ragged.from_rows([b"ab", b"c"])
        >>> parts = [({"w": Scattered.of(words, np.array([row]))}, np.array([1 - row])) for row in range(2)]
        >>> bytes(gather_rows(parts)["w"].values)
        b'cab'
    """
    count = sum(len(places) for _, places in parts)
    made: RowBatch = {}
    for name, first in parts[0][0].items():
        columns = [(rows[name], places) for rows, places in parts]
        if not isinstance(first, Scattered):
            out = np.empty((count, *first.shape[1:]), np.result_type(*(column for column, _ in columns)))  # type: ignore[arg-type]
            for column, places in columns:
                out[places] = column
            made[name] = out
            continue
        sizes = np.empty(count, np.int64)
        for column, places in columns:
            sizes[places] = column.sizes  # type: ignore[union-attr]
        offsets = offsets_of(sizes)
        memory = np.empty(int(offsets[-1]), np.uint8)
        for column, places in columns:
            assert isinstance(column, Scattered) and column.dtype == first.dtype, "parts have the same columns"
            _check_copied(_copy_runs(*_seen(column.memory, column.begin, column.sizes, offsets[:-1][places]), memory))
        made[name] = Ragged(memory.view(first.dtype), offsets // first.dtype.itemsize)
    return made


def gather_columns(
    columns: Sequence[tuple[str, np.dtype[Any], bool]],
    parts: Sequence[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]],
    begin: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    memory: SharedMemory | None = None,
) -> RowBatch:
    """Return rows that lie in several pieces of memory as one batch, copied once.

    Args:
        columns: Name, type and whether it is ragged, of every column.
        parts: Each piece of memory, with the numbers of the rows that lie there.
        begin: [columns, rows]: where each row begins in its memory.
        sizes: The same for its bytes.
        memory: Where they are copied to; by default to memory of this process alone.

    Example:
        >>> text, rows = np.frombuffer(b"abcd", np.uint8), np.arange(2)
        >>> columns = [("w", np.dtype(np.uint8), True)]
        >>> found = gather_columns(columns, [(text, rows)], np.array([[2, 0]]), np.array([[2, 1]]))
        >>> bytes(found["w"].values), found["w"].offsets.tolist()
        (b'cda', [0, 2, 3])
    """
    made: RowBatch = {}
    for (name, dtype, ragged), starts, lengths in zip(columns, begin, sizes, strict=True):
        offsets = offsets_of(lengths)
        out = np.empty(int(offsets[-1]), np.uint8) if memory is None else memory.empty(int(offsets[-1]))
        for source, rows in parts:
            _check_copied(_copy_some(*_seen(source, rows, starts, offsets), out))
        values = out.view(dtype)
        made[name] = Ragged(values, offsets // dtype.itemsize) if ragged else values
    return made


def rows_in_place(batch: RowBatch, rows: npt.NDArray[np.integer]) -> RowsInPlace:
    """Return the given rows of every column, without copying those of ragged columns."""
    return {k: Scattered.of(v, rows) if isinstance(v, Ragged) else v[rows] for k, v in batch.items()}


def take_rows(batch: RowBatch, rows: npt.NDArray[np.integer]) -> RowBatch:
    """Return the given rows of every column."""
    return {k: v.take(rows) if isinstance(v, Ragged) else v[rows] for k, v in batch.items()}


def slice_rows(batch: RowBatch, start: int, stop: int) -> RowBatch:
    """Return rows start..stop of every column."""
    return {k: v[start:stop] if isinstance(v, np.ndarray) else v.slice(start, stop) for k, v in batch.items()}


def copied_run(batch: RowBatch, start: int, stop: int) -> RowBatch:
    """Return rows start..stop of every column, in memory of their own.

    Example:
        >>> bytes(copied_run({"w": Ragged.from_rows([b"ab", b"c", b"de"])}, 1, 3)["w"].values)
        b'cde'
    """

    def copied(column: Ragged) -> Ragged:
        offsets = column.offsets[start : stop + 1]
        return Ragged(column.values[offsets[0] : offsets[-1]].copy(), offsets - offsets[0])

    return {k: copied(v) if isinstance(v, Ragged) else v[start:stop].copy() for k, v in batch.items()}


def blank_rows(batch: RowBatch, which: npt.NDArray[np.bool_]) -> RowBatch:
    """Return rows without the content of some of them: their ragged values are empty.

    Example:
        >>> blank_rows({"text": Ragged.from_rows([b"ab", b"c"])}, np.array([True, False]))["text"].lengths.tolist()
        [0, 1]
    """

    def blank(column: Ragged) -> Ragged:
        lengths = np.where(which, 0, column.lengths)
        return Ragged(gather_runs(column.values, column.offsets[:-1], lengths), offsets_of(lengths))

    return {name: blank(column) if isinstance(column, Ragged) else column for name, column in batch.items()}


def copied_rows(batch: RowBatch) -> RowBatch:
    """Return rows in memory of their own."""
    return {
        name: Ragged(np.array(column.values), np.array(column.offsets))
        if isinstance(column, Ragged)
        else np.array(column)
        for name, column in batch.items()
    }


def concat_rows(batches: Sequence[RowBatch]) -> RowBatch:
    """Join batches with the same columns."""
    if len(batches) == 1:
        return batches[0]
    return {
        k: Ragged.concat([b[k] for b in batches])  # type: ignore[misc]
        if isinstance(v, Ragged)
        else np.concatenate([b[k] for b in batches])  # type: ignore[arg-type]
        for k, v in batches[0].items()
    }


def num_rows(batch: RowBatch) -> int:
    """Return how many rows a batch has."""
    return len(next(iter(batch.values())))


def num_bytes(batch: RowBatch) -> int:
    """Return how many bytes a batch holds."""
    return sum(v.nbytes for v in batch.values())
