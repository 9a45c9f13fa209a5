"""What a row of a source is: `Text`, `ImageText` or `Custom`, and how many patches an image makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, field_serializer, model_validator
from pydantic.json_schema import SkipJsonSchema

from overlord.core.spec_errors import Fault, conflict, did_you_mean, name_choices
from overlord.core.spec_model import Spec, Word, code_of, whole

Int64s = npt.NDArray[np.int64]

_NO_PATCHES = "an image of no patches has no tokens. Give what the vision encoder was trained with"


class Text(Spec):
    """A row is one text, or the token ids of one.

    Example:
        >>> Text("body")
        Text('body')
    """

    positional: ClassVar[tuple[str, ...]] = ("column",)

    kind: Annotated[Literal["text"], Field(repr=False)] = "text"
    """The kind of sample."""
    column: Word = "text"
    """Column that holds the text."""
    tokenized: bool = False
    """Whether the column already holds token ids; then no tokenizer is needed."""
    special_tokens: bool = True
    """Whether the tokenizer adds its special tokens (begin, end) to each text."""

    if TYPE_CHECKING:

        def __init__(self, column: str = "text", *, tokenized: bool = False, special_tokens: bool = True) -> None: ...


def _as_image_token(value: object) -> object:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise Fault(
        "this must be a token of the tokenizer (text) or its id (0 or more); the places of the image's "
        'tokens would be unknown. Write image_token="<image>" or the id'
    )


class ImageText(Spec):
    """A row is one image and its text.

    Example:
        >>> ImageText("jpg", "caption", patch=14, merge=2)
        ImageText('jpg', 'caption', patch=14, merge=2)
    """

    positional: ClassVar[tuple[str, ...]] = ("image", "text")

    kind: Annotated[Literal["image_text"], Field(repr=False)] = "image_text"
    """The kind of sample."""
    image: Word = "jpg"
    """Column that holds the encoded image."""
    text: Word = "txt"
    """Column that holds the text."""
    patch: Annotated[int, whole(1, _NO_PATCHES, example="16")] = 16
    """Side of a patch in pixels."""
    merge: Annotated[int, whole(1, _NO_PATCHES, example="2")] = 1
    """merge x merge patches become one token."""
    size: Annotated[int, whole(1, _NO_PATCHES, example="224")] | None = None
    """Side in pixels of the square every image is resized to; none keeps the native resolution."""
    min_pixels: Annotated[int, whole(1, _NO_PATCHES, example="4096")] = 64 * 64
    """Smaller images are enlarged (native resolution only)."""
    max_pixels: Annotated[int, whole(1, _NO_PATCHES, example="1048576")] = 1024 * 1024
    """Larger images are shrunk (native resolution only)."""
    width: Word | None = None
    """Column that holds the image's width; saves reading image headers."""
    height: Word | None = None
    """Column that holds the image's height; saves reading image headers."""
    image_token: Annotated[str | int, BeforeValidator(_as_image_token, json_schema_input_type=str | int)] = "<image>"
    """Token (text) or token id that stands where the image's tokens go."""

    if TYPE_CHECKING:

        def __init__(
            self,
            image: str = "jpg",
            text: str = "txt",
            *,
            patch: int = 16,
            merge: int = 1,
            size: int | None = None,
            min_pixels: int = 64 * 64,
            max_pixels: int = 1024 * 1024,
            width: str | None = None,
            height: str | None = None,
            image_token: str | int = "<image>",
        ) -> None: ...

    @property
    def factor(self) -> int:
        """Pixels that each side of a resized image is a multiple of."""
        return self.patch * self.merge

    @property
    def min_tokens(self) -> int:
        """Tokens of the smallest image there can be."""
        if self.size is not None:
            return (self.size // self.factor) ** 2
        return -(-self.min_pixels // self.factor**2)

    @model_validator(mode="after")
    def _check_sizes(self) -> ImageText:
        factor = self.factor
        if self.size is not None and self.size % factor:
            near = max(1, round(self.size / factor)) * factor
            raise conflict(
                f"{self.size} is not a multiple of patch*merge = {factor}, so the last patches would be cut. "
                f"Write size={near}",
                "size",
            )
        if self.size is None and self.min_pixels > self.max_pixels:
            raise conflict(
                f"{self.min_pixels} is more than max_pixels = {self.max_pixels}; no image would have a legal "
                "size. Swap them",
                "min_pixels",
            )
        if self.size is None and factor**2 > self.max_pixels:
            raise conflict(
                f"{self.max_pixels} is less than one token of {factor} x {factor} pixels (patch*merge); no "
                f"image would have a token. Write at least max_pixels={factor**2}",
                "max_pixels",
            )
        if (self.width is None) != (self.height is None):
            given, missing = ("width", "height") if self.height is None else ("height", "width")
            raise conflict(
                f"missing, although {given} is given; the size of an image needs both. Name both columns, or "
                "neither to read the sizes from the image headers",
                missing,
            )
        return self


def image_grid(spec: ImageText, widths: npt.ArrayLike, heights: npt.ArrayLike) -> tuple[Int64s, Int64s]:
    """Return the patch rows and patch columns (before merging) of images after resizing.

    Native resolution: each side is rounded to the nearest multiple of patch*merge; an image over
    max_pixels is shrunk (rounding down), one under min_pixels enlarged (rounding up). Where a very
    narrow image cannot keep its shape within max_pixels, its long side is cut short: max_pixels wins.

    Example:
        >>> rows, cols = image_grid(ImageText(patch=16), [640, 3000], [480, 3000])
        >>> rows.tolist(), cols.tolist()
        ([30, 64], [40, 64])
    """
    width = np.maximum(np.asarray(widths, np.int64), 1)
    height = np.maximum(np.asarray(heights, np.int64), 1)
    if spec.size is not None:
        side = np.full(width.shape, spec.size // spec.patch, np.int64)
        return side, side.copy()
    pixels = width.astype(np.float64) * height
    shrink = np.sqrt(spec.max_pixels / pixels)
    grow = np.sqrt(spec.min_pixels / pixels)
    rows, cols = _nearest(height / spec.factor), _nearest(width / spec.factor)
    area = spec.factor**2
    over, under = rows * cols * area > spec.max_pixels, rows * cols * area < spec.min_pixels
    # Rounding a very narrow side up to one token can bring an image over max_pixels although its own
    # pixels are fewer; it must not be enlarged then.
    shrink = np.minimum(shrink, 1.0)
    rows = np.where(over, np.maximum(1, np.floor(height * shrink / spec.factor)), rows)
    cols = np.where(over, np.maximum(1, np.floor(width * shrink / spec.factor)), cols)
    rows = np.where(under, np.ceil(height * grow / spec.factor), rows).astype(np.int64)
    cols = np.where(under, np.ceil(width * grow / spec.factor), cols).astype(np.int64)
    most = spec.max_pixels // area
    tall = rows > cols
    fitted_rows, fitted_cols = (
        np.where(tall, np.minimum(rows, np.maximum(1, most // cols)), np.minimum(rows, most)),
        np.where(tall, np.minimum(cols, most), np.minimum(cols, np.maximum(1, most // rows))),
    )
    return fitted_rows.astype(np.int64) * spec.merge, fitted_cols.astype(np.int64) * spec.merge


def _nearest(tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.maximum(1, np.rint(tokens))


def image_tokens(spec: ImageText, widths: npt.ArrayLike, heights: npt.ArrayLike) -> Int64s:
    """Return how many tokens each image makes.

    Example:
        >>> image_tokens(ImageText(patch=14, merge=2, size=448), [640], [480]).tolist()
        [256]
    """
    rows, cols = image_grid(spec, widths, heights)
    return rows * cols // spec.merge**2


class Custom(Spec):
    """A row is whatever a Python function makes of it.

    The function takes a row (a dict of columns) and returns {"tokens": ints, "loss_mask": ..}, the mask
    being optional. Only for jobs written in Python.

    Example:
        >>> def reverse(row): return {"tokens": row["ids"][::-1]}
        >>> Custom(reverse, columns=["ids"]).name
        'reverse'
    """

    positional: ClassVar[tuple[str, ...]] = ("fn",)

    kind: Annotated[Literal["custom"], Field(repr=False)] = "custom"
    """The kind of sample."""
    fn: Callable[[dict[str, Any]], Mapping[str, Any]]
    """The function: row -> tokens."""
    columns: tuple[Word, ...] | None = None
    """Columns the function needs; none reads all."""
    name: Word = ""
    """Name in messages and in the fingerprint; the function's own by default."""
    code_digest: Annotated[str, Field(repr=False)] = ""
    """Digest of the function's source code; give your own to say that a change keeps the tokens."""

    if TYPE_CHECKING:

        def __init__(
            self,
            fn: Callable[[dict[str, Any]], Mapping[str, Any]],
            *,
            columns: Sequence[str] | None = None,
            name: str | None = None,
            code_digest: str | None = None,
        ) -> None: ...

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


_KINDS: dict[str, type[Text] | type[ImageText]] = {"text": Text, "image_text": ImageText}


def _as_sample(value: object) -> object:
    """Take a sample object, or a mapping with its kind; the kind may be the only key: {text: body}."""
    if isinstance(value, (Text, ImageText, Custom)):
        return value
    if not isinstance(value, Mapping):
        raise Fault(
            "this must say what a row is; the source could not be read. Write ol.Text(..) or "
            "ol.ImageText(..) in Python, {kind: text, column: ..} in a file"
        )
    data = dict(cast("Mapping[str, Any]", value))
    if len(data) == 1 and (only := next(iter(data))) in _KINDS:
        inner = data[only]
        first = _KINDS[only].positional[0]
        data = dict(cast("Mapping[str, Any]", inner)) if isinstance(inner, Mapping) else {first: inner}
        data["kind"] = only
    kind = data.get("kind", "image_text" if "image" in data else "text")
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


_Short = dict[Literal["text", "image_text"], str | dict[str, Any]]

Sample = Annotated[
    Text | ImageText | SkipJsonSchema[Custom],
    BeforeValidator(_as_sample, json_schema_input_type=Text | ImageText | _Short),
]
"""Any kind of sample."""
