"""Engines for a CPU and for RTX cards in one artifact, by the command line; TensorRT's builder is a stand-in.

No card is here: that engines for one run on it is not tested.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mingc_command import CHECKPOINT, EAGER, REPOSITORY, mingc_here
from worker_threads import worker_threads

from mingc import doctor
from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.target_choice import target_views
from mingc.artifacts.tensorrt_engine import read_engine
from mingc.errors import ArtifactError, ConfigError, IncompatibleError
from mingc.export.compile import schedule
from mingc.host.machine import Host, current_host
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.options import EngineOptions

STAND_IN = REPOSITORY / "tests" / "support" / "tensorrt_rtx_stand_in"
TOY = REPOSITORY / "tests" / "plugins" / "toy"
RTX = "rtx:sm86,sm89"


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    """The stand-in, the backend `eager` and the stage `toy_filter`, here and in the builder's process."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in (TOY, EAGER, STAND_IN):
            patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (STAND_IN, REPOSITORY))))
        patch.setattr(schedule, "worker_pool", worker_threads)
        yield
    # A module that is loaded counts as installed, for the tests of `doctor` as well.
    sys.modules.pop("tensorrt_rtx", None)


@pytest.fixture(scope="module")
def artifact(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One stage of one graph, for a CPU and for two RTX cards."""
    root = tmp_path_factory.mktemp("targets") / "both"
    targets = ("--target", "cpu", "--target", RTX)
    words = ("--backend", "eager", "--stages", "toy_filter", "--no-cache", "--output", root)
    done = mingc_here("export", CHECKPOINT, *targets, *words, "--json")
    assert done.code == 0, done.stderr
    rows = [(row["target"], row["backend"]) for row in done.document["graphs"]]
    assert rows == [("cpu", "eager"), (RTX, "tensorrt")]
    assert any(RTX in note and "not run" in note for note in done.document["notes"])
    return root


def test_weights_and_goldens_are_stored_once(artifact: Path) -> None:
    manifest = open_artifact(artifact).manifest
    cpu, rtx = target_views(manifest)
    assert (cpu.fingerprint.target, cpu.fingerprint.device) == ("cpu", "cpu")
    assert (rtx.fingerprint.target, rtx.fingerprint.device, rtx.fingerprint.capability) == (
        RTX,
        "cuda",
        "8.6,8.9",
    )
    (mine,), (theirs,) = (view.stages["toy_filter"].graphs.values() for view in (cpu, rtx))
    assert cpu.stages["toy_filter"].weights == rtx.stages["toy_filter"].weights
    assert (mine.golden, mine.spec) == (theirs.golden, theirs.spec)
    assert sorted(manifest.files) == sorted(
        path.relative_to(artifact).as_posix()
        for path in artifact.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    )
    assert len(manifest.files) == 4, "weights, golden, two engines"
    plan = read_engine(artifact / theirs.engines[0].file)
    assert plan.plan == b"SM86,SM89" and plan.header.capabilities == ("8.6", "8.9")


def test_a_machine_without_a_gpu_verifies_the_engines_for_its_processor(artifact: Path) -> None:
    done = mingc_here("verify", artifact, "--json")
    assert done.code == 0, done.stderr
    assert done.document["passed"] and done.document["checked"] >= 1
    assert done.document["files_hashed"] == 4


def test_a_server_does_not_take_another_target_than_was_asked_for(artifact: Path) -> None:
    with pytest.raises(IncompatibleError, match=f"the engines for {RTX} do not run here") as refused:
        open_service(artifact, EngineOptions(target="rtx:sm86"))
    assert refused.value.where == "--target" and "pass --target cpu" in (refused.value.fix or "")
    with pytest.raises(ConfigError, match="no engines for rtx:sm86,sm120"):
        open_service(artifact, EngineOptions(target="rtx:sm86,sm120"))
    with pytest.raises(ConfigError, match="--target rtx:sm1: sm1 is not one of"):
        open_service(artifact, EngineOptions(target="rtx:sm1"))
    for target in (None, "cpu"):  # those for the CPU run here, but no request reaches this stage
        with pytest.raises(ArtifactError, match="nothing to serve"):
            open_service(artifact, EngineOptions(target=target))


@pytest.mark.parametrize("command", ["verify", "probe"])
def test_a_target_that_is_not_this_machine_is_refused(artifact: Path, command: str) -> None:
    done = mingc_here(command, artifact, "--target", "rtx:sm89")
    assert done.code == 1
    assert f"the engines for {RTX} do not run here: built; this machine has no CUDA device" in done.stderr
    assert "pass --target cpu" in done.stderr
    done = mingc_here(command, artifact, "--target", "cuda")
    assert done.code == 2
    assert (
        "the artifact has no engines for cuda" in done.stderr
        and f"it has those for cpu, {RTX}" in done.stderr
    )


def test_inspect_lists_targets_and_the_machines_that_they_need(artifact: Path) -> None:
    rows = mingc_here("bundle", "inspect", artifact, "--json").document["targets"]
    assert [(row["target"], row["needs"], row["backends"], row["engines"]) for row in rows] == [
        ("cpu", f"a CPU with {current_host('cpu').capability}", ["eager"], 1),
        (RTX, "an RTX card of compute capability 8.6 or 8.9", ["tensorrt"], 1),
    ]
    assert all(row["engine_bytes"] > 0 for row in rows)


def test_doctor_says_which_engines_would_be_loaded_and_why(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows() -> list[tuple[str, bool, str]]:
        found = doctor._artifact_targets(artifact)
        return [(each.target, each.loads, each.reason) for each in found]

    assert rows() == [
        ("cpu", True, "no CUDA device"),
        (RTX, False, "built; this machine has no CUDA device"),
    ]
    (verdict,) = doctor._verdicts(artifact, set())
    assert verdict.backend == "eager" and verdict.target.startswith("cpu ")
    here = current_host("cpu")

    def with_card(capability: str) -> Any:
        card = Host(torch=here.torch, device="cuda", capability=capability)
        return lambda device: card if device == "cuda" else here

    monkeypatch.setattr(doctor, "current_host", with_card("8.9"))
    monkeypatch.setattr(doctor, "_gpu_bytes", lambda: [8 << 30])
    monkeypatch.setattr(doctor, "_gpu_free_bytes", lambda: [8 << 30])
    assert rows() == [
        ("cpu", False, "runs here as well: --target cpu asks for it"),
        (RTX, True, "the first target with engines for this GPU"),
    ]
    (verdict,) = doctor._verdicts(artifact, set())
    assert verdict.backend == "tensorrt" and verdict.target == "cuda 8.6,8.9, 1 rank(s)"
    monkeypatch.setattr(doctor, "current_host", with_card("9.0"))
    assert rows() == [
        ("cpu", True, "no engines for this GPU"),
        (RTX, False, "built; the GPU here has compute capability 9.0"),
    ]


def test_targets_that_do_not_go_together_are_refused(installed: None, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        done = mingc_here("export", CHECKPOINT, "--stages", "toy_filter", "--output", tmp_path / "x", *words)
        assert done.code == 2
        return done.stderr

    assert "names a device twice" in refused("--target", "cpu", "--target", "cpu")
    assert "names a device twice" in refused("--target", "rtx:sm86", "--target", "rtx:sm86,sm89")
    assert "--target toaster: not one of" in refused("--target", "cpu", "--target", "toaster")
    assert "finds no CUDA device" in refused(
        "--target", "cuda:sm90", "--target", "rtx:sm89", "--target", "cpu", "--backend", "aoti"
    )
    assert "--target cuda:90: 90 is not the name of one GPU" in refused("--target", "cuda:90")
    assert "names a device twice" in refused("--target", "cuda:sm90", "--target", "cuda")
    assert "--synthetic: samples weights on one device" in refused(
        "--target", "cpu", "--target", "rtx:sm86", "--synthetic"
    )
    assert "engines for RTX cards" in refused(
        "--target", "rtx:sm86", "--target", "rtx:sm89", "--backend", "aoti"
    )
    assert "--backend onnx: " in refused("--target", "cuda", "--target", "rtx:sm86", "--backend", "onnx")
