"""Refuses requests that a page of another origin sends without asking first.

Browsers ask (CORS) before a page sends JSON to another origin. They do not ask before they open a WebSocket or send a
form, so any page could use a server without keys on the user's own computer.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers

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
        raise RequestError(
            f"Pages of the origin {printable(origins[0][:100])} may not use this server.",
            fix="start it with --cors-origin for this origin",
            status=403,
            code="origin_not_allowed",
        )
