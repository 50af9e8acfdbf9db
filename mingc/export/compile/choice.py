"""Choice among the engines that several backends built of one graph, by their times on the target device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mingc.artifacts.manifest import BackendRefusal, BackendTrial, EngineRecord, EngineTiming, GraphRecord


def join_backends(records: Sequence[GraphRecord]) -> GraphRecord:
    """One record of a graph of those that each have the engines of one backend, the default one first."""
    engines = [engine for record in records for engine in record.engines]
    parity = {record.engines[0].backend: record.parity for record in records}
    return replace(
        records[0],
        engines=tuple(sorted(engines, key=size_order)),
        backend_parity=parity if len(parity) > 1 else {},
    )


def size_order(engine: EngineRecord) -> tuple[int, ...]:
    """Key that sorts engines by size."""
    return tuple((engine.dims or {}).values())


def choose_fastest(
    record: GraphRecord,
    timings: Sequence[EngineTiming],
    *,
    device: str,
    refused: Sequence[BackendRefusal] = (),
    keep_all: bool = False,
) -> GraphRecord:
    """`record` with the fastest engine of each size, or with all of them, the fastest first, and with the trial.

    Engines of `refused` backends are left out. The speed of an engine for one size is its median; for an engine of all
    sizes it is the geometric mean of its medians, which weighs every size equally. Among equally fast ones the first is
    kept.
    """
    trial = BackendTrial(device=device, timings=tuple(timings), refused=tuple(refused))
    left_out = {each.backend for each in refused}
    tried = [each for each in record.engines if each.backend not in left_out]
    sizes: list[dict[str, int] | None] = []
    for engine in tried:
        if engine.dims not in sizes:
            sizes.append(engine.dims)
    ordered: list[list[EngineRecord]] = []
    for dims in sizes:
        engines = [each for each in tried if each.dims == dims]
        if timings:
            engines.sort(key=lambda each: _mean_us(timings, each.backend, dims or {}))
        ordered.append(engines)
    fastest = tuple(engines[0] for engines in ordered)
    kept = tuple(each for engines in ordered for each in engines) if keep_all else fastest
    chosen = replace(record, engines=kept, trial=trial)
    parity = {name: each for name, each in record.backend_parity.items() if name in chosen.backends}
    return replace(
        chosen,
        parity=max((record.parity_of(each.backend) for each in fastest), key=lambda each: each.compiled),
        backend_parity=parity if len(parity) > 1 else {},
    )


def _mean_us(timings: Sequence[EngineTiming], backend: str, dims: Mapping[str, int]) -> float:
    """Geometric mean of the medians of `backend` at sizes that agree with `dims`."""
    medians = [
        each.median_us
        for each in timings
        if each.backend == backend and all(each.dims[name] == size for name, size in dims.items())
    ]
    return math.exp(sum(map(math.log, medians)) / len(medians))
