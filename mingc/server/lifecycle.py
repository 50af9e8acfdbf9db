"""A server's life: it listens, serves an app, drains on a signal and shuts down in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from starlette.applications import Starlette

from mingc.console import signals
from mingc.errors import ConfigError, ServeError
from mingc.runtime.request import Service
from mingc.server.connections import Acceptor, ConnectionTable, HttpConnection, connection_limit
from mingc.server.state import ServerState
from mingc.server.websocket_connection import WebSocketConnection

log = logging.getLogger("mingc.http")
_CLOSE_MARGIN_S = 2.0  # added to the shutdown timeout: to send last events and join workers
# Switch interval of Python's threads. With the default 5 ms, the time of two patches, engine threads would wait that
# long at each switch for a thread that prepares a long text.
_SWITCH_S = 0.001
_TICKS = 5  # of uvicorn's, 0.1 s each, between two looks for connections that exceed a time limit


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a socket to the address, without listening. Call it before slow work, so that a port in use fails early.

    Raises:
        ConfigError: if the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> ConfigError:
    if isinstance(error, UnicodeError):  # not a valid host name
        error = OSError(0, f"not a host name: {error}")
    fixes = {
        errno.EADDRINUSE: "stop the other process, or pass another --port (0 lets the system choose)",
        errno.EACCES: "pass a --port above 1023",
    }
    why = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return ConfigError(
        f"cannot listen at {host}:{port}: {why}",
        where=f"--host {host} --port {port}",
        fix=fixes.get(error.errno or 0, "pass a --host that is an address of this computer"),
    )


def base_url(listener: socket.socket) -> str:
    """`http://host:port` of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _print_url(url: str) -> None:
    print(f"serving at {url}", file=sys.stderr, flush=True)


def serve(
    app: Starlette, listener: socket.socket | None = None, *, announce: Callable[[str], None] = _print_url
) -> bool:
    """Serve until a signal, then shut down in order; see `serve_async`. Sets a shorter switch interval."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        return asyncio.run(serve_async(app, listener, announce=announce))
    finally:
        sys.setswitchinterval(before)


async def serve_async(
    app: Starlette,
    listener: socket.socket | None = None,
    *,
    announce: Callable[[str], None] = _print_url,
    stop: asyncio.Event | None = None,
) -> bool:
    """Listen and serve inside a running event loop, until a signal or `stop`.

    After a first SIGTERM, or SIGHUP unless it is ignored (nohup), `/ready` answers 503, and requests are served for the
    drain time of the options, so that proxies can send theirs elsewhere. Then, and at once after SIGINT, the port is
    closed, and the service with the shutdown timeout of the options; streams that are aborted get an error event. A
    second signal stops at once, unless it follows so soon that it counts as the first. A failure that the service
    reports (`on_failure`) ends the server like a first SIGINT. In any case `service.close` is called last, with a
    timeout of 0.

    Args:
        app: from `create_app`.
        listener: from `bind_socket`; None binds the host and port of the options. Closed at the end.
        announce: called with the base URL once connections are accepted; the default prints it to stderr.
        stop: setting it acts like a first SIGINT.

    Returns:
        True after an orderly shutdown, False after a second signal.

    Raises:
        ConfigError: if the port is in use.
        ServeError: the failure that the service reported.
    """
    state: ServerState = app.state.server
    failures: list[ServeError] = []
    try:
        with contextlib.closing(listener or bind_socket(state.options.host, state.options.port)) as bound:
            server = _Server(app, bound, announce, connection_limit(state.options.max_connections))
            serving = asyncio.create_task(server.serve(sockets=[bound]))
            state.service.on_failure(_failure_callback(server, failures))
            try:
                with _stop_signals(server, serving), _stop_event(server, stop):
                    await serving
            except asyncio.CancelledError:
                if not server.force_exit:
                    raise
            finally:
                server.abort()
            if failures:
                raise failures[0]
            return not server.force_exit
    finally:
        state.is_stopping = True
        await _close(state.service, 0.0)
        if state.traces is not None:
            await asyncio.to_thread(state.traces.close)


async def _close(service: Service, shutdown_timeout_s: float) -> None:
    """Close the service, with a limit on the wait."""
    try:
        async with asyncio.timeout(shutdown_timeout_s + _CLOSE_MARGIN_S):
            await service.close(shutdown_timeout_s=shutdown_timeout_s)
    except TimeoutError:
        log.error("the service did not close within %g s", shutdown_timeout_s + _CLOSE_MARGIN_S)


def _failure_callback(server: _Server, failures: list[ServeError]) -> Callable[[ServeError], None]:
    """Callback for `Service.on_failure`: appends the error to `failures` and stops the server; for any thread."""
    loop = asyncio.get_running_loop()

    def fail(error: ServeError) -> None:
        failures.append(error)
        server.should_exit = True

    def report(error: ServeError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(fail, error)

    return report


@contextlib.contextmanager
def _stop_signals(server: _Server, serving: asyncio.Task[None]) -> Iterator[None]:
    """First signal: orderly shutdown. Later signal: cancel; after the block it ends the process.

    Does nothing outside the main thread, where Python delivers no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    loop = asyncio.get_running_loop()
    state = server.state
    draining: asyncio.TimerHandle | None = None
    before = {
        number: handler
        for number in signals.SIGNALS
        if (handler := signal.getsignal(number)) != signal.SIG_IGN or number != signal.SIGHUP
    }
    first: float | None = None

    def stop(number: signal.Signals) -> None:
        nonlocal first, draining
        if first is not None and loop.time() - first < signals.SIGNAL_DEBOUNCE_S:
            return
        first = loop.time()
        if server.should_exit or draining is not None:
            server.force_exit = True
            serving.cancel()
        elif number != signal.SIGINT and state.options.drain_s > 0:
            state.is_draining = True
            log.info("draining: requests are served for %g s, then the port is closed", state.options.drain_s)
            draining = loop.call_later(state.options.drain_s, server.exit)
            return
        server.should_exit = True

    for number in before:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        if draining is not None:
            draining.cancel()
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
        if first is not None:
            signals.exit_on_later_signal()


