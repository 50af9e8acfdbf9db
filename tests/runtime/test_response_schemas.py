"""Response objects: what all chunks of an answer share, and what an error shows to a client."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import msgspec
import pytest

from mingc.errors import CapacityError, ConfigError, MingcError, RequestError, WorkerError
from mingc.runtime.request import Done, ServiceInfo, TextDelta, Usage
from mingc.server.error_objects import error_response
from mingc.server.http.response_schemas import (
    Answer,
    ChatResponseBuilder,
    Delta,
    SpeechDelta,
    SpeechSegment,
    model_object,
    speech_done,
    sse,
)
from mingc.server.options import ServeOptions

Json = dict[str, Any]

USAGE = Usage(prompt_tokens=7, completion_tokens=3, audio_patches=0, audio_seconds=0.0)
DONE = Done(finish_reason="stop", usage=USAGE, timings_ms={})


def answer(done: Done) -> Answer:
    made = Answer()
    for event in (TextDelta(text="a"), done):
        made.add(event)
    return made


def document(value: msgspec.Struct) -> Json:
    """The JSON that a client receives."""
    found: Json = json.loads(msgspec.json.encode(value))
    return found


def test_all_objects_of_an_answer_have_its_id_model_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI: each chunk has the same timestamp, however long the answer takes."""
    seconds = itertools.count(1_700_000_000, 10)
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))
    builder = ChatResponseBuilder(request_id="chatcmpl-1", model="m", include_usage=True)
    objects = [
        builder.role_chunk(),
        builder.chunk(Delta(content="a")),
        builder.audio_chunk(b"\0", is_first=True),
        builder.audio_end_chunk("a", is_first=False),
        builder.chunk(Delta(), "stop", {}),
        builder.usage_chunk(USAGE),
        builder.completion([answer(DONE)], audio=None),
    ]
    assert {(each.id, each.model, each.created) for each in objects} == {("chatcmpl-1", "m", 1_700_000_000)}


@pytest.mark.parametrize(
    "error", [ValueError("/etc/secret"), KeyError("/etc/secret"), OSError(2, "no", "/etc/secret")]
)
def test_an_unforeseen_error_shows_no_details(error: Exception) -> None:
    body = error_response(error).error
    assert "secret" not in body.message and type(error).__name__ not in body.message
    assert (body.type, body.code) == ("server_error", "internal_error")


def test_errors_of_mingc_show_their_message_and_requests_their_fix() -> None:
    worker = error_response(WorkerError("rank 1 died", fix="restart the server")).error
    assert worker.message == "rank 1 died"
    request = error_response(RequestError("too long", where="messages", fix="send less")).error
    assert (request.message, request.param) == ("too long: send less", "messages")


FULL_USAGE = Usage(
    prompt_tokens=70, cached_tokens=48, completion_tokens=5, audio_patches=3, audio_seconds=0.96
)
CHAT_USAGE = {
    "prompt_tokens": 70,
    "completion_tokens": 5,
    "total_tokens": 75,
    "prompt_tokens_details": {"cached_tokens": 48},
    "audio_patches": 3,
    "audio_seconds": 0.96,
}


def chunk(delta: Json, finish_reason: str | None = None) -> Json:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [choice],
    }  # fmt: skip


