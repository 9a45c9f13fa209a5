"""Columns of another dataset beside those of a source: by row, or by a key that both have.

Both datasets are read where they are. The rows of the other one are reached one by one, when the rows of the source
that need them are read; for a key, a table of keys and row numbers is made once and kept in the index cache.
"""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import (
    BAD_COLUMN,
    NO_PARTNER,
    Kind,
    Ragged,
    RowBatch,
    blank_rows,
    no_value,
    sizes_column,
)
from overlord.core.samples import FILE_SHIFT
from overlord.errors import SourceError
from overlord.job.specs import Join
from overlord.readers.reader import Int64s
from overlord.readers.source_files import SourceFiles

_BATCH_ROWS = 8192


class JoinedColumns:
    """The columns that a source gets from another dataset. Threads may share it.

    Args:
        spec: What is joined, and how.
        own: The files of the source, with its own columns; that of the key is among them.
        other: The files of the other dataset, with the columns that are wanted of it.
        keeps_key: Whether the sample reads the key's column too.
    """

    def __init__(self, spec: Join, own: SourceFiles, other: SourceFiles, *, keeps_key: bool) -> None:
        self._spec = spec
        self._own = own
        self._other = other
        self._drops_key = spec.by is not None and not keeps_key
        self._lock = threading.Lock()
        self._first_rows: tuple[Int64s, Int64s] | None = None
        self._table: Int64s | None = None

    @property
    def columns(self) -> list[str]:
        """The names under which the columns are joined."""
        return list(self._spec.columns)

    def kinds(self, own: dict[str, Kind]) -> dict[str, Kind]:
        """Return the kinds of the source's own columns and of the joined ones.

        Raises:
            SourceError: A column is missing, or the keys of both are of different kinds.
        """
        spec = self._spec
        found = self._other.kinds()
        both = next((name for name in spec.columns if name in self._own.columns()), None)
        if both is not None:
            raise SourceError(
                f"source {self._own.name!r}: join.columns: the source has a column {both!r} of its own; one of them "
                f'would be lost. Join it under another name: columns={{"other_{both}": "{spec.columns[both]}"}}.'
            )
        if spec.by is not None:
            key = self._keys_of_other().kinds()[spec.other_key]
            if own[spec.by] != key or key not in ("int", "bytes"):
                raise SourceError(
                    f"source {self._own.name!r}: join.by={spec.by!r} holds {own[spec.by]!r} values, and "
                    f"{spec.other_key!r} of {self._other.files[0].path} {key!r}; keys must be whole numbers or text in "
                    "both, or no row would find another. Name other columns, or write them with one type."
                )
        kept = {name: kind for name, kind in own.items() if not (self._drops_key and name == spec.by)}
        return kept | {name: found[column] for name, column in spec.columns.items()}

    def prepare(self) -> None:
        """Find out which row goes with which, as far as that needs more than one row.

        Raises:
            SourceError: The datasets do not have the same number of rows, a key is there twice, or is missing and
                must not be.
        """
        if self._spec.by is None:
            self._rows_before()
            return
        table = self._keys()
        if self._spec.missing == "bad":
            return
        own = self._own.with_columns([self._spec.by])
        for file in range(len(own.files)):
            row = 0
            for batch in own.all_rows(file, _BATCH_ROWS):
                keys = _hashed(batch[self._spec.by])
                lost = np.flatnonzero(~_look_up(table, keys)[1] | (np.asarray(batch[BAD_COLUMN]) != 0))
                if len(lost):
                    raise SourceError(
                        f"source {own.name!r}: join: row {row + int(lost[0])} of {own.files[file].path} has the key "
                        f"{_shown(batch[self._spec.by], int(lost[0]))}, which no row of {self._other.files[0].path} "
                        'has; with missing="error" every row needs one. Complete the other dataset, or write '
                        'missing="bad" to count such rows as bad samples.'
                    )
                row += len(keys)

    def attach(self, batch: RowBatch, numbers: Int64s) -> RowBatch:
        """Return rows of the source with the joined columns; `numbers` are their row numbers (file << 32 | row)."""
        spec = self._spec
        own = {name: column for name, column in batch.items() if name != BAD_COLUMN}
        marks = np.array(batch[BAD_COLUMN])
        if spec.by is None:
            ours, theirs = self._rows_before()
            place = ours[numbers >> FILE_SHIFT] + (numbers & ((1 << FILE_SHIFT) - 1))
            file = np.searchsorted(theirs, place, side="right") - 1
            partner, found = (file << FILE_SHIFT) + place - theirs[file], np.ones(len(numbers), np.bool_)
        else:
            partner, found = _look_up(self._keys(), _hashed(own[spec.by]))
            if self._drops_key:
                key = [name for name in own if not name.startswith(sizes_column(""))].index(spec.by)
                del own[spec.by]
                found &= marks < no_value(key)  # the key is the last of the source's own columns
                marks[marks >= no_value(key)] = NO_PARTNER
        count = len([name for name in own if not name.startswith(sizes_column(""))])
        other = blank_rows(self._other.take(partner), ~found) if not found.all() else self._other.take(partner)
        theirs_bad = np.asarray(other[BAD_COLUMN])
        for name, column in spec.columns.items():
            own[name] = other[column]
            if sizes_column(column) in other:
                own[sizes_column(name)] = other[sizes_column(column)]
        # Reasons that name a column count the columns of the joined rows.
        reason = np.where(theirs_bad >= no_value(0), theirs_bad + 2 * count, theirs_bad)
        reason = np.where(found, reason, NO_PARTNER)
        own[BAD_COLUMN] = np.where(marks != 0, marks, reason).astype(np.int16)
        return own

    @property
    def row_bytes(self) -> int:
        """About how many bytes the joined columns add to a row: it counts in what a shuffle may hold."""
        rows = int(self._rows_before()[1][-1]) if self._spec.by is None else len(self._keys()) // 2
        return self._other.total_bytes // max(1, rows)

    def listing_digest(self) -> str:
        """Return a hash of the files of the other dataset."""
        return self._other.listing_digest()

    def forget(self) -> None:
        """Drop what is held in memory; tables stay in the cache folder."""
        with self._lock:
            self._first_rows = self._table = None
        self._other.forget()

    def _keys_of_other(self) -> SourceFiles:
        return self._other.with_columns([self._spec.other_key])

    def _rows_before(self) -> tuple[Int64s, Int64s]:
        """Return how many rows are before each file, and in all, of the source and of the other dataset."""
        with self._lock:
            if self._first_rows is None:
                ours, theirs = (one.rows_before() for one in (self._own, self._other))
                if ours[-1] != theirs[-1]:
                    raise SourceError(
                        f"source {self._own.name!r} has {ours[-1]} rows, and the dataset that is joined by row "
                        f"({', '.join(self._spec.path)}) has {theirs[-1]}; rows would get columns of other rows. Join "
                        "by a key (by=..), or give datasets with the same rows."
                    )
                self._first_rows = (ours, theirs)
            return self._first_rows

    def _keys(self) -> Int64s:
        """Return the sorted keys of the other dataset, and behind them the row number of each: mapped."""
        with self._lock:
            if self._table is None:
                self._table = self._other.table(["keys", self._spec.other_key], self._sort_keys)
            return self._table

    def _sort_keys(self) -> Int64s:
        source, column = self._keys_of_other(), self._spec.other_key
        keys: list[Int64s] = []
        numbers: list[Int64s] = []
        for file in range(len(source.files)):
            row = file << FILE_SHIFT
            for batch in source.all_rows(file, _BATCH_ROWS):
                good = np.flatnonzero(np.asarray(batch[BAD_COLUMN]) == 0)  # a row without a key is not looked for
                keys.append(_hashed(batch[column])[good])
                numbers.append(row + good)
                row += len(np.asarray(batch[BAD_COLUMN]))
        joined, rows = np.concatenate([np.empty(0, np.int64), *keys]), np.concatenate([np.empty(0, np.int64), *numbers])
        if not len(joined):
            raise SourceError(
                f"source {self._own.name!r}: join: no row of {source.files[0].path} and the files behind it has a "
                f"value in {column!r}; nothing could be joined. Name another column, or correct the path."
            )
        order = np.argsort(joined, kind="stable")
        joined, rows = joined[order], rows[order]
        twice = np.flatnonzero(joined[1:] == joined[:-1])
        if len(twice):
            first, second = (int(rows[at]) for at in (twice[0], twice[0] + 1))
            shown = _shown(source.take(np.array([first]))[column], 0)
            where = " and ".join(
                f"row {one & ((1 << FILE_SHIFT) - 1)} of {source.files[one >> FILE_SHIFT].path}"
                for one in (first, second)
            )
            raise SourceError(
                f"source {self._own.name!r}: join: {where} have the same {column!r} ({shown}); which of them belongs "
                "to a row would be a guess. Keep one of them, or join by another column."
            )
        return np.concatenate([joined, rows])


def _look_up(table: Int64s, keys: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
    """Return the row number of each key, and which keys there are; of others some row."""
    count = len(table) // 2
    at = np.minimum(np.searchsorted(table[:count], keys), count - 1)
    return table[count + at], table[at] == keys


def _hashed(keys: Ragged | npt.NDArray[np.generic]) -> Int64s:
    """Return keys as whole numbers: themselves, or 64 bits of a hash (two of a billion texts share one in 3 of 100).

    Example:
        >>> _hashed(np.array([3, 1], np.int32)).tolist()
        [3, 1]
    """
    if not isinstance(keys, Ragged):
        return keys.astype(np.int64)
    made = [hashlib.blake2b(keys[row].tobytes(), digest_size=8).digest() for row in range(len(keys))]
    return np.frombuffer(b"".join(made), np.int64)


def _shown(keys: Ragged | npt.NDArray[np.generic], row: int) -> str:
    return repr(bytes(keys[row]).decode("utf-8", "replace")[:80]) if isinstance(keys, Ragged) else str(keys[row])
