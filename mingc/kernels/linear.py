"""Linear layers of a pre-norm transformer, fused with the norm before, and the activation or residual sum after.

With few rows on CUDA each is one kernel. A `ResidualState` connects them: the residual stream and what the next layer
needs of it.
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
# With more rows the vendor's GEMMs gain more than fusion saves (benchmarks/NOTES.md).
_MAX_FUSED_ROWS = 32
_MAX_GEMV_ROWS = 2  # which read each weight once, without tensor cores
_TILE = 16  # n and k must be multiples of this: tensor cores take no smaller tile, nor does torch._scaled_mm


class ResidualState(NamedTuple):
    """A residual stream `values` and its form before the next norm.

    One of three forms, chosen by the number of rows: `normed` is the stream after the norm (`squares` and `norm` are
    None); or `normed` is the stream times the norm's weight and `squares` (rows, parts) float32 sums up to its squared
    values, so that the next GEMM divides by their root mean square; or `norm` is the norm's weight, and the next GEMV
    normalizes. `counters` belong to the split-K GEMM of the second form.
    """

    values: Tensor
    normed: Tensor
    squares: Tensor | None
    counters: Tensor | None
    norm: Tensor | None = None


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """GELU of a linear layer: x (..., K), weight (N, K), bias (N,) → (..., N); `approximate` as in F.gelu.

    On a GPU the tanh form runs in the epilogue of the vendor's GEMM, in float32 before the result is rounded; that
    GEMM has no epilogue for the exact form.
    """
    if approximate == "tanh" and use_triton(x):
        flat = x.reshape(-1, x.shape[-1])
        made: Tensor = torch.ops.aten._addmm_activation(bias, flat, weight.t(), use_gelu=True)
        return made.view(*x.shape[:-1], made.shape[-1])
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def begin_residual(x: Tensor, norm: Tensor, eps: float) -> ResidualState:
    """Start a residual stream at `x` (..., D), before a norm with weight `norm` (D,)."""
    if not use_triton(x) or x.numel() // x.shape[-1] > _MAX_FUSED_ROWS:
        return ResidualState(x, rms_norm(x, norm, eps), None, None)
    if x.numel() // x.shape[-1] <= _MAX_GEMV_ROWS:
        return ResidualState(x, x, None, None, norm)
    if x.shape[-1] % _TILE:
        return ResidualState(x, rms_norm(x, norm, eps), None, None)
    from mingc.kernels.triton.linear import NUM_COUNTERS

    return _with_squares(x, norm, torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=x.device))


def _with_squares(x: Tensor, norm: Tensor, counters: Tensor) -> ResidualState:
    squares = x.reshape(-1, x.shape[-1]).float().square().sum(-1, keepdim=True)
    return ResidualState(x, x * norm, squares, counters)


def _has_gemm(weight: Tensor, activation: Activation = "none") -> bool:
    """Whether the GEMM for few rows takes `weight`; the GEMV takes every size."""
    n = weight.shape[0] // (2 if activation == "swiglu" else 1)
    return n % _TILE == 0 and weight.shape[1] % _TILE == 0


def final_norm(state: ResidualState, eps: float) -> Tensor:
    """The residual stream after its norm (..., D)."""
    if state.norm is not None:
        return rms_norm(state.values, state.norm, eps)
    if state.squares is None:
        return state.normed
    scale = torch.rsqrt(state.squares.sum(-1) / state.normed.shape[-1] + eps).view(
        *state.normed.shape[:-1], 1
    )
    return (state.normed.float() * scale).to(state.normed.dtype)


def normed_linear(
    state: ResidualState,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    activation: Activation = "none",
    weight_scale: Tensor | None = None,
) -> Tensor:
    """activation(norm(stream) @ weightᵀ + bias): (..., D) → (..., N).

    `swiglu` takes gate rows then up rows of `weight` (2N, D) and returns silu(gate) * up; `gelu` is the tanh form.
    A weight with a scale is FP8 (`mingc.kernels.quantized`).
    """
    if state.norm is not None:
        return _fused_norm_gemv(
            state.values, weight, weight_scale, bias, norm=state.norm, eps=eps, activation=activation
        )
    if state.squares is not None and _has_gemm(weight, activation):
        from mingc.kernels.triton import linear as gpu

        kind = gpu.ACTIVATIONS[activation]
        flat = state.normed.reshape(-1, state.normed.shape[-1]).contiguous()
        out: Tensor = gpu.normed_linear(flat, state.squares, weight, weight_scale, bias, eps, kind)
        return out.view(*state.normed.shape[:-1], out.shape[-1])
    x = final_norm(state, eps)
    if activation == "gelu" and bias is not None and weight_scale is None:
        return linear_gelu(x, weight, bias, "tanh")
    out = linear(x, weight, bias, weight_scale)
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
    state: ResidualState,
    norm: Tensor,
    eps: float,
    weight_scale: Tensor | None = None,
) -> ResidualState:
    """The stream + (x @ weightᵀ + bias), before a norm with weight `norm`: x (..., K) → (..., D)."""
    if state.norm is not None:
        values = _fused_norm_gemv(x, weight, weight_scale, bias, residual=state.values)
        return ResidualState(values, values, None, None, norm)
    if state.squares is not None and state.counters is not None and _has_gemm(weight):
        from mingc.kernels.triton import linear as gpu

        shape = state.values.shape
        flat = [each.reshape(-1, each.shape[-1]).contiguous() for each in (x, state.values)]
        values, normed, squares = gpu.add_linear(
            flat[0], weight, weight_scale, bias, flat[1], norm, state.counters
        )
        return ResidualState(values.view(shape), normed.view(shape), squares, state.counters)
    values = state.values + linear(x, weight, bias, weight_scale)
    if state.counters is not None:
        return _with_squares(values, norm, state.counters)
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
    """At most `_MAX_GEMV_ROWS` rows (..., K) → (..., N) in one kernel."""
    from mingc.kernels.triton import fused_norm_gemv as gpu

    flat, kind = x.reshape(-1, x.shape[-1]).contiguous(), gpu.ACTIVATIONS[activation]
    added = None if residual is None else residual.reshape(-1, residual.shape[-1]).contiguous()
    out: Tensor = gpu.fused_norm_gemv(flat, norm, weight, weight_scale, bias, added, eps, kind)
    return out.view(*x.shape[:-1], out.shape[-1])


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor | None = None,
    *,
    has_many_rows: bool = False,
) -> Tensor:
    """x @ weightᵀ + bias: (..., K) → (..., N).

    A weight with a scale is in a format of `mingc.kernels.quantized`. With an FP8 weight and more than
    `_MAX_FUSED_ROWS` rows, `x` is rounded to FP8 too where Triton kernels run, with one scale per row so that rows stay
    independent; otherwise the weight is dequantized. `has_many_rows` chooses what is faster from about 512 rows on.
    """
    if weight_scale is None:
        return F.linear(x, weight, bias)
    if weight.dtype != FP8 or not _has_gemm(weight) or not use_triton(x):
        return F.linear(x, dequantize(weight, weight_scale, x.dtype), bias)
    if x.numel() // x.shape[-1] <= _MAX_FUSED_ROWS:
        from mingc.kernels.triton import linear as gpu

        flat = x.reshape(-1, x.shape[-1]).contiguous()
        made: Tensor = gpu.normed_linear(flat, None, weight, weight_scale, bias, 0.0, gpu.NONE)
        return made.view(*x.shape[:-1], made.shape[-1])
    if has_many_rows:
        from mingc.kernels.triton import quantize_rows as gpu_rows

        rounded, scale = gpu_rows.quantize_rows(x.reshape(-1, x.shape[-1]).contiguous())
        scaled = torch._scaled_mm(
            rounded, weight.t(), scale, weight_scale.unsqueeze(0), out_dtype=x.dtype, use_fast_accum=True
        )
        added = scaled if bias is None else scaled + bias
        return added.view(*x.shape[:-1], added.shape[-1])
    rounded, scale = quantize_fp8(x.reshape(-1, x.shape[-1]))
    # The vendor's GEMM with one scale per matrix is faster than the one with a scale per row plus the multiplication
    # below, which the compiler fuses into the next operation (benchmarks/NOTES.md).
    one = torch.ones((), dtype=torch.float32, device=x.device)
    gemm = torch._scaled_mm(rounded, weight.t(), one, one, out_dtype=x.dtype, use_fast_accum=True)
    out = gemm.to(torch.float32) * scale.unsqueeze(1) * weight_scale
    if bias is not None:
        out = out + bias
    return out.to(x.dtype).view(*x.shape[:-1], out.shape[-1])


def slice_tokens(state: ResidualState, tokens: slice) -> ResidualState:
    """Slice the stream to some tokens (axis 1); only `add_linear` may follow."""
    return state._replace(values=state.values[:, tokens])
