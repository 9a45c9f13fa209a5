"""The draw: which samples make global batch t (the law, "Draw").

Sources are served like packets in worst-case fair queueing (WF2Q): among the sources that are owed
something, the one whose next sample would finish first in the ideal fluid mixture goes next. That
keeps every source within one sample (or one sample's tokens) of its schedule at every draw; simply
taking the largest deficit strays by several samples when there are hundreds of sources.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from overlord.core.samples import ENDS_EPOCH, SKIP
from overlord.planning.mixing import SCALE

Int64s = npt.NDArray[np.int64]


class Pause(enum.IntEnum):
    """Why the kernel came back."""

    FULL = 0
    """The budget is met."""
    STARVED = 1
    """A source must be looked at and its metadata is not here yet."""
    ENDED = 2
    """A source passed the last row of an epoch."""
    DRY = 3
    """No source with weight has anything left."""


@dataclass(slots=True)
class Supply:
    """Metadata at hand, all sources one behind the other, and how far each has been drawn."""

    tokens: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int32]
    base: Int64s
    """Where a source's rows begin in `tokens` and `flags`."""
    count: Int64s
    """Rows at hand of each source."""
    taken: Int64s
    """Rows of them already passed."""


@dataclass(slots=True)
class Budget:
    """When a step is full."""

    max_samples: int
    max_tokens: int
    samples: int = 0
    tokens: int = 0


def draw_more(
    supply: Supply,
    weights: Int64s,
    deficits: Int64s,
    skipped: Int64s,
    budget: Budget,
    *,
    by_tokens: bool,
    sequential: bool,
) -> tuple[Pause, int, Int64s, Int64s]:
    """Draw until the budget is met or something must be decided outside.

    Changes `supply.taken`, `deficits`, `skipped` and the budget's counters.

    Returns:
        Why it paused, the source concerned, and the drawn samples as (source, row in the supply).
    """
    limit = min(budget.max_samples - budget.samples, int((supply.count - supply.taken).sum()))
    out_source = np.empty(max(limit, 1), np.int64)
    out_row = np.empty(max(limit, 1), np.int64)
    pause, which, drawn, tokens = _draw(
        supply.tokens,
        supply.flags,
        supply.base,
        supply.count,
        supply.taken,
        weights,
        deficits,
        skipped,
        budget.max_samples - budget.samples,
        budget.max_tokens - budget.tokens,
        budget.samples > 0,
        by_tokens,
        sequential,
        out_source,
        out_row,
    )
    budget.samples += int(drawn)
    budget.tokens += int(tokens)
    return Pause(pause), int(which), out_source[:drawn], out_row[:drawn]


@numba.njit(nogil=True, cache=True)
def _draw(  # noqa: PLR0913 - a kernel takes its arrays one by one
    tokens: Int64s,
    flags: Int64s,
    base: Int64s,
    count: Int64s,
    taken: Int64s,
    weights: Int64s,
    deficits: Int64s,
    skipped: Int64s,
    max_samples: int,
    max_tokens: int,
    begun: bool,
    by_tokens: bool,
    sequential: bool,
    out_source: Int64s,
    out_row: Int64s,
) -> tuple[int, int, int, int]:
    drawn = 0
    total = 0
    while drawn < max_samples:
        best = -1
        best_finish = np.inf
        # Second round: only after a source left the mixture can it be that nobody is owed anything.
        for owed in (True, False):
            for i in range(len(weights)):
                if weights[i] <= 0 or (owed and not sequential and deficits[i] < 0):
                    continue
                # Look at the next row that may be drawn; rows that are never drawn are passed here.
                while taken[i] < count[i] and flags[base[i] + taken[i]] & SKIP:
                    ended = flags[base[i] + taken[i]] & ENDS_EPOCH
                    taken[i] += 1
                    skipped[i] += 1
                    if ended:
                        return 2, i, drawn, total
                if taken[i] == count[i]:
                    return 1, i, drawn, total
                if sequential:
                    best = i
                    break
                size = tokens[base[i] + taken[i]] if by_tokens else 1
                finish = (size * SCALE - deficits[i]) / weights[i]
                if finish < best_finish:
                    best, best_finish = i, finish
            if best >= 0:
                break
        if best < 0:
            return 3, -1, drawn, total
        row = base[best] + taken[best]
        if (begun or drawn > 0) and total + tokens[row] > max_tokens:
            return 0, -1, drawn, total
        charge = tokens[row] if by_tokens else 1
        for i in range(len(weights)):
            deficits[i] += weights[i] * charge
        deficits[best] -= SCALE * charge
        out_source[drawn] = best
        out_row[drawn] = row
        drawn += 1
        total += tokens[row]
        taken[best] += 1
        if flags[row] & ENDS_EPOCH:
            return 2, best, drawn, total
    return 0, -1, drawn, total