def test_every_object_of_an_answer_is_that_of_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents of OpenAI's API reference, written out, and what docs/http-api.md adds to them."""
    monkeypatch.setattr(time, "time", lambda: 99.5)
    done = Done(finish_reason="length", usage=FULL_USAGE, timings_ms={"done": 9.0})
    built = ChatResponseBuilder(request_id="chatcmpl-1", model="m", created=7)
    counted = ChatResponseBuilder(request_id="chatcmpl-1", model="m", created=7, include_usage=True)
    for made, expected in (
        (lambda b: b.role_chunk(), chunk({"role": "assistant", "content": "", "refusal": None})),
        (lambda b: b.chunk(Delta(content="a")), chunk({"content": "a"})),
        (
            lambda b: b.role_chunk(has_text=False),
            chunk({"role": "assistant", "content": None, "refusal": None}),
        ),
        (lambda b: b.audio_chunk(b"\0", is_first=True), chunk({"audio": {"id": "audio-1", "data": "AA=="}})),
        (lambda b: b.audio_chunk(b"\0", is_first=False), chunk({"audio": {"data": "AA=="}})),
        (
            lambda b: b.audio_end_chunk("said", is_first=False),
            chunk({"audio": {"expires_at": 99, "transcript": "said"}}),
        ),
        (
            lambda b: b.audio_end_chunk("said", is_first=True),
            chunk({"audio": {"id": "audio-1", "data": "", "expires_at": 99, "transcript": "said"}}),
        ),
        (
            lambda b: b.end_chunk(done),
            {**chunk({}, "length"), "timings_ms": {"done": 9.0}},
        ),
    ):
        assert document(made(built)) == expected
        assert document(made(counted)) == {**expected, "usage": None}, "null in all chunks but the last"
    assert document(counted.usage_chunk(FULL_USAGE)) == {**chunk({}), "choices": [], "usage": CHAT_USAGE}
    message = {"role": "assistant", "content": "a", "refusal": None}
    whole = {
        **chunk({}), "object": "chat.completion", "usage": CHAT_USAGE, "timings_ms": {"done": 9.0},
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
    }  # fmt: skip
    assert document(built.completion([answer(done)], audio=None)) == whole
    audio = {"id": "audio-1", "data": "AAE=", "expires_at": 99, "transcript": "a"}
    whole["choices"] = [
        {"index": 0, "message": {**message, "audio": audio}, "logprobs": None, "finish_reason": "length"}
    ]
    assert document(built.completion([answer(done)], audio="AAE=")) == whole


def test_objects_of_speech() -> None:
    assert document(SpeechDelta(b"\0")) == {"type": "speech.audio.delta", "audio": "AA=="}
    usage = {"input_tokens": 70, "output_tokens": 3, "total_tokens": 73, "audio_seconds": 0.96}
    assert document(speech_done(FULL_USAGE)) == {"type": "speech.audio.done", "usage": usage}


def test_an_event_is_one_line_of_compact_json() -> None:
    expected = 'data: {"type":"speech.segment","text":"é\\n","start":0.0}\n\n'
    assert sse(SpeechSegment(text="é\n", start=0.0)) == expected.encode()


def test_the_object_of_a_model() -> None:
    info = ServiceInfo(
        model="ming",
        sample_rate=44100,
        voices=("DB30", "Lina"),
        default_voice="Lina",
        has_text=True,
        has_image=False,
        has_video=True,
        has_audio_input=False,
        has_speech=True,
    )
    assert document(model_object(info, ServeOptions(), 7, "alias")) == {
        "id": "alias",
        "object": "model",
        "created": 7,
        "owned_by": "mingc",
        "input_modalities": ["text", "video"],
        "output_modalities": ["text", "audio"],
        "routes": ["/v1/chat/completions", "/v1/completions", "/v1/audio/speech"],
        "sample_rate": 44100,
    }


@pytest.mark.parametrize(
    ("error", "message", "kind", "param", "code"),
    [
        (RequestError("no", param="n", code="c"), "no", "invalid_request_error", "n", "c"),
        (RequestError("no", where="w", fix="do"), "no: do", "invalid_request_error", "w", "invalid_value"),
        (RequestError("no", param="p", where="w"), "no", "invalid_request_error", "p", "invalid_value"),
        (
            CapacityError("full", fix="wait", code="queue_full"),
            "full",
            "overloaded_error",
            None,
            "queue_full",
        ),
        (WorkerError("dead", where="rank 1", code="x"), "dead", "server_error", None, "x"),
        (ConfigError("bad", where="/etc/secret", fix="edit"), "bad", "server_error", None, None),
    ],
)
def test_what_an_error_shows(
    error: MingcError, message: str, kind: str, param: str | None, code: str | None
) -> None:
    shown = {"message": message, "type": kind, "param": param, "code": code}
    assert document(error_response(error)) == {"error": shown}
