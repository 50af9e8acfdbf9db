"""Products of the thinker's attention and head: of one token by kernels that read the weight once and do no more.

One token keeps no matrix unit busy: what takes time is the weight, and every kernel beside the product. So the sum
before a norm and the norm itself are part of it.
"""

from __future__ import annotations

from torch import Tensor

from mingc.kernels.dispatch import use_triton
from mingc.kernels.linear import linear
from mingc.kernels.quantized import FP8
from mingc.kernels.rms_norm import rms_norm

_MULTIPLE = 128  # of inputs: what a warp loads at once
_MAX_NORM_WIDTH = 8192  # a row is kept in registers


def gemv(x: Tensor, weight: Tensor, weight_scale: Tensor | None = None) -> Tensor:
    """x (T, K) @ weightᵀ → (T, N), as `linear` without a bias."""
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
    """The stream residual + delta (T, K), and rms_norm of it @ weightᵀ (T, N).

    Args:
        residual, delta: (T, K) in one dtype.
        norm: (K,), weight of the norm.
        weight: (N, K); with a scale in a format of `mingc.kernels.quantized`.
    """
    width = residual.shape[1]
    if _has_kernel(residual, weight) and width & (width - 1) == 0 and width <= _MAX_NORM_WIDTH:
        from mingc.kernels.triton import gemv as gpu

        made: tuple[Tensor, Tensor] = gpu.sum_norm_linear(residual, delta, norm, weight, weight_scale, eps)
        return made
    stream = residual + delta
    return stream, linear(rms_norm(stream, norm, eps), weight, None, weight_scale)


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """One row on CUDA, whole tiles, a weight in its dtype or FP8."""
    if not use_triton(x) or x.shape[0] != 1 or weight.dtype not in (x.dtype, FP8):
        return False
    return weight.shape[0] % 16 == 0 and weight.shape[1] % _MULTIPLE == 0
