"""What a row of a source is: `Text`, `Chat`, `ImageChat`, `ImageText`, `Interleaved`, `Audio`, `Video`, `Custom`; and
how many frames, patches and tokens the header of an image, sound or clip promises.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, cast

import numpy as np
import numpy.typing as npt
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
from overlord.job.spec_model import Spec, Takes, Word, code_of, real, spec_field, token, whole

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
Sides = tuple[Int64s, Int64s]

_NO_IMAGE_PATCHES = "an image of no patches has no tokens. Give what the vision encoder was trained with"
_MOST_ASPECT = 200
"""Up to here the smart resize of Qwen-VL is defined: the long side over the short one."""


Token = Annotated[
    str | int, token('the places of the image\'s tokens would be unknown. Write image_token="<image>" or the id')
]
"""A token of the tokenizer, as text or as its id."""


IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""What is decoded as an image unless a spec adds to it: Pillow knows dozens of formats, most of them never hardened
against malicious files, and one (EPS) that starts another program with the bytes of the image."""


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
    contrast: Annotated[float, real(0, 1, "the contrast cannot be negative. Write 0.2 for up to 20 %")] = 0.0
    """Largest change of the contrast, around the image's mean grey."""

    @model_validator(mode="after")
    def _check_crop(self) -> Self:
        if self.crop == 0:
            raise conflict("0 would keep nothing of an image. Write the smallest share to keep, such as 0.5", "crop")
        return self


class ImageSpec(Spec):
    """How images become patches and tokens: what every kind of sample with images shares."""

    patch: Annotated[int, whole(1, _NO_IMAGE_PATCHES, example="16")] = 16
    """Side of a patch in pixels."""
    merge: Annotated[int, whole(1, _NO_IMAGE_PATCHES, example="2")] = 1
    """merge x merge patches become one token."""
    temporal: Annotated[int, whole(1, _NO_IMAGE_PATCHES, example="2")] = 1
    """Frames in a patch: an image is repeated this often, for encoders that also take video (Qwen-VL: 2)."""
    size: Annotated[int, whole(1, _NO_IMAGE_PATCHES, example="224")] | None = None
    """Side in pixels of the square every image is resized to; none keeps the native resolution."""
    resize: Literal["smart", "any"] = "smart"
    """How the native resolution is rounded: "smart" as Qwen-VL does, "any" (NaViT) never enlarges."""
    min_pixels: Annotated[int, whole(1, _NO_IMAGE_PATCHES, example="4096")] = 64 * 64
    """Smaller images are enlarged (resize="smart" only)."""
    max_pixels: Annotated[int, whole(1, _NO_IMAGE_PATCHES, example="1048576")] = 1024 * 1024
    """Larger images are shrunk (native resolution only)."""
    image_token: Token = "<image>"
    """Token (text) or token id that stands where the image's tokens go."""
    before: Token | None = None
    """Token put in front of every image, such as "<|vision_start|>"."""
    after: Token | None = None
    """Token put behind every image, such as "<|vision_end|>"."""
    augment: Takes[Augment | None, Augment | Mapping[str, Any] | None] = spec_field(default=None)
    """Random changes of the images; none by default."""
    extra_formats: Takes[
        Annotated[tuple[str, ...], BeforeValidator(_as_formats, json_schema_input_type=list[str])], Sequence[str]
    ] = spec_field(default=(), exclude_if=lambda formats: not formats)  # an older state without this field still fits
    """Formats that Pillow may decode besides AVIF, BMP, GIF, JPEG, PNG, TIFF and WEBP, by its names ("JPEG2000")."""

    exif_transpose: Annotated[bool, Field(exclude_if=lambda is_set: not is_set)] = False
    """Whether images are turned as their EXIF data say, as transformers' load_image does; else they stay as stored."""
    jpeg_scaling: Annotated[bool, Field(exclude_if=lambda is_set: not is_set)] = False
    """Whether a JPEG that is to become small is decoded at 1/2, 1/4 or 1/8 of its size: faster, and other pixels."""
    folder: Takes[Word | None, str | os.PathLike[str] | None] = spec_field(
        default=None, exclude_if=lambda folder: folder is None
    )
    """Folder or URL from which images are read where the data hold their paths; without it paths are bad samples."""

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

    kind: Annotated[Literal["image_text"], Field(repr=False)] = "image_text"
    """The kind of sample."""
    image: Word = Field(default="jpg", kw_only=False)
    """Column that holds the encoded image: its bytes, base64, a data: URL, or with `folder` its path."""
    text: Word = Field(default="txt", kw_only=False)
    """Column that holds the text."""
    width: Word | None = None
    """Column that holds the image's width; saves reading image headers."""
    height: Word | None = None
    """Column that holds the image's height; saves reading image headers."""

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

    kind: Annotated[Literal["interleaved"], Field(repr=False)] = "interleaved"
    """The kind of sample."""
    images: Takes[
        Annotated[tuple[Word, ...], BeforeValidator(_as_columns, json_schema_input_type=str | list[str])],
        str | Sequence[str],
    ] = spec_field(default=("images",), kw_only=False)
    """Column with the list of encoded images, or columns with one each; in tar shards "*.jpg" takes all there are."""
    text: Word = Field(default="text", kw_only=False)
    """Column that holds the text with its markers."""
    marker: Word = "<image>"
    """Where an image goes in the text."""
    parts: Word | None = None
    """Column that holds the parts, instead of a text with markers."""
    special_tokens: bool = True
    """Whether the tokenizer's special tokens (begin, end) go around each row."""

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


