"""Transformer of the flow-matching DiT and of the aggregator (spec: talker.md §7.1, §7.2).

Shape letters: N sequences, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mingc.errors import CheckpointError
from mingc.export.config_fields import DIT, check_fields
from mingc.export.layers.linear import Linear
from mingc.export.stage import WeightSource
from mingc.kernels.flow_sampler import BlockWeights, TransformerWeights
from mingc.kernels.linear import ResidualState, add_linear, begin_residual, normed_linear, slice_tokens
from mingc.kernels.small_sequence_attention import small_sequence_attention

_EPS = 1e-6
_ROPE_BASE = 10000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DitConfig:
    """Geometry of one transformer over latents; its sequences have a fixed length of `num_tokens`."""

    depth: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    latent_dim: int
    out_size: int
    num_tokens: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def read_dit_config(raw: dict[str, Any], where: str, *, num_tokens: int, out_size: int | None) -> DitConfig:
    """Read the geometry from one section of the talker's config; an `out_size` of None means the latent width.

    Raises: CheckpointError for a missing key or a variant that is not implemented.
    """
    missing = [key for key in ("depth", "hidden_size", "num_heads", "in_channels") if key not in raw]
    if missing:
        raise CheckpointError(f"config keys missing: {', '.join(missing)}", where=where)
    check_fields(raw, DIT, where)
    hidden, heads = int(raw["hidden_size"]), int(raw["num_heads"])
    if hidden % heads or (hidden // heads) % 2:
        raise CheckpointError(f"width {hidden} does not divide into {heads} heads of even size", where=where)
    latent = int(raw["in_channels"])
    return DitConfig(
        depth=int(raw["depth"]),
        hidden_size=hidden,
        num_heads=heads,
        mlp_size=int(hidden * float(raw.get("mlp_ratio", 4))),
        latent_dim=latent,
        out_size=latent if out_size is None else out_size,
        num_tokens=num_tokens,
    )


class DitBlock(nn.Module):
    """Pre-norm attention and GELU MLP, without modulation."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = nn.Parameter(torch.empty(width))
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)
        self.mlp_norm = nn.Parameter(torch.empty(width))
        self.up = Linear(width, config.mlp_size)
        self.down = Linear(config.mlp_size, width)

    def forward(
        self, x: ResidualState, cos: Tensor, sin: Tensor, next_norm: Tensor, kept: slice | None = None
    ) -> ResidualState:
        """Residual stream (N, T, D) → (N, T, D) before `next_norm`.

        With `kept`, only these tokens are computed after attention and returned.
        """
        qkv, out, up, down = self.qkv, self.out, self.up, self.down
        packed = normed_linear(x, qkv.weight, qkv.bias, _EPS, weight_scale=qkv.weight_scale)
        context = small_sequence_attention(packed, cos, sin)
        if kept is not None:
            x, context = slice_tokens(x, kept), context[:, kept]
        x = add_linear(context, out.weight, out.bias, x, self.mlp_norm, _EPS, out.weight_scale)
        inner = normed_linear(x, up.weight, up.bias, _EPS, "gelu", up.weight_scale)
        return add_linear(inner, down.weight, down.bias, x, next_norm, _EPS, down.weight_scale)

    def weights(self) -> BlockWeights:
        """Parameters for kernels that run the whole transformer."""
        return BlockWeights(
            attention_norm=self.attention_norm,
            qkv=self.qkv.weight,
            qkv_bias=_present(self.qkv.bias),
            out=self.out.weight,
            out_bias=_present(self.out.bias),
            mlp_norm=self.mlp_norm,
            up=self.up.weight,
            up_bias=_present(self.up.bias),
            down=self.down.weight,
            down_bias=_present(self.down.bias),
        )


