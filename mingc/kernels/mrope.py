"""Rotary embedding driven by three position rows (time, height, width)."""

from __future__ import annotations

import torch
from torch import Tensor


def mrope_cos_sin(positions: Tensor, inv_freq: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every token's rotation angles.

    Args:
        positions: (3, T) int64; rows time, height, width; may be negative (spec: thinker.md §4), so
            angles are computed instead of looked up.
        inv_freq: (R,) float32, R = half the rotated width.
        rows: (R,) int64, which row of `positions` drives each frequency.

    Returns: two (T, R) float32.
    """
    # Transposed first, so that the result is contiguous, as engines expect.
    angles = positions.t().index_select(1, rows).to(torch.float32) * inv_freq
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2R values of every head, value f with value f + R; the rest is unchanged.

    Args:
        x: (T, H, d) any float dtype.
        cos, sin: (T, R) float32, 2R <= d.

    Returns: like `x`; computed in float32 (spec: thinker.md §3).
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first = x[..., :half].to(torch.float32)
    second = x[..., half : 2 * half].to(torch.float32)
    rotated_first = (first * cos - second * sin).to(x.dtype)
    rotated_second = (second * cos + first * sin).to(x.dtype)
    return torch.cat((rotated_first, rotated_second, x[..., 2 * half :]), dim=-1)
