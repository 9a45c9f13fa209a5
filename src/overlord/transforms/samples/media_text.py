"""One item (an image, a sound or a clip), then its text: the part that ImageText, Audio and Video have in common."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import Ragged, RowBatch, expand_ranges, offsets_of
from overlord.core.samples import BAD
from overlord.errors import SpecError
from overlord.job.specs import Audio, ImageText, Text, Video
from overlord.transforms.samples.per_sample import (
    STAND_IN_TOKEN,
    Bools,
    Finished,
    Int64s,
    Measured,
    UInt64s,
    Workers,
    flat,
    media_columns,
    media_of,
    ragged_column,
)
from overlord.transforms.samples.text import TextTransform
from overlord.transforms.samples.tokenize import TextTokenizer


def media_library(name: str) -> Any:
    """Return a library that only sounds and clips need.

    Raises:
        SpecError: when it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SpecError(
            f"a source of sounds or clips needs the library {name!r}, which cannot be imported ({error}); none of its "
            "rows could be measured. Install it with: pip install overlord-data[media]"
        ) from error


class ItemThenText:
    """One item a row: [before] placeholders [after] text."""

    def __init__(
        self, spec: ImageText | Audio | Video, kind: str, item_token: str | int, tokenizer: TextTokenizer
    ) -> None:
        self.text = TextTransform(Text(spec.text), tokenizer)
        self._kind = kind
        self._item_token = tokenizer.id_of(item_token, f"{kind}_token")
        self._before = None if spec.before is None else tokenizer.id_of(spec.before, "before")
        self._after = None if spec.after is None else tokenizer.id_of(spec.after, "after")

    def measured(
        self, text: Measured, bad: Bools, items: Ragged, length: Int64s, grid: Int64s, seeds: UInt64s,
        seconds: npt.NDArray[np.float64] | None = None,
    ) -> Measured:  # fmt: skip
        """Return the metadata of rows from that of their text and of their items.

        Args:
            text: The text alone; its kept columns are taken over.
            bad: Rows that are stand-ins.
            items: The encoded items.
            length: Placeholders of each.
            grid: Three numbers of each.
            seeds: The seeds of the rows.
            seconds: Seconds of a temporal patch.
        """
        lead = length + (self._before is not None) + (self._after is not None)
        ones, seen = np.ones(len(bad), np.int64), self._kind != "audio"
        start = np.full(len(bad), int(self._before is not None))
        text.kept.update(
            media_columns(items, items=ones, nbytes=items.lengths, start=start, length=length, grid=grid, seeds=seeds,
                          seconds=seconds)
        )  # fmt: skip
        # An item without a text is still a sample; only its text is a stand-in.
        return Measured(
            tokens=text.tokens + lead,
            image_tokens=length if seen else 0 * length,
            images=ones if seen else 0 * ones,
            flags=np.where(bad, BAD, 0).astype(np.int32),
            kept=text.kept,
            faults=text.faults,
            wrong_lengths=text.wrong_lengths,
            front=lead,
            margin=(int(self._before is not None), int(self._after is not None)),
        )

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        """Return tokens and loss of exactly the planned lengths, and the items that are whole within them."""
        start = flat(ragged_column(kept, "media_start")).astype(np.int64)
        length = flat(ragged_column(kept, "media_length")).astype(np.int64)
        behind = start + length
        lead = behind + (self._after is not None)
        text = self.text.finish(kept, np.maximum(planned - lead, 0), bad, workers)
        offsets = offsets_of(planned)
        first = offsets[:-1]
        tokens = np.full(int(offsets[-1]), STAND_IN_TOKEN, np.int32)
        loss = np.zeros(int(offsets[-1]), np.uint8)
        # A cut may leave the item out, never half of it: there is no placeholder without its features.
        tokens[expand_ranges(first + start, np.where(behind <= planned, length, 0))] = self._item_token
        if self._before is not None:
            tokens[first[planned > 0]] = self._before
        if self._after is not None:
            tokens[(first + behind)[behind < planned]] = self._after
        places = expand_ranges(first + lead, text.tokens.lengths)
        tokens[places] = text.tokens.values
        loss[places] = text.loss.values
        media = media_of(self._kind, kept, planned, bad)
        return Finished(Ragged(tokens, offsets), Ragged(loss, offsets), media, text.faults, text.wrong_lengths)
