"""Spoken answers that do not sound yet: their first patches go before the thinker's next steps.

A patch takes three times as long beside decode steps as alone. That a segment is complete is known when the event loop
has read its last token; the thinker has launched a further step by then, and would launch the one after it at once. It
waits a moment for the event loop instead, in which the device is still busy.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

_READING_S = 0.001  # the event loop has read a token by then, and a decode step takes longer
_PATCH_S = 0.008  # prompt and patch take about 5 ms alone
_EXPECTED_S = 1.0  # a thought may come before the words


class SpeechStarts:
    """What a thinker waits for. Thread-safe; streams are named by any object. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        # Streams without a segment, and until when one is expected.
        self._expected: dict[object, float] = {}
        # Streams with one, and until when steps wait for their first patches.
        self._begun: dict[object, float] = {}

    def expect(self, stream: object) -> None:
        """Record that the words of a stream are being written from now on."""
        with self._changed:
            self._expected[stream] = self._clock() + _EXPECTED_S

    def begin(self, stream: object) -> None:
        """Record that the first segment of a stream is complete."""
        with self._changed:
            self._expected.pop(stream, None)
            self._begun[stream] = self._clock() + _PATCH_S
            self._changed.notify_all()

    def end(self, stream: object) -> None:
        """Record that the first patch of a stream has arrived, or that none is awaited; it may be unknown."""
        if stream in self._expected or stream in self._begun:
            with self._changed:
                self._expected.pop(stream, None)
                self._begun.pop(stream, None)
                self._changed.notify_all()

    def wait_for_segment(self) -> bool:
        """Let the event loop read the last token if a segment is expected. Returns whether one is complete."""
        with self._changed:
            if not self._left_s(self._begun) and self._left_s(self._expected):
                self._changed.wait(_READING_S)
            return self._left_s(self._begun) > 0.0

    def wait_for_patches(self) -> None:
        """Wait until all complete first segments have their first patches, or have been waited for long enough."""
        with self._changed:
            while left := self._left_s(self._begun):
                self._changed.wait(left)

    def _left_s(self, until: dict[object, float]) -> float:
        return max(0.0, max(until.values(), default=-math.inf) - self._clock()) if until else 0.0
