"""`mingc doctor`: what each missing piece disables, and that every declared dependency is checked."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from manifest_edit import edit_manifest

from mingc import doctor
from mingc.artifacts.target import Host
from mingc.doctor import Check, DoctorReport, examine, peer_check
from mingc.host import machine as host
from mingc.host.machine import Gpu

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
    absent = ("cuda", "tensorrt-rtx")  # here as well
    (missing,) = (each for each in report.checks if each.state == "missing" and each.name not in absent)
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
            *extras["tensorrt"],
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


def make_three_stages(artifact_path: Path, machine: pytest.MonkeyPatch) -> None:
    """Turn the artifact's stage into three equal ones, on a host that runs them."""

    def change(document: dict[str, Any]) -> None:
        stages, graph = document["stages"], document["graph"]
        record, node = stages["audio_encoder"], graph["nodes"][0]
        for name in ("second", "third"):
            stages[name] = {**record, "weights": record["weights"]}
            graph["nodes"].append({**node, "name": name})
            document["parameters"][name] = document["parameters"]["audio_encoder"]

    here = Host(torch="2.13.0", device="cpu", capability="AVX512")
    machine.setattr(doctor, "current_host", lambda device: here)
    edit_manifest(artifact_path, change)


def test_stages_of_an_artifact_share_the_memory(
    artifact_path: Path, good_machine: pytest.MonkeyPatch
) -> None:
    """Three stages of equal weights: each that begins beyond the memory does not work, nor do those after it."""
    make_three_stages(artifact_path, good_machine)
    sizes = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 0}
    good_machine.setattr("os.sysconf", sizes.__getitem__)
    one = len((artifact_path / "weights/audio.bin").read_bytes())
    for memory, fit in ((3 * one, 3), (3 * one - 1, 2), (2 * one - 1, 1), (one - 1, 0)):
        sizes["SC_PHYS_PAGES"] = memory
        verdicts = doctor._verdicts(artifact_path, set())
        assert [each.works for each in verdicts] == [index < fit for index in range(3)]


def test_stages_of_an_artifact_share_the_disk_for_their_engines(
    artifact_path: Path, good_machine: pytest.MonkeyPatch
) -> None:
    make_three_stages(artifact_path, good_machine)
    one = (artifact_path / "engines/encode.pt2").stat().st_size
    for free, fit in ((3 * one, 3), (3 * one - 1, 2), (2 * one - 1, 1), (one - 1, 0)):
        good_machine.setattr(doctor, "_free_bytes", lambda folder, free=free: free)
        verdicts = doctor._verdicts(artifact_path, set())
        assert [each.works for each in verdicts] == [index < fit for index in range(3)]
        assert all("TMPDIR" in str(each.fix) for each in verdicts[fit:])


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


@pytest.mark.parametrize(("free", "state"), [(1 << 30, "ok"), ((1 << 30) - 1, "problem"), (0, "problem")])
def test_a_folder_needs_a_gib(free: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=9 << 40, used=0, free=free))
    check = doctor._space("user cache", tmp_path / "not" / "there", "XDG_CACHE_HOME", "export")
    assert check.state == state and (check.fix is None) == (state == "ok")
    assert check.detail == f"{tmp_path / 'not' / 'there'}: {free / 2**30:.1f} GiB free"


def test_disks_are_those_of_the_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert doctor._temporary_space().detail.startswith(f"{tmp_path}/temporary: ")
    assert doctor._cache_space().detail.startswith(f"{tmp_path}/cache/mingc: ")


def test_memory_is_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 5 << 18}.__getitem__)
    assert doctor._memory().detail == "5.0 GiB"


