"""A TCP connection that has become a WebSocket.

uvicorn runs the app, `websockets` parses frames (RFC 6455). This module adds what both leave to servers: memory for
incomplete messages from the budget of bodies, and a time limit on them; pongs that do not pile up when they are not
read; the place in the `ConnectionTable`; closing so that the client receives the code; JSON errors.

No extension is offered, so no message is compressed.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState as UvicornState
from websockets.frames import Frame
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from mingc.errors import CapacityError, RequestError
from mingc.server.body_budget import FREE_BYTES, BodyBudget
from mingc.server.connections import LINGER_S, READ_BYTES, ConnectionTable, Delivery
from mingc.server.error_objects import encode_error

MAX_MESSAGE_BYTES = 16 << 20  # of a client
# Bytes read from one connection before others are served, unless a longer frame has begun: in 16 KiB there could be
# 2,700 frames, which take 50 ms to parse.
_LEAST_BYTES = 256
_ABNORMAL = 1006


class _Frames(ServerProtocol):
    """The parser of `websockets`, with refusals in JSON."""

    def reject(self, status: Any, text: str) -> Response:
        response = super().reject(status, text)
        message = " ".join(text.split()) or response.reason_phrase
        response.body = encode_error(
            RequestError(message, status=response.status_code, code="invalid_websocket")
        )
        for name, value in (
            ("Content-Length", str(len(response.body))),
            ("Content-Type", "application/json"),
        ):
            del response.headers[name]
            response.headers[name] = value
        return response


class WebSocketConnection(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, known to a `ConnectionTable`. `scope["state"]["websocket"]` of the app is the connection."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        *,
        table: ConnectionTable,
        bodies: BodyBudget,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "websocket": self})
        self.conn = _Frames(max_size=MAX_MESSAGE_BYTES, logger=logging.getLogger("uvicorn.error"))
        self._wanted = 0  # bytes of the frame, or of its head, that is being read
        read_exact = self.conn.reader.read_exact

        def watched(count: int) -> Generator[None, None, bytearray]:
            self._wanted = count
            return read_exact(count)

        self.conn.reader.read_exact = watched  # type: ignore[method-assign, assignment]
        self._table = table
        self._resources = ExitStack()
        self._charge = self._resources.enter_context(bodies.charge())
        self._delivery = Delivery()
        self._num_running = 0
        self._pongs = b""

    @contextmanager
    def running(self) -> Iterator[None]:
        """A response runs: meanwhile a new connection cannot take the place of this one."""
        self._num_running += 1
        self._table.idle.pop(self, None)
        try:
            yield
        finally:
            self._num_running -= 1
            self._set_active()

    def _set_active(self) -> None:
        if not self._num_running:
            self._table.set_idle(self)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._table.add_session(self)

    def connection_lost(self, exc: Exception | None) -> None:
        closed = self.conn.close_sent
        # Before uvicorn's 1005, which would mean that the client closed without a code.
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": _ABNORMAL if closed is None else closed.code}
        )
        super().connection_lost(exc)
        self._table.remove(self)
        self._resources.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.handshake_initiated:
            self._refuse_handshake()
            return
        num_bytes = len(self.conn.reader.buffer)
        missing = self._wanted - num_bytes
        self.transport.max_size = min(max(missing, _LEAST_BYTES), READ_BYTES)  # type: ignore[attr-defined]
        self._set_receiving(num_bytes + sum(map(len, self.frames)))

    def _refuse_handshake(self) -> None:
        """Answer a request that the parser refused without an answer, or with one that uvicorn does not send."""
        answer = b"".join(self.conn.data_to_send())
        if not answer:
            answer = self.conn.reject(400, "The request is not a valid WebSocket handshake.").serialize()
        self._table.metrics.count("unmatched", "400")
        self.transport.write(answer)
        self.transport.close()

    def _set_receiving(self, num_bytes: int) -> None:
        """Charge what has arrived of an incomplete message, and limit its time."""
        if not num_bytes:
            self._table.receiving.pop(self, None)
        elif self not in self._table.receiving and self in self._table.connections:
            self._table.receiving[self] = self.loop.time()
        try:
            # A body may have more for free; connections are many more than requests.
            self._charge.set(num_bytes + FREE_BYTES if num_bytes > READ_BYTES else 0)
        except CapacityError:
            self.end(1008, "messages of all connections hold too many bytes")

    def handle_connect(self, event: Request) -> None:
        self.transport.pause_reading()  # until the app has accepted
        super().handle_connect(event)
        if self.response.status_code != 101:
            self._table.metrics.count("unmatched", str(self.response.status_code))

    async def send(self, message: Any) -> None:
        await self.writable.wait()
        if message["type"] in ("websocket.send", "websocket.close"):
            if self.close_sent or self.transport.is_closing():
                raise ClientDisconnected
            self._set_active()
        await super().send(message)
        if message["type"] == "websocket.accept" and not self.transport.is_closing():
            self.transport.resume_reading()
        elif message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True  # uvicorn would log that the app has not answered

    def handle_cont(self, event: Frame) -> None:
        # One buffer: uvicorn's list would need 60 bytes for a fragment of one byte, and memory for empty ones.
        frames: list[Any] = self.frames
        if not isinstance(frames[0], bytearray):
            frames[0] = bytearray(frames[0])
        frames[0] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        self._table.receiving.pop(self, None)
        self._set_active()
        data, self.frames = self.frames[0], []
        if self.close_sent:
            return
        if self.curr_msg_data_type == "bytes":
            self.queue.put_nowait({"type": "websocket.receive", "bytes": bytes(data)})
        else:
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                self.end(1007, f"byte {error.start} of a text message is not UTF-8")
                return
            self.queue.put_nowait({"type": "websocket.receive", "text": text})
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def handle_ping(self) -> None:
        pongs = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(pongs)
        elif pongs:
            self._pongs = pongs  # RFC 6455 §5.5.3: the latest pings may be answered alone

    def resume_writing(self) -> None:
        super().resume_writing()
        pongs, self._pongs = self._pongs, b""
        if pongs and not (self.close_sent or self.transport.is_closing()):
            self.transport.write(pongs)

    def keepalive_timeout(self) -> None:
        self.pong_timer = self.pending_ping_payload = None
        self.end(1011, "keepalive ping timeout")

    def handle_parser_exception(self) -> None:
        closed = self.conn.close_sent
        self.end(_ABNORMAL if closed is None else closed.code, "" if closed is None else closed.reason)

    def shutdown(self) -> None:
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
        else:
            self.stop_keepalive()
            self.end(1012, "the server is stopping")

    def end(self, code: int, reason: str) -> None:
        """Close, and tell the app. The client has a second to read the code; what it sends meanwhile is dropped."""
        if self.close_sent or self.transport.is_closing():
            return
        self.close_sent = True
        self.conn.fail(code, reason)  # does nothing when the parser has done it
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def blocked_s(self, now: float) -> float:
        """See `Delivery`."""
        return self._delivery.blocked_s(self.transport, now, is_full=not self.writable.is_set())

    def abort(self) -> None:
        """Close, and drop buffered data."""
        self.transport.abort()
