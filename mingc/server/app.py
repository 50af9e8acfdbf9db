"""The ASGI app of a server: its routes, and what every request passes before them (id and log, origins, keys)."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from mingc.errors import ConfigError, MingcError, RequestError, ServeError
from mingc.runtime.request import Service
from mingc.server.api_keys import VARIABLE, ApiKeyCheck, ApiKeys
from mingc.server.error_objects import encode_error, public_error
from mingc.server.http.openapi import openapi_document
from mingc.server.http.parsing import unknown_model
from mingc.server.http.response_schemas import (
    VERSION,
    ModelList,
    ReadyResponse,
    VoiceDeleted,
    health_response,
    model_object,
    voice_list,
)
from mingc.server.http.routes import HANDLERS, GenerationRoute, HttpState
from mingc.server.logs import REQUEST_ID, RequestContext, export_logs
from mingc.server.metrics import CONTENT_TYPE
from mingc.server.options import ServeOptions
from mingc.server.origins import RebindingCheck
from mingc.server.page.files import PATHS, page_routes
from mingc.server.realtime import response, route
from mingc.server.realtime.events import error_event
from mingc.server.state import ServerState
from mingc.server.tracing import Traces
from mingc.server.websocket import speech
from mingc.server.websocket.connection import EventSocket, SessionRoute

log = logging.getLogger("mingc.http")

_PROBE_PATHS = frozenset({"/health", "/ready"})


def create_app(
    service: Service,
    options: ServeOptions,
    keys: ApiKeys | None = None,
    traces: Traces | None = None,
    *,
    is_behind_proxy: bool = False,
) -> Starlette:
    """Make the ASGI app over a running service; `serve` runs it.

    Args:
        keys: None reads the keys that the options name.
        is_behind_proxy: the host of the options is not where clients connect.
    """
    state = ServerState(service=service, options=options, traces=traces)
    export_logs(state.metrics)
    keys = keys or ApiKeys(options.api_key_file)
    if not keys.is_required and state.key_limits.limits:
        raise ConfigError(
            "limits of API keys, but there are none",
            where=", ".join(state.key_limits.limits),
            fix=f"pass --api-key-file or set {VARIABLE}",
        )
    is_local = _is_loopback(options.host)
    if not keys.is_required and not is_local:
        log.warning(
            "anyone who can reach %s can use this server: set %s or pass --api-key-file",
            options.host,
            VARIABLE,
        )

    def answer_error(request: HTTPConnection, error: Exception) -> Response:
        return _error_response(request, error, options)

    voices = service.info.voices
    wrong = [
        f"{alias}={voice}"
        for alias, voice in options.aliases_of_voices.items()
        if voice not in voices or alias in voices
    ]
    if wrong:
        raise ConfigError(
            f"an alias is another name of a voice; the voices are: {', '.join(voices) or 'none'}",
            where="--voice-alias " + ", ".join(wrong),
            fix="pass --voice-alias NAME=VOICE",
        )

    async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
        error = HTTPException(404)
        if scope["type"] != "websocket":
            raise error
        await answer_error(HTTPConnection(scope), error)(scope, receive, send)

    async def serve_speech(socket: EventSocket) -> None:
        await speech.SpeechSession(http, socket).serve()

    async def serve_realtime(socket: EventSocket) -> None:
        await route.RealtimeSession(http, socket).serve()

    http = HttpState.of(state)
    open_paths = _PROBE_PATHS | ({"/metrics"} if options.has_open_metrics else set())
    open_paths |= PATHS if options.has_ui else set()
    rebinding = []
    if is_local and not (keys.is_required or is_behind_proxy):
        rebinding.append(Middleware(RebindingCheck, allowed=options.cors_origins, answer=answer_error))
    app = Starlette(
        routes=[
            *(
                Route(path, GenerationRoute(http, handler, *types), methods=["POST"])
                for path, (handler, types) in HANDLERS.items()
            ),
            WebSocketRoute(speech.PATH, SessionRoute(state, serve_speech, answer_error)),
            WebSocketRoute(
                response.PATH,
                SessionRoute(
                    state,
                    serve_realtime,
                    answer_error,
                    error_event=error_event,
                    check=partial(route.check_query, service.info),
                ),
            ),
            *(
                Route(path, _upgrade_required, include_in_schema=False)
                for path in (speech.PATH, response.PATH)
            ),
            Route("/v1/audio/translations", _refuse_translation, methods=["POST"]),
            *_information_routes(state),
            *(page_routes() if options.has_ui else ()),
        ],
        middleware=[
            Middleware(RequestContext, metrics=state.metrics, traces=traces),
            *rebinding,
            *_cors(options),
            Middleware(ApiKeyCheck, keys=keys, open_paths=open_paths, answer=answer_error),
        ],
        exception_handlers={MingcError: answer_error, HTTPException: answer_error, Exception: answer_error},
    )
    app.router.redirect_slashes = False
    app.router.default = not_found
    app.state.server = state
    return app


async def _upgrade_required(request: Request) -> Response:
    error = RequestError(
        f"{request.url.path} is a WebSocket, and the request does not ask for one",
        fix="use a WebSocket client; a proxy in between must pass 'Upgrade' and 'Connection' on",
        status=426,
        code="websocket_required",
    )
    error.headers = {"Upgrade": "websocket", "Connection": "Upgrade"}  # RFC 9110 §15.5.22
    raise error


async def _refuse_translation(request: Request) -> Response:
    raise RequestError(
        "Speech is not translated: the model has no released prompt for it. Use /v1/audio/transcriptions, or send the "
        "sound to /v1/chat/completions and ask for a translation.",
        code="unsupported_endpoint",
    )


def _information_routes(state: ServerState) -> list[Route]:
    """Routes that do not run the model."""
    service = state.service
    created = int(time.time())

    async def models(request: Request) -> Response:
        return _json(
            ModelList(
                [model_object(service.info, state.options, created, name) for name in service.info.names]
            )
        )

    async def model(request: Request) -> Response:
        name = str(request.path_params["model"])
        if name not in service.info.names:
            raise unknown_model(name, service.info)
        return _json(model_object(service.info, state.options, created, name))

    async def voices(request: Request) -> Response:
        found = await service.list_voices()
        return _json(voice_list(found, service.info.default_voice, state.options.aliases_of_voices))

    async def remove_voice(request: Request) -> Response:
        removed = await service.remove_voice(str(request.path_params["voice"]))
        return _json(VoiceDeleted(id=removed.id))

    async def health(request: Request) -> Response:
        return _json(health_response(state), 200 if state.status in ("ready", "draining") else 503)

    async def ready(request: Request) -> Response:
        return _json(ReadyResponse(state.status), 200 if state.status == "ready" else 503)

    async def metrics(request: Request) -> Response:
        return Response(state.metrics.render(service.load), media_type=CONTENT_TYPE)

    async def version(request: Request) -> Response:
        return _json(VERSION)

    async def openapi(request: Request) -> Response:
        return Response(await asyncio.to_thread(openapi_document), media_type="application/json")

    return [
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/v1/audio/voices", voices, methods=["GET"]),
        Route("/v1/audio/voices/{voice:path}", remove_voice, methods=["DELETE"]),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/version", version),
        Route("/openapi.json", openapi),
    ]


def _cors(options: ServeOptions) -> list[Middleware]:
    if not options.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            # clients add headers of their own, such as the x-stainless-… ones of OpenAI's; an origin that may call may
            # send any
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["x-request-id", "retry-after"],
        )
    ]


def _methods(request: HTTPConnection) -> list[str]:
    """Methods of all routes with the path of a request."""
    routes = [each for each in request.app.routes if isinstance(each, Route)]
    found = [each.methods or () for each in routes if each.path_regex.match(request.url.path)]
    return sorted({method for methods in found for method in methods})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _json(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _error_response(request: HTTPConnection, error: Exception, options: ServeOptions) -> Response:
    headers = dict(getattr(error, "headers", None) or {})
    method = request.scope.get("method", "WebSocket")
    if isinstance(error, HTTPException):  # from starlette: unknown path or method
        shown = f"{method} {request.url.path[:100]}"
        wrong_method = error.status_code == 405
        if wrong_method:
            headers["Allow"] = ", ".join(_methods(request))
        reason = f"allowed: {headers['Allow']}" if wrong_method else "there is no such path"
        code = "method_not_allowed" if wrong_method else "not_found"
        error = RequestError(f"{shown}: {reason}.", status=error.status_code, code=code)
    known = public_error(error)
    status = known.status if isinstance(known, ServeError) else 500
    if status in (429, 503):
        headers["Retry-After"] = str(options.retry_after_s)
    elif status >= 500:
        log.error("%s %s: %s", method, request.url.path, known)
    headers["x-request-id"] = REQUEST_ID.get()  # an unforeseen error is answered outside of RequestContext
    return Response(encode_error(known), status, headers, "application/json")
