"""Replay of a golden set through an artifact, after everything that the artifact proves of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conformance.audio import replay_clips
from conformance.engines import Engines
from conformance.golden_files import read_document, read_tensors
from conformance.picture_prompts import replay_picture_prompts
from conformance.pictures import STAGES as PICTURE_STAGES
from conformance.pictures import replay_decoding, replay_loops, replay_velocities
from conformance.preprocess import replay_preprocessing
from conformance.reference_log import ReferenceLog
from conformance.talker import replay_speech
from conformance.text import replay_texts
from conformance.thinker.prompt_replay import replay_prompts
from conformance.vae import replay_waveforms
from conformance.vision import replay_images
from mingc.artifacts.artifact import check_hashes, open_artifact
from mingc.errors import ConfigError
from mingc.numerics.tolerances import REFERENCE_TOLERANCES
from mingc.verify.verification import Progress, VerifyReport, make_report, replay_recorded

Replay = Callable[[Engines, ReferenceLog, Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenFile:
    """A file of the golden set.

    Attributes:
        name: file name of the tensors, or of a JSON document without tensors.
        document: file name of the JSON document.
        stages: the artifact must have all of them; without one the file is left out.
        inputs: file name of further tensors, which the replay only reads: `inputs` of the document.
    """

    name: str
    document: str | None = None
    stages: tuple[str, ...] = ()
    inputs: str | None = None
    replay: Replay


GOLDEN_FILES = (
    GoldenFile(name="preprocess.safetensors", document="preprocess.json", replay=replay_preprocessing),
    GoldenFile(name="vision.safetensors", stages=("vision_encoder",), replay=replay_images),
    GoldenFile(name="audio.safetensors", stages=("audio_encoder",), replay=replay_clips),
    GoldenFile(name="thinker.safetensors", stages=("thinker",), replay=replay_prompts),
    GoldenFile(
        name="talker.safetensors", document="talker.json", stages=("talker", "cfm"), replay=replay_speech
    ),
    GoldenFile(name="vae.safetensors", stages=("audio_vae",), replay=replay_waveforms),
    GoldenFile(name="text.json", document="text.json", replay=replay_texts),
    GoldenFile(
        name="imagegen/imagegen_condition.safetensors",
        document="imagegen/imagegen.json",
        stages=("thinker", "vision_encoder", "image_condition"),  # edits have pictures
        replay=replay_picture_prompts,
    ),
    GoldenFile(name="imagegen/imagegen_dit.safetensors", stages=PICTURE_STAGES, replay=replay_velocities),
    GoldenFile(name="imagegen/imagegen_vae.safetensors", stages=PICTURE_STAGES, replay=replay_decoding),
    GoldenFile(
        name="imagegen/imagegen_loop.safetensors",
        document="imagegen/imagegen.json",
        inputs="imagegen/imagegen_condition.safetensors",
        stages=PICTURE_STAGES,
        replay=replay_loops,
    ),
)


def check_conformance(path: Path, reference: Path, *, progress: Progress = lambda step: None) -> VerifyReport:
    """Make all comparisons of `mingc verify`, then compare with the golden files in the folder `reference`.

    Raises: as `mingc.verify.verification.verify`; ConfigError when `reference` holds no golden file.
    """
    _require_golden_file(reference)
    artifact = open_artifact(path)
    progress("hashes")
    check_hashes(artifact)
    own = replay_recorded(artifact, progress)
    logs = [*replay_golden_set(Engines(artifact), reference, progress)]
    names = [f"{log.file}: {name}" for log in logs if log.comparisons for name in log.not_outputs()]
    return make_report(path, artifact, [*own, *logs], names)


def replay_golden_set(engines: Engines, folder: Path, progress: Progress) -> Iterator[ReferenceLog]:
    """Replay every golden file that `folder` has."""
    with torch.inference_mode():
        for file in GOLDEN_FILES:
            progress(file.name)
            yield replay_file(engines, folder, file)


def replay_file(engines: Engines, folder: Path, file: GoldenFile) -> ReferenceLog:
    """Replay one golden file; without the file or one of its stages the log has a note and no comparison."""
    path, document = folder / file.name, folder / (file.document or "")
    has_tensors, has_document = path.suffix == ".safetensors" and path.is_file(), document.is_file()
    dtype = engines.artifact.manifest.fingerprint.dtype
    log = ReferenceLog(
        file.name,
        read_tensors(path) if has_tensors else {},
        tolerance=REFERENCE_TOLERANCES[dtype],
        is_exact=dtype == "float32",
        quantization=engines.quantization_of(file.stages),
    )
    if not has_tensors and not has_document:
        log.note = "no golden file found"
    elif not engines.has(*file.stages):
        log.note = f"this artifact has no {' and '.join(file.stages)}"
    else:
        arguments = read_document(document) if has_document else {}
        if file.inputs is not None:
            arguments["inputs"] = read_tensors(folder / file.inputs)
        with log.case("replay"):
            file.replay(engines, log, arguments)
            if not log.comparisons:
                raise ConfigError(f"{file.name} holds no value that can be replayed", where="--reference")
    return log


def _require_golden_file(folder: Path) -> None:
    """Raises: ConfigError when `folder` is not a folder of golden files."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder", where="--reference", fix="pass a folder of golden files"
        )
    names = [file.name for file in GOLDEN_FILES]
    documents = [file.document for file in GOLDEN_FILES if file.document]
    if not any((folder / name).is_file() for name in (*names, *documents)):
        raise ConfigError(
            f"{folder} holds no golden file",
            where="--reference",
            fix=f"pass a folder with at least one of {', '.join(names)}",
        )
