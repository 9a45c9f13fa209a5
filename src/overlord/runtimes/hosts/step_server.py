"""Builds steps ahead of the clients of one host: threads that plan, gather and pack around one condition.

Rules of this file:
1. A step is wanted when it lies in a client's window [its step, its step + prefetch], or when
   a client waits for it. What is not wanted is dropped, and built again for a client that asks later.
   Samples are gathered for the ranks that this host has in the mesh of a step, until another one attaches. A step
   whose mesh does not have a client's rank is the end for it.
2. Work goes to the lowest wanted step first. Beyond the byte budget only what a client needs now is built.
3. A failure belongs to its step: nothing is built from there on, and steps before it are still served,
   also to a client that comes later.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from overlord.core.client_messages import CountLabels, StepHeader, ViewFacts, mesh_to_text
from overlord.core.memory_account import MemoryAccount
from overlord.core.messages import STORE_DOWN, HostNews, Waiting
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.errors import ClosedError, OverlordError, SpecError
from overlord.roles.client import ENCODERS
from overlord.roles.data_constructor import DataConstructor
from overlord.runtimes.hosts.peers import RemotePlanner
from overlord.runtimes.transport.file_limits import out_of_files
from overlord.runtimes.transport.shared_memory import Arena, Segment
from overlord.transforms.microbatches.per_microbatch import PackedMicrobatch
from overlord.transforms.microbatches.step_samples import StepSamples

# --------------------------------------------------------------------------------------------------------------
# How long the trainers of a host waited for their batches: the sign that loaders cannot keep up.


class WaitMeter:
    """Seconds in which at least one client waited; guarded by the lock of its owner.

    Example:
        >>> now, changed = iter([10.0, 13.0]), threading.Condition()
        >>> meter = WaitMeter(lambda: next(now))
        >>> with changed:
        ...     meter.wait(changed, 0.001)
        >>> meter.seconds()
        3.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting = 0
        self._since = 0.0
        self._before = 0.0

    def wait(self, changed: threading.Condition, timeout_s: float | None = None) -> None:
        """Wait until something has changed, and count the time."""
        if not self._waiting:
            self._since = self._clock()
        self._waiting += 1
        try:
            changed.wait(timeout_s)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._before += self._clock() - self._since

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return self._waiting

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._before + (self._clock() - self._since if self._waiting else 0.0)


# --------------------------------------------------------------------------------------------------------------
# The clients that are attached to a constructor host, how far they are, and which steps they want.
#
# 1. A rank that comes with a later mesh wants nothing before the others are near its first step: the stream does not
#    run ahead because of it.
# 2. A rank that the mesh of a step does not have wants nothing from there on.


@dataclass(slots=True)
class AttachedClient:
    """One attached client."""

    rank: int
    step: int
    """The step it is at."""
    new: bool = False
    """Whether it came for a later step than the stream's first, and has not been served yet."""
    ended: bool = False
    """Whether it has come to a step whose mesh does not have it."""
    lost: bool = False
    """Whether its process is gone, though its connection is not closed yet."""


