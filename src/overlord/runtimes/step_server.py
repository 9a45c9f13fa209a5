"""Builds steps ahead of the clients of one host: threads that plan, gather and pack around one condition.

Rules of this file:
1. A step is wanted when it lies in a client's window [its step, its step + prefetch], or when
   somebody waits for it. What is not wanted is dropped; whoever asks for it later gets it built again.
2. Work goes to the lowest wanted step first. Beyond the byte budget only what a client needs now is built.
3. A failure belongs to its step: nothing is built from there on, and steps before it are still served,
   also to a client that comes later.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from overlord.core.plan import LoadingPlan
from overlord.errors import ClosedError, OverlordError
from overlord.roles.views import StepHeader
from overlord.runtimes.deployment import Roles
from overlord.runtimes.shared_memory import Arena, Segment
from overlord.transforms.packed import PackedMicrobatch
from overlord.transforms.step_samples import StepSamples

logger = logging.getLogger("overlord")

T = TypeVar("T")


@dataclass(slots=True)
class Seat:
    """One attached client."""

    rank: int
    step: int
    """The step it is at."""


@dataclass(frozen=True, slots=True)
class Built:
    """A microbatch in shared memory."""

    segment: Segment
    packed: PackedMicrobatch
    plan: LoadingPlan


Bin = tuple[int, int, int]
"""(step, bucket, microbatch)."""


class StepServer:
    """Serves planned, gathered and packed microbatches to the connections of one host."""

    def __init__(self, roles: Roles, arena: Arena, *, prefetch: int, budget_bytes: int) -> None:
        self._roles = roles
        self._arena = arena
        self._prefetch = prefetch
        self._budget = budget_bytes
        self._changed = threading.Condition()
        self._planner_lock = threading.Lock()
        self._plans: dict[int, LoadingPlan] = {}
        self._samples: dict[int, StepSamples] = {}
        self._built: dict[Bin, Built] = {}
        self._seats: dict[int, Seat] = {}
        self._waiting: Counter[tuple[int, int]] = Counter()
        self._reached: dict[int, int] = {}
        self._end: int | None = None
        self._failed: tuple[int, OverlordError] | None = None
        self._closing = self._ever_attached = False
        self._gathering: dict[int, LoadingPlan] = {}
        self._told_missing, self._last_bytes = -1, 0
        self._turn = threading.Lock()
        self._packing: set[Bin] = set()
        # Two threads gather and two pack: while one waits for its last decodes, the other's keep the workers busy.
        loops = (self._plan_loop, self._gather_loop, self._gather_loop, self._pack_loop, self._pack_loop)
        self._threads = [threading.Thread(target=loop, name=f"overlord{loop.__name__}") for loop in loops]

    def start(self) -> None:
        """Begin to build ahead."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads; whoever waits is told."""
        self._closing = True
        self._wake()
        for thread in self._threads:
            thread.join()
        self._roles.planner.passed(self._all_passed())

    def attach(self, rank: int) -> tuple[int, int]:
        """Seat a client; return its seat and the first step of the stream."""
        with self._changed:
            self._ever_attached = True
            number = max(self._seats, default=-1) + 1
            first = self._roles.planner.first_step
            self._seats[number] = Seat(rank, first)
            self._changed.notify_all()
            return number, first

    def detach(self, seat: int) -> None:
        """Free a seat; nothing is built for it any more."""
        with self._changed:
            self._seats.pop(seat)
            self._drop_unwanted()
            self._changed.notify_all()

    def open_step(self, seat: int, step: int) -> StepHeader | None:
        """Return the header of a step, or None past the end; moves the client's window."""
        with self._changed:
            self._seats[seat].step = step
            self._reached[self._seats[seat].rank] = step
            self._drop_unwanted()
            self._changed.notify_all()
            found = self._wait(step, lambda: self._plans.get(step) or (self._past_end(step) or None))
            rank = self._seats[seat].rank
            return self._roles.constructor.header_of(rank, found) if isinstance(found, LoadingPlan) else None

    def microbatch(self, seat: int, step: int, microbatch: int) -> Built | None:
        """Return a microbatch of the client's bucket; its segment is held once more for the caller.

        None for a rank that gets its data by the trainer's own broadcast.
        """
        with self._changed:
            rank, constructor = self._seats[seat].rank, self._roles.constructor

            def look() -> Built | bool | None:
                plan = self._plans.get(step)
                if plan is None:
                    return None
                place = constructor.bin_of(rank, plan, microbatch)
                return False if place is None else self._built.get((step, *place))

            self._waiting[(step, rank)] += 1
            self._changed.notify_all()
            try:
                built = self._wait(step, look)
                if not isinstance(built, Built):
                    return None
                self._arena.hold(built.segment.number)
                return built
            finally:
                self._waiting[(step, rank)] -= 1
                self._waiting += Counter()
                self._drop_unwanted()

    def leave(self, seat: int, next_step: int) -> None:
        """Note that a client goes in peace, having trained on the steps before `next_step`."""
        with self._changed:
            self._reached[self._seats[seat].rank] = next_step

    def with_planner(self, ask: Callable[[Any], T]) -> T:
        """Ask the planner something, or tell it, while it is not planning."""
        with self._planner_lock:
            answer = ask(self._roles.planner)
        self._wake()  # a step may have waited for what was told
        return answer

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def positions(self) -> dict[int, int]:
        """Return the step each attached rank is at."""
        with self._changed:
            return {seat.rank: seat.step for seat in self._seats.values()}

    # -- what is wanted ------------------------------------------------------------------------

    def _wanted_steps(self) -> dict[int, set[int]]:
        """Return wanted steps in ascending order with the ranks that want them."""
        wanted: dict[int, set[int]] = {}
        for step, rank in self._waiting:
            wanted.setdefault(step, set()).add(rank)
        for seat in self._seats.values():
            for step in range(seat.step, seat.step + self._prefetch + 1):
                wanted.setdefault(step, set()).add(seat.rank)
        if not self._ever_attached:
            first = self._roles.planner.first_step
            wanted = {step: set() for step in range(first, first + self._prefetch)}
        failed = self._failed[0] if self._failed is not None else None
        return {s: wanted[s] for s in sorted(wanted) if not self._past_end(s) and (failed is None or s < failed)}

    def _drop_unwanted(self) -> None:
        wanted = self._wanted_steps()
        plans, wanted_by = self._plans, self._roles.constructor.wanted_by
        needed = {step: wanted_by(ranks, plans[step]) for step, ranks in wanted.items() if step in plans}
        for key in [k for k in self._built if k[0] not in needed or not needed[k[0]](*k[1:])]:
            self._arena.release(self._built.pop(key).segment.number)
        for step in [s for s in self._samples if s not in wanted]:
            del self._samples[step]
        for step in [s for s in self._plans if s not in wanted]:
            del self._plans[step]

    def _all_passed(self) -> int:
        """Return the step before which every rank that ever attached is done."""
        return min(self._reached.values(), default=self._roles.planner.first_step)

    def _past_end(self, step: int) -> bool:
        return self._end is not None and step >= self._end

    def _missing_bins(self, step: int, ranks: set[int]) -> list[Bin]:
        bins = self._roles.constructor.bins_of(ranks, self._plans[step])
        return [(step, *one) for one in bins if (step, *one) not in self._built]

    def _has_room(self, step: int, wanted: dict[int, set[int]]) -> bool:
        """Whether a step may be built now: within the budget, or because a client is at it."""
        if step == next(iter(wanted)) or any(step == s for s, _ in self._waiting):
            return True
        if any(step == seat.step for seat in self._seats.values()):
            return True
        held = sum(samples.nbytes for samples in self._samples.values())
        held += self._arena.used_bytes + self._roles.fleet.buffer_bytes
        # Steps are much alike: what is being gathered, and what would come now, will be like the last.
        return held + (len(self._gathering) + 1) * self._last_bytes <= self._budget

    def _waits_for_report(self, step: int) -> bool:
        """Whether a step cannot be planned before a report comes; says so once, if a client stands there."""
        missing = self._roles.planner.missing_report(step)
        if (
            missing is not None
            and missing != self._told_missing
            and any(seat.step >= step for seat in self._seats.values())
        ):
            self._told_missing = missing
            logger.warning("step %d waits for the report of step %d; call client.report on one rank", step, missing)
        return missing is not None

    # -- waiting and failing -------------------------------------------------------------------

    def _wait(self, step: int, look: Callable[[], T | None]) -> T:
        while True:
            found = look()
            if found is not None:
                return found
            if self._failed is not None and step >= self._failed[0]:
                raise self._failed[1]
            if self._closing:
                raise ClosedError("the service was closed while a client waited for data.")
            self._changed.wait()

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
            known = error if isinstance(error, OverlordError) else None
            if known is None:
                logger.exception("step %d failed", step)
                known = OverlordError(f"step {step} failed: {type(error).__name__}: {error}")
            with self._changed:
                if self._failed is None or step < self._failed[0]:
                    self._failed = (step, known)
                self._drop_unwanted()
                self._changed.notify_all()
            return False
        return True

    # -- the three stages ----------------------------------------------------------------------

    def _plan_loop(self) -> None:
        def choose() -> int | None:
            wanted = self._wanted_steps()
            chosen = next((s for s in wanted if s not in self._plans and self._has_room(s, wanted)), None)
            return None if chosen is None or self._waits_for_report(chosen) else chosen

        def work(step: int) -> None:
            with self._planner_lock:
                plan = self._roles.planner.plan_raw(step)  # (3) the plan is made when it is asked for
                self._roles.planner.passed(self._all_passed())
            with self._changed:
                if plan is None:
                    self._end = min(step, step if self._end is None else self._end)
                else:
                    self._plans[step] = plan
                self._drop_unwanted()
                self._changed.notify_all()

        self._run(choose, work, lambda step: step)

    def _gather_loop(self) -> None:
        def choose() -> int | None:
            wanted = self._wanted_steps()
            for step, ranks in wanted.items():
                if step in self._plans and step not in self._samples and step not in self._gathering:
                    needed = not self._ever_attached or self._missing_bins(step, ranks)
                    if needed and self._has_room(step, wanted):
                        self._gathering[step] = self._plans[step]
                        return step
            return None

        while True:
            with self._turn:  # steps leave the read buffers in order, and are finished side by side
                step = self._next_task(choose)
                if step is None:
                    return
                collecting: list[Callable[[], StepSamples]] = []
                gather = self._roles.constructor.gather
                popped = self._attempt(step, lambda: collecting.append(gather(self._gathering[step])))  # noqa: B023
            if popped:
                self._attempt(step, partial(self._collect, step, collecting))

    def _collect(self, step: int, collecting: list[Callable[[], StepSamples]]) -> None:
        samples = collecting.pop()()
        with self._changed:
            self._last_bytes = samples.nbytes
            self._samples[step] = samples
            del self._gathering[step]
            self._drop_unwanted()
            self._changed.notify_all()

    def _pack_loop(self) -> None:
        def choose() -> Bin | None:
            wanted = self._wanted_steps()
            for step, ranks in wanted.items():
                if step in self._samples and step in self._plans:
                    missing = [key for key in self._missing_bins(step, ranks) if key not in self._packing]
                    if missing and self._has_room(step, wanted):
                        self._packing.add(missing[0])
                        return missing[0]
            return None

        def work(key: Bin) -> None:
            step, bucket, microbatch = key
            with self._changed:
                plan, samples = self._plans.get(step), self._samples.get(step)
            made: dict[Bin, Built] = {}
            try:
                if plan is not None and samples is not None:
                    made[key] = self._pack(plan, samples, bucket, microbatch)
            finally:
                with self._changed:  # at once: in between, the other thread would take it for missing
                    self._packing.remove(key)
                    self._built |= made
            with self._changed:
                self._drop_unwanted()  # the clients may have moved on meanwhile
                if step in self._plans and not self._missing_bins(step, self._wanted_steps()[step]):
                    self._samples.pop(step, None)
                self._changed.notify_all()

        self._run(choose, work, lambda key: key[0])

    def _pack(self, plan: LoadingPlan, samples: StepSamples, bucket: int, microbatch: int) -> Built:
        taken: list[Segment] = []

        def allocate(nbytes: int) -> Any:
            taken.append(self._arena.take(nbytes))
            return taken[0].memory[:nbytes]

        try:
            packed = self._roles.constructor.constructor_do_plan(plan, samples, bucket, microbatch, allocate)
        except BaseException:
            for segment in taken:
                self._arena.release(segment.number)
            raise
        return Built(taken[0], packed, plan)
