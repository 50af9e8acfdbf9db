"""Inputs of a thinker step on a GPU: building them does not wait for the steps before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.thinker.step import chunk_embeds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONG_CYCLES = 2_000_000_000  # about a second
ROWS, WIDTH = 40, 16


def test_media_embeddings_are_placed_without_waiting() -> None:
    kinds = np.arange(ROWS) % 3
    embeds = torch.rand(np.count_nonzero(kinds), WIDTH, dtype=torch.float32)
    prompt = ThinkerPrompt(
        input_ids=np.arange(ROWS),
        positions=np.zeros((3, ROWS), np.int64),
        rope_delta=0,
        embed_kind=kinds,
        media_embeds=embeds,
    )
    parts = slice(0, 30), slice(7, ROWS)
    expected = chunk_embeds([(prompt, part) for part in parts])
    on_device = replace(prompt, media_embeds=embeds.cuda())
    with torch.inference_mode():
        chunk_embeds([(on_device, part) for part in parts])  # allocates what the next call uses again
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG_CYCLES)
        ended = torch.cuda.Event()
        ended.record()
        found = chunk_embeds([(on_device, part) for part in parts])
        assert not ended.query()
    assert found is not None and expected is not None
    assert torch.equal(found.cpu(), expected)
