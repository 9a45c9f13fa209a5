"""Auto-partition (the paper's 5.1): the number of workers of each source, and the actors that hold them.

Three stages, as in the paper:

(1) Source clustering: sources sorted by P (seconds per sample), the most expensive first, in clusters of four.
(2) Resource levels: the ratio of a cluster's mean P to that of the cheapest cluster is the number of workers of its
    sources per worker of a cheapest source. The CPUs that planner and constructors leave, divided by all workers, are
    the resource block of a worker.
(3) Configuration: workers are put into actors, at most `per_actor` in each (data parallel beyond that); tiny sources
    share actors; if memory is short there are fewer workers, or fewer sources in an actor.

Where this goes beyond the paper:

- A source that is drawn rarely needs fewer workers than its cost says, so a level is weighted by the share of the
  mixture. Shares that are all the same give the paper's rule.
- Inside a cluster workers are divided by the cost of each source, not equally: in a cluster with sources that differ
  tenfold the most expensive one would starve and the others would idle. Equal costs give the paper's rule.
- The scale of the levels is chosen: the largest feed rate that the resources allow, or the smallest fleet that reaches
  a given rate.
- A source that keeps less than half a worker busy has one worker that shares a CPU with those of other sources and
  counts only the part that it uses: hundreds of sources fit on a few CPUs and in a few processes.

Rules of this file:
- Feed rate: min over sources of workers / (share x P), at most 1 / (mean T), within the CPUs and bytes available.
- More of a resource never makes a feed slower: CPUs and bytes of a fleet only grow with its rate.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from overlord.errors import SpecError
from overlord.scaling.profiles import TINY, Resources, SourceCost

Parallelism = Literal["worker", "source", "data"]
"""How a source is spread: workers in an actor of its own, an actor shared with other sources, or several actors."""
_WAITING = 0.9
"""A source that needs a CPU for less than this part of P is reported as waiting."""
_HALVINGS = 90
"""Bisection steps for the best rate: enough for the precision of a float."""
_ROUNDING = 1e-9
"""A load this little above a whole number counts as that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """The workers and actors of one source."""

    name: str
    cluster: int
    """Its cluster of costs; 0 holds the most expensive sources."""
    level: float
    """Workers it needs per worker of a mean source of the cheapest cluster: the paper's ratio, weighted by shares."""
    busy: float
    """Workers that it keeps busy at the expected feed rate."""
    workers: int
    cpus: float
    """CPUs that its workers use: few where they mostly wait for I/O."""
    actors: tuple[int, ...]
    """Numbers of the actors that hold it."""
    workers_per_actor: tuple[int, ...]
    """Its workers in each of them."""
    parallelism: Parallelism
    why: str
    """The reason, as one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """One loader host."""

    number: int
    sources: tuple[str, ...]
    workers: int
    """Workers that are busy at the same time, at most: those of tiny sources take turns."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A fleet of loaders, with its expected feed rate and resource use."""

    allotments: tuple[Allotment, ...]
    """In the order of the sources."""
    actors: tuple[Actor, ...]
    samples_per_s: float
    """Expected feed rate, all sources together."""
    bytes: int
    """Expected memory of all roles."""
    cpus: float
    """CPUs of all roles."""
    block_cpus: float
    """The paper's worker resource block: available CPUs for each worker that is busy at the same time."""
    limit: str
    """What limits the feed rate, in words."""

    @property
    def workers(self) -> tuple[int, ...]:
        """Workers of each source, in the order of the sources."""
        return tuple(one.workers for one in self.allotments)


