"""Triton kernel of `mingc.kernels.linear` for one or two rows: a memory-bound GEMV with norm, activation and residual.

A program loads all its weight rows before anything else. The norm is nearly free: its weight is multiplied into each
row, and every program computes the row's scale from the values it multiplies anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.artifacts.target import FusedNormGemvConfig, Target
from mingc.host.machine import gpu_target
from mingc.kernels.triton.linear import ACTIVATIONS, SWIGLU
from mingc.kernels.triton.pdl import enable_pdl

__all__ = ["ACTIVATIONS", "fused_norm_gemv"]

_WARP_VALUES = 32 * 8  # weight values that a warp loads at once
_MAX_PIECES = 20  # of K: all weights of a program are in registers at once


@triton.jit
def mingc_fused_norm_gemv_pdl(
    x, norm, weight, weight_scale, bias, residual, out,
    EPS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HAS_NORM: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (M, N) = activation(norm(x (M, K)) @ weightᵀ + bias) + residual; SWIGLU's `weight` has 2 N rows."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    at = weight + n[:, None] * K + k[None, :]
    # One copy of the row for each weight row: another layout would go through shared memory.
    across = tl.zeros([BLOCK_N, 1], tl.int32) + k[None, :]
    weights: tl.tuple = ()
    ups: tl.tuple = ()
    for begin in tl.static_range(0, K, BLOCK_K):
        is_held = (begin + k < K)[None, :]
        # Weights are read once: keep the cache for data that is read again.
        part = tl.load(at + begin, mask=is_held, other=0.0, eviction_policy="evict_first")
        weights = weights + (part,)  # noqa: RUF005 - Triton unpacks nothing
        if ACTIVATION == 2:
            part = tl.load(at + N * K + begin, mask=is_held, other=0.0, eviction_policy="evict_first")
            ups = ups + (part,)  # noqa: RUF005
    zero = enable_pdl(PDL)
    for each in tl.static_range(ROWS):
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        if ACTIVATION == 2:
            up_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        squares = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for piece in tl.static_range(0, (K + BLOCK_K - 1) // BLOCK_K):
            is_held = (piece * BLOCK_K + k < K)[None, :]
            row = tl.load(x + zero + each * K + piece * BLOCK_K + across, mask=is_held, other=0.0).to(
                tl.float32
            )
            if HAS_NORM:
                squares += row * row
                row *= tl.load(norm + piece * BLOCK_K + across, mask=is_held, other=0.0).to(tl.float32)
            sums += weights[piece].to(tl.float32) * row
            if ACTIVATION == 2:
                up_sums += ups[piece].to(tl.float32) * row
        total = tl.sum(sums, 1)
        if HAS_SCALE:
            total *= tl.load(weight_scale + n)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(squares, 1) / K + EPS)
            total *= scale
        if HAS_BIAS:
            total += tl.load(bias + n).to(tl.float32)
        if ACTIVATION == 1:
            total *= tl.sigmoid(1.5957691216057308 * (total + 0.044715 * total * total * total))
        if ACTIVATION == 2:
            up = tl.sum(up_sums, 1)
            if HAS_SCALE:
                up *= tl.load(weight_scale + N + n)
            if HAS_NORM:
                up *= scale
            total *= tl.sigmoid(total) * up
        if ADDS:
            total += tl.load(residual + zero + each * N + n).to(tl.float32)
        tl.store(out + zero + each * N + n, total.to(out.dtype.element_ty))


@torch.library.triton_op("mingc::fused_norm_gemv", mutates_args={})
def fused_norm_gemv(
    x: Tensor,
    norm: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    activation: int,
) -> Tensor:
    """activation(rms_norm(x, norm) @ weightᵀ + bias) + residual: (M, K) → (M, N).

    Arguments that are None are left out. A weight with a scale is FP8; with SWIGLU it has gate rows, then up rows.
    """
    k, n = x.shape[1], weight.shape[0] // (2 if activation == SWIGLU else 1)
    config = default_config(n, k, gpu_target(x.device))
    out = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    torch.library.wrap_triton(mingc_fused_norm_gemv_pdl)[(n // config.block_n,)](
        x, x if norm is None else norm, weight, x if weight_scale is None else weight_scale,
        x if bias is None else bias, x if residual is None else residual, out,
        EPS=eps, ROWS=x.shape[0], N=n, K=k, HAS_NORM=norm is not None, ACTIVATION=activation, HAS_BIAS=bias is not None,
        HAS_SCALE=weight_scale is not None, ADDS=residual is not None, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, PDL=True, num_warps=config.num_warps,
    )  # fmt: skip
    return out


def default_config(n: int, k: int, target: Target) -> FusedNormGemvConfig:
    """Configuration of a GEMV with a weight (n, k): the GPU's own, or one by its size."""
    measured = target.fused_norm_gemv.get((n, k))
    if measured is not None:
        return measured
    block_k = max(128, triton.next_power_of_2(triton.cdiv(k, _MAX_PIECES)))
    block_n = min(4, n & -n)
    num_warps = max(1, min(8, block_n * block_k // _WARP_VALUES))
    return FusedNormGemvConfig(block_n=block_n, block_k=block_k, num_warps=num_warps)
