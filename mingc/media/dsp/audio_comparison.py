"""Compare a wave with a recorded one by audible properties: rate, length, loudness, timbre. Needs numpy only.

Values of a wave differ by rounding, and in low precision by much more, inaudibly. The properties here barely change
with that, but each reveals a different fault: a wrong speed or sample rate, silence, a wrong gain, clipping, patches in
the wrong order, a lost frequency band.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mingc.media.dsp.log_mel import slaney_filters
from mingc.media.dsp.resample import resample

Wave = NDArray[np.floating]

Figure = Literal["sample rate", "duration", "RMS", "peak", "spectral centroid", "mel distance"]

LIMITS: Mapping[Figure, float] = MappingProxyType(
    {
        "sample rate": 0.0,
        "duration": 0.0,
        "RMS": 0.02,
        "peak": 0.03,
        "spectral centroid": 0.01,
        "mel distance": 0.5,
    }
)
"""By figure: the largest difference, relative to the recorded value; of the mel distance in dB.

For float32 and bfloat16 waves of equal noise. A wave that was spoken anew, with other noise, needs wider ones.
"""

LOW_PRECISION_LIMITS: Mapping[Figure, float] = MappingProxyType(
    {
        "sample rate": 0.0,
        "duration": 0.0,
        "RMS": 0.1,
        "peak": 0.2,
        "spectral centroid": 0.05,
        "mel distance": 2.0,
    }
)
"""The same for a wave whose latents are within the tolerance of low precision, a tenth of the largest value."""

WINDOW_S = 0.025
NUM_MELS = 40
_BLOCK = 4096  # windows, of about a minute
RANGE_DB = 60.0  # below the loudest band of the recording; quieter values count as this quiet


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioDifference:
    """One property of a wave and of its recording; `difference` and `limit` as in `LIMITS`.

    Units: sample rate and spectral centroid in Hz, duration in seconds, mel distance in dB.
    """

    figure: Figure
    found: float
    recorded: float
    difference: float
    limit: float

    @property
    def is_off(self) -> bool:
        """Whether the difference exceeds its limit, or is not a number."""
        return not self.difference <= self.limit

    def describe(self) -> str:
        return (
            f"{self.figure} {self.found:.4g}, recorded {self.recorded:.4g}; differs by {self.difference:.3g}, "
            f"allowed {self.limit:.3g}"
        )


def compare_audio(
    found: Wave,
    recorded: Wave,
    *,
    found_hz: int,
    recorded_hz: int,
    limits: Mapping[Figure, float] = LIMITS,
) -> tuple[AudioDifference, ...]:
    """Compare all properties of mono waves (n,) in [-1, 1], in the order of `LIMITS`.

    A wave with NaN or infinity fails every property that depends on its values.
    """
    one, other = (np.asarray(wave, np.float64).ravel() for wave in (found, recorded))
    values: dict[Figure, tuple[float, float]] = {
        "sample rate": (found_hz, recorded_hz),
        "duration": (len(one) / found_hz, len(other) / recorded_hz),
        "RMS": (rms(one), rms(other)),
        "peak": (peak(one), peak(other)),
        "spectral centroid": (centroid_hz(one, found_hz), centroid_hz(other, recorded_hz)),
    }
    differences: list[AudioDifference] = [
        AudioDifference(
            figure=figure,
            found=mine,
            recorded=theirs,
            difference=_relative(mine, theirs),
            limit=limits[figure],
        )
        for figure, (mine, theirs) in values.items()
    ]
    distance = mel_distance_db(one, other, found_hz=found_hz, recorded_hz=recorded_hz)
    differences.append(
        AudioDifference(
            figure="mel distance",
            found=distance,
            recorded=0.0,
            difference=distance,
            limit=limits["mel distance"],
        )
    )
    return tuple(differences)


def mel_distance_db(found: Wave, recorded: Wave, *, found_hz: int, recorded_hz: int) -> float:
    """Root mean square difference of the bands of two mel spectrograms, in dB; the shorter wave is padded with silence.

    Infinite when a value is not finite.
    """
    if not (np.isfinite(found).all() and np.isfinite(recorded).all()):
        return math.inf
    if found_hz != recorded_hz:
        found = resample(found.astype(np.float32), found_hz, recorded_hz)
    length = max(len(found), len(recorded))
    if not length:
        return 0.0
    one, other = (mel_power(np.pad(wave, (0, length - len(wave))), recorded_hz) for wave in (found, recorded))
    loudest = float(other.max()) or float(one.max())
    if not loudest:
        return 0.0
    floor = loudest * 10 ** (-RANGE_DB / 10)
    decibels = [10 * np.log10(np.maximum(power, floor)) for power in (one, other)]
    return float(np.sqrt(np.mean((decibels[0] - decibels[1]) ** 2)))


def mel_power(wave: Wave, hz: int) -> NDArray[np.float64]:
    """(T, NUM_MELS) power in mel bands of overlapping windows."""
    filters = slaney_filters(NUM_MELS, _window(hz), hz).T.astype(np.float64)
    return np.concatenate([power @ filters for power in power_spectra(wave, hz)])


def _window(hz: int) -> int:
    return max(4, 2 * round(WINDOW_S * hz / 2))


def power_spectra(wave: Wave, hz: int) -> Iterator[NDArray[np.float64]]:
    """Power spectra (T, F) of windows that overlap by half; the wave is padded with silence to whole windows.

    In blocks of at most `_BLOCK` windows: the spectra of an hour would take gigabytes.
    """
    size = _window(hz)
    hop = size // 2
    count = max(1, -(-(len(wave) - hop) // hop))
    padded = np.pad(wave, (0, max(0, (count + 1) * hop - len(wave))))
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop][:count]
    for first in range(0, count, _BLOCK):
        block = frames[first : first + _BLOCK].astype(np.float64)
        yield np.abs(np.fft.rfft(block * np.hanning(size), axis=1)) ** 2


def centroid_hz(wave: Wave, hz: int) -> float:
    """Mean frequency in Hz, weighted by power; 0 for silence."""
    if not len(wave):
        return 0.0
    power = np.sum([each.sum(0) for each in power_spectra(wave, hz)], axis=0)
    total = float(power.sum())
    return float(power @ np.linspace(0.0, hz / 2, len(power))) / total if total else 0.0


def rms(wave: Wave) -> float:
    return float(np.sqrt(np.mean(np.square(wave, dtype=np.float64)))) if len(wave) else 0.0


def peak(wave: Wave) -> float:
    return float(np.abs(wave).max(initial=0.0))


def _relative(found: float, recorded: float) -> float:
    if found == recorded:
        return 0.0
    if not math.isfinite(found) or not recorded:
        return math.inf
    return abs(found - recorded) / abs(recorded)
