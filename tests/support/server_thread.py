"""A real server over any service, in a thread, on a free port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue

from mingc.runtime.request import Service
from mingc.server.app import create_app
from mingc.server.lifecycle import serve_async
from mingc.server.options import ServeOptions


@contextmanager
def run_server(make_service: Callable[[], Service], options: ServeOptions | None = None) -> Iterator[str]:
    """Yields the base URL (`http://127.0.0.1:port`); the server is shut down on exit."""
    urls: Queue[str | BaseException] = Queue()
    stops: Queue[Callable[[], object]] = Queue()

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        stops.put(lambda: loop.call_soon_threadsafe(stop.set))
        app = create_app(make_service(), options or ServeOptions(port=0, shutdown_timeout_s=0.2))
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
