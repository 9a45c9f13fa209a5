"""Which sources a stream has at a step: who has come, gone, is parked. Read from the log of changes by step alone.

Rules of this file:
1. A source keeps its number for good. Who comes takes the next one; who goes leaves its row behind.
2. Of several changes of one source the latest step counts, and of one step the latest word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.spec_errors import did_you_mean, is_finite, list_some
from overlord.errors import SpecError, StateError
from overlord.job.reconcile import Joining, mixtures_over
from overlord.job.specs import Custom, Job, Mixture, Source
from overlord.stores.journal import Journal


class RosterChange(Protocol):
    """What a change tells of a source; other changes have another kind."""

    @property
    def kind(self) -> str:
        """Which change it is, such as "park"."""
        ...

    @property
    def at(self) -> int:
        """The first step it holds for."""
        ...

    @property
    def add(self) -> Source | None:
        """The source that comes."""
        ...

    @property
    def source(self) -> str:
        """The source that goes, is parked or returns."""
        ...

    @property
    def why(self) -> str:
        """Why it is parked."""
        ...

    @property
    def failed(self) -> bool:
        """Whether it could not be read."""
        ...


@dataclass(frozen=True, slots=True)
class Parked:
    """A source that is not drawn from for now."""

    since: int
    why: str
    failed: bool
    """Whether it could not be read; otherwise somebody asked for it."""


@dataclass(frozen=True, slots=True)
class Roster:
    """The sources at one step.

    Example:
        >>> roster_at(["a", "b"], [], 0).names
        ('a', 'b')
    """

    names: tuple[str, ...]
    """Every source that has a number at this step."""
    removed: frozenset[int] = frozenset()
    """Those that were taken out of the mixture for good."""
    parked: Mapping[int, Parked] = field(default_factory=dict[int, Parked])
    """Those that keep their cursor and their deficit until they return."""

    @property
    def drawn(self) -> list[str]:
        """The sources that may be drawn from."""
        return [n for i, n in enumerate(self.names) if i not in self.removed and i not in self.parked]


def roster_at(names: Sequence[str], changes: Sequence[RosterChange], step: int) -> Roster:
    """Return the sources at a step.

    Args:
        names: All sources by number; those that come by a change stand behind the others, in the order they come.
        changes: The log.
        step: The step.
    """
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


C = TypeVar("C", bound=RosterChange)


def roster_changes_from(changes: Sequence[C], step: int) -> list[C]:
    """Return the changes of the roster that a stream which begins at a step must know.

    All who came and went: the job may not have them. Of parkings only those in force, and what is still ahead.
    """
    latest: dict[str, C] = {}
    for change in changes:
        if change.kind in ("park", "return") and change.at < step:
            before = latest.get(change.source)
            if before is None or before.at <= change.at:
                latest[change.source] = change
    kept = [one for one in changes if one.kind == "sources"]
    kept += [one for one in latest.values() if one.kind == "park"]
    return kept + [one for one in changes if one.kind in ("park", "return") and one.at >= step]


# --------------------------------------------------------------------------------------------------------------
# What the outside world tells a stream while it runs: the trainer's reports, and changes of the job.
#
# Rules of this file:
# 1. An input is on disk before anything follows from it.
# 2. The first report of a step counts. A change takes effect at a step that has not been planned; what was planned
#    before it stays as it was, so a replay comes out the same.
#    What holds at a step follows from the steps that the changes name, not from the order of the calls: of one step
#    mixtures count before sources that come, and only of two changes of the same thing the later call.
# 3. A change has an id where somebody asked for it. The same id again changes nothing: messages may be sent twice.
# 4. A mesh is no part of a state, which goes on anywhere; only a store that goes on by itself repeats it.


Report = Mapping[str, float]

KEPT_REPORTS = 4096
"""Reports of this many recent steps are kept in memory; older ones are read from the journal if a replay asks."""
FIXED_WHILE_RUNNING = ("level", "stopping", "max_repetition", "granularity", "order")
"""What of a mixture cannot change while a stream runs: it says what the sources are owed."""
ROSTER_KINDS = ("sources", "park", "return")
"""Changes of which sources are drawn from."""


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
    """The source that comes, of kind "sources"."""
    weight: float | None = None
    """Its weight against those of the mixture in force when it comes; None for the mean of those that have one."""
    joins: bool = True
    """Whether it joins the mixture in force: not where the job was resumed with other weights since."""
    source: str = ""
    """The source that goes (of kind "sources"), is parked or returns."""
    why: str = ""
    """Why it is parked."""
    failed: bool = False
    """Whether it was parked because it could not be read, and not because somebody asked for it."""
    mesh: ClientPlaceTree | None = None
    id: str = ""
    """What its caller knows it by."""

    def to_json(self) -> dict[str, Any]:
        """Return the change as JSON."""
        head: dict[str, Any] = {"kind": self.kind, "at": self.at}
        if self.mixture is not None:
            head["mixture"] = mixture_to_json(self.mixture)
        if self.mesh is not None:
            head["mesh"] = self.mesh.sizes()
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


def mixture_to_json(mixture: Mixture) -> dict[str, Any]:
    """Return a mixture as JSON that `Mixture.from_mapping` reads."""
    if mixture.learn is not None and mixture.learn.method == "function":
        raise SpecError(
            f"the mixture follows the function {mixture.learn.name!r}, which cannot be written down; a resume could "
            "not repeat the change. Put it into the job, or change to a rule with a name such as learn='odm'."
        )
    return {k: v for k, v in mixture.model_dump(mode="json", by_alias=True).items() if v is not None}


def source_to_json(source: Source) -> dict[str, Any]:
    """Return a source as JSON that `Source.from_mapping` reads.

    Raises:
        SpecError: for a source that cannot be written down.
    """
    if isinstance(source.sample, Custom):
        raise SpecError(
            f"source {source.name!r} is made by the function {source.sample.name!r}, which cannot be written down; a "
            "resume could not open it. Put the source into the job, and launch it again from a state with "
            "reconcile='allow_add'."
        )
    return {k: v for k, v in source.model_dump(mode="json", by_alias=True).items() if v is not None}


def source_change(entry: Mapping[str, Any]) -> Change:
    """Read a change of the roster: a source that comes, goes, is parked or returns."""
    kind, at = entry["kind"], int(entry["at"])
    if kind == "sources" and "add" in entry:
        weight = entry["weight"]
        if weight is not None and not (is_finite(weight) and weight >= 0):
            raise ValueError(f"weight {weight}")
        return Change(
            "sources", at, add=Source.from_mapping(entry["add"]), weight=weight, joins=bool(entry.get("joins", True))
        )
    name = entry["remove" if kind == "sources" else "source"]
    if not isinstance(name, str):
        raise ValueError(f"source {name!r}")
    if kind == "park":
        return Change("park", at, source=name, why=str(entry["why"]), failed=bool(entry["failed"]))
    return Change(kind, at, source=name)


def roster_log(given: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Read the changes of the roster from the change log of a state, before its job is known.

    Raises:
        StateError: for a log that is damaged.
    """
    changes: list[Change] = []
    for entry in given:
        try:
            if entry.get("kind") in ROSTER_KINDS:
                changes.append(source_change(entry))
        except (KeyError, TypeError, ValueError, OverflowError, SpecError) as error:
            raise _no_change(entry, error) from None
    return changes


