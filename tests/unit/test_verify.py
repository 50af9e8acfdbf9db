"""`verify` without replay, refused references, and the silence rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

from mingc.artifacts.artifact import Artifact, write_manifest
from mingc.artifacts.manifest import FILE_NAME, GraphRecord, Manifest, Parity, QuantizationError
from mingc.artifacts.spec import TensorSpec
from mingc.artifacts.target import Host
from mingc.cli import commands, main
from mingc.errors import ConfigError, IncompatibleError, IntegrityError
from mingc.host import machine as host
from mingc.verify import self_check
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.golden_documents import read_document
from mingc.verify.replays.talker import _replay_speaker_network
from mingc.verify.replays.thinker.replay import replay
from mingc.verify.verification import _quantization, _read_tensors, _replay_file, verify

ONES = np.ones(64, np.float32)

# A thinker artifact without stages.
ENGINES: Any = SimpleNamespace(
    artifact=SimpleNamespace(
        manifest=SimpleNamespace(fingerprint=SimpleNamespace(dtype="float32"), stages={})
    ),
    parameters_of=lambda stage, kind: object(),
    has=lambda *stages: True,
)


def test_an_intact_artifact_passes(artifact_path: Path) -> None:
    steps: list[str] = []
    report = verify(artifact_path, replay=False, progress=steps.append)
    assert report.passed
    assert report.files_hashed == 4
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


def test_a_reference_without_replay_is_refused(artifact_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--reference requires a replay"):
        verify(artifact_path, reference=tmp_path, replay=False)


def test_a_missing_reference_folder_is_refused_before_hashing(artifact_path: Path) -> None:
    steps: list[str] = []
    with pytest.raises(ConfigError, match="is not a folder"):
        verify(artifact_path, reference=artifact_path / "nowhere", progress=steps.append)
    assert steps == []


def test_a_reference_folder_without_goldens_is_refused_before_hashing(
    artifact_path: Path, tmp_path: Path
) -> None:
    steps: list[str] = []
    with pytest.raises(ConfigError, match="holds no golden file") as caught:
        verify(artifact_path, reference=tmp_path, progress=steps.append)
    assert caught.value.fix is not None and "thinker.safetensors" in caught.value.fix
    assert steps == []


@pytest.mark.parametrize("option", ["--reference", "--against"])
def test_a_reference_may_have_the_former_name_of_its_option(
    option: str, artifact_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["verify", str(artifact_path), option, str(tmp_path / "nowhere")])
    assert f"{tmp_path / 'nowhere'} is not a folder" in capsys.readouterr().err
    assert option == "--reference" or option not in CliRunner().invoke(commands, ["verify", "--help"]).output


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
    def compare(*_: object, name: str, tolerance: float) -> ComparisonLog:
        log = ComparisonLog(name, {"out.y": np.ones(4)}, tolerance=tolerance, is_exact=False)
        log.tensor("out.y", np.full(4, 1 + error))
        return log

    (stage,) = manifest.stages.values()
    graph = replace(stage.graphs["encode"], parity=Parity(compiled=parity, eager=0.0))
    changed = replace(
        manifest,
        fingerprint=replace(manifest.fingerprint, dtype=dtype),
        stages={"audio_encoder": replace(stage, graphs={"encode": graph})},
        notes=("no served goldens: not asked for",),
    )
    (artifact_path / FILE_NAME).unlink()  # not a file of its own table
    write_manifest(artifact_path, changed)
    monkeypatch.setattr(self_check, "replay", compare)
    monkeypatch.setattr(
        host, "current_host", lambda device: Host(torch="2.13.0", device="cpu", capability="AVX2")
    )
    steps: list[str] = []
    report = verify(artifact_path, progress=steps.append)
    assert (report.passed, report.failed, report.checked) == (passes, int(not passes), 1)
    assert steps == ["hashes", "audio_encoder.encode"]


@pytest.mark.parametrize(
    ("notes", "passes"), [((), False), (("no served goldens: the weights are random",), True)]
)
def test_an_artifact_without_recorded_requests_needs_a_reason(
    notes: tuple[str, ...],
    passes: bool,
    manifest: Manifest,
    artifact_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (artifact_path / FILE_NAME).unlink()
    write_manifest(artifact_path, replace(manifest, notes=notes))
    monkeypatch.setattr(
        self_check,
        "replay",
        lambda *_, name, tolerance: ComparisonLog(name, {}, tolerance=tolerance, is_exact=True),
    )
    monkeypatch.setattr(
        host, "current_host", lambda device: Host(torch="2.13.0", device="cpu", capability="AVX2")
    )
    report = verify(artifact_path)
    (summary,) = (each for each in report.files if each.file == "recorded requests")
    assert (report.passed, summary.failed, summary.note) == (passes, int(not passes), "".join(notes))


def test_a_speaker_network_that_does_not_run_is_a_failure(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "net.onnx").write_bytes(b"no network")
    artifact = SimpleNamespace(
        manifest=SimpleNamespace(speaker_network="net.onnx"), path=lambda name: tmp_path / name
    )
    log = ComparisonLog("talker", {}, tolerance=1e-4, is_exact=True)
    engines: Any = SimpleNamespace(artifact=artifact)
    with log.case("voice.*"):
        _replay_speaker_network("voice.A", np.zeros((4, 80), np.float32), engines, log)
    assert "the speaker network does not run" in log.comparisons[0].note
    assert log.comparisons[0].outcome == "FAIL"


def test_quantization_widens_the_comparison_of_stages_that_do_not_record_its_error(
    manifest: Manifest,
) -> None:
    (stage,) = manifest.stages.values()
    graph = replace(stage.graphs["encode"], parity=Parity(compiled=0.0, eager=0.0, quantization=0.05))
    rough = replace(stage, graphs={"encode": graph})
    per_layer = QuantizationError(tokens=1, layer_cosine=(1.0,), logit_kl=0.0, same_argmax=1.0)
    stages = {"cfm": rough, "thinker": replace(rough, quantization_error=per_layer), "talker": stage}
    artifact = Artifact(root=Path("nowhere"), manifest=replace(manifest, stages=stages))
    assert _quantization(artifact, ("cfm", "talker")) == 0.05
    assert _quantization(artifact, ("talker", "absent")) == _quantization(artifact, ("thinker",)) == 0.0


@pytest.mark.parametrize(
    ("read", "content"), [(_read_tensors, b"no tensors"), (read_document, b"{"), (read_document, b"[]")]
)
def test_an_unreadable_golden_file_is_reported(
    tmp_path: Path, read: Callable[[Path], object], content: bytes
) -> None:
    path = tmp_path / "golden"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="golden cannot be read") as caught:
        read(path)
    assert caught.value.where == "--reference"


@pytest.mark.parametrize("run", [lambda log, document: None, lambda log, _: replay(ENGINES, log)])
def test_a_golden_file_without_known_values_fails(
    tmp_path: Path, run: Callable[[ComparisonLog, object], None]
) -> None:
    save_file({"other.values": np.zeros(3, np.float32)}, tmp_path / "thinker.safetensors")
    summary, comparisons, _ = _replay_file(ENGINES, tmp_path, "thinker.safetensors", None, ("thinker",), run)
    assert summary.failed == 1
    assert "thinker.safetensors holds no value that verify can replay" in comparisons[0].note


def test_a_stage_that_an_artifact_was_exported_without_is_not_replayed(tmp_path: Path) -> None:
    save_file({"one.embeds": ONES}, tmp_path / "vision.safetensors")
    fingerprint = SimpleNamespace(dtype="float32")
    manifest = SimpleNamespace(fingerprint=fingerprint, stages={})
    engines: Any = SimpleNamespace(artifact=SimpleNamespace(manifest=manifest), has=lambda *stages: False)

    def run(log: ComparisonLog, document: object) -> None:
        raise AssertionError("replayed")

    summary, comparisons, _ = _replay_file(
        engines, tmp_path, "vision.safetensors", None, ("vision_encoder",), run
    )
    assert (summary.checked, summary.failed, comparisons) == (0, 0, [])
    assert "this artifact has no vision_encoder" in summary.note


def test_a_self_check_runs_the_engine_of_the_recorded_sizes(manifest: Manifest) -> None:
    (stage,) = manifest.stages.values()
    graph = stage.graphs["encode"]
    (dynamic,) = graph.engines
    static = tuple(
        replace(dynamic, file=f"engines/{n}-{t}", dims={"N": n, "T4": t}) for n in (1, 2) for t in (8, 16)
    )
    recorded = {"mel": torch.zeros(2, 8, 4, 128)}
    assert self_check._engine(replace(graph, engines=static), recorded).file == "engines/2-8"
    assert self_check._engine(graph, recorded) is dynamic


@pytest.mark.parametrize(
    ("dtype", "error", "passes"),
    [
        ("float32", 0.9e-4, True),
        ("float32", 1.1e-4, False),
        ("bfloat16", 0.9e-1, True),
        ("bfloat16", 1.1e-1, False),
    ],
)
def test_values_of_a_reference_pass_within_the_documented_tolerance(
    dtype: str, error: float, passes: bool, tmp_path: Path
) -> None:
    """One value of many is off, so that not the scale of all but this value decides."""
    save_file({"one.embeds": ONES}, tmp_path / "vision.safetensors")
    engines: Any = SimpleNamespace(
        artifact=SimpleNamespace(
            manifest=SimpleNamespace(fingerprint=SimpleNamespace(dtype=dtype), stages={})
        ),
        has=lambda *stages: True,
    )
    value = ONES.copy()
    value[7] += error

    def run(log: ComparisonLog, document: object) -> None:
        log.tensor("one.embeds", value)

    summary, _, _ = _replay_file(engines, tmp_path, "vision.safetensors", None, ("vision_encoder",), run)
    assert (summary.checked, summary.failed) == (1, int(not passes))


@pytest.mark.parametrize(("error", "passes"), [(0.0, True), (0.9e-4, True), (1.1e-4, False), (np.nan, False)])
@pytest.mark.parametrize("spoiled", ["embeddings", "state.cache"])
def test_a_self_check_compares_outputs_and_state_of_the_engine(
    error: float,
    passes: bool,
    spoiled: str,
    manifest: Manifest,
    artifact_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (stage,) = manifest.stages.values()
    graph = stage.graphs["encode"]
    recorded = {
        "in.mel": torch.ones(1, 2, 4, 128),
        "state.cache": torch.zeros(3, 5),
        "out.embeddings": torch.ones(1, 2, 64),
        "state_after.cache": torch.ones(3, 5),
    }
    save_tensors(recorded, artifact_path / graph.golden)
    made = {"embeddings": torch.ones(1, 2, 64), "state.cache": torch.ones(3, 5)}
    made[spoiled].view(-1)[3] += error
    monkeypatch.setattr(self_check, "replay_engine", lambda *_: [made])
    artifact = Artifact(root=artifact_path, manifest=manifest)
    log = self_check.replay(artifact, stage, graph, name="encode", tolerance=1e-4)
    assert log.summary().checked == 2
    assert log.summary().failed == int(not passes)


def test_a_graph_whose_recorded_file_has_no_output_fails(
    manifest: Manifest, artifact_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage,) = manifest.stages.values()
    graph = stage.graphs["encode"]
    recorded = {"in.mel": torch.ones(1, 2, 4, 128), "state.cache": torch.zeros(3, 5)}
    save_tensors(recorded, artifact_path / graph.golden)
    made = {"embeddings": torch.ones(1, 2, 64), "state.cache": torch.ones(3, 5)}
    monkeypatch.setattr(self_check, "replay_engine", lambda *_: [made])
    artifact = Artifact(root=artifact_path, manifest=manifest)
    log = self_check.replay(artifact, stage, graph, name="encode", tolerance=1e-4)
    (row,) = log.comparisons
    assert (row.outcome, log.summary().failed) == ("FAIL", 1) and "records no out.embeddings" in row.note


def with_cache(graph: GraphRecord) -> tuple[GraphRecord, dict[str, torch.Tensor]]:
    """The encoder's graph with a state, and a recorded file of it that lacks the state afterwards."""
    cache = TensorSpec(name="cache", dtype="float32", shape=(3, 5))
    recorded = {
        "in.mel": torch.ones(1, 2, 4, 128),
        "state.cache": torch.zeros(3, 5),
        "out.embeddings": torch.ones(1, 2, 64),
    }
    return replace(graph, spec=replace(graph.spec, state=(cache,))), recorded


