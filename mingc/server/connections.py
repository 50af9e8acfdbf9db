"""TCP connections of the server: accepting, their number, and timeouts.

uvicorn parses HTTP by h11 and runs the app. This module adds rules of RFC 9112 that h11 leaves to servers, a time limit
on request headers and on clients to which nothing can be delivered, a limit on connections that keeps `/health`
reachable, a pause in accepting when descriptors run out (asyncio's own loop would repeat `accept` and its log line
without a pause), and JSON errors for data that is not HTTP. A connection that becomes a WebSocket goes on as a
`mingc.server.websocket_connection.WebSocketConnection` in the same table.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import re
import resource
import socket
import sys
import termios
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState as UvicornState

from mingc.errors import ConfigError, RequestError
from mingc.server.error_objects import encode_error
from mingc.server.metrics import Metrics
from mingc.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("mingc.http")

PROBE_CONNECTIONS = 16  # accepted beyond the limit: they may ask for probes and lists, not for generation
_FILES = 64  # descriptors for media, engine files, child processes and pipes
_LARGEST_DEFAULT = 4096
_SMALLEST = 8
_ACCEPTS = 16  # connections accepted before other work of the event loop
# Bytes read from one connection before others are served: with asyncio's 256 KiB, 64 uploads delay a probe by a second.
# Fewer uploads share the bytes that 64 may read in one pass of the event loop, so a body takes fewer passes.
READ_BYTES = 16 * 1024
_MAX_HEAD_BYTES = 16 * 1024  # request line and headers
_ABSOLUTE = re.compile(rb"https?://(?:[^/?#]*@)?([^/?#]*)", re.IGNORECASE)
_LARGEST_READ_BYTES = 256 * 1024
_PASS_BYTES = 64 * READ_BYTES
_ACCEPT_PAUSE_S = 0.1
# Bytes of a refused body that are read and dropped to keep the connection usable; more than sockets buffer.
_DISCARDED_BYTES = 16 << 20
LINGER_S = 1.0  # a connection closed with unread data loses what the client has not read yet
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def connection_limit(requested: int | None) -> int:
    """Connections that this process's descriptors allow, or `requested`, which must not be more.

    Raises:
        ConfigError: when there are too few descriptors.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return requested or _LARGEST_DEFAULT
    used = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else _FILES
    room = soft - used - _FILES - PROBE_CONNECTIONS
    if room < (requested or _SMALLEST):
        raise ConfigError(
            f"{soft} file descriptors leave room for {max(room, 0)} connections",
            where="--max-connections" if requested else "RLIMIT_NOFILE",
            fix=f"raise `ulimit -n`{', or pass a smaller --max-connections' if requested else ''}",
        )
    return requested or min(room, _LARGEST_DEFAULT)


class Connection(Protocol):
    """What a `ConnectionTable` knows of every connection."""

    def blocked_s(self, now: float) -> float: ...

    def abort(self) -> None: ...


class SessionConnection(Connection, Protocol):
    """What it knows of a WebSocket."""

    def end(self, code: int, reason: str) -> None: ...


