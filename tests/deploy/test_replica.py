"""Replicas and their calls without a Ray instance: health, ranks, metrics, errors of remote calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_service import FakeService
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from mingc.deploy import ray_metrics, replica
from mingc.deploy.options import DeployOptions
from mingc.errors import CapacityError, ConfigError, RankError, RequestError, ServeError, WorkerError
from mingc.runtime.http.metrics import Metrics
from mingc.runtime.request import Service, ServiceLoad, Usage


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


def test_an_artifact_for_other_ranks_is_refused(eager_artifact: Path) -> None:
    """The GPUs that were reserved would be those of `tp`, not of the artifact."""
    options = DeployOptions(artifact=str(eager_artifact), tp=2)
    with pytest.raises(ConfigError, match=r"the artifact is for 1 rank\(s\), 2 asked"):
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
