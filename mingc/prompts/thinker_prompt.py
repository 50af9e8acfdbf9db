"""The thinker's prompt: token ids, positions and media embeddings of one conversation. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

# Values of `ThinkerPrompt.embed_kind`.
WORD, VISION, AUDIO = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ThinkerPrompt:
    """Input of the thinker for one request: T tokens, M of which take a media embedding.

    Attributes:
        input_ids: (T,) int64.
        positions: (3, T) int64; generated token number n, counted from the start of the prompt, has position
            n + `rope_delta`.
        embed_kind: (T,) int64: 0 word embedding, 1 vision embedding, 2 audio embedding.
        media_embeds: (M, D), one row per token whose `embed_kind` is not 0, in order; None without media, and until
            the encoders have run.
        media_ids: (M, W) uint8, the origin of these embeddings: a hash of the medium and the position in it. None:
            unknown. It may end before the last of them: no other request can share results that depend on the rest.
        queries: tokens [start, end) of a prompt for a picture, whose hidden rows are its answer; None: it is text.
    """

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    rope_delta: int
    embed_kind: NDArray[np.int64]
    media_embeds: Tensor | None = None
    media_ids: NDArray[np.uint8] | None = None
    queries: tuple[int, int] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def followed_by(self, answer: Sequence[int]) -> ThinkerPrompt:
        """This prompt with generated tokens behind it."""
        positions = np.arange(self.num_tokens, self.num_tokens + len(answer)) + self.rope_delta
        return replace(
            self,
            input_ids=np.concatenate([self.input_ids, np.array(answer, np.int64)]),
            positions=np.concatenate([self.positions, np.tile(positions, (3, 1))], axis=1),
            embed_kind=np.concatenate([self.embed_kind, np.full(len(answer), WORD, np.int64)]),
        )

    @property
    def media_rows(self) -> NDArray[np.int64]:
        """(M,) int64, ascending: indices of the tokens that take a media embedding."""
        return np.flatnonzero(self.embed_kind)
