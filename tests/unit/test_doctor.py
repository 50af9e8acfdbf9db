"""`mingc doctor`: what each missing piece disables, and whether the stages of an artifact would be served."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_compiler import fake_compiler
from manifest_edit import edit_manifest
from packaging.requirements import Requirement

from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.target import Host
from mingc.bundles.packing import pack
from mingc.commands import doctor_report
from mingc.commands.doctor_report import Check, DoctorReport, Verdict, examine
from mingc.host import machine as host
from mingc.host.machine import Gpu

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = (
    "serve",
    "trace",
    "sign",
    "bundle",
    "export",
    "onnx",
    "tensorrt",
    "tensorrt-classic",
    "tensorrt-runtime",
)
GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine where mingc is installed as pyproject.toml says, with all extras; torch is a build for CPUs."""
    declared = list(PROJECT["dependencies"])
    versions = {"mingc": PROJECT["version"]}
    for extra in EXTRAS:
        declared += [f"{line}; extra == '{extra}'" for line in PROJECT["optional-dependencies"][extra]]
    for line in map(Requirement, declared):
        versions[line.name] = (
            next(each.version for each in line.specifier if each.operator == ">=") if line.specifier else "1"
        )
    real = importlib.metadata.requires

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: declared if name == "mingc" else real(name)
    )
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: {"Requires-Python": ">=3.11"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor_report, "driver_version", lambda: None)
    # Other processes change what the disk of the tests has.
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=50 * GIB))
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "libstdc++.so.6")))
    monkeypatch.setattr(doctor_report, "VERSIONS", versions, raising=False)
    return monkeypatch


def set_version(name: str, version: str | None) -> None:
    """Install another version on the machine; None: remove it, also for `find_spec`."""
    versions: dict[str, str] = doctor_report.VERSIONS  # type: ignore[attr-defined]
    if version is None:
        versions.pop(name)
    else:
        versions[name] = version


def check_named(report: DoctorReport, name: str) -> Check:
    (found,) = [each for each in report.checks if each.name == name]
    return found


def test_a_good_machine_can_export_and_serve(machine: pytest.MonkeyPatch) -> None:
    report = examine()
    assert report.can_export and report.can_serve and report.is_clean
    assert {each.name for each in report.checks if each.state != "ok"} == {"cuda"}


def test_every_declared_dependency_is_checked_and_nothing_else(machine: pytest.MonkeyPatch) -> None:
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    declared = {Requirement(line).name for line in lines} - {"mingc"}
    others = {"python", "C++ compiler", "temporary files", "user cache", "cuda"}
    assert {each.name for each in examine().checks} == declared | others


@pytest.mark.parametrize(
    ("name", "can_export", "can_serve", "fix"),
    [
        ("starlette", True, False, "pip install 'mingc[serve]'"),
        ("msgspec", True, False, "pip install 'mingc[serve]'"),
        ("opencv-python-headless", True, False, "pip install 'mingc[serve]'"),
        ("onnxruntime", False, False, "pip install 'mingc[serve]'"),
        ("soundfile", False, False, "pip install 'mingc[serve]'"),
        ("onnxscript", True, True, "pip install 'mingc[onnx]'"),
        ("cryptography", True, True, "pip install 'mingc[sign]'"),
        ("safetensors", False, False, "pip install 'safetensors>=0.4.5'"),
        ("pillow", False, False, "pip install 'pillow>=13'"),
    ],
)
def test_a_missing_package_disables_the_commands_that_need_it(
    name: str, can_export: bool, can_serve: bool, fix: str, machine: pytest.MonkeyPatch
) -> None:
    set_version(name, None)
    report = examine()
    assert (report.can_export, report.can_serve) == (can_export, can_serve)
    found = check_named(report, name)
    assert (found.state, found.fix) == ("missing", fix)


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.10.1", "problem"), ("2.11.0+cpu", "ok"), ("2.13.1+cu130", "ok"), ("2.14.0", "problem")],
)
def test_torch_must_be_a_supported_release(version: str, state: str, machine: pytest.MonkeyPatch) -> None:
    set_version("torch", version)
    report = examine()
    found = check_named(report, "torch")
    assert found.state == state and report.can_serve == report.can_export == (state == "ok")
    assert state == "ok" or ("<2.14" in str(found.fix) and version in found.detail)


