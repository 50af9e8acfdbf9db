"""One rank of the thinker benchmark: its engines over random weights and pages, timed decode steps and layers.

Used by `thinker.py` (decode) and `thinker_prefill.py` (prefill).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import thinker_engines as engines
import torch
import torch.distributed as dist
from thinker_routing import experts_read
from torch import Tensor

from mingc.export.layers.decoder import PAGE_SIZE
from mingc.kernels.dispatch import plain_torch
from mingc.kernels.sample_tokens import NUM_COLUMNS, NUM_RULES
from mingc.runtime.distributed.all_reduce import AllReduce, create_all_reduce
from mingc.runtime.distributed.process_group import broadcast_from_rank0_
from mingc.runtime.thinker.layers import ThinkerLayers

PEAK_TB_S = 4.27  # measured device copy of an H200, for the roofline
OUTPUT_TOKENS = 152
SAMPLING_RULES = (0.7, 50.0, 0.95, 0.02, 1.05)  # temperature, top_k, top_p, min_p, repetition penalty
Figure = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Configuration of one rank process.

    Attributes:
        folder: compiled engines.
        is_alone: run one rank's share without the other ranks.
        two_batch_overlap: run prefill chunks in pairs, the all-reduce of one overlapping with the layers of the other.
    """

    setup: engines.Setup
    folder: str
    prompts: tuple[int, ...]
    distinct: int | None
    is_alone: bool
    two_batch_overlap: bool
    profile: bool


class Rank:
    """One rank with its weights and KV pages."""

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
        """Page table (B, P) int32 of `batch` requests of `tokens` tokens, pages in random order."""
        used = -(-tokens // PAGE_SIZE)
        generator = torch.Generator().manual_seed(batch)
        pages = 1 + torch.randperm(self.num_pages - 1, generator=generator)[: batch * used]
        table = torch.zeros(batch, self.setup.max_model_len // PAGE_SIZE, dtype=torch.int32)
        table[:, :used] = pages.view(batch, used)
        return table.to(self.device)

    def inputs(self, tokens: int, first: int) -> dict[str, Tensor]:
        """Inputs of `embed` for `tokens` random text tokens at position `first`."""
        device = self.device
        return {
            "input_ids": torch.randint(0, self.config.vocab_size, (tokens,), device=device),
            "embeds": torch.zeros(tokens, self.config.hidden_size, dtype=self.dtype, device=device),
            "embed_kind": torch.zeros(tokens, dtype=torch.int64, device=device),
            "positions": torch.full((3, tokens), first, device=device),
        }

    def decode(self, batch: int, prompt: int) -> list[Figure]:
        """Time the output tokens of `batch` requests after prompts of `prompt` tokens."""
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
        sampled = [] if self.job.is_alone else self.sampled(batch, prompt, inputs, statistics.median(samples))
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
            {"name": "experts_read", **same, "median": round(read_experts, 1), "unit": "per layer",
             "expected": round(engines.expected_experts(self.config, batch), 1)},
            *sampled,
            *({"name": "kernel_us", **same, **kernel, "unit": "us a step"} for kernel in kernels),
        ]  # fmt: skip
        if self.setup.world_size > 1 and not self.job.is_alone:
            share = torch.zeros(batch, self.config.hidden_size, dtype=self.dtype, device=self.device)
            count = 2 * self.config.num_layers

            def all_reduces() -> None:
                for _ in range(count):
                    self.all_reduce.all_reduce_(share)

            all_reduce_ms = statistics.median(self.slowest(self.time_ms(self.capture(all_reduces), 20)))
            figures.append(
                {"name": "all_reduce_us", **same, "median": round(1e3 * all_reduce_ms / count, 2), "unit": "us",
                 "percent_of_step": round(100 * all_reduce_ms / step_ms, 1), "choice": self.all_reduce.plan.reason}
            )  # fmt: skip
        return figures

    def sampled(self, batch: int, prompt: int, inputs: dict[str, Tensor], greedy_ms: float) -> list[Figure]:
        """Time the same step with every sampling rule, in turns with the greedy step."""
        sampling = torch.zeros(batch, NUM_COLUMNS, device=self.device)
        sampling[:, : NUM_RULES - 1] = torch.tensor(SAMPLING_RULES, device=self.device)
        sampling[:, NUM_RULES - 1] = torch.rand(batch, device=self.device)
        seen = torch.rand(batch, self.config.vocab_size, device=self.device) < 0.01

        def step() -> None:
            logits = self.layers.decode(inputs).contiguous()
            tokens = self.stage["sample"].run(logits=logits, sampling=sampling, seen=seen)["tokens"]
            broadcast_from_rank0_(tokens)
            inputs["input_ids"].copy_(tokens)
            inputs["positions"].add_(1)
            inputs["lengths"].add_(1)

        inputs["positions"].fill_(prompt)
        inputs["lengths"].fill_(prompt + 1)
        replay = self.capture(step)
        samples: list[float] = []
        for _ in range(2):  # the first pass warms up
            inputs["positions"].fill_(prompt)
            inputs["lengths"].fill_(prompt + 1)
            samples = self.slowest(self.time_ms(replay, OUTPUT_TOKENS))
        found = harness.summary(samples)
        return [
            {"name": "sampled_step_ms", "batch": batch, "prompt": prompt, "ranks": self.setup.world_size,
             "rules": list(SAMPLING_RULES), **found, "unit": "ms",
             "of_greedy_step": round(found["median"] / greedy_ms, 4)}
        ]  # fmt: skip

    def layer(self, batch: int, prompt: int) -> list[Figure]:
        """Time one expert layer in plain eager torch."""
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
        """Capture `run` as one CUDA graph; on the CPU return it unchanged."""
        if self.device.type == "cpu":
            return run
        self.synchronize()
        return harness.capture(run).replay

    def time_ms(self, run: Callable[[], None], count: int) -> list[float]:
        """Milliseconds of each of `count` consecutive runs."""
        if self.device.type == "cuda":
            return harness.time_ms(run, count, warmups=0)
        samples = []
        for _ in range(count):
            started = time.perf_counter()
            run()
            samples.append(1e3 * (time.perf_counter() - started))
        return samples

    def synchronize(self) -> None:
        """Wait for the device and for the other ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    def slowest(self, samples: list[float]) -> list[float]:
        """The largest value of each sample over all ranks."""
        if not dist.is_initialized():
            return samples
        times = torch.tensor(samples, dtype=torch.float64, device=self.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        slowest: list[float] = times.tolist()
        return slowest
