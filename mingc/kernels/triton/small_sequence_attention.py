"""Triton kernel of `mingc.kernels.small_sequence_attention`: one head of a whole sequence per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def mingc_small_sequence_attention(
    qkv, cos, sin, out, num_tokens, num_heads,
    SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    row_size = num_heads * SIZE
    half: tl.constexpr = SIZE // 2
    token = tl.arange(0, TOKENS)
    is_real = token < num_tokens
    pair = tl.arange(0, half)
    row = (sequence * num_tokens + token) * (3 * row_size) + head * SIZE
    mask = is_real[:, None]
    c = tl.load(cos + token[:, None] * half + pair[None, :], mask=mask, other=0.0)
    s = tl.load(sin + token[:, None] * half + pair[None, :], mask=mask, other=0.0)
    dim = tl.arange(0, SIZE)
    place = qkv + row[:, None] + dim[None, :]
    q = tl.load(place, mask=mask, other=0.0)
    k = tl.load(place + row_size, mask=mask, other=0.0)
    v = tl.load(place + 2 * row_size, mask=mask, other=0.0)
    dtype = v.dtype
    # Even and odd dims are rotated together; the order of dims does not matter for a score.
    qe, qo = tl.split(tl.reshape(q.to(tl.float32), [TOKENS, half, 2]))
    ke, ko = tl.split(tl.reshape(k.to(tl.float32), [TOKENS, half, 2]))
    scores = tl.dot((qe * c - qo * s).to(dtype), tl.trans((ke * c - ko * s).to(dtype)))
    scores = tl.dot((qo * c + qe * s).to(dtype), tl.trans((ko * c + ke * s).to(dtype)), scores)
    scores = tl.where(is_real[None, :], scores * (SIZE**-0.5), float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(weights, 1)
    context = tl.dot(weights.to(dtype), v) / total[:, None]
    place = out + (sequence * num_tokens + token)[:, None] * row_size + head * SIZE + dim[None, :]
    tl.store(place, context.to(dtype), mask=mask)


@torch.library.triton_op("mingc::small_sequence_attention", mutates_args={})
def small_sequence_attention(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `mingc.kernels.small_sequence_attention`."""
    batch, tokens, packed = qkv.shape
    size = 2 * cos.shape[1]
    heads = packed // 3 // size
    out = torch.empty(batch, tokens, heads * size, dtype=qkv.dtype, device=qkv.device)
    torch.library.wrap_triton(mingc_small_sequence_attention)[(batch * heads,)](
        qkv, cos, sin, out, tokens, heads,
        SIZE=size, TOKENS=max(16, triton.next_power_of_2(tokens)), num_warps=4,
    )  # fmt: skip
    return out
