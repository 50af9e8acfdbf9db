"""The HTTP server: an ASGI app over a `Service`, and a process that listens, serves and shuts down in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mingc.console import signals
from mingc.errors import ConfigError, MingcError, RequestError, ServeError
from mingc.runtime.request import Service
from mingc.server.http import response_schemas
from mingc.server.http.api_keys import VARIABLE, ApiKeyCheck, ApiKeys
from mingc.server.http.connections import Acceptor, ConnectionTable, HttpConnection, connection_limit
from mingc.server.http.logs import REQUEST_ID, RequestContext
from mingc.server.http.media import MediaLoader
from mingc.server.http.metrics import CONTENT_TYPE, Metrics, RequestCounter
from mingc.server.http.openapi import openapi_document
from mingc.server.http.options import ServeOptions
from mingc.server.http.parsing import unknown_model
from mingc.server.http.routes import GenerationRoute, ServerState, handle_chat, handle_speech, public_error

log = logging.getLogger("mingc.http")
_CLOSE_MARGIN_S = 2.0  # added to the shutdown timeout: to send last events and join workers
# Switch interval of Python's threads. With the default 5 ms, the time of two patches, engine threads would wait that
# long at each switch for a thread that prepares a long text.
_SWITCH_S = 0.001


_PROBE_PATHS = frozenset({"/health", "/ready"})


def create_app(service: Service, options: ServeOptions, keys: ApiKeys | None = None) -> Starlette:
    """The ASGI app over a running service; `serve` runs it. `keys`: None reads those that the options name."""
    state = ServerState(service=service, options=options, media=MediaLoader(options), metrics=Metrics())
    keys = keys or ApiKeys(options.api_key_file)
    if not keys.is_required and not _is_loopback(options.host):
        log.warning(
            "anyone who can reach %s can use this server: set %s or pass --api-key-file",
            options.host,
            VARIABLE,
        )
    created = int(time.time())

    async def models(request: Request) -> Response:
        return _json(response_schemas.models_list(service.info, created))

    async def model(request: Request) -> Response:
        name = str(request.path_params["model"])
        if name not in service.info.names:
            raise unknown_model(name, service.info)
        return _json(response_schemas.model_object(service.info, created, name))

    async def voices(request: Request) -> Response:
        return _json(response_schemas.voices_list(service.info))

    def status() -> str:
        if state.is_stopping:
            return "stopping"
        if not service.is_ready:
            return "not_ready"
        return "draining" if state.is_draining else "ready"

    async def health(request: Request) -> Response:
        body: response_schemas.Json = {
            "status": status(),
            "model": service.info.model,
            "num_requests_running": state.num_running,
            **response_schemas.modalities(service.info),
        }
        for name in ("max_model_len", "max_total_tokens", "all_reduce"):
            if (value := getattr(service.info, name)) is not None:
                body[name] = value
        return _json(body, 200 if status() in ("ready", "draining") else 503)

    async def ready(request: Request) -> Response:
        return _json({"status": status()}, 200 if status() == "ready" else 503)

    async def metrics(request: Request) -> Response:
        return Response(state.metrics.render(service.load), media_type=CONTENT_TYPE)

    async def openapi(request: Request) -> Response:
        return Response(await asyncio.to_thread(openapi_document), media_type="application/json")

    def answer_error(request: Request, error: Exception) -> Response:
        return _error_response(request, error, options)

    open_paths = _PROBE_PATHS | ({"/metrics"} if options.has_open_metrics else set())
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", GenerationRoute(state, handle_chat), methods=["POST"]),
            Route("/v1/audio/speech", GenerationRoute(state, handle_speech), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/v1/audio/voices", voices),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/openapi.json", openapi),
        ],
        middleware=[
            Middleware(RequestContext),
            Middleware(RequestCounter, metrics=state.metrics),
            *_cors(options),
            Middleware(ApiKeyCheck, keys=keys, open_paths=open_paths, answer=answer_error),
        ],
        exception_handlers={MingcError: answer_error, HTTPException: answer_error, Exception: answer_error},
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


def _cors(options: ServeOptions) -> list[Middleware]:
    if not options.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    ]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _json(body: response_schemas.Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(response_schemas.encode_json(body), status, headers, "application/json")


def _error_response(request: Request, error: Exception, options: ServeOptions) -> Response:
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, HTTPException):  # from starlette: unknown path or method
        shown = f"{request.method} {request.url.path[:100]}"
        wrong_method = error.status_code == 405
        reason = f"allowed: {headers.get('Allow', '')}" if wrong_method else "there is no such path"
        code = "method_not_allowed" if wrong_method else "not_found"
        error = RequestError(f"{shown}: {reason}.", status=error.status_code, code=code)
    known = public_error(error)
    status = known.status if isinstance(known, ServeError) else 500
    if status == 503:
        headers["Retry-After"] = str(options.retry_after_s)
    elif status >= 500:
        log.error("%s %s: %s", request.method, request.url.path, known)
    headers["x-request-id"] = REQUEST_ID.get()  # an unforeseen error is answered outside of RequestContext
    return _json({**response_schemas.error_body(known)}, status, headers)


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet. Call it before slow work, so that a port in use fails early.

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
    """Serve until SIGTERM or SIGINT, then shut down in order; see `serve_async`. Sets a shorter switch interval."""
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

    After a first SIGTERM `/ready` answers 503, and requests are served for the drain time of the options, so that
    proxies can send theirs elsewhere. Then, and at once after SIGINT, the port is closed, and the service with the
    shutdown timeout of the options; streams that are aborted get an error event. A second signal stops at once, unless
    it follows so soon that it counts as the first. A failure that the service reports (`on_failure`) ends the server
    like a first SIGINT. In any case `service.close` is called last, with a timeout of 0.

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
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    first: float | None = None

    def stop(number: signal.Signals) -> None:
        nonlocal first, draining
        if first is not None and loop.time() - first < signals.SIGNAL_DEBOUNCE_S:
            return
        first = loop.time()
        if server.should_exit or draining is not None:
            server.force_exit = True
            serving.cancel()
        elif number == signal.SIGTERM and state.options.drain_s > 0:
            state.is_draining = True
            log.info("draining: requests are served for %g s, then the port is closed", state.options.drain_s)
            draining = loop.call_later(state.options.drain_s, server.exit)
            return
        server.should_exit = True

    for number in signals.SIGNALS:
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
                ws="none",
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
