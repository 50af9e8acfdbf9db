"""Prometheus metrics of one server, and their list for the documentation."""

from __future__ import annotations

import platform
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.applications import Starlette
from starlette.routing import Route, WebSocketRoute
from starlette.types import Scope

from mingc import __version__
from mingc.runtime.request import (
    AudioDelta,
    Done,
    Event,
    ImageDone,
    ImageEvent,
    PartialImage,
    ServiceInfo,
    ServiceLoad,
    TextDelta,
    TranscriptDone,
    TranscriptEvent,
    Usage,
)
from mingc.server import tracing
from mingc.server.stages import stages_ms

_Each = TypeVar("_Each", bound=Event | ImageEvent | tuple[int, Event])

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DURATION_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_BETWEEN_TOKENS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_LATENCY_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_REALTIME_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
_STAGE_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# Name and help of the counters that engines keep, by field of `ServiceLoad`.
_ENGINE_COUNTERS = {
    "num_underruns": (
        "speech_underruns",
        "Patches of streamed speech that were ready after their playback time, including patches with late text.",
    ),
    "prefilled_tokens": ("prefilled_tokens", "Prompt tokens that the thinker has computed."),
    "reused_tokens": (
        "prefix_cache_hit_tokens",
        "Prompt tokens that were not computed, because the prefix cache held their KV pages.",
    ),
    "num_preempted": (
        "preemptions",
        "Chats that lost their KV pages to older ones and were prefilled again with their answer so far.",
    ),
    "evicted_pages": ("prefix_cache_evicted_pages", "KV pages of the prefix cache given to other requests."),
    "encoder_hits": (
        "encoder_cache_hits",
        "Images, videos and clips that were not encoded, because their embeddings were cached or being computed "
        "for another request.",
    ),
    "encoder_misses": ("encoder_cache_misses", "Images, videos and clips that were encoded."),
    "drawn_pictures": ("pictures", "Pictures that were drawn."),
    "image_steps": ("image_steps", "Steps of the sampler, each for all pictures of a batch."),
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
            "http_requests",
            "HTTP requests by route and status; 499: the client disconnected before an answer; 101: a WebSocket that "
            "has ended.",
            "route",
            "status",
        )
        self.requests_running = self._gauge(
            "num_requests_running",
            "Chat and speech requests inside the server: body being read, queued or generating.",
        )
        self._requests_waiting = self._gauge(
            "num_requests_waiting",
            "Requests in the queue of an engine: thinker (whole chats; --max-queue), talker (next speech segment) or "
            "image (pictures).",
            "engine",
        )
        self._kv_cache_usage = self._gauge(
            "kv_cache_usage_ratio",
            "Share of the thinker's KV pages in use, 0 to 1; the pages of a chat grow with its answer.",
        )
        self._listeners = self._gauge(
            "num_listeners",
            "Streamed answers whose speech is being generated, by state of their playback: starting (nothing sent "
            "yet), playing, late (everything generated has been played), paused (the client does not read).",
            "state",
        )
        self._memory = self._gauge(
            "memory_bytes",
            "Memory allocated at start, by device and owner: weights of each stage, kv_pages, talker_slots; on the "
            "host the limits of encoder_cache and voice_cache; image_workspace, which a batch of pictures may take. "
            "CPU weights are mapped files. CUDA graphs and contexts are not counted.",
            "owner",
            "device",
        )
        self.requests_cancelled = self._counter(
            "requests_cancelled",
            "Chat and speech requests whose client disconnected before the end.",
            "route",
        )
        self.stream_errors = self._counter(
            "stream_errors", "Responses that failed after their first bytes were sent.", "route"
        )
        self._engine_counters = {name: self._counter(*words) for name, words in _ENGINE_COUNTERS.items()}
        self._counted = dict.fromkeys(_ENGINE_COUNTERS, 0)
        self._drawing = self._gauge("pictures_drawing", "Pictures of the batch that is being drawn.")
        self._cached_pages = self._gauge(
            "prefix_cache_pages",
            "KV pages that prompts may reuse: pages of running requests, and free pages whose content is kept.",
        )
        self._encoder_cache_bytes = self._gauge(
            "encoder_cache_bytes",
            "Host memory of cached embeddings of images, videos and clips (--encoder-cache).",
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generation_tokens = self._counter(
            "generation_tokens", "Generated text tokens of finished requests."
        )
        self._audio_seconds = self._counter(
            "generated_audio_seconds", "Seconds of speech generated for finished requests."
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "Seconds from the end of the request body to the first text of a chat request.",
            _LATENCY_S,
        )
        self.time_to_first_audio = self._histogram(
            "time_to_first_audio_seconds",
            "Seconds from the end of the request body to the first audio of a chat or speech request.",
            _LATENCY_S,
        )
        self.time_to_first_image = self._histogram(
            "time_to_first_image_seconds",
            "Seconds from the end of the request body to the first picture of a request, complete or not.",
            _LATENCY_S,
        )
        self._stages = self._histogram(
            "stage_seconds",
            "Seconds of the stages of a finished request up to its first text and audio: preprocess_queue (for a "
            "thread), preprocess (decode and resize media, tokenize), encode, queue (for the thinker), prefill, "
            "first_segment (of text to speak, from the first token), first_patch (from the segment to its audio); of a "
            "picture condition (the thinker reads the prompt), draw_queue (for the sampler), first_image.",
            _STAGE_S,
            "stage",
        )
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds",
            "Seconds between two texts of a chat request, as they leave the model.",
            _BETWEEN_TOKENS_S,
        )
        self.request_duration = self._histogram(
            "request_duration_seconds",
            "Seconds from the request headers to the end of the response of a chat or speech request.",
            _DURATION_S,
            "route",
        )
        self.connections = self._gauge("num_connections", "Open connections.")
        self.connections_closed = self._counter(
            "connections_closed",
            "Connections that the server closed early: header_timeout, body_timeout (of a message of a WebSocket), "
            "write_timeout (the client does not read), evicted (the longest waiting one, for a new one), refused "
            "(--max-connections), no_descriptor.",
            "reason",
        )
        self.websockets = self._gauge("num_websockets", "Open WebSockets.")
        self.websockets_closed = self._counter(
            "websockets_closed",
            "WebSockets that have ended, by close code (RFC 6455 §7.4): 1000 in order, 1005 without a code, 1006 the "
            "connection broke off, 1008 a limit, 1011 a bug or no pong, 1012 the server stops; `other`.",
            "code",
        )
        self.realtime_sessions = self._gauge("num_realtime_sessions", "Open sessions of /v1/realtime.")
        self.realtime_turns = self._counter(
            "realtime_turns",
            "Turns of users of realtime sessions, by what ended them: server_vad, semantic_vad, idle_timeout, or "
            "commit by the client.",
            "end",
        )
        self.realtime_first_audio = self._histogram(
            "realtime_first_audio_seconds",
            "Seconds from the end of a spoken turn (`input_audio_buffer.speech_stopped`, or the client's "
            "`response.create`) to the first audio of its response; the silence that ends a turn is before it.",
            _REALTIME_S,
        )
        self.realtime_early_starts = self._counter(
            "realtime_early_starts",
            "Responses of realtime sessions begun in the silence that may end a turn: used (it did), dropped (the user "
            "spoke on), refused (no place; the response began after the turn).",
            "result",
        )
        self.realtime_interruptions = self._counter(
            "realtime_interruptions",
            "Responses of realtime sessions that were cancelled: turn_detected (the user spoke), client_cancelled.",
            "reason",
        )
        self.realtime_truncated_seconds = self._counter(
            "realtime_truncated_seconds",
            "Seconds of speech cut by `conversation.item.truncate`, as its client had not played them.",
        )
        self.realtime_underruns = self._counter(
            "realtime_underruns",
            "Audio of realtime sessions that was sent after all audio sent before had been played.",
        )
        self._limits: dict[str, Callable[[], tuple[int, int]]] = {}
        self._limit_used = self._gauge(
            "limit_used",
            "How much of each limit is in use: requests, connections, body_bytes, answer_bytes (kept speech, with what "
            "is expected), log_bytes (lines that stderr has not taken); chats, chat_queue, kv_pages, preprocessing "
            "(requests, of which as many as the limit have a thread and a decoder process), encoder_cache_bytes, "
            "voice_cache_bytes, unread_speech_bytes (with pictures), speech_streams, speech_slots, image_queue.",
            "limit",
        )
        self._limit_max = self._gauge("limit_max", "The limits of `mingc_limit_used`.", "limit")
        self._log_lines_dropped = self._counter(
            "log_lines_dropped", "Log lines that were dropped because nobody read stderr."
        )
        self._num_dropped_lines = 0
        self.read_dropped_lines: Callable[[], int] = lambda: 0
        self.body_bytes = self._gauge(
            "body_bytes",
            "Bytes of bodies and media that requests hold, without the first 64 KiB of each "
            "(--max-total-body-bytes).",
        )
        self._build = self._gauge(
            "build_info",
            "1; the labels are the versions of mingc, Python and torch, the model and the hash of its artifact's "
            "manifest.",
            "version",
            "python",
            "torch",
            "model",
            "artifact",
        )
        ProcessCollector(registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"mingc_{name}", text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"mingc_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"mingc_{name}", text, labels, buckets=buckets, registry=self._registry)

    def set_build(self, info: ServiceInfo) -> None:
        """Describe what is served."""
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = ""
        self._build.labels(__version__, platform.python_version(), torch, info.model, info.artifact).set(1)

    def add_limit(self, name: str, read: Callable[[], tuple[int, int]]) -> None:
        """Export a limit of the server; `read` returns how much is in use, and the limit."""
        self._limits[name] = read

    def render(self, load: ServiceLoad) -> bytes:
        """Write all metrics in Prometheus' text format, with the load of this moment."""
        self._set_load(load)
        return generate_latest(self._registry)

    def samples(self, load: ServiceLoad) -> list[MetricSample]:
        """List all time series, for another exporter, with the load of this moment."""
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
        for name, (used, most) in {
            **{name: read() for name, read in self._limits.items()},
            **load.limits,
        }.items():
            self._limit_used.labels(name).set(used)
            self._limit_max.labels(name).set(most)
        dropped = self.read_dropped_lines()
        self._log_lines_dropped.inc(dropped - self._num_dropped_lines)
        self._num_dropped_lines = dropped
        self._kv_cache_usage.set(load.kv_pages_used / max(1, load.kv_pages_total))
        for engine, count in load.num_waiting.items():
            self._requests_waiting.labels(engine).set(count)
        for name, counter in self._engine_counters.items():
            increase = getattr(load, name) - self._counted[name]
            if increase > 0:  # an unknown load is all zeros
                counter.inc(increase)
                self._counted[name] += increase
        self._drawing.set(load.drawing_pictures)
        self._cached_pages.set(load.cached_pages)
        self._encoder_cache_bytes.set(load.encoder_cache_bytes)
        for state, count in load.listeners.items():
            self._listeners.labels(state).set(count)
        for use in load.memory:
            self._memory.labels(use.owner, use.device).set(use.num_bytes)

    def describe(self) -> list[MetricInfo]:
        """List name, type, labels and help text of every metric, in the order of `/metrics`."""
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

    async def count_transcript(
        self, events: AsyncIterator[TranscriptEvent]
    ) -> AsyncIterator[TranscriptEvent]:
        """Yield `events`, and count the tokens of the last one."""
        async for event in events:
            if isinstance(event, TranscriptDone):
                self.count_usage(event.usage)
            yield event

    def observe_stages(self, timings_ms: Mapping[str, float]) -> None:
        """Record the stages of a finished request from `Done.timings_ms`; a stage that it did not have is left out."""
        for stage, passed in stages_ms(timings_ms):
            self._stages.labels(stage).observe(passed / 1e3)

    def timer(self) -> RequestTimer:
        """Start the timer of one request."""
        return RequestTimer(self)


def describe_metrics() -> list[MetricInfo]:
    """List every metric that a server exports; starts no server."""
    return Metrics().describe()


class RequestTimer:
    """Times the first text, audio and picture, and the gaps between texts of one request, from its own creation."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._first = {
            TextDelta: metrics.time_to_first_token,
            AudioDelta: metrics.time_to_first_audio,
            ImageDone: metrics.time_to_first_image,
        }
        self._last_token: dict[int, float] = {}  # by answer

    @asynccontextmanager
    async def measure(self, events: AsyncIterator[_Each]) -> AsyncIterator[AsyncIterator[_Each]]:
        """Record metrics of events, each with or without the number of its answer.

        On exit close the service's iterator, which cancels the request.
        """

        async def watched() -> AsyncIterator[_Each]:
            async for each in events:
                self._see(*(each if isinstance(each, tuple) else (0, each)))
                yield each

        try:
            yield watched()
        finally:
            close = getattr(events, "aclose", None)  # AsyncIterator does not promise it; generators have it
            if close is not None:
                await close()

    def _see(self, answer: int, event: Event | ImageEvent) -> None:
        now = time.monotonic()
        kind = ImageDone if isinstance(event, PartialImage) else type(event)
        if (histogram := self._first.pop(kind, None)) is not None:
            histogram.observe(now - self._start)
        if kind is TextDelta:
            if answer in self._last_token:
                self._metrics.between_tokens.observe(now - self._last_token[answer])
            self._last_token[answer] = now
        elif isinstance(event, Done):
            self._metrics.count_usage(event.usage)
            self._metrics.observe_stages(event.timings_ms)
            tracing.mark_stages(event, answer)


class Playback:
    """Times the audio of one response of a realtime session: its first audio, and what comes too late to be heard.

    A client plays from the first audio on.
    """

    def __init__(
        self, metrics: Metrics, turn_end: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`turn_end`: when the spoken turn ended that is answered, by `clock` in seconds; None answers no speech."""
        self._metrics = metrics
        self._turn_end = turn_end
        self._clock = clock
        self._played_until: float | None = None

    def add(self, seconds: float) -> None:
        """Record that audio of this length is sent now."""
        now = self._clock()
        if self._played_until is None:
            self._played_until = now
            if self._turn_end is not None:
                self._metrics.realtime_first_audio.observe(now - self._turn_end)
        elif now > self._played_until:
            self._metrics.realtime_underruns.inc()
        self._played_until = max(now, self._played_until) + seconds


def route_of(scope: Scope) -> str:
    """Find the path pattern of the route that matches a request."""
    app: Starlette = scope["app"]
    for route in app.routes:
        if isinstance(route, Route | WebSocketRoute) and route.path_regex.match(scope["path"]):
            return route.path
    return "unmatched"
