"""Figures of a sound, and distances between two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import av
import numpy as np
from av.filter import Graph
from numpy.typing import NDArray

from mingc.audit.sounds import Sound, Wave, frames
from mingc.media.dsp.audio_comparison import RANGE_DB, centroid_hz, mel_power, peak, rms
from mingc.media.dsp.resample import resample

Floats = NDArray[np.float64]
Embed = Callable[[Wave, int], NDArray[np.float32]]
"""Vector (D,) of the speaker of samples (n,) at a rate."""

ANALYSIS_HZ = 24_000
_PITCH_HZ, _LOWEST_HZ, _HIGHEST_HZ = 16_000, 60.0, 500.0
_FRAME_S, _HOP_S = 0.05, 0.01
_UNVOICED = 0.15  # of the normalised difference; the threshold of the YIN paper is 0.1
_CLIPPED, _CLIPPED_RUN = 0.999, 3
_QUIET_DB = -45.0  # below the loudest 20 ms: a pause
_PAUSE_S = 0.02
DRIFT = ("drift_timbre_db", "drift_loudness_lu", "drift_pitch_semitones", "drift_speaker")
LONG_S = 12.0  # from here on a sound is long enough to drift
_MOST_FRAMES = 1500  # of an alignment
_BLOCK = 6000  # frames whose pitch is found at once: a minute


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A sound with its figures, each computed when it is first asked for."""

    sound: Sound
    embed: Embed | None = None
    transcript: str | None = None
    error_rate: float | None = None

    @cached_property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.sound.samples).all())

    @cached_property
    def loudness_lufs(self) -> float | None:
        return loudness_lufs(self.sound.samples, self.sound.hz)

    @cached_property
    def centroid_hz(self) -> float:
        return centroid_hz(self.sound.samples, self.sound.hz)

    @cached_property
    def clipped(self) -> float:
        """Share of samples in runs of at least three at full scale."""
        return clipped_share(self.sound.samples)

    @cached_property
    def pauses_s(self) -> tuple[float, float]:
        """Silence before the first sound, and the longest pause after it, the end included."""
        return pauses_s(self.sound.samples, self.sound.hz)

    @cached_property
    def f0_hz(self) -> Floats:
        """Pitch of all voiced frames."""
        return f0_hz(self.sound.samples, self.sound.hz)

    @cached_property
    def f0_median_hz(self) -> float | None:
        return float(np.median(self.f0_hz)) if len(self.f0_hz) else None

    @cached_property
    def f0_range_semitones(self) -> float | None:
        """From the tenth to the ninetieth percentile."""
        if not len(self.f0_hz):
            return None
        low, high = np.percentile(self.f0_hz, [10, 90])
        return semitones(high, low)

    @cached_property
    def levels_db(self) -> Floats:
        """(T, 40) log-mel at 24,000 Hz, of which the loudest value is 0."""
        return mel_levels_db(self.sound.samples, self.sound.hz)

    @cached_property
    def seconds_per_character(self) -> float | None:
        letters = sum(each.isalnum() for each in self.sound.text)
        return self.sound.duration_s / letters if letters else None

    @cached_property
    def drift(self) -> dict[str, float]:
        """Empty for a short sound; otherwise as the function `drift` returns it."""
        if self.sound.duration_s < LONG_S or not self.is_finite:
            return {}
        return drift(self.sound.samples, self.sound.hz, self.embed)

    @cached_property
    @np.errstate(invalid="ignore", over="ignore")  # samples that are no numbers: their figures become None
    def figures(self) -> dict[str, float | None]:
        """All figures by name and unit, for a report."""
        samples = self.sound.samples
        found = {
            "sample_rate": self.sound.hz,
            "duration_s": self.sound.duration_s,
            "loudness_lufs": self.loudness_lufs,
            "rms": rms(samples),
            "peak": peak(samples),
            "clipped": self.clipped,
            "longest_pause_s": max(self.pauses_s),
            "centroid_hz": self.centroid_hz,
            "f0_hz": self.f0_median_hz,
            "f0_range_semitones": self.f0_range_semitones,
            "s_per_character": self.seconds_per_character,
            "error_rate": self.error_rate,
            **{name: self.drift.get(name) for name in DRIFT},
        }
        return {
            name: value if value is None or math.isfinite(value) else None for name, value in found.items()
        }