@dataclass(kw_only=True, slots=True, eq=False)
class ConnectionTable:
    """Open connections of one server. Call it from the event loop only.

    Attributes:
        uploading: connections of which a part of a body has arrived.
        waiting: connections without a running request, with the time since when; the longest wait first.
        idle: WebSockets without a running response, the longest idle first.
        receiving: WebSockets of which a part of a message has arrived, with the time since when, in this order.
    """

    options: ServeOptions
    metrics: Metrics
    limit: int
    connections: set[Connection] = field(default_factory=set, init=False)
    uploading: set[Connection] = field(default_factory=set, init=False)
    waiting: dict[HttpConnection, float] = field(default_factory=dict, init=False)
    idle: dict[SessionConnection, None] = field(default_factory=dict, init=False)
    receiving: dict[SessionConnection, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.metrics.add_limit("connections", lambda: (len(self.connections), self.limit))

    @property
    def body_read_bytes(self) -> int:
        """Most bytes of a body to read at once."""
        share = _PASS_BYTES // max(1, len(self.uploading))
        return min(max(share, READ_BYTES), _LARGEST_READ_BYTES)

    def make_room(self) -> bool:
        """If the table is full, close the connection that has waited longest. Returns False if none waits.

        A client opens the next connection for its next request, but has to begin its session again, so sessions come
        last.
        """
        return len(self.connections) < self.limit or self.evict("evicted")

    def evict(self, reason: str) -> bool:
        """Close the connection that has waited longest. Returns False if none waits."""
        for connection in self.waiting:
            self._close(connection, reason)
            connection.abort()
            return True
        for session in self.idle:
            self._close(session, reason)
            session.end(1008, "idle, and all connections of the server are in use")
            return True
        return False

    def add(self, connection: HttpConnection) -> None:
        self._add(connection)
        self.set_waiting(connection)

    def add_session(self, session: SessionConnection) -> None:
        self._add(session)
        self.set_idle(session)

    def _add(self, connection: Connection) -> None:
        self.connections.add(connection)
        self.metrics.connections.set(len(self.connections))

    def remove(self, connection: Any) -> None:
        self.connections.discard(connection)
        self.uploading.discard(connection)
        self.metrics.connections.set(len(self.connections))
        for group in (self.waiting, self.idle, self.receiving):
            group.pop(connection, None)

    def set_waiting(self, connection: HttpConnection) -> None:
        """Record that the connection waits for a request from now on."""
        if connection in self.connections:
            self.waiting.pop(connection, None)
            self.waiting[connection] = asyncio.get_running_loop().time()

    def set_idle(self, session: SessionConnection) -> None:
        """Record that a session without a running response was active just now."""
        if session in self.connections:
            self.idle.pop(session, None)
            self.idle[session] = None

    def close_late(self) -> None:
        """Close connections that exceed a time limit."""
        now = asyncio.get_running_loop().time()
        for connection, since in list(self.waiting.items()):
            if now - since < self.options.header_timeout_s:
                break  # later entries wait for less
            self.waiting.pop(connection)
            self.metrics.connections_closed.labels("header_timeout").inc()
            connection.close_unfinished()
        for session, since in list(self.receiving.items()):
            if now - since < self.options.body_timeout_s:
                break
            self._close(session, "body_timeout")
            session.end(1008, f"a message did not arrive within {self.options.body_timeout_s:g} s")
        for each in list(self.connections):
            if each.blocked_s(now) >= self.options.write_timeout_s:
                self._close(each, "write_timeout")
                each.abort()

    def _close(self, connection: Connection, reason: str) -> None:
        self.remove(connection)
        self.metrics.connections_closed.labels(reason).inc()


class Delivery:
    """For how long nothing could be delivered to a client while data was pending."""

    def __init__(self) -> None:
        self._unsent = 0
        self._since = 0.0

    def blocked_s(self, transport: asyncio.Transport | None, now: float, *, is_full: bool) -> float:
        """Seconds until `now`. `transport`: None before the connection is set up. `is_full`: whether its buffer is.

        Nothing is added to a full or closing connection's buffer. It shrinks only when much has been delivered (on
        Linux a third of what the kernel holds), so what the kernel has sent without an acknowledgement counts too.
        """
        if transport is None or not (is_full or transport.is_closing()):
            self._unsent = 0
            return 0.0
        unsent = transport.get_write_buffer_size() + _unacknowledged(transport)
        if not self._unsent or unsent < self._unsent:
            self._unsent, self._since = max(unsent, 1), now
        return now - self._since


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes in the kernel's send buffer; 0 where the system does not tell."""
    count = bytearray(4)
    with contextlib.suppress(OSError, ValueError):  # closed
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
    return int.from_bytes(count, sys.byteorder)


class _Parser(h11.Connection):
    """h11's parser of requests, with rules of RFC 9112 that it leaves to servers.

    Parts of a chunked body, of which streams have thousands, pass by its state machine, whose state they do not change.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _MAX_HEAD_BYTES)
        self._is_chunked = False

    def send(self, event: Any) -> Any:
        if self._is_chunked and type(event) is h11.Data and event.data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        data = super().send(event)
        if type(event) is h11.Response:
            self._is_chunked = data is not None and b"\r\ntransfer-encoding: chunked\r\n" in data.lower()
        return data

    def next_event(self) -> Any:
        event = super().next_event()
        return _checked(event) if isinstance(event, h11.Request) else event


def _checked(request: h11.Request) -> h11.Request:
    """Refuse a request that is too large or whose body has no certain end; return it in origin form.

    Raises: h11.RemoteProtocolError.
    """
    if len(request.target) > _MAX_HEAD_BYTES:
        raise h11.RemoteProtocolError(
            f"the path is longer than {_MAX_HEAD_BYTES} bytes", error_status_hint=414
        )
    # h11 limits only what is incomplete; a head that arrives at once may be larger
    size = len(request.method) + len(request.target) + sum(len(n) + len(v) + 4 for n, v in request.headers)
    if size > _MAX_HEAD_BYTES:
        raise h11.RemoteProtocolError(
            f"request line and headers are larger than {_MAX_HEAD_BYTES} bytes", error_status_hint=431
        )
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        # RFC 9112 §6.1: a proxy may have seen another end of the body
        raise h11.RemoteProtocolError("send either Content-Length or, in HTTP/1.1, Transfer-Encoding")
    if (found := _ABSOLUTE.match(request.target)) is None:
        return request
    path = request.target[found.end() :]  # RFC 9112 §3.2.2
    if not path.startswith(b"/"):
        path = b"*" if request.method == b"OPTIONS" and not path else b"/" + path
    headers = [(b"host", found[1]), *((n, v) for n, v in request.headers if n != b"host")]
    return h11.Request(method=request.method, target=path, headers=headers, http_version=request.http_version)


class HttpConnection(H11Protocol):
    """uvicorn's connection, known to a `ConnectionTable`. A probe connection is closed after one response."""

    def __init__(
        self,
        table: ConnectionTable,
        config: uvicorn.Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        *,
        is_probe: bool,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "is_probe": is_probe})
        self.conn = _Parser()
        self._table = table
        self._is_probe = is_probe
        self._is_aborted = False
        self._delivery = Delivery()
        table.add(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_read_bytes(READ_BYTES)
        if self._is_aborted:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._after_events()
        table = self._table
        if self.conn.their_state is h11.SEND_BODY and self in table.connections:
            table.uploading.add(self)
            self._set_read_bytes(table.body_read_bytes)
        else:
            table.uploading.discard(self)
            self._set_read_bytes(READ_BYTES)

    def _set_read_bytes(self, count: int) -> None:
        self.transport.max_size = count  # type: ignore[attr-defined]  # of asyncio's selector transports

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._table.set_waiting(self)
        if self.conn.their_state is h11.SEND_BODY and self._declared_bytes() > _DISCARDED_BYTES:
            # Refused before its body was read: the client may read the answer, but must not send the rest.
            self.flow.pause_reading()
            self.loop.call_later(LINGER_S, self.transport.close)
        self._after_events()  # a pipelined request may have begun

    def _declared_bytes(self) -> int:
        return next((int(value) for name, value in self.headers if name == b"content-length"), 0)

    def _after_events(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            return
        self._table.waiting.pop(self, None)
        if self._is_probe and self.cycle.keep_alive:
            self.cycle.keep_alive = False
            self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"close")]

    def _should_upgrade(self) -> bool:
        """Whether the request asks for a WebSocket; other offers are ignored (RFC 9110 §7.8), as uvicorn's log lines.

        A request with a body or with data behind it goes on as HTTP: frames may follow only after the answer.
        """
        fields = dict(self.headers)
        return (
            self._get_upgrade() == b"websocket"
            and self.scope["method"] == "GET"
            and self.scope["http_version"] == "1.1"
            and b"transfer-encoding" not in fields
            and fields.get(b"content-length", b"0") == b"0"
            and not self.conn.trailing_data[0]
        )

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._table.remove(self)  # the new protocol adds itself
        super().handle_websocket_upgrade(event)

    def blocked_s(self, now: float) -> float:
        """See `Delivery`."""
        is_full = self.transport is not None and self.flow.write_paused
        return self._delivery.blocked_s(self.transport, now, is_full=is_full)

    def abort(self) -> None:
        """Close, and drop buffered data."""
        self._is_aborted = True
        if self.transport is not None:
            self.transport.abort()

    def close_unfinished(self) -> None:
        """Close a connection that waits for a request: with a 408 if part of one has arrived."""
        if self.transport is None or self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            seconds = self._table.options.header_timeout_s
            self._send_error(
                RequestError(
                    f"The request headers did not arrive within {seconds:g} s.",
                    status=408,
                    code="header_timeout",
                )
            )
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this while it handles h11's error, which has the status (431 for headers too large)."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        why = f"request line and headers are larger than {_MAX_HEAD_BYTES} bytes" if status == 431 else error
        self._send_error(RequestError(f"{msg[:-1]}: {why}.", status=status, code="invalid_http"))
        self.transport.close()

    def _send_error(self, error: RequestError) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return  # a response has begun: it can only break off
        self._table.metrics.count("unmatched", str(error.status))
        body = encode_error(error)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(
            status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status]
        )
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


