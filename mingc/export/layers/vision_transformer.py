"""Modules of the vision encoder: block with two-axis rotary embedding, merger, projector (spec: vision.md §5–§7).

Shape suffixes: P patches, W encoder width, H heads, d head width, R rotary angles (d/2), I MLP width. M merged tokens.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mingc.export.layers.residual import add_norm
from mingc.kernels.linear import linear_gelu
from mingc.kernels.rotary_varlen_attention import rotary_varlen_attention
from mingc.kernels.varlen_attention import Segments

_NORM_EPS = 1e-6  # spec: vision.md §6; not in the config


class VisionAttention(nn.Module):
    """Bidirectional attention within each frame."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_PW: Tensor, cos_PR: Tensor, sin_PR: Tensor, frames: Segments) -> Tensor:
        """x: (P, W); cos, sin: (P, R) float32; frames: segments of one sequence of P keys. Returns (P, W)."""
        num_patches, width = x_PW.shape
        qkv_P3Hd = self.qkv(x_PW).view(num_patches, 3, self.num_heads, width // self.num_heads)
        out_PHd = rotary_varlen_attention(qkv_P3Hd, cos_PR, sin_PR, frames)
        mixed: Tensor = self.proj(out_PHd.reshape(num_patches, width))
        return mixed


class VisionBlock(nn.Module):
    """Pre-norm transformer block; `gelu` is the `approximate` argument of F.gelu."""

    def __init__(self, width: int, mlp_width: int, num_heads: int, gelu: str) -> None:
        super().__init__()
        self.gelu = gelu
        self.norm1 = nn.LayerNorm(width, eps=_NORM_EPS)
        self.attention = VisionAttention(width, num_heads)
        self.norm2 = nn.LayerNorm(width, eps=_NORM_EPS)
        self.fc1 = nn.Linear(width, mlp_width)
        self.fc2 = nn.Linear(mlp_width, width)

    def forward(
        self, x_PW: Tensor, update_PW: Tensor | None, cos_PR: Tensor, sin_PR: Tensor, frames: Segments
    ) -> tuple[Tensor, Tensor]:
        """Shapes as in `VisionAttention`; `update_PW` is first added to the residual stream `x_PW`.

        Returns the stream before the last update, and this update: the next norm adds it.
        """
        x_PW, normed_PW = add_norm(x_PW, update_PW, self.norm1)
        x_PW, normed_PW = add_norm(x_PW, self.attention(normed_PW, cos_PR, sin_PR, frames), self.norm2)
        hidden_PI = linear_gelu(normed_PW, self.fc1.weight, self.fc1.bias, self.gelu)
        return x_PW, self.fc2(hidden_PI)


class PatchMerger(nn.Module):
    """Merge the patches of each token: norm of each patch, concatenation, two linear layers."""

    def __init__(self, width: int, patches_per_token: int, out_width: int) -> None:
        super().__init__()
        self.joined = patches_per_token * width
        self.norm = nn.LayerNorm(width, eps=_NORM_EPS)
        self.fc1 = nn.Linear(self.joined, self.joined)
        self.fc2 = nn.Linear(self.joined, out_width)

    def forward(self, x_PW: Tensor) -> Tensor:
        """x: (P, W), with the patches of a token adjacent. Returns (M, out_width)."""
        joined = self.norm(x_PW).view(-1, self.joined)
        merged: Tensor = self.fc2(F.gelu(self.fc1(joined)))
        return merged


class VisionProjector(nn.Module):
    """`depth` linear layers with GELU between them."""

    def __init__(self, width: int, out_width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(out_width if i else width, out_width) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """x: (M, width). Returns (M, out_width)."""
        for index, layer in enumerate(self.layers):
            x = layer(F.gelu(x) if index else x)
        return x
