"""Times every engine of an artifact and holds it against what the machine could do at most.

A figure is of one engine alone, on random data. What runs around engines (copies, scheduling, sampling) is not in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mingc.artifacts.artifact import Artifact, check_fingerprint, open_artifact
from mingc.artifacts.manifest import EngineRecord
from mingc.artifacts.spec import GraphSpec
from mingc.dtypes import torch_dtype
from mingc.errors import ConfigError
from mingc.host import current_host, gpu_target
from mingc.probe.baseline import Comparison, check_common, compare, differences
from mingc.probe.inputs import ProbeCase, page_size, room
from mingc.probe.patch_embed import check_patch_embed, compare_patch_embed
from mingc.probe.report import (
    EngineFigures,
    Latency,
    PatchEmbed,
    ProbeReport,
    RooflineBound,
    floor_of,
    title,
)
from mingc.probe.stopwatch import Stopwatch, percentile
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.cuda_graphs import GraphPool
from mingc.runtime.engines.stage_loader import load_stage

_BATCH_DIMS = ("B", "N")  # dims that count requests, clips or rows
_REPETITIONS = 200
_CPU_REPETITIONS = (3, 10)  # as many as fit into the next line's time
_CPU_MS = 1000.0
_ENQUEUED = 10
_NOTES = {
    "cuda": "times are of CUDA graph replays that find neither weights nor inputs in the device's cache",
    "cpu": "times are of calls back to back by the wall clock: small engines find their weights in the cache",
}


_Row = tuple[EngineFigures, RooflineBound | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOptions:
    """What to time.

    Attributes:
        engines: stages (`cfm`) or graphs (`cfm.sample`); None takes all.
        batch_sizes: of dims that count requests; None takes every bucket.
        context: tokens every request already holds, or as many as its slot or its pages take.
        repetitions: timed calls of an engine; None chooses by the device.
        tolerance: share by which a median may exceed the baseline's.
        compare: `patch-embed` times its two forms as well; `engines` must name its stage then.
    """

    engines: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    context: int = 256
    repetitions: int | None = None
    tolerance: float = 0.1
    compare: str | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.engines == ():
            problems.append("--engine: names nothing")
        if self.batch_sizes == ():
            problems.append("--batch: names nothing")
        if self.context < 0:
            problems.append(f"--context {self.context}: must not be below 0")
        if self.repetitions is not None and self.repetitions < 1:
            problems.append(f"--repetitions {self.repetitions}: must be at least 1")
        if not (math.isfinite(self.tolerance) and self.tolerance >= 0):
            problems.append(f"--tolerance {self.tolerance}: must be a number not below 0")
        if self.compare == "patch-embed" and self.engines and not self._names_patch_embed():
            problems.append("--compare patch-embed: --engine leaves its stage out, vision_encoder")
        if problems:
            raise ConfigError("\n".join(problems), where="mingc probe", fix="see mingc probe --help")

    def choose(self, engine: str, sizes: Mapping[str, int]) -> bool:
        """Whether `stage.graph` at `sizes` is to be timed."""
        batch = _batch(sizes)
        return self.names(engine) and (
            self.batch_sizes is None or not batch or bool({*batch} & {*self.batch_sizes})
        )

    def _names_patch_embed(self) -> bool:
        return any(name.partition(".")[0] == "vision_encoder" for name in self.engines or ())

    def names(self, engine: str) -> bool:
        """Whether `stage.graph` is to be timed at any sizes."""
        return self.engines is None or bool({engine, engine.partition(".")[0]} & {*self.engines})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """One engine at one set of sizes. `room` is for tokens of a request, held and new; infinity without state."""

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
        """Of `context` tokens those that a request has room for beside the new ones."""
        return int(min(context, self.room - self.new_tokens))

    def title(self, context: int) -> str:
        """As the figures at `context` are titled."""
        return title(self.name, self.sizes, self.held(context) if math.isfinite(self.room) else None)


def probe(
    path: Path,
    options: ProbeOptions,
    told: Callable[[str], None] = lambda step: None,
    *,
    baseline: ProbeReport | None = None,
) -> ProbeReport:
    """Time the engines of the artifact at `path` that `options` choose. `told` hears what is timed next.

    Raises: ManifestError, IntegrityError, IncompatibleError; ConfigError when the options choose what is not there,
    or nothing that `baseline` has.
    """
    artifact = open_artifact(path)
    fingerprint = artifact.manifest.fingerprint
    check_fingerprint(fingerprint, current_host(fingerprint.device))
    targets = _choose(artifact, options)
    if options.compare == "patch-embed":
        check_patch_embed(artifact)
    if baseline is not None:
        check_common(baseline.engines, [each.title(options.context) for each in targets])
    told("ceilings")
    run = _Run(artifact, options, told)
    with torch.inference_mode():
        rows = [
            row
            for stage in dict.fromkeys(target.stage for target in targets)
            for row in run.stage(stage, [each for each in targets if each.stage == stage])
        ]
        patch_embed = run.patch_embed() if options.compare == "patch-embed" else ()
    figures = [each for each, _ in rows]
    floors = [floor for _, floor in rows if floor is not None]
    uncounted = sorted({kernel for floor in floors for kernel in floor.uncounted})
    if uncounted:
        run.notes.append(f"some floors are too low: nothing counts {', '.join(uncounted)}")
    comparison = Comparison()
    if baseline is not None:
        asked = [each for each in baseline.engines if options.choose(each.engine, each.sizes)]
        comparison = compare(asked, figures, tolerance=options.tolerance)
    report = ProbeReport(
        artifact=str(path),
        model=artifact.manifest.model,
        dtype=fingerprint.dtype,
        torch=torch.__version__,
        ceilings=run.ceilings,
        engines=tuple(figures),
        floors=tuple(floors),
        tolerance=options.tolerance if baseline is not None else None,
        regressions=comparison.regressions,
        only_here=comparison.only_here,
        only_in_baseline=comparison.only_in_baseline,
        patch_embed=patch_embed,
        notes=tuple(run.notes),
    )
    if baseline is None:
        return report
    return replace(report, notes=(*report.notes, *differences(baseline, report)))


def _choose(artifact: Artifact, options: ProbeOptions) -> list[_Target]:
    """The targets that the options name. Raises: ConfigError telling what there is when they name something else."""
    targets = list(_targets(artifact))
    known = sorted({each.stage for each in targets} | {each.name for each in targets})
    unknown = [name for name in options.engines or () if name not in known]
    if unknown:
        raise ConfigError(
            f"the artifact has no {', '.join(unknown)}", where="--engine", fix=f"it has {', '.join(known)}"
        )
    named = [each for each in targets if options.names(each.name)]
    chosen = [each for each in named if options.choose(each.name, each.sizes)]
    sizes = {size for each in named for size in _batch(each.sizes)}
    absent = {*(options.batch_sizes or ())} - sizes if sizes else set()
    idle = {*(options.engines or ())} - {name for each in chosen for name in (each.stage, each.name)}
    if absent or idle:
        batches = ", ".join(map(str, sorted(absent or {*(options.batch_sizes or ())})))
        of = f" of {', '.join(sorted(idle or {*(options.engines or ())}))}" if options.engines else ""
        raise ConfigError(
            f"no engine for batch {batches}{of}",
            where="--batch",
            fix="mingc probe without --batch times what there is",
        )
    return chosen


def _batch(sizes: Mapping[str, int]) -> list[int]:
    return [sizes[dim] for dim in _BATCH_DIMS if dim in sizes]


def _targets(artifact: Artifact) -> Iterator[_Target]:
    """Every static engine; of one that takes all sizes every combination of buckets that a request fits into."""
    for stage, record in artifact.manifest.stages.items():
        for graph in record.graphs.values():
            for engine in graph.engines:
                for sizes in graph.spec.bucket_sizes() if engine.dims is None else [engine.dims]:
                    target = _Target(
                        stage=stage,
                        spec=graph.spec,
                        engine=engine,
                        sizes=sizes,
                        room=room(graph.spec, sizes, page_size(artifact.manifest.parameters.get(stage, {}))),
                    )
                    if target.room >= target.new_tokens:
                        yield target


class _Run:
    """One probe under way: what all of its engines share."""

    def __init__(self, artifact: Artifact, options: ProbeOptions, told: Callable[[str], None]) -> None:
        fingerprint = artifact.manifest.fingerprint
        self._artifact, self._options, self._told = artifact, options, told
        self._device = torch.device(fingerprint.device)
        self.notes = [_NOTES[fingerprint.device]]
        if self._device.type == "cuda":
            self.notes.append(gpu_target(self._device).describe())
        self._watch = Stopwatch(self._device)
        self.ceilings = self._watch.ceilings(torch_dtype(fingerprint.dtype))

    def stage(self, name: str, targets: list[_Target]) -> Iterator[_Row]:
        """Load one stage and time its `targets`."""
        manifest = self._artifact.manifest
        ranks = manifest.fingerprint.world_size
        if manifest.stages[name].is_sharded and ranks > 1:
            self.notes.append(f"{name}: the share of rank 0 of {ranks}, without what the ranks exchange")
        loaded = load_stage(self._artifact, name, self._device, only_first=True)
        pool = GraphPool(self._device) if self._device.type == "cuda" else None
        for target in targets:
            self._told(title(target.name, target.sizes))
            yield self._time(target, loaded[target.spec.name], pool)

    def patch_embed(self) -> tuple[PatchEmbed, ...]:
        """Both forms of the vision encoder's patch embedding."""
        self._told("patch embedding")
        return compare_patch_embed(self._artifact, self._watch)

    def _time(self, target: _Target, graph: Graph, pool: GraphPool | None) -> _Row:
        case = ProbeCase(
            stage=target.stage,
            spec=target.spec,
            sizes=target.sizes,
            context=target.held(self._options.context),
            parameters=self._artifact.manifest.parameters.get(target.stage, {}),
        )
        tensors = case.make(self._device)

        def run() -> tuple[torch.Tensor, ...]:
            return tuple(graph.run(**tensors).values())

        latency = self._latency(run, title(target.name, target.sizes), pool)
        figures = EngineFigures(
            engine=target.name,
            sizes=target.sizes,
            max_model_len=case.context if math.isfinite(target.room) else None,
            layer_instances=len(target.spec.layer_instances),
            latency=latency,
        )
        work = next((each for each in target.engine.cost if each.dims == target.sizes), None)
        return figures, None if work is None else floor_of(figures, work, case.border_bytes(), self.ceilings)

    def _latency(
        self, run: Callable[[], tuple[torch.Tensor, ...]], name: str, pool: GraphPool | None
    ) -> Latency:
        watch = self._watch
        count = self._options.repetitions or self._repetitions(run)
        enqueue = watch.enqueue_ms(run, _ENQUEUED)
        replay, uncaptured, warm = None, None, None
        if pool is not None:
            uncaptured = statistics.median(watch.samples_ms(run, _ENQUEUED, cold=True))
            replay = self._capture(run, name, pool)
        if replay is not None:
            warm = statistics.median(watch.samples_ms(replay, count))
        samples = watch.samples_ms(replay or run, count, cold=True)
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
        once_ms = min(self._watch.samples_ms(run, 1))
        return min(most, max(least, int(_CPU_MS / once_ms)))

    def _capture(
        self, run: Callable[[], tuple[torch.Tensor, ...]], name: str, pool: GraphPool
    ) -> Callable[[], None] | None:
        """A replay of `run`; None, and a note, when it waits for the device and so cannot be captured."""
        try:
            graph, _ = pool.capture(run, name)
        except RuntimeError as error:
            self.notes.append(f"{name} runs without a CUDA graph: {str(error).splitlines()[0]}")
            return None
        return graph.replay
