"""Draws global batches one after the other from a stream state; a part of the Planner.

    Drawer   draws the next step: weights from the Mixer, metadata from the loaders
    Mixer    the weights of a step, from the schedule, a live change, repetitions, or a rule that learns from reports

Rules of this file:
1. What is drawn depends on the state, the job and the sources' metadata in their order, and on nothing else: how much
   metadata happens to be buffered only decides when loaders are asked for more.
2. The mesh and the strategy are unknown here.
3. A draw that fails changes nothing: a retry begins at the same state.
4. The report of step s takes effect at step s + lag, whenever it arrives. If a rule needs a report that is missing,
   ReportMissing is raised before anything has changed.
5. The metrics of a source are weighted by the tokens that the plan gave it, not by numbers of the reporter.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Draw, last_cut, part_of_sample
from overlord.core.messages import MetaDelta, MetaRequest
from overlord.core.order import BEGIN
from overlord.core.ragged import expand_ranges
from overlord.core.samples import META, OVERLONG, Cursor, MetaArray
from overlord.core.spec_errors import did_you_mean
from overlord.core.states import StreamState
from overlord.errors import NothingToDraw, PlanError, ReportMissing, SpecError, StateError
from overlord.job.reconcile import RULE_BEGINS
from overlord.job.specs import Job, Mixture
from overlord.planning.drawing import SCALE, SUBSTEPS, Budget, Pause, Supply, Tally, draw_more, integer_weights
from overlord.planning.learning.learner import Learner
from overlord.planning.learning.repetition import Repetition, repetitions
from overlord.planning.learning.rules import FunctionRule, make_rule
from overlord.roles.changes import InputLog, Report
from overlord.roles.ports import Loaders

Int64s = npt.NDArray[np.int64]

_METRICS = ("loss", "reference", "excess")
"""Kinds of metrics that rules use: the part of a key before the slash and the source's name."""


