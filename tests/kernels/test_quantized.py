"""Quantized weight formats: bit layout and rounding error."""

import pytest
import torch
from torch import Tensor

from mingc.kernels.quantized import dequantize, quantize_fp8, quantize_int4


def experts(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def relative(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


def test_fp8_layout() -> None:
    stored, scale = quantize_fp8(experts(3, 5, 40).to(torch.bfloat16))
    assert (stored.dtype, tuple(stored.shape)) == (torch.float8_e4m3fn, (3, 5, 40))
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (3, 5))
    assert torch.equal(stored.float().abs().amax(-1), torch.full((3, 5), 448.0))


def test_fp8_error_is_its_rounding() -> None:
    weight = experts(3, 64, 256)
    stored, scale = quantize_fp8(weight)
    lost = (dequantize(stored, scale, torch.float32) - weight).abs()
    # Three bits of mantissa: half of an eighth; below the smallest normal value half a step of 2^-9.
    assert (lost <= (weight.abs() / 16).maximum(scale.unsqueeze(-1) * 2**-10) * 1.0001).all()


def test_int4_layout() -> None:
    # One group is -7 * 0.5, …, 7 * 0.5: the scale is exactly 0.5, nothing is lost.
    values = torch.arange(-7, 8).repeat(10)[:130].float()
    stored, scale = quantize_int4((values * 0.5).expand(2, 3, -1))
    assert (stored.dtype, tuple(stored.shape)) == (torch.uint8, (2, 3, 65))
    assert (scale.dtype, tuple(scale.shape)) == (torch.bfloat16, (2, 3, 2))
    assert float(scale[0, 0, 0]) == 0.5
    assert stored[1, 2, :4].tolist() == [0xA9, 0xCB, 0xED, 0x0F]  # -7 -6, -5 -4, -3 -2, -1 0
    first = dequantize(stored, scale, torch.float32)[1, 2, :128]
    assert torch.equal(first, values[:128] * 0.5)


def test_int4_groups_have_separate_scales() -> None:
    weight = torch.cat((experts(4, 128), 1000 * experts(4, 128), experts(4, 64)), dim=-1)
    stored, scale = quantize_int4(weight)
    lost = dequantize(stored, scale, torch.float32)
    assert scale.shape == (4, 3)
    for part in (slice(0, 128), slice(128, 256), slice(256, 320)):
        assert relative(lost[:, part], weight[:, part]) < 0.12


def test_int4_clips_an_outlier_when_that_reduces_the_error() -> None:
    weight = experts(64, 256)
    stored, scale = quantize_int4(weight)
    plain = weight.view(64, 2, 128)
    step = plain.abs().amax(-1, keepdim=True) / 7
    plain_error = relative(((plain / step).round() * step).flatten(-2), weight)
    assert relative(dequantize(stored, scale, torch.float32), weight) < plain_error


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_int4])
def test_rows_of_zeros_stay_zeros(quantize: object) -> None:
    assert callable(quantize)
    stored, scale = quantize(torch.zeros(2, 4, 128))
    assert torch.equal(dequantize(stored, scale, torch.bfloat16), torch.zeros(2, 4, 128).bfloat16())


def test_int4_refuses_an_odd_width() -> None:
    with pytest.raises(ValueError, match="even number of inputs, not 33"):
        quantize_int4(torch.ones(4, 33))
