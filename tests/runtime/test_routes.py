"""The routes that run the model, called as ASGI apps without a server: places, bodies, disconnects, errors."""

from __future__ import annotations

import asyncio
import json
import os
import random
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_service import FakeService
from starlette.requests import Request

from mingc.errors import CapacityError, MingcError, RequestError
from mingc.prompts.conversation import Message as RequestMessage
from mingc.prompts.conversation import TextPart, VideoParams
from mingc.runtime.request import ChatRequest, SamplingParams, ServiceLoad, SpeechParams, SpeechRequest
from mingc.server.app import create_app
from mingc.server.body_budget import FREE_BYTES, BodyBudget
from mingc.server.http.body import read_body
from mingc.server.http.routes import (
    GenerationRoute,
    Handler,
    HttpState,
    RequestBody,
    handle_chat,
    handle_speech,
)
from mingc.server.http.streaming import ResponseWriter
from mingc.server.key_limits import KeyUse
from mingc.server.metrics import Metrics
from mingc.server.options import ServeOptions
from mingc.server.state import ServerState

CHAT = "/v1/chat/completions"
_END_S = 20.0
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]


ROUTES = create_app(FakeService(), ServeOptions())  # the names of the routes in metrics


def make_state(**options: Any) -> HttpState:
    return HttpState.of(ServerState(service=FakeService(), options=ServeOptions(**options)))


def service_of(state: HttpState) -> FakeService:
    assert isinstance(state.server.service, FakeService)
    return state.server.service


@dataclass
class Client:
    """One request. `chunks` are the body; afterwards the client waits for `leaves`, or for ever.

    `pause_s`: time before each chunk. `sent`: messages of the server.
    """

    chunks: Sequence[bytes] = (b"{}",)
    headers: tuple[tuple[bytes, bytes], ...] = ()
    pause_s: float = 0.0
    stalls: bool = False
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    leaves_at_end: bool = False
    num_reads: int = 0
    sent: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._messages = self._read()

    async def _read(self) -> AsyncIterator[Message]:
        for index, chunk in enumerate(self.chunks):
            await asyncio.sleep(self.pause_s)
            is_last = index + 1 == len(self.chunks) and not self.stalls
            yield {"type": "http.request", "body": chunk, "more_body": not is_last}
        await self.leaves.wait()
        yield {"type": "http.disconnect"}

    async def receive(self) -> Message:
        self.num_reads += 1
        return await anext(self._messages)

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if self.leaves_at_end and message.get("more_body") is False:
            self.leaves.set()

    @property
    def body(self) -> bytes:
        return b"".join(each.get("body", b"") for each in self.sent)

    def header(self, name: bytes) -> bytes:
        return dict(self.sent[0]["headers"])[name]


def scope_of(path: str = CHAT, headers: Sequence[tuple[bytes, bytes]] = ()) -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": path, "headers": [*headers], "app": ROUTES}


def call(
    state: HttpState, client: Client, handler: Handler = handle_chat, path: str = CHAT
) -> MingcError | None:
    """Run one request to its end; the error that the server would answer with, if any."""
    scope = scope_of(path, client.headers)

    async def run() -> None:
        async with asyncio.timeout(_END_S):
            await GenerationRoute(state, handler)(scope, client.receive, client.send)

    try:
        asyncio.run(run())
    except MingcError as error:
        return error
    finally:
        assert state.server.num_running == 0, "the place is free again"
    return None


def refused(state: HttpState, client: Client) -> MingcError:
    error = call(state, client)
    assert error is not None
    assert not service_of(state).chats
    return error


def num_cancelled(state: HttpState) -> float:
    samples = state.server.metrics.samples(ServiceLoad())
    return sum(each.value for each in samples if each.name == "mingc_requests_cancelled_total")


def body_bytes(metrics: Metrics) -> float:
    return next(each.value for each in metrics.samples(ServiceLoad()) if each.name == "mingc_body_bytes")


def chat(text: str = "hello", **fields: Any) -> Client:
    document = {"messages": [{"role": "user", "content": text}], **fields}
    return Client(chunks=[json.dumps(document).encode()])


