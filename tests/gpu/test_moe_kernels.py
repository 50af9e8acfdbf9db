"""Triton kernels of a mixture-of-experts layer against their torch references, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.dispatch import plain_torch
from mingc.kernels.linear import linear
from mingc.kernels.moe_experts import ExpertWeights, has_int4_kernel, moe_experts
from mingc.kernels.quantized import quantize_fp8, quantize_int4
from mingc.kernels.router import route_hidden
from mingc.kernels.triton import moe_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HIDDEN, EXPERTS, CHOSEN = 1024, 32, 4
# Outputs are sums of 2 F values, each rounded to bfloat16; relative to the largest value.
TOLERANCE = 1.5e-2
# With more tokens an FP8 shared expert runs as FP8 GEMMs, whose rows are rounded to 3 bits: that alone is 0.024 to
# 0.043 of the largest value here. The reference below rounds them too.
DECODE_TOKENS = 64
# It cannot round all of them identically: the vendor's sums have fewer bits, and the compiler keeps silu(gate) * up in
# float32 where eager code has bfloat16. Some inputs of the second GEMM then round to another FP8 value, which is 0.011
# to 0.027 of the largest value in a CPU model of it.
ROUNDED_TOLERANCE = 4e-2


def store(weight: Tensor, weight_format: str) -> tuple[Tensor, Tensor | None]:
    if weight_format == "fp8":
        return quantize_fp8(weight)
    if weight_format == "int4":
        return quantize_int4(weight)
    return weight.to(torch.bfloat16), None


def make(weight_format: str, size: int, *leading: int) -> ExpertWeights:
    gate_up, up_scale = store(
        torch.randn(*leading, 2 * size, HIDDEN, device="cuda") * HIDDEN**-0.5, weight_format
    )
    down, down_scale = store(torch.randn(*leading, HIDDEN, size, device="cuda") * size**-0.5, weight_format)
    return ExpertWeights(gate_up, down, up_scale, down_scale)


def random_routing(tokens: int) -> tuple[Tensor, Tensor]:
    scores = torch.rand(tokens, EXPERTS, device="cuda")
    return scores.topk(CHOSEN).indices, torch.rand(tokens, CHOSEN, device="cuda")


def check(value: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    error = (value.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < tolerance


def rounded_gemm(rows: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """rows @ weightᵀ with rows rounded to FP8; rounded to bfloat16 before and after the scales."""
    assert scale is not None
    rounded, row_scale = quantize_fp8(rows)
    product = (rounded.float() @ weight.float().t()).to(rows.dtype)
    return (product.float() * row_scale.unsqueeze(1) * scale).to(rows.dtype)


def rounded_swiglu(x: Tensor, expert: ExpertWeights) -> Tensor:
    """An FP8 shared expert with the rows of both GEMMs rounded to FP8, as in `mingc.kernels.linear`."""
    gate, up = rounded_gemm(x, expert.gate_up, expert.gate_up_scale).chunk(2, dim=-1)
    return rounded_gemm(F.silu(gate) * up, expert.down, expert.down_scale)


# With size 512 CUDA C++ multiplies INT4 for 32 to 256 tokens.
@pytest.mark.parametrize("tokens", [1, 2, 16, 31, 32, 37, 64, 65, 131, 256, 257, 700, 1100])
@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("size", [128, 512])
def test_experts(tokens: int, weight_format: str, size: int) -> None:
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    experts, shared = make(weight_format, size, EXPERTS), make(weight_format, size)
    choice = random_routing(tokens)
    is_rounded = weight_format == "fp8" and tokens > DECODE_TOKENS
    with plain_torch():
        expected = moe_experts(x, *choice, *experts, shared=None if is_rounded else shared)
    if is_rounded:
        expected += rounded_swiglu(x, shared)
    value = moe_experts(x, *choice, *experts, shared=shared)
    check(value, expected, ROUNDED_TOLERANCE if is_rounded else TOLERANCE)


@pytest.mark.parametrize("rows", [65, 700])
def test_an_fp8_gemm(rows: int) -> None:
    """With rows rounded identically, only the order of sums differs."""
    x = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
    weight, scale = quantize_fp8(torch.randn(512, HIDDEN, device="cuda") * HIDDEN**-0.5)
    check(linear(x, weight, None, scale), rounded_gemm(x, weight, scale))


@pytest.mark.parametrize(("tokens", "size"), [(40, 128), (40, 512), (200, 128), (200, 512), (256, 512)])
@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "int4"])
def test_all_tokens_routed_to_the_same_experts(tokens: int, size: int, weight_format: str) -> None:
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    experts = make(weight_format, size, EXPERTS)
    ids = torch.tensor([[31, 7, 0, 12]], device="cuda").expand(tokens, -1).contiguous()
    choice = ids, torch.rand(tokens, CHOSEN, device="cuda")
    with plain_torch():
        expected = moe_experts(x, *choice, *experts)
    check(moe_experts(x, *choice, *experts), expected)


@pytest.mark.parametrize(
    ("tokens", "size"),
    [(12, 256), (60, 256), (32, 512), (64, 512), (65, 512), (256, 512), (300, 256), (1100, 256)],
)
@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "int4"])
def test_a_token_does_not_depend_on_its_batch(tokens: int, size: int, weight_format: str) -> None:
    """Replace all tokens but the middle one and their experts: the middle one keeps its bits."""
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    experts, shared = make(weight_format, size, EXPERTS), make(weight_format, size)
    ids, mix = random_routing(tokens)
    kept = tokens // 2
    before = moe_experts(x, ids, mix, *experts, shared=shared)[kept]
    others, (other_ids, other_mix) = torch.randn_like(x), random_routing(tokens)
    for mine, own in ((others, x), (other_ids, ids), (other_mix, mix)):
        mine[kept] = own[kept]
    after = moe_experts(others, other_ids, other_mix, *experts, shared=shared)[kept]
    assert torch.equal(before, after)


@pytest.mark.parametrize("tokens", [32, 48, 64])
def test_a_token_of_a_step_in_cuda_does_not_depend_on_its_row(tokens: int) -> None:
    """In other rows, beside padding that goes to one set of experts, tokens keep their bits."""
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    experts, shared = make("int4", 512, EXPERTS), make("int4", 512)
    ids, mix = random_routing(tokens)
    before = moe_experts(x, ids, mix, *experts, shared=shared)
    order, kept = torch.randperm(tokens, device="cuda"), tokens // 3
    x, ids, mix = x[order], ids[order], mix[order]
    # More pairs of these experts than a block has rows.
    x[kept:], ids[kept:] = 0, ids[0].clone()
    after = moe_experts(x, ids, mix, *experts, shared=shared)
    assert torch.equal(after[:kept], before[order[:kept]])


@pytest.mark.parametrize("tokens", [32, 64, 65, 200, 256])
def test_int4_in_cuda_and_in_triton(tokens: int) -> None:
    """The same result within rounding, in CUDA C++ the same bits each time."""
    from mingc.kernels.triton.moe_prefill import moe_prefill  # needs Triton

    assert has_int4_kernel(tokens, HIDDEN, 512)
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    experts, choice = make("int4", 512, EXPERTS), random_routing(tokens)
    in_triton = moe_prefill(x, *choice, *experts, None, None)
    values = [moe_experts(x, *choice, *experts) for _ in range(3)]
    check(values[0], in_triton)
    assert not torch.equal(values[0], in_triton)  # other kernels ran
    assert all(torch.equal(each, values[0]) for each in values)


def test_splitting_rows_rounds_nothing() -> None:
    """Down to 1/512 of a row's largest value; below, by up to 2^-16 of it."""
    from mingc.kernels.triton.quantize_rows import split_rows  # needs Triton

    x = (torch.randn(300, 640, device="cuda") * torch.logspace(-9, 9, 300, device="cuda")[:, None]).bfloat16()
    x[5] = 0
    parts, scale = split_rows(x)
    value = parts.float().double().sum(1) * scale[:, None]
    largest = x.double().abs().amax(1, keepdim=True)
    is_small = x.double().abs() < largest / 512
    assert torch.equal(value[~is_small], x.double()[~is_small])
    assert ((value - x.double()).abs() <= largest * 2**-16).all()


