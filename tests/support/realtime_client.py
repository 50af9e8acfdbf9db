"""A client of realtime sessions for tests: checks every event by the types of OpenAI's client, and their order."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import soundfile
import soxr
from openai import OpenAI
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.sync.client import connect

_EVENTS: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
Event = dict[str, Any]
RATE = 24000
_CLIP = Path(__file__).parents[1] / "data" / "speech" / "three-sentences.ogg"


class RealtimeClient:
    """A session. `events`: all that were received."""

    def __init__(self, url: str, query: str = "", **options: Any) -> None:
        self._url, self._options = url.replace("http", "ws", 1) + "/v1/realtime" + query, options
        self.events: list[Event] = []
        self._order = OrderCheck()

    def __enter__(self) -> Self:
        self._connecting = connect(self._url, proxy=None, max_size=900_000, **self._options)
        self.socket = self._connecting.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connecting.__exit__(kind, error, traceback)

    def send(self, type: str, **fields: Any) -> None:
        self._send({"type": type, **fields})

    def _send(self, event: Event) -> None:
        self.socket.send(json.dumps(event))

    def _receive(self) -> str | bytes:
        return self.socket.recv(timeout=30)

    def say(self, text: str, **fields: Any) -> None:
        """Add a text of the user."""
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": text}],
            **fields,
        }
        self.send("conversation.item.create", item=item)

    def append(self, pcm: bytes, size: int = 4800) -> None:
        """Send sound in pieces."""
        for start in range(0, len(pcm), size):
            audio = base64.b64encode(pcm[start : start + size]).decode()
            self.send("input_audio_buffer.append", audio=audio)

    def update(self, **session: Any) -> Event:
        """Change settings; returns those after the change."""
        self.send("session.update", session={"type": "realtime", **session})
        session_object: Event = self.until("session.updated")["session"]
        return session_object

    def next(self) -> Event:
        raw = self._receive()
        _EVENTS.validate_json(raw, strict=True)
        event: Event = json.loads(raw)
        self._order.add(event)
        self.events.append(event)
        return event

    def until(self, *types: str, where: Callable[[Event], bool] = lambda event: True) -> Event:
        """Read up to an event."""
        while True:
            event = self.next()
            if event["type"] in types and where(event):
                return event
            assert event["type"] != "error" or "error" in types, event

    def of(self, *types: str) -> list[Event]:
        """Events of these types that were received."""
        return [event for event in self.events if event["type"] in types]


class OfficialClient(RealtimeClient):
    """The same by OpenAI's client."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._openai = OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=120)

    def __enter__(self) -> Self:
        self._manager = self._openai.realtime.connect(
            model="ming-omni", websocket_connection_options={"legacy": True}
        )
        self._connection = self._manager.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._manager.__exit__(kind, error, traceback)
        self._openai.close()

    def _send(self, event: Any) -> None:
        self._connection.send(event)

    def _receive(self) -> bytes:
        return self._connection.recv_bytes()


class OrderCheck:
    """The rules of order for the server's events, in the words of the specification of the protocol."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._has_session = False
        self.items: list[str] = []
        self.active: dict[str, list[str]] = {}  # items of each running response, in the order of the output
        self._done: set[str] = set()  # responses
        self._open: dict[str, set[str]] = {}  # items of running responses: what ended of them
        self._ended: set[str] = set()  # items

    def add(self, event: Event) -> None:
        kind = event["type"]
        assert event["event_id"] not in self._ids
        self._ids.add(event["event_id"])
        assert (kind == "session.created") == (not self._has_session), "the session comes first, and once"
        self._has_session = True
        if kind.startswith("response."):
            self._response(kind.removeprefix("response."), event)
        elif kind == "conversation.item.added":
            before, item = event["previous_item_id"], event["item"]["id"]
            assert item not in self.items
            place = 0 if before is None else self.items.index(before) + 1
            self.items.insert(place, item)
        elif kind == "conversation.item.done":
            assert event["item"]["id"] in self.items
        elif kind == "conversation.item.deleted":
            self.items.remove(event["item_id"])
        elif kind == "input_audio_buffer.speech_started":
            assert event["item_id"] not in self.items

    def _response(self, kind: str, event: Event) -> None:
        if kind == "created":
            response = event["response"]
            assert response["id"] not in self.active and response["id"] not in self._done
            assert (response["status"], response["output"]) == ("in_progress", [])
            self.active[response["id"]] = []
            return
        if kind == "done":
            response = event["response"]
            items = self.active.pop(response["id"])
            self._done.add(response["id"])
            assert [item["id"] for item in response["output"]] == items and self._ended.issuperset(items)
            assert response["status"] == response["status_details"]["type"] != "in_progress"
            for item in response["output"]:
                assert item["status"] == (
                    "completed" if response["status"] == "completed" else item["status"]
                )
            return
        items = self.active[event["response_id"]]
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"]["id"])
            self._open[event["item"]["id"]] = set()
            return
        item = event["item"]["id"] if kind == "output_item.done" else event["item_id"]
        assert items[event["output_index"]] == item
        ended = self._open[item]
        part, _, step = kind.rpartition(".")
        assert part not in ended, f"{kind} after its end"
        if step == "done":
            ended.add(part)
        if kind == "output_item.done":
            del self._open[item]
            self._ended.add(item)
            kinds = [{"content_part", "output_item"} | each for each in
                     ({"output_audio", "output_audio_transcript"}, {"output_text"})]  # fmt: skip
            assert ended in [*kinds, {"function_call_arguments", "output_item"}]


def speech(start_s: float = 0.0, end_s: float | None = None, silence_s: float = 0.0) -> bytes:
    """Part of the spoken sentences of `tests/data/speech`, then silence: PCM of 16 bits at 24 kHz."""
    samples, rate = soundfile.read(_CLIP, dtype="float32")
    part = samples[int(start_s * rate) : None if end_s is None else int(end_s * rate)]
    pcm = (soxr.resample(part, rate, RATE) * 32767).astype("<i2")
    return bytes(pcm.tobytes()) + bytes(2 * int(silence_s * RATE))


def telephony(pcm: bytes, subtype: str) -> bytes:
    """`speech` at 8 kHz by libsndfile: `ULAW` or `ALAW`."""
    samples = soxr.resample(np.frombuffer(pcm, "<i2"), RATE, 8000)
    file = io.BytesIO()
    soundfile.write(file, samples, 8000, subtype, format="RAW")
    return file.getvalue()
