"""Generates the weights of layers that an artifact of random weights does not store, on the device at load."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_DRAWN_AT_ONCE = 2**26  # elements: drawing all experts at once in float32 would take four times their memory
_KEPT_SUFFIX = "_scale"  # scales of quantized weights are kept; their unscaled values are drawn


def drawn_like(stored: Tensor, name: str) -> Tensor:
    """Draw a tensor with the distribution of `stored` for the weight `name`: the same name gives the same values.

    Floating dtypes get normal values with the mean and deviation of `stored`, between its smallest and largest value.
    Packed dtypes get the rows of `stored` in another order. Scales of quantized weights, integers that are not a matrix
    and tensors of one element are copied. All ranks generate the same values for a weight that all of them have.

    Args:
        stored: any shape and dtype, on the device to draw on.
    """
    if name.endswith(_KEPT_SUFFIX) or stored.numel() < 2:
        return stored.clone()
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    generator = torch.Generator(stored.device).manual_seed(seed)
    if not stored.dtype.is_floating_point:
        if stored.dim() < 2:
            return stored.clone()
        order = torch.randperm(stored.shape[-2], generator=generator, device=stored.device)
        return stored.index_select(-2, order)
    known = stored.flatten()[:_DRAWN_AT_ONCE].float()
    deviation, mean = torch.std_mean(known)
    low, high = known.aminmax()
    drawn = torch.empty_like(stored, memory_format=torch.contiguous_format)
    for part in torch.split(drawn.flatten(), _DRAWN_AT_ONCE):
        values = torch.randn(part.shape, generator=generator, device=stored.device)
        part.copy_((values * deviation + mean).clamp(low, high))
    return drawn
