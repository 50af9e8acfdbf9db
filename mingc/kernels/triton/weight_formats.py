"""Arithmetic on stored weights: the operands of their GEMMs, unpacking INT4, SwiGLU.

FP8 becomes float16 in one instruction for two values, but bfloat16 in several for one. FP8 weights are therefore
multiplied by float16 activations, divided by `FP16_SCALE`: their range then ends at a million, and bfloat16's precision
is kept down to 1e-3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.kernels.triton.moe_config import BF16, FP8, INT4

FP16_SCALE = tl.constexpr(16.0)
IN_INTERPRETER = tl.constexpr(bool(triton.knobs.runtime.interpret))  # it knows no PTX


def weight_format_of(weight: Tensor) -> int:
    """The format of stored weights."""
    return {torch.float8_e4m3fn: FP8, torch.uint8: INT4}.get(weight.dtype, BF16)


def as_operand(x: Tensor, weight_format: int) -> Tensor:
    """Rows (T, D) in the form that the products with stored weights take.

    For FP8 that is float16 in steps of `FP16_SCALE`. For INT4 the even columns come before the odd ones, as the low
    halves of the weights' bytes before the high ones.
    """
    if weight_format == FP8:
        step = float(FP16_SCALE.value)
        narrow: Tensor = (x.to(torch.float32) / step).clamp(-65504, 65504).to(torch.float16)
        return narrow
    if weight_format == INT4:
        return x.view(x.shape[0], -1, 2).transpose(1, 2).contiguous()
    return x


@triton.jit
def shift_to(first, other, is_other, offset, item: tl.constexpr):
    """Where the data lie, counted from `first` in items: at `offset` there, or at the beginning of `other`.

    A pointer chosen by a branch would lose its known alignment, and with it wide loads.
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
    """The signed low and high four bits of bytes, as bfloat16.

    Bits are put where bfloat16 reads 136 + value, two values an instruction; conversions of integers are several
    times slower than the weights arrive.
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
