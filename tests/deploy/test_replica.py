"""Replicas and their calls without a Ray instance: health, ranks, metrics, errors of remote calls."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fake_service import INFO, TEXT_ONLY, FakeService
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from mingc.deploy import ray_metrics, replica
from mingc.deploy.options import DeployOptions
from mingc.deploy.remote_speech import SegmentCall, SpeechInfo
from mingc.errors import CapacityError, ConfigError, RankError, RequestError, ServeError, WorkerError
from mingc.prompts.media_decoder import MediaDecoder
from mingc.runtime.noise import NoiseSource, PhiloxNoise, ShiftedNoise
from mingc.runtime.request import (
    ChatRequest,
    Done,
    Event,
    SamplingParams,
    Service,
    ServiceLoad,
    SpeechParams,
    SpeechRequest,
    TextDelta,
    Usage,
)
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.server.metrics import Metrics
from mingc.server.options import ServeOptions
from mingc.text.spoken_piece import SpokenPiece


class FailingService(FakeService):
    """Keeps what is to be called when it fails."""

    report: Callable[[ServeError], None]

    def on_failure(self, report: Callable[[ServeError], None]) -> None:
        self.report = report


class PlainReplica(replica.Replica):
    async def open_service(self) -> Service:
        return FailingService()

    def __del__(self) -> None:  # type: ignore[override]
        """Of Serve, which awaits it; there is no Serve here."""


def opened() -> PlainReplica:
    """A replica as Serve makes one: its constructor is awaited."""
    made = PlainReplica.__new__(PlainReplica)
    asyncio.run(made.__init__(DeployOptions(artifact="none")))  # type: ignore[misc, func-returns-value, arg-type]
    return made


def test_a_replica_is_healthy_until_its_service_fails() -> None:
    made = opened()
    asyncio.run(made.check_health())
    made.service.report(RankError("rank 1 ended"))  # type: ignore[attr-defined]
    with pytest.raises(replica.UnhealthyReplicaError, match="rank 1 ended"):
        asyncio.run(made.check_health())


def test_a_replica_whose_service_is_not_ready_is_unhealthy() -> None:
    made = opened()
    made.service = FakeService(ready=False)
    with pytest.raises(replica.UnhealthyReplicaError, match="has ended"):
        asyncio.run(made.check_health())


def test_a_replica_that_failed_ends_its_process_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve routes to it until the third failed check, and most requests, as each fails at once."""
    ends: list[int] = []
    monkeypatch.setattr(replica.os, "_exit", ends.append)
    monkeypatch.setattr(replica, "_END_S", 0.01)

    async def end(is_reported: bool, num_checks: int) -> None:
        made = PlainReplica.__new__(PlainReplica)
        await made.__init__(DeployOptions(artifact="none"))  # type: ignore[misc]
        await made.check_health()
        await asyncio.sleep(0.03)
        assert ends == [], "a healthy one goes on"
        if is_reported:  # by the thread that watches the ranks
            await asyncio.to_thread(made.service.report, RankError("rank 1 ended"))  # type: ignore[attr-defined]
        else:
            made.service = FakeService(ready=False)
        for _ in range(num_checks):
            with pytest.raises(replica.UnhealthyReplicaError):
                await made.check_health()
        assert ends == [], "error events of its requests leave it first"
        while not ends:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.03)
        assert ends == [4]

    for is_reported, num_checks in ((True, 0), (True, 2), (False, 2)):
        asyncio.run(asyncio.wait_for(end(is_reported, num_checks), 20))
        ends.clear()


def test_an_artifact_for_other_ranks_is_refused(eager_artifact: Path) -> None:
    """The GPUs that were reserved would be those of `tp`, not of the artifact."""
    options = DeployOptions(artifact=str(eager_artifact), tp=2)
    with pytest.raises(ConfigError, match=r"the artifact is for 1 rank\(s\), 2 requested"):
        replica.open_model(options.artifact, options, tp=options.tp, loads_speech=False)


