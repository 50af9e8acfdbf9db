"""Eight different requests; `mixed_clients` sends them."""

from __future__ import annotations

from typing import Any

import mixed_clients
import numpy as np
from mixed_clients import Request


def picture(width: int, height: int) -> dict[str, Any]:
    """An image part with a gradient."""
    pixels = np.linspace(0, 255, width * height * 3, dtype=np.uint8)
    return mixed_clients.picture(pixels.reshape(height, width, 3))


def clip(seconds: float) -> dict[str, Any]:
    """An audio part with a tone."""
    time = np.arange(int(seconds * 16000), dtype=np.float32) / 16000
    return mixed_clients.clip(0.2 * np.sin(2 * np.pi * 330 * time))


def _chat(parts: list[dict[str, Any]], **fields: Any) -> Request:
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 12, **fields}
    return Request(path="/v1/chat/completions", body=body)


def _speech(text: str, **fields: Any) -> Request:
    body = {"input": text, "max_steps": 4, "response_format": "wav", "stream": False, **fields}
    return Request(path="/v1/audio/speech", body=body)


def _text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


MIXED = (
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
    _speech("The first voice.", voice="DB30", seed=1),
    _speech("第二个声音。", voice="lingguang", seed=2, temperature=0.7),
)
