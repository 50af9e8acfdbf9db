"""Compares the figures of a benchmark with those of an earlier one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Literal

from mingc.bench import records
from mingc.bench.figures import Figure, estimates
from mingc.bench.records import BenchFile, Load
from mingc.bench.statistics import CONFIDENCE, Estimate
from mingc.errors import ConfigError

Verdict = Literal["worse", "better", "no difference", "unknown"]
VERDICTS: tuple[Verdict, ...] = ("worse", "better", "unknown", "no difference")
# Fraction of the baseline below which a change is of no interest: machines drift. Percentages have none.
TOLERANCE = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One figure of one path and load, before and now."""

    path: str
    load: Load
    figure: Figure
    before: Estimate
    now: Estimate
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All figures that both have, worse ones first; `notes` say what else differs between the two."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def is_worse(self) -> bool:
        return any(change.verdict == "worse" for change in self.changes)


def read_baseline(path: Path, paths: Sequence[str], loads: Sequence[Load]) -> BenchFile:
    """Read a baseline before anything is measured.

    Raises: ConfigError when the file is no result, or has none of the paths and loads to be measured.
    """
    file = records.read(path)
    if not any(run.path in paths and run.load in loads for run in file.runs):
        known = ", ".join(dict.fromkeys(f"{run.path} {run.load.label}" for run in file.runs)) or "no run"
        raise ConfigError(
            f"{path} has none of the paths and loads to be measured: it has {known}",
            where="--baseline",
            fix="measure the same paths and loads as the baseline",
        )
    return file


def compare(before: BenchFile, now: BenchFile) -> Comparison:
    """Give each figure a verdict.

    A figure is better or worse when the interval of its change excludes zero, and the change exceeds `TOLERANCE`. The
    intervals are widened by the number of figures (Bonferroni): of servers that do not differ, any figure seems changed
    in about one comparison of twenty. Without an interval, the verdict is unknown.
    """
    old, new = estimates(before.runs), estimates(now.runs)
    pairs = [
        (path, load, figure, old[path, load][figure], value)
        for (path, load), figures in new.items()
        for figure, value in figures.items()
        if figure in old.get((path, load), {})
    ]
    widest = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / max(1, len(pairs)))
    changes = [
        Change(
            path=path, load=load, figure=figure, before=earlier, now=value,
            verdict=_verdict(figure, earlier, value, widest),
        )
        for path, load, figure, earlier, value in pairs
    ]  # fmt: skip
    changes.sort(key=lambda change: VERDICTS.index(change.verdict))
    return Comparison(changes=tuple(changes), notes=(*_differences(before, now), *_missing(old, new)))


def _verdict(figure: Figure, before: Estimate, now: Estimate, num_errors: float) -> Verdict:
    """`num_errors`: standard errors of the change within which it may be chance."""
    if before.error is None or now.error is None:
        return "unknown"
    change = now.mean - before.mean
    tolerance = 0.0 if figure.unit == "%" else TOLERANCE * abs(before.mean)
    if abs(change) <= max(tolerance, num_errors * math.hypot(before.error, now.error)):
        return "no difference"
    return "better" if (change > 0) == figure.is_higher_better else "worse"


def _differences(before: BenchFile, now: BenchFile) -> list[str]:
    """Conditions that may explain a difference."""
    notes = []
    for name in ("hardware", "versions", "servers", "settings"):
        earlier, later = getattr(before, name), getattr(now, name)
        notes += [
            f"{name}, {key}: {earlier.get(key, 'none')} in the baseline, {later.get(key, 'none')} here"
            for key in dict.fromkeys((*earlier, *later))
            if earlier.get(key) != later.get(key) and key != "seed"  # random by default
        ]
    for file, which in ((before, "The baseline"), (now, "This run")):
        if len({run.repeat for run in file.runs}) < 2:
            notes.append(f"{which} has one repeat: its intervals do not know how much runs differ.")
        notes += [f"{which} ended early."] * (not file.is_complete)
    return notes


def _missing(
    old: Mapping[tuple[str, Load], Mapping[Figure, Estimate]],
    new: Mapping[tuple[str, Load], Mapping[Figure, Estimate]],
) -> list[str]:
    notes = []
    for (here, there), which in (((new, old), "Not in the baseline"), ((old, new), "Only in the baseline")):
        labels = [f"{path} {load.label}" for path, load in here if (path, load) not in there]
        notes += [f"{which}: {', '.join(labels)}"] * bool(labels)
        for key in here.keys() & there.keys():
            names = [figure.name for figure in here[key] if figure not in there[key]]
            notes += [f"{which}, {key[0]} {key[1].label}: {', '.join(names)}"] * bool(names)
    return notes
