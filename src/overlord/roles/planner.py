"""Planner: makes plan t once, from the loaders' metadata, and keeps what is needed to make it again.

    Planner      plans steps in order, takes reports and live changes, gives states
    PlannerStart what a planner starts from: a state, the inputs so far, and what a recovery found
    Meshes       the mesh of every step: that of the launch, until a live change gives another
    Checkpoints  what is due to be written to the store, and how far steps may be handed out
    KeptStates   older states, from which a step is planned again

Rules of this file:
1. Inputs (reports, changes, verdicts) are durable before they are used. Plans are derivable: only a record is kept.
2. A snapshot is never ahead of the clients: every step before the one it resumes at has been delivered.
3. A plan that is made again must have the same digest as before; otherwise a file of a source has changed.
4. A mesh holds from a step that was not planned, so the place of a rank at a step never changes. A rank that a mesh
   does not have ends at the first step of that mesh; a rank that only a later mesh has begins there.
5. Nothing is written while a step is planned: `Checkpoints.due` returns what the runtime writes when it has time. Only
   the horizon, up to which steps may be handed out, must be on disk before; it is moved long before it is reached.
6. Recent states are all kept, older ones at intervals, and none forever: states more than `keep` steps behind every
   client are dropped, except the one from which the oldest step that can still be requested is drawn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overlord.core.draw import Buffer, Draw, Limits
from overlord.core.messages import MetaRequest
from overlord.core.order import BEGIN
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.samples import Cursor
from overlord.core.states import StreamState, check_form, describe_differences, names_of, restricted_parts
from overlord.errors import PlanError, ReaderError, ReportMissing, SourceError, SpecError, StateError
from overlord.job.specs import Job, Mixture
from overlord.roles.changes import LAST_STEP, MOST_SKIPPED, Change, InputLog, SourceChanges, check_mixture
from overlord.roles.drawer import Drawer, DrawnStep
from overlord.roles.poisoned_rows import PoisonedRows
from overlord.roles.ports import Loaders
from overlord.stores.store import KEEP, Store

MakePlan = Callable[[Buffer, ClientPlaceTree], LoadingPlan]
"""A strategy, with a check of its result."""
LimitsOf = Callable[[ClientPlaceTree], Limits]
"""The limits of plans on a mesh; raises SpecError for a mesh that the job does not fit."""

CACHED_PLANS = 32
CACHED_BYTES = 64 << 20
"""Plans that are cached: at most this many, and at most this many bytes in all."""
KEPT_DIGESTS = 1 << 14
REASON_LENGTH = 400
"""Characters of a reason that are journaled."""
KEPT_STATES = 256
"""The states of this many recent steps are kept, and of every step that is a multiple of this."""
KEPT_REPLAYED = 64
"""Old states that were computed again are kept too: a client that attaches late requests one step after another."""
MOST_ROWS = 512
"""Rows of a state that the record of a plan holds; with more sources a journal has only their cursors."""
SNAPSHOT_EVERY = 16
"""Steps between snapshots at first; a runtime with a slow store takes them less often."""
AHEAD = 32
"""Steps that the horizon is moved ahead; after a crash, a change takes effect at the horizon or later."""
SLACK = 24
"""The horizon is moved when fewer steps than this are left: they may be planned while it is written."""


@dataclass(frozen=True, slots=True)
class PlannerStart:
    """What a planner starts from. Of a stream that recovers, the store has continued its lineage already."""

    state: StreamState
    inputs: InputLog
    parts: Mapping[str, Any]
    """What the stream's fingerprint covers."""
    poisoned: PoisonedRows
    earlier: Sequence[StreamState] = ()
    """Of a recovery, older states of its lineage."""
    digests: Mapping[int, str] = field(default_factory=dict[int, str])
    """Of a recovery, the digests of plans that were made before the crash."""