def test_onnx_runtime_for_gpus_is_an_onnx_runtime(machine: pytest.MonkeyPatch) -> None:
    set_version("onnxruntime", None)
    set_version("onnxruntime-gpu", "1.32")
    assert check_named(examine(), "onnxruntime").state == "ok"


def test_one_torch_tensorrt_is_not_installed_over_the_other(machine: pytest.MonkeyPatch) -> None:
    """They have the same files, each for another library."""
    set_version("torch-tensorrt", None)
    found = check_named(examine(), "torch-tensorrt")
    assert found.fix == "pip uninstall torch-tensorrt-rtx; pip install 'mingc[tensorrt-classic]'"
    set_version("torch-tensorrt-rtx", None)
    fixes = [check_named(examine(), name).fix for name in ("torch-tensorrt", "torch-tensorrt-rtx")]
    assert fixes == ["pip install 'mingc[tensorrt-classic]'", "pip install 'mingc[tensorrt]'"]


@pytest.mark.parametrize(("version", "state"), [("3.10.14", "problem"), ("3.11.0", "ok"), ("3.13.1", "ok")])
def test_python_must_be_a_supported_release(version: str, state: str, machine: pytest.MonkeyPatch) -> None:
    machine.setattr("platform.python_version", lambda: version)
    report = examine()
    assert check_named(report, "python").state == state and report.can_serve == (state == "ok")


