"""Parquet: a block is a row group, read a few rows at a time.

Local files are mapped, so uncompressed pages are never copied as a whole. pyarrow decodes compressed pages and
dictionary pages as a whole, however few rows are requested, and writes at least 1,024 values to a page: a row group
for which that would take much memory is spilled to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from overlord.readers.arrow import OpenBlock, SchemaReader, require_columns, to_rows
from overlord.readers.files import StoredFile
from overlord.readers.parquet_footer import read_block_metadata, read_footer
from overlord.readers.reader import BlockIndex, DamagedFile, Rows
from overlord.readers.spill import RELEASE_BYTES

_REMOTE_BUFFER_BYTES = 64 << 10
_ROW_GROUPS_AT_A_TIME = 16
"""Row groups of a footer that are parsed at once; bounds the memory of indexing."""
_PAGE_BYTES = 1 << 20
_PAGE_VALUES = 1024
"""Writers close a page at 1 MiB, but check its size only after this many values."""


class ParquetReader(SchemaReader):
    """Reads Parquet. In its index, start and stop are the position of the row group in the footer."""

    name = "parquet"
    block_name = "row group"

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Find the row groups of a file; the whole footer is never parsed at once."""
        with file.open() as native:
            footer = read_footer(native, file.size)
        schema = footer.metadata(0, 0).schema
        paths = require_columns(schema.to_arrow_schema(), columns, file.path)
        leaves = _leaves_of(schema, paths.values())
        blocks: list[tuple[int, int, int, int]] = []
        for first in range(0, footer.num_row_groups, _ROW_GROUPS_AT_A_TIME):
            part = footer.metadata(first, min(first + _ROW_GROUPS_AT_A_TIME, footer.num_row_groups))
            for number in range(part.num_row_groups):
                group = part.row_group(number)
                size = sum(group.column(leaf).total_uncompressed_size for leaf in leaves)
                if group.num_rows < 0 or size < 0:
                    raise DamagedFile(f"row group {first + number} has a size below zero")
                start, stop = footer.bounds[first + number], footer.bounds[first + number + 1]
                blocks.append((group.num_rows, size, int(start), int(stop)))
        return BlockIndex.of(blocks)

    def _open_block(self, opened: OpenBlock) -> tuple[int, Callable[[int, int], Rows]]:
        file, mapped, native, index, block, columns = opened
        metadata = read_block_metadata(native, file.size, index.start, index.stop, block)
        paths = require_columns(metadata.schema.to_arrow_schema(), list(columns), file.path).values()
        names = [".".join(path) for path in paths]
        buffered = 0 if mapped else _REMOTE_BUFFER_BYTES
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
