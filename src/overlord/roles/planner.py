"""Planner: makes plan t once, from the loaders' metadata, and remembers what is needed to make it again.

Rules of this file:
1. Inputs (reports, changes, verdicts) are durable before they are used. Plans are derivable: only a record is kept.
2. A snapshot never runs ahead of the clients: what it resumes at has been delivered up to there.
3. A plan that is made again must have the digest it had; otherwise the files under it have changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlord.core.draw import Buffer, Draw, Limits
from overlord.core.messages import MetaRequest
from overlord.core.order import BEGIN
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.samples import Cursor
from overlord.core.states import StreamState, check_form, describe_differences, names_of, restricted_parts
from overlord.errors import PlanError, ReaderError, SourceError, SpecError, StateError
from overlord.job.specs import Job, Mixture
from overlord.roles.changes import Change, InputLog, Roster, SourceChanges, check_mixture
from overlord.roles.drawer import Drawer, DrawnStep
from overlord.roles.poisoned_rows import Verdicts
from overlord.roles.ports import Loaders
from overlord.stores.store import KEEP, Store

# --------------------------------------------------------------------------------------------------------------
# Which mesh every step has: that of the launch, until a change of the running job gives another.
#
# Rules of this file:
# 1. A mesh holds from a step that was not planned yet, so where a rank stands at a step never changes.
# 2. A rank that a mesh does not have is done at its first step; one that only a later mesh has begins there.


class Meshes:
    """The meshes of one stream, step by step.

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
        """The mesh behind all changes so far."""
        return self.eras()[-1][1]

    def after(self, step: int) -> tuple[int, ClientPlaceTree] | None:
        """Return the next change behind a step: from where it holds, and the mesh; None if none is known."""
        return next(((begin, tree) for begin, tree in self.eras() if begin > step), None)

    def eras(self) -> list[tuple[int, ClientPlaceTree]]:
        """Return from which step on each mesh holds, in order; the first from the first step of the stream."""
        later = [(begin, tree) for begin, tree in self._inputs.meshes() if begin > self._first_step]
        return [(self._first_step, self.at(self._first_step)), *later]

    def begin_of(self, rank: int) -> int | None:
        """Return where a rank that attaches now begins; None for one that no mesh has.

        At the first step if it was always there; else at the step from which on it is there, for the last time if it
        came and went.
        """
        begin, there = None, False
        for step, tree in self.eras():
            if rank < tree.world_size and not there:
                begin = step
            there = rank < tree.world_size
        return begin if rank >= 0 else None

    def passed(self, reached: Mapping[int, int], attached: Collection[int]) -> int:
        """Return the step before which all ranks are done that ever attached, each where a mesh has it.

        Args:
            reached: For every rank that ever attached, the step before which it is done.
            attached: Those that are attached now.
        """
        done, eras = self._first_step, self.eras()
        for number, (begin, tree) in enumerate(eras):
            came = {rank: at for rank, at in reached.items() if rank < tree.world_size and (at >= begin or not number)}
            if not came:
                return done
            if number + 1 == len(eras):
                return max(done, min(came.values()))
            end, then = eras[number + 1]
            # Who left without a word when the others had gone on is done too, or nothing would ever be.
            staying = [at for rank, at in came.items() if rank < then.world_size]
            if staying and min(staying) > end:
                came = {rank: at for rank, at in came.items() if rank < then.world_size or rank in attached}
            if min(came.values()) < end:
                return max(done, min(came.values()))
            done = end
        return done


# --------------------------------------------------------------------------------------------------------------
# The states of a stream that are remembered, so that an older step can be planned again; a part of the Planner.
#
# Rules of this file:
# 1. Recent states are all kept, older ones now and then, and none of them for ever: what lies `keep` steps behind
#    every
#    client is let go of, except the one that the oldest step which can still be asked for is drawn from.


KEPT_STATES = 256
"""States of this many recent steps are kept, and of every step that is a multiple of it."""
KEPT_REPLAYED = 64
"""Old states that were computed again are kept too: a client that comes late asks for one step after the other."""


