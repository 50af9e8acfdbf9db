"""The routes that run the model or its tokenizer, as ASGI apps: admission, the body, the response, cancellation.

`parsing` checks the body, `streaming` writes the response.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, aclosing, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from mingc.errors import CapacityError, MingcError, RequestError
from mingc.prompts.conversation import MediaPart
from mingc.prompts.conversation import Message as ConversationMessage
from mingc.prompts.tokenizer import TextTokenizer
from mingc.prompts.transcription import MAX_TRANSCRIPT_TOKENS, SEGMENTS_AHEAD
from mingc.runtime.request import (
    ChatRequest,
    SamplingParams,
    Service,
    ServiceInfo,
    SpeechParams,
    SpeechRequest,
    TextRequest,
    TranscriptDelta,
    TranscriptionRequest,
    TranscriptSegment,
)
from mingc.runtime.voices import VoiceSample
from mingc.server import tracing
from mingc.server.audio_format import AudioSpec
from mingc.server.body_budget import BodyBudget, Charge
from mingc.server.error_objects import error_response, public_error
from mingc.server.http.body import JSON, media_type, read_body
from mingc.server.http.clips import AnswerBudget, KeptClip, LiveClip
from mingc.server.http.field_errors import invalid, shorten
from mingc.server.http.forms import FORM
from mingc.server.http.media import MediaLoader
from mingc.server.http.parsing import (
    no_speech,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_speech,
    parse_tokenize,
    parse_voice,
)
from mingc.server.http.pictures import (
    PICTURE_BYTES,
    ParsedPictures,
    chat_picture_chunks,
    chat_pictures,
    most_tokens,
    parse_edit,
    parse_generation,
    picture_events,
    whole_pictures,
)
from mingc.server.http.request_schemas import MAX_RECORDING_S, MAX_REF_TEXT, MAX_SAMPLE_BYTES
from mingc.server.http.response_schemas import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    Detokenized,
    TokenList,
    sse,
    voice_object,
)
from mingc.server.http.streaming import (
    SSE,
    ResponseWriter,
    SegmentTimes,
    chat_chunks,
    chat_completion,
    completion,
    completion_chunks,
    speech_clip,
    speech_events,
    speech_parts,
)
from mingc.server.http.transcriptions import parse_transcription, transcript_events, whole_transcript
from mingc.server.key_limits import KeyUse
from mingc.server.metrics import route_of
from mingc.server.options import ServeOptions
from mingc.server.origins import check_origin
from mingc.server.state import ServerState

log = logging.getLogger("mingc.http")

_MAX_TRANSCRIPTS = 1000  # of recordings that requests bring along
_EMPTY = memoryview(b"")
_PARSED_INLINE = 64 * 1024  # bytes that are parsed faster than they are handed to a thread
Parsed = TypeVar("Parsed")
Parse = Callable[[memoryview, ServiceInfo, ServeOptions], Parsed]


@dataclass(kw_only=True, slots=True)
class HttpState:
    """Objects that the routes of one app share, besides the state of the server."""

    server: ServerState
    media: MediaLoader
    bodies: BodyBudget
    answers: AnswerBudget
    # One thread: large bodies are decoded while holding Python's lock, which the event loop gets after each.
    _parser: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="mingc-parse"), init=False
    )

    _words: dict[bytes, str] = field(default_factory=dict, init=False)  # of recordings, by their hash

    @classmethod
    def of(cls, server: ServerState) -> HttpState:
        options = server.options
        return cls(
            server=server,
            media=MediaLoader(options),
            bodies=server.bodies,
            answers=AnswerBudget(options.max_total_answer_bytes, server.metrics),
        )

    def stream(
        self, spec: AudioSpec, text: str | None = None
    ) -> AbstractContextManager[LiveClip] | AbstractContextManager[KeptClip]:
        """The clip of a streamed answer. `text`: see `AnswerBudget.keep`."""
        return closing(LiveClip(spec)) if spec.is_playable_in_parts else self.answers.keep(spec, text)

    async def load_recording(self, speech: SpeechParams, key: KeyUse, prefix: str) -> SpeechParams:
        """`speech` with the bytes of a recording that a request brings along, and its words.

        `prefix`: the path of its fields in the request.
        """
        sample = speech.reference
        if not isinstance(sample, VoiceSample) or not isinstance(sample.recording, str):
            return speech
        part = MediaPart(kind="audio", data=sample.recording, where=f"{prefix}ref_audio")
        recording = await self.media.load_one(part, MAX_SAMPLE_BYTES)
        sample = replace(sample, recording=recording)
        if not sample.transcript and self.server.service.info.has_audio_input:
            digest = hashlib.sha256(recording).digest()
            if digest not in self._words:
                words = (await transcribed(self.server.service, sample, key)).transcript or ""
                while len(self._words) >= _MAX_TRANSCRIPTS:
                    del self._words[next(iter(self._words))]
                self._words[digest] = words
            sample = replace(sample, transcript=self._words[digest])
        return replace(speech, reference=sample)

    async def parse(self, parse: Parse[Parsed], raw: memoryview) -> Parsed:
        """Parse a body: a large one outside of the event loop."""
        info, options = self.server.service.info, self.server.options
        if len(raw) <= _PARSED_INLINE:
            return parse(raw, info, options)
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse, raw, info, options)


Handler = Callable[[HttpState, "RequestBody", ResponseWriter], Awaitable[None]]


@dataclass(kw_only=True, slots=True)
class RequestBody:
    """The body of a request, its charge, and what it adds to its API key's sums.

    `take` drops the body, so that it is freed once it is parsed. `content_type` has the boundary of a form.
    """

    charge: Charge
    key: KeyUse
    content_type: str = JSON
    raw: memoryview = _EMPTY

    def take(self) -> memoryview:
        raw, self.raw = self.raw, _EMPTY
        return raw


class GenerationRoute:
    """ASGI app of one route that runs the model. `handler` receives the raw body and writes the response.

    `types`: the media types that the body may have. Web pages may send a form, and bytes without a type, without asking
    first, so their origin is checked.
    """

    def __init__(self, state: HttpState, handler: Handler, *types: str) -> None:
        self._state = state
        self._handler = handler
        self._types = types

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, server, route = self._state, self._state.server, route_of(scope)
        request = Request(scope, receive)
        if FORM in self._types or "content-type" not in request.headers:
            check_origin(request.headers, server.options.cors_origins)
        if scope.get("state", {}).get("is_probe"):
            raise CapacityError("All connections are in use; try again later.", code="too_many_connections")
        with ExitStack() as place:
            place.enter_context(server.metrics.request_duration.labels(route).time())
            key = place.enter_context(server.key_limits.admit(scope.get("state", {}).get("api_key")))
            place.enter_context(server.admit())
            body = RequestBody(
                charge=place.enter_context(state.bodies.charge()),
                key=key,
                content_type=request.headers.get("content-type", JSON),
            )
            try:
                body.raw = await read_body(request, server.options, state.bodies, body.charge, *self._types)
            except ClientDisconnect:
                server.metrics.requests_cancelled.labels(route).inc()
                return
            response = ResponseWriter(send, before_end=place.close)
            try:
                if not await run_while_connected(self._run(body, response, route), receive, response):
                    server.metrics.requests_cancelled.labels(route).inc()
            except asyncio.CancelledError:
                if not server.is_stopping:
                    raise
                log.warning("%s: aborted by shutdown", route)

    async def _run(self, body: RequestBody, response: ResponseWriter, route: str) -> None:
        try:
            await self._handler(self._state, body, response)
        except Exception as error:
            # A bug is logged and answered here: raised to the server, it would close the connection after the
            # response, and with it the client's next request.
            if not isinstance(error, MingcError):
                log.exception("%s: unexpected error", route)
            if not response.is_started:
                raise public_error(error) from error
            # the status was sent: an event stream can still report the error, raw audio can only break off
            tracing.fail(error)
            log.warning("%s: stream ended by %s", route, type(error).__name__)
            self._state.server.metrics.stream_errors.labels(route).inc()
            if response.is_sse:
                await response.end_with_event(sse(error_response(error)))


async def run_while_connected(
    work: Coroutine[None, None, None], receive: Receive, response: ResponseWriter
) -> bool:
    """Run `work`; cancel it when the client leaves. Returns False if it was cancelled."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if response.is_ended:  # servers also report a disconnect at the end of every response
            await asyncio.wait((task,))
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait((task, gone))
    if task.cancelled():
        return False
    task.result()
    return True


