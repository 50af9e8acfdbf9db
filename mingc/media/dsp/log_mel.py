"""Whisper's log-mel features and the Slaney mel filter bank, with numpy only (spec: audio.md §2)."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_LINEAR_HZ_PER_MEL = 200.0 / 3.0
_LOG_START_HZ = 1000.0
_LOG_STEP = math.log(6.4) / 27.0
_FLOOR = 1e-10
_RANGE = 8.0  # log10 units kept below the loudest value of the clip
_BLOCK_FRAMES = 128  # the spectra of so many frames stay in a processor's cache
_second_thread = ThreadPoolExecutor(1, thread_name_prefix="mingc-log-mel")


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
    """Periodic Hann window. The angle is rounded to float32 before the cosine, as in the reference.

    Near the spectral floor this rounding changes features by 1e-5, more than any other rounding here.
    """
    angle = np.arange(size, dtype=np.float32) * np.float32(2.0 * math.pi / size)
    return np.float32(0.5) - np.float32(0.5) * np.cos(angle.astype(np.float64)).astype(np.float32)


def min_samples(fft_size: int) -> int:
    """Length of the shortest wave whose ends can be reflected by half a window."""
    return fft_size // 2 + 1


def log_mel(
    wave: NDArray[np.float32], *, sample_rate: int, num_mels: int, fft_size: int, hop_samples: int
) -> NDArray[np.float32]:
    """Log-mel features of one clip: `wave` (n,) float32 in [-1, 1] → (n // hop_samples, num_mels) float32.

    Source: `whisper.audio.log_mel_spectrogram` (periodic Hann window, centred frames with reflected edges, last
    frame dropped). The floor depends on the loudest value of the clip, so a call takes one clip.

    Raises: ValueError when the wave is shorter than `min_samples(fft_size)`.
    """
    if len(wave) < min_samples(fft_size):
        raise ValueError(f"{len(wave)} samples are too few for a window of {fft_size}")
    num_frames = len(wave) // hop_samples
    filters = slaney_filters(num_mels, fft_size, sample_rate)
    padded = np.pad(wave.astype(np.float32, copy=False), fft_size // 2, mode="reflect")
    window = _hann(fft_size)
    frames = np.lib.stride_tricks.sliding_window_view(padded, fft_size)[::hop_samples]

    logs = np.empty((num_frames, num_mels), np.float32)
    starts = iter(range(0, num_frames, _BLOCK_FRAMES))

    def compute_blocks() -> None:
        # All blocks use the same memory: new pages would take as long as the computation.
        windowed = np.empty((_BLOCK_FRAMES, fft_size), np.float32)
        power, squares = np.empty((2, _BLOCK_FRAMES, fft_size // 2 + 1), np.float32)
        for start in starts:
            block = logs[start : start + _BLOCK_FRAMES]
            count = len(block)
            np.multiply(frames[start : start + count], window, out=windowed[:count])
            spectrum = np.fft.rfft(windowed[:count], axis=1)
            np.square(spectrum.real, out=power[:count], casting="same_kind")
            power[:count] += np.square(spectrum.imag, out=squares[:count], casting="same_kind")
            np.matmul(power[:count], filters.T, out=block)

    # Two threads take block after block; numpy releases Python's lock. A second one that is late has none left to do.
    second = _second_thread.submit(compute_blocks)
    compute_blocks()
    if not second.cancel():
        second.result()
    # (log10 + 4) / 4. numpy computes ln, but not log10, with vector instructions: 0.1 instead of 0.9 ms for 10 s.
    np.log(np.maximum(logs, np.float32(_FLOOR), out=logs), out=logs)
    logs *= np.float32(0.25 / math.log(10.0))
    if num_frames:
        np.maximum(logs, logs.max() - np.float32(0.25 * _RANGE), out=logs)
    logs += np.float32(1.0)
    return logs
