"""ADO: adaptive data optimisation, a mixture that follows fitted scaling laws (arXiv 2410.11820)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from overlord.planning.learning.learner import Learner, SavedState, StepReport, at_least, between, with_gaps
from overlord.planning.learning.portable_math import Float64s, exp, log, short, total
from overlord.planning.learning.power_law import MIN_POINTS, fit_power_laws

_LOSS_DIGITS = 5
_FIRST_GAP = 1.05
_SMALLEST_LOSS = 1e-6
_LARGEST_LAW = 300.0


class ADO(Learner):
    """Gives weight to the sources whose loss still falls fastest with more data.

    For each source a law L(n) = exp(e) + exp(a) / n^alpha is fitted to its losses every `refit_every` reports,
    from `first_fit` on. Until then the mixture is the prior mu. With every report, the t-th:

        slope_k = max(alpha_k, 0.05) * (L_k(n) - exp(e_k)) / n
        rho_k ~ mu_k * sqrt(h_k) * slope_k, at least `clip`
        p = 0.9 * pbar + 0.1 * rho;  pbar += (rho - pbar) / t;  h = 0.9 * h + 0.1 * share of tokens

    What differs from the authors' code, besides the fit (see `power_law`):

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
        ignore: Reports at the start whose losses are not fitted (another law holds); half of first_fit by default.
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
        """Join neighbouring places, so that as many again fit at twice the distance."""
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
