"""Arrow IPC, and Arrow record batches as numpy columns, without copying where Arrow's buffers allow it.

A block of an Arrow file is a record batch, mapped from the disk. Both the file format and the stream format are read,
which `save_to_disk` of Hugging Face datasets writes. A record batch that is compressed or remote can only be read as a
whole: a large one is spilled to disk.

Parquet uses the columns too. Text, binary and lists become Ragged, numbers arrays; a list of binary (or of
the images of Hugging Face datasets) becomes its bytes and their sizes. What is nested deeper (chat messages)
becomes JSON text with bytes in base64.
"""

from __future__ import annotations

import base64
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt
from pyarrow import ipc

from overlord.core.ragged import BAD_COLUMN, Array, Kind, Ragged, RowBatch, no_value, offsets_of, sizes_column
from overlord.readers.files import MappedFile, StoredFile
from overlord.readers.reader import BlockIndex, Rows, missing_column, require_kind
from overlord.readers.spill import RELEASE_BYTES, SpillPlace, is_too_much, spill_rows, spilled

Bools = npt.NDArray[np.bool_]


class OpenBlock(NamedTuple):
    """A block of an open file."""

    file: StoredFile
    mapped: MappedFile | None
    """None for a remote file."""
    native: pa.NativeFile
    blocks: BlockIndex
    block: int
    columns: Mapping[str, Kind]


