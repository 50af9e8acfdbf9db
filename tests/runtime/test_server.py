"""Routes, streams and errors of a real server over a fake service; invalid requests beside valid ones."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np
import pytest
from fake_service import INFO, NUM_PATCHES, PATCH_SAMPLES, TEXT_ONLY, FakeService
from numpy.typing import NDArray
from openai_checks import check_wav, image_data_url, wav_base64
from server_thread import run_server
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from mingc.errors import ConfigError
from mingc.runtime.request import MemoryUse, ServiceLoad
from mingc.server.app import create_app
from mingc.server.audio_format import AudioSpec, ClipEncoder
from mingc.server.logs import RequestContext
from mingc.server.metrics import Metrics, Playback, describe_metrics
from mingc.server.options import ServeOptions

HELLO = [{"role": "user", "content": "Hello there"}]
CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "Lina", "format": "wav"}}


class Client:
    """An HTTP client of a server, and the service behind it."""

    def __init__(self, url: str, service: FakeService) -> None:
        self.url = url
        self.service = service
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def chat(self, text: str = "Hello there", **body: Any) -> httpx.Response:
        return self.http.post(CHAT, json={"messages": [{"role": "user", "content": text}], **body})

    def speak(self, text: str = "Hello.", **body: Any) -> httpx.Response:
        return self.http.post(SPEECH, json={"input": text, **body})

    def metric(self, line: str) -> float:
        for row in self.http.get("/metrics").text.splitlines():
            if row.startswith(line + " "):
                return float(row.split()[-1])
        return 0.0


def start(options: ServeOptions | None = None, **service: Any) -> Iterator[Client]:
    made: list[FakeService] = []

    def make() -> FakeService:
        made.append(FakeService(**service))
        return made[0]

    with run_server(make, options) as url:
        client = Client(url, made[0])
        with client.http:
            yield client


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    yield from start()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Client]:
    """A server with tight limits and a media root."""
    (tmp_path / "a.png").write_bytes(b"picture")
    yield from start(
        ServeOptions(
            port=0,
            shutdown_timeout_s=0.2,
            max_body_bytes=2000,
            max_concurrent_requests=1,
            body_timeout_s=0.5,
            media_root=tmp_path,
        )
    )


def events(response: httpx.Response) -> list[Any]:
    """The `data:` lines; `[DONE]` stays a string."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    payloads = [block.removeprefix("data: ") for block in blocks[:-1]]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, whose shape is checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "Traceback" not in error["message"]
    return error


def test_models_voices_health(client: Client) -> None:
    (model,) = client.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["input_modalities"]) == (
        "ming-omni", "model", ["text", "image", "audio", "video"],
    )  # fmt: skip
    assert client.http.get("/v1/models/ming-omni").json() == model
    assert error_of(client.http.get("/v1/models/other/name"), 404)["code"] == "model_not_found"
    voices = client.http.get("/v1/audio/voices").json()
    assert (voices["voices"], voices["default"]) == (["DB30", "Lina"], "DB30")
    health = client.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ready")
    assert {"all_reduce", "max_total_tokens"}.isdisjoint(health.json())


def test_health_shows_the_all_reduce_algorithm() -> None:
    for client in start(info=replace(INFO, all_reduce="one-shot up to 8192 bytes")):
        assert client.http.get("/health").json()["all_reduce"] == "one-shot up to 8192 bytes"


def test_health_shows_the_token_limits() -> None:
    for client in start(info=replace(INFO, max_model_len=4096, max_total_tokens=16384)):
        health = client.http.get("/health").json()
        assert (health["max_model_len"], health["max_total_tokens"]) == (4096, 16384)


def test_health_and_models_show_the_limits_of_media() -> None:
    limits = {"image_pixels": 1 << 26, "clip_seconds": 300.0}
    shown = {"request_bytes": ServeOptions().max_media_bytes, **limits}
    for client in start(info=replace(INFO, media_limits=limits)):
        assert client.http.get("/health").json()["media_limits"] == shown
        assert [each["media_limits"] for each in client.http.get("/v1/models").json()["data"]] == [shown]
    for client in start():
        assert "media_limits" not in client.http.get("/health").json()


def test_a_service_that_is_not_ready() -> None:
    for client in start(ready=False):
        assert client.http.get("/health").status_code == 503


