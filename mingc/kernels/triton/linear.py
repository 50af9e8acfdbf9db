"""Triton kernel of `mingc.kernels.linear`: a GEMM with the norm before it and the residual sum after it.

The norm is nearly free: the row's scale is applied to the accumulator, and the kernel that wrote the row also stored
its sums of squares, one per tile. FP8 weights (`mingc.kernels.quantized`) are converted as they are loaded, and their
row scales are applied to the accumulator. When there are too few tiles to fill the GPU, K is split; the last program of
a tile to finish sums the parts in a fixed order, so the result does not depend on which program that is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.artifacts.target import LinearConfig, Target
from mingc.host.machine import gpu_target
from mingc.kernels.triton.weight_formats import FP16_SCALE

NUM_COUNTERS = 4096
NONE, GELU, SWIGLU = 0, 1, 2
ACTIVATIONS = {"none": NONE, "gelu": GELU, "swiglu": SWIGLU}


@triton.jit
def mingc_linear(
    x, squares, weight, weight_scale, bias, residual, norm, out, scaled, squares_out, partial, counters,
    M, EPS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = (tile % num_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile // num_m
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = m < M
    safe = tl.where(is_row, m, 0)
    if PARTS > 0:
        part = tl.arange(0, PARTS_PADDED)
        sums = tl.load(
            squares + safe[:, None] * PARTS + part[None, :], mask=(part < PARTS)[None, :], other=0.0
        )
        scale = tl.rsqrt(tl.sum(sums, 1) / K + EPS)
    k = tl.arange(0, BLOCK_K)
    length: tl.constexpr = K // SPLITS
    xs = x + safe[:, None] * K + split * length + k[None, :]
    ws = weight + n[None, :] * K + split * length + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if ACTIVATION == 2:
        ups = ws + N * K
        second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, length, BLOCK_K):
        a = tl.load(xs + start)
        if HAS_SCALE:
            a = tl.clamp(a.to(tl.float32) * (1 / FP16_SCALE), -65504.0, 65504.0).to(tl.float16)
        total = tl.dot(a, tl.load(ws + start).to(a.dtype), total)
        if ACTIVATION == 2:
            second = tl.dot(a, tl.load(ups + start).to(a.dtype), second)

    mask = is_row[:, None]
    place = safe[:, None] * N + n[None, :]
    is_last = True
    if SPLITS > 1:
        tl.store(partial + split * M * N + place, total, mask=mask)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(counters + tile, 0)
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in range(SPLITS):
                total += tl.load(partial + other * M * N + place, mask=mask, other=0.0, cache_modifier=".cg")
    if is_last:
        if HAS_SCALE:
            total = total * (tl.load(weight_scale + n) * FP16_SCALE)[None, :]
            if ACTIVATION == 2:
                second = second * (tl.load(weight_scale + N + n) * FP16_SCALE)[None, :]
        if PARTS > 0:
            total = total * scale[:, None]
        if HAS_BIAS:
            total += tl.load(bias + n).to(tl.float32)[None, :]
        if ACTIVATION == 1:
            inner = 1.5957691216057308 * (total + 0.044715 * total * total * total)
            total = total * tl.sigmoid(inner)
        if ACTIVATION == 2:
            total = total * tl.sigmoid(total) * (second * scale[:, None])
        if ADDS:
            total += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(out.dtype.element_ty)
        tl.store(out + place, rounded, mask=mask)
        if ADDS:
            rounded32 = rounded.to(tl.float32)
            weighted = rounded32 * tl.load(norm + n).to(tl.float32)[None, :]
            tl.store(scaled + place, weighted.to(scaled.dtype.element_ty), mask=mask)
            tl.store(
                squares_out + safe * (N // BLOCK_N) + column, tl.sum(rounded32 * rounded32, 1), mask=is_row
            )


@torch.library.triton_op("mingc::normed_linear", mutates_args={})
def normed_linear(
    x: Tensor,
    squares: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: int,
) -> Tensor:
    """activation(norm(x) @ weightᵀ + bias): x (M, K) → (M, N).

    x is already multiplied by the norm's weight; `squares` (M, parts) float32 are its sums of squares. Without squares
    there is no norm. A weight with a scale is FP8.
    """
    (rows, k), n = x.shape, weight.shape[0] // (2 if activation == SWIGLU else 1)
    config = default_config(rows, n, k, gpu_target(x.device), adds=False)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    parts = 0 if squares is None else squares.shape[1]
    torch.library.wrap_triton(mingc_linear)[(triton.cdiv(rows, config.block_m) * (n // config.block_n), 1)](
        x, x if squares is None else squares, weight, x if weight_scale is None else weight_scale,
        x if bias is None else bias, x, x, out, x, x, x, x, rows, EPS=eps,
        N=n, K=k, PARTS=parts, PARTS_PADDED=triton.next_power_of_2(max(1, parts)), ACTIVATION=activation,
        HAS_BIAS=bias is not None, HAS_SCALE=weight_scale is not None, ADDS=False,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=1,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


@torch.library.triton_op("mingc::add_linear", mutates_args={"counters"})
def add_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    counters: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """residual (M, N) + x (M, K) @ weightᵀ + bias, and what the next norm needs.

    `counters` are zeros before and after. A weight with a scale is FP8.

    Returns: the sum (M, N), the sum times `norm` (M, N), its sums of squares by tile (M, parts) float32.
    """
    (rows, k), n = x.shape, weight.shape[0]
    config = default_config(rows, n, k, gpu_target(x.device), adds=True)
    out, scaled = (torch.empty(rows, n, dtype=x.dtype, device=x.device) for _ in range(2))
    squares = torch.empty(rows, n // config.block_n, dtype=torch.float32, device=x.device)
    partial = squares
    if config.split_k > 1:
        partial = torch.empty(config.split_k, rows, n, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, config.block_m) * (n // config.block_n), config.split_k)
    torch.library.wrap_triton(mingc_linear)[grid](
        x, x, weight, x if weight_scale is None else weight_scale, x if bias is None else bias,
        residual, norm, out, scaled, squares, partial, counters,
        rows, EPS=0.0, N=n, K=k, PARTS=0, PARTS_PADDED=1, ACTIVATION=NONE,
        HAS_BIAS=bias is not None, HAS_SCALE=weight_scale is not None, ADDS=True,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.split_k,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, scaled, squares


def default_config(rows: int, n: int, k: int, target: Target, *, adds: bool) -> LinearConfig:
    """Configuration of `rows` rows times a weight (n, k): the GPU's own, or enough tiles to fill it.

    Only with `adds` may the inputs be split.
    """
    block_m = min(128, max(16, triton.next_power_of_2(rows)))
    measured = target.linear.get((rows, n, k)) or target.linear.get((block_m, n, k))
    if measured is not None and (adds or measured.split_k == 1):
        return measured
    block_n = 32 if n % 32 == 0 else 16
    block_k = next(size for size in (128, 64, 32, 16) if k % size == 0)
    split_k = 1
    if adds:
        tiles = n // block_n * triton.cdiv(rows, block_m)
        while tiles * split_k <= target.num_multiprocessors * 3 // 4 and k // block_k % (2 * split_k) == 0:
            split_k *= 2
    return LinearConfig(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        split_k=split_k,
        num_warps=8 if block_m == 128 else 4,
    )