def partition(
    costs: Sequence[SourceCost],
    shares: Sequence[float],
    resources: Resources,
    *,
    samples_per_s: float | None = None,
    cluster_size: int = 4,
    group_tiny: bool = True,
    headroom: float = 1.2,
) -> Partition:
    """Return how many workers and actors each source gets, and why.

    Args:
        costs: What each source costs, as profiled.
        shares: Share of each source in the samples drawn; they need not sum to one.
        resources: What is available, and the bounds w_src and w_actor.
        samples_per_s: The rate trainers need: the smallest fleet that reaches it is returned, with headroom where the
            resources have it. None: the fastest fleet that the resources allow.
        cluster_size: Sources of a cluster.
        group_tiny: Whether tiny sources share actors. False is the paper's default, one source in an actor: then
            each source also needs a whole CPU.
        headroom: How many times `samples_per_s` the fleet should reach.

    Raises:
        SpecError: The resources do not suffice; it says what is missing, for which source, and what to do.

    Example:
        >>> costs = [SourceCost(name="web", transform_s=0.001), SourceCost(name="photos", transform_s=0.04)]
        >>> found = partition(costs, [0.8, 0.2], Resources(cpus=10, bytes=8 << 30))
        >>> found.workers, round(found.samples_per_s)
        ((1, 7), 875)
    """
    check_asked(costs, shares, resources, samples_per_s, cluster_size)
    total = sum(shares)
    shares = [share / total for share in shares]
    loads = [share * max(cost.transform_s, 1e-12) for share, cost in zip(shares, costs, strict=True)]
    handover = sum(share * cost.handover_s for share, cost in zip(shares, costs, strict=True))
    check_least(costs, resources, group_tiny)
    draft, limit = _fastest(loads, handover, costs, resources, group_tiny)
    if samples_per_s is not None:
        wanted = samples_per_s * headroom
        if draft.rate < samples_per_s * (1 - 1e-9):
            check_rate(samples_per_s, draft.rate, loads, handover, costs, resources, group_tiny)
        if wanted <= draft.rate:
            draft = _draft(wanted, loads, costs, resources, group_tiny)
            limit = f"{headroom:g} times the {samples_per_s:g} samples/s asked for are reached"
    return _with_reasons(draft, limit, loads, costs, shares, resources, cluster_size)


def cluster_sources(costs: Sequence[SourceCost], cluster_size: int = 4) -> list[int]:
    """Return the cluster of each source: sorted by P, the most expensive first, `cluster_size` in each.

    Example:
        >>> cluster_sources([SourceCost(name=n, transform_s=p) for n, p in (("a", 1.0), ("b", 9.0), ("c", 2.0))], 2)
        [1, 0, 0]
    """
    order = sorted(range(len(costs)), key=lambda s: (-costs[s].transform_s, s))
    found = [0] * len(costs)
    for place, source in enumerate(order):
        found[source] = place // cluster_size
    return found


def levels(costs: Sequence[SourceCost], shares: Sequence[float], cluster_size: int = 4) -> list[float]:
    """Return how many workers each source needs per worker of a mean source of the cheapest cluster.

    With equal shares this is the paper's ratio of cluster means; a source that is drawn twice as often as the mean
    needs twice as many.

    Example:
        >>> costs = [SourceCost(name=n, transform_s=p) for n, p in (("a", 0.04), ("b", 0.04), ("c", 0.01), ("d", 0.01))]
        >>> levels(costs, [0.25] * 4, cluster_size=2)
        [4.0, 4.0, 1.0, 1.0]
    """
    clusters = cluster_sources(costs, cluster_size)
    sums = [0.0] * (max(clusters) + 1)
    counts = [0] * len(sums)
    for cluster, cost in zip(clusters, costs, strict=True):
        sums[cluster] += max(cost.transform_s, 1e-12)
        counts[cluster] += 1
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    even = sum(shares) / len(costs)
    return [means[cluster] / means[-1] * share / even for cluster, share in zip(clusters, shares, strict=True)]


# The search: the largest rate with a fleet that the resources pay for. CPUs and bytes only grow with the rate, so it is
# a bisection; a fleet is drafted for each rate that is tried, and its CPUs and bytes are counted.


