"""Middleware of Serve's HTTP proxies: ends a request whose replica is lost with an error that clients can read.

A WebSocket stays with the replica that accepted it; if that is lost, it is closed with 1011.

Set `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=mingc.deploy.proxy:middlewares` where Ray is started. Without it the
proxy closes the connection of a stream, and answers other requests in plain text.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mingc.errors import CapacityError, WorkerError
from mingc.server.error_objects import encode_error, error_response
from mingc.server.http.response_schemas import sse

_LOST = "The replica that served this request was lost."
_BUSY = "All replicas are busy; try again later."
_PLAIN_STATUSES = (503,)  # the proxy itself answers them in plain text


def middlewares() -> list[Middleware]:
    """The middlewares; Serve's proxies call this at start."""
    return [Middleware(LostReplica)]


class LostReplica:
    """ASGI middleware: completes event streams that break off, and answers in JSON where the proxy would not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        response = _Response(send, "websocket." if scope["type"] == "websocket" else "")

        async def watched() -> Message:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                response.is_ended = True
            return message

        try:
            await self._app(scope, watched, response.send)
        finally:
            await response.complete()


class _Response:
    """Forwards the messages of one response, and tracks how much was sent.

    Args:
        prefix: `websocket.` for the answer to an offer of a WebSocket. The proxy itself answers it as a request.
    """

    def __init__(self, send: Send, prefix: str) -> None:
        self._send = send
        self._prefix = prefix
        self._is_started = False
        self._is_accepted = False
        self.is_ended = False
        self._is_sse = False
        self._is_replaced = False

    async def send(self, message: Message) -> None:
        kind = message["type"].removeprefix("websocket.")
        if kind == "http.response.start":
            headers = Headers(scope=message)
            media_type = headers.get("content-type", "")
            if message["status"] in _PLAIN_STATUSES and media_type.startswith("text/plain"):
                self._is_replaced = True
                await self._send_error(
                    CapacityError(_BUSY, code="overloaded"), retry_after=headers.get("retry-after")
                )
                return
            self._is_started = True
            self._is_sse = media_type.startswith("text/event-stream")
        if self._is_replaced:
            return
        if kind == "http.response.body":
            self.is_ended = not message.get("more_body", False)
        elif kind == "accept":
            self._is_started = self._is_accepted = True
        elif kind == "close":
            self.is_ended = True
        await self._send({**message, "type": self._prefix + kind})

    async def complete(self) -> None:
        """End the response with an error if it has not ended; no message follows."""
        if self.is_ended:
            return
        if self._is_accepted:
            await self._send({"type": "websocket.close", "code": 1011, "reason": "the replica was lost"})
            return
        if not self._is_started:
            await self._send_error(WorkerError(_LOST, status=503, code="replica_lost"))
        elif self._is_sse:
            event = sse(error_response(WorkerError(_LOST, status=503, code="replica_lost")))
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _send_error(self, error: CapacityError | WorkerError, retry_after: str | None = None) -> None:
        self._is_started = self.is_ended = True
        body = encode_error(error)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", (retry_after or "1").encode()),
        ]
        start = {"type": f"{self._prefix}http.response.start", "status": 503, "headers": headers}
        await self._send(start)
        await self._send({"type": f"{self._prefix}http.response.body", "body": body, "more_body": False})
