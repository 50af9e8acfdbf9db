"""Guidance on two devices, each a CPU here: the second computes the negative samples, and nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import repeat
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from collector import Collector
from fake_engines import HIDDEN
from fake_images import BLOCKS, DIT, QUERIES, VAE, image_stages
from held_resources import check_all_is_free
from torch import Tensor

from mingc.runtime.images import worker as image_worker
from mingc.runtime.images.engines import ImageEngines, ImageSampler
from mingc.runtime.images.loop import ImageLoop
from mingc.runtime.images.tokens import TokenLayout
from mingc.runtime.images.worker import Drawing, ImageWorker, PicturePrompt
from mingc.runtime.request import ImageDone, ImageProgress, PartialImage
from mingc.runtime.request_stream import FailedItem, Item

CPU = torch.device("cpu")
NAMES = ("image_condition", "glyph", "image_dit", "image_vae")


class Second(ImageSampler):
    """Counts its samples, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__(image_stages()["image_dit"], DIT, CPU)
        self.samples: list[int] = []
        self.is_lost = False

    def blocks(self, tokens: Tensor, caption: Tensor, layout: TokenLayout, time: float) -> Iterator[Tensor]:
        if self.is_lost:
            raise RuntimeError("the second device is lost")
        self.samples.append(len(tokens))
        return super().blocks(tokens, caption, layout, time)


def worker(second: ImageSampler | None = None) -> ImageWorker:
    stages = image_stages()
    return ImageWorker(
        ImageEngines(*(stages[name] for name in NAMES), parameters=DIT, vae=VAE, device=CPU), second
    )


def drawing(*, guidance: float = 3.0, has_negative: bool = False, has_reference: bool = False) -> Drawing:
    def prompt(value: float) -> PicturePrompt:
        return PicturePrompt(
            residual=torch.full((QUERIES, HIDDEN), value), delta=torch.zeros(QUERIES, HIDDEN)
        )

    return Drawing(
        size=(80, 48),  # 15 tokens, which are padded to 16
        num_steps=4,
        guidance=guidance,
        prompt=prompt(0.4),
        negative=prompt(0.9) if has_negative else None,
        reference=np.full((80, 48, 3), 77, np.uint8) if has_reference else None,
    )


def latents(of: ImageWorker, asked: Drawing) -> list[np.ndarray]:
    batch = of.begin(of.prepare(asked), [3, 4])
    while not batch.is_finished:
        of.step(batch)
    return [of.latents(batch, index) for index in range(2)]


@pytest.mark.parametrize("has_negative", [False, True])
@pytest.mark.parametrize("has_reference", [False, True])
def test_two_devices_draw_the_pictures_of_one(has_negative: bool, has_reference: bool) -> None:
    asked, second = drawing(has_negative=has_negative, has_reference=has_reference), Second()
    found = latents(worker(second), asked)
    np.testing.assert_array_equal(found, latents(worker(), asked))
    assert second.samples == [2] * 3, "one sample of each picture in each step"
    assert not np.array_equal(found, latents(worker(), drawing(guidance=1.0, has_reference=has_reference)))


def test_blocks_are_launched_on_both_devices_in_turn_and_first_on_the_second() -> None:
    """Its tokens are copied behind what the first one was given, so the first one's part must not be there yet."""
    order: list[str] = []

    class Noted(Second):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def blocks(
            self, tokens: Tensor, caption: Tensor, layout: TokenLayout, time: float
        ) -> Iterator[Tensor]:
            for made in super().blocks(tokens, caption, layout, time):
                order.append(self.name)
                yield made

    engines = worker().engines
    engines.sampler = Noted("first")
    of = ImageWorker(engines, Noted("second"))
    batch = of.begin(of.prepare(drawing()), [3])
    of.step(batch)
    assert order == ["second", "first"] * len(BLOCKS)


def test_a_step_leaves_nothing_of_its_blocks() -> None:
    """Their memory is planned for one step, and decoding follows the last."""
    made: list[weakref.ref[Tensor]] = []

    class Watched(Second):
        def blocks(
            self, tokens: Tensor, caption: Tensor, layout: TokenLayout, time: float
        ) -> Iterator[Tensor]:
            for each in super().blocks(tokens, caption, layout, time):
                made.append(weakref.ref(each))
                yield each

    of = worker(Watched())
    batch = of.begin(of.prepare(drawing()), [3])
    of.step(batch)
    assert len(made) == len(BLOCKS) and all(each() is None for each in made)


