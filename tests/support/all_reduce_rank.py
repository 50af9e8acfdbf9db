"""One rank, in a process of its own, that all-reduces tensors: `python all_reduce_rank.py JOB`.

JOB is JSON: rank, world_size, port, device, dtype, width, tokens, rows, repeated. Prints JSON: `plan`; `sums`, one per
count of `rows`, from eager calls; `replayed`, the same from a CUDA graph; `gathered` and `broadcast`, from
`rank_input` of the first count; `agree`, whether all ranks have a flag that only rank 0 has, and one that all have;
`wrong`, the number of wrong values for each count of `repeated` and each algorithm over symmetric memory, where a graph
is replayed back to back on changing data.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from mingc.runtime.distributed import process_group
from mingc.runtime.distributed.algorithms import (
    TWO_SHOT_WORLD_SIZES,
    AllReduceAlgorithm,
    CollectiveAllReduce,
    OneShotAllReduce,
    TwoShotAllReduce,
)
from mingc.runtime.distributed.all_reduce import _is_true_on_all_ranks as is_true_on_all_ranks
from mingc.runtime.distributed.all_reduce import create_all_reduce, is_correct

REPEATS = 100


def rank_input(rank: int, rows: int, width: int) -> Tensor:
    """Input of `rank`: (rows, width) float32 values whose sum is rounded in half precision."""
    generator = torch.Generator().manual_seed(100 * rows + rank)
    return torch.randn(rows, width, generator=generator)


def wrong_values(
    algorithm: AllReduceAlgorithm, device: torch.device, dtype: torch.dtype, rows: int, width: int
) -> int:
    """Number of values, over `REPEATS` inputs, that differ from the sum of the inputs in rank order."""
    rank, static = dist.get_rank(), torch.empty(rows, width, dtype=dtype, device=device)
    graph = torch.cuda.CUDAGraph()
    algorithm.all_reduce_(static.zero_())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        algorithm.all_reduce_(static)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for repeat in range(REPEATS):
        inputs = []
        for other in range(dist.get_world_size()):
            generator = torch.Generator(device).manual_seed(1000 * repeat + other)
            inputs.append(torch.randn(rows, width, generator=generator, device=device).to(dtype))
        static.copy_(inputs[rank])
        # Two replays without synchronization: a missing barrier would let the second overwrite what others still read.
        for _ in range(2):
            graph.replay()
            total = inputs[0]
            for other_input in inputs[1:]:
                total = total + other_input
            wrong += (static != total).sum()
            inputs = [total] * len(inputs)
    return int(wrong.item())


class RankOneUnchanged:
    """A broken algorithm: rank 1 keeps its input."""

    def all_reduce_(self, x: Tensor) -> None:
        own = x.clone()
        CollectiveAllReduce().all_reduce_(x)
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
    all_reduce = create_all_reduce(device, dtype, width=job["width"], tokens=job["tokens"])
    rows, width = job["tokens"][-1], job["width"]
    assert is_correct(CollectiveAllReduce(), device, dtype, width, rows)
    assert not is_correct(RankOneUnchanged(), device, dtype, width, rows)
    sums, replayed = [], []
    for rows in job["rows"]:
        before = rank_input(job["rank"], rows, width).to(device, dtype)
        total = before.clone()
        all_reduce.all_reduce_(total)
        sums.append(total.float().cpu().tolist())
        if device.type == "cuda":
            static = torch.empty_like(before)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                all_reduce.all_reduce_(static)
            for _ in range(20):
                static.copy_(before)
                graph.replay()
                assert torch.equal(static, total), "the replay differs from the eager call"
            replayed.append(static.float().cpu().tolist())
    own = rank_input(job["rank"], job["rows"][0], width).to(device, dtype)
    gathered = process_group.all_gather_last(own).float().cpu().tolist()
    process_group.broadcast_from_rank0_(own)
    others = {
        "gathered": gathered,
        "broadcast": own.float().cpu().tolist(),
        "agree": [is_true_on_all_ranks(flag, device) for flag in (job["rank"] == 0, True)],
    }
    wrong = []
    for rows in job["repeated"]:
        num_bytes = rows * width * dtype.itemsize
        algorithms: list[AllReduceAlgorithm] = [OneShotAllReduce(device, dtype, num_bytes)]
        if job["world_size"] in TWO_SHOT_WORLD_SIZES:
            algorithms += [TwoShotAllReduce(device, dtype, num_bytes, lanes) for lanes in (1, 4)]
        wrong += [wrong_values(algorithm, device, dtype, rows, width) for algorithm in algorithms]
    assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
    result = {"plan": asdict(all_reduce.plan), "sums": sums, "replayed": replayed, "wrong": wrong}
    print(json.dumps({**result, **others}))
    process_group.shutdown()


if __name__ == "__main__":
    main()
