"""Signal handling: fast, clean shutdown of a command."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal is gone; nohup has it ignored
_AGAIN_S = 0.05
_LONGEST_IMPORT_S = 10.0  # torch takes 1 to 2 s, more from a cold disk
SIGNAL_DEBOUNCE_S = 1.0  # signals within it are one request: `timeout` signals a process and its group
CLEANING_LIMIT_S = 30.0
INTERRUPTED = 130  # exit code of a command that ends by Ctrl-C or SIGTERM


@contextmanager
def clean_shutdown() -> Iterator[None]:
    """Inside the block, SIGINT, SIGTERM and SIGHUP kill worker processes and raise KeyboardInterrupt. Main thread only.

    During an import they are deferred to its end, and raised again where a finalizer swallowed the exception. If the
    block has not ended CLEANING_LIMIT_S later, the process exits as it stands. Later signals: see
    `exit_on_later_signal`. A signal that is ignored stays ignored.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    is_signalled, first, last = False, 0.0, int(signal.SIGINT)
    waiting: list[threading.Timer] = []

    def start(timer: threading.Timer) -> None:
        timer.daemon = True
        timer.start()
        waiting[:] = [*(each for each in waiting if each.is_alive()), timer]

    def send_again(number: int) -> None:
        start(threading.Timer(_AGAIN_S, signal.pthread_kill, (threading.get_ident(), number)))

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal is_signalled, first, last
        first, last = first or time.monotonic(), number
        if _is_importing(frame) and time.monotonic() - first < _LONGEST_IMPORT_S:
            # An exception during an import can be lost, and torch's native code may abort the process.
            send_again(number)
            return
        is_signalled = True
        exit_on_later_signal()
        # A pool would wait for the running tasks of its workers: minutes for a compiler.
        for worker in multiprocessing.active_children():
            worker.kill()
        # An interrupt can come just before a `with` statement has the lock that it took: who needs it waits for ever.
        start(threading.Timer(CLEANING_LIMIT_S, os._exit, (INTERRUPTED,)))
        raise KeyboardInterrupt

    def take_unraisable(lost: UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            hook(lost)
            return
        # Finalizers and callbacks of weak references drop exceptions: the command would continue to its end.
        for number in _handled():
            signal.signal(number, end)
        send_again(last)  # another one may be ignored, as SIGINT is in a shell's background jobs

    hook, sys.unraisablehook = sys.unraisablehook, take_unraisable
    for number in _handled():
        signal.signal(number, end)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for each in waiting:
            each.cancel()
        if is_signalled:
            # If an interrupt has left code that was run from a string (dataclasses are created by such code), CPython
            # regards it as unhandled, and `python -m` then ends by SIGINT whatever the exit code. Running another
            # string resets that (run_eval_code_obj in Python/pythonrun.c).
            exec("")
        for number, handler in before.items():
            if signal.getsignal(number) is end and not is_signalled:
                signal.signal(number, handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


@dataclass(frozen=True, slots=True)
class _LaterSignals:
    """The handler of a process that got its first signal at `first` (`time.monotonic`)."""

    first: float

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self.first >= SIGNAL_DEBOUNCE_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def exit_on_later_signal() -> None:
    """Make the next signal end this process at once, without cleanup.

    A signal that comes within SIGNAL_DEBOUNCE_S counts as the first one. While the interpreter shuts down signals are
    ignored: it restores their default actions, and the exit code would be lost.
    """
    later = _LaterSignals(time.monotonic())
    for number in _handled():
        signal.signal(number, later)


# This module is imported before a command begins, so exit handlers that the command registers are called earlier.
@atexit.register
def _ignore_signals() -> None:
    for number in SIGNALS:
        if isinstance(signal.getsignal(number), _LaterSignals):
            signal.signal(number, signal.SIG_IGN)


def _handled() -> list[signal.Signals]:
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
