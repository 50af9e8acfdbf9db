"""Summary of an artifact for `mingc bundle inspect`: stages, engines, weights, voices. Reads the manifest only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.engine_choice import default_engines, explain
from mingc.artifacts.manifest import Fingerprint, GraphRecord, Manifest, StageRecord, TunedKernel
from mingc.artifacts.target import KernelConfig
from mingc.artifacts.target_choice import needed_machine, target_views


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
    """A graph whose backends were tried at export, or that has engines of several.

    `runs` has the backends of the default engines, `also` those of the others, which `--engines` selects.
    """

    graph: str
    runs: tuple[str, ...]
    also: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSummary:
    """The engines for one target. A machine loads the first target that it can run: GPUs first, then in this order."""

    target: str
    needs: str
    backends: tuple[str, ...]
    engines: int
    engine_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactSummary:
    """The result of `mingc bundle inspect`. With several targets `stages` and what follows are of the first."""

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
    targets: tuple[TargetSummary, ...] = ()


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
            _backends(f"{node.name}.{name}", graph)
            for node in manifest.graph.nodes
            for name, graph in sorted(manifest.stages[node.name].graphs.items())
            if graph.trial is not None or len(graph.backends) > 1
        ),
        targets=tuple(map(_target, target_views(manifest))) if manifest.other_targets else (),
    )


def _target(view: Manifest) -> TargetSummary:
    records = [graph for stage in view.stages.values() for graph in stage.graphs.values()]
    engines = {engine.file: engine.backend for graph in records for engine in graph.engines}
    return TargetSummary(
        target=view.fingerprint.target,
        needs=needed_machine(view.fingerprint),
        backends=tuple(sorted({*engines.values()})),
        engines=len(engines),
        engine_bytes=sum(view.files[file].size_bytes for file in engines),
    )


def _backends(name: str, graph: GraphRecord) -> BackendSummary:
    runs = tuple(dict.fromkeys(engine.backend for engine in default_engines(graph)))
    also = tuple(backend for backend in graph.backends if backend not in runs)
    return BackendSummary(graph=name, runs=runs, also=also, reason=explain(graph))


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
        weight_bytes=sum(files[file].size_bytes for file in set(record.weights)),
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
