"""Clients that trickle, stall, flood or speak no HTTP: the server stays reachable and frees what they held."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from server_thread import eventually, fake_server, metric
from uvicorn.server import ServerState as UvicornState

from mingc.errors import CapacityError, ConfigError
from mingc.runtime.request import ServiceLoad
from mingc.server.body_budget import FREE_BYTES, BodyBudget
from mingc.server.connections import (
    PROBE_CONNECTIONS,
    Acceptor,
    ConnectionTable,
    HttpConnection,
    connection_limit,
)
from mingc.server.metrics import Metrics
from mingc.server.options import ServeOptions

CHAT = "/v1/chat/completions"
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
# A server with few descriptors; its log is limited as that of `mingc serve`.
CHILD = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from fake_service import FakeService
from mingc.server.logs import configure_logging
from mingc.server.options import ServeOptions
from mingc.server.app import create_app
from mingc.server.lifecycle import serve
configure_logging("info", "text")
serve(create_app(FakeService(), ServeOptions(port=0, drain_s=0)), announce=lambda url: print(url, flush=True))
"""


class Connection:
    """What a table of connections knows of one."""

    def __init__(self, name: str, closed: list[str]) -> None:
        self._name, self._closed = name, closed

    def abort(self) -> None:
        self._closed.append(self._name)


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            data += piece
    return data


