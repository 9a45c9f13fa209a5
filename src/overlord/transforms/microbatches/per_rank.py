"""Parallelism transformations: which tokens and which keys of a microbatch each rank needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import expand_ranges

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runs:
    """A sequence cut at the bounds of segments and of the ranks' slices: each run is inside one of both."""

    segment: Int64s
    begin: Int64s
    """The run's first token inside its segment."""
    length: Int64s
    part: Int64s
    """The rank that gets it."""
    place: Int64s
    """Where it begins in that rank's slice."""

    def of_part(self, part: int) -> Runs:
        """Return the runs of one rank, as if it were the only one."""
        mine = np.flatnonzero(self.part == part)
        return Runs(self.segment[mine], self.begin[mine], self.length[mine], np.zeros(len(mine), np.int64),
                    self.place[mine])  # fmt: skip


def cut_runs(cu_seqlens: npt.NDArray[np.integer], cp: int, slicing: str, *, rows: bool = False) -> Runs:
    """Cut a sequence of segments for the ranks that share it.

    Args:
        cu_seqlens: Where segments begin, padding included.
        cp: Ranks that share the sequence.
        slicing: "zigzag", "whole_zigzag" or "contiguous".
        rows: Whether segments are rows of a rectangle, each cut by itself.

    Example:
        >>> runs = cut_runs(np.array([0, 8, 16]), 2, "zigzag").of_part(0)
        >>> (runs.begin.tolist(), runs.place.tolist())
        ([0, 6, 0, 6], [0, 2, 4, 6])
    """
    cu = cu_seqlens.astype(np.int64)
    if cp == 1:
        number = np.arange(len(cu) - 1)
        return Runs(number, np.zeros(len(number), np.int64), np.diff(cu), np.zeros(len(number), np.int64), cu[:-1])
    per_segment = rows or slicing == "zigzag"
    units = cu if per_segment else cu[[0, -1]]
    chunks = cp if slicing == "contiguous" else 2 * cp
    size: Int64s = np.diff(units) // chunks
    starts: Int64s = (units[:-1, None] + size[:, None] * np.arange(chunks)).reshape(-1)
    number = np.tile(np.arange(chunks), len(size))
    mirrored = number >= cp
    part = np.where(mirrored, 2 * cp - 1 - number, number)
    # A rank's slice of a unit begins at the unit's share; its second chunk follows the first.
    place: Int64s = np.repeat(units[:-1] // cp, chunks) + np.where(mirrored, np.repeat(size, chunks), 0)
    lengths = np.repeat(size, chunks)
    if per_segment:
        segment = np.repeat(np.arange(len(size)), chunks)
        return Runs(segment, starts - cu[segment], lengths, part, place)
    # Chunks of the whole sequence are cut again at the bounds of segments.
    bounds: Int64s = np.union1d(starts, cu[:-1])
    chunk = np.searchsorted(starts, bounds, side="right") - 1
    segment = np.searchsorted(cu, bounds, side="right") - 1
    return Runs(
        segment,
        bounds - cu[segment],
        np.diff(np.append(bounds, cu[-1])),
        part[chunk],
        place[chunk] + bounds - starts[chunk],
    )


def slice_indices(
    cu_seqlens: npt.NDArray[np.integer], cp: int, cp_rank: int, slicing: str = "zigzag", *, rows: bool = False
) -> Int64s:
    """Return the tokens of one context-parallel rank, in its order.

    Example:
        >>> slice_indices(np.array([0, 8, 16]), 2, 0).tolist()
        [0, 1, 6, 7, 8, 9, 14, 15]
        >>> slice_indices(np.array([0, 8, 16]), 2, 0, "whole_zigzag").tolist()
        [0, 1, 2, 3, 12, 13, 14, 15]
        >>> slice_indices(np.array([0, 8, 16]), 2, 1, "contiguous").tolist()
        [8, 9, 10, 11, 12, 13, 14, 15]
    """
    runs = cut_runs(cu_seqlens, cp, slicing, rows=rows).of_part(cp_rank)
    order = np.argsort(runs.place, kind="stable")
    begin = cu_seqlens.astype(np.int64)[runs.segment] + runs.begin
    return expand_ranges(begin[order], runs.length[order])
