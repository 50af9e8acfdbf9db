"""Inputs of every client script. Standard library only, as each script runs in an environment of its own."""

from __future__ import annotations

import base64
import io
import json
import sys
import wave
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ANSWER = "It is 18 °C at noon."
CHUNK_S = 0.04  # of sound that a microphone sends at once
# A function in the form of realtime sessions, which a model that has to call it can write.
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Genève", "Zürich"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """`url`: base of the API, with /v1. `image`, `clip`: a PNG and a WAV, `turns`: see `first_turn`; all base64.

    `microphone`: path of a WAV with three spoken sentences. `page_port`: of the browser's page; its origin is allowed.

    `tools_url`: the same of a model that answers a conversation with tools by the text `One moment.` and two calls,
    `get_weather` with a city and `get_time` with a zone, and one that ends with results by `ANSWER`.
    """

    url: str
    tools_url: str
    key: str
    model: str
    voice: str
    image: str
    clip: str
    turns: list[str]
    microphone: str
    page_port: int

    @property
    def first_turn(self) -> bytes:
        """A spoken sentence and the silence after it: 16-bit samples, mono, 24 kHz."""
        return base64.b64decode(self.turns[0])

    @property
    def second_turn(self) -> bytes:
        return base64.b64decode(self.turns[1])

    @staticmethod
    def check_wav(data: str) -> None:
        """Raise if the base64 `data` is no WAV of 44.1 kHz with sound in it."""
        with wave.open(io.BytesIO(base64.b64decode(data))) as file:
            assert file.getframerate() == 44100 and file.getnframes() > 0


def run(main: Callable[[Inputs], None]) -> None:
    """Call `main` with the inputs, which `run.py` writes to stdin as one JSON object."""
    main(Inputs(**json.load(sys.stdin)))
