"""Kaldi filter-bank features of the speaker network, with numpy only.

Source: `torchaudio.compliance.kaldi.fbank` with its defaults and no dither (spec: talker.md §4.1).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_FRAME_MS = 25.0
_SHIFT_MS = 10.0
_PREEMPHASIS = np.float32(0.97)
_LOW_HZ = 20.0
_NUM_BINS = 80
_POVEY_POWER = 0.85
_FLOOR = np.float32(np.finfo(np.float32).eps)


def _mel(hz: float) -> float:
    return 1127.0 * math.log(1.0 + hz / 700.0)


@lru_cache(maxsize=4)
def _filters(fft_size: int, sample_rate: int) -> NDArray[np.float32]:
    """Triangular mel filters of height 1, (80, fft_size // 2 + 1), without the Nyquist bin.

    All values are float32, as in the reference: rounding errors of the mel scale are visible in quiet low bins.
    """
    low, high = _mel(_LOW_HZ), _mel(sample_rate / 2)
    step = (high - low) / (_NUM_BINS + 1)
    index = np.arange(_NUM_BINS, dtype=np.float32)[:, None]
    left, center, right = (np.float32(low) + (index + np.float32(k)) * np.float32(step) for k in range(3))
    hz = np.arange(fft_size // 2, dtype=np.float32) * np.float32(sample_rate / fft_size)
    mel = np.float32(1127.0) * np.log(np.float32(1.0) + hz / np.float32(700.0))[None, :]
    triangles = np.maximum(0.0, np.minimum((mel - left) / (center - left), (right - mel) / (right - center)))
    return np.pad(triangles, ((0, 0), (0, 1))).astype(np.float32)


def kaldi_fbank(wave: NDArray[np.float32], *, sample_rate: int) -> NDArray[np.float32]:
    """Log mel energies of whole 25 ms frames every 10 ms: `wave` (n,) float32 in [-1, 1] → (T, 80) float32.

    The wave is not scaled to 16-bit range and no mean is subtracted. T is 0 if the wave is shorter than a frame.
    """
    frame_samples = int(sample_rate * _FRAME_MS * 0.001)
    shift_samples = int(sample_rate * _SHIFT_MS * 0.001)
    fft_size = 1 << (frame_samples - 1).bit_length()
    if len(wave) < frame_samples:
        return np.empty((0, _NUM_BINS), dtype=np.float32)
    view = np.lib.stride_tricks.sliding_window_view(wave.astype(np.float32, copy=False), frame_samples)
    frames = view[::shift_samples] - view[::shift_samples].mean(axis=1, keepdims=True, dtype=np.float32)
    previous = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    phase = 2.0 * math.pi * np.arange(frame_samples) / (frame_samples - 1)
    window = ((0.5 - 0.5 * np.cos(phase)) ** _POVEY_POWER).astype(np.float32)
    spectrum = np.fft.rfft((frames - _PREEMPHASIS * previous) * window, n=fft_size, axis=1)
    power = spectrum.real**2 + spectrum.imag**2
    # Not by BLAS, whose rounding depends on its number of threads.
    filters = _filters(fft_size, sample_rate)
    energies: NDArray[np.float32] = np.einsum("tf,bf->tb", power, filters, dtype=np.float32)
    return np.log(np.maximum(energies, _FLOOR))
