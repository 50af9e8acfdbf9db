"""Decode attention of the speech LLM: one new token per request, keys and values in fixed slots.

Rotary embedding, cache write and attention are one operation, so that one kernel can run all three.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.dispatch import use_triton


def contiguous_kv_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    slots: Tensor,
    lengths: Tensor,
    window: int | None,
) -> Tensor:
    """Attend with B new tokens, each to the tokens of its slot and to itself.

    Args:
        qkv: (B, (Hq + 2 Hk) d), queries | keys | values, with biases, before rotary embedding.
        cos, sin: (B, d/2) float32 of each token's position; value f of a head pairs with value f + d/2.
        k_slots, v_slots: (S, N, Hk, d), mutated: row `lengths[b]` of slot `slots[b]` is written.
        slots, lengths: (B,) int64; `lengths` counts the tokens already in the slot, which is the row written.
        window: number of newest tokens that are visible, the new one included; None: all.

    Returns: (B, Hq d) in the dtype of `qkv`.
    """
    if use_triton(qkv, 2 * cos.shape[-1]):
        from mingc.kernels.triton import contiguous_kv_attention as gpu

        seen = k_slots.shape[1] if window is None else window
        out: Tensor = gpu.contiguous_kv_attention(
            qkv.contiguous(), cos, sin, k_slots, v_slots, slots, lengths, seen
        )
        return out
    batch = qkv.shape[0]
    num_rows, kv_heads, size = k_slots.shape[1:]
    heads = qkv.shape[1] // size - 2 * kv_heads
    packed = qkv.view(batch, heads + 2 * kv_heads, size)
    first, second = packed[:, : heads + kv_heads].float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    k_slots.index_put_((slots, lengths), rotated[:, heads:])
    v_slots.index_put_((slots, lengths), packed[:, heads + kv_heads :])

    row = torch.arange(num_rows, device=qkv.device)
    visible = row <= lengths.unsqueeze(1)
    if window is not None:
        visible = visible & (row > lengths.unsqueeze(1) - window)
    # Queries that share a KV head go on the sequence axis, so that keys need not be repeated.
    context = F.scaled_dot_product_attention(
        rotated[:, :heads].reshape(batch, kv_heads, heads // kv_heads, size),
        k_slots[slots].transpose(1, 2),
        v_slots[slots].transpose(1, 2),
        attn_mask=visible[:, None, None, :],
    )
    return context.reshape(batch, heads * size)
