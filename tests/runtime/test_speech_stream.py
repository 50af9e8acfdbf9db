"""`/v1/audio/speech/stream`: text goes in piece by piece, speech comes out.

Samples are compared over the artifact of the tiny checkpoint, errors and cancellation over fake engines.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_omni import make_service, slow_down
from held_resources import wait_until_equal
from server_thread import eventually, metric, run_server
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as websocket

from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.server.options import ServeOptions
from mingc.server.websocket.connection import EventSocket

PATH = "/v1/audio/speech/stream"
# Two sentences whose first one has clauses, a thought, and nothing to speak at the end.
WRITTEN = (
    "Well now, this is a rather long sentence, which ends at 3 pm. <b>So</b> let us hear another one! `x` "
)
# At the rate of the artifacts: a resampler would hold samples back.
CONFIG = {"type": "session.config", "voice": "DB30", "seed": 7, "max_steps": 2, "sample_rate": 44100}
FAKE = {"type": "session.config", "voice": "amy", "seed": 7, "sample_rate": 44100}
DONE, CANCEL, END = {"type": "input.done"}, {"type": "input.cancel"}, {"type": "session.close"}


def text(words: str) -> dict[str, Any]:
    return {"type": "input.text", "text": words}


@contextmanager
def serving(service: OmniService | None = None, **options: Any) -> Iterator[tuple[str, OmniService]]:
    """A server, with nothing held at the end."""
    made = service or make_service(has_thinker=False)
    before = made.held
    with run_server(lambda: made, ServeOptions(port=0, shutdown_timeout_s=0.2, **options)) as url:
        yield url, made
        wait_until_equal(before, lambda: made.held)
        eventually(lambda: metric(url, "mingc_num_websockets") == 0)
        assert metric(url, "mingc_num_requests_running") == 0


@pytest.fixture(scope="module")
def url(eager_artifact: Path) -> Iterator[str]:
    with serving(open_service(eager_artifact, EngineOptions(speech_lead=0))) as (url, _):
        yield url


def connect(url: str, **options: Any) -> ClientConnection:
    return websocket(url.replace("http", "ws", 1) + PATH, proxy=None, **options)


def send(connection: ClientConnection, *events: dict[str, Any]) -> None:
    for event in events:
        connection.send(json.dumps(event))


def receive(connection: ClientConnection, last: str = "session.done") -> tuple[list[dict[str, Any]], bytes]:
    """Events up to one of the type `last`, and the audio before it."""
    events: list[dict[str, Any]] = []
    audio = b""
    while not events or events[-1]["type"] != last:
        message = connection.recv(timeout=30)
        if isinstance(message, bytes):
            audio += message
        else:
            events.append(json.loads(message))
    return events, audio


def spoken(url: str, *events: dict[str, Any]) -> bytes:
    with connect(url) as connection:
        send(connection, *events)
        return receive(connection)[1]


def by_http(url: str, words: str, **fields: Any) -> bytes:
    body = {"input": words, "response_format": "pcm", **CONFIG, **fields}
    del body["type"]
    answer = httpx.post(f"{url}/v1/audio/speech", json=body, timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.mark.parametrize("is_early", [False, True])
def test_the_audio_does_not_depend_on_where_the_text_is_cut(is_early: bool, url: str) -> None:
    config = {**CONFIG, "max_steps": 1, **({} if is_early else {"split_granularity": "sentence"})}
    whole = spoken(url, config, text(WRITTEN), DONE)
    assert (whole == by_http(url, WRITTEN, max_steps=1)) is not is_early, "the first clause is a segment"
    other = {**config, "split_granularity": "clause" if is_early else "none"}
    assert spoken(url, other, text(WRITTEN), DONE) == whole
    with connect(url) as connection:
        send(connection, config)
        for cut in range(0, len(WRITTEN) + 1, 24):
            send(connection, text(WRITTEN[:cut]), text(WRITTEN[cut:]), DONE)
            assert receive(connection)[1] == whole
        send(connection, *(text(character) for character in WRITTEN), DONE)
        assert receive(connection)[1] == whole


def test_a_text_without_clauses_is_spoken_as_over_http(url: str) -> None:
    words = "All eight of these words are one sentence. And so are these, with a clause."
    assert spoken(url, CONFIG, text(words), DONE) == by_http(url, words)
    wav = spoken(url, {**CONFIG, "response_format": "wav"}, text(words), DONE)
    assert (wav[:4], wav[44:]) == (b"RIFF", by_http(url, words))


@pytest.mark.parametrize("name", [None, "wav", "mp3", "opus", "aac"])
def test_formats_are_those_of_http(name: str | None, url: str) -> None:
    """A null counts as absent, whose default is raw PCM."""
    words = "This is spoken in several formats"
    config = {**CONFIG, "sample_rate": 24000, "response_format": name, "input": None}
    with connect(url) as connection:
        send(connection, config, text(words), DONE)
        (start, *_), audio = receive(connection)
    assert (start["type"], start["format"], start["sample_rate"]) == ("audio.start", name or "pcm", 24000)
    assert audio == by_http(url, words, response_format=name or "pcm", sample_rate=24000)


def test_the_events_of_an_utterance(url: str) -> None:
    with connect(url) as connection:
        send(connection, CONFIG, text("Hello there, you "), text("all."), DONE)
        events, audio = receive(connection)
    start, done, end = events
    assert start == {
        "type": "audio.start",
        "utterance_index": 0,
        "sentence_index": 0,
        "sentence_text": start["sentence_text"],
        "format": "pcm",
        "sample_rate": 44100,
    }
    assert "Hello there, you all.".startswith(start["sentence_text"])
    assert done == {
        "type": "audio.done",
        "utterance_index": 0,
        "sentence_index": 0,
        "total_bytes": len(audio),
        "error": False,
    }
    usage = end.pop("usage")
    assert usage["audio_seconds"] == pytest.approx(len(audio) / 2 / 44100)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    assert end.pop("finish_reason") in ("stop", "length")
    assert end == {"type": "session.done", "utterance_index": 0, "total_sentences": 1, "status": "completed"}


def test_speech_comes_while_the_text_is_written(url: str) -> None:
    with connect(url) as connection:
        send(connection, CONFIG, text("These are words enough, and"))
        assert receive(connection, "audio.start")[0][-1]["sentence_text"] == "These are words enough, and"
        assert isinstance(connection.recv(timeout=30), bytes)
        send(connection, text(" more of them."), DONE)
        assert receive(connection)[0][-1]["status"] == "completed"


def test_several_utterances_with_configs_of_their_own(url: str) -> None:
    with connect(url) as connection:
        send(connection, CONFIG, text("The first one is short."), DONE, DONE)
        send(
            connection, {**CONFIG, "voice": {"id": "lingguang"}}, text("The second has another voice."), DONE
        )
        send(connection, text("And the third one comes."), END)
        got = [receive(connection) for _ in range(4)]
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=30)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000
    ends = [events[-1] for events, _ in got]
    assert [each["utterance_index"] for each in ends] == [0, 1, 2, 3]
    assert [each["total_sentences"] for each in ends] == [1, 0, 1, 1], "the second one has no text"
    assert all(each["status"] == "completed" for each in ends)
    second = by_http(url, "The second has another voice.", voice="lingguang")
    assert got[2][1] == second != by_http(url, "The second has another voice.")
    assert got[3][1] == by_http(url, "And the third one comes.", voice="lingguang")


@pytest.mark.parametrize(
    ("event", "code", "param"),
    [
        ({"type": "session.config", "voice": "zoe"}, "voice_not_found", "voice"),
        ({"type": "session.config", "model": "gpt"}, "model_not_found", "model"),
        ({"type": "session.config", "input": "x"}, "unknown_parameter", "input"),
        ({"type": "session.config", "stream_format": "sse"}, "unknown_parameter", "stream_format"),
        ({"type": "session.config", "typo": 1}, "unknown_parameter", "typo"),
        ({"type": "session.config", "guidance": 99}, "invalid_value", "guidance"),
        ({"type": "session.config", "response_format": "flac"}, "invalid_value", "response_format"),
        ({"type": "session.config", "stream_audio": False}, "invalid_value", "stream_audio"),
        ({"type": "session.config", "split_granularity": "word"}, "invalid_value", "split_granularity"),
        ({"type": "input.text"}, "missing_required_parameter", "text"),
        ({"type": "input.text", "text": 1}, "invalid_type", "text"),
        ({"type": "input.text", "text": "x", "more": 1}, "unknown_parameter", "more"),
        ({"type": "response.create"}, "unsupported_event", "type"),
        ({}, "missing_required_parameter", "type"),
    ],
)
def test_errors_leave_the_session_as_it_was(event: dict[str, Any], code: str, param: str, url: str) -> None:
    words = "This is spoken with the voice that was chosen first."
    with connect(url) as connection:
        send(connection, {**CONFIG, "voice": "lingguang"}, event, text(words), DONE)
        (error,), _ = receive(connection, "error")
        assert (error["error"]["code"], error["error"]["param"]) == (code, param)
        assert receive(connection)[1] == by_http(url, words, voice="lingguang")


@pytest.mark.parametrize(
    ("events", "code", "options"),
    [
        ([text("..."), DONE], "nothing_to_speak", {}),
        ([text("<think>I think.</think>"), DONE], "nothing_to_speak", {}),
        ([text("These words are far too many."), text(" On."), DONE], "string_too_long", {"max_speech_characters": 20}),
        ([text("So this is it, "), text("but words may")], "body_timeout", {"body_timeout_s": 0.3}),
        ([text("These words are a lot of seconds."), DONE], "key_limit_exceeded", {"key_max_audio_seconds": 2}),
        ([text("Two "), text(" " * 20), text(" " * 20), DONE], "rate_limit_exceeded", {"key_max_audio_seconds": 2}),
    ],
)  # fmt: skip
def test_an_utterance_that_fails_ends_once_and_the_next_is_spoken(
    events: list[dict[str, Any]], code: str, options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("good\n")
    if "key_max_audio_seconds" in options:
        options = {**options, "api_key_file": tmp_path / "keys"}
    with (
        serving(**options) as (url, _),
        connect(url, additional_headers={"authorization": "Bearer good"}) as connection,
    ):
        send(connection, FAKE, *events)
        got, _ = receive(connection)
        assert [each["error"]["code"] for each in got if each["type"] == "error"] == [code]
        assert (got[-1]["status"], got[-1]["utterance_index"]) == ("failed", 0)
        send(connection, text("dropped"), DONE, text("Hello you."), DONE)
        got, audio = receive(connection)
        assert (got[-1]["status"], got[-1]["utterance_index"]) == ("completed", 1) and audio


def test_an_utterance_takes_a_place_and_an_idle_session_none() -> None:
    with serving(max_concurrent_requests=1) as (url, _), connect(url) as first, connect(url) as second:
        for connection in (first, second):
            send(connection, FAKE)
        send(first, text("This is not the end "))
        eventually(lambda: metric(url, "mingc_num_requests_running") == 1)
        send(second, text("Hello."), DONE)
        got, _ = receive(second)
        assert (got[0]["error"]["code"], got[-1]["status"]) == ("overloaded", "failed")
        send(first, DONE)
        assert receive(first)[0][-1]["status"] == "completed"
        send(second, text("Hello again."), DONE)
        assert receive(second)[0][-1]["status"] == "completed"


def test_too_many_waiting_utterances_close_the_session() -> None:
    with serving() as (url, _), connect(url) as connection:
        send(connection, FAKE, text("It does not end "))
        with pytest.raises(ConnectionClosed) as closed:  # while texts are still being sent, too
            for _ in range(70):
                send(connection, {"type": "input.done"}, text("more "))
            while True:
                connection.recv(timeout=30)
        assert closed.value.rcvd is not None and closed.value.rcvd.code in (1000, 1008)


@pytest.mark.parametrize("num_received", range(8))
def test_cancel_stops_at_once(num_received: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many messages of a long speech, and with another text behind it."""
    service = make_service(has_thinker=False)
    with serving(service) as (url, _), connect(url) as connection:
        patches = slow_down(service, monkeypatch)
        send(connection, FAKE, *(text("This one is a long sentence, is it not? ") for _ in range(40)), DONE)
        send(connection, text("And this comes after it."))
        for _ in range(num_received):
            connection.recv(timeout=30)
        send(connection, CANCEL)
        got = [receive(connection)[0][-1] for _ in range(2)]
        assert [(each["utterance_index"], each["status"]) for each in got] == [
            (0, "cancelled"),
            (1, "cancelled"),
        ]
        eventually(lambda: service.held["speech streams"] == 0)
        assert len(patches) < 40, "a text of many more patches"
        send(connection, CANCEL, text("Go on."), DONE)
        got, audio = receive(connection)
        assert got[0]["type"] == "audio.start" and got[-1]["utterance_index"] == 2
        assert audio == by_http(url, "Go on.", voice="amy", max_steps=None)


