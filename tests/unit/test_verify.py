"""`verify`: hashes, versions, the replay of recorded graphs, and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mingc.artifacts.artifact import Artifact, write_manifest
from mingc.artifacts.manifest import FILE_NAME, EngineRecord, GraphRecord, Manifest, Parity
from mingc.artifacts.spec import TensorSpec
from mingc.artifacts.target import Host
from mingc.errors import ArtifactError, IncompatibleError, IntegrityError
from mingc.host import machine as host
from mingc.runtime.engines import backends
from mingc.verify import graph_goldens
from mingc.verify.comparison import FileSummary
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.graph_goldens import replay_graph
from mingc.verify.served import verification as served
from mingc.verify.verification import VerifyReport, engine_tolerance, verify

Tensors = dict[str, torch.Tensor]
Replace = Callable[[Callable[..., Any]], None]

REASON = "no served goldens: not asked for"


def test_an_intact_artifact_passes(artifact_path: Path) -> None:
    steps: list[str] = []
    report = verify(artifact_path, replay=False, progress=steps.append)
    assert report == VerifyReport(
        artifact=artifact_path,
        passed=True,
        checked=0,
        failed=0,
        expected_differences=0,
        files_hashed=4,
        files=(),
        comparisons=(),
    )
    assert steps == ["hashes"]


def test_a_changed_byte_is_found(artifact_path: Path) -> None:
    path = artifact_path / "weights/audio.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(IntegrityError, match=r"weights/audio\.bin: sha256 differs"):
        verify(artifact_path, replay=False)


def test_another_torch_is_refused_before_anything_is_loaded(
    artifact_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", "2.12.0")
    with pytest.raises(IncompatibleError, match=r"torch: built with 2\.13\.0, here 2\.12\.0"):
        verify(artifact_path)


@pytest.fixture
def fitting_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that the artifact was built for."""
    monkeypatch.setattr(
        host, "current_host", lambda device: Host(torch="2.13.0", device="cpu", capability="AVX2")
    )


def rewrite(artifact_path: Path, manifest: Manifest) -> None:
    (artifact_path / FILE_NAME).unlink()  # not a file of its own table
    write_manifest(artifact_path, manifest)


def compared(name: str, *, error: float, tolerance: float) -> ComparisonLog:
    """A log with one comparison."""
    log = ComparisonLog(name, {"out.y": np.ones(4)}, tolerance=tolerance, is_exact=False)
    log.tensor("out.y", np.full(4, 1 + error))
    return log