@pytest.fixture
def from_sources(machine: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def unknown(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    machine.setattr(importlib.metadata, "metadata", unknown)
    return machine


def test_a_mingc_that_runs_from_its_sources_reads_pyproject(
    machine: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    installed = examine()
    request.getfixturevalue("from_sources")
    assert examine() == installed
    set_version("uvicorn", None)
    report = examine()
    assert check_named(report, "uvicorn").fix == "pip install 'mingc[serve]'"
    assert report.can_export and not report.can_serve


def test_without_metadata_and_pyproject_the_installation_is_the_problem(
    artifact_path: Path, tmp_path: Path, from_sources: pytest.MonkeyPatch
) -> None:
    from_sources.setattr("mingc.__file__", str(tmp_path / "mingc/__init__.py"))
    report = examine([artifact_path])
    assert not report.can_export and not report.can_serve and report.verdicts == ()
    assert check_named(report, "mingc").fix == "pip install -e 'CHECKOUT[serve,sign]'"


def test_the_compiler_is_that_of_cxx_with_its_words(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    script = tmp_path / "c++"
    script.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\necho first >&2\necho last line >&2\nexit 1\n'
    )
    script.chmod(0o755)
    machine.setenv("CXX", f"{script} -pipe")
    report = examine()
    found = check_named(report, "C++ compiler")
    assert (found.state, found.detail) == ("problem", f"{script} -pipe: last line") and found.fix is not None
    words = (tmp_path / "words").read_text().split()
    assert words[0] == "-pipe" and {"-shared", "-fPIC", "-std=c++20"} <= {*words}
    assert not report.can_export and report.can_serve and not report.is_clean


@pytest.mark.parametrize(
    ("library", "state"),
    [("static", "problem"), ("libstdc++.so.6", "ok"), ("libc++.so.1", "ok"), (None, "missing")],
)
def test_a_compiler_is_fit_when_it_links_the_standard_library_dynamically(
    library: str | None, state: str, tmp_path: Path, machine: pytest.MonkeyPatch
) -> None:
    if library is None:
        machine.delenv("CXX")
        machine.setattr("shutil.which", lambda name: None)
    else:
        fake_compiler(tmp_path, library)
    found = check_named(examine(), "C++ compiler")
    assert found.state == state and (found.fix is None) == (state == "ok")
    assert library != "static" or "CXX=/usr/bin/g++" in str(found.fix)


def test_a_machine_without_a_home_or_temporary_folder_gets_a_report(machine: pytest.MonkeyPatch) -> None:
    """As in a read-only container whose user is a bare number."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def no_folder() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    machine.setattr(Path, "home", no_home)
    machine.delenv("XDG_CACHE_HOME", raising=False)
    machine.setattr("tempfile.gettempdir", no_folder)
    machine.setattr("tempfile.tempdir", "/proc/nowhere")
    report = examine()
    for name, variable in (
        ("user cache", "XDG_CACHE_HOME"),
        ("temporary files", "TMPDIR"),
        ("C++ compiler", "TMPDIR"),
    ):
        found = check_named(report, name)
        assert found.state == "problem" and variable in str(found.fix)
    assert report.can_serve


@pytest.mark.parametrize(("free", "state"), [(10**9, "ok"), (10**9 - 1, "problem")])
def test_both_folders_need_a_gigabyte(
    free: int, state: str, tmp_path: Path, machine: pytest.MonkeyPatch
) -> None:
    machine.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine.setattr("tempfile.gettempdir", lambda: str(tmp_path / "not" / "there"))
    machine.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    report = examine()
    for name, folder in (("temporary files", "not/there"), ("user cache", "cache/mingc")):
        found = check_named(report, name)
        assert found.state == state and (found.fix is None) == (state == "ok")
        assert found.detail == f"{tmp_path / folder} has 1.00 GB free"


def test_a_folder_that_cannot_be_searched_or_written_is_a_problem(
    tmp_path: Path, machine: pytest.MonkeyPatch
) -> None:
    """Root searches and writes every folder, so the refusal is made here."""
    closed = tmp_path / "closed"
    closed.mkdir()
    machine.setenv("XDG_CACHE_HOME", str(closed))
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(13, "Permission denied")
        return real(path, **options)

    machine.setattr("os.stat", stat)
    machine.setattr("os.access", lambda path, mode: path != closed)
    found = check_named(examine(), "user cache")
    assert found.state == "problem" and "cannot be written" in found.detail


@pytest.mark.parametrize(
    ("driver", "built_for", "says", "fix"),
    [
        (None, None, "CPU build", "install a GPU's driver"),
        ("580.65.06", None, "CPU build; driver 580.65.06 is there", "a CUDA build of torch"),
        (None, "13.0", "no NVIDIA driver; torch is built for CUDA 13.0", "--gpus all"),
        ("470.1", "13.0", "driver 470.1 shows no device", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_the_reason_for_no_gpu_has_its_own_fix(
    driver: str | None, built_for: str | None, says: str, fix: str, machine: pytest.MonkeyPatch
) -> None:
    machine.setattr(doctor_report, "driver_version", lambda: driver)
    machine.setattr(torch.version, "cuda", built_for)
    report = examine()
    found = check_named(report, "cuda")
    assert found.state == "missing" and says in found.detail and fix in str(found.fix)
    assert found.needed_for == "export --target cuda" and report.can_export and report.can_serve


def test_the_driver_names_its_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\nGCC version:  gcc 12.3.0": "570.86.15",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build": "580.65.06",
        "": None,
    }
    for text, release in texts.items():
        monkeypatch.setattr(Path, "read_text", lambda path, text=text, **_: text)
        assert host.driver_version() == release

    def missing(path: Path, **_: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert host.driver_version() is None


def use_gpus(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    *,
    nccl: bool = True,
    memory: Sequence[int] = (),
    free: Sequence[int] = (),
) -> None:
    """`count` GPUs as torch would show them."""
    sizes = memory or [141 * GIB] * count
    gpus = [
        Gpu(
            name="NVIDIA H200",
            capability=(9, 0),
            num_multiprocessors=132,
            memory_bytes=size,
            cache_bytes=1,
        )
        for size in sizes
    ]
    monkeypatch.setattr(doctor_report, "gpu", gpus.__getitem__)
    monkeypatch.setattr(doctor_report, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(
        doctor_report,
        "current_host",
        lambda device: Host(torch="2.13.0", device=device, capability="9.0" if device == "cuda" else "AVX2"),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ([*free] or sizes)[index : index + 1])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)


def test_a_gpu_is_named_with_its_driver(machine: pytest.MonkeyPatch) -> None:
    use_gpus(machine, 1)
    report = examine()
    cuda = check_named(report, "cuda")
    assert (cuda.state, cuda.detail) == ("ok", "driver 580.65.06; torch is built for CUDA 13.0")
    assert check_named(report, "cuda:0").detail.startswith("NVIDIA H200, 141 GiB; ")
    assert "NCCL" not in {each.name for each in report.checks}


@pytest.mark.parametrize(("nccl", "state"), [(True, "ok"), (False, "missing")])
def test_several_gpus_are_listed_and_need_nccl(nccl: bool, state: str, machine: pytest.MonkeyPatch) -> None:
    use_gpus(machine, 4, nccl=nccl)
    report = examine()
    assert {f"cuda:{index}" for index in range(4)} <= {each.name for each in report.checks}
    assert check_named(report, "NCCL").state == state


def on_machine(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: str, release: str = "2.13.0"
) -> None:
    here = Host(torch=release, device=device, capability=capability)
    monkeypatch.setattr(doctor_report, "current_host", lambda device: here)


def verdict_of(path: Path) -> Verdict:
    (verdict,) = examine([path]).verdicts
    return verdict


def test_every_stage_of_an_artifact_gets_a_verdict(artifact_path: Path, machine: pytest.MonkeyPatch) -> None:
    """The hand-made artifact is for torch 2.13.0 and AVX2; each thing that is wrong has its own fix."""
    on_machine(machine, "cpu", "AVX512")
    verdict = verdict_of(artifact_path)
    assert (verdict.stage, verdict.works, verdict.fix) == ("audio_encoder", True, None)
    assert (verdict.target, verdict.backend) == ("cpu AVX2, 1 rank(s)", "aoti")
    assert verdict.cells()["target"] == "cpu AVX2, 1 rank(s), aoti"
    on_machine(machine, "cpu", "AVX512", "2.12.1")
    report = examine([artifact_path])
    assert "torch: built with 2.13.0, here 2.12.1" in report.verdicts[0].problem and not report.is_clean
    assert "torch==2.13.0" in str(report.verdicts[0].fix)
    on_machine(machine, "cpu", "AVX512")
    set_version("uvicorn", None)
    verdict = verdict_of(artifact_path)
    assert (verdict.works, verdict.problem) == (False, "uvicorn: missing")
    assert verdict.fix == "pip install 'mingc[serve]'"


@pytest.mark.parametrize(
    ("memory", "free", "world_size", "says"),
    [
        ([80 * GIB] * 2, [], 2, ()),
        ([80 * GIB] * 3, [80 * GIB, 80 * GIB, 0], 2, ()),  # only the ranks' GPUs count
        ([80 * GIB], [], 2, ("for 2 GPUs, 1 are visible",)),
        ([80 * GIB, 100], [], 2, ("a GPU has 0.0 GB",)),
        ([80 * GIB] * 2, [80 * GIB, 0], 2, ("a GPU has 0.0 of 85.9 GB free",)),
        ([80 * GIB, 100, 80 * GIB], [], 4, ("for 4 GPUs, 3 are visible", "a GPU has")),
    ],
)
def test_the_number_of_gpus_and_the_smallest_one_decide(
    memory: list[int],
    free: list[int],
    world_size: int,
    says: tuple[str, ...],
    artifact_path: Path,
    machine: pytest.MonkeyPatch,
) -> None:
    def change(document: dict[str, Any]) -> None:
        document["fingerprint"] |= {"device": "cuda", "capability": "9.0", "world_size": world_size}

    edit_manifest(artifact_path, change)
    use_gpus(machine, len(memory), memory=memory, free=free)
    verdict = verdict_of(artifact_path)
    assert verdict.works is (not says) and all(each in verdict.problem for each in says)
    assert verdict.target == f"cuda 9.0, {world_size} rank(s)"


def test_several_ranks_need_nccl(artifact_path: Path, machine: pytest.MonkeyPatch) -> None:
    def change(document: dict[str, Any]) -> None:
        document["fingerprint"] |= {"device": "cuda", "capability": "9.0", "world_size": 2}

    edit_manifest(artifact_path, change)
    use_gpus(machine, 4, nccl=False)
    verdict = verdict_of(artifact_path)
    assert (verdict.problem, verdict.fix) == ("NCCL: not in this torch", "install a CUDA build of torch")


def make_three_stages(artifact_path: Path, machine: pytest.MonkeyPatch) -> None:
    """Turn the artifact's stage into three equal ones, on a host that runs them."""

    def change(document: dict[str, Any]) -> None:
        stages, graph = document["stages"], document["graph"]
        record, node = stages["audio_encoder"], graph["nodes"][0]
        for name in ("second", "third"):
            stages[name] = {**record, "weights": record["weights"]}
            graph["nodes"].append({**node, "name": name})
            document["parameters"][name] = document["parameters"]["audio_encoder"]

    on_machine(machine, "cpu", "AVX512")
    edit_manifest(artifact_path, change)


def test_stages_of_an_artifact_share_the_memory(artifact_path: Path, machine: pytest.MonkeyPatch) -> None:
    """Three stages of equal weights: each that begins beyond the memory does not work, nor do those after it."""
    make_three_stages(artifact_path, machine)
    sizes = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 0}
    machine.setattr("os.sysconf", sizes.__getitem__)
    one = len((artifact_path / "weights/audio.bin").read_bytes())
    for memory, fit in ((3 * one, 3), (3 * one - 1, 2), (2 * one - 1, 1), (one - 1, 0)):
        sizes["SC_PHYS_PAGES"] = memory
        assert [each.works for each in examine([artifact_path]).verdicts] == [
            index < fit for index in range(3)
        ]


def test_stages_of_an_artifact_share_the_disk_for_their_engines(
    artifact_path: Path, tmp_path: Path, machine: pytest.MonkeyPatch
) -> None:
    make_three_stages(artifact_path, machine)
    one = (artifact_path / "engines/encode.pt2").stat().st_size
    for free, fit in ((3 * one, 3), (3 * one - 1, 2), (2 * one - 1, 1), (one - 1, 0)):
        machine.setattr("shutil.disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        verdicts = examine([artifact_path]).verdicts
        assert [each.works for each in verdicts] == [index < fit for index in range(3)]
        assert all("TMPDIR" in str(each.fix) for each in verdicts[fit:])


def test_a_packed_bundle_needs_space_in_the_cache_as_well(
    artifact_path: Path, tmp_path: Path, machine: pytest.MonkeyPatch
) -> None:
    pack(artifact_path, tmp_path / "t.mingc", {})
    on_machine(machine, "cpu", "AVX512")
    machine.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    temporary = Path(tempfile.gettempdir())
    machine.setattr(
        "shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 40 if Path(folder) == temporary else 0)
    )
    assert verdict_of(artifact_path).works
    verdict = verdict_of(tmp_path / "t.mingc")
    assert not verdict.works and "XDG_CACHE_HOME" in str(verdict.fix) and "TMPDIR" not in str(verdict.fix)


@pytest.mark.parametrize(
    ("backend", "has_onnx", "says", "fix"),
    [
        ("onnx", True, "", ""),
        ("onnx", False, "ONNX Runtime is not installed", "pip install 'mingc[onnx]'"),
        ("aoti", False, "", ""),
        ("nosuch", True, "backend nosuch is not one of", "another --backend"),
    ],
)
def test_a_stage_needs_the_loader_of_its_backend(
    backend: str, has_onnx: bool, says: str, fix: str, artifact_path: Path, machine: pytest.MonkeyPatch
) -> None:
    def change(document: dict[str, Any]) -> None:
        for graph in document["stages"]["audio_encoder"]["graphs"].values():
            for engine in graph["engines"]:
                engine["backend"] = backend

    edit_manifest(artifact_path, change)
    on_machine(machine, "cpu", "AVX2")
    if not has_onnx:
        real = importlib.util.find_spec
        machine.setattr(
            importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else real(name)
        )
    verdict = verdict_of(artifact_path)
    assert (verdict.backend, verdict.works) == (backend, not says)
    assert says in verdict.problem and fix in str(verdict.fix or "")


def test_a_verdict_has_the_weights_of_the_largest_rank_and_all_problems(
    artifact_path: Path, machine: pytest.MonkeyPatch
) -> None:
    real = open_artifact(artifact_path)
    files = {
        name: replace(record, size_bytes=3_456_000_000 if name.startswith("weights") else 2_000_000_000)
        for name, record in real.manifest.files.items()
    }
    large = replace(real, manifest=replace(real.manifest, files=files))
    machine.setattr(doctor_report, "open_artifact", lambda path: large)
    on_machine(machine, "cpu", "AVX2")
    machine.setattr("os.sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 3_000_000_000}.__getitem__)
    machine.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1_500_000_000))
    for name in ("uvicorn", "av", "cryptography"):
        set_version(name, None)
    verdict = verdict_of(artifact_path)
    assert (verdict.weights_gb, verdict.works) == (3.456, False)
    assert verdict.problem.split("; ")[:3] == [
        "uvicorn: missing",
        "av: missing",
        "its weights and the weights of earlier stages take 3.5 GB, this machine has 3.0 GB",
    ]
    assert "take 2.00 GB" in verdict.problem and "1.50 GB free" in verdict.problem
    assert str(verdict.fix).startswith("pip install 'mingc[serve]'; export again with --quantize fp8")
