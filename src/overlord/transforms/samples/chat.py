"""Chat: a conversation becomes one sequence in which the assistant's tokens count in the loss.

    ChatTransform       renders conversations, tokenizes them, and marks the tokens of the loss
    ImageChatTransform  the same of conversations with images, each of which becomes its placeholders
    render_rows         conversations to text by a Jinja template, with the characters that the assistant wrote

Rules of this file:
1. `render_rows` is pure and needs neither tokenizer nor job, so that it can run in a process worker.
2. A template has no clock and no random numbers: a row becomes the same text on every day and every host.
3. An error of a template or a row is a reason in the row's "fault" column, never an exception.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

import jinja2
import numpy as np
import numpy.typing as npt
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from overlord.core.kernels import kernel
from overlord.core.ragged import (
    BAD_COLUMN,
    Ragged,
    RowBatch,
    expand_ranges,
    no_value,
    num_rows,
    offsets_of,
    sizes_column,
    unread_rows,
)
from overlord.core.samples import BAD, SKIP
from overlord.core.spec_errors import did_you_mean
from overlord.errors import SpecError
from overlord.job.sample_specs import ChatLoss
from overlord.job.specs import Chat, ImageChat, Job
from overlord.transforms.samples.image_values import ImageValues, text_of
from overlord.transforms.samples.images import ImageDecoder, MeasuredImages, row_images
from overlord.transforms.samples.per_sample import (
    Bools,
    Fault,
    Finished,
    Int64s,
    Isolate,
    Measured,
    MediaDecoder,
    MediaFault,
    RowFunction,
    UInt64s,
    Workers,
    finish_tokens,
    measured_text,
    ragged_column,
    run_rows,
    with_stand_ins,
)
from overlord.transforms.samples.text import ItemTokens
from overlord.transforms.samples.tokenize import DEFAULT_TEMPLATE, TextTokenizer, TokenSpans, decode_texts

BUILTIN_TEMPLATES: Mapping[str, str] = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
        "{{ '\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}
"""Templates that need no file."""

Message = dict[str, Any]
Spans = list[tuple[int, int]]
"""(first character, one past the last) of each part of a text."""

_ASSISTANT = "assistant"
_SHARE_GPT_ROLES = {"human": "user", "gpt": _ASSISTANT}
_ROLES = ("system", "user", _ASSISTANT, "tool")
_RECORDER = "__recorder__"
_PROBE = "a text part"
_NO_SPANS = np.empty(0, np.int64)
_TOOL_TEMPLATE = "tool_use"
_NOTHING: RowBatch = {
    "text": Ragged.from_rows([b""]),
    "spans": Ragged.from_rows([np.empty(0, np.int64)], np.int64),
    "fault": Ragged.from_rows([b""]),
}
_NO_IMAGES: RowBatch = {
    "images": Ragged.from_rows([b""]),
    sizes_column("images"): Ragged.from_rows([np.empty(0, np.int64)], np.int64),
}


class ChatTransform:
    """A conversation becomes one sequence; rendered in process workers, or without `isolate` in the caller's thread."""

    def __init__(self, spec: Chat, tokenizer: TextTokenizer, isolate: Isolate | None = None) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._render = self._rendering()
        self._run = isolate(self._render, "chat", spec.deadline) if isolate and spec.process else None
        self.columns: tuple[str, ...] = tuple(c for c in (spec.messages, spec.tools) if c)
        self.decoder: MediaDecoder | None = None

    def _rendering(self) -> RowFunction:
        return rendering(self._spec, self._tokenizer)

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        rendered, bad, faults, killed = self._render_rows(rows, _NOTHING)
        tokens, loss = self._encode(rendered)
        stray = self._tokenizer.holds_reserved(tokens) & ~bad
        faults += [(int(row), "it holds a placeholder of images, clips or sounds") for row in np.flatnonzero(stray)]
        bad |= stray
        empty = tokens.lengths == 0
        flags = np.where(bad, BAD, 0) | np.where(empty & ~bad, SKIP, 0)
        replaced = bad | empty
        kept: RowBatch = {
            "tokens": with_stand_ins(tokens, replaced),
            "loss": with_stand_ins(loss, replaced),
            "empty": empty,
        }
        measured = measured_text(ragged_column(kept, "tokens").lengths, flags, kept, faults)
        measured.killed = killed
        return measured

    def _render_rows(self, rows: RowBatch, nothing: RowBatch) -> tuple[RowBatch, Bools, list[Fault], list[Fault]]:
        """Return rows as text, which of them are bad, all faults, and those of rows that killed their worker."""
        for column in self.columns:
            ragged_column(rows, column)
        wanted = {name: rows[name] for name in rows if name.removeprefix(sizes_column("")) in self.columns}
        rendered, killed = run_rows(self._render, self._run, wanted | {BAD_COLUMN: rows[BAD_COLUMN]}, nothing)
        bad = np.asarray(rows[BAD_COLUMN], np.bool_) | (ragged_column(rendered, "fault").lengths > 0)
        bad[[row for row, _ in killed]] = True
        reasons, _ = decode_texts(ragged_column(rendered, "fault"))
        faults = unread_rows(rows) + [(row, reason) for row, reason in enumerate(reasons) if reason]
        return rendered, bad, faults + killed, killed

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        return finish_tokens(kept, planned, bad)

    def _encode(self, rendered: RowBatch) -> tuple[Ragged, Ragged]:
        texts, _ = decode_texts(ragged_column(rendered, "text"))
        # The template writes the special tokens itself.
        encoded = self._tokenizer.encode_spans(texts, special_tokens=False)
        if self._spec.loss == "all":
            return encoded.tokens, Ragged(np.ones(len(encoded.tokens.values), np.uint8), encoded.tokens.offsets)
        spans, characters = ragged_column(rendered, "spans"), np.array([len(text) for text in texts], np.int64)
        return encoded.tokens, loss_in_spans(encoded, spans, characters)


