"""`/v1/realtime`: a session that listens, answers, and stops when it is interrupted.

One task reads the client's events and handles each of them at once. Responses, decoding of media and transcripts have
tasks of their own, so that what a client says is heard while an answer is on its way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.datastructures import QueryParams

from mingc.errors import CapacityError, MingcError, RequestError, WorkerError
from mingc.prompts.conversation import MediaPart
from mingc.runtime.request import ServiceInfo, TranscriptDelta, TranscriptDone, TranscriptionRequest
from mingc.server.http.parsing import unknown_model
from mingc.server.http.routes import HttpState
from mingc.server.realtime import events
from mingc.server.realtime.input_audio import (
    BufferFull,
    Clip,
    InputAudio,
    InputEvent,
    SpeechPaused,
    SpeechResumed,
    SpeechStarted,
    SpeechStopped,
)
from mingc.server.realtime.items import (
    AudioContent,
    Conversation,
    ImageContent,
    Item,
    Turn,
    UserMessage,
    prompt_messages,
    turns_of,
)
from mingc.server.realtime.response import PATH, Places, Question, Reason, Response
from mingc.server.realtime.session import (
    ResponseSettings,
    RetentionRatio,
    Served,
    ServerVad,
    default_settings,
    new_id,
    response_settings,
    session_object,
    transcription_request,
    update,
)
from mingc.server.websocket.connection import EventSocket

log = logging.getLogger("mingc.http")

_MAX_OUT_OF_BAND = 2
_SMALL_EVENT = 1024  # bytes; it is handled also when there is no memory for more
_AUTO_RATIO = (
    0.8  # of the context is kept when the oldest turns are left out: then the prefix stays as it is for long
)
_ANSWER_SHARE = 4  # one part in so many of the context is kept free for the answer, if it may be so long
_IDLE_RETRY_S = 0.1
_LONGEST_CLIP_MS = 300_000  # of an artifact that does not say


def check_query(info: ServiceInfo, query: QueryParams) -> None:
    """Refuse what the URL asks for and is not there. Raises: RequestError."""
    if "call_id" in query:
        raise RequestError(
            "There are no calls here that a session could join: leave 'call_id' out.",
            param="call_id",
            code="unsupported_parameter",
        )
    if (model := query.get("model")) is not None and model not in info.names:
        raise unknown_model(model, info)


@dataclass(kw_only=True, slots=True, eq=False)
class _EarlyStart:
    """A response that begins in a silence that may end the user's turn, before the turn's item is in the conversation.

    `file`: of the sound that it hears.
    """

    item: UserMessage
    file: bytes
    response: Response


class RealtimeSession:
    """One session. `serve` runs it."""

    def __init__(self, state: HttpState, socket: EventSocket) -> None:
        self._state = state
        self._server = state.server
        self._socket = socket
        self._id = new_id("sess")
        self._expires_at = int(time.time() + self._server.options.max_session_s)
        self._loop = asyncio.get_running_loop()
        self._conversation = Conversation()
        self._response: Response | None = None  # of the conversation; one at a time
        self._others: set[Response] = set()  # out of band
        self._early: _EarlyStart | None = None
        self._turn_waits: float | None = None  # end of a turn that is answered after the running response
        self._turn_id: str | None = None  # item of the turn that is being spoken
        self._tasks: set[asyncio.Task[None]] = set()
        self._decoding: dict[AudioContent | ImageContent, asyncio.Task[None]] = {}
        self._transcribing: asyncio.Task[None] | None = None  # the last one
        self._num_transcript_bytes = 0  # of sound that waits for its transcript
        self._places = Places(self._server, socket)
        self._idle: asyncio.TimerHandle | None = None
        self._texts: dict[str, int] = {}  # bytes of the client's items, besides their media
        self._num_bytes = 0  # of the conversation
        self._is_closed = False
        self._resources = ExitStack()
        self._charge = self._resources.enter_context(self._server.bodies.charge())

    async def serve(self) -> None:
        """Handle the client's events until it leaves."""
        self._resources.enter_context(self._server.metrics.realtime_sessions.track_inprogress())
        try:
            await self._begin()
            while (raw := await self._socket.receive()) is not None:
                try:
                    await self._handle(raw)
                except MingcError as error:
                    self._socket.put(events.error_event(error, events.event_id_of(raw)))
        finally:
            await self._close()

    async def _begin(self) -> None:
        self._served = await self._find_served()
        info = self._served.info
        self._settings = default_settings(self._served, self._socket.query.get("model"))
        rules = self._settings.turn_detection
        longest_ms = round(info.media_limits.get("clip_seconds", _LONGEST_CLIP_MS / 1000) * 1000)
        self._input = InputAudio(
            self._settings.input_encoding, None if rules is None else rules.rules, max_ms=longest_ms
        )
        self._socket.put(events.SessionCreated(session=self._object()))

    async def _find_served(self) -> Served:
        service = self._server.service
        voices = tuple(name for each in await service.list_voices() for name in (each.name, each.id))
        return Served(info=service.info, options=self._server.options, voices=voices)

    async def _close(self) -> None:
        """Cancel everything, and wait until nothing is held."""
        self._is_closed = True
        self._set_idle(None)
        responses = [each for each in (self._response, *self._others) if each is not None]
        if self._early is not None:
            responses.append(self._early.response)
        tasks = [*self._tasks, *(each.task for each in responses)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._resources.close()

    def _object(self) -> dict[str, Any]:
        return session_object(self._settings, self._id, self._expires_at)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Events of the client

    async def _handle(self, raw: bytes) -> None:
        if len(raw) > _SMALL_EVENT:
            self._charge.set(self._num_bytes + self._input.num_bytes + len(raw))
        encoding = self._settings.input_encoding
        if len(raw) <= events.INLINE_BYTES:
            event = events.parse_event(raw, self._served, encoding)
        else:
            event = await asyncio.to_thread(events.parse_event, raw, self._served, encoding)
        if isinstance(event, events.InputAudioBufferAppend):
            for each in await self._input.append(bytes(event.audio)):
                try:
                    self._hear(each)
                except RequestError as error:
                    self._socket.put(events.error_event(error, event.event_id))
            self._charge.set(self._num_bytes + self._input.num_bytes)
            return
        if not isinstance(event, events.ItemRetrieve):
            self._drop_early()  # it knows nothing of what the client changes now
        match event:
            case events.SessionUpdate():
                self._served = await self._find_served()
                self._update(event)
            case events.InputAudioBufferCommit():
                self._conversation.check_room()
                file = self._input.commit().wav()
                self._commit(self._user_item(file), file, "commit")
            case events.InputAudioBufferClear():
                self._input.clear()
                self._turn_id = None
                self._socket.put(events.BufferCleared())
            case events.ItemCreate():
                self._conversation.insert(event.item, event.previous_item_id, taken=self._turn_id)
                self._texts[event.item.id] = len(msgspec.json.encode(event.item.wire()))
                self._show_item(event.item)
                self._decode(event.item, event.event_id)
            case events.ItemDelete():
                self._conversation.delete(event.item_id)
                self._texts.pop(event.item_id, None)
                self._socket.put(events.ItemDeleted(item_id=event.item_id))
            case events.ItemRetrieve():
                item = self._conversation.retrieve(event.item_id)
                self._socket.put(events.ItemRetrieved(item=item.wire()))
            case events.ItemTruncate():
                self._truncate(event)
            case events.ResponseCreate():
                self._served = await self._find_served()
                self._create_response(event)
            case events.ResponseCancel():
                self._cancel(event)
        self._count_bytes()

    def _count_bytes(self) -> None:
        """Charge what is kept; it may exceed the budget now, because decoded media can be larger."""
        running = (self._response, *self._others)
        self._num_bytes = self._conversation.num_media_bytes + sum(self._texts.values())
        self._num_bytes += sum(each.num_bytes for each in running if each is not None)
        # what is being read may have left the conversation
        self._num_bytes += sum(part.media.size for part in self._decoding if part.media is not None)
        self._num_bytes += self._num_transcript_bytes
        with suppress(CapacityError):
            self._charge.set(self._num_bytes + self._input.num_bytes)

    def _update(self, event: events.SessionUpdate) -> None:
        settings = update(self._settings, event.session, self._served)
        detection = settings.turn_detection
        self._input.configure(settings.input_encoding, None if detection is None else detection.rules)
        if not self._input.is_speaking:
            self._turn_id = None
        self._settings = settings
        if detection is None or detection.idle_timeout_ms is None:
            self._set_idle(None)
        self._socket.put(events.SessionUpdated(session=self._object()))

    def _truncate(self, event: events.ItemTruncate) -> None:
        index = int(event.content_index)
        item = self._conversation.spoken_item(event.item_id, index)
        if self._response is not None and self._response.message is item:
            self._stop("client_cancelled")
        before_ms = 0 if item.answer is None else item.answer.duration_ms
        end_ms = self._conversation.truncate(event.item_id, index, int(event.audio_end_ms))
        self._server.metrics.realtime_truncated_seconds.inc(max(0, before_ms - end_ms) / 1000)
        self._socket.put(events.ItemTruncated(item_id=item.id, content_index=index, audio_end_ms=end_ms))

    def _create_response(self, event: events.ResponseCreate) -> None:
        settings = response_settings(self._settings, self._served, event.response)
        if event.input is None:
            given = None
        else:
            given = [
                self._conversation.retrieve(each) if isinstance(each, str) else each for each in event.input
            ]
            for item in given:
                self._decode(item, event.event_id)
        own_bytes = sum(item.num_media_bytes for item in given or () if isinstance(item, UserMessage))
        if settings.is_out_of_band:
            if len(self._others) >= _MAX_OUT_OF_BAND:
                raise RequestError(
                    f"{_MAX_OUT_OF_BAND} responses out of band are running, the most that a session may have.",
                    code="conversation_already_has_active_response",
                )
            response = self._ask(settings, given)
            response.num_bytes = own_bytes
            self._others.add(response)
            response.show(None)
            return
        if self._response is not None:
            raise RequestError(
                f"The conversation has an active response, {self._response.id}: cancel it, or wait for its end.",
                code="conversation_already_has_active_response",
            )
        response = self._ask(settings, given)
        response.num_bytes = own_bytes
        self._start(response, time.monotonic())

    def _cancel(self, event: events.ResponseCancel) -> None:
        wanted = event.response_id
        if self._response is not None and wanted in (None, self._response.id):
            self._stop("client_cancelled")
            return
        for other in self._others:
            if other.id == wanted:
                other.stop("client_cancelled")
                return
        raise RequestError("Cancellation failed: no active response found", code="response_cancel_not_active")

    # Items

    def _show_item(self, item: Item) -> None:
        before = self._conversation.previous_id(item)
        self._socket.put(events.ItemAdded(previous_item_id=before, item=item.wire()))
        self._socket.put(events.ItemDone(previous_item_id=before, item=item.wire()))

    def _user_item(self, file: bytes) -> UserMessage:
        """An item that is not yet in the conversation. `file`: of its sound."""
        item_id = self._turn_id or new_id("item")
        media = MediaPart(kind="audio", data=file, where=f"{item_id}.content.audio")
        return UserMessage(id=item_id, content=[AudioContent(media=media)])

    def _commit(self, item: UserMessage, file: bytes, end: str) -> None:
        """Add a turn of the user to the conversation. `file`: of its sound. Raises: RequestError without room."""
        self._turn_id = None
        self._conversation.check_room()
        self._conversation.append(item)
        before = self._conversation.previous_id(item)
        self._socket.put(events.BufferCommitted(item_id=item.id, previous_item_id=before))
        self._show_item(item)
        self._decode(item, None)
        self._server.metrics.realtime_turns.labels(end).inc()
        if (settings := self._settings.transcription) is not None:
            request = transcription_request(settings, file, f"{item.id}.content.audio")
            self._transcribing = self._run(self._transcribe(item, request, self._transcribing))

    def _decode(self, item: Item, event_id: str | None) -> None:
        """Decode the media of an item, so that prompts have features and a bad file is known early."""
        if not isinstance(item, UserMessage):
            return
        for part in item.media:
            if part not in self._decoding and part.media is not None and not _is_decoded(part.media):
                task = self._decoding[part] = self._run(self._decode_part(item, part, event_id))
                task.add_done_callback(partial(self._forget, part))

    def _forget(self, part: AudioContent | ImageContent, _: object) -> None:
        del self._decoding[part]
        self._count_bytes()

    async def _decode_part(
        self, item: UserMessage, part: AudioContent | ImageContent, event_id: str | None
    ) -> None:
        media = part.media
        assert media is not None
        try:
            decoded = await self._server.service.decode_media(media)
        except Exception as error:
            if not isinstance(error, MingcError):
                log.exception("%s: unexpected error", PATH)
            part.media = None
            self._socket.put(events.error_event(error, event_id))
            return
        if part.media is media:
            part.media = decoded
            self._conversation.limit_media(item)

    async def _transcribe(
        self, item: UserMessage, request: TranscriptionRequest, before: asyncio.Task[None] | None
    ) -> None:
        """Send the transcript of a turn, after that of the turn before."""
        server = self._server
        num_bytes = len(request.audio)
        self._num_transcript_bytes += num_bytes
        texts: list[str] = []
        done: TranscriptDone | None = None
        try:
            if before is not None:
                await asyncio.wait((before,))
            async with (
                self._places.transcribe(request.topic),
                aclosing(server.service.transcribe(request)) as transcript,
            ):
                async for event in server.metrics.count_transcript(transcript):
                    if isinstance(event, TranscriptDelta):
                        texts.append(event.text)
                        self._socket.put(events.TranscriptionDelta(item_id=item.id, delta=event.text))
                    elif isinstance(event, TranscriptDone):
                        done = event
            if done is None:
                raise WorkerError("The model stopped before the transcript was complete.", code="unfinished")
            text = "".join(texts)
            for part in item.content:
                if isinstance(part, AudioContent):
                    part.transcript = text
            usage = events.TranscriptionUsage.of(done.usage, done.audio_tokens)
            self._socket.put(events.TranscriptionCompleted(item_id=item.id, transcript=text, usage=usage))
        except Exception as error:
            if not isinstance(error, MingcError):
                log.exception("%s: unexpected error", PATH)
            failure = events.FailureDetails.of(error)
            self._socket.put(events.TranscriptionFailed(item_id=item.id, error=failure))
        finally:
            self._num_transcript_bytes -= num_bytes
            self._count_bytes()

    # Turns of the user

    def _hear(self, event: InputEvent) -> None:
        """React to what was found in the input audio."""
        detection = self._settings.turn_detection
        match event:
            case SpeechStarted(start_ms=start_ms):
                self._set_idle(None)
                self._turn_id = new_id("item")
                interrupted = None
                if detection is not None and detection.interrupt_response:
                    interrupted = self._response
                if interrupted is not None:
                    self._socket.drop(interrupted)
                started = events.SpeechStartedEvent(item_id=self._turn_id, audio_start_ms=start_ms)
                self._socket.put(started)
                if interrupted is not None:
                    self._stop("turn_detected")
            case SpeechPaused(audio=clip):
                if detection is not None and detection.create_response and self._response is None:
                    self._start_early(clip)
            case SpeechResumed():
                self._drop_early()
            case SpeechStopped():
                self._end_turn(event)
            case BufferFull(audio=clip):
                file = clip.wav()
                self._commit(self._user_item(file), file, "commit")

    def _end_turn(self, event: SpeechStopped) -> None:
        detection, file = self._settings.turn_detection, event.audio.wav()
        assert detection is not None and self._turn_id is not None
        now = time.monotonic()
        self._socket.put(events.SpeechStoppedEvent(item_id=self._turn_id, audio_end_ms=event.end_ms))
        if not self._conversation.has_room:
            self._drop_early()
        early, self._early = self._early, None
        if early is not None and (early.response.is_ended or early.file != file):
            self._drop(early)
            early = None
        item = self._user_item(file) if early is None else early.item
        self._commit(item, file, "server_vad" if isinstance(detection, ServerVad) else "semantic_vad")
        if early is not None:
            self._server.metrics.realtime_early_starts.labels("used").inc()
            self._start(early.response, now)
        elif detection.create_response and not event.is_cut:  # else the end of the next turn answers both
            if self._response is None:
                self._answer_turn(now)
            else:
                self._turn_waits = now

    def _start_early(self, clip: Clip) -> None:
        """Begin the response to a turn that may end here. Nobody hears of it before it does."""
        file = clip.wav()
        item = self._user_item(file)
        self._drop_early()
        self._decode(item, None)
        self._early = _EarlyStart(
            item=item,
            file=file,
            response=self._ask(response_settings(self._settings, self._served), None, item),
        )

    def _drop_early(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            self._drop(early)

    def _drop(self, early: _EarlyStart) -> None:
        is_refused = early.response.is_ended
        self._server.metrics.realtime_early_starts.labels("refused" if is_refused else "dropped").inc()
        early.response.stop("turn_detected")

    # Responses

    def _answer_turn(self, turn_end: float) -> None:
        self._start(self._ask(response_settings(self._settings, self._served), None), turn_end)

    def _start(self, response: Response, turn_end: float) -> None:
        """Make a response that of the conversation."""
        self._set_idle(None)
        self._response = response
        response.show(turn_end)

    def _stop(self, reason: Reason) -> None:
        """End the response of the conversation."""
        assert self._response is not None
        self._server.metrics.realtime_interruptions.labels(reason).inc()
        self._response.stop(reason)

    def _ended(self, response: Response) -> None:
        self._tasks.add(response.task)
        response.task.add_done_callback(self._tasks.discard)
        self._others.discard(response)
        if response is not self._response or self._is_closed:
            return
        self._response = None
        waits, self._turn_waits = self._turn_waits, None
        if waits is not None:
            self._answer_turn(waits)
        else:
            self._set_idle(response)

    def _ask(
        self, settings: ResponseSettings, given: list[Item] | None, newest: UserMessage | None = None
    ) -> Response:
        """A response that is not shown yet. `given`: what it is asked; None: the conversation, and `newest`."""
        items = list(self._conversation.items) if given is None else given
        items += [] if newest is None else [newest]
        conversation = None if settings.is_out_of_band else self._conversation
        return Response(
            self._state,
            self._socket,
            self._places,
            settings,
            conversation,
            lambda: self._question(settings, items, is_whole=given is None),
            self._ended,
        )

    async def _question(self, settings: ResponseSettings, items: list[Item], *, is_whole: bool) -> Question:
        """What a response is asked: as many of the last turns as there is room for."""
        pending = [
            self._decoding[part]
            for item in items
            if isinstance(item, UserMessage)
            for part in item.media
            if part in self._decoding
        ]
        if pending:
            await asyncio.wait(pending)
        turns = turns_of(items)
        instructions = settings.session.instructions
        messages = prompt_messages(turns, instructions, settings.instructions)
        request = settings.request(new_id("realtime"), messages)
        sizes = list(await self._server.service.count_tokens(request))
        if is_whole and (left_out := self._excess(settings, turns, sizes)):
            if not settings.is_out_of_band:
                self._conversation.leave_out(item for turn in left_out for item in turn.items)
            gone = {id(turn) for turn in left_out}
            kept = [turn for turn in turns if id(turn) not in gone]
            messages = prompt_messages(kept, instructions, settings.instructions)
            request = settings.request(request.request_id, messages)
            sizes = list(await self._server.service.count_tokens(request))
        return Question(request=request, sizes=sizes)

    def _excess(self, settings: ResponseSettings, turns: list[Turn], sizes: list[int]) -> list[Turn]:
        """The oldest turns, of which there is no room in the prompt."""
        truncation, context = settings.session.truncation, self._served.info.max_model_len
        if context is None or truncation == "disabled":
            return []
        limit = context - min(settings.sampling.max_tokens, context // _ANSWER_SHARE)
        base, ratio = sizes[0], _AUTO_RATIO
        if isinstance(truncation, RetentionRatio):
            ratio = truncation.retention_ratio
            limits = truncation.token_limits
            if limits is not UNSET and limits.post_instructions is not UNSET:
                limit = min(limit, base + limits.post_instructions)
        total = sum(sizes)
        if total <= limit:
            return []
        left_out: list[Turn] = []
        last = max((index for index, turn in enumerate(turns) if turn.message.role == "user"), default=0)
        first = 1 + bool(settings.session.instructions)  # after the template and the instructions
        for turn, size in zip(turns[:last], sizes[first:], strict=False):
            if turn.message.role == "user" and total <= base + ratio * (limit - base):
                break
            if turn.message.role != "system":
                left_out.append(turn)
                total -= size
        return left_out

    # Silence

    def _set_idle(self, response: Response | None) -> None:
        """Wait for the user, who hears the end of a response, or no longer (None)."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        detection = self._settings.turn_detection
        limit_ms = None if detection is None else detection.idle_timeout_ms
        if response is None or limit_ms is None or self._input.is_speaking:
            return
        unplayed_s = max(0.0, response.played_until - self._loop.time())
        since_ms = self._input.now_ms + round(unplayed_s * 1000)
        self._idle = self._loop.call_later(unplayed_s + limit_ms / 1000, self._time_out, since_ms)

    def _time_out(self, since_ms: int) -> None:
        if (idle := self._input.idle(since_ms)) is None:  # somebody may begin to speak
            self._idle = self._loop.call_later(_IDLE_RETRY_S, self._time_out, since_ms)
            return
        file = idle.audio.wav()
        item = self._user_item(file)
        triggered = events.TimeoutTriggered(
            item_id=item.id, audio_start_ms=idle.start_ms, audio_end_ms=idle.end_ms
        )
        self._socket.put(triggered)
        try:
            self._commit(item, file, "idle_timeout")
        except RequestError as error:
            self._socket.put(events.error_event(error))
            return
        self._answer_turn(time.monotonic())


def _is_decoded(part: MediaPart) -> bool:
    return not isinstance(part.data, str | bytes | memoryview)
