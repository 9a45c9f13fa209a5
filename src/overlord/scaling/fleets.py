"""What a feed rate takes: the workers of each source, the actors they stand in, and what all of it costs.

The ground of `partition`: a fleet is drafted for a rate, its CPUs and bytes are counted, and the caller looks for the
largest rate whose fleet it can pay for. Both only grow with the rate, so that search is a bisection.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from overlord.scaling.costs import TINY, Resources, SourceCost

_ROUNDING = 1e-9
"""A demand that lies this little above a whole number of workers is that number."""


def whole_workers(busy: float) -> int:
    """Return how many workers a source needs that keeps so many busy; at least one.

    Example:
        >>> [whole_workers(busy) for busy in (0.0, 1.0, 1.0000000001, 1.1)]
        [1, 1, 1, 2]
    """
    return max(1, math.ceil(busy - _ROUNDING))


@dataclass(frozen=True, slots=True)
class Draft:
    """A fleet for one rate, before anybody has said whether it can be paid for."""

    rate: float
    workers: tuple[int, ...]
    """Of each source."""
    places: tuple[tuple[tuple[int, int], ...], ...]
    """Of each source: (actor, workers there)."""
    actor_sources: tuple[tuple[int, ...], ...]
    """Of each actor: its sources."""
    actor_workers: tuple[int, ...]
    """Of each actor: how many of its workers are busy at once at most; tiny sources take turns."""
    actor_bytes: tuple[int, ...]
    source_cpus: tuple[float, ...]
    """Of each source: CPUs that its workers take; a tiny one takes what it keeps busy."""

    @property
    def cpus(self) -> float:
        """CPUs of all workers."""
        return sum(self.source_cpus)

    @property
    def bytes(self) -> int:
        """Bytes of all actors."""
        return sum(self.actor_bytes)


def cpus_of(rate: float, loads: Sequence[float], costs: Sequence[SourceCost], group_tiny: bool) -> float:
    """Return the CPUs that the workers of all sources take; a tiny source takes what it keeps busy."""
    return sum(
        cost.cpu_share * (rate * load if group_tiny and rate * load < TINY else whole_workers(rate * load))
        for load, cost in zip(loads, costs, strict=True)
    )


def room_of(cost: SourceCost, resources: Resources) -> int:
    """Return how many workers of a source one actor can hold, by its bound and its bytes; 0 where not even one."""
    if resources.bytes_per_actor is None:
        return resources.per_actor
    left = resources.bytes_per_actor - resources.actor_bytes - cost.file_bytes
    if cost.buffer_bytes <= 0:
        return resources.per_actor if left >= 0 else 0
    return max(0, min(resources.per_actor, left // cost.buffer_bytes))


def draft_fleet(
    rate: float, loads: Sequence[float], costs: Sequence[SourceCost], resources: Resources, grouped_below: float
) -> Draft:
    """Return the fleet that a rate takes.

    Args:
        rate: Samples of all sources in a second.
        loads: Seconds of work of each source for one sample of the mixture: its share of it, times its P.
        costs: What each source costs.
        resources: The bounds of one actor; how much there is in all is not looked at.
        grouped_below: A source that keeps fewer workers busy shares an actor with others; 0: none does.
    """
    workers = tuple(whole_workers(rate * load) for load in loads)
    busy = [rate * load if rate * load < TINY else float(n) for load, n in zip(loads, workers, strict=True)]
    grouped = [s for s in range(len(costs)) if rate * loads[s] < grouped_below]
    lone = grouped[0] if len(grouped) == 1 < len(costs) else None
    apart = set(grouped)
    if lone is not None:
        grouped = []
    members, most = _share_actors(grouped, busy, costs, workers, resources, grouped_below)
    places: list[tuple[tuple[int, int], ...]] = [()] * len(costs)
    for actor, sources in enumerate(members):
        for source in sources:
            places[source] = ((actor, workers[source]),)
    for source, cost in enumerate(costs):
        if source in apart:
            continue
        degree = math.ceil(workers[source] / max(1, room_of(cost, resources)))
        each = [workers[source] // degree + (number < workers[source] % degree) for number in range(degree)]
        places[source] = tuple((len(members) + number, there) for number, there in enumerate(each))
        members += [[source]] * degree
        most += each
    if lone is not None:
        actor = _guest_of(lone, places, most, costs, workers, resources)
        places[lone] = ((actor, workers[lone]),)
        if actor == len(members):
            members, most = [*members, []], [*most, 0]
        members[actor] = sorted([*members[actor], lone])
        most[actor] += workers[lone]
    held = [resources.actor_bytes] * len(members)
    for cost, where in zip(costs, places, strict=True):
        for actor, there in where:
            held[actor] += cost.file_bytes + there * cost.buffer_bytes
    cpus = tuple(cost.cpu_share * n for cost, n in zip(costs, busy, strict=True))
    return Draft(rate, workers, tuple(places), tuple(map(tuple, members)), tuple(most), tuple(held), cpus)


def _guest_of(
    lone: int,
    places: Sequence[tuple[tuple[int, int], ...]],
    most: Sequence[int],
    costs: Sequence[SourceCost],
    workers: Sequence[int],
    resources: Resources,
) -> int:
    """Return the actor that takes in a source with nobody to share one with: the emptiest, or a new one."""
    held = [resources.actor_bytes] * len(most)
    for cost, where in zip(costs, places, strict=True):
        for actor, there in where:
            held[actor] += cost.file_bytes + there * cost.buffer_bytes
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
    """Deal sources to as few shared actors as hold them; return the sources and the busy workers of each actor."""
    if not grouped:
        return [], []
    largest = TINY if grouped_below <= TINY else float(math.ceil(grouped_below))
    # Dealt largest first to the emptiest, no actor is fuller than the mean and one source more: this many suffice.
    count = 1 + int(sum(busy[s] for s in grouped) / max(resources.per_actor - largest, TINY))
    sizes = {s: costs[s].file_bytes + workers[s] * costs[s].buffer_bytes for s in grouped}
    limit = None if resources.bytes_per_actor is None else resources.bytes_per_actor - resources.actor_bytes
    while True:
        members = _deal_out(grouped, busy, sizes, count, limit)
        if limit is None or count >= len(grouped) or all(sum(sizes[s] for s in one) <= limit for one in members):
            break
        count += 1  # source parallel: fewer files open in each
    members = [sorted(one) for one in members if one]
    return members, [max(1, math.ceil(sum(busy[s] for s in one) - _ROUNDING)) for one in members]


def _deal_out(
    grouped: Sequence[int], busy: Sequence[float], sizes: dict[int, int], count: int, limit: int | None
) -> list[list[int]]:
    """Deal sources out so that no actor has much more to do, or to hold, than another."""
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
