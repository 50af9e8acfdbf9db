"""Counts of everything that a request holds, to compare with the counts before it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping

from mingc.runtime.engine_thread import EngineThread
from mingc.runtime.service.omni import OmniService

Counts = Mapping[str, int]

_WAIT_S = 20.0
_POOLS = (
    "mingc-preprocess",
    "mingc-encode",
    "asyncio_",
)  # of a fixed size; their threads start with their first work


def check_all_is_free(loop: EngineThread) -> None:
    """Assert that no request holds anything of a loop; a stopped one may have left work in flight."""
    held = {name: count for name, count in loop.held.items() if count and not name.endswith("in flight")}
    assert not held


def service_resources(service: OmniService, event_loop: asyncio.AbstractEventLoop) -> Counts:
    """Those of the service, and tasks and threads of the process."""
    return {
        **service.held,
        "tasks": len(asyncio.all_tasks(event_loop)),
        "threads": sum(not thread.name.startswith(_POOLS) for thread in threading.enumerate()),
    }


async def wait_until_free(service: OmniService, before: Counts) -> None:
    """Wait until `service` and the running event loop hold no more than `before`."""
    event_loop, end = asyncio.get_running_loop(), time.monotonic() + _WAIT_S
    while (held := _differences(before, service_resources(service, event_loop))) and time.monotonic() < end:
        await asyncio.sleep(0.002)
    assert not held, f"still held (before, now): {held}"


def wait_until_equal(before: Counts, count: Callable[[], Counts]) -> None:
    """Wait until `count` returns `before`, in a thread without an event loop."""
    end = time.monotonic() + _WAIT_S
    while (held := _differences(before, count())) and time.monotonic() < end:
        time.sleep(0.002)
    assert not held, f"still held (before, now): {held}"


def _differences(before: Counts, now: Counts) -> dict[str, tuple[int, int]]:
    """(before, now) of the counts that differ. There may be fewer tasks and threads: earlier work may end late."""
    return {
        name: (before[name], now[name])
        for name in before
        if now[name] != before[name] and not (name in ("tasks", "threads") and now[name] < before[name])
    }
