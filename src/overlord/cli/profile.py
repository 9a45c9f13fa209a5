"""`overlord profile`: measure what every source costs, keep it beside the job, and show it."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import typer
from rich.console import RenderableType
from rich.text import Text

from overlord.cli.options import folder_of
from overlord.cli.output import Screen, Tell, check_writable, show_error, write_text
from overlord.cli.sources import choose_sources
from overlord.core.spec_errors import Fault
from overlord.errors import SourceError, SpecError
from overlord.job.spec_model import as_bytes
from overlord.job.specs import Job
from overlord.job_files import JobFile
from overlord.launch_spec import LaunchOptions as LaunchSection
from overlord.launch_spec import profile_path
from overlord.reports.profile_page import headlines, plan_table, profile_tables, ranked, render_profile
from overlord.runtimes.autoscaling.profiling import (
    Profiled,
    check_profile,
    profile_job,
    read_profile,
    write_profile,
)
from overlord.runtimes.launching.launch_options import LaunchOptions
from overlord.scaling.partition import Partition, partition
from overlord.scaling.profiles import Profile, Resources, SourceCost, mean_shares, schedule_shares

# --------------------------------------------------------------------------------------------------------------
# `overlord profile --plan`: the placement that a profile and some resources give, for a person and for a program.


class Costs(Protocol):
    """What is known of the sources: a profile."""

    def cost(self, name: str) -> SourceCost:
        """Return what a source costs."""
        ...


def show_plan(
    profile: Costs, job: Job, launch: LaunchSection, resources: Resources, as_json: bool
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


def profile_sources(
    screen: Screen,
    loaded: JobFile,
    job: Path,
    *,
    samples: int,
    seconds: float,
    source: list[str] | None,
    output: Path | None,
    html: Path | None,
    plan: bool,
    cpus: float | None,
    memory: str | None,
    cache: Path,
) -> None:
    """Do what `overlord profile` was asked for; its options are told there."""
    if not seconds > 0:
        raise SpecError(f"--seconds is {seconds:g}; nothing could be measured. Give seconds above 0.")
    resources = _resources(plan, cpus, memory)
    path = profile_path(job) if output is None else output
    check_writable("--output", path)
    if html is not None:
        check_writable("--html", html)
    options = LaunchOptions(mesh=loaded.launch.mesh, cache=folder_of(cache), placement=loaded.launch.placement)
    named = None if source is None else [one.name for one in choose_sources(loaded.job, source)]
    before = _before(screen, path, needed=plan or named is not None)
    with screen.progress() as tell, screen.user_code():
        if plan and before is not None and named is None:
            check_profile(before, loaded.job, options, tell)
            result = Profiled(before)
            screen.note(f"{path} is used as it is; leave out --plan to measure again")
        else:
            result = _measured(loaded, options, named, samples, seconds, tell)
            result = _kept(result, before, loaded, path)
    told = _show(screen, job, path, result, html)
    if resources is not None:
        shown = show_plan(result.profile, loaded.job, loaded.launch, resources, screen.as_json)
        if isinstance(shown, dict):
            told["plan"] = shown
        else:
            screen.show(shown)
    screen.give(told)
    for words in result.failed.values():
        show_error(SourceError(words), as_json=False)
    if result.failed:
        raise typer.Exit(2)


def _before(screen: Screen, path: Path, *, needed: bool) -> Profile | None:
    """Return the profile that is there; one that cannot be read is replaced, unless something of it is needed."""
    try:
        return read_profile(path)
    except SpecError as error:
        if needed:
            raise
        screen.note(f"the profile that is there is replaced: {error}")
        return None


def _measured(
    loaded: JobFile, options: LaunchOptions, named: list[str] | None, samples: int, seconds: float, tell: Tell
) -> Profiled:
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = profile_job(loaded.job, options, when=when, sources=named, samples=samples, seconds=seconds, progress=tell)
    if not result.profile.sources:
        first = next(iter(result.failed.values()))
        others = f" {len(result.failed) - 1} other sources failed too." if len(result.failed) > 1 else ""
        raise SpecError(f"nothing could be measured: {first}{others}")
    return result


def _kept(result: Profiled, before: Profile | None, loaded: JobFile, path: Path) -> Profiled:
    """Write what was measured, with what was known before of other sources of the job."""
    if before is not None:
        known = Profile(tuple(one for one in before.sources if one.name in loaded.job.names))
        result = Profiled(known.joined(result.profile), result.failed)
    write_profile(path, result.profile)
    return result


def _show(screen: Screen, job: Path, path: Path, result: Profiled, html: Path | None) -> dict[str, Any]:
    screen.show(*profile_tables(str(job), result.profile))
    screen.show(Text.assemble(("profile  ", "dim"), str(path)))
    if html is not None:
        write_text(html, render_profile(str(job), result.profile, result.failed))
        screen.show(Text.assemble(("page     ", "dim"), str(html)))
    return {
        "job": str(job),
        "profile": str(path),
        "html": None if html is None else str(html),
        "headlines": headlines(result.profile),
        "sources": [dataclasses.asdict(one) for one in ranked(result.profile)],
        "failed": dict(result.failed),
    }


def _resources(plan: bool, cpus: float | None, memory: str | None) -> Resources | None:
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
    return Resources(cpus=cpus or float(os.cpu_count() or 1), bytes=have if given is None else given)
