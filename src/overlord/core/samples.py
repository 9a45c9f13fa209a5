"""Samples: who they are (SampleId), what is known of them before they are decoded (META), where they lie (Cursor).

Metadata is one structured array per source or step, never an object per sample.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FILE_SHIFT = 32
"""A row number is file << 32 | row in the file: unique in its source, and the plain row for one file."""

META = np.dtype(
    [
        ("epoch", "<i4"),
        ("flags", "<i4"),
        ("group", "<i8"),
        ("offset", "<i8"),
        ("row", "<i8"),
        ("tokens", "<i4"),  # delivered tokens, after the overlength policy
        ("loss_tokens", "<i4"),
        ("image_tokens", "<i4"),
        ("images", "<i4"),
        ("bytes", "<i8"),
    ]
)

MetaArray = npt.NDArray[Any]
"""A one-dimensional array of dtype META."""

BAD = 1
"""Bytes were read and make no sense: a stand-in is delivered."""
ENDS_EPOCH = 2
"""The last row of its source in this epoch."""
SKIP = 4
"""Never drawn: filtered out, or dropped by the overlength policy."""
OVERLONG = 8
"""Longer than the context under overlength="error"."""


def take_meta(meta: MetaArray, rows: npt.NDArray[np.integer]) -> MetaArray:
    """Return some rows of an array of dtype META.

    Rows are moved as whole words: numpy's own indexing copies a record field by field, several times as slow.
    """
    words = np.ascontiguousarray(meta).view(np.int64).reshape(len(meta), -1)
    return words.take(rows, axis=0).view(META).reshape(-1)


class SampleId(NamedTuple):
    """One sample of one epoch.

    Example:
        >>> str(SampleId("web", (2 << 32) + 7, 0))
        'web:2:7@0'
    """

    source: str
    row: int
    epoch: int

    @property
    def file(self) -> int:
        """Which file of the source (in sorted order) holds the row."""
        return self.row >> FILE_SHIFT

    @property
    def row_in_file(self) -> int:
        """The row inside its file."""
        return self.row & ((1 << FILE_SHIFT) - 1)

    def __str__(self) -> str:
        return f"{self.source}:{self.file}:{self.row_in_file}@{self.epoch}"


class Cursor(NamedTuple):
    """A position in a source's order; the sample at it has not been taken yet."""

    epoch: int
    group: int
    offset: int


def apply_overlength(
    tokens: npt.NDArray[np.integer], image_tokens: npt.NDArray[np.integer], context_length: int, policy: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return (delivered tokens, flags) of samples with these raw lengths.

    An image is never cut: a sample whose image alone is longer than the context is skipped.

    Example:
        >>> apply_overlength(np.array([5, 12]), np.array([0, 0]), 8, "truncate")[0].tolist()
        [5, 8]
    """
    over = tokens > context_length
    flags = np.where(image_tokens > context_length, SKIP, 0)
    delivered = tokens
    if policy == "truncate":
        delivered = np.minimum(tokens, context_length)
    elif policy == "drop":
        flags = flags | np.where(over, SKIP, 0)
    elif policy == "error":
        flags = np.where(over, OVERLONG, 0)
    return delivered.astype(np.int32), flags.astype(np.int32)
