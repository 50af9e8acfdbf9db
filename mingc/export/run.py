"""Run the plan of an export: tokenizers, voices, tuning, weights, engines, checks, goldens, manifest, rename."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

import mingc
from mingc.artifacts.artifact import new_artifact, write_manifest
from mingc.artifacts.codec import encode
from mingc.artifacts.manifest import (
    NO_SERVED_GOLDENS,
    SCHEMA,
    Fingerprint,
    Manifest,
    StageRecord,
    TunedKernel,
    VoiceRecord,
)
from mingc.artifacts.target import Host, rtx_capabilities
from mingc.errors import ConfigError
from mingc.export.assets import tokenizers
from mingc.export.assets.voices import (
    SPEAKER_NETWORK,
    EagerGraph,
    OpenVoices,
    RecordedVoice,
    copy_speaker_network,
    read_voice,
)
from mingc.export.autotune.tuning import autotune
from mingc.export.checkpoint import Checkpoint
from mingc.export.checks.eager_model import EagerModel
from mingc.export.plan import ExportPlan
from mingc.export.process_pool import peak_rss_bytes
from mingc.export.recipe import ExportRecipe, copies_state, first_shard, stage_options
from mingc.export.report import ExportReport, report_export
from mingc.export.schedule import AGAIN, ReportStep, Schedule
from mingc.export.stages import find
from mingc.export.tasks.check_graph import GraphResult, Replay
from mingc.export.tasks.quantization import stored_modules
from mingc.export.tasks.timing import Timer
from mingc.export.weights.loading import float32_module, weights_files
from mingc.host.machine import current_host

_KEPT_BYTES = 8 << 30  # of weights, up to which the eager model keeps its float32 modules in memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step of an export that begins (`seconds` is None) or ends, for progress lines."""

    name: str  # kernel_configs (timed), weights, engine (compiled), check (of a graph), voice, manifest
    subject: str
    seconds: float | None
    done: int
    total: int


Record = Callable[[Path, Manifest, EagerModel], str]
"""Writes served goldens into the folder of an artifact, answered by the eager model; returns their path in it."""


def run(
    plan: ExportPlan,
    replay: Replay,
    progress: Callable[[Step], None],
    record: Record | None = None,
    timer: Timer | None = None,
    open_voices: OpenVoices | None = None,
) -> ExportReport:
    """Build the artifact of `plan`.

    Args:
        replay: runs engines that were built.
        progress: called before and after every step.
        record: records goldens of whole requests; None: the artifact has none.
        timer: times engines where the recipe asks for `auto` backends.
        open_voices: registers the checkpoint's voices with engines that were built.

    Raises: ConfigError, CheckpointError, ExportError. On any of them the output of the recipe is untouched.
    """
    if timer is None and plan.is_measured:
        raise ConfigError(
            "`--backend auto` needs a timer, and none was passed",
            where="--backend auto",
            fix="name a backend",
        )
    if open_voices is None and plan.voices:
        raise ConfigError(
            f"nothing registers the voices {', '.join(voice.name for voice in plan.voices)}",
            where="mingc.export.run",
            fix="pass open_voices, as `mingc export` does",
        )
    started, recipe, checkpoint = time.perf_counter(), plan.recipe, plan.checkpoint
    step, parameters, notes = step_counter(plan, progress), plan.parameters(), [*plan.notes]
    with new_artifact(recipe.output, replace_existing=recipe.force) as folder:
        # Before the hours of compiling, because files may be missing: the released weights have no tokenizer.
        copied = tokenizers.copy(
            checkpoint, folder, plan.stages, parameters, notes, is_synthetic=recipe.synthetic
        )
        recorded = _read_voices(plan)
        kernel_configs = _autotune(plan, step)
        for name in ("weights", "engines", "goldens"):
            (folder / name).mkdir()
        schedule = Schedule(plan, folder, replay, step, kernel_configs, timer)
        schedule.run()
        peak = max(schedule.peak_rss_bytes, peak_rss_bytes())
        has_speech = plan.stage_graph.speech_path() is not None
        manifest = Manifest(
            schema=SCHEMA,
            model=recipe.model_name,
            fingerprint=fingerprint_of(recipe, target_host(recipe), checkpoint),
            stages=_stage_records(plan, folder, schedule, kernel_configs),
            graph=plan.stage_graph,
            parameters=parameters,
            tokenizers=copied,
            speaker_network=copy_speaker_network(checkpoint, folder) if has_speech else None,
            voices=(),
            notes=(
                *notes,
                *refusal_notes(schedule.results),
                *state_notes(schedule.results),
                *_target_notes(recipe.target),
            ),
            files={},
        )
        manifest = _with_voices(plan, folder, manifest, recorded, open_voices, step)
        manifest = _with_served_goldens(plan, folder, manifest, record, step)
        step("manifest", recipe.output.name, None)
        manifest = write_manifest(folder, manifest)
        step("manifest", recipe.output.name, 0.0)
    return report_export(
        recipe.output,
        manifest,
        schedule.results,
        peak_rss_bytes=peak,
        seconds=time.perf_counter() - started,
    )


