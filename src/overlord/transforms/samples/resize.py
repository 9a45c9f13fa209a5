"""Resizing images to the bytes that Pillow 13 gives, in kernels that release the interpreter lock.

Pillow copies an image in and out of its own memory while it holds the lock, so that the threads of one process stop at
about a thousand images a second. Here every thread works on numpy arrays alone.

How it works: an image is resized along one axis, rounded to bytes, and then along the other. A pixel of the result is a
weighted sum of the pixels around its place. The weights come from a filter that is stretched where the image shrinks;
they are computed in double precision and rounded to fixed point, so that the sums are exact.

Rules of this file:
1. The result is that of Pillow 13 in every byte, whichever Pillow is installed. Older ones always change width first
   (see `_rows_first`), and differ by a few levels where an image shrinks much more in height than in width.
2. Doubles are added in a fixed order, without fused multiplications: weights are the same on every machine.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from overlord.core.kernels import kernel

UInt8s = npt.NDArray[np.uint8]
Filter = Literal["bicubic", "bilinear"]

_BITS = 22
"""Fractional bits of a weight: a sum of 255 times all weights of a pixel stays within 32 bits."""
_HALF = 1 << (_BITS - 1)
_TOGETHER = 4
"""Pixels that one turn of the inner loop adds: 12 bytes and 12 weights, which compile to vector instructions."""


def resize(image: UInt8s, height: int, width: int, kind: Filter = "bicubic") -> UInt8s:
    """Return an RGB image [height, width, 3] at another size, antialiased.

    Example:
        >>> ramp = np.repeat(np.arange(0, 240, 30, dtype=np.uint8), 3).reshape(1, 8, 3)
        >>> resize(ramp, 1, 4)[0, :, 0].tolist()
        [16, 74, 136, 194]
    """
    support = 2.0 if kind == "bicubic" else 1.0
    # A read-only array, as Pillow gives, would be another type to the compiler, and compile every kernel again.
    image = np.ascontiguousarray(image) if image.flags.writeable else image.copy()
    if _rows_first(image.shape[0], image.shape[1], height, width):
        return _along_rows(_along_columns(image, height, support), width, support)
    return _along_columns(_along_rows(image, width, support), height, support)


def _rows_first(height: int, width: int, new_height: int, new_width: int) -> bool:
    """Whether rows are joined before columns: where an image shrinks much more in height than in width."""
    return new_height < height and height - new_height > 2 * (width - new_width)


def _along_rows(image: UInt8s, width: int, support: float) -> UInt8s:
    """Change the width."""
    rows, columns = image.shape[:2]
    if columns == width:
        return image
    first, weights, blocks = _grouped(*_weights(columns, width, support), columns)
    if columns < _TOGETHER * blocks:  # the inner loop reads whole groups of pixels
        image = np.concatenate([image, np.zeros((rows, _TOGETHER * blocks - columns, 3), np.uint8)], axis=1)
    out = np.empty((rows, width, 3), np.uint8)
    _join_columns(image.reshape(-1), 3 * image.shape[1], first, weights, blocks, out.reshape(-1))
    return out


def _along_columns(image: UInt8s, height: int, support: float) -> UInt8s:
    """Change the height."""
    if image.shape[0] == height:
        return image
    out = np.empty((height, *image.shape[1:]), np.uint8)
    _join_rows(image.reshape(len(image), -1), *_weights(image.shape[0], height, support), out.reshape(height, -1))
    return out


@kernel
def _weights(size: int, new_size: int, support: float) -> Any:
    """Return, for every pixel of an axis, the first old pixel it is made of, how many there are, and their weights."""
    scale = size / new_size
    stretch = max(scale, 1.0)
    reach = support * stretch
    most = int(np.ceil(reach)) * 2 + 1
    first, count = np.empty(new_size, np.int64), np.empty(new_size, np.int64)
    weights = np.zeros((new_size, most), np.int32)
    exact = np.empty(most, np.float64)
    for at in range(new_size):
        center = (at + 0.5) * scale
        first[at] = max(int(center - reach + 0.5), 0)
        count[at] = min(int(center + reach + 0.5), size) - first[at]
        total = 0.0
        for i in range(count[at]):
            x = abs((i + first[at] - center + 0.5) * (1.0 / stretch))
            if support == 1.0:
                exact[i] = 1.0 - x if x < 1.0 else 0.0
            elif x < 1.0:
                exact[i] = (1.5 * x - 2.5) * x * x + 1
            else:
                exact[i] = (((x - 5) * x + 8) * x - 4) * -0.5 if x < 2.0 else 0.0
            total += exact[i]
        for i in range(count[at]):
            share = exact[i] / total if total != 0.0 else exact[i]
            weights[at, i] = int(share * (1 << _BITS) + (-0.5 if share < 0 else 0.5))
    return first, count, weights


@kernel
def _grouped(first: Any, count: Any, weights: Any, size: int) -> Any:
    """Return the weights in whole groups of pixels, each three times for the three colours, and where they begin."""
    blocks = -(-count.max() // _TOGETHER)
    wide = _TOGETHER * blocks
    begin = np.minimum(first, max(size - wide, 0))
    out = np.zeros((len(first), 3 * wide), np.int32)
    for at in range(len(first)):
        for i in range(count[at]):
            place = 3 * (first[at] - begin[at] + i)
            out[at, place] = out[at, place + 1] = out[at, place + 2] = weights[at, i]
    return begin, out.reshape(-1), blocks


@functools.partial(kernel, inline="always")
def _rounded(total: Any) -> Any:
    return np.uint8(min(max(total >> np.int32(_BITS), np.int32(0)), np.int32(255)))


@kernel
def _join_columns(pixels: UInt8s, stride: int, first: Any, weights: Any, blocks: int, out: UInt8s) -> None:
    # Twelve sums in variables of their own, and unsigned indices: 1.3 times as fast as sums in a small array.
    to = np.uintp(0)
    for row in range(len(out) // (3 * len(first))):
        at = np.uintp(0)
        for column in range(len(first)):
            p = np.uintp(row * stride + 3 * first[column])
            a = b = c = d = e = f = g = h = i = j = k = m = np.int32(0)
            for _ in range(blocks):
                a += np.int32(pixels[p]) * weights[at]
                b += np.int32(pixels[p + np.uintp(1)]) * weights[at + np.uintp(1)]
                c += np.int32(pixels[p + np.uintp(2)]) * weights[at + np.uintp(2)]
                d += np.int32(pixels[p + np.uintp(3)]) * weights[at + np.uintp(3)]
                e += np.int32(pixels[p + np.uintp(4)]) * weights[at + np.uintp(4)]
                f += np.int32(pixels[p + np.uintp(5)]) * weights[at + np.uintp(5)]
                g += np.int32(pixels[p + np.uintp(6)]) * weights[at + np.uintp(6)]
                h += np.int32(pixels[p + np.uintp(7)]) * weights[at + np.uintp(7)]
                i += np.int32(pixels[p + np.uintp(8)]) * weights[at + np.uintp(8)]
                j += np.int32(pixels[p + np.uintp(9)]) * weights[at + np.uintp(9)]
                k += np.int32(pixels[p + np.uintp(10)]) * weights[at + np.uintp(10)]
                m += np.int32(pixels[p + np.uintp(11)]) * weights[at + np.uintp(11)]
                p += np.uintp(12)
                at += np.uintp(12)
            out[to] = _rounded(np.int32(_HALF) + a + d + g + j)
            out[to + np.uintp(1)] = _rounded(np.int32(_HALF) + b + e + h + k)
            out[to + np.uintp(2)] = _rounded(np.int32(_HALF) + c + f + i + m)
            to += np.uintp(3)


@kernel
def _join_rows(lines: UInt8s, first: Any, count: Any, weights: Any, out: UInt8s) -> None:
    sums = np.empty(lines.shape[1], np.int32)
    for row in range(len(out)):
        sums[:] = np.int32(_HALF)
        for i in range(count[row]):
            weight, line = weights[row, i], lines[first[row] + i]
            for x in range(len(sums)):
                sums[x] += np.int32(line[x]) * weight
        for x in range(len(sums)):
            out[row, x] = _rounded(sums[x])
