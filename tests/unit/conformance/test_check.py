"""Replay of golden files: tolerances, what is left out, and the command `python -m conformance`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from mingc_command import DATA, conformance
from safetensors.numpy import save_file

from conformance import audio, check, preprocess, reference_log, talker, text
from conformance.__main__ import main
from conformance.check import GOLDEN_FILES, replay_file
from conformance.engines import Engines
from conformance.reference_log import ReferenceLog
from conformance.thinker import batches, layer_quantization, reference_routing
from conformance.thinker.prompt_replay import replay_prompts
from mingc.artifacts.artifact import Artifact
from mingc.artifacts.manifest import Manifest, Parity, QuantizationError
from mingc.verify.comparison_log import ComparisonLog

ONES = np.ones(64, np.float32)


def engines(dtype: str = "float32", *stages: str) -> Any:
    """Engines of an artifact whose stages have no graphs."""
    manifest = SimpleNamespace(fingerprint=SimpleNamespace(dtype=dtype))
    return SimpleNamespace(
        artifact=SimpleNamespace(manifest=manifest),
        has=lambda *names: {*names} <= {*stages},
        quantization_of=lambda names: 0.0,
        parameters_of=lambda stage, kind: object(),
    )


def replayed(
    folder: Path, given: Any, name: str, run: Callable[[ReferenceLog, Mapping[str, Any]], None]
) -> ReferenceLog:
    """The log of the golden file `name` with `run` in place of its replay."""
    (file,) = (each for each in GOLDEN_FILES if each.name == name)
    return replay_file(given, folder, replace(file, replay=lambda _, log, document: run(log, document)))


@pytest.mark.parametrize(
    ("dtype", "error", "passes"),
    [
        ("float32", 0.9e-4, True),
        ("float32", 1.1e-4, False),
        ("bfloat16", 0.9e-1, True),
        ("bfloat16", 1.1e-1, False),
    ],
)
def test_values_pass_within_the_documented_tolerance(
    dtype: str, error: float, passes: bool, tmp_path: Path
) -> None:
    """One value of many is off, so that not the scale of all but this value decides."""
    save_file({"one.embeds": ONES}, tmp_path / "vision.safetensors")
    value = ONES.copy()
    value[7] += error
    log = replayed(
        tmp_path,
        engines(dtype, "vision_encoder"),
        "vision.safetensors",
        lambda log, _: log.tensor("one.embeds", value),
    )
    assert (log.summary().checked, log.summary().failed) == (1, int(not passes))


def test_limits_are_those_of_the_documentation() -> None:
    """docs/verification.md."""
    assert (reference_log._STEPS, reference_log._MAX_QUANTIZATION_ERROR) == (4, 0.5)
    assert (preprocess.PIXEL_TOLERANCE, audio.MEL_TOLERANCE, talker.FBANK_TOLERANCE) == (1e-5, 1e-5, 1e-4)
    assert text.NORMALISED_SHARE == 0.95
    assert (reference_routing._TOLERANCE, reference_routing._MIN_KEPT) == (3e-2, 0.9)
    assert reference_routing._QUANTIZED_LOGITS == 0.1
    assert (batches._MIN_KEPT, batches._MIN_KEPT_MULTI_RANK, batches._MIN_EXPLAINED) == (0.8, 0.5, 0.9)
    assert (layer_quantization._FACTOR, layer_quantization._MIN_KEPT) == (2.0, 0.75)
    assert (layer_quantization._ROUNDING, layer_quantization._SCALE) == (1e-3, 0.015)


def test_quantization_widens_the_comparison_of_stages_that_do_not_record_its_error(
    manifest: Manifest,
) -> None:
    (stage,) = manifest.stages.values()
    graph = replace(stage.graphs["encode"], parity=Parity(compiled=0.0, eager=0.0, quantization=0.05))
    rough = replace(stage, graphs={"encode": graph})
    per_layer = QuantizationError(tokens=1, layer_cosine=(1.0,), logit_kl=0.0, same_argmax=1.0)
    stages = {"cfm": rough, "thinker": replace(rough, quantization_error=per_layer), "talker": stage}
    found = Engines(Artifact(root=Path("nowhere"), manifest=replace(manifest, stages=stages)))
    assert found.quantization_of(("cfm", "talker")) == 0.05
    assert found.quantization_of(("talker", "absent")) == found.quantization_of(("thinker",)) == 0.0


@pytest.mark.parametrize(
    "run", [lambda log, _: None, lambda log, _: replay_prompts(engines("float32", "thinker"), log, {})]
)
def test_a_golden_file_without_known_values_fails(
    tmp_path: Path, run: Callable[[ReferenceLog, object], None]
) -> None:
    save_file({"other.values": np.zeros(3, np.float32)}, tmp_path / "thinker.safetensors")
    log = replayed(tmp_path, engines("float32", "thinker"), "thinker.safetensors", run)
    assert log.summary().failed == 1
    assert "thinker.safetensors holds no value that can be replayed" in log.comparisons[0].note


def test_a_file_is_left_out_without_a_stage_that_it_needs(tmp_path: Path) -> None:
    save_file({"one.embeds": ONES}, tmp_path / "vision.safetensors")
    for name, note in (
        ("vision.safetensors", "this artifact has no vision_encoder"),
        ("audio.safetensors", "no golden file found"),
    ):
        log = replayed(tmp_path, engines(), name, lambda *_: pytest.fail("replayed"))
        assert (log.note, log.comparisons) == (note, [])


def test_a_document_without_tensors_is_replayed(tmp_path: Path) -> None:
    seen: list[object] = []

    def run(log: ReferenceLog, document: Mapping[str, Any]) -> None:
        seen.append((document, log.is_exact))
        log.text("x", "same", "same")

    (tmp_path / "text.json").write_text('{"cases": []}')
    log = replayed(tmp_path, engines("bfloat16"), "text.json", run)
    assert [each.outcome for each in log.comparisons] == ["pass"]
    assert seen == [({"cases": []}, False)]


def test_a_speaker_network_that_does_not_run_is_a_failure(manifest: Manifest, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "net.onnx").write_bytes(b"no network")
    references = {"voice.A.spk_emb_raw": ONES, "voice.A.spk_wav16k": np.zeros((1, 16000), np.float32)}
    artifact = Artifact(root=tmp_path, manifest=replace(manifest, speaker_network="net.onnx"))
    log = ReferenceLog("talker", references, tolerance=1e-4, is_exact=True)
    talker.replay_speech(Engines(artifact), log, {})
    (row,) = (each for each in log.comparisons if each.outcome == "FAIL")
    assert "the speaker network does not run" in row.note


def command(monkeypatch: pytest.MonkeyPatch, artifact: Path, reference: Path, *words: object) -> Result:
    """The command without the part that `mingc verify` has as well, but for one comparison of it."""
    own = ComparisonLog("graph", {}, tolerance=1e-4, is_exact=True)
    own.rule("own", True, "of the artifact itself")
    monkeypatch.setattr(check, "replay_recorded", lambda artifact, progress: [own])
    files = tuple(each for each in GOLDEN_FILES if each.name == "text.json")
    monkeypatch.setattr(check, "GOLDEN_FILES", files)
    return CliRunner().invoke(main, [str(artifact), "--reference", str(reference), *map(str, words)])


def test_the_report_has_the_comparisons_of_verify_and_of_the_golden_set(
    artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = command(monkeypatch, artifact_path, DATA, "--json", tmp_path / "report.json")
    assert (found.exit_code, found.stdout) == (0, "")
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    names = [row["name"] for row in report["comparisons"]]
    assert report["passed"] and report["files_hashed"] == 4
    assert names[0] == "graph: own" and "text: segmentation.0" in names
    assert [row["file"] for row in report["files"]] == ["graph", "text.json"]
    lines = found.stderr.splitlines()
    assert lines[:2] == ["conformance: hashes", "conformance: text.json"]
    assert lines[-1] == f"conformance: {report['checked']} comparisons, 0 failed, 0 expected differences"
    table = command(monkeypatch, artifact_path, DATA).stdout
    assert "passed                yes" in table and "text.json" in table


def test_a_difference_exits_with_3(
    artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads((DATA / "text.json").read_text(encoding="utf-8"))
    document["segmentation"][0]["fragments"].append("x")
    (tmp_path / "text.json").write_text(json.dumps(document), encoding="utf-8")
    found = command(monkeypatch, artifact_path, tmp_path, "--json", "-")
    assert found.exit_code == 3
    (row,) = (row for row in json.loads(found.stdout)["comparisons"] if row["outcome"] == "FAIL")
    assert row["name"] == "text: segmentation.0"


def test_what_cannot_be_compared_is_refused_before_hashing(artifact_path: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    for folder, message in ((tmp_path / "nowhere", "is not a folder"), (tmp_path, "holds no golden file")):
        refused = run(main, [str(artifact_path), "--reference", str(folder)])
        assert refused.exit_code == 2 and message in refused.stderr and "hashes" not in refused.stderr
    assert "at least one of preprocess.safetensors, " in refused.stderr
    assert run(main, [str(artifact_path)]).exit_code == 2
    unwritable = ["--json", str(tmp_path / "no" / "file")]
    assert run(main, [str(artifact_path), "--reference", str(DATA), *unwritable]).exit_code == 2
    (artifact_path / "weights/audio.bin").write_bytes(b"!")
    damaged = run(main, [str(artifact_path), "--reference", str(DATA)])
    assert damaged.exit_code == 1 and "weights/audio.bin" in damaged.stderr


def test_the_command_is_found_in_a_checkout() -> None:
    found = conformance("--help")
    assert found.code == 0 and "python -m conformance [OPTIONS] ARTIFACT" in found.stdout