def changes_from_json(given: Any, job: Job) -> list[Change]:
    """Read the change log of a state."""
    changes: list[Change] = []
    entries: Sequence[Any] = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for entry in entries:
        try:
            kind, at, name = entry["kind"], int(entry["at"]), str(entry.get("id", ""))
            if kind == "skip":
                count = int(entry["count"])
                if count < 1:
                    raise ValueError(f"count {count}")
                changes.append(Change("skip", at, count=count, id=name))
            elif kind == "mixture":
                mixture = Mixture.from_mapping(entry["mixture"])
                check_mixture(mixture, job.mixture, [source.name for source in job.sources])
                changes.append(Change("mixture", at, mixture=mixture, id=name))
            elif kind == "mesh":
                changes.append(Change("mesh", at, mesh=ClientPlaceTree.from_sizes(entry["mesh"]), id=name))
            elif kind in ROSTER_KINDS:
                change = source_change(entry)
                if (change.add.name if change.add is not None else change.source) not in job.names:
                    raise ValueError("no source of the job has that name")
                changes.append(replace(change, id=name))
            else:
                raise ValueError(f"kind {kind!r}")
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, SpecError) as error:
            raise _no_change(entry, error) from None
    return changes


def _no_change(entry: object, error: Exception) -> StateError:
    return StateError(
        f"the state is damaged: {entry!r:.80} is not a change of a job ({error}); the stream would go on differently. "
        "Use an undamaged state, as client.state_dict() returned it."
    )


