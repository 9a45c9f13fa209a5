"""The transform of each kind of sample; that of Custom, a function of the user, is here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import BAD_COLUMN, Ragged, RowBatch, num_rows, sizes_column, unread_rows
from overlord.core.samples import BAD, SKIP
from overlord.core.spec_errors import did_you_mean, show
from overlord.errors import SpecError
from overlord.job.specs import Audio, Chat, Custom, ImageChat, ImageText, Interleaved, Job, Source, Spec, Text, Video
from overlord.transforms.samples.audio import AudioTransform
from overlord.transforms.samples.chat import ChatTransform, ImageChatTransform
from overlord.transforms.samples.image_values import ImageValues
from overlord.transforms.samples.images import ImageTextTransform, InterleavedTransform
from overlord.transforms.samples.per_sample import (
    STAND_IN_TOKEN,
    Bools,
    Fault,
    Finished,
    Int64s,
    Isolate,
    Measured,
    SampleTransform,
    UInt64s,
    Workers,
    finish_tokens,
    innermost_line,
    measured_text,
    ragged_column,
    run_rows,
)
from overlord.transforms.samples.text import TextTransform
from overlord.transforms.samples.tokenize import TextTokenizer
from overlord.transforms.samples.video import VideoTransform


def reserve_placeholders(job: Job, tokenizer: TextTokenizer) -> None:
    """Keep the placeholder tokens of a job's media out of its texts, where no media would belong to them."""
    fields = ("image_token", "audio_token", "video_token")
    named: set[str | int | None] = {getattr(source.sample, f, None) for source in job.sources for f in fields}
    ids = {tokenizer.find(token) if isinstance(token, str) else token for token in named}
    tokenizer.reserve({found for found in ids if found is not None})


def make_transform(source: Source, tokenizer: TextTokenizer | None, isolate: Isolate | None = None) -> SampleTransform:
    """Return the transform for a source's sample spec.

    `isolate` moves Python code that holds the interpreter lock into process workers; None runs it in the caller.
    """
    spec = source.sample
    if isinstance(spec, Custom):
        return CustomTransform(spec, isolate)
    if isinstance(spec, Text) and spec.tokenized:
        return TextTransform(spec, tokenizer)
    if tokenizer is None:
        raise SpecError(
            f"source {source.name!r}: its text must be tokenized, but the job has no tokenizer; give a tokenizer.json "
            "as tokenizer, or name a column that holds token ids and add tokenized=True to the sample."
        )
    if isinstance(spec, ImageChat):
        return ImageChatTransform(spec, tokenizer, ImageValues.of(source), isolate)
    if isinstance(spec, (ImageText, Interleaved)):
        images = ImageTextTransform if isinstance(spec, ImageText) else InterleavedTransform
        return images(spec, tokenizer, ImageValues.of(source))  # type: ignore[arg-type]
    if isinstance(spec, Chat):
        return ChatTransform(spec, tokenizer, isolate)
    return _TRANSFORMS[type(spec)](spec, tokenizer)


_TRANSFORMS: dict[type[Spec], Callable[[Any, TextTokenizer], SampleTransform]] = {
    Text: TextTransform,
    Audio: AudioTransform,
    Video: VideoTransform,
}


# Custom: a user's function turns a row into tokens.


RowToTokens = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""A user's function: {"tokens": ints, "loss_mask": ..} of a row, or None to skip it."""


class CustomTransform:
    """A user's function from a row to tokens. It runs before planning, since it decides lengths."""

    def __init__(self, spec: Custom, isolate: Isolate | None = None) -> None:
        self.columns: tuple[str, ...] = tuple(spec.columns or ())
        self.decoder = None
        self._function = functools.partial(custom_rows, spec.fn)
        self._run = isolate(self._function, spec.name, spec.deadline) if isolate and spec.process else None

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        faults: list[Fault] = unread_rows(rows)
        made, killed = run_rows(self._function, self._run, rows, _STAND_IN)
        reasons = ragged_column(made, "fault")
        faults += [(row, bytes(reasons[row]).decode()) for row in np.flatnonzero(reasons.lengths).tolist()]
        tokens, flags = ragged_column(made, "tokens"), np.asarray(made["flags"])
        measured = measured_text(tokens.lengths, flags, {"tokens": tokens, "loss": made["loss"]}, faults + killed)
        measured.killed = killed
        return measured

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        return finish_tokens(kept, planned, bad)


