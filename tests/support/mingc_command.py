"""Runs `mingc` commands and servers in child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY / "tests" / "data"
CHECKPOINT = DATA / "tiny-ming"
# Engines of the same graphs are compiled once a machine; a clean clone starts with an empty folder.
CACHE = Path(os.environ.get("MINGC_TEST_CACHE", REPOSITORY / "build" / "engines"))
EAGER = REPOSITORY / "tests" / "support" / "eager"
_END_S = 30
# A child process knows the backend `eager` of the tests.
_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(EAGER)))}


@dataclass(frozen=True)
class Finished:
    """Exit code and output of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)


def mingc(*words: object) -> Finished:
    """Run `mingc WORDS` to its end in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "mingc", *map(str, words)],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1500,
        env=_ENVIRONMENT,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Server:
    """A served artifact: its process and base URL."""

    process: subprocess.Popen[str]
    url: str


@contextmanager
def serving(artifact: Path, *options: object) -> Iterator[Server]:
    """`mingc serve` on a port of the system's choice; ended by SIGTERM when the block is left."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mingc",
            "serve",
            str(artifact),
            "--port",
            "0",
            "--drain-seconds",
            "0",
            *map(str, options),
        ],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=_ENVIRONMENT,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), f"the server said {url!r} and ended with {process.poll()}"
        yield Server(process, url)
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
