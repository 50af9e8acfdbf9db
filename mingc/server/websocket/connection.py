"""One WebSocket of a client, whatever kind of session it carries: refusals, events in and out, limits, close codes.

A session reads in one task, which never waits for the client to read: what a client says must be heard while sound for
it is still on its way. Another task writes, from a bounded queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct
from starlette.datastructures import Headers, QueryParams
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mingc.errors import CapacityError, MingcError, RequestError, WorkerError
from mingc.server.error_objects import ErrorObject, error_response
from mingc.server.origins import check_origin
from mingc.server.state import ServerState

log = logging.getLogger("mingc.http")

SUBPROTOCOL = "realtime"
# Of a sent message. Clients refuse larger ones than their own limit, of which 1 MiB is the lowest in use.
MAX_SENT_BYTES = 900_000
_QUEUE_BYTES = 4 << 20  # that wait to be sent; answers to events may take twice as much
_LAST_EVENTS_S = 1.0  # to send what waits after a limit was exceeded or a bug
_NO_CODE, _ABNORMAL = 1005, 1006
_CODES = (
    1000,
    1001,
    1002,
    1003,
    _NO_CODE,
    _ABNORMAL,
    1007,
    1008,
    1009,
    1011,
    1012,
)  # label values of the metric


class ErrorEvent(Struct, tag_field="type", tag="error"):
    """The session goes on. `message` is that of `error`, OpenAI's object."""

    message: str
    error: ErrorObject


def error_event(error: Exception) -> ErrorEvent:
    """The event for an error; a bug shows no details."""
    found = error_response(error).error
    return ErrorEvent(message=found.message, error=found)


@dataclass(slots=True, eq=False)
class _Queued:
    data: str | bytes
    size: int
    group: object
    sent: Callable[[], None] | None