def status_and_error(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.fixture
def few_descriptors(tmp_path: Path) -> Iterator[tuple[str, Path, psutil.Process]]:
    """A server process that may have 256 descriptors: its URL and its log."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (root / "tests" / "support", root)))
    log = tmp_path / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), log, psutil.Process(process.pid)
        process.terminate()
        assert process.wait(timeout=30) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_more_trickling_connections_than_descriptors(
    few_descriptors: tuple[str, Path, psutil.Process],
) -> None:
    """Probes and chats are answered, the log stays small, and all descriptors come back."""
    url, log, process = few_descriptors
    with httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        before = process.num_fds()
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(connect(url)) for _ in range(400)]
            for _ in range(3):
                for connection in connections:
                    with contextlib.suppress(OSError):  # closed by the server
                        connection.send(b"G")
                assert httpx.get(f"{url}/health", timeout=20, trust_env=False).status_code == 200
                body = {"messages": [{"role": "user", "content": "hi"}]}
                assert httpx.post(f"{url}{CHAT}", json=body, timeout=20, trust_env=False).status_code == 200
            assert metric(url, 'mingc_connections_closed_total{reason="evicted"}') > 100
        eventually(lambda: process.num_fds() <= before)
    assert log.stat().st_size < 100_000


def test_request_headers_have_a_time_limit() -> None:
    with fake_server(header_timeout_s=0.3) as (url, _), connect(url) as trickling, connect(url) as silent:
        trickling.sendall(b"GET /health HTTP/1.1\r\nhost:")
        status, error = status_and_error(read_all(trickling))
        assert (status, error["code"]) == (408, "header_timeout")
        assert read_all(silent) == b""
        assert metric(url, 'mingc_connections_closed_total{reason="header_timeout"}') == 2
        eventually(lambda: metric(url, "mingc_num_connections") == 1)  # that of the question


def test_a_kept_connection_has_the_same_limit_for_its_next_request() -> None:
    with fake_server(header_timeout_s=0.3) as (url, _), connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET /he")
        answers = read_all(connection)
        assert answers.startswith(b"HTTP/1.1 200 ")
        assert b"HTTP/1.1 408 " in answers


def test_a_running_request_is_not_a_late_one() -> None:
    with fake_server(header_timeout_s=0.3) as (url, _):
        body = {"messages": [{"role": "user", "content": "endless"}], "stream": True}
        with httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=30, trust_env=False) as response:
            lines = response.iter_lines()
            first = time.monotonic()
            while time.monotonic() - first < 1:
                assert next(lines) is not None


def test_a_pipelined_request_is_not_a_late_one() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "endless"}], "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with fake_server(header_timeout_s=0.3) as (url, _), connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" + head + body)
        first = time.monotonic()
        while time.monotonic() - first < 1:
            assert connection.recv(1 << 16)


def test_a_body_that_stalls_is_ended_before_its_whole_time() -> None:
    with fake_server(body_idle_timeout_s=0.3, body_timeout_s=600) as (url, _), connect(url) as connection:
        connection.sendall(f"{HEAD}content-length: 100\r\n\r\n{{".encode())
        head, _, _ = connection.recv(1 << 16).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        eventually(lambda: metric(url, "mingc_num_requests_running") == 0)


def test_a_client_that_does_not_read_is_cut_off() -> None:
    with fake_server(write_timeout_s=0.5) as (url, service):
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            body = {"modalities": ["text", "audio"], "stream": True}
            payload = json.dumps({**body, "messages": [{"role": "user", "content": "endless"}]}).encode()
            connection.sendall(f"{HEAD}content-length: {len(payload)}\r\n\r\n".encode() + payload)
            eventually(lambda: len(service.running) == 1)
            eventually(lambda: not service.running)
            assert metric(url, 'mingc_connections_closed_total{reason="write_timeout"}') == 1
        assert list(service.ends.values()) == ["cancelled"]


def test_the_connection_that_waits_longest_makes_room() -> None:
    closed: list[str] = []

    async def fill() -> None:
        table = ConnectionTable(options=ServeOptions(), metrics=Metrics(), limit=3)
        given = [Connection(name, closed) for name in ("a", "b", "c")]
        for each in given:
            table.add(each)
        table.set_waiting(given[0])  # its request has ended just now
        assert table.make_room() and closed == ["b"]
        assert table.make_room() and closed == ["b"], "there is room"

    asyncio.run(fill())


class LateConnection(Connection):
    """One whose client has not read for `blocked` seconds."""

    def __init__(self, name: str, closed: list[str], blocked: float = 0.0) -> None:
        super().__init__(name, closed)
        self._blocked = blocked

    def blocked_s(self, now: float) -> float:
        return self._blocked

    def close_unfinished(self) -> None:
        self._closed.append(f"{self._name} waited")


def test_connections_beyond_a_time_limit_are_closed_and_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []

    async def run() -> None:
        now = 100.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        metrics = Metrics()
        options = ServeOptions(header_timeout_s=10.0, write_timeout_s=5.0)
        table: Any = ConnectionTable(options=options, metrics=metrics, limit=9)
        first, later, busy, stuck = (
            LateConnection(name, closed, blocked)
            for name, blocked in (("first", 0.0), ("later", 0.0), ("busy", 4.9), ("stuck", 5.0))
        )
        for each in (busy, stuck):
            table.add(each)
            del table.waiting[each]  # each has a running request
        table.add(first)
        now = 101.0
        table.add(later)

        def counted() -> dict[str, float]:
            lines = metrics.render(ServiceLoad()).decode().splitlines()
            found = [line for line in lines if line.startswith("mingc_connections_closed_total")]
            gauge = [line for line in lines if line.startswith("mingc_num_connections ")]
            return {
                line.split()[0].removeprefix("mingc_"): float(line.split()[1]) for line in [*found, *gauge]
            }

        now = 109.9
        table.close_late()
        assert closed == ["stuck"]
        assert counted() == {'connections_closed_total{reason="write_timeout"}': 1, "num_connections": 3}
        now = 110.0
        for _ in range(2):
            table.close_late()
            assert closed == ["stuck", "first waited"], "the later one has waited for 9 s"
            assert [*table.waiting] == [later]
        assert counted()['connections_closed_total{reason="header_timeout"}'] == 1
        table.remove(first)
        table.set_waiting(first)  # its response ends after it was closed
        assert [*table.waiting] == [later]
        table.limit = 2
        assert table.make_room() and closed[-1] == "later"
        assert counted()['connections_closed_total{reason="evicted"}'] == 1
        table.limit = 1
        assert not table.make_room() and counted()["num_connections"] == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("num_idle", "num_others", "expected"),
    [(0, 0, 256), (63, 0, 256), (0, 1, 256), (5, 7, 128), (0, 40, 24), (0, 63, 16), (0, 90, 16)],
)
def test_uploads_share_what_bodies_may_take_of_the_event_loop(
    num_idle: int, num_others: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together 1 MiB at most is read before other work, but 16 KiB of each; heads are read in 16 KiB."""
    limits: list[int] = []
    tables: list[ConnectionTable] = []
    connection_made, receive = HttpConnection.connection_made, HttpConnection.data_received

    def made(self: HttpConnection, transport: asyncio.Transport) -> None:
        tables.append(self._table)
        connection_made(self, transport)

    def data_received(self: HttpConnection, data: bytes) -> None:
        limit: int = self.transport.max_size  # type: ignore[attr-defined]
        assert len(data) <= limit
        limits.append(limit)
        receive(self, data)

    monkeypatch.setattr(HttpConnection, "connection_made", made)
    monkeypatch.setattr(HttpConnection, "data_received", data_received)
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 600_000}]}).encode()
    head = f"{HEAD}content-length: {len(body)}\r\n\r\n".encode()
    with fake_server() as (url, _), contextlib.ExitStack() as idle:
        for _ in range(num_idle):
            idle.enter_context(connect(url))
        for _ in range(num_others):
            idle.enter_context(connect(url)).sendall(head + body[:1])
        with connect(url) as connection:
            eventually(lambda: bool(tables) and len(tables[-1].connections) == num_idle + num_others + 1)
            eventually(lambda: len(tables[-1].uploading) == num_others)
            limits.clear()
            for _ in range(2):
                connection.sendall(head + body)
                assert connection.recv(15) == b"HTTP/1.1 200 OK"
                while not connection.recv(1 << 16).endswith(b"}"):
                    pass  # the whole answer
    first = [index for index, limit in enumerate(limits) if limit == 16 << 10]
    kib = {limit >> 10 for limit in limits}
    assert len(limits) >= 4 and first[0] == 0 and kib <= {16, expected}, limits
    if expected > 16:
        assert len(first) == 2 and kib == {16, expected}
    assert not tables[-1].uploading


