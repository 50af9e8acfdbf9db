"""Runs `mingc` commands, and servers in child processes."""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from restored_logging import restored_logging

from mingc.cli import main

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY / "tests" / "data"
CHECKPOINT = DATA / "tiny-ming"
# Engines of the same graphs are compiled once a machine; a clean clone starts with an empty folder.
CACHE = Path(os.environ.get("MINGC_TEST_CACHE", REPOSITORY / "build" / "engines"))
EAGER = REPOSITORY / "tests" / "support" / "eager"
PARTLY = REPOSITORY / "tests" / "support" / "partly"
_LIMIT_S, _START_S, _END_S = 900, 120, 30  # a command: an export that compiles takes minutes
# What commands keep for the user: engines by default, copies of files of packed bundles.
os.environ["XDG_CACHE_HOME"] = str(CACHE / "user")
# A child process knows the backends of the tests, and packages that are in no environment.
_PATHS = (REPOSITORY, EAGER, PARTLY, *filter(None, [os.environ.get("PYTHONPATH")]))
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, _PATHS))}


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
    """Run `mingc WORDS` to its end in another process."""
    return _finish("mingc", words)


def conformance(*words: object) -> Finished:
    """Run `python -m conformance WORDS` to its end in another process."""
    return _finish("conformance", words)


def _finish(module: str, words: Sequence[object]) -> Finished:
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        env=ENVIRONMENT,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def mingc_here(*words: object) -> Finished:
    """The same in this process, without importing torch once more. `serve` only to be refused: else it never ends."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with restored_logging(), redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            main([*map(str, words)])
        except SystemExit as exited:
            code = exited.code
    assert isinstance(code, int)
    return Finished(code, stdout.getvalue(), stderr.getvalue())


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
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], _START_S)
        url = process.stdout.readline().strip() if readable else f"nothing for {_START_S} s"
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
