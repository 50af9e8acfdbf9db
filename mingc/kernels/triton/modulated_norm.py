"""Triton kernel of `mingc.kernels.modulated_norm`: one token per program, in float32 from load to store."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def mingc_modulated_norm(
    x, update, update_norm, gate, norm, scale, total, normed, num_tokens, gate_stride, scale_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """ADDS: `update` is normalized, gated and added; NORMS: the sum is normalized and scaled."""
    place = tl.arange(0, BLOCK)
    mask = place < WIDTH
    row = tl.program_id(0)
    sequence = row // num_tokens
    at = row.to(tl.int64) * WIDTH + place
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(update + at, mask=mask, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(added * added, 0) / WIDTH + EPS)
        weight = tl.load(update_norm + place, mask=mask, other=0.0).to(tl.float32)
        opening = tl.load(gate + sequence * gate_stride + place, mask=mask, other=0.0).to(tl.float32)
        opening = 2 * tl.sigmoid(2 * opening) - 1  # tanh
        rounded = (values + opening * (added * root * weight)).to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=mask)
        values = rounded.to(tl.float32)
    if NORMS:
        root = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + EPS)
        weight = tl.load(norm + place, mask=mask, other=0.0).to(tl.float32)
        factor = 1 + tl.load(scale + sequence * scale_stride + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(normed + at, (values * root * weight * factor).to(normed.dtype.element_ty), mask=mask)


def _launch(
    x: Tensor,
    update: Tensor | None,
    update_norm: Tensor | None,
    gate: Tensor | None,
    norm: Tensor | None,
    scale: Tensor | None,
    total: Tensor | None,
    normed: Tensor | None,
    eps: float,
) -> None:
    batch, tokens, width = x.shape

    def given(tensor: Tensor | None) -> Tensor:
        return x if tensor is None else tensor

    torch.library.wrap_triton(mingc_modulated_norm)[(batch * tokens,)](
        x, given(update), given(update_norm), given(gate), given(norm), given(scale), given(total), given(normed),
        tokens, given(gate).stride(0), given(scale).stride(0),
        WIDTH=width, BLOCK=triton.next_power_of_2(width), EPS=eps,
        ADDS=update is not None, NORMS=norm is not None, num_warps=8,
    )  # fmt: skip


@torch.library.triton_op("mingc::modulated_norm", mutates_args={})
def modulated_norm(x: Tensor, norm: Tensor, scale: Tensor, eps: float) -> Tensor:
    """See `mingc.kernels.modulated_norm`; `scale` may be a part of a wider row."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, None, None, norm, scale, None, normed, eps)
    return normed


@torch.library.triton_op("mingc::add_gated", mutates_args={})
def add_gated(x: Tensor, update: Tensor, update_norm: Tensor, gate: Tensor, eps: float) -> Tensor:
    """See `mingc.kernels.modulated_norm`; `gate` may be a part of a wider row."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, update, update_norm, gate, None, None, total, None, eps)
    return total


@torch.library.triton_op("mingc::add_gated_norm", mutates_args={})
def add_gated_norm(
    x: Tensor, update: Tensor, update_norm: Tensor, gate: Tensor, norm: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `mingc.kernels.modulated_norm`; `gate` and `scale` may be parts of wider rows."""
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, update, update_norm, gate, norm, scale, total, normed, eps)
    return total, normed
