"""A Ray instance on this machine with Serve: loopback only, no dashboard, no statistics."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mingc_command import EAGER, REPOSITORY

_START_LIMIT_S = "300"
# Ray and its workers read these when they start. A busy machine with two cores needs generous limits.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on 127.0.0.1 only, on Linux as well
    "RAY_AUTH_MODE": "disabled",  # a token would be written into the home folder
    "RAY_raylet_start_wait_time_s": _START_LIMIT_S,
    "RAY_gcs_server_request_timeout_seconds": _START_LIMIT_S,
    "RAY_worker_register_timeout_seconds": _START_LIMIT_S,
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": _START_LIMIT_S,
    "RAY_prestart_worker_first_driver": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mingc.deploy.proxy:middlewares",
}
# Workers import the package, fakes and the tests' backend from here.
_FOLDERS = (REPOSITORY, EAGER.parent, EAGER)
_OBJECT_STORE_BYTES = 100 << 20  # Ray's least is 75 MB


def prepare_environment() -> None:
    """Set the variables that Ray reads when it is imported."""
    os.environ.update(_ENVIRONMENT)


@contextmanager
def ray_cluster() -> Iterator[str]:
    """Starts Ray and Serve, yields the base URL of Serve's proxy, and stops both."""
    folders = [*map(str, _FOLDERS), os.environ.get("PYTHONPATH", "")]
    environment = {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    import ray
    from ray import serve

    # Ray keeps the folders of its sessions. The path is short, as sockets lie in it.
    session = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
    try:
        ray.init(
            address="local",
            _temp_dir=session.name,
            num_cpus=16,  # for Ray to schedule; the machine may have fewer
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address="127.0.0.1",
        )
        port = _free_port()
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": port},
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )
        yield f"http://127.0.0.1:{port}"
    finally:
        if ray.is_initialized():  # Serve would start another Ray, with a dashboard, to look for itself
            serve.shutdown()
        ray.shutdown()
        session.cleanup()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def deploy(application: Any, name: str, proxy: str, route_prefix: str, limit_s: float) -> Any:
    """Deploy an application, or update it, and wait until it runs and `proxy`, a URL, knows it; returns its handle.

    `serve.run` would wait for ever for a replica that cannot start.
    Raises: RuntimeError with Serve's message when it fails, or does not run within `limit_s` seconds.
    """
    import httpx
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    target = serve.RunTarget(target=application, name=name, route_prefix=route_prefix)
    (handle,) = serve.run_many([target], wait_for_applications_running=False)
    end = time.monotonic() + limit_s
    while (state := serve.status().applications[name]).status != ApplicationStatus.RUNNING:
        if state.status == ApplicationStatus.DEPLOY_FAILED or time.monotonic() > end:
            raise RuntimeError(f"{name} is {state.status} after at most {limit_s:g} s: {state.message}")
        time.sleep(1.0)  # `status` takes 0.05 s of a processor
    with httpx.Client(base_url=proxy, trust_env=False) as http:
        while route_prefix not in http.get("/-/routes").json():
            if time.monotonic() > end:
                raise RuntimeError(f"the proxy does not know {route_prefix} after {limit_s:g} s")
            time.sleep(0.05)
    return handle


def _free_port() -> int:
    """A port that is free now; Serve takes no 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
