"""Sample transformations: measured before planning, finished after it (in the SourceLoader).

Rules of this file:
1. `measure` decides every length. It sees headers and text, and never decodes an image.
2. `finish` delivers exactly the planned lengths: what turns out longer is cut, shorter is padded.
3. A fault belongs to one sample: it becomes a stand-in with a reason, never an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import BAD_COLUMN, Ragged, RowBatch, expand_ranges, num_rows, offsets_of
from overlord.core.samples import BAD, SKIP
from overlord.core.specs import Custom, ImageText, Source, Text, image_grid
from overlord.errors import SpecError
from overlord.transforms.images import ImageFault, image_size, prepare_image
from overlord.transforms.tokenize import TextTokenizer, decode_texts

STAND_IN_TOKEN = 0
IMAGES_PER_TASK = 4

Int64s = npt.NDArray[np.int64]
Fault = tuple[int, str]
"""(row of the batch, what is wrong with it)."""


@dataclass(slots=True)
class Measured:
    """What is known of some rows before planning, and what must be kept of them."""

    tokens: Int64s
    """Raw length, image placeholders included, before the overlength policy."""
    image_tokens: Int64s
    images: Int64s
    flags: npt.NDArray[np.int32]
    kept: RowBatch
    faults: list[Fault] = field(default_factory=list)


@dataclass(slots=True)
class Finished:
    """Some samples ready to be packed."""

    tokens: Ragged
    loss: Ragged
    patches: Ragged | None
    grids: npt.NDArray[np.int32] | None
    faults: list[Fault]
    lies: list[Fault]
    """Samples whose true length was not the measured one."""


class Workers(Protocol):
    """Runs pure functions side by side; the results come back in order."""

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Apply the function to every item."""
        ...


class SampleTransform(Protocol):
    """How the samples of one source are measured and finished."""

    columns: tuple[str, ...]

    def measure(self, rows: RowBatch, lengths: Int64s | None) -> Measured:
        """Measure rows; `lengths` are text lengths that somebody else already knows."""
        ...

    def finish(self, kept: RowBatch, planned: Int64s, bad: npt.NDArray[np.bool_], workers: Workers) -> Finished:
        """Bring kept rows into their final form, with exactly the planned lengths."""
        ...


def make_transform(source: Source, tokenizer: TextTokenizer | None) -> SampleTransform:
    """Return the transform that a source's sample spec asks for."""
    spec = source.sample
    if isinstance(spec, Custom):
        return CustomTransform(spec)
    if tokenizer is None and not (isinstance(spec, Text) and spec.tokenized):
        raise SpecError(
            f"source {source.name!r}: its text must be tokenized, but the job has no tokenizer; set tokenizer= to a "
            "tokenizer.json, or give a column that holds token ids and Text(..., tokenized=True)."
        )
    if isinstance(spec, ImageText):
        assert tokenizer is not None
        return ImageTextTransform(spec, tokenizer)
    return TextTransform(spec, tokenizer)


class TextTransform:
    """A column of text (or of token ids) becomes one sequence."""

    def __init__(self, spec: Text, tokenizer: TextTokenizer | None) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self.columns: tuple[str, ...] = (spec.column,)

    def measure(self, rows: RowBatch, lengths: Int64s | None) -> Measured:
        bad = np.asarray(rows[BAD_COLUMN], np.bool_).copy()
        faults: list[Fault] = [(int(r), "the row cannot be parsed or lacks its column") for r in np.flatnonzero(bad)]
        column = _ragged(rows, self._spec.column)
        if lengths is not None:
            claimed, empty = np.where(bad, 1, np.maximum(lengths, 1)), lengths <= 0
            kept: RowBatch = {"raw": column, "claimed": claimed}
            # No text has that many tokens: a wild claim must not cost memory, nor leave 32 bits.
            tokens = np.minimum(claimed, np.minimum(16 * column.lengths + 1024, np.iinfo(np.int32).max))
        else:
            encoded, empty = self._encode(column, bad, faults)
            tokens, kept = encoded.lengths, {"tokens": encoded}
        kept["empty"] = empty
        return _measured(tokens, np.where(bad, BAD, 0) | np.where(empty & ~bad, SKIP, 0), kept, faults)

    def finish(self, kept: RowBatch, planned: Int64s, bad: npt.NDArray[np.bool_], workers: Workers) -> Finished:
        faults: list[Fault] = []
        tokens, lies = _text_tokens(kept, bad, faults, self._encode)
        # The stand-in of an empty text (beside an image) is there for its place only.
        loss = np.repeat(~bad & ~np.asarray(kept["empty"], np.bool_), planned).astype(np.uint8)
        fitted, padding = fit_rows(tokens, planned)
        loss[padding] = 0
        _mask_rows(loss, fitted.offsets, [row for row, _ in faults])
        return Finished(fitted, Ragged(loss, fitted.offsets), None, None, faults, lies)

    def _encode(
        self, column: Ragged, bad: npt.NDArray[np.bool_], faults: list[Fault]
    ) -> tuple[Ragged, npt.NDArray[np.bool_]]:
        """Encode rows; bad and empty ones become one stand-in token. Marks rows that are not UTF-8 as bad."""
        if self._spec.tokenized:
            tokens = Ragged(column.values.astype(np.int32, copy=False), column.offsets)
        else:
            texts, unreadable = decode_texts(column)
            for row in np.flatnonzero(unreadable & ~bad):
                faults.append((int(row), "the text is not valid UTF-8"))
            bad |= unreadable
            assert self._tokenizer is not None
            tokens = self._tokenizer.encode(texts, special_tokens=self._spec.special_tokens)
        empty = tokens.lengths == 0
        return _with_stand_ins(tokens, bad | empty), empty