def step_counter(plan: ExportPlan, progress: Callable[[Step], None]) -> ReportStep:
    """Make a function that reports a step, the number of steps that have ended, and the number of steps of `plan`."""
    total, done = plan.num_steps, 0

    def step(name: str, subject: str, seconds: float | None) -> None:
        nonlocal done
        done += seconds is not None and name != AGAIN
        progress(Step(name=name, subject=subject, seconds=seconds, done=done, total=total))

    return step


def target_host(recipe: ExportRecipe) -> Host:
    """The machine that the engines are for."""
    machine = current_host(recipe.device)
    cards = rtx_capabilities(recipe.target)
    if cards is None:
        return machine
    names = ",".join("{}.{}".format(*each) for each in cards)
    return replace(machine, device="cuda", capability=names)


def _read_voices(plan: ExportPlan) -> tuple[RecordedVoice, ...]:
    """Read the recordings of the checkpoint's voices, and compute their speaker vectors."""
    speech = plan.stage_graph.speech_path()
    if speech is None:
        return ()
    network = plan.checkpoint.root / "talker" / SPEAKER_NETWORK
    vocoder, vae = find(speech.vocoder), plan.parameters()[speech.vocoder]
    graphs = vocoder.graphs(
        plan.configs[vocoder.name], first_shard(vocoder, plan.recipe), stage_options(plan.recipe)
    )
    latents = max((graph.spec.dim("T").maximum for graph in graphs if graph.spec.name == "encode"), default=0)
    return tuple(
        read_voice(
            voice,
            network,
            plan.configs[speech.sampler].speaker_dim,
            max_seconds=latents * vae["samples_per_latent"] / vae["sample_rate"],
        )
        for voice in plan.voices
    )


def _with_voices(
    plan: ExportPlan,
    folder: Path,
    manifest: Manifest,
    recorded: Sequence[RecordedVoice],
    open_voices: OpenVoices | None,
    step: ReportStep,
) -> Manifest:
    """Register the voices with the engines, as a server does; with eager modules for a GPU that is not here."""
    if not recorded or open_voices is None:
        return manifest
    graphs = None
    if rtx_capabilities(plan.recipe.target) is not None:
        speech = manifest.graph.speech_path()
        assert speech is not None, "voices were read"
        graphs = {
            name: EagerGraph(
                manifest.stages[stage].graphs[name].spec,
                getattr(float32_module(find(stage), plan.configs[stage], plan.checkpoint), name),
            )
            for stage, name in (
                (speech.vocoder, "encode"),
                (speech.sampler, "aggregate"),
                (speech.sampler, "speaker"),
            )
        }
    register, records = open_voices(folder, manifest, graphs), list[VoiceRecord]()
    for voice in recorded:
        started = time.perf_counter()
        step("voice", voice.name, None)
        records.append(register(voice))
        step("voice", voice.name, time.perf_counter() - started)
    return replace(manifest, voices=tuple(records))


def _autotune(plan: ExportPlan, step: ReportStep) -> dict[str, tuple[TunedKernel, ...]]:
    """Kernel configurations timed on this device, by stage. Nothing else may run here at the same time."""
    timed = {}
    for stage, (dims, problems) in plan.to_tune.items():
        started = time.perf_counter()
        step("kernel_configs", stage, None)
        timed[stage] = autotune(dims, problems, jobs=plan.recipe.jobs, cache=plan.recipe.cache)
        step("kernel_configs", stage, time.perf_counter() - started)
    return timed


