"""Cost models from a model's shape, from measurements, ready-made, and as job files write them: the public `ol.costs`.

Time is one of two resources; the other, memory, is the cap in tokens and lives with the strategies.
The time of a microbatch with segments of s_i tokens is `alpha * sum(s_i^2) + beta * sum(s_i) + gamma`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, ParamSpec, cast, get_args

import numpy as np
import numpy.typing as npt
from pydantic import PlainValidator, model_validator

from overlord.core.spec_errors import Fault, conflict, did_you_mean, is_whole, show
from overlord.errors import SpecError
from overlord.job.spec_model import Spec, as_number, real
from overlord.job.spec_model import whole as whole_number

# --------------------------------------------------------------------------------------------------------------
# `CostModel`: the time of a packed microbatch, as integers, so that every machine compares alike.


MAX_SEGMENT = 1 << 20
"""Tokens of the longest segment a cost is defined for."""
MAX_TOKENS = 1 << 31
"""Tokens of all segments of one call together."""
LARGEST_SUM = 1 << 62
"""Costs of one call sum to less than this, so that no total of a bin can overflow."""

_LINEAR_KAPPA = 1 << 30
_MAX_PER_MICROBATCH = 1 << 40
_SMALL_FLOATS = 1e3
_FLOAT_BITS = 30

Int64s = npt.NDArray[np.int64]
Unit = Literal["ms", "flops", "relative"]
CostFunction = Callable[..., npt.ArrayLike]
"""Any function of segment lengths that gives one cost for each; with a parameter `metrics`, also of the report."""


@dataclass(frozen=True)
class CostModel:
    """The time of a microbatch, and the integer cost of each of its segments.

    As a function it takes segment lengths and gives `scale * s^2 + round(scale * kappa) * s`, in integers: costs
    of segments add up exactly, and one unit is `quantum`. It holds for segments of up to MAX_SEGMENT tokens and
    MAX_TOKENS tokens together. Without attention (alpha 0, or so little of it that it could not be seen
    in a segment of that length) the cost is `scale * s`.

    Example:
        >>> model = CostModel(alpha=1e-7, beta=2.5e-3, gamma=0.3)
        >>> model([1000, 10]).tolist(), model.per_microbatch
        ([26000000, 250100], 3000000)
        >>> round(model.microbatch_time([1000, 10]), 4), round(model.milliseconds(26250100 + 3000000), 4)
        (2.925, 2.925)
    """

    alpha: float
    """Time of one squared token (attention)."""
    beta: float
    """Time of one token (everything else)."""
    gamma: float = 0.0
    """Time of a microbatch whatever is in it."""
    scale: int = 1
    """Integer units that one squared token costs; more keeps fractions of kappa."""
    window: int | None = None
    """Tokens that sliding-window attention sees; None where it sees all."""
    windowed: float = 1.0
    """Share of the attention that the window holds for (layers with a window / layers with attention)."""
    unit: Unit = "ms"
    """What alpha, beta and gamma are in."""
    name: str = "custom"
    origin: str = "given by the caller"
    """Where the constants are from."""
    residual: float | None = None
    """Largest relative error of the measurements it was fitted to."""
    shape: Mapping[str, Mapping[str, Any]] | None = field(default=None, compare=False, repr=False)
    """Of a model that `causal_lm`, `moe` or `vit` made: the name of the function and its arguments."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma", "windowed", "residual"):
            value = getattr(self, name)
            if name != "residual" or value is not None:
                object.__setattr__(self, name, _not_negative(name, value))
        self._check_words()
        if self.alpha == 0 and self.beta == 0:
            raise SpecError(
                "alpha and beta are both 0, so every segment would cost nothing and nothing could be balanced. "
                "Give at least one of them"
            )
        if self.windowed > 1:
            raise SpecError(f"windowed is {self.windowed!r}; it is a share of the attention. Give 0 to 1")
        object.__setattr__(self, "scale", whole("scale", self.scale))
        if self.window is not None:
            object.__setattr__(self, "window", whole("window", self.window))
        if self.quantum == 0:
            raise SpecError(
                f"alpha is {self.alpha!r} and beta is {self.beta!r}, too small for a unit of cost with scale "
                f"{self.scale}; no cost would have a time. Give them in a smaller unit of time"
            )
        most = self._pair_units * MAX_SEGMENT * MAX_TOKENS + self._token_units * MAX_TOKENS
        if most > LARGEST_SUM:
            raise SpecError(
                f"scale is {self.scale}, with which the costs of {MAX_TOKENS} tokens would overflow 64 bits. "
                "Lower it; 1 is enough unless kappa is small"
            )
        units = self.gamma / self.quantum
        if units > _MAX_PER_MICROBATCH:
            raise SpecError(
                f"gamma is {self.gamma!r}, as much as {units:.0f} units of cost, so that sums over "
                "microbatches could overflow 64 bits. Check that alpha, beta and gamma are in the same unit"
            )

    def _check_words(self) -> None:
        if self.unit not in get_args(Unit):
            raise SpecError(
                f"unit is {show(self.unit)}; it would not be known what a cost means. Give one of "
                f"{', '.join(get_args(Unit))}"
            )
        for name in ("name", "origin"):
            if not isinstance(getattr(self, name), str):
                raise SpecError(
                    f"{name} is {show(getattr(self, name))}, not text; reports could not name the model. Give text"
                )

    @property
    def kappa(self) -> float:
        """Tokens at which a segment's attention costs as much as the rest; infinite without attention."""
        return self.beta / self.alpha if self.alpha > 0 else math.inf

    @property
    def quantum(self) -> float:
        """What one unit of cost is in `unit`."""
        return (self.beta if self._is_linear else self.alpha) / self.scale

    @property
    def per_microbatch(self) -> int:
        """What gamma is in units of cost."""
        return round(self.gamma / self.quantum)

    @property
    def _is_linear(self) -> bool:
        return self.kappa > _LINEAR_KAPPA

    @property
    def _pair_units(self) -> int:
        return 0 if self._is_linear else self.scale

    @property
    def _token_units(self) -> int:
        return self.scale if self._is_linear else round(self.scale * self.kappa)

    def __call__(self, lengths: npt.ArrayLike) -> Int64s:
        """Return the cost of each segment, in units of `quantum`."""
        length = checked_lengths(lengths)
        cost = self._token_units * length
        if self._pair_units == 0:
            return cost
        if self.window is None:
            return cost + self._pair_units * (length * length)
        inside = round(self._pair_units * self.windowed)
        return cost + (self._pair_units - inside) * (length * length) + inside * _squares(length, self.window)

    def microbatch_time(self, lengths: npt.ArrayLike) -> float:
        """Return the time of one microbatch of these segments, in `unit`, with gamma."""
        length = checked_lengths(lengths)
        squares = float((length * length).sum())
        if self.window is not None:
            squares += self.windowed * (float(_squares(length, self.window).sum()) - squares)
        return self.alpha * squares + self.beta * float(length.sum()) + self.gamma

    def milliseconds(self, cost: float) -> float:
        """Return how long a cost takes."""
        if self.unit != "ms":
            raise SpecError(
                f"the cost model {self.name!r} is in {self.unit}, not in milliseconds, so a cost has no time. "
                "Measure some microbatches and use costs.fit, or take a measured preset"
            )
        known = finite(cost)
        if known is None:
            raise SpecError(f"cost is {show(cost)}, which takes no time. Give a finite number")
        return known * self.quantum

    def seconds(self, cost: float) -> float:
        """Return how long a cost takes."""
        return self.milliseconds(cost) / 1000


