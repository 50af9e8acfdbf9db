"""Triton kernels of `mingc.kernels.router`: router logits as a split GEMM, then group-limited top-k."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.kernels.triton.pdl import enable_pdl

_MAX_SPLIT_TOKENS = 64  # beyond, blocks of tokens alone fill the GPU


@triton.jit
def mingc_router_logits(
    x, weight, gate_index, partial, T,
    D: tl.constexpr, E: tl.constexpr, GATES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Partial logits x (T, D) @ weight[gate] (GATES, E, D) over D / SPLITS inputs: partial (SPLITS, T, E) float32."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    is_token = m < T
    length: tl.constexpr = D // SPLITS
    xs = x + m[:, None] * D + split * length + k[None, :]
    ws = weight + n[None, :] * D + split * length + k[:, None]
    logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if GATES == 1:
        for start in range(0, length, BLOCK_K):
            a = tl.load(xs + start, mask=is_token[:, None], other=0.0)
            logits = tl.dot(a, tl.load(ws + start), logits)
    else:
        gate = tl.load(gate_index + m, mask=is_token, other=-1)
        for each in tl.static_range(GATES):
            is_wanted = gate == each
            # Most blocks contain tokens of one modality.
            if tl.max(is_wanted.to(tl.int32), 0) > 0:
                total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for start in range(0, length, BLOCK_K):
                    a = tl.load(xs + start, mask=is_token[:, None], other=0.0)
                    total = tl.dot(a, tl.load(ws + each * E * D + start), total)
                logits = tl.where(is_wanted[:, None], total, logits)
    tl.store(partial + (split * T + m[:, None]) * E + n[None, :], logits, mask=is_token[:, None])


@triton.jit
def mingc_router_topk_pdl(
    partial, bias, gate_index, ids, weights, T, scale,
    E: tl.constexpr, GATES: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, K: tl.constexpr,
    K_PADDED: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Top-k experts of the best groups by biased sigmoid score, and their weights; ties go to the lower index."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, E)
    is_token = m < T
    zero = enable_pdl(PDL)
    logits = tl.zeros([ROWS, E], tl.float32)
    for split in tl.static_range(SPLITS):
        logits += tl.load(
            partial + zero + (split * T + m[:, None]) * E + e[None, :], mask=is_token[:, None], other=0.0
        )
    scores = tl.sigmoid(logits)
    if GATES == 1:
        biased = scores + tl.load(bias + e)[None, :]
    else:
        gate = tl.load(gate_index + m, mask=is_token, other=0)
        biased = scores + tl.load(bias + gate[:, None] * E + e[None, :])
    if KEPT < GROUPS:
        grouped = tl.reshape(biased, [ROWS, GROUPS, E // GROUPS])
        best = tl.max(grouped, 2)
        is_best = grouped == best[:, :, None]
        second = tl.max(tl.where(is_best, float("-inf"), grouped), 2)
        second = tl.where(tl.sum(is_best.to(tl.int32), 2) > 1, best, second)
        rank = best + second
        g = tl.arange(0, GROUPS)
        is_ahead = (rank[:, None, :] > rank[:, :, None]) | (
            (rank[:, None, :] == rank[:, :, None]) & (g[None, None, :] < g[None, :, None])
        )
        is_kept = tl.sum(is_ahead.to(tl.int32), 2) < KEPT
        grouped = tl.where(is_kept[:, :, None], grouped, float("-inf"))
        biased = tl.reshape(grouped, [ROWS, E])
    # Score as an order-preserving integer in the high bits, index in the low bits: one maximum finds both.
    bits = biased.to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * 4294967296 + (E - 1 - e).to(tl.int64)[None, :]
    place = tl.arange(0, K_PADDED)
    selected = tl.zeros([ROWS, K_PADDED], tl.float32)
    for each in tl.static_range(K):
        best_key = tl.max(keys, 1)
        expert = E - 1 - (best_key & 0xFFFFFFFF)
        is_it = e[None, :] == expert[:, None]
        score = tl.sum(tl.where(is_it, scores, 0.0), 1)
        keys = tl.where(is_it, -9223372036854775807, keys)
        selected = tl.where((place == each)[None, :], score[:, None], selected)
        tl.store(ids + zero + m * K + each, expert, mask=is_token)
    selected = selected * (scale / (tl.sum(selected, 1) + 1e-20))[:, None]
    mask = is_token[:, None] & (place < K)[None, :]
    tl.store(weights + zero + m[:, None] * K + place[None, :], selected, mask=mask)


@torch.library.triton_op("mingc::route_hidden", mutates_args={})
def route_hidden(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gate_index: Tensor | None,
    num_groups: int,
    num_kept_groups: int,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `mingc.kernels.router`. D must be a multiple of 128, E and `num_groups` powers of two."""
    (tokens, hidden_size), (gates, experts) = x.shape, weight.shape[:2]
    if gate_index is None:
        gates = 1
    splits = 1
    if tokens <= _MAX_SPLIT_TOKENS:
        splits = math.gcd(8, hidden_size // 128)
        bm, bn, bk = max(16, triton.next_power_of_2(tokens)), min(32, experts), 128
    else:
        bm, bn, bk = 64, min(64, experts), 64
    partial = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
    which = bias if gate_index is None else gate_index
    torch.library.wrap_triton(mingc_router_logits)[(triton.cdiv(tokens, bm), experts // bn, splits)](
        x, weight, which, partial, tokens, D=hidden_size, E=experts, GATES=gates, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk,
        SPLITS=splits, num_warps=4, num_stages=4,
    )  # fmt: skip
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=x.device)
    rows = 1 if tokens <= _MAX_SPLIT_TOKENS else 4
    torch.library.wrap_triton(mingc_router_topk_pdl)[(triton.cdiv(tokens, rows),)](
        partial, bias, which, ids, weights, tokens, scale, E=experts, GATES=gates, GROUPS=num_groups,
        KEPT=num_kept_groups, K=top_k, K_PADDED=triton.next_power_of_2(top_k), SPLITS=splits,
        ROWS=rows, PDL=True, num_warps=rows,
    )  # fmt: skip
    return ids, weights
