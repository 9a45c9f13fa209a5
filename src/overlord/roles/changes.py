"""The inputs of a running stream: the trainer's reports, and live changes of the job. Parts of the Planner.

    Change          one change: mixture, skip, mesh, sources (one is added or removed), park, return
    InputLog        the reports and changes so far, and what holds at a step because of them
    Roster          the sources at one step: which are removed, which are parked
    SourceChanges   add, remove, park and return a source: checks the request and appends it to the log

Rules of this file:
1. An input is on disk before anything follows from it.
2. The first report of a step counts.
3. A change takes effect at a step that has not been planned, so a replay gives the same plans. A refused change has
   changed nothing.
4. What holds at a step follows from the steps that the changes name, not from the order of the calls. Within one step,
   mixtures come before added sources; only of two changes of the same thing does the later call win. For the same
   reason a change is checked against all changes of the log, whichever step they name.
5. A change that a caller asked for has an id. The same id again changes nothing: messages may arrive twice.
6. A source keeps its number. An added source takes the next one, so sources are added in the order of their steps; a
   removed source leaves its row in the state.
7. A mesh is not part of a state, which can be resumed on any mesh. Only a service that recovers from its own store
   repeats its meshes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from overlord.core.metric_history import MetricHistory
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.spec_errors import did_you_mean, is_finite, list_some
from overlord.errors import SpecError, StateError
from overlord.job.mixture_specs import MOST_WEIGHT
from overlord.job.reconcile import Joining, mixtures_over
from overlord.job.specs import Custom, Job, Mixture, Source
from overlord.stores.journal import Journal

Report = Mapping[str, float]

KEPT_REPORTS = 4096
"""Reports of this many recent steps are kept in memory; older ones are read from the journal if a replay asks."""
FIXED_WHILE_RUNNING = ("level", "stopping", "max_repetition", "granularity", "order")
"""Options of a mixture that cannot change while a stream runs: they define what a deficit counts."""
LAST_STEP = 10**9
"""No change takes effect later: no run comes to such a step."""
MOST_SKIPPED = 10_000
"""Global batches that may be skipped before one step: all of them are drawn before it, while trainers wait."""
ROSTER_KINDS = ("sources", "park", "return")
"""Changes of which sources are drawn from."""
Effective = Callable[[str, int | None], int]
"""Returns the step that a change takes effect at, given the call's name and `at_step`; refuses a planned step."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a running job."""

    kind: Literal["mixture", "skip", "mesh", "sources", "park", "return"]
    at: int
    """The first step it holds for."""
    mixture: Mixture | None = None
    count: int = 0
    """Global batches that are drawn and not delivered before step `at`."""
    add: Source | None = None
    """The source that is added, of kind "sources"."""
    weight: float | None = None
    """Its weight relative to the mixture in force at `at`; None for the mean of the positive weights."""
    joins: bool = True
    """Whether it joins the mixture in force; False where the job was resumed with other weights since."""
    source: str = ""
    """The source that is removed (of kind "sources"), parked or returned."""
    why: str = ""
    """Why it is parked."""
    failed: bool = False
    """Whether it was parked because it could not be read; False if a caller asked for it."""
    mesh: ClientPlaceTree | None = None
    hosts: int | None = None
    """Constructor hosts of that mesh, where they are given; they decide nothing that is in a step."""
    id: str = ""
    """The caller's id of the change; empty where no caller asked for it."""

    def to_json(self) -> dict[str, Any]:
        """Return the change as JSON."""
        head: dict[str, Any] = {"kind": self.kind, "at": self.at}
        if self.mixture is not None:
            head["mixture"] = mixture_to_json(self.mixture)
        if self.mesh is not None:
            head |= {"mesh": self.mesh.sizes()} | ({} if self.hosts is None else {"hosts": self.hosts})
        elif self.add is not None:
            head |= {"add": source_to_json(self.add), "weight": self.weight} | ({} if self.joins else {"joins": False})
        elif self.kind == "sources":
            head["remove"] = self.source
        elif self.kind == "park":
            head |= {"source": self.source, "why": self.why, "failed": self.failed}
        elif self.kind == "return":
            head["source"] = self.source
        elif self.kind == "skip":
            head["count"] = self.count
        return head | ({"id": self.id} if self.id else {})

    def mark(self) -> dict[str, Any]:
        """Return what a history of the run says of the change.

        Example:
            >>> Change("park", 7, source="web").mark(), Change("skip", 9, count=2).mark()
            ({'step': 7, 'kind': 'park', 'of': 'web'}, {'step': 9, 'kind': 'skip', 'of': '2'})
        """
        source = self.source if self.add is None else self.add.name
        kind = self.kind if self.kind != "sources" else "remove" if self.add is None else "add"
        return {"step": self.at, "kind": kind, "of": source or str(self.mesh or self.count or "")}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Change:
        """Read the output of `to_json`; anything else raises one of several errors."""
        kind = entry["kind"]
        found = cls(kind, int(entry["at"]), id=str(entry.get("id", "")))
        if kind == "skip":
            count = int(entry["count"])
            if not 1 <= count <= MOST_SKIPPED:
                raise ValueError(f"count {count}")
            return replace(found, count=count)
        if kind == "mixture":
            return replace(found, mixture=Mixture.from_mapping(entry["mixture"]))
        if kind == "mesh":
            return replace(found, mesh=ClientPlaceTree.from_sizes(entry["mesh"]), hosts=entry.get("hosts"))
        if kind not in ROSTER_KINDS:
            raise ValueError(f"kind {kind!r}")
        if kind == "sources" and "add" in entry:
            weight = entry["weight"]
            if weight is not None and not (is_finite(weight) and 0 <= weight <= MOST_WEIGHT):
                raise ValueError(f"weight {weight}")
            joins = bool(entry.get("joins", True))
            return replace(found, add=Source.from_mapping(entry["add"]), weight=weight, joins=joins)
        name = entry["remove" if kind == "sources" else "source"]
        if not isinstance(name, str):
            raise ValueError(f"source {name!r}")
        if kind == "park":
            return replace(found, source=name, why=str(entry["why"]), failed=bool(entry["failed"]))
        return replace(found, source=name)


