"""Chat: a conversation becomes one sequence, of which the assistant's tokens count in the loss."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from overlord.core.ragged import BAD_COLUMN, Ragged, RowBatch, unread_rows
from overlord.core.samples import BAD, SKIP
from overlord.core.specs import Chat, Job
from overlord.errors import SpecError
from overlord.transforms.chat_template import BUILTIN_TEMPLATES, compile_template, render_rows
from overlord.transforms.isolation import Isolate, RowFunction, run_rows
from overlord.transforms.per_sample import (
    Bools,
    Fault,
    Finished,
    Int64s,
    Measured,
    TransformFacts,
    UInt64s,
    Workers,
    fit_rows,
    mask_rows,
    measured_text,
    ragged_column,
    with_stand_ins,
)
from overlord.transforms.tokenize import DEFAULT_TEMPLATE, TextTokenizer, TokenSpans, decode_texts

_TOOL_TEMPLATE = "tool_use"
_NOTHING: RowBatch = {
    "text": Ragged.from_rows([b""]),
    "spans": Ragged.from_rows([np.empty(0, np.int64)], np.int64),
    "fault": Ragged.from_rows([b""]),
}


class ChatTransform:
    """A conversation becomes one sequence.

    Args:
        spec: What the rows hold.
        tokenizer: The job's tokenizer; it may bring the template.
        run: Brings the rendering into process workers; without it, it runs in the caller's thread.
    """

    def __init__(self, spec: Chat, tokenizer: TextTokenizer, run: Isolate | None = None) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._render = rendering(spec, tokenizer)
        self._run = run(self._render, "chat", spec.deadline) if run is not None and spec.process else None
        self.columns: tuple[str, ...] = tuple(c for c in (spec.messages, spec.tools) if c)
        self.facts = TransformFacts(self.columns, ("tokens",), holds_gil=True)
        self.decoder = None

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        bad = np.asarray(rows[BAD_COLUMN], np.bool_).copy()
        faults: list[Fault] = unread_rows(rows)
        for column in self.columns:
            ragged_column(rows, column)
        wanted = {column: rows[column] for column in (*self.columns, BAD_COLUMN)}
        rendered, killed = run_rows(self._render, self._run, wanted, _NOTHING)
        reasons, _ = decode_texts(ragged_column(rendered, "fault"))
        faults += [(row, reason) for row, reason in enumerate(reasons) if reason]
        bad |= ragged_column(rendered, "fault").lengths > 0
        bad[[row for row, _ in killed]] = True
        texts, _ = decode_texts(ragged_column(rendered, "text"))
        tokens, loss = self._encode(texts, ragged_column(rendered, "spans"))
        stray = self._tokenizer.holds_reserved(tokens) & ~bad
        faults += [(int(row), "it holds a placeholder of images, clips or sounds") for row in np.flatnonzero(stray)]
        bad |= stray
        empty = tokens.lengths == 0
        flags = np.where(bad, BAD, 0) | np.where(empty & ~bad, SKIP, 0)
        replaced = bad | empty
        kept: RowBatch = {
            "tokens": with_stand_ins(tokens, replaced),
            "loss": _with_silence(loss, replaced),
            "empty": empty,
        }
        measured = measured_text(ragged_column(kept, "tokens").lengths, flags, kept, faults + killed)
        measured.killed = killed
        return measured

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        tokens, _ = fit_rows(ragged_column(kept, "tokens"), planned)
        fitted, _ = fit_rows(ragged_column(kept, "loss"), planned)
        loss = fitted.values.copy()
        mask_rows(loss, fitted.offsets, np.flatnonzero(bad).tolist())
        return Finished(tokens, Ragged(loss, fitted.offsets), None, [], [])

    def _encode(self, texts: list[str], spans: Ragged) -> tuple[Ragged, Ragged]:
        # The template writes the special tokens itself.
        if self._spec.loss == "all":
            tokens = self._tokenizer.encode_spans(texts, special_tokens=False).tokens
            return tokens, Ragged(np.ones(len(tokens.values), np.uint8), tokens.offsets)
        encoded = self._tokenizer.encode_spans(texts, special_tokens=False)
        return encoded.tokens, loss_in_spans(encoded, spans, np.array([len(text) for text in texts], np.int64))


def rendering(spec: Chat, tokenizer: TextTokenizer) -> RowFunction:
    """Return the pure function that renders the rows of a source.

    Raises:
        SpecError: when there is no template, or it is no Jinja template.
    """
    template = find_template(spec, tokenizer)
    compile_template(template)
    return functools.partial(
        render_rows, template, dict(tokenizer.special_tokens), spec.loss, spec.messages, spec.tools
    )


def find_template(spec: Chat, tokenizer: TextTokenizer) -> str:
    """Return the text of the template that a Chat asks for."""
    named = tokenizer.chat_templates
    if spec.template is not None:
        return named.get(spec.template) or template_text(spec.template, known=tuple(named))
    name = _TOOL_TEMPLATE if spec.tools is not None and _TOOL_TEMPLATE in named else DEFAULT_TEMPLATE
    if name not in named:
        others = f" It has templates named {', '.join(named)}: name one." if named else ""
        raise SpecError(
            "Chat: the tokenizer comes without a chat template; messages could not become text. Give the whole "
            "Hugging Face folder as the tokenizer (with chat_template.jinja, or chat_template in "
            f'tokenizer_config.json), or write template="chatml" or the path of a .jinja file.{others}'
        )
    return named[name]


def template_text(template: str, known: tuple[str, ...] = ()) -> str:
    """Return a template's text, given its name, its file or the text itself.

    Example:
        >>> template_text("{{ messages[0].content }}")
        '{{ messages[0].content }}'
    """
    if template in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[template]
    if "{{" in template or "{%" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        names = ", ".join(map(repr, (*BUILTIN_TEMPLATES, *known)))
        raise SpecError(
            f"Chat: template {template!r} is neither a known name ({names}), nor a readable file ({error}), nor Jinja "
            "text; messages could not become text. Give one of them."
        ) from error


def inline_templates(job: Job, tokenizer: TextTokenizer) -> Job:
    """Return the job with template files read in: what a template says decides the stream, not where it lies."""
    sources = tuple(
        source.model_copy(update={"sample": _inlined(source.sample, tokenizer)})
        if isinstance(source.sample, Chat)
        else source
        for source in job.sources
    )
    return job.model_copy(update={"sources": sources}) if any(isinstance(s.sample, Chat) for s in sources) else job


def _inlined(spec: Chat, tokenizer: TextTokenizer) -> Chat:
    if spec.template is None or spec.template in tokenizer.chat_templates or spec.template in BUILTIN_TEMPLATES:
        return spec
    return spec.model_copy(update={"template": template_text(spec.template)})


def loss_in_spans(encoded: TokenSpans, spans: Ragged, characters: Int64s) -> Ragged:
    """Return which tokens stand for characters inside spans: 1, else 0 (uint8, aligned with the tokens).

    A span counts from the first token of its first character to the first token of its last one, as in the
    assistant mask of transformers. Characters that no token stands for are passed over, and an empty
    span counts nothing; there transformers would leave out later spans, or count up to the end of the text.

    Args:
        encoded: Tokens and the characters they stand for.
        spans: For each text, begin and end of each span.
        characters: Characters of each text.
    """
    tokens = encoded.tokens
    loss = np.zeros(len(tokens.values), np.uint8)
    _mark_spans(tokens.offsets, encoded.begin, encoded.end, spans.offsets, spans.values, characters, loss)
    return Ragged(loss, tokens.offsets)


@numba.njit(nogil=True, cache=True)
def _mark_spans(
    tokens: npt.NDArray[Any],
    begin: npt.NDArray[Any],
    end: npt.NDArray[Any],
    rows: npt.NDArray[Any],
    spans: npt.NDArray[Any],
    characters: npt.NDArray[Any],
    loss: npt.NDArray[Any],
) -> None:
    for row in range(len(characters)):
        if rows[row] == rows[row + 1]:
            continue
        count = characters[row]
        token_of = np.full(count, -1, np.int64)
        for token in range(tokens[row], tokens[row + 1]):
            for character in range(begin[token], min(end[token], count)):
                if token_of[character] < 0:
                    token_of[character] = token
        for at in range(rows[row], rows[row + 1], 2):
            first, last = spans[at], spans[at + 1] - 1
            while first <= last and token_of[first] < 0:
                first += 1
            while last >= first and token_of[last] < 0:
                last -= 1
            if first <= last:
                loss[token_of[first] : token_of[last] + 1] = 1


def _with_silence(loss: Ragged, replaced: Bools) -> Ragged:
    """Return the loss with one 0 in place of the rows that a stand-in replaces."""
    as_tokens = with_stand_ins(Ragged(loss.values.astype(np.int32), loss.offsets), replaced)
    return Ragged(as_tokens.values.astype(np.uint8), as_tokens.offsets)