@dataclass(frozen=True)
class Offload:
    """How much of a long sequence's activations can wait on the host, and how many ranks that saves (ByteScale, eq. 3).

    A sequence of s tokens on ranks that hold C tokens each needs its activations of all layers. What is copied to the
    host while the next layer computes costs no time; two layers stay on the device, the one that is computed and the
    one that is fetched. Nothing is offloaded where it would not be worth a rank.

    Example:
        A million tokens on ranks of 8k tokens, with a fast bus: 8 ranks instead of 128. With the 54 GB/s of an H200,
        half of the activations of 64k tokens are hidden behind computation:

        >>> layer = CostModel(alpha=1.55e-8, beta=4.8e-4, unit="ms")
        >>> fast = Offload(layers=32, act_bytes_per_token=153_000, bandwidth=1e15, time=layer)
        >>> fast.ratios([1 << 20], capacity=8192).tolist(), fast.ranks([1 << 20], capacity=8192).tolist()
        ([1.0], [8])
        >>> real = Offload(layers=32, act_bytes_per_token=153_000, bandwidth=54e9, time=layer)
        >>> real.ratios([4096, 65_536], capacity=8192).round(2).tolist()
        [0.0, 0.53]
        >>> real.ranks([4096, 65_536], capacity=8192).tolist()
        [1, 5]
    """

    layers: int
    """Layers of one rank."""
    act_bytes_per_token: float
    """Bytes that one layer saves for its backward, for each token; each storage once."""
    bandwidth: float
    """Bytes a second between device and host, in the slower direction."""
    time: CostModel
    """The time of the forward of one layer, in ms."""
    act_bytes: float = 0.0
    """Bytes that one layer saves whatever the number of tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", whole("layers", self.layers))
        for name in ("act_bytes_per_token", "bandwidth", "act_bytes"):
            object.__setattr__(self, name, _not_negative(name, getattr(self, name)))
        if not isinstance(self.time, CostModel) or self.time.unit != "ms" or self.time.window is not None:
            raise SpecError(
                f"time is {show(self.time)}; what computation hides is known only from milliseconds of one layer with "
                "attention to all tokens. Give a CostModel with unit='ms' and no window, as ol.costs.fit makes"
            )
        if not self.act_bytes_per_token or not self.bandwidth:
            raise SpecError(
                f"act_bytes_per_token is {self.act_bytes_per_token!r} and bandwidth is {self.bandwidth!r}; a share of "
                "nothing, or a copy that never ends, cannot be planned. Give both above 0"
            )

    def ratios(self, lengths: npt.ArrayLike, capacity: int) -> npt.NDArray[np.float64]:
        """Return the share of the activations of each sequence that goes to the host: all that computation hides.

        Args:
            lengths: Tokens of each sequence.
            capacity: Tokens that one rank holds without offloading: batch.microbatch_tokens / cp.
        """
        return self._solved(lengths, capacity)[0]

    def ranks(self, lengths: npt.ArrayLike, capacity: int) -> Int64s:
        """Return how many ranks share each sequence: never more than without offloading."""
        return self._solved(lengths, capacity)[1]

    def hidden(self, lengths: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the share of the activations of each sequence that is copied while computation goes on."""
        tokens = checked_lengths(lengths).astype(np.float64)
        seconds = (self.time.alpha * tokens**2 + self.time.beta * tokens + self.time.gamma) / 1e3
        return np.minimum(1.0, seconds * self.bandwidth / self._activations(tokens))

    def _solved(self, lengths: npt.ArrayLike, capacity: int) -> tuple[npt.NDArray[np.float64], Int64s]:
        # More offloading never needs more ranks, so the largest ratio that computation hides solves it.
        tokens, held = checked_lengths(lengths), self._activations(whole("capacity", capacity))
        saved, kept, hidden = self._activations(tokens), min(2, self.layers), self.hidden(tokens)
        left = kept * saved + (1.0 - hidden) * (self.layers - kept) * saved
        plain, fewer = (np.maximum(1, np.ceil(x / held - 1e-9)).astype(np.int64) for x in (saved, left / self.layers))
        return np.where(fewer < plain, hidden, 0.0), np.minimum(fewer, plain)

    def _activations(self, tokens: Any) -> npt.NDArray[np.float64]:
        return np.asarray(self.act_bytes_per_token * np.asarray(tokens, np.float64) + self.act_bytes)