def closed_by(table: Any) -> dict[str, float]:
    samples = table.metrics.samples(ServiceLoad())
    return {
        dict(each.labels)["reason"]: each.value
        for each in samples
        if each.name == "mingc_connections_closed_total"
    }


async def accept(table: Any, attach: Callable[..., Any], num_clients: int) -> tuple[list[bool], int]:
    """Connect clients to an acceptor; `is_probe` of each accepted one, none of which waits, and how many were cut."""
    accepted: list[bool] = []

    def make(is_probe: bool) -> Any:
        accepted.append(is_probe)
        connection: Any = Connection(str(len(accepted)), [])
        table.add(connection)
        table.waiting.pop(connection)
        return connection

    asyncio.get_running_loop().connect_accepted_socket = attach  # type: ignore[method-assign]
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as clients:
        acceptor = Acceptor(listener, table, make)
        acceptor.start()
        address = listener.getsockname()
        sockets = [clients.enter_context(socket.create_connection(address)) for _ in range(num_clients)]
        while len(accepted) + sum(closed_by(table).values()) < num_clients:
            await asyncio.sleep(0.01)
        await acceptor.wait_closed()
        acceptor.close()
        cut = 0
        for each in sockets:
            each.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                cut += each.recv(1) == b""
    return accepted, cut


def test_connections_beyond_the_limit_are_probes_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingc.server.connections.PROBE_CONNECTIONS", 2)
    held: list[socket.socket] = []

    async def attach(make: Callable[[], Any], connection: socket.socket) -> None:
        held.append(connection)
        make()

    async def run() -> None:
        table: Any = ConnectionTable(options=ServeOptions(), metrics=Metrics(), limit=3)
        assert await accept(table, attach, 6) == ([False] * 3 + [True] * 2, 1)
        assert closed_by(table) == {"refused": 1}

    asyncio.run(run())
    for connection in held:
        connection.close()


