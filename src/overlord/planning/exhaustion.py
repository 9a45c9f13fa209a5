"""When sources will be read again, or read up: a forecast of the draw from the mixture, the batch and the rows.

    Course           what of a job decides how fast its sources are drawn
    SourceSize       what a source has: rows, how many of them are drawn, and their length
    SourceForecast   when epochs of a source begin, and when it is read up
    forecast         the forecast of all sources

How it is computed: the draw keeps every source within one sample of its share (see `drawing`), so what is drawn of a
source by a step is the sum of its shares over the steps before, up to one sample. The forecast adds them up block by
block. In a block the weights are constant: it ends where the schedule changes, where a source leaves the mixture and
others take its share, and where a count that the weights follow has moved. Nothing is drawn, and the cost does not
depend on the number of steps.

By samples, with a batch of samples and rows that are counted, the steps are those of the run, up to the rounding of
one sample. Where lengths or filters decide how many samples a step has, they are as good as what was measured of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from overlord.job.mixture_specs import Mixture
from overlord.job.specs import Batch
from overlord.planning.learning.repetition import Repetition

Floats = npt.NDArray[np.float64]

EPOCHS = (2, 4, 16)
"""Epochs whose first step is forecast: up to the fourth, repeated data is worth about as much as new data, and beyond
the sixteenth little (Muennighoff et al. 2023)."""
PROJECTED_STEPS = 10_000
"""Steps after which passes are counted, for a job without `max_steps`."""
MOST_STEPS = 1_000_000
"""No forecast goes further, for a job without `max_steps`."""
_BLOCKS = 512
"""Blocks of a straight line between two points of a schedule."""
_MOST_BLOCKS = 200_000
_REPEATED, _LATER = 0.02, 0.002
"""Where weights follow repetitions, a block ends when these have grown by such a part of the constant that they are
divided by, and not before the run has grown by such a part of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What of a job decides how fast its sources are drawn."""

    mixture: Mixture
    batch: Batch
    names: Sequence[str]
    base: Mapping[str, float]
    """The weights that stand with the sources, for a mixture that has none."""
    filled: float = 1.0
    """Share of `global_tokens` that a step really has: the sample that is too long for the rest stays for the next."""
    constant: Sequence[float] | None = None
    """Weights in the place of the mixture's, where reports decide those."""


@dataclass(frozen=True, slots=True)
class SourceSize:
    """What a source has."""

    rows: float | None
    """Rows of one epoch; None while that is not known."""
    tokens: float | None = None
    """Mean tokens of a drawn sample; None for the mean of the other sources."""
    drawn: float = 1.0
    """Share of the rows that are drawn; the others are filtered out or dropped."""
    exact: bool = True
    """Whether the rows were counted, and not estimated."""


@dataclass(slots=True)
class SourceForecast:
    """When epochs of a source begin. Steps are counted from 0."""

    name: str
    begins: dict[int, int] = field(default_factory=dict[int, int])
    """Number of an epoch (2, 4 or 16) to the step with its first row; epochs that no step reaches are left out."""
    read_up: int | None = None
    """The step with the last row of a source that leaves the mixture, or ends the stream."""
    epochs: float | None = None
    """Passes over it after the steps that were asked for; None where its rows are not known."""
    exact: bool = True
    """Whether the steps follow from counts alone; else mean lengths, filters or estimated rows are in them."""


def forecast(
    course: Course, sizes: Sequence[SourceSize], *, steps: int, most_steps: int | None = None
) -> list[SourceForecast]:
    """Return when the epochs of each source begin, from the first step of a run.

    Args:
        course: The mixture, the batch and the names.
        sizes: What each source has.
        steps: After how many steps the passes over each source are counted.
        most_steps: Steps of the run, which the forecast does not go beyond.

    Example:
        >>> course = Course(mixture=Mixture({"web": 3, "math": 1}), batch=Batch(64, global_samples=8),
        ...                 names=["web", "math"], base={})
        >>> web, math = forecast(course, [SourceSize(9000), SourceSize(300)], steps=1000)
        >>> web.begins[2], math.begins, round(math.epochs, 2)
        (1500, {2: 150, 4: 450, 16: 2250}, 6.67)
    """
    run = _Run(course, sizes, most_steps or max(MOST_STEPS, steps), steps)
    run.go()
    batch = course.batch
    counted = batch.global_samples is not None and batch.global_tokens is None and course.mixture.level == "sample"
    for number, source in enumerate(run.sources):
        source.exact = counted and course.constant is None and run.is_counted(number)
    return run.sources


