"""From the exponents of weights to factors: the published rules, as pure functions.

    linear        the smallest exponent to one end, the largest to the other: TempBalance, LLR, AlphaDecay
    sigmoid       10 ** phi, phi a sigmoid of the distance from the mean: TB_Sigmoid of Model Balancing
    ramped        a factor on its way from one value to the next

A small exponent is a heavy tail, which well-trained layers have; a larger one gets a larger learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]
Rule = Literal["report", "llr", "sigmoid", "tempbalance", "alphadecay"]
Knob = Literal["lr", "weight_decay"]


@dataclass(frozen=True, slots=True)
class Published:
    """What a method uses where its user says nothing else."""

    knob: Knob = "lr"
    limits: tuple[float, float] = (1.0, 1.0)
    xmin_pos: float = 2.0
    edges: Literal["neutral", "largest"] = "neutral"
    """What embeddings and heads get."""
    windows: bool = False
    """Whether eigenvalues are those of square windows, so that matrices of all shapes compare."""


PUBLISHED: dict[Rule, Published] = {
    "report": Published(windows=True),
    "llr": Published(limits=(1.0, 5.0), edges="largest"),
    "tempbalance": Published(limits=(0.5, 1.5)),
    "sigmoid": Published(xmin_pos=1.5, windows=True),
    "alphadecay": Published(knob="weight_decay", limits=(2 / 3, 3.0)),
}


def linear(alphas: Sequence[float] | Float64s, low: float, high: float, *, trim: float = 0.0) -> Float64s:
    """Map the smallest exponent to `low` and the largest to `high`.

    With `trim`, so much of both ends is clipped: one outlier squeezes all others otherwise. Where all are equal the
    factor is 1. (The published code gives them the upper end, a learning rate of five times for a model that is even.)

    Example:
        >>> linear([2.0, 3.0, 4.0], 1.0, 5.0).tolist()
        [1.0, 3.0, 5.0]
    """
    values = np.asarray(alphas, np.float64)
    if trim > 0 and len(values):
        values = np.clip(values, *np.quantile(values, (trim, 1 - trim)))
    if not len(values) or values.min() == values.max():
        return np.ones(len(values))
    return np.interp(values, (values.min(), values.max()), (low, high))


def sigmoid(
    alphas: Sequence[float] | Float64s, *, tau: float = 10.0, above: float = 1.0, below: float = 1.0
) -> Float64s:
    """Return 10 ** phi, phi = s * (sigmoid(tau * (alpha - mean)) - 1/2), s by the side of the mean.

    Example:
        >>> sigmoid([3.0, 3.0]).tolist()
        [1.0, 1.0]
    """
    values = np.asarray(alphas, np.float64)
    if not len(values):
        return values
    distance = values - values.mean()
    # exp of a large number overflows to infinity, and 1 / infinity is the 0 that is meant.
    with np.errstate(over="ignore"):
        phi = 1.0 / (1.0 + np.exp(-tau * distance)) - 0.5
    return np.asarray(10.0 ** (np.where(distance > 0, above, below) * phi), np.float64)


def ramped(begin: Float64s, target: Float64s, done: int, ramp: int) -> Float64s:
    """Return the factors of step `done` of a ramp, counted from 0; the last step of it has the target exactly."""
    if done + 1 >= ramp:
        return target
    return begin + (target - begin) * ((done + 1) / ramp)