class Recorder:
    """In the place of Ray's counter and gauge: values by tags, checked as Ray does."""

    made: dict[str, Recorder]

    def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] = ()) -> None:
        assert name not in self.made and isinstance(tag_keys, tuple)
        self.made[name] = self
        self.tag_keys = tag_keys
        self.values: dict[tuple[str, ...], float] = {}

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses others"
        self.set(self.values.get(self._key(tags), 0.0) + value, tags)

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[self._key(tags)] = value

    def _key(self, tags: dict[str, str]) -> tuple[str, ...]:
        assert set(tags) == set(self.tag_keys)
        return tuple(tags[name] for name in self.tag_keys)


def test_metrics_of_a_replica_become_those_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, gauges = type("C", (Recorder,), {"made": {}}), type("G", (Recorder,), {"made": {}})
    monkeypatch.setattr(ray_metrics, "Counter", counters)
    monkeypatch.setattr(ray_metrics, "Gauge", gauges)
    metrics = Metrics()
    copied = ray_metrics.RayMetrics(
        metrics, lambda: ServiceLoad(kv_pages_used=1, kv_pages_total=4, num_waiting={"thinker": 3})
    )
    metrics.count("/v1/chat/completions", "200")
    metrics.request_duration.labels("/v1/chat/completions").observe(0.7)
    copied.copy()
    copied.copy()  # adds nothing
    metrics.count("/v1/chat/completions", "200")
    metrics.count("/v1/chat/completions", "503")
    metrics.count_usage(Usage(completion_tokens=5))
    copied.copy()
    found = counters.made["mingc_http_requests"]
    assert found.tag_keys == ("route", "status")
    assert found.values == {("/v1/chat/completions", "200"): 2, ("/v1/chat/completions", "503"): 1}
    assert counters.made["mingc_generation_tokens"].values == {(): 5}
    buckets = counters.made["mingc_request_duration_seconds_bucket"]
    assert buckets.tag_keys == ("route", "le")
    assert {le for (_, le) in buckets.values} == {
        "1.0",
        "2.0",
        "5.0",
        "10.0",
        "30.0",
        "60.0",
        "120.0",
        "300.0",
        "+Inf",
    }
    assert set(buckets.values.values()) == {1}
    assert counters.made["mingc_request_duration_seconds_sum"].values == {("/v1/chat/completions",): 0.7}
    assert gauges.made["mingc_kv_cache_usage_ratio"].values == {(): 0.25}
    assert gauges.made["mingc_num_requests_waiting"].values == {("thinker",): 3}
    names = {*counters.made, *gauges.made}
    assert all(name.startswith("mingc_") and not name.endswith(("_total", "_created")) for name in names)


class Response:
    """A call's events: none, then `error`."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.is_cancelled = False

    def remote(self, argument: object) -> Response:
        return self

    def __aiter__(self) -> Response:
        return self

    async def __anext__(self) -> Any:
        raise self._error

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.mark.parametrize(
    "error, expected, status",
    [
        (RayTaskError("speak", "traceback", RequestError("no such voice", param="voice")), RequestError, 400),
        (RayActorError(), WorkerError, 500),
        (BackPressureError(9, 8), CapacityError, 503),
        (DeploymentUnavailableError("mingc-speech"), WorkerError, 503),
        (TaskCancelledError(), WorkerError, 500),
        (asyncio.CancelledError(), WorkerError, 500),
    ],
)
def test_errors_of_remote_calls(error: BaseException, expected: type[ServeError], status: int) -> None:
    response = Response(error)

    async def run() -> None:
        async for _ in replica._remote_events(response, "call"):
            pass

    with pytest.raises(expected) as raised:
        asyncio.run(run())
    assert raised.value.status == status and response.is_cancelled


def test_a_service_that_failed_before_it_was_watched_is_unhealthy() -> None:
    class FailedService(FakeService):
        def on_failure(self, report: Callable[[ServeError], None]) -> None:
            report(WorkerError("the talker thread ended"))

    class FailedReplica(PlainReplica):
        async def open_service(self) -> Service:
            return FailedService()

    made = FailedReplica.__new__(FailedReplica)
    asyncio.run(made.__init__(DeployOptions(artifact="none")))  # type: ignore[misc, func-returns-value, arg-type]
    with pytest.raises(replica.UnhealthyReplicaError, match="talker thread ended"):
        asyncio.run(made.check_health())


def test_a_replica_that_ends_closes_its_service_at_once() -> None:
    """Serve has waited for running requests by then. One whose constructor failed has none to close."""
    made = opened()
    asyncio.run(cast(Any, replica.Replica.__del__)(made))
    assert cast(FakeService, made.service).shutdown_timeouts == [0.0]
    del made.service
    asyncio.run(cast(Any, replica.Replica.__del__)(made))


@pytest.fixture
def opened_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Path, EngineOptions]]]:
    """What would be opened. The interpreter's settings are as before afterwards."""
    found: list[tuple[Path, EngineOptions]] = []

    def open_service(root: Path, options: EngineOptions, *, media: MediaDecoder) -> FakeService:
        found.append((root, options))
        return FakeService(INFO if options.loads_speech else TEXT_ONLY)

    monkeypatch.setattr(replica, "open_service", open_service)
    before = sys.getswitchinterval()
    yield found
    sys.setswitchinterval(before)
    gc.unfreeze()


