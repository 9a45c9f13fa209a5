"""Specs of rows with images (`ImageText`, `Interleaved`, `Augment`), and how many patches an image makes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, model_validator

from overlord.core.spec_errors import Fault, conflict
from overlord.core.spec_model import Spec, Word, real, token, whole

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
Sides = tuple[Int64s, Int64s]

_NO_PATCHES = "an image of no patches has no tokens. Give what the vision encoder was trained with"
_MOST_ASPECT = 200
"""Up to here the smart resize of Qwen-VL is defined: the long side over the short one."""


Token = Annotated[
    str | int, token('the places of the image\'s tokens would be unknown. Write image_token="<image>" or the id')
]
"""A token of the tokenizer, as text or as its id."""


IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""What is decoded as an image unless a spec adds to it: Pillow knows dozens of formats, most of them never attacked
and mended, and one (EPS) that starts another program with the bytes of the image."""


def _as_formats(value: object) -> object:
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) and one for one in cast("Any", value)):
        raise Fault('this must be a list of names that Pillow has for formats. Write extra_formats=["JPEG2000"]')
    names = tuple(dict.fromkeys(str(one).upper() for one in cast("Any", value)))
    if "EPS" in names:
        raise Fault(
            "Pillow decodes EPS (PostScript) by running Ghostscript, and an image of the data would be a program on "
            "this host. Convert these images to PNG"
        )
    return tuple(name for name in names if name not in IMAGE_FORMATS)


