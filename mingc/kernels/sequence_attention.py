"""Attention over a whole sequence without a cache: causal, with an optional sliding window, or to all. Torch only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def sequence_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, window: int | None, *, is_causal: bool = True
) -> Tensor:
    """Attend with T tokens, each to itself and the `window - 1` tokens before it (None: all).

    Without `is_causal` each attends to all tokens, those after it included; there is no window then.

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

    mask = None
    if is_causal:
        index = torch.arange(tokens, device=qkv.device)
        visible = index <= index.unsqueeze(1)
        if window is not None:
            visible = visible & (index > index.unsqueeze(1) - window)
        mask = visible[None, None]
    groups = heads // kv_heads
    shape = (kv_heads, groups, tokens, size)
    context = F.scaled_dot_product_attention(
        rotated[:, :heads].view(tokens, kv_heads, groups, size).permute(1, 2, 0, 3),
        rotated[:, heads:].transpose(0, 1).unsqueeze(1).expand(shape),
        packed[:, heads + kv_heads :].transpose(0, 1).unsqueeze(1).expand(shape),
        attn_mask=mask,
    )
    return context.permute(2, 0, 1, 3).reshape(tokens, heads * size)
