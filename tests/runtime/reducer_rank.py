"""One rank in a process of its own that sums tensors over the ranks: `python reducer_rank.py JOB`.

JOB is JSON: rank, world_size, port, device, dtype, width, batch_sizes, rows. It prints JSON: the choice, and for
each count of rows the sums, first called as they are, then (on CUDA) replayed from a graph.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from mingc.runtime import distributed
from mingc.runtime.all_reduce import Collective, adds_up, make_reducer


def part(rank: int, rows: int, width: int) -> Tensor:
    """What `rank` adds: (rows, width) float32 values that half precision rounds when they are added."""
    generator = torch.Generator().manual_seed(100 * rows + rank)
    return torch.randn(rows, width, generator=generator)


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
    distributed.init(
        rank=job["rank"], world_size=job["world_size"], port=job["port"], device=device.type, timeout_s=60
    )
    reducer = make_reducer(device, dtype, width=job["width"], batch_sizes=job["batch_sizes"])
    rows, width = job["batch_sizes"][-1], job["width"]
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
    assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
    print(json.dumps({"choice": asdict(reducer.choice), "sums": sums, "replayed": replayed}))
    distributed.shutdown()


if __name__ == "__main__":
    main()
