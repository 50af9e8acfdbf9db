"""One rank of the thinker: builds the input tensors of a step, runs the engines, keeps the KV pages.

Which requests run, and where their pages lie, is the scheduler's; sampling is the sampler's. Every rank runs the
same steps on its own weights and pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.artifacts.manifest import Manifest
from mingc.runtime.all_reduce import make_reducer
from mingc.runtime.distributed import all_gather_last
from mingc.runtime.engines.base import Graph
from mingc.runtime.stages import LoadedStage, torch_dtype
from mingc.runtime.thinker_layers import ThinkerLayers

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
        stage: the graphs of `ThinkerLayers`.
        num_pages: KV pages to allocate, page 0 included.

    The group of ranks, if there is one, must have met.
    """

    def __init__(
        self,
        stage: LoadedStage,
        *,
        vocab_size: int,
        page_size: int,
        num_pages: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self.page_size = page_size
        self.num_pages = num_pages
        self.state = stage.allocate_state({"KV": num_pages * page_size}, device)
        self._prefill, self._decode = stage["prefill_attention"], stage["decode_attention"]
        embeds = next(each for each in stage["embed"].spec.inputs if each.name == "embeds")
        self._embed_dtype = torch_dtype(embeds.dtype)
        self.hidden_size = int(embeds.shape[1])
        self._no_embeds: dict[int, Tensor] = {}  # zeros by number of tokens
        batch_sizes = self._decode.spec.dim("B").buckets
        self.max_batch = max(batch_sizes)
        self.reducer = make_reducer(
            device, self._embed_dtype, width=self.hidden_size, batch_sizes=batch_sizes
        )
        self._layers = ThinkerLayers(
            stage, self.state, vocab_size=vocab_size, reduce_=self.reducer.reduce_, gather=all_gather_last
        )
        self.max_chunk = max(self._prefill.spec.dim("T").buckets)

    @property
    def routes(self) -> list[tuple[Tensor, Tensor]]:
        """Router choices of the last chunk, see `ThinkerLayers`."""
        return self._layers.routes

    @torch.inference_mode()
    def prefill(self, step: PrefillStep) -> Tensor:
        """Run one chunk; logits (1, V) float32 of its last token."""
        count = len(step.input_ids)
        width = self._prefill.bucket("T", count)
        positions = np.zeros((3, width), np.int64)
        positions[:, :count] = step.positions
        return self._layers.prefill(
            {
                "input_ids": self._padded(step.input_ids, width),
                "embeds": self._embeds(step.embeds, width),
                "embed_kind": self._padded(step.embed_kind, width),
                "positions": self._put(positions),
                "page_table": self._page_table(self._prefill, step.pages[None], step.start + count, 1)[0],
                "start": self._put(np.array([step.start])),
                "last": self._put(np.array([count - 1])),
            }
        )

    @torch.inference_mode()
    def decode(self, step: DecodeStep) -> Tensor:
        """Run one token of each request; logits (B, V) float32, rows beyond n are padding."""
        count = len(step.input_ids)
        width = self._decode.bucket("B", count)
        lengths = np.ones(width, np.int64)
        lengths[:count] = step.lengths
        positions = np.zeros((3, width), np.int64)
        positions[:, :count] = step.positions
        return self._layers.decode(
            {
                "input_ids": self._padded(step.input_ids, width),
                "embeds": self._embeds(None, width),
                "embed_kind": self._put(np.zeros(width, np.int64)),
                "positions": self._put(positions),
                "lengths": self._put(lengths),
                "page_table": self._page_table(self._decode, step.pages, int(step.lengths.max()), width),
            }
        )

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


def make_worker(
    stage: LoadedStage, manifest: Manifest, *, num_pages: int, device: torch.device
) -> ThinkerWorker:
    """The worker of the thinker in the bundle of `manifest`."""
    parameters = manifest.parameters.thinker
    assert parameters is not None, "a bundle with the stage has its parameters"
    return ThinkerWorker(
        stage,
        vocab_size=parameters.vocab_size,
        page_size=parameters.page_size,
        num_pages=num_pages,
        device=device,
    )
