"""Triton kernels of `mingc.kernels.contiguous_kv_attention`: one program per KV head and request, or per query head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.kernels.triton.pdl import enable_pdl

_LOWEST = tl.constexpr(-1e30)  # lowest score; unlike -inf, two of them can be subtracted
_FEW_REQUESTS = 2  # up to here one program per query head is faster than one per KV head


@triton.jit
def mingc_contiguous_kv_attention(
    qkv, cos, sin, k_slots, v_slots, slots, lengths, out, num_rows, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All queries of one KV head of one request; rotates and stores the new token first."""
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    half: tl.constexpr = SIZE // 2
    row_size: tl.constexpr = (GROUP + 2) * KV_HEADS * SIZE
    length = tl.load(lengths + request)
    base = tl.load(slots + request) * num_rows * (KV_HEADS * SIZE) + kv_head * SIZE
    f = tl.arange(0, half)
    dim = tl.arange(0, SIZE)
    query = tl.arange(0, QUERIES)
    mask = (query < GROUP)[:, None]
    c = tl.load(cos + request * half + f)
    s = tl.load(sin + request * half + f)
    packed = qkv + request * row_size
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

    # The new token is in registers, the earlier ones in the slot.
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


@triton.jit
def mingc_contiguous_kv_attention_few_pdl(
    qkv, cos, sin, k_slots, v_slots, slots, lengths, out, num_rows, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for few requests: one query head per program, without tensor cores.

    Each of the BLOCK rows of a step keeps its own maximum and sum; they are combined once at the end, so that warps
    exchange nothing before.
    """
    head = tl.program_id(0)
    request = tl.program_id(1)
    kv_head = head // GROUP
    half: tl.constexpr = SIZE // 2
    # Rows in the slot were written before this graph started: loading them need not wait for the previous kernel.
    length = tl.load(lengths + request)
    base = tl.load(slots + request) * num_rows * (KV_HEADS * SIZE) + kv_head * SIZE
    oldest = tl.maximum(length - window + 1, 0)
    dim = tl.arange(0, SIZE)
    row = tl.arange(0, BLOCK)
    at = base + (oldest + row)[:, None] * (KV_HEADS * SIZE) + dim[None, :]
    is_first = (oldest + row < length)[:, None]
    keys = tl.load(k_slots + at, mask=is_first, other=0.0)
    values = tl.load(v_slots + at, mask=is_first, other=0.0)

    zero = enable_pdl(PDL)
    other = (dim + half) % SIZE  # the dim that a dim is rotated with
    turn = request * half + dim % half + zero
    c = tl.load(cos + turn)
    s = tl.load(sin + turn) * tl.where(dim < half, -1.0, 1.0)
    packed = qkv + request * ((GROUP + 2) * KV_HEADS * SIZE) + zero
    query = packed + head * SIZE
    key = packed + (KV_HEADS * GROUP + kv_head) * SIZE
    value = tl.load(packed + (KV_HEADS * (GROUP + 1) + kv_head) * SIZE + dim)
    dtype: tl.constexpr = value.dtype
    q = (tl.load(query + dim).to(tl.float32) * c + tl.load(query + other).to(tl.float32) * s).to(dtype)
    k = (tl.load(key + dim).to(tl.float32) * c + tl.load(key + other).to(tl.float32) * s).to(dtype)
    scale: tl.constexpr = SIZE**-0.5
    q32 = q.to(tl.float32) * scale
    top = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    context = tl.zeros([BLOCK, SIZE], tl.float32)
    for start in range(oldest, length, BLOCK):
        # Prefetch the next rows.
        at += BLOCK * (KV_HEADS * SIZE)
        is_next = (start + BLOCK + row < length)[:, None]
        next_keys = tl.load(k_slots + at, mask=is_next, other=0.0)
        next_values = tl.load(v_slots + at, mask=is_next, other=0.0)
        is_held = start + row < length
        scores = tl.where(is_held, tl.sum(keys.to(tl.float32) * q32[None, :], 1), _LOWEST)
        higher = tl.maximum(top, scores)
        weights = tl.where(is_held, tl.exp(scores - higher), 0.0)
        shrink = tl.exp(top - higher)
        total = total * shrink + weights
        context = context * shrink[:, None] + weights[:, None] * values.to(tl.float32)
        top = higher
        keys = next_keys
        values = next_values
    if head % GROUP == 0:
        new = base + zero + length * (KV_HEADS * SIZE)
        tl.store(k_slots + new + dim, k)
        tl.store(v_slots + new + dim, value)

    # The new token is in registers, the earlier ones in the slot.
    own = tl.sum(q32 * k.to(tl.float32), 0)
    highest = tl.maximum(tl.max(top, 0), own)
    shares = tl.exp(top - highest)
    own = tl.exp(own - highest)
    joined = tl.sum(context * shares[:, None], 0) + own * value.to(tl.float32)
    joined = joined / (tl.sum(total * shares, 0) + own)
    tl.store(out + (request * (KV_HEADS * GROUP) + head) * SIZE + zero + dim, joined.to(dtype))


@torch.library.triton_op("mingc::contiguous_kv_attention", mutates_args={"k_slots", "v_slots"})
def contiguous_kv_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    slots: Tensor,
    lengths: Tensor,
    window: int,
) -> Tensor:
    """See `mingc.kernels.contiguous_kv_attention`; `window` is an int here."""
    batch = qkv.shape[0]
    rows, kv_heads, size = k_slots.shape[1:]
    heads = qkv.shape[1] // size - 2 * kv_heads
    out = torch.empty(batch, heads * size, dtype=qkv.dtype, device=qkv.device)
    if batch <= _FEW_REQUESTS:
        torch.library.wrap_triton(mingc_contiguous_kv_attention_few_pdl)[(heads, batch)](
            qkv, cos, sin, k_slots, v_slots, slots, lengths, out, rows, window,
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, SIZE=size, BLOCK=256, PDL=True, num_warps=8,
        )  # fmt: skip
        return out
    torch.library.wrap_triton(mingc_contiguous_kv_attention)[(batch, kv_heads)](
        qkv, cos, sin, k_slots, v_slots, slots, lengths, out, rows, window,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, QUERIES=max(16, triton.next_power_of_2(heads // kv_heads)),
        SIZE=size, BLOCK=128, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
