"""The Planner behind a lock: plans for constructor hosts, answers for clients and for the owner of a service.

Rules of this file:
1. The planner is called under a lock. A request for a step that needs a report waits here, for a while.
2. A snapshot may begin at what every rank that ever attached has passed, whichever host serves it by now. A planner
   that replaces another waits for a while until all of them have told where they are.
3. A step is not planned because a rank waits for it that only comes with it: the others come there first.
4. A trainer that comes back with the step of its checkpoint goes on there, also where the planner was lost with it and
   has started at an older snapshot: the steps between are planned again. Where steps behind it were handed out to its
   rank, or reported, the lineage ends: all ranks must ask for the same step, the rewind is written down (`history`
   says what follows from that), and the service is started again. Also a short way back goes by that: the roles that
   have moved on are many (read buffers, built steps, attached clients, sources that came since), and one path that a
   crash of the service has always taken is worth more than seconds in a minute of restarting trainers.
   A rank that could go on at that step waits for the others and goes with them. Where one has been let go on there
   already, the others go on there too, as long as nothing behind it was reported: it cannot follow them.
5. An answer that promises something waits until it is written down. A store that is down pauses planning, and is
   retried; planned steps are served meanwhile, and `status()` is answered. A service that has lost its store ends.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple

from overlord.core import client_messages as msg
from overlord.core.client_messages import Beginning, Document, Reply, Request, SourceChange
from overlord.core.messages import STORE_DOWN, HostNews, Waiting
from overlord.core.metric_history import MetricHistory
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan, plan_to_bytes
from overlord.core.samples import Cursor
from overlord.errors import Fenced, NothingToDraw, ReportMissing, Rewound, SpecError, StateError, StoreError
from overlord.job.layout_specs import OnSourceFailure
from overlord.job.specs import Mixture
from overlord.planning.learning.repetition import epochs_of
from overlord.roles.changes import FIXED_WHILE_RUNNING
from overlord.roles.planner import SNAPSHOT_EVERY, Due, Planner
from overlord.roles.ports import Loaders
from overlord.runtimes.launching.resume import REWIND, before
from overlord.stores.store import newest_lineage

# --------------------------------------------------------------------------------------------------------------
# Writes what a planner has for the store: snapshots, its horizon, plan records in groups, counters of the loaders.
#
# 1. No step waits for it. The planner only notes what is due; it is written by a thread of the runtime, or on the
#    inline runtime between two steps.
# 2. Snapshots cost at most a small share of the time between them, those of the loaders a smaller one: what takes
#    longer is done less often.


PLANNER_SHARE = 0.02
"""Share of the time between two snapshots that one may take; then the interval is doubled, up to half of `keep`."""
LOADERS_SHARE = 0.01
LOADERS_EVERY = 4
"""The loaders are asked with every so manieth snapshot at first."""


class SnapshotWriter:
    """Writes what is due.

    Args:
        planner: Whose state it is.
        loaders: Its loaders.
        lock: Held while the planner is asked; never while anything is written.
        most_steps: The longest interval between snapshots.
        met: What the loaders had met when the stream began.
        clock: Seconds that never go back.
        history: Returns the history of metrics, which is written with the counters of the loaders.
    """

    def __init__(
        self,
        planner: Planner,
        loaders: Loaders,
        lock: AbstractContextManager[Any],
        *,
        most_steps: int,
        met: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        history: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._clock = clock
        self._history = history
        self._history_at = planner.next_step
        self._checkpoints = planner.checkpoints
        self._store = planner.checkpoints.store
        self._loaders = loaders
        self._lock = lock
        self._most_steps = max(1, most_steps)
        self.met: Mapping[str, Any] = met or {}
        """What the loaders had met when they were last asked."""
        self._last: float | None = None
        self._count = 0
        self._loaders_every = LOADERS_EVERY
        self._checkpoints.snapshot_every = min(SNAPSHOT_EVERY, self._most_steps)

    def work(self, *, probe: bool = False) -> None:
        """Write everything that is due now.

        Args:
            probe: Write something in any case, to see whether a store that failed works again.

        Raises:
            StoreError: The store failed; the same is due again.
        """
        if probe:
            self._store.journal.append({"kind": "probe", "step": -1}, durable=True)
        with self._lock:
            due = self._checkpoints.due()
        if due is None:
            self._store.journal.commit()
        elif due.state is None:
            self._store.reserve(due.horizon)
        else:
            self._snapshot(due)
        self._store.beat()

    def _snapshot(self, due: Due) -> None:
        assert due.state is not None
        began = self._clock()
        self._store.save(due.state, due.mark, horizon=due.horizon)
        ended = self._clock()
        with self._lock:
            self._checkpoints.saved(due)
        between = ended - self._last if self._last is not None else None
        self._last = ended
        if between:
            self._adapt((ended - began) / between)
        self._count += 1
        step = int(due.state["step"])
        # The journal has the reports since the last history, as far as steps are kept.
        if self._count % self._loaders_every == 0 or step - self._history_at >= self._most_steps:
            self.keep_history(step)
        if self._count % self._loaders_every == 0:
            self.met = self._loaders.snapshot()
            self._store.save_loaders(step, self.met)
            if between is not None and self._clock() - ended > LOADERS_SHARE * between * self._loaders_every:
                self._loaders_every *= 2

    def keep_history(self, step: int) -> None:
        """Write the history of metrics as it is before a step."""
        with self._lock:
            history = self._history()
        if history:
            self._store.save_history(step, history)
            self._history_at = step

    def _adapt(self, share: float) -> None:
        every = self._checkpoints.snapshot_every
        if share > PLANNER_SHARE:
            self._checkpoints.snapshot_every = min(2 * every, self._most_steps)
        elif share < PLANNER_SHARE / 8:  # it was slow for a moment only
            self._checkpoints.snapshot_every = max(every // 2, min(SNAPSHOT_EVERY, self._most_steps))


# --------------------------------------------------------------------------------------------------------------
# What a runtime does about a source that cannot be read: it is parked, and looked at until it is back.
#
# 1. The clock is here and not in the roles. What follows from it is a journaled change, so that a replay needs no
#    clock.
# 2. A sample that was planned must be delivered: its loader keeps trying (`ReadRetry`).


logger = logging.getLogger("overlord")

SOURCE_RETURN_S = 30.0
"""How long after it was parked a source is looked at; twice as long after each look that found it away."""
LONGEST_S = 600.0

T = TypeVar("T")


class ReturnWatch:
    """Looks now and then whether parked sources can be read again, and lets them return."""

    def __init__(self, planner: Planner, policy: OnSourceFailure) -> None:
        self._planner = planner
        self._policy = policy
        self._next_look: dict[str, tuple[float, float]] = {}
        self._told: set[str] = set()

    def due(self) -> list[str]:
        """Return the parked sources that it is time to look at; tell of those that were parked since the last call."""
        parked = {
            name: one for name, one in self._planner.sources.parked(self._planner.next_step).items() if one.failed
        }
        for name in parked.keys() - self._told:
            ends = "It returns when it can be read." if self._policy == "park" else "It returns by return_source."
            logger.warning(
                "source %r is parked from step %d on, the others take its share: %s. %s",
                name, parked[name].since, parked[name].why, ends,
            )  # fmt: skip
        self._told = set(parked)
        now = time.monotonic()
        known = self._next_look
        self._next_look = {name: known.get(name, (now + SOURCE_RETURN_S, SOURCE_RETURN_S)) for name in parked}
        return [name for name, (at, _) in self._next_look.items() if at <= now] if self._policy == "park" else []

    def looked(self, name: str, found: bool) -> None:
        """Let a source return that can be read again; otherwise look again later."""
        pause = min(2 * self._next_look.get(name, (0.0, SOURCE_RETURN_S))[1], LONGEST_S)
        self._next_look[name] = (time.monotonic() + pause, pause)
        if found and name in self._planner.sources.parked(self._planner.next_step):
            try:
                step = self._planner.sources.give_back(name)
            except SpecError as error:  # another change was made for that very step
                logger.warning("source %r can be read again and does not return: %s", name, error)
                return
            logger.warning("source %r can be read again: it returns at step %d", name, step)

    def look(self) -> None:
        """Look at everything that is due, in the caller."""
        for name in self.due():
            self.looked(name, self._planner.can_read(name))


# --------------------------------------------------------------------------------------------------------------
# What clients and the owner of a service ask of its planner, as messages.


def change_source(planner: Planner, change: SourceChange, name: str, at_step: int | None, change_id: str = "") -> int:
    """Remove a source, park it, or let it return; return the first step it holds for."""
    changes = planner.sources
    asked = {"remove_source": changes.remove, "park_source": changes.park, "return_source": changes.give_back}
    return asked[change](name, at_step, change_id=change_id)


def left_behind(what: str, first_step: int) -> StateError:
    """Say that a trainer stands in a lineage that all ranks have left."""
    return StateError(
        f"{what} is of a run that was left: the trainers of all ranks went back to step {first_step} of this service "
        "meanwhile, and what this one has is not what they get. If it is still needed, attach it again with the step "
        "of its checkpoint, as they did: ol.connect(address, rank, step=..)."
    )


def workload(planner: Planner, ahead: Sequence[int]) -> dict[str, Any]:
    """Tell what is drawn of every source, and what will be so many steps ahead; safe while others plan."""
    state, weights, names = planner.latest_state, planner.latest_weights, planner.inputs.names
    missing = [0.0] * (len(names) - len(weights))
    samples = [int(count) for count in state.samples] + [0] * (len(names) - len(state.samples))
    tokens = [int(count) for count in state.tokens] + [0] * (len(names) - len(state.tokens))
    return {
        "step": state.step,
        "names": list(names),
        "level": planner.mixture.level,
        "weights": [*weights, *missing],
        "coming": [planner.weights_ahead(state.step + steps) for steps in ahead],
        "samples": samples,
        "tokens": tokens,
    }


def _repeated_epochs(planner: Planner) -> dict[str, float]:
    """Return how many passes were made over the sources that have been read more than once."""
    state, names = planner.latest_state, planner.inputs.names
    counts = zip(names, state.epoch.tolist(), state.passed.tolist(), state.epoch_rows.tolist(), strict=False)
    passes = {name: epochs_of(epoch, passed, rows) for name, epoch, passed, rows in counts if epoch > 0}
    most = sorted(passes, key=lambda name: (-passes[name], name))[:MEASURED_EPOCHS]
    return {f"epochs/{name}": passes[name] for name in most}


def _beginning(planner: Planner, step: int | None, mesh: ClientPlaceTree) -> Beginning:
    store = planner.checkpoints.store
    return Beginning(step, str(mesh), store.lineage, (min(store.oldest_step, planner.next_step), planner.next_step))


def answer(planner: Planner, request: Any) -> Reply:
    """Answer a client, or the owner of a service; the planner is asked nothing else meanwhile.

    Raises:
        SpecError: for a request that is not known, or what cannot be done.
    """
    match request:
        case msg.GetState():
            return Document(planner.state(request.step))
        case msg.Report():
            at, newest, lineage = request.step, request.at, request.lineage
            if lineage not in (None, planner.checkpoints.store.lineage) and at > planner.first_step:
                raise left_behind(f"the report of step {at}", planner.first_step)
            if newest is not None and planner.next_step <= at <= newest:
                planner.plan_raw(at)  # handed out before this planner came in the place of another
            planner.report(at, request.metrics)
            return msg.Done()
        case msg.SetMixture():
            mixture = Mixture.from_mapping(request.mixture)
            return msg.ChangedAt(planner.set_mixture(mixture, request.step, change_id=request.id))
        case msg.SkipSteps():
            return msg.ChangedAt(planner.skip_steps(request.count, request.step, change_id=request.id))
        case msg.ChangeSource():
            return msg.ChangedAt(change_source(planner, request.change, request.source, request.step, request.id))
        case msg.Reshard():
            tree = ClientPlaceTree.from_sizes(request.mesh)
            at = planner.reshard(tree, request.step, change_id=request.id, hosts=request.hosts)
            return msg.Resharded(at, planner.meshes.newest.sizes())
        case msg.FindBeginning():
            begin, meshes = planner.meshes.begin_of(request.rank), planner.meshes
            return _beginning(planner, begin, meshes.newest if begin is None else meshes.at(begin))
        case msg.CheckState():
            planner.check_state(request.state)
            return msg.Done()
        case msg.GetMixture():
            fixed = (*FIXED_WHILE_RUNNING, "temperature")
            return Document({name: getattr(planner.mixture, name) for name in fixed})
        case msg.GetPlan():
            plan = planner.plan_raw(request.step)
            return msg.PlanBytes(None if plan is None else bytes(plan_to_bytes(plan)))
    raise SpecError(f"a planner does not answer {type(request).__name__}.")


# --------------------------------------------------------------------------------------------------------------


LOOK_S = 1.0
"""How often it is looked for sources that were parked, or should be looked at."""
PATIENCE_S = 1.0
"""How long a host that asks for a plan is kept waiting for a report before it is told."""
RETRY_S = (0.2, 5.0)
"""How long the first try after a failure of the store is put off, and the later ones at most."""
COMMIT_S = 0.5
"""How long a plan record waits to be written, together with others."""
RETURN_S = 60.0
"""How long a planner that came in the place of another waits for ranks to say where they are."""
ASKED_S = 3.0
"""How long a rank counts as asking for a step after it did so last: trainers ask again and again until they die."""
RESTART_S = 30.0
"""How long a rank that could go on waits for ranks that were further and died: they may go back to its step."""
UNHEARD_S = 5.0
"""How long, after it came in the place of another, a planner takes a rank that it has not heard of for one that may
have been further: the host of that rank tells it so within moments."""
JOIN_S = 0.5
"""How long a rank that must wait for others is kept waiting before it is told."""
KEPT_LABELS = 64
"""Steps of which it is remembered what does not decode: a host that asks later tells it again."""
MEASURED_SHARES = 100
"""Sources whose share of the mixture is noted over the steps: those with the largest."""
MEASURED_EPOCHS = 20
"""Sources whose passes are noted over the steps: those that were repeated most."""
MOST_MARKS = 500
"""Changes of a run that its history names: the newest."""
TELL_S = 0.1
"""How long a host that tells how far its clients are waits for a planner that is at work."""
STATUS_S = 1.0
"""status() waits this long for the planner's lock, then reads without it."""

