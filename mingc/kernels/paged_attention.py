"""Attention over keys and values that lie in pages.

A pool is (KV, Hk, d): the rows of all pages one after the other, `page_size` rows a page. A page table names a
request's pages in token order, filled up with 0, the page that belongs to padding. Rows beyond a request's tokens
may hold what an earlier request left, NaN even, and must not be felt. Scale 1/sqrt(d), softmax in float32
(spec: thinker.md §2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.dispatch import use_triton


def token_rows(page_table: Tensor, index: Tensor, page_size: int) -> Tensor:
    """Pool rows of tokens of one request (or of one token each of several).

    Args:
        page_table: (P,) int32, or (B, P) with `index` (B,).
        index: (T,) or (B,) int64, which token of its request.

    Returns: like `index`, int64.
    """
    place = index // page_size
    if page_table.dim() == 1:
        pages = page_table.index_select(0, place)
    else:
        pages = page_table.gather(1, place.unsqueeze(1)).squeeze(1)
    return pages.to(torch.int64) * page_size + index % page_size


def paged_prefill_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, start: Tensor, page_size: int
) -> Tensor:
    """Causal attention of one request's chunk over all of its tokens.

    Args:
        q: (T, Hq, d); query head j reads KV head j // (Hq / Hk).
        k_pages, v_pages: (KV, Hk, d).
        page_table: (P,) int32.
        start: (1,) int64, tokens of the request before the chunk: query t sees the tokens up to start + t. The
            rows of all T tokens have been written, padding of the chunk included.

    Returns: (T, Hq, d).
    """
    if use_triton(q, q.shape[-1]):
        from mingc.kernels.gpu import paged_attention as gpu

        attended: Tensor = gpu.paged_prefill_attention(q, k_pages, v_pages, page_table, start, page_size)
        return attended
    num_tokens, num_heads, width = q.shape
    num_kv_heads = k_pages.shape[1]
    num_groups = num_heads // num_kv_heads
    rows = _visible_rows(page_table, start + num_tokens, page_size)
    k = k_pages.index_select(0, rows).transpose(0, 1).unsqueeze(1)
    v = v_pages.index_select(0, rows).transpose(0, 1).unsqueeze(1)
    grouped_q = q.view(num_tokens, num_kv_heads, num_groups, width).permute(1, 2, 0, 3)
    query_index = start + torch.arange(num_tokens, device=q.device)
    is_visible = torch.arange(rows.shape[0], device=q.device) <= query_index.unsqueeze(1)
    out = F.scaled_dot_product_attention(
        grouped_q,
        k.expand(-1, num_groups, -1, -1),
        v.expand(-1, num_groups, -1, -1),
        attn_mask=is_visible,
    )
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, width)


def paged_decode_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, page_size: int
) -> Tensor:
    """Attention of one new token a request over the request's tokens, itself included.

    Args:
        q: (B, Hq, d).
        k_pages, v_pages: (KV, Hk, d).
        page_table: (B, P) int32.
        lengths: (B,) int64, tokens of each request; below 1 is taken as 1: a row of the softmax must not be empty.

    Returns: (B, Hq, d).
    """
    if use_triton(q, q.shape[-1]):
        from mingc.kernels.gpu import paged_attention as gpu

        attended: Tensor = gpu.paged_decode_attention(q, k_pages, v_pages, page_table, lengths, page_size)
        return attended
    num_requests, num_heads, width = q.shape
    num_kv_heads = k_pages.shape[1]
    lengths = lengths.clamp_min(1).unsqueeze(1)
    rows = _visible_rows(page_table, lengths, page_size)
    num_context = rows.shape[1]
    rows = rows.reshape(-1)
    shape = (num_requests, num_context, num_kv_heads, width)
    k = k_pages.index_select(0, rows).view(shape).transpose(1, 2)
    v = v_pages.index_select(0, rows).view(shape).transpose(1, 2)
    # The query heads of one KV head stand where the query tokens would: keys are read once, not per query head.
    grouped_q = q.view(num_requests, num_kv_heads, num_heads // num_kv_heads, width)
    is_visible = torch.arange(num_context, device=q.device) < lengths
    out = F.scaled_dot_product_attention(grouped_q, k, v, attn_mask=is_visible[:, None, None, :])
    return out.reshape(num_requests, num_heads, width)


def _visible_rows(page_table: Tensor, length: Tensor, page_size: int) -> Tensor:
    """Pool rows (..., P * page_size) int64 of the pages; tokens from `length` (..., 1) on are the request's first."""
    first = page_table.to(torch.int64).unsqueeze(-1) * page_size
    places = torch.arange(page_size, device=page_table.device)
    rows = (first + places).flatten(-2)
    index = torch.arange(rows.shape[-1], device=page_table.device)
    return torch.where(index < length, rows, rows[..., :1])
