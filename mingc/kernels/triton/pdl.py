"""Programmatic dependent launch (PDL) inside a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def enable_pdl(PDL: tl.constexpr):
    """Let the next kernel start, wait until the previous kernel's writes are visible, and return zero.

    Add the zero to every address that other kernels write, so that no access moves before the wait. The assembly is
    marked pure because torch assumes that a kernel with unknown effects writes all its tensors.
    """
    if PDL:
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        return tl.multiple_of(zero, 16)
    return 0
