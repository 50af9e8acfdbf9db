"""Loops that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from held_resources import check_all_is_free

from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.thinker.loop import ThinkerLoop

Loop = TypeVar("Loop", ThinkerLoop, TalkerLoop)


@pytest.fixture
def started() -> Iterator[Callable[[Loop], Loop]]:
    """Starts loops and stops them after the test, when no request may hold anything."""
    loops: list[ThinkerLoop | TalkerLoop] = []

    def start(loop: Loop) -> Loop:
        loops.append(loop)
        loop.start()
        return loop

    yield start
    for loop in loops:
        loop.stop()
        assert not loop._thread.is_alive()
        loop.scheduler.check()
        check_all_is_free(loop)