def takes_metrics(function: object) -> bool:
    """Whether a cost function has a parameter `metrics`: it then gets what the trainer reported.

    Example:
        >>> takes_metrics(lambda lengths, metrics: lengths), takes_metrics(tokens)
        (True, False)
    """
    if not callable(function) or isinstance(function, CostModel):
        return False
    try:
        return "metrics" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False


def as_costs(
    function: CostFunction,
    lengths: npt.ArrayLike,
    what: str = "the cost function",
    metrics: Mapping[str, float] | None = None,
) -> Int64s:
    """Call a cost model or a user's function of segment lengths, and return its checked costs as integers.

    A function with a parameter `metrics` gets the report in force. Floats are rounded. Where all are below 1000 they
    are first multiplied by a power of two that brings the largest to 30 bits, so that rounding does not hide
    differences; the unit of such costs holds for one call only.

    Example:
        >>> as_costs(lambda s: s * s, [30, 70]).tolist()
        [900, 4900]
        >>> as_costs(lambda s: s / 100, [25, 75]).tolist()
        [268435456, 805306368]
    """
    if isinstance(function, CostModel):
        return function(lengths)
    length = checked_lengths(lengths)
    further = {"metrics": dict(metrics or {})} if takes_metrics(function) else {}
    try:
        found: Any = np.asarray(function(length.copy(), **further))
    except (Exception, SystemExit) as error:  # the border to the user's code
        raise SpecError(
            f"{what} failed on {len(length)} lengths with {type(error).__name__}: {error}. It is called "
            "with a numpy array of lengths (and metrics=, empty before the first report, where it has that parameter) "
            "and must return a cost for each"
        ) from error
    if found.shape != length.shape or found.dtype.kind not in "iuf":
        raise SpecError(
            f"{what} returned {found.dtype} of shape {found.shape} for {len(length)} lengths, so segments would have "
            "no cost. Return one number for each length"
        )
    bad = np.flatnonzero(~np.isfinite(found) | (found < 0))
    if len(bad):
        raise SpecError(
            f"{what} returned {found[bad[0]]} for a length of {length[bad[0]]}; such a cost cannot be balanced. "
            "Return finite numbers of 0 or more"
        )
    largest = float(found.max(initial=0))
    if largest * len(found) >= LARGEST_SUM:
        raise SpecError(
            f"{what} returned costs up to {largest:g} for {len(found)} segments; their sum could overflow 64 bits. "
            "Divide them by a constant: only ratios count"
        )
    if found.dtype.kind == "f":
        if 0 < largest < _SMALL_FLOATS:
            found = np.ldexp(found.astype(np.float64), _FLOAT_BITS - math.frexp(largest)[1])
        found = np.rint(found)
    return found.astype(np.int64)


