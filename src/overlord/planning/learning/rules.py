"""Mixing that learns from losses: DoReMi, ODM (Exp3), Skill-It, ADO, any function of the user's; and rules by name."""

from __future__ import annotations

import inspect
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
    Float64s,
    Learner,
    SavedState,
    StepReport,
    at_least,
    between,
    exp,
    fixed_point,
    log,
    normalised_prior,
    ordered_sum,
    short,
    softmax,
    total,
    with_gaps,
)

_LARGEST_LOSS = 50.0
_SMALLEST_WEIGHT = 2.0**-40
_SMALLEST_LOSS = 1e-6
_LOSS_DIGITS = 5
_FIRST_GAP = 1.05
_LARGEST_LAW = 300.0
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
        smoothing: float | None = None,
        floor: float = 0.0,
        *,
        lag: int = 16,
    ) -> None:
        super().__init__(prior, lag)
        self._warmup = at_least("warmup", warmup, 0)
        self._smoothing = None if smoothing is None else between("smoothing", smoothing, 0.0, 1.0)
        self._floor = between("floor", floor, 0.0, 1.0)
        self._reward = np.zeros(self.num_sources)
        self._rate = 1.0 / self._num_active
        if self._warmup == 0:
            self._history = [(0, fixed_point(self._floored(self._active / self._num_active)))]

    def _learn(self, report: StepReport) -> Float64s | None:
        turn = self._turn
        if turn <= self._warmup:
            return None
        reward = self._rewarded(report)
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


