"""Root-mean-square normalisation over the last axis."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale `x` to unit root mean square, then by `weight`.

    Args:
        x: (..., D) any float dtype.
        weight: (D,) in the dtype of `x`.
        eps: added to the mean square.

    Returns: like `x`. Statistics are float32; the result is cast to the dtype of `x` before the weight is
    applied, as in the reference implementation (spec: thinker.md §2).
    """
    x32 = x.to(torch.float32)
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale).to(x.dtype) * weight
