"""Responses from the events of a request: whole, as server-sent events, or as raw audio.

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
    Delta,
    SpeechDelta,
    speech_done,
    sse,
)

JSON = "application/json"
SSE = "text/event-stream; charset=utf-8"
_PART_BYTES = 1 << 16  # most bytes of a clip in one event, when the whole clip is ready at once
Samples = list[NDArray[np.float32]]


class ResponseWriter:
    """Writes the response of one request, status 200. Headers are sent with the first bytes.

    `before_end` is called before the last bytes, so the client's next request finds a free place.
    """

    def __init__(self, send: Send, before_end: Callable[[], None]) -> None:
        self._send = send
        self._before_end = before_end
        self.is_started = False
        self.is_ended = False
        self.is_sse = False

    async def send_whole(self, content_type: str, data: bytes) -> None:
        """Send the whole body, with its length."""
        await self._start(content_type, (b"content-length", str(len(data)).encode()))
        await self._send_last(data)

    async def send_stream(self, content_type: str, parts: AsyncIterator[bytes]) -> None:
        """Send each part at once. An error of `parts` leaves the response open, so that it breaks off."""
        # no-cache and no buffering: a proxy must forward every part at once
        headers = (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")
        async for part in parts:
            if not self.is_started:
                await self._start(content_type, *headers)
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
        if not self.is_started:
            await self._start(content_type, *headers)
        await self._send_last(b"")

    async def end_with_event(self, event: bytes) -> None:
        """End an event stream that failed."""
        await self._send_last(event)

    async def _send_last(self, data: bytes) -> None:
        self.is_ended = True
        self._before_end()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _start(self, content_type: str, *headers: tuple[bytes, bytes]) -> None:
        self.is_started = True
        self.is_sse = content_type == SSE
        all_headers = [(b"content-type", content_type.encode()), *headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": all_headers})


async def chat_completion(
    events: AsyncIterator[Event], builder: ChatResponseBuilder, audio: AudioSpec | None
) -> bytes:
    """Encode one `chat.completion` object; `audio` is None if no speech was requested."""
    text, samples, done = await _collect(events)
    clip = None if audio is None else await asyncio.to_thread(encode, samples, audio)
    return msgspec.json.encode(builder.completion(text=text, audio=clip, done=done))


async def chat_chunks(
    events: AsyncIterator[Event], builder: ChatResponseBuilder, audio: AudioSpec | None
) -> AsyncIterator[bytes]:
    """Chunks: the role, one text delta per token, one audio delta per patch, the finish reason, `[DONE]`.

    The payloads of all audio deltas, joined before or after decoding, form one file.
    """
    encoder = None if audio is None else _ClipEncoder(audio)
    has_role = has_audio = False
    transcript: list[str] = []
    async for event in _until_done(events):
        if not has_role:
            yield sse(builder.role_chunk())
            has_role = True
        if isinstance(event, TextDelta):
            transcript.append(event.text)
            yield sse(builder.chunk(Delta(content=event.text)))
        elif isinstance(event, AudioDelta | Done) and encoder is not None:
            for data in await encoder.encode(event):
                yield sse(builder.audio_chunk(data, is_first=not has_audio))
                has_audio = True
        if isinstance(event, Done):
            if encoder is not None:
                yield sse(builder.audio_end_chunk("".join(transcript), is_first=not has_audio))
            yield sse(builder.end_chunk(event))
            if builder.include_usage:
                yield sse(builder.usage_chunk(event.usage))
            yield SSE_DONE


async def speech_clip(events: AsyncIterator[Event], audio: AudioSpec) -> bytes:
    """Encode one audio file with its length in the header."""
    _, samples, _ = await _collect(events)
    return await asyncio.to_thread(encode, samples, audio)


async def speech_parts(events: AsyncIterator[Event], audio: AudioSpec) -> AsyncIterator[bytes]:
    """Encode an audio file in parts; a WAV has an unknown length in its header."""
    encoder = open_stream(audio)
    async for event in _until_done(events):
        if isinstance(event, AudioDelta) and (data := encoder.add(event.samples)):
            yield data
    if data := await asyncio.to_thread(encoder.finish):
        yield data


async def speech_events(events: AsyncIterator[Event], audio: AudioSpec) -> AsyncIterator[bytes]:
    """Yield `speech.audio.delta` events, then `speech.audio.done` with the usage."""
    encoder = _ClipEncoder(audio)
    async for event in _until_done(events):
        if isinstance(event, AudioDelta | Done):
            for data in await encoder.encode(event):
                yield sse(SpeechDelta(data))
        if isinstance(event, Done):
            yield sse(speech_done(event.usage))


class _ClipEncoder:
    """Base64 of a clip in parts that are valid alone and joined."""

    def __init__(self, audio: AudioSpec) -> None:
        self._encoder = open_stream(audio)
        self._base64 = Base64Stream()

    async def encode(self, event: AudioDelta | Done) -> list[str]:
        """Encoded parts that can be sent now; none is empty. FLAC is complete only at the end."""
        if isinstance(event, AudioDelta):
            parts = [self._base64.add(self._encoder.add(event.samples))]
        else:
            data = await asyncio.to_thread(self._encoder.finish)
            parts = [self._base64.add(data[i : i + _PART_BYTES]) for i in range(0, len(data), _PART_BYTES)]
            parts.append(self._base64.finish())
        return [part for part in parts if part]


async def _until_done(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """Yield the events up to `Done`. Raises: WorkerError when it does not come."""
    async for event in events:
        yield event
        if isinstance(event, Done):
            return
    raise WorkerError("The model stopped before its answer was complete.", code="unfinished")


async def _collect(events: AsyncIterator[Event]) -> tuple[str, Samples, Done]:
    text: list[str] = []
    samples: Samples = []
    async for event in _until_done(events):
        if isinstance(event, TextDelta):
            text.append(event.text)
        elif isinstance(event, AudioDelta):
            samples.append(event.samples)
        elif isinstance(event, Done):
            done = event
    return "".join(text), samples, done