def test_whole_chat(client: Client) -> None:
    body = client.chat("Hello there", model="ming-omni", max_tokens=3).json()
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "You said: Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (
        7, 3, 10,
    )  # fmt: skip
    assert body["timings_ms"] == {"first_token": 1.5}


def test_streamed_text_has_one_delta_a_token(client: Client) -> None:
    chunks = events(client.chat("Hello there", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1] == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [c["choices"][0]["delta"] for c in chunks[1:-3]] == [
        {"content": word} for word in ("You", " said:", " Hello", " there")
    ]
    assert chunks[-3]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-2]["choices"] == [] and chunks[-2]["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    without = events(client.chat(stream=True))
    assert all("usage" not in chunk for chunk in without[:-1])


def test_streamed_audio_has_one_chunk_a_patch(client: Client) -> None:
    chunks = events(client.chat(stream=True, **SPOKEN))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    audio = [delta["audio"] for delta in deltas if "audio" in delta]
    *parts, end = audio
    assert [len(part["data"]) % 4 for part in parts] == [0] * len(parts)
    sizes = [len(base64.b64decode(part["data"])) for part in parts]
    assert [size % 3 for size in sizes[:-1]] == [0] * (len(sizes) - 1)
    sent = [44 + 2 * PATCH_SAMPLES * count for count in range(1, NUM_PATCHES + 1)]
    delays = [whole - arrived for whole, arrived in zip(sent, itertools.accumulate(sizes), strict=False)]
    assert all(0 <= delay <= 2 for delay in delays), "a patch is sent at once"
    assert len(check_wav(base64.b64decode("".join(part["data"] for part in parts)))) == sent[-1] // 2 - 22
    assert end.keys() == {"expires_at", "transcript"} and end["transcript"] == "You said: Hello there"
    assert [part.get("id") for part in parts] == [
        "audio-" + chunks[0]["id"].removeprefix("chatcmpl-"),
        *[None] * (len(parts) - 1),
    ]


def test_whole_audio(client: Client) -> None:
    for audio_format in ("wav", "pcm16", "flac"):
        fields = {"format": audio_format, "sample_rate": 44100}
        audio: dict[str, Any] = {"modalities": ["text", "audio"], "audio": fields}
        message = client.chat(**audio).json()["choices"][0]["message"]
        data = base64.b64decode(message["audio"]["data"])
        assert message["audio"]["transcript"] == message["content"]
        if audio_format == "pcm16":
            assert len(data) == 2 * NUM_PATCHES * PATCH_SAMPLES
        else:
            assert len(check_wav(data)) == NUM_PATCHES * PATCH_SAMPLES


def test_media_reach_the_service(client: Client) -> None:
    content = [
        {"type": "image_url", "image_url": {"url": image_data_url()}},
        {"type": "text", "text": "and"},
        {"type": "input_audio", "input_audio": {"data": wav_base64(), "format": "wav"}},
    ]
    body = {"messages": [{"role": "user", "content": content}], "videos": ["data:video/mp4;base64,AAAA"]}
    text = client.http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    assert "image of " in text and "audio of 16044 bytes" in text and "video of 3 bytes" in text
    wheres = [p.where for p in client.service.chats[-1].messages[0].parts if hasattr(p, "where")]
    assert wheres == [
        "messages[0].content[0].image_url.url",
        "messages[0].content[2].input_audio.data",
        "videos[0]",
    ]


@pytest.mark.parametrize(("audio_format", "kind"), [("wav", "audio/wav"), ("pcm", "audio/pcm;rate=24000;channels=1"),
                                                    ("flac", "audio/flac"), ("mp3", "audio/mpeg"),
                                                    ("opus", "audio/ogg"), ("aac", "audio/aac"),
                                                    ("pcmu", "audio/PCMU"), ("pcma", "audio/PCMA")])  # fmt: skip
def test_speech(client: Client, audio_format: str, kind: str) -> None:
    whole = client.speak(response_format=audio_format, voice="Lina", seed=4, stream=False)
    assert (whole.status_code, whole.headers["content-type"]) == (200, kind)
    assert int(whole.headers["content-length"]) == len(whole.content)
    assert client.service.speeches[-1].speech.seed == 4
    streamed = client.speak(response_format=audio_format, stream_format="audio")
    assert streamed.headers["transfer-encoding"] == "chunked"
    pieces = events(client.speak(response_format=audio_format, stream_format="sse"))
    assert pieces[-1]["type"] == "speech.audio.done"
    assert pieces[-1]["usage"]["output_tokens"] == NUM_PATCHES
    assert {piece["type"] for piece in pieces[:-1]} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(piece["audio"]) for piece in pieces[:-1]) == streamed.content
    assert base64.b64decode("".join(piece["audio"] for piece in pieces[:-1])) == streamed.content
    if audio_format == "wav":
        assert (
            len(check_wav(whole.content)) == len(check_wav(streamed.content)) == NUM_PATCHES * PATCH_SAMPLES
        )
    else:
        assert whole.content == streamed.content


