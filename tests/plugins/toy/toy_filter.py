"""A stage outside mingc that no other stage consumes: one weight of the checkpoint, one graph, its own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.dtypes import dtype_name
from mingc.export.checkpoint import Checkpoint
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, WeightSource

_NORM = "model.model.norm.weight"
_OFFSET = -1.0


@dataclass(frozen=True)
class ToyConfig:
    """What `build` needs to know of the checkpoint."""

    width: int


@dataclass(frozen=True)
class ToyParameters:
    """Parameters that only this stage's users know."""

    width: int
    offset: float


class ToyFilter(nn.Module):
    """x (B, D) → 2 · scale · x + offset, scale (D,)."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.doubled = nn.Parameter(torch.empty(config.width))

    def filter(self, x: Tensor) -> tuple[Tensor]:
        return (self.doubled * x + _OFFSET,)


class ToyFilterStage(Stage):
    """The stage `toy_filter`."""

    name = "toy_filter"
    policy = "once"

    def is_present(self, checkpoint: Checkpoint) -> bool:
        return _NORM in checkpoint.main.tensors

    def config(self, checkpoint: Checkpoint) -> ToyConfig:
        return ToyConfig(width=checkpoint.main.require("hidden_size", "llm_config"))

    def build(self, config: ToyConfig, shard: Shard) -> nn.Module:
        return ToyFilter(config)

    def weights(self, config: ToyConfig, shard: Shard) -> Sequence[WeightSource]:
        doubled = WeightSource(
            name="doubled",
            part="main",
            tensors=(_NORM,),
            shapes=((config.width,),),
            compute=lambda scale: 2 * scale,
        )
        return (doubled,)

    def graphs(self, config: ToyConfig, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        dtype = dtype_name(options.dtype)
        spec = GraphSpec(
            name="filter",
            inputs=(TensorSpec(name="x", dtype=dtype, shape=("B", config.width)),),
            outputs=(TensorSpec(name="y", dtype=dtype, shape=("B", config.width)),),
            dims=(Dim(name="B", minimum=1, maximum=options.max_batch, buckets=options.batch_sizes),),
        )

        def example(dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
            return {"x": torch.randn(dims["B"], config.width, generator=generator).to(options.dtype)}

        return (
            GraphDef(spec=spec, method="filter", example=example, trace_dims={"B": 3}, check_dims={"B": 2}),
        )

    def parameters(self, config: ToyConfig, options: StageOptions) -> ToyParameters:
        return ToyParameters(width=config.width, offset=_OFFSET)


STAGE = ToyFilterStage()
