"""What a row of a source is: `Text`, `Custom`, and the table of all kinds of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BeforeValidator,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_serializer,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema, WithJsonSchema

from overlord.core.spec_errors import Fault, conflict, did_you_mean, is_whole, name_choices
from overlord.job.chat_specs import Chat
from overlord.job.media_specs import Audio, ImageText, Interleaved, Video
from overlord.job.spec_model import Spec, Takes, Word, code_of, real, spec_field


def _as_border_token(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, str) and value):
        return value
    if is_whole(value, 0):
        return int(value)
    raise Fault(
        "this must be true (the tokenizer's own token), false, a token of the tokenizer (text) or its id (0 or more); "
        'the ends of the texts would be unknown. Write true, "</s>" or the id'
    )


BorderToken = Annotated[bool | str | int, BeforeValidator(_as_border_token, json_schema_input_type=bool | str | int)]
"""Which token stands at one end of a text, if any."""


class Text(Spec):
    """A row is one text, or the token ids of one.

    Example:
        >>> Text("body")
        Text('body')
    """

    kind: Annotated[Literal["text"], Field(repr=False)] = "text"
    """The kind of sample."""
    column: Word = Field(default="text", kw_only=False)
    """Column that holds the text."""
    tokenized: bool = False
    """Whether the column already holds token ids; then no tokenizer is needed."""
    special_tokens: bool = True
    """Whether the tokenizer adds its special tokens (begin, end) to each text."""
    bos: BorderToken = False
    """Token before each text: true for the tokenizer's own, or its text or id; not added where it is there already."""
    eos: BorderToken = False
    """Token behind each text: true for the tokenizer's own, or its text or id; not added where it is there already."""

    @model_serializer(mode="wrap")
    def _keep_id_zero(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        # 0 equals False, so an id of 0 would be taken for the default and be lost from a job file.
        ids = {n: v for n, v in (("bos", self.bos), ("eos", self.eos)) if info.exclude_defaults and type(v) is int}
        return cast("dict[str, Any]", handler(self)) | ids


class Custom(Spec):
    """A row is whatever a Python function makes of it.

    The function takes a row (a dict of columns) and returns {"tokens": ints, "loss_mask": ..}, the mask
    being optional. Only for jobs written in Python.

    Example:
        >>> def reverse(row): return {"tokens": row["ids"][::-1]}
        >>> Custom(reverse, columns=["ids"]).name
        'reverse'
    """

    kind: Annotated[Literal["custom"], Field(repr=False)] = "custom"
    """The kind of sample."""
    fn: Callable[[dict[str, Any]], Mapping[str, Any]] = Field(kw_only=False)
    """The function: row -> tokens."""
    columns: Takes[tuple[Word, ...] | None, Sequence[str] | None] = spec_field(default=None)
    """Columns the function needs; none reads all."""
    name: Takes[Word, str | None] = spec_field(default="")
    """Name in messages and in the fingerprint; the function's own by default."""
    code_digest: Takes[str, str | None] = spec_field(default="", repr=False)
    """Digest of the function's source code; give your own to say that a change keeps the tokens."""
    # Where the function runs is no part of the stream, so neither of these stands in a fingerprint.
    process: Annotated[bool, Field(exclude=True)] = True
    """Whether the function runs in worker processes: Python code holds up no other work then, and may crash."""
    deadline: Annotated[
        float, real(0.01, math.inf, "rows would be given up before they ran. Give seconds"), Field(exclude=True)
    ] = 60.0
    """Seconds after which a worker that has not answered is taken for hung."""

    @model_validator(mode="before")
    @classmethod
    def _describe_function(cls, data: Any) -> Any:
        # Here and not on use: in the process that runs the function its source is often not to be had.
        mapping = cast("Mapping[str, Any]", data)
        if not isinstance(data, Mapping) or not callable(mapping.get("fn")):
            return cast("Any", data)
        given = {key: value for key, value in mapping.items() if value is not None}
        return code_of(given["fn"]) | given

    @field_serializer("fn")
    def _no_code_in_files(self, fn: Any) -> str:
        return self.name


_KINDS: dict[str, type[Spec]] = {
    "text": Text,
    "chat": Chat,
    "image_text": ImageText,
    "interleaved": Interleaved,
    "audio": Audio,
    "video": Video,
}


_TELLING = {
    "messages": "chat",
    "image": "image_text",
    "images": "interleaved",
    "parts": "interleaved",
    "audio": "audio",
    "video": "video",
}
"""Fields that tell the kind where it is not given."""


def _as_sample(value: object) -> object:
    """Take a sample object, or a mapping with its kind; the kind may be a key itself: {chat: messages, loss: last}."""
    if isinstance(value, (*_KINDS.values(), Custom)):
        return value
    if not isinstance(value, Mapping):
        raise Fault(
            "this must say what a row is; the source could not be read. Write ol.Text(..) or "
            "ol.ImageText(..) in Python, {kind: text, column: ..} in a file"
        )
    data = dict(cast("Mapping[str, Any]", value))
    named = [key for key in data if key in _KINDS]
    # `text` is a field of other kinds too, and then means that.
    only = next((key for key in named if key != "text"), "text" if named and not _TELLING.keys() & data else None)
    if only is not None and "kind" not in data:
        inner = data.pop(only)
        fields = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else {_KINDS[only].positional[0]: inner}
        for key in fields:
            if key in data:
                raise conflict(f"given twice, here and by {only}: one would be lost. Give it once", key)
        data = {**fields, **data, "kind": only}
    kind = data.get("kind", next((kind for key, kind in _TELLING.items() if key in data), "text"))
    if kind == "custom":
        raise Fault(
            "a custom sample is a Python function, which a file of keys and values cannot hold. Use a Python "
            "job file: job = ol.Job(..) with sample=ol.Custom(fn, columns=[..])",
            at=("kind",),
        )
    if kind not in _KINDS:
        raise Fault(
            f"expected {name_choices(list(_KINDS))}; the rows could not be understood.{did_you_mean(kind, _KINDS)}",
            at=("kind",),
        )
    return _KINDS[kind].nested(data)


def _short_form(name: str, kind: type[Spec]) -> dict[str, Any]:
    fields: dict[str, Any] = {key: True for key in kind.known_keys() if key != "kind"}
    fields[name] = {"type": ["string", "array", "object"]}
    return {"type": "object", "properties": fields, "required": [name], "additionalProperties": False}


_Short = Annotated[
    dict[str, Any], WithJsonSchema({"anyOf": [_short_form(name, kind) for name, kind in _KINDS.items()]})
]

Sample = Annotated[
    Text | Chat | ImageText | Interleaved | Audio | Video | SkipJsonSchema[Custom],
    BeforeValidator(_as_sample, json_schema_input_type=Text | Chat | ImageText | Interleaved | Audio | Video | _Short),
]
"""Any kind of sample."""
