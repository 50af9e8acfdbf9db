"""A service that writes the time into its chunks, on Serve or in a bare server, to measure how late they arrive."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from mingc.errors import ServeError
from mingc.runtime.request import (
    ChatRequest,
    Done,
    Event,
    Service,
    ServiceInfo,
    ServiceLoad,
    SpeechRequest,
    TextDelta,
    TextDone,
    Usage,
)

PERIOD_S = 0.02  # between two chunks of a stream: 50 tokens per second

_INFO = ServiceInfo(
    model=f"clock of process {os.getpid()}",
    sample_rate=0,
    voices=(),
    default_voice=None,
    has_text=True,
    has_image=False,
    has_video=False,
    has_audio_input=False,
    has_speech=False,
)


class ClockService:
    """Streams `max_tokens` texts; each is the nanosecond of the monotonic clock at which it was made."""

    info = _INFO
    is_ready = True
    load = ServiceLoad()

    def on_failure(self, report: Callable[[ServeError], None]) -> None:
        """Nothing fails."""

    async def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        due = time.monotonic()
        for _ in range(request.sampling.max_tokens):
            yield TextDelta(text=f"{time.monotonic_ns()}")
            due += PERIOD_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        yield TextDone(finish_reason="length")
        yield Done(finish_reason="length", usage=Usage())

    def speech(self, request: SpeechRequest) -> AsyncIterator[Event]:
        raise NotImplementedError

    async def close(self, *, shutdown_timeout_s: float) -> None:
        """Nothing to close."""


def application(num_replicas: int, *, affinity: bool = False) -> Any:
    """The Serve application with clock services."""
    from mingc.deploy.options import DeployOptions
    from mingc.deploy.ray import build_application
    from mingc.deploy.replica import ModelReplica

    class ClockReplica(ModelReplica):
        async def open_service(self) -> Service:
            return ClockService()

    options = DeployOptions(
        artifact="none", num_gpus=0, num_cpus=0.1, min_replicas=num_replicas, max_replicas=num_replicas,
        affinity=affinity,
    )  # fmt: skip
    return build_application(options, ClockReplica)


if __name__ == "__main__":  # a server like `mingc serve`, which prints its address
    from mingc.server.app import create_app
    from mingc.server.lifecycle import serve
    from mingc.server.options import ServeOptions

    app = create_app(ClockService(), ServeOptions(port=0, drain_s=0))
    serve(app, announce=lambda url: print(url, flush=True))
    sys.exit(0)
