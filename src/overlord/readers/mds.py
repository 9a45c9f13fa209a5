"""Mosaic's MDS shards, as `MDSWriter` of mosaicml-streaming writes them, raw or compressed as a whole.

A shard is the number of its samples (u32), where each of them begins and the last one ends (u32), a JSON object with
the names, encodings and sizes of the columns, and the samples: the sizes of the columns that have none of their own
(u32), then the bytes of all columns. So a shard is read without the `index.json` beside it, of which only the hashes of
shards are used. Any sample of a raw shard is reached at once; a compressed shard is one block, read from its beginning.

Columns of plain values and arrays are cut out for many rows at a time; JSON and lists of images row by row. Nothing is
unpickled: a column of encoding `pkl` is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pyarrow.fs import FileType

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
)
from overlord.errors import SourceError
from overlord.readers.files import StoredFile, compression_of_name
from overlord.readers.jsonl import RowBuilder, kind_of_values, parse_value, reach
from overlord.readers.reader import (
    HEAD_ROWS,
    BlockIndex,
    DamagedFile,
    FileBytes,
    Int64s,
    blocks_of_sizes,
    cut_short,
    missing_column,
    open_bytes,
    random_bytes,
    read_exactly,
    require_kind,
)

_HEAD_BYTES = 4 << 20
"""The head of a shard, whose rows decide the kinds of its columns, at most."""
_CONFIG_BYTES = 1 << 20
"""The JSON object of a shard, at most."""
_INDEX_BYTES = 256 << 20
"""The index.json beside shards, at most."""
_ARRAY_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
"""The types of arrays by their code, where each array names its own."""
_CODES = {name: code for code, name in _ARRAY_TYPES.items()}
_SCALARS = {"int": "int64"} | {name: name for name in _CODES}
_PLAIN = ("str", "bytes", "jpeg", "png")
_LISTS = {"list[jpeg]": 4, "list[png]": 4, "jpeg_array": 0, "jpegarray": 0}
"""Lists of encoded images, and the bytes before their count."""
_NUMBERS: dict[str, tuple[Kind, Callable[[str], Any]]] = {
    "str_int": ("int", int),
    "str_float": ("float", float),
    "str_decimal": ("float", float),
}


class MdsReader:
    """Reads MDS shards. In its index, start and stop are numbers of samples; bytes are those of all columns."""

    name = "mds"
    block_bytes: int | None = None
    """Size of blocks, where it is not the usual one."""

    @contextlib.contextmanager
    def open(self, file: StoredFile) -> Iterator[Shard]:
        """Open a shard, and read what describes it."""
        with open_table(file) as (data, rows, begin, end, table):
            if not begin <= end <= begin + _CONFIG_BYTES:
                raise DamagedFile("its table of samples is not that of an MDS shard")
            encodings, sizes = _parse_config(read_exactly(data, begin, end - begin))
            yield Shard(rows, encodings, sizes, data, table)

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Cut the samples of a shard into blocks by their places; they are read only where they have a hash."""
        if file.beside is None:
            _verify_hash(file)
        with self.open(file) as shard:
            for column in columns:
                shard.require(column, file)
            places = shard.places(0, shard.rows)
        end = int(places[-1])
        if compression_of_name(file.path) is None and end != file.size:
            raise DamagedFile(f"it has {file.size} bytes where its table of samples promises {end}")
        whole = compression_of_name(file.path) is not None
        return blocks_of_sizes([np.diff(places)], whole=whole, block_bytes=self.block_bytes)

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
        """Yield the samples of one block; skipped ones of a raw shard cost nothing."""
        stop = int(index.stop[block])
        with self.open(file) as shard:
            for column in columns:
                shard.require(column, file)
            for at in range(int(index.start[block]) + skip, stop, batch_rows):
                rows = _read(shard, at, min(at + batch_rows, stop), columns, file.path)
                # A decompressor verifies its checksum at the end of the file: before the last rows are handed out.
                ends = at + batch_rows >= stop and not self.seeks(file)
                if ends and shard.data.read(int(shard.places(stop, stop)[0]), 1):
                    raise DamagedFile("there are bytes behind its last sample")
                yield rows

    def divides(self, file: StoredFile) -> bool:
        """Return True: blocks are larger than most shuffles."""
        return True

    def seeks(self, file: StoredFile) -> bool:
        """Return whether a shard is raw."""
        return compression_of_name(file.path) is None

    def columns(self, file: StoredFile) -> list[str]:
        """Return the names of the columns, by the head of the shard."""
        with self.open(file) as shard:
            return list(shard.encodings)

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return the kinds of the wanted columns: by their encodings, or by the first rows where these do not tell."""
        with self.open(file) as shard:
            known = {c: shard.require(c, file) for c in columns if shard.column_of(c) is not None}
            found: dict[str, Kind | None] = {c: _kind_of(encoding) for c, encoding in known.items()}
            asked = [column for column, kind in found.items() if kind is None]
            if not asked or not shard.rows:
                return found
            count = min(HEAD_ROWS, shard.rows)
            places = shard.places(0, count)
            count = max(1, int(np.searchsorted(places, places[0] + _HEAD_BYTES, side="right")) - 1)
            cut = shard.cut(0, count)
            for column in asked:
                cells = [cut.cell(row, shard.column_of(column) or "") for row in range(count)]
                if known[column] == "json":
                    found[column] = kind_of_values(_reach(parse_value(cell), column, shard) for cell in cells)
                else:
                    names = (_ARRAY_TYPES.get(cell[0]) for cell in cells if cell)
                    first = next((name for name in names if name), None)
                    found[column] = _list_kind(first) if first else None
            return found


_hashes: tuple[object, dict[str, dict[str, str]]] = (None, {})
"""Of the `index.json` that was read last: what names this version of it, and the hashes of its files."""


def _verify_hash(file: StoredFile) -> None:
    """Compare a shard with its hash in the `index.json` beside it, if it was written with one that hashlib knows."""
    global _hashes
    beside = f"{file.location.rpartition('/')[0]}/index.json"
    info = file.filesystem.get_file_info(beside)
    if info.type is not FileType.File:
        return
    version, known = _hashes
    if version != (file.filesystem.type_name, beside, info.size, info.mtime_ns):
        if (info.size or 0) > _INDEX_BYTES:
            raise DamagedFile(f"the index.json beside it has {info.size} bytes, and at most {_INDEX_BYTES} are read")
        with file.filesystem.open_input_file(beside) as native:
            data = native.read()
        try:
            shards = json.loads(data).get("shards", [])
            parts = [part for shard in shards for part in (shard.get("raw_data"), shard.get("zip_data")) if part]
            known = {part["basename"]: part["hashes"] for part in parts if part.get("hashes")}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedFile("the index.json beside it, which may have its hash, is not one of MDS") from error
        _hashes = (file.filesystem.type_name, beside, info.size, info.mtime_ns), known
    for name, told in known.get(file.location.rpartition("/")[2], {}).items():
        if name in hashlib.algorithms_available:
            digest = hashlib.new(name)
            with file.open_stream() as stream:
                while chunk := stream.read(_HEAD_BYTES):
                    digest.update(chunk)
            if digest.hexdigest() != told:
                raise DamagedFile(f"its {name} is not the one in the index.json beside it: a byte of it has changed")
            return


@contextlib.contextmanager
def open_table(file: StoredFile) -> Iterator[tuple[FileBytes, int, int, int, FileBytes | Int64s]]:
    """Open a file that begins with the number of its samples and where they begin.

    Yields:
        Its bytes, the number of samples, where that table ends, where the first sample begins, and `Shard.table`.
    """
    with open_bytes(file) as data:
        (rows,) = _numbers(data, 0, 1).tolist()
        begin = 4 * (rows + 2)
        if compression_of_name(file.path) is not None:
            places = _numbers(data, 4, rows + 1)
            yield data, rows, begin, int(places[0]), places
            return
        if begin > file.size:
            raise cut_short(file.size)
        (end,) = _numbers(data, 4, 1).tolist()
        with file.open() as native:  # a window of its own: reading samples does not lose it
            yield data, rows, begin, end, random_bytes(file, native)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Some rows of a shard in memory, and where their columns are in it."""

    data: npt.NDArray[np.uint8]
    begins: dict[str, Int64s]
    sizes: dict[str, Int64s]
    """0 in rows that are not whole."""
    whole: npt.NDArray[np.bool_]

    def cell(self, row: int, column: str) -> bytes:
        begin = int(self.begins[column][row])
        return self.data[begin : begin + int(self.sizes[column][row])].tobytes()

    def fixed(self, column: str, size: int) -> npt.NDArray[np.uint8]:
        """Return a column of cells of one size; zeros in rows that are not whole."""
        cells = np.zeros((len(self.whole), size), np.uint8)
        rows = np.flatnonzero(self.sizes[column] == size)
        cells[rows] = self.data[self.begins[column][rows, None] + np.arange(size)]
        return cells


