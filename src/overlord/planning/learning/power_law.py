"""Fits of L(n) = exp(e) + exp(a) / n^alpha to losses, for many sources at once, with the same bits on every machine."""

from __future__ import annotations

import numpy as np

from overlord.planning.learning.portable_math import Float64s, exp, log, ordered_sum, short

MIN_POINTS = 4
"""Places with a loss that a fit needs; three constants go through any three."""

_HUBER = 1e-3
_LEAST_ALPHA, _MOST_ALPHA = 0.01, 0.8
_ALPHAS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_FLOORS = (0.02, 0.2, 0.4, 0.55, 0.7, 0.8, 0.87, 0.92, 0.96, 0.99)
_REFINEMENTS = 80


def fit_power_laws(at: Float64s, losses: Float64s, weights: Float64s) -> Float64s:
    """Return (e, a, alpha) for every source; nan for one with fewer than MIN_POINTS losses.

    The sum of Huber losses (1e-3) of log residuals is made small, as ADO does. ADO runs L-BFGS from 512 starts; here
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
    # n is taken relative to its middle, so that a and alpha can be told apart.
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
        # The Huber loss is a square whose weight falls where the residual is large.
        pull = weight * np.minimum(1.0, _HUBER / np.maximum(np.abs(residual), 1e-300))
        tried = params + _step(slopes, residual, pull, damping)
        tried = np.stack([np.minimum(tried[0], most), tried[1], np.clip(tried[2], _LEAST_ALPHA, _MOST_ALPHA)])
        # e or a far below the other is a term that has vanished; further down nothing changes any more.
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
