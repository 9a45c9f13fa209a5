"""What a store holds of a stream, and where the stream goes on.

Rules of this file:
1. The store is claimed before it is read: no other service adds to what was read.
2. A launch takes from a store what a new lineage begins with. A recovery takes everything that was promised, and goes
   on in the lineage of its own service; where there is none yet, it is a launch again.
3. Meshes are left out, except by a recovery: a resume is launched with one of its own.
4. A rewind of a running service is a record of its lineage, on disk before anything follows from it. Every incarnation
   that would go on in that lineage begins a new one at the step of the record instead, exactly as `launch(state=STEP)`
   does: reports and changes of later steps stay in the old lineage. So a crash at any moment of a rewind leads to the
   same stream, and neither the launcher nor a planner's successor must be told anything but to start.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlord.core.metric_history import MetricHistory
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.spec_errors import did_you_mean, list_some
from overlord.core.states import StreamState, check_form, reads_records, restricted_parts
from overlord.errors import Fenced, SpecError, StateError
from overlord.job.reconcile import number_names
from overlord.job.specs import Job, Source, with_options
from overlord.roles.changes import ROSTER_KINDS, Change, InputLog, changes_from_json, roster_at, roster_log
from overlord.roles.drawer import Drawer
from overlord.roles.poisoned_rows import PoisonedRows
from overlord.roles.ports import Loaders
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.stores.places import OpenPlace, Place, open_place
from overlord.stores.store import FoundLineage, Store, kept_history, lineage_before, lineage_of, newest_lineage
from overlord.transforms.samples.processor import fill_from_processor, read_processor, share_patches

Record = Mapping[str, Any]
REWIND = "rewind"
"""The kind of the record that ends a lineage: the step that all ranks go back to, and their mesh."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a stream goes on, before its sources are known."""

    state: Mapping[str, Any] | None
    """The state; None for a stream that has not begun."""
    records: Sequence[Record] = ()
    """What of the journal counts beside it."""
    found: FoundLineage | None = None
    """The lineage that it was found in."""
    recovered: bool = False
    """Whether the stream goes on in that very lineage."""
    replay_to: int | None = None
    """The step to draw up to from that state before anything is handed out."""
    mesh: ClientPlaceTree | None = None
    """The mesh that holds from there on, of a running service that goes back; by default that of the launch."""
    replays: bool = False
    """Whether the records hold what came in for later steps too."""

    @property
    def numbering(self) -> Mapping[str, Any] | None:
        """A state that knows all sources, also those that came after it."""
        return with_records(self.state, self.records) if self.records else self.state

    @property
    def loaders(self) -> Mapping[str, Any]:
        """What the SourceLoaders had met, by source."""
        return {} if self.found is None else self.found.loaders


@dataclass(frozen=True, slots=True)
class History:
    """The open store of a stream, and what was found in it."""

    store: Store
    point: ResumePoint
    inputs: InputLog
    verdicts: PoisonedRows
    digests: Mapping[int, str] = field(default_factory=dict[int, str])
    """Digests of plans that were made before a crash."""
    measured: MetricHistory = field(default_factory=MetricHistory)
    """What the service had measured of itself, step by step."""


def open_store(options: ServiceOptions, place: str, opens: OpenPlace | None = None) -> tuple[Store, ResumePoint]:
    """Claim a store, and find where the stream goes on.

    Raises:
        StoreError: It cannot be reached, or a living service owns it.
        Fenced: This service should recover, and another one has begun a lineage since.
        StateError: It does not hold what was asked for.
    """
    store = Store((opens or open_place)(place, options.store_options), options.service, keep=options.keep)
    try:
        return store, _find_resume_point(options, store.place, store.newest() if _reads_store(options) else None)
    except BaseException:
        store.close()
        raise


def peek(options: ServiceOptions, place: str) -> Mapping[str, Any] | None:
    """Return a state that knows all sources of what a launch will go on with; nothing is claimed."""
    if not _reads_store(options):
        return options.state
    there = open_place(place, options.store_options)
    return _find_resume_point(options, there, newest_lineage(there)).numbering


def _reads_store(options: ServiceOptions) -> bool:
    return options.recover or options.latest or options.before_step is not None


