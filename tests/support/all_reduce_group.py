"""Runs `all_reduce_rank.py` on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from mingc.runtime.distributed import process_group


def run_ranks(world_size: int, device: str, **job: Any) -> list[dict[str, Any]]:
    """The result of every rank. `device` is "cpu" or "cuda"; rank r uses GPU r."""
    store = process_group.host_store(timeout_s=60)
    root = Path(__file__).parents[2]
    with ExitStack() as stack:
        processes = []
        # Files, not pipes: a rank that blocks on a full pipe never leaves the group, and the others wait for it.
        stdout, stderr = (
            [stack.enter_context(TemporaryFile("w+")) for _ in range(world_size)] for _ in range(2)
        )
        for rank in range(world_size):
            whole_job = {
                "rank": rank,
                "world_size": world_size,
                "port": store.port,
                "device": f"cuda:{rank}" if device == "cuda" else "cpu",
                **job,
            }
            command = [
                sys.executable,
                str(Path(__file__).with_name("all_reduce_rank.py")),
                json.dumps(whole_job),
            ]
            processes.append(
                subprocess.Popen(
                    command,
                    stdout=stdout[rank],
                    stderr=stderr[rank],
                    env={**os.environ, "PYTHONPATH": str(root)},
                )
            )
        try:
            codes = [process.wait(timeout=180) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, errors in enumerate(stderr):
            errors.seek(0)
            assert codes[rank] == 0, f"codes {codes}, rank {rank}: {errors.read()}"
        results = []
        for output in stdout:
            output.seek(0)
            results.append(json.loads(output.read().splitlines()[-1]))
        return results
