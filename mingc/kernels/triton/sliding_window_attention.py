"""Triton kernel of `mingc.kernels.sliding_window_attention`: one head's new frames and ring buffer per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def mingc_sliding_window_attention(
    qkv, cos, sin, k_ring, v_ring, slots, first_frame, out, num_frames, num_rows, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, FRAMES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // GROUP
    half: tl.constexpr = SIZE // 2
    row_size: tl.constexpr = (GROUP + 2) * KV_HEADS * SIZE
    first = tl.load(first_frame + request).to(tl.int32)  # 64-bit remainders are slow
    base = tl.load(slots + request) * num_rows * (KV_HEADS * SIZE) + kv_head * SIZE
    f = tl.arange(0, half)
    dim = tl.arange(0, SIZE)
    index = tl.arange(0, FRAMES)
    is_real = index < num_frames
    mask = is_real[:, None]
    turn = (request * num_frames + index)[:, None] * half + f[None, :]
    c = tl.load(cos + turn, mask=mask, other=0.0)
    s = tl.load(sin + turn, mask=mask, other=0.0)
    row = qkv + (request * num_frames + index)[:, None] * row_size
    q1 = tl.load(row + head * SIZE + f[None, :], mask=mask, other=0.0).to(tl.float32)
    q2 = tl.load(row + head * SIZE + half + f[None, :], mask=mask, other=0.0).to(tl.float32)
    key = row + (KV_HEADS * GROUP + kv_head) * SIZE + f[None, :]
    k1 = tl.load(key, mask=mask, other=0.0).to(tl.float32)
    k2 = tl.load(key + half, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(row + (KV_HEADS * (GROUP + 1) + kv_head) * SIZE + dim[None, :], mask=mask, other=0.0)
    dtype = v.dtype
    q1r, q2r = (q1 * c - q2 * s).to(dtype), (q2 * c + q1 * s).to(dtype)
    k1r, k2r = (k1 * c - k2 * s).to(dtype), (k2 * c + k1 * s).to(dtype)

    frame = first + index
    if head % GROUP == 0:
        # No program reads the rows written here from the ring: it takes their frames from `qkv`.
        target = base + ((frame % num_rows + num_rows) % num_rows)[:, None] * (KV_HEADS * SIZE)
        tl.store(k_ring + target + f[None, :], k1r, mask=mask)
        tl.store(k_ring + target + half + f[None, :], k2r, mask=mask)
        tl.store(v_ring + target + dim[None, :], v, mask=mask)

    ring = tl.arange(0, ROWS)
    newest = first + num_frames - 1
    held = newest - ((newest - ring) % num_rows + num_rows) % num_rows
    is_old = (ring < num_rows) & (held >= 0) & (held < first)
    at = base + ring * (KV_HEADS * SIZE)
    ka = tl.load(k_ring + at[None, :] + f[:, None], mask=is_old[None, :], other=0.0)
    kb = tl.load(k_ring + at[None, :] + half + f[:, None], mask=is_old[None, :], other=0.0)
    v_old = tl.load(v_ring + at[:, None] + dim[None, :], mask=is_old[:, None], other=0.0)

    scale: tl.constexpr = SIZE**-0.5
    old = tl.dot(q2r, kb, tl.dot(q1r, ka)) * scale
    new = tl.dot(q2r, tl.trans(k2r), tl.dot(q1r, tl.trans(k1r))) * scale
    sees_old = is_old[None, :] & (held[None, :] > frame[:, None] - window)
    sees_new = is_real[None, :] & (frame[None, :] >= 0) & (frame[None, :] <= frame[:, None])
    sees_new = (sees_new & (frame[None, :] > frame[:, None] - window)) | (index[None, :] == index[:, None])
    old = tl.where(sees_old, old, float("-inf"))
    new = tl.where(sees_new, new, float("-inf"))
    top = tl.maximum(tl.max(old, 1), tl.max(new, 1))[:, None]
    old_weights = tl.exp(old - top)
    new_weights = tl.exp(new - top)
    total = tl.sum(old_weights, 1) + tl.sum(new_weights, 1)
    context = tl.dot(new_weights.to(dtype), v, tl.dot(old_weights.to(dtype), v_old)) / total[:, None]
    place = (request * num_frames + index)[:, None] * (KV_HEADS * GROUP * SIZE) + head * SIZE + dim[None, :]
    tl.store(out + place, context.to(dtype), mask=mask)


@torch.library.triton_op("mingc::sliding_window_attention", mutates_args={"k_ring", "v_ring"})
def sliding_window_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    slots: Tensor,
    first_frame: Tensor,
    window: int,
) -> Tensor:
    """See `mingc.kernels.sliding_window_attention`; `window` is an int here."""
    batch, frames = qkv.shape[:2]
    rows, kv_heads, size = k_ring.shape[1:]
    heads = qkv.shape[2] // size - 2 * kv_heads
    out = torch.empty(batch, frames, heads * size, dtype=qkv.dtype, device=qkv.device)
    torch.library.wrap_triton(mingc_sliding_window_attention)[(batch, heads)](
        qkv, cos, sin, k_ring, v_ring, slots, first_frame, out, frames, rows, window,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, SIZE=size,
        FRAMES=max(16, triton.next_power_of_2(frames)), ROWS=max(16, triton.next_power_of_2(rows)), num_warps=4,
    )  # fmt: skip
    return out
