"""Images: size from the header alone, decoding with libjpeg-turbo, crop, resize, patches. uint8 throughout.

Their samples are ImageText (one image, then its text) and Interleaved (texts and images in any order). Every random
number of an augmentation comes from the item's own seed, and the crop is known before decoding.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageEnhance, UnidentifiedImageError

from overlord.core.kernels import instructions, kernel
from overlord.core.ragged import (
    BAD_COLUMN,
    Ragged,
    RowBatch,
    expand_ranges,
    num_rows,
    offsets_of,
    sizes_column,
    unread_rows,
)
from overlord.core.samples import BAD, SKIP, derive, hash64
from overlord.errors import SpecError
from overlord.job.sample_specs import IMAGE_FORMATS
from overlord.job.specs import Augment, ImageSpec, ImageText, Interleaved, image_grid
from overlord.transforms.samples.image_values import ImageValues, listed_images
from overlord.transforms.samples.per_sample import (
    STAND_IN_TOKEN,
    Bools,
    Fault,
    Finished,
    Measured,
    MediaFault,
    ViewedFile,
    Workers,
    decoder_faults,
    finish_tokens,
    flat,
    media_columns,
    ragged_column,
    read_headers,
)
from overlord.transforms.samples.resize import resize, words
from overlord.transforms.samples.rgb import rgb_pixels, warm_rgb
from overlord.transforms.samples.text import ItemThenText, ItemTokens
from overlord.transforms.samples.tokenize import TextTokenizer, decode_texts

try:
    import simplejpeg
except ImportError:  # a host without it decodes JPEG with Pillow (the same libjpeg-turbo, about half as fast)
    simplejpeg = None

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
UInt8s = npt.NDArray[np.uint8]

MAX_PIXELS = 1 << 26
"""An image with more pixels in its header is treated as a decompression bomb and never decoded."""

_JPEG = b"\xff\xd8"
_PNG = b"\x89PNG\r\n\x1a\n"
_ALIKE = ("YCbCr", "Gray", "RGB")
"""Colour spaces that simplejpeg and Pillow convert to the same RGB; CMYK is left to Pillow."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transpose that turns an image upright, by EXIF orientation."""
_SWAPS = (5, 6, 7, 8)
_WORD = 8
"""Bytes of a line of a patch that are copied at a time."""
_LANES = 16
"""Pixels whose colours are taken apart at a time."""
_PNG_TEXT = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
"""Chunks of a PNG that may hold an orientation."""


def orientation(data: bytes | memoryview, formats: Sequence[str] = IMAGE_FORMATS) -> int:
    """Return the EXIF orientation of an image, 1 to 8; 1 where it has none, or none that can be read.

    Call it after `image_size`: where a PNG has text, Pillow looks for more of it after the pixels.
    """
    try:
        with open_image(data, formats) as image:
            if image.format == "TIFF":  # Pillow turns these by itself
                return 1
            if image.format == "PNG" and not any(mark in bytes(data) for mark in _PNG_TEXT):
                return 1
            found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF data, for which Pillow raises many kinds of errors, does not make an image bad
        return 1
    return found if found in _TURNS else 1


def is_turned(data: bytes | memoryview, formats: Sequence[str] = IMAGE_FORMATS) -> bool:
    """Whether the EXIF data of an image say that it is stored turned or mirrored."""
    return orientation(data, formats) != 1


def image_size(
    data: bytes | memoryview, formats: Sequence[str] = IMAGE_FORMATS, *, upright: bool = False
) -> tuple[int, int]:
    """Return (width, height) from the header, without decoding; of the image turned `upright`, or as it is stored.

    Raises:
        MediaFault: when there is no readable header, or it claims an absurd size.
    """
    with decoder_faults("no readable image header"):
        if simplejpeg is not None and bytes(data[:2]) == _JPEG:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data, strict=False)
        else:
            with open_image(data, formats) as image:
                width, height = image.size
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise MediaFault(f"the header claims {width} x {height} pixels, more than {MAX_PIXELS} in all")
    return (height, width) if upright and orientation(data, formats) in _SWAPS else (width, height)