def loudness_lufs(samples: Wave, hz: int) -> float | None:
    """Integrated loudness by EBU R128, with FFmpeg's filter `ebur128`; None for silence and for less than 0.4 s.

    A mono sound counts as one channel, so a full-scale sine of 997 Hz has -3 LUFS.
    """
    if len(samples) < 0.4 * hz:
        return None
    graph = Graph()
    source = graph.add_abuffer(sample_rate=hz, format="flt", layout="mono", time_base=Fraction(1, hz))
    meter, sink = graph.add("ebur128", "metadata=1"), graph.add("abuffersink")
    source.link_to(meter)
    meter.link_to(sink)
    graph.configure()
    found = -math.inf
    for frame in (*frames(samples, hz), None):
        source.push(frame)
        while True:
            try:
                found = float(sink.pull().metadata.get("lavfi.r128.I", found))
            except (av.error.BlockingIOError, av.error.EOFError):
                break
    return found if found > -70 else None  # the gate of the standard


def clipped_share(samples: Wave) -> float:
    """Share of samples in runs of at least three at full scale."""
    if not len(samples):
        return 0.0
    full = np.concatenate([[False], np.abs(samples) >= _CLIPPED, [False]]).astype(np.int8)
    starts, ends = np.flatnonzero(np.diff(full) == 1), np.flatnonzero(np.diff(full) == -1)
    runs = ends - starts
    return float(runs[runs >= _CLIPPED_RUN].sum()) / len(samples)


def pauses_s(samples: Wave, hz: int) -> tuple[float, float]:
    """Silence before the first sound, and the longest one after it, in seconds; all of it is before for silence."""
    size = max(1, round(_PAUSE_S * hz))
    count = len(samples) // size
    levels = np.sqrt(np.mean(samples[: count * size].reshape(count, size) ** 2, axis=1))
    loud = np.flatnonzero(levels > max(float(levels.max(initial=0.0)) * 10 ** (_QUIET_DB / 20), 1e-5))
    if not len(loud):
        return len(samples) / hz, 0.0
    gaps = np.diff(np.concatenate([loud, [count]])) - 1
    return float(loud[0]) * size / hz, float(gaps.max()) * size / hz


def f0_hz(samples: Wave, hz: int) -> Floats:
    """Pitch (n,) of the voiced frames of 10 ms, from 60 to 500 Hz, by YIN (de Cheveigné and Kawahara 2002)."""
    wave = np.asarray(resample(np.nan_to_num(samples).astype(np.float32), hz, _PITCH_HZ), np.float64)
    longest, shortest = round(_PITCH_HZ / _LOWEST_HZ), round(_PITCH_HZ / _HIGHEST_HZ)
    size, hop = round(_FRAME_S * _PITCH_HZ), round(_HOP_S * _PITCH_HZ)
    if len(wave) < size:
        return np.zeros(0)
    energy = np.cumsum(np.pad(wave**2, (1, 0)))
    power = (energy[size:] - energy[:-size])[::hop] / size
    loud = np.flatnonzero(power > max(float(power.max()) * 1e-4, 1e-10)) * hop
    blocks = np.split(loud, range(_BLOCK, len(loud), _BLOCK))
    frames_of = np.lib.stride_tricks.sliding_window_view(wave, size)
    return np.array([each for block in blocks for each in _yin(frames_of[block], shortest, longest)])


