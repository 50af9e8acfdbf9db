"""The official `openai` client against a real server over a fake service."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import openai_checks as checks
import pytest
from fake_service import FakeService
from server_thread import run_server


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with run_server(FakeService) as url:
        yield url


@pytest.mark.parametrize("check", checks.OF_ANY_SERVER, ids=lambda check: check.__name__)
def test_client(base_url: str, check: Callable[[str], object]) -> None:
    check(base_url)


@pytest.mark.parametrize("audio_format", ["pcm16", "flac"])
def test_streamed_audio_in_other_formats(base_url: str, audio_format: str) -> None:
    checks.check_streamed_text_and_audio(base_url, audio_format)


@pytest.mark.parametrize("audio_format", ["wav", "pcm16", "flac"])
def test_the_stream_helper_joins_a_whole_clip(base_url: str, audio_format: str) -> None:
    checks.check_joined_stream(base_url, audio_format)


@pytest.mark.parametrize("audio_format", ["mp3", "opus", "aac"])
def test_a_compressed_answer_is_a_clip(base_url: str, audio_format: str) -> None:
    arguments: dict[str, Any] = {
        "model": "ming-omni",
        "messages": checks.user(checks.text("Hello.")),
        "modalities": ["text", "audio"],
        "audio": {"voice": "DB30", "format": audio_format},
    }
    with checks.client(base_url) as openai:
        whole = openai.chat.completions.create(**arguments).choices[0].message.audio
        chunks = list(openai.chat.completions.create(**arguments, stream=True))
    parts = [chunk.choices[0].delta.model_dump().get("audio") or {} for chunk in chunks]
    assert whole is not None
    assert base64.b64decode(whole.data) == b"".join(
        base64.b64decode(part.get("data") or "") for part in parts
    )
    assert seconds_of(base64.b64decode(whole.data)) == pytest.approx(0.96, abs=0.06)


def seconds_of(data: bytes) -> float:
    """Length of a clip; of one that is cut off, what was decoded before."""
    seconds = 0.0
    with av.open(io.BytesIO(data), "r") as container, contextlib.suppress(av.InvalidDataError):
        for frame in container.decode(audio=0):
            seconds += frame.samples / frame.sample_rate
    return seconds


@pytest.mark.parametrize("audio_format", [None, "mp3", "opus", "aac", "wav", "pcm"])
def test_speech_is_heard_before_its_end(audio_format: str | None) -> None:
    """Clients name a format or none, read chunks and play them; the service here never ends."""
    services: list[FakeService] = []

    def make() -> FakeService:
        services.append(FakeService())
        return services[-1]

    with run_server(make) as url, checks.client(url) as openai:
        given: dict[str, Any] = {} if audio_format is None else {"response_format": audio_format}
        with openai.audio.speech.with_streaming_response.create(
            model="ming-omni", voice="DB30", input="wait", **given
        ) as response:
            data, chunks = b"", response.iter_bytes(512)
            while len(data) < 4096:
                data += next(chunks)
            assert services[0].running, "it is still speaking"
            kinds = {"pcm": "audio/pcm;rate=24000;channels=1", "wav": "audio/wav", "opus": "audio/ogg"}
            kind = kinds.get(audio_format or "mp3", "audio/mpeg" if audio_format != "aac" else "audio/aac")
            assert response.headers["content-type"] == kind
        if audio_format != "pcm":
            assert seconds_of(data) > 0.04


def test_speech_of_every_format_whole_and_streamed(base_url: str, tmp_path: Path) -> None:
    with checks.client(base_url) as openai:
        for audio_format in ("mp3", "opus", "aac", "flac", "wav"):
            arguments: dict[str, Any] = {"model": "ming-omni", "voice": "DB30", "input": "Hello."}
            with openai.audio.speech.with_streaming_response.create(
                **arguments, response_format=audio_format
            ) as response:
                response.stream_to_file(tmp_path / audio_format)
            whole = openai.audio.speech.create(
                **arguments, response_format=audio_format, speed=0.5, extra_body={"stream": False}
            )
            assert int(whole.response.headers["content-length"]) == len(whole.content)
            streamed = (tmp_path / audio_format).read_bytes()
            assert seconds_of(streamed) == pytest.approx(0.96, abs=0.06)
            assert seconds_of(whole.content) == pytest.approx(1.92, abs=0.06)


def test_speech_to_a_file(base_url: str, tmp_path: Path) -> None:
    checks.check_speech_file(base_url, tmp_path)


def test_an_answer_can_be_sent_back_as_history(base_url: str) -> None:
    with checks.client(base_url) as openai:
        first = openai.chat.completions.create(
            model="ming-omni",
            messages=checks.user(checks.text("Hello.")),
            modalities=["text", "audio"],
            audio={"voice": "DB30", "format": "wav"},
        )
        history = [
            *checks.user(checks.text("Hello.")),
            first.choices[0].message,
            *checks.user(checks.text("And?")),
        ]
        second = openai.chat.completions.create(model="ming-omni", messages=history)
    assert second.choices[0].message.content == "You said: Hello. And?"


def test_an_error_in_a_stream_is_raised_by_the_client(base_url: str) -> None:
    from openai import APIError

    with checks.client(base_url) as openai, pytest.raises(APIError, match="rank 1 died midway"):
        for _ in openai.chat.completions.create(
            model="ming-omni", messages=checks.user(checks.text("fail midway")), stream=True
        ):
            pass
