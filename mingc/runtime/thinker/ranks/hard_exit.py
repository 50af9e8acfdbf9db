"""Ending this process while one of its threads may be inside a call to the device that never returns."""

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


def hard_exit(error: MingcError, kept: object = None, limit_s: float = EXIT_TIMEOUT_S) -> None:
    """See to it that this process ends with the exit code of `error`, in order within `limit_s`, else as it stands.

    From now on an ordinary end skips the interpreter's teardown: what torch and NCCL do there waits for the device.
    A thread that holds the interpreter's lock until `GIL_MARGIN_S` after the limit leaves exit code 1.

    Args:
        kept: is not freed before the end: freeing engines and memory of ranks waits for the device as well.
    """
    atexit.register(_end, error, kept)
    threading.Thread(target=_end_later, args=(error, limit_s), name="mingc-last-resort", daemon=True).start()
    with contextlib.suppress(
        OSError, ValueError, AttributeError
    ):  # stderr is no file: no stacks to write there
        faulthandler.dump_traceback_later(limit_s + GIL_MARGIN_S, exit=True)


def _end_later(error: MingcError, limit_s: float) -> None:
    time.sleep(limit_s)
    log.critical("the process did not end within %g s and is cut off: %s", limit_s, error.message)
    _end(error)


def _end(error: MingcError, kept: object = None) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a reader that has gone, a stream that is closed
            stream.flush()
    os._exit(error.exit_code)
