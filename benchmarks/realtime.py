"""Spoken turns over `/v1/realtime` with a paced microphone, beside the same clips in chat requests over HTTP.

A session hears 20 ms of a clip every 20 ms, then silence, while it listens to the first seconds of the answer. Every
turn is a session of its own and a clip that no other turn has. Times end with the first sound of the answer. They begin
with

- `last_speech`: the last sample of the clip is sent; the silence that ends a turn is still to come;
- `turn_end`: the last sample of the turn is sent, which is the end of that silence;
- `request`: a chat request with the clip is sent, by a client that knows where the turn ends.

    python benchmarks/realtime.py --artifact /tmp/omni --answers prose --json benchmarks/results/realtime-….json
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import httpx
import numpy as np
import soundfile
import soxr
import websockets
from arguments import seconds, whole, wholes
from clients import Clients, client_of
from conversation import PROSE_SERVER, Samples
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from serving import ROOT, server

_RATE = 24_000
_STEP = _RATE // 50  # samples of an append
_SPEECH = ROOT / "tests" / "data" / "speech" / "three-sentences.ogg"
# Its sentences, in seconds. The pauses between them are longer than those of one turn.
_SENTENCES = ((0.3, 2.2), (3.05, 4.7), (5.4, 6.1))
_PAUSE_S = 0.1
_TURN_LIMIT_S = 60.0


@dataclass(slots=True)
class Turn:
    """One turn: milliseconds from each beginning to the first sound."""

    last_speech_ms: float
    turn_end_ms: float


def clip(index: int) -> NDArray[np.int16]:
    """4.4 s of speech with little noise, 24 kHz; `index` makes it another."""
    samples, rate = soundfile.read(_SPEECH, dtype="float32")
    pause = np.zeros(int(_PAUSE_S * rate), np.float32)
    parts = [
        part for begin, end in _SENTENCES for part in (samples[int(begin * rate) : int(end * rate)], pause)
    ]
    generator = np.random.default_rng(index)
    joined = soxr.resample(np.concatenate(parts[:-1]), rate, _RATE)
    noisy = generator.uniform(0.6, 0.9) * joined + 0.0005 * generator.standard_normal(len(joined))
    return np.rint(32767 * np.clip(noisy, -1, 1)).astype(np.int16)


def append(samples: NDArray[np.int16]) -> str:
    audio = base64.b64encode(samples.astype("<i2").tobytes()).decode()
    return json.dumps({"type": "input_audio_buffer.append", "audio": audio})


async def speak(
    url: str, samples: NDArray[np.int16], begin: float, listen_s: float, tokens: int, silence_ms: int
) -> Turn:
    """One turn in a session of its own. Raises: SystemExit when it fails."""
    address = f"{url.replace('http', 'ws', 1)}/v1/realtime"
    padding = np.zeros(-len(samples) % _STEP, np.int16)
    steps = np.concatenate([samples, padding]).reshape(-1, _STEP)
    spoken, quiet = [append(each) for each in steps], append(np.zeros(_STEP, np.int16))
    sent: list[float] = []

    async def microphone(socket: Any) -> None:
        while True:
            await asyncio.sleep(begin + len(sent) * _STEP / _RATE - time.perf_counter())
            await socket.send(spoken[len(sent)] if len(sent) < len(spoken) else quiet)
            sent.append(time.perf_counter())

    async with websockets.connect(address, compression=None, max_size=None) as socket:
        detection = {"type": "server_vad", "silence_duration_ms": silence_ms}
        session = {
            "type": "realtime",
            "max_output_tokens": tokens,
            "audio": {"input": {"turn_detection": detection}},
        }
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        while json.loads(await socket.recv())["type"] != "session.updated":
            pass
        if begin < time.perf_counter():
            raise SystemExit("the sessions began too late: a session took more time to open than was planned")
        speaking = asyncio.create_task(microphone(socket))
        first = end_ms = None
        try:
            async with asyncio.timeout(_TURN_LIMIT_S):
                while True:
                    event = json.loads(await socket.recv())
                    match event["type"]:
                        case "input_audio_buffer.speech_stopped":
                            if end_ms is not None:
                                raise SystemExit("one clip was heard as two turns")
                            end_ms = event["audio_end_ms"]
                        case "response.output_audio.delta" if first is None:
                            first = time.perf_counter()
                        case "error":
                            raise SystemExit(f"the session failed: {event['error']}")
                        case "response.done" if event["response"]["status"] != "completed":
                            raise SystemExit(f"the response failed: {event['response']['status_details']}")
                    if first is not None and time.perf_counter() > first + listen_s:
                        break
        finally:
            speaking.cancel()
    assert first is not None and end_ms is not None
    last = sent[min(len(sent), -(-end_ms * _RATE // 1000) // _STEP) - 1]
    return Turn(
        last_speech_ms=1e3 * (first - sent[len(spoken) - 1]),
        turn_end_ms=1e3 * (first - last),
    )


def sessions(
    url: str,
    indexes: range,
    first: int,
    rounds: int,
    begin: float,
    stagger: float,
    listen_s: float,
    tokens: int,
    silence_ms: int,
) -> list[Turn]:
    """The turns of clients `indexes`; client i begins each of its turns i · `stagger` seconds after the round."""

    async def one(index: int) -> list[Turn]:
        found, at = list[Turn](), begin + index * stagger
        for turn in range(rounds):
            samples = clips[index, turn]
            await asyncio.sleep(at - 0.5 - time.perf_counter())
            found.append(await speak(url, samples, at, listen_s, tokens, silence_ms))
            at = time.perf_counter() + 1.0
        return found

    async def all_of_them() -> list[list[Turn]]:
        return await asyncio.gather(*(one(index) for index in indexes))

    clips = {(index, turn): clip(first + 1000 * turn + index) for index in indexes for turn in range(rounds)}
    return [turn for each in asyncio.run(all_of_them()) for turn in each]


async def ask(client: httpx.AsyncClient, body: bytes, listen_s: float) -> float:
    """Milliseconds to the first sound of one chat, which is listened to as `speak` does."""
    sent_at, first = time.perf_counter(), None
    headers = {"content-type": "application/json"}
    async with client.stream("POST", "/v1/chat/completions", content=body, headers=headers) as response:
        if response.status_code != 200:
            raise SystemExit(f"status {response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if first is None and '"audio":{' in line and '"data":' in line:
                first = time.perf_counter()
            if first is not None and time.perf_counter() > first + listen_s:
                break
    if first is None:
        raise SystemExit("an answer has no sound")
    return 1e3 * (first - sent_at)


def chats(
    url: str,
    indexes: range,
    first: int,
    rounds: int,
    begin: float,
    stagger: float,
    listen_s: float,
    tokens: int,
) -> list[float]:
    """Milliseconds to the first sound of the same clips in chat requests."""

    def write(index: int) -> bytes:
        file = io.BytesIO()
        soundfile.write(file, clip(index), _RATE, format="WAV")
        sound = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
        body = {
            "messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}],
            "modalities": ["text", "audio"],
            "audio": {"format": "pcm16", "sample_rate": _RATE},
            "max_tokens": tokens,
            "stream": True,
        }
        return json.dumps(body).encode()

    async def one(client: httpx.AsyncClient, index: int) -> list[float]:
        await asyncio.sleep(begin + index * stagger - time.perf_counter())
        return [await ask(client, bodies[index, turn], listen_s) for turn in range(rounds)]

    async def all_of_them() -> list[list[float]]:
        async with client_of(url) as client:
            return await asyncio.gather(*(one(client, index) for index in indexes))

    bodies = {
        (index, turn): write(first + 1000 * turn + index) for index in indexes for turn in range(rounds)
    }
    return [answer for each in asyncio.run(all_of_them()) for answer in each]


def early_starts(metrics: str) -> dict[str, float]:
    """Counts of a scrape of `/metrics`, by what became of them."""
    samples = (each for family in text_string_to_metric_families(metrics) for each in family.samples)
    return {
        "/".join(each.labels.values()): each.value
        for each in samples
        if each.name == "mingc_realtime_early_starts_total"
    }


def measure(url: str, clients: Clients, given: argparse.Namespace, samples: Samples) -> None:
    loads = 0

    def load(run: Any, count: int, rounds: int, *more: Any) -> list[Any]:
        nonlocal loads
        loads += 1
        # Clips are written before the first is sent.
        begin = time.perf_counter() + 2.0 + 0.02 * rounds * -(-count // given.client_processes)
        return clients.load(
            run,
            url,
            count,
            loads * 10**6,
            rounds,
            begin,
            given.stagger,
            given.listen_seconds,
            given.tokens,
            *more,
        )

    for count in given.sessions:
        rounds = given.single_rounds if count == 1 else given.rounds
        load(chats, count, 1)  # warms up
        load(sessions, count, 1, given.silence_ms)
        answers = load(chats, count, rounds)
        samples.add("first_audio_ms", "ms", answers, how="HTTP", sessions=count, since="request")
        before = early_starts(httpx.get(f"{url}/metrics").text)
        turns: Sequence[Turn] = load(sessions, count, rounds, given.silence_ms)
        after = early_starts(httpx.get(f"{url}/metrics").text)
        keys = {"how": "realtime", "sessions": count}
        samples.add("first_audio_ms", "ms", [each.turn_end_ms for each in turns], **keys, since="turn_end")
        samples.add(
            "first_audio_ms", "ms", [each.last_speech_ms for each in turns], **keys, since="last_speech"
        )
        for end, number in after.items():
            samples.add("early_starts", "responses", [number - before.get(end, 0)], **keys, end=end)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--serve", default="", help="further words of `mingc serve`")
    parser.add_argument(
        "--answers", choices=("random", "prose"), default="random", help="see conversation.py"
    )
    parser.add_argument("--sessions", type=wholes(1, 256), default="1,16")
    parser.add_argument("--single-rounds", type=whole(1), default=30, help="turns of one session alone")
    parser.add_argument("--rounds", type=whole(1), default=5, help="turns of each of several sessions")
    parser.add_argument(
        "--stagger", type=float, default=0.0, help="seconds between the beginnings of two sessions"
    )
    parser.add_argument("--listen-seconds", type=seconds, default=2.0, help="to each answer")
    parser.add_argument("--tokens", type=whole(2), default=32, help="most tokens of an answer")
    parser.add_argument("--silence-ms", type=whole(1), default=500, help="that end a turn")
    parser.add_argument("--client-processes", type=whole(1, 64), default=4)
    parser.add_argument("--json", type=Path, help="write the result here; needs a GPU")
    return parser


def main() -> None:
    given = harness.parse_args(make_parser())
    clients, samples = Clients(given.client_processes), Samples()
    programs = [[str(PROSE_SERVER)]] if given.answers == "prose" else []
    with tempfile.TemporaryDirectory() as scratch:
        caches, log = Path(scratch) / "caches", Path(scratch) / "server.log"
        with server(given.artifact, caches, log, shlex.split(given.serve), *programs) as (url, _, _):
            try:
                measure(url, clients, given, samples)
            finally:
                print(log.read_text()[-2000:], file=sys.stderr)
        clients.close()
    figures = samples.figures()
    for figure in figures:
        print(" ".join(f"{key}={value}" for key, value in figure.items()))
    if given.json:
        harness.write(given.json, harness.result("realtime", harness.peak_rates(), figures))


if __name__ == "__main__":
    main()
