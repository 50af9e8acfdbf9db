"""The export pipeline: checkpoint checks, tokenizers, voices, tuning, weights, graphs, manifest, rename."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

import mingc
from mingc.artifacts.artifact import new_artifact, write_manifest
from mingc.artifacts.codec import encode
from mingc.artifacts.manifest import (
    NO_SERVED_GOLDENS,
    SCHEMA,
    Fingerprint,
    GraphRecord,
    Manifest,
    QuantizationError,
    StageRecord,
    TunedKernel,
    VoiceRecord,
)
from mingc.artifacts.stage_graph import StageGraph
from mingc.artifacts.target import rtx_capabilities
from mingc.errors import CheckpointError, ConfigError, ExportError
from mingc.export.assets import tokenizers, voices
from mingc.export.autotune.tuning import autotune, problems_to_tune
from mingc.export.checkpoint import Checkpoint
from mingc.export.checks.coverage import check_coverage
from mingc.export.checks.eager_model import EagerModel
from mingc.export.checks.preflight import check_host, check_space
from mingc.export.compile.build import (
    GraphResult,
    Replay,
    Timer,
    early_refusals,
    engine_sizes,
    first_shard,
    stage_options,
    stored_modules,
)
from mingc.export.compile.schedule import Schedule
from mingc.export.process_pool import peak_rss_bytes
from mingc.export.recipe import ExportRecipe
from mingc.export.stage import Stage, StageOptions
from mingc.export.stages import build_graph, discover, find
from mingc.export.weights.files import weights_files, write_file
from mingc.export.weights.loading import float32_module
from mingc.export.weights.source import open_source
from mingc.host.machine import Host, current_host

_KEPT_BYTES = 8 << 30  # of weights, up to which the eager model keeps its float32 modules in memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step of an export that begins (`seconds` is None) or ends, for progress lines."""

    name: str  # kernel_configs (timed), weights, engine (compiled), check (of a graph), voice, manifest
    subject: str
    seconds: float | None
    done: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphReport:
    """One row of the export report."""

    stage: str
    graph: str
    backend: str
    engines: int
    size_bytes: int
    compile_seconds: float
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """The result of an export."""

    output: str
    model: str
    graphs: tuple[GraphReport, ...]
    weights_bytes: int
    largest_weights_bytes: int
    artifact_bytes: int
    seconds: float
    peak_rss_bytes: int
    notes: tuple[str, ...]


Record = Callable[[Path, Manifest, EagerModel], str]
"""Writes served goldens into the folder of an artifact, answered by the eager model; returns their path in it."""


def export_artifact(
    recipe: ExportRecipe,
    replay: Replay,
    progress: Callable[[Step], None],
    record: Record | None = None,
    timer: Timer | None = None,
) -> ExportReport:
    """Build the artifact of `recipe`.

    Args:
        replay: runs engines that were built.
        progress: called before and after every step.
        record: records goldens of whole requests; None: the artifact has none.
        timer: times engines where the recipe asks for `auto` backends.

    Raises: ConfigError, CheckpointError, ExportError. On any of them `recipe.output` is untouched.
    """
    started = time.perf_counter()
    check_host(recipe)
    checkpoint = open_source(recipe)
    stages = _choose(checkpoint, recipe)
    graph = build_graph(stages)
    configs = {stage.name: stage.config(checkpoint) for stage in stages}
    notes = [*checkpoint.notes, *check_coverage(checkpoint, stages, configs)]
    with new_artifact(recipe.output, replace_existing=recipe.force) as folder:
        run = _Run(recipe, checkpoint, stages, graph, configs, folder, replay, _Steps(progress), timer)
        check_space(recipe, checkpoint, stages, configs, run.num_engines)
        parameters = run.parameters()
        # Before the hours of compiling, because files may be missing: the released weights have no tokenizer.
        copied = tokenizers.copy(checkpoint, folder, stages, parameters, notes, is_synthetic=recipe.synthetic)
        records = run.write_voices()
        built = run.build()
        notes += run.notes
        manifest = Manifest(
            schema=SCHEMA,
            model=recipe.model_name,
            fingerprint=_fingerprint(recipe, run.target_host(), checkpoint),
            stages=built.stages,
            graph=graph,
            parameters=parameters,
            tokenizers=copied,
            speaker_network=voices.copy_speaker_network(checkpoint, folder) if run.has_voices else None,
            voices=records,
            notes=tuple(notes),
            files={},
        )
        manifest = run.record_goldens(manifest, record)
        run.step("manifest", recipe.output.name)
        manifest = write_manifest(folder, manifest)
        run.step("manifest", recipe.output.name, 0.0)
    return _report(recipe, manifest, built, run.peak_rss_bytes, started)


