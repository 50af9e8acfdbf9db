"""Response objects: what all chunks of an answer share, and what an error shows to a client."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from mingc.errors import RequestError, WorkerError
from mingc.runtime.http.response_schemas import ChatResponseBuilder, error_body, models_list
from mingc.runtime.request import Done, ServiceInfo, Usage

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
