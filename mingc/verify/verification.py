"""Checks an artifact: file hashes, versions, and replays of recorded inputs. Entry point of `mingc verify`.

The module imports no torch, and `verify` without replay needs none; replays import it inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mingc.artifacts.artifact import Artifact, check_fingerprint, check_hashes, open_artifact
from mingc.artifacts.manifest import NO_SERVED_GOLDENS, GraphRecord, Manifest
from mingc.errors import ConfigError
from mingc.numerics.tolerances import GRAPH_TOLERANCES, REFERENCE_TOLERANCES
from mingc.verify.comparison import Comparison, FileSummary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mingc.verify.comparison_log import ComparisonLog
    from mingc.verify.engines import Engines

_Result = tuple[FileSummary, list[Comparison], list[str]]
# Golden tensors, and the JSON document that belongs to them.
_GOLDEN_FILES = {
    "preprocess.safetensors": "preprocess.json",
    "vision.safetensors": None,
    "audio.safetensors": None,
    "thinker.safetensors": "thinker.json",
    "talker.safetensors": "talker.json",
    "vae.safetensors": None,
    "text.json": "text.json",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """The result of `mingc verify`. `passed` is False when any comparison failed."""

    artifact: Path
    passed: bool
    checked: int
    failed: int
    expected_differences: int
    files_hashed: int
    files: tuple[FileSummary, ...]
    comparisons: tuple[Comparison, ...]
    not_engine_outputs: tuple[str, ...] = field(metadata={"shown": False})


def verify(
    path: Path,
    *,
    reference: Path | None = None,
    replay: bool = True,
    progress: Callable[[str], None] = lambda step: None,
) -> VerifyReport:
    """Check the artifact at `path`; `progress` is called with the name of each step before it starts.

    Raises: ManifestError, IntegrityError, IncompatibleError, ArtifactError when a backend is not installed, or
        ConfigError when `reference` holds no golden file.
    """
    artifact = open_artifact(path)
    if reference is not None:
        _check_reference(reference, replay=replay)
    progress("hashes")
    check_hashes(artifact)
    results: list[_Result] = []
    if replay:
        from mingc.host.machine import current_host
        from mingc.runtime.engines.backends import check_loadable

        recorded = artifact.manifest.fingerprint
        check_fingerprint(recorded, current_host(recorded.device))
        check_loadable(artifact)
        results += _self_check(artifact, progress)
        results += _replay_served(artifact, progress)
        if reference is not None:
            results += _replay_reference(artifact, reference, progress)
    comparisons = tuple(each for _, group, _ in results for each in group)
    failed = sum(each.outcome == "FAIL" for each in comparisons)
    return VerifyReport(
        artifact=path,
        passed=not failed,
        checked=sum(summary.checked for summary, _, _ in results),
        failed=failed,
        expected_differences=sum(each.outcome == "expected difference" for each in comparisons),
        files_hashed=len(artifact.manifest.files),
        files=tuple(summary for summary, _, _ in results),
        comparisons=comparisons,
        not_engine_outputs=tuple(name for _, _, names in results for name in names),
    )


def _check_reference(folder: Path, *, replay: bool) -> None:
    """Raises: ConfigError when `folder` is not a folder of golden files, or replay is off."""
    if not replay:
        raise ConfigError(
            "--reference requires a replay", where="--no-replay", fix="remove one of the two options"
        )
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder", where="--reference", fix="pass a folder of golden files"
        )
    if not any((folder / name).is_file() for names in _GOLDEN_FILES.items() for name in names if name):
        names = ", ".join(_GOLDEN_FILES)
        raise ConfigError(
            f"{folder} holds no golden file",
            where="--reference",
            fix=f"pass a folder with at least one of {names}",
        )


def engine_tolerance(graph: GraphRecord, dtype: str) -> float:
    """The relative error that a replay of the golden of `graph` may have."""
    return max(GRAPH_TOLERANCES[dtype], 2 * graph.parity.compiled)


def _self_check(artifact: Artifact, progress: Callable[[str], None]) -> list[_Result]:
    """Replay the golden that the export stored for every graph."""
    from mingc.verify.self_check import replay

    results: list[_Result] = []
    for stage, record in artifact.manifest.stages.items():
        for name, graph in record.graphs.items():
            title = f"{stage}.{name}"
            progress(title)
            tolerance = engine_tolerance(graph, artifact.manifest.fingerprint.dtype)
            log = replay(artifact, record, graph, name=title, tolerance=tolerance)
            results.append((log.summary("self-check"), log.comparisons, []))
    return results


def _replay_served(artifact: Artifact, progress: Callable[[str], None]) -> list[_Result]:
    """Replay the recorded requests through services that run the artifact in different ways."""
    from mingc.verify.served.verification import replay_served

    if artifact.manifest.served_goldens is None:
        return [_without_served(artifact.manifest)]
    parameters, *logs = replay_served(artifact, progress)
    return [
        (parameters.summary("those of the recorded requests"), parameters.comparisons, []),
        *((log.summary("requests through the service"), log.comparisons, []) for log in logs),
    ]


def _without_served(manifest: Manifest) -> _Result:
    """No request is replayed: a note with the export's reason, or a failure if the export gave none."""
    from mingc.verify.comparison_log import ComparisonLog

    reasons = [note for note in manifest.notes if note.startswith(NO_SERVED_GOLDENS)]
    log = ComparisonLog("recorded requests", {}, tolerance=0.0, is_exact=True)
    if not reasons:
        log.rule("reason", False, "the manifest names no recorded requests and no reason; export again")
    return log.summary(reasons[0] if reasons else ""), log.comparisons, []