@dataclass(frozen=True, slots=True)
class Shard:
    """An open shard: samples of columns, one behind the other."""

    rows: int
    encodings: dict[str, str]
    """By column, in the order of the file."""
    sizes: dict[str, int]
    """Bytes of a column; 0 where each sample tells its own."""
    data: FileBytes
    table: FileBytes | npt.NDArray[np.int64]
    """Where samples begin: slices are read from a raw shard; of a compressed one the table is in memory."""
    bare: bool = False
    """Whether a sample is the bytes of its only column, without sizes before them."""

    def places(self, start: int, stop: int) -> Int64s:
        """Return where samples start..stop begin, and where the last one ends."""
        table = self.table
        places = (
            table[start : stop + 1]
            if isinstance(table, np.ndarray)
            else _numbers(table, 4 * (start + 1), stop + 1 - start)
        )
        if (places[1:] < places[:-1]).any() or places[0] < 4 * (self.rows + 2):
            raise DamagedFile(f"the samples {start} to {stop} in its table are not in order")
        return places

    def column_of(self, column: str) -> str | None:
        """Return the column of the shard that a name means; a dot reaches into one of JSON."""
        head = column.partition(".")[0]
        if column in self.encodings:
            return column
        return head if self.encodings.get(head) == "json" else None

    def require(self, column: str, file: StoredFile) -> str:
        """Return the encoding of a column.

        Raises:
            SourceError: There is no such column, or it is not read.
        """
        found = self.column_of(column)
        if found is None:
            raise missing_column(file.path, column, list(self.encodings))
        encoding = self.encodings[found]
        name, _, rest = encoding.partition(":")
        dtype, _, shape = rest.partition(":")
        if name == "ndarray" and "," in shape:
            raise SourceError(
                f"column {column!r} of {file.path} holds arrays of shape ({shape}); only arrays of one dimension are "
                "read. Write it flat, or name another column."
            )
        arrays = name == "ndarray" and dtype in ("", *_CODES)
        if not arrays and encoding not in ("json", *_PLAIN, *_SCALARS, *_LISTS, *_NUMBERS):
            why = "it would have to be unpickled, which runs what is in it" if encoding == "pkl" else "it is not read"
            raise SourceError(
                f"column {column!r} of {file.path} has the encoding {encoding!r}; {why}. Write the column in another "
                "encoding (bytes, json, jpeg, ..), or name another column."
            )
        return encoding

    def cut(self, start: int, stop: int) -> _Cut:
        """Read some samples and find their columns."""
        places = self.places(start, stop)
        data = np.frombuffer(read_exactly(self.data, int(places[0]), int(places[-1] - places[0])), np.uint8)
        begins, ends = places[:-1] - places[0], places[1:] - places[0]
        if self.bare:
            (name,) = self.encodings
            return _Cut(data, {name: begins}, {name: ends - begins}, np.ones(len(begins), np.bool_))
        own = [name for name, size in self.sizes.items() if not size]
        told = np.zeros((len(begins), len(own)), np.int64)
        whole = begins + 4 * len(own) <= ends
        heads = begins[whole, None] + np.arange(4 * len(own))
        told[whole] = np.ascontiguousarray(data[heads]).view("<u4")
        sizes = {
            name: told[:, own.index(name)] if not size else np.full(len(begins), size)
            for name, size in self.sizes.items()
        }
        whole &= begins + 4 * len(own) + sum(sizes.values()) == ends
        at = begins + 4 * len(own)
        found: dict[str, Int64s] = {}
        for name in sizes:
            sizes[name] = np.where(whole, sizes[name], 0)
            found[name] = np.where(whole, at, 0)
            at = at + sizes[name]
        return _Cut(data, found, sizes, whole)


