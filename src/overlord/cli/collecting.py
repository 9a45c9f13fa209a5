"""From the steps that clients received to a RunSummary: counts, mixture, padding, balance. No I/O."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.cli.summary import LoadHeatmap, StepSummary
from overlord.core.plan import Draw
from overlord.core.samples import META
from overlord.core.seeds import derive, hash64
from overlord.core.specs import Job
from overlord.planning.costs import sequence_cost
from overlord.planning.strategies import Limits, pad_lengths, round_robin
from overlord.roles.views import BatchMeta, Step

MOST_POINTS = 1024
"""Beyond twice this many steps the per-step figures are means over several, so that memory stays bounded."""
_EDGES = np.unique(np.rint(2 ** (np.arange(0, 61) / 2)).astype(np.int64))
"""Borders of the length histogram: two bins for every doubling."""

_COUNTS = 4
"""A row of figures begins with tokens, samples, loss tokens and microbatches."""

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """All segments of one step over all data-parallel ranks, as columns; dummies are left out."""

    source: Int64s
    row: Int64s
    epoch: Int64s
    offset: Int64s
    length: Int64s
    padded: Int64s
    place: Int64s
    """dp rank * microbatches + microbatch."""
    positions: int
    """Delivered positions: padding and dummies included."""

    @classmethod
    def of(cls, metas: Sequence[Sequence[BatchMeta]]) -> Segments:
        """Join the provenance of [dp rank][microbatch]; nothing keeps shared memory alive."""
        flat = [meta for of_rank in metas for meta in of_rank]
        ids = [np.array([(i.row, i.epoch) for i in m.sample_ids], np.int64).reshape(-1, 2) for m in flat]
        table = np.concatenate(ids)
        source = np.concatenate([m.source_ids for m in flat]).astype(np.int64)
        real = source >= 0
        return cls(
            source=source[real],
            row=table[real, 0],
            epoch=table[real, 1],
            offset=np.concatenate([m.segment_offsets for m in flat]).astype(np.int64)[real],
            length=np.concatenate([m.segment_lengths for m in flat]).astype(np.int64)[real],
            padded=np.concatenate([np.diff(m.cu_seqlens) for m in flat]).astype(np.int64)[real],
            place=np.repeat(np.arange(len(flat)), [len(m.source_ids) for m in flat])[real],
            positions=sum(int(m.cu_seqlens[-1]) for m in flat),
        )

    def samples(self, step: int, names: tuple[str, ...]) -> Draw:
        """Join the pieces of split samples again; the samples come in a keyed random order.

        Clients do not see the drawing order, which round-robin would follow; any order that does not look
        at lengths stands for it as well.
        """
        first = np.flatnonzero(self.offset == 0)
        keys = np.stack([self.source, self.row, self.epoch], axis=1)
        _, inverse = np.unique(keys, axis=0, return_inverse=True)
        tokens = np.bincount(inverse.reshape(-1), weights=self.length)[inverse.reshape(-1)[first]]
        key = derive(0, "round-robin", step)
        order = np.argsort(hash64(key, hash64(key, self.row[first]) ^ hash64(key + 1, self.source[first])))
        meta = np.zeros(len(first), META)
        for column, values in (("row", self.row[first]), ("epoch", self.epoch[first]), ("tokens", tokens)):
            meta[column] = values
        return Draw(step, names, self.source[first][order].astype(np.int32), meta[order], ())


class Collector:
    """Adds up what the clients of a run received, in memory that does not grow with the steps."""

    def __init__(self, job: Job, names: tuple[str, ...], limits: Limits, static_weights: Sequence[float]) -> None:
        self._job = job
        self._names = names
        self._by_tokens = job.mixture.level == "token"
        # What round-robin needs is its own business: it must not fail where the plan did not.
        self._limits = dataclasses.replace(limits, microbatches=None)
        self._static_weights = static_weights
        self._rows = _Rows()
        self._loads: dict[int, tuple[float, LoadHeatmap]] = {}
        self.samples: Int64s = np.zeros(len(names), np.int64)
        self.tokens: Int64s = np.zeros(len(names), np.int64)
        self.positions = 0
        self._planned: Floats = np.zeros(len(names))
        self._imbalance: Floats = np.zeros(2)
        self._histogram: Int64s = np.zeros(len(_EDGES) - 1, np.int64)
        self._digests = {name: hashlib.blake2b(digest_size=16) for name in ("order", "plan")}
        self.steps = 0

    def add(self, step: Step, metas: Sequence[Sequence[BatchMeta]], wait_s: float) -> None:
        """Count one step; `metas` is [dp rank][microbatch]."""
        found = Segments.of(metas)
        draw = found.samples(step.index, self._names)
        buckets, microbatches = len(metas), len(metas[0])
        costs = sequence_cost(found.padded)
        ours = np.bincount(found.place, weights=costs, minlength=buckets * microbatches).reshape(buckets, -1)
        dealt = round_robin(draw, self._limits)
        theirs = dealt.loads(sequence_cost(pad_lengths(dealt.pieces.length, self._limits.pad_multiple)))
        tokens = np.bincount(found.source, weights=found.length, minlength=len(self._names))
        samples = np.bincount(draw.source, minlength=len(self._names))
        weights = np.asarray(self._weights(step.index))
        counted = tokens if self._by_tokens else samples.astype(np.float64)
        imbalance = (imbalance_of(ours), imbalance_of(theirs))
        padding = 1 - tokens.sum() / max(found.positions, 1)
        scalars = (tokens.sum(), samples.sum(), step.global_loss_tokens, microbatches, *imbalance, padding, wait_s)
        self._rows.add(step.index, np.concatenate([scalars, weights, counted / max(counted.sum(), 1)]))
        self._keep_load(step.index, imbalance[1], ours, theirs)
        self.steps += 1
        self.samples += samples
        self.tokens += tokens.astype(np.int64)
        self.positions += found.positions
        self._planned += weights
        self._imbalance += imbalance
        self._histogram += np.histogram(draw.meta["tokens"], _EDGES)[0]
        for name, digest in (("order", step.order_digest), ("plan", step.plan_digest)):
            # What `core.plan.chain_digest` gives for the list of them.
            self._digests[name].update(f"{chr(10) if self.steps > 1 else ''}{digest}".encode())

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
        used = np.flatnonzero(self._histogram)
        if not len(used):
            return []
        span = range(int(used[0]), int(used[-1]) + 1)
        return [(int(_EDGES[i]), int(_EDGES[i + 1]), int(self._histogram[i])) for i in span]

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

    def _weights(self, step: int) -> Sequence[float]:
        mixture = self._job.mixture
        if mixture.schedule == "static":
            return self._static_weights
        weights = mixture.weights_at(float(step), self._names, {})
        return [weight / (sum(weights) or 1.0) for weight in weights]

    def _keep_load(self, step: int, rank_by: float, ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> None:
        if len(self._loads) < MOST_POINTS:
            load = LoadHeatmap(step, ours.astype(float).tolist(), theirs.astype(float).tolist())
            self._loads[step] = (rank_by, load)


def imbalance_of(loads: npt.NDArray[Any]) -> float:
    """Return the largest cost of a rank over the mean of all, from costs [rank, microbatch].

    Example:
        >>> imbalance_of(np.array([[2.0, 1.0], [1.0, 0.0]]))
        1.5
    """
    ranks = loads.sum(axis=1)
    mean = float(ranks.mean())
    return float(ranks.max()) / mean if mean > 0 else 1.0


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
