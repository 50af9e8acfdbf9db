"""Weight sources for tensors used as stored, linear layers and layer norms."""

from __future__ import annotations

import torch

from mingc.export.stage import WeightSource


def stored(
    name: str, tensor: str, *shape: int, part: str = "main", dtype: torch.dtype | None = None
) -> WeightSource:
    """Weight `name` from `tensor` of `shape` in the checkpoint's `part`, unchanged."""
    return WeightSource(name=name, part=part, tensors=(tensor,), shapes=(shape,), dtype=dtype)


def linear(name: str, tensor: str, outputs: int, inputs: int) -> list[WeightSource]:
    """Weight (outputs, inputs) and bias (outputs,) of a linear layer."""
    return [
        stored(f"{name}.weight", f"{tensor}.weight", outputs, inputs),
        stored(f"{name}.bias", f"{tensor}.bias", outputs),
    ]


def layer_norm(name: str, tensor: str, width: int) -> list[WeightSource]:
    """Weight and bias (width,) of a layer norm."""
    return [stored(f"{name}.{kind}", f"{tensor}.{kind}", width) for kind in ("weight", "bias")]
