"""Triton kernel of `mingc.kernels.gemv`: a memory-bound GEMV that can include residual sum and norm.

A program starts to load its weight rows before the kernel in front of it has ended, and computes the input row,
residual sum and norm, while they arrive. Repeating this in every program costs less than a separate kernel, and nothing
where loading the weights takes longer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.artifacts.target import GemvConfig, Target
from mingc.host.machine import gpu_target
from mingc.kernels.triton.pdl import enable_pdl

_MAX_WAVES = 8  # programs a multiprocessor; beyond, each program takes several tiles


@triton.jit
def mingc_gemv_pdl(
    x, delta, norm, weight, weight_scale, sum_out, normed_out, out,
    EPS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SCALE: tl.constexpr,
    KEEPS_NORMED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out (N,) = weight (N, K) @ row. With a norm the row is norm(x + delta), and x + delta is stored in `sum_out`."""
    program = tl.program_id(0)
    j = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    tiles: tl.constexpr = N // BLOCK_N
    if BLOCK_K == K:
        w = tl.load(weight + (program * BLOCK_N + j)[:, None] * K + k[None, :])
        if HAS_NORM:
            gain = tl.load(norm + k)
        if HAS_SCALE:
            factors = tl.load(weight_scale + program * BLOCK_N + j)
        zero = enable_pdl(PDL)
        row = tl.load(x + zero + k)
        if HAS_NORM:
            dtype: tl.constexpr = x.dtype.element_ty
            row = (row.to(tl.float32) + tl.load(delta + zero + k).to(tl.float32)).to(dtype)
            row32 = row.to(tl.float32)
            scale = tl.rsqrt(tl.sum(row32 * row32, 0) / K + EPS)
            # Round where the reference rounds: after the norm and after its weight.
            ready = ((row32 * scale).to(dtype).to(tl.float32) * gain.to(tl.float32)).to(dtype)
            if program == 0:
                tl.store(sum_out + zero + k, row)
                if KEEPS_NORMED:
                    tl.store(normed_out + zero + k, ready)
            row = ready
        factor = row.to(tl.float32)[None, :]
        for tile in range(program, tiles, PROGRAMS):
            n = tile * BLOCK_N + j
            if tiles > PROGRAMS:
                # Prefetch the next tile.
                is_more = tile + PROGRAMS < tiles
                ahead = tl.where(is_more, tile + PROGRAMS, tile)
                following = tl.load(weight + (ahead * BLOCK_N + j)[:, None] * K + k[None, :], mask=is_more)
            total = tl.sum(w.to(tl.float32) * factor, 1)
            if HAS_SCALE:
                if tiles > PROGRAMS:
                    factors = tl.load(weight_scale + n)
                total *= factors
            tl.store(out + zero + n, total.to(out.dtype.element_ty))
            if tiles > PROGRAMS:
                w = following
    else:
        zero = enable_pdl(PDL)
        for tile in range(program, tiles, PROGRAMS):
            n = tile * BLOCK_N + j
            sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
            for begin in tl.static_range(0, K, BLOCK_K):
                w = tl.load(weight + n[:, None] * K + begin + k[None, :])
                sums += w.to(tl.float32) * tl.load(x + zero + begin + k).to(tl.float32)[None, :]
            total = tl.sum(sums, 1)
            if HAS_SCALE:
                total *= tl.load(weight_scale + n)
            tl.store(out + zero + n, total.to(out.dtype.element_ty))


@torch.library.triton_op("mingc::gemv", mutates_args={})
def gemv(x: Tensor, weight: Tensor, weight_scale: Tensor | None) -> Tensor:
    """See `mingc.kernels.gemv`; x (1, K)."""
    n, k = weight.shape
    config = default_config(n, k, weight.dtype.itemsize, gpu_target(x.device), has_norm=False)
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    torch.library.wrap_triton(mingc_gemv_pdl)[(config.num_programs,)](
        x, x, x, weight, x if weight_scale is None else weight_scale, x, x, out,
        EPS=0.0, N=n, K=k, HAS_NORM=False, HAS_SCALE=weight_scale is not None, KEEPS_NORMED=False,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, PROGRAMS=config.num_programs, PDL=True,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out


@torch.library.triton_op("mingc::sum_norm_linear", mutates_args={})
def sum_norm_linear(
    residual: Tensor, delta: Tensor, norm: Tensor, weight: Tensor, weight_scale: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `mingc.kernels.gemv`; residual (1, K), K a power of two."""
    n, k = weight.shape
    config = default_config(n, k, weight.dtype.itemsize, gpu_target(weight.device), has_norm=True)
    stream = torch.empty_like(residual)
    out = torch.empty(1, n, dtype=residual.dtype, device=residual.device)
    scale = residual if weight_scale is None else weight_scale
    torch.library.wrap_triton(mingc_gemv_pdl)[(config.num_programs,)](
        residual, delta, norm, weight, scale, stream, stream, out,
        EPS=eps, N=n, K=k, HAS_NORM=True, HAS_SCALE=weight_scale is not None, KEEPS_NORMED=False,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, PROGRAMS=config.num_programs, PDL=True,
        num_warps=config.num_warps,
    )  # fmt: skip
    return stream, out


def default_config(n: int, k: int, itemsize: int, target: Target, *, has_norm: bool) -> GemvConfig:
    """Configuration of a GEMV with a weight (n, k) of `itemsize` bytes a value: the GPU's own, or one by its size."""
    measured = target.gemv.get((n, k, itemsize))
    if measured is not None:
        return measured
    block_k = k if has_norm else min(4096, k & -k)
    block_n = min(max(1, 32768 // (block_k * itemsize)), n & -n)
    tiles = n // block_n
    is_one_wave = tiles <= target.num_multiprocessors * _MAX_WAVES
    return GemvConfig(
        block_n=block_n,
        block_k=block_k,
        num_programs=tiles if is_one_wave else target.num_multiprocessors * 4,
    )
