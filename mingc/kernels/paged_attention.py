"""Attention over a paged KV cache.

A pool is (KV, Hk, d): the rows of all pages in order, `page_size` rows per page. A page table lists a request's pages
in token order, padded with 0, the padding page. Rows after a request's tokens may hold values of an earlier request,
even NaN, and must not affect the result. Scale 1/sqrt(d), softmax in float32 (spec: thinker.md §2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.dispatch import use_triton


def token_rows(page_table: Tensor, index: Tensor, page_size: int) -> Tensor:
    """Pool rows (B,) int64 of one token of each request.

    Args:
        page_table: (B, P) int32.
        index: (B,) int64, position of the token in its request.
    """
    pages = page_table.gather(1, (index // page_size).unsqueeze(1)).squeeze(1)
    return pages.to(torch.int64) * page_size + index % page_size


def chunk_rows(page_table: Tensor, segment: Tensor, index: Tensor, page_size: int) -> Tensor:
    """Pool rows (T,) int64 of a chunk's tokens; padding goes to page 0. Arguments as `paged_prefill_attention`."""
    place = index.clamp_min(0)
    pages = page_table.view(-1).index_select(0, segment * page_table.shape[1] + place // page_size)
    rows = pages.to(torch.int64) * page_size + place % page_size
    padding = torch.arange(index.shape[0], device=index.device) % page_size
    return torch.where(index >= 0, rows, padding)


def paged_prefill_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    segment: Tensor,
    index: Tensor,
    page_size: int,
) -> Tensor:
    """Attend causally with a chunk of tokens, which may belong to several requests, to all tokens of their requests.

    Args:
        q: (T, Hq, d); query head j reads KV head j // (Hq / Hk). A request's tokens are consecutive rows, the first at
            a multiple of `chunk_layout.CHUNK_ALIGNMENT`; padding may follow them. A chunk of more than
            `chunk_layout.SHARED_ROWS` rows belongs to one request.
        k_pages, v_pages: (KV, Hk, d).
        page_table: (S, P) int32.
        segment: (T,) int64, row of `page_table` for each token; any row for padding.
        index: (T,) int64, position of the token in its request, of which it sees the tokens up to itself; their rows
            must have been written. -1 for padding, whose result is finite if the rows of its segment are.

    Returns: (T, Hq, d).
    """
    if use_triton(q, q.shape[-1]):
        from mingc.kernels.triton import paged_attention as gpu

        attended: Tensor = gpu.paged_prefill_attention(
            q, k_pages, v_pages, page_table, segment, index, page_size
        )
        return attended
    if not torch.compiler.is_compiling():
        page_table = page_table[: int(segment.max()) + 1]  # unused rows of the table would cost memory here
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k_pages.shape[1]
    num_groups = num_heads // num_kv_heads
    num_segments = page_table.shape[0]
    is_own = torch.arange(num_segments, device=q.device).unsqueeze(1) == segment
    lengths = torch.where(is_own, index + 1, 1).amax(1, keepdim=True)
    rows = _visible_rows(page_table, lengths, page_size)
    num_keys = rows.shape[1]
    rows = rows.reshape(-1)
    key = torch.arange(rows.shape[0], device=q.device)
    is_visible = (key // num_keys == segment.unsqueeze(1)) & (
        key % num_keys <= index.clamp_min(0).unsqueeze(1)
    )
    k = k_pages.index_select(0, rows).transpose(0, 1).unsqueeze(1)
    v = v_pages.index_select(0, rows).transpose(0, 1).unsqueeze(1)
    grouped_q = q.view(num_tokens, num_kv_heads, num_groups, head_size).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(
        grouped_q,
        k.expand(-1, num_groups, -1, -1),
        v.expand(-1, num_groups, -1, -1),
        attn_mask=is_visible,
    )
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_size)


def paged_decode_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, page_size: int
) -> Tensor:
    """Attend with one new token per request to the request's tokens, itself included.

    Args:
        q: (B, Hq, d).
        k_pages, v_pages: (KV, Hk, d).
        page_table: (B, P) int32.
        lengths: (B,) int64, tokens of each request; values below 1 count as 1, as softmax needs a visible key.

    Returns: (B, Hq, d).
    """
    if use_triton(q, q.shape[-1]):
        from mingc.kernels.triton import paged_attention as gpu

        attended: Tensor = gpu.paged_decode_attention(q, k_pages, v_pages, page_table, lengths, page_size)
        return attended
    num_requests, num_heads, head_size = q.shape
    num_kv_heads = k_pages.shape[1]
    lengths = lengths.clamp_min(1).unsqueeze(1)
    rows = _visible_rows(page_table, lengths, page_size)
    num_context = rows.shape[1]
    rows = rows.reshape(-1)
    shape = (num_requests, num_context, num_kv_heads, head_size)
    k = k_pages.index_select(0, rows).view(shape).transpose(1, 2)
    v = v_pages.index_select(0, rows).view(shape).transpose(1, 2)
    # The query heads of one KV head go on the sequence axis: keys are read once, not once per query head.
    grouped_q = q.view(num_requests, num_kv_heads, num_heads // num_kv_heads, head_size)
    is_visible = torch.arange(num_context, device=q.device) < lengths
    out = F.scaled_dot_product_attention(grouped_q, k, v, attn_mask=is_visible[:, None, None, :])
    return out.reshape(num_requests, num_heads, head_size)


def _visible_rows(page_table: Tensor, length: Tensor, page_size: int) -> Tensor:
    """Pool rows (..., P * page_size) int64 of the pages; from `length` (..., 1) on the request's first row repeats."""
    first = page_table.to(torch.int64).unsqueeze(-1) * page_size
    places = torch.arange(page_size, device=page_table.device)
    rows = (first + places).flatten(-2)
    index = torch.arange(rows.shape[-1], device=page_table.device)
    return torch.where(index < length, rows, rows[..., :1])
