"""Triton kernel that rounds rows to FP8, each with its own scale: what `quantize_fp8` computes, bit for bit."""

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
    """A row per program, which reads it twice: for its largest value, and to round it."""
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
