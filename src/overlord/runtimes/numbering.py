"""The sources of a job by their numbers, with those that came while its stream ran."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from overlord.core.states import check_form
from overlord.job.reconcile import number_names
from overlord.job.specs import Job
from overlord.roles.changes import ROSTER_KINDS, roster_log
from overlord.transforms.samples.processor import fill_from_processor, read_processor, share_patches


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

    Args:
        known: The changes of a state.
        told: Those of the journal that counts beside it.

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


def with_newcomers(job: Job, state: Mapping[str, Any] | None) -> Job:
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


def without_files(state: Mapping[str, Any], parts: Mapping[str, Any], gone: Collection[str]) -> Mapping[str, Any]:
    """Return a state whose fingerprint does not tell which files sources had that are not opened again."""
    if not gone:
        return state
    now = {name: parts["sources"][name] for name in gone if name in state["fingerprint"]["sources"]}
    told = {**state["fingerprint"], "sources": {**state["fingerprint"]["sources"], **now}}
    return {**state, "fingerprint": told}
