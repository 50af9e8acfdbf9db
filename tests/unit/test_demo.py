"""Parts of the demo that need no server."""

from __future__ import annotations

import io
import os
import wave
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import mingc
from mingc import demo
from mingc.errors import ConfigError, WorkerError


def test_the_picture_is_a_png_of_a_red_disc() -> None:
    with Image.open(io.BytesIO(demo._picture())) as image:
        assert image.size == (96, 96)
        assert image.convert("RGB").getpixel((48, 48)) == (220, 40, 40)


def test_the_clip_is_a_recording_of_the_checkpoint_or_a_tone(tmp_path: Path) -> None:
    with wave.open(io.BytesIO(demo._clip(tmp_path))) as file:
        assert (file.getframerate(), file.getnframes()) == (16000, 16000)
    recording = tmp_path / "talker" / "data" / "spks" / "a.wav"
    recording.parent.mkdir(parents=True)
    recording.write_bytes(b"RIFF")
    assert demo._clip(tmp_path) == b"RIFF"


def test_a_missing_checkpoint_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint in") as caught:
        demo._find_checkpoint(tmp_path / "nowhere")
    assert caught.value.where == "--checkpoint"


def test_an_artifact_is_reused_until_code_or_checkpoint_change(
    artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    hour = 3600
    now = max(path.stat().st_mtime for path in Path(mingc.__file__).parent.rglob("*.py"))
    os.utime(checkpoint / "config.json", (now, now))
    os.utime(artifact_path / "manifest.json", (now + hour, now + hour))
    assert demo._is_usable(artifact_path, checkpoint)
    os.utime(checkpoint / "config.json", (now + 2 * hour, now + 2 * hour))
    assert not demo._is_usable(artifact_path, checkpoint)
    assert not demo._is_usable(tmp_path / "nowhere", checkpoint)


def test_an_answer_is_collected_with_its_times() -> None:
    answer = demo._Answer()
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "He"}}]},
        {"choices": [{"delta": {"content": "llo"}}]},
        {"choices": [{"delta": {"audio": {"data": "AAAB"}}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}], "timings_ms": {"first_token": 5.0}},
        {"choices": [], "usage": {"completion_tokens": 2}},
    ]
    for second, event in enumerate(events):
        demo._take(answer, event, float(second))
    assert answer.text == "Hello"
    assert bytes(answer.samples) == b"\0\0\1"
    assert (answer.first_text_s, answer.first_audio_s) == (1.0, 3.0)
    assert answer.usage == {"completion_tokens": 2}
    assert {time.stage: time.seconds for time in demo._times(answer)} == {
        "first text": 1.0,
        "first audio": 3.0,
        "complete answer": 0.0,
        "server: first token": 0.005,
    }


def test_an_error_in_the_stream_ends_the_demo() -> None:
    with pytest.raises(WorkerError, match="a rank died"):
        demo._take(demo._Answer(), {"error": {"message": "a rank died"}}, 0.0)


def test_control_characters_never_reach_the_terminal() -> None:
    assert demo._printable("a\x1b[31mb\r\n\x07c") == "a[31mb\nc"
