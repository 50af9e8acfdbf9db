"""Speed of the thinker at the released dims: random weights made on the device rank by rank, fixed lengths.

A decode step is embedding, all layers, logits and the choice of the likeliest token, in one CUDA graph that also
advances its own inputs; every rank runs it in a process of its own. Random weights route tokens to experts evenly,
which is the worst case for batches: real text reads fewer of them. Beside it one expert layer in plain torch, eager.

    python benchmarks/thinker.py --ranks 1,4 --batches 1,16,32 --json benchmarks/results/thinker-h200-….json
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import thinker_engines as engines
import torch
import torch.distributed as dist
from ranks import add_rank_options, run_ranks, write_figures
from thinker_prefill import prefill
from thinker_routing import experts_read
from torch import Tensor

from mingc.export.layers.decoder import PAGE_SIZE
from mingc.kernels.dispatch import plain_torch
from mingc.runtime.distributed import process_group
from mingc.runtime.distributed.all_reduce import AllReduce, create_all_reduce
from mingc.runtime.thinker.layers import ThinkerLayers

CONFIGS = Path(__file__).resolve().parent / "released"
PEAK_TB_S = 4.27  # device copy of an H200, which the roofline is counted with
OUTPUT_TOKENS = 152
Figure = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank measures."""

    setup: engines.Setup
    folder: str
    prompts: tuple[int, ...]
    distinct: int | None
    is_alone: bool  # one rank's share without the others
    two_batch_overlap: bool  # whether two chunks of a prompt go through the layers beside each other
    profile: bool


