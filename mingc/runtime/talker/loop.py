"""Talker loop: a thread that admits and removes segments at patch boundaries, and runs patches.

The service opens a stream per request and adds the segments that the planner made from its text. The scheduler assigns
slots, the pacing chooses whose patches are due, this loop launches and collects them on the worker, and passes samples
through `emit` to the request's stream.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mingc.errors import RequestError, ServeError, WorkerError
from mingc.runtime.engine_thread import EngineThread
from mingc.runtime.engines.cuda_graphs import current_device
from mingc.runtime.request import AudioDelta, Recorder
from mingc.runtime.request_stream import FailedItem, Item
from mingc.runtime.talker.launch_timing import LaunchTimingPolicy, PatchLatencyModel
from mingc.runtime.talker.pacing import SpeechPacing
from mingc.runtime.talker.scheduler import TalkerScheduler
from mingc.runtime.talker.worker import SpeechSegment, TalkerWorker

log = logging.getLogger("mingc.engine")

_T = TypeVar("_T")

_POLL_S = 0.005  # a held launch checks the device so often, because the estimate may be far too long


@dataclass(slots=True, eq=False)
class _Stream:
    emit: Callable[[Item], None]
    is_behind: Callable[[], bool]
    recorder: Recorder | None
    segments: dict[int, SpeechSegment] = field(default_factory=dict)


class TalkerLoop(EngineThread):
    """Runs the speech of the requests that are opened on it.

    Args:
        name: name of the thread; its errors have it.
        speech_lead: patches that live speech may be ahead of its playback; 0: all speech is generated as fast as
            possible.
        slow_client_timeout_s: a request fails if one pause for its slow client is longer.
        clock: returns seconds, for this timeout and for playback.

    Attributes:
        due_at: when the next held stream becomes due, by `clock`; infinite if none is held.
    """

    def __init__(
        self,
        worker: TalkerWorker,
        scheduler: TalkerScheduler,
        *,
        name: str = "talker",
        speech_lead: int = 0,
        slow_client_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name)
        self.worker = worker
        self.scheduler = scheduler
        self._slow_client_timeout_s = slow_client_timeout_s
        self._clock = clock
        self._streams: dict[int, _Stream] = {}
        self._behind_since: dict[int, float] = {}  # the streams that pause for a slow client
        self._pacing = SpeechPacing(
            speech_lead, patch_samples=worker.samples_per_patch, sample_rate=worker.sample_rate
        )
        self.due_at = math.inf
        self._ids = itertools.count(1)
        self._launch_timing = LaunchTimingPolicy()
        self._num_joined = 0  # segments since the last launch
        self._was_held = False  # whether the next launch has waited until its lead
        self._latency = PatchLatencyModel()  # by `clock`
        self._calls: set[Future[Any]] = set()  # that wait for this thread
        self._launched: deque[tuple[int, float]] = deque()  # batch size and time of the patches in flight

    @property
    def held(self) -> dict[str, int]:
        """Resources that streams hold: slots, segments, and work in flight."""
        scheduler, slots = self.scheduler, self.scheduler.slots
        return {
            "talker slots": slots.num_slots - 1 - slots.num_free,
            "speech streams": len(self._streams),
            "scheduled speech streams": scheduler.num_streams + scheduler.num_waiting + scheduler.num_running,
            "speech segments": self.worker.num_segments,
            "patches in flight": self.worker.num_in_flight,
            "talker calls": len(self._calls),
        }

    @property
    def has_work(self) -> bool:
        """Whether patches are in flight: between those of paced speech the device is free. Any thread may read it."""
        return bool(self._launched)

    @property
    def num_streams(self) -> int:
        """How many streams are open: they speak, wait to speak, or have no segment yet."""
        return len(self._streams)

    @property
    def listeners(self) -> Mapping[str, int]:
        """Number of live streams by state."""
        with self._lock:
            return self._pacing.listeners(self._clock())

    @property
    def num_underruns(self) -> int:
        """Patches of live streams that were ready after their playback time, since the start."""
        return self._pacing.num_underruns

    def open(
        self,
        emit: Callable[[Item], None],
        is_behind: Callable[[], bool],
        *,
        is_live: bool = False,
        lead: int | None = None,
        priority: int = 0,
        recorder: Recorder | None = None,
    ) -> int:
        """Open a stream. Returns its id. The talker's thread calls both functions.

        `is_behind` returns whether the client has as many unread patches as it may; the stream pauses until it reads.
        `is_live`: the stream is played while it is generated, so it is paced; its owner calls `begin_playback`.
        `lead`: of this stream instead of `speech_lead`. `priority`: streams with a lower one come first.
        Raises: CapacityError when too many streams are open.
        """
        with self._lock:
            self._check_healthy()
            stream = next(self._ids)
            self.scheduler.open(stream, is_job=not is_live)
            self._pacing.open(stream, is_live=is_live, lead=lead, priority=priority)
            self._streams[stream] = _Stream(emit, is_behind, recorder)
        return stream

    def add(self, stream: int, segment: SpeechSegment, *, wakes: bool = True) -> None:
        """Append a segment to an open stream; does nothing if the stream has failed.

        `wakes`: False: the caller calls `wake` when all segments that may share a patch are there. As many as may join
        a patch do not wait for that.
        """
        with self._lock:
            known = self._streams.get(stream)
            if known is not None:
                known.segments[segment.index] = segment
                self.scheduler.add(stream, segment.index)
                self._pacing.arrive(stream, self._clock())
                if wakes or self.scheduler.num_waiting >= self.scheduler.max_prefills:
                    self._notify()

    def begin_playback(self, stream: int) -> None:
        """Start the playback clock of a live stream, when its first audio is sent; does nothing for an ended one."""
        with self._lock:
            self._pacing.begin_playback(stream, self._clock())
            self._notify()

    def stop_pacing(self) -> None:
        """Generate all speech as fast as possible from now on."""
        with self._lock:
            self._pacing.release()
            self._notify()

    def cancel(self, stream: int) -> None:
        """Remove a stream before the next patch; does nothing if it is unknown."""
        self.post(lambda: self._remove(stream))

    def call(self, work: Callable[[], _T]) -> Future[_T]:
        """Run `work`, which uses the device, on the thread between two patches.

        Raises: the error that stopped the thread; what `work` raises is in the future.
        """
        future: Future[_T] = Future()

        def run() -> None:
            with self._lock:
                is_failed = future not in self._calls
                self._calls.discard(future)
            if not is_failed and future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

        with self._lock:
            self._check_healthy()
            self._calls.add(future)
            self._inbox.append(run)
            self._notify()
        return future

    def _run(self) -> None:
        # Engines and pinned buffers that name no device use the current device of the thread.
        with current_device(self.worker.device):
            super()._run()

    def _step(self) -> bool:
        admitted_at = self._clock()
        self._resume_streams(admitted_at)  # first, because a stream that fails leaves its slot to another one
        with self._lock:
            if not self.worker.num_in_flight:
                self._num_joined = 0
            admitted = self.scheduler.admit(self._joining(admitted_at))
            self._num_joined += len(admitted)
            for stream, *_ in admitted:
                self._pacing.begin_segment(stream)
        for stream, segment, slot in admitted:
            try:
                opened = self._streams[stream]
                self.worker.add(slot, opened.segments.pop(segment), opened.recorder)
            except Exception as error:
                self._fail_step([stream], error)
        if admitted:
            try:
                self.worker.prefill()
            except Exception as error:
                self._fail_step([stream for stream, *_ in admitted if stream in self._streams], error)
        if self._wait_for_segments():
            return True
        with self._lock:
            launchable = self._due_slots(admitted_at)
            if not self.scheduler.num_running and not self.scheduler.num_waiting:
                self.scheduler.check()
        try:
            if launchable:
                self._launch(launchable)
            elif not self.worker.num_in_flight:
                return bool(admitted)
            if self.worker.num_in_flight == self.worker.depth or not launchable:
                patches = self.worker.collect()
                self._latency.observe(*self._launched.popleft(), self._clock())
                self._deliver(patches)
        except Exception as error:
            # The device reports errors late, so any of the patches in flight may have failed.
            affected = {*launchable, *self.worker.drop()}
            self._launched.clear()
            with self._lock:
                slots = self.scheduler.slots
                failed = [each for each in self.scheduler.batch() if slots.slot(each) in affected]
            self._fail_step(failed, error)
        return True

    def _idle_s(self) -> float:
        return max(0.0, self.due_at - self._clock())

    def _joining(self, now: float) -> list[int]:
        """Streams whose segment may still join before the next patch, most urgent first."""
        left = self.scheduler.max_prefills - self._num_joined
        return self._pacing.admissible(self.scheduler.waiting, now)[:left] if left else []

    def _due_slots(self, admitted_at: float) -> list[int]:
        """Slots of the next patch, at most a batch. Pauses streams of it whose client does not read."""
        now = self._clock()
        is_crowded = not self.scheduler.has_room and bool(
            self._pacing.admissible(self.scheduler.waiting, now)
        )
        while True:
            batch = self._pacing.due(
                now, is_crowded=is_crowded, max_rows=self.scheduler.max_batch, patch_s=self._patch_s
            )
            behind = [stream for stream in batch if self._streams[stream].is_behind()]
            if not behind:
                break
            for stream in behind:
                self._pacing.pause(stream)
                self._behind_since[stream] = now
        self.due_at = self._pacing.next_time(self.scheduler.waiting, admitted_at)
        return [self.scheduler.slots.slot(stream) for stream in batch]

    def _patch_s(self, rows: int) -> float:
        return self._latency.seconds(self.worker.batch_size(min(rows, self.scheduler.max_batch)))

    def _wait_for_segments(self) -> bool:
        """Delay the next launch for new segments while the device stays busy without it.

        A segment that just misses a launch starts a whole patch later. Returns False to launch now, True to call again.
        """
        left = self.worker.remaining_s() - self._launch_timing.lead_s
        if left <= 0.0:
            return False
        if self.worker.is_idle:
            self._was_held = False  # the estimate was wrong; a longer lead would not have helped
            return False
        with self._lock:
            if not self.scheduler.has_room or self._pacing.due_at > self._clock():
                return False
            if not self._joining(self._clock()) and not self._inbox:
                was_woken = self._wake.wait(min(left, _POLL_S))
                self._was_held = not was_woken and left <= _POLL_S
        return True

    def _launch(self, slots: Sequence[int]) -> None:
        left, before, launched_at = self.worker.remaining_s(), time.perf_counter(), self._clock()
        self._launched.append((self.worker.batch_size(len(slots)), launched_at))
        self.worker.launch(slots)  # on a CPU it runs the patch
        self._launch_timing.observe(left - (time.perf_counter() - before), was_held=self._was_held)
        self._was_held = False
        self._num_joined = 0
        with self._lock:
            owner = self.scheduler.slots.owner
            ending = {owner(slot) for slot in slots if not self.worker.is_launchable(slot)}
            self._pacing.launch(map(owner, slots), self._clock(), ending)

    def _deliver(self, patches: Mapping[int, AudioDelta | None]) -> None:
        """Emit `patches`, by slot, and end the segments that are finished."""
        with self._lock:
            now = self._clock()
            delivered = [(self.scheduler.slots.owner(slot), patch) for slot, patch in patches.items()]
            for stream, patch in delivered:
                if patch is not None:
                    self._pacing.deliver(stream, len(patch.samples), now)
        for stream, patch in delivered:
            if patch is None:
                self._fail(stream, WorkerError("the model's samples are not finite", where="audio_vae"))
                continue
            self._streams[stream].emit(patch)
            if patch.is_segment_end:
                self._end_segment(stream)

    def _end_segment(self, stream: int) -> None:
        with self._lock:
            self.worker.remove(self.scheduler.slots.slot(stream))
            self.scheduler.end_segment(stream)
            self._pacing.end_segment(stream)
            self._behind_since.pop(stream, None)

    def _resume_streams(self, now: float) -> None:
        """Resume streams whose client reads again. Fails a stream whose pause exceeds the timeout."""
        unread = self._pacing.unread
        with self._lock:
            for stream in unread:
                self._behind_since.setdefault(stream, now)
        for stream, since in list(self._behind_since.items()):
            if stream not in unread and not self._streams[stream].is_behind():
                with self._lock:
                    del self._behind_since[stream]
                    self._pacing.resume(stream)
            elif now - since > self._slow_client_timeout_s:
                self._fail(
                    stream, RequestError("the speech is not being read", status=408, code="client_too_slow")
                )

    def _remove(self, stream: int) -> None:
        with self._lock:
            if stream in self.scheduler.batch():
                self.worker.remove(self.scheduler.slots.slot(stream))
            self.scheduler.remove(stream)
            self._pacing.close(stream)
            self._streams.pop(stream, None)
            self._behind_since.pop(stream, None)

    def _fail(self, stream: int, error: ServeError) -> None:
        self._streams[stream].emit(FailedItem(error=error))
        self._remove(stream)

    def _fail_step(self, streams: Sequence[int], error: Exception) -> None:
        """Fail the streams of an engine call that raised; the others continue."""
        log.error("a step of the talker failed", exc_info=error)
        mapped: ServeError = WorkerError(f"the {self._name} failed: {error}", where="talker")
        if isinstance(error, ServeError):
            mapped = error
        for stream in streams:
            self._fail(stream, mapped)

    def _fail_all(self, error: ServeError) -> None:
        for stream in list(self._streams):
            self._fail(stream, error)
        with self._lock:
            calls = list(self._calls)
            self._calls.clear()
        for call in calls:
            if call.set_running_or_notify_cancel():
                call.set_exception(error)
