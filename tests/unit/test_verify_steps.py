"""The steps of `verify` and its report, over replays that only note what they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.manifest import Manifest, Parity
from mingc.errors import ArtifactError, ConfigError
from mingc.host.machine import Host
from mingc.runtime.engines import backends
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
def calls(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called in order: hashes and replays."""
    noted: list[Any] = []
    artifact = Artifact(root=tmp_path / "artifact", manifest=manifest)

    def checked(given: Artifact, progress: Callable[[str], None]) -> list[Any]:
        assert given is artifact
        noted.append("self-check")
        return [result("encode", "pass", "FAIL", "not checked", checked=20)]

    def served(given: Artifact, progress: Callable[[str], None]) -> list[Any]:
        assert given is artifact
        noted.append("served")
        return [result("requests", "expected difference", "FAIL", "expected difference", checked=300)]

    def compared(given: Artifact, folder: Path, progress: Callable[[str], None]) -> list[Any]:
        assert given is artifact
        noted.append(("reference", folder))
        return [result("vae", "expected difference", checked=4000, names=("vae: inner",))]

    def host(device: str) -> Host:
        return Host(torch="2.13.0", device="cpu", capability="AVX2")

    monkeypatch.setattr("mingc.host.machine.current_host", host)
    monkeypatch.setattr(verification, "open_artifact", lambda path: artifact)
    monkeypatch.setattr(verification, "check_hashes", lambda given: noted.append("hashed"))
    monkeypatch.setattr(verification, "_self_check", checked)
    monkeypatch.setattr(verification, "_replay_served", served)
    monkeypatch.setattr(verification, "_replay_reference", compared)
    return noted


def test_a_report_counts_what_its_files_and_comparisons_say(
    calls: list[Any], manifest: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "vae.safetensors").touch()
    report = verify(Path("given"), reference=tmp_path, progress=calls.append)
    assert calls == ["hashes", "hashed", "self-check", "served", ("reference", tmp_path)]
    encode: Any = result("encode", "pass", "FAIL", "not checked", checked=20)
    requests: Any = result("requests", "expected difference", "FAIL", "expected difference", checked=300)
    vae: Any = result("vae", "expected difference", checked=4000, names=("vae: inner",))
    assert report == VerifyReport(
        artifact=Path("given"),
        passed=False,
        checked=4320,
        failed=2,
        expected_differences=3,
        files_hashed=len(manifest.files),
        files=(encode[0], requests[0], vae[0]),
        comparisons=(*encode[1], *requests[1], *vae[1]),
        not_engine_outputs=("vae: inner",),
    )


def test_a_wrong_reference_is_refused_before_the_files_are_read(calls: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        verify(Path("given"), reference=tmp_path)
    assert calls == []


def test_every_backend_must_be_there(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "unavailable", lambda backend, device: ("not there", "install it"))
    with pytest.raises(ArtifactError, match="need backend aoti: not there") as caught:
        verify(Path("given"))
    assert caught.value.fix == "install it" and calls == ["hashed"]


def test_the_tolerance_of_an_engine_follows_its_parity(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[str, float]] = []

    def replay(artifact: Any, record: Any, view: Any, *, name: str, tolerance: float) -> ComparisonLog:
        compared.append((name, tolerance))
        return ComparisonLog(name, {}, tolerance=tolerance, is_exact=False)

    monkeypatch.setattr(self_check, "replay", replay)
    steps: list[str] = []
    stage = manifest.stages["audio_encoder"]
    poor = replace(stage.graphs["encode"], parity=Parity(compiled=1e-3, eager=0.0))
    changed = replace(manifest, stages={"audio_encoder": replace(stage, graphs={"encode": poor})})
    results = verification._self_check(Artifact(root=tmp_path, manifest=changed), steps.append)
    assert compared == [("audio_encoder.encode", 2e-3)] and steps == ["audio_encoder.encode"]
    assert [(summary.file, summary.note) for summary, _, _ in results] == [
        ("audio_encoder.encode", "self-check")
    ]
    rough = replace(poor, parity=Parity(compiled=0.5, eager=0.0))
    assert engine_tolerance(rough, "float32") == engine_tolerance(rough, "bfloat16") == 1.0


def test_recorded_requests_come_with_the_parameters_they_are_compared_with(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mingc.verify.served import verification as served

    def replay_served(artifact: Any, progress: Any) -> list[ComparisonLog]:
        progress("served")
        return [ComparisonLog(each, {}, tolerance=1.0, is_exact=False) for each in ("first", "a", "b")]

    monkeypatch.setattr(served, "replay_served", replay_served)
    artifact = Artifact(root=tmp_path, manifest=manifest)
    steps: list[str] = []
    ((summary, (row,), _),) = verification._replay_served(artifact, steps.append)
    assert (summary.checked, summary.failed, row.outcome, steps) == (1, 1, "FAIL", []), "nothing says why not"
    with_requests = replace(artifact, manifest=replace(manifest, served_goldens="goldens/served"))
    found = verification._replay_served(with_requests, steps.append)
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
