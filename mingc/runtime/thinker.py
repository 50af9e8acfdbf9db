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
        self.max_context = min(max(graph.spec.dim("C").buckets) for graph in (self._prefill, self._decode))

    @torch.inference_mode()
    def prefill(self, step: PrefillStep) -> Tensor:
        """Run one chunk; logits (1, V) float32 of its last token."""
        count = len(step.input_ids)
        width = self._prefill.bucket("T", count)
        context = self._prefill.bucket("C", step.start + count)
        # Padding writes to page 0 and sees context row 0 only, so that no row of a softmax is empty.
        write_rows = np.arange(width) % self.page_size
        rows = self._rows(step.pages, step.start + count)
        write_rows[:count] = rows[step.start :]
        query_index = np.zeros(width, np.int64)
        query_index[:count] = np.arange(step.start, step.start + count)
        positions = np.zeros((3, width), np.int64)
        positions[:, :count] = step.positions
        outputs = self._prefill.run(
            input_ids=self._padded(step.input_ids, width),
            embeds=self._embeds(step.embeds, width),
            embed_kind=self._padded(step.embed_kind, width),
            positions=self._put(positions),
            write_rows=self._put(write_rows),
            context_rows=self._padded(rows, context),
            query_index=self._put(query_index),
            last=self._put(np.array([count - 1])),
            **self._state,
        )
        return outputs["logits"]

    @torch.inference_mode()
    def decode(self, step: DecodeStep) -> Tensor:
        """Run one token of each request; logits (B, V) float32, rows beyond n are padding."""
        count = len(step.input_ids)
        width = self._decode.bucket("B", count)
        context = self._decode.bucket("C", int(step.lengths.max()))
        last = step.lengths - 1
        write_rows = np.zeros(width, np.int64)
        pages = np.take_along_axis(step.pages, last[:, None] // self.page_size, axis=1)[:, 0]
        write_rows[:count] = pages * self.page_size + last % self.page_size
        rows = step.pages[:, :, None] * self.page_size + np.arange(self.page_size)
        rows = rows.reshape(count, -1)[:, :context]
        context_rows = np.zeros((width, context), np.int64)
        context_rows[:count, : rows.shape[1]] = rows
        lengths = np.ones(width, np.int64)
        lengths[:count] = step.lengths
        outputs = self._decode.run(
            input_ids=self._padded(step.input_ids, width),
            positions=self._padded(step.positions, width),
            write_rows=self._put(write_rows),
            context_rows=self._put(context_rows),
            context_lens=self._put(lengths),
            **self._state,
        )
        return outputs["logits"]

    def _rows(self, pages: Ints, num_tokens: int) -> Ints:
        """(num_tokens,) KV rows of a request in token order."""
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)[:num_tokens]

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
