"""Audio: one sound and its text. Measured by the sound's header; decoded to the log-mel features of an encoder."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import RowBatch
from overlord.core.samples import BAD
from overlord.core.specs import Audio, audio_frames, audio_tokens
from overlord.transforms.log_mel import log_mel
from overlord.transforms.media_text import ItemThenText, media_library
from overlord.transforms.per_sample import (
    Bools,
    Finished,
    Int64s,
    Measured,
    MediaDecoder,
    MediaFault,
    TransformFacts,
    UInt64s,
    Workers,
    decoder_faults,
    ragged_column,
    row_memory,
)
from overlord.transforms.tokenize import TextTokenizer

Float32s = npt.NDArray[np.float32]

MAX_RATE = 768_000
"""A sound whose header claims more samples a second makes no sense."""

_BLOCK = 1 << 16  # samples of all channels that are in memory at once


class AudioTransform:
    """One sound and its text."""

    def __init__(self, spec: Audio, tokenizer: TextTokenizer) -> None:
        for library in ("soundfile", "av"):
            media_library(library)
        self._spec = spec
        self._layout = ItemThenText(spec, "audio", spec.audio_token, tokenizer)
        self.columns: tuple[str, ...] = (spec.audio, spec.text)
        self.facts = TransformFacts(self.columns, ("tokens", "audio"), byte_size="grows")
        self.decoder: MediaDecoder | None = AudioDecoder(spec)

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        spec = self._spec
        text = self._layout.text.measure(rows, lengths, seeds)
        bad = (text.flags & BAD) > 0
        sounds = ragged_column(rows, spec.audio)
        samples, rates = np.zeros(len(bad), np.int64), np.ones(len(bad), np.int64)
        for row in np.flatnonzero(~bad).tolist():
            try:
                samples[row], rates[row] = sound_size(row_memory(sounds, row))
            except MediaFault as fault:
                text.faults.append((row, str(fault)))
                bad[row] = True
        frames = audio_frames(spec, samples, rates)
        short = ~bad & (frames < spec.min_frames)
        text.faults.extend(
            (row, f"the sound has {frames[row]} frames of 10 ms, too few for one token")
            for row in np.flatnonzero(short).tolist()
        )
        bad |= short
        frames[bad] = spec.min_frames
        grid = np.stack([frames, np.full_like(frames, spec.mels), np.full_like(frames, spec.frames)], axis=1)
        return self._layout.measured(text, bad, sounds, audio_tokens(frames, spec.frames_per_token), grid, seeds)

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        return self._layout.finish(kept, planned, bad, workers)


class AudioDecoder:
    """Opens sounds as log-mel features, float32 [mels, frames of the window]."""

    def __init__(self, spec: Audio) -> None:
        self._spec = spec

    def item_bytes(self, grids: npt.NDArray[np.int32]) -> Int64s:
        """Return the bytes of each sound's features."""
        return grids[:, 1].astype(np.int64) * grids[:, 2] * 4

    def decode(self, data: memoryview, grid: npt.NDArray[np.int32], seed: int, out: npt.NDArray[np.uint8]) -> None:
        """Decode one sound, resample it and write its features into their place."""
        spec = self._spec
        sound = decode_sound(data, sample_rate=spec.sample_rate, seconds=spec.seconds)
        features = log_mel(sound, mels=spec.mels, sample_rate=spec.sample_rate, frames=spec.frames)
        out[:] = features.reshape(-1).view(np.uint8)


def sound_size(data: bytes | memoryview) -> tuple[int, int]:
    """Return (samples, samples a second) from the header, without decoding.

    Raises:
        MediaFault: when there is no readable header, or it makes no sense.
    """
    with _open(data) as sound:
        return _size(sound)


def decode_sound(data: bytes | memoryview, *, sample_rate: int, seconds: int) -> Float32s:
    """Return the first seconds of a sound at a rate: mono, the mean of its channels.

    Raises:
        MediaFault: when the bytes do not decode, or hold less sound than their header says.
    """
    with _open(data) as sound:
        samples, rate = _size(sound)
        wanted = min(samples, seconds * rate)
        mono = np.empty(wanted, np.float32)
        block = max(1, _BLOCK // sound.channels)
        for at in range(0, wanted, block):
            count = min(block, wanted - at)
            with decoder_faults("does not decode"):
                part = sound.read(count, dtype="float32", always_2d=True)
            if len(part) < count:
                raise MediaFault(f"the header says {samples} samples, only {at + len(part)} decode")
            np.mean(part, axis=1, out=mono[at : at + count])
    if not np.isfinite(mono).all():
        raise MediaFault("the sound holds values that are no finite numbers")
    return mono if rate == sample_rate else resample(mono, rate, sample_rate)


def resample(mono: Float32s, rate: int, to_rate: int) -> Float32s:
    """Return a mono sound at another rate; its length is the exact one, rounded up to a sample."""
    av = media_library("av")
    wanted = -(-len(mono) * to_rate // rate)
    frame = av.AudioFrame.from_ndarray(mono.reshape(1, -1), format="flt", layout="mono")
    frame.sample_rate = rate
    resampler = av.AudioResampler(format="flt", layout="mono", rate=to_rate)
    with decoder_faults(f"cannot be resampled from {rate} to {to_rate} Hz"):
        parts = [part.to_ndarray().reshape(-1) for part in (*resampler.resample(frame), *resampler.resample(None))]
    out = np.zeros(wanted, np.float32)
    found = np.concatenate(parts)[:wanted] if parts else out
    out[: len(found)] = found
    return out


def _open(data: bytes | memoryview) -> Any:
    soundfile = media_library("soundfile")
    with decoder_faults("no readable sound header"):
        return soundfile.SoundFile(io.BytesIO(data))


def _size(sound: Any) -> tuple[int, int]:
    samples, rate = int(sound.frames), int(sound.samplerate)
    if samples < 1:
        raise MediaFault("the sound is empty")
    if not 1 <= rate <= MAX_RATE:
        raise MediaFault(f"the header claims {rate} samples a second, more than {MAX_RATE}")
    return samples, rate
