"""Costs of sources (the paper's P, T, M), the resources and budget of a launch, and demand by mixture and rate.

A worker is one task slot of a SourceLoader: it reads and measures rows ahead of the plan, and finishes planned ones. An
actor is a loader host: it holds the files of some sources open, and their workers run in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from overlord.job.specs import Job

TINY = 0.5
"""A source that keeps less than this part of one worker busy is tiny: it needs no CPU and no actor of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCost:
    """The cost of one source.

    Example:
        >>> SourceCost(name="web", transform_s=0.0002, file_bytes=1 << 20, buffer_bytes=4 << 20).samples_per_s
        5000.0
    """

    name: str
    transform_s: float
    """P: seconds that one worker needs for a sample, from reading to finishing it."""
    handover_s: float = 0.0
    """T: seconds for planning and handing over a sample, outside of workers."""
    file_bytes: int = 0
    """M_d: bytes that an actor holds for the open files of the source."""
    buffer_bytes: int = 0
    """M_b: bytes of rows that one worker holds."""
    tokens: float = 1.0
    """Tokens of a sample, on average."""
    cpu_share: float = 1.0
    """The part of P that needs a CPU: 1.0 for decoding, near 0 for waiting on remote reads. The rest is bounded by
    workers alone."""

    @property
    def samples_per_s(self) -> float:
        """Samples that one worker prepares in a second."""
        return 1.0 / max(self.transform_s, 1e-12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources for loading, and what planner and constructors take of them."""

    cpus: float
    bytes: int
    planner_cpus: float = 1.0
    planner_bytes: int = 64 << 20
    constructors: int = 1
    constructor_cpus: float = 1.0
    constructor_bytes: int = 512 << 20
    """Bytes of the steps that one constructor holds ahead of its trainers."""
    actor_bytes: int = 64 << 20
    """Bytes of a loader host before it has opened a file."""
    per_source: int = 16
    """w_src: workers that one source may have."""
    per_actor: int = 8
    """w_actor: workers that one actor may have."""
    bytes_per_actor: int | None = None
    """Bytes of one actor at most, where a pod or a host sets a limit; None: only the total `bytes` is limited."""

    @property
    def loader_cpus(self) -> float:
        """CPUs left for workers beside the planner and the constructors."""
        return self.cpus - self.planner_cpus - self.constructors * self.constructor_cpus

    @property
    def loader_bytes(self) -> int:
        """Bytes left for actors beside the planner and the constructors."""
        return self.bytes - self.planner_bytes - self.constructors * self.constructor_bytes


def counted_by_workers(costs: Iterable[SourceCost]) -> list[SourceCost]:
    """Return costs for a budget of workers instead of CPUs: a waiting worker counts as much as a computing one.

    Example:
        >>> counted_by_workers([SourceCost(name="remote", transform_s=0.1, cpu_share=0.02)])[0].cpu_share
        1.0
    """
    return [replace(cost, cpu_share=1.0) for cost in costs]


def sample_shares(
    weights: Sequence[float], costs: Sequence[SourceCost], level: Literal["sample", "token"] = "sample"
) -> list[float]:
    """Return the share of each source in the samples drawn; weights may be shares of tokens.

    Example:
        >>> costs = [SourceCost(name=n, transform_s=1.0, tokens=t) for n, t in (("a", 100.0), ("b", 300.0))]
        >>> sample_shares([1.0, 1.0], costs, "token")
        [0.75, 0.25]
    """
    rates = [
        weight / max(cost.tokens, 1e-9) if level == "token" else weight
        for weight, cost in zip(weights, costs, strict=True)
    ]
    total = sum(rates) or 1.0
    return [rate / total for rate in rates]


def demand(shares: Sequence[float], costs: Sequence[SourceCost], samples_per_s: float) -> list[float]:
    """Return how many workers of each source are busy at a rate of samples of all sources together.

    Example:
        >>> demand([0.75, 0.25], [SourceCost(name=n, transform_s=0.01) for n in "ab"], 400.0)
        [3.0, 1.0]
    """
    return [samples_per_s * share * cost.transform_s for share, cost in zip(shares, costs, strict=True)]


# The shares of the sources over the schedule of a job.

_POINTS = 200
"""Steps of a schedule that are sampled."""


def schedule_shares(job: Job, steps: int | None, costs: Sequence[SourceCost]) -> list[tuple[int, list[float]]]:
    """Return the share of each source in the samples, at steps spread over the schedule of a job.

    Learned weights count with their initial values. A temperature without weights depends on file sizes, which are not
    known here: it counts as equal weights.
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
        # The last stage has no end; it counts for as long as the ones before it.
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