class Rank:
    """One rank with its weights and pages, ready to step."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.setup, self.device = job, job.setup, device
        self.config = self.setup.config()
        self.weights = engines.random_weights(self.setup, device, distinct=job.distinct)
        self.stage = stage = engines.load(self.setup, Path(job.folder), self.weights, device)
        tokens = max(self.setup.batches) * (max(job.prompts) + OUTPUT_TOKENS + PAGE_SIZE)
        self.num_pages = tokens // PAGE_SIZE + 2 + max(self.setup.batches)
        self.state = stage.allocate_state({"KV": self.num_pages * PAGE_SIZE}, device)
        for pages in self.state.values():
            pages.normal_()
        self.dtype = next(iter(self.state.values())).dtype
        self.all_reduce: AllReduce = create_all_reduce(
            device,
            self.dtype,
            width=self.config.hidden_size,
            tokens=(*self.setup.batches, *self.setup.chunks),
        )
        vocab_size = self.config.vocab_size
        if job.is_alone:
            vocab_size = self.config.local_vocab(self.setup.world_size)
        self.layers = ThinkerLayers(
            stage, self.state, vocab_size=vocab_size, all_reduce_=self.all_reduce.all_reduce_
        )

    def page_table(self, batch: int, tokens: int) -> Tensor:
        """(B, P) int32: pages of `batch` requests of `tokens` tokens in random order."""
        used = -(-tokens // PAGE_SIZE)
        generator = torch.Generator().manual_seed(batch)
        pages = 1 + torch.randperm(self.num_pages - 1, generator=generator)[: batch * used]
        table = torch.zeros(batch, self.setup.max_model_len // PAGE_SIZE, dtype=torch.int32)
        table[:, :used] = pages.view(batch, used)
        return table.to(self.device)

    def inputs(self, tokens: int, first: int) -> dict[str, Tensor]:
        """Of `embed`: text tokens at positions from `first` on (a chunk) or all at `first` (a batch)."""
        device = self.device
        return {
            "input_ids": torch.randint(0, self.config.vocab_size, (tokens,), device=device),
            "embeds": torch.zeros(tokens, self.config.hidden_size, dtype=self.dtype, device=device),
            "embed_kind": torch.zeros(tokens, dtype=torch.int64, device=device),
            "positions": torch.full((3, tokens), first, device=device),
        }

    def decode(self, batch: int, prompt: int) -> list[Figure]:
        """The output tokens of `batch` requests after prompts of `prompt` tokens."""
        inputs = self.inputs(batch, prompt)
        inputs["page_table"] = self.page_table(batch, prompt + OUTPUT_TOKENS)
        inputs["lengths"] = torch.full((batch,), prompt + 1, device=self.device)

        def step() -> None:
            inputs["input_ids"].copy_(self.layers.decode(inputs).argmax(-1))
            inputs["positions"].add_(1)
            inputs["lengths"].add_(1)

        replay = self.capture(step)

        def generate() -> list[float]:
            inputs["positions"].fill_(prompt)
            inputs["lengths"].fill_(prompt + 1)
            return self.time_ms(replay, OUTPUT_TOKENS)

        generate()
        samples = self.slowest(generate())
        read_experts = experts_read(self.stage, self.state, self.weights, self.config, inputs)
        step_ms = statistics.mean(samples)
        read = engines.step_bytes(self.setup, [prompt + OUTPUT_TOKENS // 2] * batch)
        same = {"batch": batch, "prompt": prompt, "ranks": self.setup.world_size, "alone": self.job.is_alone}
        floor_ms = read / PEAK_TB_S / 1e9
        is_profiled = self.job.profile and (batch, prompt) == (self.setup.batches[0], self.job.prompts[0])
        kernels = harness.kernel_table(replay)[:25] if is_profiled else []
        figures: list[Figure] = [
            {"name": "decode_step_ms", **same, **harness.summary(samples), "unit": "ms",
             "floor": round(floor_ms, 3), "percent_of_roofline": round(100 * floor_ms / step_ms, 1)},
            {"name": "tok_per_s", **same, "median": round(1e3 * batch / step_ms, 1), "unit": "tokens/s"},
            {"name": "experts_read", **same, "median": round(read_experts, 1), "unit": "a layer",
             "expected": round(engines.expected_experts(self.config, batch), 1)},
            *({"name": "kernel_us", **same, **kernel, "unit": "us a step"} for kernel in kernels),
        ]  # fmt: skip
        if self.setup.world_size > 1 and not self.job.is_alone:
            share = torch.zeros(batch, self.config.hidden_size, dtype=self.dtype, device=self.device)
            count = 2 * self.config.num_layers

            def sums() -> None:
                for _ in range(count):
                    self.all_reduce.all_reduce_(share)

            sums_ms = statistics.median(self.slowest(self.time_ms(self.capture(sums), 20)))
            figures.append(
                {"name": "all_reduce_us", **same, "median": round(1e3 * sums_ms / count, 2), "unit": "us",
                 "percent_of_step": round(100 * sums_ms / step_ms, 1), "choice": self.all_reduce.plan.reason}
            )  # fmt: skip
        return figures

    def layer(self, batch: int, prompt: int) -> list[Figure]:
        """One expert layer: our two halves in a CUDA graph, and the same in plain torch, eager."""
        index = self.config.num_dense_layers
        attention = engines.piece(self.setup, f"layers.{index}.attention", self.weights)
        feed_forward = engines.piece(self.setup, f"layers.{index}.feed_forward", self.weights)
        stream = torch.randn(batch, self.config.hidden_size, device=self.device).to(self.dtype)
        angles = torch.rand(batch, self.config.rotary_dim // 2, device=self.device)
        table = self.page_table(batch, prompt)
        lengths = torch.full((batch,), prompt, device=self.device)
        pages = [self.state[f"layers.{index}.attention.{name}"] for name in ("k_pages", "v_pages")]

        def eager() -> None:
            residual, delta = attention.decode(
                stream, stream, angles.cos(), angles.sin(), table[:, : -(-prompt // PAGE_SIZE)], lengths, *pages
            )  # fmt: skip
            feed_forward.decode(residual, delta)

        with plain_torch(), torch.no_grad():
            eager()
            samples = self.time_ms(eager, 10)
        return [
            {"name": "eager_layer_ms", "batch": batch, "prompt": prompt, "ranks": self.setup.world_size,
             "alone": self.job.is_alone, **harness.summary(samples), "unit": "ms"}
        ]  # fmt: skip

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """`run` as one CUDA graph; on the CPU it is called."""
        if self.device.type == "cpu":
            return run
        self.synchronize()
        return harness.capture(run).replay

    def time_ms(self, run: Callable[[], None], count: int) -> list[float]:
        """Milliseconds of each of `count` runs, one after the other."""
        if self.device.type == "cuda":
            return harness.time_ms(run, count, warmups=0)
        samples = []
        for _ in range(count):
            started = time.perf_counter()
            run()
            samples.append(1e3 * (time.perf_counter() - started))
        return samples

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    def slowest(self, samples: list[float]) -> list[float]:
        """Of each sample the largest of all ranks."""
        if not dist.is_initialized():
            return samples
        times = torch.tensor(samples, dtype=torch.float64, device=self.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        slowest: list[float] = times.tolist()
        return slowest


def measure(job: Job, rank: int, port: int) -> list[Figure]:
    """All figures of a job; the same on every rank."""
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
    # NCCL ends its communicator only after the graphs that use it.
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
    """The figures of one process a rank, which find the job at `path`."""
    path.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
    world_size = 1 if job.is_alone else job.setup.world_size
    return run_ranks(["--job", str(path)], world_size, timeout_s=900)


def read_job(path: Path) -> Job:
    stored = json.loads(path.read_text(encoding="utf-8"))
    setup = {
        key: tuple(value) if isinstance(value, list) else value for key, value in stored["setup"].items()
    }
    return Job(**{**stored, "setup": engines.Setup(**setup), "prompts": tuple(stored["prompts"])})


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=numbers, default=(1,), help="how many GPUs share the model, each")
    parser.add_argument("--configs", type=Path, default=CONFIGS, help="folder of the model's configs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this script")
    parser.add_argument("--alone", action="store_true", help="one rank's share on one GPU, without the sums")
    parser.add_argument("--batches", type=numbers, default=(1, 16, 32))
    parser.add_argument("--prompts", type=numbers, default=(1024, 8192))
    parser.add_argument("--chunks", type=numbers, default=(1024, 4096), help="of prefill; none: '--chunks='")
    parser.add_argument(
        "--one-by-one", action="store_true", help="chunks of a prompt, not in pairs over ranks"
    )
    parser.add_argument("--context", type=int, default=32768, help="tokens that a page table has room for")
    parser.add_argument("--quantize", choices=["fp8", "int4"], help="stored weights of our engines")
    parser.add_argument("--layers", type=int, help="fewer layers than released")
    parser.add_argument("--distinct", type=int, help="expert layers with own weights; more take turns")
    parser.add_argument("--engines", type=Path, help="keep compiled engines in this folder")
    parser.add_argument("--jobs", type=int, default=8, help="compile at a time")
    parser.add_argument(
        "--autotune", action="store_true", help="time the experts' kernels first, as an export does"
    )
    parser.add_argument("--build-only", action="store_true", help="compile into --engines and end")
    parser.add_argument("--measure-only", action="store_true", help="the engines lie in --engines already")
    parser.add_argument("--profile", action="store_true", help="time the kernels of first step and prompt")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    add_rank_options(parser)
    arguments = harness.parse_args(parser)
    if arguments.job is not None:
        write_figures(arguments, measure(read_job(arguments.job), arguments.rank, arguments.port))
        return

    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.engines or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for world_size in arguments.ranks:
            setup = engines.Setup(
                configs=str(arguments.configs),
                device=arguments.device,
                quantize=arguments.quantize,
                world_size=world_size,
                batches=arguments.batches,
                chunks=arguments.chunks,
                max_model_len=arguments.context,
                layers=arguments.layers,
            )
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
                two_batch_overlap=world_size > 1 and not (arguments.alone or arguments.one_by_one),
                profile=arguments.profile,
            )
            figures += run_job(job, Path(scratch) / f"tp{world_size}.job")
    if arguments.json and arguments.device == "cuda":
        value = harness.result(
            "thinker",
            harness.peak_rates(),
            figures,
            layers=arguments.layers,
            distinct_expert_layers=arguments.distinct,
            quantize=arguments.quantize,
        )
        value["hardware"]["count"] = 1 if arguments.alone else max(arguments.ranks)
        harness.write(arguments.json, value)


if __name__ == "__main__":
    main()