def test_a_model_is_opened_with_all_options(
    opened_models: list[tuple[Path, EngineOptions]], tmp_path: Path
) -> None:
    engines = EngineOptions(max_waiting=9, num_torch_threads=3, talker_devices=("cuda:2",))
    options = DeployOptions(artifact="/a", engines=engines)
    replica.open_model("/b", options, tp=2, loads_speech=False)
    text_only = replace(engines, tp=2, loads_speech=False, talker_devices=())
    assert opened_models == [(Path("/b"), text_only)], "devices of talkers are for those who load them"
    assert sys.getswitchinterval() == pytest.approx(0.001) and gc.get_freeze_count() > 0
    fetching = replace(options, fetch="echo {artifact} > {output}", cache=tmp_path)
    replica.open_model("s3://b", fetching, tp=None, loads_speech=True)
    root, given = opened_models[1]
    assert root.read_text() == "s3://b\n" and (given.tp, given.loads_speech) == (None, True)
    assert given.talker_devices == ("cuda:2",)
    apart = replace(options, speech_artifact="/s", engines=replace(engines, image_devices=("cuda:0",)))
    model: Any = SimpleNamespace(options=apart)
    asyncio.run(cast(Any, replica.SpeechReplica.open_service)(model))
    assert opened_models[2] == (Path("/s"), engines), "the other deployment draws"


class Handle:
    """In the place of the speech deployment's handle: the methods of a replica, called here."""

    def __init__(self, speech: FakeService) -> None:
        self._speech = speech
        self.calls: list[tuple[str, object]] = []
        self.options_given: list[dict[str, Any]] = []
        self.speak = SimpleNamespace(remote=lambda call: self._stream("speak", call))
        self.speech = SimpleNamespace(remote=lambda request: self._stream("speech", request))
        self.info = SimpleNamespace(remote=self._info)

    def options(self, **given: Any) -> Handle:
        self.options_given.append(given)
        return self

    async def _info(self) -> SpeechInfo:
        return SpeechInfo(service=self._speech.info, max_segment_length=50, speech_text="natural")

    def _stream(self, method: str, argument: object) -> Events:
        self.calls.append((method, argument))
        return Events()


class Events:
    """Events of one call, then its end."""

    def __init__(self) -> None:
        self._left: list[Event] = [Done(finish_reason="stop", usage=Usage(audio_patches=1))]

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> Event:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop(0)

    def cancel(self) -> None:
        """The call is over."""


class QuietModelReplica(replica.ModelReplica):
    def __del__(self) -> None:  # type: ignore[override]
        """Of Serve, which awaits it; there is no Serve here."""


async def model_replica(options: DeployOptions, speech: Handle | None = None) -> QuietModelReplica:
    made = QuietModelReplica.__new__(QuietModelReplica)
    await made.__init__(options, speech)  # type: ignore[misc]
    return made


async def end(made: replica.ModelReplica) -> None:
    await cast(Any, replica.ModelReplica.__del__)(made)