def test_a_connection_that_breaks_while_it_is_set_up_is_forgotten() -> None:
    async def fail(make: Callable[[], Any], connection: socket.socket) -> None:
        raise ConnectionResetError

    async def run() -> None:
        table: Any = ConnectionTable(options=ServeOptions(), metrics=Metrics(), limit=9)
        assert await accept(table, fail, 1) == ([False], 1)
        assert not table.connections and not table.waiting

    asyncio.run(run())


def test_a_server_without_descriptors_closes_a_waiting_connection_and_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client that waits is answered with the descriptor of one that sent nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with fake_server() as (url, _), contextlib.ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        before = len(descriptors())
        silent = stack.enter_context(connect(url))
        eventually(lambda: metric(url, "mingc_num_connections") == 2)  # and the client that asks
        late = stack.enter_context(socket.socket())
        late.settimeout(30)
        eventually(lambda: metric(url, "mingc_num_connections") == 2)
        # The server closes its end of the asking client later: that would be a descriptor for `late`.
        eventually(lambda: len(descriptors()) <= before + 3)
        most = max(descriptors())
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most + 8, hard))
            held: list[int] = []
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(silent.fileno()))
                    stack.callback(os.close, held[-1])
            late.connect((host, int(port)))
            late.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert read_all(late).startswith(b"HTTP/1.1 200 ")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert silent.recv(1) == b""
        assert metric(url, 'mingc_connections_closed_total{reason="no_descriptor"}') >= 1
    assert "cannot accept connections: Too many open files" in caplog.messages


def descriptors() -> list[int]:
    return [int(each.name) for each in Path("/proc/self/fd").iterdir()]


@pytest.mark.parametrize(
    ("soft", "requested", "limit"),
    [
        (resource.RLIM_INFINITY, None, 4096),
        (resource.RLIM_INFINITY, 9000, 9000),
        (100_000, None, 4096),
        (100_000, 5000, 5000),
        (1000, None, 1000 - 10 - 64 - 16),
        (1000, 910, 910),  # all that there is room for
        (98, None, 8),
    ],
)
def test_the_limit_of_connections_follows_the_descriptors(
    soft: int, requested: int | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 descriptors are open, 64 kept for media and engines, 16 for probes."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, soft))
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(range(10)))
    assert connection_limit(requested) == limit


@pytest.mark.parametrize(
    ("soft", "requested", "where"), [(97, None, "RLIMIT_NOFILE"), (1000, 911, "--max-connections")]
)
def test_too_few_descriptors_stop_the_start(
    soft: int, requested: int | None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, soft))
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(range(10)))
    with pytest.raises(
        ConfigError, match=f"{soft} file descriptors leave room for {soft - 90} connections"
    ) as caught:
        connection_limit(requested)
    assert caught.value.where == where and "ulimit -n" in (caught.value.fix or "")
    assert ("--max-connections" in (caught.value.fix or "")) == (requested is not None)