def attention_pairs(lengths: npt.ArrayLike, window: int | None = None) -> Int64s:
    """Return how many pairs of tokens causal attention looks at in each segment.

    Example:
        >>> attention_pairs([4]).tolist(), attention_pairs([4], window=2).tolist()
        ([10], [7])
    """
    length = checked_lengths(lengths)
    near = length if window is None else np.minimum(length, min(whole("window", window), MAX_SEGMENT))
    return near * (near + 1) // 2 + (length - near) * near


def _squares(length: Int64s, window: int) -> Int64s:
    # Twice the pairs less one token each: s^2 inside the window, so that a window beyond all segments changes nothing.
    return 2 * attention_pairs(length, window) - length


def checked_lengths(lengths: npt.ArrayLike) -> Int64s:
    """Return segment lengths as int64, or say why they have no cost."""
    try:
        found = np.asarray(lengths)
    except ValueError:
        raise SpecError(f"lengths are {show(lengths)}, which no cost is for; give a list of whole numbers") from None
    if found.ndim == 1 and found.size == 0:
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise SpecError(f"lengths are {found.dtype} of shape {found.shape}; give a list of whole numbers of tokens")
    if int(found.min()) < 0 or int(found.max()) > MAX_SEGMENT:
        wrong = int(found.min()) if int(found.min()) < 0 else int(found.max())
        raise SpecError(f"a segment has {wrong} tokens; costs are defined for 0 to {MAX_SEGMENT}. Cut it before")
    length = found.astype(np.int64)
    if int(length.sum()) > MAX_TOKENS:
        raise SpecError(
            f"the segments have {int(length.sum())} tokens together; costs could overflow above {MAX_TOKENS}. "
            "Make the global batch smaller"
        )
    return length


def whole(field: str, value: int, least: int = 1, most: int = LARGEST_SUM) -> int:
    """Return a whole number within limits, or say that it is none."""
    if not is_whole(value, least) or value > most:
        over = is_whole(value, least)
        limits = f"from {least} to {most}" if over or most < LARGEST_SUM else f"of at least {least}"
        raise SpecError(f"{field} is {show(value)}; such a model has no cost. Give a whole number {limits}")
    return int(value)


