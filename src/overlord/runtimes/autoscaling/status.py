"""What `service.status()` tells: roles, positions, buffers, planned and realised mixture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from overlord.job.specs import Job
from overlord.roles.changes import Parked
from overlord.roles.planner import Planner
from overlord.runtimes.launching.deployment import SourceFacts, base_weights


def _parked(parked: Parked | None) -> dict[str, Any] | None:
    return None if parked is None else {"since": parked.since, "why": parked.why}


def describe(
    job: Job,
    planner: Planner,
    facts: Mapping[str, SourceFacts],
    statuses: Mapping[int, Mapping[str, Any]],
    runtime: str,
    positions: Mapping[int, int],
    *,
    view_bytes: int,
) -> dict[str, Any]:
    """Return a JSON-able picture of a running service."""
    names = planner.inputs.names
    state = planner.latest_state.grown(len(names))
    roster = planner.inputs.roster_at(planner.next_step)
    mixture = planner.mixture
    weights = planner.latest_weights or mixture.weights_at(0.0, names, base_weights(job, facts))
    weights = (*weights, *([0.0] * (len(names) - len(weights))))
    counted = state.tokens if mixture.level == "token" else state.samples
    total, realised = sum(weights) or 1.0, max(int(counted.sum()), 1)
    sources = {
        name: {
            "planned_share": weights[i] / total,
            "realised_share": int(counted[i]) / realised,
            "samples": int(state.samples[i]),
            "tokens": int(state.tokens[i]),
            "skipped": int(state.skipped[i]),
            "epoch": int(state.epoch[i]),
            "finished": bool(state.finished[i]),
            "removed": i in roster.removed,
            "parked": _parked(roster.parked.get(i)),
            "format": facts[name].format,
            **statuses[i],
        }
        for i, name in enumerate(names)
    }
    newest_plan = max(planner.next_step - 1, planner.first_step)
    coming = planner.meshes.after(newest_plan)
    return {
        "runtime": runtime,
        "pid": os.getpid(),
        "restarts": 0,
        "mesh": str(planner.meshes.at(newest_plan)),
        "next_mesh": None if coming is None else {"step": coming[0], "mesh": str(coming[1])},
        "planner": {
            "next_step": planner.next_step,
            "first_step": planner.first_step,
            "waits_for_report": planner.missing_report(planner.next_step),
        },
        "store": planner.checkpoints.store.status(),
        "clients": {str(rank): step for rank, step in sorted(positions.items())},
        "buffers": {"views_bytes": view_bytes, "read_bytes": sum(s["buffer_bytes"] for s in sources.values())},
        "mixture_level": mixture.level,
        "sources": sources,
    }