def custom_rows(fn: RowToTokens, rows: RowBatch) -> RowBatch:
    """Apply a user's function to every row that could be read; what it raises is a fault of the row.

    Returns:
        tokens, loss (whether each counts), flags (BAD, SKIP) and fault (text; empty where there is none).

    Example:
        >>> rows = {"n": np.array([3, 0]), BAD_COLUMN: np.zeros(2, np.bool_)}
        >>> made = custom_rows(lambda row: {"tokens": [9] * row["n"]}, rows)
        >>> made["tokens"].lengths.tolist(), made["flags"].tolist()
        ([3, 1], [0, 1])
    """
    unread = np.asarray(rows[BAD_COLUMN], np.bool_)
    flags = np.where(unread, BAD, 0).astype(np.int32)
    tokens: list[npt.NDArray[Any]] = [np.full(1, STAND_IN_TOKEN, np.int32)] * num_rows(rows)
    masks: list[npt.NDArray[Any]] = [np.zeros(1, np.uint8)] * num_rows(rows)
    reasons = [b""] * num_rows(rows)
    names = [name for name in rows if name != BAD_COLUMN and not name.startswith(sizes_column(""))]
    for row in np.flatnonzero(~unread).tolist():
        values = {name: _value(rows, name, row) for name in names}
        try:
            made = fn(values)
            if made is None:
                flags[row] |= SKIP
                continue
            tokens[row], masks[row] = _checked_custom(made)
        except Exception as error:  # the boundary to the user's code: any exception is a fault of this row
            reasons[row] = _reason(error).encode(errors="replace")
            flags[row] |= BAD
    return {
        "tokens": Ragged.from_rows(tokens, np.int32),
        "loss": Ragged.from_rows(masks, np.uint8),
        "flags": flags,
        "fault": Ragged.from_rows(reasons),
    }


_STAND_IN: RowBatch = {
    "tokens": Ragged.from_rows([np.full(1, STAND_IN_TOKEN)], np.int32),
    "loss": Ragged.from_rows([np.zeros(1)], np.uint8),
    "flags": np.full(1, BAD, np.int32),
    "fault": Ragged.from_rows([b""]),
}
"""The result for a row that killed its worker."""


def _value(rows: RowBatch, name: str, row: int) -> Any:
    """Return a value as the user's function takes it: bytes, a list of bytes, an array or a number."""
    value, sizes = rows[name], rows.get(sizes_column(name))
    if not _is_bytes(value):
        return value[row]
    data = bytes(value[row])
    if not isinstance(sizes, Ragged):
        return data
    ends = np.cumsum(sizes[row]).tolist()
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _is_bytes(values: Ragged | npt.NDArray[Any]) -> bool:
    return isinstance(values, Ragged) and values.values.dtype == np.uint8


class _WrongReturn(Exception):
    """What the function returned cannot be used."""


def _reason(error: Exception) -> str:
    if isinstance(error, _WrongReturn):
        return f"the custom function returned {error}"
    return f"the custom function raised {type(error).__name__}: {error}{innermost_line(error)}"


def _checked_custom(made: object) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    if not isinstance(made, Mapping) or "tokens" not in made:
        shown = f"a mapping without 'tokens' ({', '.join(map(str, made))})" if isinstance(made, Mapping) else repr(made)
        raise _WrongReturn(f"{shown:.80}; expected {{'tokens': [..], 'loss_mask': [..]}}, the mask being optional")
    raw = np.asarray(made["tokens"])
    if raw.ndim != 1 or not len(raw) or raw.dtype.kind not in "iu":
        raise _WrongReturn(f"tokens of type {raw.dtype} and shape {raw.shape}; expected a list of whole numbers")
    if int(raw.min()) < 0 or int(raw.max()) > np.iinfo(np.int32).max:
        raise _WrongReturn(f"token ids from {raw.min()} to {raw.max()}; expected 0 to 2**31 - 1")
    unknown = [key for key in made if key not in ("tokens", "loss_mask")]
    if unknown:
        raise _WrongReturn(
            f"{show(unknown[0])}, which no batch would have; return 'tokens' and 'loss_mask' only."
            f"{did_you_mean(unknown[0], ['tokens', 'loss_mask'])}"
        )
    mask = np.asarray(made.get("loss_mask", np.ones(len(raw), np.uint8)))
    if mask.shape != raw.shape:
        raise _WrongReturn(f"{len(raw)} tokens and a loss_mask of shape {mask.shape}; expected one as long")
    counts = np.asarray(mask == 1)
    other = np.flatnonzero(~(counts | (mask == 0)))
    if len(other):
        raise _WrongReturn(
            f"a loss_mask with {mask[other[0]]!s:.40} at token {other[0]}; a token counts in the loss or not, weights "
            "are not kept: expected 0 or 1"
        )
    return raw.astype(np.int32), counts.astype(np.uint8)
