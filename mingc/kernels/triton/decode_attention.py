"""Triton kernels of `mingc.kernels.decode_attention`: norms, rotation and write of the new token, and flash decoding.

A long context is split into parts for different programs; a second kernel combines them in order. The split depends
only on the context's length and on the width of the page table, so a request's result does not depend on its batch.
Programs without a part exit at once: the grid is fixed, as CUDA graphs need.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.host.machine import gpu_target
from mingc.kernels.triton.pdl import enable_pdl

_LOG2_E = tl.constexpr(1.4426950408889634)
_MIN_PART = (
    128  # tokens: smaller parts cost more to combine than they gain; larger ones idle the GPU at batch 1
)
_BLOCK = 64
_MIN_QUERIES = 16  # rows: the minimum for tensor cores


@triton.jit
def _part_size(length, SPLITS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    return tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK, LEAST)


@triton.jit
def _norm_rotate(
    x, partners, weight, partner_weight, c, s, SIZE: tl.constexpr, EPS: tl.constexpr, dtype: tl.constexpr
):
    """Norm and rotation of heads x (N, SIZE), rounded where the reference rounds; `partners` of each dim (N, SIZE)."""
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, 1) / SIZE + EPS)[:, None]
    normed = ((x32 * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)[None, :]).to(dtype)
    turned = (partners.to(tl.float32) * scale).to(dtype).to(tl.float32) * partner_weight.to(tl.float32)[
        None, :
    ]
    return (normed.to(tl.float32) * c[None, :] + turned.to(dtype).to(tl.float32) * s[None, :]).to(dtype)


@triton.jit
def _attend(queries, k, v, is_held, top, total, context, scale: tl.constexpr):
    """Highest score, sum of weights and weighted values, after a block of tokens."""
    scores = tl.where(is_held[None, :], tl.dot(queries, tl.trans(k)) * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    context = tl.dot(weights.to(queries.dtype), v, context * shrink[:, None])
    return higher, total * shrink + tl.sum(weights, 1), context


@triton.jit
def mingc_decode_attention_pdl(
    qkv, q_norm, k_norm, cos, sin, k_pages, v_pages, page_table, lengths, out, partial, tops, totals, table_width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    EPS: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The query heads of one KV head and a part of a request's context.

    The new token belongs to the last part, whose program writes it and keeps it in registers. The first LEAST tokens of
    a part are loaded before the wait: earlier steps wrote them.
    """
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.maximum(tl.load(lengths + request).to(tl.int32), 1)
    part = _part_size(length, SPLITS, BLOCK, LEAST)
    first = split * part
    if first >= length:
        return
    last = length - 1
    is_last = first + part >= length
    end = tl.minimum(first + part, last)  # of the tokens in the pages
    table = page_table + request * table_width
    dim = tl.arange(0, SIZE)
    query = tl.arange(0, QUERIES)
    is_query = query < GROUP
    # Dims f and f + HALF are rotated together; dims from 2 HALF on are unchanged: their partner is themselves.
    partner = tl.where(dim < HALF, dim + HALF, tl.where(dim < 2 * HALF, dim - HALF, dim))
    q_weight = tl.load(q_norm + dim)
    q_partner_weight = tl.load(q_norm + partner)
    k_weight = tl.load(k_norm + dim)
    k_partner_weight = tl.load(k_norm + partner)
    new_page = tl.load(table + last // PAGE)
    token = first + tl.arange(0, LEAST)
    is_held = token < end
    row = tl.load(table + token // PAGE, mask=is_held, other=0).to(tl.int64) * PAGE + token % PAGE
    at = (row * KV_HEADS + kv_head)[:, None] * SIZE + dim[None, :]
    k = tl.load(k_pages + at, mask=is_held[:, None], other=0.0)
    v = tl.load(v_pages + at, mask=is_held[:, None], other=0.0)

    zero = enable_pdl(PDL)
    is_turned = dim < 2 * HALF
    f = request * HALF + dim % HALF + zero
    c = tl.load(cos + f, mask=is_turned, other=1.0)
    s = tl.load(sin + f, mask=is_turned, other=0.0)
    s = tl.where(dim < HALF, -s, s)
    packed = qkv + zero + request * ((GROUP + 2) * KV_HEADS * SIZE)
    dtype: tl.constexpr = qkv.dtype.element_ty
    heads = packed + (kv_head * GROUP + query)[:, None] * SIZE
    x = tl.load(heads + dim[None, :], mask=is_query[:, None], other=0.0)
    partners = tl.load(heads + partner[None, :], mask=is_query[:, None], other=0.0)
    queries = _norm_rotate(x, partners, q_weight, q_partner_weight, c, s, SIZE, EPS, dtype)
    key = packed + (KV_HEADS * GROUP + kv_head) * SIZE
    x = tl.load(key + dim)[None, :]
    partners = tl.load(key + partner)[None, :]
    new_k = _norm_rotate(x, partners, k_weight, k_partner_weight, c, s, SIZE, EPS, dtype)
    new_v = tl.load(key + KV_HEADS * SIZE + dim)

    scale: tl.constexpr = SIZE**-0.5 * _LOG2_E
    own = tl.sum(queries.to(tl.float32) * new_k.to(tl.float32), 1) * scale
    top = tl.where(is_last, own, float("-inf"))
    total = tl.where(is_last, 1.0, 0.0) + tl.zeros([QUERIES], tl.float32)
    context = tl.where(is_last, new_v.to(tl.float32), 0.0)[None, :] + tl.zeros([QUERIES, SIZE], tl.float32)
    top, total, context = _attend(queries, k, v, is_held, top, total, context, scale)
    for start in range(first + LEAST, end, BLOCK):
        later = start + tl.arange(0, BLOCK)
        is_later = later < end
        page = tl.load(table + later // PAGE, mask=is_later, other=0)
        later_row = page.to(tl.int64) * PAGE + later % PAGE
        later_at = (later_row * KV_HEADS + kv_head)[:, None] * SIZE + dim[None, :]
        later_k = tl.load(k_pages + later_at, mask=is_later[:, None], other=0.0)
        later_v = tl.load(v_pages + later_at, mask=is_later[:, None], other=0.0)
        top, total, context = _attend(queries, later_k, later_v, is_later, top, total, context, scale)
    if is_last:
        new = ((new_page.to(tl.int64) * PAGE + last % PAGE) * KV_HEADS + kv_head) * SIZE + zero
        tl.store(k_pages + new + dim[None, :], new_k)
        tl.store(v_pages + new + dim, new_v)
    head = (request * KV_HEADS + kv_head) * GROUP + query + zero
    if part >= length:
        attended = (context / total[:, None]).to(dtype)
        tl.store(out + head[:, None] * SIZE + dim[None, :], attended, mask=is_query[:, None])
    else:
        place = head * SPLITS + split
        tl.store(partial + place[:, None] * SIZE + dim[None, :], context, mask=is_query[:, None])
        tl.store(tops + place, top, mask=is_query)
        tl.store(totals + place, total, mask=is_query)


@triton.jit
def mingc_decode_attention_join_pdl(
    lengths, partial, tops, totals, out,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    request = tl.program_id(1)
    length = tl.maximum(tl.load(lengths + request).to(tl.int32), 1)
    num_parts = tl.cdiv(length, _part_size(length, SPLITS, BLOCK, LEAST))
    zero = enable_pdl(PDL)
    # With the zero, so that no program ends before the wait: the next kernel waits only for this one.
    if num_parts + zero == 1:
        return
    base = (request * HEADS + head) * SPLITS + zero
    every = tl.arange(0, PADDED)
    is_part = every < num_parts
    all_tops = tl.load(tops + base + every, mask=is_part, other=float("-inf"))
    all_totals = tl.load(totals + base + every, mask=is_part, other=0.0)
    top = tl.max(all_tops, 0)
    total = tl.sum(tl.exp2(all_tops - top) * all_totals, 0)
    dim = tl.arange(0, SIZE)
    context = tl.zeros([SIZE], tl.float32)
    for start in range(0, num_parts, STEP):
        some = start + tl.arange(0, STEP)
        is_some = some < num_parts
        weight = tl.exp2(tl.load(tops + base + some, mask=is_some, other=float("-inf")) - top)
        at = partial + (base + some)[:, None] * SIZE + dim[None, :]
        context += tl.sum(weight[:, None] * tl.load(at, mask=is_some[:, None], other=0.0), 0)
    place = out + zero + (request * HEADS + head) * SIZE + dim
    tl.store(place, (context / total).to(out.dtype.element_ty))


@torch.library.triton_op("mingc::decode_attention", mutates_args={"k_pages", "v_pages"})
def decode_attention(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    eps: float,
    page_size: int,
) -> Tensor:
    """See `mingc.kernels.decode_attention`."""
    batch, all_heads, size = qkv.shape
    kv_heads, table_width = k_pages.shape[1], page_table.shape[1]
    heads = all_heads - 2 * kv_heads
    group = heads // kv_heads
    splits = num_splits(table_width * page_size, kv_heads, gpu_target(qkv.device).num_multiprocessors)
    out = torch.empty(batch, heads, size, dtype=qkv.dtype, device=qkv.device)
    partial = torch.empty(batch, heads, splits, size, dtype=torch.float32, device=qkv.device)
    tops, totals = (
        torch.empty(batch, heads, splits, dtype=torch.float32, device=qkv.device) for _ in range(2)
    )
    torch.library.wrap_triton(mingc_decode_attention_pdl)[(kv_heads, batch, splits)](
        qkv, q_norm, k_norm, cos, sin, k_pages, v_pages, page_table, lengths, out, partial, tops, totals, table_width,
        KV_HEADS=kv_heads, GROUP=group, QUERIES=max(_MIN_QUERIES, triton.next_power_of_2(group)), SIZE=size,
        HALF=cos.shape[1], EPS=eps, PAGE=page_size, SPLITS=splits, BLOCK=_BLOCK, LEAST=_MIN_PART, PDL=True,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        torch.library.wrap_triton(mingc_decode_attention_join_pdl)[(heads, batch)](
            lengths, partial, tops, totals, out,
            HEADS=heads, SIZE=size, SPLITS=splits, PADDED=triton.next_power_of_2(splits), STEP=min(16, splits),
            BLOCK=_BLOCK, LEAST=_MIN_PART, PDL=True, num_warps=4,
        )  # fmt: skip
    return out


def num_splits(max_tokens: int, kv_heads: int, num_multiprocessors: int) -> int:
    """Number of parts of the longest context, a power of two: at most as many as fill the GPU with one request."""
    splits = 1
    while splits * _MIN_PART < max_tokens and 2 * splits * kv_heads <= num_multiprocessors:
        splits *= 2
    return splits
