"""The base class of learning rules: the prior, versions of the weights, checked reports, checked states.

Rules of this file:
1. A source with prior 0 is not in the mixture: its weight stays 0, whatever is reported, and K does not count it.
2. Weights are multiples of 2^-40 that sum to exactly 1; what a rule keeps is rounded to 13 digits. Both are computed
   with portable functions, so the same reports give the same weights on every machine: numpy and the C library
   compute exp and log with an error that differs between processors and versions. Here they are made of +, -, *, / and
   exact scaling by powers of two only, each of which IEEE 754 rounds in one way; sums have a fixed order. The error
   stays below a few units in the last place.
3. An observe that fails, or a state that is refused, changes nothing.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from overlord.core.spec_errors import is_finite, is_whole, show
from overlord.errors import SpecError, StateError

Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

# ln 2 in two parts: k * _LN2_HIGH is exact for every exponent k.
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_INVERSE_LN2 = float.fromhex("0x1.71547652b82fep+0")
_EXP_TERMS = [1.0 / math.factorial(n) for n in range(14)]
_LOG_TERMS = [2.0 / (2 * n + 1) for n in range(12)]
_ROOT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
_LARGEST = 709.0
_SMALLEST = -745.0


def exp(values: npt.ArrayLike) -> Float64s:
    """Return e ** x; x above 709 counts as 709, so the result is finite.

    Example:
        >>> exp([0.0, 1.0, -800.0]).tolist()
        [1.0, 2.7182818284590455, 0.0]
    """
    given = np.asarray(values, np.float64)
    x = np.clip(given, _SMALLEST, _LARGEST)
    k = np.rint(x * _INVERSE_LN2)
    rest = (x - k * _LN2_HIGH) - k * _LN2_LOW
    total = np.full_like(rest, _EXP_TERMS[-1])
    for term in _EXP_TERMS[-2::-1]:
        total = total * rest + term
    return np.where(given < _SMALLEST, 0.0, np.ldexp(total, k.astype(np.int64)))


def log(values: npt.ArrayLike) -> Float64s:
    """Return the natural logarithm of positive numbers.

    Example:
        >>> log([1.0, 8.0]).tolist()
        [0.0, 2.0794415416798357]
    """
    mantissa, exponent = np.frexp(np.asarray(values, np.float64))
    small = mantissa < _ROOT_HALF
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    exponent = (exponent - small).astype(np.float64)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    total = np.full_like(square, _LOG_TERMS[-1])
    for term in _LOG_TERMS[-2::-1]:
        total = total * square + term
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + total * ratio)


def ordered_sum(values: Float64s) -> Float64s:
    """Return the sum over the first axis, added one after the other: numpy's own order may change."""
    total = np.zeros(values.shape[1:], np.float64)
    for row in values:
        total = total + row
    return total


def total(values: Float64s) -> float:
    """Return the sum, exactly rounded."""
    return math.fsum(values.tolist())


def short(values: npt.ArrayLike, digits: int = 13) -> Float64s:
    """Round to some significant decimal digits, so that a saved state is short and still exact."""
    given = np.asarray(values, np.float64)
    text = f"%.{digits - 1}e"
    return np.array([float(text % x) for x in given.ravel().tolist()], np.float64).reshape(given.shape)


WEIGHT_ONE = 1 << 40
"""Fixed-point one of a rule's weights."""

_LARGEST_LOSS = 1e6
_MOST_TOKENS = 1 << 53
_SMALLEST_RATIO = 1e-300

NO_EXTRA: Mapping[str, Float64s] = {}


@dataclass(frozen=True, slots=True)
class StepReport:
    """The checked losses of one step."""

    step: int
    loss: Float64s
    """Mean loss of each source; 0 where it was not in the step."""
    tokens: Int64s
    seen: npt.NDArray[np.bool_]
    """Sources of the mixture that the step reports on."""
    drawn: Float64s
    """The weights the step was drawn with."""
    extra: Mapping[str, Float64s]

    def further(self, name: str) -> Float64s:
        """Return a loss in `extra`, nan where a source has none."""
        values = np.asarray(self.extra[name], np.float64)
        if not (np.isnan(values) | (np.abs(values) <= _LARGEST_LOSS)).all():
            raise SpecError(
                f"{name} of step {self.step} has values above {_LARGEST_LOSS:g}; the mixture could not recover. "
                "Report finite losses, and leave out what has none"
            )
        return values


