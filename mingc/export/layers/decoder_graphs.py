"""The borders of the thinker's graphs, and inputs that real use could produce for them.

A step runs `embed`, then of every layer attention and feed-forward, then `head`. Dims: T tokens of a chunk, B
requests, N either of both, P pages of a request, KV rows of a page pool. On CUDA a chunk may hold tokens of several
requests: there every chunk takes as long as reading most experts does.
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

_MAX_POOL_ROWS = 1 << 30
_SMALLEST_CHUNK = 16
_SMALLEST_TABLE = 4
_MOST_PROMPTS = 16  # of a chunk: more would fill it with less than their alignment


def thinker_graphs(config: DecoderConfig, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
    """All graphs of one rank; without dense or without expert layers there is no graph of that kind."""
    borders = _Borders(config, shard, options)
    plans = [borders.embed(), borders.attention("prefill"), borders.attention("decode"), borders.head()]
    if config.num_dense_layers:
        plans.append(borders.dense())
    if config.num_layers > config.num_dense_layers:
        plans += [borders.experts("prefill"), borders.experts("decode")]
    return plans


class _Borders:
    """Makes the plans; what they have in common is made once."""

    def __init__(self, config: DecoderConfig, shard: Shard, options: StageOptions) -> None:
        self._config = config
        self._world_size = shard.world_size
        self._options = options
        self._dtype = dtype_name(options.dtype)
        chunks = doubling_buckets(
            min(_SMALLEST_CHUNK, options.prefill_chunk_size), options.prefill_chunk_size
        )
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
        self._pool = Dim(name="KV", minimum=2 * PAGE_SIZE, maximum=_MAX_POOL_ROWS, multiple=PAGE_SIZE)
        # Sizes to trace and to check at; none is 1, which tracing would take for a constant.
        self._trace = {
            "T": min(12, longest),
            "B": min(3, options.max_batch),
            "N": 3,
            "P": 5,
            "KV": 24 * PAGE_SIZE,
        }
        # A chunk of two prompts where it may hold several.
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
        return self._plan(spec, "forward")

    def attention(self, kind: str) -> GraphDef:
        """Of `prefill` or `decode`."""
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
            outputs=self._halfway(tokens),
            state=tuple(
                TensorSpec(name=name, dtype=self._dtype, shape=shape) for name in ("k_pages", "v_pages")
            ),
            dims=(self._chunk if kind == "prefill" else self._batch, self._table, self._pool),
            layer_instances=tuple(f"layers.{index}.attention" for index in range(config.num_layers)),
        )
        return self._plan(spec, kind)

    def dense(self) -> GraphDef:
        spec = GraphSpec(
            name="dense",
            inputs=(self._stream("residual", "N"), self._stream("delta", "N")),
            outputs=self._halfway("N"),
            dims=(self._either,),
            layer_instances=_feed_forwards(
                range(min(self._config.num_dense_layers, self._config.num_layers))
            ),
        )
        return self._plan(spec, "forward")

    def experts(self, kind: str) -> GraphDef:
        """Of `prefill` or `decode`."""
        config = self._config
        is_prefill = kind == "prefill"
        tokens = "T" if is_prefill else "B"
        # A float32 artifact is what is held against recorded results, router choices included; others pay nothing.
        tells_routes = is_prefill and self._options.dtype == torch.float32
        chosen = (tokens, config.num_experts_per_token)
        routes = (
            TensorSpec(name="expert_ids", dtype="int32", shape=chosen),
            TensorSpec(name="expert_weights", dtype="float32", shape=chosen),
        )
        spec = GraphSpec(
            name=f"{kind}_experts",
            inputs=(
                self._stream("residual", tokens),
                self._stream("delta", tokens),
                *((_ints("embed_kind", tokens),) if is_prefill else ()),
            ),
            outputs=(*self._halfway(tokens), *(routes if tells_routes else ())),
            dims=(self._chunk if is_prefill else self._batch,),
            layer_instances=_feed_forwards(range(config.num_dense_layers, config.num_layers)),
        )
        plan = self._plan(spec, "prefill_routed" if tells_routes else kind)
        return replace(plan, routing=f"{kind}_routed")

    def head(self) -> GraphDef:
        share = self._config.local_vocab(self._world_size)
        # Rows are the last tokens of a chunk's prompts, or of a batch.
        sizes = tuple(sorted({self._num_prompts, *self._options.batch_sizes}))
        spec = GraphSpec(
            name="head",
            inputs=(self._stream("residual", "B"), self._stream("delta", "B")),
            outputs=(TensorSpec(name="logits", dtype="float32", shape=("B", share), ranks="concat"),),
            dims=(Dim(name="B", minimum=1, maximum=self._options.max_batch, buckets=sizes),),
            layer_instances=("head",),
        )
        return self._plan(spec, "forward")

    def _plan(self, spec: GraphSpec, method: str) -> GraphDef:
        names = [dim.name for dim in spec.dims]
        return GraphDef(
            spec=spec,
            method=method,
            example=lambda dims, generator: self._examples.make(spec, dims, generator),
            trace_dims={name: self._trace[name] for name in names},
            check_dims={name: self._check[name] for name in names},
        )

    def _stream(self, name: str, tokens: str) -> TensorSpec:
        return TensorSpec(name=name, dtype=self._dtype, shape=(tokens, self._config.hidden_size))

    def _halfway(self, tokens: str) -> tuple[TensorSpec, TensorSpec]:
        """What both halves of a layer give: the stream before them, and what they add to it."""
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
    """A static engine takes tables of the whole context: its kernels stop at a request's length by themselves."""
    largest = -(-options.max_model_len // PAGE_SIZE)
    smallest = largest if options.static_buckets else min(_SMALLEST_TABLE, largest)
    return Dim(name="P", minimum=1, maximum=largest, buckets=doubling_buckets(smallest, largest))


def _num_prompts(options: StageOptions) -> int:
    """Requests that a chunk may hold tokens of: one in float32 too, which is for comparing with recorded results."""
    if not options.static_buckets or options.dtype == torch.float32:
        return 1
    return min(_MOST_PROMPTS, options.max_batch)


class _Examples:
    """Tokens of random requests in the middle of the decoder, and random pools."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, num_prompts: int) -> None:
        self._config = config
        self._dtype = dtype
        self._num_prompts = num_prompts

    def make(self, spec: GraphSpec, dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        """Inputs and state of `spec`."""
        tokens = dims[next(size for size in ("T", "B", "N") if size in dims)]
        tensors = {}
        if "P" in dims:
            place = self._chunk if "T" in dims else self._batch
            tensors.update(place(tokens, dims["P"], dims["KV"] // PAGE_SIZE, generator))
        for tensor in (*spec.inputs, *spec.state):
            if tensor.name not in tensors:
                shape = [size if isinstance(size, int) else dims[size] for size in tensor.shape]
                tensors[tensor.name] = self._value(tensor.name, shape, generator)
        return tensors

    def _value(self, name: str, shape: list[int], generator: torch.Generator) -> Tensor:
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
                # The same positions for both, whichever is made first.
                places = torch.arange(shape[0], dtype=torch.float32)[:, None] + 7
                angles = places / config.rope_theta ** (torch.arange(shape[1]) / shape[1])
                return angles.cos() if name == "cos" else angles.sin()
            case _:  # the stream and the pools
                return torch.randn(shape, generator=generator).to(self._dtype)

    def _chunk(
        self, tokens: int, num_pages: int, pool_pages: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The last tokens of requests that end a few rows before their pages do; as many requests as there is room."""
        length = num_pages * PAGE_SIZE - PAGE_SIZE // 2
        whole = -(-tokens // CHUNK_ALIGNMENT)  # of what a request has at least
        each = CHUNK_ALIGNMENT * -(-whole // self._num_prompts)
        segment = torch.arange(tokens) // each
        place = torch.arange(tokens) % each
        count = torch.bincount(segment)[segment].clamp_max(length)  # rows longer than a context are padded
        return {
            "page_table": _scatter_pages(self._num_prompts, num_pages, pool_pages, generator),
            "segment": segment,
            "index": torch.where(place < count, length - count + place, -1),
        }

    def _batch(
        self, requests: int, num_pages: int, pool_pages: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Requests of different lengths."""
        lengths = torch.randint(1, num_pages * PAGE_SIZE + 1, (requests,), generator=generator)
        table = _scatter_pages(requests, num_pages, pool_pages, generator)
        is_owned = torch.arange(num_pages) * PAGE_SIZE < lengths[:, None]
        return {"page_table": table.masked_fill(~is_owned, 0), "lengths": lengths}


def _scatter_pages(requests: int, num_pages: int, pool_pages: int, generator: torch.Generator) -> Tensor:
    """Page tables (requests, num_pages) int32 in random order, page 0 left out.

    No request has another's page unless the pool is too small for that (large buckets are traced over a small
    pool); then pages come round again, which no shape or value depends on.
    """
    shuffled = 1 + torch.randperm(pool_pages - 1, generator=generator)
    pages = shuffled[torch.arange(requests * num_pages) % len(shuffled)]
    return pages.view(requests, num_pages).to(torch.int32)
