"""The two routes that run the model, as ASGI apps: admission, reading the body, the response, cancellation.

`parsing` checks the body, `streaming` writes the response.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from mingc.errors import CapacityError, MingcError, RequestError, WorkerError
from mingc.host import large_arrays
from mingc.runtime.request import ChatRequest, Done, Event, Service, ServiceInfo, SpeechRequest
from mingc.server.http.audio_format import AudioSpec
from mingc.server.http.body_budget import FREE_BYTES, BodyBudget, Charge
from mingc.server.http.body_decoder import shorten
from mingc.server.http.logs import REQUEST_ID
from mingc.server.http.media import MediaLoader
from mingc.server.http.metrics import LatencyTimer, Metrics, route_of
from mingc.server.http.options import ServeOptions
from mingc.server.http.parsing import parse_chat, parse_speech
from mingc.server.http.response_schemas import ChatResponseBuilder, error_body, sse
from mingc.server.http.streaming import (
    ResponseWriter,
    write_chat,
    write_chat_stream,
    write_speech,
    write_speech_events,
    write_speech_stream,
)

log = logging.getLogger("mingc.http")

_EMPTY = memoryview(b"")
_PARSED_INLINE = 64 * 1024  # bytes that are parsed faster than they are handed to a thread
Parsed = TypeVar("Parsed")


@dataclass(kw_only=True, slots=True)
class ServerState:
    """State shared by the routes of one app.

    `is_draining` is set by SIGTERM: requests are served, but `/ready` answers 503. `is_stopping` is set when shutdown
    begins.
    """

    service: Service
    options: ServeOptions
    media: MediaLoader
    metrics: Metrics
    num_running: int = field(default=0, init=False)
    is_draining: bool = field(default=False, init=False)
    is_stopping: bool = field(default=False, init=False)
    bodies: BodyBudget = field(init=False)
    # One thread: large bodies are decoded while holding Python's lock, which the event loop gets after each.
    _parser: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = BodyBudget(self.options.max_total_body_bytes, self.metrics)
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="mingc-parse")

    async def parse(
        self, parse: Callable[[memoryview, ServiceInfo, ServeOptions], Parsed], raw: memoryview
    ) -> Parsed:
        """Parse a body: a large one outside of the event loop."""
        info, options = self.service.info, self.options
        if len(raw) <= _PARSED_INLINE:
            return parse(raw, info, options)
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse, raw, info, options)

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold one of `max_concurrent_requests` places. Taken before the body is read, so unread bodies use no memory.

        Raises:
            CapacityError: if the server is stopping or no place is free.
        """
        if self.is_stopping:
            raise CapacityError("The server is stopping.", code="stopping")
        if self.num_running >= self.options.max_concurrent_requests:
            raise CapacityError(
                f"{self.num_running} requests are being served; try again later.", code="overloaded"
            )
        self.num_running += 1
        self.metrics.requests_running.inc()
        try:
            yield
        finally:
            self.num_running -= 1
            self.metrics.requests_running.dec()


Handler = Callable[[ServerState, "RequestBody", ResponseWriter], Awaitable[None]]


@dataclass(kw_only=True, slots=True)
class RequestBody:
    """The body of a request and its charge. `take` drops the body, so that it is freed once it is parsed."""

    charge: Charge
    raw: memoryview = _EMPTY

    def take(self) -> memoryview:
        raw, self.raw = self.raw, _EMPTY
        return raw


class GenerationRoute:
    """ASGI app of one route that runs the model. `handler` receives the raw body and writes the response."""

    def __init__(self, state: ServerState, handler: Handler) -> None:
        self._state = state
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        if scope.get("state", {}).get("is_probe"):
            raise CapacityError("All connections are in use; try again later.", code="too_many_connections")
        with ExitStack() as place:
            place.enter_context(state.metrics.request_duration.labels(route_of(scope)).time())
            place.enter_context(state.admit())
            body = RequestBody(charge=place.enter_context(state.bodies.charge()))
            try:
                body.raw = await read_body(Request(scope, receive), state.options, state.bodies, body.charge)
            except ClientDisconnect:
                state.metrics.requests_cancelled.labels(route_of(scope)).inc()
                return
            response = ResponseWriter(send, before_end=place.close)
            try:
                if not await run_while_connected(
                    self._run(body, response, route_of(scope)), receive, response
                ):
                    state.metrics.requests_cancelled.labels(route_of(scope)).inc()
            except asyncio.CancelledError:
                if not state.is_stopping:
                    raise
                log.warning("%s: aborted by shutdown", route_of(scope))

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
            log.warning("%s: stream ended by %s", route, type(error).__name__)
            self._state.metrics.stream_errors.labels(route).inc()
            if response.is_sse:
                await response.write(sse({**error_body(public_error(error))}))
                await response.end()


def public_error(error: Exception) -> MingcError:
    """The error as shown to a client: mingc's own unchanged, any other without details."""
    if isinstance(error, MingcError):
        return error
    return WorkerError(
        f"Internal server error; the server log has it as request {REQUEST_ID.get()}.", code="internal_error"
    )


