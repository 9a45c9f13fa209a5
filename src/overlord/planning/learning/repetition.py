"""Repetition: what passes over a source are worth, and weights that fall with every pass.

    effective_epochs   what so many passes are worth, in passes over new data
    Repetition         the weights of sources, lowered by how often each was repeated

Rules of this file:
1. The number of repetitions comes from the state of the stream: epochs that have ended, and rows passed of the current
   one. So it is the same on every machine, runtime and mesh, and a resumed stream continues it exactly.
2. Weights are computed with portable functions (see `learner`), and are multiples of 2^-40 that sum to exactly 1.
3. A source with a weight keeps one: no number of repetitions makes it 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from overlord.planning.learning.learner import (
    WEIGHT_ONE,
    Float64s,
    Int64s,
    between,
    exp,
    fixed_point,
    normalised_prior,
    total,
)

DECAY_EPOCHS = 15.39
"""R* of repeated data, as Muennighoff et al. 2023 fit it in "Scaling Data-Constrained Language Models"
(arXiv 2305.16264; 15.387756 in appendix A). It is the repetition at which one more pass is worth 1/e of new data."""
LEAST_DECAY, MOST_DECAY = 0.01, 1e6
_SMALLEST = 1e-300


def effective_epochs(epochs: float, decay_epochs: float = DECAY_EPOCHS) -> float:
    """Return what so many passes over a source are worth, in passes over new data of the same size.

    With U unique tokens and R repetitions, effective data is D' = U + U R* (1 - exp(-R / R*)); this is D' / U. R is one
    less than the number of passes, and R* is `decay_epochs`.

    Example:
        >>> [round(effective_epochs(epochs), 2) for epochs in (0.5, 1.0, 4.0, 11.3, 16.0, 1e3)]
        [0.5, 1.0, 3.73, 8.51, 10.58, 16.39]
    """
    if epochs <= 1:
        return epochs
    return 1.0 - decay_epochs * math.expm1(-(epochs - 1.0) / decay_epochs)


def epochs_of(epoch: int, passed: int, epoch_rows: int) -> float:
    """Return how many passes over a source were made, from the columns of a state.

    While the rows of an epoch are not known, the completed passes.

    Example:
        >>> epochs_of(2, 30, 120), epochs_of(0, 30, 0)
        (2.25, 0.0)
    """
    return epoch + passed / epoch_rows if epoch_rows else float(epoch)


def repetitions(epoch: Int64s, passed: Int64s, epoch_rows: Int64s) -> Float64s:
    """Return R of each source: passes beyond the first one, with the part of the current one; 0 in the first."""
    # The rows of an epoch are known once the first one has ended, and R is 0 until then.
    part = passed / np.maximum(epoch_rows, 1)
    return np.where(epoch > 0, epoch - 1 + part, 0.0)


class Repetition:
    """Weights of sources that fall as they are repeated: prior * exp(-R / decay_epochs), with sum 1.

    exp(-R / R*) is what one more token of a source is worth against a new one, by the law of `effective_epochs`. Only
    ratios count, so R is taken relative to the least repeated source that is drawn from: nothing underflows together.

    Example:
        >>> rule = Repetition(decay_epochs=2.0)
        >>> rule.count(np.array([0.0, 2.0]), np.array([True, True]))
        >>> [round(weight, 3) for weight in rule.weights([1.0, 1.0])]
        [0.731, 0.269]
    """

    def __init__(self, decay_epochs: float = DECAY_EPOCHS) -> None:
        self.decay_epochs = between("decay_epochs", decay_epochs, LEAST_DECAY, MOST_DECAY)
        """Repetitions after which a source has 1/e of its weight."""
        self._repeated: Float64s = np.zeros(0)
        self._drawn: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def count(self, repeated: Float64s, drawn: npt.NDArray[np.bool_]) -> None:
        """Set how often each source was repeated, and which are drawn from: neither finished, parked nor removed."""
        self._repeated, self._drawn = repeated, drawn

    def weights(self, prior: Sequence[float]) -> list[float]:
        """Return the weights for these ones before any repetition; sources beyond the counted ones are new."""
        if not any(prior):
            return list(prior)
        shares, more = normalised_prior(prior), len(prior) - len(self._repeated)
        repeated = np.concatenate([self._repeated, np.zeros(max(more, 0))])[: len(shares)]
        drawn = np.concatenate([self._drawn, np.ones(max(more, 0), np.bool_)])[: len(shares)]
        least = repeated[drawn & (shares > 0)].min(initial=math.inf)
        # A source that is not drawn from may have been repeated less than all others; its weight does not count, and
        # must not displace theirs.
        beyond = np.maximum(repeated - least, 0.0) if math.isfinite(least) else np.zeros(len(shares))
        lowered = np.where(shares > 0, np.maximum(shares * exp(-beyond / self.decay_epochs), _SMALLEST), 0.0)
        return (fixed_point(lowered / total(lowered)) / WEIGHT_ONE).tolist()