@pytest.mark.parametrize("weight_format", ["bf16", "fp8"])
def test_rows_beyond_a_block_get_the_same_bits(weight_format: str) -> None:
    """137 rows an expert: those beyond 128 share a block with the others, or have their own."""
    x = torch.randn(1100, HIDDEN, device="cuda").to(torch.bfloat16)
    experts, choice = make(weight_format, 256, EXPERTS), random_routing(1100)
    together = moe_experts(x, *choice, *experts)
    problem = moe_config.MoeProblem(
        kernel="grouped", tokens=1100, hidden_size=HIDDEN, intermediate_size=256, experts=EXPERTS, top_k=CHOSEN,
        weight_format=moe_config.BF16 if weight_format == "bf16" else moe_config.FP8,
    )  # fmt: skip
    assert moe_config.default_config(problem).extra_rows > 0
    with moe_config.use_tuned_configs({problem: replace(moe_config.default_config(problem), extra_rows=0)}):
        assert torch.equal(moe_experts(x, *choice, *experts), together)


def test_a_shared_expert_of_another_size_and_format() -> None:
    x = torch.randn(5, HIDDEN, device="cuda").to(torch.bfloat16)
    experts, shared = make("int4", 128, EXPERTS), make("bf16", 256)
    choice = random_routing(5)
    with plain_torch():
        expected = moe_experts(x, *choice, *experts, shared=shared)
    check(moe_experts(x, *choice, *experts, shared=shared), expected)