def test_speech_is_live_where_its_sound_leaves_the_server_while_it_is_made(client: Client) -> None:
    for audio_format, is_playable in (("wav", True), ("pcm", True), ("opus", True), ("flac", False)):
        for given, is_streamed in (
            ({}, True),
            ({"stream": False}, False),
            ({"stream_format": "audio"}, True),
            ({"stream_format": "sse"}, True),
        ):
            client.speak(response_format=audio_format, **given)
            assert client.service.speeches[-1].is_live == (is_playable and is_streamed)
    for audio_format, is_playable in (("wav", True), ("pcm16", True), ("flac", False)):
        for is_streamed in (False, True):
            spoken = {**SPOKEN, "audio": {**SPOKEN["audio"], "format": audio_format}}
            client.chat(**spoken, stream=is_streamed)
            assert client.service.chats[-1].is_live == (is_playable and is_streamed)
    client.chat(stream=True)
    assert not client.service.chats[-1].is_live


def test_many_clips_are_encoded_at_a_time(client: Client) -> None:
    """Sixteen streams in all formats, rates and tempos: each as when it is alone."""
    formats = ("mp3", "opus", "aac", "wav", "pcm")
    bodies: list[dict[str, Any]] = [
        {
            "response_format": formats[n % 5],
            "sample_rate": (24000, 48000)[n % 2],
            "speed": (1, 0.6, 2.2)[n % 3],
        }
        for n in range(16)
    ]
    alone = [client.speak(**body).content for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda body: client.speak(**body).content, bodies))
    assert together == alone and all(alone)


def test_a_slow_encoder_delays_only_its_own_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """And when its client leaves, it is freed once it returns."""
    begun, go_on, freed = threading.Event(), threading.Event(), threading.Event()

    class SlowEncoder(ClipEncoder):
        def __init__(self, spec: AudioSpec, file: IO[bytes] | None = None) -> None:
            super().__init__(spec, file)
            self._is_slow = spec.format == "mp3"

        def add(self, samples: NDArray[np.float32], *, is_last: bool = False) -> bytes:
            if self._is_slow:
                begun.set()
                assert go_on.wait(60)
            return super().add(samples, is_last=is_last)

        def close(self) -> None:
            super().close()
            if self._is_slow:
                assert go_on.is_set(), "FFmpeg's objects are not freed while they are used"
                freed.set()

    monkeypatch.setattr("mingc.server.http.clips.ClipEncoder", SlowEncoder)
    for client in start():
        host, port = client.url.removeprefix("http://").split(":")
        with contextlib.closing(HTTPConnection(host, int(port))) as slow:
            slow.request("POST", SPEECH, json.dumps({"input": "Hello.", "response_format": "mp3"}), JSON_TYPE)
            assert begun.wait(60)
            for audio_format in ("wav", "opus", "pcm"):
                assert client.speak(response_format=audio_format).status_code == 200
        while client.metric('mingc_requests_cancelled_total{route="/v1/audio/speech"}') == 0:
            time.sleep(0.01)
        assert not freed.is_set()
        go_on.set()
        assert freed.wait(60)


def test_voices_and_their_further_names() -> None:
    for client in start(ServeOptions(port=0, voice_aliases=("alloy=Lina",))):
        assert client.http.get("/v1/audio/voices").json()["aliases"] == {"alloy": "Lina"}
        assert client.speak(voice="alloy").status_code == 200
        assert client.service.speeches[-1].speech.voice == "Lina"
    for wrong in ("alloy=echo", "DB30=Lina"):
        with pytest.raises(ConfigError, match="the voices are: DB30, Lina") as caught:
            create_app(FakeService(), ServeOptions(voice_aliases=(wrong,)))
        assert wrong in str(caught.value)


