"""Compares the figures of a probe with those that an earlier one wrote. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mingc.artifacts.codec import decode
from mingc.errors import ConfigError, ManifestError
from mingc.runtime.probe_report import EngineFigures, ProbeReport, Regression


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Engines by title. Those that only one side has are told, they are no regression."""

    regressions: tuple[Regression, ...] = ()
    only_here: tuple[str, ...] = ()
    only_in_baseline: tuple[str, ...] = ()


def read_baseline(path: Path) -> ProbeReport:
    """The report that `mingc probe --json` wrote to `path`. Raises: ConfigError."""
    try:
        return decode(ProbeReport, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ManifestError) as error:
        raise ConfigError(
            f"{path} is no baseline: {error}",
            where="--against",
            fix=f"write one: mingc probe ARTIFACT --json > {path}",
        ) from error


def compare(
    baseline: Sequence[EngineFigures], rows: Sequence[EngineFigures], *, tolerance: float
) -> Comparison:
    """Every engine of `rows` whose median exceeds the baseline's by more than the share `tolerance`."""
    before = {each.title: each.latency.median_ms for each in baseline}
    here = {each.title: each.latency.median_ms for each in rows}
    return Comparison(
        regressions=tuple(
            Regression(
                engine=name,
                baseline_ms=before[name],
                median_ms=median,
                slower_by=median / before[name] - 1,
            )
            for name, median in here.items()
            if name in before and median > before[name] * (1 + tolerance)
        ),
        only_here=tuple(name for name in here if name not in before),
        only_in_baseline=tuple(name for name in before if name not in here),
    )
