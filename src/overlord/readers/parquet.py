"""Parquet: a block is a row group, read a few rows at a time.

Local files are mapped, so pages that are not compressed are never copied whole. A compressed page and
a dictionary page are decoded whole by pyarrow, whatever the number of rows asked for: files with large
values should be written with small pages (`write_batch_size`) and without a dictionary on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from overlord.core.ragged import RowBatch
from overlord.readers.arrow_columns import kinds_of_schema, require_columns, to_rows
from overlord.readers.filesystems import StoredFile
from overlord.readers.parquet_footer import read_block_metadata, read_footer
from overlord.readers.reader import BlockIndex, DamagedFile, Kind

_REMOTE_BUFFER_BYTES = 64 << 10
_ROW_GROUPS_AT_A_TIME = 16
"""How much of a footer is parsed at once: bounds the memory of indexing."""
_RELEASE_BYTES = 1 << 20
"""How many bytes are read before the pages behind them are handed back."""


class ParquetReader:
    """Reads Parquet. In its index, start and stop are where the row group is described in the footer."""

    name = "parquet"

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Find the row groups of a file; the whole footer is never parsed at once."""
        with file.open() as native:
            footer = read_footer(native, file.size)
        schema = footer.metadata(0, 0).schema
        paths = require_columns(schema.to_arrow_schema(), columns, file.path)
        wanted = [".".join(path) for path in paths.values()]
        leaves = [
            number
            for number in range(len(schema))
            if any(f"{schema.column(number).path}.".startswith(f"{name}.") for name in wanted)
        ]
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
        """Yield the rows of one row group."""
        mapped = file.map()
        native = mapped.native if mapped else file.open()
        metadata = read_block_metadata(native, file.size, index.start, index.stop, block)
        paths = require_columns(metadata.schema.to_arrow_schema(), list(columns), file.path)
        parquet = pq.ParquetFile(
            native, metadata=metadata, pre_buffer=False, buffer_size=0 if mapped else _REMOTE_BUFFER_BYTES
        )
        batches = parquet.iter_batches(
            batch_rows, row_groups=[0], columns=[".".join(p) for p in paths.values()], use_threads=False
        )
        passed = _RELEASE_BYTES  # the first batch may have touched a whole page, far more than it returns
        for batch in batches:
            passed += batch.nbytes
            if mapped and passed >= _RELEASE_BYTES:
                mapped.release_pages()
                passed = 0
            if skip >= batch.num_rows:
                skip -= batch.num_rows
                continue
            yield to_rows(batch.slice(skip), columns, file.path)
            skip = 0

    def columns(self, file: StoredFile) -> list[str]:
        """Return the names of the top-level fields."""
        return self._schema(file).names

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return what the wanted columns hold, by the schema."""
        return kinds_of_schema(self._schema(file), columns)

    def _schema(self, file: StoredFile) -> pa.Schema:
        with file.open() as native:
            return read_footer(native, file.size).metadata(0, 0).schema.to_arrow_schema()
