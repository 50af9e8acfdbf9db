"""Hard exit: ends this process although one of its threads may be in a device call that never returns."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time

from mingc.errors import MingcError

EXIT_TIMEOUT_S = 30.0
GIL_MARGIN_S = 5.0

log = logging.getLogger("mingc")


def hard_exit(error: MingcError, keep_alive: object = None, timeout_s: float = EXIT_TIMEOUT_S) -> None:
    """Guarantee that this process ends with the exit code of `error`: by itself within `timeout_s`, else by force.

    Returns at once. From now on a normal exit skips the interpreter's teardown, because the teardown of torch and NCCL
    waits for the device. If a thread still holds the GIL `GIL_MARGIN_S` after the timeout, the exit code is 1.

    Args:
        keep_alive: not freed before the exit, because freeing engines and rank memory waits for the device.
    """
    atexit.register(_exit, error, keep_alive)
    threading.Thread(target=_exit_later, args=(error, timeout_s), name="mingc-hard-exit", daemon=True).start()
    # Without a stderr file there is nowhere to write the stacks to.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.dump_traceback_later(timeout_s + GIL_MARGIN_S, exit=True)


def _exit_later(error: MingcError, timeout_s: float) -> None:
    time.sleep(timeout_s)
    log.critical("the process did not exit within %g s and is ended by force: %s", timeout_s, error.message)
    _exit(error)


def _exit(error: MingcError, keep_alive: object = None) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(error.exit_code)