class ImageTextTransform:
    """One image and its text: image placeholders first, then the text."""

    def __init__(self, spec: ImageText, tokenizer: TextTokenizer) -> None:
        self._spec = spec
        self._text = TextTransform(Text(spec.text), tokenizer)
        self._image_token = tokenizer.id_of(spec.image_token)
        self.columns = tuple(c for c in (spec.image, spec.text, spec.width, spec.height) if c)

    def measure(self, rows: RowBatch, lengths: Int64s | None) -> Measured:
        text = self._text.measure(rows, lengths)
        bad = (text.flags & BAD) > 0
        images = _ragged(rows, self._spec.image)
        widths, heights = self._sizes(rows, images, bad, text.faults)
        grid_rows, grid_cols = image_grid(self._spec, widths, heights)
        small = self._spec.merge
        text.kept["image"] = images
        text.kept["grid_rows"] = np.where(bad, small, grid_rows).astype(np.int32)
        text.kept["grid_cols"] = np.where(bad, small, grid_cols).astype(np.int32)
        image_tokens = text.kept["grid_rows"].astype(np.int64) * text.kept["grid_cols"] // small**2  # type: ignore[union-attr,operator]
        # An image without a caption is still a sample; only its text is a stand-in.
        return Measured(
            tokens=text.tokens + image_tokens,
            image_tokens=image_tokens,
            images=np.ones(len(bad), np.int64),
            flags=np.where(bad, BAD, 0).astype(np.int32),
            kept=text.kept,
            faults=text.faults,
        )

    def finish(self, kept: RowBatch, planned: Int64s, bad: npt.NDArray[np.bool_], workers: Workers) -> Finished:
        spec = self._spec
        grid_rows, grid_cols = np.asarray(kept["grid_rows"]), np.asarray(kept["grid_cols"])
        image_tokens = grid_rows.astype(np.int64) * grid_cols // spec.merge**2
        text = self._text.finish(kept, np.maximum(planned - image_tokens, 0), bad, workers)
        offsets = offsets_of(planned)
        tokens = np.full(int(offsets[-1]), self._image_token, np.int32)
        loss = np.zeros(int(offsets[-1]), np.uint8)
        places = expand_ranges(offsets[:-1] + image_tokens, text.tokens.lengths)
        tokens[places] = text.tokens.values
        loss[places] = text.loss.values
        patches, faults = self._patches(kept, grid_rows, grid_cols, bad, workers)
        _mask_rows(loss, offsets, [row for row, _ in faults])
        grids = np.stack([np.ones_like(grid_rows), grid_rows, grid_cols], axis=1).astype(np.int32)
        return Finished(Ragged(tokens, offsets), Ragged(loss, offsets), patches, grids, text.faults + faults, text.lies)

    def _sizes(
        self, rows: RowBatch, images: Ragged, bad: npt.NDArray[np.bool_], faults: list[Fault]
    ) -> tuple[Int64s, Int64s]:
        if self._spec.width and self._spec.height:
            widths, heights = (np.asarray(rows[c]).astype(np.int64) for c in (self._spec.width, self._spec.height))
            wrong = (widths < 1) | (heights < 1)
            faults.extend((int(r), "the width or height column is not positive") for r in np.flatnonzero(wrong & ~bad))
            bad |= wrong
            return np.where(bad, 1, widths), np.where(bad, 1, heights)
        widths, heights = np.ones(len(images), np.int64), np.ones(len(images), np.int64)
        for row in np.flatnonzero(~bad):
            try:
                widths[row], heights[row] = image_size(_memory(images, int(row)))
            except ImageFault as fault:
                faults.append((int(row), str(fault)))
                bad[row] = True
        return widths, heights

    def _patches(
        self,
        kept: RowBatch,
        grid_rows: npt.NDArray[Any],
        grid_cols: npt.NDArray[Any],
        bad: npt.NDArray[np.bool_],
        workers: Workers,
    ) -> tuple[Ragged, list[Fault]]:
        spec, images = self._spec, _ragged(kept, "image")
        patch_bytes = 3 * spec.patch**2
        offsets = offsets_of(grid_rows.astype(np.int64) * grid_cols * patch_bytes)
        out = np.empty(int(offsets[-1]), np.uint8)

        def prepare(rows: Sequence[int]) -> list[Fault]:
            faults: list[Fault] = []
            for row in rows:
                place = out[offsets[row] : offsets[row + 1]]
                if bad[row]:
                    place[:] = 0
                    continue
                try:
                    grid = (int(grid_rows[row]), int(grid_cols[row]))
                    prepare_image(_memory(images, row), grid, spec.patch, spec.merge, place)
                except ImageFault as fault:
                    place[:] = 0
                    faults.append((row, str(fault)))
            return faults

        count = len(images)
        tasks = [range(at, min(at + IMAGES_PER_TASK, count)) for at in range(0, count, IMAGES_PER_TASK)]
        return Ragged(out, offsets), [fault for part in workers.map(prepare, tasks) for fault in part]


