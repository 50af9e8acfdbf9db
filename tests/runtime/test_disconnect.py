"""Clients that leave a real server over a service with fake engines: their requests end and free everything."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_omni import make_service, slow_down
from held_resources import service_resources, wait_until_equal
from server_thread import run_server

from mingc.runtime.request import Event, TextDelta
from mingc.runtime.service.omni import OmniService
from mingc.server.metrics import Metrics

_WAIT_S = 20.0
MANY_STEPS = 60  # steps in which an abandoned request must be gone; those below take hundreds

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200}
SPOKEN = {**CHAT, "modalities": ["text", "audio"], "audio": {"voice": "amy", "format": "wav"}}
SPEECH = {"input": "This is one of many sentences. " * 20}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "streamed chat": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "spoken chat": ("/v1/chat/completions", SPOKEN),
    "streamed spoken chat": ("/v1/chat/completions", {**SPOKEN, "stream": True}),
    "several answers": ("/v1/chat/completions", {**CHAT, "n": 3}),
    "streamed answers": ("/v1/chat/completions", {**CHAT, "n": 3, "stream": True}),
    "completion": ("/v1/completions", {"prompt": "Hello", "max_tokens": 200, "n": 2}),
    "streamed completion": ("/v1/completions", {"prompt": "Hello", "max_tokens": 200, "stream": True}),
    "speech": ("/v1/audio/speech", {**SPEECH, "stream": False}),
    "streamed speech": ("/v1/audio/speech", {**SPEECH, "stream": True}),
    "streamed opus": ("/v1/audio/speech", {**SPEECH, "response_format": "opus", "speed": 3}),
    "events of speech": ("/v1/audio/speech", {**SPEECH, "stream_format": "sse"}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_client_that_leaves_frees_everything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[OmniService, asyncio.AbstractEventLoop]] = []
    path, body = REQUESTS[name]

    def make() -> OmniService:
        made.append((make_service(), asyncio.get_running_loop()))
        return made[0][0]

    with run_server(make) as url:
        service, event_loop = made[0]
        steps = slow_down(service, monkeypatch)
        before = service_resources(service, event_loop)
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=_WAIT_S) as connection:
            payload = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            connection.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
            wait_until_equal({"requests": 1}, lambda: {"requests": service.held["requests"]})
            wait_until_equal({"runs": 1}, lambda: {"runs": int(len(steps) > 2)})
        num_steps = len(steps)
        wait_until_equal(before, lambda: service_resources(service, event_loop))
        assert len(steps) < num_steps + MANY_STEPS, "the engines went on with an abandoned request"
        assert "mingc_num_requests_running 0.0" in httpx.get(f"{url}/metrics", trust_env=False).text


def test_a_response_that_breaks_off_closes_the_iterator_of_the_service() -> None:
    """Without that a request whose client left between two events would run until garbage is collected."""

    class Events:
        is_closed = False

        def __aiter__(self) -> AsyncIterator[Event]:
            return self

        async def __anext__(self) -> Event:
            return TextDelta(text="more")

        async def aclose(self) -> None:
            self.is_closed = True

    async def leave(endless: Events) -> None:
        async with Metrics().timer().measure(endless) as events:
            assert await anext(events) == TextDelta(text="more")
            assert not endless.is_closed
            raise ConnectionResetError

    endless = Events()
    with pytest.raises(ConnectionResetError):
        asyncio.run(leave(endless))
    assert endless.is_closed
