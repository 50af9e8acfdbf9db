"""What all sessions of one server share: the service, limits, metrics, places, and how far the shutdown is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from mingc.errors import CapacityError
from mingc.runtime.request import Service
from mingc.server.body_budget import BodyBudget
from mingc.server.key_limits import KeyLimits
from mingc.server.metrics import Metrics
from mingc.server.options import ServeOptions
from mingc.server.tracing import Traces

Status = Literal["ready", "not_ready", "draining", "stopping"]


@dataclass(kw_only=True, slots=True)
class ServerState:
    """State of one server. Call it from the event loop only.

    `is_draining` is set by SIGTERM: requests are served, but `/ready` answers 503. `is_stopping` is set when shutdown
    begins.
    """

    service: Service
    options: ServeOptions
    traces: Traces | None = None
    metrics: Metrics = field(default_factory=Metrics)
    key_limits: KeyLimits = field(init=False)
    bodies: BodyBudget = field(init=False)
    num_running: int = field(default=0, init=False)
    is_draining: bool = field(default=False, init=False)
    is_stopping: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.key_limits = KeyLimits(self.options)
        self.bodies = BodyBudget(self.options.max_total_body_bytes, self.metrics)
        self.metrics.set_build(self.service.info)
        self.metrics.add_limit("requests", lambda: (self.num_running, self.options.max_concurrent_requests))

    @property
    def status(self) -> Status:
        if self.is_stopping:
            return "stopping"
        if not self.service.is_ready:
            return "not_ready"
        return "draining" if self.is_draining else "ready"

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold one of `max_concurrent_requests` places. Taken before the body is read, so unread bodies use no memory.

        Raises:
            CapacityError: if the server is stopping or no place is free.
        """
        if self.is_stopping:
            raise CapacityError("The server is stopping.", code="stopping")
        if self.num_running >= self.options.max_concurrent_requests:
            raise CapacityError(
                f"{self.num_running} requests are being served; try again later.", code="overloaded"
            )
        self.num_running += 1
        self.metrics.requests_running.inc()
        try:
            yield
        finally:
            self.num_running -= 1
            self.metrics.requests_running.dec()
