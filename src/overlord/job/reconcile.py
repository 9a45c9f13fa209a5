"""Resuming with other sources: what of a state may differ from the job, and the state that fits the job again.

Rules of this file:
1. A source that the state knows keeps its place in the order of numbers, its cursor and its deficit; its files, and
   how they are read, must be what they were. A new one begins at its start, owed nothing.
2. The weights of the job may be others. They hold from the state's step on, in place of a mixture that was set while
   the stream ran; where they are not others, that one stays.
3. A rule that learns begins anew when sources come or go: what it learned is about other shares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from overlord.core.spec_errors import list_some
from overlord.core.states import StreamState, check_form, names_of
from overlord.errors import SpecError, StateError
from overlord.job.mixture_specs import Mixture

Reconcile = Literal["strict", "allow_add", "allow_add_remove"]

TABLES = ("weights", "stages", "linear", "step", "sequence")
"""What of a mixture says how much of which source."""
RULE_BEGINS = "begins"
"""In place of what a rule has learned: it begins anew."""


def number_names(names: Sequence[str], state: Mapping[str, Any] | None, *, keep_order: bool) -> list[str]:
    """Return the names of a job's sources in the order of their numbers.

    Those of the state come first, as it numbers them. The others are sorted by name, unless their order decides.

    Example:
        >>> number_names(["b", "d", "c", "a"], {"sources": {"d": [], "b": []}}, keep_order=False)
        ['d', 'b', 'a', 'c']
    """
    known = [name for name in (names_of(state) if state is not None else ()) if name in names]
    new = [name for name in names if name not in known]
    return known + (new if keep_order else sorted(new))


class Joining(NamedTuple):
    """A source that joins the mixture in force."""

    name: str
    weight: float | None
    """Against the weights of the others; None for the mean of those that have one."""
    others: Sequence[str]
    """The sources that are in the mixture at that step."""


def mixtures_over(
    own: Mixture, changes: Iterable[tuple[int, Mixture | Joining]], base: Mapping[str, float]
) -> list[tuple[int, Mixture]]:
    """Return from which step on each mixture is in force, in order; the first one, from -1 on, is the job's own.

    The changes are in the order of the calls. At one step mixtures take effect before sources that join.
    """
    found = [(-1, own)]
    for at, change in sorted(changes, key=_turn):
        if isinstance(change, Joining):
            change = found[-1][1].with_source(change.name, change.weight, at, change.others, base)
        if found[-1][0] == at:
            found.pop()
        found.append((at, change))
    return found


def _turn(change: tuple[int, Mixture | Joining]) -> tuple[int, bool]:
    return change[0], isinstance(change[1], Joining)


def reconcile_state(state: Mapping[str, Any], parts: Mapping[str, Any], how: Reconcile) -> Mapping[str, Any]:
    """Return the state as a state of this job, where it may be made one; otherwise as it is, for a strict check.

    Raises:
        StateError: when sources differ from those of the fingerprint `parts` in a way that is not allowed.
    """
    check_form(state)
    known, wanted = names_of(state), list(parts["sources"])
    if how == "strict":
        return state
    gone, fresh = [n for n in known if n not in wanted], [n for n in wanted if n not in known]
    if gone and how != "allow_add_remove":
        raise StateError(
            f"the state knows the sources {list_some(gone)}, which the job does not have; their samples would never "
            f"come again. Put them back into the job, or allow it with reconcile='allow_add_remove' (now {how!r})."
        )
    _refuse_changed(state["fingerprint"], parts, [name for name in known if name in wanted])
    found = _dropped(state, gone)
    found["fingerprint"] = _adapted(state["fingerprint"], parts, gone)
    fresh_row = [int(getattr(StreamState.begin(1), column)[0]) for column in state.get("columns", [])]
    found["sources"] = {**found["sources"], **dict.fromkeys(fresh, fresh_row)}
    found["order"] = list(found["sources"])
    taken_over = _takes_over(state, found, parts, gone)
    if taken_over:
        log = [_without_mixture(change, state["step"]) for change in found["changes"]]
        found["changes"] = [change for change in log if change is not None]
    mixer = state["mixer"] or {}
    if taken_over or ((gone or fresh) and mixer.get("rule") is not None):
        version = 1 + (mixer["version"] if isinstance(mixer.get("version"), int) else 0)
        found["mixer"] = {"version": version, "rule_base": version, "rule": RULE_BEGINS, "pending": {}}
    return found


def _dropped(state: Mapping[str, Any], gone: Collection[str]) -> dict[str, Any]:
    """Return the state without some sources."""
    log = [_without(change, gone) for change in state["changes"]]
    rows = {name: state["sources"][name] for name in names_of(state) if name not in gone}
    parts = state["fingerprint"]
    kept = {key: {n: v for n, v in parts.get(key, {}).items() if n not in gone} for key in ("weights", "sources")}
    found = {**state, "changes": [change for change in log if change is not None], "sources": rows, "order": [*rows]}
    if state.get("verdicts"):
        found["verdicts"] = {name: given for name, given in state["verdicts"].items() if name not in gone}
    return {**found, "fingerprint": {**parts, **kept}}


def unweighted(state: Mapping[str, Any], reconciled: Mapping[str, Any]) -> list[str]:
    """Return the sources that were added and that a mixture set while the stream ran does not name."""
    fresh = [name for name in reconciled["sources"] if name not in state["sources"]]
    now = _in_force(reconciled, state["fingerprint"])
    return [name for name in fresh if now is not None and name not in {one for _, one in now.places()}]


def _refuse_changed(old: Mapping[str, Any], new: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        before, after = (str(parts["sources"].get(name)).partition(":") for parts in (old, new))
        if before != after:
            what = "its files are others" if before[0] == after[0] else "it is read in another way"
            raise StateError(
                f"source {name!r} is not the one that the state knows: {what}; its cursor would point to other rows. "
                "Restore it, or leave it out and give what is new another name."
            )


def _adapted(old: Mapping[str, Any], new: Mapping[str, Any], gone: Collection[str]) -> dict[str, Any]:
    """Return the old fingerprint with everything taken from the new one that may differ."""
    tables = {key: new["mixture"][key] for key in TABLES if key in new["mixture"]}
    mixture = {**_mixture_without(old.get("mixture", {}), gone), **tables}
    return {**old, "sources": new["sources"], "weights": new["weights"], "mixture": mixture}


def _takes_over(
    state: Mapping[str, Any], found: Mapping[str, Any], parts: Mapping[str, Any], gone: Collection[str]
) -> bool:
    """Whether the job has other weights than the stream, so that they hold from here on."""
    old = state["fingerprint"]
    beside = {name: weight for name, weight in old.get("weights", {}).items() if name not in gone}
    same = _tables(_mixture_without(old.get("mixture", {}), gone)) == _tables(parts["mixture"])
    if same and beside == parts["weights"]:
        return False
    now = _in_force(found, {**old, "mixture": _mixture_without(old.get("mixture", {}), gone)})
    return now is None or _tables(now.model_dump(mode="json", by_alias=True)) != _tables(parts["mixture"])


def _tables(mixture: Mapping[str, Any]) -> dict[str, Any]:
    return {key: mixture[key] for key in TABLES if key != "sequence" and mixture.get(key) is not None}


def _in_force(state: Mapping[str, Any], old: Mapping[str, Any]) -> Mixture | None:
    """Return the mixture that was set, or that sources have joined, while a stream ran; None where it is the job's own.

    `old` is the fingerprint of the stream that the state was taken from.

    Raises:
        StateError: The log of changes is damaged.
    """
    due = [change for change in state["changes"] if change["at"] <= state["step"]]
    known, added = names_of(state), {change["add"].get("name") for change in due if "add" in change}
    before = [name for name in known if name not in added]
    changes: list[tuple[int, Mixture | Joining]] = []
    try:
        changes += [(change["at"], Mixture.from_mapping(change["mixture"])) for change in due if "mixture" in change]
        joining = [change for change in due if "add" in change and change.get("joins", True)]
        for change in sorted(joining, key=lambda change: change["at"]):
            gone = {one.get("remove") for one in due if one["at"] <= change["at"]}
            others = [name for name in before if name not in gone]
            changes.append((change["at"], Joining(change["add"]["name"], change["weight"], others)))
            before.append(change["add"]["name"])
        if not changes:
            return None
        own = Mixture()
        if isinstance(min(changes, key=_turn)[1], Joining):  # only then does the job's own mixture matter
            given = {key: value for key, value in old.get("mixture", {}).items() if key != "sequence"}
            own = Mixture.from_mapping({key: value for key, value in given.items() if value is not None})
        return mixtures_over(own, changes, old.get("weights") or dict.fromkeys(known, 1.0))[-1][1]
    except (SpecError, KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"the state is damaged: the mixture that it set cannot be read ({error}); the weights would go on "
            "differently. Use an undamaged state, as client.state_dict() returned it."
        ) from None


def _without(change: Mapping[str, Any], gone: Collection[str]) -> Mapping[str, Any] | None:
    """Return a change of the log without sources that are gone; None where nothing of it is left."""
    if not gone:
        return change
    about = change["add"].get("name") if "add" in change else change.get("source", change.get("remove"))
    if about in gone:
        return None
    return {**change, "mixture": _mixture_without(change["mixture"], gone)} if "mixture" in change else change


def _without_mixture(change: Mapping[str, Any], step: int) -> Mapping[str, Any] | None:
    """Return a change without what it did to the mixture up to a step; None where nothing else is left of it."""
    if change["at"] > step or not ("mixture" in change or "add" in change):
        return change
    return None if change["kind"] == "mixture" else {**change, "joins": False}


def _mixture_without(mixture: Mapping[str, Any], gone: Collection[str]) -> dict[str, Any]:
    found = dict(mixture)
    for key in ("weights", "linear", "step"):
        if found.get(key) is not None:
            found[key] = {name: value for name, value in found[key].items() if name not in gone}
    if found.get("stages") is not None:
        found["stages"] = [[at, {n: w for n, w in stage.items() if n not in gone}] for at, stage in found["stages"]]
    graph = (found.get("learn") or {}).get("graph")
    if graph:
        kept = {a: {b: v for b, v in row.items() if b not in gone} for a, row in graph.items() if a not in gone}
        found["learn"] = {**found["learn"], "graph": kept}
    return found
