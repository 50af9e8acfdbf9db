"""Recorded thinker cases of the golden set, as prompts of a thinker loop: their media are embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from mingc.prompts.thinker_prompt import AUDIO, VISION, ThinkerPrompt

THINKER = load_file(Path(__file__).parents[1] / "data" / "thinker.safetensors")
CASES = ("text", "image", "audio", "mixed", "video")


def thinker_prompt(case: str) -> ThinkerPrompt:
    """The recorded tokens, positions and embeddings of a case."""
    ids = THINKER[f"{case}.input_ids"][0]
    kinds = np.zeros(len(ids), np.int64)
    for name, kind in (("image_mask", VISION), ("audio_mask", AUDIO)):
        if f"{case}.{name}" in THINKER:
            kinds[THINKER[f"{case}.{name}"][0]] = kind
    media = THINKER[f"{case}.inputs_embeds"][0][kinds > 0]
    return ThinkerPrompt(
        input_ids=ids,
        positions=THINKER[f"{case}.position_ids"][:, 0],
        rope_delta=int(THINKER[f"{case}.rope_deltas"][0]),
        embed_kind=kinds,
        media_embeds=torch.from_numpy(media) if len(media) else None,
    )