def test_places_are_taken_up_to_the_limit_and_free_after_every_end() -> None:
    state = make_state(max_concurrent_requests=2)
    taken: list[int] = []

    async def handler(state: HttpState, body: RequestBody, response: ResponseWriter) -> None:
        taken.append(state.server.num_running)
        if len(taken) == 1:
            other = Client()
            with pytest.raises(CapacityError) as caught, state.server.admit():
                await GenerationRoute(state, handler)(scope_of(), other.receive, other.send)
            assert (caught.value.code, other.num_reads) == ("overloaded", 0)
        raise ValueError("a bug")

    for _ in range(3):
        assert call(state, Client(), handler) is not None
    assert taken == [1, 1, 1]


def test_a_stopping_server_takes_no_request() -> None:
    """One on a connection that was open before."""
    state = make_state()
    state.server.is_stopping = True
    client = chat()
    error = refused(state, client)
    assert isinstance(error, CapacityError) and error.code == "stopping" and client.num_reads == 0


@pytest.mark.parametrize(
    ("flag", "status", "ready", "health"),
    [
        (None, "ready", 200, 200),
        ("is_draining", "draining", 503, 200),
        ("is_stopping", "stopping", 503, 503),
    ],
)
def test_probes_see_that_a_server_is_about_to_end(
    flag: str | None, status: str, ready: int, health: int
) -> None:
    app = create_app(FakeService(), ServeOptions())
    if flag is not None:
        setattr(app.state.server, flag, True)
    for path, code in (("/ready", ready), ("/health", health)):
        sent: list[Message] = []

        async def send(message: Message, sent: list[Message] = sent) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
        asyncio.run(app(scope, Client().receive, send))
        body = b"".join(each.get("body", b"") for each in sent)
        assert (sent[0]["status"], json.loads(body)["status"]) == (code, status), path


def test_a_disconnect_cancels_the_request_before_the_route_ends() -> None:
    state = make_state()
    ends: list[str] = []
    client = Client()

    async def handler(state: HttpState, body: RequestBody, response: ResponseWriter) -> None:
        client.leaves.set()
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    assert call(state, client, handler) is None
    assert (ends, num_cancelled(state)) == (["cancelled"], 1)


def test_the_service_has_ended_a_cancelled_chat_before_the_route_ends() -> None:
    state = make_state()
    client = chat("endless", stream=True)
    sent = client.send

    async def send(message: Message) -> None:
        await sent(message)
        client.leaves.set()

    client.send = send  # type: ignore[method-assign]
    assert call(state, client) is None
    assert [*service_of(state).ends.values()] == ["cancelled"] and num_cancelled(state) == 1


def test_a_response_that_has_ended_is_not_cancelled_by_the_disconnect_behind_it() -> None:
    """Servers report a disconnect at the end of every response."""
    state = make_state()
    ends: list[str] = []

    async def answer() -> AsyncIterator[bytes]:
        yield b"{}"

    async def handler(state: HttpState, body: RequestBody, response: ResponseWriter) -> None:
        await response.send_stream("application/json", answer())
        for _ in range(10):
            await asyncio.sleep(0)
        ends.append("done")

    assert call(state, Client(leaves_at_end=True), handler) is None
    assert (ends, num_cancelled(state)) == (["done"], 0)


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_over_the_limit_is_refused_without_the_rest(is_declared: bool) -> None:
    headers = ((b"content-length", b"6000"),) if is_declared else ()
    client = Client(chunks=[b" " * 600] * 10, headers=headers)
    error = refused(make_state(max_body_bytes=1000), client)
    assert isinstance(error, RequestError) and (error.status, error.code) == (413, "body_too_large")
    assert client.num_reads == (0 if is_declared else 2)
    assert call(make_state(max_body_bytes=6000), Client(chunks=client.chunks, headers=headers)) is not None


def test_a_body_that_arrives_bit_by_bit_has_a_time_limit_as_a_whole() -> None:
    state = make_state(body_timeout_s=0.3, body_idle_timeout_s=10.0)
    client = Client(chunks=[b" "] * 60, pause_s=0.05)
    error = refused(state, client)
    assert isinstance(error, RequestError) and (error.status, error.code) == (408, "body_timeout")
    assert "did not arrive within 0.3 s" in error.message


def test_a_body_that_stops_arriving_is_not_waited_for() -> None:
    state = make_state(body_timeout_s=5.0, body_idle_timeout_s=0.2)
    error = refused(state, Client(chunks=[b"{"], stalls=True))
    assert isinstance(error, RequestError) and (error.status, error.code) == (408, "body_timeout")
    assert "Nothing of the request body arrived for 0.2 s" in error.message