def test_a_full_server_evicts_idle_connections_before_it_refuses() -> None:
    with fake_server(max_connections=4) as (url, service), contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(url)) for _ in range(4)]
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        assert read_all(idle[0]) == b""
        payload = json.dumps({"messages": [{"role": "user", "content": "endless"}], "stream": True}).encode()
        busy = [stack.enter_context(connect(url)) for _ in range(4)]
        for connection in busy:
            connection.sendall(f"{HEAD}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        eventually(lambda: len(service.running) == 4)
        # All connections run requests: probes are answered, further chats are not.
        assert httpx.get(f"{url}/health", trust_env=False).json()["num_requests_running"] == 4
        refused = httpx.post(f"{url}{CHAT}", json={}, trust_env=False)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
        assert refused.headers["retry-after"] == "1"
        waiting = [stack.enter_context(connect(url)) for _ in range(PROBE_CONNECTIONS + 4)]
        assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200
        assert len(service.running) == 4
        del waiting


def test_a_refused_body_gives_back_what_it_held_and_no_more() -> None:
    metrics = Metrics()
    budget = BodyBudget(1000, metrics)
    with budget.charge() as other:
        other.set(FREE_BYTES + 600)
        for _ in range(3):
            with pytest.raises(CapacityError), budget.charge() as charge:
                charge.set(FREE_BYTES + 300)
                charge.set(FREE_BYTES + 500)
            held = {each.name: each.value for each in metrics.samples(ServiceLoad())}
            assert held["mingc_body_bytes"] == 600
        with pytest.raises(CapacityError), budget.charge() as charge:
            charge.set(FREE_BYTES + 401)


def test_bodies_share_one_budget() -> None:
    budget = BodyBudget(1000, Metrics())
    with budget.charge() as first, budget.charge() as second:
        first.set(FREE_BYTES + 600)
        second.set(FREE_BYTES)  # small bodies are never refused
        with pytest.raises(CapacityError) as caught:
            second.set(FREE_BYTES + 401)
        assert caught.value.code == "body_budget_exhausted"
        second.set(FREE_BYTES + 400)
        first.set(0)
        second.set(FREE_BYTES + 1000)
    with budget.charge() as third:
        third.set(FREE_BYTES + 1000)


def test_half_sent_bodies_fill_the_budget_and_give_it_back() -> None:
    size = 1_000_000
    with (
        fake_server(max_body_bytes=size, max_total_body_bytes=2 * size) as (url, _),
        contextlib.ExitStack() as stack,
    ):
        for _ in range(2):
            connection = stack.enter_context(connect(url))
            connection.sendall(f"{HEAD}content-length: {size}\r\n\r\n".encode() + b" " * (size - 1))
        eventually(lambda: metric(url, "mingc_body_bytes") > 2 * (size - FREE_BYTES) - 10)
        large = httpx.post(f"{url}{CHAT}", content=b" " * size, trust_env=False)
        assert (large.status_code, large.json()["error"]["code"]) == (503, "body_budget_exhausted")
        assert large.headers["retry-after"] == "1"
        small = {"messages": [{"role": "user", "content": "hi"}]}
        assert httpx.post(f"{url}{CHAT}", json=small, trust_env=False).status_code == 200
        stack.close()
        eventually(lambda: metric(url, "mingc_body_bytes") == 0)


def test_bodies_that_arrive_together_are_refused_at_once_or_served() -> None:
    """Two bodies fit: they are not refused half-way because of a third that has begun as well."""
    size = 1_000_000
    with (
        fake_server(max_body_bytes=size, max_total_body_bytes=2 * size) as (url, _),
        contextlib.ExitStack() as stack,
    ):
        connections = [stack.enter_context(connect(url)) for _ in range(3)]
        for number, connection in enumerate(connections):
            connection.sendall(f"{HEAD}content-length: {size}\r\n\r\n".encode() + b" " * 100_000)
            if number < 2:
                charged = (number + 1) * (size - FREE_BYTES)
                eventually(lambda charged=charged: metric(url, "mingc_body_bytes") == charged)  # type: ignore[misc]
        assert connections[2].recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        for connection in connections[:2]:
            connection.sendall(b" " * (size - 100_000))
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("target", ["http://a:8000", "HTTP://b", "https://u:p@c.example"])
@pytest.mark.parametrize(
    "upgrade", ["", "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"]
)
def test_absolute_targets_and_offers_of_http2_are_answered(
    target: str, upgrade: str, caplog: pytest.LogCaptureFixture
) -> None:
    """RFC 9112 §3.2.2 and RFC 9110 §7.8, twice on one connection, as Java's HttpClient does."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    head = HEAD.replace(" /", f" {target}/") + f"{upgrade}content-length: {len(body)}\r\n\r\n"
    with fake_server() as (url, _), connect(url) as connection:
        for _ in range(2):
            connection.sendall(head.encode() + body)
            answer = HTTPResponse(connection)
            answer.begin()
            assert (answer.status, b"You said: Hi" in answer.read()) == (200, True)
        connection.sendall(f"OPTIONS {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 "), "the target is *"
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_client_that_is_answered_slowly_is_not_late() -> None:
    """Late is a client to which nothing was delivered, though its bytes have not left the server's own buffer."""
    times = [0.0]
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.connect(listener.getsockname())

        async def main() -> None:
            table = ConnectionTable(options=ServeOptions(write_timeout_s=60), metrics=Metrics(), limit=4)
            config = uvicorn.Config(lambda: None, log_config=None)
            made = HttpConnection(table, config, UvicornState(), {}, is_probe=False)
            accepted, _ = listener.accept()
            accepted.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: made, accepted)
            made.transport.write(b"x" * (16 << 20))
            assert made.flow.write_paused
            for _ in range(8):  # 8 × 50 s, and a little is read in each
                assert made.blocked_s(times[0]) < 60
                received = 0
                while received < 32768:
                    received += len(await asyncio.to_thread(client.recv, 4096))
                times[0] += 50
            assert made.blocked_s(times[0]) < 60
            times[0] += 61  # and now nothing
            assert made.blocked_s(times[0]) >= 60
            made.abort()

        asyncio.run(main())