@pytest.mark.parametrize(
    ("version", "state"), [((3, 10, 14), "problem"), ((3, 11, 0), "ok"), ((3, 13, 1), "ok")]
)
def test_python_must_be_a_supported_release(
    version: tuple[int, ...], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.version_info", version)
    check = doctor._python()
    assert check.state == state and (check.fix is None) == (state == "ok")


@pytest.mark.parametrize("has_loader", [True, False])
def test_torch_must_load_aotinductor_packages(has_loader: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SimpleNamespace(AOTIModelPackageLoader=object) if has_loader else SimpleNamespace()
    monkeypatch.setattr(torch, "_C", SimpleNamespace(_aoti=loader))
    assert doctor._loader().state == ("ok" if has_loader else "problem")


@pytest.mark.parametrize(
    ("name", "can_export", "can_serve"),
    [
        ("_torch_version", False, False),
        ("_loader", False, False),
        ("_python", False, False),
        ("_memory", True, True),
        ("_temporary_space", True, True),
        ("_cache_space", True, True),
    ],
)
def test_a_check_that_fails_disables_the_commands_that_rely_on_it(
    name: str, can_export: bool, can_serve: bool, good_machine: pytest.MonkeyPatch
) -> None:
    broken = replace(getattr(doctor, name)(), state="problem")
    good_machine.setattr(doctor, name, lambda: broken)
    report = examine()
    assert (report.can_export, report.can_serve) == (can_export, can_serve)
    assert broken in report.checks


def test_without_torch_nothing_is_asked_of_it(artifact_path: Path, good_machine: pytest.MonkeyPatch) -> None:
    for name in ("_torch_version", "_loader", "_devices"):
        good_machine.setattr(doctor, name, lambda: pytest.fail("torch is not there"))
    report = without(good_machine, "torch", artifacts=[artifact_path])
    assert not report.can_export and not report.can_serve and report.verdicts == ()


class Cuda:
    """Two GPUs of a hand-made machine; pairs in `closed` have no peer access."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, closed: set[tuple[int, int]]) -> None:
        gpus = [
            Gpu(
                name=f"GPU {index}",
                capability=(9, 0),
                num_multiprocessors=132,
                memory_bytes=(80 + index) << 30,
                cache_bytes=1,
            )
            for index in range(count)
        ]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(
            torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in closed
        )
        monkeypatch.setattr(doctor, "gpu", gpus.__getitem__)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_gpu_is_reported_and_links_from_two_on(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, count, {(0, 2)})
    checks = {check.name: check for check in doctor._devices()}
    names = [f"cuda:{index}" for index in range(count)] if count else ["cuda"]
    software = ["NVIDIA driver", "triton", "onnxruntime-gpu"] if count else []
    card = ["RTX card"] if count else []
    assert [*checks] == ["cpu", *software, *names, *card, *(["GPU links", "NCCL"] if count > 1 else [])]
    assert checks[names[0]].state == ("ok" if count else "missing")
    for index in range(count):
        assert checks[f"cuda:{index}"].detail.startswith(f"GPU {index}, {80 + index} GiB; ")
    if count > 1:
        assert "0-2" in checks["GPU links"].detail and "2-0" not in checks["GPU links"].detail
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7 + index, 80 << 30))
    assert doctor._gpu_free_bytes() == [7 + index for index in range(count)]
    assert doctor._gpu_bytes() == [(80 + index) << 30 for index in range(count)]


@pytest.mark.parametrize("name", ["starlette", "onnx", "cryptography", "onnxruntime"])
def test_a_missing_package_names_its_extra(name: str, good_machine: pytest.MonkeyPatch) -> None:
    extras = PROJECT["optional-dependencies"]
    report = without(good_machine, name)
    (check,) = (each for each in report.checks if each.name == name)
    extra = str(check.fix).partition("mingc[")[2].partition("]")[0]
    assert any(line.startswith(name) for line in extras[extra])


def test_the_compiler_is_that_of_cxx_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "c++"
    script.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\necho first >&2\necho last line >&2\nexit 1\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"{script} -pipe")
    check = doctor._compiler()
    assert (check.state, check.detail) == ("problem", f"{script} -pipe: last line") and check.fix is not None
    words = (tmp_path / "words").read_text().split()
    assert words[0] == "-pipe" and {"-shared", "-fPIC", "-std=c++20"} <= {*words}


@pytest.mark.parametrize(
    ("gpus", "world_size", "says"),
    [
        ([1 << 40] * 2, 2, ()),
        ([1 << 40] * 3, 2, ()),
        ([1 << 40], 2, ("for 2 GPUs, 1 are visible",)),
        ([1 << 40, 100], 2, ("a GPU has",)),
        ([1 << 40, 100, 1 << 40], 4, ("for 4 GPUs, 3 are visible", "a GPU has")),
    ],
)
def test_the_smallest_gpu_and_their_number_decide(
    gpus: list[int],
    world_size: int,
    says: tuple[str, ...],
    artifact_path: Path,
    good_machine: pytest.MonkeyPatch,
) -> None:
    def change(document: dict[str, Any]) -> None:
        document["fingerprint"] |= {"device": "cuda", "capability": "9.0", "world_size": world_size}

    edit_manifest(artifact_path, change)
    here = Host(torch="2.13.0", device="cuda", capability="9.0")
    good_machine.setattr(doctor, "current_host", lambda device: here)
    good_machine.setattr(doctor, "_gpu_bytes", lambda: gpus)
    (verdict,) = doctor._verdicts(artifact_path, set())
    assert verdict.works is (not says) and (verdict.fix is None) is (not says)
    assert all(each in verdict.problem for each in says) and len(verdict.problem.split("; ")) == max(
        1, len(says)
    )
    assert verdict.target == f"cuda 9.0, {world_size} rank(s)"
    (verdict,) = doctor._verdicts(artifact_path, {"engine loader", "soxr", "onnx", "av"})
    assert "this torch cannot load AOTInductor packages" in verdict.problem
    assert "not installed: av, soxr" in verdict.problem, "onnx is not needed to serve"


GIB = 1 << 30
FOUR = [80 * GIB] * 4
RTX_FIX = "serve such artifacts on a machine with one of these cards"


@pytest.fixture
def gpu_artifact(artifact_path: Path, good_machine: pytest.MonkeyPatch) -> Path:
    """The hand-made artifact as one for two GPUs of capability 9.0, on a machine that has them unless a test says."""

    def change(document: dict[str, Any]) -> None:
        document["fingerprint"] |= {"device": "cuda", "capability": "9.0", "world_size": 2}

    edit_manifest(artifact_path, change)
    here = Host(torch="2.13.0", device="cuda", capability="9.0")
    good_machine.setattr(doctor, "current_host", lambda device: here)
    good_machine.setattr(doctor, "_gpu_bytes", lambda: FOUR)
    good_machine.setattr(doctor, "_gpu_free_bytes", lambda: FOUR)
    return artifact_path


def use_gpus(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    links: set[tuple[int, int]],
    *,
    nccl: bool = True,
    capability: tuple[int, int] = (9, 0),
) -> None:
    """`count` GPUs as torch would show them, with peer access between the pairs `links`."""
    described = Gpu(
        name="NVIDIA H200",
        capability=capability,
        num_multiprocessors=132,
        memory_bytes=141 * GIB,
        cache_bytes=60 << 20,
    )
    monkeypatch.setattr(doctor, "gpu", lambda index: described)
    monkeypatch.setattr(doctor, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) in links)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    real = importlib.util.find_spec
    found = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "triton" else real(name))


def all_links(count: int) -> set[tuple[int, int]]:
    return {(one, other) for one in range(count) for other in range(count) if one != other}


def test_one_gpu_exports_and_serves_for_cuda(good_machine: pytest.MonkeyPatch) -> None:
    use_gpus(good_machine, 1, set())
    report = examine()
    checks = {check.name: check for check in report.checks}
    assert checks["cuda:0"].detail.startswith("NVIDIA H200, 141 GiB; ") and "cuda" not in checks
    assert checks["NVIDIA driver"].detail == "580.65.06; torch is built for CUDA 13.0"
    assert checks["triton"].state == "ok" and not {"NCCL", "GPU links"} & {*checks}
    assert [(each.target, each.exports, each.serves, each.fix) for each in report.targets] == [
        ("cpu, aoti", True, True, None),
        ("cpu, onnx", True, True, None),
        ("cuda, onnx", False, False, "pip uninstall onnxruntime; pip install 'mingc[onnx-gpu]'"),
        ("cuda, aoti", True, True, None),
        ("cuda, tensorrt", False, False, "pip install 'mingc[tensorrt]'"),
        ("rtx, tensorrt", False, False, f"pip install 'mingc[tensorrt]'; {RTX_FIX}"),
    ]


@pytest.mark.parametrize(
    "capability, has_library, absent, exports, serves, problem, fix",
    [
        ((8, 9), True, (), True, True, "", None),
        ((12, 0), True, (), True, True, "", None),
        (None, True, (), True, False, "cuda: ", "install"),
        ((9, 0), True, (), True, False, "RTX card: compute capability 9.0", RTX_FIX),
        ((8, 9), False, (), False, False, "tensorrt-rtx: missing", "pip install 'mingc[tensorrt]'"),
        ((8, 9), True, ("onnxscript",), False, True, "onnxscript: missing", "pip install 'mingc[onnx]'"),
        ((8, 9), True, ("uvicorn",), True, False, "uvicorn: missing", "pip install 'mingc[serve]'"),
    ],
)
def test_engines_for_rtx_cards_are_built_anywhere_and_served_on_a_card(
    capability: tuple[int, int] | None,
    has_library: bool,
    absent: tuple[str, ...],
    exports: bool,
    serves: bool,
    problem: str,
    fix: str | None,
    good_machine: pytest.MonkeyPatch,
) -> None:
    use_gpus(good_machine, 1 if capability else 0, set(), capability=capability or (9, 0))
    if capability is None:
        good_machine.setattr(doctor, "driver_version", lambda: None)
    real, found = importlib.util.find_spec, importlib.util.find_spec("json")
    library = found if has_library else None
    good_machine.setattr(
        importlib.util, "find_spec", lambda name: library if name == "tensorrt_rtx_bindings" else real(name)
    )
    rtx = without(good_machine, "tensorrt_rtx", "tensorrt", *absent).targets[-1]
    assert (rtx.target, rtx.exports, rtx.serves) == ("rtx, tensorrt", exports, serves)
    assert problem in rtx.problem and (rtx.problem == "") is (problem == "")
    assert rtx.fix is None if fix is None else fix in str(rtx.fix)


@pytest.mark.parametrize(
    "links, nccl, says",
    [
        (all_links(4), True, "one-shot"),
        (all_links(4) - {(2, 3)}, True, "devices 2-3"),
        (all_links(4), False, "one-shot"),
    ],
)
def test_four_gpus_have_links_and_nccl(
    links: set[tuple[int, int]], nccl: bool, says: str, good_machine: pytest.MonkeyPatch
) -> None:
    use_gpus(good_machine, 4, links, nccl=nccl)
    checks = {check.name: check for check in examine().checks}
    assert {f"cuda:{index}" for index in range(4)} <= {*checks} and "cuda:4" not in checks
    assert says in checks["GPU links"].detail
    assert checks["NCCL"].state == ("ok" if nccl else "missing")
    assert nccl or checks["NCCL"].fix == "install a CUDA build of torch"


def test_a_cpu_exports_for_a_cpu_alone(good_machine: pytest.MonkeyPatch) -> None:
    good_machine.setattr(torch.cuda, "is_available", lambda: False)
    good_machine.setattr(doctor, "driver_version", lambda: None)
    good_machine.setattr(torch.version, "cuda", None)
    cpu, onnx, cuda_onnx, cuda, *_ = examine().targets
    assert (cpu.exports, cpu.serves, onnx.exports, onnx.serves) == (True,) * 4 and not cpu.problem
    assert (cuda.target, cuda.exports, cuda.serves) == ("cuda, aoti", False, False)
    assert (cuda_onnx.target, cuda_onnx.exports, cuda_onnx.serves) == ("cuda, onnx", False, False)
    assert cuda.problem == cuda_onnx.problem == "cuda: this torch is a CPU build"
    assert cuda.fix == "install a GPU's driver and a CUDA build of torch"


@pytest.mark.parametrize(
    "modules, cpu, onnx, fixes",
    [
        (("uvicorn",), (True, False), (True, False), ("mingc[serve]",)),
        (("onnxscript",), (True, True), (False, True), ("mingc[onnx]",)),
        (("onnxruntime",), (False, True), (False, False), ("mingc[export]",)),
        (("safetensors", "av"), (False, False), (False, False), ("pip install safetensors", "mingc[serve]")),
    ],
)
def test_missing_extras_fail_the_targets_that_need_them(
    modules: tuple[str, ...],
    cpu: tuple[bool, bool],
    onnx: tuple[bool, bool],
    fixes: tuple[str, ...],
    good_machine: pytest.MonkeyPatch,
) -> None:
    first, second, *_ = without(good_machine, *modules).targets
    assert (first.exports, first.serves) == cpu and (second.exports, second.serves) == onnx
    failing = first if not all(cpu) else second
    assert all(fix in str(failing.fix) for fix in fixes)
    assert first.problem == "" if all(cpu) else ": missing" in first.problem


@pytest.mark.parametrize(
    "driver, built_for, says, fix",
    [
        (None, None, "CPU build", "install a GPU's driver"),
        ("580.65.06", None, "CPU build; driver 580.65.06 is there", "a CUDA build of torch"),
        (None, "13.0", "no NVIDIA driver; torch is built for CUDA 13.0", "--gpus all"),
        ("470.1", "13.0", "driver 470.1 shows no device", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_the_reason_for_no_gpu_has_its_own_fix(
    driver: str | None, built_for: str | None, says: str, fix: str
) -> None:
    why, how = doctor._no_cuda(driver, built_for)
    assert says in why and fix in how


@pytest.mark.parametrize(
    "text, release",
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\nGCC version:  gcc 12.3.0",
            "570.86.15",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("", None),
    ],
)
def test_the_driver_names_its_release(
    text: str, release: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Path, "read_text", lambda path, **_: text if str(path) == "/proc/driver/nvidia/version" else 1 / 0
    )
    assert host.driver_version() == release


def test_a_machine_without_a_driver_has_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, **_: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert host.driver_version() is None


def test_memory_in_use_is_not_memory_that_is_missing(
    gpu_artifact: Path, good_machine: pytest.MonkeyPatch
) -> None:
    """Only the GPUs of the artifact's ranks count: the two last ones are full."""
    (verdict,) = examine([gpu_artifact]).verdicts
    size = (gpu_artifact / "weights").rglob("*")
    assert verdict.cells() == {
        "stage": f"{gpu_artifact.name} audio_encoder",
        "target": "cuda 9.0, 2 rank(s), aoti",
        "works": True,
        "problem": "",
        "fix": None,
    }
    assert verdict.works and verdict.backend == "aoti" and verdict.target == "cuda 9.0, 2 rank(s)"
    assert verdict.weights_gb == round(max((each.stat().st_size for each in size), default=0) / 1e9, 3)
    good_machine.setattr(doctor, "_gpu_free_bytes", lambda: [*FOUR[:2], 0, 0])
    assert examine([gpu_artifact]).verdicts[0].works
    good_machine.setattr(doctor, "_gpu_free_bytes", lambda: [80 * GIB, 0])
    (verdict,) = examine([gpu_artifact]).verdicts
    assert "a GPU has 0.0 of 85.9 GB free" in verdict.problem and "end what else" in str(verdict.fix)


def test_several_ranks_need_nccl(gpu_artifact: Path, good_machine: pytest.MonkeyPatch) -> None:
    use_gpus(good_machine, 4, all_links(4), nccl=False)
    (verdict,) = examine([gpu_artifact]).verdicts
    assert (
        not verdict.works and "no NCCL" in verdict.problem and verdict.fix == "install a CUDA build of torch"
    )


@pytest.mark.parametrize(
    "backend, missing, says, fix",
    [
        ("onnx", (), "", None),
        (
            "onnx",
            ("onnxruntime",),
            "its engines need backend onnx: ONNX Runtime is not installed",
            "pip install 'mingc[onnx]'",
        ),
        ("aoti", ("onnxruntime",), "", None),
        ("nosuch", (), "no loader for engines of the backend nosuch", "another --backend"),
    ],
)
def test_a_stage_needs_the_loader_of_its_backend(
    backend: str,
    missing: tuple[str, ...],
    says: str,
    fix: str | None,
    artifact_path: Path,
    good_machine: pytest.MonkeyPatch,
) -> None:
    def change(document: dict[str, Any]) -> None:
        for graph in document["stages"]["audio_encoder"]["graphs"].values():
            for engine in graph["engines"]:
                engine["backend"] = backend

    edit_manifest(artifact_path, change)
    here = Host(torch="2.13.0", device="cpu", capability="AVX2")
    good_machine.setattr(doctor, "current_host", lambda device: here)
    (verdict,) = without(good_machine, *missing, artifacts=[artifact_path]).verdicts
    assert (verdict.backend, verdict.works) == (backend, not says)
    assert verdict.problem == says and (fix is None or fix in str(verdict.fix))


def test_engines_need_the_loader_of_torch(artifact_path: Path, good_machine: pytest.MonkeyPatch) -> None:
    broken = Check(name="engine loader", state="problem", detail="", needed_for="serve")
    good_machine.setattr(doctor, "_loader", lambda: broken)
    here = Host(torch="2.13.0", device="cpu", capability="AVX2")
    good_machine.setattr(doctor, "current_host", lambda device: here)
    (verdict,) = examine([artifact_path]).verdicts
    assert verdict.problem == "this torch cannot load AOTInductor packages" and "torch>=2.11" in str(
        verdict.fix
    )


def test_engines_need_space_where_they_are_unpacked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    free = {tempfile.gettempdir(): 3_000_000_000, str(tmp_path / "cache" / "mingc"): 1_000_000_000}
    monkeypatch.setattr(doctor, "_free_bytes", lambda folder: free[str(folder)])
    assert doctor._disk_problems(2_000_000_000, is_packed=False) == []
    ((problem, fix),) = doctor._disk_problems(2_000_000_000, is_packed=True)
    assert "take 2.00 GB" in problem and "has 1.00 GB free" in problem and "XDG_CACHE_HOME" in str(fix)
    ((problem, fix),) = doctor._disk_problems(4_000_000_000, is_packed=False)
    assert tempfile.gettempdir() in problem and "TMPDIR" in str(fix)


def test_free_space_is_of_the_nearest_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []

    def usage(folder: Path) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(free=7, total=9, used=2)

    monkeypatch.setattr("shutil.disk_usage", usage)
    assert doctor._free_bytes(tmp_path / "not" / "there") == 7 and asked == [tmp_path]


def problem(name: str) -> Check:
    return Check(name=name, state="problem", detail="broken", needed_for="x", fix=f"mend {name}")


AOTI, ONNX, CUDA_ONNX, CUDA, TENSORRT, CARD = (
    "cpu, aoti", "cpu, onnx", "cuda, onnx", "cuda, aoti", "cuda, tensorrt", "rtx, tensorrt",
)  # fmt: skip
EVERYTHING = dict.fromkeys((AOTI, ONNX, CUDA_ONNX, CUDA, TENSORRT, CARD), (False, False))
SERVING = dict.fromkeys(EVERYTHING, (True, False))
GRAPHS = dict.fromkeys((ONNX, CUDA_ONNX, TENSORRT, CARD), (False, True))


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("python", EVERYTHING),
        ("torch version", EVERYTHING),
        *((name, EVERYTHING) for name in doctor._REQUIRED),
        ("engine loader", dict.fromkeys((AOTI, CUDA), (False, False))),
        ("C++ compiler", dict.fromkeys((AOTI, CUDA), (False, True))),
        (
            "onnxruntime",
            dict.fromkeys((AOTI, CUDA, CARD), (False, True))
            | dict.fromkeys((ONNX, CUDA_ONNX), (False, False)),
        ),
        ("onnxruntime-gpu", {CUDA_ONNX: (False, False)}),
        ("onnx", GRAPHS),
        ("onnxscript", GRAPHS),
        ("tensorrt-rtx", dict.fromkeys((TENSORRT, CARD), (False, False))),
        ("cuda", dict.fromkeys((CUDA_ONNX, CUDA, TENSORRT), (False, False)) | {CARD: (True, False)}),
        ("triton", {CUDA: (False, True)}),
        ("RTX card", {CARD: (True, False)}),
        *((name, SERVING) for _, name, _, extra in doctor._OPTIONAL if extra == "serve"),
        ("cryptography", {}),
        ("memory", {}),
    ],
)
def test_what_each_check_takes_away(name: str, lost: dict[str, tuple[bool, bool]]) -> None:
    """(exports, serves) of the targets that need it; all others work."""
    fine = Check(name="cpu", state="ok", detail="", needed_for="")
    for each in doctor._targets([fine, problem(name)]):
        assert (each.exports, each.serves) == lost.get(each.target, (True, True)), each.target
        assert each.problem == (f"{name}: broken" if each.target in lost else "")
        assert each.fix == (f"mend {name}" if each.target in lost else None)


