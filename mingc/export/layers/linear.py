"""A linear layer whose weight an export may store in FP8."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """Weight (N, K), bias (N,) or None, and `weight_scale` (N,) float32 when the weight is FP8, else None.

    Holds tensors only: the products of a pre-norm transformer are made by `mingc.kernels.linear`.
    """

    bias: Tensor | None
    weight_scale: Tensor | None

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.register_parameter("bias", nn.Parameter(torch.empty(outputs)) if bias else None)
        self.register_parameter("weight_scale", None)
