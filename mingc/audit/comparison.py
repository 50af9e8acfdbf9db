"""Faults of sounds, and two groups of sounds compared with distances inside of each as the yardstick.

The limits below are chosen, not fitted: no released weights were heard with them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from types import MappingProxyType

import numpy as np

from mingc.audit.measures import DRIFT, Measured, aligned_distance_db, semitones
from mingc.audit.report import Check, FigureRow, Verdict
from mingc.media.dsp.audio_comparison import rms

YARDSTICK = 1.5  # distances across may be so many times those within
MAX_ERROR_RATE = 0.1  # of words, or characters of Chinese: still intelligible
_MOST_CLIPPED = 1e-4
_QUIETEST_LUFS, _LOUDEST_LUFS = -45.0, -6.0
_LONGEST_PAUSE_S = 2.0
_MOST_DRIFT = dict(zip(DRIFT, (8.0, 6.0, 3.0, 0.5), strict=True))
_RATES_HZ = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
_HAN = re.compile("[\u3400-\u9fff]")
# Seconds of speech per letter, digit or ideograph. Published speech of this model: 0.1 (docs/first-run.md).
PACE_S: Mapping[str, tuple[float, float]] = MappingProxyType({"en": (0.04, 0.14), "zh": (0.12, 0.5)})


@dataclass(frozen=True, slots=True)
class Figure:
    """A distance between two sounds of the same words.

    Attributes:
        floor: what nobody hears: the least limit.
        fixed: the limit where nothing was repeated.
    """

    name: str
    unit: str
    floor: float
    fixed: float
    between: Callable[[Measured, Measured], float | None]


def _ratio(one: float | None, other: float | None) -> float | None:
    return abs(math.log(one / other)) if one and other else None


def _levels(one: Measured, other: Measured) -> float | None:
    if one.loudness_lufs is None or other.loudness_lufs is None:
        return None
    return abs(one.loudness_lufs - other.loudness_lufs)


def _pitches(one: Measured, other: Measured) -> float | None:
    if one.f0_median_hz is None or other.f0_median_hz is None:
        return None
    return abs(semitones(one.f0_median_hz, other.f0_median_hz))


FIGURES = (
    Figure(
        "mel distance, aligned", "dB", 1.0, 4.0, lambda a, b: aligned_distance_db(a.levels_db, b.levels_db)
    ),
    Figure("duration", "log", 0.03, 0.1, lambda a, b: _ratio(a.sound.duration_s, b.sound.duration_s)),
    Figure("loudness", "LU", 0.5, 2.0, _levels),
    Figure("spectral centroid", "log", 0.03, 0.15, lambda a, b: _ratio(a.centroid_hz, b.centroid_hz)),
    Figure("pitch", "semitones", 0.3, 1.0, _pitches),
)


def language(text: str) -> str:
    """`zh` for a text with ideographs, else `en`."""
    return "zh" if _HAN.search(text) else "en"


def faults(each: Measured) -> dict[str, str]:
    """What is wrong with a sound by itself: kind → why, with figures."""
    sound, found = each.sound, {}
    if not each.is_finite:
        found["values"] = "samples are not numbers"
        return found
    length = f"its samples at {sound.hz} Hz last {sound.duration_s:.2f} s"
    if _is_other_length(sound.stated_s, sound.duration_s):
        found["length"] = f"its header says {sound.stated_s:.2f} s, {length}"
    if sound.counted_s is not None and _is_other_length(sound.counted_s, sound.duration_s):
        rate = _usual_rate(sound.hz, sound.counted_s / sound.duration_s) if sound.duration_s else None
        made = "" if rate is None else f": they were made at {rate} Hz"
        found["header"] = f"the server counted {sound.counted_s:.2f} s, {length}{made}"
    is_short = (
        each.loudness_lufs is None
        and sound.duration_s < 0.4
        and rms(sound.samples) > 10 ** (_QUIETEST_LUFS / 20)
    )
    if not is_short and (each.loudness_lufs is None or each.loudness_lufs < _QUIETEST_LUFS):
        level = "none" if each.loudness_lufs is None else f"{each.loudness_lufs:.1f} LUFS"
        found["silence"] = f"no speech is heard: loudness {level}"
    elif each.loudness_lufs is not None and each.loudness_lufs > _LOUDEST_LUFS:
        found["loudness"] = (
            f"{each.loudness_lufs:.1f} LUFS is louder than speech ({_LOUDEST_LUFS:.0f} at most)"
        )
    if each.clipped > _MOST_CLIPPED:
        found["clipping"] = f"{each.clipped:.2%} of the samples are clipped"
    before, longest = each.pauses_s
    if "silence" not in found and max(before, longest) > _LONGEST_PAUSE_S:
        found["pause"] = f"{max(before, longest):.1f} s of silence"
    pace = each.seconds_per_character
    if pace is not None:
        low, high = PACE_S[language(sound.text)]
        if not low <= pace <= high:
            found["pace"] = f"{pace:.3f} s per character; {low} to {high} is speech"
    if each.error_rate is not None and each.error_rate > MAX_ERROR_RATE:
        found["words"] = f"error rate {each.error_rate:.0%}: heard as {each.transcript or 'nothing'!r}"
    for name, value in each.drift.items() if "silence" not in found else ():
        if abs(value) > _MOST_DRIFT[name]:
            found["drift"] = (
                f"from the first to the last third: {name} {value:.2g}, {_MOST_DRIFT[name]:g} allowed"
            )
    return found


def _is_other_length(told_s: float | None, found_s: float) -> bool:
    return told_s is not None and abs(told_s - found_s) > 0.05 + 0.02 * told_s


def _usual_rate(hz: int, ratio: float) -> int | None:
    """The usual rate at which samples in a file of rate `hz` last `ratio` times as long as they do."""
    near = (rate for rate in _RATES_HZ if rate != hz and ratio and abs(hz / rate / ratio - 1) < 0.03)
    return next(near, None)


def header_fault(a: Sequence[Measured], b: Sequence[Measured]) -> str | None:
    """Find a wrong rate in the header of B by A: slower and deeper (or faster and higher) by the same ratio."""
    pairs = _alike(product(a, b))
    slower = _median(one.sound.duration_s / other.sound.duration_s for one, other in pairs)
    ratios = [
        _median(one / other for one, other in values if one and other)
        for values in (
            [(one.f0_median_hz, other.f0_median_hz) for one, other in pairs],
            [(one.centroid_hz, other.centroid_hz) for one, other in pairs],
        )
    ]
    if slower is None or abs(math.log(slower)) < 0.06:
        return None
    for spectrum in ratios:
        if spectrum is None or abs(math.log(slower * spectrum)) > 0.05 + 0.1 * abs(math.log(slower)):
            return None
    hz, other_hz = a[0].sound.hz, b[0].sound.hz
    fits = [
        f"{label} would fit at {rate} Hz"
        for label, rate in (("B", _usual_rate(other_hz, slower)), ("A", _usual_rate(hz, 1 / slower)))
        if rate is not None
    ]
    if not fits:
        return None
    return (
        f"header: B is {1 / slower:.2f} times as long as A and {slower:.2f} times as high, so the header of one has "
        f"another rate than its samples (A {hz} Hz, B {other_hz} Hz; {' or '.join(fits)})"
    )


def _median(values: Iterable[float]) -> float | None:
    found = [*values]
    return float(np.median(found)) if found else None


def _alike(pairs: Iterable[tuple[Measured, Measured]]) -> list[tuple[Measured, Measured]]:
    """Pairs of the same utterance that have samples."""
    alike = [pair for pair in pairs if pair[0].sound.utterance == pair[1].sound.utterance]
    return [pair for pair in alike if all(each.is_finite and len(each.sound.samples) for each in pair)]


def distances(a: Sequence[Measured], b: Sequence[Measured]) -> tuple[FigureRow, ...]:
    """Compare all figures of all pairs of the same utterance."""
    rows, pairs = [], _alike(product(a, b))
    repeats = _alike((*combinations(a, 2), *combinations(b, 2)))
    for figure in FIGURES:
        within, across = (
            _median(value for pair in each if (value := figure.between(*pair)) is not None)
            for each in (repeats, pairs)
        )
        if across is None:
            continue
        limit = figure.fixed if within is None else max(figure.floor, YARDSTICK * within)
        rows.append(
            FigureRow(
                figure=figure.name, unit=figure.unit, within=within, across=across, limit=limit,
                is_off=across > limit,
            )
        )  # fmt: skip
    return tuple(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Two groups compared; fields as in `AuditReport`."""

    verdict: Verdict
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    figures: tuple[FigureRow, ...]
    checks: tuple[Check, ...]


