"""Mixture weights as exact integers: what the draw counts with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SCALE = 1 << 36
"""Fixed-point one: the integer weights of a step sum to exactly this."""

SUBSTEPS = 16
"""A step is cut into this many parts where the mixture changes inside steps."""


def integer_weights(weights: Sequence[float], active: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Scale the weights of the active sources to integers that sum to SCALE (largest remainder).

    All zeros when no active source has weight.

    Example:
        >>> w = integer_weights([1.0, 2.0, 5.0], np.array([True, True, False]))
        >>> int(w.sum()) == SCALE, int(w[2])
        (True, 0)
    """
    chosen = np.where(active, np.asarray(weights, np.float64), 0.0)
    largest = chosen.max(initial=0.0)
    if largest <= 0:
        return np.zeros(len(chosen), np.int64)
    some = chosen[chosen > 0]
    if largest > np.finfo(np.float64).max / len(some):
        chosen, some = chosen / largest, some / largest  # only ratios count, and the sum of huge weights has none
    total = some.sum()  # without the zeros: a source that is left out must not change how the sum is rounded
    exact = chosen / total * SCALE
    floor = np.floor(exact).astype(np.int64)
    missing = SCALE - int(floor.sum())
    # Ties go to the earlier source, so that every machine rounds alike.
    order = np.lexsort((np.arange(len(chosen)), -(exact - floor)))
    order = order[chosen[order] > 0]
    floor[order[np.arange(abs(missing)) % len(order)]] += np.sign(missing)
    return floor
