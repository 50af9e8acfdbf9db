"""Tokens of the sampler: noise, patches of latents, and their positions (spec: imagegen.md §4.3 to §4.5, §5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mingc.artifacts.parameters import ImageDitParameters


def start_noise(seed: int, shape: Sequence[int]) -> Tensor:
    """Standard normal float32 of one picture, of torch's generator on the CPU, as the official code draws it."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def to_tokens(latents: Tensor, patch: int) -> Tensor:
    """(B, C, h, w) → tokens (B, h / patch · w / patch, patch² · C) by row and column; channels innermost."""
    batch, channels, height, width = latents.shape
    cells = latents.view(batch, channels, height // patch, patch, width // patch, patch)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch * patch * channels)


def to_latents(tokens: Tensor, patch: int, size: tuple[int, int]) -> Tensor:
    """The inverse of `to_tokens`; `size`: (h, w)."""
    height, width = size
    cells = tokens.reshape(len(tokens), height // patch, width // patch, patch, patch, -1)
    return cells.permute(0, 5, 1, 3, 2, 4).reshape(len(tokens), -1, height, width)


def padded(count: int, multiple: int) -> int:
    """`count`, rounded up to a multiple."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLayout:
    """What all steps of pictures of one size share.

    Attributes:
        num_noisy: tokens of the picture itself, which come first; those of a reference follow.
        positions: (T, 3) int64: caption or frame, row, column of all tokens with padding, then of the caption's rows.
        is_pad: (N,) bool, of the tokens.
    """

    num_noisy: int
    positions: Tensor
    is_pad: Tensor

    def to(self, device: torch.device) -> TokenLayout:
        """The same on `device`."""
        return replace(self, positions=self.positions.to(device), is_pad=self.is_pad.to(device))


def token_layout(
    parameters: ImageDitParameters, size: tuple[int, int], num_frames: int, num_caption: int
) -> TokenLayout:
    """The layout, on the CPU, of latents of the `size` (h, w). `num_frames`: 2 with a reference.

    `num_caption`: rows of the caption, padding included, which come before the first frame.
    """
    rows, columns = (side // parameters.patch_size for side in size)
    grid = torch.cartesian_prod(torch.arange(num_frames), torch.arange(rows), torch.arange(columns))
    grid[:, 0] += num_caption + 1
    count = padded(len(grid), parameters.token_multiple)
    positions = torch.zeros(count + num_caption, 3, dtype=torch.int64)
    positions[: len(grid)] = grid
    positions[count:, 0] = torch.arange(1, num_caption + 1)
    is_pad = torch.arange(count) >= len(grid)
    return TokenLayout(num_noisy=rows * columns, positions=positions, is_pad=is_pad)
