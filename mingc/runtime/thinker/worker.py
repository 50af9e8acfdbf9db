"""Thinker worker, one per rank: builds the input tensors of a step, runs the layers, samples tokens, holds KV pages.

The loop passes it steps that the scheduler has planned (which requests run, in which pages). Every rank runs the same
steps on its own weights and pages. The layers are in `mingc.runtime.thinker.layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.artifacts.parameters import ThinkerParameters
from mingc.dtypes import torch_dtype
from mingc.kernels.sample_tokens import NUM_COLUMNS
from mingc.runtime.distributed.all_reduce import create_all_reduce
from mingc.runtime.distributed.process_group import num_ranks
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy, GraphPool, GraphRunner, Shapes
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.thinker.device_sampler import DeviceSampler, needs_sampling
from mingc.runtime.thinker.layers import ThinkerLayers, split_chunk
from mingc.runtime.thinker.logit_edits import NO_OPTIONS, SampleOptions, top_logprobs, upload
from mingc.runtime.thinker.prefill_policy import StepLatencyModel
from mingc.runtime.thinker.scheduler import ChunkShape
from mingc.runtime.thinker.step import DecodeStep, Ints, PrefillStep, SampleStep, padded
from mingc.runtime.thinker.step_options import DEFAULT_STEPS, StepOptions


class GraphKey(NamedTuple):
    """Key of a captured graph (on the CPU: of a function over static tensors).

    Attributes:
        kind: a layer group of a chunk, two overlapped chunks, the layers of a decode step, sampling its tokens, or
            sampling the first tokens after a chunk.
        size: rows of the chunk or chunks, requests of the decode step, prompts of a chunk.
        layer_group: of a chunk, `ThinkerWorker.num_layer_groups` in all.
        is_random: whether tokens may be sampled at random; otherwise all rows are greedy.
    """

    kind: Literal["chunk", "two_batch", "decode", "next_tokens", "first_tokens"]
    size: int
    layer_group: int = 0
    is_random: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaunchedTokens:
    """Sampled tokens on their way to the host.

    Attributes:
        host_copy: of the tokens of a batch, int64, `NOT_FINITE` in rows whose logits are not finite; then of what the
            `options` ask for.
        rows: (n,) int64, rows of the step's requests in the batch.
    """

    host_copy: AsyncHostCopy
    rows: Ints
    options: SampleOptions = NO_OPTIONS

    def wait(self) -> list[int]:
        """Returns the tokens of the requests; blocks until the device has sampled them."""
        tokens: list[int] = self.host_copy.wait()[0].numpy()[self.rows].tolist()
        return tokens

    def logits(self) -> NDArray[np.float32] | None:
        """Returns the raw logits (n, V) of the tokens, if requested; blocks like `wait`."""
        return self.host_copy.wait()[1].float().numpy() if self.options.with_logits else None

    def logprobs(self) -> dict[int, NDArray[np.float32]]:
        """Returns `top_logprobs` of each request that asked for them; blocks like `wait`."""
        rows = self.options.logprob_rows
        if rows is None:
            return {}
        return dict(zip(rows.tolist(), self.host_copy.wait()[-1].numpy(), strict=True))


class ThinkerWorker:
    """Runs steps on the engines of one rank. On CUDA the constructor captures every size, and steps replay it.

    The constructor is a collective; initialize the process group before.

    Args:
        stage: the graphs that `ThinkerLayers` runs.
        num_pages: KV pages to allocate, page 0 included.
        keeps_rows: whether `take_rows` is available.

    Attributes:
        batches, chunks: sizes that steps are padded to.
        two_batch_sizes: rows of both chunks of a step with two-batch overlap: `max_chunk` plus any of `chunks`.
        chunk: capacity of a chunk.
        num_layer_groups: the layers of a chunk run in so many groups; decode steps may run between them.
        samples_on_device: whether `launch_decode` and `launch_prefill` are available.
        latency_model: measured time of every size; None until measured.
        routes: expert ids and weights (T, K) of each expert layer in the last chunk; empty if the engines do not
            output them.
    """

    def __init__(
        self,
        stage: LoadedStage,
        parameters: ThinkerParameters,
        *,
        num_pages: int,
        device: torch.device,
        options: StepOptions = DEFAULT_STEPS,
        keeps_rows: bool = False,
    ) -> None:
        self.device = device
        self.samples_on_device = device.type == "cuda" if options.is_static is None else options.is_static
        self.page_size = parameters.page_size
        self.vocab_size = parameters.vocab_size
        self.num_pages = num_pages
        self.state = stage.allocate_state({"KV": num_pages * self.page_size}, device)
        self.routes: list[tuple[Tensor, Tensor]] = []
        self._prefill, self._decode = stage["prefill_attention"], stage["decode_attention"]
        self._is_captured = device.type == "cuda" and stage.is_capturable
        self.batches, self.chunks = self._decode.spec.dim("B").buckets, self._prefill.spec.dim("T").buckets
        if options.max_chunk is not None:
            self.chunks = tuple(size for size in self.chunks if size <= options.max_chunk) or (
                min(self.chunks),
            )
        self.max_batch, self.max_chunk = max(self.batches), max(self.chunks)
        two_batch_overlap = options.two_batch_overlap
        if two_batch_overlap is None:
            context = self.page_size * max(self._prefill.spec.dim("P").buckets)
            two_batch_overlap = device.type == "cuda" and num_ranks() > 1 and 2 * self.max_chunk <= context
        tables = self._prefill.spec.input("page_table")
        self._table_rows = int(tables.shape[0])
        max_prompts = options.max_prompts or (self._table_rows if self.samples_on_device else 1)
        self.chunk = ChunkShape(
            max_rows=self.max_chunk,
            max_prompts=min(self._table_rows, max_prompts),
            alignment=parameters.chunk_alignment,
            shared_rows=parameters.shared_rows,
            two_batch_rows=2 * self.max_chunk if two_batch_overlap else 0,
        )
        self.two_batch_sizes = tuple(self.max_chunk + size for size in self.chunks if two_batch_overlap)
        embeds = stage["embed"].spec.input("embeds")
        dtype, self.hidden_size = torch_dtype(embeds.dtype), int(embeds.shape[1])
        longest = max(self.max_batch, self.max_chunk, self.chunk.two_batch_rows)
        self._embeds = torch.zeros(longest, self.hidden_size, dtype=dtype, device=device)
        # Residual stream and delta of the last chunk after its last layer, and the row of each of its tokens.
        self._last_rows: Tensor | None = None
        if keeps_rows:
            rows = max(self.max_chunk, self.chunk.two_batch_rows)
            self._last_rows = torch.zeros(2, rows, self.hidden_size, dtype=dtype, device=device)
        self._token_rows: Ints = np.zeros(0, np.int64)
        # `embed_kind` of decoded tokens: all are text.
        self._text_kind = torch.zeros(self.max_batch, dtype=torch.int64, device=device)
        self.all_reduce = create_all_reduce(
            device, dtype, width=self.hidden_size, tokens=(*self.batches, *self.chunks)
        )
        self._layers = ThinkerLayers(
            stage, self.state, vocab_size=self.vocab_size, all_reduce_=self.all_reduce.all_reduce_
        )
        self.num_layer_groups = self._layers.num_layer_groups
        # The residual stream of the current chunk between layer groups, with rows for the largest chunk.
        self._stream: dict[str, Tensor] = {}
        self._chunk_inputs: dict[int, Mapping[str, Tensor]] = {}  # inputs of the current chunk, by size
        self._decode_logits: dict[
            int, Tensor
        ] = {}  # logits of the last decode step, by size; static if captured
        self._no_logits = torch.zeros(0, self.vocab_size, device=device)
        self._sampler: DeviceSampler | None = None
        if self.samples_on_device:
            self._sampler = DeviceSampler(
                stage.graphs.get("sample"),
                num_slots=self.max_batch + 1,
                vocab_size=self.vocab_size,
                device=device,
            )
            self._chunk_logits = torch.zeros(self._table_rows, self.vocab_size, device=device)
        self.latency_model: StepLatencyModel | None = None
        self._graphs: dict[GraphKey, GraphRunner] = {}
        if self.samples_on_device:
            with torch.inference_mode():
                self._capture_all()

    @property
    def state_bytes(self) -> int:
        """Bytes of the KV pages on this rank."""
        return sum(each.nbytes for each in self.state.values())

    def close(self) -> None:
        """Release the captured graphs; no step may follow.

        Call it before leaving the process group: NCCL waits forever for the last graph that uses a communicator before
        it destroys the communicator (pytorch issue 115388).
        """
        for graph in self._graphs.values():
            graph.close()

    @torch.inference_mode()
    def prefill(self, step: PrefillStep) -> Tensor:
        """Run layer groups of a chunk. Returns logits (s, V) float32 of each prompt's last token.

        The next step overwrites them; before the last layer group they have no rows. A step of more than `max_chunk`
        tokens runs all layer groups at once, with two-batch overlap.
        """
        if step.first_group == 0 and self._sampler is not None:
            self._sampler.mark_skipped(step)
        offsets = self._offsets(step.counts)
        num_rows = int(offsets[-1] + step.counts[-1])
        if num_rows > self.max_chunk:
            assert num_rows <= self.chunk.two_batch_rows, "at most two chunks"
            assert (step.first_group, step.end_group or self.num_layer_groups) == (
                0,
                self.num_layer_groups,
            ), "two-batch overlap runs all layer groups at once"
            size = self.max_chunk + self._prefill.bucket("T", num_rows - self.max_chunk)
            inputs = self._first_inputs(step, offsets, size)
            logits, *routes = self._run(GraphKey("two_batch", size), inputs)
            self.routes = list(zip(routes[::2], routes[1::2], strict=True))
            return logits[: len(step.counts)]
        size = self._prefill.bucket("T", num_rows)
        for group in range(step.first_group, step.end_group or self.num_layer_groups):
            inputs = self._first_inputs(step, offsets, size) if group == 0 else {}
            logits, *routes = self._run(GraphKey("chunk", size, layer_group=group), inputs)
            if group == 0:
                self.routes = []
            self.routes += zip(routes[::2], routes[1::2], strict=True)
        return logits[: len(step.counts)]

    @torch.inference_mode()
    def take_rows(self, tokens: Ints) -> AsyncHostCopy:
        """Copy hidden rows of the last chunk to the host: (2, n, D), residual and delta of its tokens (n,).

        Call it after the last layer group, before the next step. Does not wait for the device.
        """
        assert self._last_rows is not None, "the worker keeps rows"
        rows = upload(self._token_rows[tokens], self.device)
        return AsyncHostCopy(self._last_rows.index_select(1, rows))

    def _offsets(self, counts: Ints) -> Ints:
        """The first row of each prompt in a chunk."""
        offsets, end = [], 0
        for count in counts:
            offsets.append(self.chunk.place(end))
            end = offsets[-1] + int(count)
        return np.array(offsets, np.int64)

    def _first_inputs(self, step: PrefillStep, offsets: Ints, size: int) -> dict[str, Tensor]:
        """Inputs of a chunk's first layer group; the other groups read them from its static tensors."""
        prompts = np.repeat(np.arange(len(step.counts)), step.counts)
        before = np.cumsum(step.counts) - step.counts  # tokens of the preceding prompts
        index = np.arange(len(prompts)) - before[prompts]  # within the prompt
        rows = self._token_rows = offsets[prompts] + index
        if step.embeds is not None:
            for offset, start, count in zip(offsets, before, step.counts, strict=True):
                self._embeds[offset : offset + count].copy_(step.embeds[start : start + count])

        def scatter(values: Ints, padding: int = 0) -> Tensor:
            scattered = np.full((*values.shape[:-1], size), padding, np.int64)
            scattered[..., rows] = values
            return torch.from_numpy(scattered)

        num_prompts = self._table_rows
        return {
            "input_ids": scatter(step.input_ids),
            "embed_kind": scatter(step.embed_kind),
            "positions": scatter(step.positions),
            "segment": scatter(prompts),
            "index": scatter(step.starts[prompts] + index, -1),
            "row_slots": scatter(step.slots[prompts]),
            "page_table": self._page_table(
                self._prefill, step.pages, int((step.starts + step.counts).max()), num_prompts
            ),
            "last": padded(offsets + step.counts - 1, num_prompts),
            "starts": padded(step.starts, num_prompts),
            "slots": padded(step.slots, num_prompts),
        }

    @torch.inference_mode()
    def decode(self, step: DecodeStep) -> Tensor:
        """Run one token of each request. Returns logits (B, V) float32, which the next step overwrites.

        Rows beyond the requests are padding. Does not wait for the device; `launch_sampling` may follow.
        """
        size = self._decode.bucket("B", len(step.input_ids))
        inputs = {
            "input_ids": padded(step.input_ids, size),
            "positions": padded(step.positions, size),
            "lengths": padded(step.lengths, size).clamp_min_(1),
            "page_table": self._page_table(self._decode, step.pages, int(step.lengths.max()), size),
        }
        if self.samples_on_device:
            slots = np.zeros(1, np.int64) if step.slots is None else step.slots
            inputs["slots"] = padded(slots, size)
        (logits,) = self._run(GraphKey("decode", size), inputs)
        return logits

    @torch.inference_mode()
    def launch_sampling(self, step: SampleStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens:
        """Sample the tokens of the last decode step. Does not wait for the device."""
        count = len(step.slots)
        size = self._decode.bucket("B", count)
        return self._launch_sampling(
            GraphKey("next_tokens", size), self._decode_logits[size], np.arange(count), step, options
        )

    def launch_decode(self, step: DecodeStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens:
        """Run one token of each request and sample the next ones. Does not wait for the device."""
        assert self.samples_on_device and step.sampling is not None and step.slots is not None, (
            "the step has sampling parameters"
        )
        self.decode(step)
        return self.launch_sampling(SampleStep(slots=step.slots, sampling=step.sampling), options=options)

    @torch.inference_mode()
    def launch_prefill(self, step: PrefillStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens:
        """Run the last layer groups of a chunk and sample the first tokens (k,) of answers.

        Does not wait for the device.
        """
        assert self.samples_on_device and step.sampling is not None and step.ended is not None, (
            "the step has sampling parameters"
        )
        self.prefill(step)
        key = GraphKey("first_tokens", self._table_rows)
        ended = SampleStep(slots=step.slots[step.ended], sampling=step.sampling)
        return self._launch_sampling(key, self._chunk_logits, step.ended, ended, options)

    def _launch_sampling(
        self, key: GraphKey, logits: Tensor, rows: Ints, step: SampleStep, options: SampleOptions
    ) -> LaunchedTokens:
        """Edit and sample `rows` (n,) of the logits (`key.size`, V), which the requests of the step have."""
        sampler, device = self._sampler, self.device
        assert sampler is not None, "the device samples"
        slots, sampling = np.zeros(key.size, np.int64), np.zeros((key.size, NUM_COLUMNS), np.float32)
        slots[rows], sampling[rows] = step.slots, step.sampling
        key = key._replace(is_random=needs_sampling(step.sampling))
        inputs = {"slots": torch.from_numpy(slots), "sampling": torch.from_numpy(sampling)}
        # Of the raw logits, which edits overwrite.
        recorded = [logits.index_select(0, upload(rows, device))] if options.with_logits else []
        if options.logprob_rows is not None:
            asked = upload(rows[options.logprob_rows], device)
            raw = logits.index_select(0, asked)
        if options.edits is None or options.edited_rows is None:
            (tokens,) = self._run(key, inputs)
        else:
            if options.answers is not None:
                sampler.begin_counts(step.slots[options.edited_rows], options.answers)
            edited = upload(rows[options.edited_rows], device)
            edited_slots = upload(step.slots[options.edited_rows], device)
            sampler.edit_(logits, edited, edited_slots, options.edits)
            (tokens,) = self._run(key, inputs)
            sampler.count(tokens.index_select(0, edited), edited_slots)
        if options.logprob_rows is not None:
            recorded.append(top_logprobs(raw, tokens.index_select(0, asked)))
        return LaunchedTokens(host_copy=AsyncHostCopy(tokens, *recorded), rows=rows, options=options)

    def _run(self, key: GraphKey, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        if self._graphs:
            return self._graphs[key](inputs)
        return self._function(key)({name: value.to(self.device) for name, value in inputs.items()})

    def _function(self, key: GraphKey) -> Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]:
        match key.kind:
            case "chunk":
                return partial(self._run_layer_group, group=key.layer_group, size=key.size)
            case "two_batch":
                return self._run_two_batch
            case "decode":
                return partial(self._run_decode, size=key.size)
            case "next_tokens" | "first_tokens":
                return partial(self._sample, key=key)

    def _run_layer_group(self, inputs: Mapping[str, Tensor], *, group: int, size: int) -> tuple[Tensor, ...]:
        """Logits (S, V) after the last layer group, else (0, V); then the routes of expert layers."""
        if group == 0:
            inputs = {**inputs, "embeds": self._embeds[:size]}
            self._chunk_inputs[size] = inputs
            if self._sampler is not None:
                self._sampler.mark_chunk(inputs)
        inputs = self._chunk_inputs[size]
        before = {name: kept[:size] for name, kept in self._stream.items()}
        stream, routes = self._layers.prefill_layer_group(group, inputs, before)
        if group < self.num_layer_groups - 1:
            self._save_stream(stream)
            return self._no_logits, *routes
        self._keep_rows(stream)
        logits = self._layers.chunk_logits(inputs, stream)
        if self.samples_on_device:
            self._chunk_logits.copy_(logits)
        return logits, *routes

    def _run_two_batch(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Logits (S, V); then the routes of expert layers."""
        if self._sampler is not None:
            self._sampler.mark_chunk(inputs)
        inputs = {**inputs, "embeds": self._embeds[: len(inputs["input_ids"])]}
        chunks = split_chunk(inputs, self.max_chunk)
        streams, routes = self._layers.prefill_streams(*chunks)
        for index, stream in enumerate(streams):
            self._keep_rows(stream, index * self.max_chunk)
        logits = self._layers.chunk_logits(chunks[-1], streams[-1])
        if self.samples_on_device:
            self._chunk_logits.copy_(logits)
        return logits, *routes

    def _keep_rows(self, stream: Mapping[str, Tensor], first: int = 0) -> None:
        """Keep what the last layer returned for the rows of a chunk, from row `first` on, for `take_rows`."""
        if self._last_rows is not None:
            for kept, name in zip(self._last_rows, ("residual", "delta"), strict=True):
                kept[first : first + len(stream[name])].copy_(stream[name])

    def _save_stream(self, stream: Mapping[str, Tensor]) -> None:
        """Copy a chunk's residual stream to memory that no other step writes. The first call, a warm-up, allocates."""
        for name, value in stream.items():
            if name not in self._stream:
                self._stream[name] = value.new_zeros(self.max_chunk, *value.shape[1:])
            kept = self._stream[name][: len(value)]
            if kept.data_ptr() != value.data_ptr():
                kept.copy_(value)

    def _sample(self, inputs: Mapping[str, Tensor], *, key: GraphKey) -> tuple[Tensor, ...]:
        logits = self._chunk_logits if key.kind == "first_tokens" else self._decode_logits[key.size]
        assert self._sampler is not None, "the device samples"
        return (self._sampler.sample(logits, inputs, is_random=key.is_random),)

    def _run_decode(self, inputs: Mapping[str, Tensor], *, size: int) -> tuple[Tensor, ...]:
        ids = inputs["input_ids"] if self._sampler is None else self._sampler.take(inputs)
        tokens = {
            "input_ids": ids,
            "embeds": self._embeds[: len(ids)],
            "embed_kind": self._text_kind[: len(ids)],
            "positions": inputs["positions"].expand(3, -1).contiguous(),
        }
        self._decode_logits[size] = self._layers.decode({**inputs, **tokens})
        return (self._decode_logits[size],)

    def _capture_all(self) -> None:
        """Capture every size, the largest first, so that the others reuse its graph's memory."""
        pool = GraphPool(self.device) if self._is_captured else None
        num_prompts = self._table_rows
        prompts = (torch.int64, (num_prompts,))
        for size in sorted({*self.chunks, *self.two_batch_sizes}, reverse=True):
            rows = (torch.int64, (size,))
            shapes: Shapes = {
                **dict.fromkeys(("input_ids", "embed_kind", "segment", "index", "row_slots"), rows),
                "positions": (torch.int64, (3, size)),
                "page_table": (torch.int32, (num_prompts, max(self._prefill.spec.dim("P").buckets))),
                **dict.fromkeys(("last", "starts", "slots"), prompts),
            }
            if size in self.two_batch_sizes:
                name = f"chunks of {self.max_chunk} and {size - self.max_chunk} tokens"
                self._capture(GraphKey("two_batch", size), shapes, pool, name)
                continue
            for group in range(self.num_layer_groups):
                key = GraphKey("chunk", size, layer_group=group)
                self._capture(key, {} if group else shapes, pool, f"a chunk of {size} tokens")
        for size in sorted(self.batches, reverse=True):
            ints = (torch.int64, (size,))
            shapes = {
                "input_ids": ints,
                "positions": ints,
                "lengths": ints,
                "page_table": (torch.int32, (size, max(self._decode.spec.dim("P").buckets))),
                "slots": ints,
            }
            self._capture(GraphKey("decode", size), shapes, pool, f"a decode step of batch {size}")
        sampled = (
            *(GraphKey("next_tokens", size) for size in self.batches),
            GraphKey("first_tokens", num_prompts),
        )
        for key in sampled:
            shapes = {
                "slots": (torch.int64, (key.size,)),
                "sampling": (torch.float32, (key.size, NUM_COLUMNS)),
            }
            for is_random in (True, False):
                self._capture(
                    key._replace(is_random=is_random), shapes, pool, f"sampling of {key.size} tokens"
                )

    def _capture(self, key: GraphKey, shapes: Shapes, pool: GraphPool | None, name: str) -> None:
        run = self._function(key)
        self._graphs[key] = GraphRunner(shapes, run, device=self.device, pool=pool, name=name)

    def _page_table(self, graph: Graph, pages: Ints, num_tokens: int, rows: int) -> Tensor:
        """Page table (rows, P) int32 with `pages` (n, any), padded with 0; P is the bucket that holds `num_tokens`."""
        size = graph.bucket("P", -(-num_tokens // self.page_size))
        table = np.zeros(
            (rows, max(graph.spec.dim("P").buckets) if self.samples_on_device else size), np.int32
        )
        count = min(pages.shape[1], table.shape[1])
        table[: len(pages), :count] = pages[:, :count]
        return torch.from_numpy(table)