class InputLog:
    """The reports and changes of one stream."""

    def __init__(
        self,
        job: Job,
        journal: Journal,
        reports: Mapping[int, Report],
        changes: Sequence[Change],
        history: MetricHistory | None = None,
    ) -> None:
        self._job = job
        self._journal = journal
        self._reports: dict[int, dict[str, float]] = {int(k): dict(v) for k, v in reports.items()}
        self.newest_report = max(self._reports, default=-1)
        """The newest step that was reported; -1 where none was."""
        self.history = MetricHistory() if history is None else history
        """All reports of the run for people to look at, older ones thinned; the stream never reads it."""
        known = self.history.last_step()
        for step in sorted(step for step in self._reports if step > known):
            self.history.add(step, self._reports[step])
        self.changes = list(changes)
        """Every change so far, in the order in which they were made."""
        self.names = tuple(job.names)
        """Every source by its number, including removed ones and those added at a later step."""
        self.base: dict[str, float] = {}
        """The weights given with the sources, used by a mixture without weights."""
        self._mixtures: tuple[int, list[tuple[int, Mixture]]] = (-1, [])

    def add_report(self, step: int, metrics: Report) -> None:
        """Append the report of a step that has none; it is on disk when this returns."""
        report = dict(metrics)
        self._journal.append({"kind": "report", "step": step, "metrics": report}, durable=True)
        self._reports[step] = report
        self.history.add(step, report)
        self.newest_report = max(self.newest_report, step)
        if len(self._reports) > 2 * KEPT_REPORTS:  # rarely: filtering them all costs as much as a write
            self._reports = {s: r for s, r in self._reports.items() if s >= self.newest_report - KEPT_REPORTS}

    def report_of(self, step: int) -> Report | None:
        """Return the report of a step, or None when there is none."""
        found = self._reports.get(step)
        if found is None and step < self.newest_report - KEPT_REPORTS:
            for record in self._journal.records():
                if record["kind"] == "report" and record["step"] == step:
                    return record["metrics"]
        return found

    def recent(self, first: int, stop: int) -> dict[int, Report]:
        """Return the reports of some steps."""
        found = {step: self.report_of(step) for step in range(max(first, 0), stop)}
        return {step: report for step, report in found.items() if report is not None}

    def add_change(self, change: Change) -> None:
        """Append a change; it is on disk when this returns."""
        self._journal.append({**change.to_json(), "kind": f"change.{change.kind}", "step": change.at}, durable=True)
        self.changes.append(change)
        if change.add is not None:
            self.names = (*self.names, change.add.name)

    def mixture_at(self, step: int) -> tuple[Mixture, int]:
        """Return the mixture in force at a step, and the step it holds from (-1: the job's own)."""
        if self._mixtures[0] != len(self.changes):
            self._mixtures = (len(self.changes), mixtures_of(self._job.mixture, self.names, self.changes, self.base))
        return next((mixture, since) for since, mixture in reversed(self._mixtures[1]) if since <= step)

    def check(self, what: str, change: Change, base: Mapping[str, float] | None = None) -> None:
        """Refuse a change that conflicts with a change of the log, whichever steps they name.

        `base` are the weights given with the sources, where the change adds one.

        Raises:
            SpecError: A mixture would name a source that is removed, or a step would have nothing to draw from.
        """
        names = self.names if change.add is None else (*self.names, change.add.name)
        changes, weights_of, first = [*self.changes, change], self.base if base is None else base, change.at
        for at, mixture in {
            one.at: one.mixture for one in changes if one.mixture is not None and one.at >= first
        }.items():
            there = roster_at(names, changes, at).present
            wrong = next((name for _, name in mixture.places() if name not in there), None)
            if wrong is not None:
                raise SpecError(
                    f"{what}: the mixture that was set for step {at} names {wrong!r}, which would be removed by then; "
                    "its weight would have no effect. Set a mixture without it for that step first."
                )
        mixtures = mixtures_of(self._job.mixture, names, changes, weights_of)
        ends = [since for since, _ in mixtures[1:]] + [math.inf]
        for (since, mixture), end in zip(mixtures, ends, strict=True):
            points = {max(since, 0), first, *mixture.positions(), *(one.at for one in changes)}
            met = [(point, point) for point in sorted(points) if max(since, first) <= point < end]
            if mixture.unit != "step":  # points without a weight are passed over, except for the last one
                steps = {max(since, first), *(one.at for one in changes if max(since, first) <= one.at < end)}
                met = [(step, mixture.positions()[-1]) for step in sorted(steps)]
            for step, point in met:
                roster = roster_at(names, changes, math.floor(step))
                weighted = dict(zip(roster.names, mixture.weights_at(point, roster.names, weights_of), strict=True))
                if not any(weighted[name] for name in roster.present):
                    raise SpecError(
                        f"{what}: no source has a weight at {mixture.unit} {point}; nothing could be drawn. Those that "
                        f"have one there ({list_some([name for name in weighted if weighted[name]])}) are removed by "
                        "then. Give another source a weight first, with set_mixture or add_source."
                    )

    def step_of(self, change_id: str) -> int | None:
        """Return the step that a change with this id takes effect at; None if the log has no such change."""
        return next((change.at for change in self.changes if change_id and change.id == change_id), None)

    def meshes(self) -> list[tuple[int, ClientPlaceTree]]:
        """Return (first step, mesh) of every mesh that the stream was given while it ran, in order of steps."""
        found = {change.at: change.mesh for change in self.changes if change.mesh is not None}
        return sorted(found.items(), key=lambda pair: pair[0])

    def hosts(self) -> list[tuple[int, int, int]]:
        """Return (first step, ranks, constructor hosts) of meshes that were given with hosts, in the order of calls."""
        given = ((one.at, one.mesh, one.hosts) for one in self.changes)
        return [(at, mesh.world_size, hosts) for at, mesh, hosts in given if mesh is not None and hosts is not None]

    def mesh_at(self, step: int) -> ClientPlaceTree | None:
        """Return the mesh in force at a step; None while that is the mesh of the launch."""
        return next((mesh for at, mesh in reversed(self.meshes()) if at <= step), None)

    def changes_from(self, step: int, *, whole: bool = False) -> list[dict[str, Any]]:
        """Return as JSON the changes that a stream needs if it is resumed at a step.

        `whole` includes what only a recovery of the same service needs: the meshes, and the ids of changes.
        """
        set_at = max((c.at for c in self.changes if c.mixture is not None and c.at < step), default=-1)
        latest = {change.at: change for change in self.changes if change.mixture is not None and change.at >= set_at}
        skips = [change for change in self.changes if change.kind == "skip" and change.at >= step]
        chosen = {id(change) for change in (*latest.values(), *skips, *roster_changes_from(self.changes, step))}
        kept = [change for change in self.changes if id(change) in chosen]  # in log order: of one step the last wins
        if not whole:
            return [replace(change, id="").to_json() for change in kept]
        begins = [at for at, _ in self.meshes()]
        in_force = max((at for at in begins if at <= step), default=step)
        kept += [change for change in self.changes if change.mesh is not None and change.at >= in_force]
        return [change.to_json() for change in kept]

    @property
    def added(self) -> frozenset[str]:
        """The sources that came while the stream ran."""
        return frozenset(change.add.name for change in self.changes if change.add is not None)

    def roster_at(self, step: int) -> Roster:
        """Return the sources at a step, and which of them are not drawn from."""
        return roster_at(self.names, self.changes, step)

    def skips_at(self, step: int) -> int:
        """Return how many global batches are skipped before a step."""
        return sum(change.count for change in self.changes if change.kind == "skip" and change.at == step)


