"""The text of a sample as a model is trained on it: decoded tokens, with placeholders counted and the loss marked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.cli.sources import Opened
from overlord.core.ragged import Ragged, RowBatch
from overlord.core.samples import BAD, SKIP
from overlord.job.specs import Chat, Custom, Interleaved, Text
from overlord.transforms.samples.per_sample import Finished, Measured
from overlord.transforms.samples.tokenize import TextTokenizer

_SHOWN_IDS = 24
_FIRST_TOKENS, _LAST_TOKENS = 2000, 48
"""Tokens of a sample that are decoded, an image's placeholders counted as one: as many as a page shows."""
GAP = " … "
"""Stands for the middle of a text that is too long to be shown."""

Spans = tuple[tuple[int, int], ...]
"""(first character, one behind the last) of parts of a text."""


@dataclass(frozen=True, slots=True)
class ShownText:
    """What is shown of a sample's text."""

    text: str
    spans: Spans = ()
    """The parts that count in the loss, where only parts do."""
    turns: int | None = None
    """Messages of a conversation."""


def shown_texts(one: Opened, rows: RowBatch, measured: Measured, done: Finished) -> list[ShownText]:
    """Return the text of finished rows; of bad and empty ones, which nothing is trained on, as it was read."""
    spec, found = one.source.sample, list[ShownText]()
    ids_only = isinstance(spec, Custom) or (isinstance(spec, Text) and spec.tokenized) or one.tokenizer is None
    nothing = (measured.flags & (BAD | SKIP)) > 0
    for row in range(len(measured.tokens)):
        tokens = done.tokens[row]
        if ids_only:
            found.append(ShownText(_token_ids(tokens.tolist())))
            continue
        raw = _raw_text(one, rows, row)
        turns = _turns(raw) if isinstance(spec, Chat) else None
        if nothing[row]:
            found.append(ShownText(raw, turns=turns))
            continue
        assert one.tokenizer is not None  # or only ids are shown
        text, spans = written_tokens(one.tokenizer, tokens, done.loss[row], _items(done, row))
        # Of other samples all text counts, or all but what the tokens of media are.
        found.append(ShownText(text, spans if isinstance(spec, Chat) else (), turns))
    return found


def written_tokens(
    tokenizer: TextTokenizer,
    ids: npt.NDArray[np.integer],
    loss: npt.NDArray[np.integer],
    items: Sequence[tuple[int, int]],
) -> tuple[str, Spans]:
    """Return tokens as text, the placeholders of an item as "[<image> x 64]", and which parts count in the loss.

    Args:
        tokenizer: Knows the tokens.
        ids: The tokens.
        loss: Whether each counts in the loss.
        items: First placeholder and number of placeholders of every image, clip and sound, in order.
    """
    kept = np.ones(len(ids), np.bool_)
    for start, length in items:
        kept[start + 1 : start + length] = False
    at = np.flatnonzero(kept)
    gap = _FIRST_TOKENS if len(at) > _FIRST_TOKENS + _LAST_TOKENS else None
    at = at if gap is None else np.concatenate([at[:_FIRST_TOKENS], at[-_LAST_TOKENS:]])
    short, counts = ids[at].tolist(), (loss[at] > 0).astype(np.int8)
    edges = np.flatnonzero(np.diff(counts, prepend=0, append=0)).tolist()
    pairs = list(zip(edges[::2], edges[1::2], strict=True))
    spots = [(int(np.searchsorted(at, start)), length) for start, length in items if start in at]
    # Where a token's text ends is only known from the tokens before it: some decoders join words by blanks.
    gaps = [] if gap is None else [gap]
    borders = sorted({0, len(short), *edges, *gaps, *(spot + more for spot, _ in spots for more in (0, 1))})
    place = {border: len(tokenizer.decode(short[:border])) for border in borders}
    whole, counted = tokenizer.decode(short), dict(spots)
    parts: list[str] = []
    moved: dict[int, int] = {}
    size = 0
    for begin, end in zip(borders, [*borders[1:], len(short)], strict=True):
        part = whole[place[begin] : place[end]]
        if begin in counted and begin < end:
            token = part.strip()
            part = part.replace(token, f"[{token or 'placeholder'} x {counted[begin]}]", 1)
        if begin == gap:
            part = GAP + part
        moved[begin] = size
        parts.append(part)
        size += len(part)
    moved[len(short)] = size
    spans = () if counts.all() else tuple((moved[a], moved[b]) for a, b in pairs)
    return "".join(parts), spans


def _items(done: Finished, row: int) -> list[tuple[int, int]]:
    media = done.media
    if media is None:
        return []
    chosen = slice(int(media.rows[row]), int(media.rows[row + 1]))
    return list(zip(media.start[chosen].tolist(), media.length[chosen].tolist(), strict=True))


def _raw_text(one: Opened, rows: RowBatch, row: int) -> str:
    spec = one.source.sample
    assert not isinstance(spec, Custom)  # its rows are whatever its function takes
    if isinstance(spec, Interleaved):
        text = _bytes_of(rows, spec.parts or spec.text, row)
        return text if spec.parts is None else _join_parts(text, spec.marker)
    if isinstance(spec, Chat):
        return _bytes_of(rows, spec.messages, row)
    return _bytes_of(rows, spec.column if isinstance(spec, Text) else spec.text, row)


def _turns(raw: str) -> int | None:
    """Return how many messages a conversation has; None where it is no list of them."""
    try:
        messages: Any = json.loads(raw) if raw else []
    except ValueError:
        return None
    return len(messages) if isinstance(messages, list) else None


def _join_parts(text: str, marker: str) -> str:
    """Return a list of parts as one text with markers; what is no such list is shown as it is."""
    try:
        parts: list[dict[str, Any]] = json.loads(text)
        return "".join(part["text"] if part["type"] == "text" else marker for part in parts)
    except (ValueError, KeyError, TypeError):
        return text


def _token_ids(ids: list[int]) -> str:
    return "token ids " + " ".join(map(str, ids[:_SHOWN_IDS])) + (" ..." if len(ids) > _SHOWN_IDS else "")


def _bytes_of(rows: RowBatch, column: str, row: int) -> str:
    values = rows[column]
    assert isinstance(values, Ragged)  # measuring has refused any other kind
    return values[row].tobytes().decode("utf-8", "replace")
