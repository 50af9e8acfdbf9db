"""The machine a process runs on, with and without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mingc.artifacts.target import Host
from mingc.host import machine as host
from mingc.host.description import processor_name
from mingc.host.machine import Gpu, current_host, equal_gpus

H200 = Gpu(
    name="NVIDIA H200",
    capability=(9, 0),
    num_multiprocessors=132,
    memory_bytes=141 << 30,
    cache_bytes=60 << 20,
)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9000")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")


@pytest.mark.usefixtures("cpu")
def test_without_a_gpu_the_host_for_cuda_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(host, "gpu", lambda *_: pytest.fail("there is no GPU to ask"))
    expected = Host(torch="2.13.0", device="cpu", capability="AVX9000")
    assert current_host("cuda") == current_host("cpu") == expected


@pytest.mark.usefixtures("cpu")
def test_with_a_gpu_the_host_depends_on_the_device_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpus = {None: H200, 2: replace(H200, capability=(8, 0))}
    monkeypatch.setattr(host, "gpu", gpus.__getitem__)
    assert current_host("cuda") == Host(torch="2.13.0", device="cuda", capability="9.0")
    assert current_host("cuda", 2).capability == "8.0", "that of the GPU, not of the current one"
    assert current_host("cpu") == Host(torch="2.13.0", device="cpu", capability="AVX9000")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ("0", "2")), ("7,4,GPU-ab", ("7", "GPU-ab")), ("7, 4, 3, no such GPU", ("7", "3"))],
)
def test_equal_gpus_are_named_as_cuda_lists_them(
    visible: str | None, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second GPU is of another model. What follows an unknown name is not visible."""
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    same = replace(H200, memory_bytes=H200.memory_bytes - 4096)
    gpus = {None: H200, 0: H200, 1: replace(H200, name="NVIDIA H100"), 2: same}
    monkeypatch.setattr(host, "gpu", lambda index=None: gpus[index])
    assert equal_gpus() == expected


def test_without_a_gpu_none_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert equal_gpus() == ()


def test_the_processor_has_a_name() -> None:
    assert processor_name() not in ("", "cpu")
