"""Triton kernel of `mingc.kernels.rotate_packed`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 8  # of a program
_BLOCK = 256  # values of a token


@triton.jit
def mingc_rotate_packed(
    qkv, cos, sin, out, num_tokens,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """TOKENS × BLOCK values of queries and keys per program; WIDTH values of each of them per token."""
    half: tl.constexpr = SIZE // 2
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (token < num_tokens)[:, None] & (place < 2 * WIDTH)[None, :]
    is_low = place % SIZE < half
    partner = tl.where(is_low, place + half, place - half)
    source = qkv + token.to(tl.int64)[:, None] * (3 * WIDTH)
    own = tl.load(source + place[None, :], mask=mask, other=0.0)
    other = tl.load(source + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    angle = token[:, None] * half + (place % half)[None, :]
    c = tl.load(cos + angle, mask=mask, other=0.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)
    rotated = own.to(tl.float32) * c + tl.where(is_low[None, :], -other, other) * s
    target = out + token.to(tl.int64)[:, None] * (2 * WIDTH) + place[None, :]
    tl.store(target, rotated.to(own.dtype), mask=mask)


@torch.library.triton_op("mingc::rotate_packed", mutates_args={})
def rotate_packed(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries and keys (T, 2, H, d) of qkv (T, 3, H, d), rotated. See `mingc.kernels.rotate_packed`."""
    tokens, _, heads, size = qkv.shape
    width = heads * size
    out = torch.empty(tokens, 2, heads, size, dtype=qkv.dtype, device=qkv.device)
    grid = (triton.cdiv(tokens, _TOKENS), triton.cdiv(2 * width, _BLOCK))
    torch.library.wrap_triton(mingc_rotate_packed)[grid](
        qkv, cos, sin, out, tokens, WIDTH=width, SIZE=size, TOKENS=_TOKENS, BLOCK=_BLOCK, num_warps=4
    )
    return out
