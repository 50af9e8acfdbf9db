"""`/v1/images/…` and pictures in chats of a real artifact with random weights, by the official client."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from held_resources import wait_until_equal
from image_checkpoint import IMAGE_DATA
from numpy.typing import NDArray
from openai import OpenAI
from PIL import Image
from preprocess_data import png
from safetensors.numpy import load_file
from server_thread import eventually, metric, run_server

from mingc.media.decoder_pool import DecoderPool
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService

SIZE = "512x512"
IDLE = (
    "mingc_num_requests_running", "mingc_pictures_drawing", 'mingc_num_requests_waiting{engine="image"}',
    *(f'mingc_limit_used{{limit="{name}"}}' for name in ("requests", "chats", "image_queue", "answer_bytes")),
)  # fmt: skip
FAST = {"num_inference_steps": 2, "seed": 7}


def large_png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


PICTURE = png(np.random.default_rng(0).integers(0, 256, (60, 90, 3)).astype(np.uint8))


class Server:
    def __init__(self, url: str, service: OmniService) -> None:
        self.url, self.service = url, service
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.model = service.info.model

    def generate(self, prompt: str = "A cat", extra: Any = None, **fields: Any) -> Any:
        fields = {"model": self.model, "size": SIZE, **fields}
        return self.client.images.generate(prompt=prompt, extra_body={**FAST, **(extra or {})}, **fields)

    def edit(self, image: Any = PICTURE, extra: Any = None, **fields: Any) -> Any:
        fields = {"model": self.model, "size": SIZE, "prompt": "In blue", **fields}
        return self.client.images.edit(image=image, extra_body={**FAST, **(extra or {})}, **fields)


@pytest.fixture(scope="module")
def server(image_artifact: Path) -> Iterator[Server]:
    services: list[OmniService] = []

    def make() -> OmniService:
        services.append(open_service(image_artifact, media=DecoderPool()))
        return services[0]

    with run_server(make) as url:
        server = Server(url, services[0])
        before = server.service.held
        with server.client:
            yield server
        wait_until_equal(before, lambda: server.service.held)


def pixels(data: str) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return np.asarray(image)


@pytest.mark.parametrize("case", ["e2e_t2i", "e2e_edit"])
def test_pictures_are_those_of_the_official_code(server: Server, case: str) -> None:
    """By the golden set: from the prompt to the file, of which at most 1 value in 1,000 is off by 1."""
    recorded = json.loads((IMAGE_DATA / "imagegen.json").read_text(encoding="utf-8"))["e2e"][case]
    expected = load_file(IMAGE_DATA / "imagegen_loop.safetensors")[f"{case}.image"]
    inputs = load_file(IMAGE_DATA / "imagegen_condition.safetensors")
    height, width = recorded["image_size"]
    fields = {
        "prompt": recorded["user_text"],
        "size": f"{width}x{height}",
        "extra": {
            "num_inference_steps": recorded["steps"],
            "guidance_scale": recorded["guidance"],
            "seed": recorded["seed"],
        },
    }
    if recorded["images"]:
        answer = server.edit(image=[png(inputs[name]) for name in recorded["images"]], **fields)
    else:
        answer = server.generate(**fields)
    off = np.abs(pixels(answer.data[0].b64_json).astype(int) - expected)
    assert answer.size == f"{width}x{height}" and off.max() <= 1 and (off > 0).mean() < 1e-3


def test_a_stream_ends_with_the_picture_that_is_sent_whole(server: Server) -> None:
    fields: dict[str, Any] = {"extra": {"num_inference_steps": 4, "seed": 0}}
    whole = server.generate(**fields)
    assert whole.data[0].seed == 0
    *partial, done = server.generate(stream=True, partial_images=2, **fields)
    np.testing.assert_array_equal(pixels(done.b64_json), pixels(whole.data[0].b64_json))
    assert [each.partial_image_index for each in partial] == [0, 1]
    errors = [np.abs(pixels(each.b64_json).astype(int) - pixels(done.b64_json)).mean() for each in partial]
    assert 0 < errors[1] < errors[0]
    assert whole.usage.input_tokens == done.usage.input_tokens > 0
    assert whole.usage.output_tokens == done.usage.output_tokens == 1024


def test_the_pictures_of_a_request_are_those_of_their_seeds(server: Server) -> None:
    """But for rounding: they are drawn as one batch."""
    both, one = server.generate(n=2), server.generate(extra={"seed": FAST["seed"] + 1})
    assert [each.seed for each in both.data] == [7, 8] and both.usage.output_tokens == 2 * 1024
    off = np.abs(pixels(both.data[1].b64_json).astype(int) - pixels(one.data[0].b64_json))
    assert off.max() <= 1 and (off > 0).mean() < 1e-3


def test_a_chat_draws_what_an_edit_does(server: Server) -> None:
    edited = server.edit()
    assert edited.usage.input_tokens_details.image_tokens > 0
    url = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
    answer = server.client.chat.completions.create(
        model=server.model,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "In blue"},
                ],
            }
        ],
        modalities=["image"],  # type: ignore[list-item]
        extra_body={"image_generation": {"size": SIZE, **FAST}},
    )
    part: Any = answer.choices[0].message.content[0]  # type: ignore[index]
    drawn = pixels(part["image_url"]["url"].partition(",")[2])
    np.testing.assert_array_equal(drawn, pixels(edited.data[0].b64_json))


def test_twenty_at_once_beside_chats_of_which_half_leave(server: Server) -> None:
    """The others get the pictures and answers that they get alone."""
    chat = {"messages": [{"role": "user", "content": "Hello, who are you?"}], "max_tokens": 8}
    left = 'mingc_requests_cancelled_total{route="/v1/images/generations"}'
    held, already_left = server.service.held, metric(server.url, left)

    async def work() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=100, trust_env=False) as client:

            async def draw(seed: int, steps: int = 2) -> Any:
                body = {"prompt": "A cat", "size": SIZE, "guidance_scale": 1, "num_inference_steps": steps}
                answer = await client.post("/v1/images/generations", json={**body, "seed": seed})
                return answer.json()["data"][0]["b64_json"]

            async def said() -> str:
                answer: Any = (await client.post("/v1/chat/completions", json=chat)).json()
                return str(answer["choices"][0]["message"]["content"])

            alone = await draw(18), await said()
            stays = [asyncio.ensure_future(draw(seed)) for seed in range(0, 20, 2)]
            leaves = [asyncio.ensure_future(draw(seed, steps=200)) for seed in range(1, 20, 2)]
            chats = [asyncio.ensure_future(said()) for _ in range(4)]
            await asyncio.wait(stays, return_when=asyncio.FIRST_COMPLETED)
            for each in leaves:
                each.cancel()
            drawn = await asyncio.gather(*stays)
            assert len({*drawn}) == 10 and (drawn[-1], *await asyncio.gather(*chats)) == (
                alone[0],
                *[alone[1]] * 4,
            )
            assert all(each.cancelled() for each in leaves)

    asyncio.run(work())
    eventually(lambda: metric(server.url, left) == already_left + 10)
    wait_until_equal(held, lambda: server.service.held)
    for line in IDLE:
        eventually(lambda line=line: metric(server.url, line) == 0)


def test_a_client_that_leaves_frees_the_sampler(server: Server) -> None:
    before = server.service.held
    connection = HTTPConnection(server.url.removeprefix("http://"))
    body = {"prompt": "A cat", "size": SIZE, "num_inference_steps": 200}
    connection.request(
        "POST", "/v1/images/generations", json.dumps(body), {"content-type": "application/json"}
    )
    eventually(lambda: server.service.held != before)
    connection.close()
    wait_until_equal(before, lambda: server.service.held)
    assert server.generate().data


@pytest.mark.parametrize(
    ("data", "status", "code", "where"),
    [
        (PICTURE[:200], 400, "undecodable_media", "image[1]"),
        (b"%PDF-1.7\n%", 400, "undecodable_media", "image"),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), 400, "undecodable_media", "image"),
        (None, 413, "media_too_large", "image[1]"),
        (png(np.zeros((40, 400, 3), np.uint8)), 400, "invalid_value", "image"),
    ],
    ids=["cut", "PDF", "broken", "20000×20000", "thin"],
)
def test_hostile_pictures_are_refused_by_name(
    server: Server, data: bytes | None, status: int, code: str, where: str
) -> None:
    # Made here, because it takes a second and all processes collect the tests.
    data = data or large_png(20_000, 20_000)
    with pytest.raises(openai.APIStatusError) as refused:
        server.edit(image=[PICTURE, data] if where == "image[1]" else data)
    assert (refused.value.status_code, refused.value.code) == (status, code)
    assert refused.value.param == where


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_a_text_beyond_the_context_is_refused_by_name(server: Server, field: str) -> None:
    given = {"prompt": "A cat", "num_inference_steps": 2, field: '"' + "\u00e9" * 5000 + '"'}
    refused = httpx.post(f"{server.url}/v1/images/generations", json=given, trust_env=False)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)


def test_a_form_with_a_seed_that_is_no_number_is_refused_by_kind(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.edit(extra={"seed": "nan"})
    assert (refused.value.code, refused.value.param) == ("invalid_type", "seed")
