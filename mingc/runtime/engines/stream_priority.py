"""Priorities of CUDA streams: waiting thread blocks of the smaller number start first.

Kernels of a CUDA graph have the priority of the stream on which they were captured.
"""

from __future__ import annotations

DRAWING = 0  # pictures: also the lowest, and of steps that take longer than any other call
ENCODERS = 0  # the lowest and CUDA's default: thinker and talker overtake long encoder calls
DECODING = -1  # thinker and talker
COMMUNICATION = -2  # few thread blocks, for which the other ranks wait