class Planner:
    """Plans steps in order. Older steps can be requested again, as far as they are kept.

    `mesh` is the mesh of the launch, `keep` how many steps behind the slowest client can be requested again. With
    `parks_failing` a source that cannot be read is parked; otherwise the stream stops.
    """

    def __init__(
        self,
        job: Job,
        loaders: Loaders,
        store: Store,
        start: PlannerStart,
        make_plan: MakePlan,
        *,
        mesh: ClientPlaceTree,
        limits: LimitsOf,
        parks_failing: bool = False,
        keep: int = KEEP,
    ) -> None:
        state, inputs = start.state, start.inputs
        self._job = job
        self._loaders = loaders
        self._make_plan = make_plan
        self._limits = limits
        self.inputs = inputs
        """Reports and live changes so far."""
        self.parts = start.parts
        """What the stream's fingerprint covers; set again when a source is added."""
        self._parks_failing = parks_failing
        self._poisoned = start.poisoned
        self._drawer = Drawer(job, loaders, state, inputs)
        self.sources = SourceChanges(inputs, self._effective)
        """Live changes of the sources."""
        self.first_step = store.first_step if store.lineage else state.step
        """The step this stream was launched at."""
        self.promised = store.horizon if store.lineage else state.step
        """Steps before this one may have been handed out by a planner that this one replaces."""
        self.meshes = Meshes(mesh, self.first_step, inputs)
        """The mesh of every step."""
        self._states = KeptStates((*start.earlier, state), keep=keep)
        self._plans: OrderedDict[int, LoadingPlan] = OrderedDict()
        self._digests: dict[int, str] = dict(start.digests)
        self.end: int | None = None
        """The step before which the stream ends; None while that is not known."""
        self.checkpoints = Checkpoints(
            store, state.step, lambda step: self.state(step, whole=True), lambda: self.next_step
        )
        """What is due to be written to the store."""
        self.latest_weights: tuple[float, ...] = ()
        """The weights of the newest plan."""
        self._follows_reports = False  # known once the strategy has read the metrics of a step

    @property
    def next_step(self) -> int:
        """The first step that is not planned."""
        return self._drawer.state.step

    @property
    def newest_plan(self) -> LoadingPlan | None:
        """The plan of the newest step, as long as it is cached."""
        return self._plans.get(self.next_step - 1)

    @property
    def latest_state(self) -> StreamState:
        """The state after the newest plan."""
        return self._drawer.state

    def passed_cursors(self) -> list[Cursor]:
        """Return the cursor of every source before the steps that some client may still need."""
        state = self._states.nearest(self.checkpoints.passed)
        return [state.cursor(source) for source in range(len(state.epoch))]

    def plan_raw(self, step: int) -> LoadingPlan | None:
        """Return the plan of a step, or None past the end of the stream."""
        if step < self.first_step:
            raise SpecError(
                f"step {step} is before step {self.first_step}, at which this stream was launched; its samples are "
                "not part of the stream. Launch from an older state to get it."
            )
        self._states.check(step)
        if step in self._plans:
            self._plans.move_to_end(step)
            return self._plans[step]
        if step < self._drawer.state.step:
            return self._remember(self._plan_again(step))
        while self.end is None and self._drawer.state.step <= step:
            self._plan_next()
        return self._plans.get(step)

    def summary_buffer(self, step: int) -> Buffer | None:
        """Return the input of a strategy for a step: its draw with the metadata; None past the end of the stream."""
        plan = self.plan_raw(step)
        return None if plan is None else Buffer(plan.draw, self._limits(plan.mesh), lambda: plan.metrics or {})

    def _metrics_at(self, step: int) -> Mapping[str, float]:
        """Return the report that a strategy follows at a step: the one of `lag` steps before, as of the mixture.

        Raises:
            ReportMissing: It has not arrived. The step is drawn by then, and planned once it has.
        """
        self._follows_reports = True
        missing = self._missing_metrics(step)
        if missing is not None:
            raise ReportMissing(
                f"step {step} needs the report of step {missing}: its strategy follows the metrics with "
                f"lag={self._job.lag}. Call client.report({missing}, ..) on one rank before requesting step {step}."
            )
        return self.inputs.report_of(step - self._job.lag) or {}

    def _missing_metrics(self, step: int) -> int | None:
        needed = step - self._job.lag
        return needed if needed >= 0 and self.inputs.report_of(needed) is None else None

    @property
    def mixture(self) -> Mixture:
        """The mixture in force."""
        return self._drawer.mixer.mixture

    def weights_ahead(self, step: int) -> list[float]:
        """Return the weights of a future step, as far as they are known now."""
        return self._drawer.mixer.weights_ahead(step)

    def can_read(self, name: str) -> bool:
        """Try to read a source at its cursor; safe while another thread plans."""
        number, state = self.inputs.names.index(name), self._drawer.state
        cursor = state.cursor(number) if number < len(state.epoch) else Cursor(0, BEGIN, 0)
        try:
            return bool(self._loaders.summary_buffer([MetaRequest(number, cursor, 1)]))
        except (ReaderError, SourceError):
            return False

    def missing_report(self, step: int) -> int | None:
        """Return the step of the report that is needed to plan a step and is missing; None if there is none.

        The step is the next one to plan, or the last one drawn, which may wait for a report that its strategy follows.
        """
        found = self._drawer.mixer.missing_report(step) if step == self.next_step else None
        if found is None and self._follows_reports and step in (self.next_step - 1, self.next_step):
            found = self._missing_metrics(step)
        return found

    def state(self, step: int, *, whole: bool = False) -> dict[str, Any]:
        """Return the state before a step as JSON; `whole` adds what only a recovery of this service needs."""
        if self.end is not None and step > self.end:
            step = self.end
        if step > self._drawer.state.step:
            self.plan_raw(step - 1)
        state = self._state_before(step)
        recent = self.inputs.recent(step - self._job.lag, step)
        changes = self.inputs.changes_from(step, whole=whole)
        names = self.inputs.names[: len(state.epoch)]
        return state.to_json(names, restricted_parts(self.parts, names), recent, changes, self._poisoned.to_json())

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another stream: of another job, or of a lineage that this stream was forked from.

        Reports, changes and verdicts may have arrived after the state was taken, and are not compared. If the step is
        not kept here, only the fingerprint is compared.

        Raises:
            StateError: with the differences.
        """
        check_form(state)
        step, names = int(state["step"]), names_of(state)
        here = self.state(step) if self._states.oldest <= step <= self.next_step else None
        parts = restricted_parts(self.parts, names) if here is None else here["fingerprint"]
        differences = describe_differences(state["fingerprint"], parts)
        if differences:
            raise StateError(
                f"the state belongs to another stream than the service's: {'; '.join(differences)}. Resuming from it "
                "would lose or repeat samples silently. Give the address of the service that runs this job, or launch "
                "one with state=."
            )
        if here is not None and any(here[key] != state[key] for key in ("sources", "mixer")):
            raise StateError(
                f"the state of step {step} is not the one that this service had at that step: the run was forked, by "
                "other reports or changes or by an older checkpoint. Resuming from it would lose or repeat samples "
                "silently. Launch a service with state= to resume from it."
            )

    def changes_after(self, step: int) -> list[str]:
        """Describe the changes that take effect after a step."""
        return [f"{change.kind} at step {change.at}" for change in self.inputs.changes if change.at > step]

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the trainer's metrics of a step; the first report of a step counts."""
        if self.inputs.report_of(step) is not None:
            return
        if self.next_step <= step < self.promised:
            self.plan_raw(step)  # it may have been handed out before a crash, and is not planned again yet
        if step >= self.next_step:
            raise SpecError(
                f"report: step {step} has not been planned yet (the next one is {self.next_step}); it cannot have been "
                "trained on. Report `step.index` of a step that was delivered."
            )
        self._drawer.mixer.check_report(step, metrics)
        self.inputs.add_report(step, metrics)

    def set_mixture(self, mixture: Mixture, at_step: int | None = None, *, change_id: str = "") -> int:
        """Change the mixture from a step that is not planned (default: the next) on; return that step."""
        made = self.inputs.step_of(change_id)
        if made is not None:
            return made
        at = self._effective("set_mixture", at_step)
        check_mixture(mixture, self.mixture, self.inputs.roster_at(at).present)
        change = Change("mixture", at, mixture=mixture, id=change_id)
        self.inputs.check("set_mixture", change)
        self.inputs.add_change(change)
        return at

    def skip_steps(self, count: int, at_step: int | None = None, *, change_id: str = "") -> int:
        """Skip `count` global batches before a step that is not planned (default: the next); return that step."""
        made = self.inputs.step_of(change_id)
        if made is not None:
            return made
        if count < 1:
            raise SpecError(f"skip_steps: count is {count}; nothing would be skipped. Give 1 or more.")
        at = self._effective("skip_steps", at_step)
        before = self.inputs.skips_at(at)
        if before + count > MOST_SKIPPED:
            told = f"{count}, with {before} that are skipped before step {at} already" if before else f"{count}"
            raise SpecError(
                f"skip_steps: count is {told}; what is skipped must be drawn first, while trainers wait, so at most "
                f"{MOST_SKIPPED} global batches are skipped before a step. Give fewer, or several steps."
            )
        self.inputs.add_change(Change("skip", at, count=count, id=change_id))
        return at

    def reshard(
        self, tree: ClientPlaceTree, at_step: int | None = None, *, change_id: str = "", hosts: int | None = None
    ) -> int:
        """Change the mesh from a step that is not planned (default: the next) on; return that step.

        `hosts` are written down for a supervisor that recovers.
        """
        made = self.inputs.step_of(change_id)
        if made is not None:
            return made
        at = self._effective("reshard", at_step)
        self._check_mesh(tree)
        self.inputs.add_change(Change("mesh", at, mesh=tree, hosts=hosts, id=change_id))
        return at

    def _check_mesh(self, tree: ClientPlaceTree) -> None:
        """Refuse a mesh on which no step can be planned, by planning a known draw on it."""
        known = next(reversed(self._plans.values()), None)
        try:
            limits = self._limits(tree)
            if known is not None:
                self._make_plan(Buffer(known.draw, limits, lambda: known.metrics or {}), tree)
        except (SpecError, PlanError) as error:
            raise SpecError(
                f"reshard: the mesh {tree} does not fit this job; the stream would stop at its first step. {error}"
            ) from error

    def _effective(self, what: str, at_step: int | None) -> int:
        # Steps up to the promised horizon may have been handed out before a crash, and must not change; but none from
        # the first step on that has no source to draw from.
        promised = range(self.next_step, self.promised)
        first = next((step for step in promised if not self.inputs.roster_at(step).drawn), promised.stop)
        first = max(first, self.next_step)
        at = first if at_step is None else at_step
        if at > LAST_STEP:
            raise SpecError(
                f"{what}: at_step is {at}, and no run comes to a step beyond {LAST_STEP}; nothing would change. Give "
                f"the step from which it should hold ({first} or more), or leave it out."
            )
        if at < first:
            ahead = f"may have been handed out before the planner was replaced (the first that was not is {first})"
            known = ahead if at >= self.next_step else f"is already planned (the next one is {first})"
            raise SpecError(
                f"{what}: step {at} {known}, and a planned step never changes. Use at_step={first} or more, or leave "
                "it out."
            )
        return at

    def passed(self, step: int) -> None:
        """Record that every client has finished the steps before this one; a snapshot may be due then."""
        if step > self.checkpoints.passed:
            self.checkpoints.passed = step
            self._states.forget(step)

    def close(self) -> None:
        """Save the state that the clients have passed, and close the store."""
        self.checkpoints.close()

    def _plan_next(self) -> None:
        step = self._drawer.state.step
        if self._job.max_steps is not None and step >= self._job.max_steps:
            self.end = step
            return
        self.checkpoints.reserve(step)
        before = self._drawer.state
        self._poisoned.step = step
        drawn = self._draw_or_park(step)
        if drawn is None:
            self.end = step
            return
        after = drawn.after
        self._states.add(after, self.checkpoints.passed)
        self._digests.pop(after.step - KEPT_DIGESTS, None)
        plan = self._planned(drawn.draw, after)
        self._record(plan, before, after)
        self._remember(plan)

    def _draw_or_park(self, step: int) -> DrawnStep | None:
        """Draw a step; park sources that cannot be read, if the launch allows it."""
        while True:
            try:
                return self._drawer.draw()
            except (ReaderError, SourceError) as error:
                parks = self._parks_failing and step >= self.promised  # a promised step includes the source
                if not parks or error.source is None or error.source in self.sources.parked(step):
                    raise
                # The change is on disk before the draw is repeated.
                self.sources.park(error.source, step, why=str(error)[:REASON_LENGTH], failed=True)
                self.checkpoints.wanted = step

    def _record(self, plan: LoadingPlan, before: StreamState, after: StreamState) -> None:
        self.latest_weights = plan.draw.weights
        if plan.step in self._digests:  # it was planned before a crash
            if plan.digest != self._digests[plan.step]:
                raise _differs(plan.step)
            return
        rows = after.rows_since(before.grown(len(after.epoch)), self.inputs.names)
        record: dict[str, Any] = {
            "kind": "plan",
            "step": plan.step,
            "order": plan.draw.digest,
            "plan": plan.digest,
            "mixture": plan.draw.mixture_version,
        }
        if len(rows) <= MOST_ROWS and (after.mixer is None or after.mixer["rule"] is None):
            # All that the state changed by: any kept step can be shown, or gone on from, without drawing those before.
            record |= {"rows": rows} | ({} if after.mixer is None else {"mixer": after.mixer})
        else:
            record["cursors"] = {name: row[:3] for name, row in rows.items()}
        self.checkpoints.store.journal.append(record, durable=False)
        self._digests[plan.step] = plan.digest

    def _planned(self, draw: Draw, after: StreamState) -> LoadingPlan:
        tree = self.meshes.at(draw.step)
        read: list[Mapping[str, float]] = []

        def reported() -> Mapping[str, float]:
            read.append(self._metrics_at(draw.step))
            return read[-1]

        plan = self._make_plan(Buffer(draw, self._limits(tree), reported), tree)
        ends = np.stack([after.epoch, after.group, after.offset], axis=1)
        return plan.with_ends(ends, metrics=read[-1] if read else None)

    def _plan_again(self, step: int) -> LoadingPlan:
        """Make an old plan again, from the nearest state before it."""
        before = self._state_before(step)
        drawn = Drawer(self._job, self._loaders, before, self.inputs).draw()
        plan = None
        if drawn is not None:
            self._states.add_replayed(drawn.after)
            plan = self._planned(drawn.draw, drawn.after)
            if step not in self._digests and step + KEPT_DIGESTS > self._drawer.state.step:
                self._record(plan, before, drawn.after)  # its strategy failed when it was drawn first
        if plan is None or self._digests.get(step, plan.digest) != plan.digest:
            raise _differs(step)
        return plan

    def _state_before(self, step: int) -> StreamState:
        nearest = self._states.nearest(step)
        if nearest.step == step:
            return nearest
        drawer = Drawer(self._job, self._loaders, nearest, self.inputs)
        while drawer.state.step < step:
            drawn = drawer.draw()
            if drawn is None:
                break
            self._states.add_replayed(drawn.after)
        return drawer.state

    def _remember(self, plan: LoadingPlan) -> LoadingPlan:
        self._plans[plan.step] = plan
        while len(self._plans) > 1 and (
            len(self._plans) > CACHED_PLANS or sum(p.nbytes for p in self._plans.values()) > CACHED_BYTES
        ):
            self._plans.popitem(last=False)
        return plan