def _numbers(data: FileBytes, at: int, count: int) -> Int64s:
    return np.frombuffer(read_exactly(data, at, 4 * int(count)), "<u4").astype(np.int64)


def _parse_config(text: bytes) -> tuple[dict[str, str], dict[str, int]]:
    try:
        found = json.loads(text)
        names, encodings, sizes = (found[f"column_{what}"] for what in ("names", "encodings", "sizes"))
        known = found["version"] == 2 and found["format"] == "mds" and len(names) == len(set(names))
        typed = all(type(one) is str for one in (*names, *encodings))
        typed = typed and all(one is None or (type(one) is int and 0 <= one < 1 << 32) for one in sizes)
        if not (known and typed and len(names) == len(encodings) == len(sizes)):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFile("the description of its columns is not that of an MDS shard of version 2") from error
    for encoding, size in zip(encodings, sizes, strict=True):
        if encoding in _SCALARS and size != np.dtype(_SCALARS[encoding]).itemsize:
            raise DamagedFile(f"by its description, a column of {encoding!r} has cells of {size} bytes")
    return dict(zip(names, encodings, strict=True)), {n: size or 0 for n, size in zip(names, sizes, strict=True)}


def _kind_of(encoding: str) -> Kind | None:
    """Return the kind of a column, None where the encoding alone does not tell it."""
    if encoding in _PLAIN:
        return "bytes"
    if encoding in _SCALARS:
        return "float" if _SCALARS[encoding].startswith("float") else "int"
    if encoding in _LISTS:
        return "bytes_list"
    if encoding in _NUMBERS:
        return _NUMBERS[encoding][0]
    return _list_kind(encoding.split(":")[1]) if ":" in encoding else None


