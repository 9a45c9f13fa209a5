"""Images and text: ImageText (one image, then its text) and Interleaved (texts and images in any order)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

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
from overlord.core.samples import BAD, SKIP
from overlord.errors import SpecError
from overlord.job.specs import ImageSpec, ImageText, Interleaved, image_grid
from overlord.transforms.samples.images import ImageDecoder, crop_boxes, image_size, item_seeds
from overlord.transforms.samples.media_text import ItemThenText
from overlord.transforms.samples.per_sample import (
    STAND_IN_TOKEN,
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
from overlord.transforms.samples.tokenize import TextTokenizer, decode_texts


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
        """Tokens before and after the placeholders of an image."""
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
        self._layout = ItemThenText(spec, "image", spec.image_token, tokenizer)
        self.columns = tuple(c for c in (spec.image, spec.text, spec.width, spec.height) if c)
        self.facts = TransformFacts(self.columns, ("tokens", "image"), byte_size="grows")
        self.decoder = ImageDecoder(spec)

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        text = self._layout.text.measure(rows, lengths, seeds)
        bad = (text.flags & BAD) > 0
        images = ragged_column(rows, self._spec.image)
        widths, heights = self._sizes(rows, images, bad, text.faults)
        grids = plan_grids(self._spec, widths, heights, seeds, bad)
        return self._layout.measured(text, bad, images, grids[:, 1] * grids[:, 2] // self._spec.merge**2, grids, seeds)

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        return self._layout.finish(kept, planned, bad, workers)

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


class InterleavedTransform:
    """Texts and images in any order."""

    def __init__(self, spec: Interleaved, tokenizer: TextTokenizer) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._places = ImagePlaces.of(spec, tokenizer)
        nothing = np.empty(0, np.int32)
        self._begin, self._end = _around(tokenizer) if spec.special_tokens else (nothing, nothing)
        self._layout_column = spec.parts or spec.text
        self.columns: tuple[str, ...] = (*spec.images, self._layout_column)
        self.facts = TransformFacts(self.columns, ("tokens", "image"), byte_size="grows")
        self.decoder = ImageDecoder(spec)

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        """Measure rows; all text is tokenized here, so known `lengths` are not used."""
        broken = np.asarray(rows[BAD_COLUMN], np.bool_).copy()
        faults: list[Fault] = unread_rows(rows)
        images, have = _row_images(rows, self._spec.images)
        layout = self._lay_out(rows, have, broken, faults)
        encoded, nbytes = _chosen_images(images, have.sum(axis=1), layout)
        owner = np.repeat(np.arange(len(broken)), layout.items)
        numbers = np.arange(len(owner)) - np.repeat(offsets_of(layout.items)[:-1], layout.items)
        item_seed = item_seeds(seeds[owner], numbers)
        single = Ragged(encoded.values, encoded.offsets[0] + offsets_of(nbytes))
        widths, heights, unreadable = read_sizes(
            ((item, row_memory(single, item)) for item in range(len(single))),
            len(single),
            self._spec.formats,
            upright=self._spec.exif_transpose,
        )
        faults.extend((int(owner[item]), f"image {int(numbers[item])}: {reason}") for item, reason in unreadable)
        stand_in = np.zeros(len(single), np.bool_)
        stand_in[[item for item, _ in unreadable]] = True
        bad = broken.copy()
        bad[owner[stand_in]] = True
        grids = plan_grids(self._spec, widths, heights, item_seed, stand_in)
        placeholders = grids[:, 1] * grids[:, 2] // self._spec.merge**2
        tokens, loss, start, empty = self._join(layout, placeholders, broken)
        loss.values[np.repeat(bad, loss.lengths)] = 0
        kept: RowBatch = {"tokens": tokens, "loss": loss, "empty": empty}
        kept |= media_columns(encoded, items=layout.items, nbytes=nbytes, start=start, length=placeholders, grid=grids,
                              seeds=item_seed)  # fmt: skip
        return Measured(
            tokens=tokens.lengths,
            image_tokens=np.bincount(owner, placeholders, len(bad)).astype(np.int64),
            images=layout.items,
            flags=(np.where(bad, BAD, 0) | np.where(empty & ~bad, SKIP, 0)).astype(np.int32),
            kept=kept,
            margin=self._places.margin,
            # One reason per row: a sample is bad once, however many of its images are.
            faults=sorted(dict(reversed(faults)).items()),
        )

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        tokens, _ = fit_rows(ragged_column(kept, "tokens"), planned)
        loss, _ = fit_rows(ragged_column(kept, "loss"), planned)
        counted = loss.values * np.repeat(~bad, planned)
        return Finished(tokens, Ragged(counted, loss.offsets), media_of("image", kept, planned, bad), [], [])

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
        lengths[at_run], lengths[at_image] = runs.lengths, placeholders + self._places.extra
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
        first = places[at_image] + self._places.lead
        self._places.write(tokens, first, placeholders)
        start = first - np.repeat(offsets[:-1], items)
        return Ragged(tokens, offsets), Ragged(loss, offsets), start, empty


def split_parts(text: str, columns: Sequence[str], have: Sequence[int]) -> tuple[list[str], list[int]]:
    """Return the runs of text between the images of a list of parts, and which of the row's images they are.

    Args:
        text: The parts as JSON.
        columns: The columns of the row's images.
        have: How many images each of them holds.

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


def _row_images(rows: RowBatch, columns: Sequence[str]) -> tuple[Ragged, Int64s]:
    """Return all images, one ragged row each, sample by sample; and how many each sample has in each column."""
    parts: list[Ragged] = []
    counts: list[Int64s] = []
    for column in columns:
        data = ragged_column(rows, column)
        sizes = data.lengths
        many = rows.get(sizes_column(column))
        if isinstance(many, Ragged):
            sizes = flat(many)
        counts.append(many.lengths if isinstance(many, Ragged) else np.ones(len(data), np.int64))
        parts.append(Ragged(data.values, data.offsets[0] + offsets_of(sizes)))
    have = np.stack(counts, axis=1)
    if len(parts) == 1:
        return parts[0], have
    owner = np.concatenate([np.repeat(np.arange(num_rows(rows)), count) for count in counts])
    return Ragged.concat(parts).take(np.argsort(owner, kind="stable")), have


def _chosen_images(images: Ragged, have: Int64s, layout: _Layout) -> tuple[Ragged, Int64s]:
    """Return the bytes of all images that each sample uses, concatenated, and the bytes of each image."""
    chosen = np.repeat(offsets_of(have)[:-1], layout.items) + layout.picks
    if not np.array_equal(chosen, np.arange(len(images))):
        images = images.take(chosen)
    return Ragged(images.values, images.offsets[offsets_of(layout.items)]), images.lengths


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
