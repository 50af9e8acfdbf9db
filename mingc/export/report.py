"""The report of an export, for the console and `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mingc.artifacts.manifest import Manifest
from mingc.export.tasks.check_graph import GraphResult


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


def report_export(
    output: Path,
    manifest: Manifest,
    results: Sequence[GraphResult],
    *,
    peak_rss_bytes: int,
    seconds: float,
) -> ExportReport:
    """Sizes, times and errors of the artifact at `output`."""
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
        for result in sorted(results, key=lambda each: (order[each.stage], each.record.spec.name))
    ]
    sizes = [
        sum(manifest.files[file].size_bytes for file in files)
        for stage in manifest.stages.values()
        for files in stage.weights
    ]
    return ExportReport(
        output=str(output),
        model=manifest.model,
        graphs=tuple(rows),
        weights_bytes=sum(sizes),
        largest_weights_bytes=max(sizes),
        artifact_bytes=sum(record.size_bytes for record in manifest.files.values()),
        seconds=seconds,
        peak_rss_bytes=peak_rss_bytes,
        notes=manifest.notes,
    )
