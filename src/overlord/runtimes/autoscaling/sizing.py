"""How many workers a launch begins with, in which actors: the auto-partition of a profile, or numbers that are given.

`plan_loaders` is the one place that asks for a partition: `launch(loaders_per_source="auto")` starts what it returns,
and `overlord profile --plan` prints it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlord.core.spec_errors import did_you_mean
from overlord.errors import SpecError
from overlord.job.specs import Job
from overlord.launch_spec import Budget, LaunchOptions
from overlord.runtimes.launching.resume import canonical
from overlord.runtimes.launching.service_options import WORKERS_PER_ACTOR, cluster_of, shadows_of
from overlord.runtimes.supervision.child import usable_cpus
from overlord.scaling.autoscaler import Scaling
from overlord.scaling.partition import CLUSTER_SIZE, Partition, partition
from overlord.scaling.profiles import Profile, Resources, SourceCost, mean_shares, most_actors, schedule_shares

MOST_WORKER_THREADS = 64
"""Workers of a host that may run at the same time where a launch does not say how many."""
NO_LIMIT = 1 << 62
"""Bytes where nothing limits them."""
RAY_THREADS = 2
"""Cores of a loader host and of a constructor host of a cluster, where a launch does not say."""


def sizing_of(job: Job, launch: LaunchOptions) -> dict[str, Any]:
    """Return the fields of `ServiceOptions` for how many workers there are, where they run, and what they may take.

    Raises:
        SpecError: for what cannot be; nothing has run.

    Example:
        >>> from overlord.job.specs import Batch, Source, Text
        >>> web = Source("web", "web.jsonl", sample=Text("text", tokenized=True))
        >>> job = Job(sources=[web], batch=Batch(8, global_samples=4))
        >>> sizing_of(job, LaunchOptions(loaders_per_source={"web": 4}, budget=Budget(cpus=16)))["workers"]
        {'web': 4}
    """
    given, loaders = launch.budget or Budget(), launch.loaders_per_source
    settings = scaling_of(launch)
    shadows = shadows_of(canonical(job), launch)
    cluster = cluster_of(launch, shadows)
    _check_budget(given, launch, in_actors=loaders == "auto" or (settings is not None and cluster is not None))
    threads = launch.threads or default_threads(launch)
    sized = settings is not None or given.cpus is not None or loaders == "auto"
    found: dict[str, Any] = {
        "worker_threads": given.cpus or (usable_cpus() if sized else MOST_WORKER_THREADS),
        "workers_per_source": given.workers_per_source,
        "workers_per_actor": given.workers_per_actor or WORKERS_PER_ACTOR,
        "scaling": settings,
        "memory": given.memory or NO_LIMIT,
        "budget_bytes": given.ahead_bytes(threads),
        "profile": launch.profile,
        "threads": threads,
        "cluster": cluster,
    }
    if loaders == "auto":
        planned = plan_loaders(job, launch, _profile_of(launch)).found
        workers = {one.name: one.workers for one in planned.allotments}
        return found | {"workers": workers, "cluster": cluster_of(launch, shadows, planned.actors)}
    if isinstance(loaders, Mapping):
        return found | {"workers": _by_name(job, loaders)}
    return found | {"loaders_per_source": loaders}


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """The auto-partition of a launch, and what it follows from."""

    found: Partition
    resources: Resources
    costs: Sequence[SourceCost]
    shares: Sequence[float]
    """Of each source in the samples, at the point of the schedule that the fleet is sized for."""
    points: Sequence[tuple[int, Sequence[float]]]
    """The shares at steps over the whole schedule."""


def plan_loaders(job: Job, launch: LaunchOptions, profile: Profile) -> LoaderPlan:
    """Partition the sources of a launch: for the first step where workers follow the mixture, else for its mean.

    Raises:
        SpecError: The budget does not suffice, or a source was not profiled.
    """
    budget = launch.budget or Budget()
    costs = [profile.cost(name) for name in job.names]
    points = schedule_shares(job, job.max_steps, costs)
    shares = points[0][1] if launch.scaling else mean_shares(points)
    cpus, hosts, here = budget.cpus or usable_cpus(), constructor_hosts(launch), launch.runtime != "ray"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if here else NO_LIMIT
    resources = Resources(
        cpus=float(cpus),
        bytes=budget.memory or memory,
        # The budget is for loaders alone: planner and constructors have CPUs of their own, and `ahead` bounds the rest.
        planner_cpus=0.0,
        planner_bytes=0,
        constructors=hosts,
        constructor_cpus=0.0,
        constructor_bytes=0,
        per_source=budget.workers_per_source or cpus,
        per_actor=budget.workers_per_actor or WORKERS_PER_ACTOR,
        bytes_per_actor=budget.memory_per_actor,
        workers=float(cpus),
        decoders=float(hosts * (launch.threads or default_threads(launch))),
        one_host=here,
    )
    size = budget.cluster_size or CLUSTER_SIZE
    divided = _most_actors(job, launch, costs, shares)
    found = partition(costs, shares, resources, cluster_size=size, most_actors=divided)
    return LoaderPlan(found, resources, costs, shares, points)


def _most_actors(
    job: Job, launch: LaunchOptions, costs: Sequence[SourceCost], shares: Sequence[float]
) -> dict[str, int]:
    """Return how many actors sources can be divided over, where that is limited; one for a source with a shadow."""
    tokens = sum(share * cost.tokens for share, cost in zip(shares, costs, strict=True))
    samples = job.batch.global_samples or (job.batch.global_tokens or 0) / max(tokens, 1e-9)
    found = {
        cost.name: most
        for cost, share in zip(costs, shares, strict=True)
        if (most := most_actors(cost, share * samples)) is not None
    }
    ordered = canonical(job)
    return found | {name: 1 for name, has in zip(ordered.names, shadows_of(ordered, launch), strict=True) if has}


def scaling_of(launch: LaunchOptions) -> Scaling | None:
    """Return when workers come and go; None where they stay."""
    return launch.scaling if isinstance(launch.scaling, Scaling) else Scaling() if launch.scaling else None


def default_threads(launch: LaunchOptions) -> int:
    """Return how many threads or workers decode: the cores of this host, less one for each trainer.

    At least half of them, and two: trainers mostly wait for their accelerators.
    """
    if launch.runtime == "ray":
        return RAY_THREADS
    cpus = usable_cpus()
    if launch.budget is not None and launch.budget.cpus is not None:
        cpus = min(cpus, launch.budget.cpus)
    return max(min(cpus, 2), cpus // 2, cpus - launch.mesh.world_size)


def constructor_hosts(launch: LaunchOptions) -> int:
    """Return how many constructor hosts there are: one for each trainer host, as far as the launch says."""
    if launch.runtime != "ray" or launch.ranks_per_host is None:
        return 1
    return max(1, math.ceil(launch.mesh.world_size / launch.ranks_per_host))


def _profile_of(launch: LaunchOptions) -> Profile:
    from overlord.runtimes.autoscaling.profiling import read_profile  # with the readers, which few launchers need

    known = None if launch.profile is None else read_profile(Path(launch.profile))
    if known is None:
        what = "there is no profile=" if launch.profile is None else f"there is no file {launch.profile!r}"
        raise SpecError(
            f"launch: loaders_per_source is 'auto' and {what}; what sources cost is not known. Run `overlord "
            "profile JOB` and name the file it writes, or give numbers."
        )
    return known


def _check_budget(given: Budget, launch: LaunchOptions, *, in_actors: bool) -> None:
    """Refuse bounds of workers and actors where nothing asks for them."""
    loaders, auto = launch.loaders_per_source, launch.loaders_per_source == "auto"
    sized = auto or bool(launch.scaling)
    used = {
        "memory": sized,
        "workers_per_source": sized,
        "workers_per_actor": in_actors,
        "memory_per_actor": auto,
        "cluster_size": auto,
    }
    for name, has_effect in used.items():
        value = getattr(given, name)
        if value is not None and not has_effect:
            raise SpecError(
                f"launch: budget.{name} is {value} and loaders_per_source is {loaders!r:.80}, so no number of workers "
                "or actors follows from it; it would have no effect. Use loaders_per_source='auto' (or scaling, of "
                f"several loader hosts), or leave {name} out; budget.ahead bounds what is held ahead of the trainers."
            )
    if auto and launch.loader_hosts is not None:
        raise SpecError(
            f"launch: loader_hosts is {launch.loader_hosts!r} and loaders_per_source is 'auto', which decides how many "
            "loader hosts there are and what each has; it would have no effect. Leave loader_hosts out; "
            "budget.workers_per_actor, memory_per_actor and cluster_size say how the sources are divided."
        )


def _by_name(job: Job, loaders: Mapping[str, int]) -> dict[str, int]:
    for name in loaders:
        if name not in job.names:
            raise SpecError(
                f"launch: loaders_per_source names {name!r:.80}, which is no source of the job; its workers would have "
                f"nothing to do.{did_you_mean(str(name), job.names)} Name sources of the job."
            )
    return dict(loaders)
