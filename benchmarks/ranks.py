"""Run a measuring script once a rank: starts itself as one process group and returns the figures of rank 0."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mingc.runtime.distributed import process_group

Figures = list[dict[str, Any]]


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run_ranks` passes to rank processes; `rank` is None in the process started by the user."""
    for name in ("--rank", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)


def write_figures(arguments: argparse.Namespace, figures: Figures) -> None:
    """In a rank process: write the figures, if it is rank 0."""
    if arguments.rank == 0:
        arguments.figures.write_text(json.dumps(figures), encoding="utf-8")


def run_ranks(words: Sequence[str], world_size: int, *, timeout_s: float) -> Figures:
    """Run this script with `words` as `world_size` processes and return their figures. A single process gets port 0: no
    group.

    Raises: SystemExit when one of them fails; subprocess.TimeoutExpired.
    """
    store = process_group.host_store(timeout_s=120) if world_size > 1 else None
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "figures.json"
        command = [sys.executable, sys.argv[0], *words, "--port", str(store.port if store else 0)]
        command += ["--figures", str(path)]
        processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(world_size)]
        try:
            failed = [rank for rank, process in enumerate(processes) if process.wait(timeout_s)]
        finally:
            for process in processes:
                process.kill()
        if failed:
            raise SystemExit(f"ranks {failed} of {world_size} failed")
        figures: Figures = json.loads(path.read_text(encoding="utf-8"))
    return figures
