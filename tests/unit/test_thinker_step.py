"""Inputs of one thinker step: media embeddings of prompts that share a chunk, padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.thinker.step import chunk_embeds, padded

WIDTH = 3


def prompt(name: float, kinds: list[int]) -> ThinkerPrompt:
    """A prompt whose media token at row r has the embedding [name, r, 1]."""
    rows = np.flatnonzero(kinds)
    embeds = [[name, float(row), 1.0] for row in rows]
    return ThinkerPrompt(
        input_ids=np.arange(len(kinds)),
        positions=np.zeros((3, len(kinds)), np.int64),
        rope_delta=0,
        embed_kind=np.array(kinds),
        media_embeds=torch.tensor(embeds) if embeds else None,
    )


MEDIA = prompt(1.0, [0, 1, 1, 0, 2, 2, 0, 0])
WORDS = prompt(2.0, [0, 0, 0])
LATE = prompt(3.0, [0, 0, 0, 0, 1])


@pytest.mark.parametrize(
    "parts",
    [
        [(MEDIA, slice(0, 8))],
        [(MEDIA, slice(2, 5))],
        [(MEDIA, slice(0, 8)), (WORDS, slice(0, 3))],
        [(WORDS, slice(0, 3)), (MEDIA, slice(0, 8))],
        [(MEDIA, slice(4, 8)), (LATE, slice(0, 5))],
        [(LATE, slice(3, 5)), (WORDS, slice(1, 3)), (MEDIA, slice(1, 6))],
        [(MEDIA, slice(0, 3)), (LATE, slice(0, 4))],  # the media of the second one come in a later chunk
        [(LATE, slice(0, 4)), (MEDIA, slice(0, 3))],
    ],
)
def test_every_media_token_of_a_chunk_has_its_embedding(parts: list[tuple[ThinkerPrompt, slice]]) -> None:
    expected = [
        [name, float(row), 1.0] if each.embed_kind[row] else [0.0] * WIDTH
        for each, inside in parts
        for name in [{id(MEDIA): 1.0, id(WORDS): 2.0, id(LATE): 3.0}[id(each)]]
        for row in range(inside.start, inside.stop)
    ]
    embeds = chunk_embeds(parts)
    assert embeds is not None and embeds.tolist() == expected


def test_a_chunk_of_words_has_no_embeddings() -> None:
    assert chunk_embeds([(WORDS, slice(0, 3))]) is None
    assert chunk_embeds([(LATE, slice(0, 4)), (MEDIA, slice(6, 8))]) is None


def test_padding_is_zero() -> None:
    assert padded(np.array([3, 4]), 4).tolist() == [3, 4, 0, 0]
