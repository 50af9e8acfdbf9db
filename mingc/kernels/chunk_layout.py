"""Layout of a prefill chunk that several requests share: part of the contracts of the prefill attentions."""

from __future__ import annotations

# Each request's rows start at a multiple of this: a program of the kernel takes this many rows, of one request. With 64
# two programs share a multiprocessor: one does softmax while the other multiplies.
CHUNK_ALIGNMENT = 64
# The longest chunk that may hold several requests. A longer chunk's time is proportional to its rows: sharing it gains
# nothing and delays the other requests.
SHARED_ROWS = 1024
# The same of the speech LLM (`contiguous_kv_prefill_attention`): 16 rows are the fewest that tensor cores multiply.
SLOT_CHUNK_ALIGNMENT = 16
