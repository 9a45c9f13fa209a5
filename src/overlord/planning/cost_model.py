"""`CostModel`: the time of a packed microbatch, as integers, so that every machine compares alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from overlord.core.spec_errors import show
from overlord.errors import SpecError

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
CostFunction = Callable[[Int64s], npt.ArrayLike]
"""Any function of segment lengths that gives one cost for each."""


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

    def __post_init__(self) -> None:
        for field in ("alpha", "beta", "gamma", "windowed", "residual"):
            value = getattr(self, field)
            if field != "residual" or value is not None:
                object.__setattr__(self, field, _not_negative(field, value))
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
        for field in ("name", "origin"):
            if not isinstance(getattr(self, field), str):
                raise SpecError(
                    f"{field} is {show(getattr(self, field))}, not text; reports could not name the model. Give text"
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


def as_costs(function: CostFunction, lengths: npt.ArrayLike, what: str = "the cost function") -> Int64s:
    """Call a cost model or a user's function of segment lengths, and return its checked costs as integers.

    Floats are rounded. Where all are below 1000 they are first multiplied by a power of two that brings the largest
    to 30 bits, so that rounding does not hide differences; the unit of such costs holds for one call only.

    Example:
        >>> as_costs(lambda s: s * s, [30, 70]).tolist()
        [900, 4900]
        >>> as_costs(lambda s: s / 100, [25, 75]).tolist()
        [268435456, 805306368]
    """
    if isinstance(function, CostModel):
        return function(lengths)
    length = checked_lengths(lengths)
    try:
        found: Any = np.asarray(function(length.copy()))
    except (Exception, SystemExit) as error:  # the border to the user's code
        raise SpecError(
            f"{what} failed on {len(length)} lengths with {type(error).__name__}: {error}. It is called "
            "with a numpy array of lengths and must return a cost for each"
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
    # Twice the pairs less one token each: s^2 inside the window, so that a window nobody reaches changes nothing.
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
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        over = isinstance(value, int | np.integer) and value > most
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