class SourceChanges:
    """Adds, removes, parks and returns sources of a running stream."""

    def __init__(self, inputs: InputLog, effective: Effective) -> None:
        self._inputs = inputs
        self._effective = effective

    def check_name(self, name: str) -> None:
        """Refuse the name of a new source if it is taken."""
        if name in self._inputs.names:
            raise SpecError(
                f"add_source: the stream already has a source {name!r} (removed sources keep their name); cursors and "
                "weights are stored by name, so the two would be mixed up. Give the source another name."
            )

    def step_of_add(self, at_step: int | None) -> int:
        """Return the step that a new source is added at, not before a source that is already to be added."""
        at = self._effective("add_source", at_step)
        last = max((change.at for change in self._inputs.changes if change.add is not None), default=0)
        if at_step is not None and at < last:
            raise SpecError(
                f"add_source: step {at} is before step {last}, at which another source is added; sources are numbered "
                f"in the order of their steps, and ties are broken by number. Use at_step={last} or more, or leave it "
                "out."
            )
        return max(at, last)

    def made(self, change_id: str) -> int | None:
        """Return the step of a change that was made before under this id; None if there is none."""
        return self._inputs.step_of(change_id)

    def check_add(self, name: str, weight: float | None, at_step: int | None) -> None:
        """Refuse a new source before it is opened."""
        self.check_name(name)
        self._check_share(name, weight, self.step_of_add(at_step))

    def add(
        self, source: Source, weight: float | None, at: int, base: Mapping[str, float], change_id: str = ""
    ) -> None:
        """Append that a source is added at the step that `step_of_add` returned; its loaders must be open.

        `weight` is relative to the other weights (None: their mean), `base` has the weights given with all sources,
        including this one.
        """
        self.check_name(source.name)
        self._check_share(source.name, weight, at)
        change = Change("sources", at, add=source, weight=weight, id=change_id)
        self._inputs.check("add_source", change, base)
        self._inputs.base.update(base)
        self._inputs.add_change(change)

    def _check_share(self, name: str, weight: float | None, at: int) -> None:
        """Refuse an invalid weight, and a mixture that no source can be added to."""
        if weight is not None and not (is_finite(weight) and 0 <= weight <= MOST_WEIGHT):
            raise SpecError(
                f"add_source: weight is {weight!r}, which is no share of a mixture. Give a number from 0 to "
                f"{MOST_WEIGHT:g}."
            )
        learn = self._inputs.mixture_at(at)[0].learn
        if learn is not None and learn.method == "function":
            raise SpecError(
                f"add_source: the mixture is computed by the function {learn.name!r}, which cannot be serialized "
                f"with one more source; a resume could not repeat the change. Add {name!r} to the job and launch it "
                "from a state with reconcile='allow_add'."
            )

    def mean_weight(self) -> float:
        """Return the mean of the positive weights given with the sources."""
        others = [weight for weight in self._inputs.base.values() if weight > 0]
        return sum(others) / len(others) if others else 1.0

    def remove(self, name: str, at_step: int | None = None, *, change_id: str = "") -> int:
        """Remove a source from the mixture permanently, from a step on; return that step."""
        return self._make("remove_source", Change("sources", 0, source=name, id=change_id), at_step)

    def park(
        self,
        name: str,
        at_step: int | None = None,
        *,
        why: str = "asked for",
        failed: bool = False,
        change_id: str = "",
    ) -> int:
        """Stop drawing from a source from a step on, until it is returned; return that step."""
        change = Change("park", 0, source=name, why=why, failed=failed, id=change_id)
        return self._make("park_source", change, at_step)

    def give_back(self, name: str, at_step: int | None = None, *, change_id: str = "") -> int:
        """Draw from a parked source again from a step on, from its cursor; return that step."""
        return self._make("return_source", Change("return", 0, source=name, id=change_id), at_step)

    def _make(self, what: str, change: Change, at_step: int | None) -> int:
        made = self.made(change.id)
        if made is not None:
            return made
        change = replace(change, at=self._effective(what, at_step))
        number, roster = self._find(what, change.source, change.at)
        parked = roster.parked.get(number)
        if change.kind == "park" and parked is not None:
            raise SpecError(
                f"park_source: {change.source!r} is already parked, since step {parked.since}; nothing would change. "
                "Call return_source to draw from it again."
            )
        if change.kind == "return" and parked is None:
            raise SpecError(
                f"return_source: {change.source!r} is not parked at step {change.at}; nothing would change. Remove the "
                "call."
            )
        if change.kind == "sources":
            self._inputs.check(what, change)
        self._inputs.add_change(change)
        return change.at

    def parked(self, step: int) -> dict[str, Parked]:
        """Return the sources that are parked at a step, by name."""
        roster = self._inputs.roster_at(step)
        return {roster.names[number]: one for number, one in roster.parked.items()}

    def _find(self, what: str, name: str, at: int) -> tuple[int, Roster]:
        roster = self._inputs.roster_at(at)
        if name not in roster.names:
            raise SpecError(
                f"{what}: no source has the name {name!r} at step {at}; nothing would change."
                f"{did_you_mean(name, roster.names)} Sources: {list_some(roster.names)}."
            )
        number = roster.names.index(name)
        if number in roster.removed:
            raise SpecError(
                f"{what}: {name!r} is removed permanently; nothing would change. Add it under another name."
            )
        return number, roster


