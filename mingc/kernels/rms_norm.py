"""Root-mean-square normalisation over the last axis."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale `x` to unit root mean square, then by `weight`.

    Args:
        x: (..., width) any float dtype.
        weight: (width,) in the dtype of `x`.
        eps: added to the mean square.

    Returns: like `x`. Statistics are float32; the result is cast to the dtype of `x` before the weight is
    applied, as the checkpoint's authors do (spec: thinker.md §2).
    """
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
