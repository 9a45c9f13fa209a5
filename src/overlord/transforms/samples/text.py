"""Text: a column of text, or of token ids, becomes one sequence; alone, or after an image, a sound or a clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import BAD_COLUMN, Ragged, RowBatch, expand_ranges, offsets_of, unread_rows
from overlord.core.samples import BAD, CLIPS, SKIP, SOUNDS
from overlord.errors import SpecError
from overlord.job.specs import Audio, ImageSpec, ImageText, Text, Video
from overlord.transforms.samples.per_sample import (
    STAND_IN_TOKEN,
    Bools,
    Fault,
    Finished,
    Int64s,
    Measured,
    UInt64s,
    Workers,
    fit_rows,
    flat,
    measured_text,
    media_columns,
    media_of,
    ragged_column,
    with_stand_ins,
)
from overlord.transforms.samples.tokenize import TextTokenizer, TokenizerPanic, decode_texts


class TextTransform:
    """A column of text (or of token ids) becomes one sequence."""

    def __init__(self, spec: Text, tokenizer: TextTokenizer | None) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._bos = _border_id(spec, tokenizer, "bos")
        self._eos = _border_id(spec, tokenizer, "eos")
        self.columns: tuple[str, ...] = (spec.column,)
        self.decoder = None

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        bad = np.asarray(rows[BAD_COLUMN], np.bool_).copy()
        faults: list[Fault] = unread_rows(rows)
        column = ragged_column(rows, self._spec.column)
        wrong: list[Fault] = []
        if lengths is not None:
            wrong = self._left_out(column, lengths, bad)
            claimed, empty = np.where(bad, 1, np.maximum(lengths, 1)), lengths <= 0
            kept: RowBatch = {"raw": column, "claimed": claimed}
            # No text has that many tokens: an absurd claim must not cost memory, nor exceed 32 bits.
            tokens = np.minimum(claimed, np.minimum(16 * column.lengths + 1024, np.iinfo(np.int32).max))
        else:
            encoded, empty = self._encode(column, bad, faults)
            tokens, kept = encoded.lengths, {"tokens": encoded}
        kept["empty"] = empty
        measured = measured_text(tokens, np.where(bad, BAD, 0) | np.where(empty & ~bad, SKIP, 0), kept, faults)
        measured.wrong_lengths = wrong
        return measured

    def _left_out(self, column: Ragged, lengths: Int64s, bad: Bools) -> list[Fault]:
        """Return the rows that have text although their known length is 0: all of it is left out."""
        asked = np.flatnonzero((lengths <= 0) & ~bad & (column.lengths > 0))
        if not len(asked):
            return []
        tokens, empty = self._encode(column.take(asked), np.zeros(len(asked), np.bool_), [])
        return [
            (int(row), f"its length column says {int(lengths[row])} tokens, so its text of {int(count)} is left out")
            for row, count in zip(asked[~empty], tokens.lengths[~empty], strict=True)
        ]

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        faults: list[Fault] = []
        tokens, wrong = self.kept_tokens(kept, bad, faults)
        # The stand-in of an empty text (next to an image) does not count in the loss.
        loss = np.repeat(~bad & ~np.asarray(kept["empty"], np.bool_), planned).astype(np.uint8)
        fitted, padding = fit_rows(tokens, planned)
        loss[padding] = 0
        for row, _ in faults:
            loss[fitted.offsets[row] : fitted.offsets[row + 1]] = 0
        return Finished(fitted, Ragged(loss, fitted.offsets), None, faults, wrong)

    def kept_tokens(self, kept: RowBatch, bad: Bools, faults: list[Fault]) -> tuple[Ragged, list[Fault]]:
        """Return the tokens of kept rows, and the rows with another length than claimed."""
        if "tokens" in kept:
            return ragged_column(kept, "tokens"), []
        tokens, _ = self._encode(ragged_column(kept, "raw"), bad.copy(), faults)
        claimed = np.asarray(kept["claimed"])
        broken = {row for row, _ in faults}
        wrong = [
            (int(r), f"its length column says {int(claimed[r])} tokens, the text has {int(tokens.lengths[r])}")
            for r in np.flatnonzero((tokens.lengths != claimed) & ~bad)
            if int(r) not in broken
        ]
        return tokens, wrong

    def _encode(self, column: Ragged, bad: Bools, faults: list[Fault]) -> tuple[Ragged, Bools]:
        """Encode rows; bad and empty ones become one stand-in token. Marks rows that are not UTF-8 as bad."""
        if self._spec.tokenized:
            tokens = Ragged(column.values.astype(np.int32, copy=False), column.offsets)
            wild = _rows_with(column, (column.values < 0) | (column.values > np.iinfo(np.int32).max))
            for row in np.flatnonzero(wild & ~bad):
                faults.append((int(row), "a token id is negative, or 2**31 and more"))
            bad |= wild
        else:
            texts, unreadable = decode_texts(column)
            for row in np.flatnonzero(unreadable & ~bad):
                faults.append((int(row), "the text is not valid UTF-8"))
            bad |= unreadable
            assert self._tokenizer is not None
            special = self._spec.special_tokens
            try:
                tokens = self._tokenizer.encode(texts, special_tokens=special)
            except TokenizerPanic:
                tokens, panics = self._tokenizer.encode_each(texts, special_tokens=special)
                faults += [fault for fault in panics if not bad[fault[0]]]
                bad[[row for row, _ in panics]] = True
        empty = tokens.lengths == 0
        return with_stand_ins(with_borders(tokens, self._bos, self._eos), bad | empty), empty


def with_borders(tokens: Ragged, bos: int | None, eos: int | None) -> Ragged:
    """Return the rows with bos before and eos after each, unless it is already there or the row is empty.

    Example:
        >>> rows = Ragged.from_rows([[5, 6], [], [1, 5]], np.int32)
        >>> [row.tolist() for row in map(with_borders(rows, 1, 2).__getitem__, range(3))]
        [[1, 5, 6, 2], [], [1, 5, 2]]
    """
    if bos is None and eos is None:
        return tokens
    have = tokens.lengths
    some = have > 0
    before, behind = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.bool_)
    if bos is not None:
        before[some] = tokens.values[tokens.offsets[:-1][some]] != bos
    if eos is not None:
        behind[some] = tokens.values[tokens.offsets[1:][some] - 1] != eos
    offsets = offsets_of(have + before + behind)
    out = np.empty(int(offsets[-1]), np.int32)
    out[expand_ranges(offsets[:-1] + before, have)] = tokens.values[tokens.offsets[0] : tokens.offsets[-1]]
    if bos is not None:
        out[offsets[:-1][before]] = bos
    if eos is not None:
        out[offsets[1:][behind] - 1] = eos
    return Ragged(out, offsets)


def _border_id(spec: Text, tokenizer: TextTokenizer | None, field: Literal["bos", "eos"]) -> int | None:
    wanted = getattr(spec, field)
    if wanted is False:
        return None
    if spec.tokenized and not isinstance(wanted, (bool, str)):
        return int(wanted)  # the ids of the column need not be those of the job's tokenizer
    if tokenizer is None:
        raise SpecError(
            f"{field}={wanted!r}: only a tokenizer knows the id of that token, but the job has none; the texts would "
            f"run into each other. Set tokenizer= to a tokenizer folder, or give the id: {field}=2."
        )
    return tokenizer.border_id(field, wanted)


def _rows_with(column: Ragged, found: Bools) -> Bools:
    """Return which rows hold a value that was found."""
    rows = np.zeros(len(column), np.bool_)
    rows[np.searchsorted(column.offsets, np.flatnonzero(found), side="right") - 1] = bool(len(rows))
    return rows


# -- one item (an image, a sound or a clip), then its text: what ImageText, Audio and Video have in common -----------


@dataclass(frozen=True, slots=True)
class ItemTokens:
    """The tokens that stand for an item: its placeholders, and perhaps one token before and one after them."""

    item: int
    before: int | None
    after: int | None

    @classmethod
    def of(cls, spec: ImageSpec | Audio | Video, kind: str, tokenizer: TextTokenizer) -> ItemTokens:
        """Look up the tokens that a spec names for an "image", "audio" or "video"."""
        field = f"{kind}_token"
        around = (("before", spec.before), ("after", spec.after))
        ids = (None if token is None else tokenizer.id_of(token, name) for name, token in around)
        return cls(tokenizer.id_of(getattr(spec, field), field), *ids)

    @property
    def margin(self) -> tuple[int, int]:
        """Tokens before and after the placeholders of an item."""
        return int(self.before is not None), int(self.after is not None)


_KIND_FLAGS = {"image": 0, "video": CLIPS, "audio": SOUNDS}


class ItemThenText:
    """One item a row: [before] placeholders [after] text."""

    def __init__(self, spec: ImageText | Audio | Video, kind: str, tokenizer: TextTokenizer) -> None:
        self._text = TextTransform(Text(spec.text), tokenizer)
        self._kind = kind
        self._tokens = ItemTokens.of(spec, kind, tokenizer)

    def _measured(
        self, text: Measured, bad: Bools, items: Ragged, length: Int64s, grid: Int64s, seeds: UInt64s,
        seconds: npt.NDArray[np.float64] | None = None,
    ) -> Measured:  # fmt: skip
        """Return the metadata of rows from that of their text and of their items; the kept columns are joined."""
        ones = np.ones(len(bad), np.int64)
        before, after = self._tokens.margin
        start = np.full(len(bad), before)
        text.kept |= media_columns(
            items, items=ones, nbytes=items.lengths, start=start, length=length, grid=grid, seeds=seeds, seconds=seconds
        )
        # An item without a text is still a sample; only its text is a stand-in.
        return Measured(
            tokens=text.tokens + length + before + after,
            image_tokens=length,
            images=ones,
            flags=(np.where(bad, BAD, 0) | _KIND_FLAGS[self._kind]).astype(np.int32),
            kept=text.kept,
            faults=text.faults,
            wrong_lengths=text.wrong_lengths,
            front=length + before + after,
            margin=self._tokens.margin,
        )

    def kept_tokens(self, kept: RowBatch, bad: Bools, faults: list[Fault]) -> tuple[Ragged, list[Fault]]:
        """Return the tokens of the texts of kept rows, and the rows with another length than claimed."""
        return self._text.kept_tokens(kept, bad, faults)

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        """Return tokens and loss of exactly the planned lengths, and the items that are whole within them."""
        start = flat(ragged_column(kept, "media_start")).astype(np.int64)
        length = flat(ragged_column(kept, "media_length")).astype(np.int64)
        behind = start + length
        lead = behind + self._tokens.margin[1]
        text = self._text.finish(kept, np.maximum(planned - lead, 0), bad, workers)
        offsets = offsets_of(planned)
        first = offsets[:-1]
        tokens = np.full(int(offsets[-1]), STAND_IN_TOKEN, np.int32)
        loss = np.zeros(int(offsets[-1]), np.uint8)
        # A cut may leave the item out, never half of it: there is no placeholder without its features.
        tokens[expand_ranges(first + start, np.where(behind <= planned, length, 0))] = self._tokens.item
        if self._tokens.before is not None:
            tokens[first[planned > 0]] = self._tokens.before
        if self._tokens.after is not None:
            tokens[(first + behind)[behind < planned]] = self._tokens.after
        places = expand_ranges(first + lead, text.tokens.lengths)
        tokens[places] = text.tokens.values
        loss[places] = text.loss.values
        media = media_of(self._kind, kept, planned, bad)
        return Finished(Ragged(tokens, offsets), Ragged(loss, offsets), media, text.faults, text.wrong_lengths)
