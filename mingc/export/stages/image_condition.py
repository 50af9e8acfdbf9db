"""Condition of a picture: hidden rows of the thinker at the learned queries → rows that the sampler reads.

The thinker's final norm, a projection, a bidirectional Qwen2 stack, a projection, unit norm (spec: imagegen.md §1). The
learned queries, which the prompt of a picture ends with, are a weight of this stage that no graph reads.

Shape letters: Q queries of the last scale, D the thinker's width, C width of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.artifacts.parameters import ImageConditionParameters
from mingc.artifacts.spec import GraphSpec, TensorSpec
from mingc.artifacts.stage_graph import Edge
from mingc.dtypes import dtype_name
from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.config_fields import IMAGE_MLP, check_fields
from mingc.export.layers.qwen2 import Qwen2Config, Qwen2Stack, qwen2_weights, read_qwen2_config
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, WeightSource
from mingc.export.weights.mapping import stored
from mingc.kernels.rms_norm import rms_norm
from mingc.kernels.sequence_attention import sequence_attention

_UNIT_EPS = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageConditionConfig:
    """Geometry of the queries and the connector.

    Attributes:
        hidden_size, norm_eps: of the thinker.
        scales: rows and columns of the queries of each scale.
        width: of a row of the condition.
    """

    hidden_size: int
    norm_eps: float
    scales: tuple[int, ...]
    width: int
    connector: Qwen2Config

    @property
    def num_queries(self) -> tuple[int, ...]:
        return tuple(scale * scale for scale in self.scales)


class ImageCondition(nn.Module):
    """Learned queries, the thinker's final norm, both projections and the connector."""

    def __init__(self, config: ImageConditionConfig) -> None:
        super().__init__()
        self.config = config
        self.queries = nn.Parameter(torch.empty(sum(config.num_queries), config.hidden_size))
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        self.proj_in = nn.Linear(config.hidden_size, config.connector.hidden_size)
        self.connector = Qwen2Stack(config.connector)
        self.proj_out = nn.Linear(config.connector.hidden_size, config.width)

    def condition(self, residual: Tensor, delta: Tensor) -> tuple[Tensor]:
        """Residual stream and delta (Q, D) after the thinker's last layer → unit rows (Q, C) float32."""
        x = self.proj_in(rms_norm(residual + delta, self.norm, self.config.norm_eps))
        cos, sin = self.connector.rope(torch.arange(x.shape[0], device=x.device))
        heads = self.config.connector.num_kv_heads

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return sequence_attention(qkv, cos, sin, heads, None, is_causal=False)

        rows = self.proj_out(self.connector(x, attend))
        return (F.normalize(rows.float(), dim=-1, eps=_UNIT_EPS),)


class ImageConditionStage(Stage):
    """The stage `image_condition`."""

    name = "image_condition"
    policy = "once"
    edges = (Edge("thinker", "image_condition", "hidden"), Edge("image_condition", "image_dit", "condition"))

    def is_present(self, checkpoint: Checkpoint) -> bool:
        return "mlp" in checkpoint.parts

    def config(self, checkpoint: Checkpoint) -> ImageConditionConfig:
        mlp, connector = checkpoint.part("mlp"), checkpoint.part("connector")
        where = str(mlp.config_file)
        for key in ("dit_type", "use_identity_mlp", "text_encoder_norm"):
            mlp.require(key)  # the reference assumes other values than the release has
        check_fields(mlp.config, IMAGE_MLP, where)
        scales, width = mlp.sizes("img_gen_scales"), mlp.size("diffusion_c_input_dim")
        geometry = read_qwen2_config(connector.config, str(connector.config_file))
        if any(window is not None for window in geometry.windows):
            raise CheckpointError(
                "not implemented: sliding windows, the connector attends to all rows",
                where=str(connector.config_file),
                fix="set use_sliding_window to false, or leave the stage out",
            )
        return ImageConditionConfig(
            hidden_size=checkpoint.main.require("hidden_size", "llm_config"),
            norm_eps=checkpoint.main.require("rms_norm_eps", "llm_config"),
            scales=scales,
            width=width,
            connector=geometry,
        )

    def build(self, config: ImageConditionConfig, shard: Shard) -> ImageCondition:
        return ImageCondition(config)

    def weights(self, config: ImageConditionConfig, shard: Shard) -> Sequence[WeightSource]:
        hidden, inner = config.hidden_size, config.connector.hidden_size
        queries = WeightSource(
            name="queries",
            part="mlp",
            tensors=tuple(f"query_tokens_dict.{scale}x{scale}" for scale in config.scales),
            shapes=tuple((count, hidden) for count in config.num_queries),
            compute=lambda *values: torch.cat(values),
        )
        return (
            queries,
            stored("norm", "model.model.norm.weight", hidden),
            stored("proj_in.weight", "proj_in.weight", inner, hidden, part="mlp"),
            stored("proj_in.bias", "proj_in.bias", inner, part="mlp"),
            stored("proj_out.weight", "proj_out.weight", config.width, inner, part="mlp"),
            stored("proj_out.bias", "proj_out.bias", config.width, part="mlp"),
            *qwen2_weights(
                config.connector, part="connector", source="model.", target="connector.", quantizable=False
            ),
        )

    def graphs(self, config: ImageConditionConfig, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        count, hidden = config.num_queries[-1], config.hidden_size
        dtype = dtype_name(options.dtype)
        spec = GraphSpec(
            name="condition",
            inputs=tuple(
                TensorSpec(name=name, dtype=dtype, shape=(count, hidden)) for name in ("residual", "delta")
            ),
            outputs=(TensorSpec(name="rows", dtype="float32", shape=(count, config.width)),),
            dims=(),
        )

        def example(dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
            return {
                name: torch.randn(count, hidden, generator=generator).to(options.dtype)
                for name in ("residual", "delta")
            }

        return (GraphDef(spec=spec, method="condition", example=example, trace_dims={}, check_dims={}),)

    def parameters(self, config: ImageConditionConfig, options: StageOptions) -> ImageConditionParameters:
        return ImageConditionParameters(num_queries=config.num_queries, width=config.width)

    def ignored(self, checkpoint: Checkpoint) -> Sequence[tuple[str, str]]:
        reason = "the connector reads rows and gives rows, no tokens"
        return (("model.embed_tokens.", reason), ("lm_head.", reason))


STAGE = ImageConditionStage()