def _differs(step: int) -> PlanError:
    return PlanError(
        f"step {step} was planned again with a different result; ranks would get different data. A file of a source "
        "has changed, or a Custom function is not deterministic. Restore the file, or start a new run."
    )


class Meshes:
    """The mesh of every step of one stream.

    Example:
        Four ranks become two at step 10, and eight at step 20::

            meshes.at(9).dp, meshes.at(10).dp
            (4, 2)
            meshes.begin_of(1), meshes.begin_of(3), meshes.begin_of(8)
            (0, 20, None)
    """

    def __init__(self, launched: ClientPlaceTree, first_step: int, inputs: InputLog) -> None:
        self._launched = launched
        self._first_step = first_step
        self._inputs = inputs

    def at(self, step: int) -> ClientPlaceTree:
        """Return the mesh of a step."""
        return self._inputs.mesh_at(step) or self._launched

    @property
    def newest(self) -> ClientPlaceTree:
        """The mesh after all changes so far."""
        return self.eras()[-1][1]

    def after(self, step: int) -> tuple[int, ClientPlaceTree] | None:
        """Return (first step, mesh) of the next mesh after a step; None if none is known."""
        return next(((begin, tree) for begin, tree in self.eras() if begin > step), None)

    def eras(self) -> list[tuple[int, ClientPlaceTree]]:
        """Return (first step, mesh) of every mesh, in order; the first begins at the first step of the stream."""
        later = [(begin, tree) for begin, tree in self._inputs.meshes() if begin > self._first_step]
        return [(self._first_step, self.at(self._first_step)), *later]

    def begin_of(self, rank: int) -> int | None:
        """Return the first step of a rank that attaches now; None for a rank that no mesh has.

        That is the first step of the stream if every mesh has the rank, and otherwise the begin of the last run of
        meshes that have it.
        """
        begin, there = None, False
        for step, tree in self.eras():
            if rank < tree.world_size and not there:
                begin = step
            there = rank < tree.world_size
        return begin if rank >= 0 else None

    def passed(self, reached: Mapping[int, int], attached: Collection[int]) -> int:
        """Return the step before which all ranks that ever attached have finished.

        `reached` has, for every rank that ever attached, the step before which it has finished. The eras, of one mesh
        each, are checked in order. In an era those ranks count that its mesh has and that have reached its first step.
        If all of them have finished its last step, the era is over, and the next one is checked; otherwise the slowest
        of them decides.
        """
        done, eras = self._first_step, self.eras()
        for number, (begin, tree) in enumerate(eras):
            came = {rank: at for rank, at in reached.items() if rank < tree.world_size and (at >= begin or not number)}
            if not came:
                return done
            if number + 1 == len(eras):
                return max(done, min(came.values()))
            end, then = eras[number + 1]
            # A rank that the next mesh does not have may detach without reporting its last step. Once the ranks that
            # stay are beyond the boundary, it counts as finished; otherwise the stream would wait for it forever.
            staying = [at for rank, at in came.items() if rank < then.world_size]
            if staying and min(staying) > end:
                came = {rank: at for rank, at in came.items() if rank < then.world_size or rank in attached}
            if min(came.values()) < end:
                return max(done, min(came.values()))
            done = end
        return done


