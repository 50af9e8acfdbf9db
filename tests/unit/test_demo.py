"""Parts of the demo that need no server."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import sys
import wave
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np
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


MODEL = {
    "id": "mine",
    "sample_rate": 24000,
    "input_modalities": ["text", "image", "audio"],
    "output_modalities": ["text", "audio"],
}
EVENTS = [
    {"choices": [{"delta": {"content": "Hi"}}]},
    {"choices": [{"delta": {"audio": {"data": base64.b64encode(b"\1\2" * 12000).decode()}}}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}], "timings_ms": {"first_token": 5.0}},
    {"choices": [], "usage": {"completion_tokens": 2, "audio_patches": 3}},
]


class Web:
    """A server in this process: keeps requests and streams `EVENTS`, or refuses with `status`."""

    def __init__(self, model: dict[str, Any], status: int = 200, body: str | None = None) -> None:
        self.model, self.status = model, status
        lines = [f"data: {json.dumps(event)}\n\n" for event in EVENTS]
        self.body = "".join([*lines, "data: [DONE]\n\n"]) if body is None else body
        self.asked: list[dict[str, Any]] = []

    def client(self, **options: Any) -> httpx.Client:
        def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [self.model]})
            assert (request.method, request.url.path) == ("POST", "/v1/chat/completions")
            self.asked.append(json.loads(request.content))
            return httpx.Response(self.status, text=self.body)

        return REAL_CLIENT(base_url="http://test", transport=httpx.MockTransport(answer))


REAL_CLIENT = httpx.Client


@pytest.mark.parametrize("has_image", [True, False])
@pytest.mark.parametrize("has_audio", [True, False])
@pytest.mark.parametrize("speaks", [True, False])
def test_the_question_holds_what_the_model_takes(has_image: bool, has_audio: bool, speaks: bool) -> None:
    inputs = ["text", *["image"] * has_image, *["audio"] * has_audio]
    web = Web({**MODEL, "input_modalities": inputs, "output_modalities": ["text", *["audio"] * speaks]})
    answer = demo._ask(web.client(), web.model, b"clip")
    (asked,) = web.asked
    (message,) = asked["messages"]
    parts = {part["type"]: part for part in message["content"]}
    assert [*parts] == ["text", *["image_url"] * has_image, *["input_audio"] * has_audio]
    assert parts["text"]["text"] == demo.QUESTION and message["role"] == "user"
    if has_image:
        kind, _, data = parts["image_url"]["image_url"]["url"].partition(",")
        assert kind == "data:image/png;base64" and base64.b64decode(data) == demo._picture()
    if has_audio:
        clip = parts["input_audio"]["input_audio"]
        assert (base64.b64decode(clip["data"]), clip["format"]) == (b"clip", "wav")
    assert asked["model"] == "mine" and asked["modalities"] == web.model["output_modalities"]
    assert asked["stream"] is True and asked["max_tokens"] == 48
    assert asked.get("audio") == ({"format": "pcm16"} if speaks else None)
    assert (answer.text, len(answer.samples), answer.usage["audio_patches"]) == ("Hi", 24000, 3)
    assert answer.total_s >= (answer.first_text_s or 0.0) >= 0.0


@pytest.mark.parametrize(
    ("body", "says"), [('{"error": {"message": "too long"}}', "too long"), ("<html>", "<html>"), ("[]", "[]")]
)
def test_a_refused_question_is_reported(body: str, says: str) -> None:
    web = Web(MODEL, 400, body)
    with pytest.raises(WorkerError, match=f"the server refused the request: {re.escape(says)}"):
        demo._ask(web.client(), web.model, b"")


@pytest.mark.parametrize(
    ("again", "usable", "exports"), [(False, True, 0), (False, False, 1), (True, True, 1)]
)
def test_a_demo_writes_what_was_answered(
    again: bool, usable: bool, exports: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Path, Path]] = []

    def export(source: Path, artifact: Path) -> list[demo.StageTime]:
        made.append((source, artifact))
        return [demo.StageTime(stage="complete export", seconds=1.0)]

    @contextmanager
    def server(artifact: Path, log: Path) -> Iterator[str]:
        assert (artifact, log) == (output / "artifact", output / "server.log")
        yield "http://test"

    web, output = Web(MODEL), tmp_path / "deep" / "demo"
    monkeypatch.setattr(demo, "_export", export)
    monkeypatch.setattr(demo, "_server", server)
    monkeypatch.setattr(demo, "_is_usable", lambda artifact, source: usable)
    monkeypatch.setattr(httpx, "Client", web.client)
    (tmp_path / "config.json").write_text("{}")
    report = demo.run_demo(output, checkpoint=tmp_path, again=again)
    assert made == [(tmp_path, output / "artifact")] * exports
    assert (report.tokens, report.audio_patches, report.sample_rate_hz) == (2, 3, 24000)
    assert report.audio_seconds == 0.5 and report.text == "Hi" and report.artifact == output / "artifact"
    assert report.transcript.read_text(encoding="utf-8") == f"{demo.QUESTION}\n\nHi\n"
    with wave.open(str(report.reply)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24000, 1, 2)
        assert file.readframes(-1) == b"\1\2" * 12000
    stages = [each.stage for each in report.times]
    assert stages == ["complete export"] * exports + [
        "server start",
        "first text",
        "first audio",
        "complete answer",
        "server: first token",
    ]


@pytest.mark.parametrize("fault", ["version", "torch", "newer code"])
def test_an_artifact_of_another_version_is_made_anew(
    fault: str, artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    now = max(path.stat().st_mtime for path in Path(mingc.__file__).parent.rglob("*.py"))
    os.utime(checkpoint / "config.json", (now, now))
    later = -1 if fault == "newer code" else 60
    os.utime(artifact_path / "manifest.json", (now + later, now + later))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.12.0" if fault == "torch" else "2.13.0")
    monkeypatch.setattr(mingc, "__version__", "0.0.9" if fault == "version" else "0.1.0")
    assert not demo._is_usable(artifact_path, checkpoint)


@pytest.mark.parametrize("code", [0, 3])
def test_the_export_is_a_command_whose_failure_is_reported(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    report = {"graphs": [{"stage": "cfm", "graph": "sample", "compile_seconds": 2.5}], "seconds": 7.25}

    def command(*words: str) -> list[str]:
        asked.append([*words])
        return [sys.executable, "-c", f"import sys; print({json.dumps(report)!r}); sys.exit({code})"]

    monkeypatch.setattr(demo, "_command", command)
    if code:
        with pytest.raises(WorkerError, match="the export ended with code 3"):
            demo._export(Path("from"), tmp_path / "artifact")
    else:
        times = demo._export(Path("from"), tmp_path / "artifact")
        assert [(each.stage, each.seconds) for each in times] == [
            ("compile cfm.sample", 2.5),
            ("complete export", 7.2),
        ]
    (words,) = asked
    assert words[:4] == ["export", "from", "--output", str(tmp_path / "artifact")]
    assert "--force" in words and words[words.index("--cache") + 1] == str(tmp_path / "engines")


@pytest.mark.parametrize(("code", "problem"), [(0, None), (4, "the server ended with code 4")])
def test_the_server_ends_with_the_demo(
    code: int, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import signal, sys\n"
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))\n"
        "print('begun', file=sys.stderr, flush=True)\n"
        "print('http://127.0.0.1:1', flush=True)\n"
        "sys.stdin.read()\n"
    )
    asked: list[list[str]] = []

    def command(*words: str) -> list[str]:
        asked.append([*words])
        return [sys.executable, "-c", script]

    monkeypatch.setattr(demo, "_command", command)
    raised = pytest.raises(WorkerError, match=problem) if problem else nullcontext()
    with raised, demo._server(Path("a"), tmp_path / "log") as url:
        assert url == "http://127.0.0.1:1"
    assert asked[0][:2] == ["serve", "a"] and asked[0][asked[0].index("--port") + 1] == "0"
    assert (tmp_path / "log").read_text() == "begun\n"


def test_a_server_that_does_not_start_is_reported_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys; print('x' * 2000 + 'no such artifact', file=sys.stderr)"
    monkeypatch.setattr(demo, "_command", lambda *_: [sys.executable, "-c", script])
    with (
        pytest.raises(WorkerError, match="did not start") as caught,
        demo._server(Path("a"), tmp_path / "log"),
    ):
        pass
    assert str(caught.value.fix).endswith("no such artifact") and len(str(caught.value.fix)) == 999


def test_the_whole_question() -> None:
    web = Web(MODEL)
    demo._ask(web.client(), web.model, b"clip")
    (asked,) = web.asked
    del asked["messages"]
    assert asked == {
        "model": "mine",
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        "max_tokens": 48,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_every_pixel_of_the_picture() -> None:
    """A red disc with a third of the side as radius on a gradient from blue to pale blue."""
    y, x = np.mgrid[:96, :96]
    expected = np.stack([2 * x, 2 * x, np.full_like(x, 255)], axis=-1).astype(np.uint8)
    expected[np.hypot(x - 48, y - 48) < 32] = (220, 40, 40)
    with Image.open(io.BytesIO(demo._picture())) as image:
        np.testing.assert_array_equal(np.asarray(image), expected)


def test_the_tone_falls_from_440_hz_to_40_hz(tmp_path: Path) -> None:
    """A chirp: its phase is 2π(440 t - 200 t²), so its pitch is 440 - 400 t."""
    with wave.open(io.BytesIO(demo._clip(tmp_path))) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        samples = np.frombuffer(file.readframes(-1), "<i2")
    t = np.arange(16000) / 16000
    np.testing.assert_allclose(samples, 8000 * np.sin(2 * np.pi * (440 * t - 200 * t**2)), atol=1.01)


def test_a_demo_says_what_its_answer_is_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def server(artifact: Path, log: Path) -> Iterator[str]:
        yield "http://test"

    web = Web(MODEL)
    monkeypatch.setattr(demo, "_server", server)
    monkeypatch.setattr(demo, "_is_usable", lambda artifact, source: True)
    monkeypatch.setattr(httpx, "Client", web.client)
    (tmp_path / "config.json").write_text("{}")
    output = tmp_path / "demo"
    for _ in range(2):  # the folder may be there
        report = demo.run_demo(output, checkpoint=tmp_path, again=False)
    assert report.note == demo.RANDOM_WEIGHTS
    printed = capsys.readouterr()
    assert printed.out == "" and f"demo: {demo.RANDOM_WEIGHTS}\n" in printed.err
    assert f"demo: asking with a 96×96 image and an audio clip: {demo.QUESTION}\nHi\n" in printed.err
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot create the folder") as caught:
        demo.run_demo(tmp_path / "file" / "below", checkpoint=tmp_path, again=False)
    assert caught.value.where == "--output"


@pytest.mark.parametrize(("cores", "jobs"), [(1, "1"), (3, "3"), (4, "4"), (64, "4"), (None, "1")])
def test_the_demo_compiles_with_up_to_four_jobs(
    cores: int | None, jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def command(*words: str) -> list[str]:
        asked.extend(words)
        return [sys.executable, "-SEc", "raise SystemExit(3)"]

    monkeypatch.setattr(demo, "_command", command)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    with pytest.raises(WorkerError) as caught:
        demo._export(Path("from"), tmp_path / "artifact")
    assert asked == [
        "export", "from", "--output", str(tmp_path / "artifact"), "--force", "--jobs", jobs,
        "--cache", str(tmp_path / "engines"), "--json",
    ]  # fmt: skip
    assert caught.value.where == "from"
