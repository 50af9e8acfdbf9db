"""`mingc.kernels.slot_attention` on CUDA: one program serves all queries of a key head of a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def mingc_slot_attention(
    qkv, cos, sin, k_slots, v_slots, slots, lengths, out, num_rows, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    half: tl.constexpr = SIZE // 2
    width: tl.constexpr = (GROUP + 2) * KV_HEADS * SIZE
    length = tl.load(lengths + request)
    base = tl.load(slots + request) * num_rows * (KV_HEADS * SIZE) + kv_head * SIZE
    f = tl.arange(0, half)
    dim = tl.arange(0, SIZE)
    query = tl.arange(0, QUERIES)
    mask = (query < GROUP)[:, None]
    c = tl.load(cos + request * half + f)
    s = tl.load(sin + request * half + f)
    packed = qkv + request * width
    place = packed + (kv_head * GROUP + query)[:, None] * SIZE + f[None, :]
    q1 = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    q2 = tl.load(place + half, mask=mask, other=0.0).to(tl.float32)
    key = packed + (KV_HEADS * GROUP + kv_head) * SIZE + f
    k1 = tl.load(key).to(tl.float32)
    k2 = tl.load(key + half).to(tl.float32)
    value = tl.load(packed + (KV_HEADS * (GROUP + 1) + kv_head) * SIZE + dim)
    dtype = value.dtype
    k1r = (k1 * c - k2 * s).to(dtype)
    k2r = (k2 * c + k1 * s).to(dtype)
    q1r = (q1 * c[None, :] - q2 * s[None, :]).to(dtype)
    q2r = (q2 * c[None, :] + q1 * s[None, :]).to(dtype)
    new = base + length * (KV_HEADS * SIZE)
    tl.store(k_slots + new + f, k1r)
    tl.store(k_slots + new + half + f, k2r)
    tl.store(v_slots + new + dim, value)

    # The new token comes from registers, the earlier ones from the slot.
    scale: tl.constexpr = SIZE**-0.5
    own = tl.sum(q1r.to(tl.float32) * k1r.to(tl.float32)[None, :], 1)
    top = (own + tl.sum(q2r.to(tl.float32) * k2r.to(tl.float32)[None, :], 1)) * scale
    total = tl.full([QUERIES], 1.0, tl.float32)
    context = tl.zeros([QUERIES, SIZE], tl.float32) + value.to(tl.float32)[None, :]
    oldest = tl.maximum(length - window + 1, 0)
    for start in range(oldest, length, BLOCK):
        row = start + tl.arange(0, BLOCK)
        is_held = row < length
        at = base + row * (KV_HEADS * SIZE)
        ka = tl.load(k_slots + at[None, :] + f[:, None], mask=is_held[None, :], other=0.0)
        kb = tl.load(k_slots + at[None, :] + half + f[:, None], mask=is_held[None, :], other=0.0)
        v = tl.load(v_slots + at[:, None] + dim[None, :], mask=is_held[:, None], other=0.0)
        scores = tl.dot(q2r, kb, tl.dot(q1r, ka)) * scale
        scores = tl.where(is_held[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        context = tl.dot(weights.to(dtype), v, context * shrink[:, None])
        top = higher
    place = (
        out + request * (KV_HEADS * GROUP * SIZE) + (kv_head * GROUP + query)[:, None] * SIZE + dim[None, :]
    )
    tl.store(place, (context / total[:, None]).to(dtype), mask=mask)


@torch.library.triton_op("mingc::slot_attention", mutates_args={"k_slots", "v_slots"})
def slot_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    slots: Tensor,
    lengths: Tensor,
    window: int,
) -> Tensor:
    """See `mingc.kernels.slot_attention`; `window` is a number here."""
    batch = qkv.shape[0]
    rows, kv_heads, size = k_slots.shape[1:]
    heads = qkv.shape[1] // size - 2 * kv_heads
    out = torch.empty(batch, heads * size, dtype=qkv.dtype, device=qkv.device)
    torch.library.wrap_triton(mingc_slot_attention)[(batch, kv_heads)](
        qkv, cos, sin, k_slots, v_slots, slots, lengths, out, rows, window,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, QUERIES=max(16, triton.next_power_of_2(heads // kv_heads)),
        SIZE=size, BLOCK=128, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