class CustomTransform:
    """A user's function from a row to tokens. It runs before planning, since it decides lengths."""

    def __init__(self, spec: Custom) -> None:
        self._spec = spec
        self.columns: tuple[str, ...] = tuple(spec.columns or ())

    def measure(self, rows: RowBatch, lengths: Int64s | None) -> Measured:
        count = num_rows(rows)
        bad = np.asarray(rows[BAD_COLUMN], np.bool_)
        flags = np.where(bad, BAD, 0).astype(np.int32)
        faults: list[Fault] = [(int(r), "the row cannot be parsed or lacks its column") for r in np.flatnonzero(bad)]
        stand_in = np.full(1, STAND_IN_TOKEN, np.int32)
        tokens: list[npt.NDArray[Any]] = [stand_in] * count
        masks: list[npt.NDArray[Any]] = [np.zeros(1, np.uint8)] * count
        for row in np.flatnonzero(~bad).tolist():
            values = {c: bytes(v[row]) if _is_bytes(v) else v[row] for c, v in rows.items() if c != BAD_COLUMN}
            try:
                made = self._spec.fn(values)
                if made is None:
                    flags[row] |= SKIP
                    continue
                tokens[row], masks[row] = _checked_custom(made)
            except Exception as error:  # the border to the user's code: whatever it raises is a fault of this row
                faults.append((int(row), f"the custom function raised {type(error).__name__}: {error}"))
                flags[row] |= BAD
        kept: RowBatch = {
            "tokens": Ragged.from_rows(tokens, np.int32),
            "loss": Ragged.from_rows(masks, np.uint8),
        }
        return _measured(kept["tokens"].lengths, flags, kept, faults)  # type: ignore[union-attr]

    def finish(self, kept: RowBatch, planned: Int64s, bad: npt.NDArray[np.bool_], workers: Workers) -> Finished:
        tokens, _ = fit_rows(_ragged(kept, "tokens"), planned)
        loss, _ = fit_rows(_ragged(kept, "loss"), planned)
        return Finished(tokens, loss, None, None, [], [])


def fit_rows(rows: Ragged, lengths: Int64s) -> tuple[Ragged, Int64s]:
    """Cut or pad every row to its length; return the rows and the places that are padding."""
    have = rows.lengths
    if np.array_equal(have, lengths):
        return Ragged(rows.values[rows.offsets[0] : rows.offsets[-1]], rows.offsets - rows.offsets[0]), _NOWHERE
    copied = np.minimum(have, lengths)
    offsets = offsets_of(lengths)
    out = np.full(int(offsets[-1]), STAND_IN_TOKEN, rows.values.dtype)
    out[expand_ranges(offsets[:-1], copied)] = rows.values[expand_ranges(rows.offsets[:-1], copied)]
    return Ragged(out, offsets), expand_ranges(offsets[:-1] + copied, lengths - copied)


