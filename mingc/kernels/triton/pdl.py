"""Programmatic dependent launch (PDL) inside a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def enable_pdl(PDL: tl.constexpr):
    """Zero, known only when all that the kernel in front wrote can be read; the kernel behind may begin from here on.

    Addresses of what other kernels write have to have it added. The snippet is called pure because torch takes a kernel
    with unknown effects for one that writes all its tensors.
    """
    if PDL:
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        return tl.multiple_of(zero, 16)
    return 0
