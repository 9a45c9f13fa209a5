"""Lance datasets, read by the library `pylance` (extra `lance`).

A dataset is a folder with the files of its fragments and a manifest for each of its versions, which lists them. The
listing takes the newest manifest as the file of the source: it names a version, and a version never changes, so rows
that are added while a job runs are not part of it. A block is a run of rows of a fragment of about 1 MiB on disk. The
library decodes natively and starts threads, so datasets are read in reader processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from overlord.core.ragged import Kind, RowBatch
from overlord.errors import SourceError, pip_install
from overlord.readers.arrow import kinds_of_schema, require_columns, to_rows, validate_columns
from overlord.readers.files import StoredFile, version_of_manifest
from overlord.readers.reader import BLOCK_BYTES, BlockIndex, DamagedFile, SeekableReader

_MOST_BLOCKS = 1 << 16
"""Blocks of a dataset, about: those of a larger one are larger, so that its index stays small."""
_ROW_BITS = 32
_CACHE_BYTES = 1 << 20
"""What the library may keep of metadata and of indices of a dataset that is open."""


class LanceReader(SeekableReader):
    """Reads Lance datasets. In its index, start and stop are rows of a fragment, whose number is in the bits above."""

    name = "lance"
    native = True

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Cut the fragments of a version into blocks; bytes are those of all columns on disk."""
        dataset = _open(file)
        require_columns(dataset.schema, columns, file.path)
        fragments = [
            (
                fragment.count_rows(),
                fragment.physical_rows,
                sum(one.file_size_bytes or 0 for one in fragment.data_files()),
            )
            for fragment in dataset.get_fragments()
        ]
        size = max(BLOCK_BYTES, sum(stored for *_, stored in fragments) // _MOST_BLOCKS)
        blocks: list[tuple[int, int, int, int]] = []
        for number, (rows, physical, stored) in enumerate(fragments):
            row_bytes = max(1, stored // max(1, physical))
            step = max(1, size // row_bytes)
            for at in range(0, rows, step):
                count, start = min(step, rows - at), (number << _ROW_BITS) + at
                blocks.append((count, count * row_bytes, start, start + count))
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
        """Yield the rows of one block; skipped ones cost nothing."""
        dataset = _open(file)
        number, start = divmod(int(index.start[block]), 1 << _ROW_BITS)
        paths = require_columns(dataset.schema, list(columns), file.path).values()
        left = int(index.rows[block]) - skip
        if left <= 0:
            return
        batches = dataset.get_fragments()[number].to_batches(
            columns=list(dict.fromkeys(path[0] for path in paths)),
            batch_size=batch_rows,
            offset=start + skip,
            limit=left,
            batch_readahead=1,
        )
        for batch in batches:
            validate_columns(batch, list(columns), file.path)
            for at in range(0, batch.num_rows, batch_rows):
                yield to_rows(batch.slice(at, batch_rows), columns, file.path)

    def columns(self, file: StoredFile) -> list[str]:
        """Return the names of the top-level fields."""
        schema: pa.Schema = _open(file).schema
        return list(schema.names)

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return the kinds of the wanted columns, by the schema."""
        return kinds_of_schema(_open(file).schema, columns)


def _open(file: StoredFile) -> Any:
    try:
        import lance
    except ImportError as error:
        raise SourceError(
            f"{file.path} is of a Lance dataset, which needs the package pylance; it cannot be read. Install it "
            f"(`{pip_install('lance')}`)."
        ) from error
    if not file.is_local:
        raise SourceError(
            f"{file.path} is of a Lance dataset on a remote store, and datasets on this host's disks are read; nothing "
            "could be read. Mount the store, or copy the dataset."
        )
    folder, _, name = file.location.rpartition("/_versions/")
    if not folder:
        raise DamagedFile("it is no manifest in the folder _versions of a Lance dataset")
    return lance.dataset(
        folder,
        version=version_of_manifest(name.removesuffix(".manifest")),
        metadata_cache_size_bytes=_CACHE_BYTES,
        index_cache_size_bytes=_CACHE_BYTES,
    )