@pytest.mark.parametrize(("tokens", "has_gates"), [(1, False), (9, False), (64, True), (300, True)])
def test_router(tokens: int, has_gates: bool) -> None:
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    weight = (torch.randn(3, 256, HIDDEN, device="cuda") * HIDDEN**-0.5).to(torch.bfloat16)
    bias = torch.randn(3, 256, device="cuda") / 100
    gates = torch.randint(0, 3, (tokens,), device="cuda") if has_gates else None
    options = {"num_groups": 8, "num_kept_groups": 4, "top_k": 8, "scale": 2.5}
    with plain_torch():
        expected_ids, expected_mix = route_hidden(x, weight, bias, gates, **options)
    ids, mix = route_hidden(x, weight, bias, gates, **options)
    # Summing in another order may swap experts with nearly equal scores.
    is_same = (ids == expected_ids).all(1)
    assert is_same.float().mean() > 0.97
    torch.testing.assert_close(mix[is_same], expected_mix[is_same], rtol=1e-4, atol=1e-5)


def test_ties_go_to_the_first_experts() -> None:
    x = torch.zeros(3, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(1, 64, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids, mix = route_hidden(
        x, weight, torch.zeros(1, 64, device="cuda"), None,
        num_groups=8, num_kept_groups=2, top_k=3, scale=2.5,
    )  # fmt: skip
    assert ids.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(mix, torch.full_like(mix, 2.5 / 3))


@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 128), (6, 128), (40, 512), (80, 128), (80, 512)])
def test_compiled(weight_format: str, tokens: int, size: int) -> None:
    """The code that the compiler generates contains the kernels' helpers and constants."""
    torch._dynamo.reset()  # all cases compile the same code, and together they would exceed the recompile limit
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    experts, shared = make(weight_format, size, EXPERTS), make(weight_format, size)
    weight = (torch.randn(1, EXPERTS, HIDDEN, device="cuda") * HIDDEN**-0.5).to(torch.bfloat16)
    bias = torch.zeros(1, EXPERTS, device="cuda")

    def layer(x: Tensor) -> Tensor:
        choice = route_hidden(x, weight, bias, None, num_groups=4, num_kept_groups=2, top_k=CHOSEN, scale=2.5)
        return moe_experts(x, *choice, *experts, shared=shared)

    is_rounded = weight_format == "fp8" and tokens > DECODE_TOKENS
    tolerance = ROUNDED_TOLERANCE if is_rounded else TOLERANCE
    check(torch.compile(layer, fullgraph=True)(x), layer(x), tolerance)