def _find_resume_point(options: ServiceOptions, place: Place, found: FoundLineage | None) -> ResumePoint:
    if options.recover and found is not None:
        if found.newest.service == options.service:
            back = next((record for record in reversed(found.records) if record["kind"] == REWIND), None)
            if back is None:
                return ResumePoint(found.newest.state, found.records, found, recovered=True)
            return before(place, found, back["step"], ClientPlaceTree.from_sizes(back["mesh"]))
        if (own := lineage_of(place, options.service)) is not None:
            raise Fenced(
                f"another service has taken over the store {place.name!r}: lineage {found.number} is its, and the "
                f"lineage {own} of this service ends before it. To begin anew would hand out steps that differ from "
                "those that were trained on, so it stops here. Launch again with state='latest' or a saved state."
            )
    if not options.latest and options.before_step is None:
        return ResumePoint(options.state)
    if found is None:
        asked = "'latest'" if options.latest else options.before_step
        raise StateError(
            f"state={asked} was asked for, but the store {place.name!r} holds no snapshot; there is nothing to resume. "
            "Launch without state to begin."
        )
    if options.before_step is None:
        return _latest(found)
    return before(place, found, options.before_step, replays=options.replays)


@reads_records
def _latest(found: FoundLineage) -> ResumePoint:
    """Go on from the newest snapshot, with what came in later and still counts."""
    step, lag = found.newest.step, found.newest.state["fingerprint"].get("lag", 0)

    def counts(record: Record) -> bool:
        if record["kind"] == "report":
            return step - lag <= record["step"] < step
        return record["kind"] == "verdict" or record["step"] >= step

    return ResumePoint(found.newest.state, [record for record in found.records if counts(record)], found)


@reads_records
def before(
    place: Place, newest: FoundLineage, step: int, mesh: ClientPlaceTree | None = None, *, replays: bool = False
) -> ResumePoint:
    """Go on before a step: from the nearest snapshot, drawing again what lies between.

    What came in for later steps holds in a replay only: elsewhere these are trained on anew.

    Raises:
        StateError: The store does not hold the step any more; it names those that it holds.
    """
    found = lineage_before(place, newest, step)
    oldest, last = found.snapshots[0].step, found.last_resumable
    if not oldest <= step <= last:
        raise StateError(
            f"step {step} was asked for, and lineage {found.number} of the store {place.name!r} keeps the steps "
            f"{oldest} to {last}; what lies outside cannot be told exactly. Give a step of these, or launch from a "
            "saved state" + ("." if step > last else "; launch with a larger keep to be able to go further back.")
        )
    nearest = [snapshot for snapshot in found.snapshots if snapshot.step <= step][-1].state
    state = {**nearest, "changes": [change for change in nearest["changes"] if replays or change["at"] <= step]}

    def counts(record: Record) -> bool:
        return replays or record["step"] < step or (record["kind"].startswith("change.") and record["step"] == step)

    records = [record for record in found.records if counts(record)]
    return ResumePoint(state, records, found, replay_to=step, mesh=mesh, replays=replays)


@reads_records
def read_history(job: Job, store: Store, point: ResumePoint, given: Mapping[str, Any] | None) -> History:
    """Read the inputs of a stream, now that its sources are known; a recovery goes on in its lineage."""
    records, found = point.records, point.found
    verdicts = PoisonedRows.recover(store.journal, given, records, job.names, threading.Lock())
    reported, measured = _metrics_so_far(store, point, given)
    if not point.recovered:
        return History(store, point, _inputs(job, store, given, point, reported), verdicts, measured=measured)
    assert found is not None and given is not None
    inputs = _inputs_again(job, store, given, found, reported)
    digests = {record["step"]: record["plan"] for record in records if record["kind"] == "plan"}
    store.go_on(found)
    return History(store, point, inputs, verdicts, digests, measured)


