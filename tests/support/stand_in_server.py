"""A server that only looks like one: right, in the shapes of other servers, or wrong on purpose."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

RATE, FIRST_S, STEP_S = 44_100, 0.06, 0.006
CHUNKS, CHUNK = 12, 4410  # of sound: 1.2 s
_NATURAL_TOKENS = 5  # of an answer, and the length of the prompt


def wav(pcm: bytes, rate: int, *, has_length: bool = True) -> bytes:
    """A WAV file by the table of the format; without a length as streams have it."""
    size = len(pcm) if has_length else 0xFFFFFFFF - 36
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", (size + 36) & 0xFFFFFFFF, b"WAVE", b"fmt ", 16, 1, 1, rate,
                       2 * rate, 2, 16, b"data", size)  # fmt: skip
    return head + pcm


class StandIn:
    """`shape`: `mingc`, `sglang` or `vllm`. `fault`: what is wrong; empty: nothing."""

    def __init__(self, shape: str = "mingc", fault: str = "") -> None:
        self.shape, self.fault = shape, fault
        self.bodies: list[dict[str, Any]] = []
        self.stalled = False
        self._one, self._waiting = asyncio.Semaphore(1), 0
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/metrics", self._metrics),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/audio/speech", self._speech, methods=["POST"]),
                Route("/v1/images/generations", self._draw, methods=["POST"]),
                Route("/v1/audio/transcriptions", self._transcribe, methods=["POST"]),
                WebSocketRoute("/v1/realtime", self._session),
            ]
        )

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "ming-omni", "object": "model"}]})

    async def _metrics(self, _: Request) -> Response:
        hits = len(self.bodies) if self.fault == "cache" else 0
        return PlainTextResponse(
            f"# TYPE mingc_encoder_cache_hits_total counter\nmingc_encoder_cache_hits_total {hits}\n"
        )

    def _pcm(self, prompt: str) -> list[bytes]:
        seed = 1 if self.fault == "equal" else int(hashlib.sha256(prompt.encode()).hexdigest()[:12], 16)
        noise = np.random.default_rng(seed).integers(-9000, 9000, (CHUNKS, CHUNK))
        return [each.astype("<i2").tobytes() for each in noise]

    async def _pause(self, seconds: float) -> None:
        if self.fault == "stall" and not self.stalled and len(self.bodies) > 20:
            self.stalled = True
            time.sleep(0.6)  # all of them wait: the event loop itself stands still
        await asyncio.sleep(seconds)

    # Chats

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.fault == "plain lengths" and body.keys() & {"ignore_eos", "min_tokens"}:
            return JSONResponse({"error": {"message": "unknown field ignore_eos"}}, status_code=400)
        return StreamingResponse(self._chat_events(body), media_type="text/event-stream")

    async def _chat_events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        prompt = json.dumps(body["messages"])
        is_fixed = body.get("ignore_eos") and self.shape != "sglang" and self.fault != "lengths"
        count = body["max_tokens"] if is_fixed else min(body["max_tokens"], _NATURAL_TOKENS + len(prompt) % 7)
        words = (
            ["same answer"] * count
            if self.fault == "equal"
            else [f" {hash((prompt, i)) % 9973}" for i in range(count)]
        )
        async with self._turn():
            yield self._chunk({"role": "assistant", "content": ""})
            if self.fault == "flood":
                yield self._chunk({"content": " more"}) * 100_000
            if self.fault == "failed":
                yield 'data: {"choices": [{"delta": {"content": 3}}]}\n\n'
            await self._pause(FIRST_S + (count * STEP_S if self.fault == "blob" else 0))
            if self.shape == "sglang":  # text in one piece; the sound below
                yield self._chunk({"content": "".join(words)})
            elif self.fault == "blob":
                yield "".join(self._chunk({"content": word}) for word in words)
            else:
                for word in words:
                    yield self._chunk({"content": word})
                    await self._pause(STEP_S)
            if "audio" in body.get("modalities", ()):
                async for chunk in self._chat_sound(prompt):
                    yield chunk
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        if self.shape == "mingc":
            end["timings_ms"] = {
                "preprocessing": 1.0,
                "prepared": 3.0,
                "encoded": 7.0,
                "prefill": 8.0,
                "first_token": 20.0,
            }  # type: ignore[assignment]
        yield f"data: {json.dumps(end)}\n\n"
        if body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 90, "completion_tokens": count}
            usage["prompt_tokens_details"] = {"cached_tokens": 80 if self.fault == "cache" else 16}  # type: ignore[assignment]
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], **more: Any) -> str:
        return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': None}], **more})}\n\n"

    async def _chat_sound(self, prompt: str) -> AsyncIterator[str]:
        rate = 24_000 if self.fault == "header" else RATE
        pieces = self._pcm(prompt)
        if self.shape == "sglang" and self.fault == "blob":  # without a pipeline that streams
            await self._pause(len(pieces) * STEP_S)
            pieces = [b"".join(pieces)]
        for index, pcm in enumerate(pieces):
            if self.shape == "mingc":
                data = wav(b"", rate, has_length=False) + pcm if index == 0 else pcm
            else:
                data = wav(pcm, rate)
            encoded = base64.b64encode(data).decode()
            if self.shape == "vllm":
                yield self._chunk({"content": encoded}, modality="audio")
            else:
                yield self._chunk({"audio": {"data": encoded, "transcript": "again "}})
            await self._pause(STEP_S)

    # Speech

    async def _speech(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        rate, pieces = 24_000 if self.fault == "header" else RATE, self._pcm(body["input"])
        if not body.get("stream"):
            async with self._turn():
                await self._pause(FIRST_S + CHUNKS * STEP_S)
            return Response(wav(b"".join(pieces), rate), media_type="audio/wav")
        if self.shape == "mingc":
            return StreamingResponse(self._stream(pieces, rate), media_type="audio/wav")
        return StreamingResponse(self._speech_events(pieces, rate), media_type="text/event-stream")

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """With the fault `flat` one answer at a time, the slower the more wait, so that a slow client shows no gain."""
        if self.fault != "flat":
            yield
            return
        self._waiting += 1
        async with self._one:
            self._waiting -= 1
            await self._pause(0.05 * self._waiting)
            yield

    async def _stream(self, pieces: list[bytes], rate: int) -> AsyncIterator[bytes]:
        async with self._turn():
            await self._pause(FIRST_S + (CHUNKS * STEP_S if self.fault == "blob" else 0))
            yield wav(b"", rate, has_length=False)
            if self.fault == "blob":
                yield b"".join(pieces)
                return
            for piece in pieces:
                yield piece
                await self._pause(STEP_S)

    async def _speech_events(self, pieces: list[bytes], rate: int) -> AsyncIterator[str]:
        await self._pause(FIRST_S)
        for piece in pieces:
            data = base64.b64encode(wav(piece, rate)).decode()
            if self.shape == "vllm":
                event = {"type": "speech.audio.delta", "audio": data, "response_format": "wav"}
            else:
                event = {
                    "object": "audio.speech.chunk",
                    "audio": {"data": data, "format": "wav"},
                    "finish_reason": None,
                }  # type: ignore[dict-item]
            yield f"data: {json.dumps(event)}\n\n"
            await self._pause(STEP_S)
        usage = {"input_tokens": 9, "output_tokens": 4}
        yield f"data: {json.dumps({'type': 'speech.audio.done', 'usage': usage})}\n\ndata: [DONE]\n\n"

    # Pictures

    async def _draw(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.shape != "mingc":  # in one piece
            await self._pause(FIRST_S + CHUNKS * STEP_S)
            return JSONResponse({"created": 1, "data": [{"b64_json": self._pixels(body["prompt"])}]})
        return StreamingResponse(self._picture_events(body["prompt"]), media_type="text/event-stream")

    async def _picture_events(self, prompt: str) -> AsyncIterator[str]:
        await self._pause(FIRST_S + (CHUNKS * STEP_S if self.fault == "blob" else 0))
        event = {"type": "image_generation.partial_image", "b64_json": "AAAA", "partial_image_index": 0}
        first = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
        if self.fault != "blob":
            yield first
            first = ""
            await self._pause(CHUNKS * STEP_S)
        last = {"type": "image_generation.completed", "b64_json": self._pixels(prompt)}
        usage = {"input_tokens": 9, "output_tokens": 4096, "total_tokens": 4105}
        yield f"{first}event: {last['type']}\ndata: {json.dumps({**last, 'usage': usage})}\n\n"

    def _pixels(self, prompt: str) -> str:
        return base64.b64encode(b"".join(self._pcm(prompt))).decode()

    # Clips

    async def _transcribe(self, request: Request) -> Response:
        async with request.form() as form:
            data = await form["file"].read()  # type: ignore[union-attr]
        self.bodies.append({"input": hashlib.sha256(data).hexdigest()})
        await self._pause(FIRST_S)
        return JSONResponse({"text": f"a clip of {len(data)} bytes was heard here"})

    async def _session(self, socket: WebSocket) -> None:
        await socket.accept()
        heard = ""
        async for text in socket.iter_text():
            event = json.loads(text)
            if event["type"] == "session.update":
                await socket.send_json({"type": "session.updated", "session": event["session"]})
            elif event["type"] == "input_audio_buffer.append":
                heard += event["audio"]
            elif event["type"] == "response.create":
                self.bodies.append({"input": heard})
                await self._pause(FIRST_S)
                for piece in self._pcm(heard):
                    data = base64.b64encode(piece).decode()
                    await socket.send_json({"type": "response.output_audio.delta", "delta": data})
                    await self._pause(STEP_S)
                await socket.send_json({"type": "response.done", "response": {"status": "completed"}})


@contextmanager
def stand_in(shape: str = "mingc", fault: str = "") -> Iterator[tuple[str, StandIn]]:
    """Yields the URL of a stand-in, and the stand-in. It ends with the block."""
    found = StandIn(shape, fault)
    config = uvicorn.Config(
        found.app, host="127.0.0.1", port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="stand-in")
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", found
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
