"""Products of a pre-norm transformer: norm before, activation after, or the sum with the residual stream after.

On CUDA with few rows each is one kernel. A `ResidualState` connects them: the residual stream and what the
next one needs of it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.dispatch import use_triton
from mingc.kernels.quantized import FP8, dequantize, quantize_fp8
from mingc.kernels.rms_norm import rms_norm

Activation = Literal["none", "gelu", "swiglu"]
_MAX_FUSED_ROWS = (
    32  # beyond, the vendor's matrix products win by more than the fusions save (benchmarks/NOTES.md)
)
_FP8_MULTIPLE = 16  # inputs and outputs of a product of FP8 come in blocks of this many


class ResidualState(NamedTuple):
    """A residual stream before a norm.

    `normed` is the stream after the norm; or, when `squares` is there, the stream times the norm's weight, still to
    be divided by the root mean square that `squares` (rows, parts) float32 adds up to. With `norm`, the norm's weight,
    it is the stream itself, and the next product makes the norm.
    """

    values: Tensor
    normed: Tensor
    squares: Tensor | None
    counters: Tensor | None
    norm: Tensor | None = None


def begin_residual(x: Tensor, norm: Tensor, eps: float) -> ResidualState:
    """The stream `x` (..., D) before the norm of weight `norm` (D,)."""
    if not use_triton(x) or x.numel() // x.shape[-1] > _MAX_FUSED_ROWS:
        return ResidualState(x, rms_norm(x, norm, eps), None, None)
    if x.numel() == x.shape[-1]:
        return ResidualState(x, x, None, None, norm)
    from mingc.kernels.triton.linear import NUM_COUNTERS

    squares = x.reshape(-1, x.shape[-1]).float().square().sum(-1, keepdim=True)
    return ResidualState(x, x * norm, squares, torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=x.device))


def final_norm(rows: ResidualState, eps: float) -> Tensor:
    """The stream after its norm (..., D)."""
    if rows.norm is not None:
        return rms_norm(rows.values, rows.norm, eps)
    if rows.squares is None:
        return rows.normed
    scale = torch.rsqrt(rows.squares.sum(-1) / rows.normed.shape[-1] + eps).view(*rows.normed.shape[:-1], 1)
    return (rows.normed.float() * scale).to(rows.normed.dtype)


def normed_linear(
    rows: ResidualState,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    activation: Activation = "none",
    weight_scale: Tensor | None = None,
) -> Tensor:
    """activation(norm(rows) @ weightᵀ + bias): (..., D) → (..., N).

    `swiglu` takes gate rows then up rows of `weight` (2N, D) and gives silu(gate) * up; `gelu` is the tanh form.
    A weight with a scale is FP8 (`mingc.kernels.quantized`).
    """
    if rows.norm is not None:
        return _fused_norm_gemv(
            rows.values, weight, weight_scale, bias, norm=rows.norm, eps=eps, activation=activation
        )
    if rows.squares is not None:
        from mingc.kernels.triton import linear as gpu

        kind = gpu.ACTIVATIONS[activation]
        flat = rows.normed.reshape(-1, rows.normed.shape[-1]).contiguous()
        out: Tensor = gpu.normed_linear(flat, rows.squares, weight, weight_scale, bias, eps, kind)
        return out.view(*rows.normed.shape[:-1], out.shape[-1])
    out = linear(rows.normed, weight, bias, weight_scale)
    if activation == "gelu":
        return F.gelu(out, approximate="tanh")
    if activation == "swiglu":
        gate, up = out.chunk(2, dim=-1)
        return F.silu(gate) * up
    return out


def add_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: ResidualState,
    norm: Tensor,
    eps: float,
    weight_scale: Tensor | None = None,
) -> ResidualState:
    """rows + (x @ weightᵀ + bias), before the norm of weight `norm`: x (..., K) → (..., D)."""
    if rows.norm is not None:
        values = _fused_norm_gemv(x, weight, weight_scale, bias, residual=rows.values)
        return ResidualState(values, values, None, None, norm)
    if rows.squares is not None and rows.counters is not None:
        from mingc.kernels.triton import linear as gpu

        shape = rows.values.shape
        flat = [each.reshape(-1, each.shape[-1]).contiguous() for each in (x, rows.values)]
        values, normed, squares = gpu.add_linear(
            flat[0], weight, weight_scale, bias, flat[1], norm, rows.counters
        )
        return ResidualState(values.view(shape), normed.view(shape), squares, rows.counters)
    values = rows.values + linear(x, weight, bias, weight_scale)
    return ResidualState(values, rms_norm(values, norm, eps), None, None)


def _fused_norm_gemv(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    *,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 0.0,
    activation: Activation = "none",
) -> Tensor:
    """One row (..., K) → (..., N), by one kernel."""
    from mingc.kernels.triton import fused_norm_gemv as gpu

    flat, kind = x.reshape(1, -1), gpu.ACTIVATIONS[activation]
    held = None if residual is None else residual.reshape(1, -1)
    out: Tensor = gpu.fused_norm_gemv(flat, norm, weight, weight_scale, bias, held, eps, kind)
    return out.view(*x.shape[:-1], out.shape[-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, weight_scale: Tensor | None = None) -> Tensor:
    """x @ weightᵀ + bias: (..., K) → (..., N).

    A weight with a scale is in one of the formats of `mingc.kernels.quantized`. With FP8, many rows of `x` are rounded
    to FP8 as well where the device multiplies FP8 (each with its own scale, so that no row depends on another); else
    the weight is widened.
    """
    if weight_scale is None:
        return F.linear(x, weight, bias)
    is_whole = weight.shape[0] % _FP8_MULTIPLE == 0 and weight.shape[1] % _FP8_MULTIPLE == 0
    if weight.dtype != FP8 or not is_whole or not use_triton(x):
        return F.linear(x, dequantize(weight, weight_scale, x.dtype), bias)
    if x.numel() // x.shape[-1] <= _MAX_FUSED_ROWS:
        from mingc.kernels.triton import linear as gpu

        flat = x.reshape(-1, x.shape[-1]).contiguous()
        made: Tensor = gpu.normed_linear(flat, None, weight, weight_scale, bias, 0.0, gpu.NONE)
        return made.view(*x.shape[:-1], made.shape[-1])
    rounded, scale = quantize_fp8(x.reshape(-1, x.shape[-1]))
    # The vendor's product takes one scale a matrix; the one that takes a scale a row is slower than the scales are
    # here, where they become part of what comes next (benchmarks/NOTES.md).
    one = torch.ones((), dtype=torch.float32, device=x.device)
    product = torch._scaled_mm(rounded, weight.t(), one, one, out_dtype=x.dtype, use_fast_accum=True)
    out = product.to(torch.float32) * scale.unsqueeze(1) * weight_scale
    if bias is not None:
        out = out + bias
    return out.to(x.dtype).view(*x.shape[:-1], out.shape[-1])


def slice_tokens(rows: ResidualState, kept: slice) -> ResidualState:
    """Only the tokens `kept` (axis 1) of the stream; only `add_linear` may come next."""
    return rows._replace(values=rows.values[:, kept])
