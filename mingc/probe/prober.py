"""Times every engine of an artifact and compares it with roofline bounds of the machine.

Each figure is for a single engine on random data, without the copies, scheduling and sampling of a server.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mingc.artifacts.artifact import Artifact, check_fingerprint, open_artifact
from mingc.artifacts.codec import encode
from mingc.artifacts.manifest import EngineCost, EngineRecord, content_hash
from mingc.artifacts.spec import GraphSpec
from mingc.dtypes import torch_dtype
from mingc.errors import ArtifactError, ConfigError
from mingc.host.machine import current_host, gpu_target
from mingc.probe.baseline import Comparison, check_common, compare, differences
from mingc.probe.cold_start import ColdStart, measure_cold_start
from mingc.probe.environment import this_environment
from mingc.probe.inputs import ProbeCase, page_size, room
from mingc.probe.options import ProbeOptions, request_counts
from mingc.probe.patch_embed import check_patch_embed, compare_patch_embed
from mingc.probe.report import (
    EngineFigures,
    EnginePair,
    Latency,
    PatchEmbed,
    PeakRates,
    ProbeReport,
    above_the_roof,
    roofline_bound,
    title,
)
from mingc.probe.stopwatch import Stopwatch, percentile
from mingc.probe.transfers import measure_transfers
from mingc.runtime.engines.backends import check_loadable
from mingc.runtime.engines.cuda_graphs import GraphPool
from mingc.runtime.engines.stage_loader import LoadedStage, load_stage

_REPETITIONS = 200
_CPU_REPETITIONS = (3, 10)  # minimum, and maximum if they fit into _CPU_MS
_CPU_MS = 1000.0
_ENQUEUED = 10
_NOTES = {
    "cuda": "times are of CUDA graph replays with a cold device cache",
    "cpu": "times are wall-clock times of back-to-back calls: small engines have their weights in the cache, so their "
    "memory roof is the rate measured for as many bytes",
}


# Figures of an engine; its cost and the bytes of its inputs and outputs, if the export counted the cost.
_Row = tuple[EngineFigures, tuple[EngineCost, int] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """One engine at one set of sizes. `room` limits a request's tokens, held and new; infinity without state."""

    stage: str
    spec: GraphSpec
    engine: EngineRecord
    sizes: dict[str, int]
    room: float

    @property
    def name(self) -> str:
        return f"{self.stage}.{self.spec.name}"

    @property
    def new_tokens(self) -> int:
        return self.sizes.get("T", 1)

    def held(self, context: int) -> int:
        """Return how many of `context` tokens fit into a request beside the new ones."""
        return int(min(context, self.room - self.new_tokens))

    def title(self, context: int) -> str:
        """Title of the figures at `context`."""
        return title(self.name, self.sizes, self.held(context) if math.isfinite(self.room) else None)


