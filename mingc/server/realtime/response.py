"""One response of a session: what the service generates becomes events, in the order that clients rely on.

A response may begin before it is shown: until `show`, what was generated waits. It ends once, by itself when all its
sound and text were written to the socket, or by `stop`; either way with the last events of its items and
`response.done`.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mingc.errors import CapacityError, MingcError, RequestError, WorkerError
from mingc.prompts.conversation import MediaKind, MediaPart
from mingc.prompts.transcription import MAX_TRANSCRIPT_TOKENS, SEGMENTS_AHEAD
from mingc.runtime.request import (
    AudioDelta,
    ChatRequest,
    Done,
    Event,
    TextDelta,
    ToolCallDone,
    ToolCallFailed,
    Usage,
)
from mingc.server import tracing
from mingc.server.audio_format import AudioSpec
from mingc.server.http.clips import LiveClip
from mingc.server.http.routes import HttpState
from mingc.server.http.streaming import until_done
from mingc.server.key_limits import KeyUse
from mingc.server.metrics import Playback
from mingc.server.realtime import events
from mingc.server.realtime.heard import Answer
from mingc.server.realtime.input_audio import RATES
from mingc.server.realtime.items import AssistantMessage, Conversation, FunctionCall, Item, Status
from mingc.server.realtime.session import ResponseSettings, new_id
from mingc.server.state import ServerState
from mingc.server.websocket.connection import EventSocket

log = logging.getLogger("mingc.http")

PATH = "/v1/realtime"
Reason = Literal["turn_detected", "client_cancelled"]
_RETRY_S = 0.1  # for a place
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a response is asked. `sizes`: tokens of the prompt, as `Service.count_tokens` gives them."""

    request: ChatRequest
    sizes: Sequence[int]

    def num_media_tokens(self, kind: MediaKind, num_tokens: int | None = None) -> int:
        """How many tokens of the prompt are sound, or pictures: of all, or of the first `num_tokens`."""
        messages = self.request.messages
        found, place = 0, self.sizes[0]
        for message, size in zip(messages, self.sizes[1:], strict=True):
            media = (part for part in message.parts if isinstance(part, MediaPart) and part.kind == kind)
            count = sum(part.num_tokens or 0 for part in media)
            found += count if num_tokens is None else min(count, max(0, num_tokens - place))
            place += size
        return found


class Places:
    """Places of one session for what the model does, within the limits of the server and of the API key.

    A transcript waits for one; a response is refused without one, unless a transcript of the same session has it.
    """

    def __init__(self, server: ServerState, socket: EventSocket) -> None:
        self._server = server
        self._socket = socket
        self._transcribing = asyncio.Lock()

    async def respond(self, place: ExitStack) -> KeyUse:
        """Hold a place until `place` is closed. Raises: CapacityError."""
        return await self._after_transcript(lambda: place.enter_context(self._take()))

    async def count(self, key: KeyUse, question: Question) -> None:
        """Count the tokens of a response. Raises: see `KeyUse.add`."""
        num_tokens, request = sum(question.sizes), question.request
        is_spoken = request.speech is not None
        await self._after_transcript(
            lambda: key.add_text(range(num_tokens), request.sampling.max_tokens, is_spoken=is_spoken)
        )

    async def _after_transcript(self, take: Callable[[], _T]) -> _T:
        """Take something, if need be when the transcript of the same session that runs has ended."""
        try:
            return take()
        except CapacityError:
            if not self._transcribing.locked():
                raise
        async with self._transcribing:
            return take()

    @asynccontextmanager
    async def transcribe(self, prompt: str) -> AsyncIterator[None]:
        """Hold a place in the block. One transcript at a time. Raises: CapacityError when the server stops."""
        while True:
            async with self._transcribing:
                with ExitStack() as place:
                    try:
                        key = place.enter_context(self._take())
                        key.add_text(prompt * SEGMENTS_AHEAD, MAX_TRANSCRIPT_TOKENS * SEGMENTS_AHEAD)
                    except CapacityError as error:
                        if error.code == "stopping":
                            raise
                    else:
                        yield
                        return
            await asyncio.sleep(_RETRY_S)

    @contextmanager
    def _take(self) -> Iterator[KeyUse]:
        with (
            self._server.key_limits.admit(self._socket.key) as key,
            self._server.admit(),
            self._socket.running(),
        ):
            yield key


