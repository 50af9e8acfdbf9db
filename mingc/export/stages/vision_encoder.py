"""Vision encoder: image and video patches → embeddings of the thinker's width (spec: vision.md §3–§7).

One graph, `encode`. The runtime resizes and flattens images and computes position tables on the host.

Shape suffixes: M merged tokens, G patches of a merged token, P = M·G patches, C input values of a patch, W encoder
width, f rotary frequencies of one axis, R = 2f rotary angles, D thinker width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mingc.artifacts.parameters import VisionParameters
from mingc.artifacts.spec import Dim, DType, GraphSpec, TensorSpec
from mingc.artifacts.stage_graph import Edge
from mingc.dtypes import dtype_name
from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.config_fields import IMAGES, ROOT, VISION, check_fields
from mingc.export.layers.batch_buckets import doubling_buckets
from mingc.export.layers.patch_grid import example_tables
from mingc.export.layers.vision_transformer import PatchMerger, VisionBlock, VisionProjector
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, WeightSource
from mingc.export.weights.mapping import layer_norm, linear, stored
from mingc.kernels.varlen_attention import make_segments

_DEEPSTACK = "vision.deepstack_merger_list."
_UNIT_EPS = 1e-12  # spec: vision.md §7
_ROTARY_BASE = 10000.0  # spec: vision.md §5; not in the config

# Constants of the video reader, which no config file holds (spec: vision.md §2).
_VIDEO_MIN_PIXELS = 128 * 32 * 32
_VIDEO_TOTAL_PIXELS = 96 * 128 * 32 * 32
_VIDEO_FPS = 2.0
_VIDEO_MAX_FRAMES = 170

# Maximum merged tokens per call. 16384 are the largest legal image. Except on CUDA attention has a dense mask, which
# grows with the square of the patches, to 1 GiB in float32 at 4096 tokens.
_MAX_TOKENS = 16384
_MAX_TOKENS_WITH_MASK = 4096
_MIN_STATIC_BUCKET = 64  # below, launches and weight reads dominate, so padding costs nothing

_ACTIVATIONS = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}  # config spelling → `approximate` of F.gelu


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """Geometry of the encoder (`config.json`) and of its input (`preprocessor_config.json`)."""

    depth: int
    width: int
    mlp_width: int
    num_heads: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    in_channels: int
    position_grid_size: int
    gelu: str
    merger_width: int
    hidden_size: int  # of the thinker
    projector_depth: int  # linear layers
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    @property
    def patch_values(self) -> int:
        """Input values of one patch, ordered (channel, time, y, x)."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        """Patches merged into one token."""
        return self.merge_size**2

    @property
    def num_frequencies(self) -> int:
        """Rotary frequencies of each of the two axes."""
        return self.width // self.num_heads // 4


class VisionEncoder(nn.Module):
    """Vision transformer with merger and projector; method `encode` is the graph.

    Source: official `Qwen3MoeVisionTransformer` and `linear_proj` (spec: vision.md §3–§7). The patch embedding is a
    linear layer, as the stride of the published Conv3d equals its kernel size.
    """

    position_table: Tensor
    inverse_frequency: Tensor

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.patch_embed = nn.Linear(config.patch_values, config.width)
        # Float32 position tables and angles: bf16 would round positions too coarsely.
        table_rows = config.position_grid_size**2
        self.register_buffer("position_table", torch.empty(table_rows, config.width, dtype=torch.float32))
        self.register_buffer("inverse_frequency", torch.empty(config.num_frequencies, dtype=torch.float32))
        self.blocks = nn.ModuleList(
            VisionBlock(config.width, config.mlp_width, config.num_heads, config.gelu)
            for _ in range(config.depth)
        )
        self.merger = PatchMerger(config.width, config.patches_per_token, config.merger_width)
        self.projector = VisionProjector(config.merger_width, config.hidden_size, config.projector_depth)

    def interpolate_positions(self, index_P4: Tensor, weight_P4: Tensor) -> Tensor:
        """Interpolate the position table (§4) from (P, 4) int64 rows and (P, 4) float32 weights → (P, W) float32."""
        rows_P4W = self.position_table[index_P4]
        return (rows_P4W * weight_P4.unsqueeze(-1)).sum(1)

    def rotary_angles(self, coordinates_P2: Tensor) -> Tensor:
        """Rotary angles of (row, column) pairs (§5): (P, 2) int64 → (P, R) float32, row frequencies first."""
        angles_P2f = coordinates_P2.float().unsqueeze(-1) * self.inverse_frequency
        return angles_P2f.flatten(1)

    def encode(
        self,
        pixels_MGC: Tensor,
        position_index_MG4: Tensor,
        position_weight_MG4: Tensor,
        coordinates_MG2: Tensor,
        segment_MG2: Tensor,
    ) -> tuple[Tensor]:
        """Embed the patches of M tokens, given in merge order.

        Args:
            pixels_MGC: (M, G, C) normalized pixels in the compute dtype.
            position_index_MG4: (M, G, 4) int64 rows of the position table.
            position_weight_MG4: (M, G, 4) float32 interpolation weights.
            coordinates_MG2: (M, G, 2) int64 row and column of the patch in its frame.
            segment_MG2: (M, G, 2) int32 `[start, end)` of its frame, as flat patch indices.

        Returns:
            (M, D) unit vectors in the compute dtype.
        """
        x_PW = self.patch_embed(pixels_MGC.flatten(0, 1))
        positions_PW = self.interpolate_positions(
            position_index_MG4.flatten(0, 1), position_weight_MG4.flatten(0, 1)
        )
        x_PW = (x_PW + positions_PW).to(x_PW.dtype)
        angles_PR = self.rotary_angles(coordinates_MG2.flatten(0, 1))
        cos_PR, sin_PR = angles_PR.cos(), angles_PR.sin()
        frames = make_segments(segment_MG2.flatten(0, 1).unsqueeze(0), x_PW, self.num_heads)
        update_PW: Tensor | None = None
        for block in self.blocks:
            x_PW, update_PW = block(x_PW, update_PW, cos_PR, sin_PR, frames)
        x_MD = self.projector(self.merger(x_PW if update_PW is None else x_PW + update_PW))
        return (F.normalize(x_MD.float(), dim=-1, eps=_UNIT_EPS).to(x_MD.dtype),)


class VisionEncoderStage(Stage):
    """The stage `vision_encoder`, which is not sharded."""

    name = "vision_encoder"
    policy = "once"
    edges = (Edge("vision_encoder", "thinker", "image"), Edge("vision_encoder", "thinker", "video"))

    def is_present(self, checkpoint: Checkpoint) -> bool:
        return any(name.startswith("vision.") for name in checkpoint.main.tensors)

    def config(self, checkpoint: Checkpoint) -> VisionConfig:
        part = checkpoint.main
        where = str(part.root / "config.json")
        vision = "vision_config"
        check_fields(part.config, ROOT, where)
        check_fields(part.require(vision), VISION, f"{where}: {vision}")
        width, num_heads = part.require("hidden_size", vision), part.require("num_heads", vision)
        if width % (4 * num_heads):
            message = f"{vision}.hidden_size {width} is not a multiple of 4 × num_heads {num_heads}"
            raise CheckpointError(message, where=where)
        num_positions = part.require("num_position_embeddings", vision)
        side = math.isqrt(num_positions)
        if side * side != num_positions:
            message = f"{vision}.num_position_embeddings {num_positions} is not a square"
            raise CheckpointError(message, where=where)
        activation = part.require("hidden_act", vision)
        if activation not in _ACTIVATIONS:
            message = f"{vision}.hidden_act is {activation!r}; supported: {', '.join(_ACTIVATIONS)}"
            raise CheckpointError(message, where=where)
        layers, depth = _deepstack_layers(checkpoint), part.require("depth", vision)
        count = len({name.split(".")[2] for name in part.tensors if name.startswith(_DEEPSTACK)})
        if (count and len(layers) != count) or any(layer not in range(depth) for layer in layers):
            raise CheckpointError(
                f"{vision}.deepstack_visual_indexes is {layers}: not layers of the encoder, one for each of the "
                f"{count} stored mergers",
                where=where,
            )
        projector_depth = part.require("mlp_depth")
        if projector_depth < 1:
            raise CheckpointError(f"mlp_depth is {projector_depth}; it must be at least 1", where=where)
        sizes = {
            "patch_size": part.require("patch_size", vision),
            "temporal_patch_size": part.require("temporal_patch_size", vision),
            "merge_size": part.require("spatial_merge_size", vision),
        }
        images = _ImageSettings.read(checkpoint.root / "preprocessor_config.json", sizes)
        return VisionConfig(
            depth=depth,
            width=width,
            mlp_width=part.require("intermediate_size", vision),
            num_heads=num_heads,
            in_channels=part.require("in_channels", vision),
            position_grid_size=side,
            gelu=_ACTIVATIONS[activation],
            merger_width=part.require("out_hidden_size", vision),
            hidden_size=part.require("hidden_size", "llm_config"),
            projector_depth=projector_depth,
            min_pixels=images.min_pixels,
            max_pixels=images.max_pixels,
            image_mean=images.mean,
            image_std=images.std,
            **sizes,
        )

    def build(self, config: VisionConfig, shard: Shard) -> VisionEncoder:
        return VisionEncoder(config)

    def weights(self, config: VisionConfig, shard: Shard) -> Sequence[WeightSource]:
        width, mlp_width, merger_width = config.width, config.mlp_width, config.merger_width
        joined = config.patches_per_token * width
        patch, table_rows = config.patch_size, config.position_grid_size**2
        sources = [
            WeightSource(
                name="patch_embed.weight",
                part="main",
                tensors=("vision.patch_embed.proj.weight",),
                shapes=((width, config.in_channels, config.temporal_patch_size, patch, patch),),
                # A flattened patch has the kernel's order: channel, time, y, x.
                compute=lambda kernel: kernel.flatten(1),
            ),
            stored("patch_embed.bias", "vision.patch_embed.proj.bias", width),
            stored("position_table", "vision.pos_embed.weight", table_rows, width, dtype=torch.float32),
            WeightSource(
                name="inverse_frequency",
                part="main",
                compute=lambda: _inverse_frequency(config.num_frequencies),
                dtype=torch.float32,
            ),
        ]
        for index in range(config.depth):
            target, source = f"blocks.{index}", f"vision.blocks.{index}"
            sources += layer_norm(f"{target}.norm1", f"{source}.norm1", width)
            sources += linear(f"{target}.attention.qkv", f"{source}.attn.qkv", 3 * width, width)
            sources += linear(f"{target}.attention.proj", f"{source}.attn.proj", width, width)
            sources += layer_norm(f"{target}.norm2", f"{source}.norm2", width)
            sources += linear(f"{target}.fc1", f"{source}.mlp.linear_fc1", mlp_width, width)
            sources += linear(f"{target}.fc2", f"{source}.mlp.linear_fc2", width, mlp_width)
        sources += layer_norm("merger.norm", "vision.merger.norm", width)
        sources += linear("merger.fc1", "vision.merger.linear_fc1", joined, joined)
        sources += linear("merger.fc2", "vision.merger.linear_fc2", merger_width, joined)
        for index in range(config.projector_depth):
            # Odd indices of the stored sequence are GELUs.
            inputs = config.hidden_size if index else merger_width
            target = f"projector.layers.{index}"
            sources += linear(target, f"linear_proj.{2 * index}", config.hidden_size, inputs)
        return sources

    def graphs(self, config: VisionConfig, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        group = config.patches_per_token
        dtype = dtype_name(options.dtype)

        def inputs(name: str, kind: DType, values: int) -> TensorSpec:
            return TensorSpec(name=name, dtype=kind, shape=("M", group, values))

        spec = GraphSpec(
            name="encode",
            inputs=(
                inputs("pixels", dtype, config.patch_values),
                inputs("position_index", "int64", 4),
                inputs("position_weight", "float32", 4),
                inputs("coordinates", "int64", 2),
                inputs("segment", "int32", 2),
            ),
            outputs=(TensorSpec(name="embeddings", dtype=dtype, shape=("M", config.hidden_size)),),
            dims=(_token_dim(options),),
        )

        def example(dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
            tables = example_tables(dims["M"], config.merge_size, config.position_grid_size)
            pixels = torch.randn(dims["M"], group, config.patch_values, generator=generator)
            return {"pixels": pixels.to(options.dtype), **tables}

        graph = GraphDef(
            spec=spec, method="encode", example=example, trace_dims={"M": 12}, check_dims={"M": 22}
        )
        return (graph,)

    def parameters(self, config: VisionConfig, options: StageOptions) -> VisionParameters:
        return VisionParameters(
            patch_size=config.patch_size,
            temporal_patch_size=config.temporal_patch_size,
            merge_size=config.merge_size,
            in_channels=config.in_channels,
            min_pixels=config.min_pixels,
            max_pixels=config.max_pixels,
            image_mean=config.image_mean,
            image_std=config.image_std,
            position_grid_size=config.position_grid_size,
            hidden_size=config.hidden_size,
            video_min_pixels=_VIDEO_MIN_PIXELS,
            video_total_pixels=_VIDEO_TOTAL_PIXELS,
            video_fps=_VIDEO_FPS,
            video_max_frames=_VIDEO_MAX_FRAMES,
            max_patches=_token_dim(options).maximum * config.patches_per_token,
        )

    def ignored(self, checkpoint: Checkpoint) -> Sequence[tuple[str, str]]:
        reason = (
            f"outputs of deepstack_visual_indexes {_deepstack_layers(checkpoint)} are never injected into the decoder, "
            "as in the reference (use_deepstack is off)"
        )
        return ((_DEEPSTACK, reason),)


def _deepstack_layers(checkpoint: Checkpoint) -> list[Any]:
    found = checkpoint.main.config["vision_config"].get("deepstack_visual_indexes")
    return found if isinstance(found, list) else []


STAGE = VisionEncoderStage()


@dataclass(frozen=True, kw_only=True, slots=True)
class _ImageSettings:
    """Image settings of `preprocessor_config.json`."""

    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    def read(cls, file: Path, sizes: dict[str, int]) -> _ImageSettings:
        """Read `file` and check that its patch, temporal and merge sizes equal the encoder's `sizes`."""
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{file.name} cannot be read ({error})",
                where=str(file),
                fix="copy preprocessor_config.json from the model's code repository into the checkpoint",
            ) from error
        check_fields(values, IMAGES, str(file))
        needed = ("min_pixels", "max_pixels", "image_mean", "image_std", *sizes)
        missing = [key for key in needed if key not in values]
        if missing:
            raise CheckpointError(f"missing key(s): {', '.join(missing)}", where=str(file))
        for key, size in sizes.items():
            if values[key] != size:
                message = f"{key} is {values[key]}, but vision_config of config.json has {size}"
                raise CheckpointError(message, where=str(file))
        red, green, blue = values["image_mean"]
        mean = (float(red), float(green), float(blue))
        red, green, blue = values["image_std"]
        std = (float(red), float(green), float(blue))
        return cls(min_pixels=values["min_pixels"], max_pixels=values["max_pixels"], mean=mean, std=std)


def _inverse_frequency(count: int) -> Tensor:
    """Rotary frequencies base^(−i/count) for i < count (§5: exponent −2i/36 with 18 frequencies)."""
    exponent = torch.arange(0, 2 * count, 2, dtype=torch.float32) / (2 * count)
    return 1.0 / _ROTARY_BASE**exponent


def _token_dim(options: StageOptions) -> Dim:
    """Dim M with doubling buckets."""
    largest = _MAX_TOKENS if options.device == "cuda" else _MAX_TOKENS_WITH_MASK
    smallest = _MIN_STATIC_BUCKET if options.static_buckets else 1
    return Dim(name="M", minimum=1, maximum=largest, buckets=doubling_buckets(smallest, largest))
