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


def test_bfloat16_is_rounded_before_the_weight_is_applied() -> None:
    """The reference casts the normalized value to bfloat16, then multiplies (spec: thinker.md §2)."""
    x = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    weight = torch.full((2,), 149 / 128, dtype=torch.bfloat16)
    # 1/√2.5 = 0.632456 becomes 162/256. Times 149/128 that is 188.58/256: 189/256. Rounded once, it would be 188/256.
    assert rms_norm(x, weight, 0.0).tolist() == [[189 / 256, 189 / 128]]


def test_bfloat16_values_are_rounded_once_before_the_weight() -> None:
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(rms_norm(x, torch.ones(48, dtype=torch.bfloat16), 1e-6), exact.bfloat16())