@pytest.mark.parametrize("kind", [b"multipart/form-data; boundary=x", b"text/plain", b"application/xml"])
def test_bodies_of_other_types_are_refused(kind: bytes) -> None:
    client = Client(headers=((b"content-type", kind),))
    error = refused(make_state(), client)
    assert isinstance(error, RequestError) and (error.status, client.num_reads) == (415, 0)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "br", "gzip, identity"])
def test_compressed_bodies_are_refused_by_name(coding: str) -> None:
    client = Client(headers=((b"content-type", b"application/json"), (b"content-encoding", coding.encode())))
    error = refused(make_state(), client)
    assert isinstance(error, RequestError) and (error.status, client.num_reads) == (415, 0)
    assert f'Content-Encoding "{coding}"' in error.message
    assert error.headers == {"Accept-Encoding": "identity"}
    twice = Client(headers=(*client.headers[:1], (b"content-encoding", b"identity"), *client.headers[1:]))
    assert refused(make_state(), twice).status == 415, "a repeated field is a list, RFC 9110 §5.3"


def test_large_bodies_count_towards_the_budget_of_all_requests() -> None:
    """Neither two at once, nor one that grows without a length."""
    state = make_state(max_body_bytes=300_000, max_total_body_bytes=400_000)
    with state.bodies.charge() as held:
        held.set(250_000)
        error = refused(state, Client(chunks=[b" " * 100_000] * 3))
        assert isinstance(error, CapacityError) and error.code == "body_budget_exhausted"
    assert isinstance(call(state, Client(chunks=[b" " * 100_000] * 3)), RequestError), "not JSON"


def test_a_bug_is_answered_without_its_details() -> None:
    async def handler(state: HttpState, body: RequestBody, response: ResponseWriter) -> None:
        raise ValueError("secret")

    error = call(make_state(), Client(), handler)
    assert error is not None and "secret" not in str(error) and "Internal server error" in error.message


def test_an_event_stream_that_fails_ends_with_the_error() -> None:
    client = chat("fail midway", stream=True)
    assert call(make_state(), client) is None
    assert b'"error"' in client.body and client.sent[-1]["more_body"] is False


@pytest.mark.parametrize(
    ("format", "kind"), [("wav", b"audio/wav"), ("flac", b"audio/flac"), ("pcm", b"audio/pcm")]
)
def test_speech_is_sent_as_audio(format: str, kind: bytes) -> None:
    client = Client(chunks=[json.dumps({"input": "hello", "response_format": format}).encode()])
    assert call(make_state(), client, handle_speech, "/v1/audio/speech") is None
    assert client.header(b"content-type").startswith(kind)


def counters(state: HttpState, *names: str) -> dict[tuple[str, str], float]:
    """Values above 0 of counters that have a route, by their short name and route."""
    return {
        (each.name, dict(each.labels)["route"]): each.value
        for each in state.server.metrics.samples(ServiceLoad())
        if each.name in names and each.value
    }


@pytest.mark.parametrize(
    ("path", "handler", "body"),
    [
        (CHAT, handle_chat, {"messages": [{"role": "user", "content": "endless"}], "stream": True}),
        ("/v1/audio/speech", handle_speech, {"input": "endless", "stream": True}),
    ],
)
def test_metrics_of_a_request_have_its_own_route(path: str, handler: Handler, body: dict[str, Any]) -> None:
    state = make_state()
    leaving = Client(chunks=[json.dumps(body).encode()])
    sent = leaving.send

    async def send(message: Message) -> None:
        await sent(message)
        leaving.leaves.set()

    leaving.send = send  # type: ignore[method-assign]
    assert call(state, leaving, handler, path) is None
    unread = Client(chunks=[], stalls=True)
    unread.leaves.set()  # before its body has arrived
    assert call(state, unread, handler, path) is None and not unread.sent
    failing = Client(chunks=[json.dumps(body).replace("endless", "fail midway").encode()])
    assert call(state, failing, handler, path) is None
    names = {
        "mingc_requests_cancelled_total": 2,
        "mingc_stream_errors_total": 1,
        "mingc_request_duration_seconds_count": 3,
    }
    assert counters(state, *names) == {(name, path): value for name, value in names.items()}


