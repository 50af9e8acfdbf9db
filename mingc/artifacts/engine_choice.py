"""Choice of the engines to run from an artifact with engines of several backends. No torch.

The default is the first engine of each size; `STAGE=BACKEND` selects another backend for a stage. There is no fallback
to other engines than the requested ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mingc.artifacts.manifest import EngineRecord, EngineTiming, GraphRecord, Manifest
from mingc.errors import ConfigError

OPTION = "--engines"


def parse_choice(words: Sequence[str]) -> dict[str, str]:
    """`STAGE=BACKEND` words as backend by stage. Raises: ConfigError for another form, or a stage named twice."""
    chosen: dict[str, str] = {}
    problems = []
    for word in words:
        stage, equals, backend = (each.strip() for each in word.partition("="))
        if not (stage and equals and backend) or "=" in backend:
            problems.append(f"{OPTION} {word}: not of the form STAGE=BACKEND")
        elif stage in chosen:
            problems.append(f"{OPTION} {word}: names stage {stage} twice")
        else:
            chosen[stage] = backend
    if problems:
        raise ConfigError("\n".join(problems), where=OPTION, fix="write STAGE=BACKEND, such as cfm=onnx")
    return chosen


def choose_engines(manifest: Manifest, chosen: Mapping[str, str]) -> Manifest:
    """`manifest` with one engine of each size: those of the backends `chosen` by stage, else the default ones.

    Raises: ConfigError when the artifact lacks a stage of `chosen`, or engines of its backend.
    """
    unknown = sorted({*chosen} - {*manifest.stages})
    if unknown:
        held = ", ".join(sorted(manifest.stages))
        raise ConfigError(f"the artifact has no stage {unknown[0]}", where=OPTION, fix=f"it has {held}")
    stages = {}
    for name, stage in manifest.stages.items():
        graphs = {}
        for each, graph in stage.graphs.items():
            engines = default_engines(graph)
            if name in chosen:
                engines = _engines_of(graph, chosen[name], f"{name}.{each}", engines)
            graphs[each] = _with_engines(graph, engines)
        stages[name] = replace(stage, graphs=graphs)
    return replace(manifest, stages=stages)


def default_engines(graph: GraphRecord) -> tuple[EngineRecord, ...]:
    """The engines of a graph that run by default: the first of each size.

    If the first one takes every size, it is the only one.
    """
    first = graph.engines[0]
    if first.dims is None:
        return (first,)
    found: dict[tuple[tuple[str, int], ...], EngineRecord] = {}
    for engine in graph.engines:
        if engine.dims is not None:
            found.setdefault(_key(engine.dims), engine)
    return tuple(found.values())


def backend_views(graph: GraphRecord) -> list[GraphRecord]:
    """The graph with its default engines, then once for each backend that has other engines."""
    default = default_engines(graph)
    views = [_with_engines(graph, default)]
    for backend in graph.backends:
        own = tuple(each for each in graph.engines if each.backend == backend)
        if any(each not in default for each in own):
            views.append(_with_engines(graph, own))
    return views


def explain(graph: GraphRecord) -> str:
    """Why a graph has its engines, in one line; empty when the only backend was requested."""
    trial = graph.trial
    if trial is None:
        return "asked for by name" if len(graph.backends) > 1 else ""
    parts = [f"{backend} {ratio:.2f}" for backend, ratio in _time_ratios(trial.timings).items()]
    sizes = len({_key(each.dims) for each in trial.timings})
    lines = []
    if parts:
        of = f"{sizes} sizes" if sizes > 1 else "one size"
        lines.append(f"time relative to the fastest, {of}, {trial.device}: {', '.join(parts)}")
    lines += [f"{each.backend} refused: {' '.join(each.reason.split())}" for each in trial.refused]
    return "; ".join(lines) or "no other backend is installed"


def _time_ratios(timings: Sequence[EngineTiming]) -> dict[str, float]:
    """Geometric mean over sizes of each backend's median relative to the fastest median at that size."""
    fastest: dict[tuple[tuple[str, int], ...], float] = {}
    for each in timings:
        fastest[_key(each.dims)] = min(each.median_us, fastest.get(_key(each.dims), each.median_us))
    logs: dict[str, list[float]] = {}
    for each in timings:
        logs.setdefault(each.backend, []).append(math.log(each.median_us / fastest[_key(each.dims)]))
    return {backend: math.exp(sum(values) / len(values)) for backend, values in logs.items()}


def used_backends(manifest: Manifest) -> dict[str, list[str]]:
    """The stages that have engines of each backend."""
    used: dict[str, list[str]] = {}
    for name, stage in manifest.stages.items():
        for backend in dict.fromkeys(each for graph in stage.graphs.values() for each in graph.backends):
            used.setdefault(backend, []).append(name)
    return used


def _engines_of(
    graph: GraphRecord, backend: str, where: str, default: Iterable[EngineRecord]
) -> tuple[EngineRecord, ...]:
    """Every engine of `backend`. Raises: ConfigError when they do not take all sizes that the `default` ones take."""
    own = tuple(each for each in graph.engines if each.backend == backend)
    if not own:
        reasons = (
            [] if graph.trial is None else [each for each in graph.trial.refused if each.backend == backend]
        )
        refused = f": it was refused at export, {reasons[0].reason}" if reasons else ""
        raise ConfigError(
            f"the artifact has no engine of {backend} for {where}{refused}",
            where=OPTION,
            fix=f"it has {' and '.join(graph.backends)}; or export again with --backend "
            f"{'+'.join((*graph.backends, backend))}:{where.partition('.')[0]}",
        )
    whole = next((each for each in own if each.dims is None), None)
    if whole is not None:
        return (whole,)
    sizes = {_key(each.dims or {}) for each in own}
    static = [each.dims for each in default if each.dims is not None]
    absent = [each for each in static or graph.spec.bucket_sizes() if _key(each) not in sizes]
    if absent:
        raise ConfigError(
            f"the artifact has engines of {backend} for {where} only for some sizes, not for "
            f"{', '.join(f'{name} {size}' for name, size in absent[0].items())}",
            where=OPTION,
            fix=f"leave {where.partition('.')[0]} out of {OPTION}, or export again with --backend {backend}",
        )
    return own


def _with_engines(graph: GraphRecord, engines: tuple[EngineRecord, ...]) -> GraphRecord:
    """The graph with only these engines, and the worst parity of their backends."""
    backends = dict.fromkeys(each.backend for each in engines)
    parity = max((graph.parity_of(each) for each in backends), key=lambda each: each.compiled)
    return replace(graph, engines=engines, parity=parity, backend_parity={})


def _key(dims: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(dims.items()))
