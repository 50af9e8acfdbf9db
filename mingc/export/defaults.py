"""Sizes that the recipe and the options of stages have unless others are chosen."""

from __future__ import annotations

BATCH_SIZES = (1, 2, 4, 8)
MAX_MODEL_LEN = 4096  # tokens of a prompt and its answer
PREFILL_CHUNK_SIZE = 256  # tokens
