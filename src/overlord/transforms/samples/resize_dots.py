"""Weighted sums of pixels by dot products of bytes, where a processor has instructions for them.

64-bit Arm has one that multiplies sixteen bytes by sixteen others and adds up every four products; those of 32-bit
numbers make four products in twice the time. A weight is written as three digits of eight bits, so that a weighted sum
is three sums of products of bytes. All of them are exact: the bytes are those of the other kernels of `resize`.

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
BYTES = 16
"""Bytes of a vector."""
VECTORS = 4
"""Vectors of pixels whose sums are made together."""
BITS = 22
"""Fractional bits of a weight: a sum of 255 times all weights of a pixel stays within 32 bits."""
_DIGITS = 3
_MIDDLE = 128
"""What is taken from a pixel: its highest bit is turned over, and is a sign then."""
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
    digits = np.zeros((len(first), groups, BYTES // TAPS, TAPS), np.int8)  # there are three: whole vectors
    for at in range(len(first)):
        start[at] = min(first[at], size - TAPS * groups)
        begin[at] = 1 << (BITS - 1)
        for i in range(count[at]):
            tap, rest = first[at] - start[at] + i, np.int64(weights[at, i])
            begin[at] += _MIDDLE * rest
            for digit in range(_DIGITS):
                low = ((rest + 128) & 255) - 128
                digits[at, tap // TAPS, digit, tap % TAPS] = low
                rest = (rest - low) >> 8
    return start, begin, digits


@kernel
def dot_columns(image: Any, line: Any, start: Any, begin: Any, digits: Any, out: Any) -> None:
    """Change the width; `line` is memory for one row. Vectors reach beyond a row: behind it are `BYTES` more.

    So are they behind `out`. What is written there is overwritten by the next row.
    """
    width, source = len(start), np.intp(line.ctypes.data)
    for row in range(len(image)):
        for i in range(image.shape[1]):
            line[i] = image[row, i] ^ np.uint8(_MIDDLE)
        for x in range(0, width, VECTORS):
            first = min(x, width - VECTORS)
            starts, begins = np.intp(start.ctypes.data) + 8 * first, np.intp(begin.ctypes.data) + 8 * first
            weights = np.intp(digits.ctypes.data) + first * digits.shape[1] * BYTES
            to = np.intp(out.ctypes.data) + 3 * (row * width + first)
            _dot_pixels(source, starts, weights, digits.shape[1], begins, to)


@kernel
def dot_rows(lines: Any, start: Any, begin: Any, digits: Any, out: Any) -> None:
    """Change the height."""
    pitch = lines.shape[1]
    for row in range(len(start)):
        source, to = np.intp(lines.ctypes.data) + start[row] * pitch, np.intp(out.ctypes.data) + row * pitch
        weights = np.intp(digits.ctypes.data) + row * digits.shape[1] * BYTES
        for x in range(0, pitch, BYTES):
            inside = min(x, pitch - BYTES)
            _dot_lines(source + inside, pitch, weights, digits.shape[1], begin[row], to + inside)


@instructions
def _dot_pixels(b: Any, source: Any, starts: Any, digits: Any, groups: Any, begins: Any, out: Any) -> None:
    """Write some pixels of one row, and four bytes more."""
    colours = [3 * tap + colour for colour in range(3) for tap in range(TAPS)] + [0] * (BYTES - 3 * TAPS)
    places = [_loaded(b, _plus(b, starts, 8 * one), source.type) for one in range(VECTORS)]
    rows = [b.add(source, b.mul(place, place.type(3))) for place in places]
    begin = [_loaded(b, _plus(b, begins, 8 * one), source.type) for one in range(VECTORS)]
    weights = [b.add(digits, b.mul(groups, groups.type(BYTES * one))) for one in range(VECTORS)]

    def pixels(group: Any) -> list[Any]:
        found = [_bytes_at(b, b.add(row, b.mul(group, group.type(3 * TAPS)))) for row in rows]
        return [_shuffled(b, one, one, colours) for one in found]

    done = _sums(b, groups, weights, begin, pixels)
    order = [4 * one + colour for one in range(VECTORS) for colour in range(3)] + [0] * (BYTES - 3 * VECTORS)
    b.store(_shuffled(b, done, done, order), b.inttoptr(out, done.type.as_pointer()), align=1)


@instructions
def _dot_lines(b: Any, source: Any, pitch: Any, digits: Any, groups: Any, begin: Any, out: Any) -> None:
    """Write some bytes of one row."""
    low, high = ([n // 2 + BYTES * (n % 2) + first for n in range(BYTES)] for first in (0, BYTES // 2))

    def pixels(group: Any) -> list[Any]:
        line = b.mul(group, group.type(TAPS))
        lines = [_bytes_at(b, b.add(source, b.mul(pitch, _plus(b, line, tap)))) for tap in range(TAPS)]
        lines = [b.xor(one, one.type([_MIDDLE] * BYTES)) for one in lines]
        found = []
        for half in (low, high):
            even, odd = (_shuffled(b, lines[one], lines[one + 2], half) for one in (0, 1))
            found += [_shuffled(b, even, odd, low), _shuffled(b, even, odd, high)]
        return found

    done = _sums(b, groups, [digits] * VECTORS, [begin] * VECTORS, pixels)
    b.store(done, b.inttoptr(out, done.type.as_pointer()), align=1)


def _sums(b: Any, groups: Any, digits: list[Any], begin: list[Any], pixels: Callable[[Any], list[Any]]) -> Any:
    """Return sixteen weighted sums, rounded to bytes.

    Args:
        b: The builder.
        groups: How many groups of pixels there are.
        digits: Where those of the weights are, for each vector of pixels.
        begin: What its sums begin with.
        pixels: Gives the vectors of pixels of a group, from -128 to 127.
    """
    from llvmlite import ir
    from numba.core import cgutils

    byte, number = ir.VectorType(ir.IntType(8), BYTES), ir.VectorType(ir.IntType(32), BYTES // TAPS)
    nothing = ir.Constant(number, None)
    add_dots = _add_dots if has_dots() else _add_products
    sums = []
    for one in begin:
        whole = b.insert_element(nothing, b.trunc(one, number.element), ir.IntType(32)(0))
        given = [_shuffled(b, whole, whole, [0] * number.count), *[nothing] * (_DIGITS - 1)]
        sums.append([cgutils.alloca_once_value(b, value) for value in given])
    with cgutils.for_range(b, groups) as loop:
        for vector, at, total in zip(pixels(loop.index), digits, sums, strict=True):
            weights = _loaded(b, b.add(at, b.mul(loop.index, loop.index.type(BYTES))), number)
            for digit in range(_DIGITS):
                same = b.bitcast(_shuffled(b, weights, weights, [digit] * number.count), byte)
                b.store(add_dots(b, b.load(total[digit]), vector, same), total[digit])
    parts = []
    for total in sums:
        part = b.load(total[0])
        for one in total[1:]:  # what is below the next digit is only carried over: the bits behind it are not asked for
            part = b.add(b.load(one), b.ashr(part, ir.Constant(number, [8] * number.count)))
        parts.append(b.ashr(part, ir.Constant(number, [BITS - 8 * (_DIGITS - 1)] * number.count)))
    while len(parts) > 1:
        every = list(range(2 * parts[0].type.count))
        parts = [_shuffled(b, one, two, every) for one, two in zip(parts[::2], parts[1::2], strict=True)]
    (done,) = parts
    for bits, limits in ((16, ((">", 0), ("<", 0xFFFF))), (8, (("<", 0xFF),))):  # as there are instructions for
        for sign, most in limits:
            limit = ir.Constant(done.type, [most] * BYTES)
            compare = b.icmp_signed if bits == 16 else b.icmp_unsigned
            done = b.select(compare(sign, done, limit), done, limit)
        done = b.trunc(done, ir.VectorType(ir.IntType(bits), BYTES))
    return done


def _add_dots(b: Any, total: Any, one: Any, two: Any) -> Any:
    """Add the products of every four bytes to a sum, by the instruction."""
    from llvmlite import ir
    from numba.core import cgutils

    # A compiler that does not know this processor would not use its instructions. llvmlite refuses such an attribute.
    set.add(b.function.attributes, '"target-features"="+neon,+dotprod"')
    kind = ir.FunctionType(total.type, [total.type, one.type, two.type])
    return b.call(
        cgutils.get_or_insert_function(b.module, kind, "llvm.aarch64.neon.sdot.v4i32.v16i8"), [total, one, two]
    )


def _add_products(b: Any, total: Any, one: Any, two: Any) -> Any:
    """Do the same where there is no such instruction: slower than the plain kernel, but it can be tested there."""
    from llvmlite import ir

    wide = ir.VectorType(total.type.element, BYTES)
    products = b.mul(b.sext(one, wide), b.sext(two, wide))
    for tap in range(TAPS):
        total = b.add(total, _shuffled(b, products, products, list(range(tap, BYTES, TAPS))))
    return total


def _plus(b: Any, value: Any, more: int) -> Any:
    return b.add(value, value.type(more))


def _loaded(b: Any, address: Any, kind: Any) -> Any:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=1)


def _bytes_at(b: Any, address: Any) -> Any:
    from llvmlite import ir

    return _loaded(b, address, ir.VectorType(ir.IntType(8), BYTES))


def _shuffled(b: Any, one: Any, two: Any, order: list[int]) -> Any:
    from llvmlite import ir

    return b.shuffle_vector(one, two, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order))