@pytest.mark.parametrize(
    "speech, has_remote, loaded", [(True, False, True), (False, False, False), (True, True, False)]
)
def test_speech_stages_are_loaded_where_they_speak(
    opened_models: list[tuple[Path, EngineOptions]], speech: bool, has_remote: bool, loaded: bool
) -> None:
    async def run() -> bool:
        options = DeployOptions(
            artifact="/a", tp=3, speech=speech, speech_artifact="/s" if has_remote else None
        )
        made = await model_replica(options, Handle(FakeService()) if has_remote else None)
        await end(made)
        return made.service.info.has_speech

    has_speech = asyncio.run(run())
    assert [(options.tp, options.loads_speech) for _, options in opened_models] == [(3, loaded)]
    assert has_speech == (loaded or has_remote)


def test_speech_of_another_deployment_is_asked_for_by_its_handle(
    opened_models: list[tuple[Path, EngineOptions]],
) -> None:
    async def run() -> None:
        handle = Handle(FakeService(replace(INFO, voices=("Ann",), default_voice="Ann")))
        made = await model_replica(DeployOptions(artifact="/a", speech_artifact="/s"), handle)
        assert handle.options_given == [{"stream": True}], "a call without it would return one object"
        assert made.service.info.voices == ("Ann",)
        request = SpeechRequest(request_id="1", text="x", speech=SpeechParams())
        assert [event async for event in made.service.speech(request)] == [
            Done(finish_reason="stop", usage=Usage(audio_patches=1))
        ]
        assert handle.calls == [("speech", request)]
        chat = ChatRequest(
            request_id="2", messages=(), sampling=SamplingParams(), speech=SpeechParams(voice="Ann", seed=3)
        )
        assert any([isinstance(event, Done) async for event in made.service.chat(chat)])
        spoken = [call for method, call in handle.calls[1:] if method == "speak"]
        assert spoken and len(spoken) == len(handle.calls) - 1
        assert all(isinstance(call, SegmentCall) and call.seed == 3 for call in spoken)
        await end(made)

    asyncio.run(run())


