"""Triton kernel of `mingc.kernels.layer_norm`: residual sum and layer norm of one row per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def mingc_add_layer_norm(
    x, update, weight, bias, total, normed,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, BLOCK)
    mask = place < WIDTH
    row = tl.program_id(0).to(tl.int64) * WIDTH + place
    added = tl.load(x + row, mask=mask, other=0.0).to(tl.float32)
    added += tl.load(update + row, mask=mask, other=0.0).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + row, rounded, mask=mask)
    values = rounded.to(tl.float32)
    centered = tl.where(mask, values - tl.sum(values, 0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 0) / WIDTH + EPS)
    w = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(bias + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row, (centered * scale * w + b).to(normed.dtype.element_ty), mask=mask)


@torch.library.triton_op("mingc::add_layer_norm", mutates_args={})
def add_layer_norm(
    x: Tensor, update: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `mingc.kernels.layer_norm`."""
    width = x.shape[-1]
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    torch.library.wrap_triton(mingc_add_layer_norm)[(x.numel() // width,)](
        x, update, weight, bias, total, normed,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), EPS=eps, num_warps=4,
    )  # fmt: skip
    return total, normed
