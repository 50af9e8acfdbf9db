"""Notices a step of the ranks that does not end: in a call on the host, or on the device after the call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_CHECKS = 10  # in the limit


class StepWatchdog:
    """Calls `on_stuck` once, on a thread of its own, when a step takes longer than `limit_s`.

    A step that is launched has not ended when its call returns. So on CUDA an event is recorded behind a step, the
    next one when that has been passed: one event that is `limit_s` old and not passed is a device that stands still.

    Args:
        limit_s: seconds.
        on_stuck: gets what is wrong.
    """

    def __init__(self, device: torch.device, limit_s: float, on_stuck: Callable[[str], None]) -> None:
        self._device = device
        self._limit_s = limit_s
        self._on_stuck = on_stuck
        self._inside_since: float | None = None
        self._marked: tuple[torch.cuda.Event, float] | None = None
        self._is_ended = threading.Event()
        threading.Thread(target=self._run, name="mingc-step-watch", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the call of a step."""
        self._inside_since = time.monotonic()
        try:
            yield
            if self._device.type == "cuda":
                self._mark()
        finally:
            self._inside_since = None

    def close(self) -> None:
        """Watch no more."""
        self._is_ended.set()

    def _mark(self) -> None:
        if self._marked is None or self._marked[0].query():  # type: ignore[no-untyped-call]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._marked = event, time.monotonic()

    def _run(self) -> None:
        while not self._is_ended.wait(self._limit_s / _CHECKS):
            problem = self._find()
            if problem is not None:
                self._on_stuck(problem)
                return

    def _find(self) -> str | None:
        latest = time.monotonic() - self._limit_s
        inside_since, marked = self._inside_since, self._marked
        if inside_since is not None and inside_since < latest:
            return f"a step of the thinker did not return within {self._limit_s:g} s"
        if marked is None or marked[1] >= latest:
            return None
        try:
            is_passed = marked[0].query()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            return f"the device failed: {error}"
        return None if is_passed else f"a step of the thinker did not end within {self._limit_s:g} s"
