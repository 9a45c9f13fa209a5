"""Who holds up the trainers: the source that constructors wait for most, and how many workers it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WAITING = 0.02
"""Share of an interval that trainers may wait without anybody being called a bottleneck."""
_HARDLY = 0.01
"""Share of an interval that a source must have been waited for, to be blamed."""
_MOST_WAITED = 0.9
"""A source that was waited for all the time does not say how many workers it needs: ten times as many, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """How one source did in an interval."""

    source: str
    waited_s: float
    """Seconds that planner and constructors were held up by it."""
    demand: float
    """Workers that it would keep busy at the rate trainers want."""
    workers: int


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The source that holds up the trainers."""

    source: str
    workers: int
    needs: int
    waited: float
    """Share of the interval that was spent waiting for it."""

    def __str__(self) -> str:
        """Return the sentence for status and logs."""
        has = f"{self.workers} worker{'' if self.workers == 1 else 's'}"
        return f"source {self.source!r} is the bottleneck: it has {has} and needs {self.needs}"


def find_bottleneck(
    sources: Sequence[Waited], interval_s: float, trainer_wait: float, *, headroom: float = 1.2
) -> Bottleneck | None:
    """Return the source that holds up the trainers, or None where nobody does.

    A source that was waited for a share f of the time delivered in the rest of it what was wanted in all of it, so it
    needs 1 / (1 - f) times its workers; its demand with headroom, if that is more; and one more than it has anyway.

    Args:
        sources: How each source did.
        interval_s: Seconds of the interval.
        trainer_wait: Share of the interval that trainers waited for their batches.
        headroom: Workers for each one that the demand keeps busy.

    Example:
        >>> slow = Waited(source="photos", waited_s=5.0, demand=6.4, workers=4)
        >>> str(find_bottleneck([slow], 10.0, 0.5))
        "source 'photos' is the bottleneck: it has 4 workers and needs 8"
    """
    if trainer_wait < _WAITING or not sources:
        return None
    worst = max(sources, key=lambda one: one.waited_s)  # the first of equals: the order of sources is the job's
    waited = min(worst.waited_s / max(interval_s, 1e-9), 1.0)
    if waited < _HARDLY:
        return None  # trainers wait for something else: planning, hand-over, the network
    slowed = max(worst.workers, 1) / (1 - min(waited, _MOST_WAITED))
    needs = max(worst.workers + 1, math.ceil(slowed - 1e-9), math.ceil(worst.demand * headroom - 1e-9))
    return Bottleneck(worst.source, worst.workers, needs, waited)
