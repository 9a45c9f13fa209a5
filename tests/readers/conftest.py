"""Sources in a temporary folder, and how to read all of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlord.core.ragged import BAD_COLUMN, Ragged, RowBatch, num_rows
from overlord.readers.index import IndexCache
from overlord.readers.source_files import SourceFiles

OpenSource = Callable[..., SourceFiles]


@pytest.fixture
def cache(tmp_path: Path) -> IndexCache:
    return IndexCache(tmp_path / "index-cache")


@pytest.fixture
def open_source(cache: IndexCache) -> OpenSource:
    """Open a source that does not wait between attempts."""

    def open_one(*paths: str | Path, **options: Any) -> SourceFiles:
        return SourceFiles("web", [str(p) for p in paths], cache=cache, pause=lambda _: None, **options)

    return open_one


def cell(column: Any, row: int) -> Any:
    """Return one cell as a Python value: bytes, a list or a number."""
    if isinstance(column, Ragged):
        values = column[row]
        return values.tobytes() if values.dtype == np.uint8 else values.tolist()
    return column[row].item()


def rows_of(batch: RowBatch) -> list[dict[str, Any]]:
    batch = batch | {BAD_COLUMN: np.asarray(batch[BAD_COLUMN], np.bool_)}
    return [{name: cell(column, row) for name, column in batch.items()} for row in range(num_rows(batch))]


def read_block(source: SourceFiles, file: int, block: int, skip: int = 0, batch_rows: int = 7) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in source.stream(file, block, skip=skip, batch_rows=batch_rows):
        assert 0 < num_rows(batch) <= batch_rows
        rows += rows_of(batch)
    return rows


def read_all(source: SourceFiles, batch_rows: int = 7) -> list[dict[str, Any]]:
    """Return every row of a source in the order of the files, checking the index on the way."""
    rows: list[dict[str, Any]] = []
    for file in range(len(source.files)):
        blocks = source.blocks(file)
        at = 0
        for block, count in enumerate(blocks.rows):
            assert source.row_base(file, block) == at
            part = read_block(source, file, block, batch_rows=batch_rows)
            assert len(part) == count
            rows, at = rows + part, at + len(part)
    return rows
