"""Whether an artifact is whole, fits this machine, and computes what it should: hashes, versions, replay of goldens.

Importing this needs no torch, and neither does `verify` without replay; what needs it is imported inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mingc.artifacts.artifact import Artifact, check_fingerprint, check_hashes, open_artifact
from mingc.errors import ConfigError
from mingc.numerics.tolerances import GRAPH_TOLERANCES
from mingc.verify.comparison import Comparison, FileSummary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mingc.verify.comparison_log import ComparisonLog
    from mingc.verify.stages import Engines

# Relative to the largest magnitude of a reference value: chains of graphs, such as whole models, compared with recorded
# float32 values. A single graph has the tighter bound of `GRAPH_TOLERANCES`.
REFERENCE_TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-1}
_Found = tuple[FileSummary, list[Comparison], list[str]]
# With the documents beside them.
_GOLDEN_FILES = {
    "preprocess.safetensors": "preprocess.json",
    "vision.safetensors": None,
    "audio.safetensors": None,
    "thinker.safetensors": "thinker.json",
    "talker.safetensors": "talker.json",
    "vae.safetensors": "vae.json",
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
    told: Callable[[str], None] = lambda step: None,
) -> VerifyReport:
    """Check the artifact at `path`. `told` hears what is looked at next.

    Raises: ManifestError, IntegrityError, IncompatibleError, or ConfigError when `reference` holds no golden file.
    """
    artifact = open_artifact(path)
    if reference is not None:
        _check_reference(reference, replay=replay)
    told("hashes")
    check_hashes(artifact)
    found: list[_Found] = []
    if replay:
        from mingc.host import current_host

        check_fingerprint(artifact.manifest.fingerprint, current_host(artifact.manifest.fingerprint.device))
        found += _replay_own(artifact, told)
        if reference is not None:
            found += _replay_reference(artifact, reference, told)
    comparisons = tuple(each for _, group, _ in found for each in group)
    failed = sum(each.outcome == "FAIL" for each in comparisons)
    return VerifyReport(
        artifact=path,
        passed=not failed,
        checked=sum(summary.checked for summary, _, _ in found),
        failed=failed,
        expected_differences=sum(each.outcome == "expected difference" for each in comparisons),
        files_hashed=len(artifact.manifest.files),
        files=tuple(summary for summary, _, _ in found),
        comparisons=comparisons,
        not_engine_outputs=tuple(name for _, _, names in found for name in names),
    )


def _check_reference(folder: Path, *, replay: bool) -> None:
    """Raises: ConfigError when `folder` cannot be replayed, whatever it holds."""
    if not replay:
        raise ConfigError("--reference needs the replay", where="--no-replay", fix="leave one of the two out")
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder", where="--reference", fix="pass a folder of golden files"
        )
    if not any((folder / name).is_file() for names in _GOLDEN_FILES.items() for name in names if name):
        names = ", ".join(_GOLDEN_FILES)
        raise ConfigError(
            f"{folder} holds no golden file", where="--reference", fix=f"it should hold some of {names}"
        )


def _replay_own(artifact: Artifact, told: Callable[[str], None]) -> list[_Found]:
    """The goldens that the export put beside every engine."""
    from mingc.verify.self_check import replay

    floor = GRAPH_TOLERANCES[artifact.manifest.fingerprint.dtype]
    found: list[_Found] = []
    for stage, record in artifact.manifest.stages.items():
        for name, graph in record.graphs.items():
            told(f"{stage}.{name}")
            tolerance = max(floor, 2 * graph.parity.compiled)
            ledger = replay(artifact, record, graph, name=f"{stage}.{name}", tolerance=tolerance)
            found.append((ledger.summary("own golden"), ledger.comparisons, []))
    return found


def _replay_reference(artifact: Artifact, folder: Path, told: Callable[[str], None]) -> list[_Found]:
    """Every golden file of `folder` that is there."""
    import torch

    from mingc.verify.replays import audio, preprocess, talker, text, thinker, vae, vision
    from mingc.verify.stages import Engines

    kind = artifact.manifest.fingerprint.device
    engines = Engines(artifact, torch.device(kind, 0) if kind == "cuda" else torch.device(kind))
    replays: dict[str, tuple[tuple[str, ...], Callable[[ComparisonLog, Mapping[str, Any]], None]]] = {
        "preprocess.safetensors": ((), lambda a, b: preprocess.replay(engines, a, b)),
        "vision.safetensors": (("vision_encoder",), lambda a, b: vision.replay(engines, a)),
        "audio.safetensors": (("audio_encoder",), lambda a, b: audio.replay(engines, a)),
        "thinker.safetensors": (("thinker",), lambda a, b: thinker.replay(engines, a)),
        "talker.safetensors": (("talker", "cfm"), lambda a, b: talker.replay(engines, a, b)),
        "vae.safetensors": (("audio_vae",), lambda a, b: vae.replay(engines, a, b)),
        "text.json": ((), lambda a, b: text.replay(a, b)),
    }
    found = []
    with torch.inference_mode():
        for file, document in _GOLDEN_FILES.items():
            told(file)
            stages, run = replays[file]
            found.append(_replay_file(engines, folder, file, document, stages, run))
    return found


def _replay_file(
    engines: Engines,
    folder: Path,
    file: str,
    document: str | None,
    stages: tuple[str, ...],
    run: Callable[[ComparisonLog, Mapping[str, Any]], None],
) -> _Found:
    from mingc.verify.comparison_log import ComparisonLog
    from mingc.verify.golden_documents import read_document

    dtype = engines.artifact.manifest.fingerprint.dtype
    path, beside = folder / file, folder / document if document is not None else None
    is_tensors = path.suffix == ".safetensors" and path.is_file()
    ledger = ComparisonLog(
        file,
        _read_tensors(path) if is_tensors else {},
        tolerance=REFERENCE_TOLERANCES[dtype],
        is_exact=dtype == "float32",
        quantization=_quantization(engines.artifact, stages),
    )
    has_document = beside is not None and beside.is_file()
    if not is_tensors and not has_document:
        return ledger.summary("no golden file found"), [], []
    if not engines.has(*stages):
        return ledger.summary(f"this artifact has no {' and '.join(stages)}"), [], []
    given = read_document(beside) if beside is not None and has_document else {}
    with ledger.case("replay"):
        run(ledger, given)
        if not ledger.comparisons:
            raise ConfigError(f"{file} holds nothing that is replayed", where="--reference")
    return ledger.summary(), ledger.comparisons, [f"{file}: {name}" for name in ledger.not_outputs()]


def _quantization(artifact: Artifact, stages: tuple[str, ...]) -> float:
    """The largest quantization parity of a graph of `stages`, without stages that record a quantization error."""
    held = [artifact.manifest.stages[name] for name in stages if name in artifact.manifest.stages]
    return max(
        (
            graph.parity.quantization or 0.0
            for stage in held
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
