"""Defaults that the command line, the export recipe and the stages share."""

from __future__ import annotations

BATCH_SIZES = (1, 2, 4, 8)
MAX_MODEL_LEN = 4096  # tokens of a prompt and its answer
PREFILL_CHUNK_SIZE = 256  # tokens
MODEL_NAME = "ming-omni"
BACKEND = "aoti"
CACHE_GIGABYTES = 20.0  # of compiled engines; those of one export take 0.1 to 1
RTX_BACKEND = "tensorrt"  # the only one that builds for RTX cards that are not in the machine
