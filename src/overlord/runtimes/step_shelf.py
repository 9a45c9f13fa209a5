"""The steps of one host on their way to its clients: planned, gathered, and built in shared memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from overlord.core.plan import LoadingPlan
from overlord.roles.data_constructor import DataConstructor
from overlord.roles.views import ENCODER, StepHeader
from overlord.runtimes.shared_memory import Arena, Segment
from overlord.runtimes.wire import to_text
from overlord.transforms.microbatches.per_microbatch import PackedMicrobatch
from overlord.transforms.microbatches.step_samples import StepSamples


@dataclass(frozen=True, slots=True)
class Gathered:
    """The samples of a step, as far as some ranks need them."""

    samples: StepSamples
    ranks: frozenset[int]
    unopened: set[tuple[int, int]]
    """(bucket, microbatch) of all with media that are decoded when they are packed: what does not decode is known when
    this is empty, and so is how many labels the step has."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What a host knows of the labels of a step when it has decoded all media of its own ranks."""

    plan: LoadingPlan
    ranks: frozenset[int]
    counted: int
    """Labels of the step over all ranks, as the loaders counted them."""
    lost: dict[int, int]
    """Those of samples that do not decode here."""


@dataclass(frozen=True, slots=True)
class Built:
    """A microbatch in shared memory."""

    segment: Segment
    packed: PackedMicrobatch
    plan: LoadingPlan
    views: dict[int, str]
    """What a rank is told of its view, as JSON: written before a client waits for it."""


AT_ONCE = 64
"""Microbatches that are handed over with their step at most: a message takes no more than 253 descriptors."""

Bin = tuple[int, int, int]
"""(step, bucket, microbatch)."""


class StepShelf:
    """What is there of each step. Not safe by itself: whoever uses it holds its own lock."""

    def __init__(self, constructor: DataConstructor, arena: Arena) -> None:
        self._constructor = constructor
        self._arena = arena
        self.plans: dict[int, LoadingPlan] = {}
        self.samples: dict[int, Gathered] = {}
        self.built: dict[Bin, Built] = {}
        self.labels: dict[int, int] = {}
        """Labels of each step over all ranks, once it is known which of its samples decode."""
        self.checked: dict[int, Checked] = {}
        """What is known here of steps whose other media are decoded on other hosts."""
        self._fresh: list[Bin] = []
        self._kept: dict[int, set[int]] = {}
        """What was wanted of planned steps when everything that is built was looked through."""
        self._queues: dict[tuple[int, frozenset[int]], tuple[list[Bin], int]] = {}
        """What ranks need of a step, and how much of it from the front on is built."""

    def add(self, made: Mapping[Bin, Built]) -> None:
        """Take in what was built."""
        self.built.update(made)
        self._fresh += made

    def keep(self, wanted: Mapping[int, set[int]]) -> None:
        """Drop everything but steps that some ranks want.

        This is called with every microbatch, and a step may have thousands: as long as the same is wanted, only what
        was built since is looked at.
        """
        plans, wanted_by = self.plans, self._constructor.wanted_by
        now = {step: set(ranks) for step, ranks in wanted.items() if step in plans}
        needed = {step: wanted_by(ranks, plans[step]) for step, ranks in now.items()}
        looked_at = list(self.built) if now != self._kept else self._fresh
        dropped = [k for k in looked_at if k in self.built and (k[0] not in needed or not needed[k[0]](*k[1:]))]
        for key in dropped:
            self._arena.release(self.built.pop(key).segment.number)
        if dropped or now != self._kept:
            self._queues.clear()
        self._kept, self._fresh = now, []
        for step in [s for s in self.samples if s not in wanted]:
            del self.samples[step]
        for step in [s for s in self.plans if s not in wanted]:
            del self.plans[step]
            self.labels.pop(step, None)
            self.checked.pop(step, None)

    def gathered(self, plan: LoadingPlan, samples: StepSamples, ranks: frozenset[int]) -> None:
        """Keep the samples of a step; those of more ranks come in the place of those of fewer."""
        before = self.samples.get(plan.step)
        if before is not None:  # what is packed by now is not packed again
            samples.lost |= before.samples.lost
        mine = set(self._constructor.bins_of(ranks, plan))
        unopened = samples.unopened(plan) & mine if before is None else before.unopened
        self.samples[plan.step] = Gathered(samples, ranks, unopened)
        self._settle(plan.step)

    def opened(self, step: int, place: tuple[int, int]) -> None:
        """Note that a microbatch was packed, with all that was wrong with its media."""
        if step in self.samples:
            self.samples[step].unopened.discard(place)
            self._settle(step)

    def _settle(self, step: int) -> None:
        plan, gathered = self.plans.get(step), self.samples[step]
        if plan is None or gathered.unopened:
            return
        samples, ranks = gathered.samples, gathered.ranks
        if samples.late and len(ranks) < plan.mesh.world_size:
            self.checked[step] = Checked(plan, ranks, samples.counted, dict(samples.lost))
        else:
            self.labels.setdefault(step, samples.labels)

    def next_missing(self, step: int, ranks: set[int], busy: Collection[Bin] = ()) -> Bin | None:
        """Return the first that is neither built nor being built: what ranks want, then what the labels wait for."""
        key = (step, frozenset(ranks))
        bins, at = self._queues.get(key) or (
            [(step, *b) for b in self._constructor.bins_of(ranks, self.plans[step])],
            0,
        )
        while at < len(bins) and bins[at] in self.built:
            at += 1
        self._queues[key] = (bins, at)
        first = next(
            (one for one in itertools.islice(bins, at, None) if one not in self.built and one not in busy), None
        )
        if first is not None or step not in self.samples or step in self.labels or not ranks:
            return first
        # Ranks that are not attached have no use for their microbatches, but what does not decode there counts.
        unopened = sorted((step, *one) for one in self.samples[step].unopened)
        return next((one for one in unopened if one not in busy), None)

    def places(self, rank: int, plan: LoadingPlan) -> tuple[StepHeader, dict[int, Bin]]:
        """Return a rank's header of a step, and where its microbatches are found that go along with it."""
        header = self._constructor.header_of(rank, plan, self.labels[plan.step])
        header = _announce(header, self.plans.get(plan.step + 1))
        bucket = self._constructor.bin_of(rank, plan, 0)
        places = {n: (plan.step, bucket[0], n) for n in range(min(header.num_microbatches, AT_ONCE)) if bucket}
        if header.encodes:
            places[ENCODER] = (plan.step, rank, ENCODER)
        return header, places

    def has_all(self, places: Mapping[int, Bin], most_bytes: int) -> bool:
        """Whether some microbatches are all built, and small enough to be held together."""
        found = [self.built.get(key) for key in places.values()]
        return sum(one.segment.capacity if one is not None else most_bytes + 1 for one in found) <= most_bytes

    def take(self, places: Mapping[int, Bin]) -> dict[int, Built]:
        """Return those of some microbatches that are built, each held once more for the caller."""
        built = {number: self.built[key] for number, key in places.items() if key in self.built}
        for one in built.values():
            self._arena.hold(one.segment.number)
        return built

    def build(self, plan: LoadingPlan, gathered: Gathered, place: tuple[int, int]) -> Built:
        """Build one microbatch of one bucket in shared memory, with what its ranks are told of it."""
        return _build(self._constructor, self._arena, plan, gathered, place)


