"""Sliding-window attention of a streaming decoder: a few new frames per request, keys and values in a ring buffer.

The ring buffer needs no reset: the frame number of a row follows from the newest frame number, so rows left by an
earlier request of the slot get negative numbers and are never visible.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.dispatch import use_triton

# The kernel keeps a ring and all new frames in registers; without a window a ring has thousands of rows.
_MAX_RING_ROWS, _MAX_FRAMES = 256, 64


def sliding_window_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    slots: Tensor,
    first_frame: Tensor,
    window: int | None,
) -> Tensor:
    """Write n new frames of B requests to their ring buffers and attend causally to them.

    Frame f is in row `f % R`. The next call may overwrite rows (of frames that were computed before the following ones
    were known), so R must be at least `window - 1 + n`.

    Args:
        qkv: (B, n, (Hq + 2 Hk) d), queries | keys | values, with biases, before rotary embedding.
        cos, sin: (B, n, d/2) float32 of the frame numbers.
        k_ring, v_ring: (S, R, Hk, d), mutated.
        slots: (B,) int64.
        first_frame: (B,) int64 number of frame 0 of `qkv`; negative frames do not exist: no other frame sees them,
            and their own result is finite but meaningless.
        window: number of newest frames visible to a query, itself included; None: all in the ring.

    Returns: (B, n, Hq d) in the dtype of `qkv`.
    """
    is_small = qkv.shape[1] <= _MAX_FRAMES and k_ring.shape[1] <= _MAX_RING_ROWS
    if use_triton(qkv, 2 * cos.shape[-1]) and is_small:
        from mingc.kernels.triton import sliding_window_attention as gpu

        seen = k_ring.shape[1] if window is None else window
        out: Tensor = gpu.sliding_window_attention(
            qkv.contiguous(), cos, sin, k_ring, v_ring, slots, first_frame, seen
        )
        return out
    batch, frames = qkv.shape[:2]
    num_rows, kv_heads, size = k_ring.shape[1:]
    heads = qkv.shape[2] // size - 2 * kv_heads
    groups = heads // kv_heads
    packed = qkv.view(batch, frames, heads + 2 * kv_heads, size)
    first, second = packed[:, :, : heads + kv_heads].float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)

    frame = first_frame.unsqueeze(1) + torch.arange(frames, device=qkv.device)
    target = (slots.unsqueeze(1), torch.remainder(frame, num_rows))
    k_ring.index_put_(target, rotated[:, :, heads:])
    v_ring.index_put_(target, packed[:, :, heads + kv_heads :])

    newest = first_frame.unsqueeze(1) + (frames - 1)
    stored = newest - torch.remainder(newest - torch.arange(num_rows, device=qkv.device), num_rows)
    stored, query = stored.unsqueeze(1), frame.unsqueeze(2)
    visible = (stored >= 0) & (stored <= query)
    if window is not None:
        visible = visible & (stored > query - window)
    visible = visible | (stored == query)  # a negative frame sees itself: softmax over no keys is NaN
    queries = rotated[:, :, :heads].reshape(batch, frames, kv_heads, groups, size).permute(0, 2, 3, 1, 4)
    mask = visible[:, None, None].expand(batch, 1, groups, frames, num_rows)
    # Queries that share a KV head go on the sequence axis, so that keys need not be repeated.
    context = F.scaled_dot_product_attention(
        queries.reshape(batch, kv_heads, groups * frames, size),
        k_ring[slots].transpose(1, 2),
        v_ring[slots].transpose(1, 2),
        attn_mask=mask.reshape(batch, 1, groups * frames, num_rows),
    )
    context = context.view(batch, kv_heads, groups, frames, size).permute(0, 3, 1, 2, 4)
    return context.reshape(batch, frames, heads * size)
