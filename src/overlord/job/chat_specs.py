"""What a row of conversations is: `Chat`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from overlord.job.spec_model import Spec, Word, real

ChatLoss = Literal["assistant", "all", "last"]
"""Whose tokens count in the loss."""


class Chat(Spec):
    """A row is one conversation: a list of messages that a chat template turns into text.

    The column holds a list of {"role": .., "content": ..} (or ShareGPT's {"from": .., "value": ..}), as
    nested columns or as JSON text. Its lengths are always measured: which tokens count in the loss must be
    known before planning.

    Example:
        >>> Chat("conversation", template="chatml", loss="last")
        Chat('conversation', template='chatml', loss='last')
    """

    kind: Annotated[Literal["chat"], Field(repr=False)] = "chat"
    """The kind of sample."""
    messages: Word = Field(default="messages", kw_only=False)
    """Column that holds the messages."""
    template: Word | None = None
    """The tokenizer folder's own by default; else "chatml", a name of the folder's, a .jinja file, or Jinja text."""
    loss: ChatLoss = "assistant"
    """Whose tokens count in the loss: every assistant message, only the last one, or all tokens."""
    tools: Word | None = None
    """Column that holds the tools (a list of JSON schemas) that the template may show to the model."""
    # Where conversations are rendered is no part of the stream, so neither of these stands in a fingerprint.
    process: Annotated[bool, Field(exclude=True)] = True
    """Whether conversations are rendered in worker processes, so that Python code holds up no other work."""
    deadline: Annotated[
        float, real(0.01, math.inf, "rows would be given up before they ran. Give seconds"), Field(exclude=True)
    ] = 60.0
    """Seconds after which a worker that has not answered is taken for hung."""
