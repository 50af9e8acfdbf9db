"""Counts of everything that a request holds, to compare with the counts before it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable

from mingc.runtime.service.omni import OmniService
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.worker import TalkerWorker
from mingc.runtime.thinker.loop import ThinkerLoop

Counts = dict[str, int]

_WAIT_S = 20.0
_POOLS = ("mingc-preprocess", "asyncio_")  # of a fixed size; their threads start with their first work


def thinker_resources(loop: ThinkerLoop) -> Counts:
    """Free pages and slots of a thinker loop; its requests and the work in flight."""
    scheduler = loop.scheduler
    return {
        "free pages": scheduler.pool.num_free,
        "free thinker slots": loop._slots.num_free,
        "chats": len(loop._requests),
        "chats that run": scheduler.num_running,
        "chats that wait": scheduler.num_waiting,
        "chunks under way": int(scheduler._current is not None),
        "thinker steps in flight": len(loop._launched),
    }


def talker_resources(loop: TalkerLoop) -> Counts:
    """Free slots of a talker loop; its streams and the work in flight."""
    scheduler, worker = loop.scheduler, loop._worker
    assert isinstance(worker, TalkerWorker)
    return {
        "free talker slots": scheduler.slots.num_free,
        "speech streams": len(loop._streams),
        "streams with segments": len(scheduler._segments),
        "streams that run": scheduler.num_running,
        "streams that wait": scheduler.num_waiting,
        "segments in the worker": len(worker._running),
        "patches in flight": worker.num_in_flight,
    }


def check_all_is_free(loop: ThinkerLoop | TalkerLoop) -> None:
    """Assert that every page and slot of a loop is free and that it knows no request."""
    if isinstance(loop, ThinkerLoop):
        pool, slots = loop.scheduler.pool, loop._slots
        assert (pool.num_free, slots.num_free) == (pool.num_pages - 1, slots.num_slots - 1)
        assert not loop._requests and loop.scheduler._current is None
    else:
        slots = loop.scheduler.slots
        assert slots.num_free == slots.num_slots - 1
        assert not loop._streams and not loop.scheduler._segments and not loop._worker._running
    assert loop.scheduler.num_running == loop.scheduler.num_waiting == 0


def loop_resources(service: OmniService) -> Counts:
    """Those of the service's loops; of several talkers the sums."""
    counts: Counter[str] = Counter()
    for loop in service._loops:
        counts.update(thinker_resources(loop) if isinstance(loop, ThinkerLoop) else talker_resources(loop))
    return dict(counts)


def service_resources(service: OmniService, event_loop: asyncio.AbstractEventLoop) -> Counts:
    """Those of the service's loops, its requests, and tasks and threads of the process."""
    return {
        **loop_resources(service),
        "requests": len(service._running),
        "chats of the service": len(service._running_chats),
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
