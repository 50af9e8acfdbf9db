"""The borders of the thinker's two graphs, and inputs that real use could produce for them.

Dims: T tokens of a chunk, B requests, P pages of a request, KV rows of a page pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mingc.artifacts.spec import Dim, DType, GraphSpec, TensorSpec
from mingc.export.layers.decoder import PAGE_SIZE, DecoderConfig
from mingc.export.stages.base import GraphPlan, Shard, StageOptions

_MAX_POOL_ROWS = 1 << 30
_SMALLEST_CHUNK = 16
_SMALLEST_TABLE = 4
_DTYPES: dict[torch.dtype, DType] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def thinker_graphs(config: DecoderConfig, shard: Shard, options: StageOptions) -> Sequence[GraphPlan]:
    """`prefill` and `decode` of one rank."""
    dtype = _DTYPES[options.dtype]
    _, num_kv_heads = config.local_heads(shard.world_size)
    state = tuple(
        TensorSpec(name=f"{kind}_pages.{index}", dtype=dtype, shape=("KV", num_kv_heads, config.head_dim))
        for index in range(config.num_layers)
        for kind in ("k", "v")
    )
    pool = Dim(name="KV", minimum=2 * PAGE_SIZE, maximum=_MAX_POOL_ROWS, multiple=PAGE_SIZE)
    table = _page_table_dim(options)
    logits = config.vocab_size

    def ints(name: str, *shape: int | str) -> TensorSpec:
        return TensorSpec(name=name, dtype="int64", shape=shape)

    # A float32 bundle is what is held against recorded results, router choices included; others pay nothing for it.
    tells_routes = options.dtype == torch.float32 and config.num_layers > config.num_dense_layers
    chunk_buckets = _powers_of_two(min(_SMALLEST_CHUNK, options.prefill_tokens), options.prefill_tokens)
    prefill = GraphSpec(
        name="prefill",
        inputs=(
            ints("input_ids", "T"),
            TensorSpec(name="embeds", dtype=dtype, shape=("T", config.hidden_size)),
            ints("embed_kind", "T"),
            ints("positions", 3, "T"),
            TensorSpec(name="page_table", dtype="int32", shape=("P",)),
            ints("start", 1),
            ints("last", 1),
        ),
        outputs=(
            TensorSpec(name="logits", dtype="float32", shape=(1, logits)),
            *(_route_outputs(config) if tells_routes else ()),
        ),
        state=state,
        dims=(
            Dim(name="T", minimum=2, maximum=max(2, options.prefill_tokens), buckets=chunk_buckets),
            table,
            pool,
        ),
    )
    decode = GraphSpec(
        name="decode",
        inputs=(
            ints("input_ids", "B"),
            ints("positions", "B"),
            ints("lengths", "B"),
            TensorSpec(name="page_table", dtype="int32", shape=("B", "P")),
        ),
        outputs=(TensorSpec(name="logits", dtype="float32", shape=("B", logits)),),
        state=state,
        dims=(
            Dim(
                name="B",
                minimum=1,
                maximum=options.max_batch,
                buckets=options.batch_sizes,
            ),
            table,
            pool,
        ),
    )
    examples = _Examples(config, state, options.dtype)
    return (
        GraphPlan(
            spec=prefill,
            method="prefill_routed" if tells_routes else "prefill",
            example=examples.prefill,
            trace_dims={"T": min(12, options.prefill_tokens), "P": 5, "KV": 9 * PAGE_SIZE},
            check_dims={"T": min(32, options.prefill_tokens), "P": 8, "KV": 20 * PAGE_SIZE},
        ),
        GraphPlan(
            spec=decode,
            method="decode",
            example=examples.decode,
            trace_dims={"B": 3, "P": 5, "KV": 24 * PAGE_SIZE},
            check_dims={"B": min(4, options.max_batch), "P": 8, "KV": 40 * PAGE_SIZE},
        ),
    )


def _route_outputs(config: DecoderConfig) -> tuple[TensorSpec, TensorSpec]:
    shape = (config.num_layers - config.num_dense_layers, "T", config.num_experts_per_token)
    return (
        TensorSpec(name="expert_ids", dtype="int32", shape=shape),
        TensorSpec(name="expert_weights", dtype="float32", shape=shape),
    )


def _page_table_dim(options: StageOptions) -> Dim:
    """A static engine takes tables of the whole context: its kernels stop at a request's length by themselves."""
    largest = -(-options.context_tokens // PAGE_SIZE)
    smallest = largest if options.static_buckets else min(_SMALLEST_TABLE, largest)
    return Dim(name="P", minimum=1, maximum=largest, buckets=_powers_of_two(smallest, largest))


def _powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
    """`smallest` doubled until `largest`, which ends the list whether it fits or not."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= 2
    return (*sizes, largest)


class _Examples:
    """Random requests in a random pool."""

    def __init__(self, config: DecoderConfig, state: Sequence[TensorSpec], dtype: torch.dtype) -> None:
        self._config = config
        self._state = state
        self._dtype = dtype

    def prefill(self, dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        """The last chunk of a request whose tokens end a few rows before its pages do."""
        tokens, num_pages = dims["T"], dims["P"]
        length = num_pages * PAGE_SIZE - PAGE_SIZE // 2
        num_real = min(tokens, length)  # a chunk longer than its context is padded
        start = length - num_real
        height_width = torch.randint(-3, 4, (2, tokens), generator=generator)
        time = torch.arange(start, start + tokens)
        embeds = torch.randn(tokens, self._config.hidden_size, generator=generator)
        return {
            "input_ids": torch.randint(0, self._config.vocab_size, (tokens,), generator=generator),
            "embeds": torch.nn.functional.normalize(embeds, dim=-1).to(self._dtype),
            "embed_kind": torch.randint(0, 3, (tokens,), generator=generator),
            "positions": time + torch.cat((torch.zeros(1, tokens, dtype=torch.int64), height_width)),
            "page_table": _scatter_pages(1, num_pages, dims["KV"], generator)[0],
            "start": torch.tensor([start]),
            "last": torch.tensor([num_real - 1]),
            **self._pools(dims["KV"], generator),
        }

    def decode(self, dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        """Requests of different lengths."""
        requests, num_pages = dims["B"], dims["P"]
        lengths = torch.randint(1, num_pages * PAGE_SIZE + 1, (requests,), generator=generator)
        table = _scatter_pages(requests, num_pages, dims["KV"], generator)
        is_owned = torch.arange(num_pages) * PAGE_SIZE < lengths[:, None]
        return {
            "input_ids": torch.randint(0, self._config.vocab_size, (requests,), generator=generator),
            "positions": lengths - 1,
            "lengths": lengths,
            "page_table": table.masked_fill(~is_owned, 0),
            **self._pools(dims["KV"], generator),
        }

    def _pools(self, num_rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        pools = {}
        for spec in self._state:
            shape = [num_rows if isinstance(size, str) else size for size in spec.shape]
            pools[spec.name] = torch.randn(shape, generator=generator).to(self._dtype)
        return pools


def _scatter_pages(requests: int, num_pages: int, pool_rows: int, generator: torch.Generator) -> Tensor:
    """Page tables (requests, num_pages) int32 in random order, page 0 left out.

    No request has another's page unless the pool is too small for that (large buckets are traced over a small
    pool); then pages come round again, which no shape or value depends on.
    """
    shuffled = 1 + torch.randperm(pool_rows // PAGE_SIZE - 1, generator=generator)
    pages = shuffled[torch.arange(requests * num_pages) % len(shuffled)]
    return pages.view(requests, num_pages).to(torch.int32)
