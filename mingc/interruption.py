"""How a command ends before its time: at once, but tidily."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_REQUEST_S = 1.0  # `timeout` signals a process and its group: what comes again so soon is one request


@contextmanager
def ending_tidily() -> Iterator[None]:
    """Inside the block SIGINT and SIGTERM kill the worker processes and raise KeyboardInterrupt; main thread only.

    A second signal ends this process as it stands, unless it comes so soon that it belongs to the first: also behind
    the block, for what is removed when the interpreter ends. A signal that was ignored before stays so.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    heard = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    first: float | None = None

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is not None:
            if time.monotonic() - first < ONE_REQUEST_S:
                return
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        first = time.monotonic()
        # A pool waits for what its workers have begun: with a compiler that is minutes.
        for worker in multiprocessing.active_children():
            worker.kill()
        raise KeyboardInterrupt

    for each in heard:
        signal.signal(each, end)
    try:
        yield
    finally:
        if first is None:
            for each in heard:
                signal.signal(each, before[each])
