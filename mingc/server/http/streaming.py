"""Writing the events of a request as its HTTP response: whole, as server-sent events, or as raw audio.

A stream starts with its first event, so a request that cannot be served still gets an error status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.types import Send

from mingc.errors import WorkerError
from mingc.runtime.request import AudioDelta, Done, Event, TextDelta
from mingc.server.audio_format import AudioSpec, Base64Stream, encode, open_stream
from mingc.server.http.response_schemas import (
    SSE_DONE,
    ChatResponseBuilder,
    SpeechDelta,
    speech_done,
    sse,
)

_SSE = "text/event-stream; charset=utf-8"
_PART_BYTES = 1 << 16  # of a clip in one event, where all of it is ready at once
Samples = list[NDArray[np.float32]]


class ResponseWriter:
    """Writes the response of one request, status 200. Headers are sent with the first bytes.

    `before_end` is called before the last bytes, so the client's next request finds a free place.
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
        """Send a chunk now."""
        if not self.is_started:
            # no-cache and no buffering: a proxy must forward every chunk at once
            await self._start([(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End a streamed body; without it the client sees a broken connection."""
        await self._send_last(b"")

    async def send_whole(self, data: bytes) -> None:
        """Send the whole body, with its length."""
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


async def write_chat(
    events: AsyncIterator[Event],
    builder: ChatResponseBuilder,
    audio: AudioSpec | None,
    response: ResponseWriter,
) -> None:
    """Write one `chat.completion` object; `audio` is None if no speech was requested."""
    text, samples, done = await _collect(events)
    clip = None if audio is None else await asyncio.to_thread(encode, samples, audio)
    await response.send_whole(msgspec.json.encode(builder.completion(text=text, audio=clip, done=done)))


async def write_chat_stream(
    events: AsyncIterator[Event],
    builder: ChatResponseBuilder,
    audio: AudioSpec | None,
    response: ResponseWriter,
) -> None:
    """Write chunks: the role, one text delta per token, one audio delta per patch, the finish reason, `[DONE]`.

    The payloads of all audio deltas, joined before or after decoding, form one file.
    """
    response.content_type = _SSE
    encoder = None if audio is None else _ClipEncoder(audio)
    is_first = True
    transcript: list[str] = []
    async for event in events:
        if not response.is_started:
            await response.write(sse(builder.role_chunk()))
        if isinstance(event, TextDelta):
            transcript.append(event.text)
            await response.write(sse(builder.text_chunk(event.text)))
        elif isinstance(event, AudioDelta) and encoder is not None:
            if data := encoder.add(event):
                await response.write(sse(builder.audio_chunk(data, is_first=is_first)))
                is_first = False
        elif isinstance(event, Done):
            if encoder is not None:
                for data in await encoder.finish():
                    await response.write(sse(builder.audio_chunk(data, is_first=is_first)))
                    is_first = False
                await response.write(sse(builder.audio_end_chunk("".join(transcript), is_first=is_first)))
            await response.write(sse(builder.finish_chunk(event)))
            if builder.include_usage:
                await response.write(sse(builder.usage_chunk(event.usage)))
            await response.write(SSE_DONE)
            await response.end()
            return
    raise _unfinished()


async def write_speech(events: AsyncIterator[Event], audio: AudioSpec, response: ResponseWriter) -> None:
    """Write one audio file with its length in the header."""
    _, samples, _ = await _collect(events)
    await response.send_whole(await asyncio.to_thread(encode, samples, audio))


async def write_speech_stream(
    events: AsyncIterator[Event], audio: AudioSpec, response: ResponseWriter
) -> None:
    """Write an audio file in chunks; a WAV has an unknown length in its header."""
    encoder = open_stream(audio)
    async for event in events:
        if isinstance(event, AudioDelta):
            if data := encoder.add(event.samples):
                await response.write(data)
        elif isinstance(event, Done):
            if data := await asyncio.to_thread(encoder.finish):
                await response.write(data)
            await response.end()
            return
    raise _unfinished()


async def write_speech_events(
    events: AsyncIterator[Event], audio: AudioSpec, response: ResponseWriter
) -> None:
    """Write `speech.audio.delta` events, then `speech.audio.done` with the usage."""
    response.content_type = _SSE
    encoder = _ClipEncoder(audio)
    async for event in events:
        if isinstance(event, AudioDelta):
            if data := encoder.add(event):
                await response.write(sse(SpeechDelta(data)))
        elif isinstance(event, Done):
            for data in await encoder.finish():
                await response.write(sse(SpeechDelta(data)))
            await response.write(sse(speech_done(event.usage)))
            await response.end()
            return
    raise _unfinished()


class _ClipEncoder:
    """Base64 of a clip in parts that are valid alone and joined."""

    def __init__(self, audio: AudioSpec) -> None:
        self._encoder = open_stream(audio)
        self._base64 = Base64Stream()

    def add(self, event: AudioDelta) -> str:
        """What is ready to be sent, or "": FLAC is complete only at the end."""
        return self._base64.add(self._encoder.add(event.samples))

    async def finish(self) -> list[str]:
        """The rest in parts of at most `_PART_BYTES`, none of them empty."""
        data = await asyncio.to_thread(self._encoder.finish)
        parts = [self._base64.add(data[i : i + _PART_BYTES]) for i in range(0, len(data), _PART_BYTES)]
        return [part for part in (*parts, self._base64.finish()) if part]


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
    return WorkerError("The model stopped before its answer was complete.", code="unfinished")