def test_whole_speech_beyond_the_budget_is_refused_until_another_answer_has_ended() -> None:
    for client in start(ServeOptions(port=0, shutdown_timeout_s=0.2, max_total_answer_bytes=1 << 20)):
        used = 'mingc_limit_used{limit="answer_bytes"}'
        host, port = client.url.removeprefix("http://").split(":")
        with contextlib.closing(HTTPConnection(host, int(port))) as other:
            # 100 letters are about 8 s, 0.7 MB.
            whole = {"response_format": "wav", "stream": False}
            other.request("POST", SPEECH, json.dumps({"input": "wait " * 20, **whole}), JSON_TYPE)
            while client.metric(used) == 0:
                time.sleep(0.01)
            for audio_format in ("wav", "flac"):
                refused = client.speak("a" * 100, response_format=audio_format, stream=False)
                assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
                assert refused.json()["error"]["code"] == "answer_budget_exhausted"
            assert client.speak("a" * 100, stream=True).status_code == 200, "sent as it is generated"
            assert len(client.service.speeches) == 2, "what is refused has not begun"
        while client.metric(used) > 0:
            time.sleep(0.01)
        assert client.speak("a" * 100, **whole).status_code == 200


Post = Callable[[Client], httpx.Response]
JSON_TYPE = {"content-type": "application/json"}
BAD_REQUESTS: dict[str, tuple[Post, int, str | None]] = {
    "unknown model": (lambda c: c.chat(model="gpt-4o"), 404, "model"),
    "malformed JSON": (lambda c: c.http.post(CHAT, content=b'{"messages": [', headers=JSON_TYPE), 400, None),
    "not UTF-8": (lambda c: c.http.post(CHAT, content=b"\xff\xfe", headers=JSON_TYPE), 400, None),
    "no body": (lambda c: c.http.post(CHAT, headers=JSON_TYPE), 400, None),
    "not an object": (lambda c: c.http.post(CHAT, json=[1]), 400, "body"),
    "a form": (lambda c: c.http.post(CHAT, data={"messages": "x"}), 415, None),
    "plain text": (lambda c: c.http.post(SPEECH, content="{}", headers={"content-type": "text/plain"}), 415, None),
    "GET of a POST route": (lambda c: c.http.get(CHAT), 405, None),
    "POST of a GET route": (lambda c: c.http.post("/v1/models"), 405, None),
    "unknown path": (lambda c: c.http.get("/v1/embeddings"), 404, None),
    "wrong type": (lambda c: c.chat(max_tokens="many"), 400, "max_tokens"),
    "no messages": (lambda c: c.http.post(CHAT, json={"model": "ming-omni"}), 400, "messages"),
    "empty messages": (lambda c: c.http.post(CHAT, json={"messages": []}), 400, "messages"),
    "unknown role": (lambda c: c.http.post(CHAT, json={"messages": [{"role": "x", "content": "y"}]}), 400,
                     "messages[0].role"),
    "unknown voice": (lambda c: c.speak(voice="alloy"), 404, "voice"),
    "unknown voice in a stream": (lambda c: c.chat(stream=True, modalities=["text", "audio"], audio={"voice": "x"}),
                                  404, "audio.voice"),
    "ogg": (lambda c: c.speak(response_format="ogg"), 400, "response_format"),
    "video output": (lambda c: c.chat(modalities=["video"]), 400, "modalities[0]"),
    "unknown field": (lambda c: c.chat(temprature=1), 400, "temprature"),
    "a key that is half a character": (
        lambda c: c.http.post(CHAT, content=b'{"messages": [{"role": "user", "content": "x"}], "a\\ud800": 1}',
                              headers=JSON_TYPE), 400, "a\\ud800"),
    "empty audio": (lambda c: c.chat(audios=["data:audio/wav;base64,"]), 400, "audios[0]"),
    "bad base64": (lambda c: c.chat(images=["data:image/png;base64,@@@@"]), 400, "images[0]"),
    "forbidden host": (lambda c: c.chat(images=["http://127.0.0.1:1/a.png"]), 400, "images[0]"),
    "forbidden path": (lambda c: c.chat(images=["/etc/passwd"]), 400, "images[0]"),
    "too long for the context": (lambda c: c.chat("too long", stream=True), 400, "messages"),
    "overloaded": (lambda c: c.chat("overloaded"), 503, None),
    "overloaded stream": (lambda c: c.chat("overloaded", stream=True), 503, None),
    "a worker that died": (lambda c: c.chat("fail first", stream=True), 500, None),
    "a worker that dies midway": (lambda c: c.chat("fail midway"), 500, None),
}  # fmt: skip