def finite(value: object) -> float | None:
    """Return a number as a float, or None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _not_negative(field: str, value: object) -> float:
    found = finite(value)
    if found is None or found < 0:
        raise SpecError(f"{field} is {show(value)}; costs must be finite and not negative. Give 0 or more")
    return found


# --------------------------------------------------------------------------------------------------------------


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


_Arguments = ParamSpec("_Arguments")


def _with_shape(function: Callable[_Arguments, CostModel]) -> Callable[_Arguments, CostModel]:
    """Let a model remember the arguments it was made from, so that a job file can hold it."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def made(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> CostModel:
        model = function(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        changed = {name: value for name, value in given.items() if value != signature.parameters[name].default}
        numbers = {name: value if isinstance(value, bool) else as_number(value) for name, value in changed.items()}
        return replace(model, shape={function.__name__: numbers})

    return made


@_with_shape
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


@_with_shape
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


@_with_shape
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
        shape=None,
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
    so that machines with linear algebra that differs in the last bit agree.

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
        if not isinstance(cast("object", measured), Sequence) or isinstance(measured, str) or len(measured) != 2:
            raise SpecError(f"measurement {number} is {show(measured)}; nothing can be fitted to it. Give {_PAIRS}")
        lengths, milliseconds = measured
        time = finite(milliseconds)
        if time is None or not _SHORTEST <= time <= _LONGEST:
            raise SpecError(f"measurement {number} took {show(milliseconds)} ms; no time fits it. Measure it again")
        length = checked_lengths(lengths)
        rows.append((float((length * length).sum()), float(length.sum()), 1.0))
        times.append(time)
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


# --------------------------------------------------------------------------------------------------------------
# Cost models as a job file writes them: a preset, the shape of a model, or measured milliseconds.


Preset = Literal["tokens", "quadratic", "llama_12b", "vit_2b"]


def _shape(function: Callable[..., CostModel]) -> PlainValidator:
    """Make a cost model of the arguments of its function, which are checked by its signature."""
    name, parameters = function.__name__, inspect.signature(function).parameters
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]

    def check(value: object) -> CostModel:
        if not isinstance(value, Mapping):
            raise Fault(f"this must be a mapping of the model's shape, such as {{{', '.join(required)}}}")
        given: dict[str, int | float | bool] = {}
        for key, found in cast("Mapping[Any, object]", value).items():
            if key not in parameters:
                raise conflict(
                    f"unknown key; the model would have another shape than you asked for."
                    f"{did_you_mean(key, parameters)} {name} takes {', '.join(parameters)}",
                    key,
                )
            number = found if isinstance(found, bool) else as_number(found)
            if number is None or isinstance(number, bool) != isinstance(parameters[key].default, bool):
                what = "true or false" if isinstance(parameters[key].default, bool) else "a number"
                raise Fault(f"this must be {what}; the model would have no cost", at=(key,))
            given[key] = number
        for key in required:
            if key not in given:
                raise conflict(f"missing; without it the model has no cost. {name} needs {', '.join(required)}", key)
        try:
            return function(**given)
        except SpecError as error:
            raise conflict(str(error)) from None

    keys: Any = Literal[tuple(parameters)]  # type: ignore[valid-type]
    return PlainValidator(check, json_schema_input_type=dict[keys, float | bool])


_Time = Annotated[float, real(0, math.inf, "a cost cannot be negative")]
_CausalLm = Annotated[CostModel, _shape(causal_lm)]
_Moe = Annotated[CostModel, _shape(moe)]
_Vit = Annotated[CostModel, _shape(vit)]


