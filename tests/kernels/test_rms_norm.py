"""RMS norm: formula, and float32 statistics for every dtype."""

import torch

from mingc.kernels.rms_norm import rms_norm


def test_formula_in_float64() -> None:
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(0.5, 2, 64)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected.float(), rtol=1e-6, atol=1e-6)


def test_bfloat16_statistics_are_float32() -> None:
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    got = rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 1e-6)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.ones_like(got))


def test_zeros_stay_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))
