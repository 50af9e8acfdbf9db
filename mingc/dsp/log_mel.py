"""Whisper's log-mel features and the Slaney mel filter bank (spec: audio.md §2)."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mingc.optional_library import import_opencv

_LINEAR_HZ_PER_MEL = 200.0 / 3.0
_LOG_START_HZ = 1000.0
_LOG_STEP = math.log(6.4) / 27.0
_FLOOR = 1e-10
_RANGE = 8.0  # log10 units kept below the loudest value of the clip
_BLOCK_FRAMES = 64  # whose spectra stay in a processor's cache


def _mel_to_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    log_start_mel = _LOG_START_HZ / _LINEAR_HZ_PER_MEL
    exponent = np.maximum(mel - log_start_mel, 0.0) * _LOG_STEP
    return np.where(mel < log_start_mel, mel * _LINEAR_HZ_PER_MEL, _LOG_START_HZ * np.exp(exponent))


def _hz_to_mel(hz: float) -> float:
    if hz < _LOG_START_HZ:
        return hz / _LINEAR_HZ_PER_MEL
    return _LOG_START_HZ / _LINEAR_HZ_PER_MEL + math.log(hz / _LOG_START_HZ) / _LOG_STEP


@lru_cache(maxsize=8)
def slaney_filters(num_mels: int, fft_size: int, sample_rate: int) -> NDArray[np.float32]:
    """Triangular filters of equal area from 0 Hz to the Nyquist frequency: (num_mels, fft_size // 2 + 1) float32."""
    bins = np.linspace(0.0, sample_rate / 2, fft_size // 2 + 1)
    corners = _mel_to_hz(np.linspace(0.0, _hz_to_mel(sample_rate / 2), num_mels + 2))
    distance = corners[:, None] - bins[None, :]
    width = np.diff(corners)
    rising = -distance[:-2] / width[:-1, None]
    falling = distance[2:] / width[1:, None]
    area = 2.0 / (corners[2:] - corners[:-2])
    return (np.maximum(0.0, np.minimum(rising, falling)) * area[:, None]).astype(np.float32)


@lru_cache(maxsize=8)
def _hann(size: int) -> NDArray[np.float32]:
    """Periodic Hann window, with the angle rounded to float32 before the cosine as the reference does.

    Near the spectral floor this rounding changes features by 1e-5, more than any other rounding error here.
    """
    angle = np.arange(size, dtype=np.float32) * np.float32(2.0 * math.pi / size)
    return np.float32(0.5) - np.float32(0.5) * np.cos(angle.astype(np.float64)).astype(np.float32)


def min_samples(fft_size: int) -> int:
    """Length of the shortest wave that half a window can be reflected on at both ends."""
    return fft_size // 2 + 1


def _power(frames: NDArray[np.float64], spectra: NDArray[np.float64], power: NDArray[np.float32]) -> None:
    """Write the power spectra of real `frames` (n, size) into `power` (n, size // 2 + 1), using `spectra` (n, size).

    OpenCV's DFT of rows takes a tenth of the time of numpy's. In float32 its rounding error, 3e-5 in the features of
    speech, would be that of the reference; float64 leaves 2e-7 at little cost.
    """
    cv2 = import_opencv("sound input")
    # A row: Re 0, Re 1, Im 1, Re 2, Im 2, …; its last value is real when the size is even.
    spectra = cv2.dft(frames, spectra, flags=cv2.DFT_ROWS)
    np.square(spectra, out=spectra)
    power[:, 0], power[:, -1] = spectra[:, 0], spectra[:, -1]
    pairs = (frames.shape[1] - 1) // 2
    real, imaginary = spectra[:, 1 : 2 * pairs : 2], spectra[:, 2 : 2 * pairs + 1 : 2]
    np.add(real, imaginary, out=power[:, 1 : pairs + 1], casting="same_kind")


def log_mel(
    wave: NDArray[np.float32], *, sample_rate: int, num_mels: int, fft_size: int, hop_samples: int
) -> NDArray[np.float32]:
    """Log-mel features of one clip: `wave` (n,) float32 in [-1, 1] → (n // hop_samples, num_mels) float32.

    Source: `whisper.audio.log_mel_spectrogram` (periodic Hann window, centred frames with reflected edges, last
    frame dropped). The floor depends on the loudest value of the clip, so each call takes one clip. Spectra are
    computed in float64, all else in float32.

    Raises: ValueError when the wave is shorter than `min_samples(fft_size)`; ConfigError without OpenCV.
    """
    if len(wave) < min_samples(fft_size):
        raise ValueError(f"{len(wave)} samples are too few for a window of {fft_size}")
    num_frames = len(wave) // hop_samples
    filters = slaney_filters(num_mels, fft_size, sample_rate)
    padded = np.pad(wave.astype(np.float32, copy=False), fft_size // 2, mode="reflect")
    window = _hann(fft_size).astype(np.float64)
    frames = np.lib.stride_tricks.sliding_window_view(padded, fft_size)[::hop_samples]

    # Blocks use the same memory again: new pages would take as long as the computation.
    windowed, spectra = np.empty((2, _BLOCK_FRAMES, fft_size), np.float64)
    power = np.empty((_BLOCK_FRAMES, fft_size // 2 + 1), np.float32)
    logs = np.empty((num_frames, num_mels), dtype=np.float32)
    for start in range(0, num_frames, _BLOCK_FRAMES):
        block = logs[start : start + _BLOCK_FRAMES]
        count = len(block)
        np.multiply(frames[start : start + count], window, out=windowed[:count])
        _power(windowed[:count], spectra[:count], power[:count])
        np.matmul(power[:count], filters.T, out=block)
    np.log10(np.maximum(logs, np.float32(_FLOOR), out=logs), out=logs)
    if num_frames:
        np.maximum(logs, logs.max() - np.float32(_RANGE), out=logs)
    logs += np.float32(4.0)
    logs /= np.float32(4.0)
    return logs