def _list_kind(dtype: str) -> Kind:
    return "float_list" if dtype.startswith("float") else "int_list"


def _read(shard: Shard, start: int, stop: int, columns: Mapping[str, Kind], path: str) -> RowBatch:
    cut = shard.cut(start, stop)
    marks = np.where(cut.whole, 0, NOT_WHOLE).astype(np.int16)
    rows: RowBatch = {}
    for number, (column, kind) in enumerate(columns.items()):
        name = shard.column_of(column) or ""
        encoding = shard.encodings[name]
        require_kind(_kind_of(encoding), kind, path=path, column=column, holds=f"values of encoding {encoding!r}")
        wrong = np.zeros(stop - start, np.int16)
        if encoding in _PLAIN:
            sizes = cut.sizes[name]
            rows[column] = Ragged(gather_runs(cut.data, cut.begins[name], sizes), offsets_of(sizes))
        elif encoding in _SCALARS:
            dtype = np.dtype(_SCALARS[encoding])
            rows[column] = cut.fixed(name, dtype.itemsize).view(dtype)[:, 0]
            wrong[cut.sizes[name] != dtype.itemsize] = other_kind(number)
        elif encoding.startswith("ndarray"):
            rows[column], bad = _arrays(cut, name, encoding, kind)
            wrong[bad] = other_kind(number)
        else:
            builder = RowBuilder({column: kind})
            for row in range(stop - start):
                builder.append([_value(cut.cell(row, name), encoding, column, shard)])
            made = builder.finish()
            wrong = np.asarray(made.pop(BAD_COLUMN)) + np.int16(no_value(number) - no_value(0))
            wrong[wrong == no_value(number) - no_value(0)] = 0
            rows |= made
        marks = np.where(marks == 0, wrong, marks)
    rows[BAD_COLUMN] = marks
    return rows


