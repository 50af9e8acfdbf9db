"""Kernels of the sampler's blocks against the same operations in float64, in half precision on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mingc.kernels.dispatch import use_triton
from mingc.kernels.modulated_norm import add_gated, add_gated_norm, modulated_norm
from mingc.kernels.norm_rotate_packed import norm_rotate_packed
from mingc.kernels.silu_product import silu_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 1e-2  # rounding error of bfloat16, relative to the largest value
EPS = 1e-5


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def check(value: Tensor, expected: Tensor) -> None:
    assert value.isfinite().all()
    assert (value.double() - expected).abs().max() < TOLERANCE * expected.abs().max()


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@pytest.mark.parametrize(("sequences", "tokens", "width"), [(1, 1, 64), (2, 37, 3840), (3, 130, 200)])
def test_gated_sums_and_modulated_norms(sequences: int, tokens: int, width: int) -> None:
    x, update = randn(sequences, tokens, width), 3 * randn(sequences, tokens, width)
    assert use_triton(x)
    first, second = randn(width), randn(width)
    # Parts of a wider row, as of a projection of the time.
    _, gate, scale = randn(sequences, 3 * width).chunk(3, dim=-1)
    total = x.double() + gate.double().tanh().unsqueeze(1) * normed(update.double(), first)
    check(add_gated(x, update, first, gate, EPS), total)
    found, inner = add_gated_norm(x, update, first, gate, second, scale, EPS)
    check(found, total)
    factor = 1 + scale.double().unsqueeze(1)
    check(inner, normed(total, second) * factor)
    check(modulated_norm(x, second, scale, EPS), normed(x.double(), second) * factor)


@pytest.mark.parametrize(("heads", "size"), [(30, 128), (3, 64), (1, 32)])
def test_heads_are_normalized_and_turned_in_pairs(heads: int, size: int) -> None:
    qkv = randn(2, 77, 3, heads, size)
    norms = randn(size), randn(size)
    angles = torch.rand(77, size // 2, device="cuda") * 6
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128).unsqueeze(1)
    found = norm_rotate_packed(qkv, *norms, angles.cos(), angles.sin(), EPS)
    for index, value in enumerate(found):
        pairs = torch.view_as_complex(normed(qkv[:, :, index].double(), norms[index]).unflatten(-1, (-1, 2)))
        check(value, torch.view_as_real(pairs * turn).flatten(-2))


@pytest.mark.parametrize("inner", [10_240, 3_000, 16])
def test_swiglu(inner: int) -> None:
    gate_up = 3 * randn(2, 5, 2 * inner)
    gate, up = gate_up.double().chunk(2, dim=-1)
    check(silu_product(gate_up), torch.nn.functional.silu(gate) * up)
