"""Mixture-driven scaling (the paper's 5.2): how many workers each source should have, from how the mixture moves.

`decide` is a pure function of the weights of past intervals, the schedule of the coming ones, measured costs and the
fleet; it returns the workers of each source and the reasons. The scaler calls it once per interval and applies it.

Three things move a source's workers:

- Past demand. If the moving average needs more workers than there are in each of the last `patience` intervals, the
  source is scaled up. If it needs fewer than `down` of them for as long, it is scaled down.
- Coming demand. The schedule is known, so workers for an interval within `lookahead` are added ahead of it, at once
  and without patience; and a source that needs its workers again within `lookahead` is not scaled down.
- Limits. CPUs and bytes are never exceeded. If all wishes do not fit, idle workers are given back first, and the rest
  goes to the largest shortfall: to what is needed next before what is needed later.

Rules of this file:
- No flapping. A source is scaled up to `headroom` times its demand, and again only when the demand exceeds its
  workers. It is scaled down only when `slack` times its demand would still leave a worker idle. So constant weights
  change a source at most once while the measured costs vary by less than these margins.
- A source that is drawn, or will be within `lookahead`, keeps a worker. One that was not drawn in the window and is not
  coming is drained: no worker.
- A source's only worker counts the part of a CPU that it keeps busy, as in `partition`: hundreds of tiny sources share
  a few CPUs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from overlord.errors import SpecError
from overlord.scaling.partition import whole_workers
from overlord.scaling.profiles import SourceCost, demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The current workers, the rate that trainers need, and the limits of the fleet."""

    workers: tuple[int, ...]
    """Of each source."""
    samples_per_s: float
    """The rate that trainers need, all sources together."""
    cpus: int
    """Workers at most; may exceed the number of CPUs where sources wait more than they compute."""
    bytes: int
    """Bytes that files and buffers of all sources may take."""
    per_source: int = 16
    """Workers of one source at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """When workers are added and removed; the unit of time is the interval between two decisions."""

    window: int = 4
    """Intervals of the moving average."""
    patience: int = 3
    """Intervals in a row that must agree before a past demand changes anything."""
    up: float = 1.0
    """Demand over workers above which there are too few."""
    down: float = 0.6
    """Demand over workers below which there are too many."""
    headroom: float = 1.2
    """Workers for each one that is kept busy, when their number is chosen."""
    lookahead: int = 4
    """Intervals of the schedule that are looked at."""
    slack: float = 1.1
    """By what factor the demand, or the gain of a change, must differ to count."""

    interval_s: float = 1.0
    """Seconds between two decisions, in a running service."""

    def __post_init__(self) -> None:
        """Refuse settings that would flap."""
        if not 0.01 <= self.interval_s < float("inf"):
            raise SpecError(
                f"interval_s is {self.interval_s}; decisions cannot be made so often. Give 0.01 seconds or more."
            )
        for name in ("window", "patience"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} is {getattr(self, name)}; no interval would be looked at. Give 1 or more.")
        if self.lookahead < 0:
            raise SpecError(f"lookahead is {self.lookahead}; give 0 to look at the past alone, or more.")
        if not 0 < self.down * self.headroom < self.up <= self.headroom:
            raise SpecError(
                f"up is {self.up:g}, down {self.down:g}, headroom {self.headroom:g}: what was just scaled would be "
                "scaled back. down x headroom must lie below up, and up not above headroom."
            )


class Scaled(NamedTuple):
    """A change of one source's workers."""

    source: str
    before: int
    after: int
    why: str


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers each source should have from now on."""

    workers: tuple[int, ...]
    changes: tuple[Scaled, ...] = ()


class _Need(NamedTuple):
    """The demand of one source, in busy workers."""

    past: tuple[float, ...]
    """Moving averages of the last `patience` intervals, the newest last."""
    near: float
    """Now and in the next interval."""
    far: float
    """At most, from now to the end of the lookahead."""
    coming: float
    """At most, of the schedule alone."""
    first: int
    """Intervals until the schedule first asks for more workers than there are; the whole lookahead if it never does."""
    alive: bool
    """Whether it is drawn within the window or the lookahead."""


def decide(
    history: Sequence[Sequence[float]],
    coming: Sequence[Sequence[float]],
    costs: Sequence[SourceCost],
    fleet: Fleet,
    settings: Scaling | None = None,
) -> Decision:
    """Return how many workers each source should have.

    Args:
        history: Share of each source in the samples of each past interval, the oldest first.
        coming: The same of the next intervals, by the schedule; empty where it is not known (weights that are learned).
        costs: What each source costs, as measured.
        fleet: What there is now.
        settings: When to change it.

    Example:
        >>> costs = [SourceCost(name="web", transform_s=0.001), SourceCost(name="photos", transform_s=0.04)]
        >>> fleet = Fleet(workers=(1, 1), samples_per_s=500.0, cpus=16, bytes=1 << 30)
        >>> decide([[1.0, 0.0]], [[1.0, 0.0], [0.6, 0.4]], costs, fleet).changes[0].why
        'the schedule comes to 8 busy workers within 2 intervals'
    """
    settings = settings or Scaling()
    needs = _needs(history, coming[: settings.lookahead], costs, fleet, settings)
    wanted = [_wish(before, need, fleet, settings) for before, need in zip(fleet.workers, needs, strict=True)]
    wishes, reasons = [wish for wish, _ in wanted], [why for _, why in wanted]
    if not _within(wishes, needs, costs, fleet):
        wishes, reasons = _fill(wishes, reasons, needs, costs, fleet, settings)
    changes = (
        Scaled(cost.name, before, after, why)
        for cost, before, after, why in zip(costs, fleet.workers, wishes, reasons, strict=True)
        if before != after
    )
    return Decision(tuple(wishes), tuple(changes))


def _needs(
    history: Sequence[Sequence[float]],
    coming: Sequence[Sequence[float]],
    costs: Sequence[SourceCost],
    fleet: Fleet,
    settings: Scaling,
) -> list[_Need]:
    """Return the past, present and coming demand of each source."""
    averages: list[list[float]] = []
    for end in range(max(len(history) - settings.patience, 0) + 1, len(history) + 1):
        window = history[max(end - settings.window, 0) : end]
        mean = [sum(column) / len(window) for column in zip(*window, strict=True)]
        averages.append(demand(mean, costs, fleet.samples_per_s))
    soon = [demand(shares, costs, fleet.samples_per_s) for shares in coming]
    now = demand(history[-1], costs, fleet.samples_per_s) if history else None
    seen = history[-max(settings.window, settings.patience) :]
    needs: list[_Need] = []
    for s in range(len(costs)):
        past = tuple(average[s] for average in averages)
        ahead = max((one[s] for one in soon), default=0.0)
        # Where the schedule is not known, the moving average is the best guess of what comes next.
        near = max(soon[0][s], now[s] if now else 0.0) if soon else (past[-1] if past else 0.0)
        young = len(seen) < max(settings.window, settings.patience)  # too early to call it undrawn
        alive = ahead > 0 or young or any(shares[s] > 0 for shares in seen)
        enough = settings.up * fleet.workers[s]
        first = next((number for number, one in enumerate(soon, 1) if one[s] > enough), len(soon))
        needs.append(_Need(past, near, max((near, ahead, *past)), ahead, first, alive))
    return needs


def _wish(before: int, need: _Need, fleet: Fleet, settings: Scaling) -> tuple[int, str]:
    """Return how many workers a source should have if it were alone, and why."""
    least = 1 if need.alive else 0

    def sized(busy: float) -> int:
        return max(least, min(fleet.per_source, whole_workers(busy * settings.headroom)))

    if not need.alive:
        return 0, "it is not drawn and not coming"
    if before > fleet.per_source:
        return fleet.per_source, "a source may not have more (per_source)"
    if need.coming > settings.up * before:
        why = f"the schedule comes to {need.coming:.3g} busy workers within {need.first} intervals"
        return max(before, sized(need.coming)), why
    # Past demand needs `patience` intervals that agree: above `up` to add workers, below `down` to remove some, and
    # then only if neither the present nor the schedule needs them.
    held = len(need.past) >= settings.patience
    if held and all(busy > settings.up * before for busy in need.past):
        busy = need.past[-1]
        return max(before, sized(max(busy, need.coming))), f"{busy:.3g} workers' work for {settings.patience} intervals"
    idle = held and all(busy < settings.down * before for busy in need.past) and need.far < settings.down * before
    if idle and sized(need.far * settings.slack) < before:
        why = f"no more than {need.far:.3g} were busy for {settings.patience} intervals, or will be soon"
        return sized(need.far), why
    return max(before, least), "it is drawn, or will be"


def cpus_used(workers: Sequence[int], busy: Sequence[float]) -> float:
    """Return the CPUs of a fleet: one per worker; the only worker of a source counts as much as it is busy.

    Example:
        >>> cpus_used([3, 1, 1, 0], [2.5, 0.01, 1.7, 0.0])
        4.01
    """
    return sum(n if n > 1 else min(n, load) for n, load in zip(workers, busy, strict=True))


def bytes_used(workers: Sequence[int], costs: Sequence[SourceCost]) -> int:
    """Return the bytes of files and buffers of a fleet; a source without workers has nothing open."""
    return sum(cost.held_bytes(n) for n, cost in zip(workers, costs, strict=True) if n)


def _within(workers: Sequence[int], needs: Sequence[_Need], costs: Sequence[SourceCost], fleet: Fleet) -> bool:
    busy = [need.far for need in needs]
    return cpus_used(workers, busy) <= fleet.cpus and bytes_used(workers, costs) <= fleet.bytes


def _fill(
    wishes: Sequence[int],
    reasons: Sequence[str],
    needs: Sequence[_Need],
    costs: Sequence[SourceCost],
    fleet: Fleet,
    settings: Scaling,
) -> tuple[list[int], list[str]]:
    """Divide the fleet where all wishes do not fit: first what is needed next, then what is needed later.

    Three candidates, in order of preference: keep the workers as they are; take away only idle ones; divide anew. The
    first one is taken that is within the limits and lets the slowest source lose less than a factor of `slack` against
    dividing anew. Otherwise sources that are all short would exchange workers for ever as measured costs vary.
    """
    least = [1 if need.alive else 0 for need in needs]
    sized = [whole_workers(need.near * settings.headroom) for need in needs]
    kept = [max(n, low) if low else 0 for n, low in zip(fleet.workers, least, strict=True)]
    trimmed = [min(n, fleet.per_source, most) for n, most in zip(kept, sized, strict=True)]  # without idle workers
    anew = _pour(least, needs, costs, fleet, settings)
    candidates = [one for one in (kept, trimmed) if _within(one, needs, costs, fleet) and max(one) <= fleet.per_source]
    candidates = [one if one is kept else _pour(one, needs, costs, fleet, settings) for one in candidates]
    found = next((one for one in candidates if _gain(anew, one, needs) < settings.slack), anew)
    whys: list[str] = []
    for before, after, wish, why in zip(fleet.workers, found, wishes, reasons, strict=True):
        if after < before and wish >= before:
            whys.append("others need it more, and there is no more")
        elif after < wish:
            whys.append(f"{why}; there is no more than this")
        else:
            whys.append(why if after == wish else "others gave back what they did not need")
    return found, whys


def _pour(
    base: Sequence[int], needs: Sequence[_Need], costs: Sequence[SourceCost], fleet: Fleet, settings: Scaling
) -> list[int]:
    """Add workers where the shortfall is largest, until every source has enough or the limits are reached."""
    found = list(base)
    # Reserve a little more than is used, so that varying costs do not make the fleet too large.
    free_cpus = fleet.cpus - cpus_used(found, [need.far * settings.headroom for need in needs])
    free_bytes = fleet.bytes - bytes_used(found, costs)
    for busy in ([need.near for need in needs], [need.far for need in needs]):
        caps = [min(fleet.per_source, whole_workers(load * settings.headroom)) for load in busy]
        heap = [(n / max(busy[s], 1e-12), s) for s, n in enumerate(found) if n and n < caps[s]]
        heapq.heapify(heap)
        while heap and free_cpus > 0:
            _, s = heapq.heappop(heap)
            # From the second worker on, every worker of a source counts as a whole CPU.
            paid = 1.0 if found[s] > 1 else 2.0 - min(1.0, needs[s].far * settings.headroom)
            if paid > free_cpus or costs[s].buffer_bytes > free_bytes:
                continue
            free_cpus -= paid
            free_bytes -= costs[s].buffer_bytes
            found[s] += 1
            if found[s] < caps[s]:
                heapq.heappush(heap, (found[s] / max(busy[s], 1e-12), s))
    return found


def _gain(other: Sequence[int], workers: Sequence[int], needs: Sequence[_Need]) -> float:
    """Return the factor by which the slowest source is faster with other workers, now or later."""
    near, far = [need.near for need in needs], [need.far for need in needs]
    return max(_slowest(other, busy) / _slowest(workers, busy) for busy in (near, far))


def _slowest(workers: Sequence[int], busy: Sequence[float]) -> float:
    """Return how much of its demand the slowest source can meet, at most all of it."""
    return min((min(1.0, n / load) for n, load in zip(workers, busy, strict=True) if load > 0), default=1.0) or 1e-9


# The bottleneck: the source that constructors wait for most, and how many workers it needs.


WAITING = 0.02
"""Trainers that wait less than this share of an interval have no bottleneck."""
_HARDLY = 0.01
"""A source that was waited for less than this share of an interval is not the bottleneck."""
_LEAST_CPU_SHARE = 0.05
"""Below this share of computing, what a worker computes is not what limits their number."""
_MOST_WAITED = 0.9
"""Caps the share of waiting in the estimate: a source gets at most ten times its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """How long one source was waited for in an interval."""

    source: str
    waited_s: float
    """Seconds that planner and constructors were held up by it."""
    demand: float
    """Workers that it would keep busy at the rate trainers want."""
    workers: int
    cpu_share: float = 1.0
    """Share of its workers' time that they compute; the rest they wait for storage."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The source that holds up the trainers."""

    source: str
    workers: int
    needs: int
    waited: float
    """Share of the interval that was spent waiting for it."""

    def __str__(self) -> str:
        """Return the sentence for status and logs."""
        has = f"{self.workers} worker{'' if self.workers == 1 else 's'}"
        return f"source {self.source!r} is the bottleneck: it has {has} and needs {self.needs}"


