"""Learning rules: DoReMi, ODM (Exp3), Skill-It, and any function of the user's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from overlord.core.spec_errors import show
from overlord.errors import PlanError, SpecError
from overlord.planning.costs import finite
from overlord.planning.learning.learner import (
    WEIGHT_ONE,
    Learner,
    SavedState,
    StepReport,
    at_least,
    between,
    fixed_point,
    normalised_prior,
    softmax,
    with_gaps,
)
from overlord.planning.learning.portable_math import Float64s, exp, log, ordered_sum, short, total

_LARGEST_LOSS = 50.0
_SMALLEST_WEIGHT = 2.0**-40
_SMALLEST_LOSS = 1e-6
_STEEPEST = 1e6
"""The most that eta and a strength of a graph may be: their product with any loss stays finite."""


class DoReMi(Learner):
    """Raises the sources with the loss furthest above a reference model's (arXiv 2305.10429).

    With score_k = max(loss_k - reference_k, 0): `log w += eta * score`, `w = softmax`, `w = (1 - eps) * w + eps / K`. A
    source that is not reported keeps its last score. A report brings `extra["reference"]`, the reference
    model's mean loss of each source (nan where missing), or `extra["excess"]`, the mean over tokens of
    max(loss - reference, 0), which is what the paper uses.

    Two deviations: with "reference" the excess is cut off at 0 for a source and not for each token; and the
    weights are what is drawn, where the paper reweights the loss. `average` is the paper's final mixture.
    """

    kind: ClassVar[str] = "doremi"

    def __init__(
        self, prior: Sequence[float] | Float64s, eta: float = 1.0, eps: float = 1e-3, *, lag: int = 16
    ) -> None:
        super().__init__(prior, lag)
        self._eta = between("eta", eta, 0.0, _STEEPEST)
        self._eps = between("eps", eps, 0.0, 1.0)
        self._now = short(self._prior)
        self._score = np.zeros(self.num_sources)
        self._sum = np.zeros(self.num_sources)

    @property
    def average(self) -> Float64s:
        """The mean of the weights over all steps that were reported."""
        return self._prior if self._version == 0 else self._sum / total(self._sum)

    def _learn(self, report: StepReport) -> Float64s | None:
        excess = self._excess(report)
        known = report.seen & ~np.isnan(excess)
        score = short(np.where(known, np.maximum(excess, 0.0), self._score))
        logits = np.where(self._active, log(np.where(self._active, self._now, 1.0)) + self._eta * score, -math.inf)
        found = (1 - self._eps) * softmax(logits) + self._eps * self._active / self._num_active
        # A weight of 0 could never grow again.
        self._now = short(np.where(self._active, np.maximum(found, _SMALLEST_WEIGHT), 0.0))
        self._score = score
        self._sum = short(self._sum + self._now)
        return self._now

    def _excess(self, report: StepReport) -> Float64s:
        for name in ("excess", "reference"):
            if name in report.extra:
                given = report.further(name)
                return given if name == "excess" else report.loss - given
        raise SpecError(
            f"the report of step {report.step} has no reference losses, without which DoReMi cannot learn. Report "
            '"reference/SOURCE" (the mean loss of the reference model) beside "loss/SOURCE"'
        )

    def _fields(self) -> dict[str, Any]:
        return {"weights": self._now.tolist(), "score": self._score.tolist(), "sum": self._sum.tolist()}

    def _restore(self, saved: SavedState) -> None:
        shape = (self.num_sources,)
        now, score = saved.floats("weights", shape, 0.0), saved.floats("score", shape, 0.0)
        self._sum = saved.floats("sum", shape, 0.0)
        self._now, self._score = now, score


class ODM(Learner):
    """Moves weight to the sources with the highest loss: online data mixing by Exp3 (arXiv 2312.02406).

    With t the number of reports and `e_t = min(1 / K, sqrt(ln K / (K t)))`: `R_k += loss_k / 10 / p_k`, where p is what
    the step was drawn with, and `w_k = (1 - K e_t) exp(e_(t-1) R_k) / sum_j exp(e_(t-1) R_j) + e_t`.
    With `smoothing` s: `R_k = s R_k + (1 - s) exp(loss_k)` and `w_k = (1 - K e_t) R_k / sum_j R_j + e_t`.

    The mixture is the prior for `warmup` reports. After that Exp3 starts from the uniform one, as e_t is 1 / K for
    the first K ln K reports: 1751 of them for 306 sources. With `floor` a source keeps at least floor times its prior.
    """

    kind: ClassVar[str] = "odm"
    remembers_weights: ClassVar[bool] = True

    def __init__(
        self,
        prior: Sequence[float] | Float64s,
        warmup: int = 0,
        update_every: int = 1,
        smoothing: float | None = None,
        floor: float = 0.0,
        *,
        lag: int = 16,
    ) -> None:
        super().__init__(prior, lag)
        self._warmup = at_least("warmup", warmup, 0)
        self._update_every = at_least("update_every", update_every, 1)
        self._smoothing = None if smoothing is None else between("smoothing", smoothing, 0.0, 1.0)
        self._floor = between("floor", floor, 0.0, 1.0)
        self._reward = np.zeros(self.num_sources)
        self._rate = 1.0 / self._num_active
        if self._warmup == 0:
            self._history = [(0, self._as_units(self._active / self._num_active))]

    def _learn(self, report: StepReport) -> Float64s | None:
        turn = self._turn
        if turn <= self._warmup:
            return None
        reward = self._rewarded(report)
        if turn % self._update_every:
            self._reward = reward
            return None
        count = self._num_active
        before = self._rate
        rate = min(1.0 / count, math.sqrt(float(log(float(count))) / (count * turn)))
        if self._smoothing is None:
            share = softmax(np.where(self._active, before * reward, -math.inf))
        else:
            whole = total(reward)
            share = reward / whole if whole > 0 else self._active / count
        self._reward = reward
        self._rate = float(short(rate))
        found = np.where(self._active, (1 - count * rate) * share + rate, 0.0)
        return self._floored(found / total(found))

    def _rewarded(self, report: StepReport) -> Float64s:
        if self._smoothing is None:
            gain = report.loss / 10.0 / np.maximum(report.drawn, _SMALLEST_WEIGHT)
            return short(np.where(report.seen, self._reward + gain, self._reward))
        # exp of a larger loss would outweigh all that was learned before, or overflow.
        now = exp(np.minimum(report.loss, _LARGEST_LOSS))
        smooth = self._smoothing * self._reward + (1 - self._smoothing) * now
        return short(np.where(report.seen, smooth, self._reward))

    def _floored(self, weights: Float64s) -> Float64s:
        return (1 - self._floor) * weights + self._floor * self._prior

    def _as_units(self, weights: Float64s) -> npt.NDArray[np.int64]:
        return fixed_point(self._floored(weights))

    def _fields(self) -> dict[str, Any]:
        return {"reward": self._reward.tolist(), "rate": self._rate}

    def _restore(self, saved: SavedState) -> None:
        reward = saved.floats("reward", (self.num_sources,), 0.0)
        self._rate = saved.number("rate")
        self._reward = reward


class SkillIt(Learner):
    """Follows a graph of skills: a source is raised by the losses of what it teaches (arXiv 2307.14430).

    `w ~ prior * exp(eta * graph @ sum of the last `window` losses)`. graph[k][j] says how much training on source k
    helps source j. An entry of the window is the mean loss over `update_every` reports; a source that is
    missing there keeps its last one.

    Args:
        prior: The weights at the start.
        graph: K x K, not negative.
        eta: How strongly losses count.
        window: Entries that are summed.
        update_every: Reports in an entry.
        metric: "loss" for the training loss; else the name in `extra` that holds each source's validation loss (nan
            where missing). Reports without it change nothing.
        normalise: Whether losses are divided by the first ones.
        lag: Steps after which a report takes effect.
    """

    kind: ClassVar[str] = "skill_it"

    def __init__(
        self,
        prior: Sequence[float] | Float64s,
        graph: npt.ArrayLike,
        eta: float = 0.2,
        window: int = 3,
        update_every: int = 1,
        metric: str = "loss",
        normalise: bool = False,
        *,
        lag: int = 16,
    ) -> None:
        super().__init__(prior, lag)
        size = self.num_sources
        self._graph = _checked_graph(graph, size)
        self._eta = between("eta", eta, 0.0, _STEEPEST)
        self._window = at_least("window", window, 1)
        self._update_every = at_least("update_every", update_every, 1)
        self._metric, self._normalise = metric, normalise
        self._entries = np.empty((0, size))
        self._first = np.full(size, math.nan)
        self._last = np.full(size, math.nan)
        self._open_sum, self._open_count, self._reports = np.zeros(size), np.zeros(size), 0

    def _learn(self, report: StepReport) -> Float64s | None:
        if self._metric == "loss":
            value, count = report.loss, np.where(report.seen, report.tokens, 0).astype(np.float64)
        elif self._metric in report.extra:
            given = report.further(self._metric)
            value, count = np.nan_to_num(given), np.where(np.isfinite(given), 1.0, 0.0)
        else:
            return None
        self._open_sum = short(self._open_sum + value * count)
        self._open_count = self._open_count + count
        self._reports += 1
        if self._reports < self._update_every or not (self._open_count.any() or len(self._entries)):
            return None
        found = short(self._open_sum / np.maximum(self._open_count, 1.0))
        self._last = np.where(self._open_count > 0, found, self._last)
        self._first = np.where(np.isnan(self._first), self._last, self._first)
        self._entries = np.concatenate([self._entries, self._last[None]])[-self._window :]
        self._open_sum, self._open_count, self._reports = np.zeros_like(found), np.zeros_like(found), 0
        return self._from_losses()

    def _from_losses(self) -> Float64s:
        # A source that was never reported counts as 0: it says nothing about those that teach it.
        losses = ordered_sum(np.nan_to_num(self._entries))
        if self._normalise:
            first = np.nan_to_num(self._first)
            # A first loss of next to nothing would make every later one infinite.
            losses = losses / np.where(first > 0, np.maximum(first, _SMALLEST_LOSS), 1.0)
        pull = ordered_sum(np.ascontiguousarray((self._graph * losses).T))
        logits = log(np.where(self._active, self._prior, 1.0)) + self._eta * pull
        return softmax(np.where(self._active, logits, -math.inf))

    def _fields(self) -> dict[str, Any]:
        return {
            "entries": [with_gaps(entry) for entry in self._entries],
            "first": with_gaps(self._first),
            "last": with_gaps(self._last),
            "open_sum": self._open_sum.tolist(),
            "open_count": self._open_count.tolist(),
            "reports": self._reports,
        }

    def _restore(self, saved: SavedState) -> None:
        size = self.num_sources
        entries = saved.floats("entries", (-1, size), gaps=True) if saved.items("entries") else np.empty((0, size))
        if len(entries) > self._window:
            raise saved.refusal("entries", f"has {len(entries)} losses, and the window is {self._window}")
        first, last = (saved.floats(name, (size,), gaps=True) for name in ("first", "last"))
        open_sum, open_count = (saved.floats(name, (size,)) for name in ("open_sum", "open_count"))
        self._reports = saved.integer("reports", 0)
        self._entries, self._first, self._last = entries, first, last
        self._open_sum, self._open_count = open_sum, open_count


def _checked_graph(graph: npt.ArrayLike, size: int) -> Float64s:
    try:
        found = np.asarray(graph, np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.empty(0)
    if found.shape != (size, size):
        raise SpecError(
            f"graph is {show(graph)}; it must be {size} x {size} numbers, row k what source k teaches, in the order of "
            "the sources, or losses would raise the wrong ones"
        )
    bad = np.argwhere(~((found >= 0) & (found <= _STEEPEST)))
    if len(bad):
        row, column = bad[0].tolist()
        raise SpecError(
            f"graph[{row}][{column}] is {found[row, column]}; the weights would not stay finite. Give numbers from 0 "
            f"to {_STEEPEST:g}"
        )
    return found


MixingFunction = Callable[[int, dict[str, float]], Mapping[str, float] | Sequence[float] | None]
"""What a user writes: (step, metrics in force) -> weight of each source; None keeps the prior."""


class FunctionRule(Learner):
    """Calls a function of the user for the weights of every step.

    The function gets the step and the metrics in force, as reported ("loss/web": 2.1), empty before the first. It must
    depend on nothing else, or a resumed run would draw other samples.

    Example:
        >>> def by_loss(step, metrics):
        ...     return {"web": 1, "code": metrics.get("loss/code", 1)}
        >>> rule = FunctionRule(by_loss, [1, 1], ["web", "code"])
        >>> rule.observe_metrics(0, {"loss/code": 3.0})
        >>> rule.weights(16).tolist()
        [0.25, 0.75]
    """

    kind: ClassVar[str] = "function"

    def __init__(
        self, fn: MixingFunction, prior: Sequence[float] | Float64s, names: Sequence[str], *, lag: int = 16
    ) -> None:
        super().__init__(prior, lag)
        if len(names) != self.num_sources or len(set(names)) != len(names):
            raise SpecError(f"names are {list(names)}; there must be one for each of {self.num_sources} sources")
        if not callable(cast("object", fn)):
            raise SpecError(f"fn is {show(fn)}, not a function; there would be no weights. Give fn(step, metrics)")
        self._fn = fn
        self._title = f"the mixing function {getattr(fn, '__qualname__', type(fn).__qualname__)}"
        self._names = tuple(names)
        self._metrics: dict[str, float] = {}

    def weights(self, step: int) -> Float64s:
        """Return what the function says for a step, with sum 1."""
        try:
            found = self._fn(step, dict(self._metrics))
        except (Exception, SystemExit) as error:  # code of the user may raise anything
            raise PlanError(
                f"{self._title} failed at step {step} with {type(error).__name__}: {error}. It is called with "
                "the step and a dictionary of the metrics in force, empty before the first"
            ) from error
        if found is None:
            return super().weights(step)
        weights = self._in_order(step, found)
        return fixed_point(normalised_prior(weights, f"{self._title} gave at step {step}")) / WEIGHT_ONE

    def observe_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Put a step's metrics into force; a step that is not after the last one is ignored."""
        if step <= self._last_step:
            return
        for name, value in metrics.items():
            if finite(value) is None:
                raise SpecError(
                    f"the metric {name!r} of step {step} is {show(value)}; a mixture cannot be made of it. Report "
                    "finite numbers"
                )
        self._metrics = {str(name): float(value) for name, value in metrics.items()}
        self._advance(step, None)

    def _learn(self, report: StepReport) -> Float64s | None:
        values = {"loss": np.where(report.tokens > 0, report.loss, math.nan), **report.extra}
        self._metrics = {
            f"{metric}/{name}": float(value)
            for metric, column in values.items()
            for name, value in zip(self._names, np.asarray(column, np.float64).tolist(), strict=True)
            if math.isfinite(value)
        }
        return None

    def _in_order(self, step: int, found: Mapping[str, float] | Sequence[float]) -> list[float]:
        if isinstance(found, Mapping):
            unknown = sorted(set(found) - set(self._names), key=str)
            if unknown:
                raise SpecError(
                    f"{self._title} gave {unknown[0]!r} a weight at step {step}, but there is no such source. "
                    f"The sources are {', '.join(self._names[:8])}{', ...' if len(self._names) > 8 else ''}"
                )
            found = [found.get(name, 0.0) for name in self._names]
        try:
            given = list(found)
            weights = [] if any(isinstance(weight, str | bytes) for weight in given) else [float(w) for w in given]
        except Exception:  # objects of the user may raise anything
            weights = []
        if isinstance(found, str | bytes) or len(weights) != self.num_sources:
            raise SpecError(
                f"{self._title} returned {show(found)} at step {step}; there are {self.num_sources} sources. Return "
                "a mapping of names to weights, or one weight for each source in order"
            )
        return weights

    def _fields(self) -> dict[str, Any]:
        return {"metrics": dict(self._metrics)}

    def _restore(self, saved: SavedState) -> None:
        self._metrics = saved.numbers("metrics")