class Cost(Spec):
    """What a file says a sequence or an image costs: a preset, the shape of a model, or alpha s² + beta s + gamma.

    Example:
        >>> Cost(preset="llama_12b").model().name, Cost(causal_lm={"layers": 32, "hidden": 4096}).model().kappa
        ('llama_12b', 49152.0)
    """

    preset: Preset | None = None
    """A model of `ol.costs`."""
    causal_lm: _CausalLm | None = None
    """The arguments of `ol.costs.causal_lm`."""
    moe: _Moe | None = None
    """The arguments of `ol.costs.moe`."""
    vit: _Vit | None = None
    """The arguments of `ol.costs.vit`."""
    alpha: _Time | None = None
    """Milliseconds of one squared token."""
    beta: _Time | None = None
    """Milliseconds of one token."""
    gamma: _Time | None = None
    """Milliseconds of a microbatch, whatever is in it."""

    def model(self) -> CostModel:
        """Return the cost model."""
        if self.preset is not None:
            return preset(self.preset)
        shaped = self.causal_lm or self.moe or self.vit
        return shaped or CostModel(self.alpha or 0.0, self.beta or 0.0, self.gamma or 0.0)

    @model_validator(mode="before")
    @classmethod
    def _take_short_form(cls, data: Any) -> Any:
        if isinstance(data, str) and data not in _PRESETS:
            raise conflict(
                f"there is no cost model {show(data)}; it is not known what a sequence costs."
                f"{did_you_mean(data, _PRESETS)} Presets: {', '.join(_PRESETS)}; or write {{causal_lm: {{layers: 32, "
                "hidden: 4096}}"
            )
        return {"preset": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _check_together(self) -> Cost:
        timed = [name for name in ("alpha", "beta", "gamma") if getattr(self, name) is not None]
        given = [name for name in ("preset", "causal_lm", "moe", "vit") if getattr(self, name) is not None] + timed[:1]
        if len(given) != 1:
            found = f"{given[0]} and {given[1]} are both given" if given else "nothing is given"
            raise conflict(
                f"one thing decides what a sequence costs, but {found}. Write a preset such as llama_12b, "
                "{causal_lm: {layers: 32, hidden: 4096}}, or {alpha: 1.0e-7, beta: 2.6e-3}"
            )
        try:
            self.model()
        except SpecError as error:
            raise conflict(str(error)) from None
        return self


def as_cost(value: object) -> CostFunction:
    """Return a cost in any form that a strategy takes: a model, a function of lengths, or as a file writes it.

    Raises:
        Fault: It is none of these.
    """
    if callable(value):
        return cast("CostFunction", value)
    if isinstance(value, (str, Mapping)):
        return Cost.nested(cast("object", value)).model()
    raise Fault(
        "this must be a cost model of ol.costs or its name, or a function of lengths; it is not known what a sequence "
        "costs"
    )


def written_cost(cost: object) -> object:
    """Return a cost as a job file holds it.

    Raises:
        SpecError: It is a function, or a model that the constants of a file do not describe.

    Example:
        >>> written_cost(llama_12b), written_cost(causal_lm(32, 4096)), written_cost(CostModel(1e-7, 0.002))
        ('llama_12b', {'causal_lm': {'layers': 32, 'hidden': 4096}}, {'alpha': 1e-07, 'beta': 0.002, 'gamma': 0.0})
    """
    if isinstance(cost, CostModel):
        if _PRESETS.get(cost.name) == cost:
            return cost.name
        if cost.shape is not None:
            return {name: dict(given) for name, given in cost.shape.items()}
        if (cost.unit, cost.scale, cost.window) == ("ms", 1, None):
            return {"alpha": cost.alpha, "beta": cost.beta, "gamma": cost.gamma}
    raise SpecError(
        f"the cost {getattr(cost, '__name__', None) or show(cost)} is made in Python, which YAML cannot hold; the file "
        "would not give the same plans. Use a preset, causal_lm, moe, vit or milliseconds, or keep the job in a Python "
        "file."
    )


class OffloadCost(Spec):
    """What a file says of offloading: the fields of `Offload`.

    Example:
        >>> time = {"alpha": 1.55e-8, "beta": 4.8e-4}
        >>> OffloadCost(layers=32, act_bytes_per_token=153_000, bandwidth=54e9, time=time).model().layers
        32
    """

    layers: Annotated[int, whole_number(1, "nothing would be computed. Give the layers of one rank")]
    """Layers of one rank."""
    act_bytes_per_token: Annotated[float, real(0, math.inf, "bytes cannot be negative")]
    """Bytes that one layer saves for its backward, for each token."""
    bandwidth: Annotated[float, real(0, math.inf, "a copy would never end")]
    """Bytes a second between device and host, in the slower direction."""
    time: Cost
    """Milliseconds of the forward of one layer."""
    act_bytes: Annotated[float, real(0, math.inf, "bytes cannot be negative")] = 0.0
    """Bytes that one layer saves whatever the number of tokens."""

    def model(self) -> Offload:
        """Return what a strategy takes."""
        return Offload(self.layers, self.act_bytes_per_token, self.bandwidth, self.time.model(), self.act_bytes)

    @model_validator(mode="after")
    def _check_together(self) -> OffloadCost:
        try:
            self.model()
        except SpecError as error:
            raise conflict(str(error)) from None
        return self


def as_offload(value: object) -> Offload:
    """Return offloading in any form that a strategy takes: itself, or as a file writes it.

    Raises:
        Fault: It is none of these.
    """
    if isinstance(value, Offload):
        return value
    if isinstance(value, Mapping):
        return OffloadCost.nested(cast("object", value)).model()
    raise Fault(
        "this must be ol.costs.Offload(..), or a mapping of its fields; it is not known what computation hides. Give "
        "layers, act_bytes_per_token, bandwidth and time"
    )


def written_offload(offload: Offload) -> dict[str, object]:
    """Return offloading as a job file holds it.

    Raises:
        SpecError: Its time is made in Python.
    """
    names = ("layers", "act_bytes_per_token", "bandwidth", "act_bytes")
    return {name: getattr(offload, name) for name in names} | {"time": written_cost(offload.time)}


AnyOffload = Annotated[Offload, PlainValidator(as_offload, json_schema_input_type=OffloadCost)]
"""Offloading in any form that a strategy takes."""
AnyCost = Annotated[CostFunction, PlainValidator(as_cost, json_schema_input_type=Preset | Cost)]
"""A cost in any form that a strategy takes."""
