"""Spans of requests, by OpenTelemetry's SDK: in memory, and as a collector receives them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from fake_service import FakeService
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from realtime_client import RealtimeClient
from server_thread import eventually, run_server

from mingc.errors import ConfigError, WorkerError
from mingc.runtime.request import Done, Usage
from mingc.server import tracing
from mingc.server.tracing import Traces

CHAT = "/v1/chat/completions"
# The example of https://www.w3.org/TR/trace-context/.
PARENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


def in_memory() -> tuple[Traces, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Traces(provider), exporter


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, InMemorySpanExporter]]:
    traces, exporter = in_memory()
    with run_server(FakeService, traces=traces) as url:
        yield url, exporter


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize(
    ("body", "status", "events", "error"),
    [
        ({}, 200, [("first_token", {"answer": 0})], None),
        ({"n": 2}, 200, [("first_token", {"answer": 0}), ("first_token", {"answer": 1})], None),
        ({"n": 0}, 400, [], None),
        ({"say": "crash midway"}, 500, [], "500"),
        ({"say": "fail midway", "stream": True}, 200, [], "WorkerError"),
    ],
    ids=str,
)
def test_a_request_is_a_span_that_continues_the_trace_of_its_client(
    server: tuple[str, InMemorySpanExporter],
    body: dict[str, Any],
    status: int,
    events: list[tuple[str, dict[str, int]]],
    error: str | None,
) -> None:
    url, exporter = server
    exporter.clear()
    body = {"messages": [{"role": "user", "content": body.pop("say", "secret words")}], **body}
    answer = httpx.post(f"{url}{CHAT}", json=body, headers=PARENT, trust_env=False)
    eventually(lambda: len(exporter.get_finished_spans()) == 1)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind) == (f"POST {CHAT}", SpanKind.SERVER)
    context, parent = span.context, span.parent
    assert context is not None and parent is not None
    assert f"00-{context.trace_id:032x}-{parent.span_id:016x}-01" == PARENT["traceparent"]
    assert attributes(span) == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "url.path": CHAT,
        "url.scheme": "http",
        "http.response.status_code": status,
        "mingc.request_id": answer.headers["x-request-id"],
        **({} if error is None else {"error.type": error}),
    }
    assert span.status.is_ok is (error is None)
    assert [(each.name, dict(each.attributes or {})) for each in span.events] == events
    start, end = span.start_time, span.end_time
    assert start is not None and end is not None
    assert all(start <= each.timestamp <= end for each in span.events)
    assert "secret" not in span.to_json()


def test_spans_of_other_requests(server: tuple[str, InMemorySpanExporter]) -> None:
    """Probes have none; without `traceparent`, or with one that breaks its rules, a request begins a trace."""
    url, exporter = server
    exporter.clear()
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/nowhere/secret?key=secret"):
        httpx.get(f"{url}{path}", headers={"traceparent": "00-0-0-01"}, trust_env=False)
    # A span ends after the last byte of its answer has left.
    eventually(lambda: len(exporter.get_finished_spans()) >= 2)
    spans = exporter.get_finished_spans()
    assert [each.name for each in spans] == ["GET /v1/models", "GET unmatched"]
    assert all(each.parent is None for each in spans)
    assert [attributes(each)["url.path"] for each in spans] == ["/v1/models", "/nowhere/secret"]


def test_each_response_of_a_session_is_a_span_below_it() -> None:
    traces, exporter = in_memory()
    with run_server(FakeService, traces=traces) as url, RealtimeClient(url) as client:
        for status in ("completed", "failed"):
            client.say("Hello" if status == "completed" else "fail midway, secret")
            client.send("response.create")
            assert client.until("response.done")["response"]["status"] == status
    eventually(lambda: len(exporter.get_finished_spans()) == 3)
    *responses, session = exporter.get_finished_spans()
    assert (session.name, attributes(session)["http.response.status_code"]) == ("GET /v1/realtime", 101)
    assert all(span.parent == session.context and session.context is not None for span in responses)
    assert [[event.name for event in span.events] for span in responses] == [["first_token"], []]
    assert [attributes(span).get("error.type") for span in responses] == [None, "WorkerError"]
    ids = [each["response"]["id"] for each in client.of("response.done")]
    assert [attributes(span)["mingc.response_id"] for span in responses] == ids
    assert not session.events and not any("secret" in span.to_json() for span in (*responses, session))


def test_parts_of_a_request_have_spans_with_their_stages() -> None:
    """Each of two at once records in its own span, below that of the session."""
    traces, exporter = in_memory()
    scope = {"type": "websocket", "scheme": "ws", "path": "/v1/realtime", "headers": []}

    async def respond(name: str, ms: float) -> None:
        with tracing.span("realtime.response", id=name):
            await asyncio.sleep(0)
            done = Done(finish_reason="stop", usage=Usage(), timings_ms={"first_token": ms, "done": 4 * ms})
            tracing.mark_stages(done, 0)
            if name == "b":
                raise WorkerError("secret")

    async def session() -> None:
        span = traces.begin(scope, "/v1/realtime", "id")
        await asyncio.gather(respond("a", 0.25), respond("b", 0.5), return_exceptions=True)
        for name in ("a", "b"):  # one after the other in the task of the session
            with suppress(WorkerError):
                await respond(name, {"a": 0.25, "b": 0.5}[name])
        tracing.end(span, "101")

    asyncio.run(session())
    *responses, whole = exporter.get_finished_spans()
    assert (whole.name, attributes(whole)["http.response.status_code"]) == ("GET /v1/realtime", 101)
    assert sorted(str(attributes(each)["id"]) for each in responses) == ["a", "a", "b", "b"]
    for span in responses:
        assert span.parent == whole.context and whole.context is not None
        assert [each.name for each in span.events] == ["first_token", "done"]
        name, (first, done) = attributes(span)["id"], span.events
        assert done.timestamp - first.timestamp == {"a": 750_000, "b": 1_500_000}[name]  # ns
        assert attributes(span).get("error.type") == {"a": None, "b": "WorkerError"}[name]
        assert "secret" not in span.to_json()
    assert not whole.events


def test_a_collector_receives_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over OTLP/HTTP, those of the last moment too; variables of OpenTelemetry name the service."""
    received: list[ExportTraceServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "voice")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        try:
            with run_server(FakeService, traces=Traces.from_environment()) as url:
                httpx.get(f"{url}/v1/models", trust_env=False)
        finally:
            collector.shutdown()
            thread.join()
    (batch,) = [each for request in received for each in request.resource_spans]
    resource = {each.key: each.value.string_value for each in batch.resource.attributes}
    assert resource["service.name"] == "voice"
    assert [span.name for scope in batch.scope_spans for span in scope.spans] == ["GET /v1/models"]


@pytest.mark.parametrize(
    ("variables", "where", "fix"),
    [
        ({}, "OTEL_EXPORTER_OTLP_ENDPOINT", "mingc[trace]"),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b"},
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            "mingc[tr",
        ),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], where: str, fix: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError) as caught:
        Traces.from_environment()
    assert caught.value.where == where and fix in str(caught.value.fix)
