"""What is said when the resources do not suffice: how much is missing, who needs it, what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from overlord.errors import SpecError
from overlord.scaling.costs import Resources, SourceCost
from overlord.scaling.fleets import cpus_of, draft_fleet, room_of, whole_workers


def written_bytes(value: float) -> str:
    """Write a number of bytes for a person.

    Example:
        >>> written_bytes(3 << 30), written_bytes(1500)
        ('3.22 GB', '1.5 kB')
    """
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"


def check_asked(
    costs: Sequence[SourceCost],
    shares: Sequence[float],
    resources: Resources,
    samples_per_s: float | None,
    cluster_size: int,
) -> None:
    """Refuse numbers that mean nothing."""
    if not costs or len(costs) != len(shares):
        raise SpecError(f"{len(costs)} costs and {len(shares)} shares: each source needs both. Profile them all.")
    wrong = next((n for n, share in enumerate(shares) if not (share >= 0 and math.isfinite(share))), None)
    if wrong is not None:
        raise SpecError(f"the share of source {costs[wrong].name!r} is {shares[wrong]}; give a number of 0 or more.")
    if sum(shares) <= 0:
        raise SpecError("no source has a share of the mixture; nothing would be drawn. Give one a weight above 0.")
    if samples_per_s is not None and not samples_per_s > 0:
        raise SpecError(f"samples_per_s is {samples_per_s:g}; no fleet would be needed. Give a rate above 0.")
    for name, value in (
        ("cluster_size", cluster_size),
        ("per_source", resources.per_source),
        ("per_actor", resources.per_actor),
    ):
        if value < 1:
            raise SpecError(f"{name} is {value}; no source could have a worker. Give 1 or more.")


def check_least(costs: Sequence[SourceCost], resources: Resources, group_tiny: bool) -> None:
    """Refuse resources that do not even hold every source once."""
    paid = resources.cpus - resources.loader_cpus
    if resources.loader_cpus <= 0:
        raise SpecError(
            f"{resources.cpus:g} CPUs are given and the planner and {resources.constructors} constructors take "
            f"{paid:g}: at least {paid + 1 - resources.cpus:g} more are needed for one worker. Give "
            f"{paid + 1:g} CPUs or fewer constructors."
        )
    if not group_tiny:
        least = sum(cost.cpu_share for cost in costs)
        if least > resources.loader_cpus + 1e-9:
            raise SpecError(
                f"one worker for each of {len(costs)} sources takes {least:g} CPUs, and beside the planner and the "
                f"constructors there are {resources.loader_cpus:g}: {least - resources.loader_cpus:g} are missing. "
                f"Give {least + paid:g} CPUs, or let tiny sources share workers (group_tiny)."
            )
    for cost in costs:
        if room_of(cost, resources) < 1:
            need = resources.actor_bytes + cost.file_bytes + cost.buffer_bytes
            limit = resources.bytes_per_actor or 0
            raise SpecError(
                f"source {cost.name!r} needs {written_bytes(need)} in an actor with one worker, and an actor may hold "
                f"{written_bytes(limit)}: {written_bytes(need - limit)} are missing. Raise bytes_per_actor, or lower "
                "the source's read buffer."
            )
    none = [0.0] * len(costs)
    draft = draft_fleet(0.0, none, costs, resources, float(max(resources.per_actor // 2, 1)) if group_tiny else 0.0)
    if draft.bytes > resources.loader_bytes:
        raise _bytes_missing(draft.bytes, "every source open once, with one worker", costs, draft.workers, resources)


def check_rate(
    asked: float,
    reached: float,
    loads: Sequence[float],
    handover: float,
    costs: Sequence[SourceCost],
    resources: Resources,
    group_tiny: bool,
) -> None:
    """Refuse a rate that the resources do not reach; say which of them falls short, and by how much."""
    what = f"{asked:g} samples/s"
    workers = [whole_workers(asked * load) for load in loads]
    most = max(range(len(costs)), key=lambda s: (workers[s], -s))
    at_best = f"At most {reached:,.4g} samples/s can be had."
    if workers[most] > resources.per_source:
        raise SpecError(
            f"{what} need {workers[most]} workers of source {costs[most].name!r} "
            f"({1000 * costs[most].transform_s:.3g} ms a sample), and one source may have {resources.per_source}: "
            f"{workers[most] - resources.per_source} are missing. {at_best} Raise per_source, or draw it less often."
        )
    if asked * handover > 1:
        raise SpecError(
            f"{what} cannot be handed over: a sample takes {handover * 1e6:,.0f} µs of planning and handing over, "
            f"which is {asked * handover:.3g} s of work in a second. {at_best} Use fewer, larger samples."
        )
    needed = cpus_of(asked, loads, costs, group_tiny)
    if needed > resources.loader_cpus + 1e-9:
        missing = needed - resources.loader_cpus
        paid = resources.cpus - resources.loader_cpus
        most = max(range(len(costs)), key=lambda s: (costs[s].cpu_share * workers[s], -s))
        raise SpecError(
            f"{what} need {needed:.4g} CPUs for workers, and beside the planner and the constructors there are "
            f"{resources.loader_cpus:g}: {missing:.3g} are missing; source {costs[most].name!r} alone needs "
            f"{workers[most]} workers. {at_best} Give {math.ceil(needed + paid - 1e-9)} CPUs, or ask for less."
        )
    below = float(max(resources.per_actor // 2, 1)) if group_tiny else 0.0
    draft = draft_fleet(asked, loads, costs, resources, below)
    raise _bytes_missing(draft.bytes, what, costs, draft.workers, resources, at_best)


def _bytes_missing(
    needed: int,
    what: str,
    costs: Sequence[SourceCost],
    workers: Sequence[int],
    resources: Resources,
    at_best: str = "",
) -> SpecError:
    held = [cost.file_bytes + n * cost.buffer_bytes for cost, n in zip(costs, workers, strict=True)]
    most = max(range(len(costs)), key=lambda s: (held[s], -s))
    reserved = resources.bytes - resources.loader_bytes
    return SpecError(
        f"{what}: the actors take {written_bytes(needed)}, and beside the planner and the constructors there are "
        f"{written_bytes(max(resources.loader_bytes, 0))}: {written_bytes(needed - resources.loader_bytes)} are "
        f"missing; source {costs[most].name!r} takes most, {written_bytes(held[most])}. "
        f"{at_best + ' ' if at_best else ''}Give {written_bytes(needed + reserved)}, lower the read buffers, or draw "
        "fewer sources at a time."
    )