def _announce(header: StepHeader, following: LoadingPlan | None) -> StepHeader:
    """Tell with a step that the one behind it has another mesh, where that is planned already."""
    if following is None or following.mesh == header.mesh:
        return header
    return dataclasses.replace(header, next_mesh=following.mesh)


def _build(
    constructor: DataConstructor, arena: Arena, plan: LoadingPlan, gathered: Gathered, place: tuple[int, int]
) -> Built:
    """Build one microbatch of one bucket, and write what each of its ranks is told of it."""
    segment, packed = _pack(constructor, arena, plan, gathered.samples, place)
    ranks = [rank for rank in gathered.ranks if constructor.bin_of(rank, plan, place[1]) == place]
    return Built(segment, packed, plan, {rank: view_text(constructor, rank, plan, packed) for rank in ranks})


def view_text(constructor: DataConstructor, rank: int, plan: LoadingPlan, packed: PackedMicrobatch) -> str:
    """Write what a rank is told of a microbatch: numbers, and type, shape and place of its arrays."""
    names, scalars = constructor.view_of(rank, plan, packed)
    specs = {spec.name: (spec.dtype, spec.shape, spec.offset) for spec in packed.arrays}
    told = {"scalars": scalars, "arrays": [(key, *specs[name]) for key, name in names.items()]}
    return to_text(told)[1:-1]


def _pack(
    constructor: DataConstructor, arena: Arena, plan: LoadingPlan, samples: StepSamples, place: tuple[int, int]
) -> tuple[Segment, PackedMicrobatch]:
    """Build one microbatch of one bucket in shared memory."""
    taken: list[Segment] = []

    def allocate(nbytes: int) -> Any:
        taken.append(arena.take(nbytes))
        return taken[0].memory[:nbytes]

    try:
        packed = constructor.constructor_do_plan(plan, samples, *place, allocate)
    except BaseException:
        for segment in taken:
            arena.release(segment.number)
        raise
    return taken[0], packed