class Mixer:
    """The mixture of a stream, step by step; a part of the Drawer."""

    def __init__(self, job: Job, inputs: InputLog, step: int, state: Mapping[str, Any] | None) -> None:
        self._names = list(inputs.roster_at(step - 1).names)
        self._inputs = inputs
        self._lag = job.lag
        self.version = 0
        """The version of the mixture: grows with every report that took effect and every change."""
        self._pending: dict[int, tuple[int, list[int]]] = {}
        self.mixture, self._since = inputs.mixture_at(step - 1)  # the mixture in force
        self._rule = self._new_rule()
        self._repetition = _repetition_of(self.mixture)
        self._rule_base = 0
        self._position = 0.0  # of a schedule in epochs, at the last draw
        if state is not None:
            self._restore(state)
        elif self._rule is not None and step > 0:
            raise _damaged("it has none")

    def missing_report(self, step: int) -> int | None:
        """Return the step of the report that is needed to draw `step` and has not arrived; None if there is none."""
        if self._inputs.mixture_at(step)[1] != self._since:
            return None  # a change takes effect here: reports on the old mixture do not matter
        needed = step - self._lag
        wanted = needed in self._pending and self._inputs.report_of(needed) is None
        return needed if wanted else None

    def begin(self, step: int) -> None:
        """Advance to a step: apply a change, or learn from the report that takes effect here."""
        missing = self.missing_report(step)
        if missing is not None:
            raise ReportMissing(
                f"step {step} needs the report of step {missing}: its mixture follows the losses with lag={self._lag}. "
                f"Call client.report({missing}, {{'loss/SOURCE': ..}}) on one rank before requesting step {step}."
            )
        mixture, since = self._inputs.mixture_at(step)
        self._names = list(self._inputs.roster_at(step).names)  # an added source also changes the mixture
        if since != self._since:
            self.mixture, self._since = mixture, since
            self.version += 1
            self._rule_base = self.version
            self._pending.clear()
            self._rule = self._new_rule()
            self._repetition = _repetition_of(mixture)
        elif step - self._lag in self._pending:
            self._observe(step - self._lag)

    def check_report(self, step: int, report: Report) -> None:
        """Refuse a report that the rule cannot learn from, before it is journaled.

        Raises:
            SpecError: for an invalid loss, or a metric that the rule needs and does not find.
        """
        if self._rule is None:
            return
        if not isinstance(self._rule, FunctionRule):
            self._check_names(step, report)
        if step in self._pending:
            self._teach(copy.deepcopy(self._rule), step, report)

    def _check_names(self, step: int, report: Report) -> None:
        told = [key.split("/", 1) for key in report if key.split("/", 1)[0] in _METRICS and "/" in key]
        for kind, name in told:
            if name not in self._names:
                raise SpecError(
                    f"report: {kind}/{name} at step {step}: no source has the name {name!r}, so the mixture would not "
                    f"learn from it.{did_you_mean(name, self._names)} Sources: {', '.join(self._names[:12])}."
                )
        if not told:
            raise SpecError(
                f"report: the report of step {step} has no metric of a source ({', '.join(list(report)[:4]) or 'none'} "
                "given), and the mixture follows the losses; its weights would drift. Report as in {'loss/"
                f"{self._names[0]}': 2.1}}."
            )

    def position(self, step: float, state: StreamState) -> float:
        """Return where the schedule is at a step, or inside one; repetitions are counted up to there."""
        self.count(step, state)
        if self.mixture.unit == "step":
            return step
        roster, here = self._inputs.roster_at(int(step)), range(len(state.epoch))
        # A source that came later would hold up a schedule in epochs, or take it back to its beginning.
        came = self._inputs.added
        done = [bool(state.finished[i]) or i in roster.removed or roster.names[i] in came for i in here]
        self._position = self.mixture.position(step, self._names, state.epoch.tolist(), done, self._inputs.base)
        return self._position

    def count(self, step: float, state: StreamState) -> None:
        """Count how often each source was repeated before a step, or up to a place inside it."""
        if self._repetition is None:
            return
        drawn, roster = state.finished == 0, self._inputs.roster_at(int(step))
        drawn[[i for i in (*roster.removed, *roster.parked) if i < len(drawn)]] = False
        self._repetition.count(repetitions(state.epoch, state.passed, state.epoch_rows), drawn)

    def weights(self, position: float) -> list[float]:
        """Return the weight of each source at a position of the schedule."""
        if self._rule is not None:
            return [float(w) for w in self._rule.weights(int(position))]
        weights = self.mixture.weights_at(position, self._names, self._inputs.base)
        return weights if self._repetition is None else self._repetition.weights(weights)

    def weights_ahead(self, step: int) -> list[float]:
        """Return the weights of a future step, as far as they are known now: later reports may change them.

        Sources that are parked or removed at that step have weight 0.
        """
        roster, (mixture, since) = self._inputs.roster_at(step), self._inputs.mixture_at(step)
        if self._rule is not None and since == self._since:
            weights = self.weights(step) + [0.0] * (len(roster.names) - len(self._names))
        else:
            # When epochs will end is not known: then the weights in force count.
            position = float(step) if mixture.unit == "step" else self._position
            weights = mixture.weights_at(position, list(roster.names), self._inputs.base)
            if self._repetition is not None and since == self._since:
                weights = self._repetition.weights(weights)  # by the repetitions so far
        return [0.0 if i in roster.parked or i in roster.removed else w for i, w in enumerate(weights)]

    def end(self, draw: Draw) -> None:
        """Keep the loss tokens of each source in a drawn step until its report takes effect."""
        learn = self.mixture.learn
        if self._rule is not None and learn is not None and draw.step % learn.every == 0:
            counts = np.bincount(draw.source, draw.meta["loss_tokens"], len(self._names)).astype(np.int64)
            self._pending[draw.step] = (self.version, counts.tolist())

    def state(self) -> dict[str, Any] | None:
        """Return the state to save, as JSON; None for a mixture that has not changed."""
        if self._rule is None and self.version == 0:
            return None
        return {
            "version": self.version,
            "rule_base": self._rule_base,
            "rule": None if self._rule is None else self._rule.state_dict(),
            "pending": {str(step): [version, *counts] for step, (version, counts) in self._pending.items()},
        }

    def _new_rule(self) -> Learner | None:
        learn = self.mixture.learn
        if learn is None or not learn.follows_reports:
            return None
        prior = self.mixture.weights_at(0.0, self._names, self._inputs.base)
        given, options = dict(zip(self._names, prior, strict=True)), learn.options()
        if learn.graph is not None:
            # A source has influence 1 on itself unless the graph says otherwise.
            rows = [[learn.graph.get(a, {}).get(b, float(a == b)) for b in self._names] for a in self._names]
            options["graph"] = np.array(rows)
        return make_rule(learn.method, self._names, given, options, self._lag)

    def _observe(self, step: int) -> None:
        report = self._inputs.report_of(step)
        assert report is not None and self._rule is not None
        self._teach(self._rule, step, report)
        del self._pending[step]
        self.version = self._rule_base + self._rule.version

    def _teach(self, rule: Learner, step: int, report: Report) -> None:
        if isinstance(rule, FunctionRule):
            rule.observe_metrics(step, report)
            return
        version, counts = self._pending[step]
        loss, seen = _by_source(report, "loss", self._names)
        tokens = np.where(seen, np.asarray(counts, np.int64), 0)
        extra = {kind: _by_source(report, kind, self._names) for kind in _kinds(report) if kind != "loss"}
        means = {kind: np.where(found, values, np.nan) for kind, (values, found) in extra.items()}
        rule.observe(step, version - self._rule_base, loss * tokens, tokens, means)

    def _restore(self, state: Mapping[str, Any]) -> None:
        try:
            self.version, self._rule_base = int(state["version"]), int(state["rule_base"])
            self._pending = {
                int(step): (int(row[0]), [int(n) for n in row[1:]]) for step, row in state["pending"].items()
            }
            saved = state["rule"]
            wrong = any(len(counts) != len(self._names) for _, counts in self._pending.values())
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise _damaged(error) from None
        if saved == RULE_BEGINS:
            return
        if wrong or (saved is None) != (self._rule is None):
            raise _damaged("its mixture does not belong to the job's")
        if self._rule is not None:
            self._rule.load_state_dict(saved)


