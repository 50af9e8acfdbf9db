"""Stages of pictures made of Python functions: what they return depends on all of their inputs."""

from __future__ import annotations

import torch
from fake_engines import CPU, HIDDEN, make_graph
from torch import Tensor

from mingc.artifacts.parameters import (
    GlyphParameters,
    ImageConditionParameters,
    ImageDitParameters,
    ImageVaeParameters,
)
from mingc.runtime.engines.stage_loader import LoadedStage

QUERIES, ROW, GLYPHS, WIDTH, CHANNELS, PATCH, SCALE = 3, 5, 24, 7, 2, 2, 8
VALUES = CHANNELS * PATCH**2
BLOCKS = ("noise_refiner.0", "layers.0", "layers.1")
_TOKENS, _SIDES = tuple(range(4, 4096, 4)), tuple(range(1, 257))
CONDITION = ImageConditionParameters(num_queries=(1, QUERIES), width=ROW)
GLYPH = GlyphParameters(max_length=GLYPHS, width=ROW, added_tokens=("<color-0>",))
DIT = ImageDitParameters(
    latent_channels=CHANNELS,
    patch_size=PATCH,
    token_multiple=4,
    caption_width=ROW,
    hidden_size=WIDTH,
    feed_forward_size=2 * WIDTH,
    max_positions=(64, 128, 128),
    num_train_steps=1000,
    shift=3.0,
    is_shift_dynamic=False,
    dynamic_tokens=(256, 4096),
    dynamic_shifts=(0.5, 1.15),
    num_steps=6,
    guidance=2.0,
)
VAE = ImageVaeParameters(latent_channels=CHANNELS, block_channels=(3, 4, 5, 5))


def image_stages(device: torch.device = CPU) -> dict[str, LoadedStage]:
    """The four stages, by name."""
    order, weights_of_place = (
        torch.arange(1, ROW + 1, device=device),
        torch.tensor([0.1, 0.2, 0.3], device=device),
    )

    def condition(residual: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        return ((residual + delta).sin().sum(1, keepdim=True) * order,)

    def glyph(ids: Tensor) -> tuple[Tensor, ...]:
        return (ids[..., None].float().sin().expand(*ids.shape, ROW),)

    def caption(rows: Tensor, is_pad: Tensor) -> tuple[Tensor, ...]:
        return ((rows.sum(2) + is_pad.float())[..., None].cos().expand(*rows.shape[:2], WIDTH),)

    def begin(latents: Tensor, positions: Tensor, is_pad: Tensor, time: Tensor) -> tuple[Tensor, ...]:
        x = latents[..., :WIDTH] * 0.3 + is_pad.float()[:, None] + latents.mean((1, 2))[:, None, None]
        place = (positions.float() @ weights_of_place)[:, None]
        return x, place.cos(), place.sin(), time[:, None]

    def block(x: Tensor, cos: Tensor, sin: Tensor, embedded: Tensor) -> tuple[Tensor, ...]:
        return ((x + cos * 0.2 + sin + x.mean((1, 2))[:, None, None] + embedded[:, None]) * 0.5,)

    def end(x: Tensor, embedded: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat((x, x.mean(2, keepdim=True) + embedded[:, None]), dim=2),)

    def decode(latents: Tensor) -> tuple[Tensor, ...]:
        cells = latents.sum(1)[:, None, :, None, :, None].sin()
        return (cells.expand(1, 3, latents.shape[2], SCALE, latents.shape[3], SCALE),)

    def encode(pixels: Tensor) -> tuple[Tensor, ...]:
        return (pixels.mean((1, 3, 5))[:, None].expand(1, CHANNELS, *pixels.shape[2:5:2]),)

    batches, rows = (
        (1, 2, 4),
        {"residual": ("float32", (QUERIES, HIDDEN)), "delta": ("float32", (QUERIES, HIDDEN))},
    )
    graphs = {
        "image_condition": [
            make_graph("condition", condition, inputs=rows, outputs=("rows",), state={}, dims={})
        ],
        "glyph": [
            make_graph(
                "encode",
                glyph,
                inputs={"ids": ("int64", ("B", GLYPHS))},
                outputs=("rows",),
                state={},
                dims={"B": (1, 2)},
            )
        ],
        "image_dit": [
            make_graph(
                "caption",
                caption,
                inputs={"rows": ("float32", ("B", "K", ROW)), "is_pad": ("bool", ("K",))},
                outputs=("caption",),
                state={},
                dims={"B": batches, "K": _TOKENS},
            ),
            make_graph(
                "begin",
                begin,
                inputs={
                    "latents": ("float32", ("B", "N", VALUES)),
                    "positions": ("int64", ("T", 3)),
                    "is_pad": ("bool", ("N",)),
                    "time": ("float32", ("B",)),
                },
                outputs=("x", "cos", "sin", "embedded"),
                state={},
                dims={"B": batches, "N": _TOKENS, "T": _TOKENS},
            ),
            make_graph(
                "block",
                block,
                inputs={
                    "x": ("float32", ("B", "T", WIDTH)),
                    "cos": ("float32", ("T", 1)),
                    "sin": ("float32", ("T", 1)),
                    "embedded": ("float32", ("B", 1)),
                },
                outputs=("x",),
                state={},
                dims={"B": batches, "T": _TOKENS},
                layer_instances=BLOCKS,
            ),
            make_graph(
                "end",
                end,
                inputs={"x": ("float32", ("B", "T", WIDTH)), "embedded": ("float32", ("B", 1))},
                outputs=("velocity",),
                state={},
                dims={"B": batches, "T": _TOKENS},
            ),
        ],
        "image_vae": [
            make_graph(
                "decode",
                decode,
                inputs={"latents": ("float32", (1, CHANNELS, "h", "w"))},
                outputs=("pixels",),
                state={},
                dims={"h": _SIDES, "w": _SIDES},
            ),
            make_graph(
                "encode",
                encode,
                inputs={"pixels": ("float32", (1, 3, "h", SCALE, "w", SCALE))},
                outputs=("latents",),
                state={},
                dims={"h": _SIDES, "w": _SIDES},
            ),
        ],
    }
    queries = torch.arange((1 + QUERIES) * HIDDEN).reshape(-1, HIDDEN).float().to(device)
    weights = {"image_condition": {"queries": queries}}
    return {
        name: LoadedStage(name, {graph.spec.name: graph for graph in found}, weights.get(name, {}))
        for name, found in graphs.items()
    }