class SchemaReader(ABC):
    """What the readers of Parquet and Arrow IPC share: a file has a schema, and blocks of any size."""

    block_name: str
    """What a block is called, for messages."""

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
        """Yield the rows of one block; one that would take much memory while it is read is spilled to disk."""
        mapped = file.map()
        native = mapped.native if mapped else file.open()
        row_bytes = int(index.bytes[block]) / max(1, int(index.rows[block]))
        held, read = self._open_block(OpenBlock(file, mapped, native, index, block, columns))
        # Rows of a file that can seek are views of it, and take no memory.
        spills = scratch is not None and is_too_much(held, row_bytes, batch_rows) and not self.seeks(file)
        rows = read(skip, spill_rows(row_bytes) if spills else batch_rows)
        del mapped, native, read  # a spilled block closes the file
        if scratch is not None and spills:
            size = int(row_bytes * max(0, int(index.rows[block]) - skip))
            place = SpillPlace(scratch, f"{self.block_name} {block} of {file.path}", size)
            yield from spilled(rows, place, batch_rows)
        else:
            yield from rows

    def divides(self, file: StoredFile) -> bool:
        """Return True: blocks are as large as the writer made them."""
        return True

    def seeks(self, file: StoredFile) -> bool:
        """Return False: a block is decoded from its beginning."""
        return False

    def columns(self, file: StoredFile) -> list[str]:
        """Return the names of the top-level fields."""
        return self._schema(file).names

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return the kinds of the wanted columns, by the schema."""
        return kinds_of_schema(self._schema(file), columns)

    @abstractmethod
    def _schema(self, file: StoredFile) -> pa.Schema: ...

    @abstractmethod
    def _open_block(self, opened: OpenBlock) -> tuple[int, Callable[[int, int], Rows]]:
        """Return how many bytes are held while a block is read, and what yields its rows, given (skip, batch_rows)."""


def column_path(schema: pa.Schema, column: str) -> tuple[str, ...] | None:
    """Return the field names that lead to a column, None if there is no such column.

    A dot reaches into a struct. A struct of bytes and path (the image and audio features of Hugging
    Face datasets) stands for its bytes.

    Example:
        >>> image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        >>> column_path(pa.schema([("image", image)]), "image")
        ('image', 'bytes')
    """
    fields = {field.name: field.type for field in schema}
    path: tuple[str, ...] = ()
    rest = column
    while rest:
        name = next((n for n in fields if rest == n), None)
        name = name or next((n for n in fields if rest.startswith(n + ".")), None)
        if name is None:
            return None
        path, rest = (*path, name), rest[len(name) + 1 :]
        found = _storage_type(fields[name])
        fields = {field.name: field.type for field in found.fields} if pt.is_struct(found) else {}
    inner = _storage_type(fields["bytes"]) if set(fields) <= {"bytes", "path"} and "bytes" in fields else None
    return (*path, "bytes") if inner is not None and _is_bytes(inner) else path


def require_columns(schema: pa.Schema, columns: Sequence[str], path: str) -> dict[str, tuple[str, ...]]:
    """Return the path of every wanted column.

    Raises:
        SourceError: The schema has no such column.
    """
    found: dict[str, tuple[str, ...]] = {}
    for column in columns:
        fields = column_path(schema, column)
        if fields is None:
            raise missing_column(path, column, schema.names)
        found[column] = fields
    return found


def kinds_of_schema(schema: pa.Schema, columns: Sequence[str]) -> dict[str, Kind | None]:
    """Return the kinds of the wanted columns; a column that the schema does not have is left out."""
    kinds: dict[str, Kind | None] = {}
    for column in columns:
        fields = column_path(schema, column)
        if fields is not None:
            kinds[column] = _kind_of_type(_type_at(schema, fields))
    return kinds


def select(batch: pa.RecordBatch, fields: Sequence[str]) -> pa.Array:
    """Return the array at a path of field names; a null struct has null fields."""
    array = _storage(batch.column(batch.schema.get_field_index(fields[0])))
    for name in fields[1:]:
        array = _struct_field(array, name)
    return array


def _struct_field(array: pa.Array, name: str) -> pa.Array:
    import pyarrow.compute as pc  # takes longer to load than the rest of pyarrow, and few files need it

    return _storage(pc.struct_field(array, [name]))  # type: ignore[attr-defined]


def validate_columns(batch: pa.RecordBatch, columns: Sequence[str], path: str) -> None:
    """Check every offset, index and length of the wanted columns against their buffers.

    pyarrow does not check the offsets of an IPC file: pyarrow and our kernels would follow a damaged one out of its
    buffer. Text is checked as bytes: a row that is not UTF-8 is a bad sample, not a damaged file.

    Raises:
        pa.ArrowInvalid: A column is damaged.
    """
    batch.validate()
    for fields in require_columns(batch.schema, columns, path).values():
        array = batch.column(batch.schema.get_field_index(fields[0]))
        if pt.is_string(array.type) or pt.is_large_string(array.type):
            array = array.view(pa.binary() if pt.is_string(array.type) else pa.large_binary())
        array.validate(full=True)


def to_rows(batch: pa.RecordBatch, columns: Mapping[str, Kind], path: str) -> RowBatch:
    """Return the wanted columns of a record batch, with rows that have a null marked bad.

    Raises:
        ReaderError: A column has another type than in the other files of the source.
    """
    rows: RowBatch = {}
    marks = np.zeros(batch.num_rows, np.int16)
    for number, (column, fields) in enumerate(require_columns(batch.schema, list(columns), path).items()):
        array = select(batch, fields)
        wanted = columns[column]
        require_kind(_kind_of_type(array.type), wanted, path=path, column=column, holds=str(array.type))
        if wanted == "bytes_list":
            rows[column], rows[sizes_column(column)], nulls = _bytes_list_column(array)
        else:
            rows[column], nulls = _to_numpy(array, wanted)
        marks[nulls & (marks == 0)] = no_value(number)
    rows[BAD_COLUMN] = marks
    return rows


def _to_numpy(array: pa.Array, kind: Kind) -> tuple[Ragged | Array, Bools]:
    if pt.is_null(array.type):
        return _nothing(kind, len(array)), np.ones(len(array), np.bool_)
    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    nulls = _nulls_of(array)
    if kind == "bytes":
        return _blank(_bytes_column(array), nulls), nulls
    if kind == "json":
        texts, broken = _json_column(array)
        return texts, nulls | broken
    if kind in ("int_list", "float_list"):
        ragged, inner_nulls = _list_column(array)
        return _blank(ragged, nulls), nulls | inner_nulls
    return _number_column(array), nulls


def _bytes_column(array: pa.Array) -> Ragged:
    if not _has_offsets(array.type):  # views and fixed-size binary
        array = array.cast(pa.large_binary() if not pt.is_string_view(array.type) else pa.large_string())
    wide = pt.is_large_binary(array.type) or pt.is_large_string(array.type)
    _, offsets, data = array.buffers()
    if len(array) == 0 or offsets is None:
        return Ragged(np.empty(0, np.uint8), np.zeros(len(array) + 1, np.int64))
    at = np.frombuffer(offsets, np.int64 if wide else np.int32)[array.offset : array.offset + len(array) + 1]
    values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return Ragged(values, at.astype(np.int64, copy=False))


def _list_column(array: pa.Array) -> tuple[Ragged, Bools]:
    child, offsets = _list_parts(array)
    return Ragged(_number_column(child), offsets), _has_null(child, offsets)


def _bytes_list_column(array: pa.Array) -> tuple[Ragged, Ragged, Bools]:
    """Return the bytes of all items of each row, their sizes, and which rows have a null among them.

    A null row has no items, which is not an error: a text without images is often written so.
    """
    if pt.is_null(array.type):
        empty, none = np.zeros(len(array) + 1, np.int64), np.zeros(len(array), np.bool_)
        return Ragged(np.empty(0, np.uint8), empty), Ragged(np.empty(0, np.int64), empty), none
    nulls = _nulls_of(array)
    child, offsets = _list_parts(array)
    child = _storage(child)
    if pt.is_struct(child.type):
        child = _struct_field(child, "bytes")
    items = _bytes_column(child)
    data, sizes = Ragged(items.values, items.offsets[offsets]), Ragged(items.lengths, offsets)
    return _blank(data, nulls), _blank(sizes, nulls), ~nulls & _has_null(child, offsets)


def _list_parts(array: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    if not (pt.is_list(array.type) or pt.is_large_list(array.type)):
        array = array.cast(pa.large_list(array.type.value_type))
    return array.values, _values(array.offsets).astype(np.int64, copy=False)


def _has_null(child: pa.Array, offsets: npt.NDArray[np.int64]) -> Bools:
    if not child.null_count:
        return np.zeros(len(offsets) - 1, np.bool_)
    count = np.concatenate([[0], np.cumsum(_nulls_of(child))])
    return count[offsets[1:]] > count[offsets[:-1]]


def _number_column(array: pa.Array) -> Array:
    if pt.is_decimal(array.type):
        array = array.cast(pa.float64())
    elif pt.is_temporal(array.type):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    if array.null_count:
        array = array.fill_null(False if pt.is_boolean(array.type) else 0)
    return _values(array)


def _values(array: pa.Array) -> Array:
    """Return the numbers of an array without nulls.

    Not by `to_numpy`, which imports pandas where that is installed: a third of a second in every process that reads.
    """
    if pt.is_boolean(array.type):
        return np.from_dlpack(array.cast(pa.uint8())).view(np.bool_)
    return np.from_dlpack(array)


def _json_column(array: pa.Array) -> tuple[Ragged, Bools]:
    """Return the rows as JSON text, and which of them have no Python value: bad UTF-8, a date out of range."""
    broken: Bools = np.zeros(len(array), np.bool_)
    try:
        values = array.to_pylist()
    except (ValueError, OverflowError):
        values = []
        for row in range(len(array)):
            try:
                values.append(array[row].as_py())
            except (ValueError, OverflowError):
                values.append(None)
                broken[row] = True
    texts = [b"" if v is None else _json_text(v) for v in values]
    return Ragged(np.frombuffer(b"".join(texts), np.uint8), offsets_of([len(text) for text in texts])), broken


def _json_text(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return text.encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _nothing(kind: Kind, rows: int) -> Ragged | Array:
    dtype = {"bytes": np.uint8, "json": np.uint8, "int": np.int64, "int_list": np.int64}.get(kind, np.float64)
    if kind in ("int", "float"):
        return np.zeros(rows, dtype)
    return Ragged(np.empty(0, dtype), np.zeros(rows + 1, np.int64))


def _blank(ragged: Ragged, nulls: Bools) -> Ragged:
    """Make null rows empty: Arrow allows bytes under a null."""
    lengths = ragged.lengths
    if not lengths[nulls].any():
        return ragged
    kept = ragged.take(np.flatnonzero(~nulls))
    return Ragged(kept.values, offsets_of(np.where(nulls, 0, lengths)))


def _nulls_of(array: pa.Array) -> Bools:
    if not array.null_count:
        return np.zeros(len(array), np.bool_)
    return _values(array.is_null())


def _storage(array: pa.Array) -> pa.Array:
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _storage_type(found: pa.DataType) -> pa.DataType:
    return found.storage_type if isinstance(found, pa.BaseExtensionType) else found


def _type_at(schema: pa.Schema, fields: Sequence[str]) -> pa.DataType:
    found = _storage_type(schema.field(schema.get_field_index(fields[0])).type)
    for name in fields[1:]:
        found = _storage_type(found.field(name).type)
    return found


def _has_offsets(found: pa.DataType) -> bool:
    return pt.is_string(found) or pt.is_binary(found) or pt.is_large_string(found) or pt.is_large_binary(found)


def _is_bytes(found: pa.DataType) -> bool:
    views = pt.is_string_view(found) or pt.is_binary_view(found)
    return _has_offsets(found) or views or pt.is_fixed_size_binary(found)


def _is_binary(found: pa.DataType) -> bool:
    """Return whether a type is binary, not text, or an image or audio feature of Hugging Face datasets."""
    if pt.is_struct(found):
        inner = {field.name: _storage_type(field.type) for field in found.fields}
        return set(inner) <= {"bytes", "path"} and "bytes" in inner and _is_binary(inner["bytes"])
    return _is_bytes(found) and not (pt.is_string(found) or pt.is_large_string(found) or pt.is_string_view(found))


def _is_number(found: pa.DataType) -> bool:
    return pt.is_primitive(found) or pt.is_decimal(found)


def _kind_of_type(found: pa.DataType) -> Kind | None:
    if pt.is_null(found):
        return None
    if pt.is_dictionary(found):
        return _kind_of_type(found.value_type)
    if _is_bytes(found):
        return "bytes"
    if _is_number(found):
        return "float" if pt.is_floating(found) or pt.is_decimal(found) else "int"
    lists = pt.is_list(found) or pt.is_large_list(found) or pt.is_fixed_size_list(found)
    if lists and _is_number(found.value_type):
        return "float_list" if _kind_of_type(found.value_type) == "float" else "int_list"
    return "bytes_list" if lists and _is_binary(_storage_type(found.value_type)) else "json"


# -- the files -----------------------------------------------------------------------------------------------------


_FILE_MAGIC = b"ARROW1"
_FILE_HEAD_BYTES = 8
"""The file format is this, the stream format, and a footer."""


class ArrowReader(SchemaReader):
    """Reads Arrow IPC. In its index, start and stop are byte offsets (stream) or batch numbers (file)."""

    name = "arrow"
    block_name = "record batch"

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
            return BlockIndex.of(blocks, [not _is_compressed(native)] * len(blocks) if blocks else [])
        stream = ipc.open_stream(native)
        paths = require_columns(stream.schema, columns, file.path)
        start = native.tell()
        while True:
            try:
                batch = stream.read_next_batch()
            except StopIteration:
                return BlockIndex.of(blocks, [not _is_compressed(native)] * len(blocks) if blocks else [])
            stop = native.tell()
            batch.validate()
            blocks.append((batch.num_rows, _bytes_of(batch, paths.values()), start, stop))
            start = stop

    def _open_block(self, opened: OpenBlock) -> tuple[int, Callable[[int, int], Rows]]:
        file, mapped, native, index, block, columns = opened

        def rows(skip: int, batch_rows: int) -> Rows:
            batch = _read_batch(native, int(index.start[block]), block)
            validate_columns(batch, list(columns), file.path)
            passed = 0
            for at in range(skip, batch.num_rows, batch_rows):
                part = batch.slice(at, batch_rows)
                passed += part.nbytes
                if mapped and passed >= RELEASE_BYTES:
                    mapped.release_pages()
                    passed = 0
                yield to_rows(part, columns, file.path)

        return int(index.bytes[block]), rows

    def rows(
        self, file: StoredFile, index: BlockIndex, block: int, *, columns: Mapping[str, Kind], start: int, stop: int
    ) -> RowBatch:
        """Return rows start .. stop of a block; only they are looked at."""
        mapped = file.map()
        batch = _read_batch(mapped.native if mapped else file.open(), int(index.start[block]), block)
        part = batch.slice(start, stop - start)
        validate_columns(part, list(columns), file.path)
        return to_rows(part, columns, file.path)

    def seeks(self, file: StoredFile) -> bool:
        """Return whether the file can be mapped and is not compressed."""
        mapped = file.map()
        return mapped is not None and not _is_compressed(mapped.native)

    def _schema(self, file: StoredFile) -> pa.Schema:
        native = file.open()
        return (ipc.open_file(native) if _is_file_format(native) else ipc.open_stream(native)).schema


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
