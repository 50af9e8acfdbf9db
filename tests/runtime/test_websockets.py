"""WebSockets are as safe as HTTP: keys, origins, refusals, hostile frames, slow clients, limits, shutdown."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from fake_service import FakeService
from server_process import child
from server_thread import eventually, fake_server, metric
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as websocket
from websockets.typing import Origin, Subprotocol

from mingc.server.api_keys import ApiKeys
from mingc.server.app import create_app
from mingc.server.options import ServeOptions
from mingc.server.state import ServerState
from mingc.server.websocket.connection import EventSocket
from mingc.server.websocket_connection import WebSocketConnection

PATH = "/v1/audio/speech/stream"
TEXT, BINARY, CLOSE, PING, PONG = 0x1, 0x2, 0x8, 0x9, 0xA
KEY = base64.b64encode(b"0123456789abcdef").decode()
UPGRADE = (
    f"upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: {KEY}\r\n"
)
ENDLESS = {"type": "input.text", "text": "endless"}
DONE = {"type": "input.done"}
CANCEL = {"type": "input.cancel"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server that tests share."""
    with fake_server() as (url, _):
        yield url


def connect(url: str, path: str = PATH, **options: Any) -> ClientConnection:
    return websocket(url.replace("http", "ws", 1) + path, proxy=None, **options)


def refusal(url: str, path: str = PATH, **options: Any) -> tuple[int, str, Any]:
    """Status, code and headers of the answer of a server that does not upgrade."""
    with pytest.raises(InvalidStatus) as refused:
        connect(url, path, **options)
    response = refused.value.response
    assert response.headers["content-type"] == "application/json"
    return response.status_code, json.loads(bytes(response.body))["error"]["code"], response.headers


def ask(connection: ClientConnection) -> str:
    """Ask something that is always answered at once. Returns the code of the answer, which is an error."""
    connection.send(json.dumps({"type": "nothing"}))
    answer = json.loads(connection.recv(timeout=30))
    assert answer["type"] == "error" and answer["message"] == answer["error"]["message"]
    return str(answer["error"]["code"])


def close_code(connection: ClientConnection) -> tuple[int, list[dict[str, Any]]]:
    """Read to the end: its code, and the events before."""
    events = []
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            if isinstance(message := connection.recv(timeout=30), str):
                events.append(json.loads(message))
    return (1006 if closed.value.rcvd is None else closed.value.rcvd.code), events


# Raw frames, as RFC 6455 §5.2 draws them.


def frame(
    opcode: int, data: bytes = b"", *, fin: bool = True, masked: bool = True, length: int | None = None
) -> bytes:
    size = len(data) if length is None else length
    short = size if size < 126 else 126 if size < 1 << 16 else 127
    extended = b"" if short < 126 else struct.pack(">H" if short == 126 else ">Q", size)
    mask = bytes((1, 2, 3, 4)) if masked else b""
    if masked:
        data = bytes(each ^ mask[index % 4] for index, each in enumerate(data))
    return bytes((fin << 7 | opcode, masked << 7 | short)) + extended + mask + data