class ADO(Learner):
    """Gives weight to the sources with the loss that still falls fastest with more data (arXiv 2410.11820).

    For each source a law L(n) = exp(e) + exp(a) / n^alpha is fitted to its losses every `refit_every` reports,
    from `first_fit` on. Until then the mixture is the prior mu. With every report, the t-th:

        slope_k = max(alpha_k, 0.05) * (L_k(n) - exp(e_k)) / n
        rho_k ~ mu_k * sqrt(h_k) * slope_k, at least `clip`
        p = 0.9 * pbar + 0.1 * rho;  pbar += (rho - pbar) / t;  h = 0.9 * h + 0.1 * share of tokens

    What differs from the authors' code, besides the fit (see `fit_power_laws`):

    - n counts tokens of all sources (their `use_same_step_size`, in tokens for samples), as it does by default there.
    - The history is bounded: mean losses at no more than `points` places, evenly spaced in log n, in place of all steps
      under a Savitzky-Golay filter. A place counts by the reports in it. Places without a loss of a source are left
      out of its fit, where the authors repeat its last loss.
    - A source that cannot be fitted yet has the mean slope of the others.
    - `clip` is at most 1 / (2 K): at 306 sources their 0.01 each would leave nothing to learn.

    Args:
        prior: mu, such as the natural sizes of the sources.
        refit_every: Reports between fits.
        first_fit: The report of the first fit.
        ignore: Reports at the start that are not fitted (another law holds there); half of first_fit by default.
        clip: Least share of a source in rho.
        points: Places of the history; even, at least 8.
        lag: Steps after which a report takes effect.
    """

    kind: ClassVar[str] = "ado"

    def __init__(
        self,
        prior: Sequence[float] | Float64s,
        refit_every: int = 1000,
        first_fit: int = 1000,
        ignore: int | None = None,
        clip: float = 0.01,
        points: int = 32,
        *,
        lag: int = 16,
    ) -> None:
        super().__init__(prior, lag)
        size = self.num_sources
        self._refit_every = at_least("refit_every", refit_every, 1)
        self._first_fit = at_least("first_fit", first_fit, 1)
        self._ignore = first_fit // 2 if ignore is None else at_least("ignore", ignore, 0)
        self._clip = min(between("clip", clip, 0.0, 1.0), 0.5 / self._num_active)
        self._most = at_least("points", points, 8) // 2 * 2
        self._tokens = 0
        self._gap = _FIRST_GAP
        self._edge = 0.0
        self._at = np.empty(0)
        self._reports = np.empty(0)
        self._losses = np.empty((0, size))
        self._open = np.zeros((2, size))
        self._open_place = np.zeros(2)
        self._laws: Float64s | None = None
        self._mean = short(self._prior)
        self._recent = short(self._prior)

    @property
    def laws(self) -> Float64s | None:
        """The fitted (e, a, alpha) of each source, nan where it could not be fitted; None before the first fit."""
        return None if self._laws is None else self._laws.copy()

    def _learn(self, report: StepReport) -> Float64s | None:
        counts = np.where(report.seen, report.tokens, 0).astype(np.float64)
        drawn = total(counts)
        self._tokens += int(report.tokens.sum())
        if drawn > 0:
            self._recent = short(0.9 * self._recent + 0.1 * counts / drawn)
            if self._turn > self._ignore:
                self._remember(report.loss * counts, counts)
        due = self._turn >= self._first_fit and (self._turn - self._first_fit) % self._refit_every == 0
        if due and len(self._at) >= MIN_POINTS:
            self._laws = fit_power_laws(self._at, self._losses, self._reports)
        if self._laws is None or np.isnan(self._laws).all():
            return None
        rho = self._preferred(self._laws)
        found = 0.9 * self._mean + 0.1 * rho
        self._mean = short(self._mean + (rho - self._mean) / self._turn)
        return found / total(found)

    def _preferred(self, laws: Float64s) -> Float64s:
        known = ~np.isnan(laws[:, 2])
        _, a, alpha = np.where(known[:, None], laws, 0.0).T
        # n counts the tokens of all sources, so 1 / n is the same for all slopes and drops out.
        slope = np.maximum(alpha, 0.05) * exp(a - alpha * log(float(self._tokens)))
        slope = np.where(known, slope, total(slope[known]) / int(known.sum()))
        rho = self._prior * np.sqrt(self._recent) * slope
        whole = total(rho)
        rho = rho / whole if whole > 0 else self._prior
        rho = np.where(self._active, np.maximum(rho, self._clip), 0.0)
        return rho / total(rho)

    def _remember(self, loss_sum: Float64s, counts: Float64s) -> None:
        self._open = short(self._open + np.stack([loss_sum, counts]))
        self._open_place = self._open_place + np.array([float(self._tokens), 1.0])
        if self._edge == 0.0:
            self._edge = self._tokens * self._gap
        if self._tokens < self._edge:
            return
        found = np.maximum(self._open[0] / np.maximum(self._open[1], 1.0), _SMALLEST_LOSS)
        mean = np.where(self._open[1] > 0, short(found, _LOSS_DIGITS), math.nan)
        self._losses = np.concatenate([self._losses, mean[None]])
        self._at = np.append(self._at, short(self._open_place[0] / self._open_place[1]))
        self._reports = np.append(self._reports, self._open_place[1])
        self._open, self._open_place = np.zeros_like(self._open), np.zeros(2)
        if len(self._at) == self._most:
            self._thin_out()
        self._edge = float(short(self._tokens * self._gap))

    def _thin_out(self) -> None:
        """Merge neighbouring places: half of them remain, at twice the distance in log n."""
        first, second = self._reports[0::2], self._reports[1::2]
        both = first + second
        self._at = short((self._at[0::2] * first + self._at[1::2] * second) / both)
        left, right = self._losses[0::2], self._losses[1::2]
        mean = (left * first[:, None] + right * second[:, None]) / both[:, None]
        self._losses = short(np.where(np.isnan(left), right, np.where(np.isnan(right), left, mean)), _LOSS_DIGITS)
        self._reports = both
        self._gap = self._gap * self._gap

    def _fields(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "gap": self._gap,
            "edge": self._edge,
            "at": self._at.tolist(),
            "reports": self._reports.tolist(),
            "losses": [with_gaps(row) for row in self._losses],
            "open": self._open.tolist(),
            "open_place": self._open_place.tolist(),
            "laws": None if self._laws is None else [with_gaps(row) for row in self._laws],
            "mean": self._mean.tolist(),
            "recent": self._recent.tolist(),
        }

    def _restore(self, saved: SavedState) -> None:
        size = self.num_sources
        at = saved.floats("at", (-1,), 1.0)
        reports = saved.floats("reports", (len(at),), 1.0)
        losses = saved.floats("losses", (len(at), size), gaps=True)
        if len(at) >= self._most:
            raise saved.refusal("at", f"has {len(at)} places, and at most {self._most - 1} are kept")
        if (losses <= 0).any() or (np.diff(at) <= 0).any():
            raise saved.refusal("losses", "are not positive losses at growing places")
        laws = None if saved.field("laws") is None else saved.floats("laws", (size, 3), gaps=True)
        if laws is not None and (np.abs(laws) > _LARGEST_LAW).any():
            raise saved.refusal("laws", "have a value that is not possible")
        opened, place = saved.floats("open", (2, size), 0.0), saved.floats("open_place", (2,), 0.0)
        mean, recent = saved.floats("mean", (size,), 0.0), saved.floats("recent", (size,), 0.0)
        gap, edge = saved.number("gap", 1.0), saved.number("edge")
        self._tokens = saved.integer("tokens", 0)
        self._at, self._reports, self._losses, self._laws = at, reports, losses, laws
        self._open, self._open_place = opened, place
        self._mean, self._recent, self._gap, self._edge = mean, recent, gap, edge


