"""The two routes that run the model, as ASGI apps: admit, read the body, answer, and cancel when the client leaves.

What an answer looks like is in `responses`; what a body may say in `protocol`.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from mingc.errors import CapacityError, MingcError, RequestError, WorkerError
from mingc.runtime.http.audio_format import AudioSpec
from mingc.runtime.http.body_decoder import shorten
from mingc.runtime.http.media import MediaReader
from mingc.runtime.http.metrics import Metrics, Stopwatch, route_of
from mingc.runtime.http.options import ServeOptions
from mingc.runtime.http.parsing import parse_chat, parse_speech
from mingc.runtime.http.response_schemas import ChatObjects, error_body, sse
from mingc.runtime.http.streaming import (
    Body,
    chat_stream,
    chat_whole,
    speech_sse,
    speech_stream,
    speech_whole,
)
from mingc.runtime.request import ChatRequest, Done, Event, Service, SpeechRequest

log = logging.getLogger("mingc.http")


@dataclass(kw_only=True, slots=True)
class Http:
    """What the routes of one app share. `stopping` is set when the server begins to end."""

    service: Service
    options: ServeOptions
    media: MediaReader
    metrics: Metrics
    in_flight: int = field(default=0, init=False)
    stopping: bool = field(default=False, init=False)

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold one of `max_concurrent_requests` places, from before the body is read: unread bodies cost no memory.

        Raises:
            CapacityError: when the server stops or no place is free.
        """
        if self.stopping:
            raise CapacityError("The server is stopping.", code="stopping")
        if self.in_flight >= self.options.max_concurrent_requests:
            raise CapacityError(
                f"{self.in_flight} requests are being served; try again later.", code="overloaded"
            )
        self.in_flight += 1
        self.metrics.in_flight.inc()
        try:
            yield
        finally:
            self.in_flight -= 1
            self.metrics.in_flight.dec()


Answer = Callable[[Http, bytes, Body], Awaitable[None]]


class GenerationRoute:
    """ASGI app of one route. `answer` gets the parsed JSON body and writes the response."""

    def __init__(self, http: Http, answer: Answer) -> None:
        self._http = http
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = self._http
        with ExitStack() as place:
            place.enter_context(http.admit())
            try:
                raw = await read_body(Request(scope, receive), http.options)
            except ClientDisconnect:
                http.metrics.cancelled.labels(route_of(scope)).inc()
                return
            body = Body(send, before_end=place.close)
            try:
                if not await run_while_connected(self._run(raw, body, route_of(scope)), receive, body):
                    http.metrics.cancelled.labels(route_of(scope)).inc()
            except asyncio.CancelledError:
                if not http.stopping:
                    raise
                log.warning("%s: cut off, as the server stops", route_of(scope))

    async def _run(self, raw: bytes, body: Body, route: str) -> None:
        try:
            await self._answer(self._http, raw, body)
        except Exception as error:
            # A bug is logged and told here: one that went on to the server would have the connection closed after
            # the answer, under the next request of the same client.
            if not isinstance(error, MingcError):
                log.exception("%s: unexpected error", route)
            if not body.is_started:
                raise as_known(error) from error
            # the status is out: a stream of events can still say what happened, raw audio can only break off
            log.warning("%s: stream ended by %s", route, type(error).__name__)
            self._http.metrics.stream_errors.labels(route).inc()
            if body.is_sse:
                await body.write(sse({**error_body(as_known(error))}))
                await body.end()


def as_known(error: Exception) -> MingcError:
    """The error itself if it is ours, otherwise one that says nothing of the inside."""
    if isinstance(error, MingcError):
        return error
    return WorkerError("The server failed to answer; its log says why.", code="internal_error")


async def read_body(request: Request, options: ServeOptions) -> bytes:
    """The whole body of a JSON request.

    Raises:
        RequestError: wrong content type (415), too large (413) or too slow (408).
        ClientDisconnect: the client left before its end.
    """
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise RequestError(
            f"Content-Type {shorten(media_type)} is not supported: send 'application/json'.",
            status=415,
            code="unsupported_media_type",
        )
    too_large = RequestError(
        f"The request body is larger than {options.max_body_bytes} bytes.", status=413, code="body_too_large"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > options.max_body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(options.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > options.max_body_bytes:
                    raise too_large
    except TimeoutError as error:
        raise RequestError(
            f"The request body did not arrive within {options.body_timeout_s:g} s.",
            status=408,
            code="body_timeout",
        ) from error
    return bytes(body)


async def run_while_connected(work: Coroutine[None, None, None], receive: Receive, body: Body) -> bool:
    """Run `work`; cancel it when the client leaves. False when it was cancelled for that."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if body.is_ended:  # servers report a disconnect at the end of every answer
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


@asynccontextmanager
async def watched(
    events: AsyncIterator[Event], stopwatch: Stopwatch, metrics: Metrics
) -> AsyncIterator[AsyncIterator[Event]]:
    """The events of one request, measured; at the end the service's iterator is closed, which cancels what runs."""

    async def measure() -> AsyncIterator[Event]:
        async for event in events:
            stopwatch.see(event)
            if isinstance(event, Done):
                metrics.count_usage(event.usage)
            yield event

    try:
        yield measure()
    finally:
        close = getattr(events, "aclose", None)  # AsyncIterator does not promise it; generators have it
        if close is not None:
            await close()


async def answer_chat(http: Http, raw: bytes, body: Body) -> None:
    """`POST /v1/chat/completions`."""
    stopwatch = http.metrics.stopwatch()
    info = http.service.info
    call = parse_chat(raw, info, http.options)
    request = ChatRequest(
        request_id=f"chatcmpl-{uuid.uuid4().hex[:24]}",
        messages=await http.media.read_messages(call.messages),
        sampling=call.sampling,
        speech=call.speech,
        video=call.video,
        thinking=call.thinking,
    )
    objects = ChatObjects(request_id=request.request_id, model=info.model, include_usage=call.include_usage)
    audio = None if call.speech is None else AudioSpec(format=call.audio_format, sample_rate=info.sample_rate)
    async with watched(http.service.chat(request), stopwatch, http.metrics) as events:
        write = chat_stream if call.stream else chat_whole
        await write(events, objects, audio, body)


async def answer_speech(http: Http, raw: bytes, body: Body) -> None:
    """`POST /v1/audio/speech`."""
    stopwatch = http.metrics.stopwatch()
    info = http.service.info
    call = parse_speech(raw, info, http.options)
    request = SpeechRequest(request_id=f"speech-{uuid.uuid4().hex[:24]}", text=call.text, speech=call.speech)
    audio = AudioSpec(format=call.audio_format, sample_rate=info.sample_rate)
    body.content_type = audio.content_type
    async with watched(http.service.speech(request), stopwatch, http.metrics) as events:
        write = {"whole": speech_whole, "audio": speech_stream, "sse": speech_sse}[call.delivery]
        await write(events, audio, body)
