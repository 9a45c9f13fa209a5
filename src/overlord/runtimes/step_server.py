"""Builds steps ahead of the clients of one host: threads that plan, gather and pack around one condition.

Rules of this file:
1. A step is wanted when it lies in a client's window [its step, its step + prefetch], or when
   somebody waits for it. What is not wanted is dropped; whoever asks for it later gets it built again.
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
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.errors import ClosedError, OverlordError, SpecError
from overlord.roles.data_constructor import DataConstructor
from overlord.roles.views import StepHeader
from overlord.runtimes.file_limits import out_of_files
from overlord.runtimes.planner_host import STORE_DOWN, HostNews, Plans, Waiting
from overlord.runtimes.seats import Seats
from overlord.runtimes.shared_memory import Arena
from overlord.runtimes.step_shelf import Bin, Built, StepShelf
from overlord.runtimes.waits import WaitMeter
from overlord.transforms.microbatches.step_samples import StepSamples

logger = logging.getLogger("overlord")

T = TypeVar("T")

OTHERS_TRIES = 10
"""How often the planner's host is asked, a second each, before the media of a slow host's ranks are decoded here."""

RanksOf = Callable[[ClientPlaceTree], Collection[int]]
"""The ranks that a host is expected to serve on a mesh."""


class StepServer:
    """Serves planned, gathered and packed microbatches to the connections of one host."""

    def __init__(
        self,
        constructor: DataConstructor,
        planner: Plans,
        arena: Arena,
        *,
        ranks_of: RanksOf,
        prefetch: int,
        budget_bytes: int,
        read_bytes: Callable[[], int],
        early: bool = True,
    ) -> None:
        self._constructor = constructor
        self._planner = planner
        self._arena = arena
        self.ranks_of = ranks_of
        """The ranks this host is expected to serve on a mesh."""
        self._seats = Seats(prefetch=prefetch, first_step=planner.first_step, early=early)
        self._refused: dict[int, SpecError] = {}
        self._prefetch = prefetch
        self._budget = budget_bytes
        self._read_bytes = read_bytes
        self._changed = threading.Condition()
        self._shelf = StepShelf(constructor, arena)
        self._end: int | None = None
        self._failed: tuple[int, OverlordError] | None = None
        self._closing, self._waits = False, WaitMeter()
        self._ends_for: OverlordError | None = None
        self._gathering: dict[int, tuple[LoadingPlan, frozenset[int]]] = {}
        self._missing: int | None = None
        self._told_missing, self._last_bytes = -1, 0
        self._turn, self._packing = threading.Lock(), set[Bin]()
        # Two threads gather and two pack: while one waits for its last decodes, the other's keep the workers busy.
        loops = (
            self._plan_loop, self._gather_loop, self._gather_loop, self._pack_loop, self._pack_loop, self._label_loop
        )  # fmt: skip
        self._threads = [threading.Thread(target=loop, name=f"overlord{loop.__name__}") for loop in loops]

    def start(self) -> None:
        """Begin to build ahead."""
        for thread in self._threads:
            thread.start()

    def close(self, why: OverlordError | None = None) -> None:
        """End the threads; whoever waits is told why: by default that the launcher closed the service."""
        self._ends_for = why
        self._closing = True
        self.moved()
        for thread in self._threads:
            thread.join()

    def news(self) -> HostNews:
        """Return how far the clients of this host are, and what they hold."""
        with self._changed:
            seats, waited_s = self._seats, self._waits.seconds()
            return HostNews(seats.reached, seats.positions, self._arena.used_bytes, waited_s=waited_s)

    def attach(self, rank: int, begin: int, at: int | None = None) -> tuple[int, int | None]:
        """Seat a client where its rank begins, or where it stood; return its seat, and how far its rank came before."""
        with self._changed:
            reached = self._seats.reached_by(rank)
            seat = self._seats.take(rank, begin, at)
            self._changed.notify_all()
            return seat, reached

    def detach(self, seat: int) -> None:
        """Free a seat; nothing is built for it any more."""
        with self._changed:
            self._seats.free(seat)
            self.moved()

    def open_step(self, seat: int, step: int) -> tuple[StepHeader, dict[int, Built]] | None:
        """Move the client's window; return the header of a step, or None past the end, also that of its rank.

        With it come the microbatches that are built already, each held once more for the caller. Call `moved` when the
        client has its answer: what follows from the move is not what it waits for.
        """
        with self._changed:
            self._seats.move(seat, step)
            if step not in self._shelf.labels:
                self.moved()
                if self._missing is not None and step not in self._shelf.plans:
                    self._tell_missing(step, self._missing)
            rank = self._seats.rank_of(seat)

            def look() -> LoadingPlan | bool | None:
                plan = self._shelf.plans.get(step)
                if plan is None:
                    return self._past_end(step) or None
                return plan if rank >= plan.mesh.world_size or step in self._shelf.labels else None

            found = self._wait(step, look)
            if not isinstance(found, LoadingPlan):
                return None
            if rank >= found.mesh.world_size:
                self._seats.end(seat)
                self.moved()
                return None
            self._seats.serve(seat)
            header, places = self._shelf.places(rank, found)
            return header, self._shelf.take(places)

    def look_ahead(
        self, seat: int, step: int, at: int | None, most_bytes: int
    ) -> tuple[StepHeader, dict[int, Built]] | None:
        """Return what `open_step` would of a step that the client comes to next, if all of it is there; never waits.

        Args:
            seat: The client's.
            step: The step behind the one it is at.
            at: The step it is at, if it has that one from looking ahead and nobody was told so far.
            most_bytes: What the client may hold.
        """
        with self._changed:
            if at is not None:
                self._seats.move(seat, at)
            plan = self._shelf.plans.get(step)
            if plan is None or self._seats.rank_of(seat) >= plan.mesh.world_size or step not in self._shelf.labels:
                return None
            header, places = self._shelf.places(self._seats.rank_of(seat), plan)
            if not self._shelf.has_all(places, most_bytes):
                return None
            return header, self._shelf.take(places)

    def moved(self) -> None:
        """Drop what nobody wants any more, and wake who builds."""
        with self._changed:
            self._shelf.keep(self._wanted_steps())
            self._changed.notify_all()

    def microbatch(self, seat: int, step: int, microbatch: int) -> Built | None:
        """Return a microbatch of the client's bucket; its segment is held once more for the caller.

        None for a rank that gets its data by the trainer's own broadcast.
        """

        def look() -> Built | bool | None:
            plan = self._shelf.plans.get(step)
            if plan is None:
                return None
            place = self._constructor.bin_of(self._seats.rank_of(seat), plan, microbatch)
            return False if place is None else self._shelf.built.get((step, *place))

        with self._changed:
            try:
                with self._seats.waiting(seat, step):
                    self._changed.notify_all()
                    built = self._wait(step, look)
                    if not isinstance(built, Built):
                        return None
                    self._arena.hold(built.segment.number)
                    return built
            finally:
                self._shelf.keep(self._wanted_steps())

    def leave(self, seat: int, next_step: int) -> None:
        """Note that a client goes in peace, having trained on the steps before `next_step`."""
        with self._changed:
            self._seats.leave(seat, next_step)

    # -- what is wanted ------------------------------------------------------------------------

    def _wanted_steps(self) -> dict[int, set[int]]:
        """Return wanted steps in ascending order with the ranks that want them and, where it is known, are there."""
        failed = self._failed[0] if self._failed is not None else None
        wanted: dict[int, set[int]] = {}
        for step, ranks in self._seats.wanted().items():
            if not self._past_end(step) and (failed is None or step < failed) and step not in self._refused:
                plan = self._shelf.plans.get(step)
                wanted[step] = ranks if plan is None else {rank for rank in ranks if rank < plan.mesh.world_size}
        return wanted

    def _past_end(self, step: int) -> bool:
        return self._end is not None and step >= self._end

    def _has_room(self, step: int, wanted: dict[int, set[int]]) -> bool:
        """Whether a step may be built now: within the budget, or because a client is at it."""
        if step == next(iter(wanted)) or self._seats.stands_at(step):
            return True
        held = sum(gathered.samples.nbytes for gathered in self._shelf.samples.values())
        held += self._arena.used_bytes + self._read_bytes()
        # Steps are much alike: what is being gathered, and what would come now, will be like the last.
        return held + (len(self._gathering) + 1) * self._last_bytes <= self._budget

    def _tell_missing(self, step: int, missing: int) -> None:
        """Say once that a step cannot be planned before a report comes, if a client stands there."""
        if missing == STORE_DOWN:
            return  # the planner's host has said so
        with self._changed:
            stands = self._seats.came_to(step)
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
            if self._closing and self._ends_for is not None:
                raise type(self._ends_for)(*self._ends_for.args)  # a fresh one for each of those who wait
            if self._closing:
                raise ClosedError("the service was closed by its launcher while a client waited for data.")
            self._waits.wait(self._changed)

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
        """Do some work for a step; a failure is kept for whoever waits for that step."""
        try:
            work()
        except BaseException as error:  # the border of the roles: also a decoder's panic must reach who waits
            known = error if isinstance(error, OverlordError) else out_of_files(error)
            if known is None:
                logger.exception("step %d failed", step)
                known = OverlordError(f"step {step} failed: {type(error).__name__}: {error}")
            with self._changed:
                if isinstance(known, SpecError):
                    self._refused[step] = known  # who asks for it is wrong; others go on
                elif self._failed is None or step < self._failed[0]:
                    self._failed = (step, known)
                self.moved()
            return False
        return True

    # -- the three stages ----------------------------------------------------------------------

    def _plan_loop(self) -> None:
        def choose() -> int | None:
            wanted = self._wanted_steps()
            return next((s for s in wanted if s not in self._shelf.plans and self._has_room(s, wanted)), None)

        def work(step: int) -> None:
            with self._changed:
                newcomers = self._seats.only_new(step)
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
                    self._shelf.plans[step] = plan
                self.moved()

        self._run(choose, work, lambda step: step)

    def _gather_loop(self) -> None:
        def choose() -> int | None:
            wanted = self._wanted_steps()
            for step, ranks in wanted.items():
                held, planned = self._shelf.samples.get(step), step in self._shelf.plans
                if planned and step not in self._gathering and (held is None or not ranks <= held.ranks):
                    unknown = bool(ranks) and step not in self._shelf.labels
                    missing = unknown or self._shelf.next_missing(step, ranks) is not None
                    needed = not self._seats.ever_attached or missing
                    if needed and self._has_room(step, wanted):
                        plan = self._shelf.plans[step]
                        expected = self.ranks_of(plan.mesh)
                        self._gathering[step] = (plan, self._seats.gathers_for(expected, plan.mesh.world_size))
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
            self._shelf.gathered(self._gathering[step][0], samples, self._gathering[step][1])
            del self._gathering[step]
            self.moved()

    def _pack_loop(self) -> None:
        def choose() -> Bin | None:
            wanted = self._wanted_steps()
            for step, ranks in wanted.items():
                if step in self._shelf.samples and step in self._shelf.plans:
                    here = ranks & self._shelf.samples[step].ranks
                    missing = self._shelf.next_missing(step, here, self._packing)
                    if missing is not None and self._has_room(step, wanted):
                        self._packing.add(missing)
                        return missing
            return None

        def work(key: Bin) -> None:
            step = key[0]
            with self._changed:
                plan, gathered = self._shelf.plans.get(step), self._shelf.samples.get(step)
            made: dict[Bin, Built] = {}
            try:
                if plan is not None and gathered is not None:
                    made[key] = self._shelf.build(plan, gathered, key[1:])
            finally:
                with self._changed:  # at once: in between, the other thread would take it for missing
                    self._packing.remove(key)
                    self._shelf.add(made)
                    if made:
                        self._shelf.opened(step, key[1:])
            with self._changed:
                self._shelf.keep(self._wanted_steps())  # the clients may have moved on meanwhile
                if step in self._shelf.plans and self._shelf.next_missing(step, self._wanted_steps()[step]) is None:
                    self._shelf.samples.pop(step, None)
                self._changed.notify_all()

        self._run(choose, work, lambda key: key[0])

    def _label_loop(self) -> None:
        """Learn how many labels steps have whose media are decoded on several hosts.

        Every host tells the planner's host which of its samples do not decode, and is told those of all when the last
        one has. A host without attached trainers builds nothing, and one that is short of memory builds nothing ahead:
        the media of their ranks are then decoded here too, so that no host waits for another's trainers. Whoever
        decodes a sample finds the same, so the number depends on nothing of this.
        """

        def choose() -> int | None:
            wanted = self._wanted_steps()
            return next((s for s in wanted if s in self._shelf.checked and s not in self._shelf.labels), None)

        def work(step: int) -> None:
            with self._changed:
                mine = self._shelf.checked.get(step)
            if mine is None:
                return
            ranks, lost = set(mine.ranks), dict(mine.lost)
            for tries in itertools.count(1):
                told = self._planner.ask(
                    {"op": "labels", "step": step, "plan": mine.plan.digest, "world_size": mine.plan.mesh.world_size,
                     "ranks": sorted(ranks), "lost": list(lost.items()), "from": step - self._prefetch - 1}
                )  # fmt: skip
                if self._closing or not told["missing"]:
                    break
                if tries >= OTHERS_TRIES or not told["near"]:
                    others = told["missing"][: len(mine.ranks)]  # no more at a time than this host has memory for
                    lost |= self._constructor.gather(mine.plan, others, open_all=True)().lost
                    ranks |= set(others)
            with self._changed:
                if step in self._shelf.plans and not self._closing:
                    self._shelf.labels[step] = mine.counted - sum(count for _, count in told["lost"])
                self.moved()

        self._run(choose, work, lambda step: step)
