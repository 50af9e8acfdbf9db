"""Speech from another deployment: wraps a text-only service and sends its segments to speech replicas.

Segments of a request do not depend on each other, and their noise depends only on the seed of the request and their
index. So any replica can speak any segment, and the samples equal the samples of one artifact with text and speech.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from mingc.errors import RequestError, ServeError, WorkerError
from mingc.prompts.conversation import MediaPart
from mingc.prompts.speech_prompt import caption_instruction
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.noise import random_seed
from mingc.runtime.request import (
    NOTHING_TO_SPEAK,
    AudioDelta,
    ChatRequest,
    Done,
    Event,
    ImageEvent,
    ImageRequest,
    Service,
    ServiceInfo,
    ServiceLoad,
    SpeechParams,
    SpeechRequest,
    TextDelta,
    TextDone,
    TextRequest,
    TranscriptEvent,
    TranscriptionRequest,
    Usage,
)
from mingc.runtime.voices import NewVoice, VoiceInfo
from mingc.text.spoken import SpeechText, SpokenText
from mingc.text.spoken_piece import SpokenPiece

_AHEAD = 2  # so many segments of a request are generated at a time: the segment that is sent, and the next
_PENDING_EVENTS = 128  # events of a request, or of a segment, that wait before nothing more is read


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentCall:
    """One piece of text to speak, as segment `index` of a request.

    `text_end`: see `AudioDelta`. `is_live`, `priority`: the request's.
    """

    text: str
    index: int
    params: SpeechParams
    seed: int
    text_end: int | None = None
    is_live: bool = False
    priority: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechInfo:
    """What a speech deployment can do.

    It speaks at most `max_segment_length` units of text as one segment, which was read by the rules `speech_text`.
    """

    service: ServiceInfo
    max_segment_length: int
    speech_text: SpeechText


class RemoteVoices(Protocol):
    """The voices of a speech deployment; see `Service` and `OmniService.find_voice`."""

    async def list_voices(self) -> tuple[VoiceInfo, ...]: ...

    async def add_voice(self, voice: NewVoice) -> VoiceInfo: ...

    async def remove_voice(self, name: str) -> VoiceInfo: ...

    async def find_voice(self, params: SpeechParams, prefix: str = "") -> SpeechParams: ...


class RemoteSpeechService:
    """`Service` over a service without speech and a deployment with it.

    Args:
        speak: calls any speech replica for the events of one segment.
        speech: calls any speech replica for the events of a speech request.
        voices: asks any speech replica about voices.
    """

    def __init__(
        self,
        text: Service,
        info: SpeechInfo,
        *,
        speak: Callable[[SegmentCall], AsyncGenerator[Event]],
        speech: Callable[[SpeechRequest], AsyncGenerator[Event]],
        voices: RemoteVoices,
    ) -> None:
        self._text = text
        self._speak = speak
        self._speech = speech
        self._voices = voices
        self.update(info)

    def update(self, info: SpeechInfo) -> None:
        """Use these capabilities of the speech deployment for requests that begin from now on."""
        self._max_segment_length, self._speech_text = info.max_segment_length, info.speech_text
        self.info = replace(
            self._text.info,
            sample_rate=info.service.sample_rate,
            voices=info.service.voices,
            default_voice=info.service.default_voice,
            has_speech=True,
        )

    @property
    def is_ready(self) -> bool:
        return self._text.is_ready

    @property
    def load(self) -> ServiceLoad:
        return self._text.load

    def on_failure(self, report: Callable[[ServeError], None]) -> None:
        """See `Service`."""
        self._text.on_failure(report)

    async def close(self, *, shutdown_timeout_s: float) -> None:
        """See `Service`. Speech replicas are closed by their own deployment."""
        await self._text.close(shutdown_timeout_s=shutdown_timeout_s)

    def speech(self, request: SpeechRequest) -> AsyncIterator[Event]:
        """Events of the speech of one text. See `Service`."""
        return self._speech(request)

    def draw(self, request: ImageRequest) -> AsyncIterator[ImageEvent]:
        """Events of pictures. See `Service`."""
        return self._text.draw(request)

    def transcribe(self, request: TranscriptionRequest) -> AsyncGenerator[TranscriptEvent]:
        """Events of a transcript. See `Service`."""
        return self._text.transcribe(request)

    def answers(self, request: TextRequest) -> AsyncIterator[tuple[int, Event]]:
        """See `Service`. Only a single answer can be spoken."""
        if isinstance(request, ChatRequest) and request.speech is not None:
            return _only_answer(self.chat(request))
        return self._text.answers(request)

    async def tokenize(self, prompt: str | ChatRequest) -> Sequence[int]:
        """See `Service`."""
        return await self._text.tokenize(prompt)

    async def count_tokens(self, request: ChatRequest) -> Sequence[int]:
        """See `Service`."""
        return await self._text.count_tokens(request)

    async def decode_media(self, part: MediaPart) -> MediaPart:
        """See `Service`."""
        return await self._text.decode_media(part)

    @property
    def tokenizer(self) -> TextTokenizer:
        """See `Service`."""
        return self._text.tokenizer

    async def stream_speech(
        self, request: SpeechRequest, deltas: AsyncIterator[str], *, starts_early: bool = True
    ) -> AsyncGenerator[Event]:
        """Events of the speech of a text that is still being written. See `Service`."""
        spoken = SpokenText(self._max_segment_length, self._speech_text, starts_early=starts_early)
        params = await self._with_voice(request.speech)
        segments = self._segments(params, request, params.seed)
        merged: asyncio.Queue[_Item] = asyncio.Queue(_PENDING_EVENTS)

        async def read_text() -> AsyncGenerator[Event]:
            async for delta in deltas:
                segments.add(spoken.push(delta))
            segments.add(spoken.finish())
            segments.end()
            if not segments.num_added:
                raise RequestError(NOTHING_TO_SPEAK, param="input", code="nothing_to_speak")
            yield TextDone(finish_reason="stop")

        tasks = [
            asyncio.create_task(_pump(read_text(), merged)),
            asyncio.create_task(_pump(segments.events(), merged)),
        ]
        try:
            for _ in tasks:
                async for event in _items(merged):
                    if isinstance(event, AudioDelta):
                        yield event
        finally:
            await _cancel(tasks)
        yield Done(
            finish_reason="length" if segments.was_capped else "stop",
            usage=Usage(
                prompt_tokens=segments.prompt_tokens,
                audio_patches=segments.num_patches,
                audio_seconds=segments.num_samples / self.info.sample_rate,
            ),
        )

    async def _with_voice(self, params: SpeechParams, prefix: str = "") -> SpeechParams:
        """`params` with a voice that is not the model's: any replica may speak a segment, and it may be removed."""
        if params.reference is None and params.voice in (None, *self.info.voices):
            return params
        return await self._voices.find_voice(params, prefix)

    def _segments(
        self, params: SpeechParams, request: ChatRequest | SpeechRequest, seed: int | None
    ) -> _Segments:
        """The segments of one request. Raises: RequestError when the speech replicas would refuse `params`."""
        caption_instruction(params.instructions or "")
        call = SegmentCall(
            text="",
            index=0,
            params=replace(params, speech_lead=0),  # a call knows the playback of its own segment only
            seed=random_seed() if seed is None else seed,
            is_live=request.is_live,
            priority=request.priority,
        )
        return _Segments(self._speak, call)

    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        """Events of one answer; its speech comes from the other deployment. See `Service`."""
        events = self._text.chat(replace(request, speech=None))
        if request.speech is None:
            return events
        return self._spoken_chat(events, request, request.speech)

    async def list_voices(self) -> tuple[VoiceInfo, ...]:
        """See `Service`."""
        return await self._voices.list_voices()

    async def add_voice(self, voice: NewVoice) -> VoiceInfo:
        """See `Service`."""
        return await self._voices.add_voice(voice)

    async def remove_voice(self, name: str) -> VoiceInfo:
        """See `Service`."""
        return await self._voices.remove_voice(name)

    async def _spoken_chat(
        self, text: AsyncIterator[Event], request: ChatRequest, params: SpeechParams
    ) -> AsyncGenerator[Event]:
        params = await self._with_voice(params, "audio.")
        spoken = SpokenText(self._max_segment_length, self._speech_text)
        segments = self._segments(
            params, request, params.seed if params.seed is not None else request.sampling.seed
        )
        merged: asyncio.Queue[_Item] = asyncio.Queue(_PENDING_EVENTS)
        end: Done | None = None

        async def read_text() -> AsyncGenerator[Event]:
            nonlocal end
            async with aclosing(text):  # type: ignore[type-var]  # services' iterators are generators
                async for event in text:
                    match event:
                        case TextDelta(kind="text"):
                            segments.add(spoken.push(event.text))
                        case TextDelta(kind="call"):
                            segments.add(spoken.finish())  # it is spoken while the call is written
                        case TextDone():
                            segments.add(spoken.finish())
                            segments.end()
                    if isinstance(event, Done):
                        end = event
                    else:
                        yield event

        tasks = [
            asyncio.create_task(_pump(read_text(), merged)),
            asyncio.create_task(_pump(segments.events(), merged)),
        ]
        try:
            for _ in range(2):
                async for event in _items(merged):
                    yield event
        finally:
            await _cancel(tasks)
        assert end is not None, "a service ends with Done"
        usage = replace(
            end.usage,
            audio_patches=segments.num_patches,
            audio_seconds=segments.num_samples / self.info.sample_rate,
        )
        is_silent = not segments.num_patches and end.finish_reason != "tool_calls"
        yield replace(end, usage=usage, has_nothing_to_speak=is_silent)


