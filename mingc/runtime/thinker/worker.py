"""One rank of the thinker: builds the input tensors of a step, runs the engines, keeps the KV pages.

Which requests run, and where their pages lie, is the scheduler's; sampling is the sampler's. Every rank runs the
same steps on its own weights and pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mingc.artifacts.parameters import ThinkerParameters
from mingc.dtypes import torch_dtype
from mingc.runtime.distributed.all_reduce import create_all_reduce
from mingc.runtime.distributed.process_group import broadcast_from_rank0_, num_ranks
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy, GraphPool, GraphRunner, Shapes
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.thinker.device_sampler import NUM_COLUMNS, needs_sampling, sample_greedy, sample_tokens
from mingc.runtime.thinker.layers import ThinkerLayers, split_chunk
from mingc.runtime.thinker.prefill_policy import StepLatencyModel
from mingc.runtime.thinker.scheduler import ChunkShape
from mingc.runtime.thinker.step import DecodeStep, Ints, PrefillStep, padded, padded_sampling


class GraphKey(NamedTuple):
    """What is run over fixed tensors, and captured on CUDA.

    Attributes:
        what: a part of a chunk, a pair of chunks, a decode step, or the choice of a token behind a chunk.
        width: rows of a chunk or pair, requests of a step, prompts of a chunk.
        part: of a chunk, `ThinkerWorker.num_layer_groups` in all.
        draws: whether tokens may be drawn; else each is the likeliest.
    """

    what: Literal["chunk", "pair", "decode", "first"]
    width: int
    part: int = 0
    draws: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaunchedTokens:
    """The tokens (B,) int64 of a step on their way to the host, `NOT_FINITE` for a row without one."""

    host_copy: AsyncHostCopy

    def wait(self) -> list[int]:
        """The tokens; blocks until the device has chosen them."""
        (chosen,) = self.host_copy.wait()
        tokens: list[int] = chosen.tolist()
        return tokens


class ThinkerWorker:
    """Runs steps on one rank's engines. On CUDA every size is captured when this is made, and replayed.

    Args:
        stage: the graphs of `ThinkerLayers`.
        num_pages: KV pages to allocate, page 0 included.
        is_static: whether steps run over fixed tensors, captured on CUDA, and `launch` chooses tokens on the
            device; None: on CUDA. Page tables then always have their largest size.
        two_batch_overlap: whether two of the longest chunks may run together, the all-reduce of one overlapping with
            the layers of the other; None: where there are such sums, on CUDA, and a context holds so many tokens.

    The group of ranks, if there is one, must have met; making one is a collective.

    Attributes:
        batches, chunks: sizes that steps are padded to.
        chunk: what a chunk can hold.
        num_layer_groups: that a chunk is run in, one after the other; decode steps may come between them.
        samples: whether `launch` and `launch_prefill` are there.
        latency_model: of every size, once they were measured.
        routes: expert ids and weights (T, K) of each expert layer in the last chunk; empty when the engines do not
            tell.
    """

    def __init__(
        self,
        stage: LoadedStage,
        parameters: ThinkerParameters,
        *,
        num_pages: int,
        device: torch.device,
        is_static: bool | None = None,
        two_batch_overlap: bool | None = None,
    ) -> None:
        self.device = device
        self.samples_on_device = device.type == "cuda" if is_static is None else is_static
        self.page_size = parameters.page_size
        self.vocab_size = parameters.vocab_size
        self.num_pages = num_pages
        self.state = stage.allocate_state({"KV": num_pages * self.page_size}, device)
        self.routes: list[tuple[Tensor, Tensor]] = []
        self._prefill, self._decode = stage["prefill_attention"], stage["decode_attention"]
        self.batches, self.chunks = self._decode.spec.dim("B").buckets, self._prefill.spec.dim("T").buckets
        self.max_batch, self.max_chunk = max(self.batches), max(self.chunks)
        if two_batch_overlap is None:
            context = self.page_size * max(self._prefill.spec.dim("P").buckets)
            two_batch_overlap = device.type == "cuda" and num_ranks() > 1 and 2 * self.max_chunk <= context
        tables = next(each for each in self._prefill.spec.inputs if each.name == "page_table")
        self.chunk = ChunkShape(
            max_rows=self.max_chunk,
            max_prompts=int(tables.shape[0]),
            alignment=parameters.chunk_alignment,
            shared_rows=parameters.shared_rows,
            two_batch_rows=2 * self.max_chunk if two_batch_overlap else 0,
        )
        embeds = next(each for each in stage["embed"].spec.inputs if each.name == "embeds")
        dtype, self.hidden_size = torch_dtype(embeds.dtype), int(embeds.shape[1])
        longest = max(self.max_batch, self.max_chunk, self.chunk.two_batch_rows)
        self._embeds = torch.zeros(longest, self.hidden_size, dtype=dtype, device=device)
        # The kind of answers' tokens.
        self._words = torch.zeros(self.max_batch, dtype=torch.int64, device=device)
        self.all_reduce = create_all_reduce(
            device, dtype, width=self.hidden_size, tokens=(*self.batches, *self.chunks)
        )
        self._layers = ThinkerLayers(
            stage, self.state, vocab_size=self.vocab_size, all_reduce_=self.all_reduce.all_reduce_
        )
        self.num_layer_groups = self._layers.num_layer_groups
        self._stream: dict[str, Tensor] = {}  # of the chunk under way, rows for the largest
        self._chunk_inputs: dict[int, Mapping[str, Tensor]] = {}  # by width, of the chunk under way
        self._no_logits = torch.zeros(0, self.vocab_size, device=device)
        if self.samples_on_device:
            slots = self.max_batch + 1
            self._last = torch.zeros(slots, dtype=torch.int64, device=device)  # token of each slot's request
            self._seen = torch.zeros(slots, self.vocab_size, dtype=torch.bool, device=device)
            self._yes = torch.ones((), dtype=torch.bool, device=device)
            self._chunk_logits = torch.zeros(self.chunk.max_prompts, self.vocab_size, device=device)
        self.latency_model: StepLatencyModel | None = None
        self._runs: dict[GraphKey, GraphRunner] = {}
        if self.samples_on_device:
            with torch.inference_mode():
                self._prepare()

    def close(self) -> None:
        """Give up what was captured; no step may come any more.

        Must come before the ranks part: NCCL ends a communicator only after the last graph that uses it, and waits
        for that without end (pytorch issue 115388).
        """
        for run in self._runs.values():
            run.close()

    @torch.inference_mode()
    def prefill(self, step: PrefillStep) -> Tensor:
        """Run a chunk, or parts of one; logits (s, V) float32 of its last tokens once it is whole, until the next step.

        Before that the logits have no rows. `ChunkShape.two_batch_rows` tokens are run in all parts at once.
        """
        offsets = self._offsets(step.counts)
        num_rows = int(offsets[-1] + step.counts[-1])
        if num_rows == self.chunk.two_batch_rows:
            assert (step.first_group, step.end_group or self.num_layer_groups) == (
                0,
                self.num_layer_groups,
            ), "a pair is whole"
            inputs = self._first_inputs(step, offsets, num_rows)
            logits, *told = self._run(GraphKey("pair", num_rows), inputs)
            self.routes = list(zip(told[::2], told[1::2], strict=True))
            return logits[: len(step.counts)]
        width = self._prefill.bucket("T", num_rows)
        for part in range(step.first_group, step.end_group or self.num_layer_groups):
            inputs = self._first_inputs(step, offsets, width) if part == 0 else {}
            logits, *told = self._run(GraphKey("chunk", width, part=part), inputs)
            if part == 0:
                self.routes = []
            self.routes += zip(told[::2], told[1::2], strict=True)
        return logits[: len(step.counts)]

    def _offsets(self, counts: Ints) -> Ints:
        """The row that each prompt of a chunk begins at."""
        offsets, end = [], 0
        for count in counts:
            offsets.append(self.chunk.place(end))
            end = offsets[-1] + int(count)
        return np.array(offsets, np.int64)

    def _first_inputs(self, step: PrefillStep, offsets: Ints, width: int) -> dict[str, Tensor]:
        """What the first part of a chunk takes; the others read it where it was put."""
        prompts = np.repeat(np.arange(len(step.counts)), step.counts)
        before = np.cumsum(step.counts) - step.counts  # tokens of the prompts in front
        place = np.arange(len(prompts)) - before[prompts]
        rows = offsets[prompts] + place
        if step.embeds is not None:
            for offset, begin, count in zip(offsets, before, step.counts, strict=True):
                self._embeds[offset : offset + count].copy_(step.embeds[begin : begin + count])

        def put(values: Ints, padding: int = 0) -> Tensor:
            spread = np.full((*values.shape[:-1], width), padding, np.int64)
            spread[..., rows] = values
            return torch.from_numpy(spread)

        held = self.chunk.max_prompts
        return {
            "input_ids": put(step.input_ids),
            "embed_kind": put(step.embed_kind),
            "positions": put(step.positions),
            "segment": put(prompts),
            "index": put(step.starts[prompts] + place, -1),
            "row_slots": put(step.slots[prompts]),
            "page_table": self._page_table(
                self._prefill, step.pages, int((step.starts + step.counts).max()), held
            ),
            "last": padded(offsets + step.counts - 1, held),
            "starts": padded(step.starts, held),
            "slots": padded(step.slots, held),
        }

    @torch.inference_mode()
    def decode(self, step: DecodeStep) -> Tensor:
        """Run one token of each request; logits (B, V) float32 until the next step, rows beyond n are padding."""
        logits: Tensor = self._decode_step(step, draws=False)[0]
        return logits

    @torch.inference_mode()
    def launch_decode(self, step: DecodeStep) -> LaunchedTokens:
        """Run one token of each request and choose the next ones; does not wait for the device."""
        assert self.samples_on_device and step.sampling is not None, "the worker was made to sample"
        _, chosen = self._decode_step(step, draws=needs_sampling(step.sampling))
        return LaunchedTokens(host_copy=AsyncHostCopy(chosen[: len(step.input_ids)]))

    @torch.inference_mode()
    def launch_prefill(self, step: PrefillStep) -> LaunchedTokens:
        """Run the last parts of a chunk and choose the first tokens (k,) of answers; does not wait for the device."""
        assert self.samples_on_device and step.sampling is not None and step.ended is not None, (
            "the worker was made to sample"
        )
        self.prefill(step)
        held = self.chunk.max_prompts
        inputs = {
            "ended": padded(step.ended, held),
            "slots": padded(step.slots[step.ended], held),
            "sampling": padded_sampling(step.sampling, held),
        }
        (chosen,) = self._run(GraphKey("first", held, draws=needs_sampling(step.sampling)), inputs)
        return LaunchedTokens(host_copy=AsyncHostCopy(chosen[: len(step.ended)]))

    def _decode_step(self, step: DecodeStep, *, draws: bool) -> tuple[Tensor, ...]:
        width = self._decode.bucket("B", len(step.input_ids))
        inputs = {
            "input_ids": padded(step.input_ids, width),
            "positions": padded(step.positions, width),
            "lengths": padded(step.lengths, width).clamp_min_(1),
            "page_table": self._page_table(self._decode, step.pages, int(step.lengths.max()), width),
        }
        if self.samples_on_device:
            slots = np.zeros(1, np.int64) if step.slots is None else step.slots
            inputs.update(slots=padded(slots, width), sampling=padded_sampling(step.sampling, width))
        return self._run(GraphKey("decode", width, draws=draws), inputs)

    def _run(self, kind: GraphKey, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        if self._runs:
            return self._runs[kind](inputs)
        return self._function(kind)({name: value.to(self.device) for name, value in inputs.items()})

    def _function(self, kind: GraphKey) -> Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]:
        match kind.what:
            case "chunk":
                return partial(self._run_prefill, part=kind.part, width=kind.width)
            case "pair":
                return self._run_pair
            case "first":
                return partial(self._run_first, draws=kind.draws)
            case "decode":
                return partial(self._run_decode, draws=kind.draws)

    def _run_prefill(self, inputs: Mapping[str, Tensor], *, part: int, width: int) -> tuple[Tensor, ...]:
        """Logits (S, V) behind the last part, else (0, V); then what expert layers tell."""
        if part == 0:
            inputs = {**inputs, "embeds": self._embeds[:width]}
            self._chunk_inputs[width] = inputs
            self._note_seen(inputs)
        inputs = self._chunk_inputs[width]
        before = {name: kept[:width] for name, kept in self._stream.items()}
        stream, routes = self._layers.prefill_layer_group(part, inputs, before)
        if part < self.num_layer_groups - 1:
            self._keep(stream)
            return self._no_logits, *routes
        logits = self._layers.chunk_logits(inputs, stream)
        if self.samples_on_device:
            self._chunk_logits.copy_(logits)
        return logits, *routes

    def _run_pair(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Logits (S, V); then what expert layers tell."""
        self._note_seen(inputs)
        inputs = {**inputs, "embeds": self._embeds[: self.chunk.two_batch_rows]}
        logits, *routes = self._layers.prefill(*split_chunk(inputs, self.max_chunk))
        if self.samples_on_device:
            self._chunk_logits.copy_(logits)
        return logits, *routes

    def _note_seen(self, inputs: Mapping[str, Tensor]) -> None:
        """Note which tokens a chunk's prompts hold; those that begin with it hold no others."""
        if not self.samples_on_device:
            return
        slots, is_begun = inputs["slots"], (inputs["starts"] > 0).unsqueeze(1)
        self._seen.index_copy_(0, slots, self._seen.index_select(0, slots) & is_begun)
        rows = inputs["row_slots"]  # of padding slot 0
        self._seen.index_put_((rows, inputs["input_ids"]), self._yes)

    def _keep(self, stream: Mapping[str, Tensor]) -> None:
        """Copy a chunk's stream to where no other step writes; the first, a warm-up, makes the room."""
        for name, value in stream.items():
            if name not in self._stream:
                self._stream[name] = value.new_zeros(self.max_chunk, *value.shape[1:])
            kept = self._stream[name][: len(value)]
            if kept.data_ptr() != value.data_ptr():
                kept.copy_(value)

    def _run_first(self, inputs: Mapping[str, Tensor], *, draws: bool) -> tuple[Tensor, ...]:
        logits = self._chunk_logits.index_select(0, inputs["ended"])
        return (self._choose(logits, inputs, draws=draws),)

    def _run_decode(self, inputs: Mapping[str, Tensor], *, draws: bool) -> tuple[Tensor, ...]:
        ids = inputs["input_ids"]
        if self.samples_on_device:
            slots = inputs["slots"]
            ids = torch.where(ids >= 0, ids, self._last.index_select(0, slots))
            self._seen.index_put_((slots, ids), self._yes)
        answers = {
            "input_ids": ids,
            "embeds": self._embeds[: len(ids)],
            "embed_kind": self._words[: len(ids)],
            "positions": inputs["positions"].expand(3, -1).contiguous(),
        }
        logits = self._layers.decode({**inputs, **answers})
        return (logits, self._choose(logits, inputs, draws=draws)) if self.samples_on_device else (logits,)

    def _choose(self, logits: Tensor, inputs: Mapping[str, Tensor], *, draws: bool) -> Tensor:
        """The tokens (B,) behind `logits` (B, V), kept as the last ones of `slots`; the same on all ranks."""
        slots = inputs["slots"]
        if draws:
            chosen = sample_tokens(logits, inputs["sampling"], self._seen.index_select(0, slots))
        else:
            chosen = sample_greedy(logits)
        broadcast_from_rank0_(chosen)
        self._last.index_copy_(0, slots, chosen.clamp_min(0))
        return chosen

    def _prepare(self) -> None:
        """A run for every size, the largest first: the others then fit into the memory its graph has taken."""
        pool = GraphPool(self.device) if self.device.type == "cuda" else None
        held = self.chunk.max_prompts
        prompts = (torch.int64, (held,))
        for width in sorted({*self.chunks, self.chunk.two_batch_rows} - {0}, reverse=True):
            rows = (torch.int64, (width,))
            shapes: Shapes = {
                **dict.fromkeys(("input_ids", "embed_kind", "segment", "index", "row_slots"), rows),
                "positions": (torch.int64, (3, width)),
                "page_table": (torch.int32, (held, max(self._prefill.spec.dim("P").buckets))),
                **dict.fromkeys(("last", "starts", "slots"), prompts),
            }
            if width == self.chunk.two_batch_rows:
                self._prepare_run(
                    GraphKey("pair", width), shapes, pool, f"two chunks of {self.max_chunk} tokens"
                )
                continue
            for part in range(self.num_layer_groups):
                kind = GraphKey("chunk", width, part=part)
                self._prepare_run(kind, {} if part else shapes, pool, f"a chunk of {width} tokens")
        for width in sorted(self.batches, reverse=True):
            ints = (torch.int64, (width,))
            shapes = {
                "input_ids": ints,
                "positions": ints,
                "lengths": ints,
                "page_table": (torch.int32, (width, max(self._decode.spec.dim("P").buckets))),
                "slots": ints,
                "sampling": (torch.float32, (width, NUM_COLUMNS)),
            }
            for draws in (True, False):
                kind = GraphKey("decode", width, draws=draws)
                self._prepare_run(kind, shapes, pool, f"a step of batch {width}")
        shapes = {"ended": prompts, "slots": prompts, "sampling": (torch.float32, (held, NUM_COLUMNS))}
        for draws in (True, False):
            kind = GraphKey("first", held, draws=draws)
            self._prepare_run(kind, shapes, pool, "the choice of first tokens")

    def _prepare_run(self, kind: GraphKey, shapes: Shapes, pool: GraphPool | None, name: str) -> None:
        run = self._function(kind)
        self._runs[kind] = GraphRunner(shapes, run, device=self.device, pool=pool, name=name)

    def _page_table(self, graph: Graph, pages: Ints, num_tokens: int, rows: int) -> Tensor:
        """(rows, P) int32 with `pages` (n, any) in it and 0 elsewhere; P is the bucket that holds `num_tokens`."""
        size = graph.bucket("P", -(-num_tokens // self.page_size))
        table = np.zeros(
            (rows, max(graph.spec.dim("P").buckets) if self.samples_on_device else size), np.int32
        )
        count = min(pages.shape[1], table.shape[1])
        table[: len(pages), :count] = pages[:, :count]
        return torch.from_numpy(table)
