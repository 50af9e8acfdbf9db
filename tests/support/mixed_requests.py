"""Eight different requests, sent one after the other or together."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image


@dataclass(frozen=True)
class Answer:
    """Text and waveform of one answer; either may be empty."""

    text: str
    samples: NDArray[np.float32]
    patches: int


def picture(width: int, height: int) -> dict[str, Any]:
    pixels = np.linspace(0, 255, width * height * 3, dtype=np.uint8).reshape(height, width, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def clip(seconds: float) -> dict[str, Any]:
    time = np.arange(int(seconds * 16000), dtype=np.float32) / 16000
    file = io.BytesIO()
    soundfile.write(file, 0.2 * np.sin(2 * np.pi * 330 * time), 16000, format="WAV")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def _chat(parts: list[dict[str, Any]], **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 12,
        **fields,
    }


def _text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


MIXED: tuple[tuple[str, dict[str, Any]], ...] = (
    _chat([_text("Hello, how are you today?")]),
    _chat([picture(96, 64), _text("What is this?")]),
    _chat([clip(0.5), _text("What do you hear?")]),
    _chat([picture(64, 64), clip(0.3), _text("Both?")], temperature=0.9, top_p=0.9, seed=11),
    _chat(
        [_text("Say it.")],
        modalities=["text", "audio"],
        audio={"voice": "DB30", "format": "wav", "max_steps": 3},
        seed=5,
    ),
    _chat(
        [picture(32, 64), _text("Say what you see.")],
        modalities=["text", "audio"],
        audio={"voice": "lingguang", "format": "wav", "max_steps": 3},
        seed=6,
        temperature=0.5,
    ),
    ("/v1/audio/speech", {"input": "The first voice.", "voice": "DB30", "seed": 1, "max_steps": 4}),
    (
        "/v1/audio/speech",
        {"input": "第二个声音。", "voice": "lingguang", "seed": 2, "max_steps": 4, "temperature": 0.7},
    ),
)


def send(url: str, request: tuple[str, dict[str, Any]]) -> Answer:
    path, body = request
    response = httpx.post(url + path, json=body, timeout=300, trust_env=False)
    assert response.status_code == 200, response.text
    if path.endswith("speech"):
        return _answer("", response.content)
    message = response.json()["choices"][0]["message"]
    sound = base64.b64decode(message["audio"]["data"]) if message.get("audio") else b""
    return _answer(message["content"] or "", sound)


def send_together(url: str, requests: tuple[tuple[str, dict[str, Any]], ...]) -> list[Answer]:
    """Send all requests at once; answers are in the order of `requests`."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: send(url, request), requests))


def _answer(text: str, sound: bytes) -> Answer:
    if not sound:
        return Answer(text, np.zeros(0, np.float32), 0)
    samples, rate = soundfile.read(io.BytesIO(sound), dtype="float32")
    assert rate == 44100
    assert samples.ndim == 1 and len(samples) % 14112 == 0
    return Answer(text, samples, len(samples) // 14112)
