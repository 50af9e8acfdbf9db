"""Graph definitions of the thinker, with example inputs.

A step runs `embed`, then attention and feed-forward of every layer, then `head`; on CUDA `sample` follows if a token is
sampled at random. Dims: T tokens of a chunk, B requests, N tokens or requests, P pages of a request, KV rows of a page
pool. On CUDA a chunk may hold tokens of several requests, because every chunk takes as long as reading most experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.dtypes import dtype_name
from mingc.export.layers.batch_buckets import doubling_buckets
from mingc.export.layers.decoder import PAGE_SIZE, DecoderConfig
from mingc.export.stage import GraphDef, Shard, StageOptions
from mingc.kernels.chunk_layout import CHUNK_ALIGNMENT
from mingc.kernels.sample_tokens import NUM_COLUMNS, NUM_RULES

_MAX_POOL_ROWS = 1 << 30
_MIN_CHUNK = 16
_MIN_TABLE = 4
_MAX_PROMPTS_ON_CPU = 2  # attention computes all pairs of rows and prompts
_MAX_PROMPTS = 16  # of a chunk; with more, prompts would be shorter than the chunk alignment


def thinker_graphs(config: DecoderConfig, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
    """All graphs of one rank; dense and experts graphs only if the decoder has such layers."""
    graphs = _Graphs(config, shard, options)
    defs = [graphs.embed(), graphs.attention("prefill"), graphs.attention("decode"), graphs.head()]
    if config.num_dense_layers:
        defs.append(graphs.dense())
    if config.num_layers > config.num_dense_layers:
        defs += [graphs.experts("prefill"), graphs.experts("decode")]
    if options.static_buckets:
        defs.append(graphs.sample())  # a server on a CPU samples on the host
    return defs


class _Graphs:
    """Definitions of the graphs over shared dims, sizes and examples."""

    def __init__(self, config: DecoderConfig, shard: Shard, options: StageOptions) -> None:
        self._config = config
        self._world_size = shard.world_size
        self._options = options
        self._dtype = dtype_name(options.dtype)
        chunks = doubling_buckets(min(_MIN_CHUNK, options.prefill_chunk_size), options.prefill_chunk_size)
        longest = max(2, options.prefill_chunk_size)
        self._chunk = Dim(name="T", minimum=2, maximum=longest, buckets=chunks)
        self._batch = Dim(name="B", minimum=1, maximum=options.max_batch, buckets=options.batch_sizes)
        self._either = Dim(
            name="N",
            minimum=1,
            maximum=max(longest, options.max_batch),
            buckets=tuple(sorted({*chunks, *options.batch_sizes})),
        )
        self._table = _page_table_dim(options)
        self._num_prompts = _num_prompts(options)
        # One row for the last token of each prompt of a chunk, or of each request of a batch.
        self._head_rows = Dim(
            name="B",
            minimum=1,
            maximum=options.max_batch,
            buckets=tuple(sorted({self._num_prompts, *options.batch_sizes})),
        )
        self._pool = Dim(name="KV", minimum=2 * PAGE_SIZE, maximum=_MAX_POOL_ROWS, multiple=PAGE_SIZE)
        # Sizes for tracing and for checking; none is 1, which torch.export would specialize on.
        self._trace = {
            "T": min(12, longest),
            "B": min(3, options.max_batch),
            "N": 3,
            "P": 5,
            "KV": 24 * PAGE_SIZE,
        }
        # A chunk of two prompts where chunks may hold several.
        self._check = {
            "T": min(32 if self._num_prompts == 1 else 2 * CHUNK_ALIGNMENT, longest),
            "B": min(4, options.max_batch),
            "N": min(32, longest),
            "P": 8,
            "KV": 40 * PAGE_SIZE,
        }
        self._examples = _Examples(config, options.dtype, self._num_prompts)

    def embed(self) -> GraphDef:
        half = self._config.rotary_dim // 2
        spec = GraphSpec(
            name="embed",
            inputs=(
                _ints("input_ids", "N"),
                self._stream("embeds", "N"),
                _ints("embed_kind", "N"),
                _ints("positions", 3, "N"),
            ),
            outputs=(
                self._stream("residual", "N"),
                self._stream("delta", "N"),
                TensorSpec(name="cos", dtype="float32", shape=("N", half)),
                TensorSpec(name="sin", dtype="float32", shape=("N", half)),
            ),
            dims=(self._either,),
            layer_instances=("embed",),
        )
        return self._graph(spec, "forward")

    def attention(self, kind: str) -> GraphDef:
        """The graph of one `kind`: `prefill` or `decode`."""
        config = self._config
        tokens = "T" if kind == "prefill" else "B"
        half, (_, num_kv_heads) = config.rotary_dim // 2, config.local_heads(self._world_size)
        shape = ("KV", num_kv_heads, config.head_dim)
        place = (
            (
                TensorSpec(name="page_table", dtype="int32", shape=(self._num_prompts, "P")),
                _ints("segment", "T"),
                _ints("index", "T"),
            )
            if kind == "prefill"
            else (TensorSpec(name="page_table", dtype="int32", shape=("B", "P")), _ints("lengths", "B"))
        )
        spec = GraphSpec(
            name=f"{kind}_attention",
            inputs=(
                self._stream("residual", tokens),
                self._stream("delta", tokens),
                TensorSpec(name="cos", dtype="float32", shape=(tokens, half)),
                TensorSpec(name="sin", dtype="float32", shape=(tokens, half)),
                *place,
            ),
            outputs=self._half_outputs(tokens),
            state=tuple(
                TensorSpec(name=name, dtype=self._dtype, shape=shape) for name in ("k_pages", "v_pages")
            ),
            dims=(self._chunk if kind == "prefill" else self._batch, self._table, self._pool),
            layer_instances=tuple(f"layers.{index}.attention" for index in range(config.num_layers)),
        )
        return self._graph(spec, kind)

    def dense(self) -> GraphDef:
        spec = GraphSpec(
            name="dense",
            inputs=(self._stream("residual", "N"), self._stream("delta", "N")),
            outputs=self._half_outputs("N"),
            dims=(self._either,),
            layer_instances=_feed_forwards(
                range(min(self._config.num_dense_layers, self._config.num_layers))
            ),
        )
        return self._graph(spec, "forward")

    def experts(self, kind: str) -> GraphDef:
        """The graph of one `kind`: `prefill` or `decode`."""
        config = self._config
        is_prefill = kind == "prefill"
        tokens = "T" if is_prefill else "B"
        # Float32 artifacts output the routing, to compare it with recorded results; others do not pay for it.
        outputs_routing = is_prefill and self._options.dtype == torch.float32
        shape = (tokens, config.num_experts_per_token)
        routing = (
            TensorSpec(name="expert_ids", dtype="int32", shape=shape),
            TensorSpec(name="expert_weights", dtype="float32", shape=shape),
        )
        spec = GraphSpec(
            name=f"{kind}_experts",
            inputs=(
                self._stream("residual", tokens),
                self._stream("delta", tokens),
                *((_ints("embed_kind", tokens),) if is_prefill else ()),
            ),
            outputs=(*self._half_outputs(tokens), *(routing if outputs_routing else ())),
            dims=(self._chunk if is_prefill else self._batch,),
            layer_instances=_feed_forwards(range(config.num_dense_layers, config.num_layers)),
        )
        graph = self._graph(spec, "prefill_routed" if outputs_routing else kind)
        return replace(graph, routing=f"{kind}_routed")

    def head(self) -> GraphDef:
        vocab = self._config.local_vocab(self._world_size)
        spec = GraphSpec(
            name="head",
            inputs=(self._stream("residual", "B"), self._stream("delta", "B")),
            outputs=(TensorSpec(name="logits", dtype="float32", shape=("B", vocab), ranks="concat"),),
            dims=(self._head_rows,),
            layer_instances=("head",),
        )
        return self._graph(spec, "forward")

    def sample(self) -> GraphDef:
        """Sampling from the logits of all ranks; its dtypes do not depend on the weights' dtype."""
        vocab = self._config.vocab_size
        spec = GraphSpec(
            name="sample",
            inputs=(
                TensorSpec(name="logits", dtype="float32", shape=("B", vocab)),
                TensorSpec(name="sampling", dtype="float32", shape=("B", NUM_COLUMNS)),
                TensorSpec(name="seen", dtype="bool", shape=("B", vocab)),
            ),
            outputs=(_ints("tokens", "B"),),
            dims=(self._head_rows,),
            layer_instances=("sampler",),
        )
        return self._graph(spec, "forward")

    def _graph(self, spec: GraphSpec, method: str) -> GraphDef:
        names = [dim.name for dim in spec.dims]
        return GraphDef(
            spec=spec,
            method=method,
            example=lambda dims, generator: self._examples.tensors(spec, dims, generator),
            trace_dims={name: self._trace[name] for name in names},
            check_dims={name: self._check[name] for name in names},
        )

    def _stream(self, name: str, tokens: str) -> TensorSpec:
        return TensorSpec(name=name, dtype=self._dtype, shape=(tokens, self._config.hidden_size))

    def _half_outputs(self, tokens: str) -> tuple[TensorSpec, TensorSpec]:
        """Outputs of either half of a layer: the residual stream before it, and the partial sum to add to it."""
        hidden = self._config.hidden_size
        return (
            self._stream("residual", tokens),
            TensorSpec(name="partial", dtype=self._dtype, shape=(tokens, hidden), ranks="sum"),
        )


