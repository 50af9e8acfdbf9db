"""Pictures on two GPUs are those of one: launches and copies of both are in order, whichever GPU is late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from collector import Collector
from fake_engines import HIDDEN
from fake_images import DIT, QUERIES, VAE, image_stages
from torch import Tensor

from mingc.runtime.images.engines import ImageEngines, ImageSampler
from mingc.runtime.images.loop import ImageLoop
from mingc.runtime.images.tokens import TokenLayout
from mingc.runtime.images.worker import Drawing, ImageWorker, PicturePrompt
from mingc.runtime.request import ImageDone
from mingc.runtime.request_stream import FailedItem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
NAMES = ("image_condition", "glyph", "image_dit", "image_vae")
LATE = 20_000_000  # cycles: about 10 ms


class LateSampler(ImageSampler):
    """Runs its steps late, and on the stream of the loop."""

    def blocks(self, tokens: Tensor, caption: Tensor, layout: TokenLayout, time: float) -> Iterator[Tensor]:
        assert torch.cuda.current_stream(self.device) != torch.cuda.default_stream(self.device)
        self._sleep()
        for made in super().blocks(tokens, caption, layout, time):
            self._sleep()
            yield made + 0  # behind the pause

    def _sleep(self) -> None:
        with torch.cuda.device(self.device):
            torch.cuda._sleep(LATE)


def worker(*, late: int | None, num_devices: int) -> ImageWorker:
    devices = [torch.device("cuda", index) for index in range(num_devices)]
    stages = [image_stages(device) for device in devices]
    kinds = [LateSampler if index == late else ImageSampler for index in range(num_devices)]
    samplers = [
        kind(each["image_dit"], DIT, device)
        for kind, each, device in zip(kinds, stages, devices, strict=True)
    ]
    engines = ImageEngines(*(stages[0][name] for name in NAMES), parameters=DIT, vae=VAE, device=devices[0])
    engines.sampler = samplers[0]
    return ImageWorker(engines, *samplers[1:])


def drawing() -> Drawing:
    def prompt(value: float) -> PicturePrompt:
        return PicturePrompt(
            residual=torch.full((QUERIES, HIDDEN), value), delta=torch.zeros(QUERIES, HIDDEN)
        )

    return Drawing(
        size=(512, 512), num_steps=9, guidance=3.0, prompt=prompt(0.4), negative=prompt(0.9), reference=None
    )


def latents(of: ImageWorker, *, gives_way: bool = False) -> torch.Tensor:
    loop, collector = ImageLoop(of), Collector()
    loop.others_have_work = lambda: gives_way
    loop.start()
    try:
        loop.submit(
            drawing(),
            [3, 4],
            collector.put,
            asked=(512, 512),
            batch_size=2,
            num_partials=2,
            recorder=collector.recorder,
        )
        items = collector.wait(
            lambda items: sum(isinstance(each, ImageDone | FailedItem) for each in items) == 2
        )
        assert not any(isinstance(each, FailedItem) for each in items), items[-1]
    finally:
        loop.stop()
    return torch.stack([torch.from_numpy(each) for each in collector.recorder.image_latents])


@pytest.mark.parametrize("late", [None, 0, 1])
def test_two_gpus_draw_the_pictures_of_one(late: int | None) -> None:
    expected = latents(worker(late=None, num_devices=1))
    for gives_way in (False, False, True):
        found = latents(worker(late=late, num_devices=2), gives_way=gives_way)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_step_is_launched_while_the_one_before_runs() -> None:
    late = worker(late=1, num_devices=2)
    with torch.cuda.stream(torch.cuda.Stream(1)), torch.cuda.stream(torch.cuda.Stream(0)):
        batch = late.begin(late.prepare(drawing()), [3])
        late.step(batch)
        assert (batch.step, batch.num_done) == (1, 0)
        late.step(batch)
        assert (batch.step, batch.num_done) == (2, 1)
        late.wait(batch)
        assert batch.num_done == 2
