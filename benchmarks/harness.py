"""What every benchmark shares: timing on the device, ceilings of the machine, the result file."""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import mingc
from mingc.probe.stopwatch import Stopwatch
from mingc.runtime.engines.cuda_graphs import GraphPool

ROOT = Path(__file__).resolve().parent.parent


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`step` as one CUDA graph, captured the way a server does; it runs twice first."""

    def run() -> tuple[torch.Tensor, ...]:
        step()
        return ()

    device = torch.device("cuda", torch.cuda.current_device())
    graph, _ = GraphPool(device).capture(run, "a benchmark's step")
    return graph


def time_ms(step: Callable[[], object], count: int, warmups: int = 5) -> list[float]:
    """Milliseconds on the device of each of `count` runs of `step`, between events around it."""
    for _ in range(warmups):
        step()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
    ]
    for start, end in events:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def summary(samples: list[float]) -> dict[str, float]:
    """median, p95, min and n of `samples`."""
    ordered = sorted(samples)
    return {
        "median": round(statistics.median(ordered), 4),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 4),
        "min": round(ordered[0], 4),
        "n": len(ordered),
    }


def kernel_table(step: Callable[[], object], repeats: int = 5) -> list[dict[str, Any]]:
    """Kernels of one run of `step` by name: calls and microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    rows = [
        {
            "kernel": row.key[:110],
            "calls": row.count / repeats,
            "us": round(row.self_device_time_total / repeats, 2),
        }
        for row in profile.key_averages()
        if row.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row["us"])


def ceilings() -> dict[str, float]:
    """Copy rate (bytes read and written) and bf16 matrix rate of this device, on random data."""
    measured = Stopwatch(torch.device("cuda")).ceilings(torch.bfloat16)
    return {"copy_tb_s": measured.copy_tb_s, "bf16_tflop_s": measured.matmul_tflop_s}


def compiler_pool(jobs: int) -> ProcessPoolExecutor:
    """Processes that compile engines, `jobs` at a time."""
    return ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_start_compiler
    )


def _start_compiler() -> None:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")


def check_device(parser: argparse.ArgumentParser) -> None:
    """Refuse `--json` before anything is measured when `result` could not describe a device."""
    if not torch.cuda.is_available():
        parser.error("--json describes a CUDA device, and there is none")


def result(
    benchmark: str, ceiling: dict[str, float], figures: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """The result object of docs: who ran what on which machine, ceilings, figures."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    drivers = _words("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "schema": 1,
        "benchmark": benchmark,
        # The variable serves machines that have the files but not the repository, or another state of it.
        "commit": os.environ.get("MINGC_COMMIT")
        or _words("git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", "HEAD"),
        # Of a folder elsewhere only the last name: where this machine keeps its files says nothing.
        "command": shlex.join(
            ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
            + [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
        ),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {
            "gpu": properties.name,
            "count": 1,
            "driver": drivers.partition("\n")[0],  # a line a GPU
            "cpu": platform.processor() or platform.machine(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "mingc": mingc.__version__,
        },
        "ceilings": ceiling,
        "figures": figures,
        **more,
    }


def write(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _words(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
