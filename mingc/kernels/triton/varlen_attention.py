"""Triton kernel of `mingc.kernels.varlen_attention`: walks the key ranges of a block of queries, without a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_MIN_DOT = 16  # dims of the smallest product of tensor cores


@dataclass(frozen=True, kw_only=True, slots=True)
class _Config:
    block_m: int  # queries of a program
    block_n: int  # keys of a step
    num_warps: int
    num_stages: int


@triton.jit
def _load_head(
    base,
    stride,
    row,
    is_held,
    FROM: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    OTHER: tl.constexpr,
):
    """Dims FROM to FROM + COUNT of the head in each row; OTHER beyond SIZE dims and in rows that are not held."""
    dim = FROM + tl.arange(0, COUNT)
    mask = is_held[:, None]
    if FROM + COUNT > SIZE:
        mask = mask & (dim < SIZE)[None, :]
    return tl.load(base + row[:, None] * stride + dim[None, :], mask=mask, other=OTHER)


@triton.jit
def _score(
    q0, q1, base, stride, key, is_key,
    MAIN: tl.constexpr, REST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Products of the queries with the keys `key`; q1 is ignored without REST."""
    k0 = _load_head(base, stride, key, is_key, 0, MAIN, SIZE, 0.0)
    scores = tl.dot(q0, tl.trans(k0))
    if REST:
        k1 = _load_head(base, stride, key, is_key, MAIN, REST, SIZE, 0.0)
        scores = tl.dot(q1, tl.trans(k1), scores)
    return scores