# Fits of L(n) = exp(e) + exp(a) / n^alpha to losses, for many sources at once, with the same bits on every machine.


MIN_POINTS = 4
"""Losses that a fit needs: the three constants fit any three losses exactly."""
_HUBER = 1e-3
_LEAST_ALPHA, _MOST_ALPHA = 0.01, 0.8
_ALPHAS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_FLOORS = (0.02, 0.2, 0.4, 0.55, 0.7, 0.8, 0.87, 0.92, 0.96, 0.99)
_REFINEMENTS = 80


def fit_power_laws(at: Float64s, losses: Float64s, weights: Float64s) -> Float64s:
    """Return (e, a, alpha) for every source; nan for one with fewer than MIN_POINTS losses.

    Minimises the sum of Huber losses (1e-3) of log residuals, as ADO does. ADO runs L-BFGS from 512 starts; here
    the best of a fixed grid over (alpha, share of the smallest loss that no data removes) is refined by a fixed
    number of damped Gauss-Newton steps. alpha stays within 0.01 and 0.8, much as in ADO. ADO also keeps e above 0.5 and
    a below 6.5; that suits one kind of loss and count, so here exp(e) only stays below the largest loss. `at` is the n
    of each place, `weights` how much it counts; losses [place, source] are positive, nan where a source has none.

    Example:
        >>> n = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 64.0])
        >>> fit_power_laws(n, (1.5 + 2.0 / n**0.5)[:, None], np.ones(6))[:, 2].round(3).tolist()
        [0.5]
    """
    present = ~np.isnan(losses)
    fitted = present.sum(axis=0) >= MIN_POINTS
    target = log(np.where(present, losses, 1.0))
    weight = np.where(present, weights[:, None], 0.0)
    logs = log(at)
    # n is taken relative to its geometric mean: that decouples a and alpha.
    middle = float(ordered_sum(logs) / len(logs))
    scaled = (logs - middle)[:, None]
    smallest = np.where(present, losses, np.inf).min(axis=0, initial=np.inf)
    largest = np.where(present, losses, 0.0).max(axis=0, initial=0.0)
    smallest, largest = np.where(fitted, smallest, 1.0), np.where(fitted, largest, 1.0)
    start = _best_of_grid(scaled, target, weight, np.where(present, losses, 0.0), smallest)
    e, a, alpha = _refined(start, scaled, target, weight, log(largest))
    found = np.stack([e, a + alpha * middle, alpha], axis=1)
    return np.where(fitted[:, None], short(found, 10), np.nan)


def _best_of_grid(
    scaled: Float64s, target: Float64s, weight: Float64s, losses: Float64s, smallest: Float64s
) -> Float64s:
    best = np.zeros((3, losses.shape[1]))
    least = np.full(losses.shape[1], np.inf)
    for alpha in _ALPHAS:
        x = exp(-alpha * scaled)
        norm = np.maximum(ordered_sum(weight * x * x), 1e-300)
        for floor in _FLOORS:
            rest = floor * smallest
            # For given alpha and e the law is linear in exp(a).
            factor = np.maximum(ordered_sum(weight * x * (losses - rest)) / norm, 1e-6 * smallest)
            params = np.stack([log(rest), log(factor), np.full_like(rest, alpha)])
            error = _error(target - log(rest + factor * x), weight)
            better = error < least
            best, least = np.where(better, params, best), np.where(better, error, least)
    return best


def _refined(params: Float64s, scaled: Float64s, target: Float64s, weight: Float64s, most: Float64s) -> Float64s:
    damping = np.full(params.shape[1], 1e-3)
    residual, slopes = _residual(params, scaled, target)
    error = _error(residual, weight)
    for _ in range(_REFINEMENTS):
        # Iteratively reweighted least squares: the Huber loss is a square with less weight on large residuals.
        pull = weight * np.minimum(1.0, _HUBER / np.maximum(np.abs(residual), 1e-300))
        tried = params + _step(slopes, residual, pull, damping)
        tried = np.stack([np.minimum(tried[0], most), tried[1], np.clip(tried[2], _LEAST_ALPHA, _MOST_ALPHA)])
        # A term far below the other has vanished; lowering it further changes nothing.
        tried[:2] = np.maximum(tried[:2], most - 14.0)
        new_residual, new_slopes = _residual(tried, scaled, target)
        new_error = _error(new_residual, weight)
        better = new_error < error
        params, error = np.where(better, tried, params), np.where(better, new_error, error)
        residual = np.where(better, new_residual, residual)
        slopes = np.where(better, new_slopes, slopes)
        damping = np.clip(np.where(better, damping * 0.25, damping * 8.0), 1e-12, 1e12)
    return params


