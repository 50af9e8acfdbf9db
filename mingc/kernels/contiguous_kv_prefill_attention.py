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

    # A block of queries reads one slot, that of its first token: padding reads the slot of the request before it, as in
    # the kernel, so that both compute the same. Rows after the last token repeat it: a block of them always follows,
    # because torch.export would take a single block for the only number there is.
    num_blocks = (tokens + SLOT_CHUNK_ALIGNMENT - 1) // SLOT_CHUNK_ALIGNMENT + 1
    taken = torch.arange(num_blocks * SLOT_CHUNK_ALIGNMENT, device=qkv.device).clamp(max=tokens - 1)
    taken = taken.view(num_blocks, SLOT_CHUNK_ALIGNMENT)
    seen_slots, last = owner[taken[:, 0]], index[taken].unsqueeze(-1)
    row = torch.arange(num_rows, device=qkv.device)
    visible = row <= last
    if window is not None:
        visible = visible & (row > last - window)
    # Queries that share a KV head go on the sequence axis, so that keys need not be repeated.
    groups = heads // kv_heads
    queries = rotated[:, :heads].view(tokens, kv_heads, groups, size)[taken]
    context = F.scaled_dot_product_attention(
        queries.permute(0, 2, 3, 1, 4).reshape(-1, kv_heads, groups * SLOT_CHUNK_ALIGNMENT, size),
        k_slots[seen_slots].transpose(1, 2),
        v_slots[seen_slots].transpose(1, 2),
        attn_mask=visible.repeat(1, groups, 1).unsqueeze(1),
    )
    context = context.view(-1, kv_heads, groups, SLOT_CHUNK_ALIGNMENT, size).permute(0, 3, 1, 2, 4)
    # Not a slice: torch.export cannot prove that it is within the rows.
    return context.reshape(-1, heads * size).index_select(0, torch.arange(tokens, device=qkv.device))
