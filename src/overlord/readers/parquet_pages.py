"""Rows from the middle of a Parquet row group: only the pages that they lie in are read and decoded.

A column chunk is a dictionary page, if it has one, and data pages of about 1 MiB, each behind a header of some 30 bytes
that says how long it is. pyarrow decodes a row group from its beginning. Here the headers are walked from one to the
next, which needs no index in the file, and pyarrow is given a Parquet file in memory: the pages that are needed, and a
footer that describes them.

Rules of this file:
1. Whether a row group is read this way follows from the footer alone (`reads_pages`): the order of the source depends
   on it, and nothing but the footer is read before the first row is drawn.
2. The pages of the columns of a row group do not line up. So every leaf column becomes a row group of its own in the
   file in memory, is cut to exactly the rows that are needed, and leaves of one nested column are joined again.
3. Values are counted in the headers. A row of a column with lists is many values: its rows are counted in the header
   (data pages of version 2) or in the repetition levels that a page begins with, which are unpacked once for that and
   kept as a number. A page that begins inside a row is never the first that is decoded.
4. Whatever does not fit what is expected raises `NoPages`, and the row group is read from its beginning.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from overlord.core.kernels import kernel
from overlord.readers.files import MappedFile
from overlord.readers.parquet_footer import (
    MOST_FIELDS,
    Bytes,
    ColumnChunk,
    RowGroup,
    field_spans,
    list_header,
    page_locations,
    parse_footer,
    varint,
)
from overlord.readers.reader import DamagedFile, Int64s
from overlord.readers.remote.range_files import RemoteFile

PAGE_BYTES = 4 << 20
"""Pages that are decoded for a few rows have no more bytes, unpacked, on average; larger ones are unpacked once for all
of their rows."""
ROW_BYTES = 8 << 20
"""The same for the pages of all columns that are read."""
_WRITER_BYTES, _WRITER_VALUES = 1 << 20, 1024
"""Writers close a page at 1 MiB, but most look at its size only after this many values."""
_WHOLE_BYTES = 8 << 20
"""Column chunks of a remote file that have no more bytes together are fetched whole, before their pages are known."""
_GAP_BYTES = 256 << 10
"""Ranges of a remote file with no more bytes between them are fetched as one."""
_HEADER_BYTES, _MOST_HEADER_BYTES = 4 << 10, 16 << 20
"""What is read for the header of a page at first, and at most: it may hold the largest and smallest value."""
_KEPT_BYTES = 16 << 20
"""Tables of pages that are kept."""
_MAGIC = b"PAR1"
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 5: None, 6: "zstd", 7: "lz4_raw"}
_HADOOP_LZ4 = 5
_RLE, _BIT_PACKED = 3, 4

BEGIN, BODY, END, KIND, VALUES, ROWS, ENCODING, UNPACKED = range(8)
"""The columns of a table of pages: where its header begins, where that ends, where the page ends; its type; its values
and rows (-1 where the header does not say); its encoding; its bytes when it is unpacked."""


class NoPages(DamagedFile):
    """A row group is not what its footer says, or not what is supported."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf column that is read."""

    number: int
    path: str
    max_repetition: int
    chunk: ColumnChunk


def leaves_of(schema: pq.ParquetSchema, numbers: Sequence[int], row_group: RowGroup) -> list[Leaf]:
    """Return some leaf columns of a row group.

    Raises:
        NoPages: The footer contradicts itself.
    """
    chunks = row_group.columns()
    if len(chunks) != len(schema):
        raise NoPages("the row group has other columns than the schema")
    columns = [(number, schema.column(number)) for number in numbers]
    return [Leaf(n, column.path, column.max_repetition_level, chunks[n]) for n, column in columns]


def reads_pages(leaves: Sequence[Leaf], created_by: str) -> bool:
    """Return whether rows of a row group are read by the pages that they lie in, as far as its footer tells.

    Not where pages are large, as those of images are when pyarrow writes them (1,024 to a page, if the row group has as
    many): each would be unpacked for every few rows of it.
    """
    sizes = [page_bytes(leaf.chunk, created_by) for leaf in leaves]
    return all(map(_is_supported, leaves)) and max(sizes, default=0) <= PAGE_BYTES and sum(sizes) <= ROW_BYTES


