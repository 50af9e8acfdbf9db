"""Image loop: a thread that draws the pictures of all requests, one block of a step of one batch at a time.

Its streams have the lowest priority, so that chats and speech overtake it on each device. But priorities decide only
when a kernel ends, and those of a block run for up to milliseconds on the whole device, while a step of the thinker is
hundreds of short ones in a row. So while others have work, the device has nothing of a picture to run for some time
after each block. A batch runs to its end; then the requests take turns.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from mingc.errors import CapacityError, ServeError, WorkerError
from mingc.runtime.engine_thread import EngineThread
from mingc.runtime.engines import stream_priority
from mingc.runtime.images.schedule import partial_steps
from mingc.runtime.images.worker import Batch, Drawing, ImageWorker, PreparedDrawing
from mingc.runtime.request import ImageDone, ImageProgress, PartialImage, Recorder
from mingc.runtime.request_stream import FailedItem, Item

log = logging.getLogger("mingc.engine")

_SHARE = 0.25  # of the device's time, which pictures take at most while others have work there
# Blocks that wait behind the one that runs; work of others that begins meanwhile waits for both.
_MOST_AHEAD = 1
_POLL_S = 0.005  # how often a pause checks whether the others still have work


@dataclass(slots=True, eq=False)
class _Job:
    """The pictures of one request."""

    drawing: Drawing
    seeds: Sequence[int]
    batch_size: int
    asked: tuple[int, int]  # size for the client
    num_partials: int
    priority: int
    emit: Callable[[Item], None]
    recorder: Recorder | None
    prepared: PreparedDrawing | None = None
    num_begun: int = 0  # pictures
    num_batches: int = 0


@dataclass(slots=True, eq=False)
class _Running:
    """The batch that is being drawn: the pictures from `first` on of job `id`."""

    id: int
    job: _Job
    first: int
    batch: Batch
    partials: tuple[int, ...]  # steps after which partial pictures are sent
    num_done: int = 0  # pictures

    @property
    def num_pictures(self) -> int:
        return len(self.batch.tokens)


class ImageLoop(EngineThread):
    """Draws the pictures of the jobs that are submitted.

    Args:
        max_waiting: jobs that may wait for their first batch.
        clock: returns seconds.

    Attributes:
        others_have_work: whether thinker or talkers have, on a device that draws.
        num_drawn, num_steps: pictures and steps of batches since the start.
    """

    def __init__(
        self,
        worker: ImageWorker,
        *,
        max_waiting: int = 128,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("image generator")
        self.worker = worker
        self.max_waiting = max_waiting
        self.others_have_work: Callable[[], bool] = lambda: False
        self._clock = clock
        self._launched: deque[Callable[[], None]] = deque()  # wait for the blocks that are launched
        self._resume_at = 0.0  # when a pause ends, by `clock`
        self._jobs: dict[int, _Job] = {}
        self._running: _Running | None = None
        self._ids = itertools.count(1)
        self.num_drawn = self.num_steps = 0

    @property
    def held(self) -> dict[str, int]:
        return {"picture jobs": len(self._jobs), "picture batches": int(self._running is not None)}

    @property
    def num_running(self) -> int:
        """Pictures of the batch that is being drawn."""
        running = self._running
        return 0 if running is None else running.num_pictures - running.num_done

    @property
    def num_waiting(self) -> int:
        """Pictures whose batch has not begun."""
        return sum(len(job.seeds) - job.num_begun for job in list(self._jobs.values()))

    @property
    def num_waiting_jobs(self) -> int:
        """Jobs of which no batch has begun."""
        return sum(not job.num_batches for job in list(self._jobs.values()))

    def submit(
        self,
        drawing: Drawing,
        seeds: Sequence[int],
        emit: Callable[[Item], None],
        *,
        asked: tuple[int, int],
        batch_size: int,
        num_partials: int = 0,
        priority: int = 0,
        recorder: Recorder | None = None,
    ) -> int:
        """Queue a picture for each of `seeds`. Returns the id of the job; the thread calls `emit`.

        `batch_size`: pictures of a batch at most, for which memory is planned. `asked`: (height, width) for
        the events.

        Raises: CapacityError when too many jobs wait, WorkerError when the thread has failed or is stopping.
        """
        with self._lock:
            self._check_healthy()
            if self.num_waiting_jobs >= self.max_waiting:
                raise CapacityError(
                    f"{self.max_waiting} requests wait for the image generator",
                    fix="try again later, or start the server with a larger --max-queue",
                    code="queue_full",
                )
            job = next(self._ids)
            self._jobs[job] = _Job(drawing, seeds, batch_size, asked, num_partials, priority, emit, recorder)
            self._notify()
        return job

    def cancel(self, job: int) -> None:
        """Remove a job before the next block; does nothing if it is unknown."""
        self.post(lambda: self._remove(job))

    def _run(self) -> None:
        with ExitStack() as stack:
            # Entering a stream also makes its device the current one: the first device comes last.
            for sampler in reversed(self.worker.samplers):
                if (device := sampler.device).type == "cuda":
                    stream = torch.cuda.Stream(device, priority=stream_priority.DRAWING)  # type: ignore[no-untyped-call]
                    loading = torch.cuda.current_stream(device)  # the weights are being copied there
                    stream.wait_stream(loading)
                    stack.enter_context(torch.cuda.stream(stream))
            super()._run()

    def _step(self) -> bool:
        running = self._running
        job = self._next_job() if running is None else running.id
        if job is None:
            return False
        if self._pauses():
            return True
        began = self._clock()
        try:
            if running is None:
                self._begin(job)
            elif not running.batch.is_finished:
                self._advance(running)
            else:
                self._finish_picture(running)
            self._wait_for_blocks(began)
        except Exception as error:
            self._launched.clear()
            log.error("a step of the image generator failed", exc_info=error)
            mapped: ServeError = WorkerError(f"the image generator failed: {error}", where="image_dit")
            if job in self._jobs:
                self._fail(job, error if isinstance(error, ServeError) else mapped)
        return True

    def _wait_for_blocks(self, began: float) -> None:
        """Wait for what is launched: for all of it, and then begin a pause, if others have work; else for all but some.

        `began`: when the last of it was launched.
        """
        is_shared = self.others_have_work()
        self._launched.append(self.worker.record_end())
        while len(self._launched) > (0 if is_shared else _MOST_AHEAD):
            self._launched.popleft()()
        if is_shared:
            now = self._clock()
            self._resume_at = now + (now - began) * (1 / _SHARE - 1)

    def _pauses(self) -> bool:
        """Wait for a while in a pause. Returns whether there was one."""
        left = self._resume_at - self._clock()
        if left <= 0 or not self.others_have_work():
            return False
        with self._lock:
            if not self._is_woken:
                self._wake.wait(min(left, _POLL_S))
        return True

    def _next_job(self) -> int | None:
        """The job whose next batch begins: by priority, then the one that had the fewest, then the oldest."""
        with self._lock:
            return min(
                self._jobs,
                key=lambda each: (self._jobs[each].priority, self._jobs[each].num_batches, each),
                default=None,
            )

    def _begin(self, id: int) -> None:
        job = self._jobs[id]
        if job.prepared is None:
            job.prepared = self.worker.prepare(job.drawing)
        first = job.num_begun
        seeds = job.seeds[first : first + job.batch_size]
        batch = self.worker.begin(job.prepared, seeds)
        steps = partial_steps(job.num_partials, job.prepared.num_steps)
        with self._lock:
            job.num_begun += len(seeds)
            job.num_batches += 1
            self._running = _Running(id, job, first, batch, steps)

    def _advance(self, running: _Running) -> None:
        """Launch a block, and send what is complete after a step."""
        batch, job, before = running.batch, running.job, running.batch.num_done
        if not self.worker.advance(batch):
            return
        self.num_steps += 1
        if batch.is_finished or batch.step in running.partials:
            self.worker.wait(batch)
        indices = range(running.first, running.first + running.num_pictures)
        for step in range(before + 1, batch.num_done + 1):
            for index in indices:
                job.emit(ImageProgress(index=index, step=step, num_steps=batch.prepared.num_steps))
        if batch.step in running.partials:
            number = running.partials.index(batch.step)
            height, width = job.asked
            for index in indices:
                pixels = self.worker.decode(batch, index - running.first)
                job.emit(PartialImage(index=index, number=number, pixels=pixels, height=height, width=width))

    def _finish_picture(self, running: _Running) -> None:
        batch, job, place = running.batch, running.job, running.num_done
        index = running.first + place
        pixels = self.worker.decode(batch, place)
        if job.recorder is not None:
            job.recorder.image_latents.append(self.worker.latents(batch, place))
        running.num_done += 1
        self.num_drawn += 1
        is_last = running.num_done == running.num_pictures
        if is_last:
            self._running = None
            if job.num_begun == len(job.seeds):
                self._remove(running.id)
        height, width = job.asked
        job.emit(ImageDone(index=index, pixels=pixels, height=height, width=width, seed=job.seeds[index]))

    def _remove(self, id: int) -> None:
        with self._lock:
            self._jobs.pop(id, None)
            if self._running is not None and self._running.id == id:
                self._running = None

    def _fail(self, id: int, error: ServeError) -> None:
        job = self._jobs[id]
        self._remove(id)
        job.emit(FailedItem(error=error))

    def _fail_all(self, error: ServeError) -> None:
        for id in list(self._jobs):
            self._fail(id, error)