def _repetition_of(mixture: Mixture) -> Repetition | None:
    """Return the rule of a mixture that follows repetitions. It has no state of its own: the stream's counts decide."""
    learn = mixture.learn
    return None if learn is None or learn.follows_reports else Repetition(**learn.options())


def _kinds(report: Report) -> Sequence[str]:
    return sorted({key.split("/", 1)[0] for key in report if "/" in key})


def _by_source(
    report: Report, kind: str, names: Sequence[str]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return one number for each source, from keys such as "loss/web", and which were given."""
    given = [report.get(f"{kind}/{name}") for name in names]
    return np.array([v if v is not None else 0.0 for v in given]), np.array([v is not None for v in given])


def _damaged(what: object) -> StateError:
    return StateError(
        f"the state is damaged: the mixture in it cannot be read ({what}); the weights would continue differently. Use "
        "an undamaged state, as client.state_dict() returned it."
    )


_UNLIMITED = 1 << 60
_FULL_ENOUGH = 64
"""No sample is split for less than this part of a step's tokens: steps are at most 1.6 % short."""

_RAW = np.dtype((np.void, META.itemsize))
"""Rows of metadata as plain bytes: numpy copies those ten times as fast as records."""
_FEW_ITEMS = 1 << 16
"""The list of images is compacted when it is longer than this: images of drawn samples are dropped."""
_FIRST_GUESS = 256.0
"""The assumed length of samples before any was measured."""
_FIRST_ROWS = 4
"""Rows that are asked for at most of a source of which no length is known: documents may be long, and the first step
would wait until many more of them are tokenized than it draws."""

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """One drawn step, and the state after it."""

    draw: Draw
    after: StreamState


@dataclass(slots=True)
class _Drawn:
    """What is drawn of a step so far."""

    parts: list[tuple[Int32s, MetaArray]] = dataclasses.field(default_factory=list[tuple[Int32s, MetaArray]])
    """Sources and metadata of the samples."""
    cuts: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict[int, tuple[int, int]])
    """Of samples that are drawn in part, by their number in the step: the first token, and the one after the last."""


