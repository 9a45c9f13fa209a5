"""How even the steps of `explain` are: as planned, as dealt round-robin, and what no placement can better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlord.cli.collecting import Collector
from overlord.cli.loads import (
    encoder_loads,
    in_lockstep,
    in_pipeline,
    over_ranks,
    positions,
    rank_loads,
    runs_free,
    step_time,
)
from overlord.core.draw import Limits
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.planning.balancing.bounds import lockstep_bound
from overlord.planning.balancing.hybrid import buddy_lpt, ranks_needed
from overlord.planning.costs import CostModel
from overlord.reports.explanation import BalanceFacts, StepFacts
from overlord.reports.summary import ratio

_BOUNDED_PIECES = 20_000
"""Steps with more pieces than this are not held against the lockstep bound: it would take seconds."""
_BOUNDED_STEPS = 20
_UNEVEN = 1.2
"""An encoder this uneven is worth a word."""
_REACHED, _MATTERS = 1.02, 1.03
"""A bound counts as the limit where the plan is this near to it and it is this far from even."""


@dataclass(frozen=True, slots=True)
class _Largest:
    """The largest item of all steps, against an even share of its step."""

    length: int = 0
    shares: float = 0.0


class Balance:
    """Adds up how even steps are, planned and dealt."""

    def __init__(
        self, tree: ClientPlaceTree, limits: Limits, cost: CostModel, encoder: CostModel, *, meets_once: bool = False
    ) -> None:
        self._tree = tree
        self._limits = limits
        self._cost = cost
        self._encoder = encoder
        self._meets_once = meets_once
        self._hybrid: list[float] = []
        self._splits = False
        self._rows: dict[str, list[tuple[float, float, float]]] = {}
        self._times: list[tuple[float, float, float]] = []
        self._counts: list[tuple[int, int]] = []
        self._positions = [0, 0]
        self._sums: list[tuple[int, int, int]] = []
        self._crossing: list[int] = []
        self._image_tokens: list[int] = []
        self.first_step = 0
        self.free = False
        """Whether ranks have run free: with other numbers of microbatches than their neighbours, in any step."""
        self.by_rank = False
        """Whether every DP x CP rank is a consumer of its own."""
        self.images_planned = False
        """Whether the strategy says where images are encoded."""
        self.longest = _Largest()
        self.largest_image = _Largest()

    def add(self, plan: LoadingPlan, dealt: LoadingPlan) -> None:
        """Count one step."""
        tree, cost = self._tree, self._cost
        if not self._counts:
            self.first_step = plan.step
        ours, theirs = (rank_loads(one, tree, cost) for one in (plan, dealt))
        self.free |= runs_free(plan)
        self.by_rank |= plan.axis == "CP"
        self._add("ranks", over_ranks(theirs), over_ranks(ours), self._rank_bound(plan, ours))
        if tree.pp > 1:
            count = plan.num_microbatches  # one base for both: else the ratios would not give the speed-up
            self._add("pipeline", in_pipeline(theirs, tree.pp, count), in_pipeline(ours, tree.pp, count), np.nan)
        else:
            self._add("lockstep", in_lockstep(theirs), in_lockstep(ours), self._lockstep_bound(plan))
        dealt_time = self._time(theirs, free=self._meets_once)
        self._times.append((dealt_time, self._time(ours, free=False), self._time(ours, free=True)))
        self._counts.append((dealt.num_microbatches, plan.num_microbatches))
        for number, one in enumerate((dealt, plan)):
            self._positions[number] += positions(one)
        self._sums.append((plan.total_tokens, plan.squared_tokens, plan.global_loss_tokens))
        self._add_images(plan, dealt)

    @property
    def speedup(self) -> float:
        """Time of the steps dealt round-robin over that of the planned ones, by the cost model."""
        before, locked, free = np.array(self._times).sum(axis=0).tolist()
        after = free if self.free or self._meets_once else locked
        return before / after if after > 0 else 1.0

    @property
    def waiting(self) -> str:
        """When ranks wait for each other, by which the time of a step is reckoned."""
        if self._tree.pp > 1:
            return "pipelines wait for each other once a step"
        if self._meets_once:
            return "ranks wait for each other once a step"
        if self.free:
            return "ranks wait for each other once a step; dealt round-robin, after every microbatch"
        return "ranks wait for each other after every microbatch"

    @property
    def by_hybrid(self) -> float:
        """What hdp would make of the row over the ranks; infinite where it would split nothing."""
        return float(np.mean(self._hybrid)) if self._hybrid and self._splits else np.inf

    @property
    def crossing_tokens(self) -> float | None:
        """Image tokens a step that leave the rank they are encoded on; None without images."""
        return float(np.mean(self._crossing)) if self._crossing else None

    @property
    def image_tokens(self) -> float:
        """Image tokens a step."""
        return float(np.mean(self._image_tokens)) if self._image_tokens else 0.0

    def facts(self) -> list[BalanceFacts]:
        """Return the axes in reading order."""
        single = "DP x CP ranks" if self.by_rank else "data-parallel groups"
        meanings = {
            "ranks": f"largest cost of the {single} over their mean",
            "lockstep": "time when all wait for each other after every microbatch, over that of even ranks",
            "pipeline": f"time of the slowest of the pipelines of {self._tree.pp} stages, over that of even ones",
            "encoder": "largest encoding cost of the ranks over their mean",
        }
        return [self._fact(axis, meaning) for axis, meaning in meanings.items() if axis in self._rows]

    def step_facts(self, collector: Collector) -> StepFacts:
        """Return the mean step."""
        tokens, squares, losses = np.array(self._sums).mean(axis=0).tolist()
        before, after = np.array(self._counts).mean(axis=0).tolist()
        total = int(collector.tokens.sum())
        padding = [1 - total / held if held else 0.0 for held in self._positions]
        samples = int(collector.samples.sum()) / max(collector.steps, 1)
        return StepFacts(
            tokens=tokens,
            squared_tokens=squares,
            samples=samples,
            loss_tokens=losses,
            microbatches=after,
            microbatches_before=before,
            padding=padding[1],
            padding_before=padding[0],
            first_step=self.first_step,
            tokens_per_step=[step[0] for step in self._sums],
        )

    def means(self, axis: str) -> tuple[float, float, float] | None:
        """Return before, after and bound of an axis; NaN where there is none."""
        rows = self._rows.get(axis)
        if not rows:
            return None
        before, after, bound = (_mean([row[column] for row in rows]) for column in range(3))
        # Ranks that run free do not wait after a microbatch, also where they happen to have as many.
        return (before, np.nan, np.nan) if axis == "lockstep" and self.free else (before, after, bound)

    def _fact(self, axis: str, meaning: str) -> BalanceFacts:
        found = self.means(axis)
        assert found is not None
        before, after, bound = found
        rows = self._rows[axis]
        return BalanceFacts(
            axis,
            meaning,
            before,
            None if np.isnan(after) else after,
            None if np.isnan(bound) else bound,
            [row[0] for row in rows],
            [] if np.isnan(after) else [row[1] for row in rows],
        )

    def _add(self, axis: str, before: float, after: float, bound: float) -> None:
        self._rows.setdefault(axis, []).append((before, after, bound))

    def _time(self, loads: np.ndarray, *, free: bool) -> float:
        # Every rank of a group spends the constant of a microbatch; only what sequences cost is shared.
        return step_time(loads, stages=self._tree.pp, per_microbatch=float(self._cost.per_microbatch), free=free)

    def _rank_bound(self, plan: LoadingPlan, loads: np.ndarray) -> float:
        """Return what the largest item alone makes of an even share; a split one counts by its parts."""
        sharing = plan.cp_sizes if plan.cp_sizes is not None else 1 if plan.axis == "CP" else self._tree.cp
        # Rows are padded to the longest beside them, which another placement may change; their tokens stay.
        share = self._cost(plan.pieces.length if plan.row_tokens else plan.padded) / sharing
        mean = float(loads.sum(axis=1).mean())
        if not len(share) or mean <= 0:
            return 1.0
        at = int(np.argmax(share))
        found = float(share[at]) / mean
        self._hybrid.append(max(1.0, self._hybrid_load(plan) / mean))
        if found > self.longest.shares:
            self.longest = _Largest(int(plan.pieces.length[at]), found)
        return max(1.0, found)

    def _hybrid_load(self, plan: LoadingPlan) -> float:
        """Return the largest load of a rank as hdp would place these sequences; infinite where it cannot."""
        tree, cap = self._tree, self._limits.microbatch_tokens // self._tree.cp
        ranks = tree.dp * tree.cp
        if plan.axis == "CP" or tree.pp > 1 or ranks == 1 or cap < 1:
            return np.inf
        needed = ranks_needed(plan.pieces.length, cap)
        if ranks % int(needed.max()):
            return np.inf
        self._splits |= int(needed.max()) > 1
        return float(buddy_lpt(self._cost(plan.pieces.length), needed, ranks)[1].max())

    def _lockstep_bound(self, plan: LoadingPlan) -> float:
        known = plan.axis == "DP" and len(plan.pieces) <= _BOUNDED_PIECES and len(self._counts) < _BOUNDED_STEPS
        known &= not plan.row_tokens or self._limits.full_rows  # else what a row costs depends on its neighbours
        costs = self._cost(plan.padded)
        if not known or not int(costs.sum()):
            return np.nan
        shape = (plan.num_buckets, plan.num_microbatches)
        least = lockstep_bound(costs, plan.padded, *shape, self._limits.microbatch_tokens)
        return max(1.0, least * plan.num_buckets / int(costs.sum()))

    def _add_images(self, plan: LoadingPlan, dealt: LoadingPlan) -> None:
        tokens = plan.draw.images.length.astype(np.int64)
        self._image_tokens.append(int(tokens.sum()))
        if not self._image_tokens[-1]:
            return
        self.images_planned |= plan.encoder is not None
        per_token = self._limits.patches_per_token
        before, after = (encoder_loads(one, self._tree, self._encoder, per_token) for one in (dealt, plan))
        # Split images are no items any more: each part is one.
        images = plan.encoder.pieces.length if plan.encoder is not None else tokens
        runs = None if plan.encoder is None else plan.encoder.pieces
        of = tokens if runs is None else tokens[plan.draw.image_at(runs.sample, runs.start)[0]]
        shares = self._encoder(of * per_token) * (images / np.maximum(of, 1)) / after.mean()
        at = int(np.argmax(shares))
        if shares[at] > self.largest_image.shares:
            self.largest_image = _Largest(int(images[at]) * per_token, float(shares[at]))
        rows = [over_ranks(one[:, None]) for one in (before, after)]
        self._add("encoder", rows[0], rows[1], max(1.0, float(shares[at])))
        self._crossing.append(plan.routing.crossing_tokens() if plan.routing is not None else 0)


def words_on_limits(balance: Balance, *, clips: bool = False) -> list[str]:
    """Say what keeps steps from being even that no better placement by this strategy could change.

    Args:
        balance: The steps.
        clips: Whether clips count among the images.
    """
    words: list[str] = []
    ranks, lockstep, encoder = (balance.means(axis) for axis in ("ranks", "lockstep", "encoder"))
    if ranks and _limits(ranks):
        splits = _REACHED * balance.by_hybrid < ranks[2]
        remedy = f"{'splitting it (hdp) or ' if splits else ''}a larger global batch would help"
        words.append(
            f"One sequence of {balance.longest.length:,} tokens is {ratio(balance.longest.shares)} an even share of a "
            f"step: {remedy}."
        )
    elif lockstep and _limits(lockstep):
        splits = _REACHED * balance.by_hybrid < lockstep[2]
        other = "or splitting (hdp)" if splits else "or a larger global batch"
        words.append(
            f"In lockstep no placement of these sequences comes below {ratio(lockstep[2])}: a microbatch takes as long "
            f"as its longest sequence. Larger microbatches (batch.microbatch_tokens) {other} would help."
        )
    if encoder and _limits(encoder):
        words.append(
            f"One image{' or clip' if clips else ''} of {balance.largest_image.length:,} patches is "
            f"{ratio(balance.largest_image.shares)} an even share of the encoder's work: only cutting it (vlm_hybrid "
            "with split) would help."
        )
    elif encoder and not balance.images_planned and encoder[1] >= _UNEVEN:
        words.append(
            f"The busiest encoder rank has {ratio(encoder[1])} the mean, since images{' and clips' if clips else ''} "
            "are encoded with their tokens: vlm_hybrid would spread them over all ranks."
        )
    return words


def _limits(means: tuple[float, float, float]) -> bool:
    _, after, bound = means
    return bool(bound >= _MATTERS and after <= _REACHED * bound)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")
