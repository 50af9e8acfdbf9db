"""Summary of an artifact for `mingc bundle inspect`: stages, engines, weights, voices. Reads the manifest only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.manifest import BackendTrial, EngineTiming, Fingerprint, StageRecord, TunedKernel
from mingc.artifacts.target import KernelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSummary:
    """One stage: run policy, graphs, number of engines, and bytes on disk (weights of all ranks)."""

    stage: str
    policy: str
    graphs: tuple[str, ...]
    backends: tuple[str, ...]
    engines: int
    engine_bytes: int
    weight_bytes: int
    worst_relative_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfigSummary:
    """One kernel of a stage that was timed at export: its problem and its configuration.

    `us` are microseconds of the selected configuration, `default_us` of the default one.
    """

    stage: str
    kernel: str
    tokens: int
    up: str
    down: str
    us: float
    default_us: float
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSummary:
    """The backends that `--backend auto` kept for a graph, and why."""

    graph: str
    runs: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactSummary:
    """The result of `mingc bundle inspect`."""

    path: Path
    model: str
    schema: int
    fingerprint: Fingerprint
    files: int
    total_bytes: int
    voices: tuple[str, ...]
    notes: tuple[str, ...]
    stages: tuple[StageSummary, ...]
    edges: tuple[str, ...]
    kernel_configs: tuple[KernelConfigSummary, ...]
    backends: tuple[BackendSummary, ...] = ()


def summarize(artifact: Artifact) -> ArtifactSummary:
    """The summary of an opened artifact."""
    manifest = artifact.manifest
    return ArtifactSummary(
        path=artifact.root,
        model=manifest.model,
        schema=manifest.schema,
        fingerprint=manifest.fingerprint,
        files=len(manifest.files),
        total_bytes=sum(record.size_bytes for record in manifest.files.values()),
        voices=tuple(voice.name for voice in manifest.voices),
        notes=manifest.notes,
        stages=tuple(
            _stage(artifact, node.name, manifest.stages[node.name]) for node in manifest.graph.nodes
        ),
        edges=tuple(map(str, manifest.graph.edges)),
        kernel_configs=tuple(
            _kernel_config(name, kernel)
            for name, record in sorted(manifest.stages.items())
            for kernel in record.kernel_configs
        ),
        backends=tuple(
            BackendSummary(
                graph=f"{node.name}.{name}", runs=graph.backends, reason=explain_trial(graph.trial)
            )
            for node in manifest.graph.nodes
            for name, graph in sorted(manifest.stages[node.name].graphs.items())
            if graph.trial is not None
        ),
    )


def explain_trial(trial: BackendTrial) -> str:
    """Why `--backend auto` kept the engines of a graph, in one line."""
    lines = []
    if trial.timings:
        sizes = len({_key(each.dims) for each in trial.timings})
        of = f"{sizes} sizes" if sizes > 1 else "one size"
        ratios = [f"{backend} {ratio:.2f}" for backend, ratio in _time_ratios(trial.timings).items()]
        lines.append(f"time relative to the fastest, {of}, {trial.device}: {', '.join(ratios)}")
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


def _key(dims: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(dims.items()))


def _stage(artifact: Artifact, name: str, record: StageRecord) -> StageSummary:
    files = artifact.manifest.files
    engines = {engine.file: engine for graph in record.graphs.values() for engine in graph.engines}
    return StageSummary(
        stage=name,
        policy=artifact.manifest.graph.policy(name),
        graphs=tuple(sorted(record.graphs)),
        backends=tuple(sorted({engine.backend for engine in engines.values()})),
        engines=len(engines),
        engine_bytes=sum(files[file].size_bytes for file in engines),
        weight_bytes=sum(files[file].size_bytes for file in set(record.weights_files)),
        worst_relative_error=max((graph.parity.compiled for graph in record.graphs.values()), default=0.0),
    )


def _kernel_config(stage: str, kernel: TunedKernel) -> KernelConfigSummary:
    rows = f"{kernel.block_m} rows " if kernel.block_m else ""
    return KernelConfigSummary(
        stage=stage,
        kernel=kernel.kernel,
        tokens=kernel.tokens,
        up=rows + _gemm(kernel.up),
        down=rows + _gemm(kernel.down),
        us=kernel.us,
        default_us=kernel.default_us,
        device=kernel.device,
    )


def _gemm(config: KernelConfig) -> str:
    """block_n x block_k, warps, stages, and tiles a program if more than one: `64x256 w4 s3 x4`."""
    tiles = f" x{config.tiles_per_program}" if config.tiles_per_program > 1 else ""
    return f"{config.block_n}x{config.block_k} w{config.num_warps} s{config.num_stages}{tiles}"