class AttachedClients:
    """The clients of one host. Not thread-safe: the caller holds a lock.

    Example:
        >>> clients = AttachedClients(prefetch=1, first_step=0)
        >>> number = clients.take(0, 0)
        >>> clients.move(number, 5)
        >>> clients.wanted()
        {5: {0}, 6: {0}}
        >>> newcomer = clients.take(1, 9)
        >>> clients.wanted()
        {5: {0}, 6: {0}}
        >>> clients.move(number, 8)
        >>> clients.wanted()
        {8: {0}, 9: {0, 1}}
    """

    def __init__(self, *, prefetch: int, first_step: int, early: bool = True) -> None:
        self._early = early
        self._prefetch = prefetch
        self._first_step = first_step
        self._clients: dict[int, AttachedClient] = {}
        self._waiting: Counter[tuple[int, int]] = Counter()
        self._reached: dict[int, int] = {}

    def reached_by(self, rank: int) -> int | None:
        """Return how far a rank came that attaches again; None for one that never was here."""
        return self._reached.get(rank)

    def take(self, rank: int, begin: int, at: int | None = None) -> int:
        """Attach a client; return its number.

        Args:
            rank: Its rank.
            begin: The step where its rank begins.
            at: Where it stands, if it comes back from a connection that broke.
        """
        step = begin if at is None else at
        # Without a step it may be a second client of its process; with one, that is where its rank is.
        self._reached[rank] = max(step, self._reached.get(rank, step)) if at is None else step
        number = max(self._clients, default=-1) + 1
        self._clients[number] = AttachedClient(rank, step, new=step == begin > self._first_step)
        return number

    def lose(self, client: int) -> None:
        """Note that the process of a client is gone: its rank has no position any more."""
        if client in self._clients:
            self._clients[client].lost = True

    def free(self, client: int) -> None:
        """Forget a client."""
        self._clients.pop(client)

    def rank_of(self, client: int) -> int:
        """Return the rank of a client."""
        return self._clients[client].rank

    def move(self, client: int, step: int) -> None:
        """Note that a client is at a step, and has finished with those before it."""
        self._clients[client].step = step
        self._clients[client].ended = False
        self._reached[self._clients[client].rank] = step

    def serve(self, client: int) -> None:
        """Note that a client has what it asked for: a newcomer is one of the others now."""
        self._clients[client].new = False

    def end(self, client: int) -> None:
        """Note that a client is done: the mesh of the step it is at does not have its rank."""
        self._clients[client].new, self._clients[client].ended = False, True

    def leave(self, client: int, next_step: int) -> None:
        """Note that a client leaves in order, having trained on the steps before `next_step`."""
        self._reached[self._clients[client].rank] = next_step

    @property
    def positions(self) -> dict[int, int]:
        """The step each attached rank is at."""
        return {client.rank: client.step for client in self._clients.values() if not client.lost}

    @property
    def reached(self) -> dict[int, int]:
        """For every rank that ever attached, the step before which it is done."""
        return dict(self._reached)

    def gathers_for(self, expected: Collection[int], world_size: int) -> frozenset[int]:
        """Return the ranks that samples are gathered for: those that were expected, unless others are here.

        Args:
            expected: The ranks this host has in the mesh of the step.
            world_size: Ranks of that mesh.
        """
        attached = frozenset(client.rank for client in self._clients.values() if client.rank < world_size)
        return frozenset(expected) if attached <= frozenset(expected) else attached

    def coming_to(self, step: int, ranks: Collection[int]) -> set[int]:
        """Return those of some ranks that may still want a step: they are not past it, or were never attached."""
        at = self.positions
        return {rank for rank in ranks if (at[rank] <= step if rank in at else rank not in self._reached)}

    @property
    def ever_attached(self) -> bool:
        """Whether a client ever attached."""
        return bool(self._reached)

    @contextmanager
    def waiting(self, client: int, step: int) -> Iterator[None]:
        """While this is open, a client waits for a step."""
        key = (step, self._clients[client].rank)
        self._waiting[key] += 1
        try:
            yield
        finally:
            self._waiting[key] -= 1
            self._waiting += Counter()

    def stands_at(self, step: int) -> bool:
        """Whether a client is at a step, or waits for something of it."""
        return any(step == s for s, _ in self._waiting) or any(step == client.step for client in self._wanting())

    def came_to(self, step: int) -> bool:
        """Whether a client is at a step, or beyond it."""
        return any(client.step >= step for client in self._clients.values() if not client.new)

    def only_new(self, step: int) -> bool:
        """Whether a step is wanted only by ranks that come with it or after it."""
        others = [client for client in self._clients.values() if not client.new and not client.ended]
        waited = any(step == s for s, _ in self._waiting)
        return self.ever_attached and not waited and not any(self._in_window(client, step) for client in others)

    def _in_window(self, client: AttachedClient, step: int) -> bool:
        return client.step <= step <= client.step + self._prefetch

    def _foremost(self) -> int | None:
        """Return the furthest step that a client wants that is not new; None where all are new."""
        there = [client.step for client in self._clients.values() if not client.new and not client.ended]
        return max(there) + self._prefetch if there else None

    def _wanting(self) -> list[AttachedClient]:
        """Return the clients that want anything now."""
        foremost, clients = self._foremost(), self._clients.values()
        # The others may be past a newcomer's first step already: then it is late, and gets it at once.
        return [s for s in clients if (foremost is None or foremost >= s.step if s.new else not s.ended)]

    def _last_of(self, client: AttachedClient, foremost: int | None) -> int:
        """Return the last step that a client wants: a newcomer wants with the others, and its first alone."""
        last = client.step + self._prefetch
        if not client.new:
            return last
        return client.step if foremost is None else max(client.step, min(last, foremost))

    def wanted(self) -> dict[int, set[int]]:
        """Return wanted steps in ascending order with the ranks that want them."""
        if not self.ever_attached and not self._early:
            return {}  # clients that come back say where they are
        if not self.ever_attached:
            return {step: set() for step in range(self._first_step, self._first_step + self._prefetch)}
        wanted: dict[int, set[int]] = {}
        for step, rank in self._waiting:
            wanted.setdefault(step, set()).add(rank)
        foremost = self._foremost()
        for client in self._wanting():
            for step in range(client.step, self._last_of(client, foremost) + 1):
                wanted.setdefault(step, set()).add(client.rank)
        return {step: wanted[step] for step in sorted(wanted)}


