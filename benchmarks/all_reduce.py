"""Time of an all-reduce of bfloat16 in a CUDA graph, 8 KiB to 32 MiB, 2 to 8 GPUs: NCCL, one-shot and two-shot kernel.

One-shot up to 4 MiB: every rank reads all. Two-shot from 128 KiB: every rank adds up a share, and all read the sums;
its time holds the copy to where the others can read; a message is cut into at most so many lanes, side by side.
One process a GPU, started by this one. A figure is the slowest rank's median over replays of a graph of 20 calls.

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
from ranks import add_options, give_back, run_ranks

from mingc.runtime.distributed import process_group
from mingc.runtime.distributed.algorithms import Collective, Method, OneShot, TwoShot
from mingc.runtime.distributed.all_reduce import adds_up, graph_us

WIDTH = 4096  # values of a token of the thinker: 8 KiB
SIZES = [2**power for power in range(13, 26)]  # bytes
MOST_ONE_SHOT, LEAST_TWO_SHOT = 2**22, 2**17
LAYERS = 32


def measure(rank: int, world_size: int, port: int, lanes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Figures of all sizes; the same on every rank."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    process_group.init(rank=rank, world_size=world_size, port=port, device="cuda", timeout_s=60)
    dtype = torch.bfloat16
    methods: dict[str, tuple[Method, int, int]] = {
        "nccl": (Collective(), SIZES[0], SIZES[-1]),
        "one_shot": (OneShot(device, dtype, MOST_ONE_SHOT), SIZES[0], MOST_ONE_SHOT),
    }
    for count in lanes:
        two_shot = TwoShot(device, dtype, SIZES[-1], count)
        methods[f"two_shot_{count}"] = (two_shot, LEAST_TWO_SHOT, SIZES[-1])
    figures = []
    for num_bytes in SIZES:
        rows = num_bytes // dtype.itemsize // WIDTH
        x = torch.zeros(rows, WIDTH, dtype=dtype, device=device)
        for name, (method, least, most) in methods.items():
            if not least <= num_bytes <= most:
                continue
            is_right = adds_up(method, device, dtype, WIDTH, rows)
            slowest = torch.tensor(graph_us(lambda: method.reduce_(x), device), device=device)  # noqa: B023
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            figures.append(
                {
                    "name": "all_reduce_us",
                    "ranks": world_size,
                    "bytes": num_bytes,
                    "method": name,
                    "median": round(slowest.item(), 2),
                    "unit": "us",
                    "is_right": is_right,
                }
            )
    process_group.shutdown()
    return figures


def show(figures: list[dict[str, Any]]) -> None:
    times = {(each["ranks"], each["bytes"], each["method"]): each["median"] for each in figures}
    for ranks, num_bytes in dict.fromkeys((each["ranks"], each["bytes"]) for each in figures):
        told = [
            f"{method} {us:6.1f} µs, {2 * LAYERS * us / 1e3:6.2f} ms in the {2 * LAYERS} of a step"
            for (own_ranks, size, method), us in times.items()
            if (own_ranks, size) == (ranks, num_bytes)
        ]
        print(f"TP{ranks} {num_bytes >> 10:5} KiB: {'; '.join(told)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=wholes(2), default="2,4,8", help="how many GPUs, each")
    parser.add_argument("--lanes", type=wholes(1), default="1,2,4", help="of the two-shot sum at most, each")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--world-size", type=int, help=argparse.SUPPRESS)
    add_options(parser)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        give_back(arguments, measure(arguments.rank, arguments.world_size, arguments.port, arguments.lanes))
        return
    figures: list[dict[str, Any]] = []
    for world_size in arguments.ranks:
        if world_size > torch.cuda.device_count():
            print(f"TP{world_size}: there are {torch.cuda.device_count()} GPUs, left out")
            continue
        words = ["--world-size", str(world_size), "--lanes", ",".join(map(str, arguments.lanes))]
        figures += run_ranks(words, world_size, timeout_s=300)
    show(figures)
    if arguments.json:
        value = harness.result("all_reduce", harness.ceilings(), figures)
        value["hardware"]["count"] = torch.cuda.device_count()
        harness.write(arguments.json, value)


if __name__ == "__main__":
    main()