class _Steps:
    """Counts the steps of an export for its progress lines; `total` is set when they are planned."""

    def __init__(self, progress: Callable[[Step], None]) -> None:
        self._progress = progress
        self._done = 0
        self.total = 0

    def step(self, name: str, subject: str, seconds: float | None = None) -> None:
        """Report that a step begins, or that it ended after `seconds`."""
        self._done += seconds is not None
        self._progress(Step(name=name, subject=subject, seconds=seconds, done=self._done, total=self.total))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Built:
    """Result of the build.

    `weights` are paths of all ranks' files by stage, relative to the artifact.
    """

    stages: dict[str, StageRecord]
    results: list[GraphResult]
    weights: dict[str, tuple[str, ...]]


class _Run:
    """A running export."""

    def __init__(
        self,
        recipe: ExportRecipe,
        checkpoint: Checkpoint,
        stages: Sequence[Stage],
        graph: StageGraph,
        configs: dict[str, Any],
        folder: Path,
        replay: Replay,
        steps: _Steps,
        timer: Timer | None = None,
    ) -> None:
        self._recipe = recipe
        self.target = recipe.target
        self._timer = timer
        if timer is None and any(recipe.is_measured(stage.name) for stage in stages):
            raise ConfigError(
                "nothing times engines in this export", where="--backend auto", fix="name a backend"
            )
        self._checkpoint = checkpoint
        self._stages = stages
        self._configs = configs
        self._folder = folder
        self._replay = replay
        self.step = steps.step
        self._speech = graph.speech_path()
        self.has_voices = self._speech is not None
        self.notes: list[str] = []
        self.peak_rss_bytes = 0
        self.options = options = stage_options(recipe)
        plans = {
            stage.name: stage.graphs(configs[stage.name], first_shard(stage, recipe), options)
            for stage in stages
        }
        self._refused = {
            graph: reasons
            for stage in stages
            for graph, reasons in early_refusals(
                recipe, stage, configs[stage.name], plans[stage.name]
            ).items()
        }
        specs = {name: [plan.spec for plan in each] for name, each in plans.items()}
        self._compile_costs = {
            f"{name}.{plan.spec.name}": plan.compile_cost for name, each in plans.items() for plan in each
        }
        # Of each graph, by stage: what its engines are compiled for.
        self._sizes = {
            name: {plan.spec.name: engine_sizes(plan, options) for plan in each}
            for name, each in plans.items()
        }
        # One layer of each kind is stored of random weights, so that the artifact stays small: loading draws the rest.
        self.repeated = {
            name: {
                instance: spec.layer_instances[0]
                for spec in graphs
                for instance in spec.layer_instances[1:]
                if recipe.synthetic
            }
            for name, graphs in specs.items()
        }
        self._files = {
            stage.name: weights_files(stage, recipe, self.repeated[stage.name]) for stage in stages
        }
        backends = {name: len(recipe.backends_of(name)) for name in specs}
        self.num_engines = sum(
            backends[name] * len(sizes) for name, graphs in self._sizes.items() for sizes in graphs.values()
        )
        checks = sum(
            1 + (recipe.is_measured(name) and backends[name] > 1)
            for name, graphs in specs.items()
            for _ in graphs
        )
        builds = self.num_engines + checks
        shared = sum(map(len, self._files.values())) + 2
        self._voices = voices.find(checkpoint, self.notes) if self.has_voices else ()
        self._to_tune = {
            stage.name: found
            for stage in stages
            if (found := problems_to_tune(recipe, stage, configs[stage.name], plans[stage.name])) is not None
        }
        steps.total += shared + builds + len(self._voices) + len(self._to_tune)

    def target_host(self) -> Host:
        """The machine that the engines are for."""
        machine = current_host(self._recipe.device)
        cards = rtx_capabilities(self.target)
        if cards is None:
            return machine
        names = ",".join("{}.{}".format(*each) for each in cards)
        return replace(machine, device="cuda", capability=names)

    def parameters(self) -> dict[str, dict[str, Any]]:
        """Of every stage, as JSON values."""
        return {
            stage.name: _parameters(stage, self._configs[stage.name], self.options) for stage in self._stages
        }

    def build(self) -> _Built:
        """Write the weights, compile and check every engine."""
        kernel_configs = self.autotune()
        weights = self.write_weights()
        results, quantization_error = self.build_graphs(kernel_configs)
        if rtx_capabilities(self.target) is not None:
            self.notes.append(
                f"engines for {self.target} were built without such a card: their ONNX models were compared with "
                "float32 through ONNX Runtime on a CPU, the engines were not run; on an H200 a float32 plan had an "
                "error of 1.2e-3, above the limit of mingc verify"
            )
        stages = {
            stage.name: _stage_record(
                stage,
                weights,
                results,
                quantization_error,
                self.repeated[stage.name],
                kernel_configs.get(stage.name, ()),
            )
            for stage in self._stages
        }
        return _Built(stages=stages, results=results, weights=weights)

    def write_weights(self) -> dict[str, tuple[str, ...]]:
        """The first rank's weights file of each stage, which its engines need; the paths of all ranks' files.

        Paths are relative to the artifact. The other files are written while engines compile.
        """
        (self._folder / "weights").mkdir()
        for first, *_ in self._files.values():
            self.step("weights", first.name)
            written = write_file(first, self._recipe, self._checkpoint, self._folder)
            self.step("weights", first.name, written.seconds)
        return {stage: tuple(file.path for file in files) for stage, files in self._files.items()}

    def autotune(self) -> dict[str, tuple[TunedKernel, ...]]:
        """Kernel configurations timed on this device, by stage. Nothing else may run here meanwhile."""
        timed = {}
        for stage, (dims, problems) in self._to_tune.items():
            started = time.perf_counter()
            self.step("kernel_configs", stage)
            timed[stage] = autotune(dims, problems, jobs=self._recipe.jobs, cache=self._recipe.cache)
            self.step("kernel_configs", stage, time.perf_counter() - started)
        return timed

    def build_graphs(
        self, kernel_configs: dict[str, tuple[TunedKernel, ...]]
    ) -> tuple[list[GraphResult], dict[str, QuantizationError]]:
        """Write the other weights files, compile every engine and check every graph.

        Returns the graphs, and the quantization error of stages that measure it, by name.
        """
        (self._folder / "engines").mkdir()
        (self._folder / "goldens").mkdir()
        schedule = Schedule(
            self._recipe,
            self._folder,
            self._replay,
            self._sizes,
            self._files,
            self.step,
            kernel_configs,
            self._compile_costs,
            self._timer,
            self._refused,
        )
        schedule.run()
        self.notes += _refusal_notes(schedule.results)
        self.peak_rss_bytes = max(schedule.peak_rss_bytes, peak_rss_bytes())
        return schedule.results, schedule.quantization_error

    def record_goldens(self, manifest: Manifest, record: Record | None) -> Manifest:
        """Record whole requests, answered by the eager model; `manifest` with their file, or with a note."""
        started = time.perf_counter()
        self.step("served goldens", self._recipe.output.name)
        problem = self._no_goldens(manifest)
        if record is None or problem is not None:
            note = f"{NO_SERVED_GOLDENS}{problem or 'not asked for'}"
            manifest = replace(manifest, notes=(*manifest.notes, note))
        else:
            sizes = [path.stat().st_size for path in (self._folder / "weights").iterdir()]
            model = EagerModel(
                manifest.graph,
                self._configs,
                self._float32_modules,
                keeps_modules=sum(sizes) <= _KEPT_BYTES,
            )
            manifest = replace(manifest, served_goldens=record(self._folder, manifest, model))
        self.step("served goldens", self._recipe.output.name, time.perf_counter() - started)
        return manifest

    def _no_goldens(self, manifest: Manifest) -> str | None:
        """Why no served goldens are recorded; None if they are."""
        if self._recipe.synthetic:
            return "the weights are random"
        decoder, path = manifest.graph.text_decoder(), manifest.graph.speech_path()
        if decoder not in manifest.tokenizers and (
            path is None or path.speech_llm not in manifest.tokenizers
        ):
            return "the artifact has no tokenizer of a stage that answers"
        foreign = [
            name for name in self._configs if find(name).__class__.__module__.partition(".")[0] != "mingc"
        ]
        return f"the eager model cannot run {', '.join(foreign)}" if foreign else None

    def _float32_modules(self, stage_name: str, submodule: str) -> Sequence[nn.Module]:
        """The module of a stage, or its ranks' modules over the stored weights where these are quantized."""
        stage, config = find(stage_name), self._configs[stage_name]
        if self._recipe.quantization(stage_name) is None:
            return [float32_module(stage, config, self._checkpoint, submodule=submodule)]
        return stored_modules(
            self._recipe,
            stage,
            config,
            self._folder,
            [file.path for file in self._files[stage_name]],
            submodule,
        )

    def write_voices(self) -> tuple[VoiceRecord, ...]:
        """The voices of the checkpoint, registered once so that serving needs neither encoder nor speaker network."""
        if not self._voices or self._speech is None:
            return ()
        (self._folder / "voices").mkdir()
        maker = voices.VoiceMaker(
            self._checkpoint, self._configs, sampler=self._speech.sampler, vocoder=self._speech.vocoder
        )
        records = []
        for voice in self._voices:
            started = time.perf_counter()
            self.step("voice", voice.name)
            records.append(maker.register(voice, self._folder))
            self.step("voice", voice.name, time.perf_counter() - started)
        return tuple(records)


