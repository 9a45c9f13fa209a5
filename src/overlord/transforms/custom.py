"""Custom: a row is whatever a user's function makes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import BAD_COLUMN, Ragged, RowBatch, num_rows
from overlord.core.samples import BAD, SKIP
from overlord.core.specs import Custom
from overlord.transforms.isolation import Isolate, run_rows
from overlord.transforms.per_sample import (
    STAND_IN_TOKEN,
    Bools,
    Fault,
    Finished,
    Int64s,
    Measured,
    TransformFacts,
    UInt64s,
    Workers,
    fit_rows,
    measured_text,
    ragged_column,
)

RowToTokens = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""A user's function: {"tokens": ints, "loss_mask": ..} of a row, or None to pass over it."""


class CustomTransform:
    """A user's function from a row to tokens. It runs before planning, since it decides lengths.

    Args:
        spec: What the source says of it.
        isolate: Brings the function into process workers; without it, it runs in the caller's thread.
    """

    def __init__(self, spec: Custom, isolate: Isolate | None = None) -> None:
        self.columns: tuple[str, ...] = tuple(spec.columns or ())
        self.facts = TransformFacts(self.columns, ("tokens",), holds_gil=True)
        self.decoder = None
        self._function = functools.partial(custom_rows, spec.fn)
        self._run = isolate(self._function, spec.name, spec.deadline) if isolate and spec.process else None

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        unread = np.asarray(rows[BAD_COLUMN], np.bool_)
        faults: list[Fault] = [(int(r), "the row cannot be parsed or lacks its column") for r in np.flatnonzero(unread)]
        made, killed = run_rows(self._function, self._run, rows, _STAND_IN)
        reasons = ragged_column(made, "fault")
        faults += [(row, bytes(reasons[row]).decode()) for row in np.flatnonzero(reasons.lengths).tolist()]
        tokens, flags = ragged_column(made, "tokens"), np.asarray(made["flags"])
        measured = measured_text(tokens.lengths, flags, {"tokens": tokens, "loss": made["loss"]}, faults + killed)
        measured.killed = killed
        return measured

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        tokens, _ = fit_rows(ragged_column(kept, "tokens"), planned)
        loss, _ = fit_rows(ragged_column(kept, "loss"), planned)
        return Finished(tokens, loss, None, [], [])


def custom_rows(fn: RowToTokens, rows: RowBatch) -> RowBatch:
    """Apply a user's function to every row that could be read; what it raises is a fault of the row.

    Returns:
        tokens, loss (whether each counts), flags (BAD, SKIP) and fault (text; empty where there is none).

    Example:
        >>> rows = {"n": np.array([3, 0]), BAD_COLUMN: np.zeros(2, np.bool_)}
        >>> made = custom_rows(lambda row: {"tokens": [9] * row["n"]}, rows)
        >>> made["tokens"].lengths.tolist(), made["flags"].tolist()
        ([3, 1], [0, 1])
    """
    unread = np.asarray(rows[BAD_COLUMN], np.bool_)
    flags = np.where(unread, BAD, 0).astype(np.int32)
    tokens: list[npt.NDArray[Any]] = [np.full(1, STAND_IN_TOKEN, np.int32)] * num_rows(rows)
    masks: list[npt.NDArray[Any]] = [np.zeros(1, np.uint8)] * num_rows(rows)
    reasons = [b""] * num_rows(rows)
    for row in np.flatnonzero(~unread).tolist():
        values = {c: bytes(v[row]) if _is_bytes(v) else v[row] for c, v in rows.items() if c != BAD_COLUMN}
        try:
            made = fn(values)
            if made is None:
                flags[row] |= SKIP
                continue
            tokens[row], masks[row] = _checked_custom(made)
        except Exception as error:  # the border to the user's code: whatever it raises is a fault of this row
            reasons[row] = f"the custom function raised {type(error).__name__}: {error}".encode(errors="replace")
            flags[row] |= BAD
    return {
        "tokens": Ragged.from_rows(tokens, np.int32),
        "loss": Ragged.from_rows(masks, np.uint8),
        "flags": flags,
        "fault": Ragged.from_rows(reasons),
    }


_STAND_IN: RowBatch = {
    "tokens": Ragged.from_rows([np.full(1, STAND_IN_TOKEN)], np.int32),
    "loss": Ragged.from_rows([np.zeros(1)], np.uint8),
    "flags": np.full(1, BAD, np.int32),
    "fault": Ragged.from_rows([b""]),
}
"""What stands where a row killed its worker."""


def _is_bytes(values: Ragged | npt.NDArray[Any]) -> bool:
    return isinstance(values, Ragged) and values.values.dtype == np.uint8


def _checked_custom(made: Mapping[str, Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    tokens = np.asarray(made["tokens"], np.int32)
    mask = (np.asarray(made.get("loss_mask", np.ones(len(tokens)))) != 0).astype(np.uint8)  # counted as ones
    if tokens.ndim != 1 or len(tokens) == 0 or mask.shape != tokens.shape:
        raise ValueError(f"tokens must be a non-empty list and loss_mask as long, got {tokens.shape} and {mask.shape}")
    return tokens, mask
