"""Routed experts: both reference forms against a loop over tokens, and independence of the batch."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels import dispatch
from mingc.kernels import moe_experts as kernel
from mingc.kernels.cuda import int4_experts
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


def make_int4(tokens: int, hidden: int, inner: int) -> tuple[Tensor, Tensor, Tensor, ExpertWeights]:
    """Four experts without values, two a token."""
    stored = [
        torch.empty(4, *shape, dtype=torch.uint8)
        for shape in ((2 * inner, hidden // 2), (hidden, inner // 2))
    ]
    scales = [torch.empty(*each.shape[:2], each.shape[2] // 64, dtype=torch.bfloat16) for each in stored]
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    return (
        x,
        torch.zeros(tokens, 2, dtype=torch.int64),
        torch.zeros(tokens, 2),
        ExpertWeights(*stored, *scales),
    )


@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "families", "code"),
    [
        (31, 512, 512, ("triton", "clusters"), None),
        (32, 512, 512, ("triton", "clusters"), "code"),
        (64, 4096, 1024, ("triton", "clusters"), "code"),
        (256, 4096, 1024, ("triton", "clusters"), "code"),
        (257, 512, 512, ("triton", "clusters"), None),
        (32, 512, 512, ("triton",), None),
        (65, 512, 512, ("triton",), None),
        (32, 512, 256, ("triton", "clusters"), None),
        (65, 512, 256, ("triton", "clusters"), None),
        (65, 768, 512, ("triton", "clusters"), None),
        (65, 4608, 512, ("triton", "clusters"), None),
    ],
)
def test_cuda_multiplies_int4_where_its_sizes_fit(
    tokens: int,
    hidden: int,
    inner: int,
    families: tuple[str, ...],
    code: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if on a GPU with these kernel families."""
    calls: list[tuple[Any, ...]] = []
    for name in ("moe_prefill", "moe_decode"):  # the last argument of the second is a scale
        recorder = SimpleNamespace(**{name: lambda *given: calls.append(given)})
        monkeypatch.setitem(sys.modules, f"mingc.kernels.triton.{name}", recorder)
    x, ids, weights, experts = make_int4(tokens, hidden, inner)
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        on_gpu.setattr(dispatch, "_has_kernels", lambda index, family: family in families)
        on_gpu.setattr(int4_experts, "machine_code", lambda device: "code")
        moe_experts(x, ids, weights, *experts)
        moe_experts(x, ids, weights, experts.gate_up.view(torch.int8), *experts[1:])  # no INT4
        moe_experts(x.half(), ids, weights, *experts)
    assert [given[-1] for given in calls] == [code, None, None]


def test_a_step_in_cuda_runs_the_shared_expert_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if on a GPU with clusters: the decode kernels would take its weights, those of chunks take its output."""
    calls: list[tuple[Any, ...]] = []
    for name in ("moe_prefill", "moe_decode"):
        recorder = SimpleNamespace(**{name: lambda *given: calls.append(given)})
        monkeypatch.setitem(sys.modules, f"mingc.kernels.triton.{name}", recorder)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 512, generator=generator).bfloat16()
    gate_up, gate_up_scale = quantize_int4(torch.randn(1024, 512, generator=generator) / 22)
    down, down_scale = quantize_int4(torch.randn(512, 512, generator=generator) / 22)
    shared = ExpertWeights(gate_up, down, gate_up_scale, down_scale)
    _, ids, weights, experts = make_int4(32, 512, 512)
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        on_gpu.setattr(dispatch, "_has_kernels", lambda index, family: True)
        on_gpu.setattr(int4_experts, "machine_code", lambda device: "code")
        moe_experts(x, ids, weights, *experts, shared=shared)
    (given,) = calls
    everywhere = torch.zeros(32, 1, dtype=torch.int64), torch.ones(32, 1)
    dense = [
        dequantize(*pair, torch.float32)[None] for pair in ((gate_up, gate_up_scale), (down, down_scale))
    ]
    expected = plain(x, *everywhere, *dense)
    assert (given[-2].double() - expected).norm() / expected.norm() < 0.01 and given[-1] == "code"


def test_a_chunk_that_cuda_would_multiply_runs_in_torch_on_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(70, 512, generator=generator).bfloat16()
    ids = torch.rand(70, 4, generator=generator).topk(2).indices
    weights = torch.rand(70, 2, generator=generator)
    gate_up, gate_up_scale = quantize_int4(torch.randn(4, 1024, 512, generator=generator) / 22)
    down, down_scale = quantize_int4(torch.randn(4, 512, 512, generator=generator) / 22)
    got = moe_experts(x, ids, weights, gate_up, down, gate_up_scale, down_scale)
    expected = plain(
        x,
        ids,
        weights,
        dequantize(gate_up, gate_up_scale, torch.float32),
        dequantize(down, down_scale, torch.float32),
    )
    assert (got.double() - expected).norm() / expected.norm() < 0.01


def test_the_int4_operator_has_a_row_for_each_pair() -> None:
    x, _, _, experts = make_int4(70, 512, 512)
    order, table = torch.empty(140, dtype=torch.int32), torch.empty(3, 16, dtype=torch.int32)
    given = [each.to("meta") for each in (x, order, table, *experts)]
    out = torch.ops.mingc.int4_experts(*given, 13, "code")
    assert (out.shape, out.dtype) == ((140, 512), torch.bfloat16)
