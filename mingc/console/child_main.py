"""Entry point of the `mingc` command as a child process: it shuts down, as by SIGTERM, when its parent dies.

Started as `python -m mingc.console.child_main WORDS` with a pipe as stdin. The parent holds the other end and never
writes to it; the kernel closes it however the parent ends.
"""

from __future__ import annotations

import os
import signal

from mingc.cli import main
from mingc.host.parent_watchdog import watch_pipe

_STDIN = 0


def exit_with_parent() -> None:
    """Send this process a SIGTERM when its stdin closes."""
    watch_pipe(_STDIN, lambda: os.kill(os.getpid(), signal.SIGTERM))


if __name__ == "__main__":
    exit_with_parent()
    main()
