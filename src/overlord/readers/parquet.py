"""Parquet: a block is a row group, read a few rows at a time.

Rows from the middle of a row group are read by the pages that they lie in (`parquet_pages.py`). Local files are mapped,
so uncompressed pages are never copied as a whole. pyarrow decodes compressed pages and dictionary pages as a whole,
however few rows are requested, and writes at least 1,024 values to a page: a row group for which that would take much
memory is spilled to disk.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from overlord.core.ragged import Kind, RowBatch
from overlord.readers.arrow import OpenBlock, SchemaReader, require_columns, to_rows
from overlord.readers.files import StoredFile
from overlord.readers.parquet_footer import read_footer, read_row_group
from overlord.readers.parquet_pages import (
    Leaf,
    PageTables,
    StoredBytes,
    has_map,
    leaves_of,
    page_bytes,
    read_pages,
    reads_pages,
)
from overlord.readers.reader import BlockIndex, DamagedFile, Rows
from overlord.readers.remote.range_files import RemoteFile
from overlord.readers.spill import RELEASE_BYTES

logger = logging.getLogger("overlord")
_REMOTE_BUFFER_BYTES = 64 << 10
_ROW_GROUPS_AT_A_TIME = 16
"""Row groups of a footer that are parsed at once; bounds the memory of indexing."""
_KEPT_BYTES = 4 << 20
"""Bytes of pages that are decoded before the memory of pyarrow is given back."""
_PAGE_BYTES = 1 << 20
_PAGE_VALUES = 1024
"""Writers close a page at 1 MiB, but check its size only after this many values."""


class ParquetReader(SchemaReader):
    """Reads Parquet. In its index, start and stop are the position of the row group in the footer."""

    name = "parquet"
    block_name = "row group"

    def __init__(self) -> None:
        self._tables = PageTables()
        self._decoded = 0

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Find the row groups of a file; the whole footer is never parsed at once."""
        with file.open() as native:
            footer = read_footer(native, file.size)
        schema = footer.metadata(0, 0).schema
        arrow_schema = schema.to_arrow_schema()
        paths = require_columns(arrow_schema, columns, file.path)
        leaves = _leaves_of(schema, paths.values())
        mapless = not any(has_map(arrow_schema.field(path[0]).type) for path in paths.values())
        blocks: list[tuple[int, int, int, int]] = []
        seeks: list[bool] = []
        for first in range(0, footer.num_row_groups, _ROW_GROUPS_AT_A_TIME):
            part = footer.metadata(first, min(first + _ROW_GROUPS_AT_A_TIME, footer.num_row_groups))
            for number in range(part.num_row_groups):
                group = part.row_group(number)
                size = sum(group.column(leaf).total_uncompressed_size for leaf in leaves)
                if group.num_rows < 0 or size < 0:
                    raise DamagedFile(f"row group {first + number} has a size below zero")
                start, stop = footer.bounds[first + number], footer.bounds[first + number + 1]
                blocks.append((group.num_rows, size, int(start), int(stop)))
                row_group = footer.row_group(first + number)
                seeks.append(mapless and reads_pages(leaves_of(schema, leaves, row_group), part.created_by or ""))
        return BlockIndex.of(blocks, seeks)

    def rows(
        self, file: StoredFile, index: BlockIndex, block: int, *, columns: Mapping[str, Kind], start: int, stop: int
    ) -> RowBatch:
        """Return rows start .. stop of a block, by the pages that they lie in."""
        mapped = file.map()
        with contextlib.nullcontext(mapped.native) if mapped else file.open() as native:
            row_group = read_row_group(native, file.size, index.start, index.stop, block)
            metadata = row_group.metadata()
            paths = require_columns(metadata.schema.to_arrow_schema(), list(columns), file.path)
            leaves = leaves_of(metadata.schema, _leaves_of(metadata.schema, paths.values()), row_group)
            if not leaves:
                return to_rows(_no_columns(stop - start), columns, file.path)
            stored, count = StoredBytes(native, file.size, mapped), metadata.row_group(0).num_rows
            try:
                key = (file.location, file.size, file.mtime_ns, block)
                batch = read_pages(stored, row_group, leaves, count, start, stop, self._tables, key)
            except (DamagedFile, pa.ArrowException) as error:
                logger.debug("block %d of %s is read from its beginning: %s", block, file.path, error)
                batch = _from_beginning(native, metadata, paths.values(), start, stop)
            finally:
                stored.release()
                self._release_memory(leaves, metadata.created_by or "")
        return to_rows(batch, columns, file.path)

    def ranges(self, file: StoredFile, index: BlockIndex, block: int, columns: Sequence[str]) -> list[tuple[int, int]]:
        """Return the column chunks of a row group."""
        with file.open() as native:
            metadata = read_row_group(native, file.size, index.start, index.stop, block).metadata()
        paths = require_columns(metadata.schema.to_arrow_schema(), columns, file.path).values()
        return chunks_of(metadata, _leaves_of(metadata.schema, paths))

    def _release_memory(self, leaves: Sequence[Leaf], created_by: str) -> None:
        """Let the memory pool give back what it keeps of pages, once they were many: giving back takes time too."""
        self._decoded += sum(page_bytes(one.chunk, created_by) * (8 if one.max_repetition else 1) for one in leaves)
        if self._decoded >= _KEPT_BYTES:
            self._decoded = 0
            pa.default_memory_pool().release_unused()

    def _open_block(self, opened: OpenBlock) -> tuple[int, Callable[[int, int], Rows]]:
        file, mapped, native, index, block, columns = opened
        metadata = read_row_group(native, file.size, index.start, index.stop, block).metadata()
        paths = require_columns(metadata.schema.to_arrow_schema(), list(columns), file.path).values()
        names = [".".join(path) for path in paths]
        buffered = 0 if mapped else _REMOTE_BUFFER_BYTES
        if isinstance(native, RemoteFile):
            for start, stop in chunks_of(metadata, _leaves_of(metadata.schema, paths)):
                native.ranges.will_read(start, stop)
        parquet = pq.ParquetFile(native, metadata=metadata, pre_buffer=False, buffer_size=buffered)

        def rows(skip: int, batch_rows: int) -> Rows:
            passed = RELEASE_BYTES  # the first batch may have touched a whole page, far more than it returns
            for batch in parquet.iter_batches(batch_rows, row_groups=[0], columns=names, use_threads=False):
                passed += batch.nbytes
                if mapped and passed >= RELEASE_BYTES:
                    mapped.release_pages()
                    passed = 0
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                yield to_rows(batch.slice(skip), columns, file.path)
                skip = 0

        return held_bytes(metadata, _leaves_of(metadata.schema, paths), file.is_local), rows

    def _schema(self, file: StoredFile) -> pa.Schema:
        with file.open() as native:
            return read_footer(native, file.size).metadata(0, 0).schema.to_arrow_schema()


