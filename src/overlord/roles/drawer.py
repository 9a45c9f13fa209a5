"""Draws global batches one after the other from a stream state; a part of the Planner.

Rules of this file:
1. What is drawn depends on the state, the job and the sources' metadata in their order, and on
   nothing else: how much metadata happens to be at hand only decides when loaders are asked.
2. The mesh and the strategy are unknown here.
3. A draw that fails leaves nothing behind: asked again, it begins where it began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlord.core.messages import MetaRequest
from overlord.core.order import BEGIN
from overlord.core.plan import Draw
from overlord.core.samples import META, OVERLONG, Cursor, MetaArray
from overlord.core.specs import Job, Mixture
from overlord.core.states import StreamState
from overlord.errors import PlanError
from overlord.planning.drawing import Budget, Pause, Supply, draw_more
from overlord.planning.mixing import SUBSTEPS, integer_weights
from overlord.roles.ports import Loaders

_UNLIMITED = 1 << 60
_ONCE = ("first_exhausted", "all_exhausted_without_replacement")

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """One drawn step and the state it leaves behind."""

    draw: Draw
    after: StreamState


class _Track:
    """What is known of one source beyond its cursor."""

    def __init__(self, cursor: Cursor) -> None:
        self.next_cursor = cursor
        self.meta: MetaArray = np.empty(0, META)
        self.mean_tokens = 256.0


class Drawer:
    """Draws steps in order, beginning at a state."""

    def __init__(self, job: Job, loaders: Loaders, state: StreamState, base: Mapping[str, float]) -> None:
        self._job = job
        self._mixture = job.mixture
        self._names = tuple(source.name for source in job.sources)
        self._loaders = loaders
        self._base = base
        self._state = state
        self._awake: set[int] = set()
        self._barren: set[int] = set()
        self._begin_at(state)
        once = self._mixture.stopping in _ONCE
        self._most_epochs: float = 1 if once else self._mixture.max_repetition or math.inf

    @property
    def state(self) -> StreamState:
        """The state before the next step."""
        return self._state

    def draw(self) -> DrawnStep | None:
        """Draw the next step, or return None at the end of the stream."""
        if self._stopped:
            return None
        try:
            return self._draw()
        except BaseException:
            self._begin_at(self._state)  # what was half drawn must not be missing when it is asked for again
            raise

    def _begin_at(self, state: StreamState) -> None:
        self._tracks = [_Track(state.cursor(i)) for i in range(len(self._names))]
        self._stopped = bool(state.finished.all())
        self._barren.clear()

    def _draw(self) -> DrawnStep | None:
        step = self._state.step
        work = self._state.copy()
        batch = self._job.batch
        budget = Budget(batch.global_samples or _UNLIMITED, batch.global_tokens or _UNLIMITED)
        parts: list[tuple[Int64s, MetaArray]] = []
        first = weights = self._weights(float(step))
        self._rest_undrawn(weights)
        for part in range(SUBSTEPS if self._mixture.granularity == "substep" else 1):
            if part:
                weights = self._weights(step + part / SUBSTEPS)
            self._draw_part(work, _part_of(budget, part, self._mixture), weights, budget, parts)
            if self._stopped:
                break
        source = np.concatenate([p[0] for p in parts]) if parts else np.empty(0, np.int64)
        short = self._stopped and budget.samples < budget.max_samples and budget.tokens < budget.max_tokens
        if len(source) == 0 or (short and self._job.drop_last):
            return None
        if self._stopped:
            work.finished[:] = 1  # a stream that is resumed here has ended as well
        meta = np.concatenate([p[1] for p in parts])
        draw = Draw(step, self._names, source.astype(np.int32), meta, tuple(first))
        self._refuse_overlong(draw)
        self._state = self._after(work, draw)
        return DrawnStep(draw, self._state)

    def _rest_undrawn(self, weights: Sequence[float]) -> None:
        awake = {i for i, weight in enumerate(weights) if weight > 0}
        if self._awake - awake:
            self._loaders.rest({i: self._state.cursor(i) for i in sorted(self._awake - awake)})
        self._awake = awake

    def _weights(self, position: float) -> list[float]:
        return self._mixture.weights_at(position, self._names, self._base)

    def _draw_part(
        self,
        work: StreamState,
        part: Budget,
        weights: Sequence[float],
        whole: Budget,
        parts: list[tuple[Int64s, MetaArray]],
    ) -> None:
        exact = integer_weights(weights, work.finished == 0)
        self._top_up(exact, part)
        supply = self._supply()
        while True:
            before = supply.taken.copy()
            pause, which, source, rows = draw_more(
                supply,
                exact,
                work.deficit,
                work.skipped,
                part,
                by_tokens=self._mixture.level == "token",
                sequential=self._mixture.order == "sequential",
            )
            work.passed[:] += supply.taken - before
            if len(source):
                parts.append((source, self._rows_of(supply, source, rows)))
                self._barren.difference_update(np.unique(source).tolist())
            if pause is Pause.FULL:
                break
            if pause is Pause.DRY:
                self._stopped = True
                break
            if pause is Pause.ENDED:
                self._end_epoch(work, which, np.asarray(weights) > 0)
                if self._stopped:
                    break
                exact = integer_weights(weights, work.finished == 0)
                continue
            self._drop_taken(supply)
            self._fetch({which: max(16, self._expected(which, exact, part))})
            supply = self._supply()
        self._drop_taken(supply)
        whole.samples, whole.tokens = part.samples, part.tokens

    def _top_up(self, weights: Int64s, part: Budget) -> None:
        """Ask for what the budget will probably need, all sources at once."""
        open_ended = [
            i for i in np.flatnonzero(weights).tolist() if self._tracks[i].next_cursor.epoch < self._most_epochs
        ]
        wanted = {i: self._expected(i, weights, part) - len(self._tracks[i].meta) for i in open_ended}
        self._fetch({i: count for i, count in wanted.items() if count > 0})

    def _expected(self, source: int, weights: Int64s, part: Budget) -> int:
        share = float(weights[source]) / max(float(weights.sum()), 1.0)
        track = self._tracks[source]
        if self._mixture.order == "sequential":
            share = 1.0
        by_tokens = self._mixture.level == "token"
        samples = share * (part.max_samples - part.samples)
        if part.max_tokens < _UNLIMITED:
            left = part.max_tokens - part.tokens
            drawn = [t for t in self._tracks if t.meta.size or t.mean_tokens != 256.0] or self._tracks
            mean = track.mean_tokens if by_tokens else float(np.mean([t.mean_tokens for t in drawn]))
            samples = min(samples, share * left / max(mean, 1.0))
        if self._mixture.order == "sequential":
            samples = min(samples, 64.0)
        return math.ceil(samples) + 1

    def _fetch(self, wanted: dict[int, int]) -> None:
        """Ask loaders for so many more samples of each source; less may come where a group ends."""
        if not wanted:
            return
        requests = [MetaRequest(i, self._tracks[i].next_cursor, count) for i, count in wanted.items()]
        for delta in self._loaders.summary_buffer(requests):  # (4) metadata of what the loaders hold
            track = self._tracks[delta.source]
            track.mean_tokens = 0.5 * track.mean_tokens + 0.5 * float(delta.meta["tokens"].mean())
            track.meta = np.concatenate([track.meta, delta.meta])
            track.next_cursor = delta.next_cursor

    def _supply(self) -> Supply:
        metas = [track.meta for track in self._tracks]
        count = np.array([len(m) for m in metas], np.int64)
        joined = np.concatenate(metas)
        return Supply(
            tokens=joined["tokens"].astype(np.int64),
            flags=np.ascontiguousarray(joined["flags"]),
            base=np.cumsum(count) - count,
            count=count,
            taken=np.zeros(len(count), np.int64),
        )

    def _rows_of(self, supply: Supply, source: Int64s, rows: Int64s) -> MetaArray:
        out = np.empty(len(source), META)
        for one in np.unique(source):
            mine = source == one
            out[mine] = self._tracks[one].meta[rows[mine] - supply.base[one]]
        return out

    def _drop_taken(self, supply: Supply) -> None:
        for track, taken in zip(self._tracks, supply.taken.tolist(), strict=True):
            if taken:
                track.meta = track.meta[taken:]
        supply.count -= supply.taken
        supply.taken[:] = 0

    def _end_epoch(self, work: StreamState, source: int, drawn: npt.NDArray[np.bool_]) -> None:
        if source in self._barren:
            raise PlanError(
                f"source {self._names[source]!r} has nothing to draw: all of its {int(work.passed[source])} rows are "
                f"empty, filtered out or, with overlength={self._job.overlength!r}, too long for context_length="
                f"{self._job.batch.context_length}; the mixture would look for a sample for ever. Set its weight to 0, "
                "change overlength or mend its files."
            )
        self._barren.add(source)
        if not work.epoch_rows[source]:
            work.epoch_rows[source] = work.passed[source]
        work.passed[source] = 0
        completed = int(work.epoch[source]) + 1
        work.epoch[source] = completed  # exact again in _after; here it counts epochs ended inside this step
        mixture = self._mixture
        if completed >= self._most_epochs:
            work.finished[source] = 1
            work.deficit[source] = 0
        if mixture.stopping == "first_exhausted" or work.finished.all():
            self._stopped = True
        if mixture.stopping == "all_exhausted":
            self._stopped = bool((work.epoch[drawn] > 0).all())

    def _after(self, work: StreamState, draw: Draw) -> StreamState:
        for i, track in enumerate(self._tracks):
            head = track.meta[0] if len(track.meta) else None
            cursor = (
                track.next_cursor
                if head is None
                else Cursor(int(head["epoch"]), int(head["group"]), int(head["offset"]))
            )
            # At the beginning of an epoch a state must not tell whether somebody has looked at its first rows.
            work.epoch[i], work.group[i], work.offset[i] = cursor if work.passed[i] else (cursor.epoch, BEGIN, 0)
        work.samples[:] += np.bincount(draw.source, minlength=len(work.samples))
        np.add.at(work.tokens, draw.source, draw.meta["tokens"])
        return StreamState(self._state.step + 1, *(getattr(work, name) for name in StreamState.columns()))

    def _refuse_overlong(self, draw: Draw) -> None:
        wrong = np.flatnonzero(draw.meta["flags"] & OVERLONG)
        if len(wrong):
            raise PlanError(
                f"sample {draw.sample_id(int(wrong[0]))} has {int(draw.meta['tokens'][wrong[0]])} tokens, more than "
                f"context_length={self._job.batch.context_length}, and overlength is 'error'. Set overlength to "
                "'truncate', 'split' or 'drop', or raise the context length."
            )


def _part_of(budget: Budget, part: int, mixture: Mixture) -> Budget:
    """Return the budget up to the end of one part of the step."""
    if mixture.granularity != "substep":
        return budget
    share = (part + 1) / SUBSTEPS
    most_samples = budget.max_samples if budget.max_samples == _UNLIMITED else math.ceil(budget.max_samples * share)
    most_tokens = budget.max_tokens if budget.max_tokens == _UNLIMITED else math.ceil(budget.max_tokens * share)
    return Budget(most_samples, most_tokens, budget.samples, budget.tokens)