def _ints(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name=name, dtype="int64", shape=shape)


def _feed_forwards(layers: range) -> tuple[str, ...]:
    return tuple(f"layers.{index}.feed_forward" for index in layers)


def _page_table_dim(options: StageOptions) -> Dim:
    """Static engines take page tables of the whole context: their kernels stop at each request's length."""
    largest = -(-options.max_model_len // PAGE_SIZE)
    smallest = largest if options.static_buckets else min(_MIN_TABLE, largest)
    return Dim(name="P", minimum=1, maximum=largest, buckets=doubling_buckets(smallest, largest))


def _num_prompts(options: StageOptions) -> int:
    """Maximum number of prompts in a chunk.

    A server on a CPU does not share chunks; the two prompts there are for verification.
    """
    return min(_MAX_PROMPTS if options.static_buckets else _MAX_PROMPTS_ON_CPU, options.max_batch)


class _Examples:
    """Example inputs: random requests in the middle of the decoder, over random page pools."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, num_prompts: int) -> None:
        self._config = config
        self._dtype = dtype
        self._num_prompts = num_prompts

    def tensors(self, spec: GraphSpec, dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        """Inputs and state of `spec` by name."""
        tokens = dims[next(size for size in ("T", "B", "N") if size in dims)]
        values = {}
        if "P" in dims:
            place = self._chunk if "T" in dims else self._batch
            values.update(place(tokens, dims["P"], dims["KV"] // PAGE_SIZE, generator))
        for tensor in (*spec.inputs, *spec.state):
            if tensor.name not in values:
                values[tensor.name] = self._value(tensor.name, tensor.shape_at(dims), generator)
        return values

    def _value(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        config = self._config
        match name:
            case "input_ids":
                return torch.randint(0, config.vocab_size, shape, generator=generator)
            case "embed_kind":
                return torch.randint(0, 3, shape, generator=generator)
            case "positions":
                return torch.arange(shape[1]) + torch.randint(-3, 40, (3, 1), generator=generator)
            case "embeds":
                embeds = torch.randn(shape, generator=generator)
                return torch.nn.functional.normalize(embeds, dim=-1).to(self._dtype)
            case "cos" | "sin":
                # Both for the same positions.
                places = torch.arange(shape[0], dtype=torch.float32)[:, None] + 7
                angles = places / config.rope_theta ** (torch.arange(shape[1]) / shape[1])
                return angles.cos() if name == "cos" else angles.sin()
            case "logits":
                # Few likely tokens, so that rounding of their probabilities does not decide which one is sampled.
                return 8 * torch.randn(shape, generator=generator)
            case "seen":
                return torch.rand(shape, generator=generator) < 0.1
            case "sampling":
                return _example_rules(shape, generator)
            case _:  # the residual stream and the page pools
                return torch.randn(shape, generator=generator).to(self._dtype)

    def _chunk(
        self, tokens: int, num_pages: int, pool_pages: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The last tokens of as many requests as fit, each ending half a page before its table does."""
        length = num_pages * PAGE_SIZE - PAGE_SIZE // 2
        blocks = -(-tokens // CHUNK_ALIGNMENT)  # of the fewest rows that a request may have
        each = CHUNK_ALIGNMENT * -(-blocks // self._num_prompts)
        segment = torch.arange(tokens) // each
        place = torch.arange(tokens) % each
        count = torch.bincount(segment)[segment].clamp_max(length)  # rows beyond the context are padding
        return {
            "page_table": _scatter_pages(self._num_prompts, num_pages, pool_pages, generator),
            "segment": segment,
            "index": torch.where(place < count, length - count + place, -1),
        }

    def _batch(
        self, requests: int, num_pages: int, pool_pages: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Requests of random lengths."""
        lengths = torch.randint(1, num_pages * PAGE_SIZE + 1, (requests,), generator=generator)
        table = _scatter_pages(requests, num_pages, pool_pages, generator)
        is_owned = torch.arange(num_pages) * PAGE_SIZE < lengths[:, None]
        return {"page_table": table.masked_fill(~is_owned, 0), "lengths": lengths}


def _example_rules(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Columns of `mingc.kernels.sample_tokens`: limited, penalized and greedy rows in turn, each with a ban."""
    rules = torch.tensor(
        [[1.0, 0.0, 0.9, 0.0, 1.0], [0.7, 40.0, 1.0, 0.0, 1.2], [0.0, 0.0, 1.0, 0.0, 1.3], [1.3, 50.0, 0.95, 0.02, 0.9]]
    )  # fmt: skip
    columns = torch.zeros(shape)
    columns[:, : NUM_RULES - 1] = rules[torch.arange(shape[0]) % len(rules)]
    columns[:, NUM_RULES - 1] = torch.rand(shape[0], generator=generator)
    columns[:, NUM_RULES] = torch.arange(1.0, shape[0] + 1.0)
    return columns


def _scatter_pages(requests: int, num_pages: int, pool_pages: int, generator: torch.Generator) -> Tensor:
    """Page tables (requests, num_pages) int32 of random pages, without page 0.

    Requests share no pages unless the pool is too small (large buckets are traced over a small pool); pages then
    repeat, which no shape or value depends on.
    """
    shuffled = 1 + torch.randperm(pool_pages - 1, generator=generator)
    pages = shuffled[torch.arange(requests * num_pages) % len(shuffled)]
    return pages.view(requests, num_pages).to(torch.int32)
