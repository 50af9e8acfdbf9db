"""Causal attention over a whole sequence without a cache, with an optional sliding window. Torch only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def sequence_attention(qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, window: int | None) -> Tensor:
    """Attend with T tokens, each to itself and the `window - 1` tokens before it (None: all).

    Args:
        qkv: (T, (Hq + 2 Hk) d), queries | keys | values, with biases, before rotary embedding.
        cos, sin: (T, d/2) float32; value f of a head pairs with value f + d/2.

    Returns: (T, Hq d) in the dtype of `qkv`.
    """
    tokens, size = qkv.shape[0], 2 * cos.shape[-1]
    heads = qkv.shape[1] // size - 2 * kv_heads
    packed = qkv.view(tokens, heads + 2 * kv_heads, size)
    first, second = packed[:, : heads + kv_heads].float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)

    index = torch.arange(tokens, device=qkv.device)
    visible = index <= index.unsqueeze(1)
    if window is not None:
        visible = visible & (index > index.unsqueeze(1) - window)
    groups = heads // kv_heads
    shape = (kv_heads, groups, tokens, size)
    context = F.scaled_dot_product_attention(
        rotated[:, :heads].view(tokens, kv_heads, groups, size).permute(1, 2, 0, 3),
        rotated[:, heads:].transpose(0, 1).unsqueeze(1).expand(shape),
        packed[:, heads + kv_heads :].transpose(0, 1).unsqueeze(1).expand(shape),
        attn_mask=visible[None, None],
    )
    return context.permute(2, 0, 1, 3).reshape(tokens, heads * size)
