"""`mingc doctor`: what each missing piece disables, and that every declared dependency is checked."""

from __future__ import annotations

import importlib.util
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - loaded before its dependencies are hidden
from manifest_edit import edit_manifest

from mingc import doctor
from mingc.doctor import Check, DoctorReport, examine, peer_check
from mingc.host import Host

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def good_machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine where every check passes."""

    def ok(name: str) -> Check:
        return Check(name=name, state="ok", detail="", needed_for="")

    monkeypatch.setattr(doctor, "_torch_version", lambda: ok("torch version"))
    monkeypatch.setattr(doctor, "_loader", lambda: ok("engine loader"))
    monkeypatch.setattr(doctor, "_compiler", lambda: ok("C++ compiler"))
    return monkeypatch


def without(monkeypatch: pytest.MonkeyPatch, *modules: str, artifacts: Sequence[Path] = ()) -> DoctorReport:
    """The report of a machine that lacks `modules`."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else real(name))
    return examine(artifacts)


def test_a_good_machine_can_export_and_serve(good_machine: pytest.MonkeyPatch) -> None:
    report = without(good_machine)
    assert report.can_export and report.can_serve and report.is_clean


@pytest.mark.parametrize(
    "module, can_export, can_serve",
    [
        ("starlette", True, False),
        ("msgspec", True, False),
        ("cv2", True, False),
        ("onnxruntime", False, True),
        ("onnxscript", True, True),
        ("cryptography", True, True),
        ("safetensors", False, False),
        ("PIL", False, False),
    ],
)
def test_a_missing_package_disables_the_commands_that_need_it(
    good_machine: pytest.MonkeyPatch, module: str, can_export: bool, can_serve: bool
) -> None:
    report = without(good_machine, module)
    assert (report.can_export, report.can_serve) == (can_export, can_serve)
    (missing,) = (each for each in report.checks if each.state == "missing" and each.name != "cuda")
    assert missing.fix is not None and missing.fix.startswith("pip install ")


def test_a_missing_compiler_disables_export_alone(good_machine: pytest.MonkeyPatch) -> None:
    broken = Check(name="C++ compiler", state="problem", detail="", needed_for="export")
    good_machine.setattr(doctor, "_compiler", lambda: broken)
    report = examine()
    assert not report.can_export and report.can_serve and not report.is_clean


@pytest.mark.parametrize(
    "version, state", [("2.10.1", "problem"), ("2.11.0+cpu", "ok"), ("2.13.1", "ok"), ("2.14.0", "problem")]
)
def test_torch_must_be_a_supported_release(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", version)
    assert doctor._torch_version().state == state


def test_every_declared_dependency_is_checked_and_nothing_else() -> None:
    extras = PROJECT["optional-dependencies"]
    declared = {
        re.split(r"[<>=!~; \[]", line)[0]
        for line in (
            *PROJECT["dependencies"],
            *extras["serve"],
            *extras["export"],
            *extras["onnx"],
            *extras["sign"],
        )
    }
    assert {*doctor._REQUIRED, *(name for _, name, _, _ in doctor._OPTIONAL)} == declared
    assert {extra for *_, extra in doctor._OPTIONAL} <= {*extras}


def test_devices_without_peer_access_use_nccl() -> None:
    assert "one-shot" in peer_check([]).detail
    closed = peer_check(["0-1", "1-0"]).detail
    assert "one-shot" not in closed and "0-1, 1-0" in closed


def test_every_stage_of_an_artifact_gets_a_verdict(
    artifact_path: Path, good_machine: pytest.MonkeyPatch
) -> None:
    """The hand-made artifact is for torch 2.13.0 and AVX2; each thing that is wrong has its own fix."""
    here = Host(torch="2.13.0", device="cpu", capability="AVX512")
    good_machine.setattr(doctor, "current_host", lambda device: here)
    (verdict,) = examine([artifact_path]).verdicts
    assert (verdict.stage, verdict.works, verdict.fix) == ("audio_encoder", True, None)
    assert verdict.target == "cpu AVX2, 1 rank(s)"
    good_machine.setattr(doctor, "current_host", lambda device: replace(here, torch="2.12.1"))
    report = examine([artifact_path])
    (verdict,) = report.verdicts
    assert not verdict.works and "torch: built with 2.13.0, here 2.12.1" in verdict.problem
    assert "torch==2.13.0" in str(verdict.fix) and not report.is_clean
    good_machine.setattr(doctor, "current_host", lambda device: here)
    (verdict,) = without(good_machine, "uvicorn", artifacts=[artifact_path]).verdicts
    assert not verdict.works and verdict.problem == "not installed: uvicorn"
    assert verdict.fix == "pip install 'mingc[serve]'"


@pytest.mark.parametrize("count, fix", [(1, "--tp 1"), (4, None)])
def test_a_verdict_counts_gpus_and_their_memory(
    count: int, fix: str | None, artifact_path: Path, good_machine: pytest.MonkeyPatch
) -> None:
    """GPUs are described by hand: this is about the comparison, not about the devices."""

    def change(document: dict[str, Any]) -> None:
        document["fingerprint"] |= {"device": "cuda", "capability": "9.0", "world_size": 2}

    edit_manifest(artifact_path, change)
    good_machine.setattr(
        doctor, "current_host", lambda device: Host(torch="2.13.0", device="cuda", capability="9.0")
    )
    good_machine.setattr(doctor, "_gpu_bytes", lambda: [80 << 30] * count)
    (verdict,) = examine([artifact_path]).verdicts
    assert verdict.works is (fix is None) and (fix is None or fix in str(verdict.fix))
    good_machine.setattr(doctor, "_gpu_bytes", lambda: [100] * 4)
    (verdict,) = examine([artifact_path]).verdicts
    assert "a GPU has 0.0 GB" in verdict.problem and "--quantize fp8" in str(verdict.fix)


def test_a_folder_that_cannot_be_written_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor._space("x", tmp_path / "a" / "b", "TMPDIR", "serve").state == "ok"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    check = doctor._space("x", tmp_path, "TMPDIR", "serve")
    assert check.state == "problem" and "TMPDIR" in str(check.fix)


def test_a_machine_without_a_home_or_temporary_folder_gets_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a read-only container whose user is a bare number."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def no_folder() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", no_folder)
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    monkeypatch.setenv("CXX", "true")
    checks = {check.name: check for check in examine().checks}
    for name, variable in (
        ("user cache", "XDG_CACHE_HOME"),
        ("temporary files", "TMPDIR"),
        ("C++ compiler", "TMPDIR"),
    ):
        assert checks[name].state == "problem" and variable in str(checks[name].fix)


def test_a_folder_that_cannot_be_searched_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root searches and writes every folder, so the refusal is made here."""
    closed = tmp_path / "closed"
    closed.mkdir()
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(13, "Permission denied")
        return real(path, **options)

    monkeypatch.setattr("os.stat", stat)
    monkeypatch.setattr("os.access", lambda path, mode: path != closed)
    check = doctor._space("x", closed / "mingc", "XDG_CACHE_HOME", "export")
    assert check.state == "problem" and "cannot be written" in check.detail
