"""One rank in a process of its own that sums tensors over the ranks: `python reducer_rank.py JOB`.

JOB is JSON: rank, world_size, port, device, dtype, width, tokens, rows, repeated. It prints JSON: the choice, for
each count of `rows` the sums, first called as they are, then (on CUDA) replayed from a graph, and for each way over
shared memory and count of `repeated` how many values were wrong, a graph replayed one after the other on other data.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from mingc.runtime.distributed import process_group
from mingc.runtime.distributed.algorithms import TWO_SHOT_RANKS, Collective, Method, OneShot, TwoShot
from mingc.runtime.distributed.all_reduce import adds_up, make_reducer

REPEATS = 100


def part(rank: int, rows: int, width: int) -> Tensor:
    """What `rank` adds: (rows, width) float32 values that half precision rounds when they are added."""
    generator = torch.Generator().manual_seed(100 * rows + rank)
    return torch.randn(rows, width, generator=generator)


def wrong_values(method: Method, device: torch.device, dtype: torch.dtype, rows: int, width: int) -> int:
    """Of `REPEATS` sums of other values: those that are not the parts added in the order of the ranks."""
    rank, static = dist.get_rank(), torch.empty(rows, width, dtype=dtype, device=device)
    graph = torch.cuda.CUDAGraph()
    method.reduce_(static.zero_())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        method.reduce_(static)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for repeat in range(REPEATS):
        parts = []
        for other in range(dist.get_world_size()):
            generator = torch.Generator(device).manual_seed(1000 * repeat + other)
            parts.append(torch.randn(rows, width, generator=generator, device=device).to(dtype))
        static.copy_(parts[rank])
        # Two in a row, without the other ranks' being there: memory of the first is still being read, if it can be.
        for _ in range(2):
            graph.replay()
            total = parts[0]
            for part_ in parts[1:]:
                total = total + part_
            wrong += (static != total).sum()
            parts = [total] * len(parts)
    return int(wrong.item())


class Forgetful:
    """Sums that rank 1 does not get."""

    def reduce_(self, x: Tensor) -> None:
        own = x.clone()
        Collective().reduce_(x)
        if dist.get_rank() == 1:
            x.copy_(own)


def main() -> None:
    job = json.loads(sys.argv[1])
    device, dtype = torch.device(job["device"]), getattr(torch, job["dtype"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    process_group.init(
        rank=job["rank"], world_size=job["world_size"], port=job["port"], device=device.type, timeout_s=60
    )
    reducer = make_reducer(device, dtype, width=job["width"], tokens=job["tokens"])
    rows, width = job["tokens"][-1], job["width"]
    assert adds_up(Collective(), device, dtype, width, rows)
    assert not adds_up(Forgetful(), device, dtype, width, rows)
    sums, replayed = [], []
    for rows in job["rows"]:
        before = part(job["rank"], rows, width).to(device, dtype)
        total = before.clone()
        reducer.reduce_(total)
        sums.append(total.float().cpu().tolist())
        if device.type == "cuda":
            static = torch.empty_like(before)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                reducer.reduce_(static)
            for _ in range(20):
                static.copy_(before)
                graph.replay()
                assert torch.equal(static, total), "a replay differs"
            replayed.append(static.float().cpu().tolist())
    wrong = []
    for rows in job["repeated"]:
        num_bytes = rows * width * dtype.itemsize
        methods: list[Method] = [OneShot(device, dtype, num_bytes)]
        if job["world_size"] in TWO_SHOT_RANKS:
            methods += [TwoShot(device, dtype, num_bytes, lanes) for lanes in (1, 4)]
        wrong += [wrong_values(method, device, dtype, rows, width) for method in methods]
    assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
    print(json.dumps({"choice": asdict(reducer.choice), "sums": sums, "replayed": replayed, "wrong": wrong}))
    process_group.shutdown()


if __name__ == "__main__":
    main()
