"""Tests of the HTTP layer whose servers are a Ray Serve application: their code is unchanged, `run_server` is not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import server_thread
from fake_replica import fake_application
from mingc_command import REPOSITORY
from ray_cluster import deploy

from mingc.server.options import ServeOptions

_DEPLOY_LIMIT_S = 300.0  # a worker of Ray imports the package on a busy machine with two cores
_running: list[tuple[str, Any]] = []  # URL and handle of the application that `front` deployed


@pytest.fixture(scope="module")
def front(proxy: str) -> None:
    """The application at the root of `proxy`, with the one replica of all tests."""
    _running[:] = [(proxy, deploy(fake_application(), "fake", proxy, "/", _DEPLOY_LIMIT_S))]


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
def _run_server(make_service: Callable[[], Any], options: ServeOptions | None = None) -> Iterator[str]:
    """As `server_thread.run_server`, for fake services."""
    local = make_service()
    ((url, handle),) = _running
    handle.exchange.remote(local.info, local.is_ready, options or ServeOptions()).result(timeout_s=60)
    for name in ("chats", "speeches", "ends", "running"):
        setattr(local, name, _Recorded(handle, name))
    yield url


def on_ray(name: str, fixtures: Sequence[str], tests: Sequence[str]) -> dict[str, Any]:
    """`fixtures` and `tests` of the module `name` of tests/runtime and what they need, for the names of a test file."""
    # The finder of pytest, so that its asserts explain themselves; modules of collected files have longer names.
    folder = str(REPOSITORY / "tests" / "runtime")
    with (
        patch.object(server_thread, "run_server", _run_server),
        patch.object(sys, "path", [folder, *sys.path]),
    ):
        module = importlib.import_module(name)
    on_front = pytest.mark.usefixtures("front")
    return {
        "front": front,
        **{each: getattr(module, each) for each in fixtures},
        **{each: on_front(getattr(module, each)) for each in tests},
    }
