"""Triton kernel of `mingc.kernels.norm_rotate_packed`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def mingc_norm_rotate_packed(
    qkv, norms, cos, sin, out, num_tokens,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, SIZE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The queries (program_id(1) = 0) or keys of one token per program."""
    row = tl.program_id(0)
    is_key = tl.program_id(1)
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    dim = tl.arange(0, SIZE)[None, :]
    pair = tl.arange(0, SIZE // 2)
    mask = (head < HEADS) & (dim < SIZE)
    source = qkv + row.to(tl.int64) * (3 * HEADS * SIZE) + is_key * (HEADS * SIZE)
    values = tl.load(source + head * SIZE + dim, mask=mask, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 1) / SIZE + EPS)[:, None]
    even, odd = tl.split(tl.reshape(values, [HEAD_BLOCK, SIZE // 2, 2]))
    at = is_key * SIZE + 2 * pair
    even *= tl.load(norms + at).to(tl.float32)[None, :]
    odd *= tl.load(norms + at + 1).to(tl.float32)[None, :]
    angle = (row % num_tokens) * (SIZE // 2) + pair
    c = tl.load(cos + angle)[None, :]
    s = tl.load(sin + angle)[None, :]
    rotated = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), [HEAD_BLOCK, SIZE])
    target = out + (is_key * tl.num_programs(0) + row).to(tl.int64) * (HEADS * SIZE)
    tl.store(target + head * SIZE + dim, rotated.to(out.dtype.element_ty), mask=mask)


@torch.library.triton_op("mingc::norm_rotate_packed", mutates_args={})
def norm_rotate_packed(qkv: Tensor, norms: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Queries and keys (2, B, T, H, d) of qkv (B, T, 3, H, d) and norms (2, d)."""
    batch, tokens, _, heads, size = qkv.shape
    out = torch.empty(2, batch, tokens, heads, size, dtype=qkv.dtype, device=qkv.device)
    torch.library.wrap_triton(mingc_norm_rotate_packed)[(batch * tokens, 2)](
        qkv, norms, cos, sin, out, tokens,
        HEADS=heads, HEAD_BLOCK=triton.next_power_of_2(heads), SIZE=size, EPS=eps, num_warps=4,
    )  # fmt: skip
    return out
