"""Creates a thinker worker from an artifact; on CUDA it also measures the latency of every step size."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from mingc.artifacts.manifest import Manifest
from mingc.artifacts.parameters import ThinkerParameters
from mingc.kernels.sample_tokens import NUM_COLUMNS
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.thinker.prefill_policy import StepLatencyModel
from mingc.runtime.thinker.step import DecodeStep, PrefillStep
from mingc.runtime.thinker.step_options import DEFAULT_STEPS, StepOptions
from mingc.runtime.thinker.worker import ThinkerWorker


def create_worker(
    stage: LoadedStage,
    manifest: Manifest,
    *,
    num_pages: int,
    device: torch.device,
    options: StepOptions = DEFAULT_STEPS,
) -> ThinkerWorker:
    """Create the worker of this rank. A collective."""
    parameters = manifest.parameters_of(stage.name, ThinkerParameters)
    worker = ThinkerWorker(
        stage,
        parameters,
        num_pages=num_pages,
        device=device,
        options=options,
        keeps_rows=manifest.graph.consumer(stage.name, "hidden") is not None,
    )
    if device.type == "cuda":
        worker.latency_model = measure_step_latencies(worker)
    return worker


def measure_step_latencies(worker: ThinkerWorker) -> StepLatencyModel:
    """Time every size. A collective; writes to KV page 0 only.

    Tokens are random, because equal tokens would be routed to few experts.
    """
    sizes = sorted({*worker.chunks, *worker.two_batch_sizes})
    ids = np.random.default_rng(0).integers(0, worker.vocab_size, max(worker.max_batch, *sizes))

    def chunk(size: int) -> Callable[[], object]:
        step = PrefillStep(
            input_ids=ids[:size],
            positions=np.tile(np.arange(size), (3, 1)),
            embed_kind=np.zeros(size, np.int64),
            embeds=None,
            counts=np.array([size]),
            starts=np.zeros(1, np.int64),
            pages=np.zeros((1, -(-size // worker.page_size)), np.int64),
            slots=np.zeros(1, np.int64),
        )
        return lambda: worker.prefill(step)

    def decode(size: int) -> Callable[[], object]:
        step = DecodeStep(
            input_ids=ids[:size],
            positions=np.zeros(size, np.int64),
            lengths=np.ones(size, np.int64),
            pages=np.zeros((size, 1), np.int64),
            slots=np.zeros(size, np.int64),
            sampling=np.zeros((size, NUM_COLUMNS)),
        )
        return lambda: (worker.launch_decode if worker.samples_on_device else worker.decode)(step)

    return StepLatencyModel(
        chunks=tuple((size, _call_ms(chunk(size), worker.device)) for size in sizes),
        decodes=tuple((size, _call_ms(decode(size), worker.device)) for size in sorted(worker.batches)),
    )


def _call_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of the faster of two calls, with host time, after one warm-up call."""

    def run_and_wait() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def elapsed_ms() -> float:
        started = time.perf_counter()
        run_and_wait()
        return 1e3 * (time.perf_counter() - started)

    run_and_wait()
    return min(elapsed_ms(), elapsed_ms())
