"""Shared by all benchmarks: device timing, peak rates of the machine, and result files with their provenance."""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import re
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
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_commit = ""  # set by `parse_args`


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`step` as one CUDA graph, captured as a server captures it, after two warm-up runs."""

    def run() -> tuple[torch.Tensor, ...]:
        step()
        return ()

    device = torch.device("cuda", torch.cuda.current_device())
    graph, _ = GraphPool(device).capture(run, "a benchmark's step")
    return graph


def time_ms(step: Callable[[], object], count: int, warmups: int = 5) -> list[float]:
    """Device milliseconds of each of `count` runs of `step`, measured by CUDA events."""
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
    """Median, p95, minimum and count of `samples`."""
    ordered = sorted(samples)
    return {
        "median": round(statistics.median(ordered), 4),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 4),
        "min": round(ordered[0], 4),
        "n": len(ordered),
    }


def kernel_table(step: Callable[[], object], repeats: int = 5) -> list[dict[str, Any]]:
    """Kernels of one run of `step`, longest first: name, calls, microseconds."""
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


def peak_rates() -> dict[str, float]:
    """Copy rate (bytes read and written) and bf16 matmul rate of this device, measured on random data."""
    measured = Stopwatch(torch.device("cuda")).peak_rates(torch.bfloat16)
    return {"copy_tb_s": measured.copy_tb_s, "bf16_tflop_s": measured.matmul_tflop_s}


def compiler_pool(jobs: int) -> ProcessPoolExecutor:
    """A pool of `jobs` processes that compile engines."""
    return ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_start_compiler
    )


def _start_compiler() -> None:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments of a script that has `--json`, and add `--commit`.

    With `--json` the script ends before it measures if device or commit are unknown: every result has its
    provenance.
    """
    global _commit
    parser.add_argument("--commit", help="commit that is measured, where the checkout is no git repository")
    given = parser.parse_args()
    if given.json:
        if not torch.cuda.is_available():
            parser.error("--json needs a CUDA device, which the result describes")
        _commit = given.commit or _output("git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", "HEAD")
        if not _COMMIT.fullmatch(_commit):
            parser.error(f"--json needs the measured commit, found {_commit!r}: pass --commit HASH")
    return given


def result(
    benchmark: str,
    rates: dict[str, float] | None,
    figures: list[dict[str, Any]],
    *,
    gpus: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """The result document: provenance, hardware, clocks and peak rates of this run, figures.

    `rates` are those of `peak_rates`; they are measured now when empty. None: the device is a server's.
    `gpus`: how many were used.
    """
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "schema": 1,
        "benchmark": benchmark,
        "commit": _commit,
        # Paths outside the repository are reduced to their last name: where this machine keeps files is irrelevant.
        "command": shlex.join(
            ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
            + [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
        ),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {
            "gpu": properties.name,
            "count": gpus,
            "driver": _query_gpu("driver_version"),
            "cpu": platform.processor() or platform.machine(),
        },
        "clocks": {
            "sm": _query_gpu("clocks.sm"),
            "sm_max": _query_gpu("clocks.max.sm"),
            "memory": _query_gpu("clocks.mem"),
            "power_limit": _query_gpu("power.limit"),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "mingc": mingc.__version__,
        },
        **({} if rates is None else {"peak_rates": rates or peak_rates()}),
        "figures": figures,
        **more,
    }


def write(path: Path, value: dict[str, Any]) -> None:
    """Write a result document. Raises: ValueError when it records no commit or no command."""
    if not _COMMIT.fullmatch(value.get("commit") or ""):
        raise ValueError(f"{path.name}: a result needs the measured commit, found {value.get('commit')!r}")
    if not value.get("command"):
        raise ValueError(f"{path.name}: a result needs the command that measured it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _query_gpu(field: str) -> str:
    """A field of nvidia-smi for the first GPU, with its unit; empty where nvidia-smi is missing."""
    return _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader").partition("\n")[0].strip()


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
