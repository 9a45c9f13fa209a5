"""Cost models from a model's shape, from measurements, and ready-made: the public `ol.costs`.

Time is one of two resources; the other, memory, is the cap in tokens and lives with the strategies.
The time of a microbatch with segments of s_i tokens is `alpha * sum(s_i^2) + beta * sum(s_i) + gamma`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from overlord.core.spec_errors import did_you_mean, show
from overlord.errors import SpecError
from overlord.planning.cost_model import (
    MAX_SEGMENT,
    MAX_TOKENS,
    CostFunction,
    CostModel,
    as_costs,
    attention_pairs,
    checked_lengths,
    finite,
    whole,
)

__all__ = [
    "MAX_SEGMENT",
    "MAX_TOKENS",
    "CostFunction",
    "CostModel",
    "as_costs",
    "attention_pairs",
    "causal_lm",
    "fit",
    "llama_12b",
    "moe",
    "preset",
    "presets",
    "quadratic",
    "scaled",
    "tokens",
    "vit",
    "vit_2b",
]


def causal_lm(
    layers: int,
    hidden: int,
    heads: int | None = None,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    ffn: int | None = None,
    vocab: int | None = None,
    gated: bool = True,
    window: int | None = None,
    full_layers: int | None = None,
    attn_scale: float = 1.0,
    recompute: bool = False,
) -> CostModel:
    """Return the training FLOPs of a causal transformer: 6 * N * T + 6 * layers * width * Q.

    N are the matrix parameters a token passes; kappa is N / (layers * width).

    Args:
        layers: Number of layers.
        hidden: Width of the residual stream.
        heads: Query heads; they fill `hidden` unless head_dim is given.
        head_dim: Width of a head.
        kv_heads: Heads of keys and values; as many as query heads by default.
        ffn: Width of the feed-forward part; 8/3 of hidden (gated) or 4 times hidden by default.
        vocab: Size of the output layer, which is left out by default.
        gated: Whether the feed-forward part has three matrices (SwiGLU) and not two.
        window: Tokens that sliding-window attention sees.
        full_layers: Layers that see all tokens; the others have the window or, without one, linear attention.
        attn_scale: How much slower attention runs than matrix products for the same FLOPs: 1.4 to 2 is realistic.
        recompute: Whether activations are computed again in the backward pass.

    Example:
        >>> causal_lm(layers=32, hidden=4096).kappa == 12 * 4096
        True
    """
    layers, hidden = whole("layers", layers), whole("hidden", hidden)
    width, kv_width = _attention(hidden, heads, head_dim, kv_heads)
    mlp = 8.0 * hidden * hidden if ffn is None else (3.0 if gated else 2.0) * hidden * whole("ffn", ffn)
    linear = layers * (2.0 * hidden * (width + kv_width) + mlp) + _head(vocab, hidden)
    plain = 0 if window is not None else layers
    full = plain if full_layers is None else whole("full_layers", full_layers, 0, layers)
    attending = layers if window is not None else full
    return CostModel(
        alpha=6.0 * attending * width * _factor(attn_scale, recompute),
        beta=6.0 * linear * _factor(1.0, recompute),
        scale=layers if window is not None and 0 < full < layers else 1,
        window=window,
        windowed=1.0 if window is None else (layers - full) / layers,
        unit="flops",
        name="causal_lm",
        origin=f"FLOPs of {layers} layers of width {hidden}",
    )


def moe(
    layers: int,
    hidden: int,
    experts: int,
    top_k: int,
    expert_ffn: int,
    shared_ffn: int = 0,
    heads: int | None = None,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    vocab: int | None = None,
    attn_scale: float = 1.0,
    recompute: bool = False,
) -> CostModel:
    """Return the training FLOPs of a causal mixture of experts: a token passes top_k of them.

    Experts and the shared part are gated (three matrices). That experts are loaded unevenly is not in it.

    Example:
        >>> mixtral = moe(layers=32, hidden=4096, experts=8, top_k=2, expert_ffn=14336, heads=32, kv_heads=8)
        >>> round(mixtral.kappa)
        96264
    """
    layers, hidden, experts = whole("layers", layers), whole("hidden", hidden), whole("experts", experts)
    width, kv_width = _attention(hidden, heads, head_dim, kv_heads)
    active = whole("top_k", top_k, 1, experts) * whole("expert_ffn", expert_ffn) + whole("shared_ffn", shared_ffn, 0)
    mlp = 3.0 * hidden * active + hidden * experts
    linear = layers * (2.0 * hidden * (width + kv_width) + mlp) + _head(vocab, hidden)
    return CostModel(
        alpha=6.0 * layers * width * _factor(attn_scale, recompute),
        beta=6.0 * linear * _factor(1.0, recompute),
        unit="flops",
        name="moe",
        origin=f"FLOPs of {layers} layers of width {hidden}, {top_k} of {experts} experts",
    )


def vit(
    layers: int,
    hidden: int,
    heads: int | None = None,
    mlp: int | None = None,
    patches_per_token: int = 1,
    attn_scale: float = 1.0,
    frozen: bool = False,
) -> CostModel:
    """Return the FLOPs of a bidirectional encoder; a segment is one image.

    Args:
        layers: Number of layers.
        hidden: Width of the encoder.
        heads: Number of heads; they fill `hidden`.
        mlp: Width of the feed-forward part; 4 times hidden by default.
        patches_per_token: Patches that one unit of length stands for: 1 where lengths are patches, merge * merge
            where they are image tokens of the backbone.
        attn_scale: How much slower attention runs than matrix products for the same FLOPs.
        frozen: Whether only the forward pass runs.

    Example:
        >>> vit(layers=48, hidden=1664, mlp=8192).kappa
        11520.0
    """
    layers, hidden = whole("layers", layers), whole("hidden", hidden)
    width, _ = _attention(hidden, heads, None, None)
    feed = 8.0 * hidden * hidden if mlp is None else 2.0 * hidden * whole("mlp", mlp)
    patches = whole("patches_per_token", patches_per_token)
    passes = 1.0 / 3.0 if frozen else 1.0
    return CostModel(
        alpha=12.0 * layers * width * patches * patches * passes * _factor(attn_scale, False),
        beta=6.0 * layers * (4.0 * hidden * width + feed) * patches * passes,
        unit="flops",
        name="vit",
        origin=f"FLOPs of {layers} bidirectional layers of width {hidden}",
    )


def scaled(model: CostModel, layers: float) -> CostModel:
    """Return the model of `layers` such layers: all of its times are multiplied.

    Example:
        >>> whole = scaled(llama_12b, layers=45)
        >>> round(whole.microbatch_time([8192])), whole([8192]) == llama_12b([8192])
        (1276, array([ True]))
    """
    if not isinstance(cast("object", model), CostModel):
        raise SpecError(f"model is {show(model)}, which has no times to multiply. Give a CostModel, such as a preset")
    times = finite(layers)
    if times is None or times <= 0:
        raise SpecError(f"layers is {show(layers)}; such a model would cost nothing. Give a number above 0")
    return replace(
        model,
        alpha=model.alpha * times,
        beta=model.beta * times,
        gamma=model.gamma * times,
        name=f"{model.name} x {times:g}",
    )


_SHORTEST, _LONGEST = 1e-9, 1e12
_PAIRS = "pairs of segment lengths and milliseconds, such as ([4096], 11.5)"
_H200 = "measured on one H200, bf16, forward and backward, one layer"

tokens = CostModel(0.0, 1.0, unit="relative", name="tokens", origin="cost is the length")
quadratic = CostModel(1.0, 0.0, unit="relative", name="quadratic", origin="cost is the squared length")
llama_12b = CostModel(
    1.019e-7, 2.589e-3, 0.31, name="llama_12b", origin=f"{_H200} of hidden 4608, 36 heads, SwiGLU 12288", residual=0.015
)
vit_2b = CostModel(
    9.30e-8, 4.359e-4, 0.14, name="vit_2b", origin=f"{_H200} of hidden 1664, 16 heads, MLP 8192", residual=0.025
)

_PRESETS = {model.name: model for model in (tokens, quadratic, llama_12b, vit_2b)}


def presets() -> tuple[CostModel, ...]:
    """Return all presets; each says where it is from."""
    return tuple(_PRESETS.values())


def preset(name: str) -> CostModel:
    """Return a preset by its name.

    Example:
        >>> preset("vit_2b").origin
        'measured on one H200, bf16, forward and backward, one layer of hidden 1664, 16 heads, MLP 8192'
    """
    if not isinstance(cast("object", name), str) or name not in _PRESETS:
        raise SpecError(
            f"there is no cost preset {show(name)}, so nothing would have a cost.{did_you_mean(name, _PRESETS)} Choose "
            f"one of {', '.join(_PRESETS)}, or use costs.fit"
        )
    return _PRESETS[name]


def fit(measurements: Iterable[tuple[Sequence[int], float]], name: str = "fitted") -> CostModel:
    """Return the model nearest to measured microbatches, with `residual`, its largest relative error.

    Relative errors are made small (least squares), and no constant is negative. Constants are rounded to nine digits,
    so that machines whose linear algebra differs in the last bit agree.

    Args:
        measurements: Pairs of the segment lengths of one packed microbatch and its milliseconds.
        name: What to call it.

    Example:
        >>> packings = [[4096], [1024] * 4, [8192], [512] * 16]
        >>> model = fit([(p, 1e-7 * sum(s * s for s in p) + 2e-3 * sum(p) + 0.5) for p in packings])
        >>> model.alpha, model.beta, model.gamma, model.residual < 1e-6
        (1e-07, 0.002, 0.5, True)
    """
    rows: list[tuple[float, float, float]] = []
    times: list[float] = []
    if not isinstance(cast("object", measurements), Iterable):
        raise SpecError(f"measurements are {show(measurements)}; nothing can be fitted. Give {_PAIRS}")
    for number, measured in enumerate(measurements):
        lengths, milliseconds = _pair(number, measured)
        length = checked_lengths(lengths)
        rows.append((float((length * length).sum()), float(length.sum()), 1.0))
        times.append(milliseconds)
    advice = (
        "Measure at least three microbatches: two of different total length, and at one total one long "
        "segment as well as many short ones, such as [4096], [512] * 8 and [8192]"
    )
    if len(rows) < 3:
        raise SpecError(f"{len(rows)} measurements cannot tell three constants apart. {advice}")
    table = np.array(rows) / np.array(times)[:, None]
    column = np.sqrt((table * table).sum(axis=0))
    if not column.all() or np.linalg.matrix_rank(table / column, tol=1e-5) < 3:
        raise SpecError(
            f"the {len(rows)} measurements are too much alike to tell the time of attention, of tokens and of a "
            f"microbatch apart. {advice}"
        )
    alpha, beta, gamma = (float(f"{c:.8e}") for c in _non_negative(table / column) / column)
    if alpha == 0 and beta == 0:
        raise SpecError(f"the measured times do not grow with the tokens, so nothing could be balanced. {advice}")
    predicted = np.array(rows) @ np.array([alpha, beta, gamma])
    residual = float(f"{np.abs(predicted / np.array(times) - 1).max():.3e}")
    origin = f"fitted to {len(rows)} measured microbatches"
    return CostModel(alpha, beta, gamma, name=name, origin=origin, residual=residual)


def _attention(hidden: int, heads: int | None, head_dim: int | None, kv_heads: int | None) -> tuple[int, int]:
    """Return the widths of queries and of keys."""
    if heads is None:
        if head_dim is not None or kv_heads is not None:
            raise SpecError("heads is missing; head_dim and kv_heads say nothing without it. Give heads too")
        return hidden, hidden
    heads = whole("heads", heads)
    if head_dim is None and hidden % heads:
        raise SpecError(f"hidden is {hidden}, which {heads} heads do not divide. Give head_dim too")
    dim = hidden // heads if head_dim is None else whole("head_dim", head_dim)
    keys = heads if kv_heads is None else whole("kv_heads", kv_heads)
    if heads % keys:
        raise SpecError(f"kv_heads is {keys}, which does not divide the {heads} heads. Each must serve as many")
    return heads * dim, keys * dim


def _head(vocab: int | None, hidden: int) -> float:
    return 0.0 if vocab is None else float(whole("vocab", vocab)) * hidden


def _factor(attn_scale: float, recompute: bool) -> float:
    slower = finite(attn_scale)
    if slower is None or slower <= 0:
        raise SpecError(f"attn_scale is {show(attn_scale)}; attention would cost nothing. Give a number above 0")
    return slower * (4.0 / 3.0 if recompute else 1.0)


def _pair(number: int, measured: object) -> tuple[npt.ArrayLike, float]:
    """Return the lengths and the milliseconds of a measurement."""
    if not isinstance(measured, Sequence) or isinstance(measured, str) or len(measured) != 2:
        raise SpecError(f"measurement {number} is {show(measured)}; nothing can be fitted to it. Give {_PAIRS}")
    lengths, milliseconds = measured
    time = finite(milliseconds)
    if time is None or not _SHORTEST <= time <= _LONGEST:
        raise SpecError(f"measurement {number} took {show(milliseconds)} ms; no time fits it. Measure it again")
    return lengths, time


def _non_negative(table: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return x >= 0 with table @ x nearest to ones: the best of the seven sets of columns that may be used."""
    best, least = np.zeros(3), math.inf
    for chosen in range(1, 8):
        columns = [c for c in range(3) if chosen >> c & 1]
        found = np.linalg.lstsq(table[:, columns], np.ones(len(table)), rcond=None)[0]
        error = float(((table[:, columns] @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[columns] = found
    return best
