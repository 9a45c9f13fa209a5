"""What a packed piece costs on the device: time as an integer, so that every machine compares alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

DEFAULT_KAPPA = 25_400
"""Tokens at which attention costs as much as the rest of a layer: measured on one H200, bf16,
forward and backward, for a Llama-12B-like layer (hidden 4608). The FLOP formula says about twice that."""


def sequence_cost(tokens: npt.NDArray[np.integer], kappa: int = DEFAULT_KAPPA) -> npt.NDArray[np.int64]:
    """Return s^2 + kappa * s for every piece of s tokens.

    Example:
        >>> sequence_cost(np.array([30, 70]), kappa=0).tolist()
        [900, 4900]
    """
    length = tokens.astype(np.int64)
    return length * length + kappa * length
