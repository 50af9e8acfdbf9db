"""Time of a bfloat16 all-reduce in a CUDA graph, 8 KiB to 32 MiB, 2 to 8 GPUs: NCCL, one-shot and two-shot kernels.

One-shot, up to 4 MiB: every rank reads the tensors of all ranks. Two-shot, from 128 KiB: every rank sums a share, then
all read the sums; its time includes the copy into symmetric memory. Lanes run concurrently, each on a part of the
message. One process per GPU, started by this script. A figure is the slowest rank's median over replays of a graph of
20 calls.

    python benchmarks/all_reduce.py --ranks 2,4,8 --json benchmarks/results/all-reduce-h200-….json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from arguments import wholes
from ranks import add_rank_options, run_ranks, write_figures

from mingc.runtime.distributed import process_group
from mingc.runtime.distributed.algorithms import (
    AllReduceAlgorithm,
    CollectiveAllReduce,
    OneShotAllReduce,
    TwoShotAllReduce,
)
from mingc.runtime.distributed.all_reduce import is_correct, time_captured_us

WIDTH = 4096  # hidden size of the thinker: 8 KiB per token
SIZES = [2**power for power in range(13, 26)]  # bytes
MAX_ONE_SHOT, MIN_TWO_SHOT = 2**22, 2**17
LAYERS = 32


def measure(rank: int, world_size: int, port: int, lanes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Figures for all sizes; identical on every rank."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    process_group.init(rank=rank, world_size=world_size, port=port, device="cuda", timeout_s=60)
    dtype = torch.bfloat16
    algorithms: dict[str, tuple[AllReduceAlgorithm, int, int]] = {
        "nccl": (CollectiveAllReduce(), SIZES[0], SIZES[-1]),
        "one_shot": (OneShotAllReduce(device, dtype, MAX_ONE_SHOT), SIZES[0], MAX_ONE_SHOT),
    }
    for count in lanes:
        two_shot = TwoShotAllReduce(device, dtype, SIZES[-1], count)
        algorithms[f"two_shot_{count}"] = (two_shot, MIN_TWO_SHOT, SIZES[-1])
    figures = []
    for num_bytes in SIZES:
        rows = num_bytes // dtype.itemsize // WIDTH
        x = torch.zeros(rows, WIDTH, dtype=dtype, device=device)
        for name, (algorithm, low, high) in algorithms.items():
            if not low <= num_bytes <= high:
                continue
            correct = is_correct(algorithm, device, dtype, WIDTH, rows)
            slowest = torch.tensor(time_captured_us(lambda: algorithm.all_reduce_(x), device), device=device)  # noqa: B023
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            figures.append(
                {
                    "name": "all_reduce_us",
                    "ranks": world_size,
                    "bytes": num_bytes,
                    "algorithm": name,
                    "median": round(slowest.item(), 2),
                    "unit": "us",
                    "is_correct": correct,
                }
            )
    process_group.shutdown()
    return figures


def show(figures: list[dict[str, Any]]) -> None:
    times = {(each["ranks"], each["bytes"], each["algorithm"]): each["median"] for each in figures}
    for ranks, num_bytes in dict.fromkeys((each["ranks"], each["bytes"]) for each in figures):
        columns = [
            f"{algorithm} {us:6.1f} µs, {2 * LAYERS * us / 1e3:6.2f} ms for {2 * LAYERS} per step"
            for (num_ranks, size, algorithm), us in times.items()
            if (num_ranks, size) == (ranks, num_bytes)
        ]
        print(f"TP{ranks} {num_bytes >> 10:5} KiB: {'; '.join(columns)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=wholes(2), default="2,4,8", help="world sizes to measure")
    parser.add_argument("--lanes", type=wholes(1), default="1,2,4", help="lane limits of two-shot to measure")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--world-size", type=int, help=argparse.SUPPRESS)
    add_rank_options(parser)
    arguments = harness.parse_args(parser)
    if arguments.rank is not None:
        write_figures(
            arguments, measure(arguments.rank, arguments.world_size, arguments.port, arguments.lanes)
        )
        return
    figures: list[dict[str, Any]] = []
    for world_size in arguments.ranks:
        if world_size > torch.cuda.device_count():
            print(f"TP{world_size}: skipped, only {torch.cuda.device_count()} GPUs are visible")
            continue
        words = ["--world-size", str(world_size), "--lanes", ",".join(map(str, arguments.lanes))]
        figures += run_ranks(words, world_size, timeout_s=300)
    show(figures)
    if arguments.json:
        gpus = torch.cuda.device_count()
        value = harness.result("all_reduce", harness.peak_rates(), figures, gpus=gpus)
        harness.write(arguments.json, value)


if __name__ == "__main__":
    main()