def _with_parts(
    meta: MetaArray, items: Int32s | None, cuts: Mapping[int, tuple[int, int]], context_length: int
) -> Int32s | None:
    """Write the metadata of samples that are drawn in part; return the listed images with theirs."""
    for at, (begin, end) in cuts.items():
        first, row = int(meta["items"][at]) - 1, meta[at]
        own = None if first < 0 or items is None else items[first : first + int(row["images"])]
        meta[at], own = part_of_sample(row, own, begin, end, context_length)
        if own is not None:
            items = own if items is None else np.concatenate([items, own])
            meta["items"][at] = 1 + len(items) - len(own)
    return items


class _MetadataBuffer:
    """Buffered metadata of all sources: one array in which each source has a range, with room to grow.

    Source i holds `supply.held[i]` rows from `supply.base[i]` on, of which the first `supply.taken[i]` are drawn. New
    rows are appended after them. A source with a full range moves: to its own start if dropping the drawn rows makes
    enough room, else to the end of the array; when the array is full, all ranges are laid out again in a larger one.
    """

    def __init__(self, state: StreamState) -> None:
        num = len(state.epoch)
        self.next = np.stack([state.epoch, state.group, state.offset], axis=1)
        """The cursor after the buffered metadata of each source: rows of (epoch, group, offset)."""
        self._start = state.start.copy()
        """Tokens of the sample at the cursor that are drawn already, of sources without buffered metadata."""
        self.mean_tokens = np.full(num, _FIRST_GUESS)
        self.known = np.zeros(num, np.bool_)
        """Whether lengths of a source were seen."""
        self.meta: MetaArray = np.empty(0, META)
        self.supply = Supply(np.empty(0, np.int32), np.empty(0, np.int32), *np.zeros((3, num), np.int64))
        self._room = np.zeros(num, np.int64)
        self._end = 0
        self._items = np.empty((0, 4), np.int32)
        """Images of samples that have other images than one at the start: `meta["items"]` points here."""
        self._most_items = _FEW_ITEMS

    @property
    def left(self) -> Int64s:
        """Buffered rows of each source that are not drawn."""
        return self.supply.held - self.supply.taken

    def add(self, deltas: Sequence[MetaDelta]) -> None:
        """Add answers of loaders, at most one for each source."""
        which = np.array([delta.source for delta in deltas])
        sizes = np.array([len(delta.meta) for delta in deltas])
        self._make_room(which, sizes)
        tokens = np.concatenate([delta.meta["tokens"] for delta in deltas])
        supply, raw, given = self.supply, self.meta.view(_RAW), np.cumsum(sizes) - sizes
        places = zip(deltas, (supply.base + supply.held)[which].tolist(), given.tolist(), sizes.tolist(), strict=True)
        for delta, begin, at, size in places:
            raw[begin : begin + size] = delta.meta.view(_RAW)
            if delta.items is not None:
                listed = begin + np.flatnonzero(delta.meta["items"])
                self.meta["items"][listed] += len(self._items)
                self._items = np.concatenate([self._items, delta.items])
            supply.tokens[begin : begin + size] = tokens[at : at + size]
            supply.tokens[begin] -= self._start[delta.source]
            supply.flags[begin : begin + size] = delta.meta["flags"]
        self._start[which] = 0
        means = np.add.reduceat(tokens, given) / sizes
        self.mean_tokens[which] += (means - self.mean_tokens[which]) * sizes / (sizes + 16)  # a few rows say little
        self.known[which] = True
        self.next[which] = [delta.next_cursor for delta in deltas]
        supply.held[which] += sizes
        if len(self._items) > self._most_items:
            self._forget_drawn_items()

    def items_of(self, meta: MetaArray) -> Int32s | None:
        """Return the listed images of drawn samples; their metadata is changed to point into the returned list."""
        listed = np.flatnonzero(meta["items"])
        if not len(listed):
            return None
        count = meta["images"][listed].astype(np.int64)
        found = self._items[expand_ranges(meta["items"][listed] - 1, count)]
        meta["items"][listed] = 1 + np.cumsum(count) - count
        return found

    def pass_tokens(self, source: int, tokens: int) -> None:
        """Note that the first tokens of the next sample of a source are drawn."""
        self.supply.tokens[self.supply.base[source] + self.supply.taken[source]] -= tokens

    def next_row(self, source: int) -> MetaArray:
        """Return the metadata of the next sample of a source, which is buffered, as an array of one."""
        row = int(self.supply.base[source] + self.supply.taken[source])
        return self.meta[row : row + 1].copy()

    def _forget_drawn_items(self) -> None:
        rows = expand_ranges(self.supply.base + self.supply.taken, self.left)
        rows = rows[self.meta["items"][rows] > 0]
        kept = self.meta[rows]
        found = self.items_of(kept)
        self._items = np.empty((0, 4), np.int32) if found is None else found
        self.meta["items"][rows] = kept["items"]
        self._most_items = max(_FEW_ITEMS, 2 * len(self._items))

    def _make_room(self, which: Int64s, sizes: Int64s) -> None:
        supply, room = self.supply, self._room
        needed = self.left[which] + sizes
        cramped = which[supply.held[which] + sizes > room[which]]
        grown = which[needed > room[which]]
        # A quarter more than needed at first; twice as much for a source that needs more than once.
        room[grown] = needed[needed > room[which]] * np.where(room[grown] > 0, 8, 5) // 4 + 16
        if self._end + room[grown].sum() > len(self.meta):
            self._lay_out()
            return
        target = supply.base.copy()
        target[grown] = self._end + np.cumsum(room[grown]) - room[grown]
        self._end += int(room[grown].sum())
        self._move(cramped, target, self.meta, supply.tokens, supply.flags)

    def _lay_out(self) -> None:
        """Allocate longer arrays, and move the undrawn rows of every source into them."""
        self._end = int(self._room.sum())
        meta = np.empty(2 * self._end, META)
        tokens, flags = np.empty((2, len(meta)), np.int32)
        self._move(np.flatnonzero(self._room), np.cumsum(self._room) - self._room, meta, tokens, flags)
        self.meta, self.supply = meta, self.supply._replace(tokens=tokens, flags=flags)

    def _move(self, which: Int64s, target: Int64s, meta: MetaArray, tokens: Int32s, flags: Int32s) -> None:
        """Move the undrawn rows of some sources to their new start; drawn rows are dropped."""
        supply, count = self.supply, self.left[which]
        pairs = ((self.meta.view(_RAW), meta.view(_RAW)), (supply.tokens, tokens), (supply.flags, flags))
        begin = (supply.base + supply.taken)[which]
        for at, to, num in np.stack([begin, target[which], count], axis=1)[count > 0].tolist():
            for old, new in pairs:
                new[to : to + num] = old[at : at + num]
        supply.base[which], supply.held[which], supply.taken[which] = target[which], count, 0

    def cursors(self) -> Int64s:
        """Return the cursor of each source: rows of (epoch, group, offset)."""
        out = self.next.copy()
        some = np.flatnonzero(self.left)
        head = self.meta[self.supply.base[some] + self.supply.taken[some]]
        out[some] = np.stack([head["epoch"], head["group"], head["offset"]], axis=1)
        return out


