"""Spread the clients of a measured server over processes. Torch is not needed."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import socket
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import httpx

from mingc.host.parent_watchdog import watch_pool_owner

_TIMEOUT_S = 300.0
_T = TypeVar("_T")


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits)


class Clients:
    """Clients in several processes: one process needs tens of milliseconds to send sixteen requests."""

    def __init__(self, num_processes: int) -> None:
        asyncio.run(_warm_up_httpx())
        # A full garbage collection would look like a late chunk.
        gc.collect()
        gc.freeze()
        # Fork before any thread starts; children import nothing again.
        context = multiprocessing.get_context("fork")
        self._num_processes = num_processes
        self._pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=watch_pool_owner)
        self._pool.submit(int).result()  # forks them all

    def begin(
        self, run: Callable[..., list[_T]], url: str, concurrency: int, *arguments: Any
    ) -> list[Future[list[_T]]]:
        """Start `run(url, indexes, *arguments)` in each process; the indexes are 0 to `concurrency` in all."""
        shares = [range(first, concurrency, self._num_processes) for first in range(self._num_processes)]
        return [self._pool.submit(run, url, share, *arguments) for share in shares if share]

    def load(self, run: Callable[..., list[_T]], url: str, concurrency: int, *arguments: Any) -> list[_T]:
        """As `begin`, then wait for the results of all processes."""
        return [each for future in self.begin(run, url, concurrency, *arguments) for each in future.result()]

    def close(self) -> None:
        self._pool.shutdown()


async def _warm_up_httpx() -> None:
    """Make httpx import its deferred modules now: they take tens of milliseconds at the first request."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with client_of(f"http://127.0.0.1:{port}") as client:
        with suppress(httpx.ConnectError):
            await client.get("/")