# --------------------------------------------------------------------------------------------------------------
# The steps of one host on their way to its clients: planned, gathered, and built in shared memory.


@dataclass(frozen=True, slots=True)
class Gathered:
    """The samples of a step, as far as some ranks need them."""

    samples: StepSamples
    ranks: frozenset[int]
    unopened: set[tuple[int, int]]
    """(bucket, microbatch) of all with media that are decoded when they are packed: what does not decode is known when
    this is empty, and so is how many labels the step has."""
    waiting: set[tuple[int, int]]
    """(bucket, microbatch) of all with media that only other hosts have: they are packed when it is known which of
    those decode."""


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
    views: dict[int, ViewFacts]
    """What a rank is told of its view: made before a client waits for it."""


AT_ONCE = 64
"""Microbatches that are handed over with their step at most: a message takes no more than 253 descriptors."""

PACKED_AT_ONCE = 8
"""Microbatches without media that a thread packs in one turn: to look for the next takes as long as to pack it."""

Bin = tuple[int, int, int]
"""(step, bucket, microbatch)."""


class StepCache:
    """What is there of each step. Not thread-safe: the caller holds a lock."""

    def __init__(self, constructor: DataConstructor, arena: Arena) -> None:
        self._constructor = constructor
        self._arena = arena
        self.plans: dict[int, LoadingPlan] = {}
        self.next_meshes: dict[int, str | None] = {}
        """Of planned steps: the mesh of the step behind, where that was known to be another one."""
        self.samples: dict[int, Gathered] = {}
        self.built: dict[Bin, Built] = {}
        self.labels: dict[int, int] = {}
        """Labels of each step over all ranks, once it is known which of its samples decode."""
        self.checked: dict[int, Checked] = {}
        """What is known here of steps whose other media are decoded on other hosts."""
        self._lost: dict[int, list[int]] = {}
        """Of such steps, the samples that do not decode, on any host."""
        self.fetched_bytes = self.held_bytes = self.packed_bytes = 0
        """Bytes of samples that came, most bytes of one step's samples, bytes of arrays made: what ranks here need."""
        self._fresh: list[Bin] = []
        self._kept: dict[int, set[int]] = {}
        """What was wanted of planned steps when everything that is built was looked through."""
        self._queues: dict[tuple[int, frozenset[int]], tuple[list[Bin], int]] = {}
        """What ranks need of a step, and how much of it from the front on is built."""

    def add(self, made: Mapping[Bin, Built]) -> None:
        """Take in what was built; it may replace what was built for fewer ranks."""
        for key, one in made.items():
            self.packed_bytes += one.packed.nbytes
            if key in self.built:
                self._arena.release(self.built[key].segment.number)
        self.built.update(made)
        self._fresh += made

    def keep(self, wanted: Mapping[int, set[int]]) -> None:
        """Drop everything but steps that some ranks want.

        This is called with every microbatch, and a step may have thousands: as long as the same is wanted, only what
        was built since is looked at.
        """
        plans, wanted_by = self.plans, self._constructor.wanted_by
        now = {step: set(ranks) for step, ranks in wanted.items() if step in plans}
        looked_at = list(self.built) if now != self._kept else self._fresh
        needed = {step: wanted_by(now[step], plans[step]) for step in {key[0] for key in looked_at} & now.keys()}
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
            self.next_meshes.pop(step, None)
            self.labels.pop(step, None)
            self.checked.pop(step, None)
            self._lost.pop(step, None)

    def gathered(self, plan: LoadingPlan, samples: StepSamples, ranks: frozenset[int]) -> None:
        """Keep the samples of a step; those of more ranks come in the place of those of fewer."""
        before = self.samples.get(plan.step)
        if before is not None:  # what is packed by now is not packed again
            samples.lost |= before.samples.lost
        self.fetched_bytes += samples.nbytes
        self.held_bytes = max(self.held_bytes, samples.nbytes)
        samples.silent[self._lost.get(plan.step, [])] = True
        mine = set(self._constructor.bins_of(ranks, plan))
        unopened = samples.unopened(plan) & mine if before is None else before.unopened
        self.samples[plan.step] = Gathered(samples, ranks, unopened, samples.unopened(plan, here=False))
        self._settle(plan.step)

    def settle(self, step: int, labels: int, lost: list[int]) -> None:
        """Note how many labels a step has, and which of its samples do not decode, as all hosts have found."""
        self.labels[step], self._lost[step] = labels, lost
        if step in self.samples:
            self.samples[step].samples.silent[lost] = True

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
        while at < len(bins) and self._has(bins[at], ranks):
            at += 1
        self._queues[key] = (bins, at)
        waiting = self._waiting(step)
        left = (one for one in itertools.islice(bins, at, None) if one not in busy and one[1:] not in waiting)
        first = next((one for one in left if not self._has(one, ranks)), None)
        if first is not None or step not in self.samples or step in self.labels or not ranks:
            return first
        # Ranks that are not attached have no use for their microbatches, but what does not decode there counts.
        unopened = sorted((step, *one) for one in self.samples[step].unopened)
        return next((one for one in unopened if one not in busy), None)

    def has_step(self, step: int, ranks: set[int]) -> bool:
        """Whether everything that ranks want of a step is built, and its samples are not needed any more."""
        return not self._waiting(step) and self.next_missing(step, ranks) is None

    def _waiting(self, step: int) -> Collection[tuple[int, int]]:
        """Return the microbatches of a step that cannot be packed yet."""
        return self.samples[step].waiting if step in self.samples and step not in self.labels else ()

    def _has(self, key: Bin, ranks: Collection[int]) -> bool:
        """Whether a microbatch is built for all of some ranks: it holds the views of those it was gathered for."""
        built = self.built.get(key)
        if built is None:
            return False
        takes = self._constructor.takes
        return all(rank in built.views or not takes(rank, built.plan, key[1:]) for rank in ranks)

    def find(self, key: Bin, rank: int) -> Built | None:
        """Return a microbatch that is built for a rank."""
        built = self.built.get(key)
        return built if built is not None and rank in built.views else None

    def places(self, rank: int, plan: LoadingPlan) -> tuple[StepHeader, dict[int, Bin]]:
        """Return a rank's header of a step, and where its microbatches are found that go along with it."""
        header = self._constructor.header_of(rank, plan, self.labels[plan.step])
        following = self.plans.get(plan.step + 1)
        next_mesh = self.next_meshes.get(plan.step) if following is None else mesh_to_text(following.mesh)
        if next_mesh != header.mesh_text:
            header = msgspec.structs.replace(header, next_mesh_text=next_mesh)
        bins = (self._constructor.bin_of(rank, plan, number) for number in range(AT_ONCE))
        places = {n: (plan.step, *one) for n, one in enumerate(itertools.takewhile(bool, bins)) if one is not None}
        places |= {ENCODERS[name]: (plan.step, rank, ENCODERS[name]) for name in header.encodes}
        return header, places

    def has_all(self, rank: int, places: Mapping[int, Bin], most_bytes: int) -> bool:
        """Whether some microbatches of a rank are all built, and small enough to be held together."""
        found = [self.find(key, rank) for key in places.values()]
        return sum(one.segment.capacity if one is not None else most_bytes + 1 for one in found) <= most_bytes

    def take(self, rank: int, places: Mapping[int, Bin]) -> dict[int, Built]:
        """Return those of some microbatches of a rank that are built, each held once more for the caller."""
        found = {number: self.find(key, rank) for number, key in places.items()}
        built = {number: one for number, one in found.items() if one is not None}
        for one in built.values():
            self._arena.hold(one.segment.number)
        return built

    def build(self, plan: LoadingPlan, gathered: Gathered, place: tuple[int, int]) -> Built:
        """Build one microbatch of one bucket in shared memory, with what each of its ranks is told of it."""
        constructor = self._constructor
        ranks = tuple(rank for rank in sorted(gathered.ranks) if constructor.takes(rank, plan, place))
        segment, packed = _pack(constructor, self._arena, plan, gathered.samples, place, ranks)
        return Built(segment, packed, plan, {rank: view_facts(constructor, rank, plan, packed) for rank in ranks})


