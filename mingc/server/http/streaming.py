"""Responses from the events of a request: whole, as server-sent events, or as raw audio.

A stream starts with its first event, so a request that cannot be served still gets an error status.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.types import Send

from mingc.errors import WorkerError
from mingc.runtime.request import AudioDelta, Done, Event, TextDelta
from mingc.server.audio_format import Base64Stream
from mingc.server.http.clips import KeptClip, LiveClip
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
Clip = LiveClip | KeptClip
Whole = tuple[int, AsyncIterator[bytes]]
"""A body: its length, and its parts."""


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

    async def send_whole(self, content_type: str, num_bytes: int, parts: AsyncIterator[bytes]) -> None:
        """Send a body of known length."""
        await self._start(content_type, (b"content-length", str(num_bytes).encode()))
        async for part in parts:
            num_bytes -= len(part)
            if num_bytes > 0:
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
            else:
                await self._send_last(part)
        if not self.is_ended:
            await self._send_last(b"")

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
    events: AsyncIterator[Event], builder: ChatResponseBuilder, clip: KeptClip | None
) -> Whole:
    """Encode one `chat.completion` object; `clip` is None if no speech was requested."""
    text, done = await _collect(events, clip)
    mark = secrets.token_hex(16)  # the text of an answer cannot contain it
    completion = builder.completion(text=text, audio=None if clip is None else mark, done=done)
    before, _, after = msgspec.json.encode(completion).partition(mark.encode())
    num_bytes = len(before) + len(after)
    if clip is not None:
        num_bytes += -(-await clip.finish() // 3) * 4

    async def parts() -> AsyncIterator[bytes]:
        yield before
        if clip is not None:
            async for part in clip.rest():
                yield base64.b64encode(part)
            yield after

    return num_bytes, parts()


async def chat_chunks(
    events: AsyncIterator[Event], builder: ChatResponseBuilder, clip: Clip | None
) -> AsyncIterator[bytes]:
    """Chunks: the role, one text delta per token, one audio delta per patch, the finish reason, `[DONE]`.

    The payloads of all audio deltas, joined before or after decoding, form one file.
    """
    encoder = None if clip is None else _ClipEncoder(clip)
    has_role = has_audio = False
    transcript: list[str] = []
    async for event in until_done(events):
        if not has_role:
            yield sse(builder.role_chunk())
            has_role = True
        if isinstance(event, TextDelta):
            transcript.append(event.text)
            yield sse(builder.chunk(Delta(content=event.text)))
        elif isinstance(event, AudioDelta | Done) and encoder is not None:
            async for data in encoder.encode(event):
                yield sse(builder.audio_chunk(data, is_first=not has_audio))
                has_audio = True
        if isinstance(event, Done):
            if encoder is not None:
                yield sse(builder.audio_end_chunk("".join(transcript), is_first=not has_audio))
            yield sse(builder.end_chunk(event))
            if builder.include_usage:
                yield sse(builder.usage_chunk(event.usage))
            yield SSE_DONE


async def speech_clip(events: AsyncIterator[Event], clip: KeptClip) -> Whole:
    """Encode one audio file with its length in the header."""
    await _collect(events, clip)
    return await clip.finish(), clip.rest()


async def speech_parts(events: AsyncIterator[Event], clip: Clip) -> AsyncIterator[bytes]:
    """Encode an audio file in parts; a WAV has an unknown length in its header."""
    async for event in until_done(events):
        if isinstance(event, AudioDelta) and (data := await clip.add(event.samples)):
            yield data
    async for data in clip.rest():
        yield data


async def speech_events(events: AsyncIterator[Event], clip: Clip) -> AsyncIterator[bytes]:
    """Yield `speech.audio.delta` events, then `speech.audio.done` with the usage."""
    encoder = _ClipEncoder(clip)
    async for event in until_done(events):
        if isinstance(event, AudioDelta | Done):
            async for data in encoder.encode(event):
                yield sse(SpeechDelta(data))
        if isinstance(event, Done):
            yield sse(speech_done(event.usage))


class _ClipEncoder:
    """Base64 of a clip in parts that are valid alone and joined."""

    def __init__(self, clip: Clip) -> None:
        self._clip = clip
        self._base64 = Base64Stream()

    async def encode(self, event: AudioDelta | Done) -> AsyncIterator[str]:
        """Encoded parts that can be sent now; none is empty. FLAC is complete only at the end."""
        if isinstance(event, AudioDelta):
            if part := self._base64.add(await self._clip.add(event.samples)):
                yield part
            return
        async for data in self._clip.rest():
            if part := self._base64.add(data):
                yield part
        if part := self._base64.finish():
            yield part


async def until_done(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """Yield the events up to `Done`. Raises: WorkerError when it does not come."""
    async for event in events:
        yield event
        if isinstance(event, Done):
            return
    raise WorkerError("The model stopped before its answer was complete.", code="unfinished")


async def _collect(events: AsyncIterator[Event], clip: KeptClip | None) -> tuple[str, Done]:
    """Add the speech to `clip`. Returns the text, and the end."""
    text: list[str] = []
    async for event in until_done(events):
        if isinstance(event, TextDelta):
            text.append(event.text)
        elif isinstance(event, AudioDelta) and clip is not None:
            await clip.add(event.samples)
        elif isinstance(event, Done):
            done = event
    return "".join(text), done