def _stage_records(
    plan: ExportPlan,
    folder: Path,
    schedule: Schedule,
    kernel_configs: Mapping[str, tuple[TunedKernel, ...]],
) -> dict[str, StageRecord]:
    weights = plan.weights_folders
    return {
        stage.name: StageRecord(
            is_sharded=stage.is_sharded,
            weights=tuple(
                tuple(file.relative_to(folder).as_posix() for file in weights_files(folder / path))
                for path in weights[stage.name]
            ),
            graphs={
                result.record.spec.name: result.record
                for result in schedule.results
                if result.stage == stage.name
            },
            quantization_error=schedule.quantization_error.get(stage.name),
            repeated=plan.repeated[stage.name],
            kernel_configs=kernel_configs.get(stage.name, ()),
        )
        for stage in plan.stages
    }


def _with_served_goldens(
    plan: ExportPlan, folder: Path, manifest: Manifest, record: Record | None, step: ReportStep
) -> Manifest:
    """Record whole requests, answered by the eager model; `manifest` with their file, or with a note."""
    started = time.perf_counter()
    step("served goldens", plan.recipe.output.name, None)
    problem = _no_goldens(plan, manifest)
    if record is None or problem is not None:
        note = f"{NO_SERVED_GOLDENS}{problem or 'not asked for'}"
        manifest = replace(manifest, notes=(*manifest.notes, note))
    else:
        sizes = [path.stat().st_size for path in (folder / "weights").rglob("*.safetensors")]
        model = EagerModel(
            manifest.graph,
            plan.configs,
            lambda stage, submodule: _float32_modules(plan, folder, stage, submodule),
            keeps_modules=sum(sizes) <= _KEPT_BYTES,
        )
        manifest = replace(manifest, served_goldens=record(folder, manifest, model))
    step("served goldens", plan.recipe.output.name, time.perf_counter() - started)
    return manifest


def _no_goldens(plan: ExportPlan, manifest: Manifest) -> str | None:
    """Why no served goldens are recorded; None if they are."""
    if plan.recipe.synthetic:
        return "the weights are random"
    decoder, path = manifest.graph.text_decoder(), manifest.graph.speech_path()
    if decoder not in manifest.tokenizers and (path is None or path.speech_llm not in manifest.tokenizers):
        return "the artifact has no tokenizer of a stage that answers"
    foreign = [stage.name for stage in plan.stages if type(stage).__module__.partition(".")[0] != "mingc"]
    return f"the eager model cannot run {', '.join(foreign)}" if foreign else None


def _float32_modules(plan: ExportPlan, folder: Path, stage_name: str, submodule: str) -> Sequence[nn.Module]:
    """The module of a stage, or its ranks' modules over the stored weights where these are quantized."""
    stage, config = find(stage_name), plan.configs[stage_name]
    if plan.recipe.quantization(stage_name) is None:
        return [float32_module(stage, config, plan.checkpoint, submodule=submodule)]
    return stored_modules(plan.recipe, stage, config, folder, plan.weights_folders[stage_name], submodule)


def refusal_notes(results: Sequence[GraphResult]) -> list[str]:
    """One line for each backend that `--backend auto` could not use for some graphs, and the reason."""
    graphs: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for each in () if result.record.trial is None else result.record.trial.refused:
            line = each.reason.splitlines()[0]
            graphs.setdefault((each.backend, line), []).append(f"{result.stage}.{result.record.spec.name}")
    return [
        f"{backend} was not used for {', '.join(names)}: {line}" for (backend, line), names in graphs.items()
    ]


def state_notes(results: Sequence[GraphResult]) -> list[str]:
    """Names the graphs whose engines do not update state in place."""
    records = [(f"{each.stage}.{each.record.spec.name}", each.record) for each in results]
    names = [
        name for name, record in records if record.spec.state and any(map(copies_state, record.backends))
    ]
    return [f"engines of {', '.join(names)} copy their state in every call"] if names else []


def _target_notes(target: str) -> list[str]:
    if rtx_capabilities(target) is None:
        return []
    return [
        f"engines for {target} were built without such a card and did not run: in their place the modules that they "
        "were built from were compared with float32; run mingc verify on a card (on an H200 float32 had errors of "
        "1e-3)"
    ]


def fingerprint_of(recipe: ExportRecipe, machine: Host, checkpoint: Checkpoint) -> Fingerprint:
    """The fingerprint of engines of `recipe`; options that do not change their content do not count."""
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
