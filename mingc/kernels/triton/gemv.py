"""Products of one row on CUDA without matrix units: what counts is reading the weight once, at full speed.

A program takes some rows of the weight. It asks for them first; while they are on their way it makes the row that they
are multiplied with: the sum of the residual stream and what comes to it, and its norm. That every program makes the row
again costs less than a kernel of its own, and nothing where the weights take longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 132  # multiprocessors of an H200
_MAX_WAVES = 8  # programs a multiprocessor; with more, each takes several tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class GemvConfig:
    """A program multiplies `columns` rows of the weight at a time, `programs` of them share the work."""

    block_n: int
    block_k: int
    num_programs: int
    num_warps: int = 4


@triton.jit
def mingc_gemv(
    x, delta, norm, weight, weight_scale, sum_out, normed_out, out,
    EPS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SCALE: tl.constexpr,
    KEEPS_NORMED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out (N,) = weight (N, K) @ row. With a norm the row is norm(x + delta), and x + delta goes to `sum_out`."""
    program = tl.program_id(0)
    j = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    tiles: tl.constexpr = N // BLOCK_N
    if BLOCK_K == K:
        w = tl.load(weight + (program * BLOCK_N + j)[:, None] * K + k[None, :])
        if HAS_NORM:
            gain = tl.load(norm + k)
        row = tl.load(x + k)
        if HAS_NORM:
            dtype: tl.constexpr = x.dtype.element_ty
            row = (row.to(tl.float32) + tl.load(delta + k).to(tl.float32)).to(dtype)
            wide = row.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / K + EPS)
            # Rounded where the reference rounds: after the norm and after its weight.
            ready = ((wide * scale).to(dtype).to(tl.float32) * gain.to(tl.float32)).to(dtype)
            if program == 0:
                tl.store(sum_out + k, row)
                if KEEPS_NORMED:
                    tl.store(normed_out + k, ready)
            row = ready
        factor = row.to(tl.float32)[None, :]
        for tile in range(program, tiles, PROGRAMS):
            n = tile * BLOCK_N + j
            if tiles > PROGRAMS:
                # The next tile is on its way while this one is added up.
                is_more = tile + PROGRAMS < tiles
                ahead = tl.where(is_more, tile + PROGRAMS, tile)
                following = tl.load(weight + (ahead * BLOCK_N + j)[:, None] * K + k[None, :], mask=is_more)
            total = tl.sum(w.to(tl.float32) * factor, 1)
            if HAS_SCALE:
                total *= tl.load(weight_scale + n)
            tl.store(out + n, total.to(out.dtype.element_ty))
            if tiles > PROGRAMS:
                w = following
    else:
        for tile in range(program, tiles, PROGRAMS):
            n = tile * BLOCK_N + j
            sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
            for begin in tl.static_range(0, K, BLOCK_K):
                w = tl.load(weight + n[:, None] * K + begin + k[None, :])
                sums += w.to(tl.float32) * tl.load(x + begin + k).to(tl.float32)[None, :]
            total = tl.sum(sums, 1)
            if HAS_SCALE:
                total *= tl.load(weight_scale + n)
            tl.store(out + n, total.to(out.dtype.element_ty))


@torch.library.triton_op("mingc::gemv", mutates_args={})
def gemv(x: Tensor, weight: Tensor, weight_scale: Tensor | None) -> Tensor:
    """See `mingc.kernels.gemv`; x (1, K)."""
    columns, depth = weight.shape
    config = default_config(columns, depth, weight.dtype.itemsize, has_norm=False)
    out = torch.empty(1, columns, dtype=x.dtype, device=x.device)
    torch.library.wrap_triton(mingc_gemv)[(config.num_programs,)](
        x, x, x, weight, x if weight_scale is None else weight_scale, x, x, out,
        EPS=0.0, N=columns, K=depth, HAS_NORM=False, HAS_SCALE=weight_scale is not None, KEEPS_NORMED=False,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, PROGRAMS=config.num_programs, num_warps=config.num_warps,
    )  # fmt: skip
    return out


@torch.library.triton_op("mingc::sum_norm_linear", mutates_args={})
def sum_norm_linear(
    residual: Tensor, delta: Tensor, norm: Tensor, weight: Tensor, weight_scale: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `mingc.kernels.gemv`; residual (1, K), K a power of two."""
    columns, depth = weight.shape
    config = default_config(columns, depth, weight.dtype.itemsize, has_norm=True)
    stream = torch.empty_like(residual)
    out = torch.empty(1, columns, dtype=residual.dtype, device=residual.device)
    scale = residual if weight_scale is None else weight_scale
    torch.library.wrap_triton(mingc_gemv)[(config.num_programs,)](
        residual, delta, norm, weight, scale, stream, stream, out,
        EPS=eps, N=columns, K=depth, HAS_NORM=True, HAS_SCALE=weight_scale is not None, KEEPS_NORMED=False,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, PROGRAMS=config.num_programs, num_warps=config.num_warps,
    )  # fmt: skip
    return stream, out


# Measured on an H200 (benchmarks/NOTES-thinker.md), by (columns, depth, bytes a value).
_MEASURED: dict[tuple[int, int, int], GemvConfig] = {
    (1280, 4096, 2): GemvConfig(block_n=4, block_k=4096, num_programs=320, num_warps=4),
    (4096, 1024, 2): GemvConfig(block_n=4, block_k=1024, num_programs=1024, num_warps=4),
    (5120, 4096, 1): GemvConfig(block_n=4, block_k=4096, num_programs=1280, num_warps=4),
    (4096, 4096, 1): GemvConfig(block_n=2, block_k=4096, num_programs=2048, num_warps=4),
    (39296, 4096, 2): GemvConfig(block_n=2, block_k=4096, num_programs=528, num_warps=8),
    (157184, 4096, 1): GemvConfig(block_n=2, block_k=4096, num_programs=528, num_warps=4),
    (640, 4096, 2): GemvConfig(block_n=2, block_k=4096, num_programs=320, num_warps=4),
    (4096, 512, 2): GemvConfig(block_n=8, block_k=512, num_programs=512, num_warps=4),
    (2560, 4096, 2): GemvConfig(block_n=2, block_k=4096, num_programs=528, num_warps=8),
    (4096, 2048, 2): GemvConfig(block_n=2, block_k=2048, num_programs=528, num_warps=4),
}


def default_config(columns: int, depth: int, item: int, *, has_norm: bool) -> GemvConfig:
    """How a product of `columns` outputs and `depth` inputs of `item` bytes is cut."""
    measured = _MEASURED.get((columns, depth, item))
    if measured is not None:
        return measured
    bk = depth if has_norm else min(4096, depth & -depth)
    bn = min(max(1, 32768 // (bk * item)), columns & -columns)
    tiles = columns // bn
    return GemvConfig(
        block_n=bn, block_k=bk, num_programs=tiles if tiles <= _PROGRAMS * _MAX_WAVES else _PROGRAMS * 4
    )