# -- how many patches an image makes ----------------------------------------------------------------------------------


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


# -- sounds and clips -------------------------------------------------------------------------------------------------


FRAMES_PER_SECOND = 100
"""Mel frames of a second of sound: one every 10 ms."""

_NO_BANDS = "a sound without mel bands has no features. Give what the encoder was trained with"
_NO_PATCHES = "a frame of no patches has no tokens. Give what the vision encoder was trained with"
_NO_FRAMES = "a clip of no frames has no tokens. Give at least one"


_Token = Annotated[
    str | int,
    token('the place of a sound or clip in the text would be unknown. Write a token such as "<|AUDIO|>", or its id'),
]


class Audio(Spec):
    """A row is one sound and its text: the sound's placeholders first, then the text.

    The features are those of Whisper's encoder: mel bands of 25 ms windows every 10 ms.

    Example:
        >>> Audio("wav", "transcript", mels=128)
        Audio('wav', 'transcript', mels=128)
        >>> Audio().max_tokens
        750
    """

    kind: Annotated[Literal["audio"], Field(repr=False)] = "audio"
    """The kind of sample."""
    audio: Word = Field(default="flac", kw_only=False)
    """Column that holds the encoded sound: WAV, FLAC, Ogg, MP3."""
    text: Word = Field(default="txt", kw_only=False)
    """Column that holds the text."""
    sample_rate: Annotated[int, whole(200, "no mel band would be left. Write 16000", example="16000")] = 16000
    """Samples a second that the encoder hears; sounds of another rate are resampled."""
    mels: Annotated[int, whole(1, _NO_BANDS, example="80")] = 80
    """Mel bands: 80, or 128 for the larger Whisper encoders."""
    seconds: Annotated[int, whole(1, "no sound would be left. Write 30", example="30")] = 30
    """Length of the encoder's window: a longer sound is cut, a shorter one padded with silence."""
    frames_per_token: Annotated[int, whole(2, "the encoder itself halves the frames. Write 4", example="4")] = 4
    """Mel frames that become one token; even: the encoder halves them, a pooling takes the rest."""
    audio_token: _Token = "<|AUDIO|>"
    """Token (text) or token id that stands where the sound's tokens go."""
    before: _Token | None = None
    """Token in front of a sound's placeholders, such as "<|audio_bos|>"."""
    after: _Token | None = None
    """Token behind a sound's placeholders, such as "<|audio_eos|>"."""

    @property
    def hop(self) -> int:
        """Samples from one mel frame to the next."""
        return self.sample_rate // FRAMES_PER_SECOND

    @property
    def frames(self) -> int:
        """Mel frames of the whole window."""
        return self.seconds * FRAMES_PER_SECOND

    @property
    def min_frames(self) -> int:
        """Mel frames of the shortest sound that makes a token."""
        return self.frames_per_token - 1

    @property
    def max_tokens(self) -> int:
        """Tokens of a sound that fills the window."""
        return int(audio_tokens(self.frames, self.frames_per_token))

    @model_validator(mode="after")
    def _check_rates(self) -> Audio:
        if self.sample_rate % 200:
            near = max(1, round(self.sample_rate / 200)) * 200
            raise conflict(
                f"{self.sample_rate} is not a multiple of 200, so a frame of 10 ms or its window of 25 ms would not "
                f"be whole samples. Write sample_rate={near}, or the encoder's own (Whisper: 16000)",
                "sample_rate",
            )
        if self.frames_per_token % 2:
            raise conflict(
                f"{self.frames_per_token} is odd, but the encoder halves the frames before they are pooled; tokens "
                f"and features would not match. Write frames_per_token={self.frames_per_token + 1}",
                "frames_per_token",
            )
        return self


