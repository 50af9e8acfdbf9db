"""Realtime sessions over a real socket and a fake service: order of events, interruption, limits, and nothing held."""

from __future__ import annotations

import json
from realtime_client import RealtimeClient
from server_thread import fake_server


def test_text() -> None:
    with fake_server() as (url, service), RealtimeClient(url) as client:
        assert client.next()["type"] == "session.created"
        client.update(output_modalities=["text"])
        client.say("hello")
        client.send("response.create")
        client.until("response.done")
        client.update(output_modalities=["audio"])
        client.send("response.create")
        client.until("response.done")
        for e in client.events:
            print(json.dumps(e)[:300])