@dataclass(frozen=True, slots=True)
class Due:
    """What is due to be written to the store."""

    state: Mapping[str, Any] | None
    """The state of a snapshot; None if only the horizon moves."""
    mark: str
    """The position of the journal when the state was taken."""
    horizon: int


class Checkpoints:
    """The snapshots and the horizon of one stream, which starts or continues at `step`.

    `state_of` returns the state before a step, `next_step` the first step that is not planned.
    """

    def __init__(
        self, store: Store, step: int, state_of: Callable[[int], Mapping[str, Any]], next_step: Callable[[], int]
    ) -> None:
        self.store = store
        self._state_of = state_of
        self._next_step = next_step
        self._saved = step
        self.began = step
        """The step that the stream started or continued at."""
        self.passed = step
        """The step before which every client has finished."""
        self.snapshot_every = SNAPSHOT_EVERY
        """Steps between snapshots."""
        self.wanted = step
        """A snapshot is due as soon as clients have finished the steps before this one: they cannot be drawn again, as
        one of their sources cannot be read any more."""

    def begin(self) -> None:
        """Begin a lineage in the store, unless the stream continues one; nothing can be planned before."""
        if not self.store.lineage:
            step = self._next_step()
            self.store.begin(self._state_of(step), horizon=step + AHEAD)

    def reserve(self, step: int) -> None:
        """Make sure that a step may be handed out: inputs are on disk, and so is a horizon beyond the step."""
        self.store.journal.settle()
        if step >= self.store.horizon:
            self.store.reserve(step + AHEAD)

    @property
    def is_due(self) -> bool:
        """Whether anything is due to be written."""
        return self._snapshot_due or self._horizon_due

    def due(self, *, last: bool = False) -> Due | None:
        """Return what is due to be written, if anything; call `saved` once it is written.

        `last`: the stream is closing, so that a snapshot is due at any step.
        """
        mark, horizon = self.store.journal.mark(), self._next_step() + AHEAD  # before the state: more may be appended
        if self._snapshot_due or (last and self.passed > self._saved):
            return Due(self._state_of(self.passed), mark, horizon)
        return Due(None, mark, horizon) if self._horizon_due and not last else None

    def saved(self, due: Due) -> None:
        """Record that something was written."""
        if due.state is not None:
            self._saved = int(due.state["step"])

    def close(self) -> None:
        """Save the state that the clients have passed, and close the store."""
        try:
            due = self.due(last=True) if self.store.lineage else None
            if due is not None and due.state is not None:
                self.store.save(due.state, due.mark, horizon=due.horizon)
        finally:
            self.store.close()

    @property
    def _snapshot_due(self) -> bool:
        due = self.passed // self.snapshot_every > self._saved // self.snapshot_every
        return due or self._saved < self.wanted <= self.passed

    @property
    def _horizon_due(self) -> bool:
        return self.store.horizon - self._next_step() < SLACK


