"""Residual stream of the encoders' blocks."""

from __future__ import annotations

from torch import Tensor, nn

from mingc.kernels.layer_norm import add_layer_norm


def add_norm(x: Tensor, update: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The residual stream `x + update` and its norm, both with the shape of `x`; without an update, `x` itself."""
    if update is None:
        return x, norm(x)
    return add_layer_norm(x, update, norm.weight, norm.bias, norm.eps)
