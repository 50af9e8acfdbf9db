"""Prometheus metrics of one server, in a registry of their own, and their list for the documentation."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mingc import __version__
from mingc.runtime.request import AudioDelta, Event, ServiceLoad, TextDelta, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DURATION_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_BETWEEN_TOKENS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_LATENCY_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STAGE_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# Stages of the time to the first token and the first audio: the moments of `Done.timings_ms` at their ends.
STAGES = {
    "preprocess_queue": (None, "preprocessing"),
    "preprocess": ("preprocessing", "prepared"),
    "encode": ("prepared", "encoded"),
    "queue": ("encoded", "prefill"),
    "prefill": ("prefill", "first_token"),
    "first_segment": ("first_token", "first_segment"),
    "first_patch": ("first_segment", "first_audio"),
}
CLIENT_GONE = "499"  # no status was sent, because the client had left


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricInfo:
    """Description of one metric. `name` is the exported one: counters end in `_total`."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSample:
    """One time series at this moment. `is_counter`: it only grows; buckets, sums and counts of histograms do, too."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    is_counter: bool


class Metrics:
    """Metrics of one server. Call it from the event loop only."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter(
            "mingc_http_requests",
            "HTTP requests by route and status; status 499: the client disconnected before an answer.",
            "route",
            "status",
        )
        self.requests_running = Gauge(
            "mingc_num_requests_running",
            "Chat and speech requests inside the server: body being read, queued or generating.",
            registry=self._registry,
        )
        self._requests_waiting = Gauge(
            "mingc_num_requests_waiting",
            "Requests in the queue of an engine: thinker (whole chats; --max-queue) or talker (next speech segment).",
            ("engine",),
            registry=self._registry,
        )
        self._kv_cache_usage = Gauge(
            "mingc_kv_cache_usage_ratio",
            "Share of the thinker's KV pages in use, 0 to 1; a chat reserves pages for its prompt and max_tokens.",
            registry=self._registry,
        )
        self._listeners = Gauge(
            "mingc_num_listeners",
            "Streamed answers whose speech is being generated, by state of their playback: starting (nothing sent "
            "yet), playing, late (everything generated has been played), paused (the client does not read).",
            ("state",),
            registry=self._registry,
        )
        self._memory = Gauge(
            "mingc_memory_bytes",
            "Memory allocated at start, by device and owner: weights of each stage, kv_pages, talker_slots; on the "
            "host the limit of encoder_cache. CPU weights are mapped files. CUDA graphs and contexts are not counted.",
            ("owner", "device"),
            registry=self._registry,
        )
        self._underruns = self._counter(
            "mingc_speech_underruns",
            "Patches of streamed speech that were ready after their playback time, including those with late text.",
        )
        self.requests_cancelled = self._counter(
            "mingc_requests_cancelled",
            "Chat and speech requests whose client disconnected before the end.",
            "route",
        )
        self.stream_errors = self._counter(
            "mingc_stream_errors", "Responses that failed after their first bytes were sent.", "route"
        )
        self._prompt_tokens = self._counter("mingc_prompt_tokens", "Prompt tokens of finished requests.")
        # Counted by the engines; read whenever metrics are.
        self._engine_counters = {
            "num_underruns": self._underruns,
            "prefilled_tokens": self._counter(
                "mingc_prefilled_tokens", "Prompt tokens that the thinker has computed."
            ),
            "reused_tokens": self._counter(
                "mingc_prefix_cache_hit_tokens",
                "Prompt tokens that were not computed, because the prefix cache held their KV pages.",
            ),
            "evicted_pages": self._counter(
                "mingc_prefix_cache_evicted_pages", "KV pages of the prefix cache given to other requests."
            ),
            "encoder_hits": self._counter(
                "mingc_encoder_cache_hits",
                "Images, videos and clips that were not encoded, because their embeddings were cached or being "
                "computed for another request.",
            ),
            "encoder_misses": self._counter(
                "mingc_encoder_cache_misses", "Images, videos and clips that were encoded."
            ),
        }
        self._cached_pages = Gauge(
            "mingc_prefix_cache_pages",
            "KV pages that prompts may reuse: those of running requests, and free ones whose content is kept.",
            registry=self._registry,
        )
        self._encoder_cache_bytes = Gauge(
            "mingc_encoder_cache_bytes",
            "Host memory of cached embeddings of images, videos and clips (--encoder-cache).",
            registry=self._registry,
        )
        self._counted = dict.fromkeys(self._engine_counters, 0)
        self._generation_tokens = self._counter(
            "mingc_generation_tokens", "Generated text tokens of finished requests."
        )
        self._audio_seconds = self._counter(
            "mingc_generated_audio_seconds", "Seconds of speech generated for finished requests."
        )
        self._time_to_first_token = self._latency(
            "mingc_time_to_first_token_seconds",
            "Seconds from the end of the request body to the first text of a chat request.",
        )
        self._time_to_first_audio = self._latency(
            "mingc_time_to_first_audio_seconds",
            "Seconds from the end of the request body to the first audio of a chat or speech request.",
        )

        self._stages = Histogram(
            "mingc_stage_seconds",
            "Seconds of the stages of a finished request up to its first text and audio: preprocess_queue (for a "
            "thread), preprocess (decode and resize media, tokenize), encode, queue (for the thinker), prefill, "
            "first_segment (of text to speak, from the first token), first_patch (from the segment to its audio).",
            ("stage",),
            buckets=_STAGE_S,
            registry=self._registry,
        )
        self._between_tokens = self._latency(
            "mingc_inter_token_latency_seconds",
            "Seconds between two texts of a chat request, as they leave the model.",
            _BETWEEN_TOKENS_S,
        )
        self.request_duration = Histogram(
            "mingc_request_duration_seconds",
            "Seconds from the request headers to the end of the response of a chat or speech request.",
            ("route",),
            buckets=_DURATION_S,
            registry=self._registry,
        )
        self.connections = Gauge("mingc_num_connections", "Open connections.", registry=self._registry)
        self.connections_closed = self._counter(
            "mingc_connections_closed",
            "Connections that the server closed early: header_timeout, write_timeout (the client does not read), "
            "evicted (the longest waiting one, for a new one), refused (--max-connections), no_descriptor.",
            "reason",
        )
        self.body_bytes = Gauge(
            "mingc_body_bytes",
            "Bytes of bodies and media that requests hold, without the first 64 KiB of each "
            "(--max-total-body-bytes).",
            registry=self._registry,
        )
        build = Gauge(
            "mingc_build_info",
            "1; the labels are the versions of mingc and Python.",
            ("version", "python"),
            registry=self._registry,
        )
        build.labels(__version__, platform.python_version()).set(1)
        ProcessCollector(registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _latency(self, name: str, text: str, buckets: Sequence[float] = _LATENCY_S) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def render(self, load: ServiceLoad) -> bytes:
        """All metrics in Prometheus' text format, with the load of this moment."""
        self._set_load(load)
        return generate_latest(self._registry)

    def samples(self, load: ServiceLoad) -> list[MetricSample]:
        """All time series, for another exporter, with the load of this moment."""
        self._set_load(load)
        return [
            MetricSample(
                name=sample.name,
                labels=tuple(sample.labels.items()),
                value=sample.value,
                is_counter=family.type in ("counter", "histogram"),
            )
            for family in self._registry.collect()
            for sample in family.samples
        ]

    def _set_load(self, load: ServiceLoad) -> None:
        self._kv_cache_usage.set(load.kv_pages_used / max(1, load.kv_pages_total))
        for engine, count in load.num_waiting.items():
            self._requests_waiting.labels(engine).set(count)
        for name, counter in self._engine_counters.items():
            increase = getattr(load, name) - self._counted[name]
            if increase > 0:  # a load that is not known has zeros
                counter.inc(increase)
                self._counted[name] += increase
        self._cached_pages.set(load.cached_pages)
        self._encoder_cache_bytes.set(load.encoder_cache_bytes)
        for state, count in load.listeners.items():
            self._listeners.labels(state).set(count)
        for use in load.memory:
            self._memory.labels(use.owner, use.device).set(use.num_bytes)

    def describe(self) -> list[MetricInfo]:
        """Name, type, labels and help text of every metric, in the order of `/metrics`."""
        infos = []
        for collector in self._registry._collector_to_names:
            labels: Sequence[str] = getattr(collector, "_labelnames", ())  # the process collector has none
            for family in collector.collect():
                suffix = "_total" if family.type == "counter" else ""
                infos.append(
                    MetricInfo(
                        name=family.name + suffix,
                        type=family.type,
                        labels=tuple(labels),
                        help=family.documentation,
                    )
                )
        return infos

    def count(self, route: str, status: str) -> None:
        self._requests.labels(route, status).inc()

    def count_usage(self, usage: Usage) -> None:
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._generation_tokens.inc(usage.completion_tokens)
        self._audio_seconds.inc(usage.audio_seconds)

    def observe_stages(self, timings_ms: Mapping[str, float]) -> None:
        """Record the stages of a finished request from `Done.timings_ms`; those that it did not have are left out."""
        for stage, (begin, end) in STAGES.items():
            first = 0.0 if begin is None else timings_ms.get(begin)
            last = timings_ms.get(end)
            if first is not None and last is not None:
                self._stages.labels(stage).observe(max(0.0, last - first) / 1e3)

    def latency_timer(self) -> LatencyTimer:
        return LatencyTimer(self._time_to_first_token, self._time_to_first_audio, self._between_tokens)


def describe_metrics() -> list[MetricInfo]:
    """Every metric that a server exports; starts no server."""
    return Metrics().describe()


class LatencyTimer:
    """Times the first text, the first audio and the gaps between texts of one request, from its own creation."""

    def __init__(self, first_token: Histogram, first_audio: Histogram, between_tokens: Histogram) -> None:
        self._start = time.monotonic()
        self._waiting: dict[type, Histogram] = {TextDelta: first_token, AudioDelta: first_audio}
        self._between_tokens = between_tokens
        self._last_token: float | None = None

    def see(self, event: Event) -> None:
        now = time.monotonic()
        histogram = self._waiting.pop(type(event), None)
        if histogram is not None:
            histogram.observe(now - self._start)
        if isinstance(event, TextDelta):
            if self._last_token is not None:
                self._between_tokens.observe(now - self._last_token)
            self._last_token = now


class RequestCounter:
    """ASGI middleware that counts requests by the pattern of their route; raw paths would be unbounded."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

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
    """The path pattern of the route that matches a request."""
    app: Starlette = scope["app"]
    for route in app.routes:
        if isinstance(route, Route) and route.path_regex.match(scope["path"]):
            return route.path
    return "unmatched"
