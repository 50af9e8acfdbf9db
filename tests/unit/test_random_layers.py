"""Weights that are drawn at load: their distribution, formats and seeds."""

from __future__ import annotations

import pytest
import torch

from mingc.kernels.quantized import FP8, quantize_fp8, quantize_int4
from mingc.runtime.engines import random_layers
from mingc.runtime.engines.random_layers import drawn_like


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_values_have_the_distribution_of_the_stored_ones(dtype: torch.dtype) -> None:
    stored = (3 + 2 * matrix(64, 512)).to(dtype)
    drawn = drawn_like(stored, "layers.2.router.weight")
    assert drawn.dtype == dtype and drawn.shape == stored.shape
    assert float(drawn.float().mean()) == pytest.approx(3, abs=0.1)
    assert float(drawn.float().std()) == pytest.approx(2, abs=0.1)
    assert drawn.float().min() >= stored.float().min() and drawn.float().max() <= stored.float().max()
    assert (drawn.float() == stored.float()).float().mean() < 0.1


def test_the_name_is_the_seed() -> None:
    stored = matrix(8, 64)
    assert torch.equal(drawn_like(stored, "layers.2.w"), drawn_like(stored, "layers.2.w"))
    assert not torch.equal(drawn_like(stored, "layers.2.w"), drawn_like(stored, "layers.3.w"))


def test_fp8_values_stay_finite_and_scales_stay() -> None:
    weight, scale = quantize_fp8(matrix(64, 256))
    drawn = drawn_like(weight, "layers.1.qkv").float()
    assert drawn.isfinite().all() and not torch.equal(drawn, weight.float())
    kept = drawn_like(scale, "layers.1.qkv_scale")
    assert torch.equal(kept, scale) and kept.data_ptr() != scale.data_ptr()


def test_rows_of_packed_int4_change_places() -> None:
    packed, _ = quantize_int4(matrix(64, 256))
    experts = torch.stack([packed, packed.flip(0)])
    drawn = drawn_like(experts, "layers.1.gate_up")
    assert not torch.equal(drawn, experts)
    for before, after in zip(experts, drawn, strict=True):
        assert sorted(map(tuple, before.tolist())) == sorted(map(tuple, after.tolist()))


def test_parts_of_a_large_tensor_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_layers, "_DRAWN_AT_ONCE", 1000)
    drawn = drawn_like(matrix(50, 100), "layers.1.w").flatten()
    assert len({float(part.sum()) for part in drawn.split(1000)}) == 5
    assert float(drawn[4000:].std()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("stored", [torch.arange(8), torch.tensor(0.5), torch.tensor([7.0])])
def test_tables_and_single_values_are_copied(stored: torch.Tensor) -> None:
    drawn = drawn_like(stored, "layers.1.table")
    assert torch.equal(drawn, stored) and drawn.data_ptr() != stored.data_ptr()