class KeptStates:
    """Some states of a stream, by step.

    Args:
        states: Those that are known from the beginning.
        keep: Steps behind the slowest client that can be asked for again.

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
        """Keep the state behind a new step; thin out the older ones, but for the one that clients stand at."""
        self._states[state.step] = state
        old = state.step - KEPT_STATES
        if old in self._states and old % KEPT_STATES and old not in (self._first, passed):
            del self._states[old]

    def add_replayed(self, state: StreamState) -> None:
        """Keep a state that was computed again, for a while."""
        if state.step not in self._states:
            self._replayed[state.step] = state
            self._replayed.move_to_end(state.step)
            while len(self._replayed) > KEPT_REPLAYED:
                self._replayed.popitem(last=False)

    def forget(self, passed: int) -> None:
        """Let go of what no client can ask for any more, now that all are done with the steps before this one."""
        behind = sorted(step for step in self._states if step <= passed - self._keep)
        for step in behind[:-1]:
            del self._states[step]

    def nearest(self, step: int) -> StreamState:
        """Return the newest known state at or before a step.

        Raises:
            SpecError: The step is not kept any more.
        """
        self.check(step)
        known = self._states.get(step) or self._replayed.get(step)
        if known is not None:
            return known
        start = max(one for one in (*list(self._states), *list(self._replayed)) if one <= step)
        return self._states.get(start) or self._replayed[start]

    @property
    def oldest(self) -> int:
        """The oldest step that can be asked for."""
        return min(list(self._states))  # a copy: others may add to them

    def check(self, step: int) -> None:
        """Refuse a step that is not kept any more."""
        oldest = self.oldest
        if step < oldest:
            raise SpecError(
                f"step {step} is not kept any more: {self._keep} steps behind the slowest client are (keep=), and the "
                f"oldest is step {oldest}; its samples could not be told exactly. Attach with the step of your "
                f"checkpoint, ol.connect(address, rank, step=..) with {oldest} or more, or launch with a larger keep."
            )


# --------------------------------------------------------------------------------------------------------------
# What a planner has for its store: when a snapshot is due, and how far steps may be handed out; a part of the
# Planner.
#
# Rules of this file:
# 1. Nothing is written while a step is planned: `due` hands out what a runtime writes in its own time.
# 2. The horizon, up to which steps may be handed out, must be on disk before. It is moved long before it is reached.


SNAPSHOT_EVERY = 16
"""Steps between snapshots at first; a runtime that finds them slow takes them less often."""
AHEAD = 32
"""How far the horizon is moved ahead; after a crash a change can take effect no sooner than there."""
SLACK = 24
"""It is moved when less than this is left: so many steps may be planned while that is written."""


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be written to the store."""

    state: Mapping[str, Any] | None
    """The state of a snapshot; None where only the horizon moves."""
    mark: str
    """Where the journal stood when the state was taken."""
    horizon: int