def test_raw_audio_that_fails_is_not_ended() -> None:
    """Without its last message a server breaks the connection off, which is all that a client of raw audio can see."""
    client = Client(chunks=[json.dumps({"input": "fail midway", "stream_format": "audio"}).encode()])
    assert call(make_state(), client, handle_speech, "/v1/audio/speech") is None
    assert client.body and all(each.get("more_body", True) for each in client.sent)


def test_all_of_a_chat_reaches_the_service() -> None:
    state = make_state()
    fields = {
        "modalities": ["text", "audio"],
        "audio": {"voice": "Lina", "format": "pcm16", "instructions": "slowly", "seed": 9, "max_steps": 4,
                  "guidance": 1.5, "sigma": 0.25, "temperature": 0.5, "speech_lead": 6},
        "stream": True, "priority": -2,
        "max_tokens": 90, "min_tokens": 2, "temperature": 0.75, "top_p": 0.5, "top_k": 7,
        "min_p": 0.125, "repetition_penalty": 1.25, "stop": ["a", "b"], "stop_token_ids": [3, 5], "ignore_eos": True,
        "seed": 11, "video_fps": 1.5, "video_max_frames": 7, "video_min_pixels": 100_000,
        "video_max_pixels": 200_000, "video_total_pixels": 3_000_000, "thinking": True,
    }  # fmt: skip
    assert call(state, chat("hello", **fields)) is None
    (request,) = service_of(state).chats
    assert request == ChatRequest(
        request_id=request.request_id,
        messages=(RequestMessage(role="user", parts=(TextPart(text="hello"),)),),
        sampling=SamplingParams(
            max_tokens=90, min_tokens=2, temperature=0.75, top_p=0.5, top_k=7, min_p=0.125, repetition_penalty=1.25,
            stop=("a", "b"), stop_token_ids=(3, 5), ignore_eos=True, seed=11,
        ),
        speech=SpeechParams(
            voice="Lina", instructions="slowly", seed=9, max_steps=4, guidance=1.5, sigma=0.25, temperature=0.5,
            speech_lead=6,
        ),
        video=VideoParams(
            fps=1.5, max_frames=7, min_pixels=100_000, max_pixels=200_000, total_pixels=3_000_000
        ),
        thinking=True,
        is_live=True,
        priority=-2,
    )  # fmt: skip
    assert request.request_id.startswith("chatcmpl-")


def test_a_spoken_chat_that_is_answered_whole_is_generated_as_fast_as_possible() -> None:
    for stream, is_live in ((True, True), (False, False)):
        state = make_state()
        body = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}, "stream": stream}
        assert call(state, chat("hello", **body)) is None
        assert [request.is_live for request in service_of(state).chats] == [is_live]


def test_all_of_a_speech_request_reaches_the_service() -> None:
    state = make_state()
    body = {
        "input": "hello", "voice": {"id": "Lina"}, "instructions": "slowly", "seed": -1, "max_new_tokens": 4,
        "guidance": 1.5, "sigma": 0.25, "temperature": 0.5, "response_format": "pcm", "stream_format": "sse",
        "priority": 7, "speech_lead": 0,
    }  # fmt: skip
    for given, speech, is_live in (
        (
            body,
            SpeechParams(
                voice="Lina", instructions="slowly", seed=2**64 - 1, max_steps=4, guidance=1.5, sigma=0.25,
                temperature=0.5, speech_lead=0,
            ),
            True,
        ),
        ({"input": "hello", "stream": False}, SpeechParams(voice="DB30"), False),
        ({"input": "hello", "instructions": "  ", "seed": 0}, SpeechParams(voice="DB30", seed=0, speech_lead=0), True),
    ):  # fmt: skip
        client = Client(chunks=[json.dumps(given).encode()])
        assert call(state, client, handle_speech, "/v1/audio/speech") is None
        request = service_of(state).speeches[-1]
        assert request == SpeechRequest(
            request_id=request.request_id,
            text="hello",
            speech=speech,
            is_live=is_live,
            priority=given.get("priority", 0),
        )
        assert request.request_id.startswith("speech-")
    assert len({each.request_id for each in service_of(state).speeches}) == 3


@pytest.mark.parametrize(
    "kind",
    [b"application/json", b"Application/JSON; charset=utf-8", b"application/json ;charset=utf-8", None],
)
def test_json_may_be_announced_in_any_form(kind: bytes | None) -> None:
    headers = () if kind is None else ((b"content-type", kind),)
    client = Client(chunks=chat().chunks, headers=headers)
    assert call(make_state(), client) is None and client.sent[0]["status"] == 200


