"""Layout of a prefill chunk that several prompts share."""

from __future__ import annotations

# A chunk's rows of another request begin at a multiple of this: a program of the kernel takes so many, all of one. With
# 64 two programs share a multiprocessor: one adds up while the other multiplies.
CHUNK_ALIGNMENT = 64
# The longest chunk that may hold rows of several requests. Beyond it a chunk's time grows as its rows do: one more
# request gains nothing and makes the others wait.
SHARED_ROWS = 1024