class _Run:
    """The state of a forecast: samples drawn of each source after a number of steps, both with fractions."""

    def __init__(self, course: Course, sizes: Sequence[SourceSize], limit: int, horizon: int) -> None:
        self._course = course
        self._mixture, self._names = course.mixture, list(course.names)
        self._points = course.mixture.positions()
        self._limit, self._horizon = limit, min(horizon, limit)
        self._sizes = sizes
        self._rows = np.array([math.inf if size.rows is None else max(size.rows * size.drawn, 1.0) for size in sizes])
        lengths = [size.tokens for size in sizes if size.tokens]
        usual = float(np.mean(lengths)) if lengths else 1.0
        self._tokens = np.array([size.tokens or usual for size in sizes])
        self._most = 1.0 if self._mixture.reads_once else float(self._mixture.max_repetition or math.inf)
        learn = self._mixture.learn
        self._repetition = None if learn is None or learn.follows_reports else Repetition(**learn.options())
        self._time = 0.0
        self._drawn = np.zeros(len(sizes))
        self._finished = np.zeros(len(sizes), np.bool_)
        self._ended = False
        self._counted = False
        self.sources = [SourceForecast(name) for name in self._names]

    def go(self) -> None:
        """Advance block by block until nothing more can be said."""
        for _ in range(_MOST_BLOCKS):
            if self._ended or self._time >= self._limit or (self._counted and not self._awaited()):
                break
            shares = self._shares(self._place(), self._drawn)
            if shares is None:
                break
            block = self._block(shares)
            self._advance(self._middle(shares, block), block)
        if not self._counted:
            self._count_epochs()

    def is_counted(self, number: int) -> bool:
        """Whether the rows that decide when epochs of a source begin are counted, and none of them is filtered out."""
        # Other sources matter where they leave the mixture, or have fewer samples the more often they are repeated.
        others = math.isfinite(self._most) or self._repetition is not None or self._mixture.unit != "step"
        sizes = self._sizes if others else [self._sizes[number]]
        return all(size.rows is not None and size.exact and size.drawn == 1.0 for size in sizes)

    def _awaited(self) -> bool:
        """Whether the beginning of an epoch is still ahead."""
        ahead = self._drawn < (min(EPOCHS[-1] - 1, self._most)) * self._rows + 1
        return bool((ahead & ~self._finished & np.isfinite(self._rows)).any())

    # Shares.

    def _place(self) -> float:
        """Return when the schedule is looked at: at the beginning of the step, unless it changes inside steps."""
        return self._time if self._mixture.granularity == "substep" else float(math.floor(self._time + 1e-9))

    def _epochs(self, drawn: Floats) -> Floats:
        return drawn / self._rows

    def _shares(self, time: float, drawn: Floats) -> Floats | None:
        """Return the share of samples of each source; None where no source is left to draw from."""
        left = ~self._finished
        position = self._position(time, drawn)
        weights = self._weights(position, drawn)
        if not (weights[left] > 0).any():
            # As in the draw: the next point of the schedule counts at which a source that is left has a weight.
            later = (self._weights(at, drawn) for at in self._points if at > position)
            weights = next((there for there in later if (there[left] > 0).any()), weights)
        weights = np.where(left, weights, 0.0)
        if not weights.any():
            return None
        if self._mixture.order == "sequential":
            weights = np.where(np.arange(len(weights)) == np.flatnonzero(weights)[0], 1.0, 0.0)
        weights = weights / weights.max()
        if self._mixture.level == "token":
            weights = weights / self._tokens
        return weights / weights.sum()

    def _position(self, time: float, drawn: Floats) -> float:
        """Return where the schedule is at a time."""
        if self._mixture.unit == "step":
            return time
        epochs = [int(n) for n in np.floor(self._epochs(drawn) + 1e-9)]
        return self._mixture.position(time, self._names, epochs, self._finished.tolist(), self._course.base)

    def _weights(self, position: float, drawn: Floats) -> Floats:
        if self._course.constant is not None:
            return np.asarray(self._course.constant, np.float64)
        weights = self._mixture.weights_at(position, self._names, self._course.base)
        if self._repetition is not None:
            self._repetition.count(np.maximum(self._epochs(drawn) - 1.0, 0.0), ~self._finished)
            weights = self._repetition.weights(weights)
        return np.asarray(weights, np.float64)

    def _rates(self, shares: Floats) -> Floats:
        """Return the samples of each source in a step."""
        batch, samples = self._course.batch, math.inf
        if batch.global_samples is not None:
            samples = float(batch.global_samples)
        if batch.global_tokens is not None:
            samples = min(samples, batch.global_tokens * self._course.filled / float(shares @ self._tokens))
        return shares * samples

    # Blocks.

    def _block(self, shares: Floats) -> float:
        """Return for how many steps the weights stay, at most: up to the next point at which they change."""
        time, place, ends = self._time, self._place(), [float(self._limit)]
        if not self._counted:
            ends.append(float(self._horizon))
        ahead = next((at for at in self._points if at > place), None) if self._mixture.unit == "step" else None
        if ahead is not None:
            # A point inside a step counts from the next step on, unless the schedule is looked at inside steps.
            ends.append(ahead if self._mixture.granularity == "substep" else math.ceil(ahead))
            if self._mixture.schedule == "linear":
                before = max(at for at in self._points if at <= place)
                ends.append(math.floor(time) + max(1.0, (ahead - before) // _BLOCKS))
        rates = self._rates(shares)
        if self._repetition is not None:
            passes = np.where(self._drawn >= self._rows, rates / self._rows, 0.0)
            fastest = float(passes.max(initial=0.0))
            if fastest > 0:
                ends.append(time + max(_REPEATED * self._repetition.decay_epochs / fastest, _LATER * time))
        drawn, following = rates > 0, self._next_epochs()
        for border in self._borders():
            ends += (time + (border[drawn] - self._drawn[drawn]) / rates[drawn]).tolist()
        if following is not None:
            ended = time + (following[drawn] - self._drawn[drawn]) / rates[drawn]
            # An epoch that ends inside a step counts from the next step on.
            ends += (ended if self._mixture.granularity == "substep" else np.ceil(ended - 1e-9)).tolist()
        return min(end for end in ends if end > time) - time

    def _borders(self) -> list[Floats]:
        """Return counts of samples of each source at which weights change: ends of epochs that change them at once."""
        borders: list[Floats] = []
        if math.isfinite(self._most):
            borders.append(np.where(self._finished, math.inf, self._most * self._rows))
        if self._mixture.stopping == "all_exhausted" or self._repetition is not None:
            borders.append(np.where(self._drawn < self._rows, self._rows, math.inf))
        return borders

    def _next_epochs(self) -> Floats | None:
        """Return the count at which the next epoch of each source begins, where the schedule follows epochs."""
        if self._mixture.unit == "step" or self._position(0.0, self._drawn) >= self._points[-1]:
            return None
        return (np.floor(self._epochs(self._drawn) + 1e-9) + 1.0) * self._rows

    def _middle(self, shares: Floats, block: float) -> Floats:
        """Return the shares in the middle of a block, where they move inside it."""
        linear = self._mixture.schedule == "linear" and self._mixture.unit == "step"
        if self._repetition is None and not linear:
            return shares
        at, drawn = self._place(), self._drawn + self._rates(shares) * block / 2
        if linear and self._mixture.granularity == "substep":
            at += block / 2
        elif linear and block > 1:
            at += (block - 1) / 2  # steps hold the weights of their beginnings
        middle = self._shares(at, drawn)
        return shares if middle is None else middle

    def _advance(self, shares: Floats, block: float) -> None:
        """Draw for a block of steps; note which epochs begin in it, and which sources are read up."""
        rates = self._rates(shares)
        after = self._drawn + rates * block
        for number in np.flatnonzero((rates > 0) & np.isfinite(self._rows)).tolist():
            self._note(number, float(after[number]), float(rates[number]), float(shares[number]))
        self._drawn, self._time = after, self._time + block
        reached = self._drawn * (1 + 1e-12) + 1e-9  # a border that a block ends at is reached, whatever was rounded
        self._finished |= reached >= self._most * self._rows
        if not self._counted and self._time >= self._horizon - 1e-9:
            self._count_epochs()
        if self._mixture.stopping == "first_exhausted" and self._finished.any():
            self._ended = True
        if self._mixture.stopping == "all_exhausted":
            position = self._position(self._place(), self._drawn)
            later = [position, *(at for at in self._points if at > position)]
            weighted = np.any([self._weights(at, self._drawn) > 0 for at in later], axis=0)
            self._ended = bool((reached >= self._rows)[weighted].all())

    def _note(self, number: int, after: float, rate: float, share: float) -> None:
        rows, before, source = float(self._rows[number]), float(self._drawn[number]), self.sources[number]
        # The draw takes the n-th sample of a source when its share has paid for n samples and for all of the next but
        # what the source itself gets of the samples meanwhile.
        late = 1.0 - share

        def step_of(sample: float) -> int:
            return math.floor(self._time + max(sample + late - before, 0.0) / rate + 1e-9)

        for epoch in EPOCHS:
            first = (epoch - 1) * rows
            # A sample that is reached at the end of the block is drawn in the next one, if it still has a weight there.
            if epoch <= self._most and epoch not in source.begins and after > first + late + 1e-6:
                source.begins[epoch] = step_of(first)
        last = self._most * rows - 1.0
        if math.isfinite(last) and source.read_up is None and after >= last + late - 1e-9:
            source.read_up = step_of(last)

    def _count_epochs(self) -> None:
        """Note the passes over each source so far."""
        self._counted = True
        for source, epochs, rows in zip(
            self.sources, self._epochs(self._drawn).tolist(), self._rows.tolist(), strict=True
        ):
            source.epochs = epochs if math.isfinite(rows) else None
