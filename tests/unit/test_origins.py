"""Origins of browsers that may open a WebSocket or send a form."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from mingc.errors import RequestError
from mingc.server.origins import check_origin

OWN = "127.0.0.1:8000"


def is_accepted(host: str, origins: list[str], allowed: tuple[str, ...]) -> bool:
    raw = [(b"host", host.encode())] * bool(host) + [(b"origin", each.encode()) for each in origins]
    try:
        check_origin(Headers(raw=raw), allowed)
    except RequestError as error:
        assert (error.status, error.code) == (403, "origin_not_allowed")
        return False
    return True


@pytest.mark.parametrize(
    ("host", "origins", "allowed", "accepted"),
    [
        (OWN, [], (), True),
        (OWN, ["http://127.0.0.1:8000"], (), True),
        (OWN, ["HTTP://127.0.0.1:8000"], (), True),
        (OWN, ["https://127.0.0.1:8000"], (), True),  # TLS ends at a proxy
        (OWN, ["http://127.0.0.1:8001"], (), False),
        (OWN, ["http://127.0.0.1"], (), False),
        (OWN, ["http://localhost:8000"], (), False),
        (OWN, ["http://127.0.0.1:8000.evil.example"], (), False),
        (OWN, ["null"], (), False),
        (OWN, [""], (), False),
        (OWN, ["file://127.0.0.1:8000"], (), False),
        (OWN, ["http://127.0.0.1:8000", "http://evil.example"], (), False),
        ("", ["http://"], (), False),
        ("voice.example", ["https://voice.example"], (), True),
        ("voice.example", ["https://voice.example:443"], (), True),
        ("voice.example:443", ["https://voice.example"], (), True),
        ("voice.example", ["https://voice.example:444"], (), False),
        ("Voice.Example", ["https://voice.example"], (), True),
        ("[::1]:8000", ["http://[::1]:8000"], (), True),
        (OWN, ["https://app.example"], ("https://app.example",), True),
        (OWN, ["https://app.example"], ("https://App.Example",), True),
        (OWN, ["https://app.example.evil"], ("https://app.example",), False),
        (OWN, ["null"], ("*",), True),
    ],
)
def test_origins(host: str, origins: list[str], allowed: tuple[str, ...], accepted: bool) -> None:
    assert is_accepted(host, origins, allowed) is accepted
