"""Times engines of several backends alternately, for `mingc export --backend auto`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from mingc.artifacts.spec import GraphSpec, join_path
from mingc.host.description import processor_name
from mingc.host.machine import gpu
from mingc.runtime.engines.backends import load_engine
from mingc.runtime.engines.base import Engine
from mingc.runtime.engines.cuda_graphs import GraphPool
from mingc.runtime.engines.stage_loader import opened_weights

_WARM_UPS = 1
_LEAST, _MOST = 3, 21  # runs of an engine at one size
_SECONDS = 0.1  # for all runs of an engine at one size, as long as there are `_LEAST`


def time_engines(
    engines: Sequence[tuple[str, Path]],
    spec: GraphSpec,
    weights: Sequence[Path],
    calls: Sequence[Mapping[str, torch.Tensor]],
    device: str,
) -> tuple[str, list[list[list[float]]]]:
    """Seconds of every run, by call and engine, and the name of the device.

    Every round runs each engine once, in varying order, so that a change of the machine's load affects all of them.
    CUDA engines are captured, as a server runs them.

    Args:
        engines: pairs of backend and file.
        weights: the weights files, of which the first layer instance is used.
        calls: inputs and state by name.
    """
    place = torch.device(device)
    with opened_weights(weights) as files:
        stored = {name: file.get_tensor(name) for name, file in files.items()}
    start = join_path(spec.layer_instances[0], "")
    own = {name[len(start) :]: value.to(place) for name, value in stored.items() if name.startswith(start)}
    loaded = []
    for backend, path in engines:
        engine = load_engine(backend, path, place)
        engine.bind(own)
        loaded.append(engine)
    pool = GraphPool(place) if place.type == "cuda" else None
    samples = []
    for tensors in calls:
        given = [tensors[each.name].to(place) for each in (*spec.inputs, *spec.state)]
        arguments = [*given, *(own[name] for name in spec.weights)]
        with torch.inference_mode():
            runs = [_runner(engine, arguments, pool) for engine in loaded]
            samples.append(_in_turns(runs, place))
    return gpu(place).name if place.type == "cuda" else processor_name(), samples


def _runner(engine: Engine, arguments: list[torch.Tensor], pool: GraphPool | None) -> Callable[[], object]:
    def run() -> tuple[torch.Tensor, ...]:
        return tuple(engine.run(arguments))

    if pool is None or not engine.is_capturable:
        return run
    try:
        return pool.capture(run, "trial")[0].replay
    except RuntimeError:
        # The engine synchronizes, so a server runs it without a graph as well. Full memory raises WorkerError.
        return run


def _in_turns(runs: Sequence[Callable[[], object]], place: torch.device) -> list[list[float]]:
    slowest = 0.0
    for run in runs:
        for _ in range(_WARM_UPS):
            seconds = _seconds(run, place)
        slowest = max(slowest, seconds)
    count = max(_LEAST, min(_MOST, int(_SECONDS / max(slowest, 1e-9))))
    samples: list[list[float]] = [[] for _ in runs]
    for turn in range(count):
        for offset in range(len(runs)):
            index = (turn + offset) % len(runs)
            samples[index].append(_seconds(runs[index], place))
    return samples


def _seconds(run: Callable[[], object], place: torch.device) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    started = time.perf_counter()
    run()
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter() - started
