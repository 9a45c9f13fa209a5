"""Images, clips and sounds as a person looks at them: a picture of each, and what its header says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from overlord.cli.sources import Opened
from overlord.core.samples import BAD
from overlord.job.specs import Audio, ImageSpec, Interleaved, Video
from overlord.runtimes.hosts.prefetch import SerialWorkers
from overlord.transforms.samples.audio import sound_size
from overlord.transforms.samples.images import decode_image, is_turned
from overlord.transforms.samples.per_sample import Bools, Int64s, Measured, MediaFault
from overlord.transforms.samples.video import read_clip

Pixels = npt.NDArray[np.uint8]

_SOUND_PICTURE = (320, 160)
"""Width and height of a sound's picture, however long it is."""
_DARK, _MIDDLE, _BRIGHT = (24, 16, 64), (204, 71, 120), (255, 244, 170)
"""Colours of silence, of speech and of the loudest parts of a sound."""


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, clip or sound of a sample."""

    kind: str
    """"image", "video" or "audio"."""
    words: str
    """What it is, in a few words."""
    picture: Pixels | None = None
    """The image, the clip's first frame, or the sound's mel bands over time; None where it does not decode."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """The same for a program."""


@dataclass(frozen=True, slots=True)
class OpenItem:
    """An item of a row, decoded as a run would decode it."""

    row: int
    kind: str
    data: memoryview
    """As it was read."""
    grid: npt.NDArray[np.int32]
    decoded: Pixels
    """As a batch takes it."""
    fault: str | None
    """Why it does not decode."""


def decode_items(one: Opened, measured: Measured, planned: Int64s, left_out: Bools) -> Iterator[OpenItem]:
    """Decode the media of measured rows one after the other, each into the same memory.

    Args:
        one: The source.
        measured: Its rows.
        planned: Tokens of each row that are delivered; items behind them are passed over.
        left_out: Rows that are passed over, beside the bad ones.
    """
    decoder = one.transform.decoder
    bad = ((measured.flags & BAD) > 0) | left_out
    media = None if decoder is None else one.transform.finish(measured.kept, planned, bad, SerialWorkers()).media
    if decoder is None or media is None:
        return
    sizes = decoder.item_bytes(media.grids)
    scratch = np.empty(int(sizes.max(initial=0)), np.uint8)
    many = isinstance(one.source.sample, Interleaved)
    rows = np.repeat(np.arange(len(media.rows) - 1), np.diff(media.rows)).tolist()
    for item, row in enumerate(rows):
        if media.bad[item]:
            continue
        place, fault = scratch[: int(sizes[item])], None
        try:
            decoder.decode(media.data(item), media.grids[item], int(media.seeds[item]), place)
        except MediaFault as error:
            which = f"{media.kind} {item - int(media.rows[row])}: " if many else ""
            fault = f"{which}{error}"
        yield OpenItem(row, media.kind, media.data(item), media.grids[item], place, fault)


def stays_turned(one: Opened, item: OpenItem) -> bool:
    """Whether an image is delivered as it is stored, although its EXIF data say how to turn it."""
    spec = one.source.sample
    return (
        item.kind == "image"
        and isinstance(spec, ImageSpec)
        and not spec.exif_transpose
        and is_turned(item.data, spec.formats)
    )


def look_at(one: Opened, item: OpenItem) -> MediaItem:
    """Return an item for a person to look at; one that does not decode has no picture."""
    look = {"image": _look_at_image, "video": _look_at_clip, "audio": _look_at_sound}[item.kind]
    return look(one, item)


def _look_at_image(one: Opened, item: OpenItem) -> MediaItem:
    if item.fault is not None:
        return MediaItem("image", "image")
    spec = one.source.sample
    assert isinstance(spec, ImageSpec)  # no other kind of sample gives images
    pixels = decode_image(item.data, spec.formats, upright=spec.exif_transpose)
    height, width = pixels.shape[:2]
    turned = ", as stored: its EXIF data would turn it" if stays_turned(one, item) else ""
    return MediaItem("image", f"image {width}×{height}{turned}", pixels, {"size": [width, height]})


def _look_at_clip(one: Opened, item: OpenItem) -> MediaItem:
    spec = one.source.sample
    assert isinstance(spec, Video)  # no other kind of sample gives clips
    clip = read_clip(item.data, key_frames=spec.frames == "key")
    groups, rows, cols = (int(side) for side in item.grid)
    seconds, taken = clip.frames / clip.rate, groups * spec.temporal
    facts = {
        "size": [clip.width, clip.height],
        "seconds": round(seconds, 3),
        "frames": clip.frames,
        "fps": round(clip.rate, 3),
        "sampled_frames": taken,
        "sampled_size": [cols * spec.patch, rows * spec.patch],
    }
    words = (
        f"clip {clip.width}×{clip.height}, {seconds:.1f} s at {clip.rate:g} fps, {taken} of {clip.frames} frames at "
        f"{cols * spec.patch}×{rows * spec.patch}"
    )
    picture = None if item.fault is not None else first_frame(item.decoded, item.grid, spec)
    return MediaItem("video", words, picture, facts)


def _look_at_sound(one: Opened, item: OpenItem) -> MediaItem:
    spec = one.source.sample
    assert isinstance(spec, Audio)  # no other kind of sample gives sounds
    samples, rate = sound_size(item.data)
    seconds = samples / rate
    cut = f", cut to {spec.seconds} s" if seconds > spec.seconds else ""
    facts = {"seconds": round(seconds, 3), "sample_rate": rate, "frames": int(item.grid[0]), "mels": spec.mels}
    words = f"sound {seconds:.1f} s at {rate:,} Hz{cut}, {int(item.grid[0])} frames of {spec.mels} mel bands"
    picture = None
    if item.fault is None:
        mel = item.decoded.view(np.float32).reshape(spec.mels, -1)
        drawn = Image.fromarray(mel_picture(mel[:, : int(item.grid[0])]))
        picture = np.asarray(drawn.resize(_SOUND_PICTURE, Image.Resampling.BILINEAR))
    return MediaItem("audio", words, picture, facts)


def first_frame(patches: Pixels, grid: npt.NDArray[np.int32], spec: Video) -> Pixels:
    """Return the first sampled frame of a clip, put together again from its patches: [height, width, 3]."""
    groups, rows, cols = (int(side) for side in grid)
    merge, patch = spec.merge, spec.patch
    cut = patches.reshape(groups, rows // merge, cols // merge, merge, merge, 3, spec.temporal, patch, patch)
    whole = cut[0, ..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4)
    return np.ascontiguousarray(whole).reshape(rows * patch, cols * patch, 3)


def mel_picture(mel: npt.NDArray[np.float32]) -> Pixels:
    """Return mel bands over time as a picture: time to the right, high tones on top, loud is bright.

    Example:
        >>> mel_picture(np.array([[0.0, 1.0], [0.5, 0.0]], np.float32))[..., 0].tolist()
        [[204, 24], [24, 255]]
    """
    low, high = float(mel.min()), float(mel.max())
    share = (mel[::-1] - low) / ((high - low) or 1.0)
    stops = np.array([_DARK, _MIDDLE, _BRIGHT], np.float64)
    colours = [np.interp(share, (0.0, 0.5, 1.0), stops[:, channel]) for channel in range(3)]
    return np.rint(np.stack(colours, axis=-1)).astype(np.uint8)
