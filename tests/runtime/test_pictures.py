"""`/v1/images/…` and pictures in chats by the official client, over a service that draws pictures of one colour."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fake_service import TEXT_ONLY, FakeService
from openai import OpenAI
from openai.types import (
    ImageEditCompletedEvent,
    ImageEditPartialImageEvent,
    ImageGenCompletedEvent,
    ImageGenPartialImageEvent,
    ImagesResponse,
)
from PIL import Image
from preprocess_data import png
from server_thread import eventually, fake_server, metric, run_server

from mingc.prompts.conversation import MediaPart, TextPart
from mingc.runtime.request import ImageRequest
from mingc.server.body_budget import FREE_BYTES

GENERATIONS, EDITS, CHAT = "/v1/images/generations", "/v1/images/edits", "/v1/chat/completions"
RED = png(np.full((60, 90, 3), (255, 0, 0), np.uint8))
BLUE = png(np.full((60, 90, 3), (0, 0, 255), np.uint8))
NOISE = png(np.random.default_rng(0).integers(0, 256, (200, 300, 3)).astype(np.uint8))
URL, URL_OF_BLUE, URL_OF_NOISE = (
    "data:image/png;base64," + base64.b64encode(each).decode() for each in (RED, BLUE, NOISE)
)
SMALL = {"model": "ming-omni", "size": "512x512"}


class Server:
    def __init__(self, url: str, service: FakeService) -> None:
        self.url, self.service = url, service
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def generate(self, prompt: str = "a cat", extra: Any = None, **fields: Any) -> Any:
        return self.client.images.generate(prompt=prompt, extra_body=extra, **{**SMALL, **fields})

    def edit(self, image: Any = RED, extra: Any = None, **fields: Any) -> Any:
        return self.client.images.edit(
            image=image, extra_body=extra, **{**SMALL, "prompt": "in blue", **fields}
        )

    def chat(self, content: Any = "a cat", extra: Any = None, **fields: Any) -> Any:
        messages: Any = content if isinstance(content, list) else [{"role": "user", "content": content}]
        fields = {"modalities": ["text", "image"], "messages": messages, **fields}
        size = {"width": 512, "height": 512}
        return self.client.chat.completions.create(
            model="ming-omni", extra_body={**size, **(extra or {})}, **fields
        )

    @property
    def last(self) -> ImageRequest:
        return self.service.drawings[-1]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    service = FakeService()
    with run_server(lambda: service) as url, Server(url, service) as server:
        yield server


def picture(data: str, kind: str = "PNG") -> tuple[tuple[int, int], tuple[int, ...]]:
    """Size (width, height) and colour of a file of one colour in base64."""
    with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
        assert image.format == kind
        colour = np.asarray(image.convert("RGB")).reshape(-1, 3).mean(0)
        return image.size, tuple(int(each) for each in np.rint(colour))


def parts(request: ImageRequest) -> list[str | bytes]:
    """Texts and pictures of the last message."""
    found: list[str | bytes] = []
    for part in request.messages[-1].parts:
        if isinstance(part, MediaPart):
            assert isinstance(part.data, bytes | memoryview)
            found.append(bytes(part.data))
        elif isinstance(part, TextPart):
            found.append(part.text)
    return found


def test_generations_have_the_pictures_of_their_seeds_and_the_usage(server: Server) -> None:
    answer = server.generate(n=3, extra={"seed": 7})
    assert [picture(each.b64_json) for each in answer.data] == [((512, 512), (7 + i, i, 0)) for i in range(3)]
    assert [each.seed for each in answer.data] == [7, 8, 9]
    assert (answer.size, answer.output_format, answer.background) == ("512x512", "png", "opaque")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 3 * 1024, 7 + 3 * 1024)
    assert (usage.input_tokens_details.text_tokens, usage.output_tokens_details.image_tokens) == (7, 3072)
    assert parts(server.last) == ["a cat"] and server.last.reference is None


def test_fields_reach_the_service(server: Server) -> None:
    server.generate(
        extra={
            "seed": 5,
            "num_inference_steps": 12,
            "guidance_scale": 3.5,
            "negative_prompt": "dogs",
            "priority": -1,
        }
    )
    found = server.last
    assert (found.seed, found.num_steps, found.guidance, found.negative_prompt) == (5, 12, 3.5, "dogs")
    assert (found.height, found.width, found.resolution, found.priority) == (512, 512, 512, -1)
    server.generate(size="auto", extra={"seed": -1, "negative_prompt": "", "aspect_ratio": "16:9"})
    found = server.last
    assert (found.seed, found.num_steps, found.guidance, found.negative_prompt) == (None,) * 4
    assert (found.height, found.width, found.resolution, found.aspect) == (None, None, 1024, 16 / 9)


def test_what_openai_clients_send_changes_nothing(server: Server) -> None:
    plain = server.generate(extra={"seed": 1}).data[0].b64_json
    full = server.generate(
        background="auto",
        moderation="low",
        n=1,
        output_compression=100,
        output_format="png",
        partial_images=0,
        quality="standard",
        response_format="b64_json",
        stream=False,
        user="u",
        safety_identifier="s",
        extra={"seed": 1, "generator_device": "cpu", "vae_use_tiling": False},
    )
    assert full.data[0].b64_json == plain
    form = server.edit(
        background="opaque", input_fidelity="high", quality="auto", user="u", extra={"vae_use_slicing": False}
    )
    assert form.size == "512x512"


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_formats_and_their_quality(server: Server, kind: Any) -> None:
    fine = server.generate(output_format=kind, extra={"seed": 200})
    coarse = server.generate(output_format=kind, output_compression=0, extra={"seed": 200})
    size, colour = picture(fine.data[0].b64_json, kind.upper())
    assert size == (512, 512) and np.abs(np.array(colour) - (200, 0, 0)).max() <= 3
    assert fine.output_format == kind and coarse.data[0].b64_json != fine.data[0].b64_json


def test_a_stream_has_unfinished_pictures_and_the_complete_one(server: Server) -> None:
    events = list(server.generate(stream=True, partial_images=2, extra={"seed": 9}))
    *partial, done = events
    assert all(isinstance(each, ImageGenPartialImageEvent) for each in partial)
    assert isinstance(done, ImageGenCompletedEvent)
    assert [each.partial_image_index for each in partial] == [0, 1]
    assert [picture(each.b64_json)[1] for each in events] == [(0, 0, 0), (0, 0, 0), (9, 0, 0)]
    for each in events:
        assert (each.type.partition(".")[0], each.size) == ("image_generation", "512x512")
        assert (each.output_format, each.background, each.quality) == ("png", "opaque", "auto")
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (7, 1024, 1031)
    events = list(server.edit(stream=True, partial_images=1))
    assert [type(each) for each in events] == [ImageEditPartialImageEvent, ImageEditCompletedEvent]
    assert [each.type for each in events] == ["image_edit.partial_image", "image_edit.completed"]


def test_a_stream_of_several_pictures_tells_them_apart_and_sums_up(server: Server) -> None:
    events = list(server.generate(stream=True, partial_images=1, n=3, extra={"seed": 9}))
    assert [(each.type.rpartition(".")[2], each.image_index) for each in events if "completed" in each.type] == [
        ("completed", 0), ("completed", 1), ("completed", 2),
    ]  # fmt: skip
    assert sorted(each.image_index for each in events if "partial" in each.type) == [0, 1, 2]
    done = [each.usage for each in events if "completed" in each.type]
    assert [each.input_tokens for each in done] == [0, 0, 7]
    assert [each.output_tokens for each in done] == [1024] * 3


def test_edits_have_their_pictures_before_the_prompt(server: Server) -> None:
    server.edit()
    assert parts(server.last) == [RED, "in blue"]
    reference = server.last.reference
    assert reference is not None and bytes(reference.data) == RED and reference.where == "image"  # type: ignore[arg-type]
    server.edit(image=[("a.png", RED), ("b.png", BLUE)], n=2)
    assert parts(server.last) == [RED, BLUE, "in blue"] and server.last.num_pictures == 2
    assert bytes(server.last.reference.data) == RED  # type: ignore[union-attr, arg-type]
    answer = httpx.post(  # as curl -F image=@… -F image=@…
        f"{server.url}{EDITS}",
        files=[("image", ("b.png", BLUE)), ("image", ("a.png", RED)), ("prompt", (None, "x"))],
        trust_env=False,
    )
    assert answer.status_code == 200 and parts(server.last) == [BLUE, RED, "x"]


def test_an_edit_as_json_is_the_edit_of_a_form(server: Server) -> None:
    body = {
        **SMALL,
        "images": [{"image_url": URL}, {"image_url": URL_OF_NOISE}],
        "prompt": "in blue",
        "seed": 3,
        "n": 2,
    }
    answer = httpx.post(f"{server.url}{EDITS}", json=body, trust_env=False)
    made = ImagesResponse.model_validate_json(answer.content)
    assert parts(server.last) == [RED, NOISE, "in blue"]
    reference = server.last.reference
    assert reference is not None and bytes(reference.data) == RED  # type: ignore[arg-type]
    assert reference.where == "images[0].image_url"
    form = server.edit(image=[("a.png", RED), ("b.png", NOISE)], n=2, extra={"seed": 3})
    assert (made.data, made.size, made.usage) == (form.data, form.size, form.usage)
    body |= {"stream": True, "partial_images": 1, "n": None, "mask": None}
    with httpx.stream("POST", f"{server.url}{EDITS}", json=body, trust_env=False) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    assert ImageEditPartialImageEvent.model_validate(events[0]).type == "image_edit.partial_image"
    done = ImageEditCompletedEvent.model_validate(events[1])
    assert [done.b64_json] == [each.b64_json for each in made.data or ()][:1]


@pytest.mark.parametrize("kind", ["Application/JSON; charset=utf-8", "Multipart/Form-Data; boundary=b"])
def test_an_edit_of_either_type_has_the_limits_of_the_server_and_is_charged_without_base64(kind: str) -> None:
    form = '--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nwait\r\n--b\r\n'
    form += 'Content-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    body = json.dumps({"prompt": "wait", "images": [{"image_url": URL_OF_NOISE}]}).encode()
    if kind.startswith("M"):
        body = form.encode() + NOISE + b"\r\n--b--\r\n"
    charged = len(body) if kind.startswith("M") else len(NOISE) + len("wait")
    with fake_server(max_image_pixels=3 << 18) as (url, service):
        connection = HTTPConnection(url.removeprefix("http://"))
        connection.request("POST", EDITS, body, {"content-type": kind})
        eventually(lambda: bool(service.running))
        (seen, _) = service.drawings[-1].messages[-1].parts
        assert isinstance(seen, MediaPart) and seen.max_pixels == 3 << 18 and bytes(seen.data) == NOISE  # type: ignore[arg-type]
        assert service.drawings[-1].reference == seen
        assert metric(url, 'mingc_limit_used{limit="body_bytes"}') == charged - FREE_BYTES
        connection.close()
        eventually(lambda: metric(url, 'mingc_limit_used{limit="body_bytes"}') == 0)


def test_a_picture_of_an_edit_may_be_on_an_allowed_host(server: Server) -> None:
    file = f"{server.url}/openapi.json"
    with fake_server(allow_media_hosts=(server.url.removeprefix("http://"),)) as (url, service):
        body = {"prompt": "x", "images": [{"image_url": file}]}
        assert httpx.post(f"{url}{EDITS}", json=body, trust_env=False).status_code == 200
        assert parts(service.drawings[-1]) == [httpx.get(file, trust_env=False).content, "x"]


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({}, 400, "images", "missing_required_parameter"),
        ({"images": []}, 400, "images", "missing_required_parameter"),
        ({"images": [{}]}, 400, "images[0].image_url", "missing_required_parameter"),
        ({"images": [{"image_url": URL}] * 17}, 400, "images", "invalid_value"),
        ({"images": [{"image_url": URL}, {"file_id": "file-1"}]}, 400, "images[1].file_id", "unsupported_parameter"),
        ({"images": [{"image_url": URL, "file_id": "file-1"}]}, 400, "images[0].file_id", "unsupported_parameter"),
        ({"images": [{"image_url": URL}], "mask": {"image_url": URL}}, 400, "mask", "unsupported_parameter"),
        ({"image": URL}, 400, "image", "unknown_parameter"),
        ({"images": [{"image_url": "data:image/png;base64,"}]}, 400, "images[0].image_url", "empty_media"),
        ({"images": [{"image_url": URL}, {"image_url": "data:,x"}]}, 400, "images[1].image_url", "invalid_data_url"),
        ({"images": [{"image_url": "https://a.example/a.png"}]}, 400, "images[0].image_url", "media_host_not_allowed"),
        ({"images": [{"image_url": "/etc/passwd"}]}, 400, "images[0].image_url", "local_media_not_allowed"),
        ({"images": [{"image_url": "A" * 33_336}] * 2}, 413, "images[1].image_url", "media_too_large"),
    ],
)  # fmt: skip
def test_wrong_edits_as_json_are_named(fields: Any, status: int, param: str, code: str) -> None:
    with fake_server(max_media_bytes=50_000) as (url, service):
        answer = httpx.post(f"{url}{EDITS}", json={"prompt": "x", **fields}, trust_env=False)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
        assert not service.drawings and metric(url, 'mingc_limit_used{limit="body_bytes"}') == 0


@pytest.mark.parametrize("value", ["[" * 60_000, '{"a":' * 10_000, "[" * 9_000 + "]" * 9_000])
@pytest.mark.parametrize(
    ("route", "file", "name"),
    [
        (EDITS, "image", "background"),
        ("/v1/audio/transcriptions", "file", "n"),
        ("/v1/audio/voices", "audio_sample", "prompt"),
    ],
)
def test_a_deep_value_of_a_refused_field_of_a_form_is_refused(
    server: Server, route: str, file: str, name: str, value: str
) -> None:
    form = {"prompt": "x", name: value} if route == EDITS else {name: value}
    if route == "/v1/audio/voices":
        form |= {"name": "a", "consent": "x"}
    answer = httpx.post(f"{server.url}{route}", data=form, files={file: RED}, trust_env=False)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")


def test_an_edit_is_a_form_or_json(server: Server) -> None:
    answer = httpx.post(f"{server.url}{EDITS}", data={"prompt": "x"}, trust_env=False)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (415, "unsupported_media_type")
    assert "'application/json' or 'multipart/form-data'" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code", "says"),
    [
        ({"size": "1536x1024"}, "size", "unsupported_size", "'1248x832'"),
        ({"size": "256x256"}, "size", "unsupported_size", "'512x512'"),
        ({"size": "99999x1"}, "size", "unsupported_size", "'2048x512'"),
        ({"size": "large"}, "size", "invalid_value", "1024x1024"),
        ({"size": "0x512"}, "size", "invalid_value", "1024x1024"),
        ({"size": "1" * 99}, "size", "string_too_long", "16"),
        ({"width": 512}, "width", "invalid_value", "'height'"),
        ({"width": 512, "height": 1024, "size": "512x512"}, "size", "invalid_value", "contradicts"),
        ({"size": "512x512", "aspect_ratio": "1:1"}, "aspect_ratio", "invalid_value", "beside a size"),
        ({"size": None, "aspect_ratio": "5:1"}, "aspect_ratio", "invalid_value", "'4:1'"),
        ({"size": None, "aspect_ratio": "1:0"}, "aspect_ratio", "invalid_value", "'16:9'"),
        ({"prompt": " "}, "prompt", "invalid_value", "empty"),
        ({"prompt": None}, "prompt", "missing_required_parameter", "prompt"),
        ({"prompt": "x" * 32_001}, "prompt", "string_too_long", "32000"),
        ({"n": 11}, "n", "invalid_value", "between 1 and 10"),
        ({"n": 1.5}, "n", "invalid_type", "integer"),
        ({"num_inference_steps": 0}, "num_inference_steps", "invalid_value", "between 1 and 200"),
        ({"guidance_scale": 101}, "guidance_scale", "invalid_value", "between 0 and 100"),
        ({"negative_prompt": "x", "guidance_scale": 1}, "negative_prompt", "invalid_value", "above 1"),
        ({"seed": 1 << 53}, "seed", "invalid_value", "at most"),
        ({"partial_images": 4, "stream": True}, "partial_images", "invalid_value", "between 0 and 3"),
        ({"partial_images": 1}, "partial_images", "invalid_value", "'stream'"),
        ({"output_format": "gif"}, "output_format", "invalid_value", "'webp'"),
        ({"output_compression": 50}, "output_compression", "invalid_value", "lossless"),
        ({"response_format": "url"}, "response_format", "unsupported_parameter", "no URL"),
        ({"background": "transparent"}, "background", "unsupported_parameter", "transparency"),
        ({"quality": "high"}, "quality", "unsupported_parameter", "'num_inference_steps'"),
        ({"style": "vivid"}, "style", "unsupported_parameter", "'prompt'"),
        ({"true_cfg_scale": 4}, "true_cfg_scale", "unsupported_parameter", "'guidance_scale'"),
        ({"model": "other"}, "model", "model_not_found", "ming-omni"),
        ({"stepps": 3}, "stepps", "unknown_parameter", "stepps"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_fields_are_named(server: Server, fields: Any, param: str, code: str, says: str) -> None:
    """The same field by JSON and, as text, by a form gives the same error."""
    count = len(server.service.drawings)
    body = {"prompt": "a cat", **fields}
    edit = {**body, "images": [{"image_url": URL}]}
    edit_by_json = httpx.post(f"{server.url}{EDITS}", json=edit, trust_env=False)
    by_json = httpx.post(f"{server.url}{GENERATIONS}", json=body, trust_env=False)
    form = [("image", ("a.png", RED))]
    for name, value in body.items():
        if value is not None:
            form.append((name, (None, value if isinstance(value, str) else json.dumps(value))))  # type: ignore[arg-type]
    by_form = httpx.post(f"{server.url}{EDITS}", files=form, trust_env=False)
    for answer in (by_json, by_form, edit_by_json):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (
            404 if param == "model" else 400,
            param,
            code,
        )
        assert says in error["message"]
    assert len(server.service.drawings) == count


@pytest.mark.parametrize(
    ("files", "status", "param", "code"),
    [
        ([], 400, "image", "missing_required_parameter"),
        ([("image", b"")], 400, "image", "empty_media"),
        ([("image", RED), ("image[]", b"")], 400, "image[1]", "empty_media"),
        ([("image", RED)] * 17, 400, "image", "invalid_value"),
        ([("image", RED), ("mask", b"\xff\xfe")], 400, "mask", "unsupported_parameter"),
        ([("image", RED), ("markup", RED)], 400, "markup", "unsupported_parameter"),
        ([("image", RED), ("input_fidelity", b"medium")], 400, "input_fidelity", "unsupported_parameter"),
        ([("image", b"x" * 50_001)], 413, "image", "media_too_large"),
        ([("image", b"x" * 25_001)] * 2, 413, "image", "media_too_large"),
    ],
)  # fmt: skip
def test_wrong_forms_are_named(files: Any, status: int, param: str, code: str) -> None:
    with fake_server(max_media_bytes=50_000) as (url, service):
        form = [("prompt", (None, "x")), *((name, ("a.png", data)) for name, data in files)]
        answer = httpx.post(f"{url}{EDITS}", files=form, trust_env=False)
        assert answer.status_code == status and not service.drawings
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)


def url_of(message: Any) -> str:
    (part,) = message.content
    assert part["type"] == "image_url"
    return part["image_url"]["url"].removeprefix("data:image/png;base64,")


def test_a_chat_answers_with_pictures(server: Server) -> None:
    for modalities in (["image"], ["text", "image"]):
        answer = server.chat(n=2, modalities=modalities, seed=3)
        assert [picture(url_of(each.message)) for each in answer.choices] == [
            ((512, 512), (3 + i, i, 0)) for i in range(2)
        ]
        assert [(each.index, each.finish_reason) for each in answer.choices] == [(0, "stop"), (1, "stop")]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 2048)
    assert server.last.messages[-1].text == "a cat" and server.last.reference is None


def test_a_streamed_chat_has_the_picture_in_one_delta(server: Server) -> None:
    chunks = list(server.chat(stream=True, seed=3, stream_options={"include_usage": True}))
    role, delta, end, usage = chunks
    assert role.choices[0].delta.role == "assistant" and end.choices[0].finish_reason == "stop"
    assert picture(url_of(delta.choices[0].delta))[1] == (3, 0, 0)
    assert usage.usage.completion_tokens == 1024


@pytest.mark.parametrize(
    "extra",
    [
        {"num_inference_steps": 12, "guidance_scale": 3, "negative_prompt": "dogs", "seed": 5},
        {"image_generation": {"num_inference_steps": 12, "guidance_scale": 3, "negative_prompt": "dogs", "seed": 5,
                              "semantic_source": "thinker", "enable_text_rendering": True}},
        {"extra_body": {"num_inference_steps": 12, "guidance_scale": 3, "negative_prompt": "dogs", "seed": 5,
                        "num_outputs_per_prompt": 1, "width": 512, "height": 512}},
    ],
    ids=["fields", "sglang-omni", "vllm-omni"],
)  # fmt: skip
def test_parameters_of_a_chat_in_the_shapes_of_other_servers(server: Server, extra: Any) -> None:
    server.chat(extra=extra)
    found = server.last
    assert (found.num_steps, found.guidance, found.negative_prompt, found.seed) == (12, 3, "dogs", 5)
    assert (found.height, found.width) == (512, 512)


def test_a_chat_changes_the_picture_of_its_last_turn(server: Server) -> None:
    """It is the user's, or that of the answer before, as clients send it back."""
    image = {"type": "image_url", "image_url": {"url": URL}}
    text = {"type": "text", "text": "in blue"}
    server.chat([{"role": "user", "content": [text, image]}])
    assert parts(server.last) == ["in blue", RED]
    message = server.chat().choices[0].message
    drawn = base64.b64decode(url_of(message))
    answer = {"role": "assistant", "content": message.content}
    server.chat([{"role": "user", "content": "a cat"}, answer, {"role": "user", "content": "in blue"}])
    assert parts(server.last) == [drawn, "in blue"]
    assert bytes(server.last.reference.data) == drawn  # type: ignore[union-attr, arg-type]
    assert [each.role for each in server.last.messages] == ["user", "assistant", "user"]
    server.chat([{"role": "user", "content": [image]}, {"role": "user", "content": "a dog"}])
    assert server.last.reference is None
    other = {"type": "image_url", "image_url": {"url": URL_OF_BLUE}}
    server.chat([{"role": "user", "content": [text, other, image]}])
    assert bytes(server.last.reference.data) == BLUE  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ["image", "audio"]}, "modalities"),
        ({"modalities": ["image"], "audio": {"voice": "DB30"}}, "modalities"),
        ({"modalities": ["text"], "width": 512}, "width"),
        ({"image_generation": {}}, "image_generation"),
        ({"modalities": ["image"], "logprobs": True}, "logprobs"),
        ({"modalities": ["image"], "response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["image"], "thinking": True}, "thinking"),
        ({"modalities": ["image"], "n": 11}, "n"),
        ({"modalities": ["image"], "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"modalities": ["image"], "seed": 1, "extra_body": {"seed": 2}}, "extra_body.seed"),
        ({"modalities": ["image"], "extra_body": {"num_outputs_per_prompt": 2}}, "extra_body.num_outputs_per_prompt"),
        ({"modalities": ["image"], "image_generation": {"size": "9x9"}}, "image_generation.size"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]},
         "messages[0].content[0].image_url.url"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_chats_are_named(server: Server, fields: Any, param: str) -> None:
    body = {"messages": [{"role": "user", "content": "a cat"}], **fields}
    answer = httpx.post(f"{server.url}{CHAT}", json=body, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_artifact_that_cannot_draw_says_so() -> None:
    with run_server(lambda: FakeService(TEXT_ONLY)) as url:
        chat = {"messages": [{"role": "user", "content": "x"}], "modalities": ["image"]}
        for answer, param in (
            (httpx.post(f"{url}{GENERATIONS}", json={"prompt": "x"}), "model"),
            (httpx.post(f"{url}{EDITS}", files={"image": RED}, data={"prompt": "x"}), "model"),
            (httpx.post(f"{url}{CHAT}", json=chat), "modalities[0]"),
        ):
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param) and "draw" in error["message"]
        able = httpx.get(f"{url}/health").json()
        assert "image" not in able["output_modalities"] and GENERATIONS not in able["routes"]


def test_the_server_tells_that_it_draws(server: Server) -> None:
    able = httpx.get(f"{server.url}/health", trust_env=False).json()
    assert "image" in able["output_modalities"] and {GENERATIONS, EDITS} <= set(able["routes"])


def test_errors_and_limits() -> None:
    with (
        fake_server(max_concurrent_requests=1, key_max_tokens=None) as (url, service),
        Server(url, service) as server,
    ):
        with pytest.raises(openai.InternalServerError):
            server.generate("fail first")
        with pytest.raises(openai.APIError) as ended:
            list(server.generate("fail midway", stream=True, partial_images=1))
        assert ended.value.type == "server_error"
        with server.generate("endless", stream=True, partial_images=1) as stream:
            next(iter(stream))
            with pytest.raises(openai.InternalServerError) as busy:
                server.generate()
            assert busy.value.status_code == 503 and busy.value.code == "overloaded"
        eventually(
            lambda: service.ends[service.drawings[-1].request_id] == "cancelled" and not service.running
        )
        eventually(lambda: metric(url, f'mingc_requests_cancelled_total{{route="{GENERATIONS}"}}') == 1)
        server.generate()


def test_a_client_that_leaves_while_it_waits_cancels_its_picture(server: Server) -> None:
    connection = HTTPConnection(server.url.removeprefix("http://"))
    connection.request(
        "POST", GENERATIONS, json.dumps({"prompt": "wait"}), {"content-type": "application/json"}
    )
    eventually(lambda: bool(server.service.running))
    connection.close()
    eventually(lambda: server.service.ends[server.last.request_id] == "cancelled")


def test_the_pictures_of_a_key_and_of_all_answers_are_limited(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("none\n")
    with (
        fake_server(api_key_file=keys, key_max_tokens=3000) as (url, service),
        Server(url, service) as server,
    ):
        server.generate(n=2)
        negative = {"negative_prompt": "x" * 4000}
        for make, fields in (
            (server.generate, {"n": 3}),
            (server.generate, {"n": 2, "extra": negative}),
            (server.chat, {"n": 2, "extra": negative}),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                make(**fields)
            assert refused.value.code == "key_limit_exceeded"
    said = {"modalities": ["image"], "messages": [{"role": "user", "content": "wait"}]}
    for route, fields in ((GENERATIONS, {"prompt": "wait"}), (CHAT, said)):
        body = json.dumps({"n": 2, **fields})
        with (
            fake_server(max_total_answer_bytes=11 << 20) as (
                url,
                service,
            ),  # of two pictures, and not of a third
            Server(url, service) as server,
        ):
            connection = HTTPConnection(url.removeprefix("http://"))
            connection.request("POST", route, body, {"content-type": "application/json"})
            eventually(lambda service=service: bool(service.running))
            with pytest.raises(openai.InternalServerError) as full:
                server.generate()
            assert full.value.code == "answer_budget_exhausted"
            connection.close()
            eventually(lambda service=service: not service.running)
            server.generate()


def test_twenty_at_once(server: Server) -> None:
    def draw(seed: int) -> tuple[int, ...]:
        if seed % 2:
            answer = server.generate(extra={"seed": seed}).data[0].b64_json
        else:
            *_, done = server.edit(stream=True, partial_images=1, extra={"seed": seed})
            answer = done.b64_json
        return picture(answer)[1]

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(draw, range(20))) == [(seed, 0, 0) for seed in range(20)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on PATH")
def test_the_examples_of_the_http_page_run(server: Server, tmp_path: Path) -> None:
    """As printed, but for the port."""
    page = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text(encoding="utf-8")
    section = page[page.index("\n## Pictures\n") : page.index("\n## Completions\n")]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["", "python"]
    for kind, text in blocks:
        command = [sys.executable, "-c"] if kind else ["bash", "-e", "-o", "pipefail", "-c"]
        text = text.replace("http://127.0.0.1:8000", server.url)
        environment = {**os.environ, "NO_PROXY": "*"}
        subprocess.run([*command, text], cwd=tmp_path, env=environment, check=True, timeout=120)
    found = {}
    for path in tmp_path.glob("*.*"):
        if path.suffix != ".json":
            with Image.open(path) as image:
                found[path.name] = (image.format, image.size)
    assert found == {
        "sign.png": ("PNG", (1248, 832)),
        "cat-0.webp": ("WEBP", (1024, 1024)),
        "cat-1.webp": ("WEBP", (1024, 1024)),
        "red.png": ("PNG", (1024, 1024)),
        "chat.png": ("PNG", (1365, 768)),
    }
    night, snow = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("night", "snow"))
    assert night["size"] == snow["size"] == "1024x1024" and night["data"][0]["seed"] == 7


def test_the_first_picture_is_timed(server: Server) -> None:
    name = "mingc_time_to_first_image_seconds_count"
    before = metric(server.url, name)
    server.generate(n=2)
    list(server.generate(stream=True, partial_images=2))
    eventually(lambda: metric(server.url, name) == before + 2)
    assert metric(server.url, f'mingc_request_duration_seconds_count{{route="{GENERATIONS}"}}') > 0