# -- the roster: which sources a stream has at a step, from the log of changes and the step alone ------------------


@dataclass(frozen=True, slots=True)
class Parked:
    """A source that is not drawn from for now."""

    since: int
    why: str
    failed: bool
    """Whether it was parked because it could not be read; False if a caller asked for it."""


@dataclass(frozen=True, slots=True)
class Roster:
    """The sources at one step.

    Example:
        >>> roster_at(["a", "b"], [], 0).names
        ('a', 'b')
    """

    names: tuple[str, ...]
    """Every source that has a number at this step, by number."""
    removed: frozenset[int] = frozenset()
    """Numbers of the sources that were removed permanently."""
    parked: Mapping[int, Parked] = field(default_factory=dict[int, Parked])
    """By number, the parked sources. They keep their cursor and deficit until they are returned."""

    @property
    def present(self) -> list[str]:
        """The sources that were not removed."""
        return [name for number, name in enumerate(self.names) if number not in self.removed]

    @property
    def drawn(self) -> list[str]:
        """The sources that may be drawn from."""
        return [n for i, n in enumerate(self.names) if i not in self.removed and i not in self.parked]


def roster_at(names: Sequence[str], changes: Sequence[Change], step: int) -> Roster:
    """Return the sources at a step, from all names by number; those added by a change are last, in that order."""
    comes = {change.add.name: change.at for change in changes if change.add is not None}
    here = tuple(name for name in names if comes.get(name, step) <= step)
    numbers = {name: number for number, name in enumerate(here)}
    removed: set[int] = set()
    parked: dict[int, Parked] = {}
    for change in sorted((c for c in changes if c.source and c.at <= step), key=lambda c: c.at):
        number = numbers.get(change.source)
        if number is None:
            continue
        if change.kind == "sources":
            removed.add(number)
        elif change.kind == "park":
            parked[number] = Parked(change.at, change.why, change.failed)
        else:
            parked.pop(number, None)
    return Roster(here, frozenset(removed), {n: one for n, one in parked.items() if n not in removed})