class _End:
    """Last item of a queue."""


_Item = Event | Exception | _End


class _Segments:
    """The segments of one request in order; at most `_AHEAD` are generated at a time.

    Their calls are `call` with piece and index.
    """

    def __init__(self, speak: Callable[[SegmentCall], AsyncGenerator[Event]], call: SegmentCall) -> None:
        self._speak = speak
        self._call = call
        self._waiting: asyncio.Queue[SegmentCall | _End] = asyncio.Queue()
        self.num_added = 0
        self.is_ended = False
        self.num_patches = 0
        self.num_samples = 0
        self.prompt_tokens = 0
        self.was_capped = False

    def add(self, pieces: Iterable[SpokenPiece]) -> None:
        """Append pieces of text."""
        for text, end in pieces:
            self._waiting.put_nowait(replace(self._call, text=text, text_end=end, index=self.num_added))
            self.num_added += 1

    def end(self) -> None:
        """No segment follows."""
        self.is_ended = True
        self._waiting.put_nowait(_End())

    async def events(self) -> AsyncGenerator[AudioDelta]:
        """Patches of all segments, in order. Closing the iterator cancels the calls that run."""
        started: asyncio.Queue[asyncio.Queue[_Item] | _End] = asyncio.Queue()
        places = asyncio.Semaphore(_AHEAD)
        tasks: list[asyncio.Task[None]] = []

        async def start() -> None:
            while not isinstance(call := await self._waiting.get(), _End):
                await places.acquire()
                queue: asyncio.Queue[_Item] = asyncio.Queue(_PENDING_EVENTS)
                tasks.append(asyncio.create_task(_pump(self._speak(call), queue)))
                started.put_nowait(queue)
            started.put_nowait(_End())

        tasks.append(asyncio.create_task(start()))
        try:
            while not isinstance(queue := await started.get(), _End):
                async for event in _items(queue):
                    if isinstance(event, AudioDelta):
                        self.num_patches += 1
                        self.num_samples += len(event.samples)
                        yield event
                    elif isinstance(event, Done):
                        self.prompt_tokens += event.usage.prompt_tokens
                        self.was_capped |= event.finish_reason == "length"
                places.release()
        finally:
            await _cancel(tasks)


async def _only_answer(events: AsyncIterator[Event]) -> AsyncGenerator[tuple[int, Event]]:
    async with aclosing(events):  # type: ignore[type-var]  # services' iterators are generators
        async for event in events:
            yield 0, event


async def _pump(events: AsyncGenerator[Event], queue: asyncio.Queue[_Item]) -> None:
    """Put all events into `queue`, then the error that ended them, or `_End`."""
    last: _Item = _End()
    try:
        async with aclosing(events):
            async for event in events:
                await queue.put(event)
    except Exception as error:
        last = error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # The call was cancelled on its replica. Without an item the reader of the queue would wait forever.
        last = WorkerError("a part of this request was cancelled where it ran")
        last.__cause__ = error
    await queue.put(last)


async def _items(queue: asyncio.Queue[_Item]) -> AsyncGenerator[Event]:
    """Events of `queue` until its `_End`. Raises: the error in it."""
    while not isinstance(item := await queue.get(), _End):
        if isinstance(item, Exception):
            raise item
        yield item


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
