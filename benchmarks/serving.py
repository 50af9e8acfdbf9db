"""A server in a child process, measured over HTTP."""

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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def read_ready(child: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    """The document that `mingc serve --json` prints when ready. Raises: SystemExit with its output if it ended."""
    assert child.stdout is not None
    line = child.stdout.readline()
    try:
        ready: dict[str, Any] = json.loads(line)
    except ValueError:  # an error takes several lines
        said = line + child.stdout.read()
        raise SystemExit(f"the server did not start:\n{said}{log.read_text()[-3000:]}") from None
    return ready


@contextmanager
def server(
    artifact: Path,
    caches: Path,
    log: Path,
    options: Sequence[str] = (),
    program: Sequence[str] = ("-m", "mingc.console.child_main"),
) -> Iterator[tuple[str, dict[str, float], int]]:
    """A server as a child: its address, the seconds of its phases, its process id. It ends when this process does.

    `options` are further words of `mingc serve`; `program` are the words of Python that start `mingc`. A compiler, were
    one used, would leave its caches in `caches`.
    """
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    words = [
        "serve",
        str(artifact.resolve()),
        "--port",
        "0",
        "--drain-seconds",
        "0",
        "--json",
        "--no-check-hashes",
        *options,
    ]
    started = time.perf_counter()
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, *program, *words],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        ready = read_ready(child, log)
        phases = {**ready["startup_s"], "whole": round(time.perf_counter() - started, 3)}
        yield ready["url"], phases, child.pid
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()
