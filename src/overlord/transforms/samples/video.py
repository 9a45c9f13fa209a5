"""Video: one clip and its text. Measured by the container's header; decoded to the patches of its sampled frames."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import RowBatch
from overlord.core.samples import BAD
from overlord.job.specs import Video, pick_frames, video_frames, video_grid
from overlord.transforms.samples.images import MAX_PIXELS, resize_image
from overlord.transforms.samples.per_sample import (
    Int64s,
    Measured,
    MediaFault,
    UInt64s,
    ViewedFile,
    decoder_faults,
    media_library,
    ragged_column,
    read_headers,
)
from overlord.transforms.samples.text import ItemThenText
from overlord.transforms.samples.tokenize import TextTokenizer

UInt8s = npt.NDArray[np.uint8]

MAX_FRAMES = 1 << 31
"""A header with more frames than this is invalid."""

_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,mpegts,mpeg,ogg"


@dataclass(frozen=True, slots=True)
class Clip:
    """What the header of a clip says."""

    frames: int
    """Its frames."""
    keys: int
    """Its key frames; 0 if they were not requested."""
    rate: float
    """Frames a second, on average."""
    width: int
    height: int


class VideoTransform(ItemThenText):
    """One clip and its text."""

    def __init__(self, spec: Video, tokenizer: TextTokenizer) -> None:
        media_library("av")
        self._spec = spec
        super().__init__(spec, "video", tokenizer)
        self.columns: tuple[str, ...] = (spec.video, spec.text)
        self.decoder = VideoDecoder(spec)

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        spec = self._spec
        text = self._text.measure(rows, lengths, seeds)
        bad = (text.flags & BAD) > 0
        encoded = ragged_column(rows, spec.video)
        read = functools.partial(read_clip, key_frames=spec.frames == "key")
        clips, unreadable = read_headers(encoded, bad, read, Clip(1, 1, 1.0, 1, 1))
        text.faults += unreadable
        have = np.array([clip.keys if spec.frames == "key" else clip.frames for clip in clips], np.int64)
        total = np.array([clip.frames for clip in clips], np.int64)
        rate = np.array([clip.rate for clip in clips], np.float64)
        count = video_frames(spec, have, rate)
        sizes = np.array([(clip.width, clip.height) for clip in clips], np.int64).reshape(-1, 2)
        grid = video_grid(spec, count, sizes[:, 0], sizes[:, 1])
        grid[bad] = (1, spec.merge, spec.merge)
        tokens = np.prod(grid, axis=1) // spec.merge**2
        seconds = spec.temporal * total / (count * rate)
        return self._measured(text, bad, encoded, tokens, grid, seeds, seconds)


class VideoDecoder:
    """Opens clips at their planned grid: frames sampled, resized, cut into patches of several frames each."""

    def __init__(self, spec: Video) -> None:
        self._spec = spec

    def item_bytes(self, grids: npt.NDArray[np.int32]) -> Int64s:
        """Return the bytes of each clip's patches."""
        return np.prod(grids.astype(np.int64), axis=1) * 3 * self._spec.temporal * self._spec.patch**2

    def decode(self, data: memoryview, grid: npt.NDArray[np.int32], seed: int, out: UInt8s) -> None:
        """Decode the sampled frames of one clip and patchify them into their place."""
        spec = self._spec
        clip = read_clip(data, key_frames=spec.frames == "key")
        groups, rows, cols = (int(side) for side in grid)
        wanted = pick_frames(clip.keys if spec.frames == "key" else clip.frames, groups * spec.temporal)
        places = out.reshape(
            groups, rows // spec.merge, cols // spec.merge, spec.merge, spec.merge, 3, spec.temporal, spec.patch,
            spec.patch,
        )  # fmt: skip
        written = 0
        for number, pixels in _decode_frames(data, wanted, key_frames=spec.frames == "key"):
            small = resize_image(pixels, rows * spec.patch, cols * spec.patch)
            # A frame that is used twice fills neighbouring places.
            while written < len(wanted) and wanted[written] == number:
                _patchify_frame(small, places, written)
                written += 1
        if written == 0:
            raise MediaFault("not one frame decodes")
        last = places[(written - 1) // spec.temporal, ..., (written - 1) % spec.temporal, :, :]
        for place in range(written, len(wanted)):  # the header promised more frames than there are
            places[place // spec.temporal, ..., place % spec.temporal, :, :] = last


def read_clip(data: bytes | memoryview, *, key_frames: bool = False) -> Clip:
    """Return what the header of a clip says, without decoding.

    The packets are counted where the header does not tell the frames, or for the key frames.

    Raises:
        MediaFault: when there is no readable header, or it is invalid.
    """
    with _open(data) as (container, stream):
        frames, keys = int(stream.frames), 0
        if key_frames or frames < 1:
            kinds = [bool(packet.is_keyframe) for packet in container.demux(stream) if packet.size]
            frames, keys = len(kinds), sum(kinds)
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        clip = Clip(frames, keys, rate, int(stream.width), int(stream.height))
    if not 1 <= clip.frames < MAX_FRAMES or (key_frames and clip.keys < 1):
        raise MediaFault(f"the clip has {clip.frames} frames, {clip.keys} of them key frames")
    if clip.width < 1 or clip.height < 1 or clip.width * clip.height > MAX_PIXELS:
        raise MediaFault(f"the header claims frames of {clip.width} x {clip.height}, at most {MAX_PIXELS} pixels are")
    if not 0 < clip.rate < MAX_PIXELS:
        raise MediaFault(f"the header claims {clip.rate:g} frames a second")
    return clip


@contextmanager
def _open(data: bytes | memoryview) -> Iterator[tuple[Any, Any]]:
    """Open a container from memory; an error of the library inside is a MediaFault."""
    av = media_library("av")
    # Playlists are excluded: their demuxers would open other files and addresses.
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "none"}
    # Up to version 18, PyAV raises for a title that is no text unless it is told otherwise; later ones do not ask.
    titles = {"metadata_errors": "ignore"} if int(av.__version__.partition(".")[0]) < 19 else {}
    with decoder_faults("no readable clip header"):
        container = av.open(ViewedFile(data), options=options, **titles)
    with container, decoder_faults("does not decode"):
        stream = container.streams.best("video")
        if stream is None or stream.codec_context is None:
            raise MediaFault("there is no video in the clip, or no decoder for it")
        # Clips are decoded in parallel; threads inside one decoder would only compete with them.
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        yield container, stream


def _decode_frames(data: memoryview, wanted: Int64s, *, key_frames: bool) -> Iterator[tuple[int, UInt8s]]:
    """Yield (number, RGB pixels) of the wanted frames that there are, in order."""
    numbers = np.unique(wanted)
    try:
        for number, pixels in _decode_by_seeking(data, numbers, key_frames=key_frames):
            numbers = numbers[1:]
            yield number, pixels
    except _NoTimestamps:
        yield from _decode_from_start(data, numbers, key_frames=key_frames)


class _NoTimestamps(MediaFault):
    """The packets of a clip do not say which of them holds which frame."""


def _decode_by_seeking(data: memoryview, numbers: Int64s, *, key_frames: bool) -> Iterator[tuple[int, UInt8s]]:
    """Yield frames, decoding no more than the packets from the key frame before each of them.

    Decoding a clip of ten minutes from its start takes seconds. A first pass over the packets, which decodes nothing,
    tells which packet holds which frame and which are key frames. Then the decoder runs from a key frame up to the
    wanted frame, and the container seeks to the key frame before the next one. On the way, packets that no other frame
    refers to are not decoded: that changes no pixel of the others.

    Raises:
        _NoTimestamps: before the first frame that cannot be found that way.
    """
    with _open(data) as (container, stream):
        packets = [(packet.pts, packet.is_keyframe) for packet in container.demux(stream) if packet.size]
        place_of = {pts: place for place, (pts, _) in enumerate(packets)}
        if None in place_of or len(place_of) < len(packets):
            raise _NoTimestamps
        times = np.array([pts for pts, _ in packets], np.int64)
        keys = np.flatnonzero([is_key for _, is_key in packets])
        shown = keys if key_frames else np.arange(len(packets))
        shown = shown[np.argsort(times[shown])]  # the packets of the frames, in the order of presentation
        numbers = numbers[numbers < len(shown)]
        wanted = set(shown[numbers].tolist())
        fed = len(packets)  # the place of the last packet that the decoder was given

        def frames_from(key: int) -> Iterator[Any]:
            nonlocal fed
            container.seek(int(times[key]), stream=stream)
            fed = key - 1
            for packet in container.demux(stream):
                place = place_of.get(packet.pts, -1) if packet.size else fed + 1  # an empty one ends the clip
                if place <= fed and place >= 0:
                    continue  # it went further back than necessary
                if place != fed + 1:
                    raise _NoTimestamps
                stream.codec_context.skip_frame = "DEFAULT" if place in wanted else "NONREF"
                fed = place
                yield from packet.decode()

        frames: Iterator[Any] = iter(())
        for number in numbers.tolist():
            target = int(shown[number])
            earlier = keys[(keys <= target) & (times[keys] <= times[target])]
            if not len(earlier):
                raise _NoTimestamps
            if fed == len(packets) or (target > fed and earlier[-1] > fed + 1):
                frames = frames_from(int(earlier[-1]))
            frame = next((frame for frame in frames if frame.pts is None or frame.pts >= times[target]), None)
            if frame is None or frame.pts != times[target]:
                raise _NoTimestamps
            yield number, _pixels_of(frame)


def _decode_from_start(data: memoryview, numbers: Int64s, *, key_frames: bool) -> Iterator[tuple[int, UInt8s]]:
    """Yield frames by counting what the decoder returns, from the start of the clip."""
    wanted, last = set(numbers.tolist()), int(numbers.max(initial=-1))
    with _open(data) as (container, stream):
        number = 0
        for packet in container.demux(stream):
            if key_frames and packet.size and not packet.is_keyframe:
                continue  # a key frame decodes without the others
            for frame in packet.decode():
                if number in wanted:
                    yield number, _pixels_of(frame)
                number += 1
            if number > last:
                return


def _pixels_of(frame: Any) -> UInt8s:
    if frame.width * frame.height > MAX_PIXELS:
        raise MediaFault(f"a frame has {frame.width} x {frame.height} pixels")
    return frame.to_ndarray(format="rgb24")


def _patchify_frame(image: UInt8s, places: UInt8s, at: int) -> None:
    """Write one frame into the patches of its group: [groups, rows, cols, merge, merge, 3, temporal, patch, patch]."""
    _, rows, cols, merge, _, _, temporal, patch, _ = places.shape
    cut = image.reshape(rows, merge, patch, cols, merge, patch, 3)
    places[at // temporal, ..., at % temporal, :, :] = cut.transpose(0, 3, 1, 4, 6, 2, 5)