class KeptStates:
    """Some states of a stream, by step; `keep` steps behind the slowest client can be requested again.

    Example:
        >>> states = KeptStates([StreamState.begin(1)], keep=256)
        >>> states.nearest(3).step
        0
    """

    def __init__(self, states: Iterable[StreamState], *, keep: int) -> None:
        self._keep = keep
        self._states = {state.step: state for state in states}
        self._first = max(self._states)
        self._replayed: OrderedDict[int, StreamState] = OrderedDict()

    def add(self, state: StreamState, passed: int) -> None:
        """Keep the state after a new step; drop an older one, unless clients are at it."""
        self._states[state.step] = state
        old = state.step - KEPT_STATES
        if old in self._states and old % KEPT_STATES and old not in (self._first, passed):
            del self._states[old]

    def add_replayed(self, state: StreamState) -> None:
        """Keep a state that was computed again, until newer ones replace it."""
        if state.step not in self._states:
            self._replayed[state.step] = state
            self._replayed.move_to_end(state.step)
            while len(self._replayed) > KEPT_REPLAYED:
                self._replayed.popitem(last=False)

    def forget(self, passed: int) -> None:
        """Drop the states that no client can request, now that all have finished the steps before this one."""
        behind = sorted(step for step in self._states if step <= passed - self._keep)
        for step in behind[:-1]:
            del self._states[step]

    def nearest(self, step: int) -> StreamState:
        """Return the newest known state at or before a step.

        Raises:
            SpecError: The step is no longer kept.
        """
        self.check(step)
        known = self._states.get(step) or self._replayed.get(step)
        if known is not None:
            return known
        start = max(one for one in (*list(self._states), *list(self._replayed)) if one <= step)
        return self._states.get(start) or self._replayed[start]

    @property
    def oldest(self) -> int:
        """The oldest step that can be requested."""
        return min(list(self._states))  # a copy: another thread may add to them

    def check(self, step: int) -> None:
        """Refuse a step that is no longer kept."""
        oldest = self.oldest
        if step < oldest:
            raise SpecError(
                f"step {step} is not kept any more: {self._keep} steps behind the slowest client are kept (keep=), and "
                f"the oldest is step {oldest}; its samples cannot be reproduced. Attach with the step of your "
                f"checkpoint, ol.connect(address, rank, step=..) with {oldest} or more, or launch with a larger keep."
            )
