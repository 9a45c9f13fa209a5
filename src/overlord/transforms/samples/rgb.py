"""RGB pixels of a picture that Pillow has opened, on white where it is transparent.

Pillow decodes, but for most PNGs: these are inflated by isal, and a kernel undoes their filters, as many rows at a time
as a core's cache holds. Rules of this file:
1. The pixels are those of Pillow's decoder, followed by its `alpha_composite` on white.
2. What Pillow refuses is refused: a PNG that is not as programs write it (one byte a channel, not interlaced, not
   animated, as many bytes as pixels, checksum right, nothing odd after its pixels) is left to Pillow, which decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, PngImagePlugin

from overlord.core.kernels import kernel

try:
    from isal import igzip_lib
except ImportError:  # a machine without it decodes with Pillow
    igzip_lib = None  # type: ignore[assignment]

UInt8s = npt.NDArray[np.uint8]

_CHANNELS = {"L": 1, "P": 1, "LA": 2, "RGB": 3, "RGBA": 4}
"""Bytes of a pixel, by Pillow's mode."""
_TOGETHER = 1 << 17
"""Bytes that are inflated at a time."""
_AFTERWARDS = (b"tIME", b"tEXtdate:")
"""Beginnings of chunks after the pixels that change nothing: ImageMagick writes them."""


def rgb_pixels(image: Image.Image, data: bytes | memoryview) -> UInt8s:
    """Return the pixels [height, width, 3] of a picture that Pillow has opened and not loaded; `data` is its file."""
    pixels = _png_pixels(image, data) if isinstance(image, PngImagePlugin.PngImageFile) else None
    return _on_white(image) if pixels is None else pixels


def warm_rgb() -> None:
    """Load the kernels."""
    pixel = np.zeros((1, 1, 4), np.uint8)
    _white_behind(pixel)
    _undo_filters(np.frombuffer(bytes(5), np.uint8).reshape(1, 5), np.zeros((2, 4), np.uint8), 4)
    _look_up(pixel.reshape(1, 4), np.zeros((256, 3), np.uint8), np.empty((1, 12), np.uint8))


# -- with Pillow's decoder ----------------------------------------------------------------------------------------