async def _wait_for_disconnect(receive: Receive) -> None:
    message: Message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()


async def handle_chat(state: HttpState, body: RequestBody, response: ResponseWriter) -> None:
    """`POST /v1/chat/completions`."""
    server = state.server
    timer = server.metrics.timer()
    parsed = await state.parse(parse_chat, body.take())
    request, audio = parsed.request, parsed.audio
    texts = [message.prompt_text for message in request.messages]
    if parsed.drawing is not None:
        texts.append(parsed.drawing.negative_prompt or "")
    num_tokens = request.sampling.max_tokens * request.num_answers
    body.key.add_text(
        "".join((*texts, *(tool.definition for tool in request.tools.tools))),
        num_tokens if parsed.drawing is None else most_tokens(parsed.drawing),
        is_spoken=request.speech is not None,
    )
    stream, include_usage, drawing = parsed.stream, parsed.include_usage, parsed.drawing
    del parsed  # its base64, which is decoded now
    request = await _load_media(state, request, body)
    builder = ChatResponseBuilder(
        request_id=request.request_id, model=server.service.info.model, include_usage=include_usage
    )
    if drawing is not None:
        drawing = replace(drawing, messages=request.messages, reference=_newest_picture(request.messages))
        with state.answers.reserve(drawing.num_pictures * PICTURE_BYTES):
            async with timer.measure(server.service.draw(drawing)) as pictures:
                if stream:
                    await response.send_stream(SSE, chat_picture_chunks(pictures, builder))
                else:
                    await response.send_data(JSON, await chat_pictures(pictures, builder))
        return
    options: Any = {"num_answers": request.num_answers, "tokenizer": _tokenizer_for(server, request)}
    if stream:
        with nullcontext() if audio is None else state.stream(audio) as clip:
            async with timer.measure(server.service.answers(request)) as answers:
                await response.send_stream(SSE, chat_chunks(answers, builder, clip, **options))
    else:
        with nullcontext() if audio is None else state.answers.keep(audio) as kept:
            async with timer.measure(server.service.answers(request)) as answers:
                whole = await chat_completion(answers, builder, kept, **options)
            await response.send_whole(JSON, *whole)


