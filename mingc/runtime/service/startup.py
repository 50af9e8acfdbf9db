"""Timing of the start-up phases: imports, checks, loading, capture."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("mingc.startup")


class StartupClock:
    """Seconds of each phase, logged when it ends. Repeated phases are summed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to `name`, also when the block fails."""
        started = time.perf_counter()
        try:
            yield
        finally:
            passed = time.perf_counter() - started
            self.seconds[name] = round(self.seconds.get(name, 0.0) + passed, 3)
            log.info("%s: %.2f s", name, passed)
