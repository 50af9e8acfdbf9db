"""`/v1/audio/speech/stream`: text that another model is writing goes in, its speech comes out while it is generated.

The events have vLLM-Omni's names. One WebSocket carries any number of utterances, which are spoken one after the other.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from mingc.errors import CapacityError, MingcError, RequestError
from mingc.runtime.request import AudioDelta, Done, FinishReason, SpeechRequest
from mingc.runtime.voices import voice_not_found
from mingc.server.http.body import decode_body
from mingc.server.http.field_errors import invalid, shorten, too_long
from mingc.server.http.parsing import ParsedSpeech, parse_speech
from mingc.server.http.response_schemas import SpeechUsage, speech_done
from mingc.server.http.routes import HttpState
from mingc.server.http.streaming import until_done
from mingc.server.key_limits import SECONDS_PER_BYTE, KeyUse
from mingc.server.websocket.connection import EventSocket, error_event

log = logging.getLogger("mingc.http")

PATH = "/v1/audio/speech/stream"
_MAX_WAITING = 64  # utterances whose speech has not ended
_BYTES = 8  # at most, that a character of a waiting text takes

Status = Literal["completed", "cancelled", "failed"]


class ClientEvent(Struct):
    """What all events of a client have."""

    type: str


class InputText(Struct, forbid_unknown_fields=True):
    type: str
    text: str


class SessionSwitches(Struct):
    """Fields of `session.config` that a speech request does not have.

    `split_granularity`: `clause` ends the first segment with a clause, so that speech starts early; the others speak as
    `/v1/audio/speech` does.
    """

    split_granularity: Literal["none", "sentence", "clause"] | None = None
    stream_audio: bool | None = None


class AudioStart(Struct, kw_only=True, tag_field="type", tag="audio.start"):
    """The binary messages that follow, joined, are the audio of an utterance. `sentence_text`: its text so far."""

    utterance_index: int
    sentence_index: int = 0
    sentence_text: str
    format: str
    sample_rate: int


class AudioDone(Struct, kw_only=True, tag_field="type", tag="audio.done"):
    utterance_index: int
    sentence_index: int = 0
    total_bytes: int
    error: bool = False


class SessionDone(Struct, kw_only=True, tag_field="type", tag="session.done"):
    """Last event of an utterance, however it ends. `finish_reason` `length`: its speech was cut at a limit."""

    utterance_index: int
    total_sentences: int = 0
    status: Status = "completed"
    finish_reason: FinishReason | UnsetType = UNSET
    usage: SpeechUsage | UnsetType = UNSET


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionConfig:
    """How the utterances that begin from now on are spoken; `starts_early`: see `Service.stream_speech`."""

    speech: ParsedSpeech
    format: str
    starts_early: bool


@dataclass(kw_only=True, slots=True, eq=False)
class _Utterance:
    """One text. `deltas` ends with None, or with an error that the client made; `text` is all of it that has come."""

    index: int
    config: SessionConfig
    deltas: asyncio.Queue[str | MingcError | None] = field(default_factory=asyncio.Queue)
    text: str = ""
    is_done: bool = False  # its `session.done` is queued
    task: asyncio.Task[None] | None = None


class SpeechSession:
    """One session. `serve` runs it."""

    def __init__(self, state: HttpState, socket: EventSocket) -> None:
        self._state = state
        self._socket = socket
        self._config: SessionConfig | None = None
        self._num_utterances = 0
        self._input: _Utterance | None = None  # takes the next text
        self._utterances: list[_Utterance] = []  # some of whose events may not have been sent
        self._resources = ExitStack()
        self._charge = self._resources.enter_context(state.bodies.charge())
        self._is_closing = False

    async def serve(self) -> None:
        """Handle the client's events until it leaves."""
        try:
            while (raw := await self._socket.receive()) is not None:
                try:
                    if not self._is_closing:
                        await self._handle(raw)
                except MingcError as error:
                    self._socket.put(error_event(error))
        finally:
            self._resources.close()
            await self._stop(self._utterances)

    async def _handle(self, raw: bytes) -> None:
        match decode_body(raw, ClientEvent).type:
            case "session.config":
                if self._input is not None:
                    raise RequestError(
                        "'session.config' came while a text is open: send 'input.done' before.",
                        param="type",
                        code="utterance_open",
                    )
                config = self._parse_config(raw)
                await self._check_voice(config.speech.speech.voice)
                self._config = config
            case "input.text":
                self._add(decode_body(raw, InputText).text)
            case "input.done":
                if (utterance := self._open_input()) is not None:
                    utterance.deltas.put_nowait(None)
                self._input = None
            case "input.cancel":
                await self._cancel()
            case "session.close":
                self._is_closing = True
                if self._input is not None:
                    self._input.deltas.put_nowait(None)
                tasks = [each.task for each in self._utterances if each.task is not None]
                closing = asyncio.gather(*tasks, return_exceptions=True)
                closing.add_done_callback(lambda _: self._socket.end(1000, ""))
            case other:
                raise RequestError(
                    f"There is no event {shorten(other)}.", param="type", code="unsupported_event"
                )

    def _parse_config(self, raw: bytes) -> SessionConfig:
        """The fields are those of a speech request, whose checks they pass, and `SessionSwitches`."""
        switches = decode_body(raw, SessionSwitches)
        if switches.stream_audio is False:
            raise invalid("stream_audio", "is false, but audio is always sent while it is generated")
        fields = msgspec.json.decode(raw, type=dict[str, Raw])
        for name in ("input", "stream", "stream_format", "ref_audio", "ref_text"):
            if name in fields:
                raise RequestError(
                    f"'{name}' is no field of 'session.config'.", param=name, code="unknown_parameter"
                )
        for name in ("type", "split_granularity", "stream_audio"):
            fields.pop(name, None)
        body = {"response_format": Raw(b'"pcm"'), **fields, "input": Raw(b'"x"'), "stream": Raw(b"true")}
        server = self._state.server
        parsed = parse_speech(msgspec.json.encode(body), server.service.info, server.options)
        if not parsed.audio.is_playable_in_parts:
            raise invalid("response_format", "cannot be sent while it is generated: use 'pcm' or 'wav'")
        return SessionConfig(
            speech=parsed,
            format=msgspec.json.decode(body["response_format"]) or "wav",
            starts_early=switches.split_granularity in (None, "clause"),
        )

    async def _check_voice(self, name: str | None) -> None:
        """Raises: RequestError now, not when the first text is spoken, for a voice that nobody has uploaded."""
        service = self._state.server.service
        if name is None or name in service.info.voices:
            return
        voices = await service.list_voices()
        if not any(name in (each.name, each.id) for each in voices):
            raise voice_not_found(name, [each.name for each in voices])

    def _open_input(self) -> _Utterance | None:
        """The utterance that takes text, or a new one. None if too many wait; the WebSocket is closed then."""
        if self._input is not None:
            return self._input
        if self._config is None:
            self._config = self._parse_config(b"{}")
        if self._socket.is_empty:
            self._utterances = [each for each in self._utterances if not each.is_done]
        if sum(not each.is_done for each in self._utterances) >= _MAX_WAITING:
            self._socket.end(1008, f"{_MAX_WAITING} utterances wait to be spoken")
            return None
        utterance = _Utterance(index=self._num_utterances, config=self._config)
        self._num_utterances += 1
        before = self._utterances[-1].task if self._utterances else None
        self._utterances.append(utterance)
        utterance.task = asyncio.create_task(self._speak(utterance, before))
        self._input = utterance
        return utterance

    def _add(self, text: str) -> None:
        """Add to the open text. One that becomes too long fails as a whole: half of it is not what was meant."""
        if not text or (utterance := self._open_input()) is None or utterance.is_done:
            return  # a text that has failed may go on, because the client may not know yet
        limit = self._state.server.options.max_speech_characters
        if len(utterance.text) + len(text) > limit:
            utterance.deltas.put_nowait(too_long("text", limit))
            return
        utterance.text += text
        utterance.deltas.put_nowait(text)
        try:
            self._charge.set(_BYTES * sum(len(each.text) for each in self._utterances if not each.is_done))
        except CapacityError as error:
            utterance.deltas.put_nowait(error)

    async def _cancel(self) -> None:
        """End all utterances; what has not been sent of them is taken back."""
        self._input = None
        utterances, self._utterances = self._utterances, []
        await self._stop(utterances)
        for each in utterances:
            if self._socket.drop(each) or not each.is_done:
                self._socket.put(SessionDone(utterance_index=each.index, status="cancelled"))

    async def _stop(self, utterances: list[_Utterance]) -> None:
        """Cancel the speech of utterances, and wait until nothing is held for them."""
        tasks = [each.task for each in utterances if each.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _speak(self, utterance: _Utterance, before: asyncio.Task[None] | None) -> None:
        """Speak one utterance after the one before."""
        if before is not None:
            await asyncio.wait((before,))
        done = SessionDone(utterance_index=utterance.index, status="failed")
        try:
            first = await utterance.deltas.get()
            if first is None:
                done.status = "completed"
            else:
                await self._generate(utterance, first, done)
        except asyncio.CancelledError:
            self._state.server.metrics.requests_cancelled.labels(PATH).inc()
            raise
        except Exception as error:
            if not isinstance(error, MingcError):
                log.exception("%s: unexpected error", PATH)
            if not isinstance(error, RequestError):
                self._state.server.metrics.stream_errors.labels(PATH).inc()
            self._socket.put(error_event(error), utterance)
        self._socket.put(done, utterance)
        utterance.is_done = True

    async def _generate(self, utterance: _Utterance, first: str | MingcError, done: SessionDone) -> None:
        """Send the audio of a text that begins with `first`, and note in `done` how it ended."""
        server, socket = self._state.server, self._socket
        config, spec = utterance.config, utterance.config.speech.audio
        timer = server.metrics.timer()
        request = SpeechRequest(
            request_id=f"speech-{uuid.uuid4().hex[:24]}",
            text="",
            speech=config.speech.speech,
            is_live=True,
            priority=config.speech.priority,
        )
        with ExitStack() as place, self._state.stream(spec) as clip:
            place.enter_context(server.metrics.request_duration.labels(PATH).time())
            key = place.enter_context(server.key_limits.admit(socket.key))
            place.enter_context(server.admit())
            place.enter_context(socket.running())
            total_bytes = 0

            async def send(data: bytes) -> None:
                nonlocal total_bytes
                if not total_bytes:
                    start = AudioStart(
                        utterance_index=utterance.index,
                        sentence_text=utterance.text,
                        format=config.format,
                        sample_rate=spec.sample_rate,
                    )
                    await socket.send(start, utterance)
                total_bytes += len(data)
                await socket.send(data, utterance)

            speech = server.service.stream_speech(
                request, self._deltas(utterance, first, key), starts_early=config.starts_early
            )
            async with timer.measure(speech) as events:
                async for event in until_done(events):
                    if isinstance(event, AudioDelta) and (data := await clip.add(event.samples)):
                        await send(data)
                    elif isinstance(event, Done):
                        async for data in clip.rest():
                            await send(data)
                        done.status, done.finish_reason = "completed", event.finish_reason
                        done.total_sentences, done.usage = 1, speech_done(event.usage).usage
        await socket.send(AudioDone(utterance_index=utterance.index, total_bytes=total_bytes), utterance)

    async def _deltas(
        self, utterance: _Utterance, first: str | MingcError, key: KeyUse
    ) -> AsyncIterator[str]:
        """The pieces of the text, counted for the client's API key.

        Raises: RequestError when none comes for the time of a body, CapacityError beyond the limits of the key.
        """
        limit_s = self._state.server.options.body_timeout_s
        num_bytes = counted = 0
        text: str | MingcError | None = first
        while text is not None:
            if isinstance(text, MingcError):
                raise text
            num_bytes += len(text.encode())
            seconds = round(num_bytes * SECONDS_PER_BYTE)
            key.add("--key-max-audio-seconds", seconds - counted)
            counted = seconds
            yield text
            try:
                async with asyncio.timeout(limit_s):
                    text = await utterance.deltas.get()
            except TimeoutError as error:
                raise RequestError(
                    f"No text came for {limit_s:g} s, and no 'input.done'.", status=408, code="body_timeout"
                ) from error
