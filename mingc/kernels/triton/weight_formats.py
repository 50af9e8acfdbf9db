"""Arithmetic on stored weights: the operands of their GEMMs, unpacking INT4, SwiGLU.

Two FP8 values convert to float16 in one instruction, but one to bfloat16 takes several. For few tokens FP8 weights are
therefore multiplied by float16 activations, which are divided by `FP16_SCALE`: their range then reaches a million, with
the precision of bfloat16 down to 1e-3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.kernels.triton.moe_config import BF16, FP8, INT4

FP16_SCALE = tl.constexpr(16.0)
IN_INTERPRETER = tl.constexpr(bool(triton.knobs.runtime.interpret))  # Triton's interpreter cannot run PTX


def weight_format_of(weight: Tensor) -> int:
    """Format of a stored weight: BF16, FP8 or INT4."""
    return {torch.float8_e4m3fn: FP8, torch.uint8: INT4}.get(weight.dtype, BF16)


def as_operand(x: Tensor, weight_format: int) -> Tensor:
    """Activations (T, D) as the GEMM with weights of this format needs them.

    FP8: float16 divided by `FP16_SCALE`. INT4: even columns before odd ones, to match the low and high halves of the
    weights' bytes.
    """
    if weight_format == FP8:
        scale = float(FP16_SCALE.value)
        x16: Tensor = (x.to(torch.float32) / scale).clamp(-65504, 65504).to(torch.float16)
        return x16
    if weight_format == INT4:
        return x.view(x.shape[0], -1, 2).transpose(1, 2).contiguous()
    return x


@triton.jit
def shift_to(first, other, is_other, offset, item: tl.constexpr):
    """Offset in elements from pointer `first` to the data: `offset`, or the start of `other` if `is_other`.

    Selecting a pointer instead would lose its known alignment, and with it vectorized loads.
    """
    between = (other.to(tl.int64) - first.to(tl.int64)) // item
    return tl.multiple_of(tl.where(is_other, between, offset), 16 // item)


@triton.jit
def activate(gate, up, dtype: tl.constexpr):
    """silu(gate) * up, rounded to `dtype` where the reference rounds."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def unpack_int4(packed):
    """Unpack the signed low and high four bits of bytes to bfloat16.

    The bits are placed so that bfloat16 reads 136 + value, two values per instruction; integer conversions are several
    times slower than loading the weights.
    """
    if IN_INTERPRETER:
        low = ((packed & 15) ^ 8).to(tl.int8) - 8
        high = ((packed >> 4) ^ 8).to(tl.int8) - 8
        return low.to(tl.float32), high.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, one, less;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC308C308;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            lop3.b32 $0, a, 0x000F000F, 0x43084308, 0x6A;
            lop3.b32 $1, b, 0x000F000F, 0x43084308, 0x6A;
            shr.u32 a, a, 4;
            shr.u32 b, b, 4;
            lop3.b32 $2, a, 0x000F000F, 0x43084308, 0x6A;
            lop3.b32 $3, b, 0x000F000F, 0x43084308, 0x6A;
            fma.rn.bf16x2 $0, $0, one, less;
            fma.rn.bf16x2 $1, $1, one, less;
            fma.rn.bf16x2 $2, $2, one, less;
            fma.rn.bf16x2 $3, $3, one, less;
            }""",
            "=r,=r,=r,=r,r",
            args=[packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
