"""Arrow IPC: a block is a record batch, mapped from the disk without a copy.

Both the file format and the stream format, which `save_to_disk` of Hugging Face datasets writes. A record
batch that is compressed or remote can only be read as a whole: a large one is spilled to disk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.types as pt
from pyarrow import ipc

from overlord.core.ragged import RowBatch
from overlord.readers.arrow_columns import SchemaReader, require_columns, select, to_rows, validate_columns
from overlord.readers.filesystems import MappedFile, StoredFile
from overlord.readers.reader import BlockIndex, Kind, Rows
from overlord.readers.spill import RELEASE_BYTES, SpillPlace, is_too_much, spill_rows, spilled

_FILE_MAGIC = b"ARROW1"
_FILE_HEAD_BYTES = 8
"""The file format is this, the stream format, and a footer."""


class ArrowReader(SchemaReader):
    """Reads Arrow IPC. In its index, start and stop are byte offsets (stream) or batch numbers (file)."""

    name = "arrow"

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Find the record batches of a file."""
        mapped = file.map()
        native = mapped.native if mapped else file.open()
        blocks: list[tuple[int, int, int, int]] = []
        if _is_file_format(native):
            reader = ipc.open_file(native)
            paths = require_columns(reader.schema, columns, file.path)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                batch.validate()
                blocks.append((batch.num_rows, _bytes_of(batch, paths.values()), number, number + 1))
            return BlockIndex.of(blocks)
        stream = ipc.open_stream(native)
        paths = require_columns(stream.schema, columns, file.path)
        start = native.tell()
        while True:
            try:
                batch = stream.read_next_batch()
            except StopIteration:
                return BlockIndex.of(blocks)
            stop = native.tell()
            batch.validate()
            blocks.append((batch.num_rows, _bytes_of(batch, paths.values()), start, stop))
            start = stop

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
        """Yield the rows of one record batch: views of the mapped file where it is not compressed."""
        mapped = file.map()
        native = mapped.native if mapped else file.open()
        size, rows = int(index.bytes[block]), int(index.rows[block])
        row_bytes = size / max(1, rows)
        too_much = scratch is not None and is_too_much(size, row_bytes, batch_rows)
        spills = too_much and (mapped is None or _is_compressed(native))
        batch = _Batch(native, mapped, int(index.start[block]), block)
        del mapped, native  # a spilled record batch closes the file
        if scratch is not None and spills:
            parts = batch.rows(columns, file.path, skip, spill_rows(row_bytes))
            del batch
            left = int(row_bytes * max(0, rows - skip))
            yield from spilled(parts, SpillPlace(scratch, f"record batch {block} of {file.path}", left), batch_rows)
        else:
            yield from batch.rows(columns, file.path, skip, batch_rows)

    def seeks(self, file: StoredFile) -> bool:
        """Return whether the file can be mapped and is not compressed."""
        mapped = file.map()
        return mapped is not None and not _is_compressed(mapped.native)

    def _schema(self, file: StoredFile) -> pa.Schema:
        native = file.open()
        return (ipc.open_file(native) if _is_file_format(native) else ipc.open_stream(native)).schema


class _Batch:
    """One record batch of an open file, read when its rows are asked for."""

    def __init__(self, native: pa.NativeFile, mapped: MappedFile | None, start: int, block: int) -> None:
        self._native = native
        self._mapped = mapped
        self._start = start
        self._block = block

    def rows(self, columns: Mapping[str, Kind], path: str, skip: int, batch_rows: int) -> Rows:
        """Yield the rows behind the first `skip`."""
        batch = _read_batch(self._native, self._start, self._block)
        validate_columns(batch, list(columns), path)
        passed = 0
        for at in range(skip, batch.num_rows, batch_rows):
            part = batch.slice(at, batch_rows)
            passed += part.nbytes
            if self._mapped and passed >= RELEASE_BYTES:
                self._mapped.release_pages()
                passed = 0
            yield to_rows(part, columns, path)


def _is_file_format(native: pa.NativeFile) -> bool:
    magic = native.read_at(len(_FILE_MAGIC), 0)
    native.seek(0)  # a file that is not mapped has no position after read_at
    return magic == _FILE_MAGIC


def _bytes_of(batch: pa.RecordBatch, paths: Iterable[Sequence[str]]) -> int:
    return sum(select(batch, path).nbytes for path in paths)


def _read_batch(native: pa.NativeFile, start: int, block: int) -> pa.RecordBatch:
    if _is_file_format(native):
        return ipc.open_file(native).get_batch(start)
    stream = ipc.open_stream(native)
    if any(pt.is_dictionary(field.type) or field.type.num_fields for field in stream.schema):
        # Dictionaries, which may be nested, come in messages of their own before the batches.
        for _ in range(block):
            stream.read_next_batch()
        return stream.read_next_batch()
    native.seek(start)
    return ipc.read_record_batch(ipc.read_message(native), stream.schema)


def _is_compressed(native: pa.NativeFile) -> bool:
    """Return whether the record batches of a mapped file are compressed, by the header of the first one.

    pyarrow has no function for it. A table of a flatbuffer begins with the distance back to a list of the places of its
    fields; the header of a message is its third field, the compression of a record batch its fourth.
    """
    native.seek(_FILE_HEAD_BYTES if _is_file_format(native) else 0)
    message = ipc.read_message(native)
    while message.type != "record batch":
        message = ipc.read_message(native)
    data = message.metadata.to_pybytes()
    (root,) = struct.unpack_from("<I", data)
    header = root + _field_of(data, root, 2)
    return _field_of(data, header + struct.unpack_from("<I", data, header)[0], 3) > 0


def _field_of(data: bytes, table: int, field: int) -> int:
    """Return where a field is in a table of a flatbuffer, 0 if it is not there."""
    places = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, places)
    at = 4 + 2 * field
    return struct.unpack_from("<H", data, places + at)[0] if at < size else 0
