"""Times the kernels of the thinker's mixture-of-experts layer at the released dims on one GPU, random weights.

Every shard of 1, 2, 4 and 8 ranks, decode and prefill, weights in bfloat16, FP8 and INT4; the router; and beside
them the same functions in plain torch, eager. Each token is routed at random by itself, which makes a step read the
most experts. A timing is a CUDA graph over several routings, so that the cache does not hold the weights; `floor_us`
is the time to read every chosen expert and the shared one once at the copy rate of the same run (reading alone is a
little faster than copying: a kernel may be below its floor).

    python benchmarks/thinker_kernels.py --json benchmarks/results/thinker-kernels-h200-….json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import harness
import torch
from moe_tiles import CHOSEN, EXPERTS, HIDDEN, WIDTH, Layer, bytes_read, routings, samples_us
from torch import Tensor

from mingc.kernels.dispatch import plain_torch
from mingc.kernels.moe_experts import Weights, moe_experts
from mingc.kernels.router import route_hidden

DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TOKENS = (256, 1024, 4096)
ROUTER = {"num_groups": 8, "num_kept_groups": 4, "num_chosen": CHOSEN, "scale": 2.5}


def experts_figure(
    layer: Layer, shard: int, tokens: int, tb_s: float, is_plain: bool = False
) -> dict[str, Any]:
    width = WIDTH // shard
    gate_up, down, up_scale, down_scale, *shared = layer.weights(width)
    assert gate_up is not None and down is not None and shared[0] is not None and shared[1] is not None
    alone = Weights(shared[0], shared[1], *shared[2:])
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    sets = 2
    while (routing := routings(tokens, sets)) and sets * bytes_read(layer.storage, width, routing) < 3e8:
        sets += 2

    def run(ids: Tensor, mix: Tensor) -> Tensor:
        return moe_experts(x, ids, mix, gate_up, down, up_scale, down_scale, shared=alone)

    if is_plain:
        with plain_torch():
            samples = samples_us(run, routing[:2], 5, is_eager=True)
    else:
        samples = samples_us(run, routing, 15)
    floor = bytes_read(layer.storage, width, routing) / tb_s / 1e6
    median = harness.summary(samples)["median"]
    flops = 6 * tokens * (CHOSEN + 1) * width * HIDDEN
    return {
        "kernel": "experts and shared expert" + (", plain torch, eager" if is_plain else ""),
        "format": layer.storage,
        "ranks": shard,
        "tokens": tokens,
        "us": harness.summary(samples),
        "floor_us": round(floor, 2),
        "percent_of_copy_rate": round(100 * floor / median, 1),
        "tflop_s": round(flops / median / 1e6, 1),
    }


def router_figure(tokens: int, is_plain: bool = False) -> dict[str, Any]:
    weights = [(torch.randn(3, EXPERTS, HIDDEN, device="cuda") / 64).to(torch.bfloat16) for _ in range(12)]
    bias = torch.zeros(3, EXPERTS, device="cuda")
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    gates = None if tokens <= DECODE_TOKENS[-1] else torch.zeros(tokens, dtype=torch.int64, device="cuda")
    calls = [(weight, bias) for weight in weights]

    def run(weight: Tensor, bias: Tensor) -> object:
        return route_hidden(x, weight, bias, gates, **ROUTER)

    if is_plain:
        with plain_torch():
            samples = samples_us(run, calls, 5, is_eager=True)
    else:
        samples = samples_us(run, calls, 15)
    name = "router" + (", plain torch, eager" if is_plain else "")
    return {"kernel": name, "tokens": tokens, "us": harness.summary(samples)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default="bf16,fp8,int4")
    parser.add_argument("--ranks", default="1,2,4,8", help="into how many parts the experts' width is cut")
    parser.add_argument("--json", type=Path, help="the result file")
    options = parser.parse_args()
    ceiling = harness.ceilings()
    rate = ceiling["copy_tb_s"]
    figures = [router_figure(tokens) for tokens in (1, 8, 32, 64, 1024, 4096)]
    figures += [router_figure(tokens, is_plain=True) for tokens in (1, 32)]
    for storage in options.formats.split(","):
        layer = Layer(storage)
        for shard in map(int, options.ranks.split(",")):
            figures += [experts_figure(layer, shard, tokens, rate) for tokens in DECODE_TOKENS]
            figures += [experts_figure(layer, shard, tokens, rate) for tokens in PREFILL_TOKENS]
        if storage == "bf16":
            figures += [experts_figure(layer, 1, tokens, rate, is_plain=True) for tokens in (1, 8, 32, 1024)]
        del layer
        for figure in figures:
            if figure.get("format") == storage:
                print(
                    f"{storage} {figure['kernel']} TP{figure['ranks']} T={figure['tokens']}: "
                    f"{figure['us']['median']:.1f} us, {figure['percent_of_copy_rate']} % of the copy rate, "
                    f"{figure['tflop_s']} TFLOP/s",
                    flush=True,
                )
    if options.json:
        harness.write(options.json, harness.result("thinker_kernels", ceiling, figures))


if __name__ == "__main__":
    main()
