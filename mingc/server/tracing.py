"""Traces of requests, for OpenTelemetry.

They are exported over OTLP/HTTP when a variable of OpenTelemetry's specification names a collector. Otherwise nothing
of OpenTelemetry is imported. No span holds a text of a client.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import Scope

from mingc import __version__
from mingc.errors import ConfigError
from mingc.runtime.request import Done

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_PATH_CHARACTERS = 200
_CLOSE_S = 2.0  # to export the last spans


@dataclass(frozen=True, slots=True)
class _Current:
    tracer: Tracer
    span: Span


_CURRENT: ContextVar[_Current | None] = ContextVar("span", default=None)


class Traces:
    """Spans of one server."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("mingc", __version__)

    @classmethod
    def from_environment(cls) -> Traces | None:
        """Export as OpenTelemetry's variables say; None if they name no collector.

        Raises: ConfigError without the extra `trace`, and for another protocol than OTLP over HTTP.
        """
        where = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
        if where is None:
            return None
        for name in _PROTOCOLS:
            if (protocol := os.environ.get(name, _PROTOCOL)) != _PROTOCOL:
                raise ConfigError(
                    f"traces cannot be exported over {protocol}",
                    where=name,
                    fix=f"unset it, or set {_PROTOCOL}; most collectors take that at port 4318",
                )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"traces are to be exported, but a library cannot be imported: {error}",
                where=where,
                fix="pip install 'mingc[trace]', or unset the variable",
            ) from error
        own = Resource.create({"service.name": "mingc", "service.version": __version__})
        provider = TracerProvider(
            resource=own.merge(OTELResourceDetector().detect()),  # the operator's names win
            shutdown_on_exit=False,  # it would wait for a collector that is gone
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def begin(self, scope: Scope, route: str, request_id: str) -> Span:
        """Begin the span of a request or WebSocket, and make it the current one of this task. It continues the trace of
        the header `traceparent`."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        method = scope.get("method", "GET")
        span = self._tracer.start_span(
            f"{method} {route}",
            context=TraceContextTextMapPropagator().extract(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                "http.route": route,
                "url.path": scope["path"][:_PATH_CHARACTERS],
                "url.scheme": scope.get("scheme", "http"),
                "mingc.request_id": request_id,
            },
        )
        _CURRENT.set(_Current(self._tracer, span))
        return span

    def close(self) -> None:
        """Export the last spans, with a limit on the wait."""
        closing = threading.Thread(target=self._provider.shutdown, name="mingc-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def end(span: Span, status: str) -> None:
    """End the span of a request that was answered with `status`, which is 499 if its client left before."""
    span.set_attribute("http.response.status_code", int(status))
    if status >= "500":
        _fail(span, status)
    span.end()


@contextmanager
def span(name: str, **attributes: str) -> Iterator[None]:
    """Time a part of a request or session in a span of its own, which is the current one of this task meanwhile."""
    outer = _CURRENT.get()
    if outer is None:
        yield
        return
    from opentelemetry.trace import set_span_in_context

    inner = outer.tracer.start_span(name, context=set_span_in_context(outer.span), attributes=attributes)
    token = _CURRENT.set(_Current(outer.tracer, inner))
    try:
        yield
    except Exception as error:
        fail(error)
        raise
    finally:
        _CURRENT.reset(token)
        inner.end()


def mark_stages(done: Done, answer: int) -> None:
    """Record the moments of `Done.timings_ms` in the current span, when the request has just ended."""
    if (current := _CURRENT.get()) is None:
        return
    arrival = time.time_ns() - round(1e6 * max(done.timings_ms.values(), default=0.0))
    for name, ms in done.timings_ms.items():
        current.span.add_event(name, {"answer": answer}, arrival + round(1e6 * ms))


def fail(error: Exception) -> None:
    """Record that the current span ends in an error that no status tells."""
    if (current := _CURRENT.get()) is not None:
        _fail(current.span, type(error).__name__)


def _fail(span: Span, error_type: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR)
