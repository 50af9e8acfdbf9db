"""Decode attention of the speech LLM: one new token a request, keys and values in fixed slots.

Rotates, stores and attends in one operation so that a single kernel can replace it.
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
    """Attention of B new tokens, each over the tokens of its slot and itself.

    Args:
        qkv: (B, (Hq + 2 Hk) d), queries | keys | values, biases added, not rotated.
        cos, sin: (B, d/2) float32 of each token's position; the two halves of a head are rotated together.
        k_slots, v_slots: (S, N, Hk, d), mutated: row `lengths[b]` of slot `slots[b]` is written.
        slots, lengths: (B,) int64; `lengths` counts the tokens in the slot before, which is the row written.
        window: number of newest tokens seen, the new one included; None sees all.

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
    # The queries that share a key head stand on the sequence axis: grouped heads without repeating keys.
    context = F.scaled_dot_product_attention(
        rotated[:, :heads].reshape(batch, kv_heads, heads // kv_heads, size),
        k_slots[slots].transpose(1, 2),
        v_slots[slots].transpose(1, 2),
        attn_mask=visible[:, None, None, :],
    )
    return context.reshape(batch, heads * size)
