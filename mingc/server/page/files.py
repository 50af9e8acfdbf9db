"""The page at `/`: type or speak to the model in a browser. Its files are served as they are; nothing is built."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent
_FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/audio.js": ("audio.js", "text/javascript"),
}
PATHS = frozenset(_FILES)
_HEADERS = {
    # 'self' covers no WebSocket in older Safari
    "content-security-policy": "default-src 'self'; connect-src 'self' ws: wss:; img-src 'self' data: blob:; "
    "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",  # after an upgrade, no file of the version before
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    """Routes of `PATHS`, for GET and HEAD."""
    return [
        Route(path, _serve((_FOLDER / name).read_bytes(), media_type), include_in_schema=False)
        for path, (name, media_type) in _FILES.items()
    ]


def _serve(data: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return Response(data, headers=_HEADERS, media_type=media_type)

    return serve
