"""Weights that threads copy from files to a GPU, compared with those that the library reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mingc.artifacts.file_region import FileRegion
from mingc.runtime.engines import device_copies
from mingc.runtime.engines.packed_weights import PackedWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("is_inference", [False, True], ids=["as usual", "in inference mode"])
def test_copies_are_what_the_library_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_inference: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    path, device = tmp_path / "weights.safetensors", torch.device("cuda", torch.cuda.device_count() - 1)
    tensors = {f"w{index}": torch.randn(index, 1001, generator=generator) for index in range(200)}
    tensors |= {"fp8": torch.randn(999, generator=generator).to(torch.float8_e4m3fn)}
    save_file(tensors | {"scalar": torch.tensor(2.5)}, path)
    file = PackedWeights(FileRegion(path, path.name, 0, path.stat().st_size, is_whole=True))
    monkeypatch.setattr(
        device_copies, "_PIECE_BYTES", 100_003
    )  # tensors of several pieces, buffers used again
    with torch.inference_mode(is_inference):
        copies = device_copies.copy_to_device(dict.fromkeys(file.keys(), file), device)
    expected = load_file(path)
    assert copies.keys() == expected.keys()
    for name, tensor in expected.items():
        assert copies[name].device == device and copies[name].dtype == tensor.dtype
        assert torch.equal(copies[name].cpu().float(), tensor.float()), name


def test_a_file_that_became_shorter_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.ones(1 << 20)}, path)
    file = PackedWeights(FileRegion(path, path.name, 0, path.stat().st_size, is_whole=True))
    with path.open("r+b") as stream:
        stream.truncate(1 << 20)
    with pytest.raises(OSError, match="the file is too short"):
        device_copies.copy_to_device({"a": file}, torch.device("cuda", 0))