def _residual(params: Float64s, scaled: Float64s, target: Float64s) -> tuple[Float64s, Float64s]:
    """Return log residuals [place, source] and their derivatives [3, place, source]."""
    e, a, alpha = params
    floor, rest = exp(e), exp(a - alpha * scaled)
    both = floor + rest
    part = rest / both
    return target - log(both), np.stack([part - 1.0, -part, scaled * part])


def _step(slopes: Float64s, residual: Float64s, pull: Float64s, damping: Float64s) -> Float64s:
    """Solve the damped 3 x 3 normal equations of every source by Cramer's rule."""
    gradient = [ordered_sum(pull * slopes[i] * residual) for i in range(3)]
    h = [[ordered_sum(pull * slopes[i] * slopes[j]) for j in range(3)] for i in range(3)]
    for i in range(3):
        h[i][i] = h[i][i] * (1.0 + damping) + 1e-300
    minors = [
        [
            h[(i + 1) % 3][(j + 1) % 3] * h[(i + 2) % 3][(j + 2) % 3]
            - h[(i + 1) % 3][(j + 2) % 3] * h[(i + 2) % 3][(j + 1) % 3]
            for j in range(3)
        ]
        for i in range(3)
    ]
    whole = h[0][0] * minors[0][0] + h[0][1] * minors[0][1] + h[0][2] * minors[0][2]
    solved = [-(minors[0][j] * gradient[0] + minors[1][j] * gradient[1] + minors[2][j] * gradient[2]) for j in range(3)]
    safe = np.abs(whole) > 1e-290
    return np.stack([np.clip(np.where(safe, s / np.where(safe, whole, 1.0), 0.0), -2.0, 2.0) for s in solved])


def _error(residual: Float64s, weight: Float64s) -> Float64s:
    size = np.abs(residual)
    return ordered_sum(weight * np.where(size > _HUBER, _HUBER * (size - 0.5 * _HUBER), 0.5 * size * size))


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


RULES: Mapping[str, type[DoReMi | ODM | ADO | SkillIt | FunctionRule]] = {
    rule.kind: rule for rule in (DoReMi, ODM, ADO, SkillIt, FunctionRule)
}
"""Every rule by its name."""


def make_rule(
    kind: str, names: Sequence[str], prior: Mapping[str, float], options: Mapping[str, Any], lag: int
) -> Learner:
    """Return a rule by its name, for sources in the order of all arrays.

    A source that the prior does not name has weight 0; an empty prior makes all equal. A graph in the options may map
    names to names to numbers. A report takes effect after `lag` steps.

    Example:
        >>> rule = make_rule("odm", ["web", "code"], {"web": 3, "code": 1}, {"warmup": 100}, lag=16)
        >>> rule.weights(0).tolist()
        [0.75, 0.25]
    """
    if not isinstance(cast("object", kind), str) or kind not in RULES:
        raise SpecError(f"there is no learning rule {kind!r}. Choose one of {', '.join(RULES)}")
    unknown = sorted(set(prior) - set(names))
    if unknown:
        raise SpecError(
            f"the prior of {kind} names {unknown[0]!r}, which is no source. The sources are {list(names)[:8]}"
        )
    weights = [prior.get(name, 0.0) for name in names] if prior else [1.0] * len(names)
    rule = RULES[kind]
    given = dict(options)
    known = [name for name in inspect.signature(rule).parameters if name not in ("prior", "names", "lag")]
    for name in given:
        if name not in known:
            raise SpecError(
                f"{kind} has no option {name!r}, so it would do nothing. Its options are {', '.join(known)}"
            )
    for name in ("graph", "fn"):
        if name in known and name not in given:
            raise SpecError(f"{kind} needs the option {name!r}; without it the rule cannot learn. Give it")
    if isinstance(given.get("graph"), Mapping):
        given["graph"] = _as_table(given["graph"], names)
    if rule is FunctionRule:
        given["names"] = names
    return rule(prior=weights, lag=lag, **given)


def _as_table(graph: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> list[list[float]]:
    for teacher, row in graph.items():
        if not isinstance(cast("object", row), Mapping):
            raise SpecError(
                f"row {teacher!r} of the graph is {row!r}, not a mapping of sources to numbers. Write it as in "
                "{'math': {'code': 0.4}}"
            )
    for name in (*graph, *(taught for row in graph.values() for taught in row)):
        if name not in names:
            raise SpecError(
                f"the graph of skill_it names {name!r}, which is no source. The sources are {list(names)[:8]}"
            )
    return [[graph.get(teacher, {}).get(taught, 0.0) for taught in names] for teacher in names]
