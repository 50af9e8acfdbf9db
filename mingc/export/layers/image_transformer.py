"""Transformer of the sampler of pictures: caption branch, velocity of latent tokens (spec: imagegen.md §4).

Shape letters: B sequences, N tokens of the picture, K rows of the caption, T tokens (N, or N + K), D width, E width of
the time embedding, d head size, P values of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.export.layers.linear import Linear, empty_weight
from mingc.export.stage import WeightSource
from mingc.export.weights.mapping import stored
from mingc.kernels.linear import linear
from mingc.kernels.modulated_norm import add_gated, add_gated_norm, modulated_norm
from mingc.kernels.norm_rotate_packed import norm_rotate_packed
from mingc.kernels.rms_norm import rms_norm
from mingc.kernels.silu_product import silu_product

_UNIT_EPS = 1e-12
_CAPTION_SCALE = 1000.0
_HEAD_EPS = 1e-6
_TIME_VALUES = 256
_TIME_HIDDEN = 1024
_TIME_BASE = 10000.0
_MAX_TIME_WIDTH = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTransformerConfig:
    """Geometry; `axes_dims` are the widths of a head that turn with caption row or frame, row and column."""

    num_layers: int
    num_refiner_layers: int
    hidden_size: int
    num_heads: int
    latent_channels: int
    patch_size: int
    caption_width: int
    eps: float
    rope_theta: float
    axes_dims: tuple[int, ...]
    axes_lens: tuple[int, ...]  # positions of each axis
    time_scale: float

    @property
    def token_values(self) -> int:
        return self.patch_size**2 * self.latent_channels

    @property
    def feed_forward_size(self) -> int:
        return int(self.hidden_size / 3 * 8)

    @property
    def time_width(self) -> int:
        return min(self.hidden_size, _MAX_TIME_WIDTH)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class ImageBlock(nn.Module):
    """Attention and SwiGLU, each between two norms; modulated by the time, or not at all."""

    def __init__(self, config: ImageTransformerConfig, *, is_modulated: bool) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.feed_forward_size
        self.eps, self.num_heads = config.eps, config.num_heads
        self.modulation = nn.Linear(config.time_width, 4 * width) if is_modulated else None
        self.attention_norm1, self.attention_norm2 = empty_weight(width), empty_weight(width)
        self.qkv = Linear(width, 3 * width, bias=False)
        self.q_norm, self.k_norm = empty_weight(config.head_dim), empty_weight(config.head_dim)
        self.out = Linear(width, width, bias=False)
        self.ffn_norm1, self.ffn_norm2 = empty_weight(width), empty_weight(width)
        self.gate_up = Linear(width, 2 * inner, bias=False)
        self.down = Linear(inner, width, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], time: Tensor | None = None) -> Tensor:
        """Tokens (B, T, D) → (B, T, D); `rope` as `attend` takes it, `time` (B, E) of a modulated block."""
        if self.modulation is None or time is None:
            attention_in = rms_norm(x, self.attention_norm1, self.eps)
            x = x + rms_norm(self.attend(attention_in, rope), self.attention_norm2, self.eps)
            inner = rms_norm(x, self.ffn_norm1, self.eps)
            plain: Tensor = x + rms_norm(self.feed_forward(inner), self.ffn_norm2, self.eps)
            return plain
        scale1, gate1, scale2, gate2 = self.modulation(time).chunk(4, dim=-1)
        context = self.attend(modulated_norm(x, self.attention_norm1, scale1, self.eps), rope)
        x, inner = add_gated_norm(x, context, self.attention_norm2, gate1, self.ffn_norm1, scale2, self.eps)
        return add_gated(x, self.feed_forward(inner), self.ffn_norm2, gate2, self.eps)

    def modulated(self, x: Tensor, cos: Tensor, sin: Tensor, embedded: Tensor) -> tuple[Tensor]:
        """A modulated block as a graph: `cos` and `sin` (T, d/2) float32, `embedded` (B, E)."""
        return (self(x, (cos, sin), embedded),)

    def attend(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Bidirectional attention within each sequence, (B, T, D) → (B, T, D).

        `rope`: cosines and sines (T, d/2) float32; value 2f of a head pairs with value 2f + 1.
        """
        batch, tokens, width = x.shape
        heads = self.num_heads
        packed = _linear(x, self.qkv)
        packed = packed.view(batch, tokens, 3, heads, width // heads)
        q, k = norm_rotate_packed(packed, self.q_norm, self.k_norm, *rope, self.eps)
        v = packed[:, :, 2]
        context = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return _linear(context.transpose(1, 2).reshape(batch, tokens, width), self.out)

    def feed_forward(self, x: Tensor) -> Tensor:
        return _linear(silu_product(_linear(x, self.gate_up)), self.down)


class ImageEnds(nn.Module):
    """Before and after the blocks: embeddings of tokens, caption and time, and the head.

    Angles of rope are float32 buffers.
    """

    def __init__(self, config: ImageTransformerConfig) -> None:
        super().__init__()
        self.config = config
        width, time_width = config.hidden_size, config.time_width
        self.embed = nn.Linear(config.token_values, width)
        self.token_pad, self.caption_pad = empty_weight(width), empty_weight(width)
        self.caption_norm = empty_weight(config.caption_width)
        self.caption_embed = nn.Linear(config.caption_width, width)
        self.time_in = nn.Linear(_TIME_VALUES, _TIME_HIDDEN)
        self.time_out = nn.Linear(_TIME_HIDDEN, time_width)
        self.context_refiner = nn.ModuleList(
            ImageBlock(config, is_modulated=False) for _ in range(config.num_refiner_layers)
        )
        self.head_scale = nn.Linear(time_width, width)
        self.head = nn.Linear(width, config.token_values)
        for axis, (size, length) in enumerate(zip(config.axes_dims, config.axes_lens, strict=True)):
            self.register_buffer(f"angles_{axis}", torch.empty(length, size // 2, dtype=torch.float32))

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (T, d/2) float32 of `positions` (T, axes) int64."""
        tables = [self.get_buffer(f"angles_{axis}") for axis in range(len(self.config.axes_dims))]
        angles = torch.cat([table[positions[:, axis]] for axis, table in enumerate(tables)], dim=-1)
        return angles.cos(), angles.sin()

    def caption_rope(self, caption: Tensor) -> tuple[Tensor, Tensor]:
        """The rope of caption rows (B, K, D): row k is at (1 + k, 0, 0), pads too."""
        rows = torch.arange(1, caption.shape[1] + 1, device=caption.device)
        others = torch.zeros_like(rows)
        return self.rope(torch.stack((rows, *(others for _ in self.config.axes_dims[1:])), dim=1))

    def time_embedding(self, time: Tensor) -> Tensor:
        """Embed times (B,) float32 → (B, E): 1 - σ, which is 0 for noise."""
        half = _TIME_VALUES // 2
        exponent = torch.arange(half, dtype=torch.float32, device=time.device) / half
        angles = self.config.time_scale * time.unsqueeze(1) * torch.exp(-math.log(_TIME_BASE) * exponent)
        values = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.time_in.weight.dtype)
        embedded: Tensor = self.time_out(F.silu(self.time_in(values)))
        return embedded

    def caption(self, rows: Tensor, is_pad: Tensor) -> tuple[Tensor]:
        """Embed and refine caption rows: (B, K, caption width) float32, is_pad (K,) bool → (B, K, D)."""
        scaled = F.normalize(rows, dim=-1, eps=_UNIT_EPS) * _CAPTION_SCALE
        normed = rms_norm(scaled.to(self.caption_norm.dtype), self.caption_norm, self.config.eps)
        x = torch.where(is_pad.unsqueeze(1), self.caption_pad, self.caption_embed(normed))
        rope = self.caption_rope(x)
        for block in self.context_refiner:
            x = block(x, rope)
        return (x,)

    def begin(
        self, latents: Tensor, positions: Tensor, is_pad: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the blocks of a step read: x (B, N, D), cosines and sines (T, d/2), embedded times (B, E).

        `latents` (B, N, P) float32, `positions` (T, 3) of the picture and then of the caption, `is_pad` (N,) bool.
        """
        x = self.embed(latents.to(self.embed.weight.dtype))
        x = torch.where(is_pad.unsqueeze(1), self.token_pad, x)
        return (x, *self.rope(positions), self.time_embedding(time))

    def end(self, x: Tensor, embedded: Tensor) -> tuple[Tensor]:
        """Velocity (B, T, P) float32 of the tokens x (B, T, D) after the last block."""
        scale = 1 + self.head_scale(F.silu(embedded)).unsqueeze(1)
        return (self.head(F.layer_norm(x, x.shape[-1:], eps=_HEAD_EPS) * scale).float(),)


class ImageTransformer(nn.Module):
    """All blocks, and what is before and after them."""

    def __init__(self, config: ImageTransformerConfig) -> None:
        super().__init__()
        self.ends = ImageEnds(config)
        refiners, layers = range(config.num_refiner_layers), range(config.num_layers)
        self.noise_refiner = nn.ModuleList(ImageBlock(config, is_modulated=True) for _ in refiners)
        self.layers = nn.ModuleList(ImageBlock(config, is_modulated=True) for _ in layers)

    def velocity(
        self, latents: Tensor, positions: Tensor, is_pad: Tensor, caption: Tensor, time: Tensor
    ) -> tuple[Tensor]:
        """A whole step: the velocity (B, N, P) float32, with `caption` (B, K, D); the rest as of `ImageEnds.begin`."""
        x, cos, sin, embedded = self.ends.begin(latents, positions, is_pad, time)
        count = x.shape[1]
        for block in self.noise_refiner:
            x = block(x, (cos[:count], sin[:count]), embedded)
        x = torch.cat((x, caption), dim=1)
        for block in self.layers:
            x = block(x, (cos, sin), embedded)
        return (self.ends.end(x, embedded)[0][:, :count],)


def image_transformer_weights(config: ImageTransformerConfig, *, part: str) -> list[WeightSource]:
    """Sources of an `ImageTransformer` in the checkpoint's `part`, in the layout of diffusers."""
    width, inner, time_width = config.hidden_size, config.feed_forward_size, config.time_width
    patch = f"{config.patch_size}-1"

    def linear(name: str, tensor: str, outputs: int, inputs: int) -> list[WeightSource]:
        return [
            stored(f"{name}.weight", f"{tensor}.weight", outputs, inputs, part=part),
            stored(f"{name}.bias", f"{tensor}.bias", outputs, part=part),
        ]

    def pad_token(name: str, tensor: str) -> WeightSource:
        return WeightSource(
            name=name,
            part=part,
            tensors=(tensor,),
            shapes=((1, width),),
            compute=lambda value: value.flatten(),
        )

    def matrix(name: str, tensors: tuple[str, ...], outputs: int, inputs: int) -> WeightSource:
        return WeightSource(
            name=name,
            part=part,
            tensors=tensors,
            shapes=((outputs, inputs),) * len(tensors),
            compute=lambda *values: values[0] if len(values) == 1 else torch.cat(values),
            quantizable="linear",
        )

    def block(name: str, tensors: str, *, is_modulated: bool) -> list[WeightSource]:
        attention, ffn = f"{tensors}.attention", f"{tensors}.feed_forward"
        return [
            *(
                stored(f"{name}.{norm}", f"{tensors}.{norm}.weight", width, part=part)
                for norm in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
            ),
            *(
                stored(
                    f"{name}.{letter}_norm", f"{attention}.norm_{letter}.weight", config.head_dim, part=part
                )
                for letter in "qk"
            ),
            matrix(
                f"{name}.qkv.weight", tuple(f"{attention}.to_{each}.weight" for each in "qkv"), width, width
            ),
            matrix(f"{name}.out.weight", (f"{attention}.to_out.0.weight",), width, width),
            matrix(f"{name}.gate_up.weight", (f"{ffn}.w1.weight", f"{ffn}.w3.weight"), inner, width),
            matrix(f"{name}.down.weight", (f"{ffn}.w2.weight",), width, inner),
            *(
                linear(f"{name}.modulation", f"{tensors}.adaLN_modulation.0", 4 * width, time_width)
                if is_modulated
                else ()
            ),
        ]

    sources = [
        *linear("ends.embed", f"all_x_embedder.{patch}", width, config.token_values),
        pad_token("ends.token_pad", "x_pad_token"),
        pad_token("ends.caption_pad", "cap_pad_token"),
        stored("ends.caption_norm", "cap_embedder.0.weight", config.caption_width, part=part),
        *linear("ends.caption_embed", "cap_embedder.1", width, config.caption_width),
        *linear("ends.time_in", "t_embedder.mlp.0", _TIME_HIDDEN, _TIME_VALUES),
        *linear("ends.time_out", "t_embedder.mlp.2", time_width, _TIME_HIDDEN),
        *linear("ends.head_scale", f"all_final_layer.{patch}.adaLN_modulation.1", width, time_width),
        *linear("ends.head", f"all_final_layer.{patch}.linear", config.token_values, width),
    ]
    for index in range(config.num_refiner_layers):
        refiner = f"context_refiner.{index}"
        sources += block(f"ends.{refiner}", refiner, is_modulated=False)
        sources += block(f"noise_refiner.{index}", f"noise_refiner.{index}", is_modulated=True)
    for index in range(config.num_layers):
        sources += block(f"layers.{index}", f"layers.{index}", is_modulated=True)
    for axis, (size, length) in enumerate(zip(config.axes_dims, config.axes_lens, strict=True)):
        sources.append(
            WeightSource(
                name=f"ends.angles_{axis}",
                part=part,
                compute=_angles(length, size, config.rope_theta),
                dtype=torch.float32,
            )
        )
    return sources


def _angles(length: int, size: int, theta: float) -> Callable[[], Tensor]:
    """Makes the angles (length, size/2) of an axis, in double precision until they are rounded once, as the reference
    does."""

    def make() -> Tensor:
        frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        return torch.outer(torch.arange(length, dtype=torch.float64), frequencies).float()

    return make


def _linear(x: Tensor, layer: Linear) -> Tensor:
    return linear(x, layer.weight, None, layer.weight_scale, has_many_rows=True)
