"""Triton kernel of `mingc.kernels.silu_product`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # values of a program


@triton.jit
def mingc_silu_product(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < INNER
    gate = tl.load(gate_up + row * (2 * INNER) + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * INNER) + INNER + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + place, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@torch.library.triton_op("mingc::silu_product", mutates_args={})
def silu_product(gate_up: Tensor) -> Tensor:
    """See `mingc.kernels.silu_product`."""
    inner = gate_up.shape[-1] // 2
    rows = gate_up.numel() // (2 * inner)
    out = torch.empty(*gate_up.shape[:-1], inner, dtype=gate_up.dtype, device=gate_up.device)
    torch.library.wrap_triton(mingc_silu_product)[(rows, triton.cdiv(inner, _BLOCK))](
        gate_up, out, INNER=inner, BLOCK=_BLOCK, num_warps=8
    )
    return out
