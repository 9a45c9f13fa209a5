"""ImageText: one image and its text; the image's placeholders first, then the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import Ragged, RowBatch, expand_ranges, offsets_of
from overlord.core.samples import BAD
from overlord.core.specs import ImageSpec, ImageText, Text, image_grid
from overlord.transforms.augment import crop_boxes
from overlord.transforms.images import ImageDecoder, image_size
from overlord.transforms.per_sample import (
    Bools,
    Fault,
    Finished,
    Int64s,
    Measured,
    MediaFault,
    TransformFacts,
    UInt64s,
    Workers,
    fit_rows,
    flat,
    media_columns,
    media_of,
    ragged_column,
    row_memory,
)
from overlord.transforms.text import TextTransform
from overlord.transforms.tokenize import TextTokenizer


@dataclass(frozen=True, slots=True)
class ImagePlaces:
    """The tokens that stand for images: placeholders, and perhaps one token before and one after them."""

    image: int
    before: int | None
    after: int | None

    @classmethod
    def of(cls, spec: ImageSpec, tokenizer: TextTokenizer) -> ImagePlaces:
        """Look up the tokens that a spec names."""
        around = (("before", spec.before), ("after", spec.after))
        ids = (None if token is None else tokenizer.id_of(token, field) for field, token in around)
        return cls(tokenizer.id_of(spec.image_token, "image_token"), *ids)

    @property
    def margin(self) -> tuple[int, int]:
        """Tokens before and behind the placeholders of an image."""
        return self.lead, self.extra - self.lead

    @property
    def lead(self) -> int:
        """Tokens before the placeholders of an image."""
        return int(self.before is not None)

    @property
    def extra(self) -> int:
        """Tokens of an image besides its placeholders."""
        return self.lead + int(self.after is not None)

    def write(self, tokens: npt.NDArray[np.int32], start: Int64s, length: Int64s) -> None:
        """Write images into tokens; `start` is where each has its first placeholder, `length` how many it has."""
        tokens[expand_ranges(start, length)] = self.image
        if self.before is not None:
            tokens[start - 1] = self.before
        if self.after is not None:
            tokens[start + length] = self.after


def read_sizes(
    items: Iterable[tuple[int, memoryview]], count: int, formats: Sequence[str], *, upright: bool
) -> tuple[Int64s, Int64s, list[Fault]]:
    """Return width and height of `count` images, 1 x 1 where no header is given or readable, and what is wrong."""
    widths, heights = np.ones(count, np.int64), np.ones(count, np.int64)
    faults: list[Fault] = []
    for item, data in items:
        try:
            widths[item], heights[item] = image_size(data, formats, upright=upright)
        except MediaFault as fault:
            faults.append((item, str(fault)))
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


class ImageTextTransform:
    """One image and its text."""

    def __init__(self, spec: ImageText, tokenizer: TextTokenizer) -> None:
        self._spec = spec
        self._text = TextTransform(Text(spec.text), tokenizer)
        self._places = ImagePlaces.of(spec, tokenizer)
        self.columns = tuple(c for c in (spec.image, spec.text, spec.width, spec.height) if c)
        self.facts = TransformFacts(self.columns, ("tokens", "image"), byte_size="grows")
        self.decoder = ImageDecoder(spec)

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        text = self._text.measure(rows, lengths, seeds)
        bad = (text.flags & BAD) > 0
        images = ragged_column(rows, self._spec.image)
        widths, heights = self._sizes(rows, images, bad, text.faults)
        grids = plan_grids(self._spec, widths, heights, seeds, bad)
        image_tokens = grids[:, 1] * grids[:, 2] // self._spec.merge**2
        ones = np.ones(len(bad), np.int64)
        text.kept.update(
            media_columns(images, items=ones, nbytes=images.lengths, start=ones * self._places.lead,
                          length=image_tokens, grid=grids, seeds=seeds)
        )  # fmt: skip
        front = image_tokens + self._places.extra
        # An image without a caption is still a sample; only its text is a stand-in.
        return Measured(
            tokens=text.tokens + front,
            image_tokens=image_tokens,
            images=ones,
            flags=np.where(bad, BAD, 0).astype(np.int32),
            kept=text.kept,
            faults=text.faults,
            lies=text.lies,
            front=front,
            margin=self._places.margin,
        )

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        image_tokens = flat(ragged_column(kept, "media_length")).astype(np.int64)
        front = image_tokens + self._places.extra
        text = self._text.finish(kept, np.maximum(planned - front, 0), bad, workers)
        offsets = offsets_of(front + text.tokens.lengths)
        tokens = np.empty(int(offsets[-1]), np.int32)
        loss = np.zeros(int(offsets[-1]), np.uint8)
        self._places.write(tokens, offsets[:-1] + self._places.lead, image_tokens)
        places = expand_ranges(offsets[:-1] + front, text.tokens.lengths)
        tokens[places] = text.tokens.values
        loss[places] = text.loss.values
        # A plan may end before the text begins; it never ends inside the image.
        fitted, _ = fit_rows(Ragged(tokens, offsets), planned)
        fitted_loss, _ = fit_rows(Ragged(loss, offsets), planned)
        return Finished(fitted, fitted_loss, media_of("image", kept, planned, bad), text.faults, text.lies)

    def _sizes(self, rows: RowBatch, images: Ragged, bad: Bools, faults: list[Fault]) -> tuple[Int64s, Int64s]:
        if self._spec.width and self._spec.height:
            widths, heights = (np.asarray(rows[c]).astype(np.int64) for c in (self._spec.width, self._spec.height))
            wrong: npt.NDArray[np.bool_] = (widths < 1) | (heights < 1)
            faults.extend((int(r), "the width or height column is not positive") for r in np.flatnonzero(wrong & ~bad))
            bad |= wrong
            return np.where(bad, 1, widths), np.where(bad, 1, heights)
        good = ((row, row_memory(images, row)) for row in np.flatnonzero(~bad).tolist())
        widths, heights, unreadable = read_sizes(
            good, len(images), self._spec.formats, upright=self._spec.exif_transpose
        )
        faults.extend(unreadable)
        bad[[row for row, _ in unreadable]] = True
        return widths, heights