class EventSocket:
    """An accepted WebSocket. Call it from the event loop only.

    Attributes:
        key: hash of the client's API key; None if none is needed.
        query: of the URL.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        server: ServerState,
        error_event: Callable[[Exception], Struct] = error_event,
    ) -> None:
        state = scope.get("state", {})
        self._error_event = error_event
        self.key: bytes | None = state.get("api_key")
        self.query = QueryParams(scope.get("query_string", b""))
        self._connection: Any = state.get("websocket")  # none behind the proxy of Ray Serve
        self._receive = receive
        self._send = send
        self._server = server
        self._queue: deque[_Queued] = deque()
        self._num_bytes = 0
        self._has_more = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._ended: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._client_code: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether everything has been sent."""
        return self._is_empty.is_set()

    def running(self) -> AbstractContextManager[None]:
        """A response runs until the block ends: a new connection cannot take the place of this one."""
        return nullcontext() if self._connection is None else self._connection.running()

    async def receive(self) -> bytes | None:
        """The next message, text or binary; None once the WebSocket is closed."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self._client_code = message.get("code") or _NO_CODE
            return None
        text: str | None = message.get("text")
        return bytes(message["bytes"]) if text is None else text.encode()

    def put(
        self, event: Struct | bytes, group: object = None, sent: Callable[[], None] | None = None
    ) -> None:
        """Queue an event, or bytes for a binary message, without waiting.

        `group`: what `drop` may take back. `sent` is called when the event is being written and can no longer be.
        """
        data = event if isinstance(event, bytes) else msgspec.json.encode(event).decode()
        size = len(data)
        if size > MAX_SENT_BYTES:
            raise WorkerError(f"an event of {size} bytes; the limit is {MAX_SENT_BYTES}")
        if self._num_bytes + size > 2 * _QUEUE_BYTES:
            self.end(1008, "the client does not read its events")
            return
        self._queue.append(_Queued(data, size, group, sent))
        self._num_bytes += size
        self._is_empty.clear()
        self._has_more.set()

    async def send(self, event: Struct | bytes, group: object = None) -> None:
        """Like `put`, but wait for `room`; bytes may be larger than a message."""
        if isinstance(event, bytes) and len(event) > MAX_SENT_BYTES:
            for start in range(0, len(event), MAX_SENT_BYTES):
                await self.send(event[start : start + MAX_SENT_BYTES], group)
            return
        await self.room()
        self.put(event, group)

    async def room(self) -> None:
        """Wait while too much is queued.

        Raises: CapacityError when that lasts for the write timeout; the WebSocket is closed.
        """
        while self._num_bytes >= _QUEUE_BYTES:
            self._has_room.clear()
            try:
                async with asyncio.timeout(self._server.options.write_timeout_s):
                    await self._has_room.wait()
            except TimeoutError as error:
                self.end(1008, "the client does not read its events")
                raise CapacityError("The client does not read.", code="write_timeout") from error

    def drop(self, group: object) -> bool:
        """Take back what waits of `group`. Returns whether there was anything."""
        dropped = [each for each in self._queue if each.group is group]
        self._queue = deque(each for each in self._queue if each.group is not group)
        self._num_bytes -= sum(each.size for each in dropped)
        self._has_room.set()
        return bool(dropped)

    def end(self, code: int, reason: str) -> None:
        """Close the WebSocket soon, which cancels the session. The first call counts."""
        if not self._ended.done():
            self._ended.set_result((code, reason))

    async def run(self, serve: Callable[[EventSocket], Awaitable[None]]) -> None:
        """Run a session until it returns or the client leaves, and close."""
        metrics = self._server.metrics
        metrics.websockets.inc()
        code = _ABNORMAL
        writing = asyncio.ensure_future(self._write())
        try:
            code, reason = await self._run(serve)
            if self._client_code is None:
                await self._close(code, reason)
        finally:
            writing.cancel()
            await asyncio.wait((writing,))
            metrics.websockets.dec()
            metrics.websockets_closed.labels(str(code) if code in _CODES else "other").inc()

    async def _run(self, serve: Callable[[EventSocket], Awaitable[None]]) -> tuple[int, str]:
        """The close code and its reason."""
        limit_s = self._server.options.max_session_s
        serving = asyncio.ensure_future(serve(self))
        try:
            await asyncio.wait((serving, self._ended), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            is_late = not serving.done() and not self._ended.done()
        finally:
            serving.cancel()
            await asyncio.wait((serving,))
        if not serving.cancelled() and (error := serving.exception()) is not None:
            assert isinstance(error, Exception)
            log.error("a session failed", exc_info=error)
            self.put(self._error_event(error))
            return 1011, "internal error"
        if self._client_code is not None:
            return self._client_code, ""
        if is_late:
            expired = RequestError(f"A session lasts at most {limit_s:g} s.", code="session_expired")
            self.put(self._error_event(expired))
            return 1000, "session expired"
        return self._ended.result() if self._ended.done() else (1000, "")

    async def _close(self, code: int, reason: str) -> None:
        limit_s = self._server.options.write_timeout_s
        try:
            async with asyncio.timeout(limit_s if code == 1000 else min(limit_s, _LAST_EVENTS_S)):
                await self._is_empty.wait()
                await self._send({"type": "websocket.close", "code": code, "reason": reason})
        except (TimeoutError, OSError) as error:
            log.debug("the client did not read the end of its session: %s", type(error).__name__)

    async def _write(self) -> None:
        try:
            while True:
                await self._has_more.wait()
                while self._queue:
                    each = self._queue.popleft()
                    kind = "bytes" if isinstance(each.data, bytes) else "text"
                    if each.sent is not None:
                        each.sent()
                    await self._send({"type": "websocket.send", kind: each.data})
                    self._num_bytes -= each.size
                    self._has_room.set()
                self._has_more.clear()
                self._is_empty.set()
        except OSError:  # the client has left, as `receive` reports
            self._is_empty.set()
        except Exception as error:
            log.error("a session failed", exc_info=error)
            self.end(1011, "internal error")
            self._is_empty.set()


class SessionRoute:
    """ASGI app of a path for WebSockets: refuses before the upgrade, with the same body as HTTP, or runs a session."""

    def __init__(
        self,
        server: ServerState,
        serve: Callable[[EventSocket], Awaitable[None]],
        answer: Callable[[HTTPConnection, Exception], Response],
        *,
        error_event: Callable[[Exception], Struct] = error_event,
        check: Callable[[QueryParams], None] = lambda query: None,
    ) -> None:
        """`serve` runs one session; `answer` creates the response of an error, `error_event` the event of one.

        `check` refuses the query of the URL by a RequestError.
        """
        self._error_event = error_event
        self._check_query = check
        self._server = server
        self._serve = serve
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except MingcError as error:
            await self._answer(HTTPConnection(scope), error)(scope, receive, send)
            return
        await receive()  # websocket.connect
        accept: Message = {"type": "websocket.accept"}
        if SUBPROTOCOL in scope.get(
            "subprotocols", ()
        ):  # browsers need one that they offered; another has the key
            accept["subprotocol"] = SUBPROTOCOL
        await send(accept)
        await EventSocket(scope, receive, send, self._server, self._error_event).run(self._serve)

    def _check(self, scope: Scope) -> None:
        """Raises: RequestError or CapacityError."""
        check_origin(Headers(scope=scope), self._server.options.cors_origins)
        if scope.get("state", {}).get("is_probe"):
            raise CapacityError("All connections are in use; try again later.", code="too_many_connections")
        if self._server.is_draining or self._server.is_stopping:
            raise CapacityError("The server is stopping.", code="stopping")
        self._check_query(QueryParams(scope["query_string"]))
