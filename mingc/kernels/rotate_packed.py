"""Rotary embedding of the queries and keys of a packed projection."""

from __future__ import annotations

import torch
from torch import Tensor

from mingc.kernels.dispatch import use_triton


def rotate_packed(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate dim k with dim k + d/2 of each head, in float32.

    Args:
        qkv: (T, 3, H, d) queries, keys and values; contiguous on a GPU.
        cos, sin: (T, d/2) float32.

    Returns: queries and keys, (T, H, d) each in the dtype of `qkv`.
    """
    if use_triton(qkv):
        from mingc.kernels.triton import rotate_packed as gpu

        q, k = gpu.rotate_packed(qkv.contiguous(), cos.contiguous(), sin.contiguous()).unbind(1)
        return q, k
    low, high = qkv[:, :2].float().chunk(2, dim=-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(qkv.dtype)
    q, k = rotated.unbind(1)
    return q, k