def test_voices_of_an_updated_speech_deployment_become_known(
    opened_models: list[tuple[Path, EngineOptions]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both deployments may be updated at once, or a speech replica starts again with another artifact."""
    monkeypatch.setattr(replica, "_SPEECH_INFO_PERIOD_S", 0.001)

    async def run() -> None:
        handle = Handle(FakeService(replace(INFO, voices=("Ann",), default_voice="Ann")))
        made = await model_replica(DeployOptions(artifact="/a", speech_artifact="/s"), handle)
        known = made.service.info
        handle.info = SimpleNamespace(remote=lambda: asyncio.sleep(0))  # no answer: it has no voices
        await asyncio.sleep(0.02)
        assert made.service.info == known, "what was known stays"
        handle._speech = FakeService(replace(INFO, voices=("Ben",), default_voice="Ben", sample_rate=8000))
        handle.info = SimpleNamespace(remote=handle._info)

        async def is_read() -> None:
            while made.service.info.voices != ("Ben",):
                await asyncio.sleep(0.001)

        await asyncio.wait_for(is_read(), 20)
        assert made.service.info == replace(known, voices=("Ben",), default_voice="Ben", sample_rate=8000)
        await end(made)

    asyncio.run(run())


def test_a_replica_serves_the_app_with_its_options_and_reports_its_state(
    opened_models: list[tuple[Path, EngineOptions]], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ServiceLoad(kv_pages_used=3, num_waiting={"thinker": 2})
    monkeypatch.setattr(FakeService, "load", load)

    async def run() -> None:
        made = await model_replica(DeployOptions(artifact="/a", http=ServeOptions(max_body_bytes=100)))
        transport = httpx.ASGITransport(cast(Any, made.__serve_build_asgi_app__()))
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "ming-omni"
            large = await client.post("/v1/chat/completions", content=b" " * 200)
            assert large.status_code == 413, "an option of the HTTP layer"
            assert "x-request-id" not in large.headers, "the proxy adds it"
        service = cast(FakeService, made.service)
        state = await made.state()
        assert (state.pid, state.model, state.is_ready) == (os.getpid(), "ming-omni", True)
        assert (state.kv_pages_used, state.num_waiting, state.num_running) == (3, {"thinker": 2}, 0)
        (publishing,) = made._tasks
        assert not publishing.done()
        await end(made)
        assert publishing.cancelled() and service.shutdown_timeouts == [0.0]

    asyncio.run(run())


def test_wrong_keys_are_refused_before_the_model_is_opened(
    opened_models: list[tuple[Path, EngineOptions]], tmp_path: Path
) -> None:
    """Opening one takes minutes, and Serve tries three times."""
    options = DeployOptions(artifact="/a", http=ServeOptions(api_key_file=tmp_path / "none"))
    with pytest.raises(ConfigError, match="no API keys in"):
        asyncio.run(model_replica(options))
    assert opened_models == []


def test_a_speech_replica_exports_the_load_of_its_talker(
    opened_models: list[tuple[Path, EngineOptions]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests are the text replicas'; what waits for a slot is known here only."""
    counters, gauges = type("C", (Recorder,), {"made": {}}), type("G", (Recorder,), {"made": {}})
    monkeypatch.setattr(ray_metrics, "Counter", counters)
    monkeypatch.setattr(ray_metrics, "Gauge", gauges)
    load = ServiceLoad(num_waiting={"talker": 5}, listeners={"playing": 3}, num_underruns=2)
    monkeypatch.setattr(FakeService, "load", load)

    class Made(replica.SpeechReplica):
        def __del__(self) -> None:  # type: ignore[override]
            """Of Serve, which awaits it; there is no Serve here."""

    async def run() -> None:
        made = Made.__new__(Made)
        await made.__init__(DeployOptions(artifact="/a", speech_artifact="/s"))  # type: ignore[misc]
        await asyncio.sleep(0)
        assert gauges.made["mingc_num_requests_waiting"].values == {("talker",): 5}
        assert gauges.made["mingc_num_listeners"].values == {("playing",): 3}
        assert counters.made["mingc_speech_underruns"].values == {(): 2}
        (publishing,) = made._tasks
        await cast(Any, replica.SpeechReplica.__del__)(made)
        assert publishing.cancelled()
        assert cast(FakeService, made.service).shutdown_timeouts == [0.0]

    asyncio.run(run())


class SpeakingService(OmniService):
    """Keeps what it is asked to speak."""

    info = INFO
    max_segment_length = 30  # type: ignore[assignment]
    speech_text = "reference"  # type: ignore[assignment]

    def __init__(self) -> None:
        self.spoken: list[tuple[Any, ...]] = []

    async def speak(  # type: ignore[override]
        self, pieces: Any, params: SpeechParams, noise: NoiseSource, *, is_live: bool, priority: int
    ) -> AsyncGenerator[Event]:
        self.spoken.append((pieces, params, noise, is_live, priority))
        yield Done(finish_reason="stop", usage=Usage())

    async def speech(self, request: SpeechRequest) -> AsyncGenerator[Event]:  # type: ignore[override]
        self.spoken.append((request,))
        yield TextDelta(text=request.text)


def speech_replica() -> replica.SpeechReplica:
    class Made(replica.SpeechReplica):
        def __del__(self) -> None:  # type: ignore[override]
            """Of Serve, which awaits it; there is no Serve here."""

    made = Made.__new__(Made)
    made.service = SpeakingService()
    return made


def test_a_speech_replica_speaks_a_segment_with_the_noise_of_its_place() -> None:
    made = speech_replica()
    call = SegmentCall(
        text="two", index=2, params=SpeechParams(voice="Ann"), seed=7, text_end=9, is_live=True, priority=4
    )
    request = SpeechRequest(request_id="1", text="whole", speech=SpeechParams())

    async def run() -> list[Event]:
        assert await made.info() == SpeechInfo(service=INFO, max_segment_length=30, speech_text="reference")
        return [event async for event in made.speak(call)] + [event async for event in made.speech(request)]

    assert asyncio.run(run()) == [Done(finish_reason="stop", usage=Usage()), TextDelta(text="whole")]
    noise = ShiftedNoise(PhiloxNoise(7), 2)
    assert cast(SpeakingService, made.service).spoken == [
        ([SpokenPiece("two", 9)], SpeechParams(voice="Ann"), noise, True, 4),
        (request,),
    ]


def test_a_speech_replica_opens_the_speech_artifact_whatever_the_ranks_of_the_other(
    opened_models: list[tuple[Path, EngineOptions]],
) -> None:
    made = speech_replica()
    made.options = DeployOptions(artifact="/a", speech_artifact="/s", tp=4)
    asyncio.run(made.open_service())
    (opened_model,) = opened_models
    assert opened_model[0] == Path("/s")
    assert (opened_model[1].tp, opened_model[1].loads_speech) == (None, True)


class Calls:
    """A remote call with events, whose reader may leave."""

    def __init__(self, *events: Event) -> None:
        self._events = list(events)
        self.is_cancelled = False

    def remote(self, argument: object) -> Calls:
        return self

    def __aiter__(self) -> Calls:
        return self

    async def __anext__(self) -> Event:
        if self._events:
            return self._events.pop(0)
        await asyncio.sleep(60)
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.is_cancelled = True


def test_a_reader_that_leaves_cancels_the_remote_call() -> None:
    calls = Calls(TextDelta(text="a"))

    async def run() -> None:
        events = replica._remote_events(calls, "call")
        assert await anext(events) == TextDelta(text="a")
        await events.aclose()

    asyncio.run(run())
    assert calls.is_cancelled


def test_a_request_that_is_cancelled_stays_cancelled() -> None:
    """Otherwise a client that left would be logged as a failure of a replica."""
    calls = Calls()

    async def run() -> None:
        reading = asyncio.ensure_future(anext(replica._remote_events(calls, "call")))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(run())
    assert calls.is_cancelled


def test_an_error_of_no_kind_of_ours_is_raised_as_it_is() -> None:
    error = RayTaskError("speak", "traceback", ValueError("a bug"))

    async def run() -> None:
        async for _ in replica._remote_events(Response(error), "call"):
            pass

    with pytest.raises(RayTaskError):
        asyncio.run(run())


@pytest.mark.parametrize(
    "scope, path",
    [
        ({"path": "/tiny/v1/models", "root_path": "/tiny"}, "/v1/models"),
        ({"path": "/tiny", "root_path": "/tiny"}, "/"),
        ({"path": "/v1/tiny", "root_path": "/tiny"}, "/v1/tiny"),
        ({"path": "/v1/models", "root_path": ""}, "/v1/models"),
        ({"path": "/v1/models"}, "/v1/models"),
    ],
)
def test_the_route_prefix_and_the_id_of_a_request_are_the_proxys(scope: dict[str, Any], path: str) -> None:
    seen: list[dict[str, Any]] = []
    sent: list[Any] = []
    headers = [(b"x-request-id", b"7"), (b"content-type", b"text/plain")]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": list(headers)})
        await send({"type": "http.response.body", "body": b"x"})

    async def receive() -> Any:
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"type": "http", "headers": [], **scope}
    asyncio.run(replica.BehindProxy(app)(dict(given), receive, send))
    assert seen[0]["path"] == path and not seen[0].get("root_path")
    assert sent[0]["headers"] == headers[1:] and sent[1]["body"] == b"x"


def test_metrics_of_the_process_stay_rays_and_errors_do_not_end_copying(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counters, gauges = type("C", (Recorder,), {"made": {}}), type("G", (Recorder,), {"made": {}})
    monkeypatch.setattr(ray_metrics, "Counter", counters)
    monkeypatch.setattr(ray_metrics, "Gauge", gauges)
    loads: list[Any] = [
        RuntimeError("no load"),
        ServiceLoad(kv_pages_used=1, kv_pages_total=2),
        ServiceLoad(),
    ]
    slept: list[float] = []

    def load() -> ServiceLoad:
        found = loads.pop(0)
        if isinstance(found, Exception):
            raise found
        return cast(ServiceLoad, found)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if not loads:
            raise asyncio.CancelledError

    monkeypatch.setattr(ray_metrics.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ray_metrics.RayMetrics(Metrics(), load).publish(5.0))
    assert slept == [5.0, 5.0, 5.0] and "no load" in caplog.text
    assert gauges.made["mingc_kv_cache_usage_ratio"].values == {(): 0.0}, "a gauge falls, too"
    assert not any("process" in name or "python" in name for name in {*counters.made, *gauges.made})
