"""Times the phases of a start: imports, checks, loading, capture."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("mingc.startup")

OTHER = "other"


class StartupClock:
    """Measures the seconds of each phase and logs a phase when it ends. Repeated phases are summed.

    An outer phase does not count the time of an inner one, so that the phases add up to the whole.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._inner = [0.0]  # seconds of the phases inside each open phase; the first entry: of all phases

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all phases, in the order in which they began; `other` is the time that no phase covers."""
        passed = self.total_s
        return {
            name: round(value, 3) for name, value in {**self._seconds, OTHER: passed - self._inner[0]}.items()
        }

    @property
    def total_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    @contextmanager
    def phase(self, name: str, stage: str = "") -> Iterator[None]:
        """Add the time inside the block to `name`, also when the block fails. One thread at a time.

        The log names the `stage` that the block prepares.
        """
        self._seconds.setdefault(name, 0.0)
        started = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            passed = time.perf_counter() - started
            own = passed - self._inner.pop()
            self._inner[-1] += passed
            self._seconds[name] += own
            log.info("%s%s: %.2f s", f"{stage}: " if stage else "", name, own)
