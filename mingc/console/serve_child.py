"""`mingc serve` in a child process, for commands that measure or question a server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from mingc.python_module import module_command, module_environment


@contextmanager
def serve_child(
    words: Sequence[str], *, stop_s: float, log: IO[bytes] | None = None, command: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Run `mingc serve WORDS` and yield the process with its stdout; it ends with the block, or with this process.

    `stop_s`: how long it may take to end before it is killed. `log`: its stderr; None: that of this process.
    `command`: a program that takes the words of `mingc` and ends with its stdin; empty: `mingc`.
    """
    child = subprocess.Popen(
        [*(command or module_command("mingc.console.child_main")), "serve", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        # Keys would refuse the requests, which have none.
        env={name: value for name, value in module_environment().items() if name != "MINGC_API_KEYS"},
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        yield child, child.stdout
    finally:
        child.terminate()
        try:
            child.wait(stop_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdin.close()
        child.stdout.close()