def _metrics_so_far(
    store: Store, point: ResumePoint, given: Mapping[str, Any] | None
) -> tuple[MetricHistory, MetricHistory]:
    """Return what was reported and measured before a stream goes on: what was kept, and newer reports."""
    if given is None:
        return MetricHistory(), MetricHistory()
    kept = kept_history(store.place)
    reported, measured = (MetricHistory.from_json(kept.get(name)) for name in ("reports", "measured"))
    begin = int(given["step"]) if point.replay_to is None else point.replay_to
    if not point.recovered:
        reported.forget_from(begin)
        measured.forget_from(begin)
    known = reported.last_step()
    told = {
        record["step"]: record["metrics"]
        for record in reversed(point.found.records if point.found is not None else ())
        if record["kind"] == "report"
    }
    for step in sorted(told):
        if step > known and (point.recovered or step < begin):
            reported.add(step, told[step])
    return reported, measured


def _inputs(
    job: Job, store: Store, state: Mapping[str, Any] | None, point: ResumePoint, history: MetricHistory
) -> InputLog:
    """Return the reports and changes of a state and of records; of one step's reports the first counts."""
    if state is None:
        return InputLog(job, store.journal, {}, [])
    records = point.records
    known = list(state["changes"]) if isinstance(state["changes"], list) else [state["changes"]]
    changes = changes_from_json(with_changes(known, changes_of(records)), job)
    reports = _with_reports(state["reports"], records)
    begin = point.replay_to or 0  # the launch has the mesh of this step
    kept = [change for change in changes if change.mesh is None or (point.replays and change.at > begin)]
    if point.mesh is not None:  # a change like any other, so that a recovery of the new lineage finds it
        assert point.replay_to is not None
        kept.append(Change("mesh", point.replay_to, mesh=point.mesh))
    return InputLog(job, store.journal, reports, kept, history)


def _inputs_again(
    job: Job, store: Store, given: Mapping[str, Any], found: FoundLineage, history: MetricHistory
) -> InputLog:
    """Return everything that a lineage was told since its oldest snapshot: any of its steps may be planned again."""
    oldest = found.snapshots[0].state
    told = with_changes(given["changes"], with_changes(oldest["changes"], changes_of(found.records)))
    changes = changes_from_json(told, job)
    return InputLog(job, store.journal, _with_reports(oldest["reports"], found.records), changes, history)


def _with_reports(known: Mapping[str, Any], records: Sequence[Record]) -> dict[int, Any]:
    reports = {int(step): report for step, report in known.items()}
    for record in records:
        if record["kind"] == "report":
            reports.setdefault(record["step"], record["metrics"])
    return reports


@reads_records
def earlier_states(
    job: Job, parts: Mapping[str, Any], history: History, gone: Collection[str] = ()
) -> list[StreamState]:
    """Return the older states of the lineage that is gone on in, as far as all that they draw from is open."""
    point = history.point
    if not point.recovered or point.found is None:
        return []
    found: list[StreamState] = []
    for snapshot in point.found.snapshots[:-1]:
        state, names = snapshot.state, job.names[: len(snapshot.state["sources"])]
        went = {change["remove"] for change in state["changes"] if "remove" in change and change["at"] <= state["step"]}
        if not (set(gone) & set(names)) - went:
            now = restricted_parts(parts, names)
            found.append(StreamState.from_json(without_files(state, now, set(gone) & set(names)), names, now))
    return found


def draw_again(job: Job, loaders: Loaders, state: StreamState, history: History) -> StreamState:
    """Return the state at a step that was asked for: from a snapshot on, as the journal has it.

    Steps of which the journal does not hold all that changed are drawn; what comes out must be what was drawn then.
    """
    asked, found = history.point.replay_to, history.point.found
    if asked is None or found is None:
        return state
    plans = {record["step"]: record for record in found.records if record["kind"] == "plan"}
    drawer: Drawer | None = None
    while state.step < asked:
        step, record = state.step, plans.get(state.step, {})
        if "rows" in record and set(record["rows"]) <= set(job.names):
            state, drawer = state.with_rows(record["rows"], job.names, record.get("mixer")), None
            continue
        drawer = drawer or Drawer(job, loaders, state, history.inputs)
        drawn = drawer.draw()
        state = drawer.state
        if drawn is None and not record:
            raise StateError(
                f"state={asked} was asked for, and the stream ends at step {step}; no trainer has come further. Give a "
                "step before that, or launch from a saved state."
            )
        if drawn is None or record.get("order", drawn.draw.digest) != drawn.draw.digest:
            raise StateError(
                f"state={asked}: step {step} was drawn again and came out differently; the stream would not be the one "
                "that was trained on. A file under a source has changed, or a record was damaged."
            )
    return state


