"""Refuses requests that a page of another origin sends without asking first.

Browsers ask (CORS) before a page sends JSON to another origin. They do not ask before they open a WebSocket or send a
form, so any page could use a server without keys on the user's own computer. Nor do they ask when the page's own name
is suddenly that of this computer (DNS rebinding): then the server is the page's own origin.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mingc.errors import RequestError, printable

_PORTS = {"http": ":80", "https": ":443"}


def check_origin(headers: Headers, allowed: Sequence[str]) -> None:
    """Accept requests without `Origin` (no browser sent them), of the server's own pages, and of `allowed` origins.

    Args:
        allowed: `ServeOptions.cors_origins`; `*`: all.

    Raises:
        RequestError: 403 `origin_not_allowed`.
    """
    origins = headers.getlist("origin")
    if not origins or "*" in allowed:
        return
    origin = origins[0].lower()
    scheme, _, authority = origin.partition("://")
    port = _PORTS.get(scheme, "")
    # The scheme of the connection is unknown behind a proxy, so the host alone is compared.
    own = headers.get("host", "").lower().removesuffix(port)
    is_own = bool(port) and bool(own) and authority.removesuffix(port) == own
    if len(origins) > 1 or not (is_own or origin in {each.lower() for each in allowed}):
        raise _refused(origins[0])


class RebindingCheck:
    """ASGI middleware for a server without keys that listens on this computer only.

    Pages reach it by an address or `localhost`. One of another name came by DNS rebinding, or through a proxy; with TLS
    it is a proxy, because the server itself has none.
    """

    def __init__(
        self, app: ASGIApp, allowed: Sequence[str], answer: Callable[[HTTPConnection, Exception], Response]
    ) -> None:
        """`allowed`: see `check_origin`. `answer` creates the response of an error."""
        self._app = app
        self._allowed = {each.lower() for each in allowed}
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            origin = Headers(scope=scope).get("origin", "").lower()
            if not self._allowed & {origin, "*"} and _is_rebound(
                origin, Headers(scope=scope).get("host", "")
            ):
                await self._answer(HTTPConnection(scope), _refused(origin))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_rebound(origin: str, host: str) -> bool:
    scheme, _, authority = origin.partition("://")
    if scheme != "http" or authority.removesuffix(":80") != host.lower().removesuffix(":80"):
        return False  # not the page's own server: `check_origin` and CORS decide
    name = authority[1:].partition("]")[0] if authority[:1] == "[" else authority.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name != "localhost" and not name.endswith(".localhost")
    return False


def _refused(origin: str) -> RequestError:
    return RequestError(
        f"Pages of the origin {printable(origin[:100])} may not use this server",
        fix="start it with --cors-origin for this origin",
        status=403,
        code="origin_not_allowed",
    )