def test_a_body_of_exactly_the_limit_is_read() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    declared = ((b"content-length", str(len(body)).encode()),)
    for headers in ((), declared):
        assert call(make_state(max_body_bytes=len(body)), Client(chunks=[body], headers=headers)) is None
        error = refused(make_state(max_body_bytes=len(body) - 1), Client(chunks=[body], headers=headers))
        assert isinstance(error, RequestError) and error.status == 413


def test_a_body_is_freed_while_its_request_is_answered() -> None:
    """100 MB of media would else be held for as long as the answer takes."""
    memory = np.frombuffer(bytearray(b'{"a": 1}'), np.uint8)
    is_held = weakref.ref(memory)
    with BodyBudget(1 << 20, Metrics()).charge() as charge:
        body = RequestBody(charge=charge, key=KeyUse({}, Counter(), Counter()), raw=memory.data)
        del memory
        taken = body.take()
        assert taken == b'{"a": 1}'
        del taken
        assert is_held() is None and not body.take()


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock moves on request."""

    now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    async def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for _ in range(3):  # what is due by now runs
            await asyncio.sleep(0)


@pytest.mark.parametrize("is_declared", [False, True])
@pytest.mark.parametrize(
    "sizes", [[], [0], [1, 65_535], [65_536, 1], [3, 0, 70_000, 5_000_000, 1, 6_000_000]]
)
def test_bodies_are_read_whole_however_they_are_cut(sizes: list[int], is_declared: bool) -> None:
    generator = random.Random(8)
    chunks = [generator.randbytes(size) for size in sizes]
    whole = b"".join(chunks)
    headers = [(b"content-length", str(len(whole)).encode())] if is_declared else []
    waiting = [*chunks, b""]

    async def receive() -> Message:
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def read() -> memoryview:
        budget = BodyBudget(1 << 30, Metrics())
        with budget.charge() as charge:
            request = Request({"type": "http", "headers": headers}, receive)
            return await read_body(request, ServeOptions(), budget, charge)

    assert asyncio.run(read()) == whole


def test_a_declared_size_takes_no_memory_before_it_is_charged() -> None:
    """256 clients that declare 100 MB and send 1 KB would reserve 25 GB, which a strict kernel does not have."""
    declared = 100_000_000
    found: list[tuple[float, int]] = []  # charge, address space
    sent = [b"x" * 1000, b"x" * 1000, b"x" * FREE_BYTES, b""]
    metrics = Metrics()

    def note() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        found.append((body_bytes(metrics), used))

    async def receive() -> Message:
        note()
        part = sent.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(sent)}

    async def read() -> memoryview:
        headers = [(b"content-length", str(declared).encode())]
        with (budget := BodyBudget(1 << 30, metrics)).charge() as charge:
            request = Request({"type": "http", "headers": headers}, receive)
            note()
            return await read_body(request, ServeOptions(), budget, charge)

    assert asyncio.run(read()) == b"x" * (2000 + FREE_BYTES)
    (_, before), _, _, (free, small), (charged, large) = found
    assert (free, charged) == (0, declared - FREE_BYTES)
    assert small - before < declared // 10
    assert large - before > declared * 9 // 10


@pytest.mark.parametrize(("pause_s", "is_late"), [(9.0, False), (11.0, True)])
def test_the_idle_timeout_of_a_body_begins_again_with_every_part(pause_s: float, is_late: bool) -> None:
    loop, options = VirtualTime(), ServeOptions(body_idle_timeout_s=10.0, body_timeout_s=1000.0)
    parts = [b'{"a"', b": ", b"1", b"}"]

    async def receive() -> Message:
        await loop.pass_time(pause_s)
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def read() -> memoryview:
        budget = BodyBudget(1 << 20, Metrics())
        with budget.charge() as charge:
            return await read_body(Request({"type": "http", "headers": []}, receive), options, budget, charge)

    try:
        if is_late:
            with pytest.raises(RequestError, match="Nothing of the request body arrived for 10 s") as late:
                loop.run_until_complete(read())
            assert (late.value.status, late.value.code) == (408, "body_timeout")
        else:
            assert loop.run_until_complete(read()) == b'{"a": 1}'
            assert loop.now_s == 1036.0, "more than the idle timeout in all"
    finally:
        loop.close()