def judge(a: Sequence[Measured], b: Sequence[Measured]) -> Judgement:
    """Compare groups of which each has a sound at least."""
    notes: list[str] = []
    reasons, checks = _fault_reasons(a, b, notes)
    utterances = [{each.sound.utterance for each in group} for group in (a, b)]
    if missing := utterances[0] ^ utterances[1]:
        notes.append(f"only one group has {', '.join(sorted(missing)[:5])}{' …' * (len(missing) > 5)}")
    if not utterances[0] & utterances[1]:
        reasons.append("no utterance is in both groups: files are compared by their names")
    elif (wrong_rate := header_fault(a, b)) is not None:
        reasons.insert(0, wrong_rate)
    figures = distances(a, b)
    off = _off(figures, [sorted({each.sound.hz for each in group}) for group in (a, b)])
    if not figures:
        reasons.append("no two sounds can be compared")
    elif all(row.within is None for row in figures):
        notes.append("nothing is repeated, so fixed limits hold: give repetitions for a yardstick")
    words, is_intelligible = _words(a, b)
    if is_intelligible is False:
        reasons.append(words)
    verdict: Verdict = "equivalent"
    if reasons:
        verdict, reasons = "different", [*reasons, *off]
    elif off:
        verdict, reasons = "intelligible" if is_intelligible else "different", [*off, words]
    else:
        nearest = max(figures, key=lambda row: row.across / row.limit)
        reasons = [f"no figure exceeds its limit; nearest is {_described(nearest)}", words]
    return Judgement(
        verdict=verdict, reasons=tuple(reasons), notes=tuple(notes), figures=figures, checks=tuple(checks)
    )


