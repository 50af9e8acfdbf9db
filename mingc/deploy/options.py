"""Options of a Ray Serve application, from the arguments of `serve run`, a config file or Python.

An argument is the name of a field of `DeployOptions`, `ServeOptions`, `MediaOptions` or `EngineOptions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mingc.media.options import MediaOptions
from mingc.options import MOST_SECONDS, REQUIRED, SECONDS, check, option, options_of, parse, refuse
from mingc.runtime.service.options import EngineOptions
from mingc.server.options import ServeOptions

WHERE = "arguments of mingc.deploy.ray:app"
# Serve's proxy owns the connections, so these options would have no effect.
OF_THE_PROXY = frozenset(
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
_MOST = 2**31 - 1  # the largest integer in Serve's messages


@dataclass(frozen=True, kw_only=True, slots=True)
class DeployOptions:
    """How an artifact is deployed on Ray Serve, validated on construction."""

    artifact: str = option(
        REQUIRED, help="Folder or packed bundle on every node; with `fetch`, the argument of that command."
    )
    fetch: str | None = option(
        None,
        help="Shell command that writes the folder or packed bundle `{output}` from `{artifact}` (both are "
        "substituted); run once per node.",
    )  # fmt: skip
    cache: Path | None = option(None, help="Folder on every node that keeps what was fetched.")
    tp: int | None = option(
        None, least=1, most=1024, shown_default="the artifact's",
        help="Ranks of the thinker. A replica refuses an artifact for another number.",
    )  # fmt: skip
    speech: bool = option(
        True, help="Load the speech stages of the artifact; without them speech is refused."
    )
    speech_artifact: str | None = option(
        None,
        help="Artifact of a second deployment that generates all speech; the first one then loads none.",
    )  # fmt: skip
    min_replicas: int = option(
        1, least=1, most=_MOST, help="Replicas at least; equal to max_replicas: no autoscaling."
    )
    max_replicas: int = option(1, least=1, most=_MOST, help="Replicas at most.")
    speech_min_replicas: int = option(1, least=1, most=_MOST, help="min_replicas of the second deployment.")
    speech_max_replicas: int = option(1, least=1, most=_MOST, help="max_replicas of the second deployment.")
    target_ongoing_requests: float = option(
        16.0, above=0, most=_MOST, help="Mean number of requests in a replica that autoscaling aims at."
    )
    max_ongoing_requests: int = option(
        64,
        least=1,
        most=_MOST,
        help="Requests that the proxies send to one replica at a time; at most max_concurrent_requests.",
    )
    max_queued_requests: int = option(
        256, least=-1, most=_MOST,
        help="Requests that wait in one proxy before it answers 503; -1: any number.",
    )  # fmt: skip
    upscale_delay_s: float = option(
        10.0,
        unit=SECONDS,
        least=0,
        most=MOST_SECONDS,
        help="Time above the target before replicas are added.",
    )
    downscale_delay_s: float = option(
        600.0,
        unit=SECONDS,
        least=0,
        most=MOST_SECONDS,
        help="Time below the target before replicas are removed.",
    )
    num_gpus: float | None = option(
        None, least=0, most=1024, shown_default="as many as the artifact needs",
        help="GPUs of a replica. By default the ranks of a CUDA artifact, 0 for a CPU artifact, `tp` or 1 when the "
        "artifact is fetched or not there yet, and more if `talker_devices` or `image_devices` need them. A fraction "
        "lets replicas of one rank share a GPU.",
    )  # fmt: skip
    speech_num_gpus: float | None = option(
        None,
        least=0,
        most=1024,
        shown_default="as many as the artifact needs",
        help="num_gpus of the second deployment.",
    )
    num_cpus: float = option(1.0, least=0, most=10**6, help="CPUs that Ray reserves for a replica.")
    graceful_shutdown_timeout_s: float = option(
        600.0,
        unit=SECONDS,
        least=0,
        most=MOST_SECONDS,
        help="Time that running requests of a removed replica may continue.",
    )
    health_check_period_s: float = option(
        2.0, unit=SECONDS, above=0, most=MOST_SECONDS,
        help="Time between two health checks of a replica; the third failed check in a row replaces it.",
    )  # fmt: skip
    health_check_timeout_s: float = option(
        30.0,
        unit=SECONDS,
        above=0,
        most=MOST_SECONDS,
        help="Time after which a health check without an answer counts as failed.",
    )
    max_surge_percent: int = option(
        0, least=0, most=100,
        help="Replicas that a rolling update may start before it stops old ones, in percent.",
    )  # fmt: skip
    affinity: bool = option(
        False,
        help="Send requests with equal `x-session-id` headers to the same replica as long as it exists.",
    )
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
            if least > most:
                problems.append(f"{prefix}min_replicas {least} is above {prefix}max_replicas {most}")
        for name in ("num_gpus", "speech_num_gpus"):
            if (value := getattr(self, name)) is not None and value > 1 and value % 1:
                problems.append(f"{name} {value}: Ray shares one GPU, or reserves whole ones")
        if self.max_queued_requests == 0:
            problems.append("max_queued_requests 0: must be above 0, or -1 for any number")
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
        check(self, *problems, where=WHERE, fix="see docs/deployment.md")


def parse_arguments(arguments: Mapping[str, Any]) -> DeployOptions:
    """Options from the arguments of an application; values may be strings, as `serve run` passes them.

    Raises: ConfigError for an unknown name or a value of another type.
    """
    kinds = {DeployOptions: "", ServeOptions: "http", MediaOptions: "media", EngineOptions: "engines"}
    given: dict[type, dict[str, Any]] = {kind: {} for kind in kinds}
    problems = []
    for name, value in arguments.items():
        kind = next((each for each in kinds if name in options_of(each)), None)
        if name in OF_THE_PROXY:
            problems.append(f"{name} belongs to Serve's proxy (http_options)")
        elif kind is None:
            problems.append(f"{name} is no option")
        else:
            given[kind][name] = value
    if "artifact" not in arguments:
        problems.append("artifact is missing")
    values = {kind: parse(kind, each, problems, with_flags=False) for kind, each in given.items()}
    refuse(problems, where=WHERE, fix="pass artifact=PATH and the options you need")
    own = values.pop(DeployOptions)
    return DeployOptions(**own, **{kinds[kind]: kind(**each) for kind, each in values.items()})
