"""Runs an engine thread's steps in the calling thread, one by one, so that a test decides what happens between them."""

from __future__ import annotations

from mingc.runtime.engine_thread import EngineThread

_MAX_STEPS = 10_000


def run_step(loop: EngineThread) -> bool:
    """Run posted actions, then a step, as the thread does. Returns False if there was nothing to do."""
    while loop._inbox:
        loop._inbox.popleft()()
    return loop._step()


def run_until_idle(loop: EngineThread) -> None:
    for _ in range(_MAX_STEPS):
        if not run_step(loop):
            return
    raise AssertionError("the loop never becomes idle")
