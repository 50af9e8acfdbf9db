"""`mingc serve` as a child process of a benchmark, and the phases of its start. Torch is not needed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mingc.console.serve_child import serve_child

READY = "from the start of the process"
# The command of `serve` for artifacts of random weights: answers have texts that somebody would say.
PROSE_SERVER = (sys.executable, str(Path(__file__).with_name("prose_server.py")))
_END_S = 30


@dataclass(frozen=True)
class Served:
    """A server that is ready. `start_s`: seconds of the phases of its start, and of the whole (`READY`)."""

    url: str
    start_s: dict[str, float]
    process: subprocess.Popen[bytes]


@contextmanager
def serve(artifact: Path, more: str, log: Path, command: Sequence[str] = ()) -> Iterator[Served]:
    """Serve `artifact`; stderr goes to `log`. `more`: further words. `command`: as of `serve_child`."""
    words = [str(artifact), "--port", "0", "--json", "--drain-seconds", "0", *shlex.split(more)]
    began = time.perf_counter()
    with (
        log.open("wb") as errors,
        serve_child(words, stop_s=_END_S, log=errors, command=command) as (process, out),
    ):
        line = out.readline()
        try:
            ready = json.loads(line)
            url = ready["url"]
        except (ValueError, KeyError):
            said = line + out.read() + log.read_bytes()[-3000:]
            raise SystemExit(f"the server did not start:\n{said.decode(errors='replace')}") from None
        whole_s = round(time.perf_counter() - began, 3)
        yield Served(url, ready["startup_s"] | {READY: whole_s}, process)