def check_mixture(mixture: Mixture, now: Mixture, names: Sequence[str]) -> None:
    """Refuse a mixture that a running stream cannot take on."""
    for _, name in mixture.places():
        if name not in names:
            raise SpecError(
                f"set_mixture: no source has the name {name!r}; its weight would be lost. Sources: "
                f"{', '.join(names[:12])}."
            )
    for option in FIXED_WHILE_RUNNING:
        before, after = getattr(now, option), getattr(mixture, option)
        if before != after:
            raise SpecError(
                f"set_mixture: {option} is {after!r} and the running mixture has {before!r}; what the sources are owed "
                f"would mean something else. Write {option}={before!r}; only weights, schedule, temperature and learn "
                "can change while a stream runs."
            )


def mixtures_of(
    own: Mixture, names: Sequence[str], changes: Sequence[Change], base: Mapping[str, float]
) -> list[tuple[int, Mixture]]:
    """Return from which step on each mixture holds, in order; the first one, from -1 on, is the job's own.

    Args:
        own: The job's mixture.
        names: All sources by number.
        changes: The log, in the order of the calls.
        base: The weights that stand beside the sources.
    """
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


def check_timeline(
    what: str, own: Mixture, names: Sequence[str], changes: Sequence[Change], base: Mapping[str, float], first: int
) -> None:
    """Refuse a log by which a mixture names a source that is gone, or a step has nothing to draw from.

    Args:
        what: The call that is to blame, for the message.
        own: The job's mixture.
        names: All sources by number.
        changes: The log.
        base: The weights that stand beside the sources.
        first: The first step that matters.
    """
    latest = {change.at: change.mixture for change in changes if change.mixture is not None and change.at >= first}
    for at, mixture in latest.items():
        roster = roster_at(names, changes, at)
        there = [name for number, name in enumerate(roster.names) if number not in roster.removed]
        wrong = next((name for _, name in mixture.places() if name not in there), None)
        if wrong is not None:
            raise SpecError(
                f"{what}: the mixture that was set for step {at} names {wrong!r}, which would be removed by then; its "
                "weight would be lost. Set a mixture without it for that step first."
            )
    mixtures = mixtures_of(own, names, changes, base)
    ends = [since for since, _ in mixtures[1:]] + [math.inf]
    for (since, mixture), end in zip(mixtures, ends, strict=True):
        points = {max(since, 0), first, *mixture.positions(), *(change.at for change in changes)}
        for point in sorted(point for point in points if max(since, first) <= point < end):
            roster = roster_at(names, changes, math.floor(point))
            weights = mixture.weights_at(point, roster.names, base)
            if not any(weight for number, weight in enumerate(weights) if number not in roster.removed):
                gone = [roster.names[number] for number, weight in enumerate(weights) if weight]
                raise SpecError(
                    f"{what}: no source has a weight at step {point}; nothing could be drawn. All that the mixture "
                    f"gives one there ({list_some(gone)}) is removed by then. Give another source a weight first, with "
                    "set_mixture or add_source."
                )


