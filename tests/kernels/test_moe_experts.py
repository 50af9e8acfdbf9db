"""Routed experts: both reference forms against a loop over tokens, and independence of the batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels import moe_experts as kernel
from mingc.kernels.moe_experts import ExpertWeights, moe_experts
from mingc.kernels.quantized import dequantize, quantize_fp8, quantize_int4

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make_inputs(tokens: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """16 experts of intermediate size 24 over hidden size 32, four a token."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 32, generator=generator).to(dtype)
    ids = torch.rand(tokens, 16, generator=generator).topk(4).indices
    weights = torch.rand(tokens, 4, generator=generator)
    gate_up = torch.randn(16, 48, 32, generator=generator).to(dtype) / 6
    down = torch.randn(16, 32, 24, generator=generator).to(dtype) / 5
    return x, ids, weights, gate_up, down


def plain(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Reference in float64, token by token."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_eager_form(tokens: int) -> None:
    inputs = make_inputs(tokens)
    torch.testing.assert_close(moe_experts(*inputs).double(), plain(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 40])
def test_captured_form(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(tokens)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    torch.testing.assert_close(moe_experts(*inputs).double(), plain(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_captured", [False, True])
def test_narrower_experts_are_those_in_float32(is_captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of an export keeps the experts in bfloat16: every bfloat16 is a float32."""
    x, ids, weights, *experts = make_inputs(40)
    narrow = [each.bfloat16() for each in experts]
    if is_captured:
        monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    found = moe_experts(x, ids, weights, *narrow)
    assert torch.equal(found, moe_experts(x, ids, weights, *[each.float() for each in narrow]))


def test_one_expert_with_more_rows_than_a_block() -> None:
    x, ids, weights, gate_up, down = make_inputs(3 * kernel._BLOCK_ROWS + 1)
    ids[:, 0] = 15
    inputs = (x, ids, weights, gate_up, down)
    torch.testing.assert_close(moe_experts(*inputs).double(), plain(*inputs), rtol=1e-5, atol=1e-5)


def test_a_token_does_not_depend_on_its_batch() -> None:
    x, ids, weights, gate_up, down = make_inputs(37)
    together = moe_experts(x, ids, weights, gate_up, down)
    for token in (0, 20, 36):
        part = slice(token, token + 1)
        alone = moe_experts(x[part], ids[part], weights[part], gate_up, down)
        assert torch.equal(alone, together[part])


def test_bfloat16_sums_in_float32() -> None:
    inputs = make_inputs(8, torch.bfloat16)
    got = moe_experts(*inputs)
    assert got.dtype == torch.bfloat16
    expected = plain(*inputs)
    assert (got.double() - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_int4])
def test_quantized_weights_with_a_shared_expert(
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]], is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, ids, weights, gate_up, down = make_inputs(5)
    stored_up, up_scale = quantize(gate_up)
    stored_down, down_scale = quantize(down)
    up32, down32 = (
        dequantize(*pair, torch.float32) for pair in ((stored_up, up_scale), (stored_down, down_scale))
    )
    shared = ExpertWeights(stored_up[3], stored_down[3], up_scale[3], down_scale[3])
    everywhere = torch.full((5, 1), 3), torch.ones(5, 1)
    expected = plain(x, ids, weights, up32, down32) + plain(x, *everywhere, up32, down32)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: is_captured)
    got = moe_experts(x, ids, weights, stored_up, stored_down, up_scale, down_scale, shared=shared)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
