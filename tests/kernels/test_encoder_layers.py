"""Plain path of the encoders' operations against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from mingc.kernels.layer_norm import add_layer_norm
from mingc.kernels.linear import linear_gelu
from mingc.kernels.rotate_packed import rotate_packed


def test_rotation_turns_pairs_of_queries_and_keys_as_complex_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 3, 2, 12, generator=generator)
    angles = 6 * torch.rand(5, 6, generator=generator)
    low, high = qkv.double().chunk(2, dim=-1)
    turned = torch.complex(low, high) * torch.exp(1j * angles.double())[:, None, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1).float()
    q, k = rotate_packed(qkv, angles.cos(), angles.sin())
    torch.testing.assert_close(q, expected[:, 0])
    torch.testing.assert_close(k, expected[:, 1])


def test_norm_of_a_residual_sum() -> None:
    x, update, weight, bias = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
    weight, bias = weight[0], bias[0]
    total, normed = add_layer_norm(x, update, weight, bias, 1e-2)
    torch.testing.assert_close(total, x + update)
    for row, got in zip((x + update).tolist(), normed, strict=True):
        mean = sum(row) / 8
        variance = sum((value - mean) ** 2 for value in row) / 8
        scaled = [(value - mean) / math.sqrt(variance + 1e-2) for value in row]
        torch.testing.assert_close(got, torch.tensor(scaled) * weight + bias)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelu_of_a_linear_layer(approximate: str) -> None:
    x, weight, bias = (
        torch.tensor([[1.0, -2.0]]),
        torch.tensor([[0.5, 1.0], [2.0, 0.25]]),
        torch.tensor([0.3, 0.1]),
    )
    sums = [0.5 - 2.0 + 0.3, 2.0 - 0.5 + 0.1]
    inner = [math.sqrt(2 / math.pi) * (each + 0.044715 * each**3) for each in sums]
    tanh = [0.5 * each * (1 + math.tanh(within)) for each, within in zip(sums, inner, strict=True)]
    exact = [0.5 * each * (1 + math.erf(each / math.sqrt(2))) for each in sums]
    expected = torch.tensor([tanh if approximate == "tanh" else exact])
    torch.testing.assert_close(linear_gelu(x, weight, bias, approximate), expected, rtol=0, atol=1e-6)