@triton.jit
def mingc_varlen_attention(
    q, k, v, bounds, out, num_queries, num_keys, q_stride, k_stride, v_stride, bounds_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head per program, BLOCK_N keys per step; a head is MAIN + REST dims, powers of two."""
    head = tl.program_id(1) % HEADS
    row = (tl.program_id(1) // HEADS).to(tl.int64)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_query = token < num_queries
    place = bounds + row * tl.maximum(num_queries * bounds_stride, 2)
    place += tl.minimum(token, num_queries - 1) * bounds_stride
    start = tl.load(place)
    end = tl.load(place + 1)
    q += row * num_queries * q_stride + head * SIZE
    k += row * num_keys * k_stride + head * SIZE
    v += row * num_keys * v_stride + head * SIZE
    q0 = _load_head(q, q_stride, token, is_query, 0, MAIN, SIZE, 0.0)
    q1 = q0
    context0 = tl.zeros([BLOCK_M, MAIN], tl.float32)
    if REST:
        q1 = _load_head(q, q_stride, token, is_query, MAIN, REST, SIZE, 0.0)
        context1 = tl.zeros([BLOCK_M, REST], tl.float32)
    scale: tl.constexpr = SIZE**-0.5 * 1.4426950408889634  # of a score whose weight is a power of two
    # Values have ones in the dims beyond the head, whose context is then the sum of the weights.
    SUMS: tl.constexpr = MAIN + REST > SIZE and REST > 0
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # Keys are walked from the smallest start to the largest end. Whole blocks of the keys that all queries see, from
    # the largest start to the smallest end, need no mask.
    first = tl.min(start, 0)
    last = tl.max(end, 0)
    common = tl.max(start, 0)
    num_common = tl.maximum(tl.min(end, 0) - common, 0) // BLOCK_N
    offset = tl.arange(0, BLOCK_N)
    is_whole = tl.full([BLOCK_N], 1, tl.int1)
    for block in range(0, num_common):
        key = common + block * BLOCK_N + offset
        scores = _score(q0, q1, k, k_stride, key, is_whole, MAIN, REST, SIZE)
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(top - higher)
        if not SUMS:
            total = total * shrink + tl.sum(weights, 1)
        top = higher
        v0 = _load_head(v, v_stride, key, is_whole, 0, MAIN, SIZE, 0.0)
        context0 = tl.dot(weights.to(v0.dtype), v0, context0 * shrink[:, None])
        if REST:
            v1 = _load_head(v, v_stride, key, is_whole, MAIN, REST, SIZE, 1.0)
            context1 = tl.dot(weights.to(v1.dtype), v1, context1 * shrink[:, None])

    tail = common + num_common * BLOCK_N
    num_before = tl.cdiv(common - first, BLOCK_N)
    for block in range(0, num_before + tl.cdiv(last - tail, BLOCK_N)):
        is_before = block < num_before
        key = tl.where(is_before, first + block * BLOCK_N, tail + (block - num_before) * BLOCK_N) + offset
        is_key = key < tl.where(is_before, common, last)
        scores = _score(q0, q1, k, k_stride, key, is_key, MAIN, REST, SIZE)
        is_seen = is_key[None, :] & (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])
        scores = tl.where(is_seen, scores * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen no key yet has its maximum at -inf, which cannot be subtracted.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(top - reference)
        if not SUMS:
            total = total * shrink + tl.sum(weights, 1)
        top = higher
        v0 = _load_head(v, v_stride, key, is_key, 0, MAIN, SIZE, 0.0)
        context0 = tl.dot(weights.to(v0.dtype), v0, context0 * shrink[:, None])
        if REST:
            v1 = _load_head(v, v_stride, key, is_key, MAIN, REST, SIZE, 1.0)
            context1 = tl.dot(weights.to(v1.dtype), v1, context1 * shrink[:, None])

    if SUMS:
        total = tl.sum(tl.where((tl.arange(0, REST) == SIZE - MAIN)[None, :], context1, 0.0), 1)
    out += row * num_queries * (HEADS * SIZE) + head * SIZE
    target = out + token[:, None] * (HEADS * SIZE)
    dim = tl.arange(0, MAIN)
    mask = is_query[:, None] & (dim < SIZE)[None, :]
    tl.store(target + dim[None, :], (context0 / total[:, None]).to(q0.dtype), mask=mask)
    if REST:
        dim = MAIN + tl.arange(0, REST)
        mask = is_query[:, None] & (dim < SIZE)[None, :]
        tl.store(target + dim[None, :], (context1 / total[:, None]).to(q0.dtype), mask=mask)


@torch.library.triton_op("mingc::varlen_attention", mutates_args={})
def varlen_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """See `mingc.kernels.varlen_attention`; `bounds` (B, S, 2) int32 in place of the segments."""
    rows, queries, heads, size = q.shape
    main = _main_size(size)
    rest = 0 if size == main else max(_MIN_DOT, triton.next_power_of_2(size - main))
    config = _config(queries, has_rest=rest > 0)
    out = torch.empty(rows, queries, heads, size, dtype=q.dtype, device=q.device)
    torch.library.wrap_triton(mingc_varlen_attention)[(triton.cdiv(queries, config.block_m), rows * heads)](
        q, k, v, bounds, out, queries, k.shape[1], q.stride(1), k.stride(1), v.stride(1),
        2 if bounds.shape[1] > 1 else 0,
        HEADS=heads, SIZE=size, MAIN=main, REST=rest, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _config(queries: int, *, has_rest: bool) -> _Config:
    """Configuration for a sequence of `queries`; few queries need small blocks to fill the device.

    Measured on an H100 and an H200 (benchmarks/NOTES-encoders.md).

    Args:
        has_rest: heads are split into two parts (MAIN and REST), as in the vision encoder.
    """
    if queries <= 256:
        return _Config(block_m=64, block_n=64, num_warps=4, num_stages=3)
    if queries <= 512:
        return _Config(block_m=64, block_n=128, num_warps=4, num_stages=2)
    if queries <= 1024:
        if has_rest:
            return _Config(block_m=128, block_n=128, num_warps=8, num_stages=3)
        return _Config(block_m=64, block_n=64, num_warps=4, num_stages=3)
    if queries <= 2048:
        return _Config(block_m=128, block_n=64, num_warps=8, num_stages=3)
    return _Config(block_m=128, block_n=64, num_warps=4, num_stages=3)


def _main_size(size: int) -> int:
    """The largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)
