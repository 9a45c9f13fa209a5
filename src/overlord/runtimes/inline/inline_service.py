"""The inline runtime: every role stepped in the caller, single-threaded, for tests and debugging."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.spec_errors import is_whole
from overlord.errors import ClosedError, Fenced, StoreError
from overlord.job.specs import Job, Mixture, Source
from overlord.roles.client import Client
from overlord.roles.views import RankView, StepHeader
from overlord.runtimes.autoscaling.status import describe_roles
from overlord.runtimes.client_feed import check_step
from overlord.runtimes.hosts.planner_host import (
    ReturnWatch,
    Saver,
    SourceChange,
    change_source,
    goes_back,
    left_behind,
    ranks_disagree,
    refuse_coming_step,
)
from overlord.runtimes.hosts.prefetch import Executors
from overlord.runtimes.launching.deployment import Progress, Roles, deploy, plan_first_step
from overlord.runtimes.launching.launch_options import LaunchOptions
from overlord.runtimes.launching.newcomers import Newcomers
from overlord.runtimes.launching.resume import before
from overlord.runtimes.supervision.cleanup import remove_scratch, scratch_folder
from overlord.stores.store import newest_lineage
from overlord.transforms.microbatches.per_microbatch import PackedMicrobatch
from overlord.transforms.microbatches.step_samples import StepSamples

STORE_PATIENCE_S = 1.0
"""How long a store that is down is tried before whoever asked is told."""

T = TypeVar("T")


class InlineService:
    """All roles in this process; nothing runs unless a client asks."""

    address = None
    pid = os.getpid()

    def __init__(self, job: Job, options: LaunchOptions, progress: Progress | None) -> None:
        self._job = job
        self._options = options
        self._scratch = None if options.store else scratch_folder()
        self._samples: OrderedDict[int, StepSamples] = OrderedDict()
        self._packed: OrderedDict[tuple[int, int, int], PackedMicrobatch] = OrderedDict()
        self._labels: dict[int, int] = {}
        self._packed_bytes = 0
        self._positions: dict[int, int] = {}
        self._asked: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        self._roles: Roles | None = None
        self._begin(options, progress)

    def _begin(self, options: LaunchOptions, progress: Progress | None) -> None:
        hands = Executors.of_caller()
        try:
            self._roles = deploy(self._job, options, options.store or f"{self._scratch}", hands, progress)
            self._saver = Saver(self._roles.planner, self._roles.fleet, nullcontext(), most_steps=options.keep // 2)
            self._newcomers = Newcomers(self._roles, hands)
            self._watch = ReturnWatch(self._roles.planner, options.on_source_failure)
            plan_first_step(self._roles.planner)
            self._watch.due()
        except BaseException:
            self.close()
            raise

    def client(self, rank: int, step: int | None = None, state: Mapping[str, Any] | None = None) -> Client:
        """Return the client of one rank, at a step where one is given."""
        check_step(step)
        begin = self.roles.planner.meshes.begin_of(rank) if is_whole(rank) else None
        if step is not None and begin is not None:
            self._join(int(rank), begin := int(step), state)
        return Client(_InlineFeed(self, rank, begin), rank, begin or 0)

    def _join(self, rank: int, step: int, state: Mapping[str, Any] | None) -> None:
        """Go back to a step where that is needed, at once: there are no other trainers that could be waited for.

        Clients of other ranks that stand elsewhere are refused from then on.
        """
        planner = self.roles.planner
        if state is not None:
            planner.check_state(state)
        refuse_coming_step(planner, step)
        others = {other: at for other, at in self._asked.items() if other != rank and at != step}
        if others:
            raise ranks_disagree({**others, rank: step})
        if goes_back(planner, rank, step, self._reached, self._positions):
            store = planner.checkpoints.store
            patiently(lambda: store.journal.commit(force=True))
            newest = newest_lineage(store.place)
            assert newest is not None
            before(store.place, newest, step)
            mesh = planner.meshes.at(max(planner.next_step - 1, planner.first_step))
            self._end()
            self._positions.clear()
            self._reached.clear()
            options = dataclasses.replace(self._options, before_step=step, mesh=mesh, latest=False, skip_steps=0)
            self._begin(options, None)
        self._asked[rank] = step

    def set_mixture(self, mixture: Mixture, at_step: int | None, change_id: str) -> int:
        """Change the mixture from a step on."""
        return patiently(lambda: self.roles.planner.set_mixture(mixture, at_step, change_id=change_id))

    def skip_steps(self, count: int, at_step: int | None, change_id: str) -> int:
        """Pass over global batches before a step."""
        return patiently(lambda: self.roles.planner.skip_steps(count, at_step, change_id=change_id))

    def reshard(self, tree: ClientPlaceTree, at_step: int | None, change_id: str) -> tuple[int, ClientPlaceTree]:
        """Change the mesh from a step on; return that step, and the mesh behind all changes."""
        at = patiently(lambda: self.roles.planner.reshard(tree, at_step, change_id=change_id))
        return at, self.roles.planner.meshes.newest

    def add_source(self, source: Source, weight: float | None, at_step: int | None, change_id: str) -> int:
        """Let a source come at a step."""
        assert self.roles  # refused after it was closed
        return patiently(lambda: self._newcomers.add(source, weight, at_step, nullcontext()))

    def change_source(self, change: SourceChange, name: str, at_step: int | None, change_id: str) -> int:
        """Remove a source, park it, or let it return."""
        return patiently(lambda: change_source(self.roles.planner, change, name, at_step, change_id))

    def mixture(self) -> Mixture:
        """Return the mixture in force."""
        return self.roles.planner.mixture

    def plan_raw(self, step: int) -> LoadingPlan | None:
        """Return the plan of a step."""
        planner = self.roles.planner
        if step < planner.next_step:
            return planner.plan_raw(step)
        patiently(self._watch.look)
        plan = patiently(lambda: planner.plan_raw(step))
        self._watch.due()
        return plan

    def status(self) -> dict[str, Any]:
        """Return what every role holds and has met."""
        return {"hosts": [], "faults": []} | describe_roles(self.roles, "inline", self._positions, 0)

    def close(self) -> None:
        """Close files and remove what is temporary."""
        try:
            self._end()
        finally:
            if self._scratch is not None:
                remove_scratch(self._scratch)

    def _end(self) -> None:
        roles, self._roles = self._roles, None
        self._samples.clear()
        self._packed.clear()
        self._packed_bytes = 0
        self._labels.clear()  # steps of another lineage may hold other samples
        if roles is not None:
            roles.close()

    @property
    def roles(self) -> Roles:
        """The wired roles."""
        if self._roles is None:
            raise ClosedError("the service is closed; launch it again.")
        return self._roles

    def packed(self, rank: int, step: int, microbatch: int) -> PackedMicrobatch | None:
        """Return the microbatch that holds a rank's view, if any; the last few are remembered."""
        roles = self.roles
        plan = self.plan_raw(step)
        assert plan is not None
        place = roles.constructor.bin_of(rank, plan, microbatch)
        if place is None:
            return None
        key = (step, *place)
        if key not in self._packed:
            samples = self._gathered(plan)
            packed = roles.constructor.constructor_do_plan(plan, samples, *place, _new_buffer)
            self._packed[key] = packed
            self._packed_bytes += packed.buffer.nbytes
            while len(self._packed) > 1 and self._packed_bytes > self._options.budget_bytes // 4:
                self._packed_bytes -= self._packed.popitem(last=False)[1].buffer.nbytes
        return self._packed[key]

    def labels(self, plan: LoadingPlan) -> int:
        """Return how many labels a step has on all ranks."""
        if plan.step not in self._labels:
            self._labels[plan.step] = self._gathered(plan).labels
        return self._labels[plan.step]

    def _gathered(self, plan: LoadingPlan) -> StepSamples:
        if plan.step not in self._samples:
            self._samples[plan.step] = self.roles.constructor.gather(plan, open_all=True)()
            while len(self._samples) > 1:
                self._samples.popitem(last=False)
        return self._samples[plan.step]

    def moved(self, rank: int, step: int) -> None:
        """Note a rank's position, and forget microbatches that every client has passed."""
        self._asked.clear()  # the ranks have begun: who comes now does not come with the others
        self._positions[rank] = self._reached[rank] = step
        slowest = min(self._positions.values())
        planner = self.roles.planner
        planner.passed(planner.meshes.passed(self._reached, self._positions))
        if planner.checkpoints.is_due:
            patiently(self._saver.work)
        for key in [k for k in self._packed if k[0] < slowest]:
            self._packed_bytes -= self._packed.pop(key).buffer.nbytes
        for old in [s for s in self._labels if s < slowest]:
            del self._labels[old]

    def left(self, rank: int, next_step: int) -> None:
        """Note that a rank went, and how far it came."""
        if rank in self._positions and self._roles is not None:
            self.moved(rank, next_step)
            del self._positions[rank]


