"""Quantized weight formats FP8 and INT4: quantization and dequantization.

FP8: float8_e4m3fn of the weight's shape, and a float32 scale for each row: weight[r, k] = stored[r, k] * scale[r].

INT4: signed values -8..7, two per byte along the input axis, the first in the low four bits, as uint8 (R, K/2); groups
of 128 inputs of a row share a bfloat16 scale (the last group of a row may be shorter):
weight[r, k] = stored[r, k] * scale[r, k // 128]. K must be even.

Shape letters: R rows (outputs), K inputs; any leading axes (experts).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT4 = torch.uint8  # two values a byte
INT4_GROUP = 128
_INT4_MAX = 7
# Candidate scales of a group, relative to the scale that represents its largest value: clipping an outlier a little
# makes the steps of all other values finer. The one with the smallest squared error is used.
_INT4_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize (…, R, K) of any float dtype to float8_e4m3fn (…, R, K) and scale (…, R) float32."""
    values = weight.to(torch.float32)
    largest = values.abs().amax(-1)
    # By a tensor: CUDA divides by a Python number through its reciprocal, which rounds differently from a CPU.
    scale = torch.where(largest > 0, largest / torch.full_like(largest, FP8_MAX), 1.0)
    return (values / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize (…, R, K) of any float dtype to uint8 (…, R, K/2) and scale (…, R, ceil(K/128)) bfloat16.

    Raises: ValueError for an odd K.
    """
    inputs = weight.shape[-1]
    if inputs % 2:
        raise ValueError(f"INT4 needs an even number of inputs, not {inputs}")
    groups = _grouped(weight.to(torch.float32))
    largest = groups.abs().amax(-1, keepdim=True)
    full = torch.where(largest > 0, largest / torch.full_like(largest, _INT4_MAX), 1.0)
    best, scale, values = torch.full_like(full, torch.inf), full, groups
    for shrink in _INT4_SHRINKS:
        tried = (full * shrink).to(torch.bfloat16).to(torch.float32)
        rounded = (groups / tried).round().clamp(-_INT4_MAX - 1, _INT4_MAX)
        error = (rounded * tried - groups).square().sum(-1, keepdim=True)
        is_better = error < best
        best = torch.where(is_better, error, best)
        scale = torch.where(is_better, tried, scale)
        values = torch.where(is_better, rounded, values)
    flat = values.flatten(-2)[..., :inputs].to(torch.int32) & 15
    packed = (flat[..., 0::2] | flat[..., 1::2] << 4).to(INT4)
    return packed, scale.squeeze(-1).to(torch.bfloat16)


def dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight (…, R, K) in `dtype`, from either format; multiplied by the scale in float32."""
    if weight.dtype == FP8:
        return (weight.to(torch.float32) * scale.unsqueeze(-1)).to(dtype)
    values = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2).to(torch.int32)
    signed = torch.where(values > _INT4_MAX, values - 16, values).to(torch.float32)
    scales = scale.to(torch.float32).repeat_interleave(INT4_GROUP, dim=-1)[..., : signed.shape[-1]]
    return (signed * scales).to(dtype)


def _grouped(weight: Tensor) -> Tensor:
    """(…, R, K) → (…, R, groups, 128), the last group padded with zeros."""
    padded = F.pad(weight, (0, -weight.shape[-1] % INT4_GROUP))
    return padded.view(*weight.shape[:-1], -1, INT4_GROUP)