def test_cancel_takes_back_what_was_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, write = threading.Event(), EventSocket._write

    async def stalled(socket: EventSocket) -> None:
        while not may_write.is_set():
            await asyncio.sleep(0.01)
        await write(socket)

    monkeypatch.setattr(EventSocket, "_write", stalled)
    service = make_service(has_thinker=False)
    with serving(service) as (url, _), connect(url) as connection:
        patches = slow_down(service, monkeypatch)
        send(connection, FAKE, *(text("This one is a long sentence, is it not? ") for _ in range(40)), DONE)
        eventually(lambda: len(patches) > 3)
        send(connection, CANCEL)
        eventually(lambda: service.held["speech streams"] == 0)
        may_write.set()
        got, audio = receive(connection)
        assert [each["type"] for each in got] == ["session.done"] and not audio


def test_a_session_that_ends_at_any_event_holds_nothing() -> None:
    """Closed in order or broken off after each message that is sent and received."""
    events = [FAKE, text("Hello there, you all. "), text("How is it going"), DONE, text("Well."), DONE]
    with serving() as (url, service):
        before = service.held
        with connect(url) as connection:
            send(connection, *events)
            num_messages = 0
            for _ in range(2):
                while not (
                    isinstance(message := connection.recv(timeout=30), str) and "session.done" in message
                ):
                    num_messages += 1
        for num_sent in range(len(events) + 1):
            for num_received in range(0, 1 if num_sent < len(events) else num_messages, 2):
                for is_clean in (False, True):
                    with connect(url) as connection:
                        send(connection, *events[:num_sent])
                        for _ in range(num_received):
                            connection.recv(timeout=30)
                        if not is_clean:
                            connection.socket.shutdown(2)
        wait_until_equal(before, lambda: service.held)
        assert metric(url, "mingc_num_requests_running") == 0


def test_sessions_do_not_disturb_each_other(url: str) -> None:
    texts = [f"This is what the speaker with the number {index} says, and then ends." for index in range(8)]
    found: dict[str, bytes] = {}

    def speak(words: str) -> None:
        pieces = [words[start : start + 5] for start in range(0, len(words), 5)]
        found[words] = spoken(url, {**CONFIG, "split_granularity": "sentence"}, *map(text, pieces), DONE)

    threads = [threading.Thread(target=speak, args=(each,)) for each in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for words in texts:  # a batch of several sums in another order
        alone = np.frombuffer(by_http(url, words), np.int16).astype(int)
        assert np.abs(np.frombuffer(found[words], np.int16) - alone).max() <= 2


def test_an_artifact_without_speech_says_so() -> None:
    with serving(make_service(has_talker=False)) as (url, _), connect(url) as connection:
        send(connection, text("Hello."))
        (error,), _ = receive(connection, "error")
        assert error["error"]["code"] == "unsupported_model"
