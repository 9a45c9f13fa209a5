"""Augmentation of images: every draw comes from the item's own seed, and the crop is known before decoding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance

from overlord.core.seeds import derive, hash64
from overlord.core.specs import Augment

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
UInt8s = npt.NDArray[np.uint8]

_KEYS = {
    name: derive(0, "augment", name) for name in ("item", "area", "shape", "left", "top", "flip", "light", "contrast")
}


def item_seeds(seeds: UInt64s, numbers: npt.NDArray[np.integer]) -> UInt64s:
    """Return a seed for each image of a row with several: other numbers, other draws.

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
    # A crop wider than the image would have to be cut, and keep less than it should.
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