def audio_frames(spec: Audio, samples: npt.ArrayLike, rates: npt.ArrayLike) -> Int64s:
    """Return how many mel frames of each sound hold sound, at most those of the window.

    `samples` are those of each sound at its own rate, `rates` its own samples a second.

    Example:
        >>> audio_frames(Audio(), [1600, 44100, 16000 * 31], [16000, 44100, 16000]).tolist()
        [10, 100, 3000]
    """
    rate = np.asarray(rates, np.int64)
    length = np.minimum(np.asarray(samples, np.int64), spec.seconds * rate)
    resampled = -(-length * spec.sample_rate // rate)
    return np.asarray(-(-resampled // spec.hop), np.int64)


def audio_tokens(frames: npt.ArrayLike, frames_per_token: int = 4) -> Int64s:
    """Return how many tokens sounds of so many mel frames make, as Qwen2-Audio counts them.

    A convolution halves the frames (rounding up), then a pooling takes the rest (rounding down).

    Example:
        >>> audio_tokens([3, 10, 3000]).tolist()
        [1, 2, 750]
    """
    halved = (np.asarray(frames, np.int64) + 1) // 2
    return np.asarray(halved // (frames_per_token // 2), np.int64)


class Video(Spec):
    """A row is one clip and its text: the clip's placeholders first, then the text.

    Frames are sampled, resized and cut into patches as Qwen2-VL and its successors take them.

    Example:
        >>> Video("mp4", "caption", fps=1)
        Video('mp4', 'caption', fps=1.0)
    """

    kind: Annotated[Literal["video"], Field(repr=False)] = "video"
    """The kind of sample."""
    video: Word = Field(default="mp4", kw_only=False)
    """Column that holds the encoded clip: MP4, WebM and other containers."""
    text: Word = Field(default="txt", kw_only=False)
    """Column that holds the text."""
    fps: Annotated[float, real(0.001, math.inf, "no frame would be sampled. Write 2.0")] = 2.0
    """Frames sampled from a second of the clip."""
    frames: Literal["uniform", "key"] = "uniform"
    """Which frames are sampled: evenly, fps a second; or the key frames, which decode on their own."""
    min_frames: Annotated[int, whole(1, _NO_FRAMES, example="4")] = 4
    """Fewest frames that are sampled evenly, if the clip has them."""
    max_frames: Annotated[int, whole(1, _NO_FRAMES, example="768")] = 768
    """Most frames that are sampled; they are spread over the whole clip."""
    patch: Annotated[int, whole(1, _NO_PATCHES, example="14")] = 14
    """Side of a patch in pixels."""
    merge: Annotated[int, whole(1, _NO_PATCHES, example="2")] = 2
    """merge x merge patches become one token."""
    temporal: Annotated[int, whole(1, _NO_FRAMES, example="2")] = 2
    """Frames in a patch."""
    min_pixels: Annotated[int, whole(1, _NO_PATCHES, example="100352")] = 128 * 28 * 28
    """Smaller frames are enlarged."""
    max_pixels: Annotated[int, whole(1, _NO_PATCHES, example="602112")] = 768 * 28 * 28
    """Larger frames are shrunk."""
    max_tokens: Annotated[int, whole(1, _NO_PATCHES, example="16384")] | None = None
    """Tokens that a clip may have: many frames share them and are shrunk, though hardly below min_pixels."""
    video_token: _Token = "<|video_pad|>"
    """Token (text) or token id that stands where the clip's tokens go."""
    before: _Token | None = None
    """Token in front of a clip's placeholders, such as "<|vision_start|>"."""
    after: _Token | None = None
    """Token behind a clip's placeholders, such as "<|vision_end|>"."""

    @property
    def factor(self) -> int:
        """Pixels that each side of a resized frame is a multiple of."""
        return self.patch * self.merge

    @property
    def min_tokens(self) -> int:
        """Tokens of the smallest clip there can be."""
        return -(-self.min_pixels // self.factor**2)

    @model_validator(mode="after")
    def _check_limits(self) -> Video:
        for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels"), ("temporal", "max_frames")):
            if getattr(self, low) > getattr(self, high):
                raise conflict(
                    f"{getattr(self, low)} is more than {high} = {getattr(self, high)}; no clip would have a legal "
                    f"size. Write a smaller {low} or a larger {high}",
                    low,
                )
        if self.factor**2 > self.max_pixels:
            raise conflict(
                f"{self.max_pixels} is less than one token of {self.factor} x {self.factor} pixels (patch*merge); no "
                f"frame would have a token. Write at least max_pixels={self.factor**2}",
                "max_pixels",
            )
        return self


def video_frames(spec: Video, have: npt.ArrayLike, rates: npt.ArrayLike) -> Int64s:
    """Return how many frames are sampled from each clip: a multiple of `temporal`.

    `have` are the frames of each clip (with frames="key", its key frames), `rates` its own frames a second.

    Example:
        >>> video_frames(Video(), [240, 9, 1], [24.0, 24.0, 24.0]).tolist()
        [20, 4, 2]
        >>> video_frames(Video(frames="key"), [5, 3000], [24.0, 24.0]).tolist()
        [6, 768]
    """
    total = np.asarray(have, np.int64)
    most = np.minimum(spec.max_frames, total) // spec.temporal * spec.temporal
    if spec.frames == "key":
        padded = -(-total // spec.temporal) * spec.temporal
        return np.asarray(np.minimum(padded, spec.max_frames // spec.temporal * spec.temporal), np.int64)
    wanted = total / np.asarray(rates, np.float64) * spec.fps
    count = np.floor(np.minimum(np.maximum(wanted, spec.min_frames), most) / spec.temporal) * spec.temporal
    return np.maximum(count, spec.temporal).astype(np.int64)


def pick_frames(have: int, count: int) -> Int64s:
    """Return which `count` of a clip's frames are sampled: evenly from the first on, the last repeated if too few.

    Example:
        >>> pick_frames(9, 4).tolist(), pick_frames(1, 2).tolist()
        ([0, 2, 4, 6], [0, 0])
    """
    if have < count:
        return np.minimum(np.arange(count), have - 1)
    return np.arange(count) * have // count


def video_grid(spec: Video, frames: npt.ArrayLike, widths: npt.ArrayLike, heights: npt.ArrayLike) -> Int64s:
    """Return t, patch rows and patch columns (before merging) of clips with these sampled frames after resizing.

    The result is [clips, 3].

    Example:
        >>> video_grid(Video(), [20], [1280], [720]).tolist()
        [[10, 40, 72]]
    """
    count, width, height = np.atleast_1d(*(np.asarray(a, np.int64) for a in (frames, widths, heights)))
    most = np.full(len(count), spec.max_pixels)
    if spec.max_tokens is not None:
        share = spec.max_tokens * spec.factor**2 * spec.temporal // count
        most = np.maximum(np.minimum(most, share), max(int(spec.min_pixels * 1.05), spec.factor**2))
    grid = np.stack([count // spec.temporal, count, count], axis=1)
    for limit in np.unique(most).tolist():
        same = np.flatnonzero(most == limit)
        rows, cols = smart_resize(
            width[same], height[same], factor=spec.factor, min_pixels=spec.min_pixels, max_pixels=limit
        )
        grid[same, 1], grid[same, 2] = rows * spec.merge, cols * spec.merge
    return grid


# -- conversations, texts, functions, and the table of all kinds ------------------------------------------------------


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


class ImageChat(Chat, ImageSpec):
    """A row is one conversation with images: a Chat whose messages show images.

    A message's content is a list of parts, text and images ({"type": "image"}, {"type": "image_url", ..}), or text
    with a marker where each image goes. The image of a part is in the part itself (base64, a data: URL, a path), or it
    is the next one of the row's `images`, as are those of markers. Images do not count in the loss.

    Example:
        >>> ImageChat("conversations", images="image", folder="coco/", patch=14, merge=2)
        ImageChat('conversations', patch=14, merge=2, folder='coco/', images=('image',))
    """

    kind: Annotated[Literal["image_chat"], Field(repr=False)] = "image_chat"  # type: ignore[assignment]
    """The kind of sample."""
    images: Takes[
        Annotated[
            tuple[Word, ...],
            BeforeValidator(
                lambda given: _as_columns(given) if given != () else (), json_schema_input_type=str | list[str]
            ),
        ],
        str | Sequence[str],
    ] = spec_field(default=())
    """Columns with the images of a row, if they are not all in its messages: a list of images, or columns of one."""
    marker: Word = "<image>"
    """Where an image of the row goes in a message that is plain text."""


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
        # Here and not on use: the process that runs the function often has no access to its source.
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
    "image_chat": ImageChat,
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
    told = "image_chat" if {"messages", "images"} <= data.keys() else None
    kind = data.get("kind", told or next((kind for key, kind in _TELLING.items() if key in data), "text"))
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
    Text | Chat | ImageChat | ImageText | Interleaved | Audio | Video | SkipJsonSchema[Custom],
    BeforeValidator(
        _as_sample, json_schema_input_type=Text | Chat | ImageChat | ImageText | Interleaved | Audio | Video | _Short
    ),
]
"""Any kind of sample."""
