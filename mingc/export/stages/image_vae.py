"""VAE of pictures: latents → pixels, and the pixels of a reference picture → latents (spec: imagegen.md §6).

Latents and pixels are float32; the networks run in the recipe's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mingc.artifacts.parameters import ImageVaeParameters
from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.artifacts.stage_graph import CLIENT, Edge
from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.config_fields import IMAGE_VAE, check_fields
from mingc.export.layers.image_vae import ImageVae, ImageVaeConfig, image_vae_weights
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, WeightSource

_PART = "image_vae"
_MAX_ROWS = 256  # latents along a side: pictures of up to 2048 pixels
_TYPICAL_DIMS = {"h": 128, "w": 128}  # 1024 × 1024 pixels


class ImageVaeStage(Stage):
    """The stage `image_vae`: decode and encode."""

    name = "image_vae"
    policy = "once"
    edges = (Edge("image_vae", CLIENT, "picture"),)

    def is_present(self, checkpoint: Checkpoint) -> bool:
        return _PART in checkpoint.parts

    def config(self, checkpoint: Checkpoint) -> ImageVaeConfig:
        part = checkpoint.part(_PART)
        where = str(part.config_file)
        check_fields(part.config, IMAGE_VAE, where)
        channels = part.sizes("block_out_channels")
        groups, layers = part.size("norm_num_groups"), part.size("layers_per_block")
        if any(width % groups for width in channels):
            raise CheckpointError(
                f"block_out_channels {list(channels)} do not divide into norm_num_groups {groups}",
                where=where,
            )
        for kind in ("down", "up"):
            names = part.config.get(f"{kind}_block_types")
            usual = [f"{'Down' if kind == 'down' else 'Up'}{'En' if kind == 'down' else 'De'}coderBlock2D"]
            if names is not None and names != usual * len(channels):
                raise CheckpointError(
                    f"{kind}_block_types {names} are not implemented, only {len(channels)} × {usual[0]}",
                    where=where,
                )
        return ImageVaeConfig(
            latent_channels=part.size("latent_channels"),
            channels=channels,
            layers_per_block=layers,
            num_groups=groups,
            scaling=part.number("scaling_factor"),
            shift=part.number("shift_factor", is_signed=True),
            # diffusers has them unless the config says otherwise.
            has_quant_conv=part.flag("use_quant_conv", True),
            has_post_quant_conv=part.flag("use_post_quant_conv", True),
        )

    def build(self, config: ImageVaeConfig, shard: Shard) -> nn.Module:
        return ImageVae(config)

    def weights(self, config: ImageVaeConfig, shard: Shard) -> Sequence[WeightSource]:
        return image_vae_weights(config, part=_PART)

    def graphs(self, config: ImageVaeConfig, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        side = config.scale
        latents = TensorSpec(name="latents", dtype="float32", shape=(1, config.latent_channels, "h", "w"))
        pixels = TensorSpec(name="pixels", dtype="float32", shape=(1, 3, "h", side, "w", side))

        def graph(name: str, given: TensorSpec, made: TensorSpec) -> GraphDef:
            def example(sizes: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
                values = torch.randn(given.shape_at(sizes), generator=generator)
                return {given.name: values if given is latents else values.tanh()}

            return GraphDef(
                spec=GraphSpec(
                    name=name,
                    inputs=(given,),
                    outputs=(made,),
                    dims=tuple(Dim(name=each, minimum=2, maximum=_MAX_ROWS) for each in "hw"),
                ),
                method=name,
                example=example,
                trace_dims={"h": 6, "w": 10},
                check_dims={"h": 8, "w": 6},
                typical_dims=_TYPICAL_DIMS,
            )

        return [graph("decode", latents, pixels), graph("encode", pixels, latents)]

    def parameters(self, config: ImageVaeConfig, options: StageOptions) -> ImageVaeParameters:
        return ImageVaeParameters(latent_channels=config.latent_channels, block_channels=config.channels)


STAGE = ImageVaeStage()