def _replay_reference(artifact: Artifact, folder: Path, progress: Callable[[str], None]) -> list[_Result]:
    """Replay every golden file that `folder` has."""
    import torch

    from mingc.verify.engines import Engines
    from mingc.verify.replays import audio, preprocess, talker, text, vae, vision
    from mingc.verify.replays.thinker import replay as thinker

    kind = artifact.manifest.fingerprint.device
    engines = Engines(artifact, torch.device(kind, 0) if kind == "cuda" else torch.device(kind))
    replays: dict[str, tuple[tuple[str, ...], Callable[[ComparisonLog, Mapping[str, Any]], None]]] = {
        "preprocess.safetensors": ((), lambda a, b: preprocess.replay(engines, a, b)),
        "vision.safetensors": (("vision_encoder",), lambda a, b: vision.replay(engines, a)),
        "audio.safetensors": (("audio_encoder",), lambda a, b: audio.replay(engines, a)),
        "thinker.safetensors": (("thinker",), lambda a, b: thinker.replay(engines, a)),
        "talker.safetensors": (("talker", "cfm"), lambda a, b: talker.replay(engines, a, b)),
        "vae.safetensors": (("audio_vae",), lambda a, b: vae.replay(engines, a)),
        "text.json": ((), lambda a, b: text.replay(a, b)),
    }
    results = []
    with torch.inference_mode():
        for file, document in _GOLDEN_FILES.items():
            progress(file)
            stages, run = replays[file]
            results.append(_replay_file(engines, folder, file, document, stages, run))
    return results


def _replay_file(
    engines: Engines,
    folder: Path,
    file: str,
    document: str | None,
    stages: tuple[str, ...],
    run: Callable[[ComparisonLog, Mapping[str, Any]], None],
) -> _Result:
    """Replay one golden file; without the file or one of `stages` the summary holds a note and no comparison."""
    from mingc.verify.comparison_log import ComparisonLog
    from mingc.verify.golden_documents import read_document

    dtype = engines.artifact.manifest.fingerprint.dtype
    path, document_path = folder / file, folder / document if document is not None else None
    has_tensors = path.suffix == ".safetensors" and path.is_file()
    log = ComparisonLog(
        file,
        _read_tensors(path) if has_tensors else {},
        tolerance=REFERENCE_TOLERANCES[dtype],
        is_exact=dtype == "float32",
        quantization=_quantization(engines.artifact, stages),
    )
    has_document = document_path is not None and document_path.is_file()
    if not has_tensors and not has_document:
        return log.summary("no golden file found"), [], []
    if not engines.has(*stages):
        return log.summary(f"this artifact has no {' and '.join(stages)}"), [], []
    arguments = read_document(document_path) if document_path is not None and has_document else {}
    with log.case("replay"):
        run(log, arguments)
        if not log.comparisons:
            raise ConfigError(f"{file} holds no value that verify can replay", where="--reference")
    return log.summary(), log.comparisons, [f"{file}: {name}" for name in log.not_outputs()]


def _quantization(artifact: Artifact, stages: tuple[str, ...]) -> float:
    """The largest error by weight quantization of a graph of `stages`.

    Stages that record a quantization error per layer are left out: their replays compare layer by layer.
    """
    records = [artifact.manifest.stages[name] for name in stages if name in artifact.manifest.stages]
    return max(
        (
            graph.parity.quantization or 0.0
            for stage in records
            if stage.quantization_error is None
            for graph in stage.graphs.values()
        ),
        default=0.0,
    )


def _read_tensors(path: Path) -> dict[str, NDArray[np.generic]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    from mingc.verify.golden_documents import unreadable

    try:
        tensors: dict[str, NDArray[np.generic]] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise unreadable(path, error) from error
    return tensors