class Learner(ABC):
    """A mixture that depends on reports: the same reports give the same weights on every machine."""

    kind: ClassVar[str]
    remembers_weights: ClassVar[bool] = False
    """Whether learning needs the weights that a reported step was drawn with."""

    def __init__(self, prior: Sequence[float] | Float64s, lag: int) -> None:
        self._prior = normalised_prior(prior)
        self._active = self._prior > 0
        self._num_active = int(self._active.sum())
        self._lag = at_least("lag", lag, 1)
        self._version = 0
        self._last_step = -1
        # First version and weights (as integers); only the newest entry unless old weights are needed.
        self._history: list[tuple[int, Int64s]] = [(0, fixed_point(self._prior))]

    @property
    def version(self) -> int:
        """Which mixture `weights` gives now: one more with every observe that counts."""
        return self._version

    @property
    def num_sources(self) -> int:
        """How many sources there are, with those of prior 0."""
        return len(self._prior)

    def weights(self, step: int) -> Float64s:
        """Return the weights for a step that is drawn now; they sum to exactly 1. Changes nothing."""
        return self._history[-1][1] / WEIGHT_ONE

    def observe(
        self,
        step: int,
        mixture_version: int,
        loss_sum: npt.ArrayLike,
        token_count: npt.ArrayLike,
        extra: Mapping[str, Float64s] = NO_EXTRA,
    ) -> None:
        """Learn from a step's report. Called for each step, in order; one that is not after the last one is ignored.

        Args:
            step: The reported step.
            mixture_version: `version` when that step was drawn: plans are made ahead, reports come later.
            loss_sum: Sum of the losses of each source's tokens.
            token_count: Number of these tokens; 0 for a source that was not in the step or is not reported.
            extra: Further values for each source by name, nan where missing, such as "reference" for DoReMi.
        """
        if step <= self._last_step:
            return
        report = self._checked(step, mixture_version, {"loss_sum": loss_sum, "token_count": token_count}, extra)
        trial = copy.deepcopy(self)
        trial._advance(step, trial._learn(report))
        vars(self).update(vars(trial))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The arrays of a rule are replaced, never written into, so a copy may share them. A user's function must be
        # shared: it may hold a lock.
        twin = copy.copy(self)
        twin._history = list(self._history)
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Return everything that was learned: JSON, bounded in size, exact."""
        return {
            "kind": self.kind,
            "sources": self.num_sources,
            "version": self._version,
            "last_step": self._last_step,
            "history": [[version, weights.tolist()] for version, weights in self._history],
            **self._fields(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; a damaged one, or one of another rule, raises StateError and changes nothing."""
        saved = SavedState(state, self.kind)
        if saved.field("kind") != self.kind:
            raise saved.refusal("kind", f"is {state['kind']!r}, and this mixture learns by {self.kind!r}")
        if saved.integer("sources", 1) != self.num_sources:
            raise saved.refusal("sources", f"is {state['sources']}, and this job has {self.num_sources}")
        version, last_step = saved.integer("version", 0), saved.integer("last_step", -1)
        history = self._saved_history(saved, version)
        self._restore(saved)
        self._version, self._last_step, self._history = version, last_step, history

    @property
    def _turn(self) -> int:
        """Which report is being learned from, counted from 1: the t of the formulas."""
        return self._version + 1

    @abstractmethod
    def _learn(self, report: StepReport) -> Float64s | None:
        """Learn from a report; return new weights, or None if they stay."""

    @abstractmethod
    def _fields(self) -> dict[str, Any]:
        """Return the fields of the rule for its state."""

    @abstractmethod
    def _restore(self, saved: SavedState) -> None:
        """Restore what `_fields` returned; reads everything before it changes anything."""

    def _advance(self, step: int, found: Float64s | None) -> None:
        self._version += 1
        self._last_step = step
        if found is None:
            return
        newest = (self._version, fixed_point(found))
        if not self.remembers_weights:
            self._history = [newest]
            return
        if not np.array_equal(newest[1], self._history[-1][1]):
            self._history.append(newest)
        oldest = self._version - self._lag
        while len(self._history) > 1 and self._history[1][0] <= oldest:
            self._history.pop(0)

    def _checked(
        self, step: int, mixture_version: int, counted: Mapping[str, npt.ArrayLike], extra: Mapping[str, Float64s]
    ) -> StepReport:
        oldest = max(0, self._version - self._lag)
        if not oldest <= mixture_version <= self._version:
            raise SpecError(
                f"the report of step {step} says it was drawn with mixture {mixture_version}, but only {oldest} to "
                f"{self._version} are known; its losses would be weighed wrongly. Report every step, in order"
            )
        arrays = {name: _as_numbers(f"{name} of step {step}", value) for name, value in {**counted, **extra}.items()}
        tokens, sums = arrays["token_count"], arrays["loss_sum"].astype(np.float64)
        for name, array in arrays.items():
            if np.shape(array) != (self.num_sources,):
                raise SpecError(
                    f"{name} of step {step} has shape {np.shape(array)}, but there are {self.num_sources} sources; "
                    "losses would count for the wrong ones. Give one number for each source"
                )
        if tokens.dtype.kind not in "iu" or (tokens < 0).any() or tokens.sum(dtype=np.float64) >= _MOST_TOKENS:
            raise SpecError(
                f"token_count of step {step} is {show(tokens.tolist())}; losses would be weighed wrongly. Give whole "
                "numbers of 0 or more, less than 2**53 together"
            )
        reported = tokens > 0
        loss = np.where(reported, sums / np.maximum(tokens, 1), 0.0)
        # A reported mean was multiplied by its tokens and is divided again: allow for the rounding.
        bad = np.flatnonzero(~((loss >= 0) & (loss <= _LARGEST_LOSS * (1 + 1e-12))))
        if len(bad):
            raise SpecError(
                f"the mean loss of step {step} is {loss[bad[0]]} for source {bad[0]}; the mixture could not recover "
                f"from it. Report losses from 0 to {_LARGEST_LOSS:g}, and leave out (token_count 0) what has none"
            )
        drawn = self._prior
        if self.remembers_weights:
            drawn = next(weights for first, weights in reversed(self._history) if first <= mixture_version) / WEIGHT_ONE
        return StepReport(step, loss, tokens.astype(np.int64), reported & self._active, drawn, extra)

    def _saved_history(self, saved: SavedState, version: int) -> list[tuple[int, Int64s]]:
        found: list[tuple[int, Int64s]] = []
        for entry in saved.items("history"):
            if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], int)):
                raise saved.refusal("history", "has an entry that is not [version, weights]")
            weights = saved.array("history", entry[1], np.int64, (self.num_sources,))
            if (weights < 0).any() or int(weights.sum()) != WEIGHT_ONE:
                raise saved.refusal("history", f"has weights that do not sum to {WEIGHT_ONE}")
            found.append((entry[0], weights))
        firsts = [first for first, _ in found]
        needed = max(0, version - self._lag) if self.remembers_weights else version
        if not firsts or firsts != sorted(set(firsts)) or not 0 <= firsts[0] <= needed or firsts[-1] > version:
            raise saved.refusal("history", f"has the versions {firsts}; {needed} to {version} are needed")
        return found


