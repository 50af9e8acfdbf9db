"""A server as a child process, for measuring it through HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def server(
    artifact: Path, caches: Path, log: Path, options: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, float], int]]:
    """A server as a child: its address, the seconds of its phases, its process id.

    `options` are further words of `mingc serve`. A compiler, were one used, would leave its caches in `caches`.
    """
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    words = ["serve", str(artifact), "--port", "0", "--json", "--no-check-hashes", *options]
    started = time.perf_counter()
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "mingc", *words],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise SystemExit(f"the server did not start:\n{log.read_text()[-3000:]}")
        ready = json.loads(line)
        phases = {**ready["startup_s"], "whole": round(time.perf_counter() - started, 3)}
        yield ready["url"], phases, child.pid
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
