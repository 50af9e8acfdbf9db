"""Prefill attention of the speech LLM: a chunk of the prompts of several requests, keys and values in fixed slots."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.chunk_layout import SLOT_CHUNK_ALIGNMENT
from mingc.kernels.dispatch import use_triton


def contiguous_kv_prefill_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    slots: Tensor,
    segment: Tensor,
    index: Tensor,
    window: int | None,
) -> Tensor:
    """Write T chunk tokens to their slots and attend causally to these.

    Args:
        qkv: (T, (Hq + 2 Hk) d), queries | keys | values, with biases, before rotary embedding.
        cos, sin: (T, d/2) float32 of each token's position.
        k_slots, v_slots: (S, N, Hk, d), mutated.
        slots: (R,) int64, of each request.
        segment: (T,) int64, the request of each token; the first token of each is at a multiple of
            `chunk_layout.SLOT_CHUNK_ALIGNMENT`. -1: padding, which follows the tokens of a request and is written to
            slot 0, which is never read.
        index: (T,) int64, row of the slot, which is the token's position; of padding any row.
        window: number of newest tokens visible to a query, itself included; None: all.

    Returns: (T, Hq d) in the dtype of `qkv`; padding rows are finite but meaningless.
    """
    if use_triton(qkv, 2 * cos.shape[-1]):
        from mingc.kernels.triton import contiguous_kv_prefill_attention as gpu

        seen = k_slots.shape[1] if window is None else window
        out: Tensor = gpu.contiguous_kv_prefill_attention(
            qkv.contiguous(), cos, sin, k_slots, v_slots, slots, segment, index, seen
        )
        return out
    tokens = qkv.shape[0]
    num_rows, kv_heads, size = k_slots.shape[1:]
    heads = qkv.shape[1] // size - 2 * kv_heads
    packed = qkv.view(tokens, heads + 2 * kv_heads, size)
    first, second = packed[:, : heads + kv_heads].float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)

    owner = torch.where(segment < 0, 0, slots[segment.clamp(min=0)])
    k_slots.index_put_((owner, index), rotated[:, heads:])
    v_slots.index_put_((owner, index), packed[:, heads + kv_heads :])

    # Padding reads the slot of the request before it, as in the kernel, so that both compute the same.
    block = torch.arange(tokens, device=qkv.device) // SLOT_CHUNK_ALIGNMENT * SLOT_CHUNK_ALIGNMENT
    seen_slots = owner[block]
    row = torch.arange(num_rows, device=qkv.device)
    visible = row <= index.unsqueeze(1)
    if window is not None:
        visible = visible & (row > index.unsqueeze(1) - window)
    # Queries that share a KV head go on the sequence axis, so that keys need not be repeated.
    context = F.scaled_dot_product_attention(
        rotated[:, :heads].reshape(tokens, kv_heads, heads // kv_heads, size),
        k_slots[seen_slots].transpose(1, 2),
        v_slots[seen_slots].transpose(1, 2),
        attn_mask=visible[:, None, None, :],
    )
    return context.reshape(tokens, heads * size)
