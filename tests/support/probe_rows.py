"""Rows of a probe's report."""

from __future__ import annotations

from mingc.probe.report import Latency


def latency(fastest_ms: float, typical_ms: float) -> Latency:
    """Of an engine that runs on the CPU; the median and all percentiles are `typical_ms`."""
    return Latency(
        median_ms=typical_ms,
        p95_ms=typical_ms,
        p99_ms=typical_ms,
        min_ms=fastest_ms,
        repetitions=3,
        is_captured=False,
        warm_ms=None,
        uncaptured_ms=None,
        enqueue_ms=None,
    )
