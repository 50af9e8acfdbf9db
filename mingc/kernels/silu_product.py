"""SwiGLU of a packed projection."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.dispatch import use_triton


def silu_product(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: (…, 2 I), the gates before the ups → (…, I)."""
    if use_triton(gate_up):
        from mingc.kernels.triton import silu_product as gpu

        found: Tensor = gpu.silu_product(gate_up.contiguous())
        return found
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
