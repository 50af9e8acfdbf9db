"""The steps of `verify` and its report, over replays that only note what they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.manifest import EngineRecord, Manifest, Parity, TargetRecord
from mingc.errors import ArtifactError, ConfigError
from mingc.host.machine import Host
from mingc.runtime.engines import choice
from mingc.verify import self_check, verification
from mingc.verify.comparison import Comparison, FileSummary, Outcome
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.verification import VerifyReport, engine_tolerance, verify


def row(name: str, outcome: Outcome) -> Comparison:
    return Comparison(name=name, kind="ids", identical=outcome == "pass", outcome=outcome)


def result(name: str, *outcomes: Outcome, checked: int, names: tuple[str, ...] = ()) -> Any:
    """A replayed file, with other counts than its rows so that the two differ."""
    summary = FileSummary(
        file=name, checked=checked, failed=0, inputs=0, not_outputs=len(names), worst_error=0.0
    )
    return summary, [row(name, each) for each in outcomes], [*names]


@pytest.fixture
def two_backends(manifest: Manifest) -> Manifest:
    """Engines of AOTInductor and ONNX Runtime for a CPU, and of AOTInductor for a GPU that is not there."""
    stage = manifest.stages["audio_encoder"]
    graph = replace(
        stage.graphs["encode"],
        engines=tuple(
            EngineRecord(backend=backend, file=f"engines/{backend}", dims=None, compile_seconds=0.0)
            for backend in ("aoti", "onnx")
        ),
        backend_parity={
            "aoti": Parity(compiled=1e-6, eager=0.0),
            "onnx": Parity(compiled=1e-3, eager=0.0),
        },
        parity=Parity(compiled=1e-6, eager=0.0),
    )
    own = {"audio_encoder": replace(stage, graphs={"encode": graph})}
    gpu = TargetRecord(
        target="cuda", device="cuda", capability="9.0", stages=manifest.stages, parameters=manifest.parameters
    )
    return replace(manifest, stages=own, other_targets=(gpu,))


@pytest.fixture
def calls(two_backends: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called in order: hashes, replays and the backends of the artifact that they have."""
    noted: list[Any] = []
    artifact = Artifact(root=tmp_path / "artifact", manifest=two_backends)

    def backends(given: Artifact) -> tuple[str, ...]:
        assert given.manifest.fingerprint.target == "cpu"
        return given.manifest.stages["audio_encoder"].graphs["encode"].backends

    def checked(given: Artifact, progress: Callable[[str], None]) -> list[Any]:
        noted.append(("self-check", backends(given)))
        return [result("encode", "pass", "FAIL", "not checked", checked=20)]

    def served(given: Artifact, engines: tuple[str, ...], progress: Callable[[str], None]) -> list[Any]:
        noted.append(("served", backends(given), engines))
        return [result("requests", "expected difference", "FAIL", "expected difference", checked=300)]

    def compared(given: Artifact, folder: Path, progress: Callable[[str], None]) -> list[Any]:
        noted.append(("reference", backends(given), folder))
        return [result("vae", "expected difference", checked=4000, names=("vae: inner",))]

    def host(device: str) -> Host:
        return Host(torch="2.13.0", device="cpu", capability="AVX2")

    monkeypatch.setattr("mingc.host.machine.current_host", host)
    monkeypatch.setattr(verification, "open_artifact", lambda path: artifact)
    monkeypatch.setattr(verification, "check_hashes", lambda given: noted.append("hashed"))
    monkeypatch.setattr(verification, "_self_check", checked)
    monkeypatch.setattr(verification, "_replay_served", served)
    monkeypatch.setattr(verification, "_replay_reference", compared)
    monkeypatch.setattr(choice, "unavailable", lambda backend, device: None)
    return noted


def test_a_report_counts_what_its_files_and_comparisons_say(
    calls: list[Any], two_backends: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "vae.safetensors").touch()
    report = verify(Path("given"), reference=tmp_path, progress=calls.append)
    both = ("aoti", "onnx")
    assert calls == [
        "hashes",
        "hashed",
        ("self-check", both),
        ("served", both[:1], ()),
        ("reference", both[:1], tmp_path),
    ]
    (gpu,) = report.not_replayed
    assert gpu.startswith("engines for cuda: ")
    encode: Any = result("encode", "pass", "FAIL", "not checked", checked=20)
    requests: Any = result("requests", "expected difference", "FAIL", "expected difference", checked=300)
    vae: Any = result("vae", "expected difference", checked=4000, names=("vae: inner",))
    assert report == VerifyReport(
        artifact=Path("given"),
        passed=False,
        checked=4320,
        failed=2,
        expected_differences=3,
        files_hashed=len(two_backends.files),
        files=(encode[0], requests[0], vae[0]),
        comparisons=(*encode[1], *requests[1], *vae[1]),
        not_replayed=(gpu,),
        not_engine_outputs=("vae: inner",),
    )


