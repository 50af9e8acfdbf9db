"""Triton kernel of `mingc.kernels.paged_attention`: prefill of a chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.host.machine import gpu_target
from mingc.kernels.chunk_layout import CHUNK_ALIGNMENT, SHARED_ROWS

_LOG2_E = tl.constexpr(1.4426950408889634)
_LARGE_BLOCK = (
    128  # rows of a program in long chunks with one KV head: keys and values are read half as often
)
_LARGE_BLOCK_HEAD = 128  # head size up to which that fits shared memory
_LARGE_BLOCK_PROGRAMS = 256  # the fewest that were timed: with fewer the longest program delays the rest


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