async def read_body(
    request: Request, options: ServeOptions, budget: BodyBudget, charge: Charge
) -> memoryview:
    """The whole body of a JSON request, charged once its first 64 KiB have arrived.

    Raises:
        RequestError: for a wrong content type (415), a body too large (413) or too slow (408).
        CapacityError: if the bodies of all requests together would be too large.
        ClientDisconnect: if the client left before the end.
    """
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise RequestError(
            f"Content-Type {shorten(media_type)} is not supported: send 'application/json'.",
            status=415,
            code="unsupported_media_type",
        )
    header = request.headers.get("content-length", "")
    declared = int(header) if header.isdecimal() else 0
    _check_size(declared, options)
    budget.check(declared)
    # What is declared is not reserved before it is charged.
    body = large_arrays.empty(min(declared or FREE_BYTES, FREE_BYTES), np.uint8)
    size = 0
    chunks = aiter(request.stream())
    try:
        async with asyncio.timeout(options.body_timeout_s) as whole, asyncio.timeout(None) as idle:
            while True:
                idle.reschedule(asyncio.get_running_loop().time() + options.body_idle_timeout_s)
                chunk = await anext(chunks, None)
                if chunk is None:
                    return body.data[:size]
                start, size = size, size + len(chunk)
                _check_size(size, options)
                if size > FREE_BYTES:  # whole: bodies that grow together would all be refused half-way
                    charge.set(max(size, declared))
                if size > len(body):
                    capacity = max(declared, 2 * size)
                    if start <= FREE_BYTES:  # copied faster than it is handed to a thread
                        body = _grown(body, start, capacity)
                    else:
                        body = await asyncio.to_thread(_grown, body, start, capacity)
                body.data[start:size] = chunk
    except TimeoutError as error:
        late = f"The request body did not arrive within {options.body_timeout_s:g} s."
        stalled = f"Nothing of the request body arrived for {options.body_idle_timeout_s:g} s."
        raise RequestError(late if whole.expired() else stalled, status=408, code="body_timeout") from error


def _grown(body: NDArray[np.uint8], size: int, capacity: int) -> NDArray[np.uint8]:
    """The first `size` bytes in new memory of `capacity` bytes. Copied by NumPy, which gives Python's lock back."""
    grown = large_arrays.empty(capacity, np.uint8)
    np.copyto(grown[:size], body[:size])
    return grown


def _check_size(num_bytes: int, options: ServeOptions) -> None:
    if num_bytes > options.max_body_bytes:
        raise RequestError(
            f"The request body is larger than {options.max_body_bytes} bytes.",
            status=413,
            code="body_too_large",
        )


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


@asynccontextmanager
async def measured(
    events: AsyncIterator[Event], latency_timer: LatencyTimer, metrics: Metrics
) -> AsyncIterator[AsyncIterator[Event]]:
    """Record metrics of a request's events; on exit close the service's iterator, which cancels the request."""

    async def measure() -> AsyncIterator[Event]:
        async for event in events:
            latency_timer.see(event)
            if isinstance(event, Done):
                metrics.count_usage(event.usage)
                metrics.observe_stages(event.timings_ms)
            yield event

    try:
        yield measure()
    finally:
        close = getattr(events, "aclose", None)  # AsyncIterator does not promise it; generators have it
        if close is not None:
            await close()


async def handle_chat(state: ServerState, body: RequestBody, response: ResponseWriter) -> None:
    """`POST /v1/chat/completions`."""
    latency_timer = state.metrics.latency_timer()
    info = state.service.info
    parsed = await state.parse(parse_chat, body.take())
    messages = await state.media.load(parsed.messages)
    parsed = replace(parsed, messages=())  # its base64 is decoded
    body.charge.set(sum(message.size for message in messages))
    audio = (
        None if parsed.speech is None else AudioSpec(format=parsed.audio_format, sample_rate=info.sample_rate)
    )
    request = ChatRequest(
        request_id=f"chatcmpl-{uuid.uuid4().hex[:24]}",
        messages=messages,
        sampling=parsed.sampling,
        speech=parsed.speech,
        video=parsed.video,
        thinking=parsed.thinking,
        is_live=parsed.stream and audio is not None and audio.is_playable_in_parts,
    )
    builder = ChatResponseBuilder(
        request_id=request.request_id, model=info.model, include_usage=parsed.include_usage
    )
    async with measured(state.service.chat(request), latency_timer, state.metrics) as events:
        write = write_chat_stream if parsed.stream else write_chat
        await write(events, builder, audio, response)


async def handle_speech(state: ServerState, body: RequestBody, response: ResponseWriter) -> None:
    """`POST /v1/audio/speech`."""
    latency_timer = state.metrics.latency_timer()
    info = state.service.info
    parsed = await state.parse(parse_speech, body.take())
    body.charge.set(0)
    audio = AudioSpec(format=parsed.audio_format, sample_rate=info.sample_rate)
    request = SpeechRequest(
        request_id=f"speech-{uuid.uuid4().hex[:24]}",
        text=parsed.text,
        speech=parsed.speech,
        is_live=parsed.delivery != "whole" and audio.is_playable_in_parts,
    )
    response.content_type = audio.content_type
    async with measured(state.service.speech(request), latency_timer, state.metrics) as events:
        write = {"whole": write_speech, "audio": write_speech_stream, "sse": write_speech_events}[
            parsed.delivery
        ]
        await write(events, audio, response)
