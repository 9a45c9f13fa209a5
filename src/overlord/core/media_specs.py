"""Sounds and clips: what an `Audio` and a `Video` row is, and how many frames and tokens its header promises."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from overlord.core.image_specs import smart_resize
from overlord.core.spec_errors import conflict
from overlord.core.spec_model import Spec, Word, real, token, whole

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]

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

    positional: ClassVar[tuple[str, ...]] = ("audio", "text")

    kind: Annotated[Literal["audio"], Field(repr=False)] = "audio"
    """The kind of sample."""
    audio: Word = "flac"
    """Column that holds the encoded sound: WAV, FLAC, Ogg, MP3."""
    text: Word = "txt"
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

    if TYPE_CHECKING:

        def __init__(
            self,
            audio: str = "flac",
            text: str = "txt",
            *,
            sample_rate: int = 16000,
            mels: int = 80,
            seconds: int = 30,
            frames_per_token: int = 4,
            audio_token: str | int = "<|AUDIO|>",
            before: str | int | None = None,
            after: str | int | None = None,
        ) -> None: ...

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

    Args:
        spec: The kind of sample.
        samples: Samples of each sound, at its own rate.
        rates: Its own samples a second.

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

    positional: ClassVar[tuple[str, ...]] = ("video", "text")

    kind: Annotated[Literal["video"], Field(repr=False)] = "video"
    """The kind of sample."""
    video: Word = "mp4"
    """Column that holds the encoded clip: MP4, WebM and other containers."""
    text: Word = "txt"
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

    if TYPE_CHECKING:

        def __init__(  # noqa: PLR0913
            self,
            video: str = "mp4",
            text: str = "txt",
            *,
            fps: float = 2.0,
            frames: Literal["uniform", "key"] = "uniform",
            min_frames: int = 4,
            max_frames: int = 768,
            patch: int = 14,
            merge: int = 2,
            temporal: int = 2,
            min_pixels: int = 128 * 28 * 28,
            max_pixels: int = 768 * 28 * 28,
            max_tokens: int | None = None,
            video_token: str | int = "<|video_pad|>",
            before: str | int | None = None,
            after: str | int | None = None,
        ) -> None: ...

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

    Args:
        spec: The kind of sample.
        have: Frames of each clip; with frames="key", its key frames.
        rates: Its own frames a second.

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
    """Return t, patch rows and patch columns (before merging) of clips after resizing: [clips, 3].

    Args:
        spec: The kind of sample.
        frames: Sampled frames of each clip.
        widths: Their width in pixels.
        heights: Their height.

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
