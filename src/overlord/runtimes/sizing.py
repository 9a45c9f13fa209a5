"""How many workers a launch begins with, and how many it may have: what `launch` is told, checked and completed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from overlord.core.spec_errors import did_you_mean, is_whole
from overlord.errors import OverlordError, SpecError
from overlord.job.specs import Job
from overlord.runtimes.deployment import Prepared, SourceFacts
from overlord.runtimes.launch_options import LaunchOptions
from overlord.runtimes.profiling import digests_of, read_profile, refresh
from overlord.scaling.autoscaler import Scaling
from overlord.scaling.partition import partition
from overlord.scaling.source_costs import Budget, Resources, counted_by_workers, mean_shares, schedule_shares

logger = logging.getLogger("overlord")

Loaders = int | Mapping[str, int] | Literal["auto"]
"""Workers of each source: one number, numbers by name, or what its profile asks for."""

MOST_LANES = 64
"""Workers of a host that may run at the same time where nobody says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The workers of a launch, as `LaunchOptions` has them."""

    loaders_per_source: int = 1
    workers: Mapping[str, int] = field(default_factory=dict[str, int])
    lanes: int = MOST_LANES
    scaling: Scaling | None = None
    memory: int = 1 << 62
    budget_bytes: int
    profile: str | None = None


def sizing_of(job: Job, loaders: object, scaling: object, budget: object, profile: str | None) -> Sizing:
    """Complete what a launch says of its workers.

    Raises:
        SpecError: for what cannot be; nothing has run.

    Example:
        >>> from overlord.job.specs import Batch, Source, Text
        >>> web = Source("web", "web.jsonl", sample=Text("text", tokenized=True))
        >>> job = Job(sources=[web], batch=Batch(8, global_samples=4))
        >>> sizing_of(job, {"web": 4}, False, Budget(cpus=16), None).workers
        {'web': 4}
    """
    given = budget if isinstance(budget, Budget) else Budget(ahead=_whole("budget", budget))
    settings = _scaling_of(scaling)
    sized = settings is not None or given.cpus is not None
    lanes = given.cpus or ((os.cpu_count() or 1) if sized else MOST_LANES)
    bounds: dict[str, Any] = {
        "scaling": settings,
        "memory": given.memory or 1 << 62,
        "budget_bytes": given.ahead,
        "profile": profile,
    }
    if isinstance(loaders, Mapping):
        workers = _by_name(job, cast("Mapping[str, object]", loaders))
        return Sizing(workers=workers, lanes=lanes, **bounds)
    if loaders == "auto":
        return Sizing(
            workers=_partitioned(job, profile, given, settings), lanes=given.cpus or os.cpu_count() or 1, **bounds
        )
    return Sizing(loaders_per_source=_whole("loaders_per_source", loaders), lanes=lanes, **bounds)


def _partitioned(job: Job, profile: str | None, budget: Budget, scaling: Scaling | None) -> dict[str, int]:
    """Return the workers of the auto-partition: for the first step where they follow the mixture, else for its mean."""
    known = None if profile is None else read_profile(Path(profile))
    if known is None:
        what = "there is no profile=" if profile is None else f"there is no file {profile!r}"
        raise SpecError(
            f"launch: loaders_per_source is 'auto' and {what}; nobody would know what sources cost. Run `overlord "
            "profile JOB` and name the file it writes, or give numbers."
        )
    costs = counted_by_workers(known.cost(name) for name in job.names)  # a budget here bounds workers
    points = schedule_shares(job, job.max_steps, costs)
    shares = points[0][1] if scaling is not None else mean_shares(points)
    # All workers are threads of the service here: nothing is taken off for the other roles.
    resources = Resources(
        cpus=float(budget.cpus or os.cpu_count() or 1), bytes=budget.memory or 1 << 62, planner_cpus=0.0,
        planner_bytes=0, constructor_cpus=0.0, constructor_bytes=0, actor_bytes=0,
        per_source=budget.cpus or os.cpu_count() or 1,
    )  # fmt: skip
    return {one.name: max(1, one.workers) for one in partition(costs, shares, resources).allotments}


def check_sizes(prepared: Prepared, facts: Mapping[str, SourceFacts]) -> None:
    """Refuse a profile that was measured on other sources than those that were opened.

    Raises:
        SpecError: it names them.
    """
    path = prepared.options.profile
    profile = None if path is None else read_profile(Path(path))
    if profile is not None:
        profile.check(digests_of(prepared, facts))


def refresh_profile(options: LaunchOptions, status: Callable[[], Mapping[str, Any]]) -> None:
    """Bring the profile of a launch up to date with what its workers did; a service that ends does not fail by it."""
    if options.profile is not None:
        try:
            refresh(Path(options.profile), status(), datetime.now(UTC).isoformat(timespec="seconds"))
        except (OverlordError, OSError) as error:
            logger.warning("the profile %s could not be brought up to date: %s", options.profile, error)


def _scaling_of(scaling: object) -> Scaling | None:
    if isinstance(scaling, bool):
        return Scaling() if scaling else None
    if not isinstance(scaling, Scaling):
        raise SpecError(
            f"launch: scaling is {scaling!r:.80}; nobody would know when workers come and go. Use True, False or "
            "ol.Scaling(..)."
        )
    return scaling


def _by_name(job: Job, loaders: Mapping[str, object]) -> dict[str, int]:
    for name in loaders:
        if name not in job.names:
            raise SpecError(
                f"launch: loaders_per_source names {name!r:.80}, which is no source of the job; its workers would have "
                f"nothing to do.{did_you_mean(str(name), job.names)} Name sources of the job."
            )
    return {name: _whole(f"loaders_per_source[{name!r}]", count) for name, count in loaders.items()}


def _whole(name: str, value: object) -> int:
    if not is_whole(value) or int(cast("int", value)) < 1:
        raise SpecError(
            f"launch: {name} is {value!r:.80}; nothing could run with it. Give a whole number of at least 1, or leave "
            "it out."
        )
    return int(cast("int", value))
