"""Linear layers of the thinker's attention and head; one token runs as a GEMV that reads the weight once.

One token is bound by memory bandwidth and by launches, not by tensor cores. The GEMV therefore includes the residual
sum and the norm before it.
"""

from __future__ import annotations

from torch import Tensor

from mingc.kernels.dispatch import use_triton
from mingc.kernels.linear import linear
from mingc.kernels.quantized import FP8
from mingc.kernels.rms_norm import rms_norm

_K_MULTIPLE = 128  # what a warp loads at once
_MAX_NORM_SIZE = 8192  # a row is kept in registers


def gemv(x: Tensor, weight: Tensor, weight_scale: Tensor | None = None) -> Tensor:
    """x (T, K) @ weightᵀ → (T, N); `linear` without a bias."""
    if _has_kernel(x, weight):
        from mingc.kernels.triton import gemv as gpu

        made: Tensor = gpu.gemv(x.contiguous(), weight, weight_scale)
        return made
    return linear(x, weight, None, weight_scale)


def sum_norm_linear(
    residual: Tensor,
    delta: Tensor,
    norm: Tensor,
    weight: Tensor,
    eps: float,
    weight_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add, normalize and multiply: the sum residual + delta (T, K), and rms_norm(sum) @ weightᵀ (T, N).

    Args:
        residual, delta: (T, K) in one dtype.
        norm: (K,), weight of the norm.
        weight: (N, K); with a scale it is in a format of `mingc.kernels.quantized`.
    """
    size = residual.shape[1]
    if _has_kernel(residual, weight) and size & (size - 1) == 0 and size <= _MAX_NORM_SIZE:
        from mingc.kernels.triton import gemv as gpu

        made: tuple[Tensor, Tensor] = gpu.sum_norm_linear(residual, delta, norm, weight, weight_scale, eps)
        return made
    stream = residual + delta
    return stream, linear(rms_norm(stream, norm, eps), weight, None, weight_scale)


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether the GEMV runs: one row on a GPU with Triton kernels, whole tiles, a weight in its dtype or FP8."""
    if not use_triton(x) or x.shape[0] != 1 or weight.dtype not in (x.dtype, FP8):
        return False
    return weight.shape[0] % 16 == 0 and weight.shape[1] % _K_MULTIPLE == 0
