"""One rank of the thinker: builds the input tensors of a step, runs the engines, keeps the KV pages.

Which requests run, and where their pages lie, is the scheduler's; sampling is the sampler's. Every rank runs the
same steps on its own weights and pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.artifacts.manifest import Manifest
from mingc.runtime.all_reduce import make_reducer
from mingc.runtime.cuda_graphs import GraphPool, Shapes, StaticRun
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
    """Runs steps on one rank's engines. On CUDA every size is captured when this is made, and replayed.

    Args:
        stage: the graphs of `ThinkerLayers`.
        num_pages: KV pages to allocate, page 0 included.

    The group of ranks, if there is one, must have met; making one is a collective.

    Attributes:
        routes: expert ids and weights (T, K) of each expert layer in the last chunk; empty when the engines do not
            tell.
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
        self.routes: list[tuple[Tensor, Tensor]] = []
        self._prefill, self._decode = stage["prefill_attention"], stage["decode_attention"]
        batches, chunks = self._decode.spec.dim("B").buckets, self._prefill.spec.dim("T").buckets
        self.max_batch, self.max_chunk = max(batches), max(chunks)
        embeds = next(each for each in stage["embed"].spec.inputs if each.name == "embeds")
        dtype, self.hidden_size = torch_dtype(embeds.dtype), int(embeds.shape[1])
        longest = max(self.max_batch, self.max_chunk)
        self._embeds = torch.zeros(longest, self.hidden_size, dtype=dtype, device=device)
        self._words = torch.zeros(
            self.max_batch, dtype=torch.int64, device=device
        )  # the kind of answers' tokens
        self.reducer = make_reducer(device, dtype, width=self.hidden_size, batch_sizes=batches)
        self._layers = ThinkerLayers(stage, self.state, vocab_size=vocab_size, reduce_=self.reducer.reduce_)
        self._runs: dict[tuple[str, int], StaticRun] = {}
        if device.type == "cuda":
            with torch.inference_mode():
                self._capture(batches, chunks)

    @torch.inference_mode()
    def prefill(self, step: PrefillStep) -> Tensor:
        """Run one chunk; logits (1, V) float32 of its last token, until the next step."""
        count = len(step.input_ids)
        width = self._prefill.bucket("T", count)
        if step.embeds is not None:
            self._embeds[:count].copy_(step.embeds)
        positions = np.zeros((3, width), np.int64)
        positions[:, :count] = step.positions
        logits, *told = self._run(
            "prefill",
            width,
            {
                "input_ids": _padded(step.input_ids, width),
                "embed_kind": _padded(step.embed_kind, width),
                "positions": torch.from_numpy(positions),
                "page_table": self._page_table(self._prefill, step.pages[None], step.start + count, 1)[0],
                "start": torch.tensor([step.start]),
                "last": torch.tensor([count - 1]),
            },
        )
        self.routes = list(zip(told[::2], told[1::2], strict=True))
        return logits

    @torch.inference_mode()
    def decode(self, step: DecodeStep) -> Tensor:
        """Run one token of each request; logits (B, V) float32 until the next step, rows beyond n are padding."""
        width = self._decode.bucket("B", len(step.input_ids))
        (logits,) = self._run(
            "decode",
            width,
            {
                "input_ids": _padded(step.input_ids, width),
                "positions": _padded(step.positions, width),
                "lengths": _padded(step.lengths, width).clamp_min_(1),
                "page_table": self._page_table(self._decode, step.pages, int(step.lengths.max()), width),
            },
        )
        return logits

    def _run(self, kind: str, width: int, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """`_run_prefill` or `_run_decode` of host tensors."""
        if self._runs:
            return self._runs[kind, width](inputs)
        run = self._run_prefill if kind == "prefill" else self._run_decode
        return run({name: value.to(self.device) for name, value in inputs.items()})

    def _run_prefill(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return self._layers.prefill({**inputs, "embeds": self._embeds[: len(inputs["input_ids"])]})

    def _run_decode(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        width = len(inputs["input_ids"])
        answers = {
            "embeds": self._embeds[:width],
            "embed_kind": self._words[:width],
            "positions": inputs["positions"].expand(3, -1).contiguous(),
        }
        return (self._layers.decode({**inputs, **answers}),)

    def _capture(self, batches: Sequence[int], chunks: Sequence[int]) -> None:
        """A graph for every size, the largest first: the others then fit into the memory it has taken."""
        pool = GraphPool(self.device)
        for width in sorted(chunks, reverse=True):
            ints = (torch.int64, (width,))
            shapes: Shapes = {
                "input_ids": ints,
                "embed_kind": ints,
                "positions": (torch.int64, (3, width)),
                "page_table": (torch.int32, (_only_size(self._prefill, "P"),)),
                "start": (torch.int64, (1,)),
                "last": (torch.int64, (1,)),
            }
            self._runs["prefill", width] = StaticRun(
                shapes, self._run_prefill, device=self.device, pool=pool, name=f"a chunk of {width} tokens"
            )
        for width in sorted(batches, reverse=True):
            ints = (torch.int64, (width,))
            shapes = {
                "input_ids": ints,
                "positions": ints,
                "lengths": ints,
                "page_table": (torch.int32, (width, _only_size(self._decode, "P"))),
            }
            self._runs["decode", width] = StaticRun(
                shapes, self._run_decode, device=self.device, pool=pool, name=f"a step of batch {width}"
            )

    def _page_table(self, graph: Graph, pages: Ints, num_tokens: int, rows: int) -> Tensor:
        """(rows, P) int32 with `pages` (n, any) in it and 0 elsewhere; P is the bucket that holds `num_tokens`."""
        table = np.zeros((rows, graph.bucket("P", -(-num_tokens // self.page_size))), np.int32)
        count = min(pages.shape[1], table.shape[1])
        table[: len(pages), :count] = pages[:, :count]
        return torch.from_numpy(table)


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


def _padded(values: Ints, size: int) -> Tensor:
    padded = np.zeros(size, np.int64)
    padded[: len(values)] = values
    return torch.from_numpy(padded)


def _only_size(graph: Graph, dim: str) -> int:
    """The one size of `dim` that a captured graph can have."""
    (size,) = graph.spec.dim(dim).buckets
    return size
