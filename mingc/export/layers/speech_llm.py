"""Geometry of the speech LLM, from `talker/llm/config.json`; shared by three stages."""

from __future__ import annotations

import json

from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.layers.qwen2 import Qwen2Config, read_qwen2_config

MAX_STEPS = 1000  # patches of one utterance; the reference's cap (spec: talker.md §5)
MAX_SLOTS = 1024  # the most utterances with state in a pool


def read_llm_config(checkpoint: Checkpoint) -> Qwen2Config:
    """Read the geometry of the speech LLM's Qwen2 stack. Raises: CheckpointError."""
    if checkpoint.talker is None:
        raise CheckpointError("the checkpoint has no talker/ folder", where=str(checkpoint.root))
    file = checkpoint.talker.root / "llm" / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the speech LLM's config cannot be read: {error}", where=str(file)) from error
    if not isinstance(raw, dict):
        raise CheckpointError("the speech LLM's config is not a JSON object", where=str(file))
    return read_qwen2_config(raw, str(file))
