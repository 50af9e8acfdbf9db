"""Quantization on a GPU gives the weights that the CPU gives."""

from __future__ import annotations

import pytest
import torch

from mingc.artifacts.spec import Quantization
from mingc.export.stage import WeightSource
from mingc.export.weights.quantization import stored_tensors
from mingc.kernels.quantized import dequantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_the_device_quantizes_like_the_cpu(kind: Quantization) -> None:
    source = WeightSource(
        name="experts.down", part="main", tensors=(), shapes=(), compute=torch.empty, quantizable="experts"
    )
    value = torch.randn(3, 64, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = stored_tensors(source, value, kind, torch.bfloat16)
    stored = stored_tensors(source, value, kind, torch.bfloat16, torch.device("cuda"))
    assert [each.device.type for each in stored.values()] == ["cpu", "cpu"]
    if kind == "fp8":
        for name, tensor in expected.items():
            assert torch.equal(stored[name].view(torch.uint8), tensor.view(torch.uint8))
    # Of two scales with equal error either may be selected: sums have another order.
    same = stored["experts.down_scale"] == expected["experts.down_scale"]
    assert float(same.float().mean()) > 0.99
    values = [dequantize(*tensors.values(), torch.float32) for tensors in (stored, expected)]
    errors = [float((each - value.float()).square().mean()) for each in values]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
