"""Convolutional VAE of pictures; submodules have the names of the checkpoint, diffusers' (spec: imagegen.md §6).

Shape letters: h, w rows and columns of latents, H, W of any feature map, C channels, s pixels a latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.export.stage import WeightSource
from mingc.export.weights.mapping import stored

_EPS = 1e-6
_COLOURS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageVaeConfig:
    """Geometry; `channels` of the blocks, the finest first; latents are scaled by `scaling` after `- shift`."""

    latent_channels: int
    channels: tuple[int, ...]
    layers_per_block: int
    num_groups: int
    scaling: float
    shift: float
    has_quant_conv: bool
    has_post_quant_conv: bool

    @property
    def scale(self) -> int:
        """Pixels of a side for one latent."""
        return 1 << (len(self.channels) - 1)


class ResnetBlock(nn.Module):
    """Two convolutions with norms before them, and a residual."""

    def __init__(self, config: ImageVaeConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(config.num_groups, inputs, eps=_EPS)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(config.num_groups, outputs, eps=_EPS)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        total: Tensor = inner + (x if self.conv_shortcut is None else self.conv_shortcut(x))
        return total


class Attention(nn.Module):
    """One head over all places of the map, with a residual."""

    def __init__(self, config: ImageVaeConfig, channels: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(config.num_groups, channels, eps=_EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels) for _ in "qkv")
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x: Tensor) -> Tensor:
        rows = self.group_norm(x).flatten(2).transpose(1, 2).unsqueeze(1)  # (B, 1, H W, C)
        context = F.scaled_dot_product_attention(self.to_q(rows), self.to_k(rows), self.to_v(rows))
        total: Tensor = x + self.to_out[0](context).squeeze(1).transpose(1, 2).reshape(x.shape)
        return total


class MidBlock(nn.Module):
    """The coarsest block of either half."""

    def __init__(self, config: ImageVaeConfig) -> None:
        super().__init__()
        channels = config.channels[-1]
        self.resnets = nn.ModuleList(ResnetBlock(config, channels, channels) for _ in range(2))
        self.attentions = nn.ModuleList([Attention(config, channels)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.resnets[1](self.attentions[0](self.resnets[0](x)))
        return out


class _Sampler(nn.Module):
    """A convolution under the name `conv`: after a change of size, or that halves it."""

    def __init__(self, channels: int, *, halves: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2 if halves else 1, padding=0 if halves else 1)


class Block(nn.Module):
    """Resnet blocks, and a sampler to half (encoder) or twice (decoder) the size unless it is the last block."""

    def __init__(
        self, config: ImageVaeConfig, inputs: int, outputs: int, *, layers: int, halves: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.halves = halves
        self.resnets = nn.ModuleList(
            ResnetBlock(config, outputs if index else inputs, outputs) for index in range(layers)
        )
        samplers = nn.ModuleList([] if is_last else [_Sampler(outputs, halves=halves)])
        self.samplers_name = "downsamplers" if halves else "upsamplers"
        if not is_last:
            self.add_module(self.samplers_name, samplers)

    def forward(self, x: Tensor) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x)
        for sampler in getattr(self, self.samplers_name, ()):
            # One zero column at the right and one zero row below, or every pixel four times.
            x = sampler.conv(F.pad(x, (0, 1, 0, 1)) if self.halves else _doubled(x))
        return x


class Encoder(nn.Module):
    """Pixels (B, 3, H, W) → mean and log variance (B, 2 latent channels, h, w)."""

    def __init__(self, config: ImageVaeConfig) -> None:
        super().__init__()
        channels = config.channels
        self.conv_in = nn.Conv2d(_COLOURS, channels[0], 3, padding=1)
        self.down_blocks = nn.ModuleList(
            Block(
                config,
                channels[max(0, index - 1)],
                outputs,
                layers=config.layers_per_block,
                halves=True,
                is_last=index == len(channels) - 1,
            )
            for index, outputs in enumerate(channels)
        )
        self.mid_block = MidBlock(config)
        self.conv_norm_out = nn.GroupNorm(config.num_groups, channels[-1], eps=_EPS)
        self.conv_out = nn.Conv2d(channels[-1], 2 * config.latent_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        out: Tensor = self.conv_out(F.silu(self.conv_norm_out(self.mid_block(x))))
        return out


class Decoder(nn.Module):
    """Latents (B, latent channels, h, w) → pixels (B, 3, H, W)."""

    def __init__(self, config: ImageVaeConfig) -> None:
        super().__init__()
        channels = config.channels[::-1]
        self.conv_in = nn.Conv2d(config.latent_channels, channels[0], 3, padding=1)
        self.mid_block = MidBlock(config)
        self.up_blocks = nn.ModuleList(
            Block(
                config,
                channels[max(0, index - 1)],
                outputs,
                layers=config.layers_per_block + 1,
                halves=False,
                is_last=index == len(channels) - 1,
            )
            for index, outputs in enumerate(channels)
        )
        self.conv_norm_out = nn.GroupNorm(config.num_groups, channels[-1], eps=_EPS)
        self.conv_out = nn.Conv2d(channels[-1], _COLOURS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        out: Tensor = self.conv_out(F.silu(self.conv_norm_out(x)))
        return out


class ImageVae(nn.Module):
    """Encoder and decoder; each method is a graph.

    A picture is (1, 3, h, s, w, s), which is (1, 3, h s, w s) by another view: the sizes of a graph cannot be products.
    """

    def __init__(self, config: ImageVaeConfig) -> None:
        super().__init__()
        self.config = config
        latents = config.latent_channels
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        if config.has_quant_conv:
            self.quant_conv = nn.Conv2d(2 * latents, 2 * latents, 1)
        if config.has_post_quant_conv:
            self.post_quant_conv = nn.Conv2d(latents, latents, 1)

    def decode(self, latents: Tensor) -> tuple[Tensor]:
        """Decode scaled latents (1, latent channels, h, w) float32 → pixels (1, 3, h, s, w, s) float32, not clamped."""
        x = (latents / self.config.scaling + self.config.shift).to(self.decoder.conv_in.weight.dtype)
        if self.config.has_post_quant_conv:
            x = self.post_quant_conv(x)
        side = self.config.scale
        return (self.decoder(x).float().unflatten(3, (-1, side)).unflatten(2, (-1, side)),)

    def encode(self, pixels: Tensor) -> tuple[Tensor]:
        """Encode pixels (1, 3, h, s, w, s) float32 in [-1, 1] → scaled latents (1, latent channels, h, w) float32.

        The mode of the distribution, so nothing is drawn.
        """
        # torch 2.11 does not merge two axes into one whose size is a product of a dim; this operator is exempt.
        cells = pixels.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
        moments = self.moments(F.pixel_shuffle(cells, self.config.scale))
        mode = moments[:, : self.config.latent_channels].float()
        return ((mode - self.config.shift) * self.config.scaling,)

    def moments(self, pixels: Tensor) -> Tensor:
        """Mean and log variance (B, 2 latent channels, h, w) of pixels (B, 3, H, W)."""
        moments: Tensor = self.encoder(pixels.to(self.encoder.conv_in.weight.dtype))
        return self.quant_conv(moments) if self.config.has_quant_conv else moments


def image_vae_weights(config: ImageVaeConfig, *, part: str) -> list[WeightSource]:
    """Sources of an `ImageVae`: the checkpoint has its names and shapes."""
    with torch.device("meta"):
        tensors = ImageVae(config).state_dict()
    return [stored(name, name, *value.shape, part=part) for name, value in tensors.items()]


def _doubled(x: Tensor) -> Tensor:
    """(B, C, H, W) → (B, C, 2 H, 2 W), the nearest pixel."""
    height, width = x.shape[2:]
    return F.interpolate(x, size=(2 * height, 2 * width), mode="nearest")
