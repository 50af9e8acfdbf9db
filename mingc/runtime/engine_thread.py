"""A thread that owns one scheduler and one worker and runs step after step."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from mingc.errors import ServeError, WorkerError

_IDLE_WAIT_S = 1.0

log = logging.getLogger("mingc.engine")


class EngineThread(ABC):
    """Base of the two loops.

    Other threads call `post`, whose actions run between two steps, and methods of the subclass that touch the
    scheduler under `_lock`. The lock is never held while an engine runs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._failure: ServeError | None = None
        self._thread = threading.Thread(target=self._run, name=f"mingc-{name}", daemon=True)

    @property
    def is_healthy(self) -> bool:
        return self._failure is None and self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End after the current step and wait for it."""
        with self._lock:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the thread before its next step."""
        with self._lock:
            self._inbox.append(action)
            self._wake.notify()

    def wake(self) -> None:
        """Look again whether there is something to do."""
        with self._lock:
            self._wake.notify()

    def fail(self, error: ServeError) -> None:
        """Serve nobody any more: running and later requests get `error`. Callable from any thread."""
        with self._lock:
            self._failure = self._failure or error
            self._wake.notify()

    @abstractmethod
    def _step(self) -> bool:
        """Run one step; False when there was nothing to do."""

    @abstractmethod
    def _fail_all(self, error: ServeError) -> None:
        """Tell every request and forget it."""

    def _check_healthy(self) -> None:
        """Raises: the error that stopped the thread, or WorkerError when it is not running."""
        if self._failure is not None:
            raise self._failure
        if self._is_stopping:
            raise WorkerError(f"the {self._name} is stopping")

    def _run(self) -> None:
        is_busy = True
        while True:
            with self._lock:
                if not is_busy and not self._inbox and not self._is_stopping:
                    self._wake.wait(_IDLE_WAIT_S)
                actions = list(self._inbox)
                self._inbox.clear()
                failure = self._failure
                if self._is_stopping:
                    break
            try:
                for action in actions:
                    action()
                if failure is not None:
                    self._fail_all(failure)
                    is_busy = False
                else:
                    is_busy = self._step()
            except Exception as error:
                # Not one request's engine call (those are caught where they happen): the bookkeeping is unsound.
                log.exception("the %s loop broke", self._name)
                self.fail(WorkerError(f"the {self._name} failed: {error}"))
                is_busy = True
        self._fail_all(self._failure or WorkerError(f"the {self._name} was stopped"))
