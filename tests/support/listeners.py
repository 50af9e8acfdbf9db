"""Listeners of paced speech, over a talker loop whose steps and clock a test controls."""

from __future__ import annotations

import math
from collections.abc import Sequence

from collector import Collector
from hand_run import run_step, run_until_idle

from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.worker import SpeechSegment


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Listener(Collector):
    """A client of live speech, whose playback starts with the first patch unless it `is_stuck`."""

    def __init__(
        self,
        loop: TalkerLoop,
        *pieces: SpeechSegment,
        is_live: bool = True,
        is_stuck: bool = False,
        **pace: int,
    ) -> None:
        super().__init__()
        self._loop = loop
        self.stream = loop.open(self.put, lambda: False, is_live=is_live, recorder=self.recorder, **pace)
        self.is_stuck = is_stuck
        for piece in pieces:
            loop.add(self.stream, piece)

    def take(self) -> int:
        """Take what has arrived, as the event loop does. Returns the number of patches so far."""
        if self.items and not self.is_stuck:
            self._loop.begin_playback(self.stream)
        return len(self.items)


def run_to_end(loop: TalkerLoop, clock: Clock, listeners: Sequence[Listener]) -> float:
    """Run until no segment is left. Returns the time of the clock, which goes on when the loop waits for it."""
    while loop.scheduler.num_running or loop.scheduler.num_waiting:
        is_busy = run_step(loop)
        for listener in listeners:
            listener.take()
        if not is_busy:
            run_until_idle(loop)
            assert loop.due_at < math.inf, "nothing will ever be due"
            clock.now = max(clock.now, loop.due_at)
    return clock.now
