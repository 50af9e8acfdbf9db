"""T5 v1.1 encoder blocks, of the glyph encoder and of its mapper.

Linear layers have no bias, attention has no scale; a learned bias depends on the distance between two tokens. Source:
HF T5; spec: imagegen.md §2.3. Shape letters: B texts, L tokens, D width, H heads, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.errors import CheckpointError
from mingc.export.checkpoint import check_number, check_size
from mingc.export.config_fields import T5, check_fields
from mingc.export.layers.linear import empty_weight
from mingc.export.stage import WeightSource
from mingc.export.weights.mapping import stored
from mingc.kernels.rms_norm import rms_norm


@dataclass(frozen=True, kw_only=True, slots=True)
class T5Config:
    """Geometry of one stack of blocks."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    num_layers: int
    eps: float
    num_buckets: int
    max_distance: int


def read_t5_config(raw: dict[str, Any], where: str) -> T5Config:
    """Read the geometry of the encoder from a HF `config.json` object. Raises: CheckpointError."""
    needed = ("d_model", "d_ff", "num_heads", "d_kv", "num_layers", "feed_forward_proj")
    if missing := [key for key in needed if key not in raw]:
        raise CheckpointError(f"config keys missing: {', '.join(missing)}", where=where)
    check_fields(raw, T5, where)

    def size(key: str, default: int | None = None) -> int:
        return check_size(raw.get(key, default), key, where)

    return T5Config(
        hidden_size=size("d_model"),
        intermediate_size=size("d_ff"),
        num_heads=size("num_heads"),
        head_dim=size("d_kv"),
        num_layers=size("num_layers"),
        eps=check_number(raw.get("layer_norm_epsilon", 1e-6), "layer_norm_epsilon", where),
        num_buckets=size("relative_attention_num_buckets", 32),
        max_distance=size("relative_attention_max_distance", 128),
    )


class T5Block(nn.Module):
    """Self-attention and a gated feed-forward, each with a norm before it."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        self.num_heads, self.head_dim, self.eps = config.num_heads, size, config.eps
        self.attention_norm = empty_weight(hidden)
        self.qkv = empty_weight(3 * config.num_heads * size, hidden)
        self.out = empty_weight(hidden, config.num_heads * size)
        self.mlp_norm = empty_weight(hidden)
        self.gate_up = empty_weight(2 * inner, hidden)
        self.down = empty_weight(hidden, inner)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x (B, L, D); bias (B, H, L, L), to add to the scores."""
        packed = F.linear(rms_norm(x, self.attention_norm, self.eps), self.qkv)
        shape = (*packed.shape[:2], 3, self.num_heads, self.head_dim)
        q, k, v = packed.view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        x = x + F.linear(context.transpose(1, 2).flatten(2), self.out)
        gate, up = F.linear(rms_norm(x, self.mlp_norm, self.eps), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.gelu(gate, approximate="tanh") * up, self.down)


class T5Stack(nn.Module):
    """Blocks that share the distance bias of the first one. The norm after the last block is not part of it."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.distance_bias = empty_weight(config.num_buckets, config.num_heads)
        self.blocks = nn.ModuleList(T5Block(config) for _ in range(config.num_layers))

    def forward(self, x: Tensor, is_valid: Tensor, buckets: Tensor) -> Tensor:
        """x (B, L, D); is_valid (B, L): what may be attended to; buckets (L, L), see `distance_buckets`."""
        bias = F.embedding(buckets, self.distance_bias).permute(2, 0, 1)[None]
        bias = bias.masked_fill(~is_valid[:, None, None], -math.inf)
        for block in self.blocks:
            x = block(x, bias)
        return x


def distance_buckets(length: int, num_buckets: int, max_distance: int) -> Tensor:
    """Row (length, length) int64 of the bias table for each query (axis 0) and key.

    Keys after the query have the second half of the rows. In each half, the first half is for exact distances; the
    others grow with the logarithm of the distance, up to `max_distance`.
    """
    index = torch.arange(length)
    distance = index[None] - index[:, None]
    half, exact = num_buckets // 2, num_buckets // 4
    near = distance.abs()
    grown = torch.log(near.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (half - exact)
    far = (exact + grown.to(torch.int64)).clamp(max=half - 1)
    return torch.where(near < exact, near, far) + half * (distance > 0)


def t5_stack_weights(config: T5Config, *, part: str, source: str, target: str) -> list[WeightSource]:
    """Sources of a `T5Stack` with prefix `target` in the module; its blocks are `source` + number in the checkpoint."""
    hidden, inner, rows = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim

    def pack(name: str, tensors: Sequence[str], outputs: int) -> WeightSource:
        return WeightSource(
            name=name,
            part=part,
            tensors=tuple(tensors),
            shapes=((outputs, hidden),) * len(tensors),
            compute=lambda *values: torch.cat(values),
        )

    bias = f"{source}0.layer.0.SelfAttention.relative_attention_bias.weight"
    sources = [stored(f"{target}distance_bias", bias, config.num_buckets, config.num_heads, part=part)]
    for index in range(config.num_layers):
        block, attention = f"{target}blocks.{index}.", f"{source}{index}.layer.0."
        mlp = f"{source}{index}.layer.1."
        sources += [
            stored(block + "attention_norm", attention + "layer_norm.weight", hidden, part=part),
            pack(block + "qkv", [f"{attention}SelfAttention.{letter}.weight" for letter in "qkv"], rows),
            stored(block + "out", attention + "SelfAttention.o.weight", hidden, rows, part=part),
            stored(block + "mlp_norm", mlp + "layer_norm.weight", hidden, part=part),
            pack(block + "gate_up", [f"{mlp}DenseReluDense.wi_{half}.weight" for half in (0, 1)], inner),
            stored(block + "down", mlp + "DenseReluDense.wo.weight", hidden, inner, part=part),
        ]
    return sources