def has_map(found: pa.DataType) -> bool:
    """Return whether a type has a map in it, whose keys and values cannot be read apart."""
    return pt.is_map(found) or any(has_map(found.field(n).type) for n in range(found.num_fields))


def _is_supported(leaf: Leaf) -> bool:
    chunk = leaf.chunk
    if chunk.is_elsewhere or chunk.codec not in _CODECS or min(chunk.begin, chunk.size, chunk.num_values) < 0:
        return False
    if leaf.max_repetition == 0:
        return True
    kinds = {kind for kind, _ in chunk.pages() or ()}
    # Rows of data pages of version 1 are counted in what they begin with.
    counts = _RLE in chunk.encodings or _BIT_PACKED not in chunk.encodings
    return (bool(kinds) and _DATA not in kinds) or (chunk.codec != _HADOOP_LZ4 and counts)


def page_bytes(chunk: ColumnChunk, created_by: str) -> int:
    """Estimate the bytes of a data page with what has to be unpacked to read it."""
    pages = chunk.pages()
    count = sum(number for (kind, _), number in (pages or {}).items() if kind != _DICTIONARY)
    if count > 0:
        return chunk.uncompressed // count
    if created_by.startswith("DuckDB"):
        return chunk.uncompressed  # it writes one page
    return min(chunk.uncompressed, max(_WRITER_BYTES, _WRITER_VALUES * chunk.uncompressed // max(1, chunk.num_values)))


class StoredBytes:
    """The bytes of a file: of a mapped one where they are, of a remote one in as few requests as possible."""

    def __init__(self, native: pa.NativeFile, size: int, mapped: MappedFile | None) -> None:
        self._native, self.size, self._mapped = native, size, mapped
        self._whole = None if mapped is None else np.frombuffer(mapped.native.read_buffer(), np.uint8)
        self._loaded: list[tuple[int, Bytes]] = []

    def load(self, ranges: Sequence[tuple[int, int]], *, again: bool = False) -> None:
        """Fetch some ranges, neighbours together; `again` says that most of it will be read again soon."""
        if self._whole is not None:
            return
        joined: list[list[int]] = []
        for begin, end in sorted(ranges):
            if not 0 <= begin <= end <= self.size:
                raise NoPages("a page lies outside of the file")
            if self.has(begin, end):
                continue
            if joined and begin - joined[-1][1] <= _GAP_BYTES:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([begin, end])
        ranges = [(begin, end) for begin, end in joined]
        if isinstance(self._native, RemoteFile):  # all of them at the same time
            parts = self._native.ranges.fetch(ranges, again=again)
        else:
            parts = [memoryview(self._read(begin, end)) for begin, end in ranges]
        self._loaded += [(begin, np.frombuffer(data, np.uint8)) for (begin, _), data in zip(ranges, parts, strict=True)]

    def has(self, begin: int, end: int) -> bool:
        """Return whether looking at a range costs no request."""
        return self._whole is not None or any(at <= begin and end <= at + len(data) for at, data in self._loaded)

    def view(self, begin: int, end: int) -> Bytes:
        """Return a range."""
        if not 0 <= begin <= end <= self.size:
            raise NoPages("a page lies outside of the file")
        if self._whole is not None:
            return self._whole[begin:end]
        for at, data in self._loaded:
            if at <= begin and end <= at + len(data):
                return data[begin - at : end - at]
        return np.frombuffer(self._read(begin, end), np.uint8)

    def release(self) -> None:
        """Let go of what was touched."""
        if self._mapped is not None:
            self._mapped.release_pages()

    def _read(self, begin: int, end: int) -> bytes:
        data = self._native.read_at(end - begin, begin)
        if len(data) < end - begin:
            raise NoPages("the file is shorter than its footer says")
        return bytes(data)


class PageTables:
    """The tables of pages of row groups that were read, for as long as there is room. Threads may share it."""

    def __init__(self, most_bytes: int = _KEPT_BYTES) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._tables: OrderedDict[Hashable, Int64s] = OrderedDict()
        self._bytes = 0

    def find(self, key: Hashable) -> Int64s | None:
        """Return a table that is kept."""
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
            return self._tables.get(key)

    def add(self, key: Hashable, table: Int64s) -> None:
        """Keep a table."""
        with self._lock:
            if key not in self._tables:
                self._tables[key] = table
                self._bytes += table.nbytes
            while self._bytes > self._most:
                self._bytes -= self._tables.popitem(last=False)[1].nbytes


def read_pages(
    stored: StoredBytes, row_group: RowGroup, leaves: Sequence[Leaf], num_rows: int, start: int, stop: int,
    tables: PageTables, key: Hashable,
) -> pa.RecordBatch:  # fmt: skip
    """Return rows start .. stop of a row group: a batch with the top-level columns of the leaves.

    Args:
        stored: The file.
        row_group: What the footer says of the row group.
        leaves: The columns that are read.
        num_rows: Rows of the row group.
        start: The first row.
        stop: The row to end before.
        tables: Where the tables of pages are kept.
        key: Names the row group in them.

    Raises:
        NoPages: The pages are not what the footer says.
    """
    chunks = [(leaf.chunk.begin, leaf.chunk.end) for leaf in leaves]
    has_tables = all(tables.find((key, leaf.number)) is not None for leaf in leaves)
    if not has_tables and sum(end - begin for begin, end in chunks) <= _WHOLE_BYTES:
        stored.load(chunks, again=True)
    chosen: list[_Chosen] = []
    for leaf in leaves:
        known = (key, leaf.number)
        table = tables.find(known)
        if table is None:
            table = page_table(stored, leaf, num_rows)
            tables.add(known, table)
            if leaf.max_repetition:
                pa.default_memory_pool().release_unused()  # it keeps what every page took that was unpacked to count
        chosen.append(_choose(leaf, table, start, stop))
    stored.load([(int(begin), int(end)) for one in chosen for begin, end in one.ranges()])
    data, footer = _file_of(stored, row_group, [one.walked(stored) for one in chosen])
    parquet = pq.ParquetFile(pa.BufferReader(data), metadata=footer)
    columns: dict[str, pa.Array] = {}
    fields: dict[str, pa.Field] = {}
    for number, one in enumerate(chosen):
        table = parquet.read_row_group(number, columns=[one.leaf.path], use_threads=False)
        if table.num_columns != 1 or table.num_rows != one.rows:
            raise NoPages("pages have other rows than their headers say")
        array = table.column(0).slice(start - one.first, stop - start).combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # of an extension type
            array = pa.concat_arrays(array.chunks)
        name = table.field(0).name
        columns[name] = _joined(columns[name], array) if name in columns else array
        fields.setdefault(name, table.field(0))
    schema = pa.schema([fields[name].with_type(array.type) for name, array in columns.items()])
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)


def page_table(stored: StoredBytes, leaf: Leaf, num_rows: int) -> Int64s:
    """Return the table of the pages of a column chunk.

    Pages are walked where that costs no request, and taken from the index of the file where it does.

    Raises:
        NoPages: The pages are not what the footer says.
    """
    chunk = leaf.chunk
    if not stored.has(chunk.begin, chunk.end) and chunk.page_index[0] > 0:
        return _indexed(stored, chunk, num_rows)
    table = _walk(stored, chunk.begin, chunk.end)
    data = table[:, KIND] != _DICTIONARY
    values = int(table[data, VALUES].sum())
    if values != chunk.num_values or not np.isin(table[:, KIND], (_DATA, _DICTIONARY, _DATA_V2)).all():
        raise NoPages("the pages of a column have other values than its footer says")
    if (table[:, KIND] == _DICTIONARY)[1:].any():
        raise NoPages("a dictionary page is not the first")
    if leaf.max_repetition == 0:
        table[:, ROWS] = table[:, VALUES]
    else:
        for page in np.flatnonzero(data & (table[:, ROWS] < 0)).tolist():
            table[page, ROWS] = _count_rows(stored, leaf, table[page])
    table[~data, ROWS] = 0
    # A row that goes on in the next page is counted where it begins: a page that begins inside one has rows below zero.
    if np.where(table[:, ROWS] < 0, ~table[:, ROWS], table[:, ROWS]).sum() != num_rows:
        raise NoPages("the pages of a column have other rows than its footer says")
    return table


def _indexed(stored: StoredBytes, chunk: ColumnChunk, num_rows: int) -> Int64s:
    """Return the table of pages from the index in the file; what only their headers tell is -1."""
    at, size = chunk.page_index
    places = page_locations(stored.view(at, at + size))
    rows = np.diff(places[:, 2], append=num_rows)
    table = np.full((len(places), 8), -1, np.int64)
    table[:, BEGIN], table[:, END] = places[:, 0], places[:, 0] + places[:, 1]
    table[:, KIND], table[:, ROWS] = _DATA, rows
    aligned = len(places) and places[0, 2] == 0 and (table[1:, BEGIN] == table[:-1, END]).all()
    if not aligned or min(rows.min(), places[:, 1].min()) < 0 or not chunk.begin <= places[0, 0] <= chunk.end:
        raise NoPages("the index of pages is not that of the column")
    if places[0, 0] == chunk.begin:
        return table
    dictionary = np.full((1, 8), -1, np.int64)
    dictionary[0, [BEGIN, END, KIND, ROWS]] = chunk.begin, places[0, 0], _DICTIONARY, 0
    return np.concatenate([dictionary, table])


def _walk(stored: StoredBytes, begin: int, end: int) -> Int64s:
    tables: list[Int64s] = []
    at, window = begin, _HEADER_BYTES
    while at < end:
        stop = min(end, at + window)
        data = stored.view(begin, end) if stored._whole is not None else stored.view(at, stop)
        base = begin if stored._whole is not None else at
        table = np.empty((64, 8), np.int64)
        count, behind = walk_pages(data, base, at, end, table)
        tables.append(table[:count])
        if behind > at:
            at, window = int(behind), _HEADER_BYTES
        elif stop < end and window < _MOST_HEADER_BYTES and stored._whole is None:
            window *= 16
        else:
            raise NoPages("there is no header of a page where one must be")
    return np.concatenate(tables) if tables else np.empty((0, 8), np.int64)


def _count_rows(stored: StoredBytes, leaf: Leaf, page: Int64s) -> int:
    """Count the rows that begin in a data page of version 1; -1 - count if it begins inside one."""
    begin, body, end, _, values, _, _, unpacked = page.tolist()
    data = stored.view(begin, end)[body - begin :]
    codec = _CODECS[leaf.chunk.codec]
    if leaf.chunk.codec == _HADOOP_LZ4 or not 0 <= unpacked <= 1 << 31:
        raise NoPages("rows of a page cannot be counted")
    if codec is not None:
        data = np.frombuffer(pa.Codec(codec).decompress(pa.py_buffer(data), unpacked), np.uint8)
        data.flags.writeable = False  # as all others: numba would compile the kernel anew
    width = int(leaf.max_repetition).bit_length()
    rows = count_zeros(data, values, width)
    if rows == _NO_LEVELS:
        raise NoPages("the repetition levels of a page are damaged")
    return int(rows)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The pages of a leaf column that some rows lie in."""

    leaf: Leaf
    pages: Int64s
    dictionary: Int64s | None
    first: int
    """The first row of the first page."""
    rows: int

    def walked(self, stored: StoredBytes) -> _Chosen:
        """Return the same with what the headers of the pages tell, if they were not looked at."""
        if (self.pages[:, VALUES] >= 0).all():
            return self
        pages = _walk(stored, int(self.pages[0, BEGIN]), int(self.pages[-1, END]))
        if not np.array_equal(pages[:, BEGIN], self.pages[:, BEGIN]):
            raise NoPages("pages are not where their index says")
        return _Chosen(self.leaf, pages, self.dictionary, self.first, self.rows)

    def ranges(self) -> list[list[int]]:
        """Return where they are in the file: the dictionary page and the data pages, which lie side by side."""
        parts = [] if self.dictionary is None else [[int(self.dictionary[BEGIN]), int(self.dictionary[END])]]
        return [*parts, [int(self.pages[0, BEGIN]), int(self.pages[-1, END])]]


def _choose(leaf: Leaf, table: Int64s, start: int, stop: int) -> _Chosen:
    data = np.flatnonzero(table[:, KIND] != _DICTIONARY)
    inside = table[data, ROWS] < 0  # a row goes on from the page before
    counts = np.where(inside, ~table[data, ROWS], table[data, ROWS])
    before = np.concatenate([[0], np.cumsum(counts)])
    low = int(np.searchsorted(before, start, side="right")) - 1
    high = int(np.searchsorted(before, stop, side="left"))
    # Rows end where the next one begins: a last row that goes on needs the pages it goes on in.
    while low > 0 and inside[low]:
        low -= 1
    while high < len(data) and inside[high]:
        high += 1
    if not 0 <= low < high:
        raise NoPages("rows lie in no page")
    pages = table[data[low:high]]
    # Plain pages, which follow where a dictionary has grown too large, need no dictionary.
    dictionary = table[0] if table[0, KIND] == _DICTIONARY and (pages[:, ENCODING] != 0).any() else None
    return _Chosen(leaf, pages, dictionary, int(before[low]), int(before[high] - before[low]))


def _file_of(stored: StoredBytes, row_group: RowGroup, chosen: Sequence[_Chosen]) -> tuple[pa.Buffer, pq.FileMetaData]:
    """Return the file in memory, and its footer: one row group for each column."""
    parts: list[Bytes] = [np.frombuffer(_MAGIC, np.uint8)]
    at, groups = len(_MAGIC), list[bytes]()
    columns = len(row_group.columns())
    for one in chosen:
        begin = at
        places: list[int] = []
        for first, end in one.ranges():
            places.append(at)
            parts.append(stored.view(first, end))
            at += end - first
        groups.append(_row_group_of(one, columns, places, at - begin))
    footer = row_group.head + list_header(len(groups)) + b"".join(groups) + row_group.rest
    return pa.py_buffer(np.concatenate(parts)), parse_footer(footer)


def _row_group_of(chosen: _Chosen, columns: int, places: list[int], size: int) -> bytes:
    """Return a row group as Thrift's compact protocol writes it: one column, and nothing of all others."""
    chunk = chosen.leaf.chunk
    meta = b"".join(bytes([0x10 | kind]) + chunk.raw(field) for field, kind in ((1, 5), (2, 9), (3, 9), (4, 5)))
    unpacked = int(chosen.pages[:, UNPACKED].sum())
    numbers = ((5, int(chosen.pages[:, VALUES].sum())), (6, unpacked), (7, size), (9, places[-1]))
    meta += _numbers(4, [*numbers, *([(11, places[0])] if len(places) > 1 else [])])
    column = _numbers(0, [(2, 0)]) + bytes([0x1C]) + meta + b"\0\0"
    nothing = _numbers(0, [(2, 0)]) + b"\0"
    before, behind = chosen.leaf.number, columns - chosen.leaf.number - 1
    lists = bytes([0x19]) + list_header(columns) + nothing * before + column + nothing * behind
    return lists + _numbers(1, [(2, size), (3, chosen.rows)]) + b"\0"


def _numbers(last: int, fields: Sequence[tuple[int, int]]) -> bytes:
    """Return fields of 64-bit numbers, none below zero, behind a field of some number."""
    out = bytearray()
    for field, value in fields:
        out.append((field - last) << 4 | 6)
        value <<= 1
        while value >= 0x80:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
        last = field
    return bytes(out)


def _joined(one: pa.Array, other: pa.Array) -> pa.Array:
    """Return a nested column of which some leaves are in one array and some in another."""
    if pt.is_struct(one.type) and pt.is_struct(other.type):
        names = [field.name for field in one.type.fields]
        arrays = [one.field(n) for n in range(len(names))]  # without the nulls of the struct, and its offset applied
        for n, field in enumerate(other.type.fields):
            if field.name in names:
                at = names.index(field.name)
                arrays[at] = _joined(arrays[at], other.field(n))
            else:
                names.append(field.name)
                arrays.append(other.field(n))
        fields = [*one.type.fields, *(f for f in other.type.fields if f.name not in {g.name for g in one.type.fields})]
        typed = [field.with_type(array.type) for field, array in zip(fields, arrays, strict=True)]
        mask = one.is_null() if one.null_count else None
        return pa.StructArray.from_arrays(arrays, fields=typed, mask=mask)
    lists = (pa.ListArray, pa.LargeListArray)
    if isinstance(one, lists) and type(one) is type(other):
        mine, its = (_trimmed(array) for array in (one, other))
        if not mine[0].equals(its[0]):
            raise NoPages("leaves of a nested column have lists of other lengths")
        mask = one.is_null() if one.null_count else None
        return type(one).from_arrays(mine[0], _joined(mine[1], its[1]), mask=mask)
    raise NoPages(f"leaves of {one.type} cannot be joined")


def _trimmed(array: pa.ListArray) -> tuple[pa.Array, pa.Array]:
    """Return the offsets of a list column, from 0 on, and the items between the first and the last of them."""
    offsets = np.from_dlpack(array.offsets)
    first, last = int(offsets[0]), int(offsets[-1])
    return pa.array(offsets - first, array.offsets.type), array.values.slice(first, last - first)


def warm_pages() -> None:
    """Load the kernels of this file."""
    nothing = np.frombuffer(b"\0", np.uint8)  # read-only, as files are
    walk_pages(nothing, 0, 0, 1, np.empty((1, 8), np.int64))
    count_zeros(nothing, 1, 1)


_NO_LEVELS = -(1 << 62)


@kernel
def _small_int(data, fields, number):  # type: ignore[no-untyped-def]
    """Return a field of a struct that is a whole number; -1 where there is none."""
    if fields[number, 0] != 5:
        return -1
    value, _ = varint(data, fields[number, 1])
    return (value >> 1) ^ -(value & 1)


@kernel
def walk_pages(data, base, at, end, table):  # type: ignore[no-untyped-def]
    """Write a table of the pages from `at` to `end` whose headers are in the data, which begins at `base`.

    Returns how many there are, and where the next one is.
    """
    fields = np.zeros((MOST_FIELDS, 3), np.int64)
    inner = np.zeros((MOST_FIELDS, 3), np.int64)
    count = 0
    while count < len(table) and at < end and at - base < len(data):
        body = field_spans(data, at - base, fields)
        if body < 0:
            break
        kind, unpacked = _small_int(data, fields, 1), _small_int(data, fields, 2)
        size = _small_int(data, fields, 3)
        place = 5 if kind == 0 else 7 if kind == 2 else 8
        behind = base + body + size
        if size < 0 or unpacked < 0 or behind > end or fields[place, 0] != 12:
            break
        if field_spans(data, fields[place, 1], inner) < 0:
            break
        values = _small_int(data, inner, 1)
        if values < 0:
            break
        table[count, 0], table[count, 1], table[count, 2], table[count, 3] = at, base + body, behind, kind
        table[count, 4], table[count, 5] = values, (_small_int(data, inner, 3) if kind == 3 else -1)
        table[count, 6], table[count, 7] = _small_int(data, inner, 4 if kind == 3 else 2), unpacked
        at = behind
        count += 1
    return count, at


@kernel
def count_zeros(data, values, width):  # type: ignore[no-untyped-def]
    """Count the zeros among the levels that a data page of version 1 begins with: rows that begin in it.

    Levels are runs: of one value, or of values packed into bits. Returns -1 - count where the first is not zero, and
    _NO_LEVELS where they are damaged.
    """
    if len(data) < 4:
        return _NO_LEVELS
    stop = 4 + (np.int64(data[0]) | np.int64(data[1]) << 8 | np.int64(data[2]) << 16 | np.int64(data[3]) << 24)
    if stop > len(data) or values <= 0:
        return _NO_LEVELS if values else 0
    at, seen, zeros, first = 4, 0, 0, np.int64(-1)
    bytes_each = (width + 7) // 8
    while seen < values:
        if at >= stop:
            return _NO_LEVELS
        head, at = varint(data, at)
        if at < 0 or at > stop or head <= 0:
            return _NO_LEVELS
        if head & 1:  # groups of eight, packed
            groups = head >> 1
            if groups > stop or at + groups * width > stop:
                return _NO_LEVELS
            count = min(groups * 8, values - seen)
            for n in range(count):
                bit = n * width
                level = np.int64(0)
                for b in range(width):
                    place = bit + b
                    level |= ((np.int64(data[at + place // 8]) >> (place % 8)) & 1) << b
                if first < 0:
                    first = level
                zeros += level == 0
            at += groups * width
        else:
            count = min(head >> 1, values - seen)
            if count <= 0 or at + bytes_each > stop:
                return _NO_LEVELS
            repeated = np.int64(0)
            for b in range(bytes_each):
                repeated |= np.int64(data[at + b]) << (8 * b)
            if first < 0:
                first = repeated
            zeros += count if repeated == 0 else 0
            at += bytes_each
        seen += count
    return zeros if first == 0 else -1 - zeros
