"""What an artifact proves of itself: file hashes, versions, recorded graphs and recorded requests (`mingc verify`).

The module imports no torch, and `verify` without replay needs none; replays import it inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mingc.artifacts.artifact import Artifact, check_fingerprint, check_hashes, open_artifact
from mingc.artifacts.manifest import NO_SERVED_GOLDENS, GraphRecord, Manifest
from mingc.numerics.tolerances import GRAPH_TOLERANCES
from mingc.verify.comparison import Comparison, FileSummary

if TYPE_CHECKING:
    from mingc.verify.comparison_log import ComparisonLog

Progress = Callable[[str], None]
"""Called with the name of each step before it starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """Comparisons of an artifact with recorded values; `passed` is False when one failed.

    `not_engine_outputs`: reference values that no engine returns. Only `python -m conformance` has any, and expected
    differences.
    """

    artifact: Path
    passed: bool
    checked: int
    failed: int
    expected_differences: int
    files_hashed: int
    files: tuple[FileSummary, ...]
    comparisons: tuple[Comparison, ...]
    not_engine_outputs: tuple[str, ...] = field(default=(), metadata={"shown": False})


def verify(path: Path, *, replay: bool = True, progress: Progress = lambda step: None) -> VerifyReport:
    """Check the artifact at `path`: the hashes of its files and, with `replay`, everything that it records.

    Raises: ManifestError, IntegrityError, IncompatibleError, or ArtifactError when a backend is not installed.
    """
    artifact = open_artifact(path)
    progress("hashes")
    check_hashes(artifact)
    return make_report(path, artifact, replay_recorded(artifact, progress) if replay else ())


def replay_recorded(artifact: Artifact, progress: Progress) -> list[ComparisonLog]:
    """Run every graph on the inputs that the export recorded, then send the recorded requests through services.

    Raises: IncompatibleError when the artifact was built for another machine or another torch; ArtifactError when a
        backend is not installed.
    """
    from mingc.host.machine import current_host
    from mingc.runtime.engines.backends import check_loadable

    manifest = artifact.manifest
    check_fingerprint(manifest.fingerprint, current_host(manifest.fingerprint.device))
    check_loadable(artifact)
    return [*_replay_graphs(artifact, progress), *_replay_requests(artifact, progress)]


def make_report(
    path: Path, artifact: Artifact, logs: Sequence[ComparisonLog], not_engine_outputs: Sequence[str] = ()
) -> VerifyReport:
    """Report all comparisons in `logs`, with one summary per log."""
    files = tuple(log.summary() for log in logs)
    comparisons = tuple(row for log in logs for row in log.comparisons)
    failed = sum(row.outcome == "FAIL" for row in comparisons)
    return VerifyReport(
        artifact=path,
        passed=not failed,
        checked=sum(summary.checked for summary in files),
        failed=failed,
        expected_differences=sum(row.outcome == "expected difference" for row in comparisons),
        files_hashed=len(artifact.manifest.files),
        files=files,
        comparisons=comparisons,
        not_engine_outputs=tuple(not_engine_outputs),
    )


def engine_tolerance(graph: GraphRecord, dtype: str) -> float:
    """Return the relative error that an engine of `graph` may have on its recorded inputs."""
    return max(GRAPH_TOLERANCES[dtype], 2 * graph.parity.compiled)


def _replay_graphs(artifact: Artifact, progress: Progress) -> list[ComparisonLog]:
    from mingc.verify.graph_goldens import replay_graph

    logs: list[ComparisonLog] = []
    for stage, record in artifact.manifest.stages.items():
        for name, graph in record.graphs.items():
            title = f"{stage}.{name}"
            progress(title)
            tolerance = engine_tolerance(graph, artifact.manifest.fingerprint.dtype)
            logs.append(replay_graph(artifact, record, graph, name=title, tolerance=tolerance))
    return logs


def _replay_requests(artifact: Artifact, progress: Progress) -> list[ComparisonLog]:
    """Compare the parameters that requests were recorded with, then the answers in every way to serve."""
    from mingc.verify.served.verification import replay_served

    if artifact.manifest.served_goldens is None:
        return [_explain_missing_requests(artifact.manifest)]
    parameters, *ways = replay_served(artifact, progress)
    parameters.note = "compared with the recorded requests"
    for log in ways:
        log.note = "requests through the service"
    return [parameters, *ways]


def _explain_missing_requests(manifest: Manifest) -> ComparisonLog:
    """Report the export's reason for recording no requests; a failure if it gave none."""
    from mingc.verify.comparison_log import ComparisonLog

    reasons = [note for note in manifest.notes if note.startswith(NO_SERVED_GOLDENS)]
    log = ComparisonLog("recorded requests", {}, tolerance=0.0, is_exact=True)
    log.note = reasons[0] if reasons else ""
    if not reasons:
        log.rule("reason", False, "the manifest names no recorded requests and no reason; export again")
    return log