def _newest_picture(messages: Sequence[ConversationMessage]) -> MediaPart | None:
    """The first picture of the user's last message, which a drawing changes."""
    last = next((each for each in reversed(messages) if each.role == "user"), None)
    parts = () if last is None else last.parts
    return next((each for each in parts if isinstance(each, MediaPart) and each.kind == "image"), None)


async def _load_media(state: HttpState, request: ChatRequest, body: RequestBody) -> ChatRequest:
    messages = await state.media.load(request.messages)
    speech = request.speech
    if speech is not None:
        speech = await state.load_recording(speech, body.key, "audio.")
    body.charge.set(sum(message.size for message in messages) + _recording_size(speech))
    return replace(request, messages=messages, speech=speech)


def _recording_size(speech: SpeechParams | None) -> int:
    sample = None if speech is None else speech.reference
    return len(sample.recording) if isinstance(sample, VoiceSample) else 0


def _tokenizer_for(server: ServerState, request: TextRequest) -> TextTokenizer | None:
    """The tokenizer if log probabilities are requested."""
    return None if request.sampling.num_logprobs is None else server.service.tokenizer


async def handle_completion(state: HttpState, body: RequestBody, response: ResponseWriter) -> None:
    """`POST /v1/completions`."""
    server = state.server
    timer = server.metrics.timer()
    parsed = await state.parse(parse_completion, body.take())
    request, shown = parsed.request, parsed.shown_prompt
    body.key.add_text(request.prompt, request.sampling.max_tokens * request.num_answers)
    if not isinstance(shown, str):
        shown = await _detokenize(server.service.tokenizer, shown, "prompt")
    builder = CompletionResponseBuilder(
        request_id=request.request_id, model=server.service.info.model, include_usage=parsed.include_usage
    )
    options: Any = {
        "num_answers": request.num_answers,
        "shown_prompt": shown,
        "tokenizer": _tokenizer_for(server, request),
    }
    async with timer.measure(server.service.answers(request)) as answers:
        if parsed.stream:
            await response.send_stream(SSE, completion_chunks(answers, builder, **options))
        else:
            await response.send_whole(JSON, *await completion(answers, builder, **options))


