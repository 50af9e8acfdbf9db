"""Sample rate conversion by windowed-sinc interpolation, with numpy only.

`torchaudio.transforms.Resample` has the same filter by default (low-pass width 6, roll-off 0.99, Hann window; spec:
audio.md §1, spec: talker.md §4.2). Taps are computed in float64 and rounded to float32. Products are added one by one
in float32 in ascending tap order, like the reference's convolution for short filters: there, results are equal bit for
bit, elsewhere up to rounding errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_LOWPASS_WIDTH = 6
_ROLLOFF = 0.99


@dataclass(frozen=True, kw_only=True, slots=True)
class _Filter:
    """Polyphase form: output `j·up + p` is the sum over k of `taps[p, k] · x[j·down + first[p] + k]`."""

    up: int
    down: int
    first: NDArray[np.int64]  # (up,)
    taps: NDArray[np.float32]  # (up, num_taps)


@lru_cache(maxsize=32)
def _filter(source_hz: int, target_hz: int) -> _Filter:
    divisor = math.gcd(source_hz, target_hz)
    down, up = source_hz // divisor, target_hz // divisor
    cutoff = min(down, up) * _ROLLOFF
    width = math.ceil(_LOWPASS_WIDTH * down / cutoff)
    offset = np.arange(-width, width + down, dtype=np.float64) / down
    time = (np.arange(0, -up, -1, dtype=np.float64)[:, None] / up + offset[None, :]) * cutoff
    time = np.clip(time, -_LOWPASS_WIDTH, _LOWPASS_WIDTH)
    window = np.cos(time * math.pi / _LOWPASS_WIDTH / 2) ** 2
    angle = time * math.pi
    sinc = np.where(angle == 0, 1.0, np.sin(angle) / np.where(angle == 0, 1.0, angle))
    dense = (sinc * (window * (cutoff / down))).astype(np.float32)

    # Taps outside the window are exactly zero in float32 and are dropped.
    first = (dense != 0).argmax(axis=1)
    last = dense.shape[1] - 1 - (dense[:, ::-1] != 0).argmax(axis=1)
    num_taps = int((last - first).max()) + 1
    padded = np.pad(dense, ((0, 0), (0, num_taps)))
    taps = np.take_along_axis(padded, first[:, None] + np.arange(num_taps)[None, :], axis=1)
    return _Filter(up=up, down=down, first=first.astype(np.int64) - width, taps=taps)


def resampled_length(num_samples: int, source_hz: int, target_hz: int) -> int:
    """How many samples `resample` returns: the exact ratio, rounded up."""
    divisor = math.gcd(source_hz, target_hz)
    return -(-num_samples * (target_hz // divisor) // (source_hz // divisor))


def resample(wave: NDArray[np.float32], source_hz: int, target_hz: int) -> NDArray[np.float32]:
    """Resample `wave` (n,) float32 from `source_hz` to (ceil(n·target/source),) float32 at `target_hz`.

    The wave is zero beyond both ends. Equal rates return `wave` itself, and so does an empty one.
    """
    if source_hz <= 0 or target_hz <= 0:
        raise ValueError(f"sample rates must be positive: {source_hz} Hz to {target_hz} Hz")
    if source_hz == target_hz or not len(wave):
        return wave
    filter_ = _filter(source_hz, target_hz)
    num_taps = filter_.taps.shape[1]
    num_steps = -(-len(wave) // filter_.down)
    before = max(0, -int(filter_.first.min()))
    after = num_steps * filter_.down + int(filter_.first.max()) + num_taps - len(wave)
    padded = np.pad(wave.astype(np.float32, copy=False), (before, max(0, after)))

    output = np.empty((num_steps, filter_.up), dtype=np.float32)
    for phase in range(filter_.up):
        start = before + int(filter_.first[phase])
        total = np.zeros(num_steps, dtype=np.float32)
        for tap in range(num_taps):
            samples = padded[start + tap : start + tap + (num_steps - 1) * filter_.down + 1 : filter_.down]
            total += samples * filter_.taps[phase, tap]
        output[:, phase] = total
    return output.reshape(-1)[: resampled_length(len(wave), source_hz, target_hz)]


class FrameResampler:
    """Resamples a stream frame by frame: each frame is there as soon as its samples are, however they arrive.

    Its filter is that of `resample`, behind which it is late by half a filter (0.4 ms from 24 to 16 kHz).
    """

    def __init__(self, source_hz: int, target_hz: int, frame_samples: int) -> None:
        """`frame_samples` at `target_hz` must be whole periods of the filter."""
        filter_ = _filter(source_hz, target_hz)
        assert frame_samples % filter_.up == 0
        self._frame = frame_samples // filter_.up * filter_.down
        self._down = filter_.down
        shifts = filter_.first - filter_.first.min()
        self._taps = np.zeros((filter_.taps.shape[1] + int(shifts.max()), filter_.up), np.float32)
        for phase, shift in enumerate(shifts):
            self._taps[shift : shift + filter_.taps.shape[1], phase] = filter_.taps[phase]
        self._rest = np.zeros(len(self._taps) - filter_.down, np.float32)

    def push(self, samples: NDArray[np.float32], *, last: bool = False) -> NDArray[np.float32]:
        """The frames that `samples` (n,) complete; silence completes the last one."""
        buffer = np.concatenate([self._rest, samples])
        history = len(self._taps) - self._down
        if last:
            buffer = np.pad(buffer, (0, -(len(buffer) - history) % self._frame))
        frame, size = self._frame, buffer.itemsize
        starts = range(0, (len(buffer) - history) // frame * frame, frame)
        shape, strides = (frame // self._down, len(self._taps)), (size * self._down, size)
        # One product for each frame, so that its bits do not depend on the others.
        windows = (np.ndarray(shape, np.float32, buffer, size * start, strides) for start in starts)
        found = [(each @ self._taps).reshape(-1) for each in windows]
        self._rest = buffer[len(found) * frame :].copy()
        return np.concatenate(found) if found else np.zeros(0, np.float32)
