"""Glyph encoder: bytes of the text that a picture shall show → rows that the sampler reads behind the condition.

A T5 encoder over bytes and added tokens, then a mapper of further T5 blocks (spec: imagegen.md §2). Their weights are
pickles; the base weights, which they replace, are not read. Shape letters: B texts, L tokens, C width of a row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.artifacts.parameters import GlyphParameters
from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.artifacts.stage_graph import Edge
from mingc.errors import CheckpointError
from mingc.export.checkpoint import FIX, Checkpoint, Part
from mingc.export.config_fields import BYT5, check_fields
from mingc.export.layers.linear import empty_weight
from mingc.export.layers.t5 import T5Config, T5Stack, distance_buckets, read_t5_config, t5_stack_weights
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, WeightSource
from mingc.export.weights.mapping import stored
from mingc.kernels.rms_norm import rms_norm

_PART = "byt5"
_ENCODER, _MAPPER = "byt5_model.", "byt5_mapper."  # names of the pickles before those of their tensors
_NUM_BYTE_TOKENS = 384  # of ByT5: 3 special tokens, 256 bytes, 125 extra tokens
_LANGUAGES = ("cn-", "en-", "jp-", "kr-")
_MAX_BATCH = 2  # texts of a prompt and of a negative prompt
_PAD = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GlyphConfig:
    """Geometry of encoder and mapper.

    Attributes:
        added_tokens: behind those of ByT5, in the order of their ids.
        width: of a row.
    """

    encoder: T5Config
    mapper: T5Config
    max_length: int
    added_tokens: tuple[str, ...]
    width: int


class Glyph(nn.Module):
    """Encoder and mapper."""

    buckets: Tensor

    def __init__(self, config: GlyphConfig) -> None:
        super().__init__()
        self.eps = config.encoder.eps
        hidden = config.encoder.hidden_size
        self.register_buffer("buckets", torch.empty(config.max_length, config.max_length, dtype=torch.int64))
        self.embedding = empty_weight(_NUM_BYTE_TOKENS + len(config.added_tokens), hidden)
        self.encoder = T5Stack(config.encoder)
        self.encoder_norm = empty_weight(hidden)
        self.mapper = T5Stack(config.mapper)
        self.mapper_norm = empty_weight(hidden)
        self.channels = nn.Linear(hidden, config.width)
        self.norm = empty_weight(config.width)

    def encode(self, ids: Tensor) -> tuple[Tensor]:
        """Ids (B, L) int64, padded with 0 behind the end token → rows (B, L, C) float32, those of padding 0."""
        # A text may have the padding token in it, so padding is what no other token follows.
        is_valid = (ids != _PAD).flip(1).cumsum(1).flip(1) > 0
        x = self.encoder(F.embedding(ids, self.embedding), is_valid, self.buckets)
        x = self.mapper(rms_norm(x, self.encoder_norm, self.eps), is_valid, self.buckets)
        x = rms_norm(self.channels(rms_norm(x, self.mapper_norm, self.eps)), self.norm, self.eps)
        return (x.float() * is_valid.unsqueeze(-1),)


class GlyphStage(Stage):
    """The stage `glyph`."""

    name = "glyph"
    policy = "once"
    edges = (Edge("glyph", "image_dit", "glyph"),)

    def is_present(self, checkpoint: Checkpoint) -> bool:
        return _PART in checkpoint.parts

    def config(self, checkpoint: Checkpoint) -> GlyphConfig:
        part = checkpoint.part(_PART)
        check_fields(part.config, BYT5, str(part.config_file))
        for flag in ("special_token", "color_special_token", "font_special_token", "multilingual"):
            part.require(flag, "byt5_config")
        part.require("byt5_mapper_type")
        file = _path(part, "byt5_ckpt_path") / "config.json"
        encoder = read_t5_config(_read(file), str(file))
        colours, fonts = (_read(_path(part, key)) for key in ("color_ann_path", "font_ann_path"))
        for name, number in fonts.items():
            if not isinstance(number, int) or isinstance(number, bool):
                raise CheckpointError(
                    f"the number of the font {name} is {number!r}, expected a whole number",
                    where=str(_path(part, "font_ann_path")),
                    fix=FIX,
                )
        return GlyphConfig(
            encoder=encoder,
            mapper=replace(encoder, num_layers=part.size("num_layers", "byt5_mapper_config")),
            max_length=part.size("byt5_max_length"),
            added_tokens=(*(f"<color-{index}>" for index in range(len(colours))), *map(_font, fonts.items())),
            width=part.size("sdxl_channels", "byt5_mapper_config"),
        )

    def build(self, config: GlyphConfig, shard: Shard) -> Glyph:
        return Glyph(config)

    def weights(self, config: GlyphConfig, shard: Shard) -> Sequence[WeightSource]:
        hidden, encoder = config.encoder.hidden_size, config.encoder
        num_tokens = _NUM_BYTE_TOKENS + len(config.added_tokens)

        def copy(name: str, tensor: str, *shape: int) -> WeightSource:
            return stored(name, tensor, *shape, part=_PART)

        buckets = WeightSource(
            name="buckets",
            part=_PART,
            compute=lambda: distance_buckets(config.max_length, encoder.num_buckets, encoder.max_distance),
            dtype=torch.int64,
        )
        return (
            buckets,
            copy("embedding", _ENCODER + "embed_tokens.weight", num_tokens, hidden),
            *t5_stack_weights(encoder, part=_PART, source=_ENCODER + "block.", target="encoder."),
            copy("encoder_norm", _ENCODER + "final_layer_norm.weight", hidden),
            *t5_stack_weights(config.mapper, part=_PART, source=_MAPPER + "blocks.", target="mapper."),
            copy("mapper_norm", _MAPPER + "layer_norm.weight", hidden),
            copy("channels.weight", _MAPPER + "channel_mapper.weight", config.width, hidden),
            copy("channels.bias", _MAPPER + "channel_mapper.bias", config.width),
            copy("norm", _MAPPER + "final_layer_norm.weight", config.width),
        )

    def graphs(self, config: GlyphConfig, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        length = config.max_length
        spec = GraphSpec(
            name="encode",
            inputs=(TensorSpec(name="ids", dtype="int64", shape=("B", length)),),
            outputs=(TensorSpec(name="rows", dtype="float32", shape=("B", length, config.width)),),
            dims=(Dim(name="B", minimum=1, maximum=_MAX_BATCH, buckets=(1, _MAX_BATCH)),),
        )

        def example(dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
            """Texts of random bytes, each with an end token."""
            ids = torch.randint(3, 259, (dims["B"], length), generator=generator)
            ends = torch.randint(1, length, (dims["B"], 1), generator=generator)
            place = torch.arange(length)
            return {"ids": torch.where(place < ends, ids, (place == ends).to(torch.int64))}

        graph = GraphDef(
            spec=spec,
            method="encode",
            example=example,
            trace_dims={"B": _MAX_BATCH},
            check_dims={"B": _MAX_BATCH},
        )
        return (graph,)

    def parameters(self, config: GlyphConfig, options: StageOptions) -> GlyphParameters:
        return GlyphParameters(
            max_length=config.max_length, width=config.width, added_tokens=config.added_tokens
        )


def _path(part: Part, key: str) -> Path:
    """A path that `byt5_config` names, relative to the folder of the part."""
    return part.root / str(part.require(key, "byt5_config"))


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the file cannot be read: {error}",
            where=str(file),
            fix=FIX,
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"the file has {type(value).__name__}, expected an object", where=str(file), fix=FIX
        )
    return value


def _font(entry: tuple[str, Any]) -> str:
    """The token of a font, from its name and number."""
    name, number = entry
    prefix = next((each for each in _LANGUAGES if name.startswith(each)), "")
    return f"<{prefix}font-{number}>"


STAGE = GlyphStage()
