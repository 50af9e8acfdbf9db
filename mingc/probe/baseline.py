"""Compares the figures of a probe with a baseline that an earlier probe wrote. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mingc.artifacts.codec import decode
from mingc.errors import ConfigError, ManifestError
from mingc.probe.report import EngineFigures, ProbeReport, Regression

_SHOWN = 4  # engines that an error names


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Result of a comparison; engines by title. Engines that only one side has are listed, not failed."""

    regressions: tuple[Regression, ...] = ()
    only_here: tuple[str, ...] = ()
    only_in_baseline: tuple[str, ...] = ()


def read_baseline(path: Path) -> ProbeReport:
    """Read the report that `mingc probe --json` wrote to `path`.

    Raises: ConfigError when the file is no such report, or has no engine with valid times.
    """
    try:
        report = decode(ProbeReport, json.loads(path.read_text(encoding="utf-8")))
        _check(report.engines)
    except (OSError, ValueError, OverflowError, RecursionError, ManifestError) as error:
        why = f"{error.where}: {error.message}" if isinstance(error, ManifestError) else error
        raise ConfigError(
            f"{path} is not a baseline: {why}",
            where="--baseline",
            fix=f"write one: mingc probe ARTIFACT --json > {path}",
        ) from error
    return report


def _check(engines: Sequence[EngineFigures]) -> None:
    """Raises: ValueError without engines, with an engine twice, or with a time that is not positive."""
    if not engines:
        raise ValueError("it contains no engine")
    seen = set()
    for each in engines:
        if each.title in seen:
            raise ValueError(f"it contains {each.title} twice")
        seen.add(each.title)
        for name in ("min_ms", "median_ms"):
            if not (value := getattr(each.latency, name)) > 0:
                raise ValueError(f"{each.title} has a {name.removesuffix('_ms')} of {value} ms")


def check_common(baseline: Sequence[EngineFigures], titles: Sequence[str]) -> None:
    """Raises: ConfigError when the baseline has none of the engines `titles`."""
    before = [each.title for each in baseline]
    if not {*before} & {*titles}:
        raise ConfigError(
            f"the baseline has none of the engines to be timed ({_some(titles)}): it has {_some(before)}",
            where="--baseline",
            fix="choose --engine, --batch and --context as for the baseline",
        )


def _some(titles: Sequence[str]) -> str:
    return ", ".join(titles[:_SHOWN]) + (", …" if len(titles) > _SHOWN else "")


def differences(baseline: ProbeReport, here: ProbeReport) -> tuple[str, ...]:
    """Notes on conditions that changed since the baseline was measured and may explain a difference."""
    pairs = {
        "model": (baseline.model, here.model),
        "dtype": (baseline.dtype, here.dtype),
        "torch": (baseline.torch, here.torch),
        "device": (baseline.peak_rates.device, here.peak_rates.device),
    }
    if baseline.ready_s is not None and here.ready_s is not None:  # one start: noted, but no regression
        pairs["seconds of the cold start"] = (str(baseline.ready_s), str(here.ready_s))
    backends = {each.title: each.backend for each in baseline.engines if each.backend}
    for each in here.engines:
        if each.backend and each.title in backends:
            pairs[f"backend of {each.title}"] = (backends[each.title], each.backend)
    return tuple(
        f"{name} of the baseline: {before}, of this run: {now}"
        for name, (before, now) in pairs.items()
        if before != now
    )


def compare(
    baseline: Sequence[EngineFigures], rows: Sequence[EngineFigures], *, tolerance: float
) -> Comparison:
    """Find every engine of `rows` whose fastest call exceeds the baseline's by more than the fraction `tolerance`."""
    before = {each.title: each.latency for each in baseline}
    here = {each.title: each.latency for each in rows}
    return Comparison(
        regressions=tuple(
            Regression(
                engine=name,
                baseline_ms=before[name].min_ms,
                min_ms=now.min_ms,
                slower_by=now.min_ms / before[name].min_ms - 1,
                median_slower_by=now.median_ms / before[name].median_ms - 1,
            )
            for name, now in here.items()
            if name in before and now.min_ms > before[name].min_ms * (1 + tolerance)
        ),
        only_here=tuple(name for name in here if name not in before),
        only_in_baseline=tuple(name for name in before if name not in here),
    )
