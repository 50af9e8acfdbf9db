"""pytest plugin: tests of the HTTP layer run against a Ray Serve application instead of a server of their own.

`python -m pytest -p ray_front tests/runtime/test_server.py`, with tests/support on PYTHONPATH. `run_server` of
`server_thread` is replaced before the tests are imported, so their code is unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import pytest

# Tests of what `mingc serve` does below the app, or of the test process itself; Serve's proxy is in the place of it.
RUNNING = "MINGC_TEST_RAY"  # variable with a Ray instance that runs: its address and the URL of its proxy
_DEPLOY_LIMIT_S = 300.0  # a worker of Ray imports the package on a busy machine with two cores

OF_THE_SERVER: dict[str, str] = {
    "test_a_slow_encoder_delays_only_its_own_clip": "replaces the encoder of its own process",
}

_stack = ExitStack()


@cache
def _front() -> tuple[str, Any]:
    """URL of the application and its handle, started for the first test. A start that fails ends the run."""
    from fake_replica import fake_application
    from ray_cluster import connected, deploy, ray_cluster

    cluster = connected(os.environ[RUNNING]) if RUNNING in os.environ else ray_cluster()
    try:
        url = _stack.enter_context(cluster)
        return url, deploy(fake_application(), "fake", url, "/", _DEPLOY_LIMIT_S)
    except Exception as error:
        pytest.exit(f"the Serve application does not run: {error}", returncode=1)


class _Recorded:
    """An attribute of the fake service in the replica, fetched at each use."""

    def __init__(self, handle: Any, name: str) -> None:
        self._fetch = lambda: handle.recorded.remote(name).result(timeout_s=60)

    def __getitem__(self, index: Any) -> Any:
        return self._fetch()[index]

    def __len__(self) -> int:
        return len(self._fetch())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._fetch())


@contextmanager
def run_server(make_service: Callable[[], Any], options: Any = None) -> Iterator[str]:
    """As `server_thread.run_server`, for fake services."""
    from mingc.server.options import ServeOptions

    local = make_service()
    url, handle = _front()
    handle.exchange.remote(local.info, local.is_ready, options or ServeOptions()).result(timeout_s=60)
    for name in ("chats", "speeches", "ends", "running"):
        setattr(local, name, _Recorded(handle, name))
    yield url


def pytest_configure(config: pytest.Config) -> None:
    import server_thread

    server_thread.run_server = run_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (reason := OF_THE_SERVER.get(item.name)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_unconfigure() -> None:
    _stack.close()
