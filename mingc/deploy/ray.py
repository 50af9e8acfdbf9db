"""A Ray Serve application over an artifact: `serve run mingc.deploy.ray:app artifact=PATH`.

Each replica is an actor that serves the artifact with the HTTP app of `mingc serve`. Serve's proxies hold the
connections of clients and choose a replica for each request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from mingc.errors import ConfigError

try:
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.deployment import Application, Deployment
except ImportError as missing:
    raise ConfigError(
        "Ray Serve is not installed", where="mingc.deploy.ray", fix="pip install 'mingc[ray]'"
    ) from missing

from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.manifest import FILE_NAME
from mingc.deploy.options import DeployOptions, parse_arguments
from mingc.deploy.replica import ModelReplica, SpeechReplica
from mingc.server.api_keys import VARIABLE

_AFFINITY_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


def app(arguments: Mapping[str, Any]) -> Application:
    """The application for `arguments`; see `parse_arguments`.

    Raises: ConfigError, and ArtifactError when an artifact that should be there cannot be read.
    """
    return build_application(parse_arguments(arguments))


def _check_api_keys() -> None:
    """Refuse keys from the environment: other nodes lack them, and Ray would store and display them."""
    if os.environ.get(VARIABLE):
        raise ConfigError(
            f"replicas on other nodes do not have the keys of {VARIABLE}",
            where=VARIABLE,
            fix="unset it, put the keys into a file on every node and pass api_key_file=PATH",
        )


def build_application(options: DeployOptions, ingress: type[ModelReplica] = ModelReplica) -> Application:
    """The application for `options`. `ingress`: class of the replicas that answer HTTP requests. Raises: as `app`."""
    _check_api_keys()
    is_whole = options.speech_artifact is None
    gpus = _num_gpus(options.artifact, options, options.num_gpus, tp=options.tp, has_talkers=is_whole)
    model = _deployment(serve.ingress()(ingress)).options(
        name="mingc",
        **_common(options, gpus, options.min_replicas, options.max_replicas),
        **_affinity(options),
    )
    if options.speech_artifact is None:
        return model.bind(options)
    gpus = _num_gpus(options.speech_artifact, options, options.speech_num_gpus, tp=1, draws=False)
    speech = _deployment(SpeechReplica).options(
        name="mingc-speech",
        **_common(options, gpus, options.speech_min_replicas, options.speech_max_replicas),
    )
    return model.bind(options, speech.bind(options))


def _deployment(replica: type) -> Deployment:
    return cast(Deployment, serve.deployment(replica))


def _common(options: DeployOptions, num_gpus: float, least: int, most: int) -> dict[str, Any]:
    replicas: dict[str, Any] = {"num_replicas": least}
    if least < most:
        scaling = AutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            initial_replicas=least,
            target_ongoing_requests=options.target_ongoing_requests,
            upscale_delay_s=options.upscale_delay_s,
            downscale_delay_s=options.downscale_delay_s,
        )
        replicas = {"autoscaling_config": scaling}
    return {
        **replicas,
        "max_ongoing_requests": options.max_ongoing_requests,
        "max_queued_requests": options.max_queued_requests,
        "graceful_shutdown_timeout_s": options.graceful_shutdown_timeout_s,
        "health_check_period_s": options.health_check_period_s,
        "health_check_timeout_s": options.health_check_timeout_s,
        "max_surge_percent": options.max_surge_percent,
        # An actor lives on one node, and so do its ranks, which are its child processes.
        "ray_actor_options": {"num_cpus": options.num_cpus, "num_gpus": num_gpus},
    }


def _affinity(options: DeployOptions) -> dict[str, Any]:
    if not options.affinity:
        return {}
    return {"request_router_config": RequestRouterConfig(request_router_class=_AFFINITY_ROUTER)}  # type: ignore[arg-type]


def _num_gpus(
    artifact: str,
    options: DeployOptions,
    given: float | None,
    *,
    tp: int | None,
    has_talkers: bool = True,
    draws: bool = True,
) -> float:
    """GPUs of a replica: as given, or by the manifest, or one per rank when the artifact is not here yet.

    A replica that speaks or draws has at least as many as the devices for that need.
    """
    if given is not None:
        return given
    root = Path(artifact)
    engines = options.engines
    names = (*(engines.talker_devices if has_talkers else ()), *(engines.image_devices if draws else ()))
    least = float(max((1 + int(name.partition(":")[2]) for name in names if name != "cpu"), default=0))
    if options.fetch is not None or not (root.is_file() or (root / FILE_NAME).exists()):
        return max(float(tp or 1), least)
    fingerprint = open_artifact(root).manifest.fingerprint
    return max(float(fingerprint.world_size), least) if fingerprint.device == "cuda" else 0.0
