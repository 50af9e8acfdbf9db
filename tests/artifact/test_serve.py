"""The official `openai` client, imports, signals and the demo, over a real artifact."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import soundfile
from changed_artifact import terse_artifact
from hostile_media import small_video
from mingc_command import ENVIRONMENT, REPOSITORY, Server, serving

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
import openai_checks as checks

FORBIDDEN = ("torch._dynamo", "torch._inductor", "transformers", "onnx", "mingc.export", "triton")


@pytest.mark.parametrize("check", checks.OF_ANY_SERVER, ids=lambda check: check.__name__)
def test_openai_client(server: Server, check: Callable[[str], object]) -> None:
    check(server.url)


def test_openai_client_writes_speech_to_a_file(server: Server, tmp_path: Path) -> None:
    checks.check_speech_file(server.url, tmp_path)


def test_a_stream_has_one_audio_chunk_per_patch(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "Speak."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "DB30", "format": "pcm16", "sample_rate": 44100, "max_steps": 3},
        "max_tokens": 10,
        "stream": True,
        "seed": 3,
    }
    deltas, sizes, last = 0, [], ""
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, timeout=300, trust_env=False
    ) as response:
        for line in response.iter_lines():
            last = line or last
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                deltas += "content" in choice["delta"]
                data = choice["delta"].get("audio", {}).get("data")
                if data:
                    sizes.append(len(base64.b64decode(data)) // 2)
    assert last == "data: [DONE]"
    assert deltas >= 10
    assert len(sizes) >= 3 and sum(sizes) == len(sizes) * 14112


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on PATH")
def test_the_examples_of_the_http_page_run(eager_artifact: Path, tmp_path: Path) -> None:
    """As printed, but for the port; players save what they are to play. The printed answer has the answer's shape."""
    page = (REPOSITORY / "docs" / "http-api.md").read_text(encoding="utf-8")
    section = page[page.index("\n## Examples\n") : page.index("\n## Chat\n")]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "picture.png").write_bytes(base64.b64decode(checks.image_data_url().partition(",")[2]))
    (tmp_path / "clip.wav").write_bytes(base64.b64decode(checks.wav_base64()))
    (tmp_path / "video.mp4").write_bytes(small_video())
    shutil.copy(REPOSITORY / "tests" / "data" / "speech" / "three-sentences.ogg", tmp_path / "ann.ogg")
    samples, rate = soundfile.read(
        tmp_path / "ann.ogg"
    )  # the model writes hundreds of tokens for each sentence
    soundfile.write(tmp_path / "meeting.mp3", samples[: 2 * rate], rate, format="OGG")
    for player in ("ffplay", "aplay"):
        (tmp_path / player).write_text(f'#!/bin/bash\ncat > "$(mktemp {tmp_path}/{player}.XXX)"\n')
        (tmp_path / player).chmod(0o755)
    environment = {**ENVIRONMENT, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NO_PROXY": "*"}
    artifact = terse_artifact(eager_artifact, tmp_path / "artifact")
    with serving(artifact, "--speech-lead", 0, "--voices-dir", tmp_path / "voices") as running:

        def run(*words: str) -> str:
            address = running.url.removeprefix("http://")
            command = [word.replace("127.0.0.1:8000", address) for word in words]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        whole, *rest = [text for kind, text in blocks if kind == ""]
        assert shape(json.loads(run("bash", "-e", "-c", whole))) == shape(
            json.loads(next(text for kind, text in blocks if kind == "json"))
        )
        printed = "".join(run("bash", "-e", "-o", "pipefail", "-c", text) for text in rest)
        run(sys.executable, "-c", "\n".join(text for kind, text in blocks if kind == "python"))
    completion, tokens, listed = objects(printed)
    assert completion["object"] == "text_completion" and tokens["count"] == len(tokens["tokens"])
    voices = listed["voices"]
    assert set(voices) == set(re.search(r"for voice in (.*);", section)[1].split())  # type: ignore[index]
    assert (tmp_path / "meeting.srt").read_text().count(" --> ") == 1
    played = [*tmp_path.glob("ffplay.*")]
    assert len(played) == 2
    for path in (
        *played,
        *(tmp_path / f"{name}.wav" for name in ("answer", "good-morning", "ann", "bob", "once", *voices)),
    ):
        checks.check_wav(path.read_bytes())
    for path in (tmp_path / "answer.pcm", tmp_path / "spoken.pcm", *tmp_path.glob("aplay.*")):
        assert path.stat().st_size > 0 and path.stat().st_size % 7680 == 0  # 0.16 s each, at 24 kHz


def objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects that are printed after each other."""
    found = []
    while text.strip():
        value, end = json.JSONDecoder().raw_decode(text.lstrip())
        found.append(value)
        text = text.lstrip()[end:]
    return found


def shape(value: object) -> object:
    """Names and JSON types."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    return [shape(each) for each in value] if isinstance(value, list) else type(value)


def test_the_running_server_loads_no_compiler_and_no_export_code(
    compiled_artifact: Path, tmp_path: Path
) -> None:
    script = tmp_path / "probe.py"
    script.write_text(
        "import asyncio, sys\n"
        "import torch\n"
        "bare = set(sys.modules)\n"
        "from pathlib import Path\n"
        "from mingc.media.decoder_pool import DecoderPool\n"
        "from mingc.runtime.service.builder import open_service\n"
        "from mingc.server.app import create_app\n"
        "from mingc.server.options import ServeOptions\n"
        "from mingc.runtime.request import SpeechRequest, SpeechParams\n"
        "async def main():\n"
        "    service = open_service(Path(sys.argv[1]), media=DecoderPool())\n"
        "    create_app(service, ServeOptions(port=0))\n"
        "    request = SpeechRequest(request_id='1', text='Hello there.', speech=SpeechParams(seed=1, max_steps=2))\n"
        "    events = [event async for event in service.speech(request)]\n"
        "    assert len(events) == 3, events\n"
        "    await service.close(shutdown_timeout_s=0)\n"
        "asyncio.run(main())\n"
        "print('\\n'.join(sorted(set(sys.modules) - bare)))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(compiled_artifact)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "mingc.runtime.talker.worker" in loaded
    assert [name for name in loaded if name.startswith(FORBIDDEN)] == []


def test_sigterm_fails_running_requests_and_leaves_no_process(
    two_rank_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    body = {
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": 2000,
        "stream": True,
        "temperature": 1.0,
        "seed": 5,  # a seed with a long answer
        "stop": ["no such text"],
    }
    with serving(two_rank_artifact, "--shutdown-timeout", 0.2) as running:
        family = [psutil.Process(running.process.pid)]
        family += family[0].children(recursive=True)
        assert len(family) >= 2, "two ranks are two processes"
        events = []
        with httpx.stream(
            "POST", f"{running.url}/v1/chat/completions", json=body, timeout=60, trust_env=False
        ) as response:
            for line in response.iter_lines():
                if line:
                    events.append(line)
                    if len(events) == 3:  # once: a second SIGTERM stops at once
                        running.process.terminate()
        assert "error" in json.loads(events[-1].removeprefix("data: ")), events[-3:]
        assert running.process.wait(20) == 0
        _gone, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []
    assert [path.name for path in tmp_path.iterdir()] == []