async def handle_tokenize(state: HttpState, body: RequestBody, response: ResponseWriter) -> None:
    """`POST /tokenize`."""
    service = state.server.service
    prompt, with_names = await state.parse(parse_tokenize, body.take())
    if not isinstance(prompt, str):
        prompt = await _load_media(state, replace(prompt, speech=None), body)
    tokens = list(await service.tokenize(prompt))
    names = None
    if with_names:
        names = await asyncio.to_thread(lambda: [service.tokenizer.token_name(token) for token in tokens])
    await response.send_object(
        TokenList(
            count=len(tokens), max_model_len=service.info.max_model_len, tokens=tokens, token_strs=names
        )
    )


async def handle_detokenize(state: HttpState, body: RequestBody, response: ResponseWriter) -> None:
    """`POST /detokenize`."""
    tokens = await state.parse(parse_detokenize, body.take())
    text = await _detokenize(state.server.service.tokenizer, tokens, "tokens")
    await response.send_object(Detokenized(text))


async def _detokenize(tokenizer: TextTokenizer, tokens: Sequence[int], param: str) -> str:
    """The text of tokens, with the names of special ones. Raises: RequestError naming an unknown one."""

    def decode() -> str:
        for index, token in enumerate(tokens):
            if not tokenizer.token_name(token):
                raise invalid(f"{param}[{index}]", f"is {token}, which is not the id of a token")
        return tokenizer.decode(tokens, skip_special_tokens=False)

    return await asyncio.to_thread(decode)


async def handle_transcription(state: HttpState, body: RequestBody, response: ResponseWriter) -> None:
    """`POST /v1/audio/transcriptions`. The file is a view of the body, so the body stays charged."""
    server = state.server
    parse = partial(parse_transcription, content_type=body.content_type)
    parsed = await state.parse(parse, body.take())
    # so many answers are written at a time
    body.key.add_text(parsed.prompt_text * SEGMENTS_AHEAD, MAX_TRANSCRIPT_TOKENS * SEGMENTS_AHEAD)
    request = replace(parsed.request, request_id=f"transcript-{uuid.uuid4().hex[:24]}")
    tokenizer = server.service.tokenizer if parsed.has_logprobs else None
    async with aclosing(server.service.transcribe(request)) as events:
        counted = server.metrics.count_transcript(events)
        if parsed.stream:
            await response.send_stream(SSE, transcript_events(counted, tokenizer))
        else:
            content_type, data = await whole_transcript(counted, parsed, tokenizer)
            await response.send_data(content_type, data)


async def handle_generation(state: HttpState, body: RequestBody, response: ResponseWriter) -> None:
    """`POST /v1/images/generations`."""
    await _draw(state, body, response, parse_generation)


async def handle_edit(state: HttpState, body: RequestBody, response: ResponseWriter) -> None:
    """`POST /v1/images/edits`."""
    await _draw(state, body, response, partial(parse_edit, content_type=body.content_type))


async def _draw(
    state: HttpState, body: RequestBody, response: ResponseWriter, parse: Parse[ParsedPictures]
) -> None:
    timer = state.server.metrics.timer()
    parsed = await state.parse(parse, body.take())
    request = parsed.request
    texts = (*(each.prompt_text for each in request.messages), request.negative_prompt or "")
    body.key.add_text("".join(texts), most_tokens(request))
    messages = await state.media.load(request.messages)
    if media_type(body.content_type) == JSON:  # pictures of a form are views of the body, which stays charged
        body.charge.set(sum(message.size for message in messages))
    request = replace(request, messages=messages, reference=_newest_picture(messages))
    parsed = replace(parsed, request=request)  # without base64
    with state.answers.reserve(request.num_pictures * PICTURE_BYTES):
        async with timer.measure(state.server.service.draw(request)) as events:
            if parsed.stream:
                await response.send_stream(SSE, picture_events(events, parsed))
            else:
                await response.send_data(JSON, await whole_pictures(events, parsed))