logger = logging.getLogger("overlord")

Given = TypeVarTuple("Given")


Describe = Callable[[Mapping[int, int], Mapping[str, int]], dict[str, Any]]
"""Makes the status from the positions of all ranks and the memory that constructors hold."""


def goes_back(planner: Planner, rank: int, step: int, reached: Mapping[int, int], attached: Collection[int]) -> bool:
    """Whether a rank that attaches at a step goes back behind what the lineage holds.

    A rank goes on where it has not been handed out a later step, though the others may have: it is the only one that
    died. Reports of that step and later ones would count for steps that are trained again, unless a rank that is
    attached has trained them.

    Args:
        planner: Whose stream it is.
        rank: The rank.
        step: The step it asks for.
        reached: For every rank that ever attached, the step before which it is done.
        attached: The ranks that are attached.
    """
    known, checkpoints = reached.get(rank), planner.checkpoints
    if known is None and not checkpoints.store.goes_on:
        return step < planner.first_step  # it has not been in this lineage, however far the others are by now
    if step < max(planner.first_step, checkpoints.began if known is None else known):
        return True
    return planner.inputs.newest_report >= step and not set(attached) - {rank}


def refuse_coming_step(planner: Planner, step: int) -> None:
    """Refuse a step that no trainer of this stream can have come to.

    Raises:
        StateError: it names the steps that can be asked for.
    """
    last = planner.next_step if planner.end is not None else max(planner.next_step, planner.promised)
    if step > last:
        oldest = planner.checkpoints.store.oldest_step
        raise StateError(
            f"step {step} was asked for, and this service has come to step {last}; what was trained on before it is "
            f"unknown. Give a step from {oldest} to {last}, or launch a service from the state of your checkpoint "
            "(state=)."
        )