class ImageChatTransform(ChatTransform):
    """A conversation with images.

    The rendered text has one placeholder token for each image; after tokenizing, it is repeated for the tokens that the
    header of the image promises.
    """

    def __init__(
        self, spec: ImageChat, tokenizer: TextTokenizer, values: ImageValues, isolate: Isolate | None = None
    ) -> None:
        self._images = spec
        self._item = ItemTokens.of(spec, "image", tokenizer)
        self._values = values
        super().__init__(spec, tokenizer, isolate)
        # Behind the others: of several columns that are null in a row the first is its fault.
        self.columns = (*self.columns, *spec.images)
        self.decoder = ImageDecoder(spec)

    def _rendering(self) -> RowFunction:
        written = _written_image(self._images, self._item, self._tokenizer)
        images = ChatImages(self._images.images, self._images.marker, written, self._values)
        return rendering(self._spec, self._tokenizer, images)

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        rendered, bad, faults, killed = self._render_rows(self._without_images(rows), _NOTHING | _NO_IMAGES)
        shown, have = row_images(rendered, ["images"])
        images, unreadable = MeasuredImages.of(self._images, None, shown, have[:, 0], seeds)
        faults += unreadable
        bad[images.owner[images.bad]] = True
        tokens, loss = self._encode(rendered)
        at = np.flatnonzero(tokens.values == self._item.item)
        row_of = np.searchsorted(tokens.offsets, at, side="right") - 1
        # A text that spells a placeholder itself would take the place of an image.
        count = np.bincount(row_of, minlength=len(tokens))
        others = self._tokenizer.holds_reserved(Ragged(np.where(tokens.values == self._item.item, -1, tokens.values),
                                                       tokens.offsets))  # fmt: skip
        stray = ((count != have[:, 0]) | others) & ~bad
        faults += [(int(row), "a text in it holds a placeholder of images, clips or sounds")
                   for row in np.flatnonzero(stray)]  # fmt: skip
        bad |= stray
        empty = tokens.lengths == 0
        used = ~bad & ~empty
        images, at, row_of = images.keep(used[images.owner]), at[used[row_of]], row_of[used[row_of]]
        tokens, loss, first = _repeat_placeholders(tokens, loss, at, images.placeholders, self._item.margin)
        kept: RowBatch = {
            "tokens": with_stand_ins(tokens, ~used),
            "loss": with_stand_ins(loss, ~used),
            "empty": empty,
        }
        kept |= images.columns(len(used), first - tokens.offsets[row_of])
        return Measured(
            tokens=ragged_column(kept, "tokens").lengths,
            image_tokens=np.bincount(images.owner, images.placeholders, len(used)).astype(np.int64),
            images=np.bincount(images.owner, minlength=len(used)),
            flags=(np.where(bad, BAD, 0) | np.where(empty & ~bad, SKIP, 0)).astype(np.int32),
            kept=kept,
            margin=self._item.margin,
            # One reason per row: a sample is bad once, however many of its images are.
            faults=sorted(dict(reversed(faults)).items()),
            killed=killed,
        )

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        return finish_tokens(kept, planned, bad, "image")

    def _without_images(self, rows: RowBatch) -> RowBatch:
        """Return rows in which one without images is not bad: its column of images is null, or not there."""
        marks = np.asarray(rows[BAD_COLUMN])
        names = [name for name in rows if name != BAD_COLUMN and not name.startswith(sizes_column(""))]
        none = np.isin(marks, [no_value(names.index(column)) for column in self._images.images])
        return {**rows, BAD_COLUMN: np.where(none, 0, marks)} if none.any() else rows


