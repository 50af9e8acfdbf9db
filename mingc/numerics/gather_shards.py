"""Combine per-rank outputs without collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mingc.artifacts.spec import TensorSpec


def gather_shards(spec: TensorSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The output `spec` from `parts`, one a rank; half precision is summed in float32."""
    if spec.ranks == "sum":
        return torch.stack([part.float() for part in parts]).sum(0).to(parts[0].dtype)
    return torch.cat(tuple(parts), dim=-1) if spec.ranks == "concat" else parts[0]