def ranks_disagree(steps: Mapping[int, int]) -> StateError:
    """Say that ranks ask for different steps."""
    told = ", ".join(f"rank {rank} asks for step {step}" for rank, step in sorted(steps.items()))
    return StateError(
        f"the ranks do not agree where to go on: {told}; they would train on different global batches. Load the same "
        "checkpoint on all ranks, and attach again."
    )


class Pace:
    """How a host waits: with threads, in the time of its machine."""

    threads = True
    """Whether work can go on beside the caller."""
    patience_s = math.inf
    """How long a store that is down is waited for before the caller gets the error. Where no thread runs beside the
    caller, nothing can end a wait for a source either, and the caller gets that error at once."""

    def now(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        """Wait, without the lock, until something has changed; return whether it has in time."""
        return changed.wait(seconds)


@dataclass(slots=True)
class _Asking:
    """A rank that asks to go on at a step."""

    step: int
    since: float
    goes_back: bool
    """Whether all ranks must go back for that."""
    begins: bool = False
    """Whether it was let go on there: its host tells so when it is attached."""


class SharedPlanner:
    """Asks one Planner on behalf of all hosts, and writes to the store what it has for it.

    Args:
        planner: The planner.
        describe: Makes the status.
        loaders: Its loaders, whose snapshots are kept too.
        keep: Steps that stay resumable.
        met: What the loaders had met when the stream began.
        on_source_failure: What becomes of a source that cannot be read.
        pace: How it waits.
        rewound: Called when a rewind is written down: the service must be started again.
    """

    def __init__(
        self,
        planner: Planner,
        describe: Describe,
        loaders: Loaders,
        *,
        keep: int,
        met: Mapping[str, Any] | None = None,
        on_source_failure: OnSourceFailure = "stop",
        pace: Pace | None = None,
        rewound: Callable[[], None] | None = None,
        measured: MetricHistory | None = None,
    ) -> None:
        self._planner = planner
        self._measured = MetricHistory() if measured is None else measured
        self._measured_at: tuple[int, float, float] | None = None
        self._measured_weights: tuple[float, ...] = ()
        self._rewound = rewound
        self._waits_since: dict[int, float] = {}
        """Since when ranks that could go on wait for others that died."""
        self._asked: dict[int, _Asking] = {}
        self._told = set[int]()
        self._replayable: set[int] = set()
        self._back_to: int | None = None
        self._pace = pace or Pace()
        self._describe = describe
        self._watch = ReturnWatch(planner, on_source_failure)
        self._ended = threading.Event()
        if on_source_failure != "stop" and self._pace.threads:
            threading.Thread(target=self._watch_parked, name="overlord-parked", daemon=True).start()
        self._changed = threading.Condition()
        self._heard = threading.Condition()
        self._decoded: OrderedDict[str, tuple[set[int], dict[int, int]]] = OrderedDict()
        """Of plans: the ranks whose media are decoded, and the labels of each sample that does not."""
        self._news: dict[int, HostNews] = {}
        self._newest_news: dict[int, HostNews] = {}
        """The same as soon as it comes: written without the lock, which a planner that waits for a source holds. Then
        most of all, `status` must show how long trainers wait. `_hear_newest` makes `_news` of it."""
        self._reached: dict[int, int] = {}
        self._born = self._pace.now()
        self._closing = self._closed = False
        self._barren = -1
        self._down: tuple[float, StoreError] | None = None
        self._down_since = 0.0
        self._lost: Fenced | None = None
        self._snapshots = SnapshotWriter(
            planner, loaders, self._changed, most_steps=keep // 2, met=met, clock=self._pace.now,
            history=self._kept_history,
        )  # fmt: skip
        self._retry_s = 0.0
        self._work = threading.Event()
        self._writer = threading.Thread(target=self._write_loop, name="overlord_write_loop", daemon=True)
        if self._pace.threads:
            self._writer.start()
            threading.Thread(target=self._beat_loop, name="overlord-beat", daemon=True).start()

    @property
    def first_step(self) -> int:
        """The step this stream was launched at."""
        return self._planner.first_step

    @property
    def planner(self) -> Planner:
        """The planner; ask it only while `alone`."""
        return self._planner

    def alone(self) -> AbstractContextManager[Any]:
        """Hold the planner's lock while the context is open."""
        return self._changed

    def plan(self, step: int, news: HostNews, host: int = 0) -> LoadingPlan | Waiting | None:
        """Return the plan of a step for a host: made now, or remembered; None past the end."""
        until = self._pace.now() + PATIENCE_S
        self._newest_news[host] = news
        with self._changed:
            self._check_not_rewound()
            self._hear_newest()
            if news.newcomers and not self._comes_near(step, until):
                return Waiting(None)
            if not self._pace.threads and step >= self._planner.next_step and self._down is None:
                self._look_for_parked()
            while step >= self._planner.next_step:
                self._check_owned()
                self._check_patience()
                missing = self._planner.missing_report(self._planner.next_step)
                missing = STORE_DOWN if self._down is not None else missing
                if missing is None:
                    break
                known = missing == news.told_missing and not self._closing
                if not known or not self._pace.wait(self._changed, until - self._pace.now()):
                    return Waiting(missing)
            try:
                plan = self._planner.plan_raw(step)  # (3) the plan is made when it is asked for
            except StoreError as error:
                self._failed(error)
                return Waiting(STORE_DOWN)
            except ReportMissing:  # of the strategy, which reads it after the draw; the mixture's is known before
                missing = self._planner.missing_report(step)
                if missing is None:
                    raise
                if missing == news.told_missing and not self._closing:
                    self._pace.wait(self._changed, until - self._pace.now())
                return Waiting(missing)
            except NothingToDraw as error:  # a source may return, by itself or by a change
                if self._pace.patience_s < math.inf:
                    raise
                if self._barren != step:
                    self._barren = step
                    logger.warning("%s Trainers wait until then", error)
                self._pace.wait(self._changed, until - self._pace.now())
                return Waiting(STORE_DOWN)
            if not self._pace.threads:
                self._watch.due()  # tells of sources that were parked by this
            self._forget_passed()
            self._changed.notify_all()  # newcomers may wait for it
            return plan

    def _comes_near(self, step: int, until: float) -> bool:
        """Wait until all steps before one are planned, or the stream has ended; return whether that came in time."""
        planner = self._planner
        while step > planner.next_step and planner.end is None:
            if self._closing or not self._pace.wait(self._changed, until - self._pace.now()):
                return False
        return True

    def passed_cursors(self) -> list[Cursor]:
        """Return where every source stands before the steps that some client may still need.

        Without the lock: a planner that waits for a loader holds it, and that loader's successor asks this first.
        """
        return self._planner.passed_cursors()

    @property
    def loaders_met(self) -> Mapping[str, Any]:
        """What the loaders had met when they were last asked."""
        return self._snapshots.met

    @property
    def latest_weights(self) -> Sequence[float]:
        """The weights of the newest plan."""
        return self._planner.latest_weights

    def tell(self, news: HostNews, host: int = 0) -> None:
        """Hear how far the clients of a host are; what follows from it may wait for a planner that is at work."""
        self._newest_news[host] = news
        if self._changed.acquire(timeout=TELL_S):
            try:
                if not self._closed:  # a client may go after the service it was attached to
                    self._hear_newest()
                    self._forget_passed()
            finally:
                self._changed.release()

    def ask(self, request: Request[Any]) -> Any:
        """Answer a client, or the owner of the service; what that promises is written down first, however long that is.

        Raises:
            SpecError: for a request that is not known.
            Fenced: when another service owns the store.
        """
        if isinstance(request, msg.GetStatus):
            return Document(self._status())
        if isinstance(request, msg.GetWorkload):  # without the lock: it is asked for when a planner waits for loaders
            reached = [step for news in list(self._newest_news.values()) for step in news.positions.values()]
            trainers = {"waited_s": self._waited_s(), "trained": max(reached, default=None)}
            return Document({**workload(self._planner, request.ahead), **trainers})
        if isinstance(request, msg.GetPlan) and request.kept:  # without the lock too: it is asked for by onlookers
            return msg.PlanBytes(bytes(plan_to_bytes(self._planner.kept_plan(request.step))))
        if isinstance(request, msg.GetHistory):
            with self._changed:
                both = (self._planner.inputs.history, self._measured)
                reported, measured = (history.points(request.names) for history in both)
                changes = [change.mark() for change in self._planner.inputs.changes[-MOST_MARKS:]]
            return Document({"reports": reported, "measured": measured, "changes": changes})
        self._check_not_rewound()
        if isinstance(request, msg.Join):
            return self.durably(self._join, request)
        if isinstance(request, msg.CountLabels):
            return self._labels(request)
        with self._changed:
            if isinstance(request, msg.GetPlan) and not self._pace.threads and self._down is None:
                self._look_for_parked()  # as for a host that asks for a plan: without threads nothing else looks
            try:
                return self.durably(answer, self._planner, request)
            finally:
                self._changed.notify_all()  # a step may have waited for what was told

    def _join(self, request: msg.Join) -> Beginning | msg.RanksMissing:
        """Let a rank go on at a step, or tell which ranks it waits for; all that go back must ask for the same step.

        Raises:
            StateError: The state is not one of this stream, the ranks disagree, or the step cannot be told exactly.
            Rewound: All ranks go back.
        """
        rank, step, planner = request.rank, request.step, self._planner
        with self._changed:
            self._check_not_rewound()
            self._hear_newest()
            refuse_coming_step(planner, step)
            if not self._plan_up_to(step, math.inf if request.alone else JOIN_S):
                return msg.RanksMissing([])
            if request.state is not None:
                planner.check_state(request.state)
            now = self._pace.now()
            self._asked = {r: asked for r, asked in self._asked.items() if now - asked.since < ASKED_S}
            self._told &= set(self._asked)
            self._waits_since = {r: since for r, since in self._waits_since.items() if r in self._asked}
            positions = {r: at for news in self._news.values() for r, at in news.positions.items()}
            # One that could go on goes back with those that must: it would be left in the old lineage.
            back = any(asked.goes_back and asked.step == step for asked in self._asked.values())
            back = back or goes_back(planner, rank, step, self._reached, positions)
            back = back and not self._have_begun(rank, step, positions)
            self._asked[rank] = _Asking(step, now, back)
            self._changed.notify_all()
            steps = {r: asked.step for r, asked in self._asked.items()}
            # Ranks that go on where each of them stood may stand at different steps; ranks that go back must agree.
            if len(set(steps.values())) > 1 and any(asked.goes_back for asked in self._asked.values()):
                self._told.add(rank)
                if self._told >= set(steps):  # all of them know, and the next word of each is a new one
                    self._asked.clear()
                    self._told.clear()
                raise ranks_disagree(steps)
            if not back:
                died = self._died_further(step, steps, positions, planner.meshes.at(step))
                if died and not request.alone and now - self._waits_since.setdefault(rank, now) < RESTART_S:
                    self._pace.wait(self._changed, JOIN_S)
                    return msg.RanksMissing([(r, None) for r in died])
                self._waits_since.pop(rank, None)
                self._reached[rank] = step
                self._asked[rank].begins = True
                return _beginning(planner, step, planner.meshes.at(step))
            if step not in self._replayable:
                self._check_replayable(step)
                self._replayable.add(step)
            # The mesh that trains now, which is that of the trainers that come back; a later one is left behind.
            mesh = planner.meshes.at(max(planner.next_step - 1, planner.first_step))
            others = [r for r in range(mesh.world_size) if r not in steps and positions.get(r) != step]
            if others and not request.alone:
                self._pace.wait(self._changed, JOIN_S)
                return msg.RanksMissing([(r, positions.get(r)) for r in others])
            self._write_rewind(step, mesh)
        if self._rewound is not None:
            self._rewound()
        raise self._rewind_error(step)

    def _plan_up_to(self, step: int, seconds: float) -> bool:
        """Plan the steps before one that a trainer has come to; return whether that was done in the given time.

        A planner that recovers starts at its newest snapshot, which is behind the trainers, and records of plans may
        have been lost with its predecessor. The inputs of every step before the horizon are on disk, so planning these
        steps again gives what the trainer was handed out. It is done in slices, as the caller and others wait.

        Raises:
            StateError: A step before it was never handed out.
        """
        planner, until = self._planner, self._pace.now() + seconds
        try:
            while planner.next_step < step and planner.end is None:
                if self._pace.now() > until:
                    return False
                planner.plan_raw(planner.next_step)
            if step == planner.next_step > planner.first_step:
                planner.plan_raw(step - 1)  # it may be drawn only, and its strategy waits for a report
        except (ReportMissing, NothingToDraw) as error:
            raise StateError(
                f"step {step} was asked for, and no trainer of this service has come to it: a step before it was never "
                f"handed out. {error} Give an earlier step, or launch a service from the state of your checkpoint "
                "(state=)."
            ) from error
        refuse_coming_step(planner, step)  # the stream may end before it
        return True

    def _have_begun(self, rank: int, step: int, positions: Mapping[int, int]) -> bool:
        """Return whether other ranks stand at a step that one asks for, and the others ask for it too.

        Those were let go on there, by a planner that did not know that they had been further; their hosts may not have
        told of it so far. The stream need not go back for the others: nothing of a later step has been reported, and
        no rank is at one. They could not follow it: they may have the step behind it already.
        """
        planner = self._planner
        others = set(range(planner.meshes.at(step).world_size)) - {rank}
        asked = {r: asking for r, asking in self._asked.items() if asking.step == step and r not in positions}
        begun = {r for r in others if positions.get(r) == step or (r in asked and asked[r].begins)}
        return (
            step >= max(planner.first_step, planner.checkpoints.began)
            and planner.inputs.newest_report < step
            and bool(begun)
            and others == begun | (others & set(asked))
        )

    def _died_further(
        self, step: int, asked: Mapping[int, int], positions: Mapping[int, int], mesh: ClientPlaceTree
    ) -> list[int]:
        """Return the ranks that were further than a step, are gone, and have not come back.

        All trainers are started again together, and these will ask for the same step: then the stream goes back for all
        ranks. A rank that was not as far could go on at once, and would hold steps of a lineage that was left. So could
        one that was as far, and attaches to a planner that does not know it: it came in the place of another.
        """
        is_new = self._planner.checkpoints.store.goes_on and self._pace.now() - self._born < UNHEARD_S
        unheard = math.inf if is_new else step
        return [
            rank
            for rank in range(mesh.world_size)
            if rank not in asked and rank not in positions and self._reached.get(rank, unheard) > step
        ]

    def _write_rewind(self, step: int, mesh: ClientPlaceTree) -> None:
        planner = self._planner
        record = {"kind": REWIND, "step": step, "mesh": mesh.sizes()}
        planner.checkpoints.store.end_lineage(record, lambda: self._check_replayable(step))
        self._back_to = step
        self._changed.notify_all()
        logger.warning(
            "all ranks go back to step %d from step %d: the service is started again there, in a new lineage. Reports "
            "of the steps from there on stay in lineage %d",
            step, planner.next_step, planner.checkpoints.store.lineage,
        )  # fmt: skip
        if left := planner.changes_after(step):
            logger.warning(
                "changes of later steps do not hold in the new lineage; make them again: %s", "; ".join(left)
            )

    def _check_replayable(self, step: int) -> None:
        store = self._planner.checkpoints.store
        store.journal.commit(force=True)
        newest = newest_lineage(store.place)
        assert newest is not None, "the lineage that is being written"
        before(store.place, newest, step)

    def _check_not_rewound(self) -> None:
        if self._back_to is not None:
            raise self._rewind_error(self._back_to)

    def _rewind_error(self, step: int) -> Rewound:
        return Rewound(f"the service goes back to step {step} and is being started again; ask again")

    def _labels(self, request: msg.CountLabels) -> msg.Labels:
        """Hear which samples of a step do not decode on a host; tell those of all, waiting a while for other hosts.

        Nothing of this is written down: a planner that comes in the place of another is told it again.
        """
        until, world_size = self._pace.now() + PATIENCE_S, request.world_size
        with self._heard:
            ranks, lost = self._decoded.setdefault(request.plan, (set(), {}))
            ranks.update(request.ranks)
            lost.update(request.lost)
            while len(self._decoded) > KEPT_LABELS:
                self._decoded.popitem(last=False)
            self._heard.notify_all()
            while True:
                missing = sorted(set(range(world_size)) - ranks)
                near = self._any_near(missing, request.near_from)
                if not near or self._closing or not self._pace.wait(self._heard, until - self._pace.now()):
                    return msg.Labels(missing, sorted(lost.items()), near)

    def _any_near(self, ranks: Sequence[int], step: int) -> bool:
        """Whether one of some ranks is attached and at a step or beyond: its host decodes what comes next for it."""
        positions = [news.positions for news in list(self._newest_news.values())]
        return any(rank in found and found[rank] >= step for found in positions for rank in ranks)

    def close(self) -> None:
        """End all waits, save how far the clients are, and leave the store."""
        self.interrupt()
        self._work.set()
        if self._writer.is_alive():
            self._writer.join()
        with self._changed:
            if self._closed:
                return
            if self._hear_newest():
                self._forget_passed()
            self._closed = True
            if self._planner.checkpoints.store.lineage and self._lost is None:
                with contextlib.suppress(StoreError):  # told below, where it concerns the stream
                    self._snapshots.keep_history(self._planner.checkpoints.passed)
            try:
                self._planner.close()
            except Fenced as error:
                logger.warning("%s", error)
            except StoreError as error:
                logger.warning("the last snapshot is missing, and a resume repeats a few steps: %s", error)

    def interrupt(self) -> None:
        """End all waits for a report."""
        self._closing = True
        self._ended.set()
        for condition in (self._changed, self._heard):
            with condition:
                condition.notify_all()

    # -- the store -----------------------------------------------------------------------------

    def _write_loop(self) -> None:
        """Write what is due; where that fails, again and again."""
        wait = 0.0
        while not self._closing and wait < math.inf:
            self._work.wait(COMMIT_S)
            self._work.clear()
            wait = self.write_due()
            if 0 < wait < math.inf:
                with self._changed:
                    self._pause(wait)
                self._work.set()

    def _beat_loop(self) -> None:
        """Say that the owner lives, without any lock: a planner may wait long for a loader, and lives."""
        while self._lost is None and not self._ended.wait(COMMIT_S):
            try:
                self._planner.checkpoints.store.beat()
            except Fenced:
                return  # the next write raises it
            except StoreError as error:
                logger.debug("the store did not hear that its owner lives: %s", error)

    def write_if_due(self) -> None:
        """Write what a planner without threads has said is due."""
        if self._work.is_set():
            self._work.clear()
            self.write_due()

    def write_due(self) -> float:
        """Write what is due now; return how long to wait before the next try (0: it worked; infinite: lost)."""
        try:
            self._measure()
            self._snapshots.work(probe=self._down is not None)
        except Fenced as error:
            with self._changed:
                self._lose(error)
            return math.inf
        except StoreError as error:
            with self._changed:
                self._failed(error)
            self._retry_s = min(2 * self._retry_s or RETRY_S[0], RETRY_S[1])
            return self._retry_s
        except Exception:  # such as a loader that is gone, which its callers notice; a snapshot can wait
            logger.exception("a snapshot could not be taken; it is tried again")
            return RETRY_S[1]
        self._retry_s = 0.0
        with self._changed:
            self._works()
        return 0.0

    def durably(self, work: Callable[[*Given], T], *given: *Given) -> T:
        """Do what must be written down; where that fails, again and again. The lock is not held while it waits."""
        wait, since = RETRY_S[0], self._pace.now()
        while True:
            self._check_owned()
            try:
                return work(*given)
            except StoreError as error:
                with self._changed:
                    self._failed(error)
                    if self._closing or self._pace.now() + wait - since > self._pace.patience_s:
                        raise
                    self._pause(wait, until_it_works=True)
                wait = min(2 * wait, RETRY_S[1])

    def _pause(self, seconds: float, *, until_it_works: bool = False) -> None:
        until = self._pace.now() + seconds
        while not self._closing and (left := until - self._pace.now()) > 0:
            if until_it_works and self._down is None:
                return
            self._pace.wait(self._changed, left)

    def _failed(self, error: StoreError) -> None:
        if isinstance(error, Fenced):
            self._lose(error)
            raise error
        if self._down is None:
            logger.warning(
                "planning pauses at step %d: %s Trainers go on with what is planned; the store is tried again until it "
                "works.", self._planner.next_step, error,
            )  # fmt: skip
            self._down = (time.time(), error)
            self._down_since = self._pace.now()
        self._work.set()

    def _check_patience(self) -> None:
        """Raise the error of a store that has been down for long; the next request waits as long again."""
        if self._down is not None and self._pace.now() - self._down_since > self._pace.patience_s:
            self._down_since = self._pace.now()
            raise self._down[1]

    def _works(self) -> None:
        if self._down is not None:
            logger.warning("the store works again after %.1f s; planning goes on", time.time() - self._down[0])
            self._down = None
            self._changed.notify_all()

    def _lose(self, error: Fenced) -> None:
        if self._lost is None:
            logger.error("%s", error)
            self._lost = error
            self._changed.notify_all()

    def _check_owned(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _status(self) -> dict[str, Any]:
        """Tell how things are, also while the planner waits for a store that does not answer."""
        held = self._changed.acquire(timeout=STATUS_S)
        try:
            newest = list(self._newest_news.values())
            positions = {rank: at for news in newest for rank, at in news.positions.items()}
            memory = Counter[str]()
            for news in newest:
                memory.update(news.memory)
            found = self._describe(positions, memory)
        finally:
            if held:
                self._changed.release()
        trouble = self._lost or (self._down and self._down[1])
        since = {"since": self._down[0]} if self._down else {}
        hosts = {
            str(host): {name: getattr(news, name) for name in ("fetched_bytes", "held_bytes", "packed_bytes")}
            for host, news in sorted(self._newest_news.copy().items())
        }
        store = {**found["store"], "error": str(trouble) if trouble else None, **since}
        history = self._planner.inputs.history
        reports = {name: {"step": step, "value": value} for name, (step, value) in history.newest().items()}
        measured = {name: value for name, (_, value) in self._measured.newest().items() if "/" not in name}
        told = {
            "waited_s": self._waited_s(),
            "reports": reports,
            "reports_left_out": history.left_out,
            "measured": measured,
        }
        return {**found, "store": store, "constructors": hosts, **told}

    def _waited_s(self) -> float:
        """Return the seconds in which trainers waited for a batch, on the host where they waited most."""
        return max((news.waited_s for news in list(self._newest_news.values())), default=0.0)

    def _measure(self) -> None:
        """Note how the run does: never while a step is planned, and at most once for a step."""
        with self._changed:
            planner, now = self._planner, self._pace.now()
            step, waited = planner.next_step - 1, self._waited_s()
            before, plan = self._measured_at, planner.newest_plan
            if step < planner.first_step or (before is not None and step <= before[0]):
                return
            self._measured_at = (step, now, waited)
            found: dict[str, float] = {}
            if before is not None and now > before[1]:
                found["steps_per_s"] = (step - before[0]) / (now - before[1])
                found["wait_s"] = max(waited - before[2], 0.0) / (step - before[0])
            weights, names = tuple(planner.latest_weights), planner.inputs.names
            if weights != self._measured_weights and sum(weights) > 0:
                self._measured_weights = weights
                shares = sorted(zip(weights, names, strict=False), reverse=True)[:MEASURED_SHARES]
                found |= {f"share/{name}": weight / sum(weights) for weight, name in shares}
            found |= _repeated_epochs(planner)
        if plan is not None:  # without the lock: a plan never changes
            loads = plan.loads(plan.padded).sum(axis=1)
            found["balance"] = float(loads.max() / max(loads.mean(), 1.0)) if len(loads) else 1.0
        with self._changed:
            self._measured.add(step, found)

    def _kept_history(self) -> dict[str, Any]:
        return {"reports": self._planner.inputs.history.to_json(), "measured": self._measured.to_json()}

    def _look_for_parked(self) -> None:
        """Look for parked sources that can be read again, in the caller; a store that fails at that is down."""
        try:
            self._watch.look()
        except StoreError as error:
            self._failed(error)

    def _watch_parked(self) -> None:
        """Look now and then whether parked sources can be read again; no request waits for that."""
        while not self._ended.wait(LOOK_S):
            with self._changed:
                due = self._watch.due()
            for name in due:
                found = self._planner.can_read(name)
                with self._changed:
                    try:
                        if not self._closed:
                            self._watch.looked(name, found)
                    except StoreError as error:
                        self._failed(error)  # it returns when the store is back

    def _hear_newest(self) -> bool:
        """Take in what hosts have told; return whether there was anything."""
        unheard = [(h, news) for h, news in self._newest_news.copy().items() if self._news.get(h) is not news]
        for host, news in unheard:
            self._hear(host, news)
        return bool(unheard)

    def _hear(self, host: int, news: HostNews) -> None:
        before = self._news.get(host, HostNews({}, {}))
        self._news[host] = news
        for rank in [rank for rank in self._asked if rank in before.positions]:
            if news.positions.get(rank) != self._asked[rank].step:
                del self._asked[rank]  # it has what it asked for, and went on or died
        for rank, step in news.reached.items():
            if rank in news.positions:
                self._reached[rank] = step
            elif before.reached.get(rank) != step:  # else it was told before, and the rank may sit on another host now
                self._reached[rank] = max(step, self._reached.get(rank, step))

    def _all_heard(self) -> bool:
        """Whether all ranks that may have been attached to the planner before this one have said where they are."""
        checkpoints = self._planner.checkpoints
        if not checkpoints.store.goes_on or self._pace.now() - self._born > RETURN_S:
            return True
        return len(self._reached) >= self._planner.meshes.at(checkpoints.passed).world_size

    def _forget_passed(self) -> None:
        attached = {rank for news in self._news.values() for rank in news.positions}
        if self._all_heard():
            self._planner.passed(self._planner.meshes.passed(self._reached, attached))
        if self._planner.checkpoints.is_due:
            self._work.set()
