"""GPU table: rows, the unknown GPU, and that nothing else knows a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mingc.artifacts.target import TARGETS, lookup
from mingc.commands import doctor_report as doctor
from mingc.host import machine as host
from mingc.kernels import dispatch

PACKAGE = Path(host.__file__).parent
# What would make a second place know a GPU: reading its properties, or its numbers as literals.
READERS = re.compile(r"get_device_capability|get_device_properties|multi_processor_count|L2_cache_size")
LITERALS = re.compile(
    r"\b132\b|\(9, ?0\)|sm_?90|compute_90|[\"']9\.0[\"']|capability\b(\[\d\])? *[<>=!]=? *[\"'(]?\d"
)


@pytest.fixture(autouse=True)
def forget_gpus() -> None:
    host._gpu.cache_clear()


def properties(name: str, capability: tuple[int, int], multiprocessors: int) -> SimpleNamespace:
    major, minor = capability
    return SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=multiprocessors, total_memory=150 << 30,
        L2_cache_size=60 << 20,
    )  # fmt: skip


def use_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], count: int) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: properties(name, capability, count)
    )


def test_an_h200_is_measured_and_runs_all_kernels() -> None:
    target = lookup((9, 0), "NVIDIA H200", 132)
    assert (target.name, target.is_known, target.is_measured) == ("NVIDIA H200", True, True)
    assert target.kernels == ("triton", "clusters")
    assert target.architecture == "sm_90a"
    assert target.num_multiprocessors == 132
    assert "not measured" not in target.describe()


def test_an_h100_runs_the_same_kernels_and_is_measured() -> None:
    h200, h100 = lookup((9, 0), "NVIDIA H200", 132), lookup((9, 0), "NVIDIA H100 80GB HBM3", 132)
    assert h100.name == "NVIDIA H100" and h100.kernels == h200.kernels
    assert (h100.gemv, h100.linear) == (h200.gemv, h200.linear)
    assert h100.memory_tb_s != h200.memory_tb_s
    assert h100.is_measured and "not measured" not in h100.describe()


def test_rates_are_those_of_the_data_sheets() -> None:
    """The vendor's figures for SXM modules: memory and its rate, bfloat16 without sparsity."""
    rates = {row.name: (row.memory_gb, row.memory_tb_s, row.bf16_tflop_s) for row in TARGETS}
    assert rates == {"NVIDIA H200": (141, 4.8, 989), "NVIDIA H100": (80, 3.35, 989)}


def test_the_dit_shares_inputs_as_measured() -> None:
    """benchmarks/NOTES.md: `qkv` and `up` split K over clusters of 2, `down` over 8, `project` over 4."""
    configs = lookup((9, 0), "NVIDIA H200", 132).flow_sampler
    assert [config.max_requests for config in configs] == [1, 2, 4]
    for config in configs:
        assert [each.cluster_size for each in (config.qkv, config.up, config.down)] == [2, 2, 8]
        assert config.project is None or config.project.cluster_size == 4


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "NVIDIA A100-SXM4-80GB"),
        ((10, 0), "NVIDIA B200"),
        ((9, 0), "NVIDIA GH200 480GB"),  # the name holds H200
        ((8, 0), "NVIDIA H200"),  # a name that does not belong to the capability
    ],
)
def test_a_gpu_without_a_row_runs_on_plain_kernels_and_says_so(
    capability: tuple[int, int], name: str
) -> None:
    target = lookup(capability, name, 108)
    assert not target.is_known and not target.kernels
    assert target.describe() == (
        f"unknown GPU {name} (compute capability {capability[0]}.{capability[1]}, 108 multiprocessors): "
        "runs on plain kernels; speed not measured"
    )


def test_a_part_of_a_gpu_has_its_own_number_of_multiprocessors() -> None:
    assert lookup((9, 0), "NVIDIA H200 MIG 1g.18gb", 16).num_multiprocessors == 16


def test_every_row_is_found_by_its_own_name() -> None:
    for row in TARGETS:
        assert lookup(row.capability, row.name, row.num_multiprocessors) == row
        assert row.memory_gb and row.memory_tb_s and row.bf16_tflop_s


def test_a_gpu_is_read_from_the_driver_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, "NVIDIA H200", (9, 0), 132)
    assert host.gpu_target(0) == host.gpu_target() == lookup((9, 0), "NVIDIA H200", 132)
    assert host.gpu(torch.device("cuda", 0)).memory_bytes == 150 << 30
    assert host.gpu(0).cache_bytes == 60 << 20
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    assert host.gpu_target(torch.device("cuda")).name == "NVIDIA H200"