@pytest.mark.usefixtures("fitting_host")
@pytest.mark.parametrize(
    ("dtype", "parity", "error", "passes"),
    [
        ("float32", 1e-6, 0.9e-4, True),
        ("float32", 1e-6, 1.1e-4, False),
        ("float32", 1e-3, 1.9e-3, True),  # twice what the export measured
        ("float32", 1e-3, 2.1e-3, False),
        ("bfloat16", 1e-3, 2.9e-2, True),
        ("bfloat16", 1e-3, 3.1e-2, False),
    ],
)
def test_an_artifact_passes_if_its_graphs_are_as_close_as_at_export(
    dtype: str,
    parity: float,
    error: float,
    passes: bool,
    manifest: Manifest,
    artifact_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (stage,) = manifest.stages.values()
    graph = replace(stage.graphs["encode"], parity=Parity(compiled=parity, eager=0.0))
    changed = replace(
        manifest,
        fingerprint=replace(manifest.fingerprint, dtype=dtype),
        stages={"audio_encoder": replace(stage, graphs={"encode": graph})},
        notes=(REASON,),
    )
    rewrite(artifact_path, changed)
    monkeypatch.setattr(
        graph_goldens,
        "replay_graph",
        lambda *_, name, tolerance: compared(name, error=error, tolerance=tolerance),
    )
    steps: list[str] = []
    report = verify(artifact_path, progress=steps.append)
    assert (report.passed, report.failed, report.checked) == (passes, int(not passes), 1)
    assert steps == ["hashes", "audio_encoder.encode"]
    rough = replace(graph, parity=Parity(compiled=0.5, eager=0.0))
    assert engine_tolerance(rough, dtype) == 1.0


@pytest.mark.usefixtures("fitting_host")
@pytest.mark.parametrize(("notes", "passes"), [((), False), ((REASON,), True)])
def test_an_artifact_without_recorded_requests_needs_a_reason(
    notes: tuple[str, ...],
    passes: bool,
    manifest: Manifest,
    artifact_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rewrite(artifact_path, replace(manifest, notes=notes))
    monkeypatch.setattr(
        graph_goldens,
        "replay_graph",
        lambda *_, name, tolerance: ComparisonLog(name, {}, tolerance=tolerance, is_exact=True),
    )
    report = verify(artifact_path)
    (summary,) = (each for each in report.files if each.file == "recorded requests")
    assert (report.passed, summary.failed, summary.note) == (passes, int(not passes), "".join(notes))


@pytest.mark.usefixtures("fitting_host")
def test_a_report_has_every_graph_and_every_way_to_serve(
    manifest: Manifest, artifact_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(artifact_path, replace(manifest, served_goldens="voices/DB30.bin"))
    graph = compared("audio_encoder.encode", error=1.0, tolerance=1e-4)
    requests = [compared(name, error=1e-5, tolerance=1e-4) for name in ("parameters", "usual", "pairs")]

    def replay_served(artifact: Artifact, progress: Callable[[str], None]) -> list[ComparisonLog]:
        assert artifact.root == artifact_path
        progress("served")
        return requests

    monkeypatch.setattr(graph_goldens, "replay_graph", lambda *_, name, tolerance: graph)
    monkeypatch.setattr(served, "replay_served", replay_served)
    steps: list[str] = []
    report = verify(artifact_path, progress=steps.append)
    assert steps == ["hashes", "audio_encoder.encode", "served"]
    assert (report.passed, report.checked, report.failed, report.files_hashed) == (False, 4, 1, 4)
    assert report.comparisons == tuple(row for log in (graph, *requests) for row in log.comparisons)

    def summary(name: str, note: str, *, failed: int = 0, error: float) -> FileSummary:
        return FileSummary(
            file=name,
            checked=1,
            failed=failed,
            inputs=0,
            not_outputs=0,
            worst_error=pytest.approx(error),  # type: ignore[arg-type]
            note=note,
        )

    assert report.files == (
        summary("audio_encoder.encode", "", failed=1, error=1.0),
        summary("parameters", "compared with the recorded requests", error=1e-5),
        summary("usual", "requests through the service", error=1e-5),
        summary("pairs", "requests through the service", error=1e-5),
    )


@pytest.mark.usefixtures("fitting_host")
def test_the_backend_of_the_engines_must_be_installed(
    artifact_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "unavailable", lambda backend, device: ("not there", "install it"))
    with pytest.raises(ArtifactError, match="need backend aoti: not there") as caught:
        verify(artifact_path)
    assert caught.value.where == str(artifact_path)


RECORDED = {"in.mel": torch.ones(1, 2, 4, 128), "out.embeddings": torch.ones(1, 2, 64)}
WITH_STATE = RECORDED | {"state.cache": torch.zeros(3, 5), "state_after.cache": torch.ones(3, 5)}


@pytest.fixture
def graph(manifest: Manifest) -> GraphRecord:
    """The graph of the audio encoder, with a state."""
    graph = manifest.stages["audio_encoder"].graphs["encode"]
    cache = TensorSpec(name="cache", dtype="float32", shape=(3, 5))
    return replace(graph, spec=replace(graph.spec, state=(cache,)))


def replayed(
    manifest: Manifest,
    root: Path,
    graph: GraphRecord,
    recorded: Mapping[str, torch.Tensor],
    *,
    weights: tuple[tuple[str, ...], ...] = (("weights/audio.bin",),),
) -> ComparisonLog:
    """The comparisons of `graph` with `recorded`, written as its golden file."""
    save_file(dict(recorded), root / graph.golden)
    stage = replace(manifest.stages["audio_encoder"], weights=weights)
    return replay_graph(Artifact(root=root, manifest=manifest), stage, graph, name="encode", tolerance=1e-4)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """Replaces the run of an engine by a function."""
    return lambda run: monkeypatch.setattr(graph_goldens, "run_engine", run)


@pytest.mark.parametrize(("error", "passes"), [(0.0, True), (0.9e-4, True), (1.1e-4, False), (np.nan, False)])
@pytest.mark.parametrize("spoiled", ["embeddings", "state.cache"])
def test_outputs_and_state_of_an_engine_are_compared(
    error: float,
    passes: bool,
    spoiled: str,
    manifest: Manifest,
    graph: GraphRecord,
    artifact_path: Path,
    engine: Replace,
) -> None:
    made = {"embeddings": torch.ones(1, 2, 64), "state.cache": torch.ones(3, 5)}
    made[spoiled].view(-1)[3] += error
    engine(lambda *_: [made])
    summary = replayed(manifest, artifact_path, graph, WITH_STATE).summary()
    assert (summary.checked, summary.failed, summary.inputs) == (2, int(not passes), 2)
    assert summary.note == "self-check"


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"out.embeddings": None}, "records no out.embeddings"),
        ({"state_after.cache": None}, "records no state_after.cache"),
        ({"state.cache": torch.zeros(3, 5, dtype=torch.int64)}, "records int64 as cache, the signature says"),
        ({"in.mel": None}, "records nothing as mel, the signature says float32"),
    ],
)
def test_a_recorded_file_that_does_not_fit_its_graph_fails(
    changed: Mapping[str, torch.Tensor | None],
    found: str,
    manifest: Manifest,
    graph: GraphRecord,
    artifact_path: Path,
    engine: Replace,
) -> None:
    engine(lambda *_: pytest.fail("nothing to run it on"))
    recorded = {name: value for name, value in {**WITH_STATE, **changed}.items() if value is not None}
    (row,) = replayed(manifest, artifact_path, graph, recorded).comparisons
    assert row.outcome == "FAIL" and f"{graph.golden} {found}" in row.note


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_memory_that_is_lacking_is_no_fault_of_the_engine(
    error: Exception, manifest: Manifest, artifact_path: Path, engine: Replace
) -> None:
    def fail(*_: object) -> None:
        raise error

    engine(fail)
    plain = manifest.stages["audio_encoder"].graphs["encode"]
    with pytest.raises(type(error)):
        replayed(manifest, artifact_path, plain, RECORDED)