def probe(
    path: Path,
    options: ProbeOptions,
    progress: Callable[[str], None] = lambda step: None,
    *,
    baseline: ProbeReport | None = None,
    command: str = "",
) -> ProbeReport:
    """Time the chosen engines of the artifact at `path`; `progress` is called with each step before it starts.

    `command` is noted in the report.

    Raises: ManifestError, IntegrityError, IncompatibleError; ConfigError when `options` name a missing engine or batch
    size, when `baseline` has none of the chosen engines, or when the artifact beside has none or is for other inputs.
    """
    artifact = open_artifact(path)
    sha256 = content_hash(encode(artifact.manifest))
    fingerprint = artifact.manifest.fingerprint
    check_fingerprint(fingerprint, current_host(fingerprint.device))
    check_loadable(artifact)
    targets = _choose(artifact, options)
    other = _open_beside(artifact, options.beside) if options.beside is not None else None
    other_targets = _common_targets(targets, other, options) if other is not None else {}
    if options.compare == "patch-embed":
        check_patch_embed(artifact)
    if baseline is not None:
        check_common(baseline.engines, [each.title(options.context) for each in targets])
    # The server starts first, because it needs the whole memory of the device.
    start = ColdStart()
    if options.has_cold_start:
        start = measure_cold_start(path, progress)
    transfers = measure_transfers(progress) if options.has_transfers else ()
    progress("peak rates")
    run = _Run(artifact, options, progress)
    beside_rows: list[_Row] = []
    with torch.inference_mode():
        rows = []
        for stage in dict.fromkeys(target.stage for target in targets):
            here = [each for each in targets if each.stage == stage]
            loaded, loaded_other = run.load(artifact, stage), None
            for target in here:
                rows.append(run.time(artifact, target, loaded))
                there = other_targets.get(target.title(options.context))
                if there is not None and other is not None:
                    loaded_other = loaded_other or run.load(other, stage)
                    beside_rows.append(run.time(other, there, loaded_other))
        patch_embed = run.patch_embed() if options.compare == "patch-embed" else ()
    figures, beside_figures = [each for each, _ in rows], [each for each, _ in beside_rows]
    # Measured again at the end: other work may have slowed the machine down at the start.
    peak_rates = run.peak_rates.faster(run.measure_peak_rates())
    roofline_bounds = [roofline_bound(each, *cost, peak_rates) for each, cost in rows if cost is not None]
    if (above := above_the_roof(roofline_bounds)) is not None:
        run.notes.append(above)
    uncounted = sorted({kernel for bound in roofline_bounds for kernel in bound.uncounted})
    if uncounted:
        run.notes.append(f"some roofline bounds are too low: no cost is counted for {', '.join(uncounted)}")
    paired = pairs(figures, beside_figures)
    if (same := same_backends(paired)) is not None:
        run.notes.append(same)
    comparison = Comparison()
    if baseline is not None:
        asked = [each for each in baseline.engines if options.choose(each.engine, each.sizes)]
        comparison = compare(asked, figures, tolerance=options.tolerance)
    report = ProbeReport(
        artifact=str(path),
        model=artifact.manifest.model,
        dtype=fingerprint.dtype,
        torch=torch.__version__,
        peak_rates=peak_rates,
        engines=tuple(figures),
        roofline_bounds=tuple(roofline_bounds),
        tolerance=options.tolerance if baseline is not None else None,
        regressions=comparison.regressions,
        only_here=comparison.only_here,
        only_in_baseline=comparison.only_in_baseline,
        patch_embed=patch_embed,
        artifact_sha256=sha256,
        command=command,
        environment=this_environment(),
        ready_s=start.phases[-1].until_s if start.phases else None,
        cold_start=start.phases,
        first_requests=start.first_requests,
        transfers=transfers,
        beside_artifact=str(options.beside) if options.beside is not None else None,
        beside=paired,
        beside_engines=tuple(beside_figures),
        notes=(*run.notes, *start.notes),
    )
    if baseline is None:
        return report
    return replace(report, notes=(*report.notes, *differences(baseline, report)))


def pairs(here: Sequence[EngineFigures], there: Sequence[EngineFigures]) -> tuple[EnginePair, ...]:
    """Engines that exist on both sides, by title, in the order of `here`."""
    others = {each.title: each for each in there}
    return tuple(
        EnginePair(
            engine=each.title,
            backend=each.backend,
            median_ms=each.latency.median_ms,
            other_backend=other.backend,
            other_median_ms=other.latency.median_ms,
            ratio=other.latency.median_ms / each.latency.median_ms,
        )
        for each in here
        if (other := others.get(each.title)) is not None
    )


def same_backends(pairs: Sequence[EnginePair]) -> str | None:
    """Note pairs with the same backend, which do not compare backends; None if there is none."""
    same = [pair for pair in pairs if pair.backend == pair.other_backend]
    if not same:
        return None
    return (
        f"--beside: {len(same)} of {len(pairs)} pairs have engines of "
        f"{' and '.join(dict.fromkeys(pair.backend for pair in same))} on both sides, {same[0].engine} the first; "
        "export one of the artifacts with another --backend"
    )