def cuda_tensor(dtype: torch.dtype) -> torch.Tensor:
    return SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda", 0))  # type: ignore[return-value]


def test_kernels_run_where_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, "NVIDIA H200", (9, 0), 132)
    half, single = cuda_tensor(torch.bfloat16), cuda_tensor(torch.float32)
    assert dispatch.use_triton(half) and dispatch.use_clusters(half)
    assert dispatch.use_triton(half, 64) and not dispatch.use_triton(half, 72)
    assert not dispatch.use_triton(single) and not dispatch.use_clusters(single)
    with dispatch.plain_torch():
        assert not dispatch.use_triton(half) and not dispatch.use_clusters(half)


def test_kernels_run_for_the_dtypes_and_head_sizes_that_they_support(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, "NVIDIA H200", (9, 0), 132)
    ieee = cuda_tensor(torch.float16)
    assert dispatch.use_triton(ieee, 32) and not dispatch.use_clusters(ieee)
    assert not dispatch.use_triton(ieee, 16), "tensor cores take at least 16 dims of each half of a head"
    assert not dispatch.use_triton(torch.zeros(1, dtype=torch.bfloat16)), "a CPU tensor"
    with dispatch.plain_torch():
        with pytest.raises(ZeroDivisionError), dispatch.plain_torch():
            raise ZeroDivisionError
        assert not dispatch.use_triton(ieee), "the outer context still holds"
    assert dispatch.use_triton(ieee)


def test_each_gpu_has_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {0: ("NVIDIA A100-SXM4-80GB", (8, 0), 108), 1: ("NVIDIA H200", (9, 0), 132)}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties(*gpus[index]))
    assert host.gpu_target(0).name == host.gpu_target(torch.device("cuda", 0)).name == "NVIDIA A100-SXM4-80GB"
    assert host.gpu_target().name == host.gpu_target(torch.device("cuda")).name == "NVIDIA H200"


def test_no_kernel_runs_on_an_unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, "NVIDIA A100-SXM4-80GB", (8, 0), 108)
    assert not dispatch.use_triton(cuda_tensor(torch.bfloat16), 64)
    assert not dispatch.use_clusters(cuda_tensor(torch.bfloat16))


def test_dynamo_takes_the_lookup_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` must not trace into the table: it cannot trace regular expressions or calls of the driver."""
    use_gpu(monkeypatch, "NVIDIA H200", (9, 0), 132)

    def run(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if dispatch._has_kernels(0, "clusters") else x - 1

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))


def test_only_the_table_and_the_host_know_a_gpu() -> None:
    knowing = {"artifacts/target.py"}
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix not in (".py", ".cu"):
            continue
        name, text = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        if name != "machine.py":
            assert not READERS.search(text), f"{name} reads properties of a GPU: use mingc.host.machine.gpu"
        if name not in knowing:
            assert not LITERALS.search(text), (
                f"{name} knows a GPU: put the number in mingc/artifacts/target.py"
            )


@pytest.mark.parametrize(
    "line",
    [
        "if gpu().capability[0] >= 9:",
        "if target.capability >= (8, 0):",
        'if here.capability == "9.0":',
        'NEWEST = "9.0"',
        "NEWEST = (9, 0)",
        "programs = 132 * 4",
        'options = ["-arch=sm_90a"]',
    ],
)
def test_a_line_that_knows_a_gpu_is_found(line: str) -> None:
    assert LITERALS.search(line)


def test_one_function_reads_device_properties() -> None:
    text = (PACKAGE / "machine.py").read_text(encoding="utf-8")
    assert len(re.findall("get_device_properties|get_device_capability", text)) == 1


def test_a_target_looks_the_same_in_every_process() -> None:
    """Cache keys contain its representation, so it has no sets: their order changes with the hash seed."""
    code = "from mingc.artifacts.target import lookup; print(repr(lookup((9, 0), 'NVIDIA H200', 132)))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(PACKAGE.parent)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3", "4")
    }
    assert len(seen) == 1


def test_doctor_names_an_unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, "NVIDIA A100-SXM4-80GB", (8, 0), 108)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (check,) = [each for each in doctor._devices() if each.name == "cuda:0"]
    assert "150 GiB; unknown GPU NVIDIA A100-SXM4-80GB" in check.detail