def test_bad_requests_do_not_affect_concurrent_ones(client: Client) -> None:
    """Valid requests give the same output while all invalid ones are sent as when they run alone."""
    quiet_chat = client.chat("Steady", **SPOKEN).json()["choices"]
    quiet_speech = client.speak("Steady").content
    stop = threading.Event()

    def keep_asking(ask: Callable[[], object]) -> list[object]:
        answers = []
        while not stop.is_set():
            answers.append(ask())
        return answers

    def without_id(choices: Any) -> Any:
        audio = choices[0]["message"]["audio"]
        return {**choices[0]["message"], "audio": (audio["data"], audio["transcript"])}

    with ThreadPoolExecutor(2) as pool:
        chats = pool.submit(
            keep_asking, lambda: without_id(client.chat("Steady", **SPOKEN).json()["choices"])
        )
        clips = pool.submit(keep_asking, lambda: client.speak("Steady").content)
        try:
            for name, (post, status, param) in BAD_REQUESTS.items():
                error = error_of(post(client), status)
                assert error["param"] == param, name
        finally:
            stop.set()
        assert all(answer == without_id(quiet_chat) for answer in chats.result(60))
        assert all(clip == quiet_speech for clip in clips.result(60))


@pytest.mark.parametrize("name", ["overloaded", "overloaded stream"])
def test_a_full_server_sends_retry_after(client: Client, name: str) -> None:
    assert BAD_REQUESTS[name][0](client).headers["retry-after"] == "1"


def test_405_lists_the_allowed_methods(client: Client) -> None:
    response = client.http.get(CHAT)
    assert response.headers["allow"] == "POST"
    assert error_of(response, 405)["code"] == "method_not_allowed"


def test_a_stream_that_fails_ends_with_an_error_event(client: Client) -> None:
    chunks = events(client.chat("fail midway", stream=True))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1]] == ["You", " said:"]
    assert chunks[-1]["error"]["message"] == "rank 1 died midway"
    assert chunks[-1]["error"]["type"] == "server_error"
    pieces = events(client.speak("fail midway", stream_format="sse"))
    assert pieces[-1]["error"]["message"] == "rank 1 died midway"


def test_raw_audio_that_fails_is_broken_off(client: Client) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        client.speak("fail midway", stream_format="audio")
    assert client.speak().status_code == 200


def test_a_bug_is_reported_without_its_details(client: Client) -> None:
    error = error_of(client.chat("crash midway"), 500)
    assert "bug" not in error["message"] and error["code"] == "internal_error"
    with client.http.stream(
        "POST", CHAT, json={"messages": [{"role": "user", "content": "crash midway"}], "stream": True}
    ) as response:
        assert '"internal_error"' in "".join(response.iter_text())
    assert client.chat().status_code == 200


def test_limits(small: Client) -> None:
    assert error_of(small.chat("x" * 3000), 413)["code"] == "body_too_large"

    def chunked() -> Iterator[bytes]:
        yield b'{"messages": "'
        yield b"x" * 3000

    assert (
        error_of(small.http.post(CHAT, content=chunked(), headers=JSON_TYPE), 413)["code"] == "body_too_large"
    )
    assert "image of 7 bytes" in small.chat(images=["a.png"]).json()["choices"][0]["message"]["content"]
    assert error_of(small.chat(images=["../a"]), 400)["code"] == "local_media_not_allowed"
    assert "image of 3 bytes" in small.chat(images=["YWJj"]).json()["choices"][0]["message"]["content"]