def chunks_of(metadata: pq.FileMetaData, leaves: Iterable[int]) -> list[tuple[int, int]]:
    """Return where the column chunks of the first row group are."""
    chunks = [metadata.row_group(0).column(leaf) for leaf in leaves]
    begins = [min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset) for chunk in chunks]
    return [(begin, begin + chunk.total_compressed_size) for begin, chunk in zip(begins, chunks, strict=True)]


def _no_columns(count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))


def _from_beginning(
    native: pa.NativeFile, metadata: pq.FileMetaData, paths: Iterable[Sequence[str]], start: int, stop: int
) -> pa.RecordBatch:
    """Return rows of the row group of a footer; those before them are decoded too."""
    names = [".".join(path) for path in paths]
    parquet = pq.ParquetFile(native, metadata=metadata, pre_buffer=False)
    parts: list[pa.RecordBatch] = []
    at = 0
    for batch in parquet.iter_batches(max(1, stop - start), row_groups=[0], columns=names, use_threads=False):
        begin, end = max(start - at, 0), min(stop - at, batch.num_rows)
        if begin < end:
            parts.append(batch.slice(begin, end - begin))
        at += batch.num_rows
        if at >= stop:
            break
    if sum(part.num_rows for part in parts) < stop - start:
        raise DamagedFile("a row group has fewer rows than its footer says")
    return parts[0] if len(parts) == 1 else pa.Table.from_batches(parts).combine_chunks().to_batches()[0]


def held_bytes(metadata: pq.FileMetaData, leaves: Iterable[int], is_local: bool) -> int:
    """Estimate the bytes that pyarrow holds while it reads the first row group a few rows at a time.

    The values of a dictionary page stay until the end of the column chunk. A page that has to be decompressed is held
    once more, and once more if it is remote; an uncompressed page of a mapped file costs nothing.
    """
    held = 0.0
    for leaf in leaves:
        chunk = metadata.row_group(0).column(leaf)
        size = chunk.total_uncompressed_size
        page = min(size, max(_PAGE_BYTES, _PAGE_VALUES * size / max(1, chunk.num_values)))
        dictionary = 0.0
        if chunk.has_dictionary_page:
            stored = chunk.data_page_offset - chunk.dictionary_page_offset
            dictionary = min(size, size * stored / max(1, chunk.total_compressed_size))
        elif any("DICTIONARY" in encoding for encoding in chunk.encodings):
            dictionary = page  # some writers do not record its position
        copies = (chunk.compression != "UNCOMPRESSED") + (not is_local)
        held += dictionary + copies * max(dictionary, min(page, size - dictionary))
    return int(held)


def _leaves_of(schema: pq.ParquetSchema, paths: Iterable[Sequence[str]]) -> list[int]:
    """Return the leaf columns of the file under any of the paths."""
    wanted = tuple(f"{'.'.join(path)}." for path in paths)
    return [leaf for leaf in range(len(schema)) if f"{schema.column(leaf).path}.".startswith(wanted)]
