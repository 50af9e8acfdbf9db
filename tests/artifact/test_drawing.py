"""Pictures of an artifact with eager engines: the official code's, alone and beside other requests."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_omni import chat, speech_request
from held_resources import service_resources, wait_until_free
from image_checkpoint import IMAGE_DATA
from live_memory import LiveMemory
from mingc_command import mingc_here
from PIL import Image
from preprocess_data import png
from safetensors.numpy import load_file

from mingc.artifacts.artifact import open_artifact
from mingc.errors import RequestError, WorkerError
from mingc.media.decoding import InProcessDecoder
from mingc.prompts.conversation import MediaPart, Message, TextPart
from mingc.runtime.engines.stage_loader import load_stage
from mingc.runtime.images.engines import ImageEngines
from mingc.runtime.images.memory import ImageMemory
from mingc.runtime.images.worker import Batch, Drawing, ImageWorker, PicturePrompt
from mingc.runtime.request import (
    Done,
    ImageDone,
    ImageEvent,
    ImageProgress,
    ImageRequest,
    Recorder,
)
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.service.served_stages import find_image_stages
from mingc.server.picture_format import PictureSpec, encode_picture

CPU = torch.device("cpu")
GOLDEN = json.loads((IMAGE_DATA / "imagegen.json").read_text(encoding="utf-8"))
LOOPS = load_file(IMAGE_DATA / "imagegen_loop.safetensors")
CONDITION = load_file(IMAGE_DATA / "imagegen_condition.safetensors")


class GivenRows(ImageEngines):
    """Takes the rows of a caption instead of hidden rows."""

    def condition(self, residual: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return residual


@pytest.fixture(scope="module")
def worker(image_artifact: Path) -> ImageWorker:
    artifact = open_artifact(image_artifact)
    stages = find_image_stages(artifact.manifest)
    assert stages is not None and stages.glyph is not None
    names = (stages.condition, stages.glyph, stages.sampler, stages.decoder)
    loaded = [load_stage(artifact, name, CPU) for name in names]
    return ImageWorker(GivenRows(*loaded, parameters=stages.dit, vae=stages.vae, device=CPU))


def relative_error(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def drawing_of(case: str) -> Drawing:
    given = GOLDEN["loops"][case]
    caption = torch.from_numpy(CONDITION[given["caption"].removeprefix("condition: ")][0])
    pixels = LOOPS.get(f"{case}.ref_pixels")
    reference = None if pixels is None else ((pixels[0].transpose(1, 2, 0) / 2 + 0.5) * 255).round()
    return Drawing(
        size=(given["height"], given["width"]),
        num_steps=given["steps"],
        guidance=given["guidance"],
        prompt=PicturePrompt(residual=caption, delta=torch.zeros(())),
        reference=None if reference is None else reference.astype(np.uint8),
    )


def steps_of(worker: ImageWorker, batch: Batch) -> Iterator[np.ndarray]:
    while not batch.is_finished:
        worker.step(batch)
        yield worker.latents(batch, 0)


@pytest.mark.parametrize("case", GOLDEN["loops"])
def test_all_latents_of_a_loop_are_those_of_the_official_code(
    case: str, worker: ImageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = GOLDEN["loops"][case]
    if given["scheduler"] != "shipped":
        dynamic = replace(
            worker.engines.parameters, is_shift_dynamic=given["scheduler"]["use_dynamic_shifting"]
        )
        monkeypatch.setattr(worker.engines, "parameters", dynamic)
    prepared = worker.prepare(drawing_of(case))
    np.testing.assert_allclose(prepared.levels, LOOPS[f"{case}.sigmas"], rtol=0, atol=1e-7)
    expected = LOOPS[f"{case}.latents"][:, 0]
    batch = worker.begin(prepared, [given["seed"]])
    np.testing.assert_array_equal(worker.latents(batch, 0), LOOPS[f"{case}.noise"][0])
    made = [*steps_of(worker, batch)]
    assert len(made) == max(1, len(expected) - 1), "the last step changes nothing"
    for latents, wanted in zip(made, expected, strict=False):
        assert relative_error(latents, wanted) < 1e-5
    assert relative_error(made[-1], expected[-1]) < 1e-5
    difference = np.abs(worker.decode(batch, 0).astype(int) - LOOPS[f"{case}.image"])
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-3


def test_each_picture_of_a_batch_is_the_picture_of_its_seed(worker: ImageWorker) -> None:
    """Not to the bit: the matrices of a batch have more rows."""
    prepared = worker.prepare(drawing_of("g2_ref_tall"))
    batch = worker.begin(prepared, [1, 2, 3])
    alone = [worker.begin(prepared, [seed]) for seed in (1, 2, 3)]
    for each in (batch, *alone):
        for _ in steps_of(worker, each):
            pass
    for index, each in enumerate(alone):
        assert relative_error(worker.latents(batch, index), worker.latents(each, 0)) < 1e-5


def test_a_partial_picture_is_what_is_expected_of_the_noise(worker: ImageWorker) -> None:
    """On a straight way from noise to picture: latents + what is left of the noise level × velocity."""
    prepared = worker.prepare(drawing_of("g2_square"))
    batch = worker.begin(prepared, [43])
    worker.step(batch)
    level = LOOPS["g2_square.sigmas"][1]
    ahead = LOOPS["g2_square.latents"][0, 0] - level * LOOPS["g2_square.noise_pred"][0, 0]
    straight = worker.engines.decode(torch.from_numpy(ahead)).permute(1, 2, 0)
    expected = ((straight / 2 + 0.5).clamp(0, 1) * 255).round().numpy()
    assert np.abs(worker.decode(batch, 0) - expected).max() <= 1


def test_a_negative_equal_to_the_prompt_guides_nowhere(worker: ImageWorker) -> None:
    guided = drawing_of("g35_glyph")
    pictures = []
    for drawing in (replace(guided, negative=guided.prompt), replace(guided, guidance=1.0), guided):
        batch = worker.begin(worker.prepare(drawing), [4])
        *_, last = steps_of(worker, batch)
        pictures.append(last)
    assert relative_error(pictures[0], pictures[1]) < 1e-5 < relative_error(pictures[2], pictures[1])


def test_latents_that_are_not_finite_fail_the_step(worker: ImageWorker) -> None:
    batch = worker.begin(worker.prepare(drawing_of("g2_square")), [1])
    batch.tokens = torch.full_like(batch.tokens, math.nan)
    with pytest.raises(WorkerError, match="not finite"):
        worker.step(batch)


def request_of(text: str = "A red house.", *media: MediaPart, **fields: Any) -> ImageRequest:
    given = {"resolution": 512, "seed": 5, "num_steps": 3, **fields}
    message = Message(role="user", parts=(*media, TextPart(text=text)))
    return ImageRequest(request_id="draw", messages=(message,), **given)


def golden_request(case: str) -> ImageRequest:
    given = GOLDEN["e2e"][case]
    media = [MediaPart(kind="image", data=png(CONDITION[name]), where=name) for name in given["images"]]
    return request_of(
        given["user_text"],
        *media,
        aspect=given["aspect"],
        resolution=given["highres"],
        seed=given["seed"],
        num_steps=given["steps"],
        guidance=given["guidance"],
        reference=media[0] if media else None,
    )


async def collect(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


async def draw(service: OmniService, request: ImageRequest) -> tuple[list[ImageEvent], Recorder]:
    recorder = Recorder()
    return await collect(service.draw(request, recorder=recorder)), recorder


def pictures_of(events: list[Any]) -> list[ImageDone]:
    return [event for event in events if isinstance(event, ImageDone)]


@pytest.fixture
def service(image_artifact: Path) -> OmniService:
    return open_service(image_artifact, media=InProcessDecoder())


@pytest.fixture
def service_of_two_devices(image_artifact: Path) -> OmniService:
    return open_service(image_artifact, EngineOptions(image_devices=("cpu", "cpu")), media=InProcessDecoder())


def run(service: OmniService, work: Any) -> Any:
    async def whole() -> Any:
        before = service_resources(service, asyncio.get_running_loop())
        try:
            result = await asyncio.wait_for(work, 120)
            await wait_until_free(service, before)
            return result
        finally:
            await service.close(shutdown_timeout_s=0)

    return asyncio.run(whole())


@pytest.mark.parametrize("devices", ["service", "service_of_two_devices"])
@pytest.mark.parametrize("case", GOLDEN["e2e"])
def test_a_picture_of_the_whole_service_is_the_official_one(
    case: str, devices: str, request: pytest.FixtureRequest
) -> None:
    given, service = GOLDEN["e2e"][case], request.getfixturevalue(devices)
    assert service.info.has_image_output
    events, recorder = run(service, draw(service, golden_request(case)))
    done = events[-1]
    (picture,) = pictures_of(events)
    assert relative_error(recorder.image_latents[0], LOOPS[f"{case}.final_latent"][0]) < 1e-5
    assert picture.pixels.shape == (*given["diffusion_size"], 3) and picture.seed == given["seed"]
    assert [picture.height, picture.width] == given["image_size"]
    file = encode_picture(picture.pixels, (picture.height, picture.width), PictureSpec())
    found = np.asarray(Image.open(io.BytesIO(file))).astype(int)
    difference = np.abs(found - LOOPS[f"{case}.image"])
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-3
    height, width = given["diffusion_size"]
    assert isinstance(done, Done) and done.usage.image_tokens == height * width // 256
    recorded = "edit" if given["images"] else "glyph"
    assert done.usage.prompt_tokens == CONDITION[f"{recorded}.appended_ids"].shape[1]
    assert done.usage.prompt_image_tokens == len(CONDITION.get(f"{recorded}.image_embeds", ()))
    moments = [
        done.timings_ms[name]
        for name in ("prepared", "prefill", "condition", "first_step", "first_image", "done")
    ]
    assert moments == sorted(moments)


def test_a_picture_has_the_same_bits_alone_and_beside_everything_else(service: OmniService) -> None:
    """Beside chats, speech and other pictures, and with a prompt that the prefix cache has."""
    request = request_of('A sign "OPEN".', num_pictures=2, num_steps=2)

    async def work() -> None:
        alone, _ = await draw(service, request)
        ends = asyncio.Event()

        async def busy(events: Any) -> None:
            while not ends.is_set():
                await collect(events())

        others = [
            asyncio.ensure_future(busy(events))
            for events in (
                lambda: service.chat(chat("Hello, who are you?", max_tokens=20)),
                lambda: service.speech(speech_request("Good morning.", seed=1, max_steps=3)),
                lambda: service.draw(request_of("A tree.", num_steps=2, seed=None, guidance=1.0)),
            )
        ]
        try:
            beside, _ = await draw(service, request)
        finally:
            ends.set()
            await asyncio.gather(*others)
        for one, other in zip(pictures_of(alone), pictures_of(beside), strict=True):
            assert one.seed == other.seed
            np.testing.assert_array_equal(one.pixels, other.pixels)

    run(service, work())


def test_events_seeds_and_partial_pictures_of_a_request(service: OmniService) -> None:
    async def work() -> None:
        drawn = request_of(num_pictures=2, num_partials=2, seed=None, num_steps=4, aspect=1.5)
        events, _ = await draw(service, drawn)
        first, second = pictures_of(events)
        assert second.seed == first.seed + 1 and not np.array_equal(first.pixels, second.pixels)
        shown = {type(event).__name__ for event in events}
        assert shown == {"ImageProgress", "PartialImage", "ImageDone", "Done"}
        sizes = {(each.pixels.shape, each.height, each.width) for each in events if hasattr(each, "pixels")}
        assert sizes == {((416, 608, 3), 416, 624)}  # 512 × 768 is asked for
        again, _ = await draw(service, replace(drawn, seed=first.seed, num_partials=0))
        np.testing.assert_array_equal(pictures_of(again)[0].pixels, first.pixels)
        one = replace(drawn, seed=first.seed, num_pictures=1, num_partials=0, negative_prompt='no "sign"')
        negative, _ = await draw(service, one)
        assert np.abs(pictures_of(negative)[0].pixels.astype(int) - first.pixels).max() > 1  # not by rounding
        assert negative[-1].usage.prompt_tokens > events[-1].usage.prompt_tokens
        load = service.load
        assert (load.drawn_pictures, load.image_steps, load.drawing_pictures) == (5, 9, 0)

    run(service, work())


def test_a_client_that_leaves_ends_its_pictures(service: OmniService) -> None:
    async def work() -> None:
        for count in range(3):
            async with aclosing(service.draw(request_of(num_steps=200, num_pictures=2))) as events:
                seen = 0
                async for _ in events:
                    seen += 1
                    if seen > count:
                        break

    run(service, work())  # waits until nothing is held


@pytest.mark.parametrize(("num_steps", "shutdown_timeout_s"), [(3, 60.0), (200, 0.0)])
def test_a_service_that_stops_waits_for_a_picture_as_long_as_it_may(
    num_steps: int, shutdown_timeout_s: float, service: OmniService
) -> None:
    async def work() -> None:
        async with aclosing(service.draw(request_of(num_steps=num_steps))) as events:
            assert isinstance(await anext(events), ImageProgress)
            stops = asyncio.ensure_future(service.close(shutdown_timeout_s=shutdown_timeout_s))
            if shutdown_timeout_s:
                assert len(pictures_of(await collect(events))) == 1
            else:
                with pytest.raises(WorkerError, match="stopping") as ended:
                    await collect(events)
                assert ended.value.status == 503
            await stops

    run(service, work())


def test_a_client_that_leaves_during_its_prompt_ends_that(
    service: OmniService, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[int] = []
    thinker = service.thinker
    assert thinker is not None

    def submit(*_: object, **__: object) -> int:  # never answered
        prompts.append(7)
        return 7

    monkeypatch.setattr(thinker, "submit_queries", submit)
    monkeypatch.setattr(thinker, "cancel", prompts.remove)

    async def work() -> None:
        waiting = asyncio.ensure_future(draw(service, request_of()))
        while not prompts:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() and not prompts

    run(service, work())


WRONG = {
    "num_pictures": 11,
    "num_steps": 0,
    "guidance": math.nan,
    "height": 512,
    "aspect": 0.0,
    "resolution": 600,
    "seed": -1,
    "num_partials": 4,
    "negative_prompt": "fog",  # without guidance
}


def test_values_out_of_range_are_refused_by_name(service: OmniService) -> None:
    async def work() -> None:
        for field, value in WRONG.items():
            others = {"guidance": 1.0} if field == "negative_prompt" else {}
            with pytest.raises(RequestError) as caught:
                await draw(service, request_of(**{**others, field: value}))
            assert caught.value.param == field and caught.value.status == 400
        with pytest.raises(RequestError, match="expected 0 to 9007199254740990"):
            await draw(service, request_of(seed=(1 << 53) - 1, num_pictures=2))

    run(service, work())


def test_a_picture_that_does_not_fit_the_memory_is_refused_before_a_step(service: OmniService) -> None:
    images = service._images
    assert images is not None
    needed = images.memory.batch_bytes((512, 512), 1, num_caption=32, num_samples=1, num_frames=1)
    service._images = replace(images, num_bytes=needed)

    async def work() -> None:
        events, _ = await draw(service, request_of(guidance=1.0, num_pictures=2))
        assert len(pictures_of(events)) == 2
        with pytest.raises(RequestError, match="a picture of 1024×1024 needs") as caught:
            await draw(service, request_of(guidance=1.0, resolution=1024))
        assert caught.value.status == 507

    run(service, work())


def test_draw_writes_the_picture_of_the_service(image_artifact: Path, tmp_path: Path) -> None:
    case = GOLDEN["e2e"]["e2e_t2i"]
    file = tmp_path / "sign.png"
    words = ("--size", "704x352", "--seed", case["seed"], "--steps", case["steps"])
    done = mingc_here("draw", image_artifact, case["user_text"], "--output", file, *words, "--json")
    assert done.code == 0, done.stderr
    assert done.document == {"file": str(file), "width": 704, "height": 352, "seed": 42}
    with Image.open(file) as picture:
        assert picture.format == "PNG"
        assert np.abs(np.asarray(picture).astype(int) - LOOPS["e2e_t2i.image"]).max() <= 1


@pytest.mark.parametrize(
    ("prompt", "words", "where"),
    [
        ("A cat", ("--output", "absent/cat.png"), "--output"),
        ("A cat", ("--output", "cat.tif"), "--output"),
        (" ", (), "PROMPT"),
        ("A cat", ("--guidance", "nan"), "--guidance"),
        ("A cat", ("--guidance", "1", "--negative-prompt", "fog"), "--negative-prompt"),
        ("A cat", ("--seed", 1 << 64), "--seed"),
        ("A cat", ("--size", "1024x1"), "--size"),
        ("A cat", ("--reference", "absent.png"), "--reference"),
    ],
)
def test_draw_refuses_what_is_wrong_before_it_opens_the_artifact(
    prompt: str, words: tuple[object, ...], where: str, tmp_path: Path
) -> None:
    output = () if "--output" in words else ("--output", tmp_path / "cat.png")
    done = mingc_here("draw", tmp_path / "no-artifact", prompt, *output, *words)
    assert done.code not in (0, 1) and where in done.stderr and "no-artifact" not in done.stderr, done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("size", "num_pictures", "num_frames"), [((512, 512), 1, 1), ((512, 512), 3, 1), ((256, 1024), 1, 2)]
)
def test_a_batch_takes_no_more_memory_than_is_planned(
    size: tuple[int, int], num_pictures: int, num_frames: int, worker: ImageWorker
) -> None:
    """And the plan is no more than a few times of what it takes."""
    engines = worker.engines
    memory = ImageMemory(
        sampler=engines.parameters,
        vae=engines.vae,
        itemsize=engines.sampler.itemsize,
        max_samples=engines.sampler.max_batch,
    )
    reference = np.zeros((*size, 3), np.uint8) if num_frames == 2 else None
    drawing = replace(drawing_of("g2_square"), size=size, reference=reference)
    prepared = worker.prepare(drawing)
    batch = worker.begin(prepared, range(num_pictures))
    with LiveMemory() as step:
        worker.step(batch)
    with LiveMemory() as decode:
        worker.decode(batch, 0)
    planned = memory.step_bytes(
        size, num_pictures, num_caption=prepared.captions.shape[1], num_samples=2, num_frames=num_frames
    )
    assert step.peak <= planned <= 2 * step.peak
    assert decode.peak <= memory.decode_bytes(size) <= 5 * decode.peak


def test_the_cost_of_a_block_is_that_of_a_picture_of_1024_pixels_with_guidance(image_artifact: Path) -> None:
    """2 · rows · weights of a layer, and 4 · rows² · width of attention; within what embeddings and ends add."""
    manifest = open_artifact(image_artifact).manifest
    graph = manifest.stages["image_dit"].graphs["block"]
    assert graph.spec.layer_instances == ("noise_refiner.0", "layers.0", "layers.1")
    (engine,) = graph.engines
    (cost,) = engine.cost
    width, inner, whole = 96, 256, 4096 + 512
    rows = 2 * whole  # two samples through one layer
    attention = 2 * 4 * width * whole**2
    assert cost.flops == pytest.approx(rows * 2 * (4 * width**2 + 3 * width * inner) + attention, rel=0.03)
