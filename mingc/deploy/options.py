"""Options of a Ray Serve application: parsed from the arguments of `serve run`, of a config file or of Python.

Arguments that are not fields of `DeployOptions` are fields with the same names of `ServeOptions`, `EngineOptions` or
`MediaOptions`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mingc.errors import ConfigError
from mingc.media.options import MediaOptions
from mingc.runtime.service.options import EngineOptions
from mingc.server.options import ServeOptions

WHERE = "arguments of mingc.deploy.ray:app"
# Serve's proxy owns the connections, so these options of a server of our own would be ignored.
_OF_THE_PROXY = frozenset(
    {
        "host",
        "port",
        "max_connections",
        "header_timeout_s",
        "write_timeout_s",
        "drain_s",
        "shutdown_timeout_s",
    }
)
_MOST = 2**31 - 1  # of the integers in Serve's messages
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeployOptions:
    """How an artifact is deployed on Ray Serve, validated on construction.

    Attributes:
        artifact: folder or packed bundle on every node; with `fetch`, the argument of that command.
        fetch: shell command that writes the folder or packed bundle `{output}` from `{artifact}` (both are
            substituted); run once per node. None: nothing is fetched.
        cache: folder on every node that keeps what was fetched.
        tp: ranks of the thinker; None takes the artifact's. A replica refuses an artifact for another number.
        speech: whether replicas load the speech stages of the artifact.
        speech_artifact: artifact of a second deployment that generates all speech; the first one then loads none.
        min_replicas, max_replicas: bounds of autoscaling; equal ones switch it off.
        speech_min_replicas, speech_max_replicas: the same of the second deployment.
        target_ongoing_requests: mean number of requests in a replica that autoscaling aims at.
        max_ongoing_requests: requests that the proxies send to one replica at a time.
        max_queued_requests: requests that wait in one proxy before it answers 503; -1: any number.
        upscale_delay_s: time above the target before replicas are added.
        downscale_delay_s: time below the target before replicas are removed.
        num_gpus: GPUs of a replica; None: the ranks of a CUDA artifact, 0 for a CPU artifact, and `tp` or 1 when the
            artifact is fetched or not there yet; or more, up to the last one of `talker_devices`. A fraction lets
            replicas of one rank share a GPU.
        speech_num_gpus: the same of the second deployment.
        num_cpus: CPUs that Ray reserves for a replica.
        graceful_shutdown_timeout_s: time that running requests of a removed replica may continue.
        health_check_period_s: time between two health checks of a replica; the third failed one in a row replaces it.
        health_check_timeout_s: time after which a health check without an answer counts as failed.
        max_surge_percent: replicas that a rolling update may start before it stops old ones, in percent.
        affinity: send requests with equal `x-session-id` headers to the same replica as long as it exists.
    """

    artifact: str
    fetch: str | None = None
    cache: Path | None = None
    tp: int | None = None
    speech: bool = True
    speech_artifact: str | None = None
    min_replicas: int = 1
    max_replicas: int = 1
    speech_min_replicas: int = 1
    speech_max_replicas: int = 1
    target_ongoing_requests: float = 16.0
    max_ongoing_requests: int = 64
    max_queued_requests: int = 256
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 600.0
    num_gpus: float | None = None
    speech_num_gpus: float | None = None
    num_cpus: float = 1.0
    graceful_shutdown_timeout_s: float = 600.0
    health_check_period_s: float = 2.0
    health_check_timeout_s: float = 30.0
    max_surge_percent: int = 0
    affinity: bool = False
    http: ServeOptions = field(default_factory=ServeOptions)
    engines: EngineOptions = field(default_factory=EngineOptions)
    media: MediaOptions = field(default_factory=MediaOptions)

    def __post_init__(self) -> None:
        problems = []
        if not self.artifact:
            problems.append("artifact is empty")
        if self.fetch is not None:
            problems += [
                f"fetch has no {name}" for name in ("{artifact}", "{output}") if name not in self.fetch
            ]
            if self.cache is None:
                problems.append("fetch needs cache, a folder on every node")
        for prefix in ("", "speech_"):
            least, most = getattr(self, f"{prefix}min_replicas"), getattr(self, f"{prefix}max_replicas")
            if not 1 <= least <= most:
                problems.append(
                    f"{prefix}min_replicas {least} and {prefix}max_replicas {most} are not 1 ≤ min ≤ max"
                )
        for name in ("target_ongoing_requests", "max_ongoing_requests", "health_check_period_s",
                     "health_check_timeout_s"):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                problems.append(f"{name} is {getattr(self, name)}, which is not above 0")
        if self.tp is not None and self.tp < 1:
            problems.append(f"tp is {self.tp}, which is below 1")
        for name in ("upscale_delay_s", "downscale_delay_s", "graceful_shutdown_timeout_s", "num_cpus",
                     "num_gpus", "speech_num_gpus", "max_surge_percent"):  # fmt: skip
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                problems.append(f"{name} is {value}, which is below 0")
        for name in ("num_gpus", "speech_num_gpus"):
            if (value := getattr(self, name)) is not None and 1 < value < math.inf and value != int(value):
                problems.append(f"{name} is {value}: Ray shares one GPU, or reserves whole ones")
        if self.max_surge_percent > 100:
            problems.append(f"max_surge_percent is {self.max_surge_percent}, which is above 100")
        for name in ("min_replicas", "max_replicas", "speech_min_replicas", "speech_max_replicas",
                     "max_queued_requests"):  # fmt: skip
            if getattr(self, name) > _MOST:
                problems.append(f"{name} is {getattr(self, name)}, which is above {_MOST}")
        if self.max_queued_requests < 1 and self.max_queued_requests != -1:
            problems.append(
                f"max_queued_requests is {self.max_queued_requests}, which is neither above 0 nor -1 (any number)"
            )
        if self.max_ongoing_requests > self.http.max_concurrent_requests:
            problems.append(
                f"max_ongoing_requests {self.max_ongoing_requests} is above max_concurrent_requests "
                f"{self.http.max_concurrent_requests}"
            )
        if self.speech_artifact is not None and not self.speech:
            problems.append("speech is off, but speech_artifact is given")
        if self.engines.talker_devices and not self.speech:
            problems.append("speech is off, but talker_devices are given")
        if self.speech_artifact is None:
            problems += [
                f"{name} is of the second deployment, which needs speech_artifact"
                for name, default in (
                    ("speech_min_replicas", 1),
                    ("speech_max_replicas", 1),
                    ("speech_num_gpus", None),
                )
                if getattr(self, name) != default
            ]
        if self.cache is not None and self.fetch is None:
            problems.append("cache keeps what fetch writes, and fetch is missing")
        if problems:
            raise ConfigError("; ".join(problems), where=WHERE, fix="see docs/deployment.md")


def parse_arguments(arguments: Mapping[str, Any]) -> DeployOptions:
    """Options from the arguments of an application; values may be strings, as `serve run` passes them.

    Raises: ConfigError for an unknown name or a value of another type.
    """
    own = _types(DeployOptions, excluded={"http", "engines", "media"})
    http = _types(ServeOptions, excluded=_OF_THE_PROXY)
    engines = _types(EngineOptions, excluded={"steps", "tp"})
    media = _types(MediaOptions, excluded=())
    given: dict[str, dict[str, Any]] = {"own": {}, "http": {}, "engines": {}, "media": {}}
    problems = []
    for name, value in arguments.items():
        for group, known in (("own", own), ("http", http), ("engines", engines), ("media", media)):
            if name in known:
                try:
                    given[group][name] = _convert(value, known[name])
                except ValueError as error:
                    problems.append(f"{name}={value!r}: {error}")
                break
        else:
            reason = "belongs to Serve's proxy (http_options)" if name in _OF_THE_PROXY else "is no option"
            problems.append(f"{name} {reason}")
    if "artifact" not in arguments:
        problems.append("artifact is missing")
    if problems:
        raise ConfigError("; ".join(problems), where=WHERE, fix="pass artifact=PATH and the options you need")
    return DeployOptions(
        **given["own"],
        http=ServeOptions(**given["http"]),
        engines=EngineOptions(**given["engines"]),
        media=MediaOptions(**given["media"]),
    )


def _types(options: type, excluded: typing.Collection[str]) -> dict[str, Any]:
    hints = typing.get_type_hints(options)
    return {each.name: hints[each.name] for each in dataclasses.fields(options) if each.name not in excluded}


def _convert(value: Any, kind: Any) -> Any:
    """`value` as `kind`. Raises: ValueError when it cannot be that."""
    if isinstance(kind, types.UnionType):
        if value is None or value == "none":
            return None
        (kind,) = (each for each in kind.__args__ if each is not type(None))
    if typing.get_origin(kind) is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ValueError("not a list")
        return tuple(str(each) for each in items)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() not in _TRUE + _FALSE:
            raise ValueError("not true or false")
        return str(value).lower() in _TRUE
    if kind is str and not isinstance(
        value, str | os.PathLike
    ):  # an empty line of a config file would be "None"
        raise ValueError("not a text")
    if kind in (int, float) and isinstance(value, bool):
        raise ValueError("not a number")
    if kind is int and isinstance(value, float):
        raise ValueError("not a whole number")
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"not of type {kind.__name__}") from error
