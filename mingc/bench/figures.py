"""Figures of runs: what users feel, per path and load.

Latencies count from the moment at which a request was due (`Sample.scheduled`). Answers that failed count in `success`,
and the time they took in the rates; no other figure has them. A rate's interval treats a closed loop as what it is:
answers that take longer make the run longer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mingc.bench.records import Load, Run, Sample, grouped
from mingc.bench.statistics import Estimate, Floats, Measure, Quantile, Ratio, estimate

STREAMED_SPEECH = ("speech-stream", "spoken", "realtime")


@dataclass(frozen=True, slots=True)
class Figure:
    """What a figure is called, its unit, and which way is better."""

    name: str
    unit: str
    is_higher_better: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


@dataclass(frozen=True, slots=True)
class Playback:
    """What a listener heard who began to play with the first chunk: silences between chunks, and their seconds."""

    num_underruns: int
    silent_s: float


SUCCESS = Figure("success", "%", is_higher_better=True)
FIRST_TOKEN = Figure("first token, median", "ms")
FIRST_AUDIO = Figure("first audio, median", "ms")
WALL = Figure("wall, median", "ms")
UNDERRUNS = Figure("underruns per answer", "")
CONTINUITY = Figure("continuity", "%", is_higher_better=True)
# Amount of each answer that a rate counts.
_RATES: dict[Figure, Callable[[Sample], float | None]] = {
    Figure("requests", "1/s", is_higher_better=True): lambda sample: 1.0,
    Figure("tokens", "tok/s", is_higher_better=True): (
        lambda sample: None if sample.picture_times else sample.output_tokens
    ),
    Figure("audio", "s/s", is_higher_better=True): lambda sample: sample.audio_s or None,
    Figure("pictures", "1/s", is_higher_better=True): lambda sample: sample.num_pictures or None,
}


def _gaps(times: Sequence[float]) -> Sequence[float]:
    return [1e3 * (later - earlier) for earlier, later in pairwise(times)]


def _tpot(sample: Sample) -> Sequence[float]:
    """Mean time per output token after the first one; a piece of text may have several tokens."""
    times, tokens = sample.token_times, sample.output_tokens
    return [1e3 * (times[-1] - times[0]) / (tokens - 1)] if tokens and tokens > 1 and len(times) > 1 else []


def _since_due(times: Sequence[float], sample: Sample) -> Sequence[float]:
    return [1e3 * (times[0] - sample.scheduled)] if times else []


def _chunk_gaps(sample: Sample) -> Sequence[float]:
    return _gaps(sample.audio_times)


def _rtf(sample: Sample) -> Sequence[float]:
    return [(sample.ended - sample.scheduled) / sample.audio_s] if sample.audio_s else []


def _first_partial(sample: Sample) -> Sequence[float]:
    """Nothing of an answer that has finished pictures only."""
    return _since_due(sample.picture_times[: len(sample.picture_times) - sample.num_pictures], sample)


def _per_picture(sample: Sample) -> Sequence[float]:
    return [(sample.ended - sample.scheduled) / sample.num_pictures] if sample.num_pictures else []


# Values of an answer; name, unit, quantiles that are shown.
_TIMES: tuple[tuple[str, str, tuple[str, ...], Callable[[Sample], Sequence[float]]], ...] = (
    ("first token", "ms", ("median", "p95"), lambda sample: _since_due(sample.token_times, sample)),
    ("time per output token", "ms", ("median", "p95"), _tpot),
    ("pause between tokens", "ms", ("p99",), lambda sample: _gaps(sample.token_times)),
    ("first audio", "ms", ("median", "p95"), lambda sample: _since_due(sample.audio_times, sample)),
    ("pause between chunks", "ms", ("p99",), _chunk_gaps),
    ("first unfinished picture", "ms", ("median", "p95"), _first_partial),
    ("time per picture", "s", ("median", "p95"), _per_picture),
    ("real-time factor", "", ("median", "p95"), _rtf),
    ("wall", "ms", ("median", "p95"), lambda sample: [1e3 * (sample.ended - sample.scheduled)]),
)
# A session may hold back the text of an answer that it began early, and its tokens are of sound, too.
_OF_TOKENS = ("tokens", "time per output token", "pause between tokens")
_QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99}


def playback(sample: Sample) -> Playback:
    """Play the chunks of an answer: each after the one before, or when it came."""
    silences = 0
    silent_s = 0.0
    until = sample.audio_times[0] if sample.audio_times else 0.0
    for came, frames in zip(sample.audio_times, sample.audio_samples, strict=True):
        if came > until:
            silences += 1
            silent_s += came - until
        until = max(until, came) + frames / sample.sample_rate
    return Playback(silences, silent_s)


def measures(run: Run) -> Iterator[tuple[Figure, Measure]]:
    """Measure of each figure that the answers of `run` have."""
    samples = run.samples
    good = [not sample.error for sample in samples]
    if not samples:
        return
    yield SUCCESS, Ratio(100.0 * np.array(good), np.ones(len(samples)))
    weights, left_out = _wall_shares(run), _OF_TOKENS if run.path == "realtime" else ()
    for figure, amount in _RATES.items():
        amounts = [amount(sample) if is_good else 0.0 for sample, is_good in zip(samples, good, strict=True)]
        if any(amounts) and None not in amounts and figure.name not in left_out:
            yield figure, Ratio(np.array(amounts, dtype=np.float64), weights)
    for name, unit, quantiles, values in _TIMES:
        if name in left_out:
            continue
        owned = [values(sample) if is_good else () for sample, is_good in zip(samples, good, strict=True)]
        for quantile in quantiles:
            yield from _quantile(Figure(f"{name}, {quantile}", unit), owned, _QUANTILES[quantile])
    if run.path in STREAMED_SPEECH:
        played = [
            (playback(sample), sample.audio_s) if is_good and sample.audio_times else (Playback(0, 0.0), 0.0)
            for sample, is_good in zip(samples, good, strict=True)
        ]
        heard = np.array([seconds for _, seconds in played])
        silent = np.array([each.silent_s for each, _ in played])
        if heard.any():
            yield (
                UNDERRUNS,
                Ratio(np.array([float(each.num_underruns) for each, _ in played]), heard * 0 + (heard > 0)),
            )
            yield CONTINUITY, Ratio(100 * heard, heard + silent)
    for stage in dict.fromkeys(stage for sample in samples for stage in sample.stages):
        owned = [
            [sample.stages[stage]] if is_good and stage in sample.stages else []
            for sample, is_good in zip(samples, good, strict=True)
        ]
        for quantile in ("median", "p95"):
            yield from _quantile(Figure(f"server: {stage}, {quantile}", "ms"), owned, _QUANTILES[quantile])


def _wall_shares(run: Run) -> Floats:
    """Share of each request in the wall time: of a closed loop by the time it took, otherwise equal.

    Spoken turns have equal shares, too: most of their time is the speaker's.
    """
    taken = np.array([sample.ended - sample.sent for sample in run.samples])
    if run.load.kind == "open" or run.path == "realtime" or not taken.sum() > 0:
        taken = np.ones(len(taken))
    shares: Floats = run.wall_s * taken / taken.sum()
    return shares


def _quantile(figure: Figure, owned: Sequence[Sequence[float]], q: float) -> Iterator[tuple[Figure, Measure]]:
    filled = [np.asarray(values, dtype=np.float64) for values in owned if values]
    if filled:
        owners = np.repeat(np.arange(len(filled)), [len(values) for values in filled])
        yield figure, Quantile(np.concatenate(filled), owners, q, len(filled))


def estimates(runs: Sequence[Run]) -> dict[tuple[str, Load], Mapping[Figure, Estimate]]:
    """Estimate every figure of every path and load over its repeats; reproducible."""
    found: dict[tuple[str, Load], Mapping[Figure, Estimate]] = {}
    for (path, load), repeats in grouped(runs).items():
        collected: dict[Figure, list[Measure]] = {}
        for run in repeats:
            for figure, measure in measures(run):
                collected.setdefault(figure, []).append(measure)
        found[path, load] = {
            figure: result
            for figure, own in collected.items()
            if (result := estimate(own, zlib.crc32(f"{path} {load.label} {figure.name}".encode())))
            is not None
        }
    return found
