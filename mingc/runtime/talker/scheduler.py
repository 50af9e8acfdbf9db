"""Admits speech streams to the talker's batch at patch boundaries. Plain Python, no torch.

Like the thinker's scheduler it belongs to one engine thread and takes no locks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container

from mingc.errors import CapacityError
from mingc.runtime.kv_cache import SlotPool


class TalkerScheduler:
    """Segments of speech join and leave the running batch at patch boundaries.

    A stream is one client's speech; its segments are spoken one after the other. Streams wait in order of
    arrival for a slot, and a stream that ends a segment goes to the end of the queue for its next one, so a
    long text shares the slots with others.

    Args:
        max_prefills_per_patch: segments that may join at one boundary: each costs a prefill, which the others wait for.
        max_streams: streams known at once (speaking and waiting) before more are refused.
    """

    def __init__(
        self, slots: SlotPool, *, max_batch: int, max_prefills_per_patch: int, max_streams: int
    ) -> None:
        self.slots = slots
        self._max_batch = min(max_batch, slots.num_slots - 1)
        self._max_prefills = max_prefills_per_patch
        self._max_streams = max_streams
        self._segments: dict[int, deque[int]] = {}  # per stream: segments not yet spoken, first one first
        self._queue: OrderedDict[int, None] = OrderedDict()  # streams that wait for a slot
        self._running: OrderedDict[int, int] = OrderedDict()  # stream → segment being spoken

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_room(self) -> bool:
        """Whether a further stream could join now."""
        return len(self._running) < self._max_batch and self.slots.num_free > 0

    def open(self, stream: int) -> None:
        """Make a stream known. Raises CapacityError when there are too many."""
        if len(self._segments) >= self._max_streams:
            raise CapacityError(
                f"{len(self._segments)} requests are speaking or waiting to", fix="try again later"
            )
        self._segments[stream] = deque()

    def add(self, stream: int, segment: int) -> None:
        """Append a segment to an open stream."""
        self._segments[stream].append(segment)
        if stream not in self._running:
            self._queue[stream] = None

    def remove(self, stream: int) -> None:
        """Forget a stream with all its segments and free its slot; nothing happens when it is not known."""
        self._segments.pop(stream, None)
        self._queue.pop(stream, None)
        self._running.pop(stream, None)
        self.slots.free(stream)

    def admit(self) -> list[tuple[int, int, int]]:
        """Admit segments: (stream, segment, slot) of each, at most `max_prefills_per_patch`. They are running now."""
        joined: list[tuple[int, int, int]] = []
        while self._queue and len(joined) < self._max_prefills and self.has_room:
            stream = next(iter(self._queue))
            slot = self.slots.allocate(stream)
            assert slot is not None, "there was room"
            del self._queue[stream]
            segment = self._segments[stream].popleft()
            self._running[stream] = segment
            joined.append((stream, segment, slot))
        return joined

    def batch(self, paused: Container[int] = ()) -> tuple[int, ...]:
        """Streams that make a patch now: the running ones without `paused`, which keep their slots."""
        return tuple(stream for stream in self._running if stream not in paused)

    def end_segment(self, stream: int) -> None:
        """The stream's segment is spoken: free its slot, and queue the stream when it has another one."""
        del self._running[stream]
        self.slots.free(stream)
        if self._segments[stream]:
            self._queue[stream] = None

    def check(self) -> None:
        """Assert that slots belong to running streams only."""
        self.slots.check()
        assert self.slots.num_free == self.slots.num_slots - 1 - len(self._running), "slots held by no stream"
