"""The official `openai` client against a real server over a fake service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

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


def test_speech_to_a_file(base_url: str, tmp_path: Path) -> None:
    checks.check_speech_file(base_url, tmp_path)


def test_speech_without_a_format_is_wav(base_url: str) -> None:
    with checks.client(base_url) as openai:
        speech = openai.audio.speech.create(model="ming-omni", voice="DB30", input="Hello.")
    assert len(checks.check_wav(speech.content)) == 3 * 14112


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