def _repeat_placeholders(
    tokens: Ragged, loss: Ragged, at: Int64s, counts: Int64s, margin: tuple[int, int]
) -> tuple[Ragged, Ragged, Int64s]:
    """Repeat the tokens at some places; return tokens, loss, and where the first of each repeated one is.

    They do not count in the loss, nor do those of the margin around them.

    Example:
        >>> rows = Ragged(np.array([5, 9, 6, 7]), np.array([0, 3, 4]))
        >>> made = _repeat_placeholders(rows, Ragged(np.ones(4), rows.offsets), np.array([1]), np.array([3]), (0, 1))
        >>> made[0].values.tolist(), made[0].offsets.tolist(), made[1].values.tolist(), made[2].tolist()
        ([5, 9, 9, 9, 6, 7], [0, 5, 6], [1.0, 0.0, 0.0, 0.0, 0.0, 1.0], [1])
    """
    times = np.ones(len(tokens.values), np.int64)
    times[at] = counts
    places = offsets_of(times)
    offsets, first = places[tokens.offsets], places[at]
    counted = np.repeat(loss.values, times)
    counted[expand_ranges(first - margin[0], counts + sum(margin))] = 0
    return Ragged(np.repeat(tokens.values, times), offsets), Ragged(counted, offsets), first


def _written_image(spec: ImageChat, item: ItemTokens, tokenizer: TextTokenizer) -> str | None:
    """Return what stands for an image in a text; None where the chat template writes it.

    Raises:
        SpecError: when the template or the tokenizer does not know the placeholder.
    """
    ids = [one for one in (item.before, item.item, item.after) if one is not None]
    names = [one for one in (spec.before, spec.image_token, spec.after) if one is not None]
    tokens = [tokenizer.decode([one]) if isinstance(one, int) else one for one in names]
    written = "".join(tokens)
    found = tokenizer.encode_spans([written], special_tokens=False).tokens.values.tolist()
    if found != ids:
        raise SpecError(
            f"sample.image_token: the tokenizer {tokenizer.path!r} reads {written!r} as the tokens {found}, not as "
            f"{ids}; images would have no place in a conversation. Add them to the tokenizer as special tokens."
        )
    template = compile_template(find_template(spec, tokenizer))
    own = template.image_text(dict(tokenizer.special_tokens))
    if own is None:
        return written
    token = tokens[0 if item.before is None else 1]
    if own.count(token) != 1 or written not in own:
        raise SpecError(
            f"the chat template writes an image as {own!r}, and sample.image_token, before and after make it "
            f"{written!r}; images would not find their places. Give the tokens that the template writes."
        )
    return None


def rendering(spec: Chat, tokenizer: TextTokenizer, images: ChatImages | None = None) -> RowFunction:
    """Return the pure function that renders the rows of a source.

    Raises:
        SpecError: when there is no template, or it is no Jinja template.
    """
    template = find_template(spec, tokenizer)
    compile_template(template)
    return functools.partial(
        render_rows, template, dict(tokenizer.special_tokens), spec.loss, spec.messages, spec.tools, images=images
    )


