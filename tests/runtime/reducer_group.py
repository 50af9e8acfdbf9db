"""Runs `reducer_rank.py` on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mingc.runtime import distributed


def run_ranks(world_size: int, device: str, **job: Any) -> list[dict[str, Any]]:
    """What every rank printed. `device` is "cpu" or "cuda", rank r gets the r-th."""
    store = distributed.host_store(timeout_s=60)
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("reducer_rank.py")),
                json.dumps(
                    {
                        "rank": rank,
                        "world_size": world_size,
                        "port": store.port,
                        "device": f"cuda:{rank}" if device == "cuda" else "cpu",
                        **job,
                    }
                ),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        for rank in range(world_size)
    ]
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=180)
            assert process.returncode == 0, err
            results.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results
