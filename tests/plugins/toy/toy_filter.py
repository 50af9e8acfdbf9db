"""A stage outside mingc that no other stage consumes: one graph, parameters of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.dtypes import dtype_name
from mingc.export.checkpoint import Checkpoint
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, WeightSource

_WIDTH = 8


@dataclass(frozen=True)
class ToyParameters:
    """Parameters that only this stage's users know."""

    width: int
    offset: float


class ToyFilter(nn.Module):
    """x (B, D) → x Wᵀ + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(_WIDTH, _WIDTH))

    def filter(self, x: Tensor) -> tuple[Tensor]:
        return (x @ self.weight.T + 1,)


class ToyFilterStage(Stage):
    """The stage `toy_filter`."""

    name = "toy_filter"
    policy = "once"

    def is_present(self, checkpoint: Checkpoint) -> bool:
        return True

    def config(self, checkpoint: Checkpoint) -> None:
        return None

    def build(self, config: None, shard: Shard) -> nn.Module:
        return ToyFilter()

    def weights(self, config: None, shard: Shard) -> Sequence[WeightSource]:
        weight = WeightSource(
            name="weight", part="main", tensors=(), shapes=(), compute=lambda: 2 * torch.eye(_WIDTH)
        )
        return (weight,)

    def graphs(self, config: None, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        dtype = dtype_name(options.dtype)
        spec = GraphSpec(
            name="filter",
            inputs=(TensorSpec(name="x", dtype=dtype, shape=("B", _WIDTH)),),
            outputs=(TensorSpec(name="y", dtype=dtype, shape=("B", _WIDTH)),),
            dims=(Dim(name="B", minimum=1, maximum=options.max_batch, buckets=options.batch_sizes),),
        )

        def example(dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
            return {"x": torch.randn(dims["B"], _WIDTH, generator=generator).to(options.dtype)}

        return (
            GraphDef(spec=spec, method="filter", example=example, trace_dims={"B": 3}, check_dims={"B": 2}),
        )

    def parameters(self, config: None, options: StageOptions) -> ToyParameters:
        return ToyParameters(width=_WIDTH, offset=-1.0)


STAGE = ToyFilterStage()
