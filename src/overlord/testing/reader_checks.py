"""Tries a reader of a file format: what the law asks of its index, its rows and its columns, and what damage may do."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from overlord.core.ragged import BAD_COLUMN, Kind, Ragged, RowBatch, num_rows, sizes_column
from overlord.errors import OverlordError, SourceError
from overlord.readers.files import StoredFile
from overlord.readers.index import IndexCache
from overlord.readers.reader import BlockIndex, Reader
from overlord.readers.source_files import SourceFiles, reader_of, rows_of_block

_BATCH_ROWS = (1, 3, 256)
_MOST_SKIPS = 16
"""Rows of a block at which a stream is begun."""
_ITEMS: dict[Kind, tuple[str, bool]] = {
    "bytes": ("u", True),
    "json": ("u", True),
    "int": ("iub", False),
    "float": ("f", False),
    "int_list": ("iub", True),
    "float_list": ("fiu", True),
    "bytes_list": ("u", True),
}
"""By kind: the types that its values may have, as numpy names them, and whether its rows are ragged."""


def check_reader(
    format: str,
    path: str | Path,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    flips: int = 200,
    seed: int = 0,
) -> int:
    """Check that a reader does what the stream needs; return how many rows the files have.

    - Two indices of a file are equal; blocks lie one behind the other, and every block yields the rows it promises.
    - The rows of a block are the same from any row on, in batches of any size, and side by side with another stream.
    - Every batch has the wanted columns and no others, of the kinds that `kinds` tells, and at most `batch_rows` rows.
    - Some of the columns alone hold what they hold among all; a column that does not exist is a `SourceError`.
    - Files that are cut short or have a flipped byte are read, or refused with an error that names them. Damage that
      ends the process cannot be caught here: such a reader is `native`.

    Args:
        format: A format, or the reader as "module:Class".
        path: Files or a folder that it reads, on this host; small, as they are read many times.
        rows: What the rows must be: bytes or text, numbers, and lists of them, by column.
        flips: How many damaged copies of each file are read, half of them cut short.
        seed: Decides what is damaged.

    Raises:
        AssertionError: It says what is wrong.

    Example:
        In a test of your own::

            assert check_reader("my_formats:LogReader", "tests/data/logs/", rows=[{"text": "a"}, {"text": "b"}]) == 2
    """
    with tempfile.TemporaryDirectory(prefix="overlord-reader-") as scratch:
        source = _open(format, [str(path)], Path(scratch) / "index")
        reader, kinds = reader_of(format), source.kinds()
        seen: list[dict[str, Any]] = []
        for file in source.files:
            assert file.is_local, f"{file.path}: the files must be on this host, where they can be damaged"
            seen += _check_file(reader, file, kinds, Path(scratch))
        if rows is not None:
            _compare(rows, seen)
        _check_missing(format, source, Path(scratch) / "missing")
        _check_damage(format, source, Path(scratch), flips, seed)
    return len(seen)


def _open(format: str, paths: list[str], cache: Path, columns: list[str] | None = None) -> SourceFiles:
    return SourceFiles("checked", paths, format=format, columns=columns, cache=IndexCache(cache), pause=lambda _: None)


def _check_file(reader: Reader, file: StoredFile, kinds: Mapping[str, Kind], scratch: Path) -> list[dict[str, Any]]:
    columns = list(kinds)
    index, again = (reader.index(file, columns).completed(lambda: reader.seeks(file)) for _ in range(2))
    for field in BlockIndex.__slots__:
        first, second = getattr(index, field), getattr(again, field)
        assert np.array_equal(first, second), f"{file.path}: index() tells another {field!r} when it is called again"
        assert first.dtype == np.int64, f"{file.path}: {field!r} of the index is {first.dtype}, not int64"
        assert len(first) == len(index.rows), f"{file.path}: the arrays of the index differ in length"
    expected = np.cumsum(index.rows) - index.rows
    assert np.array_equal(index.first_row, expected), f"{file.path}: first_row does not count the rows before a block"
    assert (index.rows >= 0).all() and (index.bytes >= 0).all(), f"{file.path}: a block has less than no rows or bytes"
    seen: list[dict[str, Any]] = []
    for block, promised in enumerate(index.rows.tolist()):
        where = f"{file.path}, block {block}"

        def stream(
            skip: int, batch_rows: int, wanted: Mapping[str, Kind] = kinds, block: int = block
        ) -> Iterator[RowBatch]:
            return reader.stream(
                file, index, block, columns=wanted, skip=skip, batch_rows=batch_rows, scratch=scratch / "spill"
            )

        whole = _rows_of(stream(0, _BATCH_ROWS[-1]), kinds, _BATCH_ROWS[-1], where)
        assert len(whole) == promised, f"{where}: its index promises {promised} rows and {len(whole)} came"
        step = max(1, -(-promised // _MOST_SKIPS))
        for skip, batch_rows in itertools.product([*range(0, promised, step), promised], _BATCH_ROWS):
            found = _rows_of(stream(skip, batch_rows), kinds, batch_rows, where)
            assert found == whole[skip:], f"{where}: from row {skip} on, {batch_rows} at a time, the rows are others"
            if skip < promised and index.seeks[block]:
                stop = min(skip + batch_rows, promised)
                part = rows_of_block(reader, file, index, block, columns=kinds, start=skip, stop=stop)
                found = _rows_of(iter([part]), kinds, batch_rows, where)
                assert found == whole[skip:stop], f"{where}: rows {skip} to {stop} alone are others"
        for column, kind in kinds.items():
            alone = _rows_of(stream(0, 7, {column: kind}), {column: kind}, 7, where)
            marked = [row for row in range(promised) if not whole[row][BAD_COLUMN]]
            assert all(alone[row][column] == whole[row][column] for row in marked), (
                f"{where}: column {column!r} alone is not what it is among others"
            )
        beside = list(zip(stream(0, 1), stream(0, 1), strict=False))  # a row of each in turn
        for one in zip(*beside, strict=True):
            found = _rows_of(iter(one), kinds, 1, where)
            assert found == whole, f"{where}: two streams side by side disturb each other"
        seen += whole
    return seen


def _rows_of(batches: Iterator[RowBatch], kinds: Mapping[str, Kind], most: int, where: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    lists = [sizes_column(column) for column, kind in kinds.items() if kind == "bytes_list"]
    for batch in batches:
        names = {*kinds, *lists, BAD_COLUMN}
        assert set(batch) == names, f"{where}: a batch has the columns {sorted(batch)}, not {sorted(names)}"
        count = num_rows(batch)
        assert 0 < count <= most, f"{where}: a batch has {count} rows, and at most {most} were asked for"
        assert all(len(column) == count for column in batch.values()), f"{where}: columns of a batch differ in length"
        for column, kind in kinds.items():
            values, (types, ragged) = batch[column], _ITEMS[kind]
            assert isinstance(values, Ragged) == ragged, f"{where}: column {column!r} is not what kind {kind!r} says"
            found = values.values.dtype if isinstance(values, Ragged) else values.dtype
            assert found.kind in types, f"{where}: column {column!r} holds {found}, which is not of kind {kind!r}"
        rows += [{name: _cell(batch[name], row) for name in batch} for row in range(count)]
    return rows


def _cell(column: Any, row: int) -> Any:
    if isinstance(column, Ragged):
        values = column[row]
        return values.tobytes() if values.dtype == np.uint8 else [_number(value) for value in values.tolist()]
    return _number(column[row].item())


def _number(value: Any) -> Any:
    return "nan" if value != value else value  # so that it equals itself


def _compare(expected: Sequence[Mapping[str, Any]], seen: Sequence[Mapping[str, Any]]) -> None:
    assert len(seen) == len(expected), f"there are {len(seen)} rows, and {len(expected)} were expected"
    for number, (wanted, found) in enumerate(zip(expected, seen, strict=True)):
        for column, value in wanted.items():
            value = value.encode() if isinstance(value, str) else value
            assert found[column] == value, f"row {number}, column {column!r}: {found[column]!r} is not {value!r}"


def _check_missing(format: str, source: SourceFiles, cache: Path) -> None:
    try:
        _open(format, [source.files[0].path], cache, ["no such column"]).kinds()
    except SourceError:
        return
    raise AssertionError("a column that does not exist is not refused: kinds() must leave it out")


def _check_damage(format: str, source: SourceFiles, scratch: Path, flips: int, seed: int) -> None:
    rng = random.Random(seed)
    columns = list(source.kinds())
    for number, flip in itertools.product(range(len(source.files)), range(flips)):
        file, folder = source.files[number], scratch / f"damaged-{number}-{flip}"
        folder.mkdir()
        path = folder / Path(file.path).name
        for one in (file, file.beside):
            if one is not None:
                shutil.copy(one.location, folder / Path(one.path).name)
        # Of two files, each in turn.
        target = folder / Path((file.beside if file.beside and flip % 4 < 2 else file).path).name
        data = bytearray(target.read_bytes())
        at = rng.randrange(len(data))
        if flip % 2:
            data[at] ^= rng.randrange(1, 256)
        target.write_bytes(data[: max(1, at)] if flip % 2 == 0 else data)
        try:
            damaged = _open(format, [str(path)], folder / "index", columns)
            for block in range(len(damaged.blocks(0).rows)):
                for _ in damaged.stream(0, block, batch_rows=7):
                    pass
        except OverlordError as error:
            assert str(folder) in str(error), f"an error about a damaged file does not name it: {error}"
        shutil.rmtree(folder)
