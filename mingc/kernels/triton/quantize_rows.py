"""Triton kernels that convert rows to FP8, each row with its own scale: rounded, or split into two values a number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FP8, _LARGEST = torch.float8_e4m3fn, 448.0
_BLOCK = 4096  # values of a row at a time


@triton.jit
def mingc_quantize_rows(
    x, rounded, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr
):  # fmt: skip
    """A row per program, which reads it twice: for its largest value, and to round it, as `quantize_fp8` does."""
    place = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        values = tl.load(x + row * WIDTH + start + place, mask=start + place < WIDTH, other=0.0)
        largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
    most = tl.max(largest, 0)
    scale = tl.where(most > 0, tl.div_rn(most, LARGEST), 1.0)
    tl.store(scales + row, scale)
    for start in range(0, WIDTH, BLOCK):
        mask = start + place < WIDTH
        values = tl.load(x + row * WIDTH + start + place, mask=mask, other=0.0).to(tl.float32)
        shrunk = tl.clamp(tl.div_rn(values, scale), -LARGEST, LARGEST)
        tl.store(rounded + row * WIDTH + start + place, shrunk.to(rounded.dtype.element_ty), mask=mask)


@triton.jit
def mingc_split_rows(x, parts, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Split bfloat16 rows: x (M, WIDTH) = (parts[:, 0] + parts[:, 1]) * scales, with parts (M, 2, WIDTH) in FP8.

    Scales are powers of two, and each of the two FP8 values holds 4 of the 8 significant bits of a bfloat16 number. The
    sum is therefore exact, except that numbers below 1/512 of the row's largest are rounded by up to 2^-16 of that one.
    """
    place = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    mask = place < WIDTH
    values = tl.load(x + row * WIDTH + place, mask=mask, other=0.0).to(tl.float32)
    power = (tl.max(tl.abs(values), 0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(power > 1e-30, power / 128, 1.0)  # the largest value becomes 128 to 256
    tl.store(scales + row, scale)
    values = values / scale
    # Not `.to(FP8).to(float32)`: ptxas of CUDA 12.8 reads the wrong register for some of the values.
    high = ((values.to(tl.int32, bitcast=True) + 0x80000) & -0x100000).to(tl.float32, bitcast=True)
    dtype = parts.dtype.element_ty
    tl.store(parts + row * (2 * WIDTH) + place, high.to(dtype), mask=mask)
    tl.store(parts + row * (2 * WIDTH) + WIDTH + place, (values - high).to(dtype), mask=mask)


@torch.library.triton_op("mingc::quantize_rows", mutates_args={})
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, K) → float8_e4m3fn (M, K), scale (M, 1) float32."""
    rows, width = x.shape
    rounded = torch.empty(rows, width, dtype=_FP8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    torch.library.wrap_triton(mingc_quantize_rows)[(rows,)](
        x, rounded, scales, WIDTH=width, BLOCK=block, LARGEST=_LARGEST, num_warps=8
    )
    return rounded, scales


def split_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, K) contiguous bfloat16 → float8_e4m3fn (M, 2, K), scale (M,) float32; see `mingc_split_rows`."""
    rows, width = x.shape
    parts = torch.empty(rows, 2, width, dtype=_FP8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    torch.library.wrap_triton(mingc_split_rows)[(rows,)](
        x, parts, scales, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4
    )
    return parts, scales