def _fault_reasons(
    a: Sequence[Measured], b: Sequence[Measured], notes: list[str]
) -> tuple[list[str], list[Check]]:
    """A reason for each kind of fault that one group has more often, and all faults; those of both become notes."""
    reasons: list[str] = []
    checks: list[Check] = []
    counts = Counter[tuple[str, str]]()
    for label, group in (("A", a), ("B", b)):
        for each in group:
            for kind, why in faults(each).items():
                counts[label, kind] += 1
                checks.append(Check(name=kind, where=f"{label} {each.sound.name}", outcome="bad", found=why))
    for kind in dict.fromkeys(each.name for each in checks):
        shares = counts["A", kind] / len(a), counts["B", kind] / len(b)
        worse = "A" if shares[0] > shares[1] else "B"
        example = next(each for each in checks if each.name == kind and each.where.startswith(worse))
        (notes if shares[0] == shares[1] else reasons).append(
            f"{kind}: {counts['A', kind]} of {len(a)} sounds of A, {counts['B', kind]} of {len(b)} of B; "
            f"{example.where}: {example.found}"
        )
    return reasons, checks


def _off(figures: Sequence[FigureRow], rates: Sequence[list[int]]) -> list[str]:
    """Reasons why the groups sound different."""
    off = [f"sample rates are {rates[0]} Hz in A and {rates[1]} Hz in B"] if rates[0] != rates[1] else []
    return off + [_described(row) for row in figures if row.is_off]


def _described(row: FigureRow) -> str:
    within = "nothing is repeated" if row.within is None else f"{row.within:.3g} within the groups"
    return f"{row.figure}: {row.across:.3g} {row.unit} across, {row.limit:.3g} allowed ({within})"


def _words(a: Sequence[Measured], b: Sequence[Measured]) -> tuple[str, bool | None]:
    """What is known of the words; whether both groups say them equally well; None: unknown."""
    rates = [[each.error_rate for each in group if each.error_rate is not None] for group in (a, b)]
    if not all(rates):
        return "words were not compared: no texts, or nothing that transcribes", None
    means = [float(np.mean(each)) for each in rates]
    are_good = max(means) <= MAX_ERROR_RATE and abs(means[0] - means[1]) <= MAX_ERROR_RATE / 2
    return f"error rate of words: {means[0]:.1%} in A, {means[1]:.1%} in B", are_good
