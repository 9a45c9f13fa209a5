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
from overlord.transforms.samples.resize_dots import (
    BITS,
    BYTES,
    TAPS,
    VECTORS,
    dot_columns,
    dot_rows,
    has_dots,
    weight_digits,
)

UInt8s = npt.NDArray[np.uint8]
Filter = Literal["bicubic", "bilinear"]

_HALF = 1 << (BITS - 1)
_ROWS = 64
"""Rows of an image that are turned together (see `_along_rows`): two copies of them stay in a core's cache."""
_STEP = 16
"""Rows are turned in multiples of this: lines of whole vectors, without a remainder."""


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
    """Change the width: some rows are turned into columns, lines of these are joined, and the result turned back.

    Every pixel of a row is made of pixels at a place of its own, three bytes apart, and a compiler makes no vectors of
    such sums. Turned pixels are joined line by line, as rows are: with both turns that takes less than half the time.
    """
    rows, columns = image.shape[:2]
    if columns == width:
        return image
    if columns == 1:
        return np.repeat(image, width, axis=1)
    joined, dots = _table(columns, width, support)
    if dots and width >= VECTORS:
        made, line = (np.empty(3 * size + BYTES, np.uint8) for size in (rows * width, columns))
        dot_columns(image.reshape(rows, -1), line, *dots, made)
        return made[:-BYTES].reshape(rows, width, 3)
    together = min(_ROWS, -(-rows // _STEP) * _STEP)
    turned, done = (np.empty((size, 3 * together), np.uint8) for size in (columns, width))
    out = np.empty((max(rows * width, 2), 3), np.uint8)
    pairs = [(one.reshape(-1), words(one, 4)) for one in (image, turned, done, out)]
    _join_columns(*pairs, rows, turned, *joined, done)
    return out[: rows * width].reshape(rows, width, 3)


def _along_columns(image: UInt8s, height: int, support: float) -> UInt8s:
    """Change the height."""
    if image.shape[0] == height:
        return image
    out = np.empty((height, *image.shape[1:]), np.uint8)
    given, made = image.reshape(len(image), -1), out.reshape(height, -1)
    joined, dots = _table(image.shape[0], height, support)
    if dots and given.shape[1] >= BYTES:
        dot_rows(given, *dots, made)
    else:
        _join_rows(given, *joined, made)
    return out


@functools.lru_cache(maxsize=16)  # images of a source are often of one size; a table takes up to about 100 kB
def _table(size: int, new_size: int, support: float) -> tuple[Any, Any]:
    """Return the weights of an axis, and their digits where sums are made of these: else None."""
    joined = _weights(size, new_size, support)
    usable = has_dots() and -(-int(joined[1].max()) // TAPS) * TAPS <= size
    return joined, weight_digits(size, *joined) if usable else None


def words(array: UInt8s, size: int) -> npt.NDArray[Any]:
    """Return bytes as overlapping words, one beginning at every byte: kernels copy several bytes at a time with them.

    Example:
        >>> words(np.arange(6, dtype=np.uint8), 2).tobytes().hex()
        '00010102020303040405'
    """
    # A field of a packed record is what the compiler loads from any address, aligned or not. There are at least two
    # words: a single one is contiguous, which is another type to the compiler.
    return np.ndarray((array.size - size + 1,), _word_type(size), array, strides=(1,))


_word_type = functools.cache(lambda size: np.dtype([("word", f"u{size}")]))


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
            weights[at, i] = int(share * (1 << BITS) + (-0.5 if share < 0 else 0.5))
    return first, count, weights


@functools.partial(kernel, inline="always")
def _rounded(total: Any) -> Any:
    return np.uint8(min(max(total >> np.int32(BITS), np.int32(0)), np.int32(255)))


@kernel
def _join_columns(
    image: Any, turned: Any, done: Any, out: Any, rows: int, lines: UInt8s, first: Any, count: Any, weights: Any,
    joined: UInt8s,
) -> None:  # fmt: skip
    """Change the width. Arrays come as pairs of bytes and words; `lines` and `joined` are those of turned and done."""
    columns, width, pitch = len(lines), len(joined), lines.shape[1]
    for top in range(0, rows, pitch // 3):
        some = min(pitch // 3, rows - top)
        for part in range(0, some, _STEP):  # as many rows as a core can read ahead
            begin = 3 * columns * (top + part)
            _turn(image, begin, 3 * columns, min(_STEP, some - part), columns, turned, 3 * part, pitch)
        _join_rows(lines, first, count, weights, joined)
        _turn(done, 0, pitch, width, some, out, 3 * width * top, 3 * width)


@kernel
def _turn(source: Any, begin: int, pitch: int, rows: int, columns: int, to: Any, at: int, to_pitch: int) -> None:
    # A pixel is copied as a word of four bytes: the last one is of another pixel, and overwritten by the next word. The
    # last pixel of a column is copied as bytes: behind it are other pixels, or the end of the memory.
    (pixels, fours), (out, out_fours) = source, to
    for column in range(columns):
        p, q = np.uintp(begin + 3 * column), np.uintp(at + to_pitch * column)
        for _ in range(rows - 1):
            out_fours[q].word = fours[p].word
            p += np.uintp(pitch)
            q += np.uintp(3)
        out[q] = pixels[p]
        out[q + np.uintp(1)] = pixels[p + np.uintp(1)]
        out[q + np.uintp(2)] = pixels[p + np.uintp(2)]


@kernel
def _join_rows(lines: UInt8s, first: Any, count: Any, weights: Any, out: UInt8s) -> None:
    # Two lines at a time: half the loads and stores of the sums.
    sums = np.empty(lines.shape[1], np.int32)
    for row in range(len(out)):
        begin, odd = first[row], count[row] % 2
        if odd:
            line, weight = lines[begin], weights[row, 0]
            for x in range(len(sums)):
                sums[x] = np.int32(_HALF) + np.int32(line[x]) * weight
        else:
            sums[:] = np.int32(_HALF)
        for i in range(odd, count[row], 2):
            line, weight, other, another = lines[begin + i], weights[row, i], lines[begin + i + 1], weights[row, i + 1]
            for x in range(len(sums)):
                sums[x] += np.int32(line[x]) * weight + np.int32(other[x]) * another
        for x in range(len(sums)):
            out[row, x] = _rounded(sums[x])
