"""Decode attention of the thinker, from the packed QKV projection to the output projection: one token per request."""

from __future__ import annotations

from torch import Tensor

from mingc.kernels.dispatch import use_triton
from mingc.kernels.norm_rope_write import norm_rope_write
from mingc.kernels.paged_attention import paged_decode_attention, token_rows


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
    """Run `norm_rope_write` for each request's last token, then `paged_decode_attention`.

    Args:
        qkv: (B, Hq + 2 Hk, d).
        page_table: (B, P) int32.
        lengths: (B,) int64, the new token included; a padding request has 0 or 1 and page 0.
        others: as in these two functions; `k_pages` and `v_pages` are mutated.

    Returns: (B, Hq, d).
    """
    if use_triton(qkv, qkv.shape[-1]):
        from mingc.kernels.triton import decode_attention as gpu

        attended: Tensor = gpu.decode_attention(
            qkv.contiguous(), q_norm, k_norm, cos, sin, k_pages, v_pages, page_table, lengths, eps, page_size
        )
        return attended
    rows = token_rows(page_table, (lengths - 1).clamp_min(0), page_size)
    q = norm_rope_write(qkv, q_norm, k_norm, cos, sin, rows, k_pages, v_pages, eps)
    return paged_decode_attention(q, k_pages, v_pages, page_table, lengths, page_size)
