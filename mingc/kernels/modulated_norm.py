"""RMS norm of a block that a time modulates: gated residual sum before it, scale after it.

With dynamic sizes the compiler indexes by 64 bits and reads each row several times; the kernel takes a row per program.

Shape letters: B sequences, T tokens, D width.
"""

from __future__ import annotations

from torch import Tensor

from mingc.kernels.dispatch import use_triton
from mingc.kernels.rms_norm import rms_norm

_MAX_WIDTH = 16_384  # the kernel keeps a row in registers


def modulated_norm(x: Tensor, norm: Tensor, scale: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * (1 + scale): x (B, T, D), norm (D,), scale (B, D) → (B, T, D)."""
    if _has_kernel(x):
        from mingc.kernels.triton import modulated_norm as gpu

        found: Tensor = gpu.modulated_norm(x.contiguous(), norm, scale, eps)
        return found
    return rms_norm(x, norm, eps) * (1 + scale.unsqueeze(1))


def add_gated(x: Tensor, update: Tensor, update_norm: Tensor, gate: Tensor, eps: float) -> Tensor:
    """x + tanh(gate) * rms_norm(update): x, update (B, T, D), update_norm (D,), gate (B, D) → (B, T, D)."""
    if _has_kernel(x):
        from mingc.kernels.triton import modulated_norm as gpu

        found: Tensor = gpu.add_gated(x.contiguous(), update.contiguous(), update_norm, gate, eps)
        return found
    total: Tensor = x + gate.unsqueeze(1).tanh() * rms_norm(update, update_norm, eps)
    return total


def add_gated_norm(
    x: Tensor, update: Tensor, update_norm: Tensor, gate: Tensor, norm: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_gated`, and `modulated_norm` of its sum: both (B, T, D)."""
    if _has_kernel(x):
        from mingc.kernels.triton import modulated_norm as gpu

        total, normed = gpu.add_gated_norm(
            x.contiguous(), update.contiguous(), update_norm, gate, norm, scale, eps
        )
        return total, normed
    total = add_gated(x, update, update_norm, gate, eps)
    return total, modulated_norm(total, norm, scale, eps)


def _has_kernel(x: Tensor) -> bool:
    return use_triton(x) and x.shape[-1] <= _MAX_WIDTH
