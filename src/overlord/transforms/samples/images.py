"""Images: size from the header alone, decoding with libjpeg-turbo, crop, resize, patches. uint8 throughout.

Every random number of an augmentation comes from the item's own seed, and the crop is known before decoding.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageEnhance, UnidentifiedImageError

from overlord.core.samples import derive, hash64
from overlord.errors import SpecError
from overlord.job.media_specs import IMAGE_FORMATS
from overlord.job.specs import Augment, ImageSpec
from overlord.transforms.samples.per_sample import MediaFault, decoder_faults
from overlord.transforms.samples.resize import resize

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

    Args:
        data: The encoded image.
        formats: The formats it may have, by its content; Pillow's names.
        upright: Whether it is turned as its EXIF data say.

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


def decode_image(data: bytes | memoryview, formats: Sequence[str] = IMAGE_FORMATS, *, upright: bool = False) -> UInt8s:
    """Return the image as uint8 [height, width, 3], RGB, on white where it is transparent.

    It is turned `upright` as its EXIF data say, or left as it is stored.

    Args:
        data: The encoded image.
        formats: The formats it may have, by its content; Pillow's names.
        upright: Whether it is turned as its EXIF data say.

    Raises:
        MediaFault: when the bytes do not decode.
    """
    turn = _TURNS.get(orientation(data, formats)) if upright else None
    pixels = _decode_stored(data, formats)
    return pixels if turn is None else np.asarray(Image.fromarray(pixels).transpose(turn))


def _decode_stored(data: bytes | memoryview, formats: Sequence[str]) -> UInt8s:
    image_size(data, formats)
    with decoder_faults("does not decode"):
        if simplejpeg is not None and bytes(data[:2]) == _JPEG:
            try:
                if simplejpeg.decode_jpeg_header(data, strict=False)[2] in _ALIKE:
                    return simplejpeg.decode_jpeg(data, colorspace="RGB")
            except Exception:  # rare colour spaces: Pillow supports them, and decides on faults
                pass
        with open_image(data, formats) as image:
            pixels = np.asarray(_on_white(image))
    if pixels.ndim != 3 or pixels.shape[0] * pixels.shape[1] > MAX_PIXELS:
        raise MediaFault(f"decodes to {pixels.shape} pixels")  # another size than its header says
    return pixels


def open_image(data: bytes | memoryview, formats: Sequence[str]) -> Image.Image:
    """Open an image of an allowed format, by its content: Pillow runs programs for some of the others.

    Raises:
        MediaFault: when it has another format.
    """
    try:
        return Image.open(io.BytesIO(data), formats=tuple(formats))
    except UnidentifiedImageError as error:
        raise MediaFault(
            f"the bytes are no image of an allowed format ({', '.join(formats)}, and the sample's extra_formats)"
        ) from error


def check_formats(spec: ImageSpec) -> None:
    """Refuse formats that Pillow does not know.

    Raises:
        SpecError: with the names that there are.
    """
    Image.init()
    unknown = [name for name in spec.extra_formats if name not in Image.OPEN]
    if unknown:
        raise SpecError(
            f"extra_formats: Pillow has no format {unknown[0]!r} on this host, so its images would all be bad samples. "
            f"It has: {', '.join(sorted(set(Image.OPEN) - {'EPS'}))}."
        )


def _on_white(image: Image.Image) -> Image.Image:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


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
    _patchify(np.ascontiguousarray(image).reshape(-1), height, width, patch, merge, temporal, out.reshape(-1))


@numba.njit(nogil=True, cache=True)
def _patchify(pixels: UInt8s, height: int, width: int, patch: int, merge: int, temporal: int, out: UInt8s) -> None:
    # One loop for the three colours compiles to interleaved vector loads: three times as fast as numpy's transpose.
    plane, three = np.uintp(patch * patch), np.uintp(3)
    at = np.uintp(0)
    for top in range(0, height, patch * merge):
        for left in range(0, width, patch * merge):
            for part in range(merge * merge):
                y, x = top + part // merge * patch, left + part % merge * patch
                for line in range(patch):
                    source = np.uintp(((y + line) * width + x) * 3)
                    red = at + np.uintp(line * patch)
                    green, blue = red + np.uintp(temporal) * plane, red + np.uintp(2 * temporal) * plane
                    for i in range(np.uintp(patch)):
                        out[red + i] = pixels[source + three * i]
                        out[green + i] = pixels[source + three * i + np.uintp(1)]
                        out[blue + i] = pixels[source + three * i + np.uintp(2)]
                for colour in range(3):
                    first = at + np.uintp(colour * temporal) * plane
                    for frame in range(1, temporal):
                        again = first + np.uintp(frame) * plane
                        for i in range(plane):
                            out[again + i] = out[first + i]
                at += np.uintp(3 * temporal) * plane


def normalize_patches(
    rows: UInt8s, mean: Sequence[float], std: Sequence[float], rescale: float, out: npt.NDArray[np.float32]
) -> None:
    """Write patch rows as the floats that an encoder takes: (pixel * rescale - mean) / std of each channel.

    Args:
        rows: [patches, 3 * anything], channel by channel as `patchify_into` writes them.
        mean: Mean of each of the three channels, after rescaling.
        std: Standard deviation of each channel.
        rescale: What a pixel (0 to 255) is multiplied with, usually 1 / 255.
        out: As large as `rows`.

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


@numba.njit(nogil=True, cache=True)
def _look_up(rows: UInt8s, table: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
    for row in range(rows.shape[0]):
        for channel in range(3):
            for at in range(rows.shape[2]):
                out[row, channel, at] = table[channel, rows[row, channel, at]]


class ImageDecoder:
    """Decodes images to their planned grid: decoded, cropped, resized, altered, cut into patches."""

    def __init__(self, spec: ImageSpec) -> None:
        self._patch = spec.patch
        self._merge = spec.merge
        self._temporal = spec.temporal
        self._augment = spec.augment
        self._formats = spec.formats
        check_formats(spec)
        self._upright = spec.exif_transpose

    def item_bytes(self, grids: npt.NDArray[np.int32]) -> Int64s:
        """Return the bytes of each image's patches."""
        return np.prod(grids.astype(np.int64), axis=1) * (3 * self._temporal * self._patch**2)

    def decode(self, data: memoryview, grid: npt.NDArray[np.int32], seed: int, out: UInt8s) -> None:
        """Decode, resize to the planned grid and patchify one image into its place."""
        image = decode_image(data, self._formats, upright=self._upright)
        if self._augment is not None:
            image = crop_image(image, self._augment, seed)
        image = resize_image(image, int(grid[1]) * self._patch, int(grid[2]) * self._patch)
        if self._augment is not None:
            image = alter_image(image, self._augment, seed)
        patchify_into(image, self._patch, self._merge, out, temporal=self._temporal)


# -- augmentation -----------------------------------------------------------------------------------------------

_KEYS = {
    name: derive(0, "augment", name) for name in ("item", "area", "shape", "left", "top", "flip", "light", "contrast")
}


def item_seeds(seeds: UInt64s, numbers: npt.NDArray[np.integer]) -> UInt64s:
    """Return a seed for each image of a row with several images.

    Args:
        seeds: The seed of each image's row.
        numbers: Its place among the images of the row.
    """
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
