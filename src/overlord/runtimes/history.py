"""What a store holds of a stream, and where the stream goes on."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlord.core.specs import Job
from overlord.roles.inputs import InputLog, changes_from_json
from overlord.roles.verdicts import Verdicts
from overlord.stores.checkpoints import CheckpointFolder
from overlord.stores.journal import Journal, read_journal, set_aside


@dataclass(frozen=True, slots=True)
class History:
    """The open store of a stream."""

    journal: Journal
    checkpoints: CheckpointFolder
    inputs: InputLog
    verdicts: Verdicts


def open_store(job: Job, state: Mapping[str, Any] | None, store: Path, step: int, *, latest: bool) -> History:
    """Open a store to go on at a step; what it holds of later steps is set aside.

    Args:
        job: The job.
        state: The state the stream goes on from, if any.
        store: The folder.
        step: The state's step.
        latest: Whether the state is the store's own newest snapshot.
    """
    checkpoints = CheckpointFolder(store)
    checkpoints.set_aside(step)
    later = list(read_journal(store / "journal")) if latest else []
    set_aside(store / "journal", step)
    journal = Journal(store / "journal")
    try:
        inputs = recover_inputs(job, journal, state, later)
        verdicts = Verdicts.recover(journal, state, later, job.names, threading.Lock())
    except BaseException:
        journal.close()
        raise
    return History(journal, checkpoints, inputs, verdicts)


def recover_inputs(
    job: Job, journal: Journal, state: Mapping[str, Any] | None, later: Sequence[Mapping[str, Any]]
) -> InputLog:
    """Return the reports and changes a stream goes on with.

    Those of its state; and where it goes on from its own newest snapshot, what came in after that (`later`). A state
    that was given may be of another lineage than the journal, so nothing but the state counts then. Meshes are left
    out: a resume is launched with one of its own.
    """
    if state is None:
        return InputLog(job, journal, {}, [])
    reports = {int(step): report for step, report in state["reports"].items()}
    changes = list(state["changes"]) if isinstance(state["changes"], list) else [state["changes"]]
    for record in later:
        if record["kind"] == "report" and state["step"] - job.lag <= record["step"] < state["step"]:
            reports.setdefault(record["step"], record["metrics"])
        if record["kind"].startswith("change.") and record["at"] >= state["step"]:
            change = {key: value for key, value in record.items() if key != "step"}
            change["kind"] = record["kind"].removeprefix("change.")
            if change not in changes:
                changes.append(change)
    read = changes_from_json(changes, job)
    inputs = InputLog(job, journal, reports, [change for change in read if change.mesh is None])
    for recovered in read[len(state["changes"]) :]:
        if recovered.mesh is None:
            inputs.write_again(recovered)
    return inputs