@pytest.mark.parametrize("error", [TypeError("missing argument"), RuntimeError("wrong size")])
def test_an_engine_that_does_not_run_is_a_failure(
    error: Exception, manifest: Manifest, artifact_path: Path, engine: Replace
) -> None:
    def fail(*_: object) -> None:
        raise error

    engine(fail)
    plain = manifest.stages["audio_encoder"].graphs["encode"]
    (row,) = replayed(manifest, artifact_path, plain, RECORDED).comparisons
    assert row.outcome == "FAIL" and str(error) in row.note


def test_every_rank_runs_on_what_was_recorded(
    manifest: Manifest, graph: GraphRecord, artifact_path: Path, engine: Replace
) -> None:
    calls: list[Any] = []

    def run_engine(*arguments: Any) -> list[Tensors]:
        calls.append(arguments)
        return [{"embeddings": torch.ones(1, 2, 64)}]

    engine(run_engine)
    recorded = RECORDED | {
        "state.cache": torch.zeros(3, 5)
    }  # the state afterwards is another one on every rank
    ranks = (("weights/audio.bin", "engines/encode.pt2"), ("voices/DB30.bin",))
    manifest = replace(
        manifest, stages={"audio_encoder": replace(manifest.stages["audio_encoder"], is_sharded=True)}
    )
    summary = replayed(manifest, artifact_path, graph, recorded, weights=ranks).summary()
    assert (summary.checked, summary.failed, summary.inputs) == (1, 0, 2)
    ((path, backend, spec, weights, (given,), device),) = calls
    assert (path, backend, spec, device) == (artifact_path / "engines/encode.pt2", "aoti", graph.spec, "cpu")
    assert [[each.name for each in files] for files in weights] == [[*files] for files in ranks]
    assert given.keys() == {"mel", "cache"} and torch.equal(given["cache"], recorded["state.cache"])


@pytest.mark.parametrize(
    ("dims", "chosen"),
    [
        ([{"N": n, "T4": t} for n in (1, 2) for t in (8, 16)], 2),
        ([{"N": 1, "P": 7}, {"N": 2, "P": 7}], 1),  # sizes that an engine does not know do not exclude it
        ([None], 0),
    ],
)
def test_the_engine_of_the_recorded_sizes_runs(
    dims: Sequence[dict[str, int] | None],
    chosen: int,
    manifest: Manifest,
    artifact_path: Path,
    engine: Replace,
) -> None:
    plain = manifest.stages["audio_encoder"].graphs["encode"]
    engines = tuple(
        EngineRecord(backend="aoti", file=f"engines/{index}", dims=sizes, compile_seconds=0.0)
        for index, sizes in enumerate(dims)
    )
    ran: list[str] = []

    def run_engine(path: Path, *_: object) -> list[Tensors]:
        ran.append(path.name)
        return [{"embeddings": torch.ones(2, 8, 64)}]

    engine(run_engine)
    recorded = {"in.mel": torch.ones(2, 8, 4, 128), "out.embeddings": torch.ones(2, 8, 64)}
    replayed(manifest, artifact_path, replace(plain, engines=engines), recorded)
    assert ran == [str(chosen)]
