"""A feed on a simulated clock: sources with queues and workers, CPUs they share, a trainer that takes steps at a pace.

The samples of a step are drawn by the shares of its step. Their work waits in the queue of its source, the oldest step
first, and each worker takes a sample at a time. Workers that are busy share the CPUs: where there are more of them than
CPUs, those of the oldest step go first, and the others are slower. A step is there when all its samples are. Loaders
work on the step in hand and `prefetch` steps after it. The clock goes from one event to the next, in ticks where CPUs
are shared or workers change; random numbers are seeded.

A change of workers takes time: a new worker produces after `start_s`, in a new host after `host_start_s`; one that is
given back holds its memory for `drain_s` more, and what replaces it starts only then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from overlord.scaling.dealing import Deal, deal
from overlord.scaling.profiles import SourceCost

Scale = Callable[[int, tuple[int, ...]], Sequence[int]]
"""Told (the step that is being taken, the workers of each source), returns the workers there should be."""

_DONE_S = 1e-7
"""Less work than this is rounding."""


@dataclass(frozen=True)
class World:
    """What is the same for every setup."""

    costs: tuple[SourceCost, ...]
    shares: np.ndarray
    """Of each step and source."""
    samples: float
    """Of a step."""
    step_s: float | np.ndarray
    """Seconds that the trainer takes for a step; of each step, where they differ."""
    cpus: float
    """CPUs of the workers, without those of planner and constructors."""
    prefetch: int = 2
    interval: int = 2
    """Steps between two decisions."""
    start_s: float = 1.5
    host_start_s: float = 5.0
    drain_s: float = 1.0
    tick_s: float = 0.01
    per_actor: int = 8
    actor_bytes: int = 64 << 20
    seed: int = 0

    def work(self) -> np.ndarray:
        """Return the seconds of work of each step and source: whole samples, which differ by half their mean cost."""
        drawn = np.diff(np.floor(np.cumsum(self.shares * self.samples, axis=0) + 1e-9), axis=0, prepend=0)
        noise = np.random.default_rng(self.seed).standard_normal(drawn.shape)
        mean = np.array([cost.transform_s for cost in self.costs])
        return mean * np.maximum(drawn + 0.5 * np.sqrt(drawn) * noise, 0.5 * drawn)


@dataclass
class Outcome:
    """What one setup gave."""

    waits: list[float] = field(default_factory=list)
    """Seconds that the trainer waited for each step; 0 for the first one, which is the start."""
    worker_s: float = 0.0
    """Seconds that workers were there."""
    used_cpu_s: float = 0.0
    """Seconds of CPU that they used."""
    peak_bytes: int = 0
    peak_workers: int = 0
    events: int = 0
    """Changes of one source's workers."""

    seconds: float = 0.0
    """From the first step, which is the start, to the end of the last."""

    @property
    def stall_s(self) -> float:
        """Seconds that the trainer waited, all in all."""
        return sum(self.waits)

    @property
    def steps_per_s(self) -> float:
        """Steps that the trainer took in a second, waits included."""
        return len(self.waits) / max(self.seconds, 1e-12)


class Loaders:
    """The workers of a setup: which produce, which start, which drain, and the hosts they stand in."""

    def __init__(self, world: World, workers: Sequence[int]) -> None:
        self.world = world
        self.workers = tuple(workers)
        self.active = np.array(workers, dtype=float)
        self._coming: list[tuple[float, int, int]] = []  # (when, source, how many more produce)
        self._held: list[tuple[float, int]] = []  # (until when, bytes that drained workers still hold)
        self._late_bytes: list[tuple[float, int]] = []  # (from when, bytes of workers that start late)
        self.hosts: dict[int, int] = {}
        self.dealt = self._deal([()] * len(workers))

    def change(self, now: float, workers: Sequence[int]) -> int:
        """Change the workers; return how many sources changed."""
        before, changed = self.workers, 0
        old = self.dealt
        self.workers = tuple(workers)
        self.dealt = self._deal([old.hosts(s) for s in range(len(workers))])
        new_hosts = {host for s in range(len(workers)) for host in self.dealt.hosts(s)}
        new_hosts -= {host for s in range(len(workers)) for host in old.hosts(s)}
        drains = any(after < n for n, after in zip(before, self.workers, strict=True))
        for s, (n, after) in enumerate(zip(before, self.workers, strict=True)):
            buffer = self.world.costs[s].buffer_bytes
            changed += n != after
            if after < n:
                self._cancel(s, n - after)
                self._held.append((now + self.world.drain_s, (n - after) * buffer))
            elif after > n:
                begin = now + (self.world.drain_s if drains else 0.0)
                slow = any(host in new_hosts for host in self.dealt.hosts(s))
                ready = begin + (self.world.host_start_s if slow else self.world.start_s)
                self._coming.append((ready, s, after - n))
                if begin > now:
                    self._late_bytes.append((begin, (after - n) * buffer))
        return changed

    @property
    def changing(self) -> bool:
        """Whether workers start or drain."""
        return bool(self._coming or self._held or self._late_bytes)

    def at(self, now: float) -> np.ndarray:
        """Return how many workers of each source produce."""
        for ready, source, count in self._coming:
            if ready <= now:
                self.active[source] += count
        self._coming = [one for one in self._coming if one[0] > now]
        self._held = [one for one in self._held if one[0] > now]
        self._late_bytes = [one for one in self._late_bytes if one[0] > now]
        return self.active

    def bytes(self) -> int:
        """Return what hosts, open files and buffers take now."""
        costs = self.world.costs
        taken = len(self.hosts) * self.world.actor_bytes + sum(size for _, size in self._held)
        taken -= sum(size for _, size in self._late_bytes)
        for cost, places, n in zip(costs, self.dealt.places, self.workers, strict=True):
            taken += n * cost.buffer_bytes + (len(places) * cost.file_bytes if n else 0)
        return taken

    def _cancel(self, source: int, count: int) -> None:
        """Take workers away: first such as have not begun."""
        for number, (ready, of, coming) in enumerate(self._coming):
            if of == source and count:
                fewer = min(count, coming)
                self._coming[number] = (ready, of, coming - fewer)
                count -= fewer
        self.active[source] -= count

    def _deal(self, now: Sequence[Sequence[int]]) -> Deal:
        """Deal the workers to hosts; start as many further ones as that needs, and let empty ones go."""
        world = self.world
        mean = world.shares.mean(axis=0) * world.samples / max(float(np.mean(world.step_s)), 1e-9)
        loads = [float(min(1.0, rate * cost.transform_s)) for rate, cost in zip(mean, world.costs, strict=True)]
        while True:
            found = deal(self.workers, now, self.hosts, world.per_actor, loads=loads)
            if not found.further:
                break
            first = max(self.hosts, default=-1) + 1
            self.hosts.update({first + n: world.per_actor for n in range(found.further)})
        for host in found.drained:
            del self.hosts[host]
        return found