def test_a_body_that_does_not_arrive(small: Client) -> None:
    host, port = small.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{{"
        connection.sendall(head.encode())
        answer = connection.recv(4096)
    assert b" 408 " in answer.splitlines()[0]


def test_requests_beyond_the_limit_are_refused(small: Client) -> None:
    with small.http.stream(
        "POST", CHAT, json={"messages": [{"role": "user", "content": "endless"}], "stream": True}
    ) as running:
        pieces = running.iter_text()
        next(pieces)
        response = small.chat()
        assert error_of(response, 503)["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
        assert small.http.get("/health").json()["num_requests_running"] == 1


def test_unsupported_modality_of_this_artifact() -> None:
    for client in start(info=TEXT_ONLY):
        assert error_of(client.chat(**SPOKEN), 400)["code"] == "unsupported_modality"
        assert error_of(client.speak(), 400)["code"] == "unsupported_model"
        assert error_of(client.chat(images=[image_data_url()]), 400)["param"] == "images[0]"
        assert client.chat().status_code == 200


def test_metrics() -> None:
    for client in start(info=INFO):
        client.chat(**SPOKEN)
        client.chat(n=0)
        client.chat("fail midway", stream=True)
        client.http.get("/nowhere/else")
        assert client.metric('mingc_http_requests_total{route="/v1/chat/completions",status="200"}') == 2
        assert client.metric('mingc_http_requests_total{route="/v1/chat/completions",status="400"}') == 1
        assert client.metric('mingc_http_requests_total{route="unmatched",status="404"}') == 1
        assert client.metric('mingc_stream_errors_total{route="/v1/chat/completions"}') == 1
        assert client.metric("mingc_prompt_tokens_total") == 7
        assert client.metric("mingc_generation_tokens_total") > 0
        assert client.metric("mingc_generated_audio_seconds_total") == pytest.approx(0.96)
        assert client.metric("mingc_time_to_first_token_seconds_count") == 2
        assert client.metric("mingc_time_to_first_audio_seconds_count") == 1
        assert client.metric("mingc_num_requests_running") == 0
        assert client.metric("mingc_kv_cache_usage_ratio") == 0.25
        assert client.metric('mingc_num_requests_waiting{engine="thinker"}') == 2
        assert client.metric('mingc_num_requests_waiting{engine="talker"}') == 0
        assert client.metric('mingc_num_listeners{state="starting"}') == 1
        assert client.metric('mingc_num_listeners{state="playing"}') == 5
        for _ in range(2):  # of the service, not of each scrape
            assert client.metric("mingc_speech_underruns_total") == 4


def test_counters_of_the_engines_follow_their_load() -> None:
    """A load that is not known has zeros, and what was counted stays counted."""
    metrics = Metrics()

    def rendered(load: ServiceLoad) -> dict[str, float]:
        lines = [line.split() for line in metrics.render(load).decode().splitlines() if "#" not in line]
        return {
            name: float(value)
            for name, value in lines
            if any(part in name for part in ("_prefi", "preempt", "speech_underruns", "encoder_cache"))
            and "_created" not in name
        }

    first = ServiceLoad(
        prefilled_tokens=40,
        reused_tokens=24,
        num_preempted=1,
        cached_pages=5,
        evicted_pages=2,
        num_underruns=3,
        encoder_hits=6,
        encoder_misses=7,
        encoder_cache_bytes=800,
    )
    later = replace(
        first, prefilled_tokens=50, evicted_pages=3, cached_pages=1, encoder_hits=9, encoder_cache_bytes=70
    )
    expected = {
        "mingc_prefilled_tokens_total": 40,
        "mingc_prefix_cache_hit_tokens_total": 24,
        "mingc_preemptions_total": 1,
        "mingc_prefix_cache_evicted_pages_total": 2,
        "mingc_prefix_cache_pages": 5,
        "mingc_speech_underruns_total": 3,
        "mingc_encoder_cache_hits_total": 6,
        "mingc_encoder_cache_misses_total": 7,
        "mingc_encoder_cache_bytes": 800,
    }
    assert rendered(first) == rendered(first) == expected
    unknown = {"mingc_prefix_cache_pages": 0, "mingc_encoder_cache_bytes": 0}
    assert rendered(ServiceLoad()) == {**expected, **unknown}
    assert rendered(later) == {
        "mingc_prefilled_tokens_total": 50,
        "mingc_prefix_cache_hit_tokens_total": 24,
        "mingc_preemptions_total": 1,
        "mingc_prefix_cache_evicted_pages_total": 3,
        "mingc_prefix_cache_pages": 1,
        "mingc_speech_underruns_total": 3,
        "mingc_encoder_cache_hits_total": 9,
        "mingc_encoder_cache_misses_total": 7,
        "mingc_encoder_cache_bytes": 70,
    }


def test_memory_is_exported_by_owner_and_device() -> None:
    metrics = Metrics()
    uses = [("cuda:0", "kv_pages", 7), ("cuda:1", "talker_slots", 3), ("host", "encoder_cache", 5)]
    memory = tuple(MemoryUse(device=device, owner=owner, num_bytes=count) for device, owner, count in uses)
    lines = metrics.render(ServiceLoad(memory=memory)).decode().splitlines()
    assert [line for line in lines if line.startswith("mingc_memory_bytes")] == [
        f'mingc_memory_bytes{{device="{device}",owner="{owner}"}} {count:.1f}'
        for device, owner, count in uses
    ]


@pytest.mark.parametrize(
    ("turn_end", "sent", "first_s", "num_underruns"),
    [
        (
            10.0,
            [(10.25, 0.32), (10.5, 0.32), (10.8, 0.32)],
            0.25,
            0,
        ),  # ahead of playback, which ends at 11.21
        (10.0, [(10.25, 0.25), (10.5, 0.25), (10.75, 0.25)], 0.25, 0),  # just in time
        (None, [(3.0, 0.25), (3.5, 0.25), (3.7, 0.25), (4.25, 0.25)], None, 2),  # a gap delays what follows
        (1.0, [(2.0, 0.25), (9.0, 0.25)], 1.0, 1),
    ],
)
def test_audio_of_a_realtime_response_is_late_if_everything_before_was_played(
    turn_end: float | None, sent: list[tuple[float, float]], first_s: float | None, num_underruns: int
) -> None:
    metrics = Metrics()
    moments = iter([moment for moment, _ in sent])
    playback = Playback(metrics, turn_end, clock=lambda: next(moments))
    for _, seconds in sent:
        playback.add(seconds)
    samples = {each.name: each.value for each in metrics.samples(ServiceLoad()) if not each.labels}
    assert samples["mingc_realtime_underruns_total"] == num_underruns
    assert samples["mingc_realtime_first_audio_seconds_count"] == (first_s is not None)
    assert samples["mingc_realtime_first_audio_seconds_sum"] == (first_s or 0)


@pytest.mark.parametrize(
    ("fails", "sent", "status"),
    [(False, None, "499"), (True, None, "500"), (True, 200, "500"), (False, 200, "200"), (False, 404, "404")],
)
def test_a_request_is_counted_by_route_and_status(fails: bool, sent: int | None, status: str) -> None:
    """docs/metrics.md: 499 is a client that left before an answer; raw paths are no label."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if sent is not None:
            await send({"type": "http.response.start", "status": sent, "headers": []})
        if fails:
            raise ZeroDivisionError

    async def ignore(message: Message) -> None:
        pass

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    metrics = Metrics()
    app = Starlette(routes=[Route("/v1/voices/{name}", lambda request: PlainTextResponse(""))])
    scope = {"type": "http", "method": "GET", "path": "/v1/voices/DB30", "headers": [], "app": app}
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        asyncio.run(RequestContext(answer, metrics)(scope, receive, ignore))
    counted = [
        line
        for line in metrics.render(ServiceLoad()).decode().splitlines()
        if line.startswith("mingc_http_requests_total")
    ]
    assert counted == [f'mingc_http_requests_total{{route="/v1/voices/{{name}}",status="{status}"}} 1.0']


def test_the_list_of_metrics_is_what_a_server_exports() -> None:
    listed = {(info.name, info.type): info for info in describe_metrics()}
    for client in start():
        text = client.http.get("/metrics").text
        exported = {
            (name, kind)
            for name, kind in re.findall(r"# TYPE (\S+) (\S+)", text)
            if not name.endswith("_created")
        }
        assert exported == set(listed)
        assert all(f"# HELP {info.name} {info.help}" in text for info in listed.values())
    assert listed["mingc_http_requests_total", "counter"].labels == ("route", "status")
