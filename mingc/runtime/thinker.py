"""One rank of the thinker: builds the input tensors of a step, runs the engine, keeps the KV pages.

Which requests run, and where their pages lie, is the scheduler's; sampling is the sampler's. Every rank runs the
same steps on its own weights and pages; the engines reduce across ranks themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.runtime.engines.base import Graph
from mingc.runtime.stages import LoadedStage, torch_dtype

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillStep:
    """One chunk of one prompt.

    Attributes:
        input_ids: (n,) int64.
        positions: (3, n) int64.
        embed_kind: (n,) int64; 0 word embedding, 1 image gate, 2 audio gate.
        embeds: (n, D), rows of media tokens; None when the chunk has none.
        start: tokens of the request before this chunk.
        pages: (P,) int64, the request's pages in token order, enough for start + n tokens.
    """

    input_ids: Ints
    positions: Ints
    embed_kind: Ints
    embeds: Tensor | None
    start: int
    pages: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStep:
    """One token of each of n requests.

    Attributes:
        input_ids, positions: (n,) int64.
        lengths: (n,) int64, tokens of each request, the new one included.
        pages: (n, P) int64, pages in token order, padded with 0.
    """

    input_ids: Ints
    positions: Ints
    lengths: Ints
    pages: Ints


class ThinkerWorker:
    """Runs steps on one rank's engines.

    Args:
        stage: the graphs `prefill` and `decode`.
        num_pages: KV pages to allocate, page 0 included.
    """

    def __init__(self, stage: LoadedStage, *, page_size: int, num_pages: int, device: torch.device) -> None:
        self._prefill = stage["prefill"]
        self._decode = stage["decode"]
        self.device = device
        self.page_size = page_size
        self.num_pages = num_pages
        self._state = stage.allocate_state({"KV": num_pages * page_size}, device)
        embeds = next(each for each in self._prefill.spec.inputs if each.name == "embeds")
        self._embed_dtype = torch_dtype(embeds.dtype)
        self.hidden_size = int(embeds.shape[1])
        self._no_embeds: dict[int, Tensor] = {}  # zeros by chunk bucket
        self.max_batch = max(self._decode.spec.dim("B").buckets)
        self.max_chunk = max(self._prefill.spec.dim("T").buckets)

    @torch.inference_mode()
    def prefill(self, step: PrefillStep) -> Tensor:
        """Run one chunk; logits (1, V) float32 of its last token."""
        count = len(step.input_ids)
        width = self._prefill.bucket("T", count)
        positions = np.zeros((3, width), np.int64)
        positions[:, :count] = step.positions
        outputs = self._prefill.run(
            input_ids=self._padded(step.input_ids, width),
            embeds=self._embeds(step.embeds, width),
            embed_kind=self._padded(step.embed_kind, width),
            positions=self._put(positions),
            page_table=self._page_table(self._prefill, step.pages[None], step.start + count, 1)[0],
            start=self._put(np.array([step.start])),
            last=self._put(np.array([count - 1])),
            **self._state,
        )
        return outputs["logits"]

    @torch.inference_mode()
    def decode(self, step: DecodeStep) -> Tensor:
        """Run one token of each request; logits (B, V) float32, rows beyond n are padding."""
        count = len(step.input_ids)
        width = self._decode.bucket("B", count)
        lengths = np.ones(width, np.int64)
        lengths[:count] = step.lengths
        outputs = self._decode.run(
            input_ids=self._padded(step.input_ids, width),
            positions=self._padded(step.positions, width),
            lengths=self._put(lengths),
            page_table=self._page_table(self._decode, step.pages, int(step.lengths.max()), width),
            **self._state,
        )
        return outputs["logits"]

    def _page_table(self, graph: Graph, pages: Ints, num_tokens: int, rows: int) -> Tensor:
        """(rows, P) int32 with `pages` (n, any) in it and 0 elsewhere; P is the bucket that holds `num_tokens`."""
        table = np.zeros((rows, graph.bucket("P", -(-num_tokens // self.page_size))), np.int32)
        count = min(pages.shape[1], table.shape[1])
        table[: len(pages), :count] = pages[:, :count]
        return torch.from_numpy(table).to(self.device)

    def _padded(self, values: Ints, size: int) -> Tensor:
        padded = np.zeros(size, np.int64)
        padded[: len(values)] = values
        return self._put(padded)

    def _put(self, values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def _embeds(self, embeds: Tensor | None, width: int) -> Tensor:
        if embeds is None:
            if width not in self._no_embeds:
                self._no_embeds[width] = self._new_embeds(width)
            return self._no_embeds[width]
        padded = self._new_embeds(width)
        padded[: len(embeds)] = embeds
        return padded

    def _new_embeds(self, width: int) -> Tensor:
        return torch.zeros(width, self.hidden_size, dtype=self._embed_dtype, device=self.device)