class Response:
    """A response of a session. Call it from the event loop only.

    Args:
        conversation: gets the answer; None for one out of band.
        ask: prepares what is asked, in the task of the response.
        ended: called once, after the last event is queued.

    Attributes:
        is_shown: whether the client knows of it.
        is_ended: no event follows.
        message: its item with text or sound.
        num_bytes: of media that it alone has.
        played_until: when the client will have played what was written, by the clock of the event loop.
        task: frees all that it holds when it ends.
    """

    def __init__(
        self,
        state: HttpState,
        socket: EventSocket,
        places: Places,
        settings: ResponseSettings,
        conversation: Conversation | None,
        ask: Callable[[], Awaitable[Question]],
        ended: Callable[[Response], None],
    ) -> None:
        self.id = new_id("resp")
        self.settings = settings
        self.is_shown = self.is_ended = False
        self.message: AssistantMessage | None = None
        self.num_bytes = 0
        self.played_until = 0.0
        self._state = state
        self._socket = socket
        self._places = places
        self._conversation = conversation
        self._ask = ask
        self._ended = ended
        self._encoding = settings.session.output_encoding
        self._rate = RATES[self._encoding]
        self._playback: Playback | None = None
        self._waiting: list[tuple[Event, bytes]] = []  # until it is shown
        self._shown = asyncio.Event()
        self._index = 0  # of the message in the output
        self._calls: list[ToolCallDone] = []  # that wait for the end of the message
        self._has_broken_call = False
        self._output: list[Item] = []
        self._question: Question | None = None
        self._done: Done | None = None
        self._num_tokens = self._num_patches = 0
        self._unsaid: list[Callable[[], None]] = []  # what is true when the next delta is written
        self._num_queued = 0
        self._is_written = asyncio.Event()
        self._is_written.set()
        self.task = asyncio.create_task(self._run())

    def show(self, turn_end: float | None) -> None:
        """Queue `response.created`, and what was generated so far. `turn_end`: see `Playback`."""
        self.is_shown = True
        self._playback = Playback(self._state.server.metrics, turn_end)
        self._put(events.ResponseCreated(response=self._object("in_progress")))
        waiting, self._waiting = self._waiting, []
        try:
            for event, data in waiting:
                self._handle(event, data)
        except MingcError as error:
            self.task.cancel()
            self._end("failed", error=error)
        self._shown.set()

    def stop(self, reason: Reason) -> None:
        """End it now: what is not written yet of its text and sound is taken back. The task ends soon after."""
        self._end("cancelled", reason=reason)
        self.task.cancel()

    async def _run(self) -> None:
        metrics = self._state.server.metrics
        try:
            with tracing.span("realtime.response", **{"mingc.response_id": self.id}):
                await self._generate()
            await self._shown.wait()
            await self._is_written.wait()
            is_cut = self._done is not None and self._done.finish_reason == "length"
            self._end(*(("incomplete", "max_output_tokens") if is_cut else ("completed",)))
        except asyncio.CancelledError:
            metrics.requests_cancelled.labels(PATH).inc()
            raise
        except Exception as error:
            if not isinstance(error, MingcError):
                log.exception("%s: unexpected error", PATH)
            if not isinstance(error, RequestError):
                metrics.stream_errors.labels(PATH).inc()
            self._end("failed", error=error)

    async def _generate(self) -> None:
        """Read the answer to its end. The response holds a place meanwhile."""
        server, settings = self._state.server, self.settings
        timer = server.metrics.timer()
        with ExitStack() as place:
            place.enter_context(server.metrics.request_duration.labels(PATH).time())
            key = await self._places.respond(place)
            self._question = await self._ask()
            await self._places.count(key, self._question)
            clip = None
            if settings.speech is not None:
                clip = place.enter_context(closing(LiveClip(self._spec())))
            async with timer.measure(server.service.chat(self._question.request)) as answers:
                async for event in until_done(answers):
                    data = b""
                    if clip is not None and isinstance(event, AudioDelta):
                        data = await clip.add(event.samples)
                    elif clip is not None and isinstance(event, Done):
                        data = b"".join([each async for each in clip.rest()])
                    if self.is_shown:
                        self._handle(event, data)
                    else:
                        self._waiting.append((event, data))
                    await self._socket.room()

    def _spec(self) -> AudioSpec:
        formats: Any = {"audio/pcm": "pcm16", "audio/pcmu": "pcmu", "audio/pcma": "pcma"}
        return AudioSpec(
            format=formats[self._encoding],
            sample_rate=self._rate,
            source_rate=self._state.server.service.info.sample_rate,
        )

    def _handle(self, event: Event, data: bytes) -> None:
        """Queue the events that an event of the service causes. `data`: sound that it completes."""
        match event:
            case TextDelta():
                self._num_tokens += event.token is not None
                if event.kind == "text":
                    self._add_text(event)
            case AudioDelta():
                self._num_patches += 1
                self._add_sound(event, data)
            case ToolCallDone():
                self._calls.append(event)
                if self.message is None:
                    self._send_calls()
            case ToolCallFailed():
                self._has_broken_call = True
            case Done():
                if self._has_broken_call and event.finish_reason != "length":  # which may end within a call
                    raise WorkerError(
                        "The model wrote a call that is none: broken JSON, or no function of 'tools'.",
                        code="invalid_tool_call",
                    )
                self._done = event
                if data:
                    self._add_sound(None, data)
                if self.message is None and not self._output:
                    self._open()

    def _add_text(self, event: TextDelta) -> None:
        if self.message is None and event.text:
            self._open()
        self._unsaid.append(lambda: self._answer.add_text(event))
        if event.text:
            is_spoken = self.settings.speech is not None
            kind = events.TranscriptDelta if is_spoken else events.OutputTextDelta
            self._delta(kind(**self._place(), delta=event.text))

    def _add_sound(self, patch: AudioDelta | None, data: bytes) -> None:
        self._unsaid.append(partial(self._write_sound, patch, len(data)))
        if data:
            self._delta(events.OutputAudioDelta(**self._place(), delta=base64.b64encode(data).decode()))

    def _write_sound(self, patch: AudioDelta | None, num_bytes: int) -> None:
        num_samples = num_bytes // (2 if self._encoding == "audio/pcm" else 1)
        self._answer.add_sound(num_samples, patch)
        assert self._playback is not None
        seconds = num_samples / self._rate
        self._playback.add(seconds)
        self.played_until = max(self.played_until, asyncio.get_running_loop().time()) + seconds

    @property
    def _answer(self) -> Answer:
        assert self.message is not None and self.message.answer is not None
        return self.message.answer

    def _delta(self, event: Struct) -> None:
        """Queue a part of the answer, which `stop` may take back."""
        written, self._unsaid = self._unsaid, []
        self._num_queued += 1
        self._is_written.clear()
        self._socket.put(event, self, lambda: self._count(written))

    def _count(self, written: list[Callable[[], None]]) -> None:
        for effect in written:
            effect()
        self._num_queued -= 1
        if not self._num_queued:
            self._is_written.set()

    def _open(self) -> None:
        """Begin the message."""
        is_spoken = self.settings.speech is not None
        answer = Answer(self._state.server.service.tokenizer, sample_rate=self._rate, is_spoken=is_spoken)
        self.message = AssistantMessage(is_spoken=is_spoken, answer=answer, status="in_progress")
        self._index = len(self._output)
        self._begin_item(self.message)
        part = events.AudioContentPart() if is_spoken else events.TextContentPart()
        self._put(events.ContentPartAdded(**self._place(), part=part))

    def _close(self, status: Status, *, is_written: bool) -> None:
        """End the message, if it has begun. `is_written`: all of the answer is."""
        if self.message is None:
            return
        self.message.status = status
        if is_written:
            for effect in self._unsaid:
                effect()
            self._answer.finish()
        text = self.message.transcript
        part: events.AudioContentPart | events.TextContentPart
        if self.message.is_spoken:
            self._put(events.OutputAudioDone(**self._place()))
            self._put(events.TranscriptDone(**self._place(), transcript=text))
            part = events.AudioContentPart(transcript=text)
        else:
            self._put(events.OutputTextDone(**self._place(), text=text))
            part = events.TextContentPart(text=text)
        self._put(events.ContentPartDone(**self._place(), part=part))
        self._end_item(self.message, self._index)

    def _send_calls(self) -> None:
        """Send complete calls. Half of a call is never sent, as clients might make it."""
        for done in self._calls:
            call = FunctionCall(name=done.name, arguments="", status="in_progress")
            index = len(self._output)
            self._begin_item(call)
            place: dict[str, Any] = {
                "response_id": self.id, "item_id": call.id, "output_index": index, "call_id": call.call_id
            }  # fmt: skip
            self._put(events.ArgumentsDelta(**place, delta=done.arguments))
            self._put(events.ArgumentsDone(**place, name=call.name, arguments=done.arguments))
            call.arguments, call.status = done.arguments, "completed"
            self._end_item(call, index)
        self._calls.clear()

    def _begin_item(self, item: Item) -> None:
        """Add an item after that of the response before, whatever the conversation got meanwhile."""
        index, last = len(self._output), self._output[-1] if self._output else None
        self._output.append(item)
        self._put(events.OutputItemAdded(response_id=self.id, output_index=index, item=item.wire()))
        if self._conversation is not None:
            if last is not None and self._conversation.find(last.id) is last:
                self._conversation.insert(item, last.id)
            else:
                self._conversation.append(item)
            before = self._conversation.previous_id(item)
            self._put(events.ItemAdded(previous_item_id=before, item=item.wire()))

    def _end_item(self, item: Item, index: int) -> None:
        self._put(events.OutputItemDone(response_id=self.id, output_index=index, item=item.wire()))
        if self._conversation is not None and self._conversation.find(item.id) is item:
            before = self._conversation.previous_id(item)
            self._put(events.ItemDone(previous_item_id=before, item=item.wire()))

    def _place(self) -> dict[str, Any]:
        assert self.message is not None
        return {"response_id": self.id, "item_id": self.message.id, "output_index": self._index}

    def _put(self, event: Struct) -> None:
        self._socket.put(event)

    def _end(
        self,
        status: Literal["completed", "incomplete", "cancelled", "failed"],
        reason: Reason | Literal["max_output_tokens"] | None = None,
        error: Exception | None = None,
    ) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        self._socket.drop(self)
        if self.is_shown:
            is_written = status in ("completed", "incomplete")
            self._close("completed" if status == "completed" else "incomplete", is_written=is_written)
            if is_written:
                self._send_calls()
            details = events.StatusDetails(type=status)
            if reason is not None:
                details.reason = reason
            if error is not None:
                details.error = events.FailureDetails.of(error)
            self._put(events.ResponseDone(response=self._object(status, details)))
        self._ended(self)

    def _object(
        self, status: events.ResponseStatus, details: events.StatusDetails | UnsetType = UNSET
    ) -> events.ResponseObject:
        settings, session = self.settings, self.settings.session
        made = events.ResponseObject(
            id=self.id,
            status=status,
            status_details=details,
            conversation_id=None if self._conversation is None else self._conversation.id,
            output_modalities=session.output_modalities,
            max_output_tokens=session.max_output_tokens,
            metadata=settings.metadata,
            output=[item.wire() for item in self._output],
        )
        if settings.speech is not None:
            output = msgspec.to_builtins(session.audio.output)  # without a voice if the model has none
            made.audio = {"output": {name: output[name] for name in ("format", "voice") if name in output}}
        if details is not UNSET:
            made.usage = self._usage()
        if self._done is not None:
            made.timings_ms = self._done.timings_ms
        return made

    def _usage(self) -> events.ResponseUsage:
        """Of a response that has not come to its end: what was generated until then."""
        question = self._question
        if question is None:
            return events.ResponseUsage.of(Usage())
        usage = Usage(
            prompt_tokens=sum(question.sizes),
            completion_tokens=self._num_tokens,
            audio_patches=self._num_patches,
        )
        if self._done is not None:
            usage = self._done.usage
        return events.ResponseUsage.of(
            usage,
            audio=question.num_media_tokens("audio"),
            image=question.num_media_tokens("image"),
            cached_audio=question.num_media_tokens("audio", usage.cached_tokens),
            cached_image=question.num_media_tokens("image", usage.cached_tokens),
        )
