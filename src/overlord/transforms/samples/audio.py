"""Audio: one sound and its text. Measured from the header; decoded to the log-mel features of an encoder."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.kernels import kernel
from overlord.core.ragged import RowBatch
from overlord.core.samples import BAD
from overlord.job.specs import Audio, audio_frames, audio_tokens
from overlord.transforms.samples.per_sample import (
    Int64s,
    Measured,
    MediaFault,
    UInt64s,
    decoder_faults,
    media_library,
    ragged_column,
    read_headers,
)
from overlord.transforms.samples.text import ItemThenText
from overlord.transforms.samples.tokenize import TextTokenizer

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]

MAX_RATE = 768_000
"""A header with more samples a second than this is invalid."""

_BLOCK = 1 << 16  # samples of all channels that are in memory at once


class AudioTransform(ItemThenText):
    """One sound and its text."""

    def __init__(self, spec: Audio, tokenizer: TextTokenizer) -> None:
        for library in ("soundfile", "av"):
            media_library(library)
        self._spec = spec
        super().__init__(spec, "audio", tokenizer)
        self.columns: tuple[str, ...] = (spec.audio, spec.text)
        self.decoder = AudioDecoder(spec)

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        spec = self._spec
        text = self._text.measure(rows, lengths, seeds)
        bad = (text.flags & BAD) > 0
        sounds = ragged_column(rows, spec.audio)
        sizes, unreadable = read_headers(sounds, bad, sound_size, (0, 1))
        text.faults += unreadable
        samples, rates = np.array(sizes, np.int64).reshape(-1, 2).T
        frames = audio_frames(spec, samples, rates)
        short = ~bad & (frames < spec.min_frames)
        text.faults.extend(
            (row, f"the sound has {frames[row]} frames of 10 ms, too few for one token")
            for row in np.flatnonzero(short).tolist()
        )
        bad |= short
        frames[bad] = spec.min_frames
        grid = np.stack([frames, np.full_like(frames, spec.mels), np.full_like(frames, spec.frames)], axis=1)
        return self._measured(text, bad, sounds, audio_tokens(frames, spec.frames_per_token), grid, seeds)


class AudioDecoder:
    """Decodes sounds to log-mel features, float32 [mels, frames of the window]."""

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
        MediaFault: when there is no readable header, or it is invalid.
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


# -- log-mel features as Whisper's encoder takes them: 25 ms windows every 10 ms, Slaney mel bands, log10 ---------

FLOOR = 1e-10
"""Power below which a band counts as silent."""
RANGE = 8.0
"""Decades under the loudest band that are kept."""

_LINEAR_HZ = 200.0 / 3.0  # a mel of the slaney scale, up to its break
_BREAK_HZ = 1000.0
_BREAK_MEL = _BREAK_HZ / _LINEAR_HZ
_LOG_STEP = np.log(6.4) / 27.0
_FRAMES_AT_ONCE = 512  # bounds the memory of the transform, whatever the window


def mel_filters(mels: int, sample_rate: int) -> Float64s:
    """Return the triangular slaney filters [mels, frequency bins], each scaled to the same area.

    Example:
        >>> mel_filters(80, 16000).shape
        (80, 201)
    """
    bins = np.linspace(0, sample_rate // 2, sample_rate // 80 + 1)
    top = min(8000.0, sample_rate / 2)
    edges = _hertz(np.linspace(0.0, float(_mel(np.asarray(top))), mels + 2))
    rising = (bins[None, :] - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins[None, :]) / np.diff(edges)[1:, None]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return triangles * (2.0 / (edges[2:] - edges[:-2]))[:, None]


def log_mel(sound: Float32s, *, mels: int, sample_rate: int, frames: int) -> Float32s:
    """Return the log-mel features [mels, frames] of a mono sound, padded with silence (or cut) to its frames.

    Args:
        sound: Samples between -1 and 1.
        mels: Mel bands: 80 or 128 for Whisper.
        sample_rate: Samples a second, a multiple of 200.
        frames: Frames of the window, 100 a second.

    Example:
        >>> silence = log_mel(np.zeros(1600, np.float32), mels=80, sample_rate=16000, frames=100)
        >>> silence.shape, float(silence.max())
        ((80, 100), -1.5)
    """
    hop, width = sample_rate // 100, sample_rate // 40
    window = np.zeros(frames * hop, np.float64)
    kept = min(len(sound), len(window))
    window[:kept] = sound[:kept]
    # A window that covers only padding is silent: only frames that overlap the sound are computed.
    heard = min(frames, -(-(kept + width // 2) // hop))
    padded = np.pad(window, width // 2, mode="reflect")
    spans = np.lib.stride_tricks.sliding_window_view(padded, width)[: heard * hop : hop]
    weights, first, last = _bank(mels, sample_rate)
    taper = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(width) / width)
    out = np.full((mels, frames), np.log10(FLOOR))
    for at in range(0, heard, _FRAMES_AT_ONCE):
        spectrum = np.fft.rfft(spans[at : at + _FRAMES_AT_ONCE] * taper, axis=1)
        _log_bands(spectrum.view(np.float64), weights, first, last, out, at)
    np.maximum(out, out.max() - RANGE, out=out)
    return ((out + 4.0) / 4.0).astype(np.float32)


@lru_cache(maxsize=8)
def _bank(mels: int, sample_rate: int) -> tuple[Float64s, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the filters, and the first and last bin of each."""
    weights = mel_filters(mels, sample_rate)
    seen = weights > 0
    first = np.argmax(seen, axis=1)
    last = np.where(seen.any(axis=1), weights.shape[1] - np.argmax(seen[:, ::-1], axis=1), first)
    return weights, first, last


@kernel
def _log_bands(spectrum: Any, weights: Any, first: Any, last: Any, out: Any, at: int) -> None:
    """Write log10 of every band's power from column `at` on; sums run in one order, whatever the number of threads."""
    power = np.empty(weights.shape[1])
    for frame in range(spectrum.shape[0]):
        for k in range(len(power)):
            real, imaginary = spectrum[frame, 2 * k], spectrum[frame, 2 * k + 1]
            power[k] = real * real + imaginary * imaginary
        for band in range(len(first)):
            total = 0.0
            for k in range(first[band], last[band]):
                total += weights[band, k] * power[k]
            out[band, at + frame] = np.log10(max(total, FLOOR))


def _mel(hertz: Float64s) -> Float64s:
    above = _BREAK_MEL + np.log(np.maximum(hertz, _BREAK_HZ) / _BREAK_HZ) / _LOG_STEP
    return np.where(hertz < _BREAK_HZ, hertz / _LINEAR_HZ, above)


def _hertz(mel: Float64s) -> Float64s:
    above = _BREAK_HZ * np.exp(_LOG_STEP * (np.maximum(mel, _BREAK_MEL) - _BREAK_MEL))
    return np.where(mel < _BREAK_MEL, mel * _LINEAR_HZ, above)
