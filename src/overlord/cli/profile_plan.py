"""`overlord profile --plan`: the placement that a profile and some resources give, for a person and for a program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlord.job.specs import Job
from overlord.launch_section import LaunchOptions
from overlord.reports.summary import count, number, percent, seconds, size
from overlord.scaling.partition import Allotment, Partition, partition
from overlord.scaling.source_costs import TINY, Resources, SourceCost, mean_shares, schedule_shares

_MOST_ROWS = 40
"""Sources that the table holds: those with the most workers."""


class Costs(Protocol):
    """What is known of the sources: a profile."""

    def cost(self, name: str) -> SourceCost:
        """Return what a source costs."""
        ...


def show_plan(
    profile: Costs, job: Job, launch: LaunchOptions, resources: Resources, as_json: bool
) -> RenderableType | dict[str, Any]:
    """Return how the sources of a job would be partitioned: something to print, or what JSON is made of.

    Workers are sized for the mean of the mixture's schedule.

    Args:
        profile: What each source costs.
        job: Whose sources are placed.
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
    return _as_table(found, costs, shares, resources, worst)


def _constructors(launch: LaunchOptions, resources: Resources) -> int:
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


def _as_table(
    found: Partition,
    costs: Sequence[SourceCost],
    shares: Sequence[float],
    resources: Resources,
    worst: tuple[int, float, str],
) -> RenderableType:
    table = Table(title="workers and actors", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("source", style="bold")
    for name in ("cluster", "P", "share", "workers", "CPUs", "actors"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", style="dim", ratio=1)
    rows = sorted(
        zip(found.allotments, costs, shares, strict=True), key=lambda row: (-row[0].workers, -row[0].busy, row[0].name)
    )
    for one, cost, share in rows[:_MOST_ROWS]:
        table.add_row(
            Text(one.name), str(one.cluster), seconds(cost.transform_s), percent(share), str(one.workers),
            f"{one.cpus:.2g}", _actors(one), Text(one.why),
        )  # fmt: skip
    rest = rows[_MOST_ROWS:]
    parts: list[RenderableType] = [table]
    if rest:
        workers = number(sum(one.workers for one, _, _ in rest), "worker")
        parts.append(Text(f"and {number(len(rest), 'source')} more, {workers}", style="dim"))
    return Group(*parts, *(Text(words) for words in plan_words(found, resources, worst)))


def _actors(one: Allotment) -> str:
    """Write the actors of a source, those of a long row as a range.

    A source's own actors have numbers that follow each other.
    """
    first, last = one.actors[0], one.actors[-1]
    return str(first) if first == last else f"{first}–{last}"


def plan_words(found: Partition, resources: Resources, worst: tuple[int, float, str]) -> list[str]:
    """Return what matters most of a plan, in sentences."""
    shared = sum(one.parallelism == "source" for one in found.allotments)
    spread = sum(one.parallelism == "data" for one in found.allotments)
    busy = number(sum(one.workers for one in found.allotments), "worker")
    words = [
        f"Expected: {count(found.samples_per_s)} samples/s; {found.limit}.",
        f"{busy} in {number(len(found.actors), 'actor')}: {number(shared, 'source')} share actors, "
        f"{spread} {'is' if spread == 1 else 'are'} spread over several.",
        f"CPUs: {found.cpus:.3g} of {resources.cpus:g}, {resources.cpus - resources.loader_cpus:g} of them for the "
        f"planner and {number(resources.constructors, 'constructor')}; {resources.cpus - found.cpus:.3g} are left.",
        f"Memory: {size(found.bytes)} of {size(resources.bytes)}; {size(resources.bytes - found.bytes)} are left.",
    ]
    at_once = sum(one.busy if one.busy < TINY else one.workers for one in found.allotments)
    if at_once > resources.loader_cpus + 1e-6:
        most = math.ceil(at_once - 1e-6)
        words.append(
            f"{number(most, 'worker')} at once are more than the CPUs for them ({resources.loader_cpus:g}): part of "
            f"their time is waiting. A launch bounds workers, not CPUs: with --cpus {most} "
            f"(budget=ol.Budget(cpus={most})) it has them all."
        )
    step, rate, source = worst
    if rate < 0.99 * found.samples_per_s:
        words.append(
            f"The mixture changes: sized for its mean, the feed falls to {count(rate)} samples/s around step {step:,}, "
            f"when {source} is drawn most. Online scaling follows the schedule."
        )
    return words
