"""Sound to log-mel features, as Whisper's encoder takes them: 25 ms windows every 10 ms, slaney mel bands, log10."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]

FLOOR = 1e-10
"""Power under which a band counts as silent."""
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
    # A window over nothing but padding is silent: only the frames that can see the sound are computed.
    heard = min(frames, -(-(kept + width // 2) // hop))
    padded = np.pad(window, width // 2, mode="reflect")
    spans = np.lib.stride_tricks.sliding_window_view(padded, width)[: heard * hop : hop]
    weights, first, last = _bank(mels, sample_rate)
    taper = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(width) / width)
    out = np.full((mels, frames), np.log10(FLOOR))
    for at in range(0, heard, _FRAMES_AT_ONCE):
        spectrum = np.fft.rfft(spans[at : at + _FRAMES_AT_ONCE] * taper, axis=1)
        _log_bands(spectrum.view(np.float64), weights, first, last, out[:, at : at + len(spectrum)])
    np.maximum(out, out.max() - RANGE, out=out)
    return ((out + 4.0) / 4.0).astype(np.float32)


@lru_cache(maxsize=8)
def _bank(mels: int, sample_rate: int) -> tuple[Float64s, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the filters and the first and last bin that each of them sees."""
    weights = mel_filters(mels, sample_rate)
    seen = weights > 0
    first = np.argmax(seen, axis=1)
    last = np.where(seen.any(axis=1), weights.shape[1] - np.argmax(seen[:, ::-1], axis=1), first)
    return weights, first, last


@numba.njit(nogil=True, cache=True)
def _log_bands(spectrum: Any, weights: Any, first: Any, last: Any, out: Any) -> None:
    """Write log10 of every band's power; sums run in one order, so they are the same on any number of threads."""
    power = np.empty(weights.shape[1])
    for frame in range(spectrum.shape[0]):
        for k in range(len(power)):
            real, imaginary = spectrum[frame, 2 * k], spectrum[frame, 2 * k + 1]
            power[k] = real * real + imaginary * imaginary
        for band in range(len(first)):
            total = 0.0
            for k in range(first[band], last[band]):
                total += weights[band, k] * power[k]
            out[band, frame] = np.log10(max(total, FLOOR))


def _mel(hertz: Float64s) -> Float64s:
    above = _BREAK_MEL + np.log(np.maximum(hertz, _BREAK_HZ) / _BREAK_HZ) / _LOG_STEP
    return np.where(hertz < _BREAK_HZ, hertz / _LINEAR_HZ, above)


def _hertz(mel: Float64s) -> Float64s:
    above = _BREAK_HZ * np.exp(_LOG_STEP * (np.maximum(mel, _BREAK_MEL) - _BREAK_MEL))
    return np.where(mel < _BREAK_MEL, mel * _LINEAR_HZ, above)
