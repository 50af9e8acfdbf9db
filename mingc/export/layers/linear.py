"""Parameters without values, and a linear layer whose weight may be stored in FP8."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def empty_weight(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter without values and without a gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """Weight (N, K), bias (N,) or None, and `weight_scale` (N,) float32 if the weight is FP8, else None.

    Only holds the tensors: `mingc.kernels.linear` computes the GEMMs of a pre-norm transformer.
    """

    bias: Tensor | None
    weight_scale: Tensor | None

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.register_parameter("bias", nn.Parameter(torch.empty(outputs)) if bias else None)
        self.register_parameter("weight_scale", None)
