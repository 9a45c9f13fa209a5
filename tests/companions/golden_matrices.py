"""The matrices of golden_alpha.json, from their seeds: the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np


def matrix(entry: dict[str, Any]) -> np.ndarray:
    """Return the weight of an entry, in float64."""
    rng = np.random.default_rng(entry["seed"])
    shape, recipe = entry["shape"], entry["recipe"]
    if recipe == "finger":
        # A power law and a cluster in its tail: here the lower bound of "xmin_peak" decides, which it hardly ever does.
        cluster = shape[0] // 5
        tail = 1 + rng.pareto(0.6, shape[0] - cluster)
        weight = np.diag(np.sqrt(np.concatenate([tail, rng.uniform(900.0, 1000.0, cluster)])))
    elif recipe == "product":
        inner = 2 * shape[0]
        weight = rng.standard_normal((shape[0], inner)) @ rng.standard_normal((inner, shape[1]))
    elif recipe == "uniform":
        weight = rng.uniform(-1.0, 1.0, shape)
    elif recipe == "student":
        weight = rng.standard_t(3, shape)
    else:
        weight = rng.standard_normal(shape)
    if recipe == "power":
        weight *= np.arange(1, shape[1] + 1) ** -0.8
    elif recipe == "spiked":
        weight[:5] *= 12.0
    return weight * entry["scale"]