def _value(cell: bytes, encoding: str, column: str, shard: Shard) -> Any:
    """Return the Python value of a cell, None if there is none in it."""
    if encoding == "json":
        return _reach(parse_value(cell), column, shard)
    try:
        if encoding in _NUMBERS:
            return _NUMBERS[encoding][1](cell.decode())
        before = _LISTS[encoding]
        count = int.from_bytes(cell[before : before + 4], "little")
        at = before + 4 * (count + 1)
        if not 0 < at <= len(cell):
            return None
        bounds = at + offsets_of(np.frombuffer(cell, "<u4", count, before + 4))
        return [cell[a:b] for a, b in itertools.pairwise(bounds.tolist())] if bounds[-1] == len(cell) else None
    except ValueError:
        return None


def _reach(value: Any, column: str, shard: Shard) -> Any:
    return value if column in shard.encodings else reach(value, column.partition(".")[2])


def _arrays(cut: _Cut, name: str, encoding: str, kind: Kind) -> tuple[Ragged, npt.NDArray[np.bool_]]:
    """Return a column of arrays, and which of its rows are no array of one dimension.

    An array is its type (one byte, unless the encoding tells it), its shape (unless the encoding tells it: one byte
    with the number of dimensions and the size of a number of the shape, then these numbers), and its values.
    """
    parts = encoding.split(":")
    begins, sizes = cut.begins[name].copy(), cut.sizes[name].copy()
    bad = ~cut.whole
    if len(parts) == 1:
        codes = _take_byte(cut, begins, sizes, bad)
    if len(parts) < 3:
        shape = _take_byte(cut, begins, sizes, bad)
        numbers = 1 << (shape & 3)
        bad |= (shape >> 2 != 1) | (sizes < numbers)
        begins, sizes = begins + numbers, sizes - numbers
    # Where each array has a type of its own, all become the widest one: a column has one type.
    wide = np.dtype("f8" if kind == "float_list" else "i8")
    if len(parts) > 1:
        types, wide = {parts[1]: ~bad}, np.dtype("f4" if parts[1] == "float16" else parts[1])
    else:
        types = {
            _ARRAY_TYPES[code]: ~bad & (codes == code)
            for code in np.unique(codes[~bad]).tolist()
            if code in _ARRAY_TYPES
        }
    chosen = {t: rows for t, rows in types.items() if kind == "float_list" or _list_kind(t) == kind}
    lengths = np.zeros(len(bad), np.int64)
    for t, rows in chosen.items():
        rows &= sizes % np.dtype(t).itemsize == 0
        lengths[rows] = sizes[rows] // np.dtype(t).itemsize
    good = np.logical_or.reduce([np.zeros(len(bad), np.bool_), *chosen.values()])
    offsets = offsets_of(lengths)
    values: Array = np.empty(int(offsets[-1]), wide)
    for t, rows in chosen.items():
        found = gather_runs(cut.data, np.where(rows, begins, 0), np.where(rows, sizes, 0)).view(t)
        if len(chosen) == 1:
            values = found.astype(wide, copy=False)
        else:
            values[np.repeat(rows, lengths)] = found
    return Ragged(values, offsets), ~good & cut.whole


def _take_byte(cut: _Cut, begins: Int64s, sizes: Int64s, bad: npt.NDArray[np.bool_]) -> Int64s:
    """Return the first byte of every cell and move the cells on by one; empty cells are bad."""
    bad |= sizes < 1
    found = np.zeros(len(bad), np.int64)
    found[~bad] = cut.data[begins[~bad]]
    begins += 1
    sizes -= 1
    return found