def _choose(checkpoint: Checkpoint, recipe: ExportRecipe) -> list[Stage]:
    stages = (
        [find(name) for name in recipe.stages] if recipe.stages is not None else list(discover().values())
    )
    present = [stage for stage in stages if stage.is_present(checkpoint)]
    if recipe.stages is not None and len(present) < len(stages):
        absent = ", ".join(stage.name for stage in stages if stage not in present)
        raise ConfigError(f"the checkpoint does not hold {absent}", where="--stages", fix="leave them out")
    if not present:
        raise CheckpointError("the checkpoint holds no stage that mingc knows", where=str(checkpoint.root))
    recipe.check_stages(present)
    return present


def _refusal_notes(results: Sequence[GraphResult]) -> list[str]:
    """One line per backend that was tried and could not build a graph, or some."""
    graphs: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for each in () if result.record.trial is None else result.record.trial.refused:
            line = each.reason.splitlines()[0]
            graphs.setdefault((each.backend, line), []).append(f"{result.stage}.{result.record.spec.name}")
    return [
        f"{backend} was not used for {', '.join(names)}: {line}" for (backend, line), names in graphs.items()
    ]


def _parameters(stage: Stage, config: Any, options: StageOptions) -> dict[str, Any]:
    """The parameters of `stage` as JSON values. Raises: ExportError when they are not JSON values."""
    encoded: Any = encode(stage.parameters(config, options))
    try:
        json.dumps(encoded, allow_nan=False)
        problem = None if isinstance(encoded, dict) else f"{encoded!r}"
    except (TypeError, ValueError) as error:
        problem = str(error)
    if problem is not None:
        raise ExportError(
            f"the parameters of {stage.name} are not a dataclass of JSON values: {problem}",
            where=stage.name,
            fix="correct what its `parameters` returns",
        )
    return cast("dict[str, Any]", encoded)


