"""Limits of what one API key has in flight, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_service import FakeService
from server_thread import run_server

from mingc.errors import CapacityError, ConfigError, RequestError
from mingc.server.app import create_app
from mingc.server.key_limits import KeyLimits
from mingc.server.options import ServeOptions

CHAT, COMPLETION, SPEECH = "/v1/chat/completions", "/v1/completions", "/v1/audio/speech"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextmanager
def server(tmp_path: Path, **limits: int) -> Iterator[httpx.Client]:
    (tmp_path / "keys").write_text("first\nsecond\n")
    options = ServeOptions(port=0, shutdown_timeout_s=0.2, api_key_file=tmp_path / "keys", **limits)  # type: ignore[arg-type]
    with (
        run_server(FakeService, options) as url,
        httpx.Client(base_url=url, timeout=30, trust_env=False) as http,
    ):
        yield http


# (limit, its name in errors, route, a request that runs until it is cancelled, one that exceeds the limit beside it,
# one that fits). 40 bytes of text are 10 tokens, or 3 s of speech.
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "DB30", "format": "pcm16"}}
CASES = {
    "requests": ({"key_max_requests": 1}, "--key-max-requests", CHAT, chat("endless"), chat("Hello"), None),
    "tokens": (
        {"key_max_tokens": 100},
        "--key-max-tokens",
        CHAT,
        chat("endless", max_tokens=60),
        chat("Hello, hello, hello, hello, hello, hello", max_tokens=30),
        chat("Hello, hello, hello, hello, hello, hello", max_tokens=29),
    ),
    "several answers": (
        {"key_max_tokens": 100},
        "--key-max-tokens",
        CHAT,
        chat("endless", max_tokens=20, n=3),
        chat("Hello, hello, hello, hello, hello, hello", max_tokens=10, n=3),
        chat("Hello, hello, hello, hello, hello, hello", max_tokens=29, n=1),
    ),
    "completions": (
        {"key_max_tokens": 100},
        "--key-max-tokens",
        COMPLETION,
        {"prompt": "endless", "max_tokens": 60, "stream": True},
        {"prompt": [70] * 20, "max_tokens": 10, "n": 2},
        {"prompt": [70] * 19, "max_tokens": 10, "n": 2},
    ),
    "speech": (
        {"key_max_audio_seconds": 9},
        "--key-max-audio-seconds",
        SPEECH,
        {"input": "endless " + "word " * 14, "stream": True, "response_format": "pcm"},  # 6 s
        {"input": "word " * 10},
        {"input": "word " * 8},
    ),
    "spoken chats": (
        {"key_max_audio_seconds": 8},
        "--key-max-audio-seconds",
        CHAT,
        chat("endless", max_tokens=20, **SPOKEN),
        chat("Hello", max_tokens=10, stream=True, **SPOKEN),
        chat("Hello", max_tokens=500),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_key_has_limits_that_others_do_not_share(case: str, tmp_path: Path) -> None:
    limits, name, route, endless, excess, fitting = CASES[case]
    if route == CHAT:
        endless = {**endless, "stream": True}
    with server(tmp_path, **limits) as http:
        with http.stream("POST", route, json=endless, headers=bearer("first")) as running:
            chunks = running.iter_raw()  # closes the connection when it is deleted
            assert next(chunks)
            refused = http.post(route, json=excess, headers=bearer("first"))
            assert (refused.status_code, refused.headers.get("retry-after")) == (429, "1"), refused.text
            error = refused.json()["error"]
            assert error["code"] == "rate_limit_exceeded" and name in error["message"]
            assert http.post(route, json=excess, headers=bearer("second")).status_code == 200
            if fitting is not None:
                assert http.post(route, json=fitting, headers=bearer("first")).status_code == 200
        for _ in range(3000):  # until the server has seen the disconnect
            again = http.post(route, json=excess, headers=bearer("first"))
            if again.status_code == 200:
                break
        assert again.status_code == 200


def test_a_request_that_never_fits_is_the_clients_fault(tmp_path: Path) -> None:
    with server(tmp_path, key_max_tokens=100) as http:
        answer = http.post(CHAT, json=chat("Hello", max_tokens=100), headers=bearer("first"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "key_limit_exceeded")
        assert "101 tokens" in answer.json()["error"]["message"]
        assert http.get("/v1/models", headers=bearer("first")).status_code == 200


def test_limits_of_keys_need_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINGC_API_KEYS", raising=False)
    with pytest.raises(ConfigError, match="--key-max-tokens"):
        create_app(FakeService(), ServeOptions(key_max_tokens=100))


def test_tool_calls_of_a_history_count(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "look_up", "arguments": "x" * 400}}
    body = chat("Hello", max_tokens=1)
    body["messages"] += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    with server(tmp_path, key_max_tokens=100) as http:
        answer = http.post(CHAT, json=body, headers=bearer("first"))
        assert answer.json()["error"]["code"] == "key_limit_exceeded"


def test_tools_count(tmp_path: Path) -> None:
    function = {"name": "look_up", "description": "x" * 400}
    body = chat("Hello", max_tokens=1) | {"tools": [{"type": "function", "function": function}]}
    with server(tmp_path, key_max_tokens=100) as http:
        answer = http.post(CHAT, json=body, headers=bearer("first"))
        assert answer.json()["error"]["code"] == "key_limit_exceeded"


def test_texts_count_in_bytes_and_spoken_chats_also_when_they_are_not_streamed(tmp_path: Path) -> None:
    with server(tmp_path, key_max_tokens=40, key_max_audio_seconds=9) as http:
        for route, body in (
            (CHAT, chat("你" * 60, max_tokens=1)),  # 180 bytes: 45 tokens
            (SPEECH, {"input": "你" * 60}),  # 14 s
            (
                CHAT,
                chat("Hello", max_tokens=30, **SPOKEN | {"audio": {"voice": "DB30", "format": "wav"}}),
            ),  # 10 s
        ):
            answer = http.post(route, json=body, headers=bearer("first"))
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "key_limit_exceeded"), body


@pytest.mark.parametrize("amount", [100, 1000], ids=["too much beside others", "too much at all"])
def test_a_refused_request_is_not_counted(amount: int) -> None:
    limits = KeyLimits(ServeOptions(key_max_requests=2, key_max_tokens=100))
    with limits.admit(b"key") as running:
        running.add("--key-max-tokens", 60)
        for _ in range(2):
            with pytest.raises((CapacityError, RequestError)), limits.admit(b"key") as refused:
                refused.add("--key-max-tokens", amount)
        with limits.admit(b"key") as fitting:
            fitting.add("--key-max-tokens", 40)


def test_sums_survive_another_request_that_ends_first() -> None:
    """A request whose body is still being read has added nothing yet; one beside it ends meanwhile."""
    limits = KeyLimits(ServeOptions(key_max_tokens=100))
    with limits.admit(b"key") as slow:
        with limits.admit(b"key"):
            pass
        slow.add("--key-max-tokens", 60)
        with limits.admit(b"key") as other, pytest.raises(CapacityError):
            other.add("--key-max-tokens", 60)
    with limits.admit(b"key") as last:
        last.add("--key-max-tokens", 100)
