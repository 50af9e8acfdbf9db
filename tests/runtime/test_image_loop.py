"""The image loop over a worker without a model: order, batches, partial pictures, cancelling and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from collector import Collector
from held_resources import check_all_is_free
from server_thread import eventually

from mingc.errors import CapacityError, WorkerError
from mingc.runtime.images.loop import ImageLoop
from mingc.runtime.images.worker import Drawing, ImageWorker
from mingc.runtime.request import ImageDone, ImageProgress, PartialImage
from mingc.runtime.request_stream import FailedItem

STEPS = 3


class Worker:
    """Remembers its calls; the pixel of a picture is its seed, before its last step plus 100."""

    samplers = (SimpleNamespace(device=torch.device("cpu")),)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.broken: str | None = None  # the call that fails

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.broken:
            raise RuntimeError("the device is lost")

    def prepare(self, drawing: str) -> Any:
        self._call(f"prepare {drawing}")
        return SimpleNamespace(drawing=drawing, num_steps=STEPS)

    def begin(self, prepared: Any, seeds: Sequence[int]) -> Any:
        self._call(f"begin {prepared.drawing} {[*seeds]}")
        return SimpleNamespace(prepared=prepared, tokens=[*seeds], step=0, num_done=0, is_finished=False)

    def advance(self, batch: Any) -> bool:
        """As on a GPU: of the steps that are launched, all but the last are done."""
        batch.num_done, batch.step = batch.step, batch.step + 1
        batch.is_finished = batch.step == STEPS
        self._call(f"step {batch.step} {batch.prepared.drawing}")
        return True

    def record_end(self) -> Callable[[], None]:
        launched = self.calls[-1]

        def wait() -> None:
            if self.broken == "wait" and "bad" in launched:
                raise RuntimeError("the device is lost")

        return wait

    def wait(self, batch: Any) -> None:
        batch.num_done = batch.step
        self._call(f"wait {batch.step} {batch.prepared.drawing}")

    def decode(self, batch: Any, index: int) -> Any:
        self._call(f"decode {batch.prepared.drawing}")
        return np.full((1, 1, 3), batch.tokens[index] + 100 * (not batch.is_finished), np.uint8)


class Stand:
    """A loop whose steps the test runs."""

    def __init__(self, **options: Any) -> None:
        self.worker = Worker()
        self.loop = ImageLoop(cast(ImageWorker, self.worker), **options)
        self.jobs: dict[str, int] = {}

    def draw(self, name: str, seeds: Sequence[int] = (1,), **options: Any) -> Collector:
        collector = Collector()
        self.jobs[name] = self.loop.submit(
            cast(Drawing, name), seeds, collector.put, asked=(5, 7), **{"batch_size": 4, **options}
        )
        return collector

    def run(self, steps: int | None = None) -> None:
        """Run so many steps, or until there is nothing to do."""
        done = 0
        while steps is None or done < steps:
            while self.loop._inbox:
                self.loop._inbox.popleft()()
            if not self.loop._step():
                assert steps is None
                return
            done += 1


def test_a_request_gets_its_progress_its_partial_pictures_and_its_pictures() -> None:
    stand = Stand()
    collector = stand.draw("a", [8, 9], num_partials=1)
    assert (stand.loop.num_waiting, stand.loop.num_running) == (2, 0)
    stand.run(2)
    assert (stand.loop.num_waiting, stand.loop.num_running) == (0, 2)
    stand.run()
    found: list[Any] = []
    for item in collector.items:
        match item:
            case ImageProgress():
                found.append((item.index, item.step, item.num_steps))
            case PartialImage():
                found.append((item.index, f"partial {item.number}", item.pixels.max()))
            case ImageDone():
                assert (item.height, item.width) == (5, 7)
                found.append((item.index, item.seed, item.pixels.max()))
    steps = [[(index, step, 3) for index in range(2)] for step in (1, 2, 3)]
    partials = [(0, "partial 0", 108), (1, "partial 0", 109)]
    assert found == [*steps[0], *steps[1], *partials, *steps[2], (0, 8, 8), (1, 9, 9)]
    assert (stand.loop.num_drawn, stand.loop.num_steps) == (2, 3)
    check_all_is_free(stand.loop)


def test_batches_go_on_counting_pictures_and_number_the_partial_ones_that_there_are_steps_for() -> None:
    stand = Stand()
    collector = stand.draw("a", [8, 9, 5], num_partials=3, batch_size=2)
    stand.run()
    shown = [(each.index, each.number) for each in collector.items if isinstance(each, PartialImage)]
    assert shown == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    done = [each for each in collector.items if isinstance(each, ImageDone)]
    assert [(each.index, each.seed, each.pixels.max()) for each in done] == [(0, 8, 8), (1, 9, 9), (2, 5, 5)]


def test_requests_take_turns_by_priority_and_by_the_batches_that_they_had() -> None:
    stand = Stand()
    stand.draw("many", range(5), batch_size=2)
    stand.draw("late", [7], priority=1)
    stand.run(1)
    stand.draw("one", [9])
    stand.draw("urgent", [5], priority=-1)
    stand.run()
    begun = [call for call in stand.worker.calls if call.startswith(("begin", "prepare"))]
    assert begun == [
        "prepare many", "begin many [0, 1]", "prepare urgent", "begin urgent [5]", "prepare one", "begin one [9]",
        "begin many [2, 3]", "begin many [4]", "prepare late", "begin late [7]",
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 5])
def test_a_cancelled_request_ends_before_the_next_step(steps: int) -> None:
    stand = Stand()
    leaving = stand.draw("leaving", [1, 2])
    stand.run(steps)
    stand.loop.cancel(stand.jobs["leaving"])
    before, seen = len(stand.worker.calls), len(leaving.items)
    staying = stand.draw("staying")
    stand.run()
    assert all("staying" in call for call in stand.worker.calls[before:])
    assert len(leaving.items) == seen and isinstance(staying.items[-1], ImageDone)
    check_all_is_free(stand.loop)


@pytest.mark.parametrize("broken", ["prepare bad", "begin bad [1]", "step 2 bad", "decode bad", "wait"])
def test_an_error_fails_the_request_of_its_batch_alone(broken: str) -> None:
    stand = Stand()
    stand.worker.broken = broken
    bad, good = stand.draw("bad"), stand.draw("good")
    stand.run()
    failed = bad.items[-1]
    assert isinstance(failed, FailedItem) and "the device is lost" in failed.error.message
    assert isinstance(good.items[-1], ImageDone)
    check_all_is_free(stand.loop)


def test_a_full_queue_refuses_and_a_stopped_thread_fails_what_it_has() -> None:
    stand = Stand(max_waiting=1)
    waiting = stand.draw("a")
    with pytest.raises(CapacityError, match="1 requests wait"):
        stand.draw("b")
    stand.run(1)
    stand.draw("b")  # the first one does not wait any more
    ready = threading.Event()
    stand.worker.advance = lambda batch: ready.set()  # type: ignore[method-assign]  # endless
    stand.loop.start()
    assert ready.wait(20)
    stand.loop.stop()
    failed = waiting.items[-1]
    assert isinstance(failed, FailedItem) and failed.error.status == 503
    with pytest.raises(WorkerError, match="stopping"):
        stand.draw("c")
    check_all_is_free(stand.loop)


class Shared(Worker):
    """A worker whose steps have three blocks of `BLOCK_S` on a device, and others that have work there.

    `now` is the clock of the loop: it moves while a block runs, and whenever the loop asks for the others in a pause.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ends_at = 0.0  # of what is launched
        self.blocks: list[tuple[float, float]] = []  # launch and end
        self.is_busy = True
        self.cancel: Callable[[], None]
        self.cancel_at = 0  # blocks

    def clock(self) -> float:
        return self.now

    def others_have_work(self) -> bool:
        self.now += TICK_S
        return self.is_busy

    def advance(self, batch: Any) -> bool:
        self.ends_at = max(self.ends_at, self.now) + BLOCK_S
        self.blocks.append((self.now, self.ends_at))
        if len(self.blocks) == self.cancel_at:
            self.cancel()
        return len(self.blocks) % 3 == 0 and super().advance(batch)

    def record_end(self) -> Callable[[], None]:
        end = self.ends_at

        def wait() -> None:
            self.now = max(self.now, end)

        return wait