def roster_changes_from(changes: Sequence[Change], step: int) -> list[Change]:
    """Return the roster changes that a stream needs if it is resumed at a step.

    All additions and removals, since the job may not contain those sources; of parkings only those in force at the
    step, and those that take effect later.
    """
    latest: dict[str, Change] = {}
    for change in changes:
        if change.kind in ("park", "return") and change.at < step:
            before = latest.get(change.source)
            if before is None or before.at <= change.at:
                latest[change.source] = change
    kept = [one for one in changes if one.kind == "sources"]
    kept += [one for one in latest.values() if one.kind == "park"]
    return kept + [one for one in changes if one.kind in ("park", "return") and one.at >= step]


# -- the mixtures of a log, and whether they fit its roster --------------------------------------------------------


def check_mixture(mixture: Mixture, now: Mixture, names: Sequence[str]) -> None:
    """Refuse a mixture that a running stream cannot change to."""
    for _, name in mixture.places():
        if name not in names:
            raise SpecError(
                f"set_mixture: no source has the name {name!r}; its weight would have no effect. Sources: "
                f"{', '.join(names[:12])}."
            )
    for option in FIXED_WHILE_RUNNING:
        before, after = getattr(now, option), getattr(mixture, option)
        if before != after:
            raise SpecError(
                f"set_mixture: {option} is {after!r} and the running mixture has {before!r}; the deficits of the "
                f"sources would change their meaning. Set {option}={before!r}; only weights, schedule, temperature and "
                "learn can change while a stream runs."
            )