async def handle_speech(state: HttpState, body: RequestBody, response: ResponseWriter) -> None:
    """`POST /v1/audio/speech`."""
    server = state.server
    timer = server.metrics.timer()
    parsed = await state.parse(parse_speech, body.take())
    body.key.add_speech(parsed.text)
    speech = await state.load_recording(parsed.speech, body.key, "")
    parsed = replace(parsed, speech=speech)  # without its base64
    body.charge.set(_recording_size(speech))
    audio = parsed.audio
    request = SpeechRequest(
        request_id=f"speech-{uuid.uuid4().hex[:24]}",
        text=parsed.text,
        speech=parsed.speech,
        is_live=parsed.delivery != "whole" and audio.is_playable_in_parts,
        priority=parsed.priority,
    )
    if parsed.delivery == "whole":
        with state.answers.keep(audio, parsed.text) as kept:
            async with timer.measure(server.service.speech(request)) as events:
                whole = await speech_clip(events, kept)
            await response.send_whole(audio.content_type, *whole)
        return
    with state.stream(audio, parsed.text) as clip:
        async with timer.measure(server.service.speech(request)) as events:
            if parsed.delivery == "audio":
                await response.send_stream(audio.content_type, speech_parts(events, clip))
            else:
                times = SegmentTimes(audio) if parsed.has_segments else None
                await response.send_stream(SSE, speech_events(events, clip, times))


async def handle_add_voice(state: HttpState, body: RequestBody, response: ResponseWriter) -> None:
    """`POST /v1/audio/voices`."""
    service = state.server.service
    if not service.info.has_speech:
        raise no_speech(service.info, "name")
    voice = await state.parse(partial(parse_voice, content_type=body.content_type), body.take())
    if voice.name in state.server.options.aliases_of_voices:
        raise RequestError(
            f"{shorten(voice.name)} is another name of a voice (--voice-alias): take another one.",
            status=409,
            param="name",
            code="voice_exists",
        )
    body.charge.set(len(voice.sample.recording))
    if voice.sample.recording and not voice.sample.transcript and service.info.has_audio_input:
        voice = replace(voice, sample=await transcribed(service, voice.sample, body.key))
    await response.send_object(voice_object(await service.add_voice(voice), is_new=True))


async def transcribed(service: Service, sample: VoiceSample, key: KeyUse) -> VoiceSample:
    """`sample` with the words of its recording, as the model hears them.

    Raises: RequestError when it is too long for a voice, has no words, or exceeds the limits of `key`.
    """
    assert isinstance(sample.recording, bytes), "recordings are loaded"
    key.add_text("", MAX_TRANSCRIPT_TOKENS * SEGMENTS_AHEAD)
    request = TranscriptionRequest(
        request_id=f"transcript-{uuid.uuid4().hex[:24]}",
        audio=sample.recording,
        where=sample.where,
        sampling=SamplingParams(max_tokens=MAX_TRANSCRIPT_TOKENS),
    )
    words = ""
    async with aclosing(service.transcribe(request)) as events:
        async for event in events:
            if isinstance(event, TranscriptDelta):
                words += event.text
            elif isinstance(event, TranscriptSegment) and event.end_ms > MAX_RECORDING_S * 1000:
                raise invalid(sample.where, f"is longer than {MAX_RECORDING_S} s")
    if not words.strip():
        raise RequestError(
            f"'{sample.where}' has no words that the model hears: send 'ref_text'.",
            param="ref_text",
            code="invalid_value",
        )
    return replace(sample, transcript=words.strip()[:MAX_REF_TEXT])


# The handler of each route, and the media types of its body.
HANDLERS: dict[str, tuple[Handler, tuple[str, ...]]] = {
    "/v1/images/generations": (handle_generation, (JSON,)),
    "/v1/images/edits": (handle_edit, (JSON, FORM)),
    "/v1/chat/completions": (handle_chat, (JSON,)),
    "/v1/completions": (handle_completion, (JSON,)),
    "/v1/audio/speech": (handle_speech, (JSON,)),
    "/v1/audio/voices": (handle_add_voice, (FORM,)),
    "/v1/audio/transcriptions": (handle_transcription, (FORM,)),
    "/tokenize": (handle_tokenize, (JSON,)),
    "/detokenize": (handle_detokenize, (JSON,)),
}
