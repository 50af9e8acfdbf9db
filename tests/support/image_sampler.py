"""A plain sampler of pictures, written from the specification (imagegen.md §3 to §5), for the networks of a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_MULTIPLE, _PATCH = 32, 2


@dataclass(frozen=True, kw_only=True)
class Networks:
    """The graphs of `image_dit`: positional inputs as in their specs, one output."""

    caption: Callable[..., Tensor]
    velocity: Callable[..., Tensor]

    def at(self, latents: Tensor, captions: Tensor, time: Tensor, reference: Tensor | None = None) -> Tensor:
        """Velocity (B, 16, h, w) of `latents` (B, 16, h, w) with `captions` (B, L, C); `time` (B,)."""
        rows, caption_pads = _padded(captions)
        frames = [latents] if reference is None else [latents, reference.expand_as(latents)]
        _, channels, height, width = latents.shape
        size = (height // _PATCH, width // _PATCH)
        tokens, pads = _padded(torch.cat([_tokens(each) for each in frames], dim=1))
        grid = [torch.arange(len(frames)) + rows.shape[1] + 1, *map(torch.arange, size)]
        places = torch.stack(torch.meshgrid(*grid, indexing="ij"), -1).reshape(1, -1, 3)
        caption = torch.tensor([[1 + row, 0, 0] for row in range(rows.shape[1])])
        made = self.velocity(
            tokens,
            torch.cat((_padded(places)[0][0], caption)),
            pads,
            self.caption(rows, caption_pads),
            time.to(torch.float32),
        )
        kept = made[:, : size[0] * size[1]].reshape(-1, *size, _PATCH, _PATCH, channels)
        return kept.permute(0, 5, 1, 3, 2, 4).reshape(latents.shape)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is recorded of one step of a batch; `velocity` (B or 2B, 16, h, w), with guidance first the captions'."""

    velocity: Tensor
    noise_pred: Tensor
    latents: Tensor


def sample(
    networks: Networks,
    noise: Tensor,
    captions: Tensor,
    sigmas: Tensor,
    guidance: float,
    reference: Tensor | None = None,
) -> list[Step]:
    """Every step from `noise` (B, 16, h, w) with `captions` (B, L, C); `sigmas` (steps + 1,)."""
    steps, x, is_guided = [], noise, guidance > 1
    given = torch.cat((captions, torch.zeros_like(captions))) if is_guided else captions
    for now, after in pairwise(sigmas):
        both = torch.cat((x, x)) if is_guided else x
        time = (1000 - 1000 * now) / 1000  # 1 - σ is rounded otherwise, which 1000 frequencies see
        made = networks.at(both, given, time.expand(len(both)), reference)
        guided = made
        if is_guided:
            positive, negative = made.chunk(2)
            guided = positive + guidance * (positive - negative)
        x = x + (after - now) * -guided
        steps.append(Step(velocity=made, noise_pred=-guided, latents=x))
    return steps


def to_uint8(pixels: Tensor) -> Tensor:
    """(B, 3, H, W) → (B, H, W, 3) uint8 (§6)."""
    return ((pixels * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


def _tokens(latents: Tensor) -> Tensor:
    batch, channels, height, width = latents.shape
    cells = latents.reshape(batch, channels, height // _PATCH, _PATCH, width // _PATCH, _PATCH)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, _PATCH * _PATCH * channels)


def _padded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (B, n, …) padded with zeros to a multiple, and which ones are padding."""
    count = rows.shape[1]
    missing = -count % _MULTIPLE
    return torch.cat((rows, rows.new_zeros(len(rows), missing, *rows.shape[2:])), dim=1), (
        torch.arange(count + missing) >= count
    )
