"""Clients of a conversation: requests of four workloads, in closed and open loops. Needs no torch.

A workload is what a person sends and gets: `text` (text → text), `image` (image and text → text), `clip` (spoken clip →
text and speech), `speech` (text → speech).
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import chat_clients
import httpx
import numpy as np
import speech_clients
from clients import client_of
from PIL import Image
from speech_clients import ReceivedSpeech

WORKLOADS = ("text", "image", "clip", "speech")
SPOKEN = ("clip", "speech")  # workloads whose answers have sound
_CLIP_RATE = 16_000
MAX_CLIENTS, MAX_TURNS = 1_000, 10_000  # of a load: their product is the number of its requests
_SENTENCE_PATCHES = 60  # 19.2 s
_SPREAD = 0.5  # lengths of answers are uniform within this share of the wanted one


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the requests.

    Attributes:
        words: of a prompt.
        tokens: of an answer of text; exact.
        patches: most patches of a speech request.
        segment_patches: most patches of each segment of a spoken answer; random weights end none earlier.
        image_pixels: width and height of the image.
        clip_s: seconds of the spoken clip.
        is_varied: whether lengths of answers differ from request to request.
        sampling: further fields of each chat, such as its temperature; without it answers are greedy.
    """

    words: int
    tokens: int
    patches: int
    image_pixels: int
    clip_s: float
    segment_patches: int = 10
    is_varied: bool = False
    sampling: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """One answer as a client saw it. Times come from `time.perf_counter`.

    Attributes:
        text: of a chat: arrivals of its tokens, and the server's moments; None for a speech request.
        speech: arrivals of its sound; None for an answer of text.
    """

    sent_at: float
    text: chat_clients.Seen | None
    speech: ReceivedSpeech | None

    @property
    def first_token_ms(self) -> float | None:
        return None if self.text is None else 1e3 * (self.text.arrivals[0] - self.sent_at)

    @property
    def first_audio_ms(self) -> float | None:
        return None if self.speech is None else 1e3 * (self.speech.arrivals[0][0] - self.sent_at)

    @property
    def tpot_ms(self) -> float | None:
        """Mean time between two tokens of the answer."""
        if self.text is None or len(self.text.arrivals) < 2:
            return None
        first, last = self.text.arrivals[0], self.text.arrivals[-1]
        return 1e3 * (last - first) / (len(self.text.arrivals) - 1)

    @property
    def num_chunks(self) -> int:
        return 0 if self.speech is None else len(self.speech.arrivals)

    @property
    def num_underruns(self) -> int:
        return 0 if self.speech is None else self.speech.underruns()

    @property
    def audio_s(self) -> float:
        return 0.0 if self.speech is None else self.speech.num_bytes / 2 / speech_clients.RATE