class Augment(Spec):
    """Random changes of images, drawn from each sample's own seed: the same wherever and whenever it is read.

    Example:
        >>> Augment(flip=0.5, crop=0.6)
        Augment(flip=0.5, crop=0.6)
    """

    flip: Annotated[float, real(0, 1, "it is how likely a flip is. Write 0.5 for every other image")] = 0.0
    """How likely an image is mirrored left to right."""
    crop: Annotated[float, real(0, 1, "it is the smallest share of the area that a crop keeps. Write 0.5 or 1")] = 1.0
    """Smallest share of an image's area that a crop keeps; 1 never crops."""
    ratio: Annotated[float, real(1, math.inf, "it is a factor. Write 1 to keep the shape of the image")] = 4 / 3
    """Largest factor by which the shape (width over height) of a crop differs from the image's."""
    brightness: Annotated[float, real(0, 1, "a pixel cannot be darker than black. Write 0.2 for up to 20 %")] = 0.0
    """Largest change of the brightness: 0.2 makes an image up to 20 % darker or lighter."""
    contrast: Annotated[float, real(0, 1, "there is less than no contrast. Write 0.2 for up to 20 %")] = 0.0
    """Largest change of the contrast, around the image's mean grey."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            flip: float = 0.0,
            crop: float = 1.0,
            ratio: float = 4 / 3,
            brightness: float = 0.0,
            contrast: float = 0.0,
        ) -> None: ...

    @model_validator(mode="after")
    def _check_crop(self) -> Self:
        if self.crop == 0:
            raise conflict("0 would keep nothing of an image. Write the smallest share to keep, such as 0.5", "crop")
        return self


class ImageSpec(Spec):
    """How images become patches and tokens: what every kind of sample with images shares."""

    patch: Annotated[int, whole(1, _NO_PATCHES, example="16")] = 16
    """Side of a patch in pixels."""
    merge: Annotated[int, whole(1, _NO_PATCHES, example="2")] = 1
    """merge x merge patches become one token."""
    temporal: Annotated[int, whole(1, _NO_PATCHES, example="2")] = 1
    """Frames in a patch: an image is repeated this often, for encoders that also take video (Qwen-VL: 2)."""
    size: Annotated[int, whole(1, _NO_PATCHES, example="224")] | None = None
    """Side in pixels of the square every image is resized to; none keeps the native resolution."""
    resize: Literal["smart", "any"] = "smart"
    """How the native resolution is rounded: "smart" as Qwen-VL does, "any" (NaViT) never enlarges."""
    min_pixels: Annotated[int, whole(1, _NO_PATCHES, example="4096")] = 64 * 64
    """Smaller images are enlarged (resize="smart" only)."""
    max_pixels: Annotated[int, whole(1, _NO_PATCHES, example="1048576")] = 1024 * 1024
    """Larger images are shrunk (native resolution only)."""
    image_token: Token = "<image>"
    """Token (text) or token id that stands where the image's tokens go."""
    before: Token | None = None
    """Token put in front of every image, such as "<|vision_start|>"."""
    after: Token | None = None
    """Token put behind every image, such as "<|vision_end|>"."""
    augment: Augment | None = None
    """Random changes of the images; none by default."""
    extra_formats: Annotated[
        tuple[str, ...],
        BeforeValidator(_as_formats, json_schema_input_type=list[str]),
        Field(exclude_if=lambda formats: not formats),  # an older state without this field still fits
    ] = ()
    """Formats that Pillow may decode besides AVIF, BMP, GIF, JPEG, PNG, TIFF and WEBP, by its names ("JPEG2000")."""

    exif_transpose: Annotated[bool, Field(exclude_if=lambda is_set: not is_set)] = False
    """Whether images are turned as their EXIF data say, as transformers' load_image does; else they stay as stored."""

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats an image may have; bytes of any other one are a bad sample."""
        return (*IMAGE_FORMATS, *self.extra_formats)

    @property
    def factor(self) -> int:
        """Pixels that each side of a resized image is a multiple of."""
        return self.patch * self.merge

    @property
    def min_tokens(self) -> int:
        """Tokens of the smallest image there can be."""
        if self.size is not None:
            return (self.size // self.factor) ** 2
        return 1 if self.resize == "any" else -(-self.min_pixels // self.factor**2)

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        factor = self.factor
        if self.size is not None and self.size % factor:
            near = max(1, round(self.size / factor)) * factor
            raise conflict(
                f"{self.size} is not a multiple of patch*merge = {factor}, so the last patches would be cut. "
                f"Write size={near}",
                "size",
            )
        if self.size is not None and self.resize == "any":
            raise conflict(
                f"'any' keeps the shape of an image, but size={self.size} makes every image a square. Choose one",
                "resize",
            )
        if self.size is None and self.resize == "smart" and self.min_pixels > self.max_pixels:
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
        return self


class ImageText(ImageSpec):
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
    width: Word | None = None
    """Column that holds the image's width; saves reading image headers."""
    height: Word | None = None
    """Column that holds the image's height; saves reading image headers."""

    if TYPE_CHECKING:

        def __init__(  # noqa: PLR0913
            self,
            image: str = "jpg",
            text: str = "txt",
            *,
            patch: int = 16,
            merge: int = 1,
            temporal: int = 1,
            size: int | None = None,
            resize: Literal["smart", "any"] = "smart",
            min_pixels: int = 64 * 64,
            max_pixels: int = 1024 * 1024,
            width: str | None = None,
            height: str | None = None,
            image_token: str | int = "<image>",
            before: str | int | None = None,
            after: str | int | None = None,
            augment: Augment | Mapping[str, Any] | None = None,
            extra_formats: Sequence[str] = (),
            exif_transpose: bool = False,
        ) -> None: ...

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if (self.width is None) != (self.height is None):
            given, missing = ("width", "height") if self.height is None else ("height", "width")
            raise conflict(
                f"missing, although {given} is given; the size of an image needs both. Name both columns, or "
                "neither to read the sizes from the image headers",
                missing,
            )
        if self.exif_transpose and self.width is not None:
            raise conflict(
                f"the columns {self.width!r} and {self.height!r} do not tell which images are turned, so some would "
                "have their sides swapped. Leave width and height out: the sizes are then read from the headers",
                "exif_transpose",
            )
        return self


