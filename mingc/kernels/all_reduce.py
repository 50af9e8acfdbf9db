"""Collectives of the tensor-parallel group, in the form that a compiled graph can hold.

The group is known by name only; the runtime registers one under it (`mingc.runtime.distributed`), export a
stand-in of the same size (`mingc.export.tensor_parallel`).
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = "mingc_tp"


def all_reduce(x: Tensor, world_size: int) -> Tensor:
    """Sum of `x` over the group's ranks; `x` itself when there is one rank."""
    if world_size == 1:
        return x
    reduced: Tensor = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", GROUP)
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(reduced)
    return waited


def all_gather_last(x: Tensor, world_size: int) -> Tensor:
    """The ranks' `x` (N, W) side by side in rank order: (N, world_size * W)."""
    if world_size == 1:
        return x
    gathered: Tensor = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), world_size, GROUP)
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
    num_rows, width = x.shape
    return waited.view(world_size, num_rows, width).permute(1, 0, 2).reshape(num_rows, world_size * width)
