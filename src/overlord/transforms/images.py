"""Images: size from the header alone, decode with libjpeg-turbo, resize, cut into patches. uint8 all the way."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

try:
    import simplejpeg
except ImportError:  # a host without it decodes JPEG with Pillow (the same libjpeg-turbo, about half as fast)
    simplejpeg = None

UInt8s = npt.NDArray[np.uint8]

MAX_PIXELS = 1 << 26
"""An image whose header claims more is taken for a decompression bomb and never decoded."""

_JPEG = b"\xff\xd8"


class ImageFault(Exception):
    """The bytes of one image make no sense; the reason goes to the log with the sample's id."""


def image_size(data: bytes | memoryview) -> tuple[int, int]:
    """Return (width, height) from the header, without decoding.

    Raises:
        ImageFault: when there is no readable header, or it claims an absurd size.
    """
    try:
        if simplejpeg is not None and bytes(data[:2]) == _JPEG:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data, strict=False)
        else:
            with Image.open(io.BytesIO(data)) as image:
                width, height = image.size
    except UnidentifiedImageError as error:
        raise ImageFault("the bytes are no image of a known format") from error
    except (ValueError, KeyError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageFault(f"no readable image header: {error}") from error
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise ImageFault(f"the header claims {width} x {height} pixels, more than {MAX_PIXELS} in all")
    return width, height


def decode_image(data: bytes | memoryview) -> UInt8s:
    """Return the image as uint8 [height, width, 3], RGB.

    Raises:
        ImageFault: when the bytes do not decode.
    """
    image_size(data)
    try:
        if simplejpeg is not None and bytes(data[:2]) == _JPEG:
            try:
                return simplejpeg.decode_jpeg(data, colorspace="RGB")
            except (ValueError, KeyError):
                pass  # CMYK and other rare colour spaces: Pillow knows them, and has the last word on faults
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageFault(f"does not decode: {error}") from error


def resize_image(image: UInt8s, height: int, width: int) -> UInt8s:
    """Return the image at another size (bicubic, antialiased)."""
    if image.shape[:2] == (height, width):
        return image
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def patchify_into(image: UInt8s, patch: int, merge: int, out: UInt8s) -> None:
    """Write the image as patch rows [patches, 3 * patch * patch]; patches that merge are neighbours."""
    rows, cols = image.shape[0] // (patch * merge), image.shape[1] // (patch * merge)
    cut = image.reshape(rows, merge, patch, cols, merge, patch, 3)
    out.reshape(rows, cols, merge, merge, 3, patch, patch)[:] = cut.transpose(0, 3, 1, 4, 6, 2, 5)


def prepare_image(data: bytes | memoryview, grid: tuple[int, int], patch: int, merge: int, out: UInt8s) -> None:
    """Decode, resize to the planned grid and patchify one image into its place."""
    image = resize_image(decode_image(data), grid[0] * patch, grid[1] * patch)
    patchify_into(image, patch, merge, out)
