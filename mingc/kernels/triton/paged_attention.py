"""Triton kernels of `mingc.kernels.paged_attention`: flash decoding, and prefill of a chunk.

Decode splits a long context into parts for different programs; a second kernel combines them in order. The split
depends only on the context's length and on the width of the page table, so a request's result does not depend on its
batch. Programs without a part exit at once: the grid is fixed, as CUDA graphs need. Lengths are inputs of a step and
are read before the wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.host.machine import gpu_target
from mingc.kernels.chunk_layout import CHUNK_ALIGNMENT, SHARED_ROWS
from mingc.kernels.triton.pdl import enable_pdl

_LOG2_E = tl.constexpr(1.4426950408889634)
_MIN_PART = (
    128  # tokens: smaller parts cost more to combine than they gain; larger ones idle the GPU at batch 1
)
_DECODE_BLOCK = 64
_MIN_QUERIES = 16  # rows: the minimum for tensor cores
_LARGE_BLOCK = (
    128  # rows of a program in long chunks with one KV head: keys and values are read half as often
)
_LARGE_BLOCK_HEAD = 128  # head size up to which that fits shared memory
_LARGE_BLOCK_PROGRAMS = 256  # the fewest that were timed: with fewer the longest program delays the rest


@triton.jit
def _part_size(length, SPLITS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    return tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK, LEAST)


@triton.jit
def mingc_paged_decode_pdl(
    q, k_pages, v_pages, page_table, lengths, out, partial, tops, totals, table_width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.maximum(tl.load(lengths + request).to(tl.int32), 1)
    part = _part_size(length, SPLITS, BLOCK, LEAST)
    zero = enable_pdl(PDL)
    first = split * part + zero
    if first >= length:
        return
    end = tl.minimum(first + part, length)
    dim = tl.arange(0, SIZE)
    query = tl.arange(0, QUERIES)
    is_query = query < GROUP
    head = (request * KV_HEADS + kv_head) * GROUP + query + zero
    queries = tl.load(q + head[:, None] * SIZE + dim[None, :], mask=is_query[:, None], other=0.0)
    dtype = queries.dtype
    scale: tl.constexpr = SIZE**-0.5 * _LOG2_E
    table = page_table + request * table_width
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    context = tl.zeros([QUERIES, SIZE], tl.float32)
    for start in range(first, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        is_held = token < end
        page = tl.load(table + token // PAGE, mask=is_held, other=0)
        row = page.to(tl.int64) * PAGE + token % PAGE
        at = (row * KV_HEADS + kv_head)[:, None] * SIZE + dim[None, :]
        k = tl.load(k_pages + at, mask=is_held[:, None], other=0.0)
        v = tl.load(v_pages + at, mask=is_held[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(k)) * scale
        scores = tl.where(is_held[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        context = tl.dot(weights.to(dtype), v, context * shrink[:, None])
        top = higher
    if part >= length:
        own = out + head[:, None] * SIZE + dim[None, :]
        tl.store(own, (context / total[:, None]).to(dtype), mask=is_query[:, None])
    else:
        place = head * SPLITS + split
        tl.store(partial + place[:, None] * SIZE + dim[None, :], context, mask=is_query[:, None])
        tl.store(tops + place, top, mask=is_query)
        tl.store(totals + place, total, mask=is_query)


@triton.jit
def mingc_paged_decode_join_pdl(
    lengths, partial, tops, totals, out,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    request = tl.program_id(1)
    length = tl.maximum(tl.load(lengths + request).to(tl.int32), 1)
    num_parts = tl.cdiv(length, _part_size(length, SPLITS, BLOCK, LEAST))
    zero = enable_pdl(PDL)
    # With the zero, so that no program ends before the wait: the next kernel waits for this one only.
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


@torch.library.triton_op("mingc::paged_decode_attention", mutates_args={})
def paged_decode_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, page_size: int
) -> Tensor:
    """See `mingc.kernels.paged_attention`."""
    return launch_decode(q, k_pages, v_pages, page_table, lengths, page_size)


def launch_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, page_size: int
) -> Tensor:
    """Launch the decode kernels within another operation."""
    batch, heads, size = q.shape
    kv_heads, table_width = k_pages.shape[1], page_table.shape[1]
    splits = num_splits(table_width * page_size, kv_heads, gpu_target(q.device).num_multiprocessors)
    out = torch.empty_like(q)
    partial = torch.empty(batch, heads, splits, size, dtype=torch.float32, device=q.device)
    tops, totals = (torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device) for _ in range(2))
    group = heads // kv_heads
    torch.library.wrap_triton(mingc_paged_decode_pdl)[(kv_heads, batch, splits)](
        q, k_pages, v_pages, page_table, lengths, out, partial, tops, totals, table_width,
        KV_HEADS=kv_heads, GROUP=group, QUERIES=max(_MIN_QUERIES, triton.next_power_of_2(group)), SIZE=size,
        PAGE=page_size, SPLITS=splits, BLOCK=_DECODE_BLOCK, LEAST=_MIN_PART, PDL=True, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    if splits > 1:
        torch.library.wrap_triton(mingc_paged_decode_join_pdl)[(heads, batch)](
            lengths, partial, tops, totals, out,
            HEADS=heads, SIZE=size, SPLITS=splits, PADDED=triton.next_power_of_2(splits), STEP=min(16, splits),
            BLOCK=_DECODE_BLOCK, LEAST=_MIN_PART, PDL=True, num_warps=1,
        )  # fmt: skip
    return out


def num_splits(max_tokens: int, kv_heads: int, num_multiprocessors: int) -> int:
    """Number of parts of the longest context, a power of two: at most as many as fill the GPU with one request."""
    splits = 1
    while splits * _MIN_PART < max_tokens and 2 * splits * kv_heads <= num_multiprocessors:
        splits *= 2
    return splits


@triton.jit
def mingc_paged_prefill(
    q, k_pages, v_pages, page_tables, segment, index, out, num_tokens, table_width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    # The last rows see the most keys: they start first, so that the longest programs do not run alone at the end.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = head // GROUP
    dim = tl.arange(0, SIZE)
    query = block * ROWS + tl.arange(0, ROWS)
    # All rows belong to one request; padding, with index -1, comes last.
    place = tl.load(index + query, mask=query < num_tokens, other=-1).to(tl.int32)
    before = tl.maximum(tl.load(index + block * ROWS).to(tl.int32), 0)
    page_table = page_tables + tl.load(segment + block * ROWS) * table_width
    is_query = (query < num_tokens)[:, None]
    own = (query * (KV_HEADS * GROUP) + head)[:, None] * SIZE + dim[None, :]
    queries = tl.load(q + own, mask=is_query, other=0.0)
    dtype = queries.dtype
    scale: tl.constexpr = SIZE**-0.5 * _LOG2_E
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    context = tl.zeros([ROWS, SIZE], tl.float32)
    # All rows see the tokens below `common`; from there to `end` a row sees only some. Padding sees all of them.
    common = (before + 1) // BLOCK * BLOCK
    end = tl.maximum(tl.max(place, 0), 0) + 1
    for first in range(0, common, BLOCK):
        token = first + tl.arange(0, BLOCK)
        row = tl.load(page_table + token // PAGE).to(tl.int64) * PAGE + token % PAGE
        at = (row * KV_HEADS + kv_head)[:, None] * SIZE + dim[None, :]
        k = tl.load(k_pages + at)
        v = tl.load(v_pages + at)
        scores = tl.dot(queries, tl.trans(k))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        context = tl.dot(weights.to(dtype), v, context * shrink[:, None])
        top = higher
    for first in range(common, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        is_held = token < end
        page = tl.load(page_table + token // PAGE, mask=is_held, other=0)
        row = page.to(tl.int64) * PAGE + token % PAGE
        at = (row * KV_HEADS + kv_head)[:, None] * SIZE + dim[None, :]
        k = tl.load(k_pages + at, mask=is_held[:, None], other=0.0)
        v = tl.load(v_pages + at, mask=is_held[:, None], other=0.0)
        is_seen = is_held[None, :] & (token[None, :] <= tl.where(place < 0, end, place)[:, None])
        scores = tl.where(is_seen, tl.dot(queries, tl.trans(k)) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        context = tl.dot(weights.to(dtype), v, context * shrink[:, None])
        top = higher
    tl.store(out + own, (context / total[:, None]).to(dtype), mask=is_query)


@torch.library.triton_op("mingc::paged_prefill_attention", mutates_args={})
def paged_prefill_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    segment: Tensor,
    index: Tensor,
    page_size: int,
) -> Tensor:
    """See `mingc.kernels.paged_attention`."""
    tokens, heads, size = q.shape
    kv_heads = k_pages.shape[1]
    out = torch.empty_like(q)
    is_long = tokens > SHARED_ROWS and heads * tokens >= _LARGE_BLOCK_PROGRAMS * _LARGE_BLOCK
    if is_long and kv_heads == 1 and size <= _LARGE_BLOCK_HEAD:
        rows, block, warps, stages = _LARGE_BLOCK, 128, 8, 3
    else:
        num_multiprocessors = gpu_target(q.device).num_multiprocessors
        is_full = heads * triton.cdiv(tokens, CHUNK_ALIGNMENT) >= num_multiprocessors
        rows, block, warps, stages = CHUNK_ALIGNMENT, 64 if is_full else 128, 4, 2
    torch.library.wrap_triton(mingc_paged_prefill)[(heads, triton.cdiv(tokens, rows))](
        q, k_pages, v_pages, page_table, segment, index, out, tokens, page_table.shape[1],
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, SIZE=size, PAGE=page_size, ROWS=rows, BLOCK=block,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
