"""Time to first token of a prompt, for `thinker.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import harness
import thinker_engines as engines
import torch
from thinker_rank import Figure, Rank

PEAK_TFLOPS = 785  # large bf16 GEMMs on an H200
_REPEATS = 5


def prefill_problem(prompt: int, chunks: Sequence[int]) -> str | None:
    """Why a prompt cannot be prefilled in chunks of these sizes; None if it can."""
    fitting = [size for size in chunks if size <= prompt]
    if not fitting:
        return f"--prompts {prompt}: every size of --chunks is larger; add a chunk of at most {prompt} tokens"
    if prompt % max(fitting):
        return f"--prompts {prompt} is not a multiple of its chunk size, {max(fitting)}"
    return None


def prefill(own: Rank, prompt: int) -> list[Figure]:
    """Time a prompt alone on the device, with all its chunks in one CUDA graph."""
    setup, job = own.setup, own.job
    chunk = max(size for size in setup.chunks if size <= prompt)
    tables = own.stage["prefill_attention"].spec.input("page_table")
    table = own.page_table(1, prompt)
    table = torch.cat([table, table.new_zeros(int(tables.shape[0]) - 1, table.shape[1])])
    chunks = []
    for start in range(0, prompt, chunk):
        inputs = own.inputs(chunk, 0)
        place = torch.arange(start, start + chunk, device=own.device)
        inputs["positions"] = place.expand(3, -1).contiguous()
        inputs["page_table"] = table
        inputs["segment"], inputs["index"] = torch.zeros_like(place), place
        inputs["last"] = torch.tensor([chunk - 1], device=own.device)
        chunks.append(inputs)
    together = 2 if job.two_batch_overlap else 1
    groups = [chunks[first : first + together] for first in range(0, len(chunks), together)]

    tokens = torch.zeros(1, dtype=torch.int64, device=own.device)

    def run() -> None:
        for group in groups:
            logits = own.layers.prefill(*group)[0]
        tokens.copy_(logits.argmax(-1))

    replay = own.capture(run)
    samples = []
    for _ in range(_REPEATS):
        own.synchronize()
        started = time.perf_counter()
        replay()
        tokens.item()
        samples.append(1e3 * (time.perf_counter() - started))
    samples = own.slowest(samples[1:])
    same = {
        "prompt": prompt,
        "chunk": chunk,
        "two_batch_overlap": job.two_batch_overlap and len(chunks) > 1,
        "ranks": setup.world_size,
        "alone": job.is_alone,
    }
    median = statistics.median(samples)
    flops = sum(engines.chunk_flops(setup, chunk, start) for start in range(0, prompt, chunk))
    rate = flops / median / 1e9
    is_profiled = job.profile and prompt == job.prompts[0]
    kernels = harness.kernel_table(replay)[:25] if is_profiled else []
    return [
        {"name": "ttft_ms", **same, **harness.summary(samples), "unit": "ms"},
        {
            "name": "prefill_tflops",
            **same,
            "median": round(rate, 1),
            "unit": "TFLOP/s",
            "percent_of_peak": round(100 * rate / PEAK_TFLOPS, 1),
        },
        *({"name": "prefill_kernel_us", **same, **each, "unit": "us per prompt"} for each in kernels),
        {"name": "prefill_tok_per_s", **same, "median": round(1e3 * prompt / median), "unit": "tokens/s"},
    ]
