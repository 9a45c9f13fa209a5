"""Arrow IPC: a block is a record batch, mapped from the disk without a copy.

Both the file format and the stream format, which `save_to_disk` of Hugging Face datasets writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.types as pt
from pyarrow import ipc

from overlord.core.ragged import RowBatch
from overlord.readers.arrow_columns import kinds_of_schema, require_columns, select, to_rows
from overlord.readers.filesystems import StoredFile
from overlord.readers.reader import BlockIndex, Kind

_FILE_MAGIC = b"ARROW1"
_RELEASE_BYTES = 1 << 20


class ArrowReader:
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
    ) -> Iterator[RowBatch]:
        """Yield the rows of one record batch: views of the mapped file."""
        mapped = file.map()
        native = mapped.native if mapped else file.open()
        batch = _read_batch(native, int(index.start[block]), block)
        passed = 0
        for at in range(skip, batch.num_rows, batch_rows):
            part = batch.slice(at, batch_rows)
            passed += part.nbytes
            if mapped and passed >= _RELEASE_BYTES:
                mapped.release_pages()
                passed = 0
            yield to_rows(part, columns, file.path)

    def columns(self, file: StoredFile) -> list[str]:
        """Return the names of the top-level fields."""
        return self._schema(file).names

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return what the wanted columns hold, by the schema."""
        return kinds_of_schema(self._schema(file), columns)

    def _schema(self, file: StoredFile) -> pa.Schema:
        native = file.open()
        return (ipc.open_file(native) if _is_file_format(native) else ipc.open_stream(native)).schema


def _is_file_format(native: pa.NativeFile) -> bool:
    return native.read_at(len(_FILE_MAGIC), 0) == _FILE_MAGIC


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