class Checkpoints:
    """When one stream is written down.

    Args:
        store: Where.
        step: The step it goes on at.
        state_of: Returns the state before a step.
        next_step: Returns the step that is not planned yet.
    """

    def __init__(
        self, store: Store, step: int, state_of: Callable[[int], Mapping[str, Any]], next_step: Callable[[], int]
    ) -> None:
        self.store = store
        self._state_of = state_of
        self._next_step = next_step
        self._saved = step
        self.began = step
        """The step it goes on at."""
        self.passed = step
        """The step before which every client is done."""
        self.snapshot_every = SNAPSHOT_EVERY
        """Steps between snapshots."""

    def begin(self) -> None:
        """Begin a lineage in the store, unless the stream goes on in one; nothing can be planned before."""
        if not self.store.lineage:
            step = self._next_step()
            self.store.begin(self._state_of(step), horizon=step + AHEAD)

    def reserve(self, step: int) -> None:
        """See to it that a step may be handed out: what it is made without must not come back after a crash."""
        self.store.journal.settle()
        if step >= self.store.horizon:
            self.store.reserve(step + AHEAD)

    @property
    def is_due(self) -> bool:
        """Whether there is anything to be written."""
        return self._snapshot_due or self._horizon_due

    def due(self, *, last: bool = False) -> Due | None:
        """Return what is to be written now, if anything; `saved` must be told when it is.

        Args:
            last: Whether this is the end, so that a snapshot is due for any step.
        """
        mark, horizon = self.store.journal.mark(), self._next_step() + AHEAD  # before the state: more may come in
        if self._snapshot_due or (last and self.passed > self._saved):
            return Due(self._state_of(self.passed), mark, horizon)
        return Due(None, mark, horizon) if self._horizon_due and not last else None

    def saved(self, due: Due) -> None:
        """Learn that something is written."""
        if due.state is not None:
            self._saved = int(due.state["step"])

    def close(self) -> None:
        """Save where the clients stand, and leave the store."""
        try:
            due = self.due(last=True) if self.store.lineage else None
            if due is not None and due.state is not None:
                self.store.save(due.state, due.mark, horizon=due.horizon)
        finally:
            self.store.close()

    @property
    def _snapshot_due(self) -> bool:
        return self.passed // self.snapshot_every > self._saved // self.snapshot_every

    @property
    def _horizon_due(self) -> bool:
        return self.store.horizon - self._next_step() < SLACK


# --------------------------------------------------------------------------------------------------------------


MakePlan = Callable[[Buffer, ClientPlaceTree], LoadingPlan]
"""A strategy, with its answer checked."""
LimitsOf = Callable[[ClientPlaceTree], Limits]
"""What plans must respect on a mesh; raises SpecError for one that the job does not fit."""

CACHED_PLANS = 32
CACHED_BYTES = 64 << 20
"""Plans that are kept to be asked for again: at most so many, of so many bytes together."""
KEPT_DIGESTS = 1 << 14
MOST_WORDS = 400
"""Letters of a reason that are written down."""


