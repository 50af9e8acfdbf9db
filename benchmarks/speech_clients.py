"""Clients that measure a speech server: arrival times of each request's bytes. Needs no torch."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from clients import client_of

RATE = 44_100
SENTENCES = (
    "The harbour was quiet and the boats lay side by side in the early light of the morning",
    "She counted the steps to the top of the tower and wrote the number into her small book",
    "A train of empty wagons rolled past the station while nobody looked up from their papers",
    "He mended the roof before the first rain fell and then sat down to drink his coffee",
)


@dataclass(slots=True)
class ReceivedSpeech:
    """Arrivals of one answer: time of each chunk, and bytes received by then."""

    sent_at: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_ms(self) -> float:
        return 1e3 * (self.arrivals[0][0] - self.sent_at)

    @property
    def num_bytes(self) -> int:
        return self.arrivals[-1][1]

    def gaps_ms(self) -> list[float]:
        times = [when for when, _ in self.arrivals]
        return [1e3 * (after - before) for before, after in itertools.pairwise(times)]

    def underruns(self) -> int:
        """Number of chunks that arrive after playback, started with the first chunk, has run out of audio."""
        start = self.arrivals[0][0]
        count = 0
        for (_, held), (when, _) in itertools.pairwise(self.arrivals):
            count += when > start + held / 2 / RATE
        return count


def body(index: int, patches: int, *, streamed: bool, text: str | None = None) -> dict[str, Any]:
    request: dict[str, Any] = {
        "model": "ming-omni",
        "input": text or f"{SENTENCES[index % len(SENTENCES)]}, number {index}.",
        "response_format": "pcm",
        "sample_rate": RATE,
        "seed": index,
        "max_steps": patches,
    }
    return {**request, "stream_format": "audio"} if streamed else {**request, "stream": False}


async def ask(
    client: httpx.AsyncClient, request: dict[str, Any] | bytes, chunks: int | None = None
) -> ReceivedSpeech:
    """Send one request and record arrivals; disconnect after `chunks` of them when given."""
    content = request if isinstance(request, bytes) else json.dumps(request).encode()
    headers = {"content-type": "application/json"}
    received = ReceivedSpeech(time.perf_counter())
    count = 0
    async with client.stream("POST", "/v1/audio/speech", content=content, headers=headers) as response:
        if response.status_code != 200:
            raise SystemExit(f"status {response.status_code}: {(await response.aread())[:500]!r}")
        async for data in response.aiter_raw():
            count += len(data)
            received.arrivals.append((time.perf_counter(), count))
            if chunks is not None and len(received.arrivals) >= chunks:
                break
    return received


def speak(url: str, indexes: range, rounds: int, patches: int, streamed: bool) -> list[ReceivedSpeech]:
    """Run the clients `indexes`, each with `rounds` sequential requests."""

    async def one(client: httpx.AsyncClient, index: int) -> list[ReceivedSpeech]:
        return [
            await ask(client, body(1000 * turn + index, patches, streamed=streamed)) for turn in range(rounds)
        ]

    async def all_of_them() -> list[list[ReceivedSpeech]]:
        async with client_of(url) as client:
            return await asyncio.gather(*(one(client, index) for index in indexes))

    return [received for each in asyncio.run(all_of_them()) for received in each]
