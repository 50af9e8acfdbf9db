"""Parent watchdog: ends this process when its parent dies, however that happens.

A daemon thread blocks on a file descriptor that the kernel closes together with the parent.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable


def exit_now() -> None:
    """End the process without cleanup: a thread may be blocked in a collective or a compiler."""
    os._exit(1)


def watch_pipe(fd: int, on_exit: Callable[[], None] = exit_now) -> None:
    """Call `on_exit` when the pipe `fd` is closed. The parent holds the write end and never writes to it."""

    def wait() -> None:
        os.read(fd, 1)
        on_exit()

    _start(wait)


def watch_pool_owner() -> None:
    """End this process, a worker of a multiprocessing pool, when the owner of the pool dies.

    A killed owner cannot shut the workers down; without this they would wait for tasks forever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is not a process started by multiprocessing"

    def wait() -> None:
        parent.join()
        exit_now()

    _start(wait)


def _start(wait: Callable[[], None]) -> None:
    threading.Thread(target=wait, name="mingc-parent-watchdog", daemon=True).start()
