"""TFRecord: records one behind the other, each with its length and checksums; a record is a `tf.train.Example`.

A record is its length (u64), a checksum of the length, its bytes, and a checksum of these (u32, CRC-32C, masked). A
block is a run of whole records of about 1 MiB, or the whole of a compressed file. A record whose bytes do not fit its
checksum is a bad row; behind a length that does not fit, no record can be found, and the file is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.kernels import kernel
from overlord.core.ragged import Kind, RowBatch
from overlord.readers.files import StoredFile, compression_of_name
from overlord.readers.hooked.examples import (
    RECORD,
    Bytes,
    example_columns,
    example_rows,
    kind_of_column,
    require_features,
)
from overlord.readers.reader import (
    BLOCK_BYTES,
    HEAD_ROWS,
    BlockIndex,
    CompressibleReader,
    DamagedFile,
    FileBytes,
    Int64s,
    cut_short,
    open_bytes,
)

_HEAD_BYTES = 4 << 20
_AROUND = 16
"""Bytes of a record beside its own: the length, and two checksums."""
_CHUNK_BYTES = 256 << 10


class TfrecordReader(CompressibleReader):
    """Reads TFRecord files. In its index, start and stop are offsets in the decompressed bytes."""

    name = "tfrecord"

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Find the blocks of a file by the lengths of its records."""
        require_features(_head(file)[0], columns, file.path)
        whole = compression_of_name(file.path) is not None
        blocks: list[tuple[int, int, int, int]] = []
        start, rows, at = 0, 0, 0
        with open_bytes(file) as native:
            data = _Records(native, file)
            while len(found := data.headers(at)):
                ends = found[:, 0] + found[:, 1] + _AROUND - 12
                first = 0
                while first < len(ends):
                    last = len(ends) if whole else int(np.searchsorted(ends, start + BLOCK_BYTES)) + 1
                    rows += min(last, len(ends)) - first
                    at = int(ends[min(last, len(ends)) - 1])
                    first = last
                    if last <= len(ends) and not whole:
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
        """Yield the records of one block; skipped ones are not decoded."""
        at, left = int(index.start[block]), int(index.rows[block])
        with open_bytes(file) as native:
            data = _Records(native, file)
            while skip and left and len(found := data.headers(at)[:skip]):
                at = int(found[-1].sum()) + _AROUND - 12
                skip, left = skip - len(found), left - len(found)
            while left:
                chunk, found = data.records(at, min(batch_rows, left))
                whole = _checksums_fit(chunk, found[:, 0] - at, found[:, 1])
                rows = example_rows(chunk, found[:, 0] - at, found[:, 1], whole, columns)
                at = int(found[-1].sum()) + _AROUND - 12
                left -= len(found)
                del chunk
                yield rows

    def columns(self, file: StoredFile) -> list[str]:
        """Return the names of the features in the head of the file; `record` where it holds no Examples."""
        return list(_head(file)[0])

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return the kinds of the wanted columns, by the head of the file."""
        known, chunk, begins, sizes = _head(file)
        found = {column: known[column] for column in columns if column in known}
        if RECORD in columns and RECORD not in known:
            found[RECORD] = kind_of_column(chunk, begins, sizes, RECORD) or "bytes"
        return found


def _head(file: StoredFile) -> tuple[dict[str, Kind | None], Bytes, Int64s, Int64s]:
    with open_bytes(file) as native:
        chunk, found = _Records(native, file).records(0, HEAD_ROWS, _HEAD_BYTES)
    whole = _checksums_fit(chunk, found[:, 0], found[:, 1])
    begins, sizes = np.ascontiguousarray(found[whole, 0]), np.ascontiguousarray(found[whole, 1])
    return example_columns(chunk, begins, sizes), chunk, begins, sizes


class _Records:
    """The records of an open file, read front to back in large pieces."""

    def __init__(self, data: FileBytes, file: StoredFile) -> None:
        self._data = data
        self._end = None if compression_of_name(file.path) else file.size
        self._held = b""
        self._held_at = 0

    def headers(self, at: int) -> Int64s:
        """Return where the next records begin (their own bytes) and their lengths, at least one; none at the end."""
        found = self._lengths(self._read(at, _CHUNK_BYTES), at)
        if self._end is not None and len(found) and int(found[-1].sum()) + 4 > self._end:
            raise cut_short(self._end)
        return found

    def records(self, at: int, count: int, most_bytes: int | None = None) -> tuple[Bytes, Int64s]:
        """Return bytes that hold the next records, and where these begin in the file and their lengths.

        They are `count`, or fewer at the end of the file or past `most_bytes`, but at least one.
        """
        wanted = _CHUNK_BYTES
        while True:
            data = self._read(at, wanted)
            found = self._lengths(data, at)[:count]
            complete = int((found.sum(axis=1) + 4 <= at + len(data)).sum())
            if complete == count or (complete and most_bytes is not None and len(data) >= most_bytes):
                break
            if len(data) < wanted:  # the file ends here
                if complete < len(found) or not complete:
                    raise cut_short(at + len(data))
                break
            need = int(found[-1].sum()) + 4 - at if complete < len(found) else 0
            wanted = max(2 * wanted, need)
        return np.frombuffer(data, np.uint8), found[:complete]

    def _lengths(self, data: bytes, at: int) -> Int64s:
        if not data:
            return np.zeros((0, 2), np.int64)
        found, wrong = _walk(np.frombuffer(data, np.uint8), _TABLES)
        if wrong >= 0:
            raise DamagedFile(f"the length of the record at byte {at + wrong} does not fit its checksum")
        if not len(found):
            raise cut_short(at + len(data))
        found[:, 0] += at
        return found

    def _read(self, at: int, count: int) -> bytes:
        """Return bytes of the file, fewer at its end; `at` never decreases, as a compressed file cannot go back."""
        passed = at - self._held_at
        self._held = self._held[passed:] if passed <= len(self._held) else b""
        self._held_at = at
        if len(self._held) < count:
            behind = at + len(self._held)
            if self._end is None or behind < self._end:
                self._held += self._data.read(behind, count - len(self._held))
        return self._held


# Kernels. CRC-32C by eight tables, eight bytes a turn; TFRecord masks it, as it may be part of what is summed again.


_jit: Any = kernel


def _crc_tables() -> npt.NDArray[np.uint32]:
    tables = np.zeros((8, 256), np.uint32)
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(0x82F63B78), values >> 1).astype(np.uint32)
    tables[0] = values
    for n in range(1, 8):
        tables[n] = (tables[n - 1] >> 8) ^ tables[0][tables[n - 1] & 0xFF]
    return tables


_TABLES = _crc_tables()


@_jit
def _masked_crc(data: Bytes, start: int, stop: int, tables: npt.NDArray[np.uint32]) -> np.int64:
    crc, at, end = np.uint32(0xFFFFFFFF), np.uint64(start), np.uint64(stop)
    byte, eight = np.uint32(255), np.uint64(8)
    while end - at >= eight:
        low = crc ^ (
            np.uint32(data[at])
            | np.uint32(data[at + np.uint64(1)]) << np.uint32(8)
            | np.uint32(data[at + np.uint64(2)]) << np.uint32(16)
            | np.uint32(data[at + np.uint64(3)]) << np.uint32(24)
        )
        crc = (
            tables[7, low & byte]
            ^ tables[6, (low >> np.uint32(8)) & byte]
            ^ tables[5, (low >> np.uint32(16)) & byte]
            ^ tables[4, low >> np.uint32(24)]
            ^ tables[3, data[at + np.uint64(4)]]
            ^ tables[2, data[at + np.uint64(5)]]
            ^ tables[1, data[at + np.uint64(6)]]
            ^ tables[0, data[at + np.uint64(7)]]
        )
        at += eight
    while at < end:
        crc = (crc >> np.uint32(8)) ^ tables[0, (crc ^ np.uint32(data[at])) & byte]
        at += np.uint64(1)
    crc = np.uint32(~crc)
    return np.int64(np.uint32(((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)))


@_jit
def _stored(data: Bytes, at: int, count: int) -> np.int64:
    value = np.uint64(0)
    for n in range(count):
        value |= np.uint64(data[at + n]) << np.uint64(8 * n)
    return np.int64(value)


@_jit
def _walk(data: Bytes, tables: npt.NDArray[np.uint32]) -> tuple[Int64s, int]:
    """Return (begin, length) of the records whose lengths are in the data, and where a length is damaged, or -1."""
    most = len(data) // 16 + 1
    found = np.zeros((most, 2), np.int64)
    at, count = 0, 0
    while at + 12 <= len(data):
        length = _stored(data, at, 8)
        if _masked_crc(data, at, at + 8, tables) != _stored(data, at + 8, 4) or not 0 <= length < 1 << 40:
            return found[:count], at
        found[count, 0], found[count, 1] = at + 12, length
        count += 1
        at += 16 + length
    return found[:count].copy(), -1


@_jit
def _check_rows(data: Bytes, begins: Int64s, lengths: Int64s, tables: npt.NDArray[np.uint32]) -> Any:
    fits = np.zeros(len(begins), np.bool_)
    for row in range(len(begins)):
        stop = begins[row] + lengths[row]
        fits[row] = _masked_crc(data, begins[row], stop, tables) == _stored(data, stop, 4)
    return fits


def _checksums_fit(data: Bytes, begins: Int64s, lengths: Int64s) -> npt.NDArray[np.bool_]:
    """Return which records fit their checksums."""
    return _check_rows(data, np.ascontiguousarray(begins), np.ascontiguousarray(lengths), _TABLES)


def warm_examples() -> None:
    """Compile the kernels that read records of Examples."""

    def field(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2, len(value)]) + value

    lists = {b"b": (1, b"ab"), b"f": (2, bytes(4)), b"i": (3, b"\1\2")}
    entries = [field(1, field(1, n) + field(2, field(code, field(1, v)))) for n, (code, v) in lists.items()]
    record = field(1, b"".join(entries))
    data = np.frombuffer(len(record).to_bytes(8, "little") + bytes(4) + record + bytes(4), np.uint8)
    _walk(data, _TABLES)
    begins, sizes = np.array([12]), np.array([len(record)])
    columns = example_columns(data, begins, sizes)
    kinds: dict[str, Kind] = {name: kind or "bytes" for name, kind in columns.items()}
    example_rows(data, begins, sizes, _checksums_fit(data, begins, sizes), {**kinds, "i": "float_list"})