def _fastest(
    loads: Sequence[float], handover: float, costs: Sequence[SourceCost], resources: Resources, group_tiny: bool
) -> tuple[Draft, str]:
    """Return the fastest fleet that the resources allow, and what limits it.

    The rate is bounded by the workers of one source, then by the hand-over, then by CPUs (bisection), then by bytes
    (bisection over drafts). If bytes bind, a second way is tried: more sources share actors.
    """
    slowest = max(range(len(loads)), key=lambda s: (loads[s], -s))
    most, limit = (
        resources.per_source / loads[slowest],
        (
            f"source {costs[slowest].name!r} has all the {resources.per_source} workers that one source may have "
            "(per_source)"
        ),
    )
    if handover * most > 1:
        most, limit = 1 / handover, f"planning and handing over take {handover * 1e6:,.0f} µs of each sample"
    rate = _largest(lambda rate: cpus_of(rate, loads, costs, group_tiny) <= resources.loader_cpus + 1e-9, most)
    if rate < most:
        limit = f"{_next_cpu(rate, loads, costs, group_tiny)} does not fit the {resources.cpus:g} CPUs"
    found: list[Draft] = []
    for below in _groupings(resources, group_tiny):

        def paid(rate: float, below: float = below) -> bool:
            return draft_fleet(rate, loads, costs, resources, below).bytes <= resources.loader_bytes

        fitting = _largest(paid, rate)
        found.append(draft_fleet(fitting, loads, costs, resources, below))
        if fitting >= rate:
            return found[-1], limit
    best = max(found, key=lambda draft: draft.rate)
    return best, f"{_next_worker(best.rate, loads, costs)} does not fit the {written_bytes(resources.bytes)} of memory"


def _next_cpu(rate: float, loads: Sequence[float], costs: Sequence[SourceCost], group_tiny: bool) -> str:
    """Return in words which source would need more CPUs for a slightly faster feed; workers that wait do not count."""
    more = rate * (1 + 1e-6)
    grown = [
        cpus_of(more, [load], [cost], group_tiny) - cpus_of(rate, [load], [cost], group_tiny)
        for load, cost in zip(loads, costs, strict=True)
    ]
    first = max(range(len(grown)), key=lambda s: (grown[s], -s))
    if group_tiny and more * loads[first] < TINY:
        return "more work of tiny sources"
    own = group_tiny and rate * loads[first] < TINY  # it shared a CPU, and would now need a whole worker
    return f"a whole worker for {costs[first].name!r}" if own else f"one more worker for {costs[first].name!r}"


def _next_worker(rate: float, loads: Sequence[float], costs: Sequence[SourceCost]) -> str:
    """Return in words what a faster feed would need first."""
    busy = [rate * load for load in loads]
    # The source with the busiest workers: its load is nearest below a whole number.
    first = min(range(len(busy)), key=lambda s: (whole_workers(busy[s]) / max(busy[s], 1e-12), s))
    return f"one more worker for {costs[first].name!r}" if busy[first] >= TINY else "more work of tiny sources"


def _draft(
    rate: float, loads: Sequence[float], costs: Sequence[SourceCost], resources: Resources, group_tiny: bool
) -> Draft:
    """Return the fleet for a rate that the resources are known to allow."""
    drafts = [draft_fleet(rate, loads, costs, resources, below) for below in _groupings(resources, group_tiny)]
    return next((draft for draft in drafts if draft.bytes <= resources.loader_bytes), drafts[-1])


