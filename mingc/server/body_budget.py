"""Budget of the bytes that clients have sent and that wait in memory: bodies, their media, messages of WebSockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mingc.errors import CapacityError
from mingc.server.metrics import Metrics

# Bodies up to this size are not charged, so that a few large ones never keep an ordinary chat out; their number is
# bounded by `max_concurrent_requests`.
FREE_BYTES = 64 * 1024


class Charge:
    """Bytes that one request has in memory."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._charged = 0

    def set(self, num_bytes: int) -> None:
        """Change the charge to `num_bytes`.

        Raises:
            CapacityError: if that exceeds the budget; the charge is not changed then.
        """
        wanted = max(0, num_bytes - FREE_BYTES)
        self._budget.take(wanted - self._charged)
        self._charged = wanted


class BodyBudget:
    """Counts the bytes of all bodies together. Call it from the event loop only."""

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit = limit
        self._metrics = metrics
        self._used = 0
        metrics.add_limit("body_bytes", lambda: (self._used, limit))

    @contextmanager
    def charge(self) -> Iterator[Charge]:
        """Open a charge of 0 bytes; the end of the block releases its final amount."""
        charge = Charge(self)
        try:
            yield charge
        finally:
            charge.set(0)

    def check(self, num_bytes: int) -> None:
        """Raise CapacityError if a body of `num_bytes` would exceed the budget now."""
        if num_bytes > FREE_BYTES and self._used + num_bytes - FREE_BYTES > self._limit:
            raise CapacityError(
                f"The bodies of running requests hold {self._used} of {self._limit} bytes; try again later.",
                code="body_budget_exhausted",
            )

    def take(self, num_bytes: int) -> None:
        """Add `num_bytes`, which may be negative. Raises: CapacityError."""
        if num_bytes > 0:
            self.check(num_bytes + FREE_BYTES)
        self._used += num_bytes
        self._metrics.body_bytes.set(self._used)
