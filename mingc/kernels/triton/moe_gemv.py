"""Triton kernels of `mingc.kernels.moe_gemv`: the mixture-of-experts half of a layer for one token, in three kernels.

The first computes residual sum, norm and router logits. Top-k is so little work that every program of the experts'
first GEMV repeats it up to its own expert, instead of a separate kernel. The second GEMV is in `moe_decode`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.kernels.triton.gemv import mingc_gemv_pdl
from mingc.kernels.triton.moe_config import MoeProblem, select_config
from mingc.kernels.triton.moe_decode import mingc_expert_gemv_down_pdl
from mingc.kernels.triton.pdl import enable_pdl
from mingc.kernels.triton.weight_formats import activate, shift_to, weight_format_of

_ROUTER_BLOCK_N = 2  # experts of a program: there are few


@triton.jit
def _eligible(biased, E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """Biased scores (E,), -inf outside the best groups; a group's score is the sum of its two best."""
    if KEPT < GROUPS:
        grouped = tl.reshape(biased, [GROUPS, E // GROUPS])
        best = tl.max(grouped, 1)
        is_best = grouped == best[:, None]
        second = tl.max(tl.where(is_best, float("-inf"), grouped), 1)
        second = tl.where(tl.sum(is_best.to(tl.int32), 1) > 1, best, second)
        rank = best + second
        g = tl.arange(0, GROUPS)
        is_ahead = (rank[None, :] > rank[:, None]) | (
            (rank[None, :] == rank[:, None]) & (g[None, :] < g[:, None])
        )
        is_kept = tl.sum(is_ahead.to(tl.int32), 1) < KEPT
        biased = tl.reshape(tl.where(is_kept[:, None], grouped, float("-inf")), [E])
    return biased


@triton.jit
def _dot_rows(gates, gate_weights, up_weights, x, D: tl.constexpr, F: tl.constexpr, BLOCK_K: tl.constexpr):
    """Gate and up values of some rows, whose first BLOCK_K weights are loaded."""
    k = tl.arange(0, BLOCK_K)
    a = tl.load(x + k).to(tl.float32)[None, :]
    gate = gate_weights.to(tl.float32) * a
    up = up_weights.to(tl.float32) * a
    for begin in tl.static_range(BLOCK_K, D, BLOCK_K):
        a = tl.load(x + begin + k).to(tl.float32)[None, :]
        gate += tl.load(gates + begin).to(tl.float32) * a
        up += tl.load(gates + F * D + begin).to(tl.float32) * a
    return tl.sum(gate, 1), tl.sum(up, 1)


@triton.jit
def mingc_moe_gemv_up_pdl(
    x, logits, bias, ids, weights, gate_up, gate_up_scale, shared, shared_scale, hidden, scale,
    E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, HAS_SHARED: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Top-k routing, then `mingc_expert_gemv_up` of the selected experts; row K of `hidden` is the shared expert's.

    The shared expert's programs come first: they load weights before the wait. Ties go to the lower index. One program
    stores the routing: ids (K,) int64 and weights (K,) float32.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    pair = tl.program_id(1) - (1 if HAS_SHARED else 0)
    is_shared = pair < 0
    tile = n[:, None] * D + k[None, :]
    expert = tl.zeros([], tl.int64)
    if is_shared:
        gate_weights = tl.load(shared + tile)
        up_weights = tl.load(shared + tile + F * D)
        zero = enable_pdl(PDL)
        gate, up = _dot_rows(shared + tile, gate_weights, up_weights, x + zero, D, F, BLOCK_K)
    else:
        e = tl.arange(0, E)
        biases = tl.load(bias + e)
        zero = enable_pdl(PDL)
        scores = tl.sigmoid(tl.load(logits + zero + e))
        biased = _eligible(scores + biases, E, GROUPS, KEPT)
        # Score as an order-preserving integer in the high bits, index in the low bits: one maximum finds both.
        bits = biased.to(tl.int32, bitcast=True)
        keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * 4294967296 + (E - 1 - e).to(tl.int64)
        if (pair == K - 1) & (tl.program_id(0) == 0):
            place = tl.arange(0, K_PADDED)
            selected = tl.zeros([K_PADDED], tl.float32)
            selected_ids = tl.zeros([K_PADDED], tl.int64)
            left = keys
            for each in range(0, K):
                best = tl.max(left, 0)
                is_it = left == best
                selected = tl.where(place == each, tl.sum(tl.where(is_it, scores, 0.0), 0), selected)
                selected_ids = tl.where(place == each, E - 1 - (best & 0xFFFFFFFF), selected_ids)
                left = tl.where(is_it, -9223372036854775807, left)
            tl.store(ids + zero + place, selected_ids, mask=place < K)
            total = tl.sum(selected, 0) + 1e-20
            tl.store(weights + zero + place, selected * (scale / total), mask=place < K)
        for _ in range(0, pair):
            keys = tl.where(keys == tl.max(keys, 0), -9223372036854775807, keys)
        expert = E - 1 - (tl.max(keys, 0) & 0xFFFFFFFF)
        gates = gate_up + expert * (2 * F * D) + tile
        gate, up = _dot_rows(gates, tl.load(gates), tl.load(gates + F * D), x + zero, D, F, BLOCK_K)
    if FORMAT == 1:
        scales = gate_up_scale + shift_to(gate_up_scale, shared_scale, is_shared, expert * (2 * F), 4) + n
        gate *= tl.load(scales)
        up *= tl.load(scales + F)
    activated = activate(gate, up, x.dtype.element_ty)
    row = tl.where(is_shared, K, pair)
    tl.store(hidden + zero + row * F + n, activated.to(hidden.dtype.element_ty))


@torch.library.triton_op("mingc::moe_gemv", mutates_args={})
def moe_gemv(
    residual: Tensor,
    delta: Tensor,
    norm: Tensor,
    gate: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    shared_gate_up_scale: Tensor | None,
    shared_down_scale: Tensor | None,
    eps: float,
    num_groups: int,
    num_kept_groups: int,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `mingc.kernels.moe_gemv`; residual (1, D), gate (G, E, D), of which the first is used."""
    hidden_size, experts = residual.shape[1], gate.shape[1]
    intermediate_size, weight_format = gate_up.shape[1] // 2, weight_format_of(gate_up)
    has_shared = shared_gate_up is not None
    num_pairs = top_k + int(has_shared)
    device, dtype = residual.device, residual.dtype
    stream, normed, out = (torch.empty_like(residual) for _ in range(3))
    logits = torch.empty(experts, dtype=torch.float32, device=device)
    programs = experts // _ROUTER_BLOCK_N
    torch.library.wrap_triton(mingc_gemv_pdl)[(programs,)](
        residual, delta, norm, gate, residual, stream, normed, logits,
        EPS=eps, N=experts, K=hidden_size, HAS_NORM=True, HAS_SCALE=False, KEEPS_NORMED=True,
        BLOCK_N=_ROUTER_BLOCK_N, BLOCK_K=hidden_size, PROGRAMS=programs, PDL=True,
        num_warps=4,
    )  # fmt: skip
    ids = torch.empty(1, top_k, dtype=torch.int64, device=device)
    weights = torch.empty(1, top_k, dtype=torch.float32, device=device)
    hidden = torch.empty(num_pairs, intermediate_size, dtype=dtype, device=device)
    config = select_config(
        MoeProblem(
            kernel="moe_gemv", tokens=1, hidden_size=hidden_size, intermediate_size=intermediate_size, experts=experts,
            top_k=top_k, weight_format=weight_format,
        )
    )  # fmt: skip
    gemm = config.up
    torch.library.wrap_triton(mingc_moe_gemv_up_pdl)[(intermediate_size // gemm.block_n, num_pairs)](
        normed, logits, bias, ids, weights, gate_up, residual if gate_up_scale is None else gate_up_scale,
        gate_up if shared_gate_up is None else shared_gate_up,
        residual if shared_gate_up_scale is None else shared_gate_up_scale, hidden, scale,
        E=experts, GROUPS=num_groups, KEPT=num_kept_groups, K=top_k,
        K_PADDED=triton.next_power_of_2(top_k), D=hidden_size, F=intermediate_size, HAS_SHARED=has_shared,
        FORMAT=weight_format, BLOCK_N=gemm.block_n, BLOCK_K=gemm.block_k, PDL=True, num_warps=gemm.num_warps,
    )  # fmt: skip
    gemm = config.down
    torch.library.wrap_triton(mingc_expert_gemv_down_pdl)[(hidden_size // gemm.block_n,)](
        hidden, ids, weights, down, residual if down_scale is None else down_scale,
        down if shared_down is None else shared_down, residual if shared_down_scale is None else shared_down_scale,
        out, K=top_k, D=hidden_size, F=intermediate_size, HAS_SHARED=has_shared, FORMAT=weight_format,
        BLOCK_N=gemm.block_n, BLOCK_K=gemm.block_k, PDL=True, num_warps=gemm.num_warps,
    )  # fmt: skip
    return stream, out, ids, weights
