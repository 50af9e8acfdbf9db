"""A server over a fake service in its own process, for signals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CHILD = """
import os, sys
from mingc.console import signals
from fake_service import FakeService
from mingc.server.options import ServeOptions
from mingc.server.app import create_app
from mingc.server.lifecycle import serve

class Slow:
    def __del__(self):
        os.write(1, b"ending\\n")
        os.read(0, 1)

slow = Slow()
signals.SIGNAL_DEBOUNCE_S = float(sys.argv[2])
app = create_app(FakeService(), ServeOptions(port=0, drain_s=float(sys.argv[3]), shutdown_timeout_s=float(sys.argv[1])))
ended_in_order = serve(app, announce=lambda url: print(url, flush=True))
print("in order" if ended_in_order else "cut short", flush=True)
"""


@contextmanager
def child(
    shutdown_timeout_s: float, one_request_s: float = 600.0, drain_s: float = 0.0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in its own process, and its URL; signals within `one_request_s` count as one."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join(
        [str(Path(__file__).parents[1] / "support"), str(root), os.environ.get("PYTHONPATH", "")]
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", CHILD, *map(str, (shutdown_timeout_s, one_request_s, drain_s))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            pytest.fail(f"the server did not start: {process.communicate()[1]}")
        yield process, url
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