def _open_beside(artifact: Artifact, path: Path) -> Artifact:
    """Open the artifact of `--beside`.

    Raises: ConfigError when it is for another device, model or dtype; ArtifactError when its engines cannot be loaded.
    """
    other = open_artifact(path)
    recorded, here = other.manifest.fingerprint, artifact.manifest.fingerprint
    check_fingerprint(recorded, current_host(recorded.device))
    before = (artifact.manifest.model, here.device, here.dtype, here.world_size)
    after = (other.manifest.model, recorded.device, recorded.dtype, recorded.world_size)
    if before != after:
        names = ("model", "device", "dtype", "ranks")
        differing = [f"{name} {a} and {b}" for name, a, b in zip(names, before, after, strict=True) if a != b]
        raise ConfigError(
            f"the artifacts cannot be compared: {', '.join(differing)}",
            where="--beside",
            fix="pass an artifact that differs in its backend only",
        )
    try:
        check_loadable(other)
    except ArtifactError as error:
        raise ArtifactError(error.message, where="--beside", fix=error.fix) from error
    return other


def _common_targets(targets: Sequence[_Target], other: Artifact, options: ProbeOptions) -> dict[str, _Target]:
    """Targets of `other` by title. Raises: ConfigError when none of `targets` is among them."""
    found = {each.title(options.context): each for each in _targets(other)}
    if not {*found} & {each.title(options.context) for each in targets}:
        raise ConfigError(
            f"{other.root} has none of the engines to be timed",
            where="--beside",
            fix="pass an artifact that was exported with the same batch sizes, or choose other engines with --engine",
        )
    return found


def _choose(artifact: Artifact, options: ProbeOptions) -> list[_Target]:
    """Choose targets by `options`. Raises: ConfigError for a name or batch size that the artifact lacks."""
    targets = list(_targets(artifact))
    known = sorted({each.stage for each in targets} | {each.name for each in targets})
    unknown = [name for name in options.engines or () if name not in known]
    if unknown:
        raise ConfigError(
            f"the artifact has no {', '.join(unknown)}", where="--engine", fix=f"it has {', '.join(known)}"
        )
    named = [each for each in targets if options.names(each.name)]
    chosen = [each for each in named if options.choose(each.name, each.sizes)]
    sizes = {size for each in named for size in request_counts(each.sizes)}
    absent = {*(options.batch_sizes or ())} - sizes if sizes else set()
    idle = {*(options.engines or ())} - {name for each in chosen for name in (each.stage, each.name)}
    if absent or idle:
        batches = ", ".join(map(str, sorted(absent or {*(options.batch_sizes or ())})))
        of = f" of {', '.join(sorted(idle or {*(options.engines or ())}))}" if options.engines else ""
        raise ConfigError(
            f"no engine for batch {batches}{of}",
            where="--batch",
            fix="leave --batch out to time all sizes",
        )
    return chosen


def _targets(artifact: Artifact) -> Iterator[_Target]:
    """Yield static engines at their size, and dynamic ones at every combination of buckets that fits a request.

    A dim without buckets has the size that the cost was counted at.
    """
    for stage, record in artifact.manifest.stages.items():
        for graph in record.graphs.values():
            for engine in graph.engines:
                counted = [each.dims for each in engine.cost] or graph.spec.bucket_sizes()
                for sizes in counted if engine.dims is None else [engine.dims]:
                    target = _Target(
                        stage=stage,
                        spec=graph.spec,
                        engine=engine,
                        sizes=sizes,
                        room=room(
                            graph.spec, sizes, page_size(encode(artifact.manifest.parameters.get(stage, {})))
                        ),
                    )
                    if target.room >= target.new_tokens:
                        yield target


