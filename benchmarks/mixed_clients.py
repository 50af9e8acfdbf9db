"""Clients that send mixed requests, one after the other or together, and read text and speech."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

_CLIP_RATE, _SPEECH_RATE = 16_000, 44_100
_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    path: str
    body: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Text and samples of an answer; either may be empty."""

    text: str
    samples: NDArray[np.float32]


def picture(pixels: NDArray[np.uint8]) -> dict[str, Any]:
    """An image part of `pixels` (height, width, 3)."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def clip(samples: NDArray[np.floating[Any]]) -> dict[str, Any]:
    """An audio part of `samples` at 16 kHz."""
    file = io.BytesIO()
    soundfile.write(file, samples, _CLIP_RATE, format="WAV")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def send(url: str, request: Request) -> Answer:
    """Raises: RuntimeError when the server refuses the request, or its speech has another sample rate than 44.1 kHz."""
    response = httpx.post(url + request.path, json=request.body, timeout=_TIMEOUT_S, trust_env=False)
    if response.status_code != 200:
        raise RuntimeError(f"{request.path}: {response.status_code} {response.text[:500]}")
    if request.path.endswith("speech"):
        return Answer(text="", samples=_samples(response.content))
    message = response.json()["choices"][0]["message"]
    sound = base64.b64decode(message["audio"]["data"]) if message.get("audio") else b""
    return Answer(text=message["content"] or "", samples=_samples(sound))


def send_together(url: str, requests: Sequence[Request], stagger_s: float = 0.0) -> list[Answer]:
    """Send each request `stagger_s` seconds after the one before it, none waiting for an answer."""

    def send_later(place: int) -> Answer:
        time.sleep(place * stagger_s)
        return send(url, requests[place])

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(send_later, range(len(requests))))


def _samples(file: bytes) -> NDArray[np.float32]:
    """Samples of a WAV file of one channel; empty bytes give no samples."""
    if not file:
        return np.zeros(0, np.float32)
    samples, rate = soundfile.read(io.BytesIO(file), dtype="float32")
    if rate != _SPEECH_RATE or samples.ndim != 1:
        raise RuntimeError(f"the speech has {rate} samples per second and the shape {samples.shape}")
    return np.asarray(samples, np.float32)
