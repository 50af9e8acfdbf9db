"""Prefill attention of the speech LLM: a chunk of one request's prompt, keys and values in a fixed slot."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.dispatch import use_triton


def contiguous_kv_prefill_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    slot: Tensor,
    start: Tensor,
    last: Tensor,
    window: int | None,
) -> Tensor:
    """Write T chunk tokens to the slot at rows `start`, `start + 1`, … and attend causally to it.

    Args:
        qkv: (T, (Hq + 2 Hk) d), queries | keys | values, with biases, before rotary embedding.
        cos, sin: (T, d/2) float32 of each token's position.
        k_slots, v_slots: (S, N, Hk, d), mutated.
        slot, start, last: (1,) int64. Tokens after chunk index `last` are padding: they are written to slot 0,
            which is never read, so that a padded chunk cannot run past the end of its slot.
        window: number of newest tokens visible to a query, itself included; None: all.

    Returns: (T, Hq d) in the dtype of `qkv`; padding rows are finite but meaningless.
    """
    if use_triton(qkv, 2 * cos.shape[-1]):
        from mingc.kernels.triton import contiguous_kv_prefill_attention as gpu

        seen = k_slots.shape[1] if window is None else window
        out: Tensor = gpu.contiguous_kv_prefill_attention(
            qkv.contiguous(), cos, sin, k_slots, v_slots, slot, start, last, seen
        )
        return out
    tokens = qkv.shape[0]
    num_rows, kv_heads, size = k_slots.shape[1:]
    heads = qkv.shape[1] // size - 2 * kv_heads
    packed = qkv.view(tokens, heads + 2 * kv_heads, size)
    first, second = packed[:, : heads + kv_heads].float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)

    index = torch.arange(tokens, device=qkv.device)
    is_real = index <= last
    target = (torch.where(is_real, slot, 0), torch.where(is_real, start + index, index % num_rows))
    k_slots.index_put_(target, rotated[:, heads:])
    v_slots.index_put_(target, packed[:, heads + kv_heads :])

    row = torch.arange(num_rows, device=qkv.device)
    # Padding may lie beyond the slot's last row; the clamp keeps at least one row visible to it.
    position = (start + index).clamp(max=num_rows - 1).unsqueeze(1)
    visible = row <= position
    if window is not None:
        visible = visible & (row > position - window)
    groups = heads // kv_heads
    keys = k_slots[slot].permute(2, 0, 1, 3).expand(kv_heads, groups, num_rows, size)
    values = v_slots[slot].permute(2, 0, 1, 3).expand(kv_heads, groups, num_rows, size)
    context = F.scaled_dot_product_attention(
        rotated[:, :heads].view(tokens, kv_heads, groups, size).permute(1, 2, 0, 3),
        keys,
        values,
        attn_mask=visible[None, None],
    )
    return context.permute(2, 0, 1, 3).reshape(tokens, heads * size)
