"""Weighted sums of pixels by dot products of bytes, where a processor has instructions for them.

64-bit Arm has one that multiplies sixteen bytes by sixteen others and adds up every four products; its usual
multiplications of 32-bit numbers take ten times as long. A weight is written as three digits of eight bits, so that a
weighted sum is three sums of products of bytes. All of them are exact: the result is that of `resize`.

A digit goes from -128 to 127, and so must a pixel: 128 is taken from it, and the sum of all weights times 128 is added
to what a sum begins with.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from overlord.core.kernels import instructions, kernel

TAPS = 4
"""Pixels that one instruction adds up."""
ROWS = 4
"""Rows whose pixels are summed together: they share the digits of their weights."""
BYTES = 16
"""Bytes of a vector."""
BITS = 22
"""Fractional bits of a weight: a sum of 255 times all weights of a pixel stays within 32 bits."""
_DIGITS = 3
_HWCAP, _ASIMDDP = 16, 1 << 20
"""Which of the kernel's values lists the abilities of a processor, and this one there."""


@functools.cache
def has_dots() -> bool:
    """Whether this processor has the instruction."""
    if sys.platform != "linux" or platform.machine() != "aarch64":
        return False
    return bool(ctypes.CDLL(None).getauxval(_HWCAP) & _ASIMDDP)