class InputLog:
    """The reports and changes of one stream."""

    def __init__(self, job: Job, journal: Journal, reports: Mapping[int, Report], changes: Sequence[Change]) -> None:
        self._job = job
        self._journal = journal
        self._reports: dict[int, dict[str, float]] = {int(k): dict(v) for k, v in reports.items()}
        self._newest_report = max(self._reports, default=-1)
        self._changes = list(changes)
        self._names = tuple(job.names)
        self.base: dict[str, float] = {}
        """The weights that stand beside the sources: what a mixture without weights goes by."""
        self._mixtures: tuple[int, list[tuple[int, Mixture]]] = (-1, [])

    @property
    def names(self) -> tuple[str, ...]:
        """Every source by its number, also those that come at a later step or were removed."""
        return self._names

    @property
    def changes(self) -> Sequence[Change]:
        """Every change so far, in the order in which they were made."""
        return self._changes

    def add_report(self, step: int, metrics: Report) -> None:
        """Take the report of a step that has none."""
        report = dict(metrics)
        self._journal.append({"kind": "report", "step": step, "metrics": report}, durable=True)
        self._reports[step] = report
        self._newest_report = max(self._newest_report, step)
        if len(self._reports) > 2 * KEPT_REPORTS:  # now and then: to look through them takes as long as a write
            self._reports = {s: r for s, r in self._reports.items() if s >= self._newest_report - KEPT_REPORTS}

    def report_of(self, step: int) -> Report | None:
        """Return the report of a step, or None when there is none."""
        found = self._reports.get(step)
        if found is None and step < self._newest_report - KEPT_REPORTS:
            for record in self._journal.records():
                if record["kind"] == "report" and record["step"] == step:
                    return record["metrics"]
        return found

    @property
    def newest_report(self) -> int:
        """The newest step that was reported; -1 where none was."""
        return self._newest_report

    def recent(self, first: int, stop: int) -> dict[int, Report]:
        """Return the reports of some steps."""
        found = {step: self.report_of(step) for step in range(max(first, 0), stop)}
        return {step: report for step, report in found.items() if report is not None}

    def add_change(self, change: Change) -> None:
        """Take a change; it is on disk when this returns."""
        self._journal.append({**change.to_json(), "kind": f"change.{change.kind}", "step": change.at}, durable=True)
        self._changes.append(change)
        if change.add is not None:
            self._names = (*self._names, change.add.name)

    def mixture_at(self, step: int) -> tuple[Mixture, int]:
        """Return the mixture in force at a step, and the step it holds from (-1: the job's own)."""
        if self._mixtures[0] != len(self._changes):
            self._mixtures = (len(self._changes), mixtures_of(self._job.mixture, self._names, self._changes, self.base))
        return next((mixture, since) for since, mixture in reversed(self._mixtures[1]) if since <= step)

    def check(self, what: str, change: Change, base: Mapping[str, float] | None = None) -> None:
        """Refuse a change that cannot be together with those that were asked for before, whichever step they name.

        Args:
            what: The call, for the message.
            change: What is asked for.
            base: The weights that stand beside the sources, where the change brings one.

        Raises:
            SpecError: A mixture would name a source that is removed, or a step would have nothing to draw from.
        """
        names = self._names if change.add is None else (*self._names, change.add.name)
        check_timeline(
            what, self._job.mixture, names, [*self._changes, change], self.base if base is None else base, change.at
        )

    def step_of(self, change_id: str) -> int | None:
        """Return from where a change holds that was asked for before; None for one that is new."""
        return next((change.at for change in self._changes if change_id and change.id == change_id), None)

    def meshes(self) -> list[tuple[int, ClientPlaceTree]]:
        """Return from which step on each mesh holds that the stream was given while it ran, in order."""
        found = {change.at: change.mesh for change in self._changes if change.mesh is not None}
        return sorted(found.items(), key=lambda pair: pair[0])

    def mesh_at(self, step: int) -> ClientPlaceTree | None:
        """Return the mesh in force at a step; None as long as it is that of the launch."""
        return next((mesh for at, mesh in reversed(self.meshes()) if at <= step), None)

    def changes_from(self, step: int, *, whole: bool = False) -> list[dict[str, Any]]:
        """Return as JSON the changes that a stream which begins at a step must know.

        Args:
            step: The step.
            whole: Also what only the same service needs to go on: the meshes, and who asked for what.
        """
        set_at = max((c.at for c in self._changes if c.mixture is not None and c.at < step), default=-1)
        latest = {change.at: change for change in self._changes if change.mixture is not None and change.at >= set_at}
        skips = [change for change in self._changes if change.kind == "skip" and change.at >= step]
        chosen = {id(change) for change in (*latest.values(), *skips, *roster_changes_from(self._changes, step))}
        kept = [change for change in self._changes if id(change) in chosen]  # of one step the latest word wins
        if not whole:
            return [replace(change, id="").to_json() for change in kept]
        begins = [at for at, _ in self.meshes()]
        in_force = max((at for at in begins if at <= step), default=step)
        kept += [change for change in self._changes if change.mesh is not None and change.at >= in_force]
        return [change.to_json() for change in kept]

    def roster_at(self, step: int) -> Roster:
        """Return which sources there are at a step, and which of them are not drawn from."""
        return roster_at(self._names, self._changes, step)

    def skips_at(self, step: int) -> int:
        """Return how many global batches are passed over before a step."""
        return sum(change.count for change in self._changes if change.kind == "skip" and change.at == step)


# --------------------------------------------------------------------------------------------------------------
# Sources that come, go, are parked and return while a stream runs: what is asked for is checked and written down.
#
# Rules of this file:
# 1. A change takes effect at a step that is not planned yet. What is refused has changed nothing.
# 2. Who comes takes the next number, so sources come in the order of their steps.
# 3. What is refused does not depend on the order of the calls either: a change is held against all that were asked
#    for.


Effective = Callable[[str, int | None], int]
"""Tells the step that a change takes effect at, from its name and what was asked for; refuses a planned one."""


