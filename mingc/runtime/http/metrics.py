"""What `/metrics` tells: prometheus counters of one server, in a registry of its own."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mingc.runtime.request import AudioDelta, Event, TextDelta, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_CLIENT_GONE = "499"  # nothing was answered, as the client had left


class Metrics:
    """Counters of one server. Called from the event loop only."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "mingc_requests",
            "Answered requests by route and HTTP status.",
            ("route", "status"),
            registry=registry,
        )
        self.in_flight = Gauge(
            "mingc_requests_in_flight", "Generation requests inside the server.", registry=registry
        )
        self.cancelled = Counter(
            "mingc_requests_cancelled",
            "Requests whose client left before the end.",
            ("route",),
            registry=registry,
        )
        self.stream_errors = Counter(
            "mingc_stream_errors", "Streams that ended with an error event.", ("route",), registry=registry
        )
        self._tokens = Counter("mingc_tokens", "Text tokens, by kind.", ("kind",), registry=registry)
        self._audio = Counter("mingc_audio_seconds", "Seconds of speech made.", registry=registry)
        self._first_token = Histogram(
            "mingc_first_token_seconds", "Arrival to first text.", buckets=_LATENCY_S, registry=registry
        )
        self._first_audio = Histogram(
            "mingc_first_audio_seconds", "Arrival to first audio.", buckets=_LATENCY_S, registry=registry
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def count(self, route: str, status: str) -> None:
        self._requests.labels(route, status).inc()

    def count_usage(self, usage: Usage) -> None:
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("completion").inc(usage.completion_tokens)
        self._audio.inc(usage.audio_seconds)

    def stopwatch(self) -> Stopwatch:
        return Stopwatch(self._first_token, self._first_audio)


class Stopwatch:
    """Observes the first text and the first audio of one request, counted from its birth."""

    def __init__(self, first_token: Histogram, first_audio: Histogram) -> None:
        self._start = time.monotonic()
        self._waiting: dict[type, Histogram] = {TextDelta: first_token, AudioDelta: first_audio}

    def see(self, event: Event) -> None:
        histogram = self._waiting.pop(type(event), None)
        if histogram is not None:
            histogram.observe(time.monotonic() - self._start)


class CountRequests:
    """ASGI middleware that counts each request by the path of its route (never by the raw path: that is unbounded)."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_GONE

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            status = "500"  # the layer above answers with it
            raise
        finally:
            self._metrics.count(route_of(scope), status)


def route_of(scope: Scope) -> str:
    """The path pattern of the route that a request falls on."""
    app: Starlette = scope["app"]
    for route in app.routes:
        if isinstance(route, Route) and route.path_regex.match(scope["path"]):
            return route.path
    return "unmatched"