@contextlib.contextmanager
def _stop_event(server: _Server, stop: asyncio.Event | None) -> Iterator[None]:
    async def wait() -> None:
        if stop is not None:
            await stop.wait()
            server.should_exit = True

    waiting = asyncio.create_task(wait())
    try:
        yield
    finally:
        waiting.cancel()


class _Server(uvicorn.Server):
    """Uvicorn with `connections` below it and without its own signal handling; closes the service on shutdown."""

    def __init__(
        self, app: Starlette, listener: socket.socket, announce: Callable[[str], None], max_connections: int
    ) -> None:
        self.state: ServerState = app.state.server
        self._listener = listener
        self._announce = announce
        self._table = ConnectionTable(
            options=self.state.options, metrics=self.state.metrics, limit=max_connections
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpConnection,
                ws=partial(WebSocketConnection, table=self._table, bodies=self.state.bodies),  # type: ignore[arg-type]
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=math.ceil(self.state.options.shutdown_timeout_s + _CLOSE_MARGIN_S),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's version raises the signal again at the end, which would kill the process before workers are joined
        yield

    def exit(self) -> None:
        """Begin the shutdown."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        host, port = self._listener.getsockname()[:2]
        try:
            # two processes may bind one port while neither listens; the second to listen fails here
            self._listener.listen(self.config.backlog)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        acceptor = Acceptor(self._listener, self._table, self._connection)
        self.servers = [acceptor]  # type: ignore[list-item]  # stands in for asyncio's server
        acceptor.start()
        self.started = True
        self._announce(base_url(self._listener))

    def _connection(self, is_probe: bool) -> HttpConnection:
        return HttpConnection(
            self._table, self.config, self.server_state, self.lifespan.state, is_probe=is_probe
        )

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS == 0:
            self._table.close_late()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.state.is_stopping = True
        closing = asyncio.create_task(_close(self.state.service, self.state.options.shutdown_timeout_s))
        try:
            await super().shutdown(sockets)
            await closing
        finally:
            closing.cancel()
            await asyncio.wait((closing,))

    def abort(self) -> None:
        """Close the sockets, requests and connections that remain after an orderly shutdown, or all of them."""
        for listening in getattr(self, "servers", ()):
            listening.close()
        for task in list(self.server_state.tasks):
            task.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.close()
