"""Talker scheduler: admits speech segments to the running batch at patch boundaries. Plain Python; imports no torch.

The talker loop calls it under its lock. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from mingc.errors import CapacityError
from mingc.runtime.kv_cache import SlotPool


class TalkerScheduler:
    """Assigns slots to streams, one segment at a time.

    A stream is the speech of one request; its segments are spoken in order. Streams wait for a slot in order of
    arrival. After each segment a stream goes to the end of the queue for its next one, so a long text shares the slots
    with other requests. A segment keeps its slot until it ends, however slowly it is generated.

    Args:
        max_batch: most streams in one patch; with more slots, more streams run than fit into one patch.
        max_prefills_per_patch: most segments admitted by one call; running ones wait for their prefills.
        max_streams: most open streams (speaking and waiting) before more are refused.
        max_jobs: most slots of jobs, whose speech nobody hears while it is generated; None: all slots.
    """

    def __init__(
        self,
        slots: SlotPool,
        *,
        max_batch: int,
        max_prefills_per_patch: int,
        max_streams: int,
        max_jobs: int | None = None,
    ) -> None:
        self.slots = slots
        self.max_batch = max_batch
        self.max_prefills = max_prefills_per_patch
        self.max_streams = max_streams
        self._max_jobs = slots.num_slots - 1 if max_jobs is None else max_jobs
        self._jobs: set[int] = set()
        self._running_jobs: set[int] = set()
        self._segments: dict[int, deque[int]] = {}  # per stream: segments not yet spoken, in order
        self._queue: OrderedDict[int, None] = OrderedDict()  # streams waiting for a slot
        self._running: OrderedDict[int, int] = OrderedDict()  # stream → segment being spoken

    @property
    def num_streams(self) -> int:
        """Open streams, with or without a segment."""
        return len(self._segments)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_room(self) -> bool:
        """Whether a further segment can be admitted now."""
        return self.slots.num_free > 0

    @property
    def waiting(self) -> tuple[int, ...]:
        """Streams that wait for a slot, in order of arrival; without jobs while these have as many as they may."""
        if self._has_room_for_jobs:
            return tuple(self._queue)
        return tuple(each for each in self._queue if each not in self._jobs)

    @property
    def _has_room_for_jobs(self) -> bool:
        return len(self._running_jobs) < self._max_jobs

    def open(self, stream: int, *, is_job: bool = False) -> None:
        """Open a stream. Raises: CapacityError when too many are open."""
        if len(self._segments) >= self.max_streams:
            raise CapacityError(
                f"{len(self._segments)} requests are speaking or waiting to speak",
                fix="try again later",
                code="queue_full",
            )
        self._segments[stream] = deque()
        if is_job:
            self._jobs.add(stream)

    def add(self, stream: int, segment: int) -> None:
        """Append a segment to an open stream."""
        self._segments[stream].append(segment)
        if stream not in self._running:
            self._queue[stream] = None

    def remove(self, stream: int) -> None:
        """Remove a stream with all its segments and free its slot; does nothing if it is unknown."""
        self._segments.pop(stream, None)
        self._jobs.discard(stream)
        self._queue.pop(stream, None)
        self._running.pop(stream, None)
        self._running_jobs.discard(stream)
        self.slots.free(stream)

    def admit(self, order: Iterable[int] | None = None) -> list[tuple[int, int, int]]:
        """Admit up to `max_prefills_per_patch` segments, which run from now on. Returns (stream, segment, slot).

        `order`: the waiting streams that may be admitted, in order; None: all, in order of arrival.
        """
        admitted: list[tuple[int, int, int]] = []
        for stream in self.waiting if order is None else order:
            if len(admitted) == self.max_prefills or not self.has_room:
                break
            is_job = stream in self._jobs
            if is_job and not self._has_room_for_jobs:
                continue
            slot = self.slots.allocate(stream)
            assert slot is not None, "there was room"
            del self._queue[stream]
            segment = self._segments[stream].popleft()
            self._running[stream] = segment
            if is_job:
                self._running_jobs.add(stream)
            admitted.append((stream, segment, slot))
        return admitted

    def batch(self) -> tuple[int, ...]:
        """Running streams, in order of admission."""
        return tuple(self._running)

    def end_segment(self, stream: int) -> None:
        """End the stream's segment: free its slot, and queue the stream if it has another one."""
        del self._running[stream]
        self._running_jobs.discard(stream)
        self.slots.free(stream)
        if self._segments[stream]:
            self._queue[stream] = None

    def check(self) -> None:
        """Assert that every allocated slot belongs to a running stream."""
        self.slots.check()
        assert self.slots.num_free == self.slots.num_slots - 1 - len(self._running), "slots held by no stream"
        assert self._running_jobs == self._jobs & self._running.keys(), "jobs are counted wrong"
