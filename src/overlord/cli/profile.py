"""`overlord profile`: measures what every source costs, keeps it beside the job, and plans workers by it."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from overlord.cli.output import Screen
from overlord.core.spec_errors import Fault
from overlord.errors import SpecError
from overlord.job.spec_model import as_bytes
from overlord.job.specs import Job
from overlord.job_files import JobFile
from overlord.launch_spec import LaunchOptions as LaunchSection
from overlord.reports.profile_page import plan_table
from overlord.runtimes.autoscaling.profiling import (
    check_profile,
    profile_job,
    read_profile,
    write_profile,
)
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.runtimes.supervision.child import usable_cpus
from overlord.scaling.partition import Partition, partition
from overlord.scaling.profiles import Profile, Resources, SourceCost, mean_shares, schedule_shares

# --------------------------------------------------------------------------------------------------------------
# `overlord profile --plan`: the placement that a profile and some resources give, for a person and for a program.


def show_plan(
    profile: Profile, job: Job, launch: LaunchSection, resources: Resources, as_json: bool
) -> RenderableType | dict[str, Any]:
    """Return how the sources of a job would be partitioned: something to print, or what JSON is made of.

    Workers are sized for the mean of the mixture's schedule.

    Args:
        profile: What each source costs.
        job: The job with the sources that are placed.
        launch: How many trainer hosts, and so constructors, there are.
        resources: What there is; its number of constructors is taken from the launch.
        as_json: Whether a program reads it.

    Raises:
        SpecError: The resources do not suffice, or a source was not profiled.
    """
    costs = [profile.cost(name) for name in job.names]
    resources = dataclasses.replace(resources, constructors=_constructors(launch, resources))
    points = schedule_shares(job, launch.steps or job.max_steps, costs)
    shares = mean_shares(points)
    found = partition(costs, shares, resources)
    worst = _slowest_point(found, costs, points)
    if as_json:
        return _as_json(found, shares, resources, worst)
    return plan_table(found, costs, shares, resources, worst)


def _constructors(launch: LaunchSection, resources: Resources) -> int:
    """Return how many constructors there are: one for each trainer host."""
    if launch.runtime != "ray" or launch.ranks_per_host is None:
        return resources.constructors
    return max(1, math.ceil(launch.mesh.world_size / launch.ranks_per_host))


def _slowest_point(
    found: Partition, costs: Sequence[SourceCost], points: Sequence[tuple[int, list[float]]]
) -> tuple[int, float, str]:
    """Return the step of the schedule that the fleet feeds slowest: (step, samples/s, the source that holds it up)."""
    rates = [
        (n / (share * max(cost.transform_s, 1e-12)), step, cost.name)
        for step, shares in points
        for n, share, cost in zip(found.workers, shares, costs, strict=True)
        if share > 0
    ]
    rate, step, name = min(rates)
    return step, min(rate, found.samples_per_s) if len(points) == 1 else rate, name


def _as_json(
    found: Partition, shares: Sequence[float], resources: Resources, worst: tuple[int, float, str]
) -> dict[str, Any]:
    told = dataclasses.asdict(found)
    for one, share in zip(told["allotments"], shares, strict=True):
        one["share"] = share
    step, rate, source = worst
    return told | {
        "resources": dataclasses.asdict(resources),
        "cpus_left": resources.cpus - found.cpus,
        "bytes_left": resources.bytes - found.bytes,
        "slowest": {"step": step, "samples_per_s": rate, "source": source},
    }


# --------------------------------------------------------------------------------------------------------------


def find_profile(
    screen: Screen,
    loaded: JobFile,
    path: Path,
    cache: str,
    *,
    named: list[str] | None,
    samples: int,
    seconds: float,
    as_it_is: bool,
) -> tuple[Profile, Mapping[str, str]]:
    """Measure the sources of a job and write the profile, with what it knew before of the others.

    Args:
        screen: Where progress is shown.
        loaded: The job.
        path: Where the profile is kept.
        cache: Folder of indices.
        named: Only these sources.
        samples: Samples of each source.
        seconds: Seconds for each source.
        as_it_is: Measure nothing if there is a profile that fits the job.

    Returns:
        The profile, and why sources could not be measured, by their names.
    """
    launch = loaded.launch
    options = ServiceOptions(
        mesh=launch.mesh, cache=cache, placement=launch.placement, loader_do_plan=launch.loader_do_plan
    )
    before: Profile | None = None
    try:
        before = read_profile(path)
    except SpecError as error:  # replaced, unless something of it is needed
        if as_it_is or named is not None:
            raise
        screen.note(f"the profile that is there is replaced: {error}")
    with screen.progress() as tell, screen.user_code():
        if as_it_is and before is not None and named is None:
            check_profile(before, loaded.job, options, tell)
            screen.note(f"{path} is used as it is; leave out --plan to measure again")
            return before, {}
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        result = profile_job(
            loaded.job, options, when=when, sources=named, samples=samples, seconds=seconds, progress=tell
        )
        profile, failed = result.profile, result.failed
        if not profile.sources:
            others = f" {len(failed) - 1} other sources failed too." if len(failed) > 1 else ""
            raise SpecError(f"nothing could be measured: {next(iter(failed.values()))}{others}")
        if before is not None:
            known = Profile(tuple(one for one in before.sources if one.name in loaded.job.names))
            profile = known.joined(profile)
        write_profile(path, profile)
    return profile, failed


def resources_of(plan: bool, cpus: float | None, memory: str | None) -> Resources | None:
    """Return what there is for loading, if it is to be planned: by default, what this host has."""
    if not plan:
        for name, value in (("--cpus", cpus), ("--memory", memory)):
            if value is not None:
                raise SpecError(f"{name} is {value} and --plan is not given; it would have no effect. Add --plan.")
        return None
    if cpus is not None and not cpus > 0:
        raise SpecError(f"--cpus is {cpus:g}; nothing could be loaded. Give the cores that loading may use.")
    try:
        given = None if memory is None else as_bytes(memory)
    except Fault as fault:
        raise SpecError(f"--memory is {memory!r:.80}: {fault}. Write it as 64GiB.") from None
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Resources(cpus=cpus or float(usable_cpus()), bytes=have if given is None else given)
