"""Triton kernel of `mingc.kernels.norm_rotate_packed`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def mingc_norm_rotate_packed(
    qkv, q_norm, k_norm, cos, sin, out, num_tokens,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, SIZE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The queries (program_id(1) = 0) or keys of one token per program."""
    row = tl.program_id(0)
    is_key = tl.program_id(1)
    head = tl.arange(0, HEAD_BLOCK)
    dim = tl.arange(0, SIZE)
    partner = dim ^ 1
    mask = (head < HEADS)[:, None] & (dim < SIZE)[None, :]
    source = qkv + row.to(tl.int64) * (3 * HEADS * SIZE) + is_key * (HEADS * SIZE) + head[:, None] * SIZE
    own = tl.load(source + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(source + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(own * own, 1) / SIZE + EPS)
    own_weight = tl.where(is_key == 1, tl.load(k_norm + dim), tl.load(q_norm + dim)).to(tl.float32)
    other_weight = tl.where(is_key == 1, tl.load(k_norm + partner), tl.load(q_norm + partner)).to(tl.float32)
    angle = (row % num_tokens) * (SIZE // 2) + dim // 2
    c = tl.load(cos + angle)
    s = tl.load(sin + angle)
    s = tl.where(dim % 2 == 0, -s, s)
    rotated = own * (own_weight * c)[None, :] + other * (other_weight * s)[None, :]
    target = out + (is_key * tl.num_programs(0) + row).to(tl.int64) * (HEADS * SIZE) + head[:, None] * SIZE
    tl.store(target + dim[None, :], (rotated * root[:, None]).to(out.dtype.element_ty), mask=mask)


@torch.library.triton_op("mingc::norm_rotate_packed", mutates_args={})
def norm_rotate_packed(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """Queries and keys (2, B, T, H, d) of qkv (B, T, 3, H, d). See `mingc.kernels.norm_rotate_packed`."""
    batch, tokens, _, heads, size = qkv.shape
    out = torch.empty(2, batch, tokens, heads, size, dtype=qkv.dtype, device=qkv.device)
    torch.library.wrap_triton(mingc_norm_rotate_packed)[(batch * tokens, 2)](
        qkv, q_norm, k_norm, cos, sin, out, tokens,
        HEADS=heads, HEAD_BLOCK=triton.next_power_of_2(heads), SIZE=size, EPS=eps, num_warps=4,
    )  # fmt: skip
    return out