@kernel
def weight_digits(size: int, first: Any, count: Any, weights: Any) -> Any:
    """Return, for every pixel, the first old pixel of its sum, what the sum begins with, and digits of the weights.

    All sums have equally many pixels, a multiple of `TAPS`; those in excess have the weight 0.
    """
    groups = (count.max() + TAPS - 1) // TAPS
    begin, start = np.empty(len(first), np.int64), np.empty(len(first), np.int64)
    digits = np.zeros((len(first), groups, _DIGITS, TAPS), np.int8)
    for at in range(len(first)):
        start[at] = min(first[at], size - TAPS * groups)
        begin[at] = 1 << (BITS - 1)
        for i in range(count[at]):
            tap, rest = first[at] - start[at] + i, np.int64(weights[at, i])
            begin[at] += 128 * rest
            for digit in range(_DIGITS):
                low = ((rest + 128) & 255) - 128
                digits[at, tap // TAPS, digit, tap % TAPS] = low
                rest = (rest - low) >> 8
    return start, begin, digits


@kernel
def dot_columns(image: Any, last: Any, start: Any, begin: Any, digits: Any, out: Any) -> None:
    """Change the width; `last` is a copy of the last rows with room behind it, where vectors are read beyond them."""
    rows, pitch, to_pitch = image.shape[0], image.shape[1], out.shape[1]
    for some in range(0, rows, ROWS):
        top = min(some, rows - ROWS)
        source = np.intp(last.ctypes.data) if top == rows - ROWS else np.intp(image.ctypes.data) + top * pitch
        to = np.intp(out.ctypes.data) + top * to_pitch
        for x in range(len(start)):
            weights = np.intp(digits.ctypes.data) + x * digits.shape[1] * (_DIGITS * TAPS)
            _dot_pixels(source + 3 * start[x], pitch, weights, digits.shape[1], begin[x], to + 3 * x, to_pitch)


@kernel
def dot_rows(lines: Any, start: Any, begin: Any, digits: Any, out: Any) -> None:
    """Change the height."""
    pitch = lines.shape[1]
    for row in range(len(start)):
        source, to = np.intp(lines.ctypes.data) + start[row] * pitch, np.intp(out.ctypes.data) + row * pitch
        weights = np.intp(digits.ctypes.data) + row * digits.shape[1] * (_DIGITS * TAPS)
        for x in range(0, pitch, BYTES):
            inside = min(x, pitch - BYTES)
            _dot_lines(source + inside, pitch, weights, digits.shape[1], begin[row], to + inside)


@instructions
def _dot_pixels(b: Any, source: Any, pitch: Any, digits: Any, groups: Any, begin: Any, out: Any, to_pitch: Any) -> None:
    """Write one pixel of some rows."""
    from llvmlite import ir

    together = [3 * tap + colour for colour in range(3) for tap in range(TAPS)] + [0] * (BYTES - 3 * TAPS)

    def vectors(group: Any) -> list[Any]:
        at = b.add(source, b.mul(group, group.type(3 * TAPS)))
        rows = [_bytes_at(b, b.add(at, b.mul(pitch, pitch.type(row)))) for row in range(ROWS)]
        return [_shuffled(b, row, row, together) for row in rows]

    pixels = b.bitcast(_sums(b, groups, digits, begin, vectors), ir.VectorType(ir.IntType(32), ROWS))
    for row in range(ROWS):
        pixel, to = b.extract_element(pixels, ir.IntType(32)(row)), b.add(out, b.mul(to_pitch, to_pitch.type(row)))
        for size, offset in ((16, 0), (8, 2)):
            part, place = ir.IntType(size), b.add(to, to.type(offset))
            value = b.trunc(b.lshr(pixel, pixel.type(8 * offset)), part)
            b.store(value, b.inttoptr(place, part.as_pointer()), align=1)


@instructions
def _dot_lines(b: Any, source: Any, pitch: Any, digits: Any, groups: Any, begin: Any, out: Any) -> None:
    """Write some bytes of one row."""
    low, high = ([n // 2 + BYTES * (n % 2) + first for n in range(BYTES)] for first in (0, BYTES // 2))

    def vectors(group: Any) -> list[Any]:
        line = b.mul(group, group.type(TAPS))
        one, two, three, four = (
            _bytes_at(b, b.add(source, b.mul(pitch, b.add(line, line.type(tap))))) for tap in range(TAPS)
        )
        found = []
        for half in (low, high):
            odd, even = _shuffled(b, one, three, half), _shuffled(b, two, four, half)
            found += [_shuffled(b, odd, even, low), _shuffled(b, odd, even, high)]
        return found

    done = _sums(b, groups, digits, begin, vectors)
    b.store(done, b.inttoptr(out, done.type.as_pointer()), align=1)


def _sums(b: Any, groups: Any, digits: Any, begin: Any, vectors: Callable[[Any], list[Any]]) -> Any:
    """Return sixteen weighted sums, rounded to bytes; `vectors` gives the four vectors of pixels of a group."""
    from llvmlite import ir
    from numba.core import cgutils

    # A compiler that does not know this processor would not use its instructions. llvmlite refuses such an attribute.
    set.add(b.function.attributes, '"target-features"="+neon,+dotprod"')
    byte, number = ir.VectorType(ir.IntType(8), BYTES), ir.VectorType(ir.IntType(32), BYTES // TAPS)
    dot_type = ir.FunctionType(number, [number, byte, byte])
    dot = cgutils.get_or_insert_function(b.module, dot_type, "llvm.aarch64.neon.sdot.v4i32.v16i8")
    first = [_repeated(b, b.trunc(begin, number.element), number), *[ir.Constant(number, None)] * (_DIGITS - 1)]
    sums = [[cgutils.alloca_once_value(b, one) for one in first] for _ in range(TAPS)]
    with cgutils.for_range(b, groups) as loop:
        pixels = [b.xor(one, ir.Constant(byte, [128] * BYTES)) for one in vectors(loop.index)]
        at = b.add(digits, b.mul(loop.index, loop.index.type(_DIGITS * TAPS)))
        for digit in range(_DIGITS):
            place = b.inttoptr(b.add(at, at.type(digit * TAPS)), number.element.as_pointer())
            weights = b.bitcast(_repeated(b, b.load(place, align=1), number), byte)
            for vector, total in zip(pixels, sums, strict=True):
                b.store(b.call(dot, [b.load(total[digit]), vector, weights]), total[digit])
    parts = []
    for total in sums:
        part = b.load(total[0])
        for one in total[1:]:  # what is below the next digit is only carried over: the bits behind it are not asked for
            part = b.add(b.load(one), b.ashr(part, ir.Constant(number, [8] * number.count)))
        parts.append(b.ashr(part, ir.Constant(number, [BITS - 8 * (_DIGITS - 1)] * number.count)))
    while len(parts) > 1:
        every = list(range(2 * parts[0].type.count))
        parts = [_shuffled(b, one, two, every) for one, two in zip(parts[::2], parts[1::2], strict=True)]
    (whole,) = parts
    for bits, limits in ((16, ((">", 0), ("<", 0xFFFF))), (8, (("<", 0xFF),))):  # as there are instructions for
        for sign, most in limits:
            limit = ir.Constant(whole.type, [most] * BYTES)
            compare = b.icmp_signed if bits == 16 else b.icmp_unsigned
            whole = b.select(compare(sign, whole, limit), whole, limit)
        whole = b.trunc(whole, ir.VectorType(ir.IntType(bits), BYTES))
    return whole


def _bytes_at(b: Any, address: Any) -> Any:
    from llvmlite import ir

    return b.load(b.inttoptr(address, ir.VectorType(ir.IntType(8), BYTES).as_pointer()), align=1)


def _shuffled(b: Any, one: Any, two: Any, order: list[int]) -> Any:
    from llvmlite import ir

    return b.shuffle_vector(one, two, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order))


def _repeated(b: Any, value: Any, vector: Any) -> Any:
    from llvmlite import ir

    nothing = ir.Constant(vector, ir.Undefined)
    return _shuffled(b, b.insert_element(nothing, value, ir.IntType(32)(0)), nothing, [0] * vector.count)