class LatentTransformer(nn.Module):
    """Blocks, final norm and output projection; RoPE tables are float32 buffers of the fixed length."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.latent_dim, config.hidden_size)
        self.blocks = nn.ModuleList(DitBlock(config) for _ in range(config.depth))
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        self.project = nn.Linear(config.hidden_size, config.out_size)
        table = (config.num_tokens, config.head_dim // 2)
        self.register_buffer("cos", torch.empty(table, dtype=torch.float32))
        self.register_buffer("sin", torch.empty(table, dtype=torch.float32))

    def embed_latents(self, latents: Tensor) -> Tensor:
        """(N, T, latent_dim) float32 → (N, T, D) in the weights' dtype."""
        out: Tensor = self.embed(latents.to(self.embed.weight.dtype))
        return out

    def norms(self) -> list[Tensor]:
        """Weights of the norm before each block's attention, and of the final norm."""
        return [*(block.get_parameter("attention_norm") for block in self.blocks), self.norm]

    def weights(self) -> TransformerWeights:
        """Parameters for kernels that run the whole transformer, without the output projection."""
        blocks = [block.weights() for block in self.blocks if isinstance(block, DitBlock)]
        return TransformerWeights(blocks, self.norm, self.cos, self.sin, self.embed.weight, self.embed.bias)

    def project_rows(self, x: Tensor) -> Tensor:
        """Final norm and projection of tokens (N, D) → (N, out_size)."""
        rows = begin_residual(x, self.norm, _EPS)
        out: Tensor = normed_linear(rows, self.project.weight, self.project.bias, _EPS)
        return out

    def forward(self, x: Tensor, kept: slice) -> Tensor:
        """Tokens (N, T, D) → projected outputs (N, number kept, out_size) of the tokens `kept`."""
        last = len(self.blocks) - 1
        norms = self.norms()
        rows = begin_residual(x, norms[0], _EPS)
        for index, block in enumerate(self.blocks):
            rows = block(rows, self.cos, self.sin, norms[index + 1], kept if index == last else None)
        out: Tensor = normed_linear(rows, self.project.weight, self.project.bias, _EPS)
        return out


def latent_transformer_weights(
    config: DitConfig, *, part: str, source: str, target: str
) -> list[WeightSource]:
    """Sources of a `LatentTransformer` named `target` in the module and `source` in the checkpoint."""
    width, inner = config.hidden_size, config.mlp_size

    def pack(name: str, tensors: tuple[str, ...], *shape: int) -> WeightSource:
        return WeightSource(
            name=target + name,
            part=part,
            tensors=tuple(source + tensor for tensor in tensors),
            shapes=(shape,) * len(tensors),
            compute=lambda *values: values[0] if len(values) == 1 else torch.cat(values),
            # Only the blocks: the small matrices at either end are read once per call.
            quantizable="linear" if name.startswith("blocks.") and len(shape) == 2 else None,
        )

    def linear(name: str, tensor: str, rows: int, columns: int) -> list[WeightSource]:
        return [
            pack(f"{name}.weight", (f"{tensor}.weight",), rows, columns),
            pack(f"{name}.bias", (f"{tensor}.bias",), rows),
        ]

    sources = [
        *linear("embed", "x_embedder", width, config.latent_dim),
        pack("norm", ("final_layer.norm_final.weight",), width),
        *linear("project", "final_layer.linear", config.out_size, width),
    ]
    for index in range(config.depth):
        block = f"blocks.{index}."
        letters = tuple(f"{block}attn.to_{letter}." for letter in "qkv")
        sources += [
            pack(block + "attention_norm", (block + "norm1.weight",), width),
            pack(block + "qkv.weight", tuple(name + "weight" for name in letters), width, width),
            pack(block + "qkv.bias", tuple(name + "bias" for name in letters), width),
            *linear(block + "out", block + "attn.to_out.0", width, width),
            pack(block + "mlp_norm", (block + "norm2.weight",), width),
            *linear(block + "up", block + "mlp.ff.0.0", inner, width),
            *linear(block + "down", block + "mlp.ff.2", width, inner),
        ]
    for name in ("cos", "sin"):
        sources.append(
            WeightSource(
                name=target + name,
                part=part,
                compute=lambda name=name: getattr(torch, name)(_rope_angles(config)),
                dtype=torch.float32,
            )
        )
    return sources


def _present(bias: Tensor | None) -> Tensor:
    """`bias`, which every linear layer of a block has."""
    assert bias is not None
    return bias


def _rope_angles(config: DitConfig) -> Tensor:
    """RoPE angles (num_tokens, head_dim/2) float32, recomputed because the checkpoint's `inv_freq` may be rounded."""
    frequencies = 1.0 / _ROPE_BASE ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    return torch.arange(config.num_tokens).float().unsqueeze(1) * frequencies
