"""Auto-partition (the paper's 5.1): the number of workers of each source, and the actors that hold them.

Three stages, as in the paper:

(1) Source clustering: sources sorted by P (seconds per sample), the most expensive first, in clusters of four.
(2) Resource levels: the ratio of a cluster's mean P to that of the cheapest cluster is the number of workers of its
    sources per worker of a cheapest source. The CPUs that planner and constructors leave, divided by all workers, are
    the resource block of a worker.
(3) Configuration: workers are put into actors, at most `per_actor` in each (data parallel beyond that); sources of the
    lowest level, which keep less than half a worker busy, share actors; if memory is short there are fewer workers, or
    fewer sources in an actor.

Where this goes beyond the paper:

- A source that is drawn rarely needs fewer workers than its cost says, so a level is weighted by the share of the
  mixture. Shares that are all the same give the paper's rule.
- A source that costs more than the mean of its cluster, or less than half of it, counts with its own cost: the first
  would starve otherwise and all others wait for it, the second would have idle workers. Equal costs within a cluster
  give the paper's rule exactly.
- The scale of the levels is chosen: the largest feed rate that the resources allow, or the smallest fleet that reaches
  a given rate.
- A source that keeps less than half a worker busy has one worker that shares a CPU with those of other sources and
  counts only the part that it uses: hundreds of sources fit on a few CPUs and in a few processes.

Rules of this file:
- Feed rate: the largest at which every source has the workers of its level, at most 1 / (mean T), within the workers,
  CPUs and bytes available, and at most what decoding behind the hand-over allows.
- More of a resource never makes a feed slower: CPUs and bytes of a fleet only grow with its rate.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from overlord.errors import SpecError
from overlord.scaling.profiles import TINY, Resources, SourceCost

Parallelism = Literal["worker", "source", "data"]
"""How a source is spread: workers in an actor of its own, an actor shared with other sources, or several actors."""
CLUSTER_SIZE = 4
"""Sources of a cluster: the paper found 4 best in most scenarios."""
_WAITING = 0.9
"""A source that needs a CPU for less than this part of P is reported as waiting."""
_HALVINGS = 90
"""Bisection steps for the best rate: enough for the precision of a float."""
_ROUNDING = 1e-9
"""A load this little above a whole number counts as that number."""
_ALIKE = 2.0
"""A source follows the level of its cluster if the mean cost there is at most so many times its own."""


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
    source_workers: tuple[int, ...]
    """Workers of each of them here."""
    workers: int
    """Workers that are busy at the same time, at most: those of tiny sources take turns."""
    cpus: float
    """CPUs that they use."""
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
    cluster_size: int
    """Sources of a cluster, as given or as chosen."""
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
    cluster_size: int = CLUSTER_SIZE,
    most_actors: Mapping[str, int] | None = None,
    headroom: float = 1.2,
) -> Partition:
    """Return how many workers and actors each source gets, and why.

    Args:
        costs: What each source costs, as profiled.
        shares: Share of each source in the samples drawn; they need not sum to one.
        resources: What is available, and the bounds w_src and w_actor.
        samples_per_s: The rate trainers need: the smallest fleet that reaches it is returned, with headroom where the
            resources have it. None: the fastest fleet that the resources allow.
        cluster_size: Sources of a cluster. With 1, workers follow what each source was measured to cost; larger ones
            give sources that cost about the same alike, which evens out what was measured on few samples.
        most_actors: Actors that some sources can be divided over at most; the others as many as they need.
        headroom: How many times `samples_per_s` the fleet should reach.

    Raises:
        SpecError: The resources do not suffice; it says what is missing, for which source, and what to do.

    Example:
        >>> costs = [SourceCost(name="web", transform_s=0.001), SourceCost(name="photos", transform_s=0.04)]
        >>> found = partition(costs, [0.8, 0.2], Resources(cpus=10, bytes=8 << 30))
        >>> found.workers, round(found.samples_per_s)
        ((1, 7), 875)
    """
    _check_arguments(costs, shares, resources, samples_per_s, cluster_size)
    total = sum(shares)
    shares = [share / total for share in shares]
    search = _Search.of(costs, shares, resources, cluster_size, most_actors or {})
    search.check_least()
    draft, limit = search.fastest()
    if samples_per_s is not None:
        if draft.rate < samples_per_s * (1 - 1e-9):
            raise search.shortfall(samples_per_s, draft.rate)
        if samples_per_s * headroom <= draft.rate:
            draft = search.fleet(samples_per_s * headroom)
            limit = f"{headroom:g} times the {samples_per_s:g} samples/s asked for are reached"
    return _with_reasons(draft, limit, search)


def cluster_sources(costs: Sequence[SourceCost], cluster_size: int = CLUSTER_SIZE) -> list[int]:
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


def cluster_means(costs: Sequence[SourceCost], clusters: Sequence[int]) -> list[float]:
    """Return the mean P of each cluster."""
    sums = [0.0] * (max(clusters) + 1)
    counts = [0] * len(sums)
    for cluster, cost in zip(clusters, costs, strict=True):
        sums[cluster] += max(cost.transform_s, 1e-12)
        counts[cluster] += 1
    return [total / count for total, count in zip(sums, counts, strict=True)]


def _level_s(own_s: float, mean_s: float) -> float:
    """Return the seconds that a source counts with: the mean of its cluster, if that is more, and its cost is like it.

    Example:
        >>> [_level_s(own, 0.04) for own in (0.05, 0.03, 0.01)]
        [0.05, 0.04, 0.01]
    """
    return mean_s if own_s < mean_s <= _ALIKE * own_s else own_s


def levels(costs: Sequence[SourceCost], shares: Sequence[float], cluster_size: int = CLUSTER_SIZE) -> list[float]:
    """Return how many workers each source needs per worker of a mean source of the cheapest cluster.

    With equal shares this is the paper's ratio of cluster means; a source that is drawn twice as often as the mean
    needs twice as many.

    Example:
        >>> costs = [SourceCost(name=n, transform_s=p) for n, p in (("a", 0.04), ("b", 0.04), ("c", 0.01), ("d", 0.01))]
        >>> levels(costs, [0.25] * 4, cluster_size=2)
        [4.0, 4.0, 1.0, 1.0]
    """
    clusters = cluster_sources(costs, cluster_size)
    means, even = cluster_means(costs, clusters), sum(shares) / len(costs)
    return [means[cluster] / means[-1] * share / even for cluster, share in zip(clusters, shares, strict=True)]


@dataclass(frozen=True, slots=True)
class _Draft:
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
    def bytes(self) -> int:
        """Bytes of all actors."""
        return sum(self.actor_bytes)


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for the largest rate with a fleet that the resources pay for.

    CPUs and bytes only grow with the rate, so it is a bisection; a fleet is drafted for each rate that is tried, and
    its CPUs and bytes are counted.
    """

    costs: Sequence[SourceCost]
    shares: Sequence[float]
    loads: Sequence[float]
    """Seconds of work of each source for one sample of the mixture: its share of it, times its P."""
    needs: Sequence[float]
    """The same by its level, with about the mean P of its cluster. Its workers follow from this."""
    clusters: Sequence[int]
    handover: float
    """Mean T."""
    decoding: float
    """Mean seconds of decoding behind the hand-over."""
    resources: Resources
    cluster_size: int
    most_actors: Mapping[str, int]

    @classmethod
    def of(
        cls,
        costs: Sequence[SourceCost],
        shares: Sequence[float],
        resources: Resources,
        cluster_size: int,
        most_actors: Mapping[str, int],
    ) -> _Search:
        """Cluster the sources and weigh their levels by the mixture."""
        clusters = cluster_sources(costs, cluster_size)
        means, given = cluster_means(costs, clusters), list(zip(costs, shares, clusters, strict=True))
        return cls(
            costs,
            shares,
            [share * max(cost.transform_s, 1e-12) for cost, share, _ in given],
            [share * _level_s(max(cost.transform_s, 1e-12), means[cluster]) for cost, share, cluster in given],
            clusters,
            sum(share * cost.handover_s for cost, share, _ in given),
            sum(share * cost.decode_s for cost, share, _ in given),
            resources,
            cluster_size,
            most_actors,
        )

    def fastest(self) -> tuple[_Draft, str]:
        """Return the fastest fleet that the resources allow, and what limits it.

        The rate is bounded by the workers of one source, then by the hand-over and what is decoded behind it, then by
        workers and CPUs (bisection), then by bytes (bisection over drafts). If bytes bind, a second way is tried: more
        sources share actors.
        """
        resources = self.resources
        caps = [self.cap(cost) for cost in self.costs]
        slowest = _first_largest([load / cap for load, cap in zip(self.loads, caps, strict=True)])
        most = caps[slowest] / self.loads[slowest]
        actors = self.most_actors.get(self.costs[slowest].name)
        why = (
            "per_source"
            if caps[slowest] == resources.per_source
            else f"it can be divided over {actors} actor{'' if actors == 1 else 's'}"
        )
        limit = f"source {self.costs[slowest].name!r} has all the {caps[slowest]} workers that it may have ({why})"
        if self.handover * most > 1:
            most = 1 / self.handover
            limit = f"planning and handing over take {self.handover * 1e6:,.0f} µs of each sample"
        if resources.decoders is not None and self.decoding * most > resources.decoders:
            most = resources.decoders / self.decoding
            limit = (
                f"{resources.decoders:g} threads of the constructors decode behind the hand-over, "
                f"{1000 * self.decoding:.3g} ms of each sample"
            )
        rate = _largest(lambda rate: self._missing(rate) is None, most)
        if rate < most:
            limit = f"{self._next_cpu(rate)} does not fit the {self._missing(rate * (1 + 1e-6)) or 'CPUs'}"
        found: list[_Draft] = []
        for below in self._groupings():

            def paid(rate: float, below: float = below) -> bool:
                return self._draft(rate, below).bytes <= resources.loader_bytes

            fitting = _largest(paid, rate)
            found.append(self._draft(fitting, below))
            if fitting >= rate:
                return found[-1], limit
        best = max(found, key=lambda draft: draft.rate)
        return best, f"{self._next_worker(best.rate)} does not fit the {_written_bytes(resources.bytes)} of memory"

    def fleet(self, rate: float) -> _Draft:
        """Return the fleet for a rate that the resources are known to allow."""
        drafts = [self._draft(rate, below) for below in self._groupings()]
        return next((draft for draft in drafts if draft.bytes <= self.resources.loader_bytes), drafts[-1])

    def workers(self, rate: float) -> list[int]:
        """Return the workers of each source at a rate, by its level."""
        return [
            min(self.cap(cost), whole_workers(rate * need)) for cost, need in zip(self.costs, self.needs, strict=True)
        ]

    def busy(self, rate: float) -> list[float]:
        """Return the workers of each source that count: those of a tiny source only as much as they are busy."""
        return [
            rate * load if rate * need < TINY else float(count)
            for load, need, count in zip(self.loads, self.needs, self.workers(rate), strict=True)
        ]

    def cpus(self, rate: float) -> list[float]:
        """Return the CPUs that the workers of each source use; a tiny source uses only what it keeps busy."""
        return [cost.cpu_share * count for cost, count in zip(self.costs, self.busy(rate), strict=True)]

    def cap(self, cost: SourceCost) -> int:
        """Return how many workers a source may have (w_src), in as many actors as it can be divided over."""
        most, actors = self.resources.per_source, self.most_actors.get(cost.name)
        return most if actors is None else max(1, min(most, actors * self.room(cost)))

    def room(self, cost: SourceCost) -> int:
        """Return how many workers of a source fit in one actor, by count and by bytes; 0 if not even one does."""
        resources = self.resources
        if resources.bytes_per_actor is None:
            return resources.per_actor
        left = resources.bytes_per_actor - resources.actor_bytes - cost.file_bytes
        if cost.buffer_bytes <= 0:
            return resources.per_actor if left >= 0 else 0
        return max(0, min(resources.per_actor, left // cost.buffer_bytes))

    def _missing(self, rate: float) -> str | None:
        """Return which of CPUs and workers do not suffice for a rate, in words; None where both do."""
        resources, busy = self.resources, self.busy(rate)
        if resources.workers is not None and sum(busy) > resources.workers + 1e-9:
            return f"{resources.workers:g} workers of all sources"
        needed = sum(cost.cpu_share * count for cost, count in zip(self.costs, busy, strict=True))
        needed += rate * self.decoding if resources.one_host else 0.0
        return f"{resources.cpus:g} CPUs" if needed > resources.loader_cpus + 1e-9 else None

    def _next_cpu(self, rate: float) -> str:
        """Return in words what would need more CPUs, or workers, for a slightly faster feed."""
        more = rate * (1 + 1e-6)
        bounded = "workers" in (self._missing(more) or "")  # else waiting does not count
        before, after = (self.busy if bounded else self.cpus)(rate), (self.busy if bounded else self.cpus)(more)
        grown = [new - old for old, new in zip(before, after, strict=True)]
        if self.resources.one_host and not bounded and (more - rate) * self.decoding > sum(grown):
            return "more decoding behind the hand-over"
        first = _first_largest(grown)
        if more * self.needs[first] < TINY:
            return "more work of tiny sources"
        own = rate * self.needs[first] < TINY  # it shared a CPU, and would now need a whole worker
        return f"{'a whole' if own else 'one more'} worker for {self.costs[first].name!r}"

    def _next_worker(self, rate: float) -> str:
        """Return in words what a faster feed would need first."""
        busy = [rate * need for need in self.needs]
        # The source with the busiest workers: its load is nearest below a whole number.
        first = _first_largest([-whole_workers(one) / max(one, 1e-12) for one in busy])
        return f"one more worker for {self.costs[first].name!r}" if busy[first] >= TINY else "more work of tiny sources"

    def _groupings(self) -> list[float]:
        """Return below which load sources share actors: only tiny ones; if memory is short, up to half an actor."""
        return [TINY, float(max(self.resources.per_actor // 2, 1))]

    def _draft(self, rate: float, grouped_below: float) -> _Draft:
        """Return the fleet for a rate; the total resources are not checked here.

        Sources that keep fewer workers busy than `grouped_below` share actors; a single one of them joins the emptiest
        actor of another source. Every other source has actors of its own, as many as its workers need.
        """
        costs, workers, busy = self.costs, tuple(self.workers(rate)), self.busy(rate)
        held = [cost.held_bytes(n) for cost, n in zip(costs, workers, strict=True)]
        grouped = [s for s in range(len(costs)) if rate * self.needs[s] < grouped_below]
        lone = grouped[0] if len(grouped) == 1 < len(costs) else None
        # Actors are numbered as they are made: first the shared ones, then those of a single source.
        members, most = ([], []) if lone is not None else self._share_actors(grouped, busy, held, grouped_below)
        places: list[tuple[tuple[int, int], ...]] = [()] * len(costs)
        for actor, sources in enumerate(members):
            for source in sources:
                places[source] = ((actor, workers[source]),)
        for source in sorted(set(range(len(costs))) - set(grouped)):
            # Data parallel: as many actors as the workers need, with about the same number in each.
            degree = math.ceil(workers[source] / max(1, self.room(costs[source])))
            each = [workers[source] // degree + (number < workers[source] % degree) for number in range(degree)]
            places[source] = tuple((len(members) + number, there) for number, there in enumerate(each))
            members += [[source]] * degree
            most += each
        if lone is not None:
            actor = self._host_for_lone(workers[lone], held[lone], self._actor_bytes(len(members), places), most)
            places[lone] = ((actor, workers[lone]),)
            if actor == len(members):
                members, most = [*members, []], [*most, 0]
            members[actor] = sorted([*members[actor], lone])
            most[actor] += workers[lone]
        cpus = tuple(cost.cpu_share * n for cost, n in zip(costs, busy, strict=True))
        taken = tuple(self._actor_bytes(len(members), places))
        return _Draft(rate, workers, tuple(places), tuple(map(tuple, members)), tuple(most), taken, cpus)

    def _actor_bytes(self, count: int, places: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
        """Return the bytes of each of so many actors."""
        held = [self.resources.actor_bytes] * count
        for cost, where in zip(self.costs, places, strict=True):
            for actor, there in where:
                held[actor] += cost.held_bytes(there)
        return held

    def _host_for_lone(self, workers: int, own: int, held: Sequence[int], most: Sequence[int]) -> int:
        """Return the actor for the only source that would share one: the emptiest with room, or a new one."""
        limit = self.resources.bytes_per_actor
        roomy = [
            actor
            for actor, there in enumerate(most)
            if there + workers <= self.resources.per_actor and (limit is None or held[actor] + own <= limit)
        ]
        return min(roomy, key=lambda actor: (most[actor], actor), default=len(most))

    def _share_actors(
        self, grouped: Sequence[int], busy: Sequence[float], held: Sequence[int], grouped_below: float
    ) -> tuple[list[list[int]], list[int]]:
        """Put sources into as few shared actors as hold them; return the sources and the busy workers of each actor."""
        if not grouped:
            return [], []
        resources = self.resources
        largest = TINY if grouped_below <= TINY else float(math.ceil(grouped_below))
        # Largest first into the emptiest, no actor exceeds the mean by more than one source: this many suffice.
        count = 1 + int(sum(busy[s] for s in grouped) / max(resources.per_actor - largest, TINY))
        limit = None if resources.bytes_per_actor is None else resources.bytes_per_actor - resources.actor_bytes
        while True:
            members = _deal_out(grouped, busy, held, count, limit)
            if limit is None or count >= len(grouped) or all(sum(held[s] for s in one) <= limit for one in members):
                break
            count += 1  # more actors, with fewer files open in each
        members = [sorted(one) for one in members if one]
        return members, [whole_workers(sum(busy[s] for s in one)) for one in members]

    # Refusals: which resource is missing, how much of it, which source needs it, what to do.

    def check_least(self) -> None:
        """Refuse resources that cannot hold one worker of every source."""
        resources = self.resources
        paid = resources.cpus - resources.loader_cpus
        if resources.loader_cpus <= 0:
            raise SpecError(
                f"{resources.cpus:g} CPUs are given and the planner and {resources.constructors} constructors take "
                f"{paid:g}: at least {paid + 1 - resources.cpus:g} more are needed for one worker. Give "
                f"{paid + 1:g} CPUs or fewer constructors."
            )
        for cost in self.costs:
            if self.room(cost) < 1:
                need, limit = resources.actor_bytes + cost.held_bytes(1), resources.bytes_per_actor or 0
                raise SpecError(
                    f"source {cost.name!r} needs {_written_bytes(need)} in an actor with one worker, and an actor may "
                    f"hold {_written_bytes(limit)}: {_written_bytes(need - limit)} are missing. Raise bytes_per_actor, "
                    "or lower the source's read buffer."
                )
        draft = self._draft(0.0, self._groupings()[-1])
        if draft.bytes > resources.loader_bytes:
            raise self._bytes_missing(draft, "every source open once, with one worker")

    def shortfall(self, asked: float, reached: float) -> SpecError:
        """Return the error for a rate that the resources do not reach: which one is short, and by how much."""
        resources, costs, what = self.resources, self.costs, f"{asked:g} samples/s"
        own = [whole_workers(asked * load) for load in self.loads]
        most = _first_largest([count - self.cap(cost) for count, cost in zip(own, costs, strict=True)])
        at_best, cap = f"At most {reached:,.4g} samples/s are possible.", self.cap(costs[most])
        if own[most] > cap:
            return SpecError(
                f"{what} need {own[most]} workers of source {costs[most].name!r} "
                f"({1000 * costs[most].transform_s:.3g} ms a sample), and it may have {cap}: {own[most] - cap} are "
                f"missing. {at_best} Raise per_source, or draw it less often."
            )
        workers = self.workers(asked)
        if asked * self.handover > 1:
            return SpecError(
                f"{what} cannot be handed over: a sample takes {self.handover * 1e6:,.0f} µs of planning and handing "
                f"over, which is {asked * self.handover:.3g} s of work in a second. {at_best} Use fewer, larger "
                "samples."
            )
        if resources.decoders is not None and asked * self.decoding > resources.decoders:
            return SpecError(
                f"{what} keep {asked * self.decoding:.3g} threads busy with decoding behind the hand-over, and the "
                f"constructors have {resources.decoders:g}. {at_best} Give them more threads, or decode in the loaders."
            )
        if resources.workers is not None and sum(self.busy(asked)) > resources.workers + 1e-9:
            short = sum(self.busy(asked)) - resources.workers
            return SpecError(
                f"{what} need {short:.3g} workers more than the {resources.workers:g} that all sources may have "
                f"together. {at_best} Raise budget.cpus, or ask for less."
            )
        needed = sum(self.cpus(asked)) + (asked * self.decoding if resources.one_host else 0.0)
        if needed > resources.loader_cpus + 1e-9:
            paid = resources.cpus - resources.loader_cpus
            most = _first_largest([cost.cpu_share * n for cost, n in zip(costs, workers, strict=True)])
            return SpecError(
                f"{what} need {needed:.4g} CPUs for workers, and beside the planner and the constructors there are "
                f"{resources.loader_cpus:g}: {needed - resources.loader_cpus:.3g} are missing; source "
                f"{costs[most].name!r} alone needs {workers[most]} workers. {at_best} Give "
                f"{math.ceil(needed + paid - 1e-9)} CPUs, or ask for less."
            )
        return self._bytes_missing(self._draft(asked, self._groupings()[-1]), what, f"{at_best} ")

    def _bytes_missing(self, draft: _Draft, what: str, at_best: str = "") -> SpecError:
        held = [cost.held_bytes(n) for cost, n in zip(self.costs, draft.workers, strict=True)]
        most, there = _first_largest(held), self.resources.loader_bytes
        return SpecError(
            f"{what}: the actors take {_written_bytes(draft.bytes)}, and beside the planner and the constructors there "
            f"are {_written_bytes(max(there, 0))}: {_written_bytes(draft.bytes - there)} are missing; source "
            f"{self.costs[most].name!r} takes most, {_written_bytes(held[most])}. {at_best}Give "
            f"{_written_bytes(draft.bytes + self.resources.bytes - there)}, lower the read buffers, or draw fewer "
            "sources at a time."
        )


def _check_arguments(
    costs: Sequence[SourceCost],
    shares: Sequence[float],
    resources: Resources,
    samples_per_s: float | None,
    cluster_size: int,
) -> None:
    if not costs or len(costs) != len(shares):
        raise SpecError(f"{len(costs)} costs and {len(shares)} shares: each source needs both. Profile them all.")
    wrong = next((n for n, share in enumerate(shares) if not (share >= 0 and math.isfinite(share))), None)
    if wrong is not None:
        raise SpecError(f"the share of source {costs[wrong].name!r} is {shares[wrong]}; give a number of 0 or more.")
    if sum(shares) <= 0:
        raise SpecError("no source has a share of the mixture; nothing would be drawn. Give one a weight above 0.")
    if samples_per_s is not None and not samples_per_s > 0:
        raise SpecError(f"samples_per_s is {samples_per_s:g}; no fleet would be needed. Give a rate above 0.")
    counts = {"cluster_size": cluster_size, "per_source": resources.per_source, "per_actor": resources.per_actor}
    for name, value in counts.items():
        if value < 1:
            raise SpecError(f"{name} is {value}; no source could have a worker. Give 1 or more.")


def whole_workers(busy: float) -> int:
    """Return how many workers a source needs that keeps so many busy; at least one.

    Example:
        >>> [whole_workers(busy) for busy in (0.0, 1.0, 1.0000000001, 1.1)]
        [1, 1, 1, 2]
    """
    return max(1, math.ceil(busy - _ROUNDING))


def _first_largest(values: Sequence[float]) -> int:
    return values.index(max(values))


def _largest(possible: Callable[[float], bool], most: float) -> float:
    """Return the largest possible number up to `most`, given that all smaller ones are possible too (bisection)."""
    if possible(most):
        return most
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low


def _deal_out(
    grouped: Sequence[int], busy: Sequence[float], held: Sequence[int], count: int, limit: int | None
) -> list[list[int]]:
    """Divide sources among actors so that work and bytes are about even."""
    work = sum(busy[s] for s in grouped) or 1.0

    def weight(source: int) -> float:
        return max(busy[source] / work, 0.0 if limit is None else held[source] / (limit * count or 1))

    members: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, actor) for actor in range(count)]
    for source in sorted(grouped, key=lambda s: (-weight(s), s)):
        filled, actor = heapq.heappop(heap)
        members[actor].append(source)
        heapq.heappush(heap, (filled + weight(source), actor))
    return members


def _with_reasons(draft: _Draft, limit: str, search: _Search) -> Partition:
    """Return a fleet with the reasons for it."""
    costs, resources = search.costs, search.resources
    ratios = levels(costs, search.shares, search.cluster_size)
    allotments = [_allot(draft, source, search, ratios[source]) for source in range(len(costs))]
    actors = [
        Actor(
            number=n,
            sources=tuple(costs[s].name for s in sources),
            source_workers=(here := tuple(dict(draft.places[s])[n] for s in sources)),
            workers=workers,
            cpus=sum(draft.source_cpus[s] * w / draft.workers[s] for s, w in zip(sources, here, strict=True)),
            bytes=held,
        )
        for n, (sources, workers, held) in enumerate(
            zip(draft.actor_sources, draft.actor_workers, draft.actor_bytes, strict=True)
        )
    ]
    decoding = draft.rate * search.decoding if resources.one_host else 0.0
    return Partition(
        allotments=tuple(allotments),
        actors=tuple(actors),
        samples_per_s=draft.rate,
        bytes=resources.bytes - resources.loader_bytes + draft.bytes,
        cpus=min(resources.cpus, resources.cpus - resources.loader_cpus + sum(draft.source_cpus) + decoding),
        block_cpus=resources.loader_cpus / max(sum(draft.actor_workers), 1),
        cluster_size=search.cluster_size,
        limit=limit,
    )


def _allot(draft: _Draft, source: int, search: _Search, level: float) -> Allotment:
    cost, places, workers = search.costs[source], draft.places[source], draft.workers[source]
    share = search.shares[source]
    busy = draft.rate * search.loads[source]
    others = len(draft.actor_sources[places[0][0]]) - 1
    kind: Parallelism = "data" if len(places) > 1 else "source" if others else "worker"
    need = (
        f"{100 * share:.3g} % of {draft.rate:,.4g} samples/s at {1000 * cost.transform_s:.3g} ms each keep "
        f"{busy:.3g} workers busy"
        if share > 0
        else "it is not drawn"
    )
    if share > 0 and cost.cpu_share < _WAITING:
        need += f", {100 * cost.cpu_share:.2g} % of the time with a CPU ({draft.source_cpus[source]:.2g} in all)"
    if kind == "data":
        room = search.room(cost)
        bound = "may have" if room == search.resources.per_actor else "has memory for"
        what = f"{workers} of them are more than the {room} that one actor {bound}, so {len(places)} actors hold it"
    elif kind == "source":
        turns = "it takes turns with" if busy < TINY else "it shares an actor with"
        what = f"{turns} {others} other source{'' if others == 1 else 's'} in actor {places[0][0]}"
    else:
        what = f"{workers} worker{'' if workers == 1 else 's'} in an actor of its own"
    return Allotment(
        name=cost.name,
        cluster=search.clusters[source],
        level=level,
        busy=busy,
        workers=workers,
        cpus=draft.source_cpus[source],
        actors=tuple(actor for actor, _ in places),
        workers_per_actor=tuple(there for _, there in places),
        parallelism=kind,
        why=f"{need}: {what}",
    )


def _written_bytes(value: float) -> str:
    """Format a number of bytes.

    Example:
        >>> _written_bytes(3 << 30), _written_bytes(1500)
        ('3.22 GB', '1.5 kB')
    """
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"
