"""Response objects: what all chunks of an answer share, and what an error shows to a client."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from mingc.errors import CapacityError, ConfigError, MingcError, RequestError, WorkerError
from mingc.runtime.request import Done, ServiceInfo, Usage
from mingc.server.http.response_schemas import (
    ChatResponseBuilder,
    Json,
    error_body,
    model_object,
    models_list,
    speech_delta,
    speech_done,
    sse,
    voices_list,
)

USAGE = Usage(prompt_tokens=7, completion_tokens=3, audio_patches=0, audio_seconds=0.0)
DONE = Done(finish_reason="stop", usage=USAGE, timings_ms={})


def test_all_objects_of_an_answer_have_its_id_model_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI: each chunk has the same timestamp, however long the answer takes."""
    seconds = itertools.count(1_700_000_000, 10)
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))
    builder = ChatResponseBuilder(request_id="chatcmpl-1", model="m", include_usage=True)
    objects = [
        builder.role_chunk(),
        builder.text_chunk("a"),
        builder.audio_chunk("AA==", is_first=True),
        builder.audio_end_chunk("a", is_first=False),
        builder.finish_chunk(DONE),
        builder.usage_chunk(USAGE),
        builder.completion(text="a", audio=None, done=DONE),
    ]
    assert {(each["id"], each["model"], each["created"]) for each in objects} == {
        ("chatcmpl-1", "m", 1_700_000_000)
    }


@pytest.mark.parametrize("include_usage", [False, True])
def test_streamed_and_whole_answers_end_with_their_reason_and_timings(include_usage: bool) -> None:
    builder = ChatResponseBuilder(request_id="chatcmpl-1", model="m", include_usage=include_usage)
    done = Done(finish_reason="length", usage=USAGE, timings_ms={"prefill": 1.5, "done": 9.0})
    for last in (builder.finish_chunk(done), builder.completion(text="a", audio=None, done=done)):
        assert last["timings_ms"] == {"prefill": 1.5, "done": 9.0}
        (choice,) = last["choices"]
        assert choice["finish_reason"] == "length"
    assert "timings_ms" not in builder.text_chunk("a")


def test_the_list_of_models_has_every_name_of_the_model() -> None:
    info = ServiceInfo(
        model="ming",
        aliases=("gpt-4o", "house/ming"),
        sample_rate=0,
        voices=(),
        default_voice=None,
        has_text=True,
        has_image=False,
        has_video=False,
        has_audio_input=False,
        has_speech=False,
    )
    listed = models_list(info, created=7)
    assert listed["object"] == "list"
    assert [(each["id"], each["object"], each["created"]) for each in listed["data"]] == [
        (name, "model", 7) for name in ("ming", "gpt-4o", "house/ming")
    ]


@pytest.mark.parametrize(
    "error", [ValueError("/etc/secret"), KeyError("/etc/secret"), OSError(2, "no", "/etc/secret")]
)
def test_an_unforeseen_error_shows_no_details(error: Exception) -> None:
    body = error_body(error)["error"]
    assert "secret" not in json.dumps(body) and type(error).__name__ not in json.dumps(body)
    assert (body["type"], body["code"]) == ("server_error", "internal_error")


def test_errors_of_mingc_show_their_message_and_requests_their_fix() -> None:
    worker = error_body(WorkerError("rank 1 died", fix="restart the server"))["error"]
    assert worker["message"] == "rank 1 died"
    request = error_body(RequestError("too long", where="messages", fix="send less"))["error"]
    assert (request["message"], request["param"]) == ("too long: send less", "messages")


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
        (lambda b: b.text_chunk("a"), chunk({"content": "a"})),
        (lambda b: b.audio_chunk("AA==", is_first=True), chunk({"audio": {"id": "audio-1", "data": "AA=="}})),
        (lambda b: b.audio_chunk("AA==", is_first=False), chunk({"audio": {"data": "AA=="}})),
        (
            lambda b: b.audio_end_chunk("said", is_first=False),
            chunk({"audio": {"expires_at": 99, "transcript": "said"}}),
        ),
        (
            lambda b: b.audio_end_chunk("said", is_first=True),
            chunk({"audio": {"id": "audio-1", "data": "", "expires_at": 99, "transcript": "said"}}),
        ),
        (lambda b: b.finish_chunk(done), {**chunk({}, "length"), "timings_ms": {"done": 9.0}}),
    ):
        assert made(built) == expected
        assert made(counted) == {**expected, "usage": None}, "null in all chunks but the last"
    assert counted.usage_chunk(FULL_USAGE) == {**chunk({}), "choices": [], "usage": CHAT_USAGE}
    message = {"role": "assistant", "content": "a", "refusal": None}
    whole = {
        **chunk({}), "object": "chat.completion", "usage": CHAT_USAGE, "timings_ms": {"done": 9.0},
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
    }  # fmt: skip
    assert built.completion(text="a", audio=None, done=done) == whole
    audio = {"id": "audio-1", "data": "AAE=", "expires_at": 99, "transcript": "a"}
    whole["choices"] = [
        {"index": 0, "message": {**message, "audio": audio}, "logprobs": None, "finish_reason": "length"}
    ]
    assert built.completion(text="a", audio=b"\0\1", done=done) == whole


def test_objects_of_speech() -> None:
    assert speech_delta("AA==") == {"type": "speech.audio.delta", "audio": "AA=="}
    usage = {"input_tokens": 70, "output_tokens": 3, "total_tokens": 73, "audio_seconds": 0.96}
    assert speech_done(FULL_USAGE) == {"type": "speech.audio.done", "usage": usage}


def test_an_event_is_one_line_of_compact_json() -> None:
    assert sse({"a": "é\n", "b": [1, None]}) == 'data: {"a":"é\\n","b":[1,null]}\n\n'.encode()
    with pytest.raises(ValueError, match="JSON"):
        sse({"a": float("nan")})


def test_objects_of_a_model_and_its_voices() -> None:
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
    assert model_object(info, 7, "alias") == {
        "id": "alias",
        "object": "model",
        "created": 7,
        "owned_by": "mingc",
        "input_modalities": ["text", "video"],
        "output_modalities": ["text", "audio"],
        "routes": ["/v1/chat/completions", "/v1/audio/speech"],
        "sample_rate": 44100,
    }
    assert voices_list(info) == {"object": "list", "voices": ["DB30", "Lina"], "default": "Lina"}


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
    assert error_body(error) == {"error": shown}