class SavedState:
    """Reads the fields of a state and refuses invalid values."""

    def __init__(self, state: object, kind: str) -> None:
        self._kind = kind
        if not isinstance(state, Mapping):
            raise self.refusal("it", f"is {type(state).__name__}, not a mapping")
        self._state: Mapping[str, Any] = state

    def refusal(self, field: str, fault: str) -> StateError:
        """Return the error that says what is wrong with a field."""
        return StateError(
            f"the state of the mixture ({self._kind}): {field} {fault}. Going on would not give the same stream; load "
            "an undamaged state of this job"
        )

    def field(self, name: str) -> Any:
        """Return a field that must be there."""
        if name not in self._state:
            raise self.refusal(name, "is missing")
        return self._state[name]

    def integer(self, name: str, least: int) -> int:
        """Return a whole number."""
        value = self.field(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
            raise self.refusal(name, f"is {show(value)}, not a whole number of at least {least}")
        return value

    def number(self, name: str, least: float = 0.0) -> float:
        """Return a finite number."""
        value = self.field(name)
        if not is_finite(value) or value < least:
            raise self.refusal(name, f"is {value!r}, not a number of at least {least}")
        return float(value)

    def items(self, name: str) -> list[Any]:
        """Return a list."""
        value = self.field(name)
        if not isinstance(value, list):
            raise self.refusal(name, f"is {type(value).__name__}, not a list")
        return value

    def numbers(self, name: str) -> dict[str, float]:
        """Return a mapping of names to finite numbers."""
        value = self.field(name)
        if not isinstance(value, Mapping):
            raise self.refusal(name, f"is {type(value).__name__}, not a mapping")
        for key, number in value.items():
            if not (isinstance(key, str) and is_finite(number)):
                raise self.refusal(name, f"has {key!r}: {number!r}, which is not a finite number")
        return {key: float(number) for key, number in value.items()}

    def floats(self, name: str, shape: tuple[int, ...], least: float | None = None, gaps: bool = False) -> Float64s:
        """Return an array of finite numbers; `gaps` allows null, which becomes nan."""
        value = self.array(name, self.field(name), np.float64, shape)
        fine = np.isfinite(value) | (np.isnan(value) if gaps else False)
        if not fine.all() or (least is not None and (value < least).any()):
            raise self.refusal(name, "has a value that is not possible")
        return value

    def array(self, name: str, value: object, dtype: type[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return nested lists as an array of a certain shape (-1 is any length)."""
        try:
            found = np.array(value, object)
            if found.size == 0:
                found = found.reshape([max(n, 0) for n in shape])
            if any(isinstance(x, bool | str) for x in found.ravel().tolist()):
                raise ValueError
            result = found.astype(np.float64)
        except (TypeError, ValueError, OverflowError):
            raise self.refusal(name, "is not made of numbers") from None
        if len(found.shape) != len(shape) or any(n not in (-1, m) for n, m in zip(shape, found.shape, strict=True)):
            raise self.refusal(name, f"has the shape {found.shape}, not {shape}")
        if dtype is np.int64 and not (np.abs(result) < 2.0**53).all():
            raise self.refusal(name, "has a value that is not possible")
        if dtype is np.int64 and (result != np.rint(result)).any():
            raise self.refusal(name, "has a value that is not whole")
        return result.astype(dtype)


def fixed_point(weights: Float64s) -> Int64s:
    """Return weights as integers that sum to WEIGHT_ONE; none above 0 becomes 0.

    Example:
        >>> int(fixed_point(np.array([1 / 3, 2 / 3])).sum()) == WEIGHT_ONE
        True
    """
    if not np.isfinite(weights).all():
        raise no_weights(weights)
    units = np.where(weights > 0, np.maximum(np.rint(weights * WEIGHT_ONE), 1), 0).astype(np.int64)
    units[np.argmax(units)] += WEIGHT_ONE - int(units.sum())
    return units


def normalised_prior(prior: Sequence[float] | Float64s, what: str = "the prior is") -> Float64s:
    """Return the prior with sum 1, or raise SpecError; `what` begins the message."""
    try:
        found = np.asarray(prior, np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.empty(0)
    if found.ndim != 1 or not np.isfinite(found).all() or (found < 0).any() or not (found > 0).any():
        raise SpecError(
            f"{what} {show(prior)}; nothing could be drawn from it. Give each source a finite weight of 0 or more, "
            "and at least one of them more"
        )
    # Only ratios count, and a sum of huge weights may overflow. A weight above 0 stays above 0.
    found = np.where(found > 0, np.maximum(found / found.max(), _SMALLEST_RATIO), 0.0)
    return found / total(found)


def at_least(name: str, value: int, least: int) -> int:
    """Return a whole number, or raise SpecError if it is too small."""
    if not is_whole(value, least):
        raise SpecError(f"{name} is {value!r}; the mixture would never learn. Give a whole number of at least {least}")
    return int(value)


def between(name: str, value: float, least: float, most: float) -> float:
    """Return a number, or raise SpecError if it is out of range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise SpecError(f"{name} is {value!r}; the weights would be wrong. Give a number from {least:g} to {most:g}")
    return float(value)


def softmax(logits: Float64s) -> Float64s:
    """Return exp(x) / sum(exp(x)), relative to the largest x so that nothing overflows; -inf gives 0."""
    largest = logits.max()
    if not math.isfinite(largest):
        raise no_weights(logits)
    shifted = exp(np.maximum(logits - largest, -1e4))
    return shifted / total(shifted)


def no_weights(values: Float64s) -> SpecError:
    """Return the error for weights that are not finite."""
    return SpecError(
        f"the weights of the sources would be made of {show(values.tolist())}, which are not finite, so nothing could "
        "be drawn. Give the rule a smaller eta or graph, or an undamaged state"
    )


def _as_numbers(what: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        found = np.asarray(values)
    except ValueError:
        found = np.empty(0, object)
    if found.dtype.kind not in "biuf":
        raise SpecError(f"{what} is {show(values)}; nothing could be learned from it. Give one number for each source")
    return found


def with_gaps(values: Float64s) -> list[float | None]:
    """Return an array as JSON, with null for nan."""
    return [None if math.isnan(value) else value for value in values.tolist()]