class SourceChanges:
    """The changes of one stream's roster; a part of the Planner."""

    def __init__(self, inputs: InputLog, base: dict[str, float], effective: Effective) -> None:
        self._inputs = inputs
        self._base = base
        self._effective = effective

    def check_name(self, name: str) -> None:
        """Refuse the name of a new source that is taken."""
        if name in self._inputs.names:
            raise SpecError(
                f"add_source: there is a source {name!r} already (removed ones keep their name); cursors and weights "
                "are kept by name and would mix the two. Give it another name."
            )

    def step_of_add(self, at_step: int | None) -> int:
        """Return the step a new source comes at; not before another one that is still to come."""
        at = self._effective("add_source", at_step)
        last = max((change.at for change in self._inputs.changes if change.add is not None), default=0)
        if at_step is not None and at < last:
            raise SpecError(
                f"add_source: step {at} lies before step {last}, where another new source comes; sources are numbered "
                f"in the order in which they come, and ties go by number. Use at_step={last} or more, or leave it out."
            )
        return max(at, last)

    def made(self, change_id: str) -> int | None:
        """Return the step of a change that was asked for before, by the id its caller knows it by."""
        return self._inputs.step_of(change_id)

    def check_add(self, name: str, weight: float | None, at_step: int | None) -> None:
        """Refuse a new source before it is opened."""
        self.check_name(name)
        self._check_share(name, weight, self.step_of_add(at_step))

    def add(
        self, source: Source, weight: float | None, at: int, base: Mapping[str, float], change_id: str = ""
    ) -> None:
        """Write down that a source comes at a step; its loaders are there already.

        Args:
            source: The source, as it was opened.
            weight: Against the others' weights; None for their mean.
            at: What `step_of_add` gave.
            base: The weights that stand beside all sources, this one included.
            change_id: What its caller knows the change by.
        """
        self.check_name(source.name)
        self._check_share(source.name, weight, at)
        change = Change("sources", at, add=source, weight=weight, id=change_id)
        self._inputs.check("add_source", change, base)
        self._base.update(base)
        self._inputs.add_change(change)

    def _check_share(self, name: str, weight: float | None, at: int) -> None:
        """Refuse a weight that is none, and a mixture that no source can join."""
        if weight is not None and not (is_finite(weight) and weight >= 0):
            raise SpecError(
                f"add_source: weight is {weight!r}; it gives no share of the mixture. Give a number of 0 or more."
            )
        learn = self._inputs.mixture_at(at)[0].learn
        if learn is not None and learn.method == "function":
            raise SpecError(
                f"add_source: the mixture follows the function {learn.name!r}, which cannot be written down "
                f"with one more source; a resume could not repeat it. Put {name!r} into the job, and launch it again "
                "from a state with reconcile='allow_add'."
            )

    def mean_weight(self) -> float:
        """Return the mean of the weights that stand beside the sources."""
        others = [weight for weight in self._base.values() if weight > 0]
        return sum(others) / len(others) if others else 1.0

    def remove(self, name: str, at_step: int | None = None, *, change_id: str = "") -> int:
        """Take a source out of the mixture for good, from a step on; return that step."""
        made = self.made(change_id)
        if made is not None:
            return made
        at = self._effective("remove_source", at_step)
        self._find("remove_source", name, at)
        change = Change("sources", at, source=name, id=change_id)
        self._inputs.check("remove_source", change)
        self._inputs.add_change(change)
        return at

    def park(
        self,
        name: str,
        at_step: int | None = None,
        *,
        why: str = "asked for",
        failed: bool = False,
        change_id: str = "",
    ) -> int:
        """Draw nothing from a source from a step on, until it returns; return that step."""
        made = self.made(change_id)
        if made is not None:
            return made
        at = self._effective("park_source", at_step)
        number, roster = self._find("park_source", name, at)
        if number in roster.parked:
            raise SpecError(
                f"park_source: {name!r} is parked already, since step {roster.parked[number].since}; nothing would "
                "change. Call return_source to draw from it again."
            )
        self._inputs.add_change(Change("park", at, source=name, why=why, failed=failed, id=change_id))
        return at

    def give_back(self, name: str, at_step: int | None = None, *, change_id: str = "") -> int:
        """Draw from a parked source again, from a step on, where it stood; return that step."""
        made = self.made(change_id)
        if made is not None:
            return made
        at = self._effective("return_source", at_step)
        number, roster = self._find("return_source", name, at)
        if number not in roster.parked:
            raise SpecError(f"return_source: {name!r} is not parked at step {at}; nothing would change. Leave it.")
        self._inputs.add_change(Change("return", at, source=name, id=change_id))
        return at

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
            raise SpecError(f"{what}: {name!r} is removed, for good; nothing would change. Add it under another name.")
        return number, roster
