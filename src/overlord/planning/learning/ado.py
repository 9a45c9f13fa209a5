"""ADO: adaptive data optimisation, a mixture that follows fitted scaling laws (arXiv 2410.11820)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from overlord.planning.learning.learner import Learner, SavedState, StepReport, at_least, between, with_gaps
from overlord.planning.learning.portable_math import Float64s, exp, log, ordered_sum, short, total

_LOSS_DIGITS = 5
_FIRST_GAP = 1.05
_SMALLEST_LOSS = 1e-6
_LARGEST_LAW = 300.0


class ADO(Learner):
    """Gives weight to the sources with the loss that still falls fastest with more data.

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
    a below 6.5; that suits one kind of loss and count, so here exp(e) only stays below the largest loss.

    Args:
        at: The n of each place.
        losses: [place, source], positive, nan where a source has none.
        weights: How much each place counts.

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
