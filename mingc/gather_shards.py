"""What the ranks of a sharded stage give, put together: for whoever runs them without letting them meet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mingc.artifacts.spec import TensorSpec


def gather_shards(spec: TensorSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The output `spec` that the `parts`, one a rank, make; half precision is added up in float32."""
    if spec.ranks == "sum":
        return torch.stack([part.float() for part in parts]).sum(0).to(parts[0].dtype)
    return torch.cat(tuple(parts), dim=-1) if spec.ranks == "concat" else parts[0]
