"""`--backend auto`: choose among the engines that several backends built of one graph, by their times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mingc.artifacts.manifest import BackendRefusal, BackendTrial, EngineRecord, EngineTiming, GraphRecord


def size_order(engine: EngineRecord) -> tuple[int, ...]:
    """Key that sorts engines by size."""
    return tuple((engine.dims or {}).values())


def distinct_sizes(engines: Iterable[EngineRecord]) -> list[dict[str, int] | None]:
    """The sizes that engines are compiled for, each once, in the order of the engines."""
    found: list[dict[str, int] | None] = []
    for engine in engines:
        if engine.dims not in found:
            found.append(engine.dims)
    return found


def choose_fastest(
    records: Sequence[GraphRecord],
    timings: Sequence[EngineTiming],
    *,
    device: str,
    refused: Sequence[BackendRefusal] = (),
) -> GraphRecord:
    """The record of a graph with the fastest engine of each size, the worst parity of these, and the trial.

    `records` has one record per backend, the preferred backend first; engines of `refused` backends are left out. The
    speed of an engine for one size is its median; for an engine of all sizes it is the geometric mean of its medians,
    which weighs every size equally. Among equally fast engines the first is kept.
    """
    left_out = {each.backend for each in refused}
    parity = {record.engines[0].backend: record.parity for record in records}
    tried = [engine for record in records for engine in record.engines if engine.backend not in left_out]
    kept = []
    for dims in distinct_sizes(sorted(tried, key=size_order)):
        engines = [each for each in tried if each.dims == dims]
        kept.append(
            min(engines, key=lambda each: _mean_us(timings, each.backend, dims or {}))
            if timings
            else engines[0]
        )
    return replace(
        records[0],
        engines=tuple(kept),
        parity=max((parity[each.backend] for each in kept), key=lambda each: each.compiled),
        trial=BackendTrial(device=device, timings=tuple(timings), refused=tuple(refused)),
    )


def _mean_us(timings: Sequence[EngineTiming], backend: str, dims: Mapping[str, int]) -> float:
    """Geometric mean of the medians of `backend` at sizes that agree with `dims`."""
    medians = [
        each.median_us
        for each in timings
        if each.backend == backend and all(each.dims[name] == size for name, size in dims.items())
    ]
    return math.exp(sum(map(math.log, medians)) / len(medians))
