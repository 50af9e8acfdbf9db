"""Step watchdog: detects a step that does not finish, in a host call or on the device after the call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_CHECKS_PER_TIMEOUT = 10


class StepWatchdog:
    """Calls `on_timeout` once, on a separate thread, with the problem, when a step takes longer than `timeout_s`.

    Steps are launched asynchronously, so on CUDA a step records an event after its work. Once the event has passed, the
    next step records another one. If an event is `timeout_s` old and has not passed, the device is stuck.
    """

    def __init__(self, device: torch.device, timeout_s: float, on_timeout: Callable[[str], None]) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._call_start: float | None = None
        self._event: tuple[torch.cuda.Event, float] | None = None
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="mingc-step-watchdog", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch the call of a step in the block."""
        self._call_start = time.monotonic()
        try:
            yield
            if self._device.type == "cuda":
                self._record_event()
        finally:
            self._call_start = None

    def close(self) -> None:
        """Stop watching."""
        self._is_closed.set()

    def _record_event(self) -> None:
        if self._event is None or self._event[0].query():  # type: ignore[no-untyped-call]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._event = event, time.monotonic()

    def _run(self) -> None:
        while not self._is_closed.wait(self._timeout_s / _CHECKS_PER_TIMEOUT):
            problem = self._find_problem()
            if problem is not None:
                self._on_timeout(problem)
                return

    def _find_problem(self) -> str | None:
        latest = time.monotonic() - self._timeout_s
        call_start, recorded = self._call_start, self._event
        if call_start is not None and call_start < latest:
            return f"a step of the thinker did not return within {self._timeout_s:g} s"
        if recorded is None or recorded[1] >= latest:
            return None
        try:
            has_passed = recorded[0].query()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            return f"the device failed: {error}"
        return None if has_passed else f"a step of the thinker did not end within {self._timeout_s:g} s"
