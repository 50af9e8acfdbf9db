"""Times the attention kernels of the thinker on one GPU, with the heads of one rank of 1, 4 and 8, in a CUDA graph.

Decode: everything between the packed QKV projection and the output projection, over pages in random order that are in
no cache, relative to the bytes of keys and values. Prefill: attention of a chunk, relative to the FLOPs of its GEMMs.
For comparison both in plain torch, eager.

    python benchmarks/thinker_attention.py --json benchmarks/results/thinker-attention-h200-….json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from mingc.kernels.decode_attention import decode_attention
from mingc.kernels.dispatch import plain_torch
from mingc.kernels.paged_attention import paged_prefill_attention

PAGE_SIZE, SIZE, HALF = 16, 128, 32
TABLE = 32768 // PAGE_SIZE  # pages of a table
HEADS = {1: (32, 4), 4: (8, 1), 8: (4, 1)}  # by number of ranks: query and KV heads of one rank
COLD_BYTES = (
    200e6  # read by the runs of one graph, if the pool is large enough, so that no run finds its data cached
)
MAX_RUNS = 24
Figure = dict[str, Any]


class Pool:
    """Pages of one layer with random contents, assigned anew for every case."""

    def __init__(self, num_pages: int, kv_heads: int) -> None:
        shape = (num_pages * PAGE_SIZE, kv_heads, SIZE)
        self.k, self.v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
        self._order = (torch.randperm(num_pages - 1, device="cuda") + 1).to(torch.int32)
        self.row_bytes = 2 * kv_heads * SIZE * 2

    def tables(self, batch: int, tokens: int) -> list[Tensor]:
        """Page tables (batch, TABLE) of enough sets of requests to keep the caches cold."""
        used = -(-tokens // PAGE_SIZE)
        sets = min(
            len(self._order) // (batch * used), int(COLD_BYTES / (batch * tokens * self.row_bytes)) + 1
        )
        tables = []
        for pages in self._order[: sets * batch * used].view(sets, batch, used)[:MAX_RUNS]:
            table = torch.zeros(batch, TABLE, dtype=torch.int32, device="cuda")
            table[:, :used] = pages
            tables.append(table)
        return tables


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def time_captured_us(runs: list[Callable[[], object]], count: int = 15) -> dict[str, float]:
    """Microseconds a run; all `runs` are in one CUDA graph."""

    def all_runs() -> None:
        for run in runs:
            run()

    graph = harness.capture(all_runs)
    return harness.summary([1e3 * each / len(runs) for each in harness.time_ms(graph.replay, count)])


def eager_us(run: Callable[[], object]) -> float:
    with plain_torch():
        return round(1e3 * statistics.median(harness.time_ms(run, 5, warmups=2)), 1)


def decode(ranks: int, pool: Pool, batch: int, context: int, copy_tb_s: float) -> Figure:
    heads, kv_heads = HEADS[ranks]
    qkv, norms = normal(batch, heads + 2 * kv_heads, SIZE), [normal(SIZE) for _ in range(2)]
    angles = torch.rand(batch, HALF, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    lengths = torch.full((batch,), context, device="cuda")

    def run(table: Tensor) -> Callable[[], object]:
        return lambda: decode_attention(
            qkv, *norms, cos, sin, pool.k, pool.v, table, lengths, 1e-6, PAGE_SIZE
        )

    tables = pool.tables(batch, context)
    timing = time_captured_us([run(table) for table in tables])
    num_bytes = batch * context * pool.row_bytes
    # Plain torch copies what it attends to: it gets only the used part of the table, and not the largest cases.
    used = tables[0][:, : -(-context // PAGE_SIZE)].contiguous()
    eager = eager_us(run(used)) if num_bytes < 2**30 else None
    return {
        "name": "decode_attention_us",
        "ranks": ranks,
        "batch": batch,
        "context": context,
        **timing,
        "unit": "us",
        "floor": round(num_bytes / copy_tb_s / 1e6, 2),
        "tb_s": round(num_bytes / timing["median"] / 1e6, 2),
        "reference": {"name": "eager torch", "median": eager},
    }


def prefill(ranks: int, pool: Pool, tokens: int, start: int) -> Figure:
    heads, _ = HEADS[ranks]
    q, place = normal(tokens, heads, SIZE), torch.arange(start, start + tokens, device="cuda")
    table, segment = pool.tables(1, start + tokens)[0], torch.zeros_like(place)

    def run() -> Tensor:
        return paged_prefill_attention(q, pool.k, pool.v, table, segment, place, PAGE_SIZE)

    timing = time_captured_us([run] * 3)
    operations = 4 * SIZE * heads * tokens * (start + (tokens + 1) / 2)
    return {
        "name": "prefill_attention_us",
        "ranks": ranks,
        "tokens": tokens,
        "start": start,
        **timing,
        "unit": "us",
        "tflop_s": round(operations / timing["median"] / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,4,8")
    parser.add_argument("--batches", default="1,16,32,64")
    parser.add_argument("--contexts", default="1024,8192,32768")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = harness.parse_args(parser)
    rates = harness.peak_rates()
    batches, contexts = (
        [int(word) for word in text.split(",")] for text in (arguments.batches, arguments.contexts)
    )
    figures = []
    for ranks in map(int, arguments.ranks.split(",")):
        pool = Pool(max(batches) * max(contexts) // PAGE_SIZE + 1, HEADS[ranks][1])
        for context in contexts:
            for batch in batches:
                figures.append(decode(ranks, pool, batch, context, rates["copy_tb_s"]))
                print(figures[-1], flush=True)
        for tokens, start in ((4096, 0), (4096, 4096), (1024, 0), (512, 8192)):
            figures.append(prefill(ranks, pool, tokens, start))
            print(figures[-1], flush=True)
        del pool
    if arguments.json:
        harness.write(arguments.json, harness.result("thinker_attention", rates, figures))


if __name__ == "__main__":
    main()
