"""A real server over any service, in a thread, on a free port."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import httpx
from fake_service import FakeService

from mingc.runtime.request import Service
from mingc.server.app import create_app
from mingc.server.lifecycle import serve_async
from mingc.server.options import ServeOptions
from mingc.server.tracing import Traces


@contextmanager
def run_server(
    make_service: Callable[[], Service], options: ServeOptions | None = None, traces: Traces | None = None
) -> Iterator[str]:
    """Yields the base URL (`http://127.0.0.1:port`); the server is shut down on exit."""
    urls: Queue[str | BaseException] = Queue()
    stops: Queue[Callable[[], object]] = Queue()

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        stops.put(lambda: loop.call_soon_threadsafe(stop.set))
        options_ = options or ServeOptions(port=0, shutdown_timeout_s=0.2)
        app = create_app(make_service(), options_, traces=traces)
        await serve_async(app, announce=urls.put, stop=stop)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            urls.put(error)
            raise

    thread = threading.Thread(target=run, name="server")
    thread.start()
    url = urls.get(timeout=60)
    if isinstance(url, BaseException):
        raise url
    try:
        yield url
    finally:
        stops.get()()
        thread.join(timeout=60)
        assert not thread.is_alive()


@contextmanager
def fake_server(**options: Any) -> Iterator[tuple[str, FakeService]]:
    """Yields the URL of a server over a fake service, and the service."""
    services: list[FakeService] = []

    def make() -> FakeService:
        services.append(FakeService())
        return services[0]

    with run_server(make, ServeOptions(port=0, shutdown_timeout_s=0.2, **options)) as url:
        yield url, services[0]


def eventually(claim: Callable[[], bool]) -> None:
    """Wait until another thread makes `claim` true."""
    deadline = time.monotonic() + 30
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def metric(url: str, line: str) -> float:
    """Value of a line of the server's metrics, named with its labels; 0 if there is none."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return next((float(row.split()[-1]) for row in text.splitlines() if row.startswith(line + " ")), 0.0)