def test_problems_of_a_target_are_listed_once_and_their_fixes_as_well() -> None:
    checks = [problem("python"), problem("uvicorn"), replace(problem("av"), fix="mend uvicorn", detail="")]
    first = doctor._targets(checks)[0]
    assert first.problem == "python: broken; uvicorn: broken; av: problem"
    assert first.fix == "mend python; mend uvicorn"


def test_checks_of_two_linked_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus(monkeypatch, 2, all_links(2), nccl=False, capability=(8, 9))
    monkeypatch.setattr(doctor, "_package", lambda *words: problem("triton"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(doctor, "has_cuda_provider", lambda: True)
    cpu, driver, triton, onnx, first, second, card, links, nccl = doctor._devices()
    cuda = "export --target cuda"
    assert cpu == Check(name="cpu", state="ok", detail="12 cores, AVX2", needed_for="export --target cpu")
    release = "580.65.06; torch is built for CUDA 13.0"
    assert driver == Check(name="NVIDIA driver", state="ok", detail=release, needed_for=cuda)
    assert triton == problem("triton")
    needed_for = "export --target cuda --backend onnx, and its engines"
    assert onnx == Check(name="onnxruntime-gpu", state="ok", detail="", needed_for=needed_for)
    assert (first.name, second.name, first.needed_for) == ("cuda:0", "cuda:1", cuda)
    assert first.detail == second.detail == f"NVIDIA H200, 141 GiB; {doctor.gpu(0).target.describe()}"
    assert card == Check(
        name="RTX card",
        state="ok",
        detail="compute capability 8.9",
        needed_for="serve: artifacts of --target rtx:…",
    )
    assert links == peer_check([]) and links.needed_for == "serve --tp 2 and more"
    assert nccl == Check(
        name="NCCL",
        state="missing",
        detail="not in this torch",
        needed_for="serve --tp 2 and more",
        fix="install a CUDA build of torch",
    )
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert doctor._devices()[-1] == replace(nccl, state="ok", detail="in this torch", fix=None)
    monkeypatch.setattr(doctor, "driver_version", lambda: None)
    assert doctor._devices()[1].detail == "release unknown; torch is built for CUDA 13.0"


@pytest.mark.parametrize(("is_installed", "detail"), [(True, "this ONNX Runtime is for CPUs"), (False, "")])
def test_an_onnx_runtime_without_cuda(
    is_installed: bool, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "has_cuda_provider", lambda: False)
    monkeypatch.setattr(doctor, "is_installed", lambda: is_installed)
    check = doctor._onnx_cuda()
    fix = "pip uninstall onnxruntime; pip install 'mingc[onnx-gpu]'"
    assert (check.state, check.detail, check.fix) == ("missing", detail, fix)


def test_a_card_that_tensorrt_for_rtx_does_not_know() -> None:
    check = doctor._rtx_card([(9, 0), (9, 0), (7, 0)])
    assert (check.state, check.fix) == ("missing", RTX_FIX)
    assert check.detail.startswith("compute capability 9.0, 7.0; TensorRT for RTX builds engines for ")
    known = check.detail.rpartition("for ")[2].split(", ")
    assert {"8.6", "8.9", "12.0"} <= {*known} and not {"9.0", "10.0"} & {*known}
    assert doctor._rtx_card([(9, 0), (12, 0)]).state == "ok", "one of several is enough"


def test_checks_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fix = "pip install 'torch>=2.11,<2.14'"
    for version, is_ok in (("2.13.1+cu130", True), ("1.99.0", False), ("3.0", False)):
        monkeypatch.setattr("torch.__version__", version)
        assert doctor._torch_version() == Check(
            name="torch version",
            state="ok" if is_ok else "problem",
            detail=version,
            needed_for="everything",
            fix=None if is_ok else fix,
        )
    loader = {"name": "engine loader", "needed_for": "serve, verify"}
    monkeypatch.setattr(torch, "_C", SimpleNamespace(_aoti=SimpleNamespace(AOTIModelPackageLoader=object)))
    assert doctor._loader() == Check(**loader, state="ok", detail="AOTInductor packages")  # type: ignore[arg-type]
    for module in (SimpleNamespace(), SimpleNamespace(_aoti=SimpleNamespace())):
        monkeypatch.setattr(torch, "_C", module)
        assert doctor._loader() == Check(
            **loader,  # type: ignore[arg-type]
            state="problem",
            detail="this torch cannot load AOTInductor packages",
            fix=fix,
        )


def test_checks_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    there = doctor._package("click", "click", "everything", None)
    assert there == Check(
        name="click", state="ok", detail=doctor.importlib.metadata.version("click"), needed_for="everything"
    )
    unknown = doctor._package("json", "no-such-distribution", "serve", "serve")
    assert (unknown.state, unknown.detail) == ("ok", "version unknown")
    for extra, fix in ((None, "pip install dist-name"), ("serve", "pip install 'mingc[serve]'")):
        assert doctor._package("no_such_module", "dist-name", "serve: x", extra) == Check(
            name="dist-name", state="missing", detail="", needed_for="serve: x", fix=fix
        )


def test_a_verdict_has_the_weights_of_the_largest_rank_and_all_problems(
    artifact_path: Path, good_machine: pytest.MonkeyPatch
) -> None:
    real = doctor.open_artifact(artifact_path)
    files = {
        name: replace(record, size_bytes=3_456_000_000 if name.startswith("weights") else 2_000_000_000)
        for name, record in real.manifest.files.items()
    }
    large = replace(real, manifest=replace(real.manifest, files=files))
    good_machine.setattr(doctor, "open_artifact", lambda path: large)
    here = Host(torch="2.13.0", device="cpu", capability="AVX2")
    good_machine.setattr(doctor, "current_host", lambda device: here)
    good_machine.setattr("os.sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 3_000_000_000}.__getitem__)
    good_machine.setattr(doctor, "_free_bytes", lambda folder: 1_500_000_000)
    good_machine.setattr("tempfile.gettempdir", lambda: "/scratch")
    (verdict,) = doctor._verdicts(artifact_path, {"uvicorn", "av", "soxr", "cryptography"})
    assert (verdict.weights_gb, verdict.backend, verdict.works) == (3.456, "aoti", False)
    assert verdict.problem.split("; ") == [
        "not installed: av, soxr, uvicorn",
        "its weights and those of the stages before take 3.5 GB, this machine has 3.0 GB",
        "its engines and those of the stages before take 2.00 GB, /scratch has 1.50 GB free",
    ]
    assert str(verdict.fix).split("; ") == [
        "pip install 'mingc[serve]'",
        "export again with --quantize fp8 or a larger --tp, or use a machine with more memory",
        "free some space there, or set TMPDIR to another folder",
    ]
    assert verdict.cells()["works"] is False
