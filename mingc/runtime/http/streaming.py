"""From the events of a request to the body of its response: whole, as server-sent events, or as raw audio.

A stream starts with its first event, so that a request which cannot be served still gets a proper status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np
from numpy.typing import NDArray
from starlette.types import Send

from mingc.errors import WorkerError
from mingc.runtime.http.audio_format import AudioSpec, encode, open_stream
from mingc.runtime.http.response_schemas import (
    SSE_DONE,
    ChatObjects,
    encode_json,
    speech_delta,
    speech_done,
    sse,
)
from mingc.runtime.request import AudioDelta, Done, Event, TextDelta

_SSE = "text/event-stream; charset=utf-8"
Samples = list[NDArray[np.float32]]


class Body:
    """The response of one request, status 200. Its headers go out with the first bytes.

    `before_end` is called before the last bytes: a client that has them may ask again at once and must find room.
    """

    def __init__(self, send: Send, before_end: Callable[[], None]) -> None:
        self._send = send
        self._before_end = before_end
        self.content_type = "application/json"
        self.is_started = False
        self.is_ended = False

    @property
    def is_sse(self) -> bool:
        return self.content_type == _SSE

    async def write(self, data: bytes) -> None:
        """Send a piece now."""
        if not self.is_started:
            # no-cache and no buffering: a proxy must hand every piece on as it comes
            await self._start([(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Close a streamed body; a body that is never ended reaches the client as broken off."""
        await self._send_last(b"")

    async def send_whole(self, data: bytes) -> None:
        """Send everything, with its length."""
        await self._start([(b"content-length", str(len(data)).encode())])
        await self._send_last(data)

    async def _send_last(self, data: bytes) -> None:
        self.is_ended = True
        self._before_end()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _start(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.is_started = True
        headers = [(b"content-type", self.content_type.encode()), *headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})


async def chat_whole(
    events: AsyncIterator[Event], objects: ChatObjects, audio: AudioSpec | None, body: Body
) -> None:
    """One `chat.completion` object; `audio` None means no speech was asked for."""
    text, samples, done = await _collect(events)
    clip = None if audio is None else await asyncio.to_thread(encode, samples, audio)
    await body.send_whole(encode_json(objects.completion(text=text, audio=clip, done=done)))


async def chat_stream(
    events: AsyncIterator[Event], objects: ChatObjects, audio: AudioSpec | None, body: Body
) -> None:
    """Chunks: the role, one text delta per token, one audio delta per patch, the finish reason, `[DONE]`.

    All audio payloads, decoded and joined, are one clip.
    """
    body.content_type = _SSE
    encoder = None if audio is None else open_stream(audio)
    transcript: list[str] = []
    async for event in events:
        if not body.is_started:
            await body.write(sse(objects.role_chunk()))
        if isinstance(event, TextDelta):
            transcript.append(event.text)
            await body.write(sse(objects.text_chunk(event.text)))
        elif isinstance(event, AudioDelta) and encoder is not None:
            if data := encoder.add(event.samples):
                await body.write(sse(objects.audio_chunk(data)))
        elif isinstance(event, Done):
            if encoder is not None:
                if data := encoder.finish():
                    await body.write(sse(objects.audio_chunk(data)))
                await body.write(sse(objects.audio_end_chunk("".join(transcript))))
            await body.write(sse(objects.finish_chunk(event)))
            if objects.include_usage:
                await body.write(sse(objects.usage_chunk(event.usage)))
            await body.write(SSE_DONE)
            await body.end()
            return
    raise _unfinished()


async def speech_whole(events: AsyncIterator[Event], audio: AudioSpec, body: Body) -> None:
    """One audio file with true lengths in its header."""
    _, samples, _ = await _collect(events)
    await body.send_whole(await asyncio.to_thread(encode, samples, audio))


async def speech_stream(events: AsyncIterator[Event], audio: AudioSpec, body: Body) -> None:
    """The same file piece by piece, its length unknown at the start."""
    async for data in _audio_pieces(events, audio):
        if isinstance(data, bytes):
            await body.write(data)
    await body.end()


async def speech_sse(events: AsyncIterator[Event], audio: AudioSpec, body: Body) -> None:
    """`speech.audio.delta` events, then `speech.audio.done` with the usage."""
    body.content_type = _SSE
    async for data in _audio_pieces(events, audio):
        await body.write(sse(speech_delta(data) if isinstance(data, bytes) else speech_done(data.usage)))
    await body.end()


async def _audio_pieces(events: AsyncIterator[Event], audio: AudioSpec) -> AsyncIterator[bytes | Done]:
    """Encoded pieces, none of them empty, and the event that ends them."""
    encoder = open_stream(audio)
    async for event in events:
        if isinstance(event, AudioDelta):
            if data := encoder.add(event.samples):
                yield data
        elif isinstance(event, Done):
            if data := encoder.finish():
                yield data
            yield event
            return
    raise _unfinished()


async def _collect(events: AsyncIterator[Event]) -> tuple[str, Samples, Done]:
    text: list[str] = []
    samples: Samples = []
    async for event in events:
        if isinstance(event, TextDelta):
            text.append(event.text)
        elif isinstance(event, AudioDelta):
            samples.append(event.samples)
        elif isinstance(event, Done):
            return "".join(text), samples, event
    raise _unfinished()


def _unfinished() -> WorkerError:
    return WorkerError("The model stopped before its answer was done.", code="unfinished")