def _on_white(image: Image.Image) -> UInt8s:
    """Return RGB pixels, on white where the image is transparent: the same as by Pillow's `alpha_composite`."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return np.asarray(image.convert("RGB"))
    if image.mode == "P":  # only its colours are composited
        colours = image.resize((256, 1), Image.Resampling.NEAREST)
        colours.putdata(range(256))
        image.putpalette(_white_behind(np.asarray(colours.convert("RGBA"))).tobytes())
        del image.info["transparency"]
        return np.asarray(image.convert("RGB"))
    return _white_behind(np.asarray(image if image.mode in ("RGBA", "LA") else image.convert("RGBA")))


def _white_behind(pixels: UInt8s) -> UInt8s:
    """Return RGB pixels of colours, or shades of grey, whose last channel says how opaque they are."""
    out = np.empty((*pixels.shape[:2], 3), np.uint8)
    _composite(np.array(pixels, order="C").reshape(-1, pixels.shape[2]), out.reshape(-1, 3))
    return out


@kernel
def _composite(pixels: UInt8s, out: UInt8s) -> None:
    # One pass: through Pillow it takes four, each over all pixels.
    channels = pixels.shape[1] - 1
    for at in range(len(pixels)):
        alpha = np.int32(pixels[at, channels])
        if alpha == 255:  # most of them
            for colour in range(3):
                out[at, colour] = pixels[at, min(colour, channels - 1)]
            continue
        for colour in range(3):
            value = np.int32(pixels[at, min(colour, channels - 1)])
            blend = 128 * (value * alpha + 255 * (255 - alpha)) + 0x4000  # rounded as Pillow does
            out[at, colour] = ((blend >> 8) + blend) >> 15


# -- PNG ----------------------------------------------------------------------------------------------------------


def _png_pixels(image: PngImagePlugin.PngImageFile, data: bytes | memoryview) -> UInt8s | None:
    """Return the pixels of a PNG, or None where Pillow is to decode it, or to say what is wrong."""
    packed = _packed_pixels(image, data)
    if packed is None:
        return None
    (width, height), channels = image.size, _CHANNELS[image.mode]
    direct = channels == 3
    table = _colours(image) if channels == 1 else None
    pitch = 1 + width * channels  # a row, and before it the number of its filter
    step = min(max(_TOGETHER // pitch, 1), height)
    # A row needs the one above it: the first of these is above the first.
    out = np.empty((height + direct, 3 * width), np.uint8)
    lines = out if direct else np.empty((step + 1, width * channels), np.uint8)
    lines[0] = 0
    inflater = igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_ZLIB)
    for top in range(0, height, step):
        rows = min(step, height - top)
        last = top + rows == height
        try:  # one byte too many is seen after the last row, and the checksum read
            block = inflater.decompress(packed, rows * pitch + last)
        except igzip_lib.error:  # type: ignore[misc]
            return None
        packed = b""
        if len(block) != rows * pitch or inflater.eof != last:
            return None
        these = lines[top : top + rows + 1] if direct else lines[: rows + 1]
        if not _undo_filters(np.frombuffer(block, np.uint8).reshape(rows, pitch), these, channels):
            return None
        if table is not None:
            _look_up(these[1:], table, out[top : top + rows])
        elif not direct:
            _composite(these[1:].reshape(-1, channels), out[top : top + rows].reshape(-1, 3))
        if not direct:
            lines[0] = these[rows]
    return out[direct:].reshape(height, width, 3)


def _packed_pixels(image: PngImagePlugin.PngImageFile, data: bytes | memoryview) -> bytes | None:
    """Return what is to be inflated of a PNG as programs write it, else None."""
    if igzip_lib is None or image.mode not in _CHANNELS or image.is_animated or image.info.get("interlace"):
        return None
    if len(image.tile) != 1 or image.tile[0][1] != (0, 0, *image.size) or image.tile[0].args != image.mode:
        return None
    if image.mode in ("L", "RGB") and "transparency" in image.info:  # one colour: its pixels are the transparent ones
        return None
    parts, at = [], image.tile[0].offset - 8
    while data[at + 4 : at + 8] == b"IDAT":
        end = at + 8 + int.from_bytes(data[at : at + 4])
        parts.append(data[at + 8 : end])
        at = end + 4
    text: Any = image.png
    while bytes(data[at + 4 : at + 13]).startswith(_AFTERWARDS) and text.text_memory + len(data) < 1 << 20:
        at += 12 + int.from_bytes(data[at : at + 4])
    return b"".join(parts) if data[at + 4 : at + 8] == b"IEND" else None


def _colours(image: PngImagePlugin.PngImageFile) -> UInt8s:
    """Return the colour [256, 3] of every value that a pixel may have."""
    values = Image.new(image.mode, (256, 1))
    values.putdata(range(256))
    if image.mode == "P":
        values.palette, values.info = image.palette and image.palette.copy(), dict(image.info)
    return _on_white(values)[0].copy()  # Pillow's arrays are read-only: another type to the compiler


@kernel
def _undo_filters(rows: UInt8s, lines: UInt8s, channels: int) -> bool:
    """Write the bytes of rows below the first line, which is the row above them; False where a filter is unknown."""
    for y in range(len(rows)):
        kind, given = rows[y, 0], rows[y, 1:]
        above, line = lines[y], lines[y + 1]
        if kind == 0:
            for x in range(len(line)):
                line[x] = given[x]
        elif kind == 1:  # constants: the compiler makes a loop for each
            _add_guesses(1, given, above, line, channels)
        elif kind == 2:
            for x in range(len(line)):
                line[x] = given[x] + above[x]
        elif kind == 3:
            _add_guesses(3, given, above, line, channels)
        elif kind == 4:
            _add_guesses(4, given, above, line, channels)
        else:
            return False
    return True


@kernel
def _add_guesses(kind: int, given: UInt8s, above: UInt8s, line: UInt8s, channels: int) -> None:
    # What the next pixel needs stays in registers: to read it from the line again takes twice as long.
    left0 = left1 = left2 = left3 = corner0 = corner1 = corner2 = corner3 = np.int32(0)
    for x in range(np.uintp(0), np.uintp(len(line)), np.uintp(channels)):  # type: ignore[call-overload]
        left0, corner0 = _add_guess(kind, given, above, line, x, left0, corner0)
        if channels > 1:
            left1, corner1 = _add_guess(kind, given, above, line, x + np.uintp(1), left1, corner1)
        if channels > 2:
            left2, corner2 = _add_guess(kind, given, above, line, x + np.uintp(2), left2, corner2)
        if channels > 3:
            left3, corner3 = _add_guess(kind, given, above, line, x + np.uintp(3), left3, corner3)


@kernel
def _add_guess(
    kind: int, given: UInt8s, above: UInt8s, line: UInt8s, x: np.uintp, left: np.int32, corner: np.int32
) -> tuple[np.int32, np.int32]:
    """Write one byte; return it and the one above it, which are the next one's `left` and `corner`."""
    top = np.int32(above[x])
    if kind == 1:
        guess = left
    elif kind == 3:
        guess = (left + top) >> 1
    else:
        # Paeth: whichever is nearest to left + top - corner, where alike in this order. The corner is that unless it
        # lies outside of the two, or at least twice as near to one of them as to the other: then it is that other.
        low, high, edge = min(left, top), max(left, top), 3 * corner - left - top
        guess = low if edge >= high else high if edge <= low else corner
    value = (np.int32(given[x]) + guess) & np.int32(255)
    line[x] = value
    return value, top


@kernel
def _look_up(rows: UInt8s, table: UInt8s, out: UInt8s) -> None:
    for y in range(len(rows)):
        for x in range(rows.shape[1]):
            for colour in range(3):
                out[y, 3 * x + colour] = table[rows[y, x], colour]