def test_engines_that_are_asked_for_are_the_only_ones_replayed(calls: list[Any]) -> None:
    verify(Path("given"), engines=["audio_encoder=onnx"])
    asked = ("audio_encoder=onnx",)
    assert calls == ["hashed", ("self-check", ("onnx",)), ("served", ("onnx",), asked)]


def test_wrong_words_are_refused_before_the_files_are_read(calls: list[Any], tmp_path: Path) -> None:
    for wrong in ({"engines": ["onnx"]}, {"reference": tmp_path}):
        with pytest.raises(ConfigError):
            verify(Path("given"), **wrong)  # type: ignore[arg-type]
    assert calls == []
    with pytest.raises(ConfigError, match="painter"):
        verify(Path("given"), engines=["painter=onnx"])
    with pytest.raises(ConfigError, match="tpu"):
        verify(Path("given"), target="tpu")


def test_every_backend_must_be_there_unless_engines_are_named(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = {"onnx": ("not there", "install it")}
    monkeypatch.setattr(choice, "unavailable", lambda backend, device: lacks.get(backend))
    with pytest.raises(ArtifactError, match="need backend onnx: not there") as caught:
        verify(Path("given"))
    assert caught.value.where == "given" and calls == ["hashed"]
    verify(Path("given"), engines=["audio_encoder=aoti"])
    assert calls[2:] == [("self-check", ("aoti",)), ("served", ("aoti",), ("audio_encoder=aoti",))]


def test_the_engines_of_each_backend_have_their_own_tolerance(
    two_backends: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[str, str, float]] = []

    def replay(artifact: Any, record: Any, view: Any, *, name: str, tolerance: float) -> ComparisonLog:
        compared.append((name, view.backends[0], tolerance))
        return ComparisonLog(name, {}, tolerance=tolerance, is_exact=False)

    monkeypatch.setattr(self_check, "replay", replay)
    steps: list[str] = []
    results = verification._self_check(Artifact(root=tmp_path, manifest=two_backends), steps.append)
    names = ["audio_encoder.encode", "audio_encoder.encode (onnx)"]
    assert compared == [(names[0], "aoti", compared[0][2]), (names[1], "onnx", 2e-3)]
    assert compared[0][2] < 2e-3 and steps == names
    assert [(summary.file, summary.note) for summary, _, _ in results] == [
        (each, "self-check") for each in names
    ]
    graph = two_backends.stages["audio_encoder"].graphs["encode"]
    rough = replace(graph, parity=Parity(compiled=0.5, eager=0.0))
    assert engine_tolerance(rough, "float32") == engine_tolerance(rough, "bfloat16") == 1.0


def test_recorded_requests_come_with_the_parameters_they_are_compared_with(
    two_backends: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mingc.verify.served import verification as served

    def replay_served(artifact: Any, progress: Any, engines: tuple[str, ...]) -> list[ComparisonLog]:
        progress("served")
        assert engines == ("cfm=onnx",)
        return [ComparisonLog(each, {}, tolerance=1.0, is_exact=False) for each in ("first", "a", "b")]

    monkeypatch.setattr(served, "replay_served", replay_served)
    artifact = Artifact(root=tmp_path, manifest=two_backends)
    steps: list[str] = []
    ((summary, (row,), _),) = verification._replay_served(artifact, ("cfm=onnx",), steps.append)
    assert (summary.checked, summary.failed, row.outcome, steps) == (1, 1, "FAIL", []), "nothing says why not"
    with_requests = replace(artifact, manifest=replace(two_backends, served_goldens="goldens/served"))
    found = verification._replay_served(with_requests, ("cfm=onnx",), steps.append)
    requests = "requests through the service"
    assert steps == ["served"] and [(summary.file, summary.note) for summary, _, _ in found] == [
        ("first", "those of the recorded requests"),
        ("a", requests),
        ("b", requests),
    ]


def test_a_document_without_tensors_is_replayed(tmp_path: Path) -> None:
    fingerprint = SimpleNamespace(dtype="bfloat16")
    engines: Any = SimpleNamespace(
        artifact=SimpleNamespace(manifest=SimpleNamespace(fingerprint=fingerprint, stages={})),
        has=lambda *stages: True,
    )
    seen: list[Any] = []

    def run(log: ComparisonLog, document: Any) -> None:
        seen.append((document, log.is_exact))
        log.text("x", "same", "same")

    none, rows, _ = verification._replay_file(engines, tmp_path, "text.json", "text.json", (), run)
    assert (none.note, rows, seen) == ("no golden file found", [], [])
    (tmp_path / "text.json").write_text('{"cases": []}')
    _, rows, _ = verification._replay_file(engines, tmp_path, "text.json", "text.json", (), run)
    assert [each.outcome for each in rows] == ["pass"]
    assert seen == [({"cases": []}, False)]


@pytest.mark.parametrize("name", ["text.json", "thinker.json", "vae.safetensors"])
def test_one_golden_file_is_enough(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no golden file") as caught:
        verification._check_reference(tmp_path, replay=True)
    assert (caught.value.fix or "").startswith("pass a folder with at least one of preprocess.safetensors, ")
    (tmp_path / name).touch()
    verification._check_reference(tmp_path, replay=True)
