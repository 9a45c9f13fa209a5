"""Metadata of measured rows: bytes, images, and where images stand that do not just begin their sample. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Pieces
from overlord.core.ragged import RowBatch, expand_ranges, offsets_of
from overlord.core.samples import MetaArray
from overlord.roles.buffer import Chunk
from overlord.transforms.per_sample import Measured, flat, ragged_column


def row_bytes_of(kept: RowBatch, count: int) -> npt.NDArray[np.int64]:
    """Return the bytes that each row holds."""
    total = np.zeros(count, np.int64)
    for column in kept.values():
        total += column.lengths * column.values.itemsize if hasattr(column, "lengths") else 0  # type: ignore[union-attr]
    return total


def media_items(measured: Measured) -> tuple[Pieces | None, Pieces | None]:
    """Return every image, clip and sound by its placeholders, and with the tokens around it that go with it."""
    if "media_start" not in measured.kept:
        return None, None
    start = ragged_column(measured.kept, "media_start")
    rows = np.repeat(np.arange(len(start)), start.lengths).astype(np.int32)
    first, length = flat(start), flat(ragged_column(measured.kept, "media_length"))
    before, behind = measured.margin
    return Pieces(rows, first, length), Pieces(rows, first - before, length + before + behind)


def count_images(meta: MetaArray, images: Pieces) -> None:
    """Count the images that are delivered; those of a sample that does not just begin with one are listed."""
    kept = images.start.astype(np.int64) + images.length <= meta["tokens"][images.sample]
    sample = images.sample[kept]
    meta["image_tokens"] = np.bincount(sample, images.length[kept], len(meta))
    meta["images"] = np.bincount(sample, minlength=len(meta))
    simple = (meta["images"] <= 1) & (np.bincount(sample, images.start[kept], len(meta)) == 0)
    meta["items"] = ~simple


def listed_items(meta: MetaArray, parts: list[tuple[MetaArray, Chunk]]) -> npt.NDArray[np.int32] | None:
    """List the images of samples that do not just begin with one, and let their metadata point into the list."""
    if not meta["items"].any():
        return None
    found: list[npt.NDArray[np.int32]] = []
    for part, chunk in parts:
        rows = np.flatnonzero(part["items"])
        start, length = ragged_column(chunk.kept, "media_start"), ragged_column(chunk.kept, "media_length")
        # Images come in the order of their tokens: those that the overlength policy leaves out are the last.
        places = expand_ranges(start.offsets[rows + int(part["offset"][0]) - chunk.offset], part["images"][rows])
        margins = np.broadcast_to(np.array(chunk.margin), (len(places), 2))
        found.append(np.concatenate([np.stack([start.values[places], length.values[places]], axis=1), margins], axis=1))
    listed = np.flatnonzero(meta["items"])
    meta["items"][listed] = 1 + offsets_of(meta["images"][listed])[:-1]
    return np.concatenate(found).astype(np.int32)
