"""What `explain` tells of each source: its shares, and how often it is read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlord.cli.collecting import Collector
from overlord.cli.sources import count_indexed
from overlord.core.states import StreamState
from overlord.reports.explanation import SourceFacts
from overlord.runtimes.launching.deployment import Roles, base_weights

_POINTS = 512
"""Where a schedule is looked at, to know its mean over a run."""
_ONCE = ("first_exhausted", "all_exhausted_without_replacement")

Floats = npt.NDArray[np.float64]


def source_facts(roles: Roles, collector: Collector, state: StreamState, horizon: int) -> list[SourceFacts]:
    """Return the facts of each source, in the order of the planner."""
    planned, realised = np.array(collector.planned), collector.realised
    passed = state.samples + state.skipped
    through = _projected(roles, collector, planned, passed, horizon)
    mixture = roles.job.mixture
    most = 1 if mixture.stopping in _ONCE else mixture.max_repetition or np.inf
    found: list[SourceFacts] = []
    for number, source in enumerate(roles.job.sources):
        files = roles.listings[source.name]
        rows, exact, _ = count_indexed(files)
        if state.epoch_rows[number]:
            rows, exact = float(state.epoch_rows[number]), True
        found.append(
            SourceFacts(
                name=source.name,
                format=files.format,
                planned_share=float(planned[number]),
                realised_share=realised[number],
                samples=int(collector.samples[number]),
                tokens=int(collector.tokens[number]),
                skipped=int(state.skipped[number]),
                rows=rows,
                rows_exact=exact and rows is not None,
                epochs=float(passed[number]) / rows if rows else None,
                projected_epochs=min(float(through[number]) / rows, most) if rows else None,
            )
        )
    return found


def _projected(
    roles: Roles, collector: Collector, planned: Floats, passed: npt.NDArray[np.int64], horizon: int
) -> Floats:
    """Return the rows of each source that a whole run passes."""
    mixture, names = roles.job.mixture, [source.name for source in roles.job.sources]
    shares = planned
    if mixture.learn is None and mixture.order != "sequential":
        base = base_weights(roles.job, roles.facts)
        at = np.linspace(0, max(horizon - 1, 0), min(horizon, _POINTS))
        weights = np.array([mixture.weights_at(float(step), names, base) for step in at])
        shares = (weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)).mean(axis=0)
    steps = max(collector.steps, 1)
    # A source that no planned step drew is taken to have samples of the mean length.
    unseen = float(collector.samples.sum()) / steps
    seen = planned > 0
    per_share = np.where(seen, passed / steps / np.where(seen, planned, 1.0), unseen)
    return per_share * shares * horizon