def image_url(pixels: int, index: int) -> str:
    """A picture of random blocks as a JPEG data URL; `index` makes it another."""
    blocks = np.random.default_rng(index).integers(0, 256, (8, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks).resize((pixels, pixels), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def clip_base64(seconds: float, index: int) -> str:
    """A clip of gliding tones, interrupted as syllables are, as a base64 WAV of 16 kHz; `index` makes it another."""
    generator = np.random.default_rng(index)
    times = np.arange(int(seconds * _CLIP_RATE)) / _CLIP_RATE
    pitch = 120 + 40 * np.sin(2 * np.pi * generator.uniform(0.2, 0.6) * times)
    phase = 2 * np.pi * np.cumsum(pitch) / _CLIP_RATE
    voice = sum(np.sin(order * phase) / order for order in range(1, 6))
    syllables = np.clip(np.sin(2 * np.pi * generator.uniform(2, 5) * times) + 0.5, 0, 1)
    samples = 0.3 * voice * syllables + 0.005 * generator.standard_normal(len(times))
    pcm = np.rint(32767 * np.clip(samples, -1, 1)).astype("<i2").tobytes()
    header = b"RIFF" + (36 + len(pcm)).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little")
    header += b"".join(
        number.to_bytes(width, "little")
        for number, width in ((1, 2), (1, 2), (_CLIP_RATE, 4), (2 * _CLIP_RATE, 4), (2, 2), (16, 2))
    )
    return base64.b64encode(header + b"data" + len(pcm).to_bytes(4, "little") + pcm).decode()


def request_of(workload: str, index: int, sizes: Sizes) -> dict[str, Any]:
    """The body of request `index`; the same index is the same request.

    Speech longer than one sentence may be is that of several sentences, equally long.
    """
    share = random.Random(index).uniform(1 - _SPREAD, 1 + _SPREAD) if sizes.is_varied else 1.0
    if workload == "speech":
        patches = max(1, round(share * sizes.patches))
        count = -(-patches // _SENTENCE_PATCHES)
        sentences = speech_clients.SENTENCES * -(-count // len(speech_clients.SENTENCES))
        text = f"{'. '.join(sentences[:count])}, number {index}." if count > 1 else None
        return speech_clients.body(index, -(-patches // count), streamed=True, text=text)
    body = chat_clients.body(sizes.words, max(2, round(share * sizes.tokens)), index) | sizes.sampling
    parts: list[dict[str, Any]] = [{"type": "text", "text": body["messages"][0]["content"]}]
    if workload == "image":
        parts.insert(0, {"type": "image_url", "image_url": {"url": image_url(sizes.image_pixels, index)}})
    if workload == "clip":
        sound = {"data": clip_base64(sizes.clip_s, index), "format": "wav"}
        parts = [{"type": "input_audio", "input_audio": sound}]
        body |= {
            "modalities": ["text", "audio"],
            "audio": {
                "format": "pcm16",
                "sample_rate": speech_clients.RATE,
                "max_steps": sizes.segment_patches,
            },
        }
    return {**body, "messages": [{"role": "user", "content": parts}]}


async def ask(client: httpx.AsyncClient, workload: str, body: bytes) -> Answer:
    """Send one request. Raises: SystemExit when it is refused or fails."""
    if workload == "speech":
        received = await speech_clients.ask(client, body)
        return Answer(received.sent_at, None, received)
    seen = await chat_clients.ask(client, body)
    if not seen.arrivals or (workload in SPOKEN and not seen.audio):
        raise SystemExit(f"an answer of workload {workload} has no {'sound' if seen.arrivals else 'text'}")
    return Answer(seen.sent_at, seen, ReceivedSpeech(seen.sent_at, seen.audio) if seen.audio else None)


def closed_loop(
    url: str,
    indexes: range,
    workloads: Sequence[str],
    rounds: int,
    sizes: Sizes,
    first: int,
    begin: float,
    until: float | None = None,
) -> list[Answer]:
    """Run the clients `indexes`, each with `rounds` sequential requests; only its first is sent after time `until`.

    Requests have the indexes from `first`, and no index twice. Without `until` they are all written before the first
    one is sent at time `begin`: writing a clip takes longer than the server needs for it, and a client that writes one
    would stamp the arrivals of its process's other answers too late.

    The workloads are those of the clients, in turns.
    """

    def write(index: int, turn: int) -> bytes:
        workload = workloads[index % len(workloads)]
        return json.dumps(request_of(workload, first + MAX_CLIENTS * turn + index, sizes)).encode()

    written = {
        (index, turn): write(index, turn)
        for index in indexes
        for turn in range(rounds if until is None else 1)
    }
    if (late := time.perf_counter() - begin) > 0:
        raise SystemExit(f"the clients needed {late:.1f} s more to write their requests: begin later")

    async def one(client: httpx.AsyncClient, index: int) -> list[Answer]:
        workload, answers = workloads[index % len(workloads)], list[Answer]()
        await asyncio.sleep(begin - time.perf_counter())
        for turn in range(rounds):
            if until is not None and answers and time.perf_counter() > until:
                break
            body = written.pop((index, turn), None) or write(index, turn)
            answers.append(await ask(client, workload, body))
        return answers

    async def all_of_them() -> list[list[Answer]]:
        async with client_of(url) as client:
            return await asyncio.gather(*(one(client, index) for index in indexes))

    return [answer for each in asyncio.run(all_of_them()) for answer in each]


def open_loop(
    url: str, indexes: range, workloads: Sequence[str], due: Sequence[float], sizes: Sizes, first: int
) -> list[Answer | None]:
    """Requests that are sent at the times `due`, those of `indexes`, whether earlier ones are answered or not.

    An answer counts from the time at which it was due. None: it was refused or failed.
    """

    async def one(client: httpx.AsyncClient, index: int) -> Answer | None:
        workload = workloads[index % len(workloads)]
        body = json.dumps(request_of(workload, first + index, sizes)).encode()
        await asyncio.sleep(due[index] - time.perf_counter())
        with suppress(SystemExit, httpx.HTTPError):
            answer = await ask(client, workload, body)
            answer.sent_at = due[index]
            return answer
        return None

    async def all_of_them() -> list[Answer | None]:
        async with client_of(url) as client:
            return await asyncio.gather(*(one(client, index) for index in indexes))

    return asyncio.run(all_of_them())


def varied_open_loop(
    url: str, indexes: range, workloads: Sequence[str], due: Sequence[float], sizes: Sizes, first: int
) -> list[Answer | None]:
    """As `open_loop`, with answers of different lengths."""
    return open_loop(url, indexes, workloads, due, replace(sizes, is_varied=True), first)


def poisson(rate: float, window_s: float, seed: int, least: int = 1) -> list[float]:
    """Seconds of arrivals within a window, at `rate` a second on average; at least `least` of them."""
    generator, times = random.Random(seed), list[float]()
    at = generator.expovariate(rate)
    while at < window_s or len(times) < least:
        times.append(at)
        at += generator.expovariate(rate)
    return times
