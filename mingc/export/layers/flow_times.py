"""Time steps of the flow-matching sampler and their embeddings, which are constants of a checkpoint.

Source: spec: talker.md §6, §7.1. All float32, in the reference's order of operations: sines of angles up to 1000 depend
on it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_TIME_CHANNELS = 256  # width of the sinusoidal embedding before the time MLP, fixed in the reference
_TIME_SCALE = 1000.0

# Empirically pruned schedules by step count, in 32nds.
_PRUNED_GRIDS = {
    5: (0, 2, 4, 8, 16, 32),
    6: (0, 2, 4, 6, 8, 16, 32),
    7: (0, 2, 4, 6, 8, 16, 24, 32),
    10: (0, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32),
    12: (0, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32),
    16: (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32),
}


def flow_times(num_steps: int) -> Tensor:
    """Times (num_steps + 1,) float32 from 0 (noise) to 1 (data), after sway sampling with coefficient -1."""
    pruned = _PRUNED_GRIDS.get(num_steps)
    if pruned is None:
        grid = torch.linspace(0, 1, num_steps + 1, dtype=torch.float32)
    else:
        grid = torch.tensor(pruned, dtype=torch.float32) / 32
    return grid - (torch.cos(torch.pi / 2 * grid) - 1 + grid)


def time_embeddings(
    num_steps: int, in_weight: Tensor, in_bias: Tensor, out_weight: Tensor, out_bias: Tensor
) -> Tensor:
    """Time embeddings (num_steps, hidden) float32 of the start times of all steps.

    Args:
        in_weight, in_bias: first layer of the time MLP, (hidden, 256) and (hidden,).
        out_weight, out_bias: second layer, (hidden, hidden) and (hidden,).
    """
    half = _TIME_CHANNELS // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = _TIME_SCALE * flow_times(num_steps)[:-1].unsqueeze(1) * frequencies
    sinusoid = torch.cat((angles.sin(), angles.cos()), dim=-1)
    inner = F.silu(F.linear(sinusoid, in_weight.float(), in_bias.float()))
    return F.linear(inner, out_weight.float(), out_bias.float())
