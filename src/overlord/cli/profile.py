"""`overlord profile`: measures what every source costs, keeps it beside the job, and plans workers by it."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from overlord.cli.output import Screen
from overlord.core.spec_errors import Fault
from overlord.errors import SpecError
from overlord.job.spec_model import as_bytes
from overlord.job.specs import Job
from overlord.job_files import JobFile
from overlord.launch_spec import Budget, LaunchOptions
from overlord.reports.profile_page import plan_table
from overlord.runtimes.autoscaling.profiling import (
    check_profile,
    profile_job,
    read_profile,
    write_profile,
)
from overlord.runtimes.autoscaling.sizing import LoaderPlan, plan_loaders
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.scaling.profiles import Profile

# --------------------------------------------------------------------------------------------------------------
# `overlord profile --plan`: the placement that a profile and some resources give, for a person and for a program.


def show_plan(profile: Profile, job: Job, launch: LaunchOptions, as_json: bool) -> RenderableType | dict[str, Any]:
    """Return how the sources of a job are partitioned: something to print, or what JSON is made of.

    It is what a launch with `loaders_per_source="auto"` and the same budget starts.

    Raises:
        SpecError: The budget does not suffice, or a source was not profiled.
    """
    plan = plan_loaders(job, launch, profile)
    worst = _slowest_point(plan)
    if as_json:
        return _as_json(plan, worst)
    return plan_table(plan.found, plan.costs, plan.shares, plan.resources, worst)


def _slowest_point(plan: LoaderPlan) -> tuple[int, float, str]:
    """Return the step of the schedule that the fleet feeds slowest: (step, samples/s, the source that holds it up)."""
    rates = [
        (n / (share * max(cost.transform_s, 1e-12)), step, cost.name)
        for step, shares in plan.points
        for n, share, cost in zip(plan.found.workers, shares, plan.costs, strict=True)
        if share > 0
    ]
    rate, step, name = min(rates)
    return step, min(rate, plan.found.samples_per_s) if len(plan.points) == 1 else rate, name


def _as_json(plan: LoaderPlan, worst: tuple[int, float, str]) -> dict[str, Any]:
    found, resources = plan.found, plan.resources
    told = dataclasses.asdict(found)
    for one, share in zip(told["allotments"], plan.shares, strict=True):
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


def budget_of(plan: bool, launch: LaunchOptions, cpus: int | None, memory: str | None) -> LaunchOptions:
    """Return a launch with the budget that is to be planned for: that of the job file, where nothing else is given."""
    for name, value in (("--cpus", cpus), ("--memory", memory)):
        if value is not None and not plan:
            raise SpecError(f"{name} is {value} and --plan is not given; it would have no effect. Add --plan.")
    if cpus is not None and not cpus > 0:
        raise SpecError(f"--cpus is {cpus:g}; nothing could be loaded. Give the workers that all sources may have.")
    try:
        given = {"cpus": cpus, "memory": None if memory is None else as_bytes(memory)}
    except Fault as fault:
        raise SpecError(f"--memory is {memory!r:.80}: {fault}. Write it as 64GiB.") from None
    budget = (launch.budget or Budget()).model_copy(update={k: v for k, v in given.items() if v is not None})
    return launch.model_copy(update={"budget": budget})
