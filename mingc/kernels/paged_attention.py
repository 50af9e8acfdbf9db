"""Attention over keys and values that lie in rows of a page pool.

A pool is (KV, Hk, d): rows of all pages one after the other. The caller says in which rows a request's tokens
lie, in token order. Row numbers of padding must be valid (page 0 is reserved for them).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def write_rows(k_pages: Tensor, v_pages: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Put keys and values (T, Hk, d) into `rows` (T,) int64 of the pools, in place.

    The write goes to the pool itself, not to a view of it: only so does the compiler update it without a copy.
    """
    k_pages.index_put_((rows,), k)
    v_pages.index_put_((rows,), v)


def paged_prefill_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, context_rows: Tensor, query_index: Tensor
) -> Tensor:
    """Causal attention of one request's chunk over all of its tokens.

    Args:
        q: (T, Hq, d); query head j reads KV head j // (Hq / Hk).
        k_pages, v_pages: (KV, Hk, d).
        context_rows: (C,) int64, the request's rows in token order.
        query_index: (T,) int64, each query's token index; context j is visible when j <= index. An index below
            0 (padding) is taken as 0: a row of the softmax must not be empty, NaN would enter the pool.

    Returns: (T, Hq, d). Scale 1/sqrt(d), softmax in float32 (spec: thinker.md §2.1).
    """
    num_tokens, num_heads, width = q.shape
    num_kv_heads = k_pages.shape[1]
    num_groups = num_heads // num_kv_heads
    k = k_pages.index_select(0, context_rows).transpose(0, 1).unsqueeze(1)
    v = v_pages.index_select(0, context_rows).transpose(0, 1).unsqueeze(1)
    grouped_q = q.view(num_tokens, num_kv_heads, num_groups, width).permute(1, 2, 0, 3)
    is_visible = torch.arange(context_rows.shape[0], device=q.device) <= query_index.clamp_min(0).unsqueeze(1)
    out = F.scaled_dot_product_attention(
        grouped_q,
        k.expand(-1, num_groups, -1, -1),
        v.expand(-1, num_groups, -1, -1),
        attn_mask=is_visible,
    )
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, width)


def paged_decode_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, context_rows: Tensor, context_lens: Tensor
) -> Tensor:
    """Attention of one new token a request over the request's tokens, itself included.

    Args:
        q: (B, Hq, d).
        k_pages, v_pages: (KV, Hk, d).
        context_rows: (B, C) int64, each request's rows in token order, padded with any valid row.
        context_lens: (B,) int64, how many of them count; below 1 (padding) is taken as 1.

    Returns: (B, Hq, d), as `paged_prefill_attention`.
    """
    num_requests, num_heads, width = q.shape
    num_kv_heads = k_pages.shape[1]
    num_context = context_rows.shape[1]
    rows = context_rows.reshape(-1)
    shape = (num_requests, num_context, num_kv_heads, width)
    k = k_pages.index_select(0, rows).view(shape).transpose(1, 2)
    v = v_pages.index_select(0, rows).view(shape).transpose(1, 2)
    # The query heads of one KV head stand where the query tokens would: keys are read once, not per query head.
    grouped_q = q.view(num_requests, num_kv_heads, num_heads // num_kv_heads, width)
    is_visible = torch.arange(num_context, device=q.device) < context_lens.clamp_min(1).unsqueeze(1)
    out = F.scaled_dot_product_attention(grouped_q, k, v, attn_mask=is_visible[:, None, None, :])
    return out.reshape(num_requests, num_heads, width)