def find_template(spec: Chat, tokenizer: TextTokenizer) -> str:
    """Return the text of the template of a Chat."""
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
        names = (*BUILTIN_TEMPLATES, *known)
        why = "" if isinstance(error, FileNotFoundError) else f" ({getattr(error, 'strerror', None) or error})"
        raise SpecError(
            f"Chat: template {template!r} is neither a known name ({', '.join(map(repr, names))}), nor a readable "
            f"file{why}, nor Jinja text; messages could not become text.{did_you_mean(template, names)} Give one of "
            "them."
        ) from error


def inline_templates(job: Job, tokenizer: TextTokenizer) -> Job:
    """Return the job with template files read in: the stream depends on a template's text, not on its path."""
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
    assistant mask of transformers. Characters without a token are skipped, and an empty span counts nothing;
    there transformers would leave out later spans, or count up to the end of the text.
    """
    tokens = encoded.tokens
    loss = np.zeros(len(tokens.values), np.uint8)
    _mark_spans(tokens.offsets, encoded.begin, encoded.end, spans.offsets, spans.values, characters, loss)
    return Ragged(loss, tokens.offsets)


@kernel
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
            for character in range(max(begin[token], 0), min(end[token], count)):
                if token_of[character] < 0:
                    token_of[character] = token
        for at in range(rows[row], rows[row + 1], 2):
            first, last = max(spans[at], 0), min(spans[at + 1], count) - 1
            while first <= last and token_of[first] < 0:
                first += 1
            while last >= first and token_of[last] < 0:
                last -= 1
            if first <= last:
                loss[token_of[first] : token_of[last] + 1] = 1


# -- conversations to text ---------------------------------------------------------------------------------------


class ChatFault(Exception):
    """One conversation cannot become text; the reason goes to the log with the sample's id."""


@dataclass(frozen=True, slots=True)
class ChatImages:
    """How the images of conversations are found and written."""

    columns: tuple[str, ...]
    """Columns that hold images of a row."""
    marker: str
    """Where one of them goes in a text."""
    written: str | None
    """What stands for an image in a text; None where the template takes images as parts and writes it itself."""
    values: ImageValues


class _RowImages:
    """The images of one conversation, collected in the order in which its messages show them."""

    def __init__(self, how: ChatImages, have: list[bytes]) -> None:
        self.how = how
        self.shown: list[bytes] = []
        self._have = have
        self._taken: set[int] = set()
        self._next = 0

    def split(self, text: str) -> list[Message]:
        """Return a text as parts: text, and an image of the row at each marker."""
        runs = text.split(self.how.marker)
        parts: list[Message] = []
        for number, run in enumerate(runs):
            if number:
                parts.append(self._add(None))
            if run:
                parts.append({"type": "text", "text": run})
        return parts

    def part(self, number: int, part: Message) -> Message:
        """Return a part of a message, with what it shows collected if it is an image."""
        kind = part.get("type")
        if kind == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if kind not in ("image", "image_url", "input_image"):
            raise ChatFault(f"message {number} holds a part of type {kind!r}; known are text, image and image_url")
        keys = ("image", "image_url", "base64", "url", "path", "source")
        return self._add(next((part[key] for key in keys if part.get(key) is not None), None))

    def check(self) -> None:
        """Refuse a row with images that no message shows."""
        if len(self._taken) < len(self._have):
            raise ChatFault(f"the row has {len(self._have)} images, and its messages show {len(self._taken)} of them")

    def _add(self, value: Any) -> Message:
        if isinstance(value, int) and not isinstance(value, bool):
            self._take(value)
        elif value is None:
            self._take(self._next)
            self._next += 1
        else:
            try:
                self.shown.append(bytes(self.how.values.find(text_of(value).encode("utf-8", "replace"))))
            except MediaFault as fault:
                raise ChatFault(f"image {len(self.shown)}: {fault}") from fault
        return {"type": "image"}

    def _take(self, number: int) -> None:
        if not 0 <= number < len(self._have):
            raise ChatFault(f"a message shows image {number} of the row, which has {len(self._have)}")
        self._taken.add(number)
        try:
            self.shown.append(bytes(self.how.values.find(self._have[number])))
        except MediaFault as fault:
            raise ChatFault(f"image {len(self.shown)}: {fault}") from fault


