"""AudioVAE encoder: waveform of a voice prompt → latents (spec: talker.md §8.3).

Shape letters: T latents, u frames a latent, D hidden, hop samples a frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.export.layers.qwen2 import Qwen2Config, Qwen2Stack, qwen2_weights
from mingc.export.stage import WeightSource
from mingc.export.weights.mapping import stored
from mingc.kernels.sequence_attention import sequence_attention

_MIN_STD = 1e-4

ENCODER_LAYERS = 4
"""Layers of the aggregator, and the most that the body runs: the reference sets this number on the config object that
both share, and never executes further layers in the checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VaeEncoderConfig:
    """Geometry of the encoder, which body and aggregator share."""

    stack: Qwen2Config
    latent_dim: int
    frames_per_latent: int
    hop: int


class VaeEncoder(nn.Module):
    """Frame projection, body, aggregator over the frames of each latent, and projection to mean and scale."""

    def __init__(self, config: VaeEncoderConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.stack.hidden_size
        self.frame_in = nn.Linear(config.hop, hidden, bias=False)
        self.frame_mix = nn.Linear(hidden, hidden)
        self.stack = Qwen2Stack(config.stack)
        self.aggregator = Qwen2Stack(config.stack)
        self.query = nn.Parameter(torch.empty(hidden))
        self.posterior = nn.Linear(hidden, 2 * config.latent_dim)

    def encode(self, waveform: Tensor, num_frames: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode a waveform (T, u hop) float32, whose first `num_frames` (1,) frames are real; noise (T, latent_dim).

        Returns: latents, mean and standard deviation, each (T, latent_dim) float32.
        """
        frames = waveform.view(-1, self.config.hop).to(self.frame_in.weight.dtype)
        hidden = self._attend(self.stack, self.frame_mix(self.frame_in(frames)))
        # As in the reference, hidden rows beyond the end are zero; zero samples there would give other values.
        is_real = torch.arange(hidden.shape[0], device=hidden.device) < num_frames
        hidden = torch.where(is_real.unsqueeze(1), hidden, 0)
        groups = hidden.view(waveform.shape[0], self.config.frames_per_latent, hidden.shape[1])
        query = self.query.expand(groups.shape[0], 1, -1)
        tokens = self._attend(self.aggregator, torch.cat((groups, query), dim=1).flatten(0, 1))
        summary = tokens.view(groups.shape[0], self.config.frames_per_latent + 1, -1)[:, -1]
        mean, scale = self.posterior(summary).float().chunk(2, dim=-1)
        deviation = F.softplus(scale) + _MIN_STD
        return mean + deviation * noise, mean, deviation

    @staticmethod
    def _attend(stack: Qwen2Stack, x: Tensor) -> Tensor:
        """Run `stack` causally on one sequence (n, D)."""
        config = stack.config
        cos, sin = stack.rope(torch.arange(x.shape[0], device=x.device))

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return sequence_attention(qkv, cos, sin, config.num_kv_heads, config.windows[layer])

        out: Tensor = stack(x, attend)
        return out


def vae_encoder_weights(
    config: VaeEncoderConfig, *, part: str, source: str, target: str
) -> list[WeightSource]:
    """Sources of a `VaeEncoder` named `target` in the module and `source` in the checkpoint."""
    hidden, latent = config.stack.hidden_size, config.latent_dim

    def copy(name: str, tensor: str, *shape: int) -> WeightSource:
        return stored(target + name, source + tensor, *shape, part=part)

    return [
        copy("frame_in.weight", "fc1.weight", hidden, config.hop),
        copy("frame_mix.weight", "fc2.weight", hidden, hidden),
        copy("frame_mix.bias", "fc2.bias", hidden),
        copy("posterior.weight", "fc3.weight", 2 * latent, hidden),
        copy("posterior.bias", "fc3.bias", 2 * latent),
        WeightSource(
            name=target + "query",
            part=part,
            tensors=(source + "cls_embed",),
            shapes=((1, 1, hidden),),
            compute=lambda value: value.flatten(),
        ),
        # Not quantizable: the encoder only runs when a voice is registered.
        *(
            weight
            for theirs, ours in (("encoder.", "stack."), ("aggregator.", "aggregator."))
            for weight in qwen2_weights(
                config.stack, part=part, source=source + theirs, target=target + ours, quantizable=False
            )
        ),
    ]
