"""Talker group: the talkers of one service, one per device; it chooses the talker of a request.

A stream stays on the talker that opened it: its segments share a voice's prefix, and its playback has one clock.
Samples do not depend on the talker, because noise belongs to the request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mingc.runtime.talker.loop import TalkerLoop


class TalkerGroup:
    """Spreads streams over one or more talkers. The service starts, watches and stops `loops` one by one."""

    def __init__(self, loops: Sequence[TalkerLoop]) -> None:
        assert loops, "a group has a talker"
        self.loops = tuple(loops)

    def place(self) -> TalkerLoop:
        """The talker for a new stream: the first one that has the fewest open streams.

        Its `open` raises CapacityError only if every talker is full. A failed talker gets no stream while another one
        runs; if no talker runs, `open` raises the failure. The event loop calls it, and opens the stream before it
        places another one.
        """
        healthy = [loop for loop in self.loops if loop.is_healthy]
        return min(healthy or self.loops, key=lambda loop: loop.num_streams)

    @property
    def num_waiting(self) -> int:
        """Streams whose next segment waits for a slot."""
        return sum(loop.scheduler.num_waiting for loop in self.loops)

    @property
    def limits(self) -> Mapping[str, tuple[int, int]]:
        """How many streams and slots are in use, and how many there may be."""
        schedulers = [loop.scheduler for loop in self.loops]
        return {
            "speech_streams": (
                sum(each.num_streams for each in schedulers),
                sum(each.max_streams for each in schedulers),
            ),
            "speech_slots": (
                sum(each.num_running for each in schedulers),
                sum(each.slots.num_slots - 1 for each in schedulers),
            ),
        }

    @property
    def listeners(self) -> Mapping[str, int]:
        """Number of live streams by state."""
        total: Counter[str] = Counter()
        for loop in self.loops:
            total.update(loop.listeners)
        return total

    @property
    def num_underruns(self) -> int:
        """See `TalkerLoop.num_underruns`."""
        return sum(loop.num_underruns for loop in self.loops)

    def stop_pacing(self) -> None:
        """Generate all speech as fast as possible from now on."""
        for loop in self.loops:
            loop.stop_pacing()