class _Recorder:
    """The output of one rendering so far, and the parts marked as the assistant's."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.length = 0
        self.marked: list[tuple[int, str]] = []

    def add(self, piece: str) -> None:
        self.pieces.append(piece)
        self.length += len(piece)


class _GenerationTag(Extension):
    """`{% generation %}..{% endgeneration %}`: the text between was written by the assistant."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _mark(self, context: Context, caller: Macro) -> str:
        text = str(caller())
        # The recorder belongs to the rendering and is not stored here: threads may share a template.
        recorder: _Recorder = context[_RECORDER]
        recorder.marked.append((recorder.length, text))
        return text


class _NoClock(jinja2.Undefined):
    """The `strftime_now` of other renderers: not defined here, so that a template can fall back on a fixed date."""

    def __getattr__(self, name: str) -> Never:
        raise AttributeError(name)  # Jinja inspects attributes of what it is about to call

    def __call__(self, *args: Any, **kwargs: Any) -> Never:
        raise ChatFault(
            "the chat template asks for today's date (strftime_now); the same row would become other tokens tomorrow. "
            "Write a fixed date into the template"
        )


def _refuse(message: object) -> Never:
    raise ChatFault(f"the chat template refuses the conversation: {message}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as models were trained on it: Jinja's own filter would escape it for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled chat template.

    Example:
        >>> chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        >>> text, spans = compile_template(BUILTIN_TEMPLATES["chatml"]).render(chat)
        >>> [text[begin:end] for begin, end in spans]
        ['Hello<|im_end|>']
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _NoClock(name="strftime_now")
        del environment.globals["lipsum"], environment.filters["random"]  # they are random
        self._template = environment.from_string(source)
        tree = environment.parse(source)
        self.has_tags = any(tag.name == "_mark" for tag in tree.find_all(nodes.ExtensionAttribute))
        """Whether it has generation tags, which mark what the assistant wrote."""
        self.takes_parts = self._probe([{"type": "text", "text": _PROBE}]) is not None
        """Whether it supports content that is a list of parts; otherwise it gets their texts joined."""
        self.takes_text = self._probe(_PROBE) is not None
        """Whether it supports content that is text; otherwise it gets a list of one part."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        prompt: bool = False,
        special_tokens: Mapping[str, str] | None = None,
    ) -> tuple[str, Spans]:
        """Return the text of a conversation, and the spans between generation tags.

        With `prompt`, the beginning of an answer of the assistant follows.

        Raises:
            ChatFault: when the template refuses the conversation or fails on it.
        """
        recorder = _Recorder()
        variables = dict(special_tokens or {}) | {
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
            _RECORDER: recorder,
        }
        try:
            for piece in self._template.generate(variables):
                recorder.add(piece)
        except (ChatFault, MemoryError):  # out of memory is a fault of the host, not of the row
            raise
        except Exception as error:  # the border to the user's template: whatever it raises is a fault of this row
            raise ChatFault(f"the chat template fails on it: {type(error).__name__}: {error}") from error
        text = "".join(recorder.pieces)
        if any(not text.startswith(marked, begin) for begin, marked in recorder.marked):
            raise ChatFault(
                "the chat template has its generation tags inside a macro, set, call or filter block, where their "
                "place in the text is not known; move them to where the text is put out"
            )
        return text, [(begin, begin + len(marked)) for begin, marked in recorder.marked]

    def image_text(self, special_tokens: Mapping[str, str]) -> str | None:
        """Return what it writes for an image; None if it does not take images as parts of a message."""
        text = [{"type": "text", "text": _PROBE}]
        plain, shown = (self._probe(parts, special_tokens) for parts in (text, [{"type": "image"}, *text]))
        if plain is None or shown is None:
            return None
        before, _, after = plain.partition(_PROBE)
        inner = shown.removeprefix(before).removesuffix(after).replace(_PROBE, "", 1)
        return inner or None

    def _probe(self, content: object, special_tokens: Mapping[str, str] | None = None) -> str | None:
        """Return a message with this content as text; None if the template cannot take such content."""
        try:
            text, _ = self.render([{"role": "user", "content": content}], special_tokens=special_tokens)
        except ChatFault:
            return None
        # In quotes, the whole list was printed as Python or JSON.
        return text if _PROBE in text and not any(quote + _PROBE + quote in text for quote in "'\"") else None


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    """Return the compiled template; one that was compiled before is used again.

    Raises:
        SpecError: when it is no Jinja template.
    """
    try:
        return ChatTemplate(source)
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(
            f"the chat template is no Jinja template ({error.message}, line {error.lineno}); no conversation could "
            "become text. Correct the template, or give another one."
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # Jinja computes constants when it compiles: 'a' * 10**12, and what is nested too deeply
        raise SpecError(
            f"the chat template cannot be compiled ({type(error).__name__}: {error}); no conversation could become "
            "text. Correct the template, or give another one."
        ) from error


def render_rows(
    template: str,
    special_tokens: Mapping[str, str],
    loss: ChatLoss,
    messages: str,
    tools: str | None,
    rows: RowBatch,
    *,
    images: ChatImages | None = None,
) -> RowBatch:
    """Render conversations; a pure function of its arguments, row by row.

    Args:
        template: The chat template, as Jinja text.
        special_tokens: Special tokens by name, as the template knows them.
        loss: Which messages to return as spans; with "all" there are none, since all tokens count.
        messages: Column that holds the messages as JSON text.
        tools: Column that holds the tools as JSON text.
        rows: The rows; those marked bad are left out.
        images: How images are found and written; None where messages are text only.

    Returns:
        Columns of as many rows: "text" (UTF-8), "spans" (int64: begin and end of each, in characters) and
        "fault" (UTF-8: what is wrong with the row, empty where nothing is); with images also "images", a list of bytes:
        what the text shows, in its order.
    """
    compiled = compile_template(template)
    bad = np.asarray(rows[BAD_COLUMN], np.bool_)
    texts, spans, faults = [b""] * num_rows(rows), [_NO_SPANS] * num_rows(rows), [b""] * num_rows(rows)
    shown: list[list[bytes]] = [[] for _ in texts]
    have = _images_of(rows, images.columns) if images is not None and images.columns else [[] for _ in texts]
    for row in np.flatnonzero(~bad).tolist():
        try:
            own = None if images is None else _RowImages(images, have[row])
            chat = _read_messages(_cell(rows, messages, row), compiled, own)
            known = None if tools is None else _read_tools(_cell(rows, tools, row))
            text, found = _render_chat(compiled, chat, known, special_tokens, loss) if chat else ("", [])
            texts[row], spans[row] = _utf8(text), np.array(found, np.int64).reshape(-1)
            if own is not None:
                own.check()
                shown[row] = own.shown
        except ChatFault as fault:
            faults[row] = str(fault).encode("utf-8", "backslashreplace")
    made: RowBatch = {
        "text": Ragged.from_rows(texts),
        "spans": Ragged.from_rows(spans, np.int64),
        "fault": Ragged.from_rows(faults),
    }
    if images is not None:
        sizes = [np.array([len(one) for one in row], np.int64) for row in shown]
        made["images"] = Ragged.from_rows([b"".join(row) for row in shown])
        made[sizes_column("images")] = Ragged.from_rows(sizes, np.int64)
    return made


def _images_of(rows: RowBatch, columns: Sequence[str]) -> list[list[bytes]]:
    """Return the images of every row."""
    images, have = row_images(rows, columns)
    bounds = offsets_of(have.sum(axis=1)).tolist()
    items = [images[item].tobytes() for item in range(len(images))]
    return [items[begin:end] for begin, end in itertools.pairwise(bounds)]


def _render_chat(
    template: ChatTemplate,
    chat: list[Message],
    tools: list[Any] | None,
    special_tokens: Mapping[str, str],
    loss: ChatLoss,
) -> tuple[str, Spans]:
    """Return the text of a conversation, and the spans that count in the loss."""

    def render(messages: int, prompt: bool = False) -> tuple[str, Spans]:
        return template.render(chat[:messages], tools=tools, prompt=prompt, special_tokens=special_tokens)

    text, marked = render(len(chat))
    answers = [number for number, message in enumerate(chat) if message["role"] == _ASSISTANT]
    if loss == "all" or not answers:
        return text, []
    if loss == "last":
        answers = answers[-1:]
    if template.has_tags:
        # Spans that the messages before the last answer do not have belong to the last answer.
        return text, marked[len(render(answers[0])[1]) :] if loss == "last" else marked
    spans: Spans = []
    for number in answers:  # each from the end of the generation prompt to the end of its message
        before, _ = render(number, prompt=True)
        after = text if number + 1 == len(chat) else render(number + 1)[0]
        if not (after.startswith(before) and text.startswith(after)):
            raise ChatFault(
                f"what the assistant wrote in message {number} cannot be told from the rest: the chat template renders "
                "earlier messages differently when later ones follow. Put generation tags into the template, or "
                'use loss="all"'
            )
        spans.append((len(before), len(after)))
    return text, spans


def _cell(rows: RowBatch, column: str, row: int) -> bytes:
    return rows[column][row].tobytes()


def _read_json(data: bytes, what: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ChatFault(f"the {what} are not JSON: {error}") from error


def _read_tools(data: bytes) -> list[Any] | None:
    tools = _read_json(data, "tools") if data else None
    if tools is not None and not isinstance(tools, list):
        raise ChatFault(f"the tools are a {type(tools).__name__}, not a list")
    return tools or None


def _read_messages(data: bytes, template: ChatTemplate, images: _RowImages | None) -> list[Message]:
    """Return the messages as the template takes them; content in parts is joined if it needs text."""
    found = _read_json(data, "messages")
    if not isinstance(found, list):
        raise ChatFault(f"the messages are a {type(found).__name__}, not a list of messages")
    return [_message(number, one, template, images) for number, one in enumerate(found)]


def _message(number: int, found: object, template: ChatTemplate, images: _RowImages | None) -> Message:
    if not isinstance(found, dict):
        raise ChatFault(f"message {number} is a {type(found).__name__}, not a mapping with role and content")
    # In a nested column every message has the keys of all messages, with null for those it does not have itself.
    message = {key: value for key, value in found.items() if value is not None or key == "content"}
    if "role" not in message and "from" in message:
        message["role"] = _share_gpt_role(number, message.pop("from"))
        message["content"] = message.pop("value", None)
    role = message.get("role")
    if not isinstance(role, str):
        raise ChatFault(f"message {number} has no role (its keys: {', '.join(map(str, found))})")
    if "content" in message:
        message["content"] = _content(number, message["content"], template, images)
    return message


def _share_gpt_role(number: int, name: object) -> str:
    role = _SHARE_GPT_ROLES.get(str(name), str(name))
    if role not in _ROLES:
        known = ", ".join((*_SHARE_GPT_ROLES, *_ROLES))
        raise ChatFault(f"message {number} is from {name!r}; known are {known}")
    return role


def _content(number: int, content: object, template: ChatTemplate, images: _RowImages | None) -> object:
    if content is None:
        return content
    if isinstance(content, str):
        if images is None:
            return content
        if template.takes_text and images.how.marker not in content:
            return content
        parts = images.split(content)
    elif isinstance(content, list):
        parts = [_part(number, part, images) for part in content]
    else:
        raise ChatFault(f"the content of message {number} is a {type(content).__name__}, not text")
    written = None if images is None else images.how.written
    if written is not None:  # the template does not know images
        parts = [{"type": "text", "text": written} if part["type"] == "image" else part for part in parts]
    if template.takes_parts and (written is None or not template.takes_text):
        return parts
    return "".join(part["text"] for part in parts)


def _part(number: int, part: object, images: _RowImages | None) -> Message:
    if images is not None and isinstance(part, dict):
        return images.part(number, part)
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise ChatFault(
            f"message {number} holds a part of type {kind!r}, and a Chat takes text parts only; give conversations "
            "with images as ImageChat"
        )
    return {"type": "text", "text": text}


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ChatFault(f"the text holds half of a surrogate pair at character {error.start}") from error
