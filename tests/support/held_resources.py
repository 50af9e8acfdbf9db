"""Counts of everything that a request holds, to compare with the counts before it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from mingc.runtime.service.omni import OmniService
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.worker import TalkerWorker
from mingc.runtime.thinker.loop import ThinkerLoop

Counts = dict[str, int]

_WAIT_S = 20.0


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


def service_resources(service: OmniService) -> Counts:
    """Those of its loops; running requests, asyncio tasks and threads of the process."""
    counts: Counts = {}
    for loop in service._loops:
        counts |= thinker_resources(loop) if isinstance(loop, ThinkerLoop) else talker_resources(loop)
    return {
        **counts,
        "requests": len(service._running),
        "chats of the service": len(service._running_chats),
        "threads": threading.active_count(),
    }


async def wait_until_free(service: OmniService, before: Counts) -> None:
    """Wait until `service` holds no more than `before`, and this event loop runs only the calling task."""
    end = time.monotonic() + _WAIT_S
    while (held := _differences(before, service_resources(service))) and time.monotonic() < end:
        await asyncio.sleep(0.002)
    assert not held, f"still held: {held}"
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    while tasks and time.monotonic() < end:
        await asyncio.sleep(0.002)
        tasks = {task for task in tasks if not task.done()}
    assert not tasks, f"still running: {tasks}"


def wait_until_equal(before: Counts, count: Callable[[], Counts]) -> None:
    """The same for a test without an event loop."""
    end = time.monotonic() + _WAIT_S
    while (held := _differences(before, count())) and time.monotonic() < end:
        time.sleep(0.002)
    assert not held, f"still held: {held}"


def _differences(before: Counts, now: Counts) -> dict[str, tuple[int, int]]:
    """(before, now) of the counts that differ."""
    return {name: (before[name], now[name]) for name in before if before[name] != now[name]}
