"""Layer norm of a residual stream, with the residual sum before it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.dispatch import use_triton

_MAX_WIDTH = 16_384  # the kernel keeps a row in registers


def add_layer_norm(
    x: Tensor, update: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The stream `x + update` and its layer norm, both (…, W) in the dtype of `x`; weight and bias (W,).

    The sum is rounded before it is normalized, as by two separate operations.
    """
    if use_triton(x) and x.shape[-1] <= _MAX_WIDTH:
        from mingc.kernels.triton import layer_norm as gpu

        total, normed = gpu.add_layer_norm(x.contiguous(), update.contiguous(), weight, bias, eps)
        return total, normed
    total = x + update
    return total, F.layer_norm(total, x.shape[-1:], weight, bias, eps)