def test_a_refused_body_is_not_read() -> None:
    with fake_server() as (url, _), connect(url) as connection:
        connection.sendall(
            HEAD.replace("json", "xml").encode() + b"content-length: 100000000\r\n\r\n" + b"x" * 65536
        )
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 415 ")
        sent = 0
        with contextlib.suppress(OSError):  # the server closes the connection
            while sent < 100_000_000:
                sent += connection.send(b"x" * (1 << 20))
        assert sent < 50_000_000  # what the kernel buffers


def test_media_of_a_running_request_are_charged() -> None:
    data = "QUJD" * 100_000
    message = {"role": "user", "content": "endless"}
    with fake_server() as (url, service):
        body = {"messages": [message], "images": [f"data:image/png;base64,{data}"], "stream": True}
        with httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=30, trust_env=False) as response:
            lines = response.iter_lines()
            next(lines)
            assert metric(url, "mingc_body_bytes") == 300_000 + len("endless") - FREE_BYTES
        eventually(lambda: not service.running)
        eventually(lambda: metric(url, "mingc_body_bytes") == 0)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 100_000, 431),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 16_384 + b"\r\n\r\n", 431),
        (b"GET /" + b"y" * 16_384 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 414),
        (
            b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ],
)
def test_what_is_no_http_gets_a_json_error(data: bytes, expected: int) -> None:
    with fake_server() as (url, _), connect(url) as connection:
        connection.sendall(data)
        status, error = status_and_error(read_all(connection))
        assert (status, error["code"]) == (expected, "invalid_http")
        assert metric(url, f'mingc_http_requests_total{{route="unmatched",status="{expected}"}}') == 1


def test_parts_of_a_stream_are_framed_as_the_version_of_http_asks() -> None:
    """HTTP/1.0 knows no chunks: the body ends with the connection. One of HTTP/1.1 is used for the next answer."""
    body = json.dumps({"input": "Hello.", "stream_format": "audio", "response_format": "wav"}).encode()
    head = f"{HEAD.replace('chat/completions', 'audio/speech')}content-length: {len(body)}\r\n\r\n"
    with fake_server() as (url, _):
        found = []
        with connect(url) as connection:
            for _ in range(2):
                connection.sendall(head.encode() + body)
                answer = HTTPResponse(connection)
                answer.begin()
                assert (answer.status, answer.getheader("transfer-encoding")) == (200, "chunked")
                found.append(answer.read())
        with connect(url) as connection:
            connection.sendall(head.replace("HTTP/1.1", "HTTP/1.0").encode() + body)
            plain_head, _, plain = read_all(connection).partition(b"\r\n\r\n")
        assert b"chunked" not in plain_head.lower()
        assert plain[:4] == b"RIFF" and len(plain) > 2 * 14112
        assert found == [plain, plain]