def view_facts(constructor: DataConstructor, rank: int, plan: LoadingPlan, packed: PackedMicrobatch) -> ViewFacts:
    """Describe a rank's view of a microbatch: numbers, and type, shape and place of its arrays."""
    names, scalars = constructor.view_of(rank, plan, packed)
    specs = {spec.name: (spec.dtype, spec.shape, spec.offset) for spec in packed.arrays}
    return ViewFacts(scalars, [(key, *specs[name]) for key, name in names.items()])


def _pack(
    constructor: DataConstructor,
    arena: Arena,
    plan: LoadingPlan,
    samples: StepSamples,
    place: tuple[int, int],
    ranks: tuple[int, ...],
) -> tuple[Segment, PackedMicrobatch]:
    """Build one microbatch of one bucket in shared memory."""
    taken: list[Segment] = []

    def allocate(nbytes: int) -> Any:
        taken.append(arena.take(nbytes))
        return taken[0].memory[:nbytes]

    try:
        packed = constructor.constructor_do_plan(plan, samples, *place, allocate, ranks)
    except BaseException:
        for segment in taken:
            arena.release(segment.number)
        raise
    return taken[0], packed


# --------------------------------------------------------------------------------------------------------------


logger = logging.getLogger("overlord")

T = TypeVar("T")

