"""`--backend auto`: time the engines that several backends built of one graph, and keep the fastest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from mingc.artifacts.manifest import BackendRefusal, BackendTrial, EngineRecord, EngineTiming, GraphRecord
from mingc.artifacts.spec import GraphSpec
from mingc.export.process_pool import gives_memory_back
from mingc.export.recipe import stage_options
from mingc.export.tasks.graph_task import GraphTask, find_graph, library_errors
from mingc.export.weights.loading import weights_files


class Timer(Protocol):
    """Times engines of several backends alternately; the command line passes one.

    Returns the name of the device, and the seconds of every run for each call and engine.
    """

    def __call__(
        self,
        engines: Sequence[tuple[str, Path]],
        spec: GraphSpec,
        weights: Sequence[Path],
        calls: Sequence[Mapping[str, torch.Tensor]],
        device: str,
    ) -> tuple[str, list[list[list[float]]]]: ...


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


@gives_memory_back()
def time_graph(
    task: GraphTask, records: Sequence[GraphRecord], timer: Timer
) -> tuple[str, tuple[EngineTiming, ...]]:
    """Time the engines of a graph, one record per backend, alternately at each size. Nothing else may run.

    Returns the name of the device and the timings.

    Raises: CompileError, ArtifactError.
    """
    _, _, plan = find_graph(task)
    device_kind = stage_options(task.recipe).device
    spec, built = records[0].spec, [engine for record in records for engine in record.engines]
    device, timings = "", []
    for dims in distinct_sizes(built):
        engines = [each for each in built if each.dims == dims]
        # Dims without buckets have the sizes at which the golden is taken.
        sizes = [{**plan.check_dims, **each} for each in (spec.bucket_sizes() if dims is None else [dims])]
        backends = " or ".join(dict.fromkeys(each.backend for each in engines))
        with library_errors(f"the engine of {backends} does not run", task.name):
            device, samples = timer(
                [(each.backend, task.folder / each.file) for each in engines],
                spec,
                weights_files(task.folder / task.weights[0]),
                [plan.example(each, torch.Generator().manual_seed(1)) for each in sizes],
                device_kind,
            )
        timings += [
            EngineTiming(
                backend=engine.backend,
                dims=size,
                median_us=round(1e6 * statistics.median(seconds), 1),
                calls=len(seconds),
            )
            for size, of_size in zip(sizes, samples, strict=True)
            for engine, seconds in zip(engines, of_size, strict=True)
        ]
    return device, tuple(timings)


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
