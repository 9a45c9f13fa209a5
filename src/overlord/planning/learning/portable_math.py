"""exp, log and sums that give the same bits on every machine.

numpy and the C library compute exp and log with an error that differs between processors and versions. Here
they are made of +, -, *, / and exact scaling by powers of two only, each of which IEEE 754 rounds in
one way; sums have a fixed order. The error stays below a few units in the last place.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]

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
