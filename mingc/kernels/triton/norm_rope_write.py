"""Triton kernel of `mingc.kernels.norm_rope_write`: query and key norms, rotary embedding, KV cache write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.kernels.triton.pdl import enable_pdl

_FEW_TOKENS = 32


@triton.jit
def mingc_norm_rope_write_pdl(
    qkv, q_norm, k_norm, cos, sin, rows, page_table, k_pages, v_pages, q_out, table_width,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr,
    HEADS: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    zero = enable_pdl(PDL)
    token = tl.program_id(0).to(tl.int64) + zero
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, SIZE)[None, :]
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + KV_HEADS)
    is_value = (head >= NUM_HEADS + KV_HEADS) & (head < NUM_HEADS + 2 * KV_HEADS)
    is_normed = head < NUM_HEADS + KV_HEADS
    packed = qkv + (token * (NUM_HEADS + 2 * KV_HEADS) + head) * SIZE
    x = tl.load(packed + dim, mask=is_normed | is_value, other=0.0)
    dtype = x.dtype
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, 1) / SIZE + EPS)[:, None]
    # Dims f and f + HALF are rotated together; dims from 2 HALF on are unchanged: their partner is themselves.
    partner = tl.where(dim < HALF, dim + HALF, tl.where(dim < 2 * HALF, dim - HALF, dim))
    other = tl.load(packed + partner, mask=is_normed, other=0.0).to(tl.float32)
    weight = tl.where(is_query, tl.load(q_norm + dim), tl.load(k_norm + dim)).to(tl.float32)
    other_weight = tl.where(is_query, tl.load(q_norm + partner), tl.load(k_norm + partner)).to(tl.float32)
    # Round where the reference rounds: after the norm, after its weight, after the rotation.
    normed = ((x32 * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    turned = ((other * scale).to(dtype).to(tl.float32) * other_weight).to(dtype).to(tl.float32)
    is_turned = dim < 2 * HALF
    f = dim % HALF
    c = tl.load(cos + token * HALF + f, mask=is_turned, other=1.0)
    s = tl.load(sin + token * HALF + f, mask=is_turned, other=0.0)
    s = tl.where(dim < HALF, -s, s)
    y = (normed * c + turned * s).to(dtype)
    if PAGE > 0:
        # `rows` holds request lengths; the token is the request's last one.
        last = tl.maximum(tl.load(rows + token), 1) - 1
        row = tl.load(page_table + token * table_width + last // PAGE).to(tl.int64) * PAGE + last % PAGE
    else:
        row = tl.load(rows + token)
    tl.store(q_out + (token * NUM_HEADS + head) * SIZE + dim, y, mask=is_query)
    tl.store(k_pages + (row * KV_HEADS + head - NUM_HEADS) * SIZE + dim, y, mask=is_key)
    tl.store(v_pages + (row * KV_HEADS + head - NUM_HEADS - KV_HEADS) * SIZE + dim, x, mask=is_value)


@torch.library.triton_op("mingc::norm_rope_write", mutates_args={"k_pages", "v_pages"})
def norm_rope_write(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    eps: float,
) -> Tensor:
    """See `mingc.kernels.norm_rope_write`."""
    return launch(qkv, q_norm, k_norm, cos, sin, rows, k_pages, v_pages, eps)


def launch(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    eps: float,
    *,
    page_table: Tensor | None = None,
    page_size: int = 0,
) -> Tensor:
    """Launch the kernel within another operation; with `page_table` (T, P), `rows` are request lengths."""
    tokens, all_heads, size = qkv.shape
    kv_heads = k_pages.shape[1]
    heads = all_heads - 2 * kv_heads
    q = torch.empty(tokens, heads, size, dtype=qkv.dtype, device=qkv.device)
    table = rows if page_table is None else page_table
    # With few tokens a program takes two heads, to fill the GPU.
    per_program, warps = (2, 1) if tokens <= _FEW_TOKENS else (8, 2)
    torch.library.wrap_triton(mingc_norm_rope_write_pdl)[(tokens, triton.cdiv(all_heads, per_program))](
        qkv, q_norm, k_norm, cos, sin, rows, table, k_pages, v_pages, q, table.shape[-1],
        NUM_HEADS=heads, KV_HEADS=kv_heads, SIZE=size, HALF=cos.shape[1], EPS=eps, HEADS=per_program,
        PAGE=page_size, PDL=True, num_warps=warps,
    )  # fmt: skip
    return q