class Planner:
    """Plans steps in order; older steps can be asked for again, as far as they are kept.

    Of a stream that recovers, its store has gone on in its lineage already; `earlier` states and the `digests` of plans
    that were made before the crash come with it.
    """

    def __init__(  # noqa: PLR0913 - a planner is told everything and asks nobody but loaders
        self,
        job: Job,
        loaders: Loaders,
        make_plan: MakePlan,
        *,
        mesh: ClientPlaceTree,
        limits: LimitsOf,
        state: StreamState,
        inputs: InputLog,
        parts: Mapping[str, Any],
        base_weights: Mapping[str, float],
        store: Store,
        verdicts: Verdicts | None = None,
        parks_failing: bool = False,
        keep: int = KEEP,
        earlier: Sequence[StreamState] = (),
        digests: Mapping[int, str] | None = None,
    ) -> None:
        self._job = job
        self._loaders = loaders
        self._make_plan = make_plan
        self._limits = limits
        self._inputs = inputs
        self._parts = parts
        self._base = inputs.base
        self._base.update(base_weights)
        self._parks_failing = parks_failing
        self._verdicts = verdicts or Verdicts(store.journal)
        self._drawer = Drawer(job, loaders, state, self._base, inputs)
        self.sources = SourceChanges(inputs, self._base, self._effective)
        """What can be changed of the sources while the stream runs."""
        self.first_step = store.first_step if store.lineage else state.step
        """The step this stream was launched at."""
        self._promised = store.horizon if store.lineage else state.step
        self.meshes = Meshes(mesh, self.first_step, inputs)
        """The mesh of every step."""
        self._states = KeptStates((*earlier, state), keep=keep)
        self._plans: OrderedDict[int, LoadingPlan] = OrderedDict()
        self._digests: dict[int, str] = dict(digests or {})
        self._end: int | None = None
        self.checkpoints = Checkpoints(
            store, state.step, lambda step: self.state(step, whole=True), lambda: self.next_step
        )
        """What is to be written to the store, and when."""
        self._weights: tuple[float, ...] = ()

    @property
    def next_step(self) -> int:
        """The step that has not been planned yet."""
        return self._drawer.state.step

    @property
    def end(self) -> int | None:
        """The step before which the stream ends, once that is known."""
        return self._end

    @property
    def latest_state(self) -> StreamState:
        """The state behind the newest plan."""
        return self._drawer.state

    def passed_cursors(self) -> list[Cursor]:
        """Return where every source stands before the steps that some client may still need."""
        state = self._states.nearest(self.checkpoints.passed)
        return [state.cursor(source) for source in range(len(state.epoch))]

    def plan_raw(self, step: int) -> LoadingPlan | None:
        """Return the plan of a step, or None past the end of the stream."""
        if step < self.first_step:
            raise SpecError(
                f"step {step} lies before step {self.first_step}, where this stream was launched; its samples are "
                "not part of it. Launch from an older state to see it."
            )
        self._states.check(step)
        if step in self._plans:
            self._plans.move_to_end(step)
            return self._plans[step]
        if step < self._drawer.state.step:
            return self._remember(self._plan_again(step))
        while self._end is None and self._drawer.state.step <= step:
            self._plan_next()
        return self._plans.get(step)

    def summary_buffer(self, step: int) -> Buffer | None:
        """Return what a strategy sees of a step: its draw with the metadata; None past the end of the stream."""
        plan = self.plan_raw(step)
        return None if plan is None else Buffer(plan.draw, self._limits(plan.mesh))

    @property
    def mixture(self) -> Mixture:
        """The mixture in force."""
        return self._drawer.mixer.mixture

    @property
    def latest_weights(self) -> tuple[float, ...]:
        """The weights of the newest plan."""
        return self._weights

    def weights_ahead(self, step: int) -> list[float]:
        """Return the weights that a coming step will have, as far as that is known today."""
        return self._drawer.mixer.weights_ahead(step)

    @property
    def roster(self) -> Roster:
        """The sources at the next step."""
        return self._inputs.roster_at(self.next_step)

    @property
    def names(self) -> tuple[str, ...]:
        """Every source by its number, also those that come at a later step."""
        return self._inputs.names

    def know_parts(self, parts: Mapping[str, Any]) -> None:
        """Learn what the stream's fingerprint covers now that a source has come."""
        self._parts = parts

    def can_read(self, name: str) -> bool:
        """Try whether a source can be read where it stands; safe while others plan."""
        number, state = self._inputs.names.index(name), self._drawer.state
        cursor = state.cursor(number) if number < len(state.epoch) else Cursor(0, BEGIN, 0)
        try:
            return bool(self._loaders.summary_buffer([MetaRequest(number, cursor, 1)]))
        except (ReaderError, SourceError):
            return False

    def missing_report(self, step: int) -> int | None:
        """Return the step whose report must come before a step can be planned."""
        return self._drawer.mixer.missing_report(step) if step == self._drawer.state.step else None

    def state(self, step: int, *, whole: bool = False) -> dict[str, Any]:
        """Return the state before a step as JSON; `whole` with what only this service needs to go on by itself."""
        if self._end is not None and step > self._end:
            step = self._end
        if step > self._drawer.state.step:
            self.plan_raw(step - 1)
        state = self._state_before(step)
        recent = self._inputs.recent(step - self._job.lag, step)
        changes = self._inputs.changes_from(step, whole=whole)
        names = self._inputs.names[: len(state.epoch)]
        return state.to_json(names, restricted_parts(self._parts, names), recent, changes, self._verdicts.to_json())

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that is not one of this stream: that of another job, or of a lineage that was left.

        Reports, changes and verdicts may have come in after it was taken, and are not compared. Where the step is not
        kept here, only the fingerprint is.

        Raises:
            StateError: it says what differs.
        """
        check_form(state)
        step, names = int(state["step"]), names_of(state)
        here = self.state(step) if self._states.oldest <= step <= self.next_step else None
        parts = restricted_parts(self._parts, names) if here is None else here["fingerprint"]
        differences = describe_differences(state["fingerprint"], parts)
        if differences:
            raise StateError(
                f"the state belongs to another stream than the service's: {'; '.join(differences)}. Going on from it "
                "would lose or repeat samples silently. Give the address of the service that runs this job, or launch "
                "one with state=."
            )
        if here is not None and any(here[key] != state[key] for key in ("sources", "mixer")):
            raise StateError(
                f"the state of step {step} is not the one that this service had there: the run was forked between "
                "them, by other reports, changes or an older checkpoint. Going on from it would lose or repeat samples "
                "silently. Launch a service with state= to go on from it."
            )

    @property
    def newest_report(self) -> int:
        """The newest step that was reported; -1 where none was."""
        return self._inputs.newest_report

    def changes_after(self, step: int) -> list[str]:
        """Say which changes hold from a later step on."""
        return [f"{change.kind} at step {change.at}" for change in self._inputs.changes if change.at > step]

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the trainer's metrics of a step; the first report of a step counts."""
        if self._inputs.report_of(step) is not None:
            return
        if self.next_step <= step < self._promised:
            self.plan_raw(step)  # it may have been handed out before a crash, and is not planned again yet
        if step >= self.next_step:
            raise SpecError(
                f"report: step {step} has not been planned yet (the next one is {self.next_step}); it cannot have been "
                "trained on. Report `step.index` of a step that was handed out."
            )
        self._drawer.mixer.check_report(step, metrics)
        self._inputs.add_report(step, metrics)

    def set_mixture(self, mixture: Mixture, at_step: int | None = None, *, change_id: str = "") -> int:
        """Change the mixture from a step on that is not planned yet (default: the next); return that step."""
        made = self._inputs.step_of(change_id)
        if made is not None:
            return made
        at = self._effective("set_mixture", at_step)
        roster = self._inputs.roster_at(at)
        check_mixture(mixture, self.mixture, [n for i, n in enumerate(roster.names) if i not in roster.removed])
        change = Change("mixture", at, mixture=mixture, id=change_id)
        self._inputs.check("set_mixture", change)
        self._inputs.add_change(change)
        return at

    def skip_steps(self, count: int, at_step: int | None = None, *, change_id: str = "") -> int:
        """Pass over so many global batches before a step that is not planned yet; return that step."""
        made = self._inputs.step_of(change_id)
        if made is not None:
            return made
        if count < 1:
            raise SpecError(f"skip_steps: count is {count}; nothing would be skipped. Give 1 or more.")
        at = self._effective("skip_steps", at_step)
        self._inputs.add_change(Change("skip", at, count=count, id=change_id))
        return at

    def reshard(self, tree: ClientPlaceTree, at_step: int | None = None, *, change_id: str = "") -> int:
        """Give the steps from one on that is not planned yet another mesh (default: the next); return that step."""
        made = self._inputs.step_of(change_id)
        if made is not None:
            return made
        at = self._effective("reshard", at_step)
        self._check_mesh(tree)
        self._inputs.add_change(Change("mesh", at, mesh=tree, id=change_id))
        return at

    def _check_mesh(self, tree: ClientPlaceTree) -> None:
        """Refuse a mesh on which no step could be planned, by planning one that is known."""
        known = next(reversed(self._plans.values()), None)
        try:
            limits = self._limits(tree)
            if known is not None:
                self._make_plan(Buffer(known.draw, limits), tree)
        except (SpecError, PlanError) as error:
            raise SpecError(
                f"reshard: the mesh {tree} does not fit this job; the stream would end where it begins. {error}"
            ) from error

    def _effective(self, what: str, at_step: int | None) -> int:
        # What may have been handed out before a crash stays as well; nothing was, where nothing could be drawn.
        first = max(self.next_step, self._promised if self._inputs.roster_at(self.next_step).drawn else 0)
        at = first if at_step is None else at_step
        if at < first:
            ahead = f"may have been handed out before the planner was replaced (the first that was not is {first})"
            known = ahead if at >= self.next_step else f"is already planned (the next one is {first})"
            raise SpecError(
                f"{what}: step {at} {known}, and what was promised stays. Use at_step={first} or more, or leave it out."
            )
        return at

    def passed(self, step: int) -> None:
        """Learn that every client has finished with the steps before this one; a snapshot may be due then."""
        if step > self.checkpoints.passed:
            self.checkpoints.passed = step
            self._states.forget(step)

    def close(self) -> None:
        """Save where the clients stand, and leave the store."""
        self.checkpoints.close()

    def _plan_next(self) -> None:
        step = self._drawer.state.step
        if self._job.max_steps is not None and step >= self._job.max_steps:
            self._end = step
            return
        self.checkpoints.reserve(step)
        before = self._drawer.state
        self._verdicts.step = step
        drawn = self._draw_or_park(step)
        if drawn is None:
            self._end = step
            return
        after = drawn.after
        self._states.add(after, self.checkpoints.passed)
        self._digests.pop(after.step - KEPT_DIGESTS, None)
        plan = self._planned(drawn.draw, after)
        self._record(plan, before, after)
        self._remember(plan)

    def _draw_or_park(self, step: int) -> DrawnStep | None:
        """Draw a step; where the launch says so, without the sources that cannot be read."""
        while True:
            try:
                return self._drawer.draw()
            except (ReaderError, SourceError) as error:
                parks = self._parks_failing and step >= self._promised  # what was promised has it
                if not parks or error.source is None or error.source in self.sources.parked(step):
                    raise
                self.sources.park(
                    error.source, step, why=str(error)[:MOST_WORDS], failed=True
                )  # on disk before the draw goes on

    def _record(self, plan: LoadingPlan, before: StreamState, after: StreamState) -> None:
        self._weights = plan.draw.weights
        if plan.step in self._digests:  # it was made before a crash
            if plan.digest != self._digests[plan.step]:
                raise _differs(plan.step)
            return
        before = before.grown(len(after.epoch))
        moved = np.flatnonzero(
            (before.epoch != after.epoch) | (before.group != after.group) | (before.offset != after.offset)
        )
        self.checkpoints.store.journal.append(
            {
                "kind": "plan",
                "step": plan.step,
                "order": plan.draw.digest,
                "plan": plan.digest,
                "mixture": plan.draw.mixture_version,
                "cursors": {self._inputs.names[i]: list(after.cursor(i)) for i in moved.tolist()},
            },
            durable=False,
        )
        self._digests[plan.step] = plan.digest

    def _planned(self, draw: Draw, after: StreamState) -> LoadingPlan:
        tree = self.meshes.at(draw.step)
        plan = self._make_plan(Buffer(draw, self._limits(tree)), tree)
        return plan.with_ends(np.stack([after.epoch, after.group, after.offset], axis=1))

    def _plan_again(self, step: int) -> LoadingPlan:
        """Make an old plan again from the nearest state before it."""
        before = self._state_before(step)
        drawn = Drawer(self._job, self._loaders, before, self._base, self._inputs).draw()
        plan = None
        if drawn is not None:
            self._states.add_replayed(drawn.after)
            plan = self._planned(drawn.draw, drawn.after)
            if step not in self._digests and step + KEPT_DIGESTS > self._drawer.state.step:
                self._record(plan, before, drawn.after)  # its strategy failed when it was drawn
        if plan is None or self._digests.get(step, plan.digest) != plan.digest:
            raise _differs(step)
        return plan

    def _state_before(self, step: int) -> StreamState:
        nearest = self._states.nearest(step)
        if nearest.step == step:
            return nearest
        drawer = Drawer(self._job, self._loaders, nearest, self._base, self._inputs)
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
        f"step {step} was planned again and came out differently; ranks would see different data. A file under a "
        "source has changed, or a Custom function is not deterministic."
    )
