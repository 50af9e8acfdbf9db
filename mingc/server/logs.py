"""Logs of a server: text or JSON lines with request ids, a limit on repeated lines, and one line per request."""

from __future__ import annotations

import json
import logging
import re
import sys
import textwrap
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mingc.errors import printable
from mingc.server import tracing
from mingc.server.log_writer import LogHandler, LogStream, LogWriter
from mingc.server.metrics import CLIENT_GONE, Metrics, route_of
from mingc.server.tracing import Traces

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request that the current task serves; empty outside of one."""

access_log = logging.getLogger("mingc.access")

_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_PROBES = ("/health", "/ready", "/metrics")
_ANSWERS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
_BURST = 20  # equal lines within one window
_WINDOW_S = 10.0
_LINE_CHARACTERS = 4000
_PATH_CHARACTERS = 200
# Attributes that a record may have besides its message; `RequestContext` sets them.
_EXTRA = ("method", "path", "status", "duration_ms", "client")


def configure_logging(level: LogLevel, format: LogFormat, stream: TextIO | None = None) -> None:
    """Send all logs of the process to stderr, with a limit on repeated lines.

    A thread writes them, and what is printed to stderr, which becomes JSON lines, too. With `stream` they are written
    there at once.
    """
    formatter = JsonFormatter() if format == "json" else TextFormatter()
    handler = logging.StreamHandler(stream) if stream is not None else _stderr_handler(formatter, format)
    handler.setFormatter(formatter)
    handler.addFilter(RepetitionLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("httpx", "httpcore", "asyncio", "uvicorn"):  # httpx logs URLs with their signatures at INFO
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def _stderr_handler(formatter: logging.Formatter, format: LogFormat) -> logging.Handler:
    """The handler over stderr; `sys.stderr` passes through its queue from now on."""

    def line(level: int, text: str, *values: object) -> str:
        return formatter.format(logging.LogRecord("mingc.stderr", level, "", 0, text, values, None))

    def printed(text: str) -> str:
        return line(logging.ERROR if text.startswith(("mingc: error", "  ")) else logging.INFO, "%s", text)

    def report(count: int) -> bytes:
        return (
            line(logging.WARNING, "%d log lines were dropped: stderr was not read", count) + "\n"
        ).encode()

    stream: Any = sys.stderr.stream if isinstance(sys.stderr, LogStream) else sys.stderr
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or not a file
        return logging.StreamHandler(stream)
    if isinstance(sys.stderr, LogStream):
        writer = sys.stderr.writer
        writer.report = report
    else:
        stream.flush()
        writer = LogWriter(descriptor, report)
    sys.stderr = LogStream(writer, stream, printed if format == "json" else None)
    return LogHandler(writer)


def export_logs(metrics: Metrics) -> None:
    """Export how full the queue of stderr is, and how many lines were dropped."""
    if isinstance(sys.stderr, LogStream):
        writer = sys.stderr.writer
        metrics.add_limit("log_bytes", lambda: writer.limit)
        metrics.read_dropped_lines = lambda: writer.num_dropped


class TextFormatter(logging.Formatter):
    """`time level logger [request id] message`; control characters in the message are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        request_id = REQUEST_ID.get()
        head = f"{self.formatTime(record)} {record.levelname} {record.name}"
        text = f"{head}{f' [{request_id}]' if request_id else ''} {_message(record)}"
        if record.exc_info is None:
            return text
        # Indented: the text of an exception may look like a log line.
        return f"{text}\n{textwrap.indent(printable(self.formatException(record.exc_info)), '  ')}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        if request_id := REQUEST_ID.get():
            document["request_id"] = request_id
        document.update({name: getattr(record, name) for name in _EXTRA if hasattr(record, name)})
        if record.exc_info is not None:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document)


def _message(record: logging.LogRecord) -> str:
    """Write the message on one line: a client's text can neither start a new line nor send terminal commands."""
    text = printable(record.getMessage()).replace("\n", "\\n")
    return text if len(text) <= _LINE_CHARACTERS else text[: _LINE_CHARACTERS - 1] + "…"


@dataclass(slots=True)
class _Window:
    began: float
    count: int = 0


class RepetitionLimit(logging.Filter):
    """Drops lines of one kind beyond 20 in 10 s; the first line of the next window reports the number dropped.

    Lines of one kind have the same logger, level and format. Access lines of requests without an error always pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[str, int, str], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "status", 500) < 400:
            return True
        now = time.monotonic()
        key = (record.name, record.levelno, str(record.msg)[:_PATH_CHARACTERS])
        window = self._windows.get(key)
        if window is None or now - window.began >= _WINDOW_S:
            if window is not None and window.count > _BURST:
                record.msg = f"{record.getMessage()} (and {window.count - _BURST} like it before)"
                record.args = None
            if (
                window is None and len(self._windows) >= 1000
            ):  # every message that its caller formats is another key
                self._windows.clear()
            window = self._windows[key] = _Window(now)
        window.count += 1
        return window.count <= _BURST


class RequestContext:
    """ASGI middleware: the request's id, taken from `x-request-id` or generated, its access line, count and span.

    A WebSocket counts as a request of status 101, and is logged at its end.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, traces: Traces | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex
        # Not reset at the end: every request has a task, and its last error is logged above this layer.
        REQUEST_ID.set(request_id)
        began = time.monotonic()
        route = route_of(scope)
        traces = None if route in _PROBES else self._traces
        span = None if traces is None else traces.begin(scope, route, request_id)
        status = CLIENT_GONE

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] in _ANSWERS:
                status = str(message.get("status", 101))
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            status = "500"  # the layer above answers with it
            raise
        finally:
            self._metrics.count(route, status)
            if span is not None:
                tracing.end(span, status)
            _log_access(scope, route, status, time.monotonic() - began)


def _log_access(scope: Scope, route: str, status: str, seconds: float) -> None:
    level = logging.DEBUG if status < "400" and route in _PROBES else logging.INFO
    if not access_log.isEnabledFor(level):
        return
    client = scope.get("client")
    values = {
        "method": scope.get("method", "GET"),
        "path": scope["path"][:_PATH_CHARACTERS],
        "status": int(status),
        "duration_ms": round(seconds * 1000, 1),
        "client": client[0] if client else "",
    }
    access_log.log(
        level, "%(method)s %(path)s %(status)d %(duration_ms).1f ms %(client)s", values, extra=values
    )