# --------------------------------------------------------------------------------------------------------------
# The sources of a job by their numbers, with those that came while its stream ran.


def canonical(job: Job, state: Mapping[str, Any] | None = None) -> Job:
    """Return the job as its stream is made: what its processor folder says and what its images and clips share
    filled in, its sources by number.

    A stream that begins numbers its sources by name: the order that they are written in must not matter. One that goes
    on keeps the numbers of its state, and those that are still to come stand last, in the order in which they come.
    """
    if job.tokenizer is not None and Path(job.tokenizer).is_dir():
        job = fill_from_processor(job, read_processor(job.tokenizer))
    job = share_patches(job)
    named = {source.name: source for source in job.sources}
    coming = [name for name in names_to_come(state) if name in named]
    here = [name for name in named if name not in coming]
    order = number_names(here, state, keep_order=job.mixture.order == "sequential")
    return job.replace(sources=[named[name] for name in (*order, *coming)])


def names_to_come(state: Mapping[str, Any] | None) -> list[str]:
    """Return the sources that a state's log lets come at its step or later."""
    if state is None:
        return []
    log = roster_log(state["changes"])
    here = set(state["sources"])
    return [change.add.name for change in log if change.add is not None and change.add.name not in here]


def with_records(state: Mapping[str, Any] | None, records: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return a state with the changes of the roster that were journaled after it: their sources must be opened too."""
    if state is None:
        return None
    check_form(state)
    kinds = {f"change.{kind}" for kind in ROSTER_KINDS}
    coming = [record for record in records if record["kind"] in kinds and record["at"] >= state["step"]]
    return {**state, "changes": with_changes(state["changes"], changes_of(coming))}


def changes_of(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the changes among the records of a journal, as a state has them, in their order."""
    return [
        {
            **{key: value for key, value in record.items() if key != "step"},
            "kind": record["kind"].removeprefix("change."),
        }
        for record in records
        if record["kind"].startswith("change.")
    ]


def with_changes(known: Iterable[Mapping[str, Any]], told: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the changes of a state and of a journal as one log, in the order in which they were made.

    The journal has them in that order, also those that a later word made void and that a state leaves out. What only
    the state knows is older than the journal, and stands in front. A change is known again by its id. Without one it is
    known by what it says, each as often as it was said: to park, return and park again is not to park once.

    Example:
        >>> park, back = {"kind": "park", "at": 4}, {"kind": "return", "at": 4}
        >>> [change["kind"] for change in with_changes([park], [park, back, park])]
        ['park', 'return', 'park']
    """
    log = list(told)
    open_places = list(range(len(log)))
    older: list[Mapping[str, Any]] = []
    for change in reversed(list(known)):  # what the journal has no more is the oldest
        place = next((place for place in reversed(open_places) if _is_same(change, log[place])), None)
        if place is None:
            older.append(change)
        else:
            open_places.remove(place)
            log[place] = change  # as the state has it, which may have been reconciled with another job
    return older[::-1] + log


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["id"] == other["id"] if one.get("id") and other.get("id") else one == other


def with_added_sources(job: Job, state: Mapping[str, Any] | None) -> Job:
    """Return the job with the sources that came while its stream ran, also those that went again.

    Raises:
        StateError: when the state is none, or its log is damaged.
    """
    if state is None:
        return job
    check_form(state)
    log = roster_log(state["changes"])
    new = [change.add for change in log if change.add is not None and change.add.name not in job.names]
    return job.replace(sources=[*job.sources, *new]) if new else job


def with_source_options(job: Job, options: ServiceOptions, state: Mapping[str, Any] | None, own: Job) -> Job:
    """Return a job whose sources have the storage options that the launch gives for them by name.

    Args:
        job: The job, with the sources that came while its stream ran.
        options: Those of the launch.
        state: The state that those sources are known from.
        own: The job as it was launched.

    Raises:
        SpecError: A source was added with options that were not written down, and they are not given; or options are
            given for a source that there is not.
    """
    given = options.source_options
    refuse_kept_readers(job, own, given)
    gone = names_gone(own, state)
    log = () if state is None else roster_log(state["changes"])
    for change in log:
        name = "" if change.add is None else change.add.name
        if change.withheld and name not in {*given, *gone, *own.names}:
            raise SpecError(
                f"source {name!r} was added while the run went on, with the storage options "
                f"{', '.join(change.withheld)}, which are never written to a store or a state; it cannot be opened. "
                f"Give them again: ol.launch(.., source_options={{{name!r}: {{..}}}}), or source_options in the launch "
                "section of the job file. Give {} where the environment has the credentials."
            )
    unknown = next((name for name in given if name not in job.names), None)
    if unknown is not None and not options.recover:  # what a crash kept from being journaled is known to the launcher
        raise SpecError(
            f"source_options: there is no source {unknown!r}; its options would not be used."
            f"{did_you_mean(unknown, job.names)} Sources: {list_some(job.names)}."
        )
    if not given:
        return job
    return job.replace(sources=[with_options(one, given.get(one.name, {})) for one in job.sources])


def refuse_kept_readers(job: Job, own: Job, known: Collection[str] = ()) -> None:
    """Refuse readers of the user's that only a store or a state names: what is read there must not choose code.

    Args:
        job: The job, with the sources that came while its stream ran.
        own: The job as it was launched, which may name any reader.
        known: Sources that the running service was given itself.

    Raises:
        SpecError: A source that was added has a reader of its own that the job does not name.
    """
    named = {format for source in own.sources for format in _formats_of(source)}
    trusted = {*own.names, *known}
    for source in job.sources:
        if source.name not in trusted:
            for format in _formats_of(source):
                if ":" in format and format not in named:
                    raise SpecError(
                        f"source {source.name!r} was added while the run went on, with the reader {format!r}, and "
                        "code is not taken from a store or a state. Put the source into the job."
                    )


def _formats_of(source: Source) -> list[str]:
    formats = (source.format, None if source.join is None else source.join.format)
    return [format for format in formats if format is not None]


def names_gone(job: Job, state: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the sources that the job does not have, and that came and went before the state's step.

    Their files may be gone too: nothing of them is opened. Their numbers stay, as do those of the sources behind them.
    """
    if state is None:
        return frozenset()
    check_form(state)
    log = roster_log(state["changes"])
    came = {change.add.name for change in log if change.add is not None}
    went = {change.source for change in log if change.kind == "sources" and change.at <= state["step"]}
    return frozenset((came & went) - set(job.names))


def names_parked(state: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the sources that are parked once all changes of a state's log hold: nothing need be read of them."""
    if state is None:
        return frozenset()
    log = roster_log(state["changes"])
    added = [change.add.name for change in log if change.add is not None]
    roster = roster_at(tuple(dict.fromkeys((*state["sources"], *added))), log, max((one.at for one in log), default=0))
    return frozenset(roster.names[number] for number in roster.parked)


def pass_recorded(job: Job, state: StreamState, history: History, away: Collection[str]) -> StreamState:
    """Return a later state of a lineage that goes on: as its records have it, up to the step that parked some sources.

    Their files are away, and the steps in between, which trainers have had, cannot be drawn again without them.
    """
    parks = [one.at for one in history.inputs.changes if one.kind == "park" and one.source in away]
    until = max(parks, default=0) if history.point.recovered else 0
    plans = {record["step"]: record for record in history.point.records if record["kind"] == "plan"}
    while state.step < until:
        record = plans.get(state.step, {})
        if "rows" not in record or not set(record["rows"]) <= set(job.names):
            break
        state = state.with_rows(record["rows"], job.names, record.get("mixer"))
    return state


def without_files(state: Mapping[str, Any], parts: Mapping[str, Any], gone: Collection[str]) -> Mapping[str, Any]:
    """Return a state whose fingerprint does not tell which files sources had that are not opened again."""
    if not gone:
        return state
    now = {name: parts["sources"][name] for name in gone if name in state["fingerprint"]["sources"]}
    told = {**state["fingerprint"], "sources": {**state["fingerprint"]["sources"], **now}}
    return {**state, "fingerprint": told}
