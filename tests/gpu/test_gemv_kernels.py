"""GEMV kernels of one token, with norm and as whole halves of a layer, against plain torch on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mingc.export.layers.moe import MoeFeedForward, Router
from mingc.kernels.dispatch import plain_torch
from mingc.kernels.gemv import gemv, sum_norm_linear
from mingc.kernels.quantized import quantize_fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 1e-2  # rounding error of bfloat16, relative to the largest value
MANY_COLUMNS = 132 * 8 * 64  # more than one wave of programs computes on an H200


def make(weight_format: str, *shape: int) -> tuple[Tensor, Tensor | None]:
    weight = torch.randn(*shape, device="cuda") * shape[-1] ** -0.5
    return quantize_fp8(weight) if weight_format == "fp8" else (weight.to(torch.bfloat16), None)


def row(width: int) -> Tensor:
    return torch.randn(1, width, device="cuda").to(torch.bfloat16)


def check(value: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    error = (value.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < tolerance


@pytest.mark.parametrize("weight_format", ["bf16", "fp8"])
@pytest.mark.parametrize(("n", "k"), [(4096, 512), (5120, 4096), (4096, 9216), (MANY_COLUMNS + 16, 1024)])
def test_one_row(n: int, k: int, weight_format: str) -> None:
    x, (weight, scale) = row(k), make(weight_format, n, k)
    with plain_torch():
        expected = gemv(x, weight, scale)
    check(gemv(x, weight, scale), expected)


@pytest.mark.parametrize("weight_format", ["bf16", "fp8"])
@pytest.mark.parametrize(("n", "k"), [(1280, 4096), (256, 1024), (MANY_COLUMNS + 16, 2048)])
def test_one_row_after_sum_and_norm(n: int, k: int, weight_format: str) -> None:
    residual, delta, (weight, scale) = row(k), row(k), make(weight_format, n, k)
    norm = (1 + torch.randn(k, device="cuda") / 10).to(torch.bfloat16)
    with plain_torch():
        expected_stream, expected = sum_norm_linear(residual, delta, norm, weight, 1e-6, scale)
    stream, value = sum_norm_linear(residual, delta, norm, weight, 1e-6, scale)
    assert torch.equal(stream, expected_stream)
    check(value, expected)


@pytest.mark.parametrize("weight_format", ["bf16", "fp8"])
@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize(("experts", "groups", "kept", "chosen"), [(256, 8, 4, 8), (32, 1, 1, 3)])
def test_one_token_of_a_layer_with_experts(
    weight_format: str, has_shared: bool, experts: int, groups: int, kept: int, chosen: int
) -> None:
    hidden, width = 1024, 256
    router = Router(hidden, experts, num_groups=groups, num_kept_groups=kept, top_k=chosen, scale=2.5)
    half = MoeFeedForward(router, hidden, experts, width, width if has_shared else 0, 1e-6)
    half = half.to("cuda", torch.bfloat16)
    router.weight.data.normal_(0, hidden**-0.5)
    router.bias.data = torch.randn(3, experts, device="cuda") / 10
    half.norm.data.normal_(1, 0.1)
    owners: list[tuple[nn.Module, tuple[int, ...]]] = [(half, (experts,))]
    if half.shared is not None:
        owners.append((half.shared, ()))
    for owner, leading in owners:
        for name, shape in (("gate_up", (2 * width, hidden)), ("down", (hidden, width))):
            weight, scale = make(weight_format, *leading, *shape)
            setattr(owner, name, nn.Parameter(weight, requires_grad=False))
            if scale is not None:
                setattr(owner, f"{name}_scale", nn.Parameter(scale, requires_grad=False))
    for _ in range(8):
        residual, delta = row(hidden), row(hidden)
        with torch.no_grad(), plain_torch():
            expected = half.decode_routed(residual, delta)
        with torch.no_grad():
            stream, partial, ids, weights = half.decode_routed(residual, delta)
        assert torch.equal(stream, expected[0])
        # Summing in another order may swap experts with nearly equal scores: outputs cannot be compared then.
        if not torch.equal(ids, expected[2]):
            continue
        torch.testing.assert_close(weights, expected[3], rtol=1e-3, atol=1e-4)
        check(partial, expected[1], 2 * TOLERANCE)  # two GEMVs in sequence, on rounded rows
        break
    else:
        raise AssertionError("different experts for every token")