def mixtures_of(
    own: Mixture, names: Sequence[str], changes: Sequence[Change], base: Mapping[str, float]
) -> list[tuple[int, Mixture]]:
    """Return (first step, mixture) of every mixture, in order of steps; the first is the job's own, from step -1."""
    moving: list[tuple[int, Mixture | Joining]] = []
    for change in changes:
        if change.mixture is not None:
            moving.append((change.at, change.mixture))
        elif change.add is not None and change.joins:
            roster = roster_at(names, changes, change.at)
            number = roster.names.index(change.add.name)
            others = [name for i, name in enumerate(roster.names[:number]) if i not in roster.removed]
            moving.append((change.at, Joining(change.add.name, change.weight, others)))
    return mixtures_over(own, moving, base)


# -- changes as JSON, as the journal and states hold them ----------------------------------------------------------


def mixture_to_json(mixture: Mixture) -> dict[str, Any]:
    """Return a mixture as JSON that `Mixture.from_mapping` reads."""
    if mixture.learn is not None and mixture.learn.method == "function":
        raise SpecError(
            f"the mixture is computed by the function {mixture.learn.name!r}, which cannot be serialized; a resume "
            "could not repeat the change. Put it into the job, or use a built-in rule such as learn='odm'."
        )
    return {k: v for k, v in mixture.model_dump(mode="json", by_alias=True).items() if v is not None}


def source_to_json(source: Source) -> dict[str, Any]:
    """Return a source as JSON that `Source.from_mapping` reads.

    Raises:
        SpecError: for a source that cannot be serialized.
    """
    if isinstance(source.sample, Custom):
        raise SpecError(
            f"source {source.name!r} is made by the function {source.sample.name!r}, which cannot be serialized; a "
            "resume could not open it. Add the source to the job, and launch it from a state with "
            "reconcile='allow_add'."
        )
    return {k: v for k, v in source.model_dump(mode="json", by_alias=True).items() if v is not None}


def roster_log(given: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Read the roster changes from the change log of a state, before its job is known.

    Raises:
        StateError: for a log that is damaged.
    """
    return [_change_of(entry) for entry in given if entry.get("kind") in ROSTER_KINDS]


def changes_from_json(given: Any, job: Job) -> list[Change]:
    """Read the change log of a state."""
    entries: Sequence[Any] = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    return [_change_of(entry, job) for entry in entries]


def _change_of(entry: Any, job: Job | None = None) -> Change:
    try:
        change = Change.from_json(entry)
        if job is not None and change.mixture is not None:
            check_mixture(change.mixture, job.mixture, job.names)
        name = change.source if change.add is None else change.add.name
        if job is not None and change.kind in ROSTER_KINDS and name not in job.names:
            raise ValueError("no source of the job has that name")
        return change
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, SpecError) as error:
        raise StateError(
            f"the state is damaged: {entry!r:.80} is not a change of a job ({error}); the stream would continue "
            "differently. Use an undamaged state, as client.state_dict() returned it."
        ) from None
