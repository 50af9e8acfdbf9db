"""Engine thread: base of the encoder, thinker and talker loops, which run step after step."""

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
    """Runs `_step` in a thread until it is stopped or fails.

    Other threads call `post`, whose actions run between steps, and methods of the subclass that hold `_lock`. The lock
    is never held while an engine runs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_woken = False  # since the last wait
        self._is_stopping = False
        self._failure: ServeError | None = None
        self._thread = threading.Thread(target=self._run, name=f"mingc-{name}", daemon=True)

    @property
    def is_healthy(self) -> bool:
        return self._failure is None and self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop after the current step and wait for it."""
        with self._lock:
            self._is_stopping = True
            self._notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the thread before its next step."""
        with self._lock:
            self._inbox.append(action)
            self._notify()

    def wake(self) -> None:
        """Wake the thread to check for work."""
        with self._lock:
            self._notify()

    def fail(self, error: ServeError) -> None:
        """Fail all running and later requests with `error`. Callable from any thread."""
        with self._lock:
            self._failure = self._failure or error
            self._notify()

    @property
    @abstractmethod
    def held(self) -> dict[str, int]:
        """Resources that requests hold at present, by kind: all 0 without requests."""

    @abstractmethod
    def _step(self) -> bool:
        """Run one step. Returns False if there was nothing to do."""

    @abstractmethod
    def _fail_all(self, error: ServeError) -> None:
        """Fail and remove every request."""

    def _idle_s(self) -> float:
        """Seconds until there may be work to do without a call of `_notify`. Called under the lock."""
        return _IDLE_WAIT_S

    def _notify(self) -> None:
        """Wake the thread, now or when it next waits. Call it under the lock."""
        self._is_woken = True
        self._wake.notify()

    def _check_healthy(self) -> None:
        """Raise the error that stopped the thread, or WorkerError when it is stopping."""
        if self._failure is not None:
            raise self._failure
        if self._is_stopping:
            raise WorkerError(f"the {self._name} is stopping", status=503)

    def _run(self) -> None:
        is_busy = True
        while True:
            with self._lock:
                if not is_busy and not self._is_woken:
                    self._wake.wait(min(_IDLE_WAIT_S, self._idle_s()))
                self._is_woken = False
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
                # `_step` handles failed engine calls per request, so the bookkeeping itself is broken.
                log.exception("the %s loop failed", self._name)
                self.fail(WorkerError(f"the {self._name} failed: {error}"))
                is_busy = True
        self._fail_all(self._failure or WorkerError(f"the {self._name} was stopped", status=503))
