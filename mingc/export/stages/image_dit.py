"""Sampler of pictures: the caption's rows once a picture, then the velocity of its latents once a step, block by block.

The steps themselves are the runtime's: it guides, integrates, and gives way or stops between two blocks. Noise refiners
and layers share the engine of `block`. Latents, times and velocities are float32; the networks run in the recipe's
dtype (spec: imagegen.md §4, §5, §9).

Shape letters: B sequences (with guidance two a picture), N tokens of the picture, K rows of the caption, T tokens of
both or, in a noise refiner, of the picture; P values of a token, C width of a caption row, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.artifacts.parameters import ImageDitParameters
from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.artifacts.stage_graph import Edge
from mingc.dtypes import dtype_name
from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint, Part
from mingc.export.config_fields import IMAGE_DIT, SCHEDULER, check_fields
from mingc.export.layers.image_transformer import (
    ImageTransformer,
    ImageTransformerConfig,
    image_transformer_weights,
)
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, WeightSource

_PART = "transformer"
_MULTIPLE = 32  # tokens of picture and caption are padded to multiples of this, in the reference
_MAX_TOKENS = 16384  # a picture of 2048 × 2048, or two frames of a smaller one
# With guidance, of 1024 × 1024 pixels, and at the released sizes with a text to show.
_TYPICAL_DIMS = {"B": 2, "N": 4096, "K": 512, "T": 4096 + 512}
# Default arguments of the reference.
_NUM_STEPS = 30
_GUIDANCE = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageDitConfig:
    """Geometry of the transformer and the schedule of times."""

    transformer: ImageTransformerConfig
    num_train_steps: int
    shift: float
    is_shift_dynamic: bool
    dynamic_tokens: tuple[int, int]
    dynamic_shifts: tuple[float, float]

    @property
    def max_caption_rows(self) -> int:
        """The caption begins at position 1, and two frames follow it on the same axis."""
        return (self.transformer.axes_lens[0] - 3) // _MULTIPLE * _MULTIPLE


class ImageDitStage(Stage):
    """The stage `image_dit`, which is not sharded."""

    name = "image_dit"
    policy = "loop"
    edges = (Edge("image_dit", "image_vae", "latents"),)
    quantizations = ("fp8",)

    def is_present(self, checkpoint: Checkpoint) -> bool:
        return _PART in checkpoint.parts

    def config(self, checkpoint: Checkpoint) -> ImageDitConfig:
        transformer, schedule = checkpoint.part(_PART), checkpoint.part("scheduler")
        check_fields(schedule.config, SCHEDULER, str(schedule.config_file))

        def value(key: str, default: float) -> float:
            return schedule.number(key, is_signed=True) if key in schedule.config else default

        def count(key: str, default: int) -> int:
            return schedule.size(key) if key in schedule.config else default

        config = ImageDitConfig(
            transformer=_transformer_config(transformer),
            num_train_steps=schedule.size("num_train_timesteps"),
            shift=schedule.number("shift"),
            is_shift_dynamic=schedule.flag("use_dynamic_shifting"),
            # The defaults of the reference's scheduler.
            dynamic_tokens=(count("base_image_seq_len", 256), count("max_image_seq_len", 4096)),
            dynamic_shifts=(value("base_shift", 0.5), value("max_shift", 1.15)),
        )
        if config.dynamic_tokens[0] >= config.dynamic_tokens[1] or config.shift <= 0:
            raise CheckpointError(
                f"base_image_seq_len {config.dynamic_tokens[0]} must be less than max_image_seq_len "
                f"{config.dynamic_tokens[1]}, and shift {config.shift} positive",
                where=str(schedule.config_file),
            )
        return config

    def build(self, config: ImageDitConfig, shard: Shard) -> nn.Module:
        return ImageTransformer(config.transformer)

    def weights(self, config: ImageDitConfig, shard: Shard) -> Sequence[WeightSource]:
        return image_transformer_weights(config.transformer, part=_PART)

    def graphs(self, config: ImageDitConfig, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        graphs = _Graphs(config, options)
        return [graphs.caption(), graphs.begin(), graphs.block(), graphs.end()]

    def parameters(self, config: ImageDitConfig, options: StageOptions) -> ImageDitParameters:
        transformer = config.transformer
        frames, rows, columns = transformer.axes_lens
        return ImageDitParameters(
            latent_channels=transformer.latent_channels,
            patch_size=transformer.patch_size,
            token_multiple=_MULTIPLE,
            caption_width=transformer.caption_width,
            hidden_size=transformer.hidden_size,
            feed_forward_size=transformer.feed_forward_size,
            max_positions=(frames, rows, columns),
            num_train_steps=config.num_train_steps,
            shift=config.shift,
            is_shift_dynamic=config.is_shift_dynamic,
            dynamic_tokens=config.dynamic_tokens,
            dynamic_shifts=config.dynamic_shifts,
            num_steps=_NUM_STEPS,
            guidance=_GUIDANCE,
        )


def _transformer_config(part: Part) -> ImageTransformerConfig:
    where = str(part.config_file)
    check_fields(part.config, IMAGE_DIT, where)
    width, heads = part.size("dim"), part.size("n_heads")
    axes_dims = part.sizes("axes_dims")
    axes_lens = part.sizes("axes_lens")
    patches = part.sizes("all_patch_size")
    problems = [
        message
        for is_wrong, message in (
            (width % heads, f"dim {width} does not divide into n_heads {heads}"),
            (part.size("n_kv_heads") != heads, f"n_kv_heads differs from n_heads {heads}"),
            (len(axes_dims) != 3 or len(axes_lens) != 3, "axes_dims and axes_lens must have 3 values each"),
            (any(size % 2 for size in axes_dims), f"axes_dims {list(axes_dims)} must be even"),
            (
                sum(axes_dims) * heads != width,
                f"axes_dims {list(axes_dims)} must add up to dim / n_heads, {width / heads:g}",
            ),
            (
                min(axes_lens, default=0) < 2 * _MULTIPLE,
                f"axes_lens {list(axes_lens)} must be {2 * _MULTIPLE} or more",
            ),
            (len(patches) != 1, f"all_patch_size {list(patches)} must be one size"),
        )
        if is_wrong
    ]
    if problems:
        raise CheckpointError("; ".join(problems), where=where)
    return ImageTransformerConfig(
        num_layers=part.size("n_layers"),
        num_refiner_layers=part.size("n_refiner_layers"),
        hidden_size=width,
        num_heads=heads,
        latent_channels=part.size("in_channels"),
        patch_size=patches[0],
        caption_width=part.size("cap_feat_dim"),
        eps=part.number("norm_eps"),
        rope_theta=part.number("rope_theta"),
        axes_dims=axes_dims,
        axes_lens=axes_lens,
        time_scale=part.number("t_scale"),
    )


class _Graphs:
    """Definitions of the graphs, with example inputs.

    Their dims have no buckets: one engine takes every size, on every target.
    """

    def __init__(self, config: ImageDitConfig, options: StageOptions) -> None:
        self._transformer, self._dtype = config.transformer, options.dtype
        rows = config.max_caption_rows
        self._dims = {
            "B": Dim(name="B", minimum=1, maximum=2 * options.max_batch),
            **{
                name: Dim(name=name, minimum=_MULTIPLE, maximum=most, multiple=_MULTIPLE)
                for name, most in (("N", _MAX_TOKENS), ("K", rows), ("T", _MAX_TOKENS + rows))
            },
        }

    def caption(self) -> GraphDef:
        width = self._transformer.caption_width

        def example(sizes: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
            rows = torch.randn(sizes["B"], sizes["K"], width, generator=generator)
            return {"rows": F.normalize(rows, dim=-1), "is_pad": torch.arange(sizes["K"]) >= sizes["K"] - 5}

        return self._graph(
            "caption",
            "BK",
            inputs=(
                TensorSpec(name="rows", dtype="float32", shape=("B", "K", width)),
                TensorSpec(name="is_pad", dtype="bool", shape=("K",)),
            ),
            outputs=(self._hidden("caption", "K"),),
            example=example,
        )

    def begin(self) -> GraphDef:
        columns = 8  # of the example's picture
        values = self._transformer.token_values

        def example(sizes: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
            batch, tokens, rows = sizes["B"], sizes["N"], sizes["T"] - sizes["N"]
            is_pad = torch.arange(tokens) >= tokens - columns
            index = torch.arange(tokens).where(~is_pad, 0)
            picture = (
                torch.where(is_pad, 0, rows + 1),
                index // columns % self._transformer.axes_lens[1],
                index % columns,
            )
            caption = (torch.arange(1, rows + 1), *(torch.zeros(rows, dtype=torch.int64) for _ in range(2)))
            return {
                "latents": torch.randn(batch, tokens, values, generator=generator),
                "positions": torch.cat((torch.stack(picture, 1), torch.stack(caption, 1))),
                "is_pad": is_pad,
                "time": torch.rand(batch, generator=generator),
            }

        return self._graph(
            "begin",
            "BNT",
            inputs=(
                TensorSpec(name="latents", dtype="float32", shape=("B", "N", values)),
                # Row or frame, row and column (§4.5). Tokens: (caption rows + 1 + frame, row, column), zeros of pads;
                # then rows of the caption: (1 + row, 0, 0).
                TensorSpec(name="positions", dtype="int64", shape=("T", 3)),
                TensorSpec(name="is_pad", dtype="bool", shape=("N",)),
                TensorSpec(name="time", dtype="float32", shape=("B",)),  # 1 - σ
            ),
            outputs=(self._hidden("x", "N"), *self._rope(), self._embedded()),
            example=example,
        )

    def block(self) -> GraphDef:
        """A noise refiner, of the picture's tokens, or a layer."""
        transformer = self._transformer

        def example(sizes: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
            angles = torch.arange(sizes["T"])[:, None] / 7.0 ** torch.arange(transformer.head_dim // 2)
            made = self._activations(sizes, generator)
            return {"x": made["x"], "cos": angles.cos(), "sin": angles.sin(), "embedded": made["embedded"]}

        return self._graph(
            "block",
            "BT",
            inputs=(self._hidden("x", "T"), *self._rope(), self._embedded()),
            outputs=(self._hidden("x", "T"),),
            example=example,
            method="modulated",
            layer_instances=(
                *(f"noise_refiner.{index}" for index in range(transformer.num_refiner_layers)),
                *(f"layers.{index}" for index in range(transformer.num_layers)),
            ),
        )

    def end(self) -> GraphDef:
        velocity = TensorSpec(
            name="velocity", dtype="float32", shape=("B", "T", self._transformer.token_values)
        )
        return self._graph(
            "end",
            "BT",
            inputs=(self._hidden("x", "T"), self._embedded()),
            outputs=(velocity,),
            example=self._activations,
        )

    def _graph(
        self,
        name: str,
        dims: str,
        *,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        example: Callable[[dict[str, int], torch.Generator], dict[str, Tensor]],
        method: str | None = None,
        layer_instances: tuple[str, ...] = ("ends",),
    ) -> GraphDef:
        def sizes(found: dict[str, int]) -> dict[str, int]:
            return {each: found[each] for each in dims}

        return GraphDef(
            spec=GraphSpec(
                name=name,
                inputs=inputs,
                outputs=outputs,
                dims=tuple(self._dims[each] for each in dims),
                layer_instances=layer_instances,
            ),
            method=method or name,
            example=example,
            trace_dims=sizes({"B": 2, "N": 5 * _MULTIPLE, "K": 3 * _MULTIPLE, "T": 8 * _MULTIPLE}),
            check_dims=sizes({"B": 2, "N": 2 * _MULTIPLE, "K": 2 * _MULTIPLE, "T": 4 * _MULTIPLE}),
            typical_dims=sizes(_TYPICAL_DIMS),
        )

    def _activations(self, sizes: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        transformer = self._transformer

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self._dtype)

        return {
            "x": drawn(sizes["B"], sizes["T"], transformer.hidden_size),
            "embedded": drawn(sizes["B"], transformer.time_width),
        }

    def _hidden(self, name: str, tokens: str) -> TensorSpec:
        shape = ("B", tokens, self._transformer.hidden_size)
        return TensorSpec(name=name, dtype=dtype_name(self._dtype), shape=shape)

    def _rope(self) -> tuple[TensorSpec, TensorSpec]:
        shape = ("T", self._transformer.head_dim // 2)
        return (
            TensorSpec(name="cos", dtype="float32", shape=shape),
            TensorSpec(name="sin", dtype="float32", shape=shape),
        )

    def _embedded(self) -> TensorSpec:
        """The embedded times."""
        shape = ("B", self._transformer.time_width)
        return TensorSpec(name="embedded", dtype=dtype_name(self._dtype), shape=shape)


STAGE = ImageDitStage()