BLOCK_S, TICK_S = 1 / 256, 1 / 4096  # sums are exact


def draw_beside_others(worker: Shared) -> Collector:
    """A picture of nine blocks, until it is drawn or cancelled."""
    loop, collector = ImageLoop(cast(ImageWorker, worker), clock=worker.clock), Collector()
    loop.others_have_work = worker.others_have_work
    job = loop.submit(cast(Drawing, "a"), [1], collector.put, asked=(5, 7), batch_size=4)
    worker.cancel = lambda: loop.cancel(job)
    loop.start()
    try:
        eventually(lambda: not loop.held["picture jobs"])
    finally:
        loop.stop()
    check_all_is_free(loop)
    return collector


def test_pictures_take_a_quarter_of_the_device_while_others_have_work() -> None:
    worker = Shared()
    collector = draw_beside_others(worker)
    assert isinstance(collector.items[-1], ImageDone) and len(worker.blocks) == 3 * STEPS
    pauses = [after - end for (_, end), (after, _) in pairwise(worker.blocks)]
    assert all(3 * BLOCK_S <= pause <= 3 * BLOCK_S + 9 * TICK_S for pause in pauses), pauses


def test_pictures_alone_are_launched_ahead_by_one_block() -> None:
    """So the device always has work, and what comes waits for two blocks at most."""
    worker = Shared()
    worker.is_busy = False
    draw_beside_others(worker)
    launches, ends = zip(*worker.blocks, strict=True)
    assert all(after <= end for after, end in zip(launches[1:], ends, strict=False)), (
        "the device waits for none"
    )
    assert all(end <= launch for end, launch in zip(ends, launches[2:], strict=False)), "two ahead"


def test_a_pause_ends_with_the_work_of_the_others() -> None:
    worker = Shared()

    def others_have_work() -> bool:
        worker.now += TICK_S
        return worker.now < 6 * BLOCK_S  # in the second pause

    worker.others_have_work = others_have_work  # type: ignore[method-assign]
    draw_beside_others(worker)
    launches = [launch for launch, _ in worker.blocks]
    assert launches[1] >= 4 * BLOCK_S and 6 * BLOCK_S <= launches[2] <= 6 * BLOCK_S + 2 * TICK_S


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_cancelled_picture_ends_between_two_blocks(is_busy: bool) -> None:
    worker = Shared()
    worker.is_busy, worker.cancel_at = is_busy, 2
    assert not draw_beside_others(worker).items
    assert len(worker.blocks) == 2
