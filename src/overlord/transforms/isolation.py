"""Where a function over rows runs: in this thread, or in process workers, which one of the rows may kill."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from overlord.core.ragged import RowBatch, concat_rows, num_rows, take_rows
from overlord.transforms.per_sample import Fault

RowFunction = Callable[[RowBatch], RowBatch]
"""A pure function: as many rows out as in, each from its own row alone, whatever rows stand beside it."""

Isolated = Callable[[RowBatch], tuple[RowBatch, list[Fault]]]
"""Such a function in process workers: what the surviving rows became, in order, and the rows that killed a worker."""

Isolate = Callable[[RowFunction, str, float], Isolated]
"""Brings a function (its name for messages, the seconds an answer may take) into process workers."""


def run_rows(
    function: RowFunction, run: Isolated | None, rows: RowBatch, stand_in: RowBatch
) -> tuple[RowBatch, list[Fault]]:
    """Apply a function to rows; a row that killed its worker becomes the one row of `stand_in`.

    Example:
        >>> double = lambda rows: {"n": np.asarray(rows["n"]) * 2}
        >>> deadly = lambda rows: ({"n": np.array([2, 6])}, [(1, "signal 11")])
        >>> rows, killed = run_rows(double, deadly, {"n": np.array([1, 2, 3])}, {"n": np.array([0])})
        >>> rows["n"].tolist(), killed
        ([2, 0, 6], [(1, 'signal 11')])
    """
    if run is None:
        return function(rows), []
    done, killed = run(rows)
    if not killed:
        return done, []
    dead = np.zeros(num_rows(rows), np.bool_)
    dead[[row for row, _ in killed]] = True
    if dead.all():
        return take_rows(stand_in, np.zeros(len(dead), np.int64)), killed
    places = np.where(dead, num_rows(done), np.cumsum(~dead) - 1)
    return take_rows(concat_rows([done, stand_in]), places), killed
