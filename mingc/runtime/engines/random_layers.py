"""Weights of layers that an artifact of random weights does not store: generated on the device at load."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_DRAWN_AT_ONCE = 2**26  # elements; float32 draws of all experts would take four times their memory
_KEPT_SUFFIX = "_scale"  # of quantized weights: what is drawn is their unscaled values


def drawn_like(stored: Tensor, name: str) -> Tensor:
    """Another tensor of the distribution of `stored`, for the weight `name`: the same name gives the same values.

    Values of floating dtypes are normal with the mean and deviation of `stored`, within its smallest and largest value;
    for packed ones the rows are permuted. Scales of quantized weights, integers that are not a matrix and tensors of
    one element are copied. All ranks generate the same values for a weight that each of them has.

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