def raw(url: str, head: str = UPGRADE, path: str = PATH) -> tuple[socket.socket, bytes]:
    """A connection that has asked for an upgrade, and the head of the answer."""
    host, port = url.removeprefix("http://").split(":")
    opened = socket.create_connection((host, int(port)), timeout=30)
    opened.sendall(f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\n{head}\r\n".encode())
    answer = b""
    while b"\r\n\r\n" not in answer:
        piece = opened.recv(1 << 16)
        assert piece, answer
        answer += piece
    return opened, answer


def frames(connection: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Opcode and payload of every frame until the server ends the connection; its frames are short and whole."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            data += piece
            while len(data) >= 2 and len(data) >= (end := _end(data)):
                yield data[0] & 15, data[end - _size(data) : end]
                data = data[end:]


def _size(data: bytes) -> int:
    return data[1] if data[1] < 126 else int.from_bytes(data[2 : 4 if data[1] == 126 else 10])


def _end(data: bytes) -> int:
    head = 2 if data[1] < 126 else 4 if data[1] == 126 else 10
    return head + _size(data) if len(data) >= head else len(data) + 1


def code_of(connection: socket.socket) -> int | None:
    """The code that the server closes with; None if the connection breaks off."""
    codes = [int.from_bytes(data[:2]) for opcode, data in frames(connection) if opcode == CLOSE]
    return codes[0] if codes else None


# Access


@pytest.mark.parametrize(
    ("header", "subprotocols", "path", "accepted"),
    [
        ("Bearer good", [], PATH, True),
        ("bearer good", [], PATH, True),
        (None, ["realtime", "openai-insecure-api-key.good"], PATH, True),
        (None, ["openai-insecure-api-key.good"], PATH, True),
        (None, [], PATH, False),
        (None, ["realtime"], PATH, False),
        (None, ["openai-insecure-api-key.bad", "realtime"], PATH, False),
        (None, ["openai-insecure-api-key."], PATH, False),
        ("Bearer bad", [], PATH, False),
        ("Bearer bad", ["openai-insecure-api-key.good"], PATH, False),
        ("Basic good", ["openai-insecure-api-key.good"], PATH, False),
        (None, [], f"{PATH}?api_key=good", False),
        (None, [], "/health", False),
    ],
)
def test_keys(
    header: str | None,
    subprotocols: list[str],
    path: str,
    accepted: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    (tmp_path / "keys").write_text("good\n")
    options: dict[str, Any] = {"subprotocols": [Subprotocol(each) for each in subprotocols] or None}
    if header is not None:
        options["additional_headers"] = {"authorization": header}
    with fake_server(api_key_file=tmp_path / "keys") as (url, _):
        if accepted:
            with connect(url, path, **options) as connection:
                assert connection.subprotocol == ("realtime" if "realtime" in subprotocols else None)
                assert ask(connection) == "unsupported_event"
        else:
            status, code, headers = refusal(url, path, **options)
            assert (status, code, headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
    logged = [each.getMessage() for each in caplog.records if each.name.startswith("mingc")]
    assert any(PATH in each or "/health" in each for each in logged)
    assert not any("good" in each or "bad" in each for each in logged)


@pytest.mark.parametrize(
    ("origin", "accepted"),
    [
        (None, True),
        ("own", True),
        ("https://app.example", True),
        ("https://evil.example", False),
        ("null", False),
    ],
)
def test_a_page_of_another_origin_is_refused(origin: str | None, accepted: bool) -> None:
    with fake_server(cors_origins=("https://app.example",)) as (url, _):
        given: Any = url if origin == "own" else origin
        if accepted:
            with connect(url, origin=given) as connection:
                assert ask(connection) == "unsupported_event"
        else:
            assert refusal(url, origin=given)[:2] == (403, "origin_not_allowed")


OWN_NAME = "http://name.example:8000"


@pytest.mark.parametrize(
    ("origin", "options", "accepted"),
    [
        (OWN_NAME, {}, False),
        ("http://name.example", {}, False),
        ("http://127.0.0.1.example:8000", {}, False),
        ("http://localhost.example:8000", {}, False),
        ("http://127.0.0.1:8000", {}, True),
        ("http://[::1]:8000", {}, True),
        ("http://localhost:8000", {}, True),
        ("http://app.localhost:8000", {}, True),
        ("https://name.example", {}, True),  # through a proxy: the server has no TLS
        (OWN_NAME, {"cors_origins": (OWN_NAME,)}, True),
        (OWN_NAME, {"cors_origins": ("*",)}, True),
        (OWN_NAME, {"host": "0.0.0.0"}, True),  # has a name of its own
        (OWN_NAME, {"is_behind_proxy": True}, True),
        (OWN_NAME, {"keys": {"MINGC_API_KEYS": "good"}}, True),
    ],
)
def test_a_page_whose_name_became_that_of_this_computer(
    origin: str, options: dict[str, Any], accepted: bool
) -> None:
    """DNS rebinding: for browsers the server is the page's own, so they ask nobody."""
    keys, is_behind_proxy = ApiKeys(None, options.pop("keys", {})), options.pop("is_behind_proxy", False)
    app = create_app(FakeService(), ServeOptions(**options), keys, is_behind_proxy=is_behind_proxy)
    headers = {"origin": origin, "authorization": "Bearer good"}
    body = {"messages": [{"role": "user", "content": "hi"}]}

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=origin) as client:
            return await client.post("/v1/chat/completions", json=body, headers=headers)

    answer = asyncio.run(post())
    assert answer.status_code == (200 if accepted else 403), answer.text
    assert accepted or answer.json()["error"]["code"] == "origin_not_allowed"


def test_a_rebound_page_opens_no_websocket(url: str) -> None:
    port = url.rpartition(":")[2]
    rebound = f"http://name.example:{port}"
    with socket.create_connection(("127.0.0.1", int(port)), timeout=30) as opened:
        assert refusal(rebound, origin=Origin(rebound), sock=opened)[:2] == (403, "origin_not_allowed")


def test_other_requests_are_refused_as_over_http(caplog: pytest.LogCaptureFixture) -> None:
    with fake_server(max_connections=1) as (url, _):
        assert refusal(url, "/v1/nothing")[:2] == (404, "not_found")
        assert refusal(url, "/v1/chat/completions")[:2] == (404, "not_found")
        plain = httpx.get(url + PATH, trust_env=False)
        assert (plain.status_code, plain.json()["error"]["code"]) == (426, "websocket_required")
        assert plain.headers["upgrade"] == "websocket"
        with connect(url) as busy:
            busy.send(json.dumps(ENDLESS))
            busy.send(json.dumps(DONE))
            busy.recv(timeout=30)
            status, code, headers = refusal(url)
            assert (status, code, headers["retry-after"]) == (503, "too_many_connections", "1")
    assert [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (UPGRADE.replace("version: 13", "version: 8"), 400),
        (UPGRADE.replace("sec-websocket-key", "x-key"), 400),
        (UPGRADE.replace(KEY, "short"), 400),
        (UPGRADE + f"x: {'y' * 9000}\r\n", 431),  # of one line; a head may have 16 KiB
        (UPGRADE + "".join(f"x-{index}: y\r\n" for index in range(200)), 431),
        (UPGRADE.replace("websocket\r\n", "h2c\r\n"), 426),
        (UPGRADE + "content-length: 3\r\n\r\nabc", 426),  # goes on as HTTP
        (UPGRADE + "transfer-encoding: chunked\r\n\r\n0\r\n", 426),
        (UPGRADE + "\r\nGET /health HTTP/1.1\r\nhost: a\r\n", 426),  # what follows is the next request
        (UPGRADE + "\r\n" + frame(TEXT, b"{}").decode("latin-1"), 426),
    ],
)
def test_a_handshake_that_is_none(head: str, status: int, url: str) -> None:
    connection, answer = raw(url, head)
    with connection:
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    eventually(lambda: metric(url, "mingc_num_connections") == 1)  # that of the question


def test_the_access_line_and_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mingc.access")
    with fake_server() as (url, _):
        with connect(url, additional_headers={"x-request-id": "mine"}) as connection:
            assert connection.response is not None and connection.response.headers["x-request-id"] == "mine"
            assert metric(url, "mingc_num_websockets") == 1
        eventually(lambda: metric(url, 'mingc_websockets_closed_total{code="1000"}') == 1)
        eventually(lambda: metric(url, f'mingc_http_requests_total{{route="{PATH}",status="101"}}') == 1)
        assert metric(url, "mingc_num_websockets") == 0
    lines = [each.getMessage() for each in caplog.records if each.name == "mingc.access"]
    assert any(each.startswith(f"GET {PATH} 101 ") for each in lines)


# Frames


@pytest.mark.parametrize(
    ("data", "code"),
    [
        pytest.param(frame(0x3, b"x"), 1002, id="reserved opcode"),
        pytest.param(frame(0xB), 1002, id="reserved control opcode"),
        pytest.param(bytes((0xC1, 0x80, 0, 0, 0, 0)), 1002, id="reserved bit: compressed"),
        pytest.param(frame(TEXT, b"{}", masked=False), 1002, id="not masked"),
        pytest.param(frame(PING, b"x" * 126), 1002, id="long ping"),
        pytest.param(frame(PING, fin=False), 1002, id="fragmented ping"),
        pytest.param(frame(0x0, b"x"), 1002, id="continuation of nothing"),
        pytest.param(frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"), 1002, id="message inside a message"),
        pytest.param(frame(TEXT, b"{", fin=False) + frame(CLOSE), 1002, id="close inside a message"),
        pytest.param(frame(CLOSE, b"\x03"), 1002, id="half a close code"),
        pytest.param(frame(CLOSE, struct.pack(">H", 1005)), 1002, id="close code that is not sent"),
        pytest.param(frame(CLOSE, struct.pack(">H", 1000) + b"\xff"), 1007, id="close reason is not UTF-8"),
        pytest.param(frame(TEXT, b'"\xc3\x28"'), 1007, id="text is not UTF-8"),
        pytest.param(frame(TEXT, b'"\xed\xa0\x80"'), 1007, id="text has half a surrogate pair"),
        pytest.param(
            frame(TEXT, b'"\xe4\xb8', fin=False) + frame(0x0, b'"'), 1007, id="a character is cut off"
        ),
        pytest.param(frame(BINARY, length=(16 << 20) + 1), 1009, id="too large"),
        pytest.param(frame(BINARY, length=1 << 63), 1009, id="larger than the RFC allows"),
        pytest.param(
            frame(TEXT, b"x" * 9, fin=False) + frame(0x0, length=(16 << 20) - 8),
            1009,
            id="too large in parts",
        ),
    ],
)
def test_hostile_frames_close_the_connection_with_a_code(data: bytes, code: int, url: str) -> None:
    connection, answer = raw(url)
    with connection:
        assert answer.startswith(b"HTTP/1.1 101 ")
        connection.sendall(data + frame(BINARY, bytes(100_000)))  # more, which the server does not take
        assert code_of(connection) == code
    eventually(lambda: metric(url, "mingc_num_websockets") == 0)
    assert metric(url, "mingc_body_bytes") == 0
    eventually(lambda: metric(url, "mingc_num_connections") == 1)  # that of the question


def test_random_frames_end_in_a_code_and_leave_nothing(url: str) -> None:
    """Frames whose bytes, lengths, bits and order are changed at random; the seed is fixed."""
    random = Random(36)
    events = [json.dumps(each).encode() for each in (ENDLESS, DONE, CANCEL, {"type": "session.config"})]
    for _ in range(200):
        data = bytearray()
        for _ in range(random.randrange(1, 9)):
            opcode = random.choice((TEXT, TEXT, TEXT, 0x0, BINARY, PING, PONG, CLOSE, random.randrange(16)))
            payload = random.choice(events)[: random.choice((None, 0, 2, 20))]
            data += frame(opcode, payload, fin=random.random() < 0.8, masked=random.random() < 0.95)
        for _ in range(random.choice((0, 0, 1, 3))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        connection, _ = raw(url)
        with connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            assert code_of(connection) in (None, 0, *range(1000, 1012), *range(3000, 5000))  # 0: no code
    eventually(lambda: metric(url, "mingc_num_websockets") == 0)
    assert metric(url, "mingc_num_requests_running") == 0 and metric(url, "mingc_body_bytes") == 0
    assert metric(url, 'mingc_websockets_closed_total{code="1011"}') == 0


def test_a_message_may_come_in_any_pieces(url: str) -> None:
    message = json.dumps({"type": "nöthing"}, ensure_ascii=False).encode()
    parts = [
        frame(TEXT if not index else 0x0, bytes((each,)), fin=False) for index, each in enumerate(message)
    ]
    pieces = b"".join(part + frame(PING, b"p") + frame(0x0, fin=False) for part in parts) + frame(0x0)
    connection, _ = raw(url)
    with connection:
        for each in pieces:
            connection.sendall(bytes((each,)))
        connection.sendall(frame(BINARY, b'{"type": "other"}'))
        got = []
        for opcode, data in frames(connection):
            got.append((opcode, data))
            if b"other" in data:
                connection.sendall(frame(CLOSE, struct.pack(">H", 1000)))
    assert [data for opcode, data in got if opcode == PONG] == [b"p"] * len(parts)
    answers = [json.loads(data)["error"]["message"] for opcode, data in got if opcode == TEXT]
    assert answers == ['There is no event "n\\u00f6thing".', 'There is no event "other".']
    assert got[-1] == (CLOSE, struct.pack(">H", 1000))


def test_messages_that_are_no_events_are_answered(url: str) -> None:
    with connect(url) as connection:
        for message in (
            "",
            "[]",
            "{",
            "null",
            '{"type": 1}',
            '{"text": "x"}',
            '{"a":' * 5000,
            b"\xff\x00",
            "NaN",
        ):
            connection.send(message)
            answer = json.loads(connection.recv(timeout=30))
            assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["code"], message
        assert ask(connection) == "unsupported_event"


def test_incomplete_messages_are_charged_and_late_ones_closed() -> None:
    half = frame(BINARY, b"x" * 600_000, length=1_000_000)
    with fake_server(max_body_bytes=1 << 20, max_total_body_bytes=1 << 20, body_timeout_s=2.0) as (url, _):
        first, _ = raw(url)
        second, _ = raw(url)
        with first, second:
            first.sendall(half)
            eventually(lambda: metric(url, "mingc_body_bytes") > 500_000)
            second.sendall(half)
            assert code_of(second) == 1008, "too many bytes"
            assert code_of(first) == 1008, "too late"
        eventually(lambda: metric(url, "mingc_body_bytes") == 0)
        assert metric(url, 'mingc_connections_closed_total{reason="body_timeout"}') == 1
        with connect(url) as connection:
            connection.send(b" " * 900_000 + b'{"type": "nothing"}')
            assert "nothing" in connection.recv(timeout=30)
        eventually(lambda: metric(url, "mingc_body_bytes") == 0)


# Clients that do not read, and time


def test_the_header_timeout_ends_with_the_upgrade() -> None:
    with fake_server(header_timeout_s=0.3) as (url, _), connect(url) as connection:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as later:
            assert later.recv(1) == b"", "a connection that says nothing is closed"
        assert ask(connection) == "unsupported_event"


def test_a_client_that_does_not_read_is_heard_and_then_cut() -> None:
    with fake_server(write_timeout_s=3.0) as (url, service):
        connection, _ = raw(url)
        with connection:
            for event in (ENDLESS, DONE):
                connection.sendall(frame(TEXT, json.dumps(event).encode()))
            eventually(lambda: len(service.running) == 1)
            name = next(iter(service.running))
            connection.sendall(frame(TEXT, json.dumps(CANCEL).encode()))
            eventually(lambda: service.ends[name] == "cancelled" and not service.running)
            for event in (ENDLESS, DONE):
                connection.sendall(frame(TEXT, json.dumps(event).encode()))
            eventually(lambda: len(service.running) == 1)
            eventually(lambda: not service.running)
            eventually(lambda: metric(url, "mingc_num_websockets") == 0)
        assert set(service.ends.values()) == {"cancelled"}
        assert metric(url, 'mingc_connections_closed_total{reason="write_timeout"}') == 1
        assert metric(url, "mingc_num_requests_running") == 0


def test_pongs_do_not_pile_up() -> None:
    """100,000 pings of a client that does not read: their pongs are more than the system buffers."""
    num_pings = 100_000
    with fake_server() as (url, _):
        connection, _ = raw(url)
        with connection:
            for start in range(0, num_pings, 1000):
                pings = range(start, start + 1000)
                connection.sendall(b"".join(frame(PING, index.to_bytes(4) * 30) for index in pings))
            connection.sendall(frame(CLOSE, struct.pack(">H", 1000)))
            pongs = [int.from_bytes(data[:4]) for opcode, data in frames(connection) if opcode == PONG]
    assert pongs == sorted(set(pongs)) and len(pongs) < num_pings


def test_keepalive(monkeypatch: pytest.MonkeyPatch) -> None:
    made = WebSocketConnection.__init__

    def make(self: WebSocketConnection, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        self.ping_interval = self.ping_timeout = 0.2

    monkeypatch.setattr(WebSocketConnection, "__init__", make)
    with fake_server() as (url, _), connect(url) as alive:
        connection, _ = raw(url)
        with connection:
            assert [opcode for opcode, _ in frames(connection)] == [PING, CLOSE]
        eventually(lambda: metric(url, 'mingc_websockets_closed_total{code="1011"}') == 1)
        assert ask(alive) == "unsupported_event", "its library answers pings"


def test_a_session_has_a_time_limit() -> None:
    with fake_server(max_session_s=0.5) as (url, service), connect(url) as connection:
        for event in (ENDLESS, DONE):
            connection.send(json.dumps(event))
        code, events = close_code(connection)
        assert code == 1000 and events[-1]["error"]["code"] == "session_expired"
        assert set(service.ends.values()) == {"cancelled"}


def test_an_idle_session_makes_room_and_a_busy_one_stays() -> None:
    with fake_server(max_connections=2) as (url, _), connect(url) as busy, connect(url) as idle:
        for event in (ENDLESS, DONE):
            busy.send(json.dumps(event))
        busy.recv(timeout=30)
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        assert close_code(idle)[0] == 1008
        busy.send(json.dumps(CANCEL))
        while json.loads(message) if isinstance(message := busy.recv(timeout=30), str) else {}:
            pass
        assert metric(url, 'mingc_connections_closed_total{reason="evicted"}') >= 1


def test_a_bug_closes_with_1011(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from mingc.server.websocket.speech import SpeechSession

    def fail(self: SpeechSession, raw: bytes) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(SpeechSession, "_handle", fail)
    with fake_server() as (url, _), connect(url) as connection:
        connection.send("{}")
        code, events = close_code(connection)
        assert (code, events[0]["error"]["code"]) == (1011, "internal_error")
        assert "ZeroDivisionError" not in json.dumps(events)
    assert "a bug" in caplog.text


def test_1000_connections_opened_and_dropped() -> None:
    """At every moment of the handshake and of a message, some with a reset."""
    head = f"GET {PATH} HTTP/1.1\r\nhost: a\r\n{UPGRADE}\r\n".encode()
    message = frame(TEXT, json.dumps(ENDLESS).encode())
    with fake_server() as (url, service):
        host, port = url.removeprefix("http://").split(":")
        for index in range(1000):
            with socket.create_connection((host, int(port)), timeout=30) as connection:
                connection.sendall(head[: len(head) - max(0, 40 - index)])
                if index % 2:
                    connection.settimeout(0.0 if index < 40 else 30)
                    with contextlib.suppress(BlockingIOError):
                        connection.recv(1 << 16)
                    connection.settimeout(30)
                    connection.sendall(message * 2 + message[: index % len(message)])
                if index % 3 == 0:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(lambda: metric(url, "mingc_num_websockets") == 0)
        eventually(lambda: metric(url, "mingc_num_connections") == 1)
        eventually(lambda: not service.running)
        assert metric(url, "mingc_num_requests_running") == 0 and metric(url, "mingc_body_bytes") == 0
        with connect(url) as connection:  # type: ignore[assignment]
            assert ask(connection) == "unsupported_event"  # type: ignore[arg-type]


class _Client:
    """The ASGI side of a client that reads when it is told to."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.messages: list[dict[str, Any]] = []
        self.num_sending = 0

    async def send(self, message: Any) -> None:
        self.num_sending += 1
        await self.reads.wait()
        self.messages.append(message)


def test_what_waits_to_be_sent_is_bounded_and_can_be_taken_back() -> None:
    """A producer waits; what the reader answers never waits, and has an end. No message is too large for clients."""
    kept, dropped = "kept", "dropped"

    async def run(num_answers: int) -> _Client:
        client = _Client()
        state = ServerState(service=FakeService(), options=ServeOptions())
        socket = EventSocket({}, client.send, client.send, state)  # type: ignore[arg-type]

        async def serve(socket: EventSocket) -> None:
            await socket.send(b"x" * 2_000_000, kept)
            for _ in range(5):  # what was taken back takes no room
                await socket.send(b"y" * 2_000_000, dropped)
                assert socket.drop(dropped)
            await socket.send(b"y" * 2_000_000, dropped)
            await socket.send(b"z" * 900_000, kept)
            waiting = asyncio.ensure_future(socket.send(b"w", kept))
            for _ in range(num_answers):
                socket.put(b"a" * 800_000)
            await asyncio.sleep(0)
            assert not waiting.done()
            assert socket.drop(dropped) and not socket.drop(dropped)
            client.reads.set()
            await waiting

        await socket.run(serve)
        return client

    *sent, close = asyncio.run(run(2)).messages
    assert all(len(each["bytes"]) < 900_001 for each in sent)
    assert (
        b"".join(each["bytes"] for each in sent)
        == b"x" * 2_000_000 + b"z" * 900_000 + b"a" * 1_600_000 + b"w"
    )
    assert (close["type"], close["code"]) == ("websocket.close", 1000)
    assert asyncio.run(run(9)).messages[-1]["code"] == 1008


def test_what_is_being_written_cannot_be_taken_back_and_is_counted() -> None:
    async def run() -> list[str]:
        client, told = _Client(), list[str]()
        state = ServerState(service=FakeService(), options=ServeOptions())
        socket = EventSocket({}, client.send, client.send, state)  # type: ignore[arg-type]

        async def serve(socket: EventSocket) -> None:
            for name in ("first", "second"):
                socket.put(name.encode(), "group", partial(told.append, name))
            while not client.num_sending:
                await asyncio.sleep(0)
            assert told == ["first"], "the client has a part of it"
            assert socket.drop("group") and not socket.drop("group")
            client.reads.set()

        await socket.run(serve)
        assert [each.get("bytes") for each in client.messages] == [b"first", None]
        return told

    assert asyncio.run(run()) == ["first"]


# Shutdown


def test_sessions_go_on_while_the_server_drains() -> None:
    with child(0.2, drain_s=3.0) as (process, url), connect(url) as connection:
        os.kill(process.pid, signal.SIGTERM)
        eventually(lambda: httpx.get(f"{url}/ready", trust_env=False).status_code == 503)
        assert ask(connection) == "unsupported_event"
        status, code, headers = refusal(url)
        assert (status, code, headers["retry-after"]) == (503, "stopping", "1")
        assert ask(connection) == "unsupported_event"
        assert close_code(connection)[0] == 1012


def test_a_session_that_speaks_is_ended_by_the_shutdown() -> None:
    with child(0.2) as (process, url), connect(url) as connection:
        for event in (ENDLESS, DONE):
            connection.send(json.dumps(event))
        connection.recv(timeout=30)
        os.kill(process.pid, signal.SIGTERM)
        assert close_code(connection)[0] == 1012
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "in order\n"
