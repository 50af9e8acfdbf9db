"""Times the mixture-of-experts kernels of the thinker at the released sizes on one GPU, with random weights.

Every shard of 1, 2, 4 and 8 ranks, decode and prefill, weights in bfloat16, FP8 and INT4; the router; for comparison
the same functions in plain torch, eager. Every token is routed at random, which makes a step read the most experts. A
timing is a CUDA graph over several routings, so that the weights are not in the cache; `floor_us` is the time to read
every routed expert and the shared one once at the copy rate of the same run (reading alone is a little faster than
copying: a kernel may be below its floor).

    python benchmarks/thinker_kernels.py --json benchmarks/results/thinker-kernels-h200-….json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from moe_configs import released_dims
from torch import Tensor

from mingc.export.autotune.moe_benchmark import RandomExperts
from mingc.export.stage import ExpertDims
from mingc.kernels.dispatch import plain_torch
from mingc.kernels.moe_experts import moe_experts
from mingc.kernels.router import route_hidden
from mingc.kernels.triton.moe_config import BF16, FP8, INT4

DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TOKENS = (256, 1024, 4096)
FORMATS = {BF16: "bf16", FP8: "fp8", INT4: "int4"}


def samples_us(
    run: Callable[..., object], calls: Sequence[tuple[Tensor, ...]], count: int, *, is_eager: bool = False
) -> list[float]:
    """Microseconds a call over `calls`, `count` samples; in a CUDA graph unless `is_eager`."""

    def step() -> None:
        for each in calls:
            run(*each)

    timed = step if is_eager else harness.capture(step).replay
    return [1000 * each / len(calls) for each in harness.time_ms(timed, count, 2)]


def experts_figure(
    experts: RandomExperts, ranks: int, tokens: int, tb_s: float, is_plain: bool = False
) -> dict[str, Any]:
    dims = experts.dims
    calls = experts.inputs(tokens, 2)
    while sum(map(experts.read_bytes, calls)) < 3e8:
        calls += experts.inputs(tokens, 2)

    def run(x: Tensor, ids: Tensor, mix: Tensor) -> Tensor:
        return moe_experts(x, ids, mix, *experts.experts, shared=experts.shared)

    if is_plain:
        calls = calls[:2]
        with plain_torch():
            samples = samples_us(run, calls, 5, is_eager=True)
    else:
        samples = samples_us(run, calls, 15)
    floor = statistics.mean(map(experts.read_bytes, calls)) / tb_s / 1e6
    median = harness.summary(samples)["median"]
    flops = 6 * tokens * (dims.top_k + 1) * dims.intermediate_size * dims.hidden_size
    return {
        "kernel": "experts and shared expert" + (", plain torch, eager" if is_plain else ""),
        "format": FORMATS[experts.weight_format],
        "ranks": ranks,
        "tokens": tokens,
        "us": harness.summary(samples),
        "floor_us": round(floor, 2),
        "percent_of_copy_rate": round(100 * floor / median, 1),
        "tflop_s": round(flops / median / 1e6, 1),
    }


def router_figure(dims: ExpertDims, tokens: int, is_plain: bool = False) -> dict[str, Any]:
    shape = (3, dims.num_experts, dims.hidden_size)
    weights = [(torch.randn(shape, device="cuda") / 64).to(torch.bfloat16) for _ in range(12)]
    bias = torch.zeros(3, dims.num_experts, device="cuda")
    x = torch.randn(tokens, dims.hidden_size, device="cuda").to(torch.bfloat16)
    gates = None if tokens <= DECODE_TOKENS[-1] else torch.zeros(tokens, dtype=torch.int64, device="cuda")
    calls = [(weight, bias) for weight in weights]

    def run(weight: Tensor, bias: Tensor) -> object:
        return route_hidden(
            x, weight, bias, gates, num_groups=dims.num_groups, num_kept_groups=dims.num_kept_groups,
            top_k=dims.top_k, scale=2.5,
        )  # fmt: skip

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
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of ranks that share the experts")
    parser.add_argument("--json", type=Path, help="the result file")
    options = harness.parse_args(parser)
    rates = harness.peak_rates()
    rate = rates["copy_tb_s"]
    whole = released_dims(1)
    figures = [router_figure(whole, tokens) for tokens in (1, 8, 32, 64, 1024, 4096)]
    figures += [router_figure(whole, tokens, is_plain=True) for tokens in (1, 32)]
    for weight_format in (number for number, name in FORMATS.items() if name in options.formats.split(",")):
        for ranks in map(int, options.ranks.split(",")):
            experts = RandomExperts(released_dims(ranks), weight_format)
            found = [
                experts_figure(experts, ranks, tokens, rate) for tokens in DECODE_TOKENS + PREFILL_TOKENS
            ]
            if weight_format == BF16 and ranks == 1:
                found += [
                    experts_figure(experts, ranks, tokens, rate, is_plain=True) for tokens in (1, 8, 32, 1024)
                ]
            del experts
            for figure in found:
                print(
                    f"{figure['format']} {figure['kernel']} TP{ranks} T={figure['tokens']}: "
                    f"{figure['us']['median']:.1f} us, {figure['percent_of_copy_rate']} % of the copy rate, "
                    f"{figure['tflop_s']} TFLOP/s",
                    flush=True,
                )
            figures += found
    if options.json:
        harness.write(options.json, harness.result("thinker_kernels", rates, figures))


if __name__ == "__main__":
    main()
