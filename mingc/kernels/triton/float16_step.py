"""The unit of float16 operands beside FP8 weights.

FP8 becomes float16 in one instruction for two values, bfloat16 in several for one. So what FP8 weights are multiplied
with is made float16 as well, in steps of this: its range then ends at a million, and bfloat16's precision is kept down
to 1e-3.
"""

from __future__ import annotations

import triton.language as tl

FP16_STEP = tl.constexpr(16.0)