BUILDS_NOTHING = "the service cannot build a further step (a smaller prefetch or fewer ranks on this host need fewer)"
OTHERS_TRIES = 10
"""How often the planner's host is asked, a second each, before the media of a slow host's ranks are decoded here."""

RanksOf = Callable[[ClientPlaceTree], Collection[int]]
"""The ranks that a host is expected to serve on a mesh."""


class StepServer:
    """Serves planned, gathered and packed microbatches to the connections of one host."""

    def __init__(
        self,
        constructor: DataConstructor,
        planner: RemotePlanner,
        arena: Arena,
        *,
        ranks_of: RanksOf,
        prefetch: int,
        memory: MemoryAccount,
        read_bytes: Callable[[], int],
        packers: int = 2,
        early: bool = True,
    ) -> None:
        self._constructor = constructor
        self._planner = planner
        self._arena = arena
        self.ranks_of = ranks_of
        """The ranks this host is expected to serve on a mesh."""
        self._clients = AttachedClients(prefetch=prefetch, first_step=planner.first_step, early=early)
        self._refused: dict[int, SpecError] = {}
        self._prefetch = prefetch
        self._memory = memory
        self._read_bytes = read_bytes
        self._changed = threading.Condition()
        self._cache = StepCache(constructor, arena)
        self._end: int | None = None
        self._failed: tuple[int, OverlordError] | None = None
        self._closing, self._waits = False, WaitMeter()
        self._begun = False
        """Whether the first step of a client was there."""
        self._ends_for: OverlordError | None = None
        self._gathering: dict[int, tuple[LoadingPlan, frozenset[int]]] = {}
        self._missing: int | None = None
        self._told_missing, self._last_bytes = -1, 0
        self._turn, self._packing = threading.Lock(), set[Bin]()
        # Several threads gather and pack: while one waits for its last decodes, those of others keep the workers busy.
        loops = (self._plan_loop, *[self._gather_loop] * 2, *[self._pack_loop] * packers, self._label_loop)
        self._threads = [threading.Thread(target=loop, name=f"overlord{loop.__name__}") for loop in loops]

    def start(self) -> None:
        """Begin to build ahead."""
        for thread in self._threads:
            thread.start()

    def close(self, why: OverlordError | None = None) -> None:
        """End the threads; clients that wait are told why: by default that the launcher closed the service."""
        self._ends_for = why
        self._closing = True
        self.moved()
        for thread in self._threads:
            thread.join()

    def news(self) -> HostNews:
        """Return how far the clients of this host are, and what they hold."""
        with self._changed:
            clients, waited_s = self._clients, self._waits.seconds()
            return HostNews(
                clients.reached,
                clients.positions,
                waited_s=waited_s,
                fetched_bytes=self._cache.fetched_bytes,
                held_bytes=self._cache.held_bytes,
                packed_bytes=self._cache.packed_bytes,
                memory=self._memory.held("views", "samples"),
            )

    @property
    def sample_bytes(self) -> int:
        """Bytes of the samples that are gathered."""
        return sum(gathered.samples.nbytes for gathered in list(self._cache.samples.values()))

    def attach(self, rank: int, begin: int, at: int | None = None) -> tuple[int, int | None]:
        """Attach a client where its rank begins, or where it was; return its number, and how far its rank had come."""
        with self._changed:
            reached = self._clients.reached_by(rank)
            client = self._clients.take(rank, begin, at)
            self._changed.notify_all()
            return client, reached

    def lose(self, client: int | None) -> None:
        """Note that the process of a client is gone, before its connection is closed."""
        with self._changed:
            if client is not None:
                self._clients.lose(client)

    def detach(self, client: int) -> None:
        """Detach a client; nothing is built for it any more."""
        with self._changed:
            self._clients.free(client)
            self.moved()

    def open_step(self, client: int, step: int) -> tuple[StepHeader, dict[int, Built]] | None:
        """Move the client's window; return the header of a step, or None past the end, also that of its rank.

        With it come the microbatches that are built already, each held once more for the caller. Call `moved` when the
        client has its answer: what follows from the move is not what it waits for.
        """
        with self._changed:
            self._check_not_ended()
            self._clients.move(client, step)
            if step not in self._cache.labels:
                self.moved()
                if self._missing is not None and step not in self._cache.plans:
                    self._tell_missing(step, self._missing)
            rank = self._clients.rank_of(client)

            def look() -> LoadingPlan | bool | None:
                plan = self._cache.plans.get(step)
                if plan is None:
                    return self._past_end(step) or None
                return plan if rank >= plan.mesh.world_size or step in self._cache.labels else None

            found = self._wait(step, look)
            if not isinstance(found, LoadingPlan):
                return None
            if rank >= found.mesh.world_size:
                self._clients.end(client)
                self.moved()
                return None
            self._clients.serve(client)
            header, places = self._cache.places(rank, found)
            return header, self._cache.take(rank, places)

    def look_ahead(
        self, client: int, step: int, at: int | None, most_bytes: int
    ) -> tuple[StepHeader, dict[int, Built]] | None:
        """Return what `open_step` would of a step that the client comes to next, if all of it is there; never waits.

        Args:
            client: Its number.
            step: The step behind the one it is at.
            at: The step it is at, if it has that one from looking ahead and the server was not told so far.
            most_bytes: What the client may hold.
        """
        with self._changed:
            self._check_not_ended()
            if at is not None:
                self._clients.move(client, at)
            plan, rank = self._cache.plans.get(step), self._clients.rank_of(client)
            if plan is None or rank >= plan.mesh.world_size or step not in self._cache.labels:
                return None
            header, places = self._cache.places(rank, plan)
            if not self._cache.has_all(rank, places, most_bytes):
                return None
            return header, self._cache.take(rank, places)

    def moved(self) -> None:
        """Drop what is not wanted any more, and wake the threads that build."""
        with self._changed:
            self._cache.keep(self._wanted_steps())
            self._changed.notify_all()

    def microbatch(self, client: int, step: int, microbatch: int) -> Built | None:
        """Return a microbatch of the client's bucket; its segment is held once more for the caller.

        None for a rank that gets its data by the trainer's own broadcast.
        """

        def look() -> Built | bool | None:
            plan = self._cache.plans.get(step)
            if plan is None:
                return None
            rank = self._clients.rank_of(client)
            place = self._constructor.bin_of(rank, plan, microbatch)
            return False if place is None else self._cache.find((step, *place), rank)

        def held() -> Built | None:
            built = self._wait(step, look)
            if not isinstance(built, Built):
                return None
            self._arena.hold(built.segment.number)
            return built

        with self._changed:
            if look() is not None:
                return held()  # the usual case: nothing changes that others must hear of
            try:
                with self._clients.waiting(client, step):
                    self._changed.notify_all()
                    return held()
            finally:
                self._cache.keep(self._wanted_steps())

    def leave(self, client: int, next_step: int) -> None:
        """Note that a client leaves in order, having trained on the steps before `next_step`."""
        with self._changed:
            self._clients.leave(client, next_step)

    # -- what is wanted ------------------------------------------------------------------------

    def _wanted_steps(self) -> dict[int, set[int]]:
        """Return wanted steps in ascending order with the ranks that want them and, where it is known, are there."""
        failed = self._failed[0] if self._failed is not None else None
        wanted: dict[int, set[int]] = {}
        for step, ranks in self._clients.wanted().items():
            if not self._past_end(step) and (failed is None or step < failed) and step not in self._refused:
                plan = self._cache.plans.get(step)
                wanted[step] = ranks if plan is None else {rank for rank in ranks if rank < plan.mesh.world_size}
        return wanted

    def _gathers_for(self, plan: LoadingPlan) -> frozenset[int]:
        """Return the ranks that samples of a step are gathered for."""
        return self._clients.gathers_for(self.ranks_of(plan.mesh), plan.mesh.world_size)

    def _planned(self, step: int) -> bool:
        """Whether the plan of a step is here, as far as the ranks of this host need it: others may have attached."""
        plan = self._cache.plans.get(step)
        return plan is not None and plan.covers(self._gathers_for(plan))

    def _past_end(self, step: int) -> bool:
        return self._end is not None and step >= self._end

    def _may_run_ahead(self, step: int, wanted: dict[int, set[int]]) -> bool:
        """Whether a step may be planned: not behind the very first one, while a client waits for that to be decoded.

        To read and tokenize for later steps would take the cores that the first batch needs.
        """
        first, cache = next(iter(wanted)), self._cache
        if first in cache.labels or first in cache.checked:
            self._begun = True
        return self._begun or step == first or not wanted[first]

    def _has_room(self, step: int, wanted: dict[int, set[int]]) -> bool:
        """Whether a step may be built now: within the budget, or because a client is at it."""
        if step == next(iter(wanted)) or self._clients.stands_at(step):
            return True
        # Steps are much alike: what is being gathered, and what would come now, will be like the last.
        coming = (len(self._gathering) + 1) * self._last_bytes
        return self._memory.total + self._read_bytes() + coming <= self._memory.budget_bytes

    def _tell_missing(self, step: int, missing: int) -> None:
        """Say once that a step cannot be planned before a report comes, if a client stands there."""
        if missing == STORE_DOWN:
            return  # the planner's host has said so
        with self._changed:
            stands = self._clients.came_to(step)
        if missing != self._told_missing and stands:
            self._told_missing = missing
            logger.warning("step %d waits for the report of step %d; call client.report on one rank", step, missing)

    # -- waiting and failing -------------------------------------------------------------------

    def _wait(self, step: int, look: Callable[[], T | None]) -> T:
        while True:
            found = look()
            if found is not None:
                return found
            if step in self._refused:
                raise self._refused[step]
            if self._failed is not None and step >= self._failed[0]:
                raise self._failed[1]
            self._check_not_ended()
            if self._closing:
                raise ClosedError("the service was closed by its launcher while a client waited for data.")
            self._waits.wait(self._changed)

    def _check_not_ended(self) -> None:
        if self._closing and self._ends_for is not None:
            raise type(self._ends_for)(*self._ends_for.args)  # a new one for each client

    def _next_task(self, choose: Callable[[], T | None]) -> T | None:
        with self._changed:
            task = choose()
            while task is None and not self._closing:
                self._changed.wait()
                task = choose()
            return None if self._closing else task

    def _run(self, choose: Callable[[], T | None], work: Callable[[T], None], step_of: Callable[[T], int]) -> None:
        while True:
            task = self._next_task(choose)
            if task is None:
                return
            self._attempt(step_of(task), partial(work, task))

    def _attempt(self, step: int, work: Callable[[], None]) -> bool:
        """Do some work for a step; a failure is kept for the clients that wait for that step."""
        try:
            work()
        except BaseException as error:  # the border of the roles: also a decoder's panic must reach the client
            known = error if isinstance(error, OverlordError) else out_of_files(error, BUILDS_NOTHING)
            if known is None:
                logger.exception("step %d failed", step)
                known = OverlordError(f"step {step} failed: {type(error).__name__}: {error}")
            with self._changed:
                if isinstance(known, SpecError):
                    self._refused[step] = known  # the request is wrong; others go on
                elif self._failed is None or step < self._failed[0]:
                    self._failed = (step, known)
                self.moved()
            return False
        return True

    # -- the three stages ----------------------------------------------------------------------

    def _plan_loop(self) -> None:
        def choose() -> int | None:
            wanted = self._wanted_steps()
            left = (s for s in wanted if not self._planned(s) and self._may_run_ahead(s, wanted))
            return next((s for s in left if self._has_room(s, wanted)), None)

        def work(step: int) -> None:
            with self._changed:
                newcomers = self._clients.only_new(step)
            news = dataclasses.replace(self.news(), told_missing=self._missing, newcomers=newcomers)
            plan = self._planner.plan(step, news)
            self._missing = plan.missing if isinstance(plan, Waiting) else None
            if isinstance(plan, Waiting):
                if plan.missing is not None:
                    self._tell_missing(step, plan.missing)
                return  # and ask again, as long as it is wanted
            with self._changed:
                if plan is None:
                    self._end = min(step, step if self._end is None else self._end)
                else:
                    self._cache.plans[step] = plan
                    self._cache.next_meshes[step] = self._planner.next_mesh
                self.moved()

        self._run(choose, work, lambda step: step)

    def _gather_loop(self) -> None:
        def choose() -> int | None:
            wanted = self._wanted_steps()
            for step, ranks in wanted.items():
                held, planned = self._cache.samples.get(step), self._planned(step)
                if planned and step not in self._gathering and (held is None or not ranks <= held.ranks):
                    unknown = bool(ranks) and step not in self._cache.labels and step not in self._cache.checked
                    missing = unknown or self._cache.next_missing(step, ranks) is not None
                    needed = not self._clients.ever_attached or missing
                    if needed and self._has_room(step, wanted):
                        plan = self._cache.plans[step]
                        self._gathering[step] = (plan, self._gathers_for(plan))
                        return step
            return None

        while True:
            with self._turn:  # steps leave the read buffers in order, and are finished side by side
                step = self._next_task(choose)
                if step is None:
                    return
                collecting: list[Callable[[], StepSamples]] = []
                gather = self._constructor.gather
                popped = self._attempt(step, lambda: collecting.append(gather(*self._gathering[step])))  # noqa: B023
            if popped:
                self._attempt(step, partial(self._collect, step, collecting))

    def _collect(self, step: int, collecting: list[Callable[[], StepSamples]]) -> None:
        samples = collecting.pop()()
        with self._changed:
            self._last_bytes = samples.nbytes
            self._cache.gathered(self._gathering[step][0], samples, self._gathering[step][1])
            del self._gathering[step]
            self.moved()

    def _pack_loop(self) -> None:
        def choose() -> list[Bin] | None:
            wanted = self._wanted_steps()
            for step, ranks in wanted.items():
                if step not in self._cache.samples or step not in self._cache.plans:
                    continue
                gathered = self._cache.samples[step]
                chosen: list[Bin] = []
                # Media are decoded by all workers of the pool at once, so each of those is a turn of its own.
                while len(chosen) < (1 if gathered.unopened else PACKED_AT_ONCE):
                    missing = self._cache.next_missing(step, ranks & gathered.ranks, self._packing)
                    if missing is None or not self._has_room(step, wanted):
                        break
                    self._packing.add(missing)
                    chosen.append(missing)
                if chosen:
                    return chosen
            return None

        def work(keys: list[Bin]) -> None:
            step, left = keys[0][0], list(keys)
            with self._changed:
                plan, gathered = self._cache.plans.get(step), self._cache.samples.get(step)
            try:
                for key in keys if plan is not None and gathered is not None else []:
                    made = self._cache.build(plan, gathered, key[1:])  # type: ignore[arg-type]
                    with self._changed:  # at once: in between, the other thread would take it for missing
                        self._packing.remove(left.pop(0))
                        self._cache.add({key: made})
                        self._cache.opened(step, key[1:])
                        if self._waits.waiting:
                            self._changed.notify_all()
            finally:
                with self._changed:
                    self._packing.difference_update(left)
            with self._changed:
                self._cache.keep(self._wanted_steps())  # the clients may have moved on meanwhile
                held = self._cache.samples.get(step)
                if held is not None and step in self._cache.plans:
                    coming = self._clients.coming_to(step, held.ranks)
                    if self._cache.has_step(step, coming | self._wanted_steps()[step]):
                        del self._cache.samples[step]
                self._changed.notify_all()

        self._run(choose, work, lambda keys: keys[0][0])

    def _label_loop(self) -> None:
        """Learn how many labels steps have whose media are decoded on several hosts.

        Every host tells the planner's host which of its samples do not decode, and is told those of all when the last
        one has. A host without attached trainers builds nothing, and one that is short of memory builds nothing ahead:
        the media of their ranks are then decoded here too, so that no host waits for another's trainers. Every
        host that decodes a sample finds the same, so the number depends on nothing of this.
        """

        def choose() -> int | None:
            wanted = self._wanted_steps()
            return next((s for s in wanted if s in self._cache.checked and s not in self._cache.labels), None)

        def work(step: int) -> None:
            with self._changed:
                mine = self._cache.checked.get(step)
            if mine is None:
                return
            ranks, lost = set(mine.ranks), dict(mine.lost)
            for tries in itertools.count(1):
                told = self._planner.ask(
                    CountLabels(
                        step,
                        mine.plan.digest,
                        mine.plan.mesh.world_size,
                        sorted(ranks),
                        list(lost.items()),
                        near_from=step - self._prefetch - 1,
                    )
                )
                if self._closing or not told.missing:
                    break
                if tries >= OTHERS_TRIES or not told.near:
                    others = told.missing[: len(mine.ranks)]  # no more at a time than this host has memory for
                    plan = mine.plan if mine.plan.covers(others) else self._planner.whole_plan(step)
                    lost |= self._constructor.gather(plan, others, open_all=True)().lost
                    ranks |= set(others)
            with self._changed:
                if step in self._cache.plans and not self._closing:
                    lost = dict(told.lost)
                    self._cache.settle(step, mine.counted - sum(lost.values()), sorted(lost))
                self.moved()

        self._run(choose, work, lambda step: step)