def _yin(framed: Floats, shortest: int, longest: int) -> Iterator[float]:
    """Pitch of the voiced ones of frames (T, size), by lags in samples at `_PITCH_HZ`."""
    size = framed.shape[1]
    # Difference function of a window against itself later: energies less twice the correlation.
    window = size - longest
    fft = 1 << (size - 1).bit_length()  # lags below 0 come after those wanted
    spectrum = np.fft.rfft(framed, fft) * np.conj(np.fft.rfft(framed[:, :window], fft))
    correlation = np.fft.irfft(spectrum, fft)[:, : longest + 1]
    squares = np.cumsum(np.pad(framed**2, ((0, 0), (1, 0))), axis=1)
    energy = squares[:, window : window + longest + 1] - squares[:, : longest + 1]
    difference = np.maximum(energy[:, :1] + energy - 2 * correlation, 0.0)
    total = np.cumsum(difference[:, 1:], axis=1)
    normal = difference[:, 1:] * np.arange(1, longest + 1) / np.maximum(total, 1e-20)  # lag k at column k - 1
    candidates = normal[:, shortest - 1 :]
    is_low = candidates < _UNVOICED
    for row, low in zip(candidates, is_low, strict=True):
        if not low.any():
            continue
        lag = int(np.argmax(low))
        while lag + 1 < len(row) and row[lag + 1] < row[lag]:
            lag += 1
        offset = 0.0
        if 0 < lag < len(row) - 1:
            before, here, after = row[lag - 1 : lag + 2]
            bend = before - 2 * here + after
            offset = 0.5 * (before - after) / bend if bend else 0.0
        yield _PITCH_HZ / (lag + shortest + offset)


def mel_levels_db(samples: Wave, hz: int) -> Floats:
    """(T, 40) decibels of mel bands, from -60 to 0 of the loudest value; all -60 for silence."""
    wave = resample(np.nan_to_num(samples).astype(np.float32), hz, ANALYSIS_HZ)
    power = mel_power(wave, ANALYSIS_HZ)
    loudest = float(power.max())
    if not loudest:
        return np.full_like(power, -RANGE_DB)
    return 10 * np.log10(np.maximum(power / loudest, 10 ** (-RANGE_DB / 10)))


def aligned_distance_db(one: Floats, other: Floats) -> float:
    """Root mean square difference of mel levels (T, 40) along the best alignment, by dynamic time warping.

    A step goes one frame on in one sound or in both; each pair of frames on the way counts once. Long sounds are
    compared in means of several frames.
    """
    stride = -(-max(len(one), len(other)) // _MOST_FRAMES)
    one, other = (_pooled(each, stride) for each in (one, other))
    # |a - b|² by products would leave rounding errors where frames are equal.
    cost = np.stack([np.mean((row - other) ** 2, axis=1) for row in one])
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    steps = np.zeros((rows + 1, columns + 1))
    total[0, 0] = 0.0
    for diagonal in range(rows + columns - 1):
        row = np.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1))
        column = diagonal - row
        ways = np.stack([total[row, column], total[row, column + 1], total[row + 1, column]])
        lengths = np.stack([steps[row, column], steps[row, column + 1], steps[row + 1, column]])
        best = np.argmin(ways, axis=0)
        here = np.arange(len(row))
        total[row + 1, column + 1] = ways[best, here] + cost[row, column]
        steps[row + 1, column + 1] = lengths[best, here] + 1
    return math.sqrt(total[-1, -1] / steps[-1, -1])


def _pooled(levels: Floats, stride: int) -> Floats:
    if stride == 1:
        return levels
    count = -(-len(levels) // stride)
    padded = np.pad(levels, ((0, count * stride - len(levels)), (0, 0)), mode="edge")
    return np.asarray(padded.reshape(count, stride, -1).mean(axis=1))


def drift(samples: Wave, hz: int, embed: Embed | None) -> dict[str, float]:
    """What changes from the first to the last third, by the names of `DRIFT`, as far as it can be told.

    Timbre: root mean square difference of mean log-mel spectra, levels removed. Loudness and pitch: last less first.
    Speaker: cosine distance of speaker vectors.
    """
    third = len(samples) // 3
    parts = samples[:third], samples[-third:]
    first, last = (mel_levels_db(each, hz).mean(axis=0) for each in parts)
    found = {"drift_timbre_db": float(np.std(last - first))}
    quiet, loud = (loudness_lufs(each, hz) for each in parts)
    if quiet is not None and loud is not None:
        found["drift_loudness_lu"] = loud - quiet
    low, high = (f0_hz(each, hz) for each in parts)
    if len(low) and len(high):
        found["drift_pitch_semitones"] = semitones(float(np.median(high)), float(np.median(low)))
    if embed is not None:
        one, other = (embed(each, hz) for each in parts)
        found["drift_speaker"] = 1 - float(one @ other) / float(np.linalg.norm(one) * np.linalg.norm(other))
    return found


def semitones(found: float, reference: float) -> float:
    return 12 * math.log2(found / reference)
