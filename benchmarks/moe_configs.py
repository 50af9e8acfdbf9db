"""Autotunes the mixture-of-experts kernels on a GPU as `mingc export` does, at the released sizes and their shards.

    python benchmarks/moe_configs.py --ranks 4 --tokens 1,16,32,256,1024,4096 --json benchmarks/results/tuned-….json

Every token is routed at random: the worst case for the number of experts that a step reads. Each timing is a CUDA graph
over several routings, so that the weights are not in the cache. Beside the Triton kernels of INT4 chunks stand those in
CUDA C++, also for chunks that the product does not give them.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any, get_args

import harness
import torch
from arguments import whole, wholes

from mingc.artifacts.manifest import TunedKernel
from mingc.artifacts.spec import Quantization
from mingc.export.autotune.moe_benchmark import ProblemTimer, RandomExperts
from mingc.export.autotune.selection import group_by_default
from mingc.export.autotune.tuning import autotune, moe_problems, problem_of
from mingc.export.stage import ExpertDims, Shard
from mingc.export.stages import find
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.host.machine import gpu_target
from mingc.kernels.cuda import int4_experts

CONFIGS = Path(__file__).resolve().parent / "released"
BFLOAT16 = "bfloat16"
FORMATS = (BFLOAT16, *get_args(Quantization))


def released_dims(ranks: int) -> ExpertDims:
    """Expert sizes of the released thinker, sharded over `ranks` ranks."""
    stage = find("thinker")
    dims = stage.experts(stage.config(open_synthetic(CONFIGS)), Shard(world_size=ranks))
    assert dims is not None
    return dims


def figure(record: TunedKernel, ranks: int) -> dict[str, Any]:
    fields = dataclasses.asdict(record)
    return {"name": "experts_us", "ranks": ranks, "median": fields.pop("us"), "unit": "us", **fields}


def cuda_figure(dims: ExpertDims, record: TunedKernel, ranks: int) -> dict[str, Any]:
    """The chunk of `record` in CUDA C++, beside what was selected for Triton."""
    from mingc.kernels.triton.moe_prefill import moe_prefill  # needs Triton

    problem = problem_of(record)
    weights = RandomExperts(dims, problem.weight_format)
    inputs = ProblemTimer(weights, problem).inputs
    code = int4_experts.machine_code(torch.device("cuda"))
    graph = harness.capture(lambda: [moe_prefill(*each, *weights.experts, None, code) for each in inputs])
    samples = [1e3 * ms / len(inputs) for ms in harness.time_ms(graph.replay, 30)]
    return {
        "name": "experts_cuda_us",
        "ranks": ranks,
        "tokens": record.tokens,
        "weight_format": record.weight_format,
        **harness.summary(samples),
        "unit": "us",
        "reference": {"name": "Triton", "median": record.us},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=whole(1, 8), default=1, help="number of ranks that share the experts")
    parser.add_argument("--format", choices=FORMATS, default=BFLOAT16, help="weight format")
    parser.add_argument("--tokens", type=wholes(1), default=(1, 16, 32, 256, 1024, 4096))
    parser.add_argument("--jobs", type=whole(1), default=8, help="number of compile processes")
    parser.add_argument("--cache", type=Path, help="folder of cached results to reuse")
    parser.add_argument("--json", type=Path, help="the result file")
    options = harness.parse_args(parser)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    dims = released_dims(options.ranks)
    stored: Quantization | None = None if options.format == BFLOAT16 else options.format
    problems = moe_problems(dims, stored, options.tokens)
    started = time.perf_counter()
    records = autotune(dims, problems, jobs=options.jobs, cache=options.cache)
    seconds = round(time.perf_counter() - started, 1)
    same = {"ranks": options.ranks, "weight_format": options.format, "unit": "s"}
    figures = [
        {"name": "tuning_s", **same, "median": seconds, "problems": len(problems), "jobs": options.jobs}
    ]
    figures += [figure(record, options.ranks) for record in records]
    for record in records:
        gain = 100 * (1 - record.us / record.default_us)
        name = f"{record.weight_format} TP{options.ranks} {record.tokens} tokens"
        print(f"{name}: {record.us} us, {gain:.1f} % below the default's")
        print(
            f"  {record.kernel} block_m={record.block_m} swap_operands={record.swap_operands} "
            f"extra_rows={record.extra_rows}",
            flush=True,
        )
        print(f"  {record.up}\n  {record.down}", flush=True)
        has_cuda = "clusters" in gpu_target().kernels and int4_experts.fits(
            dims.hidden_size, dims.intermediate_size
        )
        if has_cuda and record.weight_format == "int4" and record.kernel == "grouped":
            figures.append(cuda_figure(dims, record, options.ranks))
            print(f"  in CUDA C++ {figures[-1]['median']} us", flush=True)
    groups = group_by_default(problems)
    print(f"{seconds} s for {len(problems)} problems with {len(groups)} default configurations", flush=True)
    if options.json:
        harness.write(options.json, harness.result("moe_configs", harness.peak_rates(), figures))


if __name__ == "__main__":
    main()
