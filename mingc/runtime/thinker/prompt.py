"""A prompt as the thinker's engines take it. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ThinkerPrompt:
    """A prompt as the engines take it.

    Attributes:
        input_ids: (T,) int64.
        positions: (3, T) int64; the token at index i of the answer's part has position i + rope_delta.
        embed_kind: (T,) int64, see `PrefillStep`.
        media_rows: (M,) int64, prompt rows that take an embedding, ascending.
        media_embeds: (M, D); None without media.
    """

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    rope_delta: int
    embed_kind: NDArray[np.int64]
    media_rows: NDArray[np.int64]
    media_embeds: Tensor | None


def chunk_embeds(parts: Sequence[tuple[ThinkerPrompt, slice]]) -> Tensor | None:
    """(n, D) with the media embeddings of a chunk at their rows; None when it has none."""
    given = next((prompt.media_embeds for prompt, _ in parts if prompt.media_embeds is not None), None)
    if given is None:
        return None
    embeds = given.new_zeros(sum(inside.stop - inside.start for _, inside in parts), given.shape[1])
    begin, has_media = 0, False
    for prompt, inside in parts:
        if prompt.media_embeds is not None:
            first, end = np.searchsorted(prompt.media_rows, [inside.start, inside.stop])
            rows = torch.from_numpy(prompt.media_rows[first:end] - inside.start + begin)
            embeds[rows] = prompt.media_embeds[first:end]
            has_media |= bool(end > first)
        begin += inside.stop - inside.start
    return embeds if has_media else None
