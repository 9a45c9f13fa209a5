"""What a job's mixture asks of each source over its schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

from overlord.core.specs import Job
from overlord.scaling.costs import SourceCost, sample_shares

_POINTS = 200
"""Steps of a schedule that are looked at."""


def schedule_shares(job: Job, steps: int | None, costs: Sequence[SourceCost]) -> list[tuple[int, list[float]]]:
    """Return the share of each source in the samples, at steps spread over the schedule of a job.

    Weights that are learned count as they begin. A temperature without weights goes by the sizes of files, which are
    not looked at here: it counts as equal weights.
    """
    given = {source.name: source.weight for source in job.sources if source.weight is not None}
    base = {name: given.get(name, 0.0) for name in job.names} if given else dict.fromkeys(job.names, 1.0)
    mixture = job.mixture
    if mixture.schedule == "static":
        at = [0]
    else:
        last = steps or _last_point(job) + 1
        at = sorted({round(n * (last - 1) / max(_POINTS - 1, 1)) for n in range(_POINTS)})
    found = [(step, mixture.weights_at(float(step), job.names, base)) for step in at]
    return [(step, sample_shares(weights, costs, mixture.level)) for step, weights in found if sum(weights) > 0]


def _last_point(job: Job) -> int:
    """Return the last step at which the schedule changes."""
    mixture = job.mixture
    if mixture.stage_weights is not None:
        starts = [start for start, _ in mixture.stage_weights]
        # The last stage goes on; it counts for as long as the ones before it.
        return math.ceil(2 * max(starts)) if max(starts) else 1
    curves = (mixture.linear_points or mixture.step_points or {}).values()
    return math.ceil(max((float(at) for points in curves for at in points), default=0.0))


def mean_shares(points: Sequence[tuple[int, Sequence[float]]]) -> list[float]:
    """Return the mean share of each source over the points of a schedule.

    Example:
        >>> mean_shares([(0, [1.0, 0.0]), (10, [0.5, 0.5])])
        [0.75, 0.25]
    """
    return [sum(column) / len(points) for column in zip(*(one for _, one in points), strict=True)]