def test_the_end_of_a_block_is_its_end_on_both_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking, "the thinker's thread needs the processor"

        def record(self, stream: torch.device) -> None:
            self.stream = stream

        def synchronize(self) -> None:
            waited.append(self.stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    of, devices = worker(), [torch.device("cuda", index) for index in range(2)]
    of.samplers = tuple(SimpleNamespace(device=each) for each in devices)  # type: ignore[assignment]
    wait = of.record_end()
    assert waited == []
    wait()
    assert waited == devices


def test_the_second_device_computes_the_negative_samples() -> None:
    """A second sampler that answers with zeros leaves (1 + guidance) times the velocity of the prompt."""

    class Zeros(Second):
        def blocks(
            self, tokens: Tensor, caption: Tensor, layout: TokenLayout, time: float
        ) -> Iterator[Tensor]:
            return repeat(torch.zeros_like(tokens), self.num_blocks)

    one, two = worker(), worker(Zeros())
    plain = one.begin(one.prepare(drawing(guidance=1.0)), [3])
    guided = two.begin(two.prepare(drawing(guidance=3.0)), [3])
    one.step(plain)
    two.step(guided)
    torch.testing.assert_close(guided.velocity, 4 * plain.velocity)


def test_a_lost_second_device_fails_requests_with_guidance_alone() -> None:
    second = Second()
    loop = ImageLoop(worker(second))
    loop.start()
    try:

        def draw(guidance: float) -> Item:
            collector = Collector()
            loop.submit(
                drawing(guidance=guidance), [1], collector.put, asked=(80, 48), batch_size=1, num_partials=1
            )
            return collector.wait(
                lambda items: bool(items) and isinstance(items[-1], ImageDone | FailedItem)
            )[-1]

        second.is_lost = True
        failed = draw(3.0)
        assert isinstance(failed, FailedItem) and "the second device is lost" in failed.error.message
        assert isinstance(draw(1.0), ImageDone) and not second.samples
        second.is_lost = False
        assert isinstance(draw(3.0), ImageDone) and second.samples
    finally:
        loop.stop()


class Unfinished:
    """A copy to the host that is there when it is waited for, as while a GPU computes."""

    waits: ClassVar[list[int]] = []  # how many values were waited for; 0: a step was launched
    is_ready = False

    def __init__(self, *values: Tensor) -> None:
        self.values = values

    def wait(self) -> tuple[Tensor, ...]:
        self.waits.append(len(self.values))
        return self.values


@pytest.fixture
def unfinished(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(image_worker, "AsyncHostCopy", Unfinished)
    monkeypatch.setattr(Unfinished, "waits", [])
    return Unfinished.waits


class Sick(Second):
    """Its step `at` has one value that is not finite."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def blocks(self, tokens: Tensor, caption: Tensor, layout: TokenLayout, time: float) -> Iterator[Tensor]:
        Unfinished.waits.append(0)
        *others, made = super().blocks(tokens, caption, layout, time)
        yield from others
        made = made.clone()
        if len(self.samples) == self.at:
            made[-1, 3, 0] = torch.nan
        yield made


def test_one_step_is_launched_ahead_of_its_check(unfinished: list[int]) -> None:
    of = worker(Sick(at=0))
    batch = of.begin(of.prepare(drawing()), [3, 4])
    found = []
    while not batch.is_finished:
        of.step(batch)
        found.append((batch.step, batch.num_done))
    of.wait(batch)
    assert found == [(1, 0), (2, 1), (3, 2)] and batch.num_done == 3
    assert unfinished == [0, 0, 1, 0, 1, 1], "each check follows the launch of the next step"


@pytest.mark.parametrize("num_partials", [0, 1, 2])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_sick_step_fails_its_request_before_anything_of_it_is_shown(
    at: int, num_partials: int, unfinished: list[int]
) -> None:
    second = Sick(at)
    loop = ImageLoop(worker(second))
    loop.start()
    try:
        sick, well = Collector(), Collector()
        for collector, partials in ((sick, num_partials), (well, 2)):
            loop.submit(drawing(), [1, 2], collector.put, asked=(80, 48), batch_size=2, num_partials=partials)
        shown = sick.wait(lambda items: bool(items) and isinstance(items[-1], FailedItem))
        assert "the model's latents are not finite" in shown[-1].error.message  # type: ignore[union-attr]
        steps = [each.step for each in shown if isinstance(each, ImageProgress)]
        assert max(steps, default=0) < at and not any(isinstance(each, ImageDone) for each in shown)
        assert len([each for each in shown if isinstance(each, PartialImage)]) <= 2 * (at - 1)
        rest = well.wait(lambda items: len([each for each in items if isinstance(each, ImageDone)]) == 2)
        order = [(type(each).__name__, each.index) for each in rest if not isinstance(each, FailedItem)]  # type: ignore[union-attr]
        step = [("ImageProgress", 0), ("ImageProgress", 1)]
        partial = [("PartialImage", 0), ("PartialImage", 1)]
        assert order == [*step, *partial, *step, *partial, *step, ("ImageDone", 0), ("ImageDone", 1)]
        check_all_is_free(loop)
    finally:
        loop.stop()