def test_a_recorded_file_that_lacks_one_of_the_states_fails(
    manifest: Manifest, artifact_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage,) = manifest.stages.values()
    graph, recorded = with_cache(stage.graphs["encode"])
    save_tensors(recorded, artifact_path / graph.golden)
    monkeypatch.setattr(self_check, "replay_engine", lambda *_: [{"embeddings": torch.ones(1, 2, 64)}])
    artifact = Artifact(root=artifact_path, manifest=manifest)
    log = self_check.replay(artifact, stage, graph, name="encode", tolerance=1e-4)
    (row,) = log.comparisons
    assert (row.outcome, log.summary().failed) == ("FAIL", 1) and "records no state_after.cache" in row.note


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_memory_that_is_lacking_is_no_fault_of_the_engine(
    error: Exception, manifest: Manifest, artifact_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    (stage,) = manifest.stages.values()
    graph = stage.graphs["encode"]
    recorded = {"in.mel": torch.ones(1, 2, 4, 128), "out.embeddings": torch.ones(1, 2, 64)}
    save_tensors(recorded, artifact_path / graph.golden)
    monkeypatch.setattr(self_check, "replay_engine", fail)
    with pytest.raises(type(error)):
        self_check.replay(
            Artifact(root=artifact_path, manifest=manifest), stage, graph, name="encode", tolerance=1e-4
        )


@pytest.mark.parametrize("error", [TypeError("missing argument"), RuntimeError("wrong size")])
def test_an_engine_that_does_not_run_is_a_failure(
    error: Exception, manifest: Manifest, artifact_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage,) = manifest.stages.values()
    graph = stage.graphs["encode"]
    save_tensors(
        {"in.mel": torch.ones(1, 2, 4, 128), "out.embeddings": torch.ones(1, 2, 64)},
        artifact_path / graph.golden,
    )

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(self_check, "replay_engine", fail)
    artifact = Artifact(root=artifact_path, manifest=manifest)
    log = self_check.replay(artifact, stage, graph, name="encode", tolerance=1e-4)
    (row,) = log.comparisons
    assert row.outcome == "FAIL" and str(error) in row.note


def test_a_self_check_runs_every_rank_on_what_was_recorded(
    manifest: Manifest, artifact_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = manifest.stages["audio_encoder"]
    graph, recorded = with_cache(stage.graphs["encode"])
    calls: list[Any] = []

    def replay_engine(*arguments: Any) -> list[dict[str, torch.Tensor]]:
        calls.append(arguments)
        return [{"embeddings": torch.ones(1, 2, 64)}]

    monkeypatch.setattr(self_check, "replay_engine", replay_engine)
    artifact = Artifact(root=artifact_path, manifest=manifest)
    ranks = replace(stage, weights=("weights/audio.bin", "voices/DB30.bin"))

    def check(tensors: dict[str, torch.Tensor]) -> ComparisonLog:
        save_tensors(tensors, artifact_path / graph.golden)
        return self_check.replay(artifact, ranks, graph, name="encode", tolerance=1e-4)

    summary = check(recorded).summary()
    assert (summary.checked, summary.failed, summary.inputs) == (1, 0, 2)
    ((path, backend, spec, weights, (given,), device),) = calls
    assert (path, backend, spec, device) == (artifact_path / "engines/encode.pt2", "aoti", graph.spec, "cpu")
    assert [each.path.name for each in weights] == ["audio.bin", "DB30.bin"]
    assert given.keys() == {"mel", "cache"} and torch.equal(given["cache"], recorded["state.cache"])
    for changed, found in (
        ({"state.cache": torch.zeros(3, 5, dtype=torch.int64)}, "records int64 as cache"),
        ({"in.mel": None}, "records nothing as mel"),
    ):
        wrong = {key: value for key, value in {**recorded, **changed}.items() if value is not None}
        (row,) = check(wrong).comparisons
        assert row.outcome == "FAIL" and f"{graph.golden} {found}, the signature says float32" in row.note
    assert len(calls) == 1


def test_sizes_that_an_engine_does_not_know_do_not_exclude_it(manifest: Manifest) -> None:
    graph = manifest.stages["audio_encoder"].graphs["encode"]
    (dynamic,) = graph.engines
    other, fitting = (replace(dynamic, file=str(n), dims={"N": n, "P": 7}) for n in (2, 1))
    found = self_check._engine(replace(graph, engines=(other, fitting)), {"mel": torch.zeros(1, 2, 4, 128)})
    assert found is fitting