def simulate(world: World, workers: Sequence[int], scale: Scale | None = None) -> Outcome:
    """Let a trainer take all steps; `scale` is asked once an interval."""
    work = world.work()
    steps, depth = len(work), world.prefetch + 1
    step_s = np.broadcast_to(world.step_s, (steps,)).tolist()
    padded = np.concatenate([work, np.zeros((depth, work.shape[1]))])
    queue = padded[:depth].copy()
    mean = np.array([cost.transform_s for cost in world.costs])
    part = np.array([cost.cpu_share for cost in world.costs])
    loaders, out = Loaders(world, workers), Outcome()
    taken, now, began = 0, 0.0, 0.0
    free_at: float | None = None  # when the trainer asks for its next step; None until the first is there
    out.peak_bytes = loaders.bytes()
    while taken < steps:
        # Go on to the next moment at which a rate may change: the first step in the queue is ready, the trainer is
        # free, or, where sources share CPUs or workers come and go, a tick is over.
        waiting = queue.sum(axis=0)
        # A sample is one worker's: the last few keep no more workers busy than there are samples.
        rate = np.minimum(loaders.at(now), np.ceil(waiting / mean - 1e-9))
        shared = float(rate @ part) > world.cpus
        if shared:
            rate = _oldest_first(queue, rate, part, world.cpus)
        first = queue[0] > 0
        with np.errstate(divide="ignore"):  # a source that no worker has time for is not ready before a tick is over
            ready_at = now + float((queue[0, first] / rate[first]).max(initial=0.0))
        moments = [at for at in (ready_at, free_at) if at is not None and at > now]
        then = min(moments) if not shared and not loaders.changing else min(*moments, now + world.tick_s)
        able = np.minimum(rate * (then - now), waiting)
        out.used_cpu_s += float(able @ part)
        out.worker_s += sum(loaders.workers) * (then - now)
        for row in queue:
            done = np.minimum(able, row)
            row -= done
            able -= done
        queue[queue < _DONE_S] = 0.0
        now = then
        if scale is not None:
            out.peak_bytes = max(out.peak_bytes, loaders.bytes())
        out.peak_workers = max(out.peak_workers, sum(loaders.workers))
        while taken < steps and (free_at is None or now >= free_at) and not queue[0].any():
            out.waits.append(0.0 if free_at is None else now - free_at)
            began = now if free_at is None else began
            free_at = now + step_s[taken]
            taken += 1
            queue = np.concatenate([queue[1:], padded[taken + depth - 1 : taken + depth]])
            if scale is not None and taken % world.interval == 0:
                out.events += loaders.change(now, scale(taken, loaders.workers))
    out.seconds = (now if free_at is None else free_at) - began
    return out


def _oldest_first(queue: np.ndarray, rate: np.ndarray, part: np.ndarray, cpus: float) -> np.ndarray:
    """Return the rates of sources where CPUs are short: those that hold up the oldest step have them first."""
    oldest = np.argmax(queue > 0, axis=0)
    out = np.zeros_like(rate)
    for row in range(len(queue)):
        here = np.where((oldest == row) & (queue[row] > 0), rate, 0.0)
        wanted = float(here @ part)
        out += here * min(1.0, cpus / wanted) if wanted > 0 else here
        cpus = max(cpus - wanted, 0.0)
    return out
