"""Triton kernels of `mingc.kernels.contiguous_kv_prefill_attention`: one rotates and stores the chunk, one attends."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.kernels.chunk_layout import SLOT_CHUNK_ALIGNMENT

_BLOCK = 64  # keys of a step


@triton.jit
def mingc_contiguous_kv_write(
    qkv, cos, sin, k_slots, v_slots, slots, segment, index, queries, num_rows,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Rotate queries into `queries` and keys into the slots, copy values; one token and one head per program."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    half: tl.constexpr = SIZE // 2
    f = tl.arange(0, half)
    place = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * SIZE + f
    first = tl.load(place)
    second = tl.load(place + half)
    request = tl.load(segment + token)
    owner = tl.where(request < 0, 0, tl.load(slots + tl.maximum(request, 0)))
    base = (owner * num_rows + tl.load(index + token)) * (KV_HEADS * SIZE)
    if head < HEADS + KV_HEADS:
        c = tl.load(cos + token * half + f)
        s = tl.load(sin + token * half + f)
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        first = (a * c - b * s).to(first.dtype)
        second = (b * c + a * s).to(second.dtype)
    if head < HEADS:
        target = queries + (token * HEADS + head) * SIZE + f
        tl.store(target, first)
        tl.store(target + half, second)
    elif head < HEADS + KV_HEADS:
        target = k_slots + base + (head - HEADS) * SIZE + f
        tl.store(target, first)
        tl.store(target + half, second)
    else:
        target = v_slots + base + (head - HEADS - KV_HEADS) * SIZE + f
        tl.store(target, first)
        tl.store(target + half, second)


@triton.jit
def mingc_contiguous_kv_prefill_attention(
    queries, k_slots, v_slots, slots, segment, index, out, num_tokens, num_rows, window,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend to a slot; TOKENS queries of one request and head per program."""
    head = tl.program_id(1)
    first_token = tl.program_id(0) * TOKENS
    token = first_token + tl.arange(0, TOKENS)
    dim = tl.arange(0, SIZE)
    mask = (token < num_tokens)[:, None]
    place = (token[:, None] * HEADS + head) * SIZE + dim[None, :]
    q = tl.load(queries + place, mask=mask, other=0.0)
    newest = tl.load(index + token, mask=token < num_tokens, other=0)
    request = tl.load(segment + first_token)
    owner = tl.where(request < 0, 0, tl.load(slots + tl.maximum(request, 0)))
    kv_head = head // (HEADS // KV_HEADS)
    base = owner * num_rows * (KV_HEADS * SIZE) + kv_head * SIZE
    scale: tl.constexpr = SIZE**-0.5
    top = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    context = tl.zeros([TOKENS, SIZE], tl.float32)
    oldest = tl.maximum(tl.min(newest, 0) - window + 1, 0)
    end = tl.max(newest, 0) + 1
    for block in range(oldest // BLOCK * BLOCK, end, BLOCK):
        row = block + tl.arange(0, BLOCK)
        is_held = row < num_rows
        at = base + row * (KV_HEADS * SIZE)
        k = tl.load(k_slots + at[None, :] + dim[:, None], mask=is_held[None, :], other=0.0)
        v = tl.load(v_slots + at[:, None] + dim[None, :], mask=is_held[:, None], other=0.0)
        is_seen = (row[None, :] <= newest[:, None]) & (row[None, :] > newest[:, None] - window)
        scores = tl.where(is_seen, tl.dot(q, k) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A block outside a query's window leaves its maximum at -inf, which cannot be subtracted.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - reference[:, None])
        shrink = tl.exp(top - reference)
        total = total * shrink + tl.sum(weights, 1)
        context = tl.dot(weights.to(v.dtype), v, context * shrink[:, None])
        top = higher
    tl.store(out + place, (context / total[:, None]).to(q.dtype), mask=mask)


@torch.library.triton_op("mingc::contiguous_kv_prefill_attention", mutates_args={"k_slots", "v_slots"})
def contiguous_kv_prefill_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    slots: Tensor,
    segment: Tensor,
    index: Tensor,
    window: int,
) -> Tensor:
    """See `mingc.kernels.contiguous_kv_prefill_attention`; `window` is an int here."""
    tokens = qkv.shape[0]
    rows, kv_heads, size = k_slots.shape[1:]
    heads = qkv.shape[1] // size - 2 * kv_heads
    queries = torch.empty(tokens, heads * size, dtype=qkv.dtype, device=qkv.device)
    out = torch.empty_like(queries)
    torch.library.wrap_triton(mingc_contiguous_kv_write)[(tokens, heads + 2 * kv_heads)](
        qkv, cos, sin, k_slots, v_slots, slots, segment, index, queries, rows,
        KV_HEADS=kv_heads, HEADS=heads, SIZE=size, num_warps=1,
    )  # fmt: skip
    block = SLOT_CHUNK_ALIGNMENT
    torch.library.wrap_triton(mingc_contiguous_kv_prefill_attention)[(triton.cdiv(tokens, block), heads)](
        queries, k_slots, v_slots, slots, segment, index, out, tokens, rows, window,
        KV_HEADS=kv_heads, HEADS=heads, SIZE=size, TOKENS=block, BLOCK=_BLOCK, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