def find_bottleneck(
    sources: Sequence[Waited],
    interval_s: float,
    trainer_wait: float,
    *,
    headroom: float = 1.2,
    spare_cpus: float = math.inf,
) -> Bottleneck | None:
    """Return the source that holds up the trainers, or None; also where more workers would not help it.

    A source that was waited for a share f of the time delivered in the rest of it what was wanted in all of it, so it
    needs 1 / (1 - f) times its workers; its demand with headroom, if that is more; and one more than it has anyway.
    But no more than can compute at once on the CPUs that are not in use.

    Args:
        sources: How long each was waited for.
        interval_s: In how many seconds.
        trainer_wait: The share of them that trainers waited for their batches.
        headroom: As in `Scaling`.
        spare_cpus: CPUs of the loaders' hosts that more workers could use; 0 where these are short of anything else.

    Example:
        >>> slow = Waited(source="photos", waited_s=5.0, demand=6.4, workers=4)
        >>> str(find_bottleneck([slow], 10.0, 0.5))
        "source 'photos' is the bottleneck: it has 4 workers and needs 8"
    """
    if trainer_wait < WAITING or not sources or spare_cpus <= 0:
        return None
    worst = max(sources, key=lambda one: one.waited_s)  # the first of equals, in the order of the job
    waited = min(worst.waited_s / max(interval_s, 1e-9), 1.0)
    if waited < _HARDLY:
        return None  # trainers wait for something else: planning, hand-over, the network
    slowed = max(worst.workers, 1) / (1 - min(waited, _MOST_WAITED))
    needs = max(worst.workers + 1, math.ceil(slowed - 1e-9), math.ceil(worst.demand * headroom - 1e-9))
    further = spare_cpus / max(worst.cpu_share, _LEAST_CPU_SHARE)
    if further < needs - worst.workers:
        needs = worst.workers + max(1, math.floor(further))
    return Bottleneck(worst.source, worst.workers, needs, waited)