def _stage_record(
    stage: Stage,
    weights: dict[str, tuple[str, ...]],
    results: Sequence[GraphResult],
    quantization_error: dict[str, QuantizationError],
    repeated: dict[str, str],
    kernel_configs: tuple[TunedKernel, ...],
) -> StageRecord:
    graphs: dict[str, GraphRecord] = {
        result.record.spec.name: result.record for result in results if result.stage == stage.name
    }
    return StageRecord(
        is_sharded=stage.is_sharded,
        weights=weights[stage.name],
        graphs=graphs,
        quantization_error=quantization_error.get(stage.name),
        repeated=repeated,
        kernel_configs=kernel_configs,
    )


def _fingerprint(recipe: ExportRecipe, machine: Host, checkpoint: Checkpoint) -> Fingerprint:
    chosen = {
        name: value
        for name, value in encode(recipe).items()
        if name not in ("checkpoint", "output", "jobs", "cache", "cache_gigabytes", "force")
    }
    return Fingerprint(
        mingc=mingc.__version__,
        torch=machine.torch,
        target=recipe.target,
        device=machine.device,
        capability=machine.capability,
        dtype=recipe.dtype,
        world_size=recipe.world_size,
        config_sha256=hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest(),
        checkpoint_sha256=checkpoint.fingerprint(),
    )


def _report(
    recipe: ExportRecipe,
    manifest: Manifest,
    built: _Built,
    peak_rss_bytes: int,
    started: float,
) -> ExportReport:
    order = {name: index for index, name in enumerate(manifest.stages)}
    rows = [
        GraphReport(
            stage=result.stage,
            graph=result.record.spec.name,
            backend=" ".join(result.record.backends),
            engines=len(result.record.engines),
            size_bytes=sum(manifest.files[engine.file].size_bytes for engine in result.record.engines),
            compile_seconds=sum(engine.compile_seconds for engine in result.record.engines),
            error=result.record.parity.compiled,
        )
        for result in sorted(built.results, key=lambda each: (order[each.stage], each.record.spec.name))
    ]
    sizes = [manifest.files[file].size_bytes for files in built.weights.values() for file in files]
    return ExportReport(
        output=str(recipe.output),
        model=manifest.model,
        graphs=tuple(rows),
        weights_bytes=sum(sizes),
        largest_weights_bytes=max(sizes),
        artifact_bytes=sum(record.size_bytes for record in manifest.files.values()),
        seconds=time.perf_counter() - started,
        peak_rss_bytes=peak_rss_bytes,
        notes=manifest.notes,
    )