def _as_columns(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise Fault(
            "this must be the column with the images, or a list of columns with one image each; the markers would have "
            'no images. Write images="images" or images=["0.jpg", "1.jpg"]'
        )
    return cast("Any", value)


class Interleaved(ImageSpec):
    """A row is a sequence of texts and images.

    Either a text with a marker where each image goes, or a column of parts: a JSON list of
    {"type": "text", "text": ..} and {"type": "image", "image": ..}, where "image" is the number of the image
    in its row (from 0) or the name of its column; without it the images are taken in order.

    The tokenizer's special tokens (begin, end) go around the whole row, not around every text in it.

    Example:
        >>> Interleaved("images", "text", marker="<img>", patch=14, merge=2)
        Interleaved(('images',), 'text', patch=14, merge=2, marker='<img>')
        >>> Interleaved(["0.jpg", "1.jpg"], parts="json.content").parts
        'json.content'
    """

    positional: ClassVar[tuple[str, ...]] = ("images", "text")

    kind: Annotated[Literal["interleaved"], Field(repr=False)] = "interleaved"
    """The kind of sample."""
    images: Annotated[
        tuple[Word, ...], BeforeValidator(_as_columns, json_schema_input_type=str | list[str])
    ] = ("images",)  # fmt: skip
    """Column with the list of encoded images, or columns with one each; in tar shards "*.jpg" takes all there are."""
    text: Word = "text"
    """Column that holds the text with its markers."""
    marker: Word = "<image>"
    """Where an image goes in the text."""
    parts: Word | None = None
    """Column that holds the parts, instead of a text with markers."""
    special_tokens: bool = True
    """Whether the tokenizer's special tokens (begin, end) go around each row."""

    if TYPE_CHECKING:

        def __init__(  # noqa: PLR0913
            self,
            images: str | Sequence[str] = ("images",),
            text: str = "text",
            *,
            marker: str = "<image>",
            parts: str | None = None,
            special_tokens: bool = True,
            patch: int = 16,
            merge: int = 1,
            temporal: int = 1,
            size: int | None = None,
            resize: Literal["smart", "any"] = "smart",
            min_pixels: int = 64 * 64,
            max_pixels: int = 1024 * 1024,
            image_token: str | int = "<image>",
            before: str | int | None = None,
            after: str | int | None = None,
            augment: Augment | Mapping[str, Any] | None = None,
            extra_formats: Sequence[str] = (),
            exif_transpose: bool = False,
        ) -> None: ...

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if self.parts is not None and (self.text, self.marker) != ("text", "<image>"):
            raise conflict(
                f"the column {self.parts!r} already says where texts and images go; text and marker would be ignored. "
                "Give parts alone, or text and marker",
                "parts",
            )
        twice = next((name for name in self.images if self.images.count(name) > 1), None)
        if twice is not None:
            raise conflict(f"{twice!r} is listed twice; a row would hold its image twice. List it once", "images")
        return self


# -- how many patches an image makes ------------------------------------------------------------


def image_grid(spec: ImageSpec, widths: npt.ArrayLike, heights: npt.ArrayLike) -> Sides:
    """Return the patch rows and patch columns (before merging) of images after resizing.

    Example:
        >>> rows, cols = image_grid(ImageText(patch=16), [640, 3000], [480, 3000])
        >>> rows.tolist(), cols.tolist()
        ([30, 64], [40, 64])
        >>> [side.tolist() for side in image_grid(ImageText(patch=16, resize="any"), [650, 20], [490, 7])]
        [[30, 1], [40, 1]]
    """
    if spec.size is not None:
        side = np.full(np.shape(widths), spec.size // spec.patch, np.int64)
        return side, side.copy()
    if spec.resize == "any":
        rows, cols = any_resize(widths, heights, factor=spec.factor, max_pixels=spec.max_pixels)
    else:
        limits = {"min_pixels": spec.min_pixels, "max_pixels": spec.max_pixels}
        rows, cols = smart_resize(widths, heights, factor=spec.factor, **limits)
    return rows * spec.merge, cols * spec.merge


def image_tokens(spec: ImageSpec, widths: npt.ArrayLike, heights: npt.ArrayLike) -> Int64s:
    """Return how many tokens each image makes.

    Example:
        >>> image_tokens(ImageText(patch=14, merge=2, size=448), [640], [480]).tolist()
        [256]
    """
    rows, cols = image_grid(spec, widths, heights)
    return rows * cols // spec.merge**2


def smart_resize(
    widths: npt.ArrayLike, heights: npt.ArrayLike, *, factor: int, min_pixels: int, max_pixels: int
) -> Sides:
    """Return the height and width of images in multiples of `factor`, as Qwen-VL resizes them.

    Each side is rounded to the nearest multiple; an image over max_pixels is shrunk (rounding down), one under
    min_pixels enlarged (rounding up). Where that rule is not defined (one side over 200 times the other) or
    would break max_pixels, the long side of the image is cut short: max_pixels wins.

    Example:
        >>> rows, cols = smart_resize([640, 10], [480, 2000], factor=28, min_pixels=3136, max_pixels=1003520)
        >>> rows.tolist(), cols.tolist()
        ([17, 29], [23, 1])
    """
    width, height = _sides(widths), _sides(heights)
    # The order of the operations is that of the rule as it was published: another one rounds differently.
    rows, cols = np.rint(height / factor) * factor, np.rint(width / factor) * factor
    over, under = rows * cols > max_pixels, rows * cols < min_pixels
    shrink, grow = np.sqrt(height * width / max_pixels), np.sqrt(min_pixels / (height * width))
    rows, cols = (
        np.where(
            over,
            np.maximum(factor, np.floor(side / shrink / factor) * factor),
            np.where(under, np.ceil(side * grow / factor) * factor, rounded),
        )
        for side, rounded in ((height, rows), (width, cols))
    )
    narrow = np.maximum(height, width) / np.minimum(height, width) > _MOST_ASPECT
    legal = ~narrow & (rows * cols <= max_pixels)
    other_rows, other_cols = _narrow_resize(width, height, factor, min_pixels, max_pixels)
    return (
        np.where(legal, rows / factor, other_rows).astype(np.int64),
        np.where(legal, cols / factor, other_cols).astype(np.int64),
    )


def any_resize(widths: npt.ArrayLike, heights: npt.ArrayLike, *, factor: int, max_pixels: int) -> Sides:
    """Return the height and width of images in multiples of `factor`, shapes kept and nothing enlarged (NaViT).

    An image over max_pixels is shrunk; sides are rounded down, but to one multiple at least.

    Example:
        >>> rows, cols = any_resize([640, 3], [480, 100], factor=28, max_pixels=200_000)
        >>> rows.tolist(), cols.tolist()
        ([13, 3], [18, 1])
    """
    width, height = _sides(widths), _sides(heights)
    shrink = np.maximum(np.sqrt(height * width / max_pixels), 1.0)
    rows, cols = (np.maximum(1, np.floor(side / shrink / factor)) for side in (height, width))
    return _within(rows, cols, max_pixels // factor**2)


def _narrow_resize(width: Float64s, height: Float64s, factor: int, min_pixels: int, max_pixels: int) -> Sides:
    """Resize what the smart rule has no answer for: like it, but at least one multiple, and within max_pixels."""
    rows, cols = (np.maximum(1, np.rint(side / factor)) for side in (height, width))
    area = factor**2
    over, under = rows * cols * area > max_pixels, rows * cols * area < min_pixels
    # Rounding a very narrow side up to one token can bring an image over max_pixels although its own
    # pixels are fewer; it must not be enlarged then.
    shrink = np.minimum(np.sqrt(max_pixels / (width * height)), 1.0)
    grow = np.sqrt(min_pixels / (width * height))
    rows, cols = (
        np.where(
            over,
            np.maximum(1, np.floor(side * shrink / factor)),
            np.where(under, np.ceil(side * grow / factor), rounded),
        )
        for side, rounded in ((height, rows), (width, cols))
    )
    return _within(rows, cols, max_pixels // area)


def _within(rows: Float64s, cols: Float64s, most: int) -> Sides:
    """Cut the long side short where there are more than `most` tokens."""
    tall = rows > cols
    return (
        np.where(tall, np.minimum(rows, np.maximum(1, most // cols)), np.minimum(rows, most)).astype(np.int64),
        np.where(tall, np.minimum(cols, most), np.minimum(cols, np.maximum(1, most // rows))).astype(np.int64),
    )


def _sides(pixels: npt.ArrayLike) -> Float64s:
    return np.maximum(np.asarray(pixels, np.int64), 1).astype(np.float64)