class Drawer:
    """Draws steps in order, beginning at a state."""

    state: StreamState
    """The state before the next step."""
    mixer: Mixer

    def __init__(self, job: Job, loaders: Loaders, state: StreamState, inputs: InputLog) -> None:
        self._job = job
        self._loaders = loaders
        self._inputs = inputs
        self._awake: set[int] = set()
        self._nothing_drawn: set[int] = set()
        """Sources of which nothing was drawn since their last epoch ended."""
        self._away: set[int] = set()
        """Parked sources that have a weight."""
        self._begin_at(state)
        self._most_epochs: float = 1 if job.mixture.reads_once else job.mixture.max_repetition or math.inf

    def draw(self) -> DrawnStep | None:
        """Draw the next step, or return None at the end of the stream."""
        if self._stopped:
            return None
        before = self.state
        try:
            self._update_roster()
            self.mixer.begin(self.state.step)
            for _ in range(self._inputs.skips_at(self.state.step)):
                skipped = self._draw()
                if skipped is None:
                    return None
                self.state = dataclasses.replace(skipped.after, step=self.state.step)
            drawn = self._draw()
            if drawn is not None:
                self.mixer.end(drawn.draw)
                self.state = dataclasses.replace(drawn.after, mixer=self.mixer.state())
                drawn = DrawnStep(drawn.draw, self.state)
            return drawn
        except BaseException:
            self._begin_at(before)  # rows that were taken must be drawn again by a retry
            raise

    def _begin_at(self, state: StreamState) -> None:
        self.state = state
        self.mixer = Mixer(self._job, self._inputs, state.step, state.mixer)
        self.mixer.count(float(state.step), state)
        self._metadata = _MetadataBuffer(state)
        self._stopped = bool(state.finished.all())
        self._nothing_drawn.clear()

    def _update_roster(self) -> None:
        """Read the roster of this step; a source that was just added gets a row in the state."""
        self._roster = self._inputs.roster_at(self.state.step)
        if len(self._roster.names) > len(self.state.epoch):
            self.state = self.state.grown(len(self._roster.names))
            self._metadata = _MetadataBuffer(self.state)

    def _draw(self) -> DrawnStep | None:
        step = self.state.step
        work = self.state.copy()
        batch = self._job.batch
        budget = Budget(batch.global_samples or _UNLIMITED, batch.global_tokens or _UNLIMITED)
        drawn = _Drawn()
        at = self.mixer.position(float(step), work)
        first = self._weights(at, work)
        self._rest_undrawn(first)
        for part in range(SUBSTEPS if self._job.mixture.granularity == "substep" else 1):
            position = self.mixer.position(step + part / SUBSTEPS, work) if part else at
            weights = self._weights(position, work) if part else first
            too_long = self._draw_part(
                work, _part_of(budget, part, self._job.mixture), position, weights, budget, drawn
            )
            if self._stopped:
                break
        if too_long is not None and self._job.overlength == "split":
            self._draw_beginning(work, budget, *too_long, drawn)
            if not drawn.parts:
                self._draw_part(work, budget, position, weights, budget, drawn, whole_samples=True)
        short = self._stopped and budget.samples < budget.max_samples and budget.tokens < budget.max_tokens
        if not drawn.parts or (short and self._job.drop_last):
            return None
        if self._stopped:
            work.finished[:] = 1  # a stream that is resumed here has ended too
        parts = drawn.parts
        source, raw = parts[0] if len(parts) == 1 else (np.concatenate(column) for column in zip(*parts, strict=True))
        meta = raw.view(META)
        items = self._metadata.items_of(meta)
        items = _with_parts(meta, items, drawn.cuts, batch.context_length)
        draw = Draw(step, self._roster.names, source, meta, tuple(first), self.mixer.version, items)
        self._refuse_overlong(draw)
        return DrawnStep(draw, self._after(work))

    def _rest_undrawn(self, weights: Sequence[float]) -> None:
        awake = {i for i, weight in enumerate(weights) if weight > 0}
        if self._awake - awake:
            self._loaders.rest({i: self.state.cursor(i) for i in sorted(self._awake - awake)})
        self._awake = awake

    def _weights(self, position: float, work: StreamState) -> list[float]:
        """Return the weights at a step, or inside one.

        If all sources with a weight are finished, the next point of the schedule counts at which an unfinished source
        has one: a stage that runs out of samples early is followed by the next stage, and does not end the stream.
        """
        left = (work.finished == 0) & ~np.isin(np.arange(len(work.finished)), list(self._roster.removed))
        for at in self._points_from(position):
            weights = self.mixer.weights(at)
            if (np.asarray(weights) > 0)[left].any():
                break
        else:
            weights = self.mixer.weights(position)
        self._away = {i for i in self._roster.parked if weights[i] > 0}
        for i in (*self._roster.parked, *self._roster.removed):
            weights[i] = 0.0  # the other sources share its weight in proportion
        return weights

    def _draw_part(
        self,
        work: StreamState,
        part: Budget,
        position: float,
        weights: Sequence[float],
        whole: Budget,
        drawn: _Drawn,
        whole_samples: bool = False,
    ) -> tuple[int, Int64s] | None:
        """Draw until the budget of one part of the step is met; add the samples to `drawn`.

        If it ends with a sample that has too many tokens, the source of that sample and the weights are returned. With
        `whole_samples` the first sample of a step is drawn however long it is.

        `draw_more` runs on the buffered metadata until it stops for one of four reasons: the budget is FULL; all
        sources with a weight are finished (DRY); source `which` has no buffered rows left (STARVED), so loaders are
        asked for more; or source `which` has reached the end of its epoch, after which the draw continues with its next
        epoch or, if the source is finished, with new weights.
        """
        exact = integer_weights(weights, work.finished == 0)
        self._top_up(exact, part)
        while True:
            metadata = self._metadata
            supply, taken = metadata.supply, metadata.supply.taken.copy()
            pause, which, source, rows = draw_more(
                supply,
                exact,
                Tally(work.deficit, work.samples, work.tokens, work.skipped),
                part,
                by_tokens=self._job.mixture.level == "token",
                sequential=self._job.mixture.order == "sequential",
                strict=self._job.overlength == "split" and not whole_samples,
            )
            work.passed[:] += supply.taken - taken
            if len(source):
                for i in np.flatnonzero((work.start > 0) & (supply.taken > taken)).tolist():  # its sample is complete
                    at = int(np.argmax(source == i))
                    drawn.cuts[part.samples - len(source) + at] = (
                        int(work.start[i]),
                        int(metadata.meta["tokens"][rows[at]]),
                    )
                    work.start[i] = 0
                drawn.parts.append((source, metadata.meta.view(_RAW).take(rows)))
                if self._nothing_drawn:
                    self._nothing_drawn.difference_update(np.flatnonzero(np.bincount(source)).tolist())
            if pause is Pause.FULL:
                break
            if pause is Pause.DRY:
                self._refuse_to_wait(work, weights)
                self._stopped = True
                break
            if pause is Pause.STARVED:
                self._top_up(exact, part, starved=which)
                continue
            self._end_epoch(work, which, position)
            if self._stopped:
                break
            if work.finished[which]:
                weights = self._weights(position, work)
                exact = integer_weights(weights, work.finished == 0)
        whole.samples, whole.tokens = part.samples, part.tokens
        return (which, exact) if pause is Pause.FULL and which >= 0 else None

    def _draw_beginning(self, work: StreamState, budget: Budget, source: int, weights: Int64s, drawn: _Drawn) -> None:
        """Fill the step with the beginning of the sample that is too long for it; later steps draw what follows.

        It is charged to the mixture by its tokens; as a sample when its last token is drawn. Nothing is drawn where the
        step is full enough, or the sample cannot be cut here.
        """
        room, begin = budget.max_tokens - budget.tokens, int(work.start[source])
        row = self._metadata.next_row(source)
        end = last_cut(row[0], self._metadata.items_of(row.copy()), begin + room)
        if room * _FULL_ENOUGH < budget.max_tokens or end <= begin:
            return
        drawn.parts.append((np.array([source], np.int32), row.view(_RAW)))
        drawn.cuts[budget.samples] = (begin, end)
        self._nothing_drawn.discard(source)
        tokens = end - begin
        budget.samples += 1
        budget.tokens += tokens
        work.tokens[source] += tokens
        if self._job.mixture.level == "token":
            work.deficit[:] += weights * tokens
            work.deficit[source] -= SCALE * tokens
        work.start[source] = end
        self._metadata.pass_tokens(source, tokens)

    def _top_up(self, weights: Int64s, part: Budget, starved: int | None = None, *, again: bool = False) -> None:
        """Request the metadata that the budget will probably need, of all sources at once; a group may end earlier."""
        metadata = self._metadata
        expected = self._expected(weights, part)
        wanted = expected - metadata.left
        wanted[(weights <= 0) | (metadata.next[:, 0] >= self._most_epochs)] = 0
        if starved is not None or again:
            # Sources that lack many rows would starve next. A few missing rows are no reason to ask for more: the draw
            # stays within one sample of the weights.
            wanted[wanted <= 2 + expected // 8] = 0
        if starved is not None and not again:
            wanted[starved] = max(16, expected[starved])
        first = ~metadata.known & (wanted > _FIRST_ROWS)
        wanted[first] = _FIRST_ROWS
        asked = np.flatnonzero(wanted > 0).tolist()
        if asked:
            requests = [MetaRequest(i, Cursor(*metadata.next[i].tolist()), int(wanted[i])) for i in asked]
            metadata.add(self._loaders.summary_buffer(requests))  # (4) metadata of what the loaders hold
        if first.any():
            self._top_up(weights, part, starved, again=True)  # now by their lengths

    def _expected(self, weights: Int64s, part: Budget) -> Int64s:
        """Return how many more samples of each source the budget will probably take."""
        means = np.maximum(self._metadata.mean_tokens, 1.0)
        rate = weights / means if self._job.mixture.level == "token" else weights.astype(np.float64)
        rate /= max(float(rate.sum()), 1e-9)
        samples = min(part.max_samples - part.samples, (part.max_tokens - part.tokens) / max(float(rate @ means), 1.0))
        if self._job.mixture.order == "sequential":
            return np.full(len(weights), math.ceil(min(samples, 64)) + 1)
        return np.ceil(rate * samples).astype(np.int64) + 1

    def _end_epoch(self, work: StreamState, source: int, position: float) -> None:
        if source in self._nothing_drawn:
            name = self._roster.names[source]
            raise PlanError(
                f"source {name!r} has nothing to draw: all of its {int(work.passed[source])} rows are "
                f"empty, filtered out or, with overlength={self._job.overlength!r}, too long for context_length="
                f"{self._job.batch.context_length}; the draw would never end. Set its weight to 0, change overlength "
                "or correct its files."
            )
        self._nothing_drawn.add(source)
        if not work.epoch_rows[source]:
            work.epoch_rows[source] = work.passed[source]
        work.passed[source] = 0
        completed = int(work.epoch[source]) + 1
        work.epoch[source] = completed  # exact again in _after; here it counts epochs ended inside this step
        mixture = self._job.mixture
        if completed >= self._most_epochs:
            work.finished[source] = 1
            work.deficit[source] = 0
        left = set(np.flatnonzero(work.finished == 0).tolist()) - self._roster.removed
        if mixture.stopping == "first_exhausted" or not left:
            self._stopped = True
        if mixture.stopping == "all_exhausted":
            through = work.epoch > 0
            self._stopped = bool(through[self._wanted(position)].all())

    def _wanted(self, position: float) -> list[int]:
        """Return the sources that the mixture gives a weight here or later, including parked ones."""
        wanted = np.any([np.asarray(self.mixer.weights(at)) > 0 for at in self._points_from(position)], axis=0)
        return [i for i in np.flatnonzero(wanted).tolist() if i not in self._roster.removed]

    def _points_from(self, position: float) -> Iterator[float]:
        """Yield a position, then the later points of the mixture's schedule."""
        yield position
        yield from (later for later in self.mixer.mixture.positions() if later > position)

    def _refuse_to_wait(self, work: StreamState, weights: Sequence[float]) -> None:
        """Raise if the stream would end only because the remaining sources are parked or have no weight."""
        if not any(weights) and not self._away:
            raise PlanError(
                f"step {self.state.step} has nothing to draw from: the mixture gives no remaining source a weight. "
                "The run would end as if its data were used up. Give a source a weight with service.set_mixture(..)."
            )
        waiting = [i for i in sorted(self._away) if not work.finished[i]]
        if waiting:
            shown = "; ".join(
                f"{self._roster.names[i]!r} since step {self._roster.parked[i].since} ({self._roster.parked[i].why})"
                for i in waiting[:4]
            )
            raise NothingToDraw(
                f"step {self.state.step} has nothing to draw from: all sources that are left in the mixture are "
                f"parked: {shown}. The run would end without their samples. Repair them and call "
                "service.return_source(name), or give another source a weight with service.set_mixture(..)."
            )

    def _after(self, work: StreamState) -> StreamState:
        work.epoch[:], work.group[:], work.offset[:] = self._metadata.cursors().T
        # At the beginning of an epoch the state must not depend on whether its first rows were already requested.
        work.group[work.passed == 0], work.offset[work.passed == 0] = BEGIN, 0
        return dataclasses.replace(work, step=self.state.step + 1)

    def _refuse_overlong(self, draw: Draw) -> None:
        if self._job.overlength != "error":
            return
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
