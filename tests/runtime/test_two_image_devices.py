"""Guidance on two devices, each a CPU here: the second computes the negative samples, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import numpy as np
import pytest
import torch
from collector import Collector
from fake_engines import HIDDEN
from fake_images import BLOCKS, DIT, QUERIES, VAE, image_stages
from torch import Tensor

from mingc.runtime.images.engines import ImageEngines, ImageSampler
from mingc.runtime.images.loop import ImageLoop
from mingc.runtime.images.tokens import TokenLayout
from mingc.runtime.images.worker import Drawing, ImageWorker, PicturePrompt
from mingc.runtime.request import ImageDone
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
