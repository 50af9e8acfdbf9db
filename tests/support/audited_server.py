"""A server that speaks tones, remembers what it spoke and looks at pictures; each fault of an audit is a switch."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import av
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

Wave = NDArray[np.float32]

HZ = 44_100
COLOURS = {"red": (214, 40, 40), "blue": (30, 80, 220), "green": (20, 150, 60)}
CHINESE = {"blue square": "这是一个蓝色的正方形。"}
SAID = "The first sentence is short. And this is the second one. Goodbye."


def tones(text: str, *, pitch: float = 170.0, seed: int = 0, syllable_s: float | None = None) -> Wave:
    """A syllable a letter, or ideograph, with harmonics that depend on it; other seeds differ a little."""
    draw = np.random.default_rng([seed, *hashlib.sha256(text.encode()).digest()])
    pieces = []
    for letter in filter(str.isalnum, text):
        seconds = syllable_s or (0.15 if ord(letter) > 0x3000 else 0.06)
        time = np.arange(round(seconds * (1 + 0.04 * draw.standard_normal()) * HZ)) / HZ
        own = pitch * (1 + 0.1 * ((ord(letter) * 7) % 11 - 5) / 5 + 0.005 * draw.standard_normal())
        shape = 1 + ord(letter) % 3
        tone, first = np.zeros(len(time)), np.exp(2j * np.pi * own * time)
        harmonic = np.ones(len(time), complex)
        for k in range(1, 9):
            harmonic *= first
            tone += harmonic.imag / k ** (0.8 + 0.2 * shape)
        pieces.append((0.35 + 0.65 * np.hanning(len(time))) * tone)
    wave = 0.12 * np.concatenate(pieces)
    return (wave + 1e-4 * draw.standard_normal(len(wave))).astype(np.float32)


def wav(samples: Wave, hz: int = HZ) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, hz, format="WAV", subtype="PCM_16")
    return file.getvalue()


def seen(picture: Image.Image) -> str:
    """Colour and shape of what is on a light ground, by the share of its bounding box that it fills."""
    pixels = np.asarray(picture.convert("RGB"), np.float64)
    is_drawn = pixels.min(axis=2) < 170
    rows, columns = np.flatnonzero(is_drawn.any(axis=1)), np.flatnonzero(is_drawn.any(axis=0))
    box = (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
    mean = pixels[is_drawn].mean(axis=0)
    if mean.max() < 100:
        return "7392"
    colour = min(COLOURS, key=lambda name: float(np.abs(mean - COLOURS[name]).sum()))
    shapes = {"triangle": 0.5, "circle": np.pi / 4, "square": 1.0}
    share = is_drawn.sum() / box
    return f"{colour} {min(shapes, key=lambda name: abs(share - shapes[name]))}"


class StandIn:
    """What the server answers. `faults` are names of the methods and branches that misbehave."""

    def __init__(self, faults: tuple[str, ...], answers: Mapping[str, str], voices: tuple[str, ...]) -> None:
        self.faults, self.answers, self.voices = faults, answers, voices
        self.spoken: dict[bytes, str] = {}
        self.num_spoken = 0
        self.is_over = threading.Event()

    def speech(self, body: dict[str, Any]) -> bytes:
        """A file; the voice of the name of a fault has that fault."""
        text, fault = str(body["input"]), {body.get("voice"), *self.faults}
        self.num_spoken += 1
        samples, hz = tones(text, seed=self.num_spoken), HZ
        third = len(samples) // 3
        if "silent" in fault:
            samples = 1e-5 * samples
        if "clipped" in fault:
            samples = np.clip(12 * samples, -1, 1)
        if "slow" in fault:
            samples = tones(text, syllable_s=0.55 if ord(text[0]) > 0x3000 else 0.16)
        if "dull" in fault:  # a lost frequency band
            spectrum = np.fft.rfft(samples)
            spectrum[np.fft.rfftfreq(len(samples), 1 / HZ) > 400] = 0
            samples = np.fft.irfft(spectrum, len(samples)).astype(np.float32)
        if "drifting" in fault:
            samples = np.concatenate([samples[: 2 * third], tones(text, pitch=320.0)[2 * third :]])
        if "header" in fault:
            hz = 24_000
        if "one sound" in fault:
            samples = tones("Twenty or thirty letters of something.")
        data = wav(samples, hz)
        if "cut" in fault:
            data = data[: len(data) // 2]
        self.spoken[data] = text
        return data

    def transcription(self, data: bytes) -> str:
        return "something else entirely was said" if "deaf" in self.faults else self.spoken[data]

    def chat(self, content: object) -> str:
        if "one answer" in self.faults:
            return "I am a language model."
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        text = next(each["text"] for each in parts if each["type"] == "text")
        for each in parts:
            if each["type"] in ("image_url", "video_url"):
                if "blind" in self.faults:
                    return "a yellow star"
                data = base64.b64decode(each[each["type"]]["url"].partition(",")[2])
                if each["type"] == "image_url":
                    found = seen(Image.open(io.BytesIO(data)))
                else:
                    with av.open(io.BytesIO(data), "r") as container:
                        found = seen([frame.to_image() for frame in container.decode(video=0)][10])
                return CHINESE.get(found, f"It is a {found}.")
            if each["type"] == "input_audio":
                return "Birds are singing." if "deaf" in self.faults else SAID
        return self.answers.get(text, "I do not know.")


@contextmanager
def stand_in(
    *faults: str, answers: Mapping[str, str] | None = None, voices: tuple[str, ...] = ("Ann",)
) -> Iterator[str]:
    """Yields the URL of a server with these faults."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.own = own = StandIn(faults, answers or {}, voices)  # type: ignore[attr-defined]
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that left
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="stand-in")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        own.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def own(self) -> StandIn:
        return self.server.own  # type: ignore[attr-defined,no-any-return]

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, body: bytes, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _json(self, value: object, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status=status)

    def do_GET(self) -> None:
        inputs = ["text", "image", "video", "audio"]
        if self.path == "/v1/models":
            self._json({"data": [{"id": "stand-in", "sample_rate": HZ, "input_modalities": inputs}]})
        elif self.path == "/v1/audio/voices" and "peer" not in self.own.faults:
            self._json({"voices": self.own.voices})
        else:
            self._json({"error": "no such route"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        faults = self.own.faults
        if "hanging" in faults:
            self.own.is_over.wait(10)
        elif "endless" in faults:
            self.send_response(200)
            self.end_headers()
            while not self.own.is_over.wait(0.02):
                self.wfile.write(b"more ")
        elif "dying" in faults:
            self.close_connection = True
        elif "garbage" in faults:
            self._send(b"\xff\xfe<html>", "text/html")
        elif "other shape" in faults:
            self._json({"choices": [], "text": None} if "chat" in self.path else ["x"])
        elif "failing" in faults:
            self._json({"error": {"message": "an engine failed"}}, 500)
        elif self.path == "/v1/audio/transcriptions":
            kind = f"content-type: {self.headers['content-type']}\n\n".encode()
            parts = message_from_bytes(kind + body).get_payload()
            (file,) = (each for each in parts if each.get_filename())  # type: ignore[union-attr]
            self._json({"text": self.own.transcription(file.get_payload(decode=True))})  # type: ignore[arg-type,union-attr]
        elif self.path == "/v1/audio/speech" and "peer" not in self.own.faults:
            self._send(self.own.speech(json.loads(body)), "audio/wav")
        elif self.path == "/v1/chat/completions":
            wish = json.loads(body)
            content, usage = wish["messages"][0]["content"], dict[str, float]()
            if "audio" in wish.get(
                "modalities", ()
            ):  # sglang-omni speaks in chats only, with a header of 24,000 Hz
                text = content.partition(": ")[2] or content.partition("：")[2]
                data = self.own.speech({"input": text})
                usage["audio_seconds"] = (len(data) - 44) / 2 / HZ
                message = {"content": text, "audio": {"data": base64.b64encode(data).decode()}}
            else:
                message = {"content": self.own.chat(content)}
            self._json({"choices": [{"message": message}], "usage": usage})
        else:
            self._json({"error": "no such route"}, 404)
