"""AudioVAE decoder: latents → waveform, for whole utterances or streamed patches (spec: talker.md §8.1, §8.2).

Shape letters: B requests, L latents, P latents a patch, u frames a latent, D hidden, hop samples a frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.export.layers.istft import IstftHead, istft_weights, overlap_add
from mingc.export.layers.qwen2 import Qwen2Config, Qwen2Stack, qwen2_weights
from mingc.export.stage import WeightSource
from mingc.export.weights.mapping import stored
from mingc.kernels.sequence_attention import sequence_attention
from mingc.kernels.sliding_window_attention import sliding_window_attention

_FRAMES_PER_WINDOW = 4  # n_fft / hop, fixed in the reference
_RING_MULTIPLE = 8  # ring buffers have a multiple of this many rows: attention masks must be aligned


@dataclass(frozen=True, kw_only=True, slots=True)
class VaeDecoderConfig:
    """Geometry of the decoder and of one streamed patch; `max_frames` bounds streams of layers without a window."""

    stack: Qwen2Config
    latent_dim: int
    frames_per_latent: int
    hop: int
    latents_per_patch: int
    max_frames: int

    @property
    def n_fft(self) -> int:
        return _FRAMES_PER_WINDOW * self.hop

    @property
    def patch_frames(self) -> int:
        return self.latents_per_patch * self.frames_per_latent

    @property
    def lookahead_frames(self) -> int:
        """Frames at the end of a latent that blend into the next one."""
        return self.frames_per_latent // 2

    @property
    def trimmed_samples(self) -> int:
        """Samples trimmed at either end of an utterance."""
        return (self.n_fft - self.hop) // 2

    @property
    def tail_samples(self) -> int:
        """Samples at the end of a call's output that are final only if the utterance ends there."""
        return self.lookahead_frames * self.hop + self.trimmed_samples

    def ring_rows(self, layer: int) -> int:
        """Ring buffer rows per slot of a layer: the window of the oldest new frame, and all new frames."""
        window = self.stack.windows[layer] or self.max_frames
        rows = min(window - 1, self.max_frames) + self.patch_frames + self.lookahead_frames
        return -(-rows // _RING_MULTIPLE) * _RING_MULTIPLE


class VaeDecoder(nn.Module):
    """Latent projection, linear upsampler, Qwen2 stack and spectrum head."""

    blend: Tensor

    def __init__(self, config: VaeDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.latent_in = nn.Linear(config.latent_dim, config.stack.hidden_size)
        self.stack = Qwen2Stack(config.stack)
        self.head = IstftHead(config.stack.hidden_size, config.n_fft, config.hop)
        self.register_buffer("blend", torch.empty(3, config.frames_per_latent, dtype=torch.float32))

    def upsample(self, latents: Tensor) -> Tensor:
        """Project latents (B, L, latent_dim) float32 and interpolate them linearly in time → (B, L u, D).

        Frames have half-pixel centres; the first and last latents are repeated at the edges.
        """
        x: Tensor = self.latent_in(latents.to(self.latent_in.weight.dtype)).float().unsqueeze(2)
        # Gathered, not sliced: with slices of L - 1 rows torch.export would exclude L = 2 from the range.
        position = torch.arange(x.shape[1], device=x.device)
        before = x[:, (position - 1).clamp(min=0)]
        after = x[:, (position + 1).clamp(max=x.shape[1] - 1)]
        weights = self.blend.unsqueeze(-1)  # (3, u, 1)
        frames = before * weights[0] + x * weights[1] + after * weights[2]
        return frames.flatten(1, 2).to(self.latent_in.weight.dtype)

    def decode(self, latents: Tensor) -> tuple[Tensor]:
        """Decode a whole utterance: (1, L, latent_dim) float32 → (L, u hop) float32, one row per latent."""
        config = self.config
        x = self.upsample(latents).squeeze(0)
        num_frames = x.shape[0]
        cos, sin = self.stack.rope(torch.arange(num_frames, device=x.device))

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return sequence_attention(qkv, cos, sin, config.stack.num_kv_heads, config.stack.windows[layer])

        frames = self.head(self.stack(x, attend).unsqueeze(0))
        exists = torch.ones(1, num_frames, dtype=torch.bool, device=x.device)
        samples = (overlap_add(frames) / self.head.envelope(exists)).flatten(1)
        kept = samples.narrow(1, config.trimmed_samples, num_frames * config.hop)
        return (kept.reshape(latents.shape[1], config.frames_per_latent * config.hop),)

    def stream(self, latents: Tensor, slots: Tensor, patch_index: Tensor, *state: Tensor) -> tuple[Tensor]:
        """Decode one patch of each of B utterances → (B, patch samples + tail) float32.

        A call decodes the last `lookahead_frames` of the previous patch and all but the last `lookahead_frames` of this
        one. It also decodes the left-out frames as if the utterance ended there: they form the tail, which is valid
        only for the last patch, and leave no state for the next call. Frames before 0 are masked, so a slot needs no
        reset. `state` is k and v ring buffers of layer 0, then of layer 1, …, last_latent, overlap.
        """
        config = self.config
        rings, last_latent, overlap = state[:-2], state[-2], state[-1]
        ahead, length = config.lookahead_frames, config.patch_frames
        is_first = (patch_index == 0).unsqueeze(1)
        previous = torch.where(is_first, latents[:, 0], last_latent[slots])
        x = self.upsample(torch.cat((previous.unsqueeze(1), latents), dim=1))
        x = x[:, config.frames_per_latent - ahead :]
        first_frame = patch_index * length - ahead
        # Frames of this call, and earlier ones whose windows overlap its samples.
        reach = _FRAMES_PER_WINDOW - 1
        number = first_frame.unsqueeze(1) + torch.arange(-reach, length + ahead, device=x.device)
        cos, sin = self.stack.rope(number[:, reach:])

        def attend(layer: int, qkv: Tensor) -> Tensor:
            keys, values = rings[2 * layer : 2 * layer + 2]
            return sliding_window_attention(
                qkv, cos, sin, keys, values, slots, first_frame, config.stack.windows[layer]
            )

        exists = number >= 0
        frames = self.head(self.stack(x, attend)) * exists[:, reach:, None, None]
        pending = torch.where(is_first, 0.0, overlap[slots]).view(-1, reach, config.hop)
        kept = overlap_add(frames[:, :length]) + F.pad(pending, (0, 0, 0, length))
        blocks = F.pad(kept, (0, 0, 0, ahead))
        if ahead:
            blocks = blocks + F.pad(overlap_add(frames[:, length:]), (0, 0, length, 0))
        samples = (blocks / self.head.envelope(exists)[:, reach:]).flatten(1)
        last_latent.index_put_((slots,), latents[:, -1])
        overlap.index_put_((slots,), kept[:, length:].flatten(1))
        return (samples[:, : length * config.hop + config.tail_samples],)


def vae_decoder_weights(
    config: VaeDecoderConfig, *, part: str, source: str, target: str
) -> list[WeightSource]:
    """Sources of a `VaeDecoder` named `target` in the module and `source` in the checkpoint."""
    hidden = config.stack.hidden_size

    def copy(name: str, tensor: str, *shape: int) -> WeightSource:
        return stored(target + name, source + tensor, *shape, part=part)

    return [
        copy("latent_in.weight", "fc1.weight", hidden, config.latent_dim),
        copy("latent_in.bias", "fc1.bias", hidden),
        *qwen2_weights(config.stack, part=part, source=source + "decoder.", target=target + "stack."),
        *istft_weights(
            hidden,
            config.n_fft,
            part=part,
            head=source + "head.out",
            window=source + "head.istft.window",
            target=target + "head.",
        ),
        WeightSource(
            name=target + "blend",
            part=part,
            compute=lambda: blend_weights(config.frames_per_latent),
            dtype=torch.float32,
        ),
    ]


def blend_weights(frames_per_latent: int) -> Tensor:
    """Interpolation weights (3, u) of the previous, same and next latent for each of the u frames of a latent."""
    offset = (torch.arange(frames_per_latent).double() + 0.5) / frames_per_latent - 0.5
    return torch.stack((-offset.clamp(max=0), 1 - offset.abs(), offset.clamp(min=0)))