def _groupings(resources: Resources, group_tiny: bool) -> list[float]:
    """Return below which load sources share actors: first only tiny ones; if memory is short, up to half an actor."""
    return [0.0] if not group_tiny else [TINY, float(max(resources.per_actor // 2, 1))]


def _largest(possible: Callable[[float], bool], most: float) -> float:
    """Return the largest possible number up to `most`, given that all smaller ones are possible too (bisection)."""
    if possible(most):
        return most
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low


def _with_reasons(
    draft: Draft,
    limit: str,
    loads: Sequence[float],
    costs: Sequence[SourceCost],
    shares: Sequence[float],
    resources: Resources,
    cluster_size: int,
) -> Partition:
    """Return a fleet with the reasons for it."""
    clusters, ratios = cluster_sources(costs, cluster_size), levels(costs, shares, cluster_size)
    allotments = tuple(
        _allot(
            draft, source, draft.rate * loads[source], shares[source], cost, clusters[source], ratios[source], resources
        )
        for source, cost in enumerate(costs)
    )
    actors = tuple(
        Actor(number=n, sources=tuple(costs[s].name for s in sources), workers=workers, bytes=held)
        for n, (sources, workers, held) in enumerate(
            zip(draft.actor_sources, draft.actor_workers, draft.actor_bytes, strict=True)
        )
    )
    return Partition(
        allotments=allotments,
        actors=actors,
        samples_per_s=draft.rate,
        bytes=resources.bytes - resources.loader_bytes + draft.bytes,
        cpus=min(resources.cpus, resources.cpus - resources.loader_cpus + draft.cpus),
        block_cpus=resources.loader_cpus / max(sum(draft.actor_workers), 1),
        limit=limit,
    )


def _allot(
    draft: Draft,
    source: int,
    busy: float,
    share: float,
    cost: SourceCost,
    cluster: int,
    level: float,
    resources: Resources,
) -> Allotment:
    places = draft.places[source]
    others = len(draft.actor_sources[places[0][0]]) - 1
    kind: Parallelism = "data" if len(places) > 1 else "source" if others else "worker"
    workers = draft.workers[source]
    need = (
        f"{100 * share:.3g} % of {draft.rate:,.4g} samples/s at {1000 * cost.transform_s:.3g} ms each keep "
        f"{busy:.3g} workers busy"
        if share > 0
        else "it is not drawn"
    )
    if share > 0 and cost.cpu_share < _WAITING:
        need += f", {100 * cost.cpu_share:.2g} % of the time with a CPU ({draft.source_cpus[source]:.2g} in all)"
    if kind == "data":
        room = room_of(cost, resources)
        bound = "may have" if room == resources.per_actor else "has memory for"
        what = f"{workers} of them are more than the {room} that one actor {bound}, so {len(places)} actors hold it"
    elif kind == "source":
        turns = "it takes turns with" if busy < TINY else "it shares an actor with"
        what = f"{turns} {others} other source{'' if others == 1 else 's'} in actor {places[0][0]}"
    else:
        what = f"{workers} worker{'' if workers == 1 else 's'} in an actor of its own"
    return Allotment(
        name=cost.name,
        cluster=cluster,
        level=level,
        busy=busy,
        workers=workers,
        cpus=draft.source_cpus[source],
        actors=tuple(actor for actor, _ in places),
        workers_per_actor=tuple(there for _, there in places),
        parallelism=kind,
        why=f"{need}: {what}",
    )


# The fleet for one rate: the workers of each source, the actors that hold them, and what they take.


@dataclass(frozen=True, slots=True)
class Draft:
    """A fleet for one rate; whether the resources allow it is not checked yet."""

    rate: float
    workers: tuple[int, ...]
    """Of each source."""
    places: tuple[tuple[tuple[int, int], ...], ...]
    """Of each source: (actor, workers there)."""
    actor_sources: tuple[tuple[int, ...], ...]
    """Of each actor: its sources."""
    actor_workers: tuple[int, ...]
    """Of each actor: how many of its workers are busy at the same time, at most; tiny sources take turns."""
    actor_bytes: tuple[int, ...]
    source_cpus: tuple[float, ...]
    """Of each source: CPUs that its workers use; a tiny one uses only what it keeps busy."""

    @property
    def cpus(self) -> float:
        """CPUs of all workers."""
        return sum(self.source_cpus)

    @property
    def bytes(self) -> int:
        """Bytes of all actors."""
        return sum(self.actor_bytes)


def draft_fleet(
    rate: float, loads: Sequence[float], costs: Sequence[SourceCost], resources: Resources, grouped_below: float
) -> Draft:
    """Return the fleet for a rate.

    Sources below `grouped_below` share actors; a single one of them joins the emptiest actor of another source. Every
    other source has actors of its own, as many as its workers need.

    Args:
        rate: Samples of all sources in a second.
        loads: Seconds of work of each source for one sample of the mixture: its share of it, times its P.
        costs: What each source costs.
        resources: The bounds of one actor; the totals are not checked here.
        grouped_below: Sources that keep fewer workers busy share actors; 0: none does.
    """
    workers = tuple(whole_workers(rate * load) for load in loads)
    busy = [rate * load if rate * load < TINY else float(n) for load, n in zip(loads, workers, strict=True)]
    grouped = [s for s in range(len(costs)) if rate * loads[s] < grouped_below]
    lone = grouped[0] if len(grouped) == 1 < len(costs) else None
    apart = set(grouped)
    if lone is not None:
        grouped = []
    # Actors are numbered as they are made: first the shared ones, then those of a single source.
    members, most = _share_actors(grouped, busy, costs, workers, resources, grouped_below)
    places: list[tuple[tuple[int, int], ...]] = [()] * len(costs)
    for actor, sources in enumerate(members):
        for source in sources:
            places[source] = ((actor, workers[source]),)
    for source, cost in enumerate(costs):
        if source in apart:
            continue
        # Data parallel: as many actors as the workers need, with about the same number in each.
        degree = math.ceil(workers[source] / max(1, room_of(cost, resources)))
        each = [workers[source] // degree + (number < workers[source] % degree) for number in range(degree)]
        places[source] = tuple((len(members) + number, there) for number, there in enumerate(each))
        members += [[source]] * degree
        most += each
    if lone is not None:
        actor = _host_for_lone(lone, places, most, costs, workers, resources)
        places[lone] = ((actor, workers[lone]),)
        if actor == len(members):
            members, most = [*members, []], [*most, 0]
        members[actor] = sorted([*members[actor], lone])
        most[actor] += workers[lone]
    held = _actor_bytes(len(members), places, costs, resources)
    cpus = tuple(cost.cpu_share * n for cost, n in zip(costs, busy, strict=True))
    return Draft(rate, workers, tuple(places), tuple(map(tuple, members)), tuple(most), tuple(held), cpus)


def cpus_of(rate: float, loads: Sequence[float], costs: Sequence[SourceCost], group_tiny: bool) -> float:
    """Return the CPUs that the workers of all sources use; a tiny source uses only what it keeps busy."""
    return sum(
        cost.cpu_share * (rate * load if group_tiny and rate * load < TINY else whole_workers(rate * load))
        for load, cost in zip(loads, costs, strict=True)
    )


def room_of(cost: SourceCost, resources: Resources) -> int:
    """Return how many workers of a source fit in one actor, by count and by bytes; 0 if not even one does."""
    if resources.bytes_per_actor is None:
        return resources.per_actor
    left = resources.bytes_per_actor - resources.actor_bytes - cost.file_bytes
    if cost.buffer_bytes <= 0:
        return resources.per_actor if left >= 0 else 0
    return max(0, min(resources.per_actor, left // cost.buffer_bytes))


def whole_workers(busy: float) -> int:
    """Return how many workers a source needs that keeps so many busy; at least one.

    Example:
        >>> [whole_workers(busy) for busy in (0.0, 1.0, 1.0000000001, 1.1)]
        [1, 1, 1, 2]
    """
    return max(1, math.ceil(busy - _ROUNDING))


def _actor_bytes(
    count: int, places: Sequence[Sequence[tuple[int, int]]], costs: Sequence[SourceCost], resources: Resources
) -> list[int]:
    """Return the bytes of each of so many actors."""
    held = [resources.actor_bytes] * count
    for cost, where in zip(costs, places, strict=True):
        for actor, there in where:
            held[actor] += cost.file_bytes + there * cost.buffer_bytes
    return held


def _host_for_lone(
    lone: int,
    places: Sequence[tuple[tuple[int, int], ...]],
    most: Sequence[int],
    costs: Sequence[SourceCost],
    workers: Sequence[int],
    resources: Resources,
) -> int:
    """Return the actor for the only source that would share one: the emptiest with room, or a new one."""
    held = _actor_bytes(len(most), places, costs, resources)
    own = costs[lone].file_bytes + workers[lone] * costs[lone].buffer_bytes
    limit = resources.bytes_per_actor
    roomy = [
        actor
        for actor, there in enumerate(most)
        if there + workers[lone] <= resources.per_actor and (limit is None or held[actor] + own <= limit)
    ]
    return min(roomy, key=lambda actor: (most[actor], actor), default=len(most))


def _share_actors(
    grouped: Sequence[int],
    busy: Sequence[float],
    costs: Sequence[SourceCost],
    workers: Sequence[int],
    resources: Resources,
    grouped_below: float,
) -> tuple[list[list[int]], list[int]]:
    """Put sources into as few shared actors as hold them; return the sources and the busy workers of each actor."""
    if not grouped:
        return [], []
    largest = TINY if grouped_below <= TINY else float(math.ceil(grouped_below))
    # Largest first into the emptiest, no actor exceeds the mean by more than one source: this many suffice.
    count = 1 + int(sum(busy[s] for s in grouped) / max(resources.per_actor - largest, TINY))
    sizes = {s: costs[s].file_bytes + workers[s] * costs[s].buffer_bytes for s in grouped}
    limit = None if resources.bytes_per_actor is None else resources.bytes_per_actor - resources.actor_bytes
    while True:
        members = _deal_out(grouped, busy, sizes, count, limit)
        if limit is None or count >= len(grouped) or all(sum(sizes[s] for s in one) <= limit for one in members):
            break
        count += 1  # more actors, with fewer files open in each
    members = [sorted(one) for one in members if one]
    return members, [max(1, math.ceil(sum(busy[s] for s in one) - _ROUNDING)) for one in members]


def _deal_out(
    grouped: Sequence[int], busy: Sequence[float], sizes: dict[int, int], count: int, limit: int | None
) -> list[list[int]]:
    """Divide sources among actors so that work and bytes are about even."""
    work = sum(busy[s] for s in grouped) or 1.0

    def weight(source: int) -> float:
        return max(busy[source] / work, 0.0 if limit is None else sizes[source] / (limit * count or 1))

    members: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, actor) for actor in range(count)]
    for source in sorted(grouped, key=lambda s: (-weight(s), s)):
        filled, actor = heapq.heappop(heap)
        members[actor].append(source)
        heapq.heappush(heap, (filled + weight(source), actor))
    return members


# Refusals: which resource is missing, how much of it, which source needs it, what to do.


def check_asked(
    costs: Sequence[SourceCost],
    shares: Sequence[float],
    resources: Resources,
    samples_per_s: float | None,
    cluster_size: int,
) -> None:
    """Refuse invalid arguments."""
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
    """Refuse resources that cannot hold one worker of every source."""
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
    draft = draft_fleet(0.0, [0.0] * len(costs), costs, resources, _groupings(resources, group_tiny)[-1])
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
    """Refuse a rate that the resources do not reach; the error says which one is short, and by how much."""
    what = f"{asked:g} samples/s"
    workers = [whole_workers(asked * load) for load in loads]
    most = max(range(len(costs)), key=lambda s: (workers[s], -s))
    at_best = f"At most {reached:,.4g} samples/s are possible."
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
    draft = draft_fleet(asked, loads, costs, resources, _groupings(resources, group_tiny)[-1])
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


def written_bytes(value: float) -> str:
    """Format a number of bytes.

    Example:
        >>> written_bytes(3 << 30), written_bytes(1500)
        ('3.22 GB', '1.5 kB')
    """
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"