def decode_image(
    data: bytes | memoryview, formats: Sequence[str] = IMAGE_FORMATS, *, upright: bool = False, divisor: int = 1
) -> UInt8s:
    """Return the image as uint8 [height, width, 3], RGB, on white where it is transparent.

    It is turned `upright` as its EXIF data say, or left as it is stored. A JPEG is decoded at 1/divisor (2, 4, 8) of
    its size, rounded up: libjpeg leaves out the work for the rest.

    Raises:
        MediaFault: when the bytes do not decode.
    """
    turn = _TURNS.get(orientation(data, formats)) if upright else None
    pixels = _decode_stored(data, formats, divisor)
    return pixels if turn is None else np.asarray(Image.fromarray(pixels).transpose(turn))


def jpeg_divisor(data: bytes | memoryview, width: int, height: int, wide: int, high: int) -> int:
    """Return the largest of 8, 4, 2 and 1 by which a JPEG may be divided and is no smaller than it is to become.

    Example:
        >>> jpeg_divisor(_JPEG, 1000, 600, 224, 224), jpeg_divisor(b"PNG", 1000, 600, 224, 224)
        (2, 1)
    """
    if bytes(data[:2]) != _JPEG:
        return 1
    return next(by for by in (8, 4, 2, 1) if by == 1 or (width // by >= wide and height // by >= high))


def _decode_stored(data: bytes | memoryview, formats: Sequence[str], divisor: int) -> UInt8s:
    width, height = image_size(data, formats)
    with decoder_faults("does not decode"):
        if simplejpeg is not None and bytes(data[:2]) == _JPEG:
            try:
                if simplejpeg.decode_jpeg_header(data, strict=False)[2] in _ALIKE:
                    # No factor of libjpeg below 1/divisor has so many pixels, so this is the one it takes.
                    least = (-(-height // divisor), -(-width // divisor)) if divisor > 1 else (0, 0)
                    return simplejpeg.decode_jpeg(data, colorspace="RGB", min_height=least[0], min_width=least[1])
            except Exception:  # rare colour spaces: Pillow supports them, and decides on faults
                pass
        with open_image(data, formats) as image:
            if divisor > 1:
                image.draft("RGB", (width // divisor, height // divisor))
            pixels = rgb_pixels(image, data)
    if pixels.ndim != 3 or pixels.shape[0] * pixels.shape[1] > MAX_PIXELS:
        raise MediaFault(f"decodes to {pixels.shape} pixels")  # another size than its header says
    return pixels


def open_image(data: bytes | memoryview, formats: Sequence[str]) -> Image.Image:
    """Open an image of an allowed format, by its content: Pillow runs programs for some of the others.

    Raises:
        MediaFault: when it has another format.
    """
    # A PNG is not copied, which takes a hundred times as long as its header; the readers of others need more of a file.
    file: Any = ViewedFile(data) if data[: len(_PNG)] == _PNG else io.BytesIO(data)
    try:
        return Image.open(file, formats=tuple(formats))
    except UnidentifiedImageError as error:
        raise MediaFault(
            f"the bytes are no image of an allowed format ({', '.join(formats)}, and the sample's extra_formats)"
        ) from error


def check_formats(spec: ImageSpec) -> None:
    """Refuse formats that Pillow does not know.

    Raises:
        SpecError: with the names that there are.
    """
    if not spec.extra_formats:
        return  # to load every plugin of Pillow takes a while
    Image.init()
    unknown = [name for name in spec.extra_formats if name not in Image.OPEN]
    if unknown:
        raise SpecError(
            f"extra_formats: Pillow has no format {unknown[0]!r} on this host, so its images would all be bad samples. "
            f"It has: {', '.join(sorted(set(Image.OPEN) - {'EPS'}))}."
        )


def resize_image(image: UInt8s, height: int, width: int) -> UInt8s:
    """Return the image at another size (bicubic, antialiased)."""
    if image.shape[:2] == (height, width):
        return image
    return resize(image, height, width)


def patchify_into(image: UInt8s, patch: int, merge: int, out: UInt8s, *, temporal: int = 1) -> None:
    """Write the image as patch rows [patches, 3 * temporal * patch * patch]; patches that merge are neighbours.

    A row holds channel, frame, y and x in this order; all `temporal` frames of a patch are the image.
    """
    height, width, side = image.shape[0], image.shape[1], patch * merge
    if height % side or width % side or out.size != 3 * height * width * temporal or not out.flags.c_contiguous:
        raise ValueError(f"{height} x {width} pixels in patches of {patch} x {merge} do not fill {out.size} bytes")
    if patch < _WORD or width < _LANES:
        cells = image.reshape(height // side, merge, patch, width // side, merge, patch, 3)
        rows = cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, patch, patch)
        out.reshape(-1, 3, temporal, patch, patch)[:] = rows
        return
    pixels = np.ascontiguousarray(image).reshape(height, -1)
    planes = np.empty((patch * merge, 3, width), np.uint8)
    _patchify(pixels, patch, merge, temporal, planes, words(planes, _WORD), words(out, _WORD))


@kernel
def _patchify(
    pixels: UInt8s, patch: int, merge: int, temporal: int, planes: UInt8s, plane_words: Any, out_words: Any
) -> None:
    # Colours are taken apart for whole lines; the lines of patches are then copied eight bytes at a time. The last ones
    # of both overlap those before them.
    width = planes.shape[2]
    at = 0
    for top in range(0, len(pixels), patch * merge):
        for y in range(patch * merge):
            line = np.intp(pixels.ctypes.data) + 3 * width * (top + y)
            plane = np.intp(planes.ctypes.data) + 3 * width * y
            for x in range(0, width, _LANES):
                inside = min(x, width - _LANES)
                _take_apart(line + 3 * inside, plane + inside, width)
        for left in range(0, width, patch * merge):
            for part in range(merge * merge):
                first = part // merge * patch * 3 * width + left + part % merge * patch
                for colour in range(3):
                    for _ in range(temporal):
                        for word in range(-(-patch // _WORD)):
                            inside = min(word * _WORD, patch - _WORD)
                            p, q = np.uintp(first + colour * width + inside), np.uintp(at + inside)
                            for _ in range(patch):
                                out_words[q].word = plane_words[p].word
                                p += np.uintp(3 * width)
                                q += np.uintp(patch)
                        at += patch * patch


@instructions
def _take_apart(builder: Any, line: Any, plane: Any, width: Any) -> None:
    """Write the colours of some pixels into three planes. The compiler makes no vectors of such a loop."""
    from llvmlite import ir

    byte, number = ir.IntType(8), ir.IntType(32)
    given, taken = ir.VectorType(byte, 3 * _LANES), ir.VectorType(byte, _LANES)
    pixels = builder.load(builder.inttoptr(line, given.as_pointer()), align=1)
    for colour in range(3):
        places = ir.Constant(ir.VectorType(number, _LANES), list(range(colour, 3 * _LANES, 3)))
        part = builder.shuffle_vector(pixels, ir.Constant(given, ir.Undefined), places)
        builder.store(part, builder.inttoptr(plane, taken.as_pointer()), align=1)
        plane = builder.add(plane, width)


def warm_images() -> None:
    """Load the kernels of images."""
    for side in (2, 9):  # small images have kernels of their own
        image = resize_image(np.zeros((side, side, 3), np.uint8), _LANES, _LANES)
    patchify_into(image, _LANES, 1, np.empty(3 * _LANES**2, np.uint8))
    warm_rgb()


def normalize_patches(
    rows: UInt8s, mean: Sequence[float], std: Sequence[float], rescale: float, out: npt.NDArray[np.float32]
) -> None:
    """Write patch rows as the floats that an encoder takes: (pixel * rescale - mean) / std of each channel.

    Rows are [patches, 3 * anything], channel by channel as `patchify_into` writes them; `out` is as large.

    Example:
        >>> out = np.empty((1, 6), np.float32)
        >>> normalize_patches(np.array([[0, 255, 0, 255, 0, 255]], np.uint8), [0.5, 0, 0], [0.5, 1, 2], 1 / 255, out)
        >>> out.tolist()
        [[-1.0, 1.0, 0.0, 1.0, 0.0, 0.5]]
    """
    # A pixel has 256 values: each is rounded once, in the order in which image processors do it.
    pixels = (np.arange(256, dtype=np.float64) * rescale).astype(np.float32)
    table = (pixels[None] - np.asarray(mean, np.float32)[:, None]) / np.asarray(std, np.float32)[:, None]
    shape = (len(rows), 3, rows.shape[1] // 3)
    _look_up(np.ascontiguousarray(rows).reshape(shape), table, out.reshape(shape))


@kernel
def _look_up(rows: UInt8s, table: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
    for row in range(rows.shape[0]):
        for channel in range(3):
            for at in range(rows.shape[2]):
                out[row, channel, at] = table[channel, rows[row, channel, at]]


class ImageDecoder:
    """Decodes images to their planned grid: decoded, cropped, resized, altered, cut into patches."""

    def __init__(self, spec: ImageSpec) -> None:
        check_formats(spec)
        self._spec = spec

    def item_bytes(self, grids: npt.NDArray[np.int32]) -> Int64s:
        """Return the bytes of each image's patches."""
        return np.prod(grids.astype(np.int64), axis=1) * (3 * self._spec.temporal * self._spec.patch**2)

    def decode(self, data: memoryview, grid: npt.NDArray[np.int32], seed: int, out: UInt8s) -> None:
        """Decode, resize to the planned grid and patchify one image into its place."""
        spec = self._spec
        high, wide = int(grid[1]) * spec.patch, int(grid[2]) * spec.patch
        image = self._decode_scaled(data, seed, wide, high) if spec.jpeg_scaling else self._decode_whole(data, seed)
        image = resize_image(image, high, wide)
        if spec.augment is not None:
            image = alter_image(image, spec.augment, seed)
        patchify_into(image, spec.patch, spec.merge, out, temporal=spec.temporal)

    def _decode_whole(self, data: memoryview, seed: int) -> UInt8s:
        spec = self._spec
        image = decode_image(data, spec.formats, upright=spec.exif_transpose)
        return image if spec.augment is None else crop_image(image, spec.augment, seed)

    def _decode_scaled(self, data: memoryview, seed: int, wide: int, high: int) -> UInt8s:
        """Decode an image as small as its crop may be; the crop is divided with it."""
        spec = self._spec
        width, height = image_size(data, spec.formats, upright=spec.exif_transpose)
        crop = [0, 0, width, height]
        if spec.augment is not None:
            (crop,) = crop_boxes(spec.augment, [width], [height], [seed]).tolist()
        by = jpeg_divisor(data, crop[2], crop[3], wide, high)
        image = decode_image(data, spec.formats, upright=spec.exif_transpose, divisor=by)
        if crop == [0, 0, width, height]:
            return image
        left, top, width, height = (part // by for part in crop)
        return image[top : top + height, left : left + width]


# -- augmentation -----------------------------------------------------------------------------------------------

_KEYS = {
    name: derive(0, "augment", name) for name in ("item", "area", "shape", "left", "top", "flip", "light", "contrast")
}


def item_seeds(seeds: UInt64s, numbers: npt.NDArray[np.integer]) -> UInt64s:
    """Return the seeds of images, from the seeds of their rows and their places among the images of their rows."""
    return hash64(_KEYS["item"], seeds ^ hash64(_KEYS["item"], numbers))


def crop_boxes(augment: Augment, widths: npt.ArrayLike, heights: npt.ArrayLike, seeds: npt.ArrayLike) -> Int64s:
    """Return the crop of each image as rows of (left, top, width, height).

    Only sums, products, quotients and square roots: they round alike on every machine.

    Example:
        >>> crop_boxes(Augment(flip=0.5), [640], [480], [7]).tolist()
        [[0, 0, 640, 480]]
    """
    width, height = np.asarray(widths, np.int64), np.asarray(heights, np.int64)
    if augment.crop == 1:
        zeros = np.zeros_like(width)
        return np.stack([zeros, zeros, width, height], axis=1)
    seed = np.asarray(seeds, np.uint64)
    share = augment.crop + (1 - augment.crop) * _draw("area", seed)
    turn = 2 * _draw("shape", seed) - 1
    stretch = 1 + np.abs(turn) * (augment.ratio - 1)
    # A crop wider than the image would be cut, and keep less area than drawn.
    stretch = np.minimum(stretch, 1 / share)
    stretch = np.where(turn < 0, 1 / stretch, stretch)
    wide = np.clip(np.ceil(width * np.sqrt(share * stretch)), 1, width).astype(np.int64)
    high = np.clip(np.ceil(height * np.sqrt(share / stretch)), 1, height).astype(np.int64)
    left, top = (_below(room + 1, name, seed) for name, room in (("left", width - wide), ("top", height - high)))
    return np.stack([left, top, wide, high], axis=1)


def crop_image(image: UInt8s, augment: Augment, seed: int) -> UInt8s:
    """Return the part of a decoded image that its seed crops: a view."""
    ((left, top, wide, high),) = crop_boxes(augment, [image.shape[1]], [image.shape[0]], [seed]).tolist()
    return image[top : top + high, left : left + wide]


def alter_image(image: UInt8s, augment: Augment, seed: int) -> UInt8s:
    """Return an image with the brightness, the contrast and the flip that its seed draws."""
    seeds = np.array([seed], np.uint64)
    if augment.brightness or augment.contrast:
        picture = Image.fromarray(image)
        for name, most, enhance in (
            ("light", augment.brightness, ImageEnhance.Brightness),
            ("contrast", augment.contrast, ImageEnhance.Contrast),
        ):
            if most:
                picture = enhance(picture).enhance(1 + most * (2 * float(_draw(name, seeds)[0]) - 1))
        image = np.asarray(picture)
    return image[:, ::-1] if _draw("flip", seeds)[0] < augment.flip else image


def _draw(name: str, seeds: UInt64s) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1), one for each seed."""
    return (hash64(_KEYS[name], seeds) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _below(counts: Int64s, name: str, seeds: UInt64s) -> Int64s:
    return np.minimum((counts * _draw(name, seeds)).astype(np.int64), counts - 1)


# -- samples of images and text ------------------------------------------------------------------------------------


def _read_sizes(spec: ImageSpec, images: Ragged, bad: Bools) -> tuple[Int64s, Int64s, list[Fault]]:
    """Return width and height of images, 1 x 1 of bad ones, and what is wrong with those that are bad from now on."""
    read = functools.partial(image_size, formats=spec.formats, upright=spec.exif_transpose)
    sizes, faults = read_headers(images, bad, read, (1, 1))
    widths, heights = np.array(sizes, np.int64).reshape(-1, 2).T
    return widths, heights, faults


def plan_grids(spec: ImageSpec, widths: Int64s, heights: Int64s, seeds: UInt64s, bad: Bools) -> Int64s:
    """Return the grid (1, patch rows, patch columns) of images once cropped and resized; of bad ones, one token's."""
    if spec.augment is not None:
        boxes = crop_boxes(spec.augment, widths, heights, seeds)
        widths, heights = boxes[:, 2], boxes[:, 3]
    rows, cols = image_grid(spec, widths, heights)
    grids = np.stack([np.ones(len(bad), np.int64), rows, cols], axis=1)
    grids[bad] = (1, spec.merge, spec.merge)
    return grids


class ImageTextTransform(ItemThenText):
    """One image and its text."""

    def __init__(self, spec: ImageText, tokenizer: TextTokenizer, values: ImageValues | None = None) -> None:
        self._spec = spec
        self._values = values or ImageValues()
        super().__init__(spec, "image", tokenizer)
        self.columns = tuple(c for c in (spec.image, spec.text, spec.width, spec.height) if c)
        self.decoder = ImageDecoder(spec)

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        text = self._text.measure(rows, lengths, seeds)
        bad = (text.flags & BAD) > 0
        images, unknown = self._values.find_all(ragged_column(rows, self._spec.image), bad)
        text.faults += unknown
        widths, heights = self._sizes(rows, images, bad, text.faults)
        grids = plan_grids(self._spec, widths, heights, seeds, bad)
        return self._measured(text, bad, images, grids[:, 1] * grids[:, 2] // self._spec.merge**2, grids, seeds)

    def _sizes(self, rows: RowBatch, images: Ragged, bad: Bools, faults: list[Fault]) -> tuple[Int64s, Int64s]:
        if self._spec.width and self._spec.height:
            widths, heights = (np.asarray(rows[c]).astype(np.int64) for c in (self._spec.width, self._spec.height))
            wrong: npt.NDArray[np.bool_] = (widths < 1) | (heights < 1)
            faults.extend((int(r), "the width or height column is not positive") for r in np.flatnonzero(wrong & ~bad))
            bad |= wrong
            return np.where(bad, 1, widths), np.where(bad, 1, heights)
        widths, heights, unreadable = _read_sizes(self._spec, images, bad)
        faults += unreadable
        return widths, heights


# -- Interleaved: one sequence with placeholders where the images are ----------------------------------------------


class RowFault(Exception):
    """A row's texts and images do not match; the reason is logged with the sample's id."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Rows as runs of text with one image between any two: a row of k images has k + 1 runs, some empty."""

    runs: list[str]
    items: Int64s
    """Images of each row."""
    picks: Int64s
    """Which of its row's images each one is."""


@dataclass(frozen=True, slots=True)
class MeasuredImages:
    """The images of some rows, one entry for each image, row after row."""

    encoded: Ragged
    owner: Int64s
    """The row of each."""
    seeds: UInt64s
    grids: Int64s
    placeholders: Int64s
    bad: Bools

    @classmethod
    def of(
        cls, spec: ImageSpec, values: ImageValues | None, images: Ragged, items: Int64s, seeds: UInt64s
    ) -> tuple[MeasuredImages, list[Fault]]:
        """Measure the images of rows by their headers; `items` is how many each row has, `seeds` are of the rows.

        `values` finds what is given as text; None where all are bytes of images.
        Returns them and (row, reason) of those that are bad: they are measured as one token.
        """
        owner = np.repeat(np.arange(len(items)), items)
        numbers = np.arange(len(owner)) - np.repeat(offsets_of(items)[:-1], items)
        item_seed = item_seeds(seeds[owner], numbers)
        bad = np.zeros(len(owner), np.bool_)
        encoded, unknown = values.find_all(images, bad) if values is not None else (images, [])
        widths, heights, unreadable = _read_sizes(spec, encoded, bad)
        grids = plan_grids(spec, widths, heights, item_seed, bad)
        placeholders = grids[:, 1] * grids[:, 2] // spec.merge**2
        faults = [(int(owner[one]), f"image {int(numbers[one])}: {reason}") for one, reason in unknown + unreadable]
        return cls(encoded, owner, item_seed, grids, placeholders, bad), faults

    def keep(self, chosen: Bools) -> MeasuredImages:
        """Return some of the images."""
        if chosen.all():
            return self
        at = np.flatnonzero(chosen)
        return MeasuredImages(
            self.encoded.take(at), self.owner[at], self.seeds[at], self.grids[at], self.placeholders[at], self.bad[at]
        )

    def columns(self, rows: int, start: Int64s) -> RowBatch:
        """Return the columns of so many kept rows that hold these images, each with its first placeholder."""
        items = np.bincount(self.owner, minlength=rows)
        joined = Ragged(self.encoded.values, self.encoded.offsets[offsets_of(items)])
        return media_columns(joined, items=items, nbytes=self.encoded.lengths, start=start, length=self.placeholders,
                             grid=self.grids, seeds=self.seeds)  # fmt: skip


class InterleavedTransform:
    """Texts and images in any order."""

    def __init__(self, spec: Interleaved, tokenizer: TextTokenizer, values: ImageValues | None = None) -> None:
        self._spec = spec
        self._values = values or ImageValues()
        self._tokenizer = tokenizer
        self._image = ItemTokens.of(spec, "image", tokenizer)
        nothing = np.empty(0, np.int32)
        self._begin, self._end = _around(tokenizer) if spec.special_tokens else (nothing, nothing)
        self._layout_column = spec.parts or spec.text
        self.columns: tuple[str, ...] = (*spec.images, self._layout_column)
        self.decoder = ImageDecoder(spec)

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        """Measure rows; all text is tokenized here, so known `lengths` are not used."""
        broken = np.asarray(rows[BAD_COLUMN], np.bool_).copy()
        faults: list[Fault] = unread_rows(rows)
        images, have = row_images(rows, self._spec.images)
        layout = self._lay_out(rows, have, broken, faults)
        chosen = _chosen_images(images, have.sum(axis=1), layout)
        found, unreadable = MeasuredImages.of(self._spec, self._values, chosen, layout.items, seeds)
        faults += unreadable
        bad = broken.copy()
        bad[found.owner[found.bad]] = True
        tokens, loss, start, empty = self._join(layout, found.placeholders, broken)
        loss.values[np.repeat(bad, loss.lengths)] = 0
        kept: RowBatch = {"tokens": tokens, "loss": loss, "empty": empty}
        kept |= found.columns(len(bad), start)
        return Measured(
            tokens=tokens.lengths,
            image_tokens=np.bincount(found.owner, found.placeholders, len(bad)).astype(np.int64),
            images=layout.items,
            flags=(np.where(bad, BAD, 0) | np.where(empty & ~bad, SKIP, 0)).astype(np.int32),
            kept=kept,
            margin=self._image.margin,
            # One reason per row: a sample is bad once, however many of its images are.
            faults=sorted(dict(reversed(faults)).items()),
        )

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        return finish_tokens(kept, planned, bad, "image")

    def _lay_out(self, rows: RowBatch, have: Int64s, broken: Bools, faults: list[Fault]) -> _Layout:
        """Split every row at its images; marks rows that do not make sense as broken: they are one empty text."""
        texts, unreadable = decode_texts(ragged_column(rows, self._layout_column))
        runs: list[str] = []
        items: list[int] = []
        picks: list[int] = []
        # One row at a time: text is split, or JSON parsed.
        for row, text in enumerate(texts):
            laid: tuple[list[str], Sequence[int]] = ([""], [])
            if not broken[row]:
                try:
                    laid = self._split(text, bool(unreadable[row]), have[row])
                except RowFault as fault:
                    faults.append((row, str(fault)))
                    broken[row] = True
            runs += laid[0]
            items.append(len(laid[1]))
            picks += laid[1]
        return _Layout(runs, np.array(items, np.int64), np.array(picks, np.int64))

    def _split(self, text: str, unreadable: bool, have: Int64s) -> tuple[list[str], Sequence[int]]:
        """Return the runs of text of one row, and which of its images stand between them."""
        if unreadable:
            raise RowFault("the text is not valid UTF-8")
        if self._spec.parts is not None:
            return split_parts(text, self._spec.images, have.tolist())
        runs = text.split(self._spec.marker)
        if len(runs) - 1 != have.sum():
            raise RowFault(f"the text has {len(runs) - 1} markers {self._spec.marker!r}, the row {have.sum()} images")
        return runs, range(len(runs) - 1)

    def _join(self, layout: _Layout, placeholders: Int64s, broken: Bools) -> tuple[Ragged, Ragged, Int64s, Bools]:
        """Return tokens and loss of every row, the first placeholder of every image in its row, and empty rows."""
        runs = self._tokenizer.encode(layout.runs, special_tokens=False)
        items = layout.items
        # A row is: begin, run, image, run, .. image, run, end.
        pieces = offsets_of(2 * items + 3)
        lengths = np.zeros(int(pieces[-1]), np.int64)
        at_run, at_image = (expand_ranges(pieces[:-1] + first, more) for first, more in ((1, items + 1), (2, items)))
        at_run += expand_ranges(np.zeros(len(items), np.int64), items + 1)
        at_image += expand_ranges(np.zeros(len(items), np.int64), items)
        lengths[at_run], lengths[at_image] = runs.lengths, placeholders + sum(self._image.margin)
        lengths[pieces[:-1]], lengths[pieces[1:] - 1] = len(self._begin) * ~broken, len(self._end) * ~broken
        ends = offsets_of(lengths)
        whole = np.diff(ends[pieces])
        empty = whole == 0
        offsets = offsets_of(np.maximum(whole, 1))
        shift = np.repeat(offsets[:-1] - ends[pieces[:-1]], np.diff(pieces))
        places = ends[:-1] + shift
        tokens = np.full(int(offsets[-1]), STAND_IN_TOKEN, np.int32)
        loss = np.zeros(int(offsets[-1]), np.uint8)
        for values, at in (
            (flat(runs), at_run),
            (np.tile(self._begin, int((~broken).sum())), pieces[:-1]),
            (np.tile(self._end, int((~broken).sum())), pieces[1:] - 1),
        ):
            where = expand_ranges(places[at], lengths[at])
            tokens[where], loss[where] = values, 1
        first = places[at_image] + self._image.margin[0]
        tokens[expand_ranges(first, placeholders)] = self._image.item
        if self._image.before is not None:
            tokens[first - 1] = self._image.before
        if self._image.after is not None:
            tokens[first + placeholders] = self._image.after
        start = first - np.repeat(offsets[:-1], items)
        return Ragged(tokens, offsets), Ragged(loss, offsets), start, empty


def split_parts(text: str, columns: Sequence[str], have: Sequence[int]) -> tuple[list[str], list[int]]:
    """Return the runs of text between the images of parts (JSON), and which of the row's images they are.

    `have` is how many images each column of the row holds.

    Raises:
        RowFault: when the parts are invalid, or name an image that the row does not have.

    Example:
        >>> split_parts('[{"type": "text", "text": "a"}, {"type": "image", "image": 1}]', ["images"], [2])
        (['a', ''], [1])
    """
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowFault(f"the parts are no JSON: {error}") from error
    if not isinstance(parts, list):
        raise RowFault(f"the parts are no list but {type(parts).__name__}")
    runs: list[str] = [""]
    picks: list[int] = []
    in_order = True
    for number, part in enumerate(cast("list[Any]", parts)):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            runs[-1] += part["text"]
        elif kind == "image":
            named = part.get("image")
            in_order = in_order and named is None
            picks.append(_image_number(len(picks) if named is None else named, columns, have))
            runs.append("")
        else:
            raise RowFault(f'part {number} is neither {{"type": "text", "text": ..}} nor {{"type": "image", ..}}')
    if in_order and len(picks) != sum(have):
        raise RowFault(f"there are {len(picks)} parts that are images, the row has {sum(have)} images")
    return runs, picks


def _image_number(named: object, columns: Sequence[str], have: Sequence[int]) -> int:
    if isinstance(named, str) and named in columns and have[columns.index(named)]:
        return sum(have[: columns.index(named)])
    if isinstance(named, int) and not isinstance(named, bool) and 0 <= named < sum(have):
        return named
    raise RowFault(f"a part wants image {named!r}, the row has {sum(have)} images")


def row_images(rows: RowBatch, columns: Sequence[str]) -> tuple[Ragged, Int64s]:
    """Return all images, one ragged row each, sample by sample; and how many each sample has in each column."""
    parts: list[Ragged] = []
    counts: list[Int64s] = []
    for column in columns:
        data = ragged_column(rows, column)
        many = rows.get(sizes_column(column))
        if isinstance(many, Ragged):
            parts.append(Ragged(data.values, data.offsets[0] + offsets_of(flat(many))))
            counts.append(many.lengths)
        else:
            items, count = listed_images(data)
            parts.append(items)
            counts.append(count)
    have = np.stack(counts, axis=1)
    if len(parts) == 1:
        return parts[0], have
    owner = np.concatenate([np.repeat(np.arange(num_rows(rows)), count) for count in counts])
    return Ragged.concat(parts).take(np.argsort(owner, kind="stable")), have


def _chosen_images(images: Ragged, have: Int64s, layout: _Layout) -> Ragged:
    """Return the images that each sample uses, sample after sample."""
    chosen = np.repeat(offsets_of(have)[:-1], layout.items) + layout.picks
    return images if np.array_equal(chosen, np.arange(len(images))) else images.take(chosen)


def _around(tokenizer: TextTokenizer) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    whole, plain = (tokenizer.encode(["a"], special_tokens=special).values for special in (True, False))
    for at in range(len(whole) - len(plain) + 1):
        if np.array_equal(whole[at : at + len(plain)], plain):
            return whole[:at], whole[at + len(plain) :]
    raise SpecError(
        "special_tokens is True, but this tokenizer does not put its special tokens around a text, so they have no "
        "place around a row of texts and images. Write special_tokens=False."
    )
