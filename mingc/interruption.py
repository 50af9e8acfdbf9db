"""How a job that has worker processes ends before its time: at once, but tidily."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ending_tidily() -> Iterator[None]:
    """Inside the block SIGINT and SIGTERM kill the worker processes and raise KeyboardInterrupt; main thread only.

    A second signal ends this process as it stands. A signal that was ignored before stays so.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    heard = [number for number, handler in before.items() if handler != signal.SIG_IGN]

    def end(number: int, frame: FrameType | None) -> None:
        for each in heard:
            signal.signal(each, signal.SIG_DFL)
        # A pool waits for what its workers have begun: with a compiler that is minutes.
        for worker in multiprocessing.active_children():
            worker.kill()
        raise KeyboardInterrupt

    for each in heard:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in heard:
            signal.signal(each, before[each])