def count_loss_tokens(measured: Measured, delivered: npt.NDArray[np.integer], context_length: int) -> Int64s:
    """Return how many labels each sample will have: the first token of a piece predicts nothing."""
    pieces = np.maximum(-(-delivered.astype(np.int64) // context_length), 1)
    if "loss" not in measured.kept:
        # Text counts, images do not; an image at the front already covers the first piece's first token.
        counted = delivered - measured.image_tokens - pieces + (measured.image_tokens > 0)
        silent = (measured.flags & BAD > 0) | np.asarray(measured.kept["empty"], np.bool_)
        return np.where(silent, 0, np.maximum(counted, 0))
    loss = _ragged(measured.kept, "loss")
    sums = np.concatenate([[0], np.cumsum(loss.values, dtype=np.int64)])
    first = loss.offsets[:-1]
    total = sums[first + np.minimum(delivered, loss.lengths)] - sums[first]
    sample = np.repeat(np.arange(len(delivered)), pieces)
    begin = (np.arange(len(sample)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * context_length
    at_start = loss.values[first[sample] + np.minimum(begin, loss.lengths[sample] - 1)] * (begin < delivered[sample])
    np.subtract.at(total, sample, at_start.astype(np.int64))
    return total


_NOWHERE = np.empty(0, np.int64)


def _measured(tokens: Int64s, flags: npt.NDArray[Any], kept: RowBatch, faults: list[Fault]) -> Measured:
    zeros = np.zeros(len(tokens), np.int64)
    return Measured(tokens.astype(np.int64), zeros, zeros, flags.astype(np.int32), kept, faults)


def _ragged(rows: RowBatch, column: str) -> Ragged:
    found = rows[column]
    if not isinstance(found, Ragged):
        raise SpecError(
            f"column {column!r} holds single numbers; a sample needs text, bytes or lists of token ids there. "
            "Name another column."
        )
    return found


def _memory(rows: Ragged, row: int) -> memoryview:
    return memoryview(rows[row])  # type: ignore[arg-type]


def _is_bytes(values: Ragged | npt.NDArray[Any]) -> bool:
    return isinstance(values, Ragged) and values.values.dtype == np.uint8


def _with_stand_ins(tokens: Ragged, replaced: npt.NDArray[np.bool_]) -> Ragged:
    if not replaced.any():
        return tokens
    lengths = np.where(replaced, 1, tokens.lengths)
    cut = Ragged(tokens.values, tokens.offsets)
    kept_lengths = np.where(replaced, 0, tokens.lengths)
    offsets = offsets_of(lengths)
    out = np.full(int(offsets[-1]), STAND_IN_TOKEN, np.int32)
    out[expand_ranges(offsets[:-1], kept_lengths)] = cut.values[expand_ranges(cut.offsets[:-1], kept_lengths)]
    return Ragged(out, offsets)


def _text_tokens(
    kept: RowBatch,
    bad: npt.NDArray[np.bool_],
    faults: list[Fault],
    encode: Callable[[Ragged, npt.NDArray[np.bool_], list[Fault]], tuple[Ragged, npt.NDArray[np.bool_]]],
) -> tuple[Ragged, list[Fault]]:
    """Return the text's tokens, and where they are not as long as was claimed."""
    if "tokens" in kept:
        return _ragged(kept, "tokens"), []
    tokens, _ = encode(_ragged(kept, "raw"), bad.copy(), faults)
    claimed = np.asarray(kept["claimed"])
    broken = {row for row, _ in faults}
    lies = [
        (int(r), f"its length column says {int(claimed[r])} tokens, the text has {int(tokens.lengths[r])}")
        for r in np.flatnonzero((tokens.lengths != claimed) & ~bad)
        if int(r) not in broken
    ]
    return tokens, lies


def _mask_rows(loss: npt.NDArray[np.uint8], offsets: Int64s, rows: Sequence[int]) -> None:
    for row in rows:
        loss[offsets[row] : offsets[row + 1]] = 0


def _checked_custom(made: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    tokens = np.asarray(made["tokens"], np.int32)
    mask = (np.asarray(made.get("loss_mask", np.ones(len(tokens)))) != 0).astype(np.uint8)  # counted as ones
    if tokens.ndim != 1 or len(tokens) == 0 or mask.shape != tokens.shape:
        raise ValueError(f"tokens must be a non-empty list and loss_mask as long, got {tokens.shape} and {mask.shape}")
    return tokens, mask