class _InlineFeed:
    """A rank's door to the inline service."""

    def __init__(self, service: InlineService, rank: int, begin: int | None) -> None:
        self._service = service
        self._rank = rank
        self._lineage = service.roles.planner.checkpoints.store.lineage
        meshes = service.roles.planner.meshes
        self.mesh = meshes.newest if begin is None else meshes.at(begin)

    def open_step(self, step: int) -> StepHeader | None:
        self._follow(f"step {step}, where rank {self._rank} is,", step)
        plan = self._service.plan_raw(step)
        self._service.moved(self._rank, step)
        if plan is None or self._rank >= plan.mesh.world_size:
            return None
        header = self._service.roles.constructor.header_of(self._rank, plan, self._service.labels(plan))
        following = self._service.roles.planner.meshes.at(step + 1)
        return header if following == plan.mesh else dataclasses.replace(header, next_mesh=following)

    def microbatch(self, step: int, microbatch: int) -> RankView:
        constructor, plan = self._service.roles.constructor, self._service.plan_raw(step)
        assert plan is not None
        packed = self._service.packed(self._rank, step, microbatch)
        if packed is None:
            return RankView({}, {})
        names, scalars = constructor.view_of(self._rank, plan, packed)
        arrays = packed.named()
        return RankView({key: arrays[name] for key, name in names.items()}, scalars)

    def _follow(self, what: str, step: int) -> None:
        """Follow a service that went back, from the very step that it went back to."""
        planner = self._service.roles.planner
        lineage = planner.checkpoints.store.lineage
        if lineage != self._lineage and step > planner.first_step:
            raise left_behind(what, planner.first_step)
        self._lineage = lineage

    def report(self, step: int, metrics: dict[str, float]) -> None:
        self._follow(f"the report of step {step}", step)
        patiently(lambda: self._service.roles.planner.report(step, metrics))

    def state(self, step: int) -> dict[str, Any]:
        return self._service.roles.planner.state(step)

    def close(self, next_step: int) -> None:
        self._service.left(self._rank, next_step)


def patiently(work: Callable[[], T]) -> T:
    """Do what needs the store; where that fails try again for a while, then let the caller know. Asking again works."""
    until, wait = time.monotonic() + STORE_PATIENCE_S, 0.05
    while True:
        try:
            return work()
        except Fenced:
            raise
        except StoreError:
            if time.monotonic() + wait > until:
                raise
            time.sleep(wait)
            wait *= 2


def _new_buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)
