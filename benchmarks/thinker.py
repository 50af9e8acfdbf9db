"""Speed of the thinker at the released dims: random weights created on the device rank by rank, fixed lengths.

A decode step is embedding, all layers, logits and greedy sampling, in one CUDA graph that also advances its own inputs.
The same step with random sampling by every rule is timed as well.
Every rank runs in a process of its own. Random weights route tokens to experts evenly, the worst case for batches: real
text reads fewer experts. For comparison, one expert layer is timed in plain eager torch.

    python benchmarks/thinker.py --ranks 1,4 --batches 1,16,32 --json benchmarks/results/thinker-h200-….json
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

import harness
import thinker_engines as engines
import torch
from arguments import whole, wholes
from ranks import add_rank_options, run_ranks, write_figures
from thinker_prefill import prefill, prefill_problem
from thinker_rank import OUTPUT_TOKENS, Figure, Job, Rank

from mingc.errors import MingcError
from mingc.export.layers.decoder import PAGE_SIZE
from mingc.runtime.distributed import process_group

CONFIGS = Path(__file__).resolve().parent / "released"


def measure(job: Job, rank: int, port: int) -> list[Figure]:
    """All figures of a job; identical on every rank."""
    kind = job.setup.device
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if port:
        process_group.init(rank=rank, world_size=job.setup.world_size, port=port, device=kind, timeout_s=120)
    figures: list[Figure] = []
    with torch.no_grad():
        own = Rank(job, device)
        for prompt in job.prompts:
            for batch in job.setup.batches:
                figures += show(own.decode(batch, prompt), rank)
            if job.setup.chunks:
                figures += show(prefill(own, prompt), rank)
        for batch in job.setup.batches:
            figures += show(own.layer(batch, job.prompts[0]), rank)
    if kind == "cuda":
        same = {"ranks": job.setup.world_size, "alone": job.is_alone, "unit": "GiB"}
        peak = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        figures.append({"name": "peak_gib", **same, "median": peak})
    # NCCL destroys its communicator only after the graphs that use it.
    del own
    gc.collect()
    process_group.shutdown()
    return figures


def show(figures: list[Figure], rank: int) -> list[Figure]:
    if rank == 0:
        for each in figures:
            print(" ".join(f"{key}={value}" for key, value in each.items()), file=sys.stderr, flush=True)
    return figures


def run_job(job: Job, path: Path) -> list[Figure]:
    """Run a job in one process per rank, which read it from `path`."""
    path.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
    world_size = 1 if job.is_alone else job.setup.world_size
    return run_ranks(["--job", str(path)], world_size, timeout_s=900)


def read_job(path: Path) -> Job:
    stored = json.loads(path.read_text(encoding="utf-8"))
    setup = {
        key: tuple(value) if isinstance(value, list) else value for key, value in stored["setup"].items()
    }
    return Job(**{**stored, "setup": engines.Setup(**setup), "prompts": tuple(stored["prompts"])})


def problem_of(arguments: argparse.Namespace) -> str | None:
    """Why this combination of arguments cannot be measured; None if it can."""
    if arguments.build_only and arguments.measure_only:
        return "--build-only and --measure-only exclude each other"
    for option in ("build_only", "measure_only"):
        if getattr(arguments, option) and arguments.engines is None:
            return f"--{option.replace('_', '-')} needs --engines"
    if arguments.json is not None and arguments.device != "cuda":
        return "--json needs --device cuda: times of a CPU are no result"
    if not (arguments.configs / "config.json").is_file():
        return f"--configs {arguments.configs}: there is no config.json in this folder"
    if arguments.context % PAGE_SIZE:
        return f"--context {arguments.context} is not a multiple of the page size, {PAGE_SIZE}"
    for prompt in arguments.prompts:
        if prompt + OUTPUT_TOKENS > arguments.context:
            return (
                f"--prompts {prompt}: with {OUTPUT_TOKENS} output tokens it does not fit into "
                f"--context {arguments.context}"
            )
        if arguments.chunks and (problem := prefill_problem(prompt, arguments.chunks)) is not None:
            return problem
    return _model_problem(arguments) or _device_problem(arguments)


def _model_problem(arguments: argparse.Namespace) -> str | None:
    for world_size in arguments.ranks:
        setup = setup_of(arguments, world_size)
        try:
            config, full = setup.config(), dataclasses.replace(setup, layers=None).config()
            config.local_heads(world_size)
        except MingcError as error:
            return f"--ranks {world_size}: {error.message}"
        if not full.num_dense_layers < config.num_layers <= full.num_layers:
            return (
                f"--layers {config.num_layers} is not from {full.num_dense_layers + 1} to {full.num_layers}"
            )
    return None


def _device_problem(arguments: argparse.Namespace) -> str | None:
    if arguments.device != "cuda":
        return None
    needed = 1 if arguments.alone or arguments.build_only else max(arguments.ranks)
    found = torch.cuda.device_count()
    return (
        f"--ranks {max(arguments.ranks)}: needs {needed} CUDA devices, {found} visible"
        if found < needed
        else None
    )


def setup_of(arguments: argparse.Namespace, world_size: int) -> engines.Setup:
    return engines.Setup(
        configs=str(arguments.configs),
        device=arguments.device,
        quantize=arguments.quantize,
        world_size=world_size,
        batches=arguments.batches,
        chunks=arguments.chunks,
        max_model_len=arguments.context,
        layers=arguments.layers,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=wholes(1, 64), default=(1,), help="world sizes to measure")
    parser.add_argument("--configs", type=Path, default=CONFIGS, help="folder of the model's configs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to test this script")
    parser.add_argument(
        "--alone", action="store_true", help="one rank's share on one GPU, without all-reduce"
    )
    parser.add_argument("--batches", type=wholes(1), default=(1, 16, 32), help="decode batch sizes")
    parser.add_argument("--prompts", type=wholes(1), default=(1024, 8192), help="prompt lengths")
    parser.add_argument(
        "--chunks",
        type=lambda text: wholes(1)(text) if text else (),
        default=(1024, 4096),
        help="prefill chunk sizes; '--chunks=' measures no prefill",
    )
    parser.add_argument(
        "--no-two-batch-overlap",
        action="store_true",
        help="prefill one chunk after the other on several ranks",
    )
    parser.add_argument("--context", type=whole(1), default=32768, help="tokens that a page table holds")
    parser.add_argument("--quantize", choices=["fp8", "int4"], help="weight format of the engines")
    parser.add_argument("--layers", type=whole(1), help="fewer layers than released")
    parser.add_argument(
        "--distinct", type=whole(1), help="expert layers with weights of their own; others reuse them"
    )
    parser.add_argument("--engines", type=Path, help="keep compiled engines in this folder")
    parser.add_argument("--jobs", type=whole(1), default=8, help="compiler processes")
    parser.add_argument(
        "--autotune", action="store_true", help="autotune the experts' kernels first, as an export does"
    )
    parser.add_argument("--build-only", action="store_true", help="compile into --engines and exit")
    parser.add_argument("--measure-only", action="store_true", help="use the engines in --engines")
    parser.add_argument(
        "--profile", action="store_true", help="time the kernels of the first step and prompt"
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    add_rank_options(parser)
    arguments = harness.parse_args(parser)
    if arguments.job is not None:
        write_figures(arguments, measure(read_job(arguments.job), arguments.rank, arguments.port))
        return
    if (problem := problem_of(arguments)) is not None:
        parser.error(problem)

    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.engines or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for world_size in arguments.ranks:
            setup = setup_of(arguments, world_size)
            if not arguments.measure_only:
                same = {"ranks": world_size, "unit": "s"}
                started = time.perf_counter()
                tiles = engines.tune_kernels(setup, folder, arguments.jobs) if arguments.autotune else ()
                if arguments.autotune:
                    wall_s = time.perf_counter() - started
                    figures.append({"name": "tuning_s", **same, "median": round(wall_s, 1)})
                started = time.perf_counter()
                single_s = engines.build_all(setup, folder, arguments.jobs, tiles)
                wall_s = time.perf_counter() - started
                print(
                    f"TP{world_size}: built in {wall_s:.0f} s, {single_s:.0f} s of compiling", file=sys.stderr
                )
                figures.append({"name": "compile_s", **same, "median": round(wall_s, 1)})
            if arguments.build_only:
                continue
            job = Job(
                setup=setup,
                folder=str(folder),
                prompts=arguments.prompts,
                distinct=arguments.distinct,
                is_alone=arguments.alone,
                two_batch_overlap=world_size > 1 and not (arguments.alone or arguments.no_two_batch_overlap),
                profile=arguments.profile,
            )
            figures += run_job(job, Path(scratch) / f"tp{world_size}.job")
    if arguments.json:
        value = harness.result(
            "thinker",
            harness.peak_rates(),
            figures,
            gpus=1 if arguments.alone else max(arguments.ranks),
            layers=arguments.layers,
            distinct_expert_layers=arguments.distinct,
            quantize=arguments.quantize,
        )
        harness.write(arguments.json, value)


if __name__ == "__main__":
    main()
