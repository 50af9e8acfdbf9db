"""Bidirectional attention over a few dozen tokens, for the DiT and the aggregator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.dispatch import use_triton

_MAX_TOKENS = 128  # the kernel keeps the scores of a whole sequence in registers


def small_sequence_attention(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Attend within N sequences of T tokens, with interleaved rotary embedding.

    Args:
        qkv: (N, T, 3 H d), queries | keys | values, with biases, before rotary embedding.
        cos, sin: (T, d/2) float32; value 2f of a head pairs with value 2f + 1.

    Returns: (N, T, H d) in the dtype of `qkv`.
    """
    if use_triton(qkv, 2 * cos.shape[-1]) and qkv.shape[1] <= _MAX_TOKENS:
        from mingc.kernels.triton import small_sequence_attention as gpu

        out: Tensor = gpu.small_sequence_attention(qkv.contiguous(), cos, sin)
        return out
    batch, tokens, row_size = qkv.shape
    size = 2 * cos.shape[-1]
    heads = row_size // 3 // size
    packed = qkv.view(batch, tokens, 3, heads, size)
    pairs = packed[:, :, :2].float().view(batch, tokens, 2, heads, size // 2, 2)
    even, odd = pairs.unbind(-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(qkv.dtype)
    context = F.scaled_dot_product_attention(
        rotated[:, :, 0].transpose(1, 2), rotated[:, :, 1].transpose(1, 2), packed[:, :, 2].transpose(1, 2)
    )
    return context.transpose(1, 2).reshape(batch, tokens, heads * size)
