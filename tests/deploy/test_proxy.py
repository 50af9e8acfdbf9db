"""The middleware of Serve's proxies: every way in which a response can break off."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.types import Message, Receive, Scope, Send

from mingc.deploy.proxy import LostReplica, middlewares

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]


def start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def respond(
    *messages: Message, fails: bool = False, kind: str = "http", leaves: bool = False
) -> list[Message]:
    """What a client gets when the proxy sends `messages`, and then ends or raises."""
    sent: list[Message] = []

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
        if leaves:
            await receive()
        if fails:
            raise ConnectionError

    async def receive() -> Message:
        return {"type": f"{kind}.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        await LostReplica(proxy)({"type": kind}, receive, send)

    if fails:
        with pytest.raises(ConnectionError):
            asyncio.run(run())
    else:
        asyncio.run(run())
    return sent


@pytest.mark.parametrize("fails", [False, True])
def test_an_event_stream_that_breaks_off_ends_with_an_error_event(fails: bool) -> None:
    sent = respond(start(200, SSE), body(b"data: 1\n\n", more=True), fails=fails)
    assert sent[:2] == [start(200, SSE), body(b"data: 1\n\n", more=True)]
    (last,) = sent[2:]
    assert not last["more_body"]
    assert json.loads(last["body"].removeprefix(b"data: "))["error"]["code"] == "replica_lost"


def test_a_stream_that_is_complete_is_left_alone() -> None:
    messages = [start(200, SSE), body(b"data: [DONE]\n\n", more=True), body(b"", more=False)]
    assert respond(*messages) == messages


def test_raw_audio_that_breaks_off_stays_broken() -> None:
    messages = [start(200, [(b"content-type", b"audio/wav")]), body(b"RIFF", more=True)]
    assert respond(*messages) == messages


def test_a_request_without_an_answer_gets_one() -> None:
    head, error = respond()
    assert (head["status"], dict(head["headers"])[b"retry-after"]) == (503, b"1")
    assert json.loads(error["body"])["error"]["code"] == "replica_lost"
    assert dict(head["headers"])[b"content-length"] == str(len(error["body"])).encode()


def test_a_proxy_that_is_full_answers_in_json() -> None:
    plain = [(b"content-type", b"text/plain"), (b"retry-after", b"7"), (b"content-length", b"3")]
    head, error = respond(start(503, plain), body(b"no!", more=False))
    assert (head["status"], dict(head["headers"])[b"retry-after"]) == (503, b"7")
    assert json.loads(error["body"])["error"]["code"] == "overloaded"


def test_a_503_of_a_replica_is_left_alone() -> None:
    messages = [start(503, [(b"content-type", b"application/json")]), body(b"{}", more=False)]
    assert respond(*messages) == messages


def test_headers_of_an_error_are_those_of_json() -> None:
    head, error = respond()
    headers = dict(head["headers"])
    assert headers[b"content-type"] == b"application/json" and not error["more_body"]
    assert json.loads(error["body"])["error"]["message"] == "The replica that served this request was lost."
    plain = [(b"content-type", b"text/plain; charset=utf-8")]
    head, error = respond(start(503, plain), body(b"no", more=True), body(b"!", more=False))
    headers = dict(head["headers"])
    assert (headers[b"content-type"], headers[b"retry-after"]) == (b"application/json", b"1")
    assert headers[b"content-length"] == str(len(error["body"])).encode()
    assert "busy" in json.loads(error["body"])["error"]["message"]


def test_a_request_whose_replica_fails_before_its_answer_gets_one() -> None:
    head, error = respond(fails=True)
    assert head["status"] == 503 and json.loads(error["body"])["error"]["code"] == "replica_lost"


@pytest.mark.parametrize("status", [200, 404, 500])
def test_other_answers_in_plain_text_are_left_alone(status: int) -> None:
    """Serve's own 404, and whatever an application sends."""
    messages = [start(status, [(b"content-type", b"text/plain")]), body(b"text", more=False)]
    assert respond(*messages) == messages


def test_a_body_without_more_is_the_last() -> None:
    messages = [start(200, SSE), {"type": "http.response.body", "body": b"data: [DONE]\n\n"}]
    assert respond(*messages) == messages


def test_a_stream_whose_headers_only_arrived_ends_with_an_error_event() -> None:
    head, error = respond(start(200, SSE))
    assert head == start(200, SSE) and error["body"].startswith(b'data: {"error"')
    assert error["body"].endswith(b"\n\n")


ACCEPT: Message = {"type": "websocket.accept"}
SENT: Message = {"type": "websocket.send", "text": "{}"}


@pytest.mark.parametrize("fails", [False, True])
def test_a_websocket_whose_replica_is_lost_is_closed(fails: bool) -> None:
    *sent, last = respond(ACCEPT, SENT, kind="websocket", fails=fails)
    assert sent == [ACCEPT, SENT]
    assert (last["type"], last["code"]) == ("websocket.close", 1011)


@pytest.mark.parametrize("end", ["closed", "left", "refused"])
def test_a_websocket_that_has_ended_is_left_alone(end: str) -> None:
    messages: list[Message] = [ACCEPT, SENT]
    if end == "closed":
        messages.append({"type": "websocket.close", "code": 1000})
    elif end == "refused":
        whole = start(401, [(b"content-type", b"application/json")]), body(b"{}", more=False)
        messages = [{**each, "type": f"websocket.{each['type']}"} for each in whole]
    assert respond(*messages, kind="websocket", fails=end == "left", leaves=end == "left") == messages


@pytest.mark.parametrize(
    "messages", [[], [start(503, [(b"content-type", b"text/plain")]), body(b"no", more=False)]]
)
def test_an_offer_of_a_websocket_that_no_replica_takes_is_refused_in_json(messages: list[Message]) -> None:
    head, error = respond(*messages, kind="websocket")
    assert (head["type"], head["status"]) == ("websocket.http.response.start", 503)
    assert error["type"] == "websocket.http.response.body"
    code = "overloaded" if messages else "replica_lost"
    assert json.loads(error["body"])["error"]["code"] == code


@pytest.mark.parametrize("kind", ["lifespan"])
def test_what_is_no_request_passes(kind: str) -> None:
    seen: list[tuple[Scope, Receive, Send]] = []

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    asyncio.run(LostReplica(proxy)({"type": kind}, receive, send))
    assert seen == [({"type": kind}, receive, send)]


def test_serve_is_given_the_middleware() -> None:
    (middleware,) = middlewares()
    assert middleware.cls is LostReplica
