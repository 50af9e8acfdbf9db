"""RMS norm and rotary embedding of the queries and keys of a packed projection, neighbours in pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from mingc.kernels.dispatch import use_triton
from mingc.kernels.rms_norm import rms_norm


def norm_rotate_packed(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalize each head, then rotate dim 2f with dim 2f + 1, in float32.

    Args:
        qkv: (B, T, 3, H, d) queries, keys and values.
        q_norm, k_norm: (d,).
        cos, sin: (T, d/2) float32.

    Returns: queries and keys, (B, T, H, d) each in the dtype of `qkv`.
    """
    if use_triton(qkv, qkv.shape[-1]):
        from mingc.kernels.triton import norm_rotate_packed as gpu

        norms = torch.stack((q_norm, k_norm))
        q, k = gpu.norm_rotate_packed(qkv.contiguous(), norms, cos.contiguous(), sin.contiguous(), eps)
        return q, k
    q, k, _ = qkv.unbind(2)
    return _rotate(rms_norm(q, q_norm, eps), cos, sin), _rotate(rms_norm(k, k_norm, eps), cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
