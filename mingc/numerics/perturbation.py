"""Perturbation of router inputs within rounding error.

Two experts may have nearly equal scores; rounding then decides which one a token is routed to. Checks perturb a token's
inputs by no more than rounding error to find the routings that rounding alone can produce. No such perturbation makes
a wrong weight, router or kernel match its reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BFLOAT16_STEP = 2.0**-8  # the largest relative rounding error of bfloat16


def bfloat16_rounding_factors(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random float32 factors, uniform within one bfloat16 rounding step of 1, on the CPU."""
    return 1 + (2 * torch.rand(*shape, generator=generator) - 1) * _BFLOAT16_STEP


def add_relative_noise(rows: Tensor, relative_std: float, generator: torch.Generator) -> Tensor:
    """`rows` (N, D) with Gaussian noise whose standard deviation is `relative_std` of each row's root mean square."""
    std = relative_std * rows.square().mean(-1, keepdim=True).sqrt()
    return rows + std * torch.randn(rows.shape, generator=generator)


def row_errors(rows: Tensor, references: Tensor, scale: Tensor | float) -> Tensor:
    """The largest difference of each row (N,) on axis 0, relative to `scale`; infinite where it is NaN."""
    return ((rows - references).abs().flatten(1).amax(-1) / scale).nan_to_num(nan=torch.inf)
