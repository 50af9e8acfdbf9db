"""The `mingc` command for a parent that may die: it is told to end, as by SIGTERM, when its stdin closes.

Started as `python -m mingc.console.child_main WORDS` with a pipe as stdin whose other end the parent holds, and
never writes to:
the kernel closes it however the parent ends.
"""

from __future__ import annotations

import os
import signal
import threading

from mingc.cli import main

_STDIN = 0


def exit_with_parent() -> None:
    """From now on this process gets a SIGTERM when its stdin closes."""
    threading.Thread(target=_wait_for_the_end, name="mingc-tether", daemon=True).start()


def _wait_for_the_end() -> None:
    os.read(_STDIN, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    exit_with_parent()
    main()
