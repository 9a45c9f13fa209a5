"""From the plans of steps to the figures of a run: counts, mixture, padding, balance. No I/O."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Buffer, Limits
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.job.specs import Job
from overlord.planning.balancing.evenness import over_ranks, positions, rank_loads
from overlord.planning.costs import CostFunction, llama_12b
from overlord.planning.strategies import vanilla
from overlord.reports.summary import LENGTH_EDGES, LoadHeatmap, StepSummary, used_bins

MOST_POINTS = 1024
"""Beyond twice this many steps the per-step figures are means over several, so that memory stays bounded."""
_COUNTS = 4
"""A row of figures begins with tokens, samples, loss tokens and microbatches."""

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """One step as it was planned, and as round-robin would have dealt it."""

    plan: LoadingPlan
    dealt: LoadingPlan
    loads: Floats
    """Costs of the plan as one rank bears them: [bucket, microbatch]."""
    dealt_loads: Floats


class Collector:
    """Adds up what the steps of a run hold, in memory that does not grow with the steps."""

    def __init__(
        self,
        job: Job,
        names: tuple[str, ...],
        limits: Limits,
        tree: ClientPlaceTree,
        cost: CostFunction = llama_12b,
    ) -> None:
        self._names = names
        self._tree = tree
        self._cost = cost
        self._by_tokens = job.mixture.level == "token"
        # Round-robin may need more microbatches than the plan; a fixed number would make it fail.
        self._limits = dataclasses.replace(limits, microbatches=None)
        self._rows = _Rows()
        self._loads: dict[int, tuple[float, LoadHeatmap]] = {}
        self.samples: Int64s = np.zeros(len(names), np.int64)
        self.tokens: Int64s = np.zeros(len(names), np.int64)
        self.full: Int64s = np.zeros(len(names), np.int64)
        """Samples of each source that fill the context: all that are cut do."""
        self.positions = 0
        self._planned: Floats = np.zeros(len(names))
        self._imbalance: Floats = np.zeros(2)
        self._histogram: Int64s = np.zeros(len(LENGTH_EDGES) - 1, np.int64)
        self._digests = {name: hashlib.blake2b(digest_size=16) for name in ("order", "plan")}
        self.steps = 0

    def add(self, plan: LoadingPlan, wait_s: float = 0.0) -> CollectedStep:
        """Count one step; return it beside what round-robin would have made of it."""
        draw = plan.draw
        dealt = vanilla()(Buffer(draw, self._limits), self._tree)
        assert isinstance(dealt, LoadingPlan)
        ours, theirs = (rank_loads(one, self._tree, self._cost) for one in (plan, dealt))
        tokens = np.bincount(draw.source, draw.meta["tokens"], len(self._names))
        samples = np.bincount(draw.source, minlength=len(self._names))
        weights = np.asarray(draw.weights) / (sum(draw.weights) or 1.0)
        counted = tokens if self._by_tokens else samples.astype(np.float64)
        imbalance = (over_ranks(ours), over_ranks(theirs))
        delivered = positions(plan)
        padding = 1 - tokens.sum() / max(delivered, 1)
        counts = (tokens.sum(), samples.sum(), plan.global_loss_tokens, plan.num_microbatches)
        self._rows.add(
            plan.step,
            np.concatenate([(*counts, *imbalance, padding, wait_s), weights, counted / max(counted.sum(), 1)]),
        )
        self._keep_load(plan, imbalance[1], ours, theirs)
        self.steps += 1
        self.samples += samples
        self.tokens += tokens.astype(np.int64)
        fills = draw.meta["tokens"] == self._limits.context_length
        self.full += np.bincount(draw.source[fills], minlength=len(self._names))
        self.positions += delivered
        self._planned += weights
        self._imbalance += imbalance
        self._histogram += np.histogram(draw.meta["tokens"], LENGTH_EDGES)[0]
        for name, digest in (("order", draw.digest), ("plan", plan.digest)):
            # What `core.plan.chain_digest` gives for the list of them.
            self._digests[name].update(f"{chr(10) if self.steps > 1 else ''}{digest}".encode())
        return CollectedStep(plan, dealt, ours, theirs)

    @property
    def planned(self) -> list[float]:
        """The mean planned share of each source."""
        return (self._planned / max(self.steps, 1)).tolist()

    @property
    def realised(self) -> list[float]:
        """The realised share of each source, by sample or by token as the mixture counts."""
        counted = self.tokens if self._by_tokens else self.samples
        return (counted / max(int(counted.sum()), 1)).tolist()

    @property
    def imbalance(self) -> tuple[float, float]:
        """Mean imbalance of the plan, and of round-robin."""
        ours, theirs = (self._imbalance / self.steps).tolist() if self.steps else (1.0, 1.0)
        return ours, theirs

    @property
    def digests(self) -> dict[str, str]:
        """The order and the plan digest of all steps."""
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    @property
    def histogram(self) -> list[tuple[int, int, int]]:
        """The lengths of the delivered samples as (low, high, count)."""
        return [(*bounds, int(self._histogram[n])) for n, bounds in used_bins(self._histogram)]

    def typical_load(self) -> LoadHeatmap | None:
        """Return the loads of the step with the median round-robin imbalance: neither the best nor the worst."""
        ranked = sorted(self._loads.values(), key=lambda entry: (entry[0], entry[1].step))
        return ranked[len(ranked) // 2][1] if ranked else None

    def per_step(self) -> tuple[int, list[StepSummary], list[dict[str, float]], list[dict[str, float]]]:
        """Return steps per point, and the points: figures, planned shares, realised shares."""
        every, rows = self._rows.finish()
        steps, count = list[StepSummary](), len(self._names)
        for index, row in rows:
            counts, ratios = row[:_COUNTS].tolist(), row[_COUNTS : -2 * count].tolist()
            steps.append(StepSummary(index, *(round(n) for n in counts), *ratios))
        planned, realised = (
            [dict(zip(self._names, row[part].tolist(), strict=True)) for _, row in rows]
            for part in (slice(-2 * count, -count), slice(-count, None))
        )
        return every, steps, planned, realised

    def _keep_load(self, plan: LoadingPlan, rank_by: float, ours: Floats, theirs: Floats) -> None:
        if len(self._loads) < MOST_POINTS:
            if plan.axis == "CP":  # beside single ranks stand the ranks of each group, which share its load
                theirs = np.repeat(theirs, self._tree.cp, axis=0)
            self._loads[plan.step] = (rank_by, LoadHeatmap(plan.step, ours.tolist(), theirs.tolist(), plan.axis))


class _Rows:
    """One row of figures a step; long runs are thinned to means, of which the wait is the largest."""

    _WAIT = 7

    def __init__(self) -> None:
        self._every = 1
        self._rows: list[tuple[int, Floats]] = []
        self._waiting: list[tuple[int, Floats]] = []

    def add(self, step: int, row: Floats) -> None:
        self._waiting.append((step, row))
        if len(self._waiting) == self._every:
            self._rows.append(self._join(self._waiting))
            self._waiting = []
        if len(self._rows) == 2 * MOST_POINTS:
            self._rows = [self._join(self._rows[at : at + 2]) for at in range(0, len(self._rows), 2)]
            self._every *= 2

    def finish(self) -> tuple[int, list[tuple[int, Floats]]]:
        rest = [self._join(self._waiting)] if self._waiting else []
        return self._every, self._rows + rest

    def _join(self, rows: Sequence[tuple[int, Floats]]) -> tuple[int, Floats]:
        table = np.stack([row for _, row in rows])
        mean = table.mean(axis=0)
        mean[self._WAIT] = table[:, self._WAIT].max()
        return rows[0][0], mean
