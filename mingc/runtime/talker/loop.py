"""The talker's thread: at each patch boundary segments join and leave, then all running ones make a patch."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from mingc.errors import RequestError, ServeError, WorkerError
from mingc.runtime.engine_thread import EngineThread
from mingc.runtime.request_stream import FailedItem, Item, PatchItem
from mingc.runtime.talker.launch_timing import LaunchTimingPolicy
from mingc.runtime.talker.scheduler import TalkerScheduler
from mingc.runtime.talker.worker import Patch, SpeechSegment, TalkerWorker

log = logging.getLogger("mingc.engine")

_LOOK_S = 0.005  # how often a held launch looks at the device: what was learnt may be far too long


@dataclass(slots=True, eq=False)
class _Stream:
    emit: Callable[[Item], None]
    is_behind: Callable[[], bool]
    segments: dict[int, SpeechSegment] = field(default_factory=dict)
    behind_since: float | None = None


class TalkerLoop(EngineThread):
    """Runs the speech of all requests.

    Args:
        slow_client_timeout_s: a client that leaves its patches unread for longer loses its request and so its slot.
    """

    def __init__(
        self, worker: TalkerWorker, scheduler: TalkerScheduler, *, slow_client_timeout_s: float = 60.0
    ) -> None:
        super().__init__("talker")
        self._worker = worker
        self.scheduler = scheduler
        self._max_behind_s = slow_client_timeout_s
        self._streams: dict[int, _Stream] = {}
        self._ids = itertools.count(1)
        self._launch_timing = LaunchTimingPolicy()
        self._was_held = False  # the next patch, until its time had come

    def open(self, emit: Callable[[Item], None], is_behind: Callable[[], bool]) -> int:
        """Begin a stream; both functions are called on the talker's thread. Returns its id.

        `is_behind`: the client has as many patches unread as it may; no further ones are made until it reads.
        Raises: CapacityError when too many streams are open.
        """
        with self._lock:
            self._check_healthy()
            stream = next(self._ids)
            self.scheduler.open(stream)
            self._streams[stream] = _Stream(emit, is_behind)
        return stream

    def add(self, stream: int, segment: SpeechSegment) -> None:
        """Append a segment to an open stream; nothing happens when the stream has failed."""
        with self._lock:
            known = self._streams.get(stream)
            if known is not None:
                known.segments[segment.index] = segment
                self.scheduler.add(stream, segment.index)
                self._wake.notify()

    def cancel(self, stream: int) -> None:
        """Forget a stream before the next patch; nothing happens when it is not known."""
        self.post(lambda: self._remove(stream))

    def _step(self) -> bool:
        with self._lock:
            joining = self.scheduler.admit()
        for stream, segment, slot in joining:
            try:
                self._worker.add(slot, self._streams[stream].segments.pop(segment))
            except Exception as error:
                self._fail_step([stream], error)
        behind = self._find_behind()
        with self._lock:
            slots = self._owners(behind)
            if not self.scheduler.num_running and not self.scheduler.num_waiting:
                self.scheduler.check()
        launchable = [slot for slot in slots if self._worker.is_launchable(slot)]
        if launchable and self._hold():
            return True
        try:
            if launchable:
                self._launch(launchable)
            elif not self._worker.num_in_flight:
                return bool(joining)
            if self._worker.num_in_flight == self._worker.depth or not launchable:
                self._deliver(self._worker.collect())
        except Exception as error:
            # Which of the patches in flight it was cannot be told: the device reports late.
            hurt = {*launchable, *self._worker.drop()}
            with self._lock:
                owners = self._owners()
            self._fail_step([stream for slot, stream in owners.items() if slot in hurt], error)
        return True

    def _hold(self) -> bool:
        """Wait for segments that may join the next patch, as long as the device is busy without it.

        What joins behind a launched patch is heard a whole patch later. False: launch now. True: ask again.
        """
        left = self._worker.remaining_s() - self._launch_timing.lead_s
        if left <= 0.0:
            return False
        if self._worker.is_idle:
            self._was_held = False  # a longer lead would not have helped
            return False
        with self._lock:
            if not self.scheduler.has_room:
                return False
            if not self.scheduler.num_waiting and not self._inbox:
                was_woken = self._wake.wait(min(left, _LOOK_S))
                self._was_held = not was_woken and left <= _LOOK_S
        return True

    def _launch(self, slots: Sequence[int]) -> None:
        left, before = self._worker.remaining_s(), time.perf_counter()
        self._worker.launch(slots)
        self._launch_timing.observe(left - (time.perf_counter() - before), was_held=self._was_held)
        self._was_held = False

    def _deliver(self, patches: Mapping[int, Patch]) -> None:
        """Hand out patches by slot, then let segments that have ended leave."""
        with self._lock:
            owners = self._owners()
        for slot, patch in patches.items():
            stream = owners[slot]
            if not patch.is_finite:
                self._fail(stream, WorkerError("the model's samples are not finite", where="audio_vae"))
                continue
            self._streams[stream].emit(
                PatchItem(samples=patch.samples, is_segment_end=patch.is_last, is_capped=patch.is_capped)
            )
            if patch.is_last:
                self._end_segment(stream)

    def _owners(self, paused: Container[int] = ()) -> dict[int, int]:
        """The running stream of each slot, without the `paused` ones."""
        return {self.scheduler.slots.slot(stream): stream for stream in self.scheduler.batch(paused)}

    def _end_segment(self, stream: int) -> None:
        with self._lock:
            self._worker.remove(self.scheduler.slots.slot(stream))
            self.scheduler.end_segment(stream)

    def _find_behind(self) -> set[int]:
        """Streams to leave out now. Those that stayed behind for too long fail."""
        now = time.monotonic()
        with self._lock:
            running = self.scheduler.batch()
        behind = set()
        for name in running:
            stream = self._streams[name]
            if not stream.is_behind():
                stream.behind_since = None
                continue
            behind.add(name)
            stream.behind_since = stream.behind_since or now
            if now - stream.behind_since > self._max_behind_s:
                self._fail(
                    name, RequestError("the speech is not being read", status=408, code="client_too_slow")
                )
        return behind

    def _remove(self, stream: int) -> None:
        with self._lock:
            if stream in self.scheduler.batch():
                self._worker.remove(self.scheduler.slots.slot(stream))
            self.scheduler.remove(stream)
            self._streams.pop(stream, None)

    def _fail(self, stream: int, error: ServeError) -> None:
        self._streams[stream].emit(FailedItem(error=error))
        self._remove(stream)

    def _fail_step(self, streams: Sequence[int], error: Exception) -> None:
        """An engine call failed: those it was for are told, the others go on."""
        log.error("a step of the talker failed", exc_info=error)
        mapped: ServeError = WorkerError(f"the talker failed: {error}", where="talker")
        if isinstance(error, ServeError):
            mapped = error
        for stream in streams:
            self._fail(stream, mapped)

    def _fail_all(self, error: ServeError) -> None:
        for stream in list(self._streams):
            self._fail(stream, error)