class Acceptor:
    """Accepts connections of one listening socket. Has the methods of `asyncio.Server` that uvicorn calls."""

    def __init__(
        self,
        listener: socket.socket,
        table: ConnectionTable,
        connect: Callable[[bool], HttpConnection],
    ) -> None:
        """`connect` makes a connection's protocol; its argument is `is_probe`."""
        self._listener = listener
        self._table = table
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_closed = False

    def start(self) -> None:
        """Accept connections of a socket that listens."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for index in range(_ACCEPTS):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                # Linux needs a free descriptor even to report that nobody waits. Before the first call somebody does.
                if index == 0:
                    self._pause(error)
                return
            self._open(connection)

    def _open(self, connection: socket.socket) -> None:
        table = self._table
        is_probe = not table.make_room()
        if is_probe and len(table.connections) >= table.limit + PROBE_CONNECTIONS:
            table.metrics.connections_closed.labels("refused").inc()
            connection.close()
            return
        protocol = self._connect(is_probe)
        connection.setblocking(False)
        task = self._loop.create_task(self._attach(protocol, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attach(self, protocol: HttpConnection, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection)
        except BaseException as error:
            self._table.remove(protocol)
            connection.close()
            if not isinstance(error, OSError):
                raise

    def _pause(self, error: OSError) -> None:
        """Out of descriptors: close the longest waiting connection and try again a little later."""
        log.warning("cannot accept connections: %s", error.strerror)
        self._table.evict("no_descriptor")
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(_ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting; connections stay open."""
        if not self._is_closed:
            self._is_closed = True
            if self._listener.fileno() >= 0:
                self._loop.remove_reader(self._listener.fileno())

    async def wait_closed(self) -> None:
        """Wait for connections that are being set up."""
        if self._tasks:
            await asyncio.wait(self._tasks)
