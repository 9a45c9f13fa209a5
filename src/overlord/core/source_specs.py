"""`Source`: one place samples come from, and what its fields may hold."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator, Field, model_validator

from overlord.core.chat_specs import Chat
from overlord.core.image_specs import Interleaved
from overlord.core.sample_specs import Custom, Sample, Text
from overlord.core.spec_errors import Fault, conflict, list_some
from overlord.core.spec_model import Spec, Word, as_bytes, real


def _as_name(value: object) -> object:
    if not isinstance(value, str):
        raise Fault("the name of a source must be text; in a file, put it in quotes")
    if not value or value in (".", ".."):
        raise Fault("a source needs a name; states and sample ids are kept by it. Write a short word")
    bad = sorted({c for c in value if c in "/:@" or c.isspace() or not c.isprintable()})
    if bad:
        raise Fault(
            f"a name must not contain {list_some(bad)}; sample ids such as name:row could not be read back. "
            "Use letters, digits, '-', '_' or '.'"
        )
    return value


def _as_paths(value: object) -> object:
    if isinstance(value, (str, os.PathLike)):
        return [cast("object", value)]
    if not isinstance(value, (list, tuple)) or not value:
        raise Fault("this must be a path, a glob, a folder or a URL, or a list of them; nothing could be read")
    return cast("Any", value)


class Source(Spec):
    """One place samples come from: files of one kind with one kind of row.

    Example:
        >>> Source("web", "data/web/*.parquet", sample=Text("body"), shuffle_bytes="16MB")
        Source('web', ('data/web/*.parquet',), sample=Text('body'), shuffle_bytes=16000000)
    """

    positional: ClassVar[tuple[str, ...]] = ("name", "path")

    name: Annotated[str, BeforeValidator(_as_name, json_schema_input_type=str)]
    """Unique name; weights, states and sample ids use it."""
    path: Annotated[tuple[Word, ...], BeforeValidator(_as_paths, json_schema_input_type=str | list[str])]
    """File, glob, folder or URL, or a list of them."""
    sample: Sample = Text("text")
    """What a row is."""
    weight: (
        Annotated[float, real(0, math.inf, "a source cannot be drawn less than never. Write 0 to leave it out")] | None
    ) = None
    """Weight in the mixture, unless the mixture has its own."""
    lengths: Word | None = None
    """Where token counts come from: a column's name, "sidecar", or none to tokenize on read."""
    shuffle_bytes: Annotated[int, BeforeValidator(as_bytes, json_schema_input_type=int | str)] = 4 * 2**20
    """Memory of the shuffle, as bytes or "16MB"; 0 keeps the order of the files."""
    tolerance: Annotated[
        float, real(0, 1, "it is the share of samples that may be bad. Write 0.01 for one in a hundred")
    ] = 0.01
    """Share of bad samples at which the run stops."""
    format: Word | None = None
    """File format, where it cannot be told from the names."""
    storage_options: dict[str, Any] = Field(default={}, repr=False)
    """Options of the filesystem: region, endpoint, credentials."""

    if TYPE_CHECKING:

        def __init__(
            self,
            name: str,
            path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
            *,
            sample: Spec | Mapping[str, Any] = ...,
            weight: float | None = None,
            lengths: str | None = None,
            shuffle_bytes: int | str = 4 * 2**20,
            tolerance: float = 0.01,
            format: str | None = None,
            storage_options: Mapping[str, Any] = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _check_lengths(self) -> Source:
        if self.lengths is not None and isinstance(self.sample, (Chat, Interleaved, Custom)):
            raise conflict(
                f"{self.lengths!r} would not be looked at: {type(self.sample).__name__} is measured when it is read, "
                "since its labels or images decide the length too. Leave it out",
                "lengths",
            )
        return self
