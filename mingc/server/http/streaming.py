"""Responses from the events of a request: whole, as server-sent events, or as raw audio.

A stream starts with its first event, so a request that cannot be served still gets an error status.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeVar

import msgspec
from starlette.types import Send

from mingc.errors import WorkerError
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.request import (
    AudioDelta,
    Done,
    Event,
    ImageEvent,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
    ToolCallFailed,
    Usage,
)
from mingc.server.audio_format import AudioSpec, Base64Groups
from mingc.server.http.body import JSON
from mingc.server.http.clips import KeptClip, LiveClip
from mingc.server.http.logprobs import CompletionLogprobsWriter, chat_logprobs
from mingc.server.http.response_schemas import (
    SSE_DONE,
    Answer,
    ChatChunk,
    ChatResponseBuilder,
    CompletionChoice,
    CompletionResponseBuilder,
    Delta,
    SegmentTime,
    SpeechDelta,
    SpeechSegment,
    speech_done,
    sse,
)

SSE = "text/event-stream; charset=utf-8"
Clip = LiveClip | KeptClip
Whole = tuple[int, AsyncIterator[bytes]]
"""A body: its length, and its parts."""
_Each = TypeVar("_Each", bound=Event | ImageEvent | tuple[int, Event])


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

    async def send_object(self, value: msgspec.Struct) -> None:
        """Send one object as JSON."""
        await self.send_data(JSON, msgspec.json.encode(value))

    async def send_data(self, content_type: str, data: bytes) -> None:
        """Send a body that is in memory."""
        await self.send_whole(content_type, *_whole(data))

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


Answers = AsyncIterator[tuple[int, Event]]
"""Events with the number of their answer."""


async def chat_completion(
    answers: Answers,
    builder: ChatResponseBuilder,
    clip: KeptClip | None,
    *,
    num_answers: int = 1,
    tokenizer: TextTokenizer | None = None,
) -> Whole:
    """Encode one `chat.completion` object.

    `clip` is None if no speech was requested, `tokenizer` if no log probabilities were.
    """
    found, logprobs = await _collect(answers, clip, num_answers)
    if found[0].has_only_calls:
        clip = None
    mark = secrets.token_hex(16)  # the text of an answer cannot contain it
    completion = builder.completion(
        found,
        audio=None if clip is None else mark,
        logprobs=None if tokenizer is None else [chat_logprobs(each, tokenizer) for each in logprobs],
    )
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
    answers: Answers,
    builder: ChatResponseBuilder,
    clip: Clip | None,
    *,
    num_answers: int = 1,
    tokenizer: TextTokenizer | None = None,
) -> AsyncIterator[bytes]:
    """Chunks of each answer: the role, one text delta per token, one audio delta per patch, the finish reason.

    Then `[DONE]`. The payloads of all audio deltas, joined before or after decoding, form one file. `tokenizer`: see
    `chat_completion`.
    """
    streams = [_ChatStream(replace(builder, index=index), clip, tokenizer) for index in range(num_answers)]
    usage = Usage()
    async for answer, event in until_done(answers, num_answers):
        async for chunk in streams[answer].chunks(event):
            yield sse(chunk)
        if isinstance(event, Done):
            usage += event.usage
    if builder.include_usage:
        yield sse(builder.usage_chunk(usage))
    yield SSE_DONE


class _ChatStream:
    """The chunks of one answer; see `chat_chunks`."""

    def __init__(
        self, builder: ChatResponseBuilder, clip: Clip | None, tokenizer: TextTokenizer | None
    ) -> None:
        self._builder = builder
        self._encoder = None if clip is None else _ClipEncoder(clip)
        self._tokenizer = tokenizer
        self._has_role = self._has_audio = False
        self._answer = Answer()

    async def chunks(self, event: Event) -> AsyncIterator[ChatChunk]:
        """The chunks that an event causes."""
        builder = self._builder
        self._answer.add(event)
        if not self._has_role:
            yield builder.role_chunk(has_text=not isinstance(event, TextDelta) or event.kind == "text")
            self._has_role = True
        match event:
            case TextDelta():
                if event.kind == "text" or event.text or event.logprobs:
                    yield self._text_chunk(event)
            case ToolCallDelta():
                yield builder.call_chunk(event)
            case ToolCallFailed():
                yield builder.chunk(Delta(content=event.text))
            case AudioDelta() | Done():
                if isinstance(event, Done) and self._answer.has_only_calls:
                    self._encoder = None
                if self._encoder is not None:
                    async for data in self._encoder.encode(event):
                        yield builder.audio_chunk(data, is_first=not self._has_audio)
                        self._has_audio = True
        if isinstance(event, Done):
            if self._encoder is not None:
                yield builder.audio_end_chunk(self._answer.text, is_first=not self._has_audio)
            yield builder.end_chunk(event)

    def _text_chunk(self, event: TextDelta) -> ChatChunk:
        delta = Delta()
        if event.kind == "thought":
            delta.reasoning_content = event.text
        elif event.kind == "text":
            delta.content = event.text
        logprobs = None
        if self._tokenizer is not None and event.logprobs:
            logprobs = chat_logprobs(event.logprobs, self._tokenizer)
        return self._builder.chunk(delta, logprobs=logprobs)


async def completion(
    answers: Answers,
    builder: CompletionResponseBuilder,
    *,
    num_answers: int,
    shown_prompt: str,
    tokenizer: TextTokenizer | None,
) -> Whole:
    """Encode one `text_completion` object. `tokenizer`: see `chat_completion`."""
    found, logprobs = await _collect(answers, None, num_answers)
    choices = []
    for index, answer in enumerate(found):
        choice = CompletionChoice(
            index=index, text=shown_prompt + answer.text, finish_reason=answer.done.finish_reason
        )
        if tokenizer is not None:
            choice.logprobs = CompletionLogprobsWriter(tokenizer).write(logprobs[index])
        choices.append(choice)
    return _whole(msgspec.json.encode(builder.completion(choices, [answer.done for answer in found])))


async def completion_chunks(
    answers: Answers,
    builder: CompletionResponseBuilder,
    *,
    num_answers: int,
    shown_prompt: str,
    tokenizer: TextTokenizer | None,
) -> AsyncIterator[bytes]:
    """Chunks of each answer: `shown_prompt`, one text per token, the finish reason; then `[DONE]`."""
    writers = [None if tokenizer is None else CompletionLogprobsWriter(tokenizer) for _ in range(num_answers)]
    shown = [shown_prompt] * num_answers
    usage = Usage()
    async for index, event in until_done(answers, num_answers):
        if shown[index]:
            yield sse(builder.chunk(CompletionChoice(index=index, text=shown[index])))
            shown[index] = ""
        if isinstance(event, TextDelta):
            choice = CompletionChoice(index=index, text=event.text)
            writer = writers[index]
            if writer is not None and event.logprobs:
                choice.logprobs = writer.write(event.logprobs)
            yield sse(builder.chunk(choice))
        elif isinstance(event, Done):
            end = CompletionChoice(index=index, text="", finish_reason=event.finish_reason)
            yield sse(builder.chunk(end, done=event))
            usage += event.usage
    if builder.include_usage:
        yield sse(builder.chunk(usage=usage))
    yield SSE_DONE


async def speech_clip(events: AsyncIterator[Event], clip: KeptClip) -> Whole:
    """Encode one audio file with its length in the header."""
    async for event in until_done(events):
        if isinstance(event, AudioDelta):
            await clip.add(event.samples)
    return await clip.finish(), clip.rest()


async def speech_parts(events: AsyncIterator[Event], clip: Clip) -> AsyncIterator[bytes]:
    """Encode an audio file in parts; a WAV has an unknown length in its header."""
    async for event in until_done(events):
        if isinstance(event, AudioDelta) and (data := await clip.add(event.samples)):
            yield data
    async for data in clip.rest():
        yield data


class SegmentTimes:
    """When the segments of a speech are heard, in seconds of its clip."""

    def __init__(self, audio: AudioSpec) -> None:
        self._samples_per_second = audio.speech_rate * audio.speed
        self._num_samples = 0
        self.segments: list[SegmentTime] = []

    def add(self, patch: AudioDelta) -> SpeechSegment | None:
        """Count a patch. Returns the segment that begins with it."""
        start = self._seconds
        self._num_samples += len(patch.samples)
        if patch.segment_text is not None:
            self.segments.append(SegmentTime(text=patch.segment_text, start=start, end=start))
        self.segments[-1].end = self._seconds
        return None if patch.segment_text is None else SpeechSegment(text=patch.segment_text, start=start)

    @property
    def _seconds(self) -> float:
        return round(self._num_samples / self._samples_per_second, 3)


async def speech_events(
    events: AsyncIterator[Event], clip: Clip, times: SegmentTimes | None = None
) -> AsyncIterator[bytes]:
    """Yield `speech.audio.delta` events, then `speech.audio.done` with the usage.

    With `times`, `speech.segment` comes before the sound of every segment, and the end has the times of all.
    """
    encoder = _ClipEncoder(clip)
    async for event in until_done(events):
        if isinstance(event, AudioDelta | Done):
            if times is not None and isinstance(event, AudioDelta) and (segment := times.add(event)):
                yield sse(segment)
            async for data in encoder.encode(event):
                yield sse(SpeechDelta(data))
        if isinstance(event, Done):
            yield sse(speech_done(event.usage, None if times is None else times.segments))


class _ClipEncoder:
    """A clip in parts whose base64 is valid alone and joined."""

    def __init__(self, clip: Clip) -> None:
        self._clip = clip
        self._groups = Base64Groups()

    async def encode(self, event: AudioDelta | Done) -> AsyncIterator[bytes]:
        """Parts that can be sent now; none is empty. FLAC is complete only at the end."""
        if isinstance(event, AudioDelta):
            if part := self._groups.add(await self._clip.add(event.samples)):
                yield part
            return
        async for data in self._clip.rest():
            if part := self._groups.add(data):
                yield part
        if part := self._groups.finish():
            yield part


def _whole(data: bytes) -> Whole:
    async def parts() -> AsyncIterator[bytes]:
        yield data

    return len(data), parts()


async def until_done(events: AsyncIterator[_Each], num_answers: int = 1) -> AsyncIterator[_Each]:
    """Yield the events, each with or without its answer, up to the last `Done`. Raises: WorkerError without it."""
    async for each in events:
        yield each
        num_answers -= isinstance(each[1] if isinstance(each, tuple) else each, Done)
        if not num_answers:
            return
    raise WorkerError("The model stopped before its answer was complete.", code="unfinished")


async def _collect(
    answers: Answers, clip: KeptClip | None, num_answers: int
) -> tuple[list[Answer], list[list[tuple[int, TokenLogprobs]]]]:
    """Add the speech to `clip`. Returns the rest of each answer, and the log probabilities of its tokens."""
    found = [Answer() for _ in range(num_answers)]
    logprobs: list[list[tuple[int, TokenLogprobs]]] = [[] for _ in range(num_answers)]
    async for index, event in until_done(answers, num_answers):
        found[index].add(event)
        if isinstance(event, TextDelta):
            logprobs[index] += event.logprobs
        elif isinstance(event, AudioDelta) and clip is not None:
            await clip.add(event.samples)
    return found, logprobs