class _Run:
    """State of one probe, shared by all engines."""

    def __init__(self, artifact: Artifact, options: ProbeOptions, progress: Callable[[str], None]) -> None:
        fingerprint = artifact.manifest.fingerprint
        self._artifact, self._options, self._progress = artifact, options, progress
        self._device = torch.device(fingerprint.device)
        self.notes = [_NOTES[fingerprint.device]]
        if self._device.type == "cuda":
            self.notes.append(gpu_target(self._device).describe())
        self._pool: GraphPool | None = None
        self._stopwatch = Stopwatch(self._device)
        self.peak_rates = self.measure_peak_rates()

    def measure_peak_rates(self) -> PeakRates:
        return self._stopwatch.peak_rates(torch_dtype(self._artifact.manifest.fingerprint.dtype))

    def load(self, artifact: Artifact, name: str) -> LoadedStage:
        """Load the engines of a stage, each with its first instance of weights."""
        manifest = artifact.manifest
        ranks = manifest.fingerprint.world_size
        if manifest.stages[name].is_sharded and ranks > 1:
            note = f"{name}: rank 0 of {ranks}, without all-reduces"
            self.notes += [] if note in self.notes else [note]
        self._pool = GraphPool(self._device) if self._device.type == "cuda" else None
        return load_stage(artifact, name, self._device, only_first=True)

    def patch_embed(self) -> tuple[PatchEmbed, ...]:
        """Both forms of the vision encoder's patch embedding."""
        return compare_patch_embed(self._artifact, self._stopwatch, self._progress, self.notes)

    def time(self, artifact: Artifact, target: _Target, loaded: LoadedStage) -> _Row:
        """Time `target`, an engine of `loaded`."""
        self._progress(f"{title(target.name, target.sizes)} ({target.engine.backend})")
        case = ProbeCase(
            stage=target.stage,
            spec=target.spec,
            sizes=target.sizes,
            context=target.held(self._options.context),
            parameters=encode(artifact.manifest.parameters.get(target.stage, {})),
        )
        tensors, graph = case.make(self._device), loaded[target.spec.name]

        def run() -> tuple[torch.Tensor, ...]:
            return tuple(graph.run(**tensors).values())

        pool = self._pool if graph.is_capturable else None
        latency = self._latency(run, title(target.name, target.sizes), pool)
        figures = EngineFigures(
            engine=target.name,
            sizes=target.sizes,
            context_tokens=case.context if math.isfinite(target.room) else None,
            layer_instances=len(target.spec.layer_instances),
            backend=target.engine.backend,
            latency=latency,
        )
        cost = next((each for each in target.engine.cost if each.dims == target.sizes), None)
        return figures, None if cost is None else (cost, case.io_bytes())

    def _latency(
        self, run: Callable[[], tuple[torch.Tensor, ...]], name: str, pool: GraphPool | None
    ) -> Latency:
        stopwatch = self._stopwatch
        count = self._options.repetitions or self._repetitions(run)
        enqueue = stopwatch.enqueue_ms(run, _ENQUEUED)
        replay, uncaptured, warm = None, None, None
        if pool is not None:
            uncaptured = statistics.median(stopwatch.samples_ms(run, _ENQUEUED, cold=True))
            replay = self._capture(run, name, pool)
        if replay is not None:
            warm = statistics.median(stopwatch.samples_ms(replay, count))
        samples = stopwatch.samples_ms(replay or run, count, cold=True)
        return Latency(
            median_ms=statistics.median(samples),
            p95_ms=percentile(samples, 0.95),
            p99_ms=percentile(samples, 0.99),
            min_ms=min(samples),
            repetitions=count,
            is_captured=replay is not None,
            warm_ms=warm,
            uncaptured_ms=uncaptured,
            enqueue_ms=enqueue,
        )

    def _repetitions(self, run: Callable[[], object]) -> int:
        if self._device.type == "cuda":
            return _REPETITIONS
        least, most = _CPU_REPETITIONS
        once_ms = min(self._stopwatch.samples_ms(run, 1))
        return min(most, max(least, int(_CPU_MS / once_ms)))

    def _capture(
        self, run: Callable[[], tuple[torch.Tensor, ...]], name: str, pool: GraphPool
    ) -> Callable[[], None] | None:
        """Capture `run` as a graph; None with a note when it synchronizes and cannot be captured."""
        try:
            graph, _ = pool.capture(run, name)
        except RuntimeError as error:
            self.notes.append(f"{name} runs without a CUDA graph: {str(error).splitlines()[0]}")
            return None
        return graph.replay
