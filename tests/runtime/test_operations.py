"""What an operator relies on: `/ready` and draining, API keys, CORS, request ids, logs, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fake_service import INFO, SPEECH_ONLY, TEXT_ONLY, FakeService
from restored_logging import restored_logging
from server_process import child
from server_thread import run_server

from mingc.errors import ConfigError
from mingc.runtime.request import AudioDelta, Event, ServiceLoad, TextDelta
from mingc.server.api_keys import ApiKeys
from mingc.server.app import create_app
from mingc.server.http.routes import HANDLERS
from mingc.server.logs import REQUEST_ID, RepetitionLimit, configure_logging
from mingc.server.metrics import Metrics
from mingc.server.options import ServeOptions

TRANSCRIPTS = "/v1/audio/transcriptions"
CHAT = "/v1/chat/completions"
TEXT_ROUTES = [CHAT, "/v1/completions"]
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@contextlib.contextmanager
def client(service: FakeService | None = None, **options: Any) -> Iterator[httpx.Client]:
    with (
        run_server(
            lambda: service or FakeService(), ServeOptions(port=0, shutdown_timeout_s=0.2, **options)
        ) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as http,
    ):
        yield http


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def logging_of_other_tests() -> Iterator[None]:
    with restored_logging():
        yield


@pytest.fixture
def log(logging_of_other_tests: None) -> io.StringIO:
    """The log in JSON, from debug on."""
    stream = io.StringIO()
    configure_logging("debug", "json", stream)
    return stream


def lines(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


# Readiness


def test_ready_answers_as_the_service_is() -> None:
    with client() as http:
        assert (http.get("/ready").status_code, http.get("/ready").json()) == (200, {"status": "ready"})
    with client(FakeService(ready=False)) as http:
        assert (http.get("/ready").status_code, http.get("/ready").json()) == (503, {"status": "not_ready"})


def test_sigterm_under_load_behind_a_proxy_refuses_nothing() -> None:
    """Clients send while /ready answers 200, as a proxy does, which asks every 50 ms: each request is answered."""
    with (
        child(shutdown_timeout_s=10, drain_s=1.5) as (process, url),
        httpx.Client(base_url=url, timeout=30, trust_env=False) as proxy,
    ):
        answers: list[tuple[float, int]] = []
        failures: list[str] = []
        is_open = threading.Event()
        is_open.set()

        def send() -> None:
            # One connection a request, and kept ones: both kinds of proxy.
            with httpx.Client(base_url=url, timeout=30, trust_env=False) as kept:
                while is_open.is_set():
                    for post in (kept.post, lambda *a, **k: httpx.post(url + a[0], trust_env=False, **k)):
                        began = time.monotonic()
                        try:
                            answers.append((began, post(CHAT, json=HELLO).status_code))
                        except httpx.HTTPError as error:
                            failures.append(repr(error))

        senders = [threading.Thread(target=send) for _ in range(4)]
        for sender in senders:
            sender.start()
        while len(answers) < 20:
            time.sleep(0.01)
        assert proxy.get("/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        signalled = time.monotonic()
        while proxy.get("/ready").status_code == 200:
            time.sleep(0.05)
        # The signal is seen: what is sent within this poll is still served, and the server is alive.
        assert proxy.get("/health").json()["status"] == "draining"
        assert proxy.get("/health").status_code == 200
        while not any(began > signalled for began, _ in answers):
            time.sleep(0.01)
        is_open.clear()
        for sender in senders:
            sender.join(timeout=30)
        assert not failures
        assert {status for _, status in answers} == {200}
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "in order\nending\n")


def test_sigint_does_not_drain_and_a_second_signal_ends_a_drain() -> None:
    with child(shutdown_timeout_s=10, drain_s=600) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0] == "in order\nending\n"
    with child(shutdown_timeout_s=10, drain_s=600, one_request_s=0) as (process, url):
        process.send_signal(signal.SIGTERM)
        while httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == "cut short\nending\n"


@pytest.mark.parametrize(
    ("info", "inputs", "outputs", "routes"),
    [
        (TEXT_ONLY, ["text"], ["text"], TEXT_ROUTES),
        (replace(TEXT_ONLY, has_audio_input=True), ["text", "audio"], ["text"], [*TEXT_ROUTES, TRANSCRIPTS]),
        (SPEECH_ONLY, ["text"], ["audio"], ["/v1/audio/speech"]),
        (
            INFO,
            ["text", "image", "audio", "video"],
            ["text", "audio", "image"],
            [
                *TEXT_ROUTES,
                TRANSCRIPTS,
                "/v1/audio/speech",
                "/v1/images/generations",
                "/v1/images/edits",
            ],
        ),
    ],
)
def test_health_and_models_show_what_an_artifact_can_do(
    info: Any, inputs: list[str], outputs: list[str], routes: list[str]
) -> None:
    with client(FakeService(info)) as http:
        for shown in (http.get("/health").json(), http.get("/v1/models").json()["data"][0]):
            assert shown["input_modalities"] == inputs
            assert shown["output_modalities"] == outputs
            assert shown["routes"] == routes


def test_a_model_may_have_several_names() -> None:
    with client(FakeService(replace(INFO, aliases=("gpt-4o", "ming")))) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [
            "ming-omni", "gpt-4o", "ming",
        ]  # fmt: skip
        assert http.get("/v1/models/ming").json()["id"] == "ming"
        assert http.post(CHAT, json={**HELLO, "model": "gpt-4o"}).json()["model"] == "ming-omni"
        assert http.post(CHAT, json={**HELLO, "model": "gpt-4"}).status_code == 404


# API keys


def test_requests_need_a_key_once_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the web app\nfirst-key\n\n  second-key  \n")
    with client(api_key_file=file) as http:
        for path in ("/health", "/ready"):
            assert http.get(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            assert http.get(path).status_code == 401, path
        for headers in (
            {},
            bearer("wrong"),
            {"authorization": "Basic first-key"},
            bearer("# of the web app"),
        ):
            answer = http.post(CHAT, json=HELLO, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            error = answer.json()["error"]
            assert (error["type"], error["param"], error["code"]) == (
                "invalid_request_error", None, "invalid_api_key",
            )  # fmt: skip
            assert "first-key" not in answer.text and "wrong" not in answer.text
        for key in ("first-key", "second-key"):
            assert http.post(CHAT, json=HELLO, headers=bearer(key)).status_code == 200
            assert http.get("/metrics", headers=bearer(key)).status_code == 200
            # RFC 9110, 11.1: the name of a scheme is case-insensitive.
            assert http.get("/metrics", headers={"authorization": f"bearer {key}"}).status_code == 200


def test_metrics_may_be_open(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key\n")
    with client(api_key_file=tmp_path / "keys", has_open_metrics=True) as http:
        assert http.get("/metrics").status_code == 200
        assert http.get("/v1/models").status_code == 401


def test_a_key_is_checked_before_the_body_is_read(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key\n")
    with (
        client(api_key_file=tmp_path / "keys") as http,
        socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=30) as connection,
    ):
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_keys_of_the_file_are_reread_and_a_broken_file_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingc.server.api_keys._CHECK_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("old\n")
    keys = ApiKeys(file, {"MINGC_API_KEYS": "fixed, other"})
    assert [keys.accepts(key) for key in ("old", "fixed", "other", "", "new")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    file.write_text("new-key\n")
    assert [keys.accepts(key) for key in ("old", "fixed", "new-key")] == [False, True, True]
    file.write_text("")
    assert keys.accepts("new-key")
    file.unlink()
    assert keys.accepts("new-key")
    assert not keys.accepts("")


def test_keys_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for name in ("empty", "missing"):
        with pytest.raises(ConfigError, match="no API keys in") as caught:
            ApiKeys(tmp_path / name, {})
        assert caught.value.where == "--api-key-file"
    for value in ("", " , ", "\n"):
        with pytest.raises(ConfigError, match="MINGC_API_KEYS is set and holds no key"):
            ApiKeys(None, {"MINGC_API_KEYS": value})
    assert not ApiKeys(None, {}).is_required


@pytest.mark.parametrize(
    "content",
    [b"\xef\xbb\xbfone\r\n\r\n two \r\n", b"\n\none\n\t\n  # no\ntwo", b"\xef\xbb\xbf# no\none\rtwo"],
)
def test_key_files_of_every_editor_are_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(content)
    keys = ApiKeys(tmp_path / "keys", {"MINGC_API_KEYS": ""})
    assert [keys.accepts(key) for key in ("one", "two", "# no", "\ufeffone", "")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_server_open_to_all_is_warned_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key\n")
    for options, warned in (
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key_file": tmp_path / "keys"}, False),
        ({"host": "127.0.0.1"}, False),
    ):
        caplog.clear()
        with run_server(FakeService, ServeOptions(port=0, shutdown_timeout_s=0.2, **options)):  # type: ignore[arg-type]
            assert any("anyone who can reach 0.0.0.0" in text for text in caplog.messages) == warned


# CORS


def test_cors_is_off_unless_an_origin_is_allowed() -> None:
    preflight = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    with client() as http:
        assert http.options(CHAT, headers=preflight).status_code == 405
        answer = http.get("/v1/models", headers=preflight)
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin", ["https://app.example/", "https://app.example/a", "app.example", "ftp://a", ""]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    """RFC 6454, 6.2: an origin is scheme, host and port; the field matches as a whole."""
    with pytest.raises(ConfigError, match="--cors-origin"):
        ServeOptions(cors_origins=(origin,))


def test_cors_for_one_origin(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key\n")
    with client(cors_origins=("https://app.example",), api_key_file=tmp_path / "keys") as http:
        preflight = {
            "origin": "https://app.example",
            "access-control-request-method": "POST",
            # what openai-node sends in a browser
            "access-control-request-headers": "authorization,content-type,x-stainless-arch,x-stainless-helper-method,"
            "x-stainless-lang,x-stainless-os,x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,"
            "x-stainless-runtime-version,x-stainless-timeout",
            "access-control-request-private-network": "true",
        }
        answer = http.options(CHAT, headers=preflight)  # carries no key: browsers send none
        assert answer.status_code == 200
        allowed = answer.headers["access-control-allow-headers"].replace(" ", "").split(",")
        assert {*preflight["access-control-request-headers"].split(",")} <= {*allowed}
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        other = http.options(CHAT, headers={**preflight, "origin": "https://evil.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        posted = http.post(CHAT, json=HELLO, headers={**bearer("key"), "origin": "https://app.example"})
        assert posted.headers["access-control-allow-origin"] == "https://app.example"
        refused = http.post(CHAT, json=HELLO, headers={"origin": "https://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"


def test_a_page_may_not_send_a_body_without_a_type() -> None:
    """Browsers do not ask before `fetch(url, {method: "POST", mode: "no-cors", body: new Uint8Array(…)})`."""
    with client(cors_origins=("https://app.example",)) as http:
        for route in (path for path, (_, types) in HANDLERS.items() if "application/json" in types):
            for origin, statuses in (("https://app.example", {200, 400}), ("https://evil.example", {403})):
                assert http.post(route, content=b"{}", headers={"origin": origin}).status_code in statuses
            typed = {"origin": "https://evil.example", "content-type": "application/json"}
            asked = http.post(route, content=b"{}", headers=typed)  # after a preflight, which was refused
            assert asked.status_code == (403 if route == "/v1/images/edits" else 400)


# Request ids and logs


def test_a_request_id_is_taken_or_made_and_returned() -> None:
    with client() as http:
        assert http.get("/health", headers={"x-request-id": "trace-1"}).headers["x-request-id"] == "trace-1"
        made = http.get("/health").headers["x-request-id"]
        assert len(made) == 32 and made != http.get("/health").headers["x-request-id"]
        for bad in ("", "a b", "x" * 129, "é".encode(), "a;b"):
            shown = http.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
            assert len(shown) == 32
        for path in ("/nowhere", "/v1/models/other"):
            answer = http.get(path, headers={"x-request-id": "trace-2"})
            assert (answer.status_code, answer.headers["x-request-id"]) == (404, "trace-2")
        streamed = http.post(CHAT, json={**HELLO, "stream": True}, headers={"x-request-id": "trace-3"})
        assert streamed.headers["x-request-id"] == "trace-3"


def test_an_error_of_the_server_names_the_request(log: io.StringIO) -> None:
    body = {"messages": [{"role": "user", "content": "crash midway"}]}
    with client() as http:
        answer = http.post(CHAT, json=body, headers={"x-request-id": "trace-9"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, "trace-9")
        assert "request trace-9" in answer.json()["error"]["message"]
        streamed = http.post(CHAT, json={**body, "stream": True}, headers={"x-request-id": "trace-10"})
        assert "request trace-10" in streamed.text
    (logged,) = [line for line in lines(log) if line.get("request_id") == "trace-9" and "exception" in line]
    assert logged["level"] == "error" and "a bug" in logged["exception"]


def test_access_lines(log: io.StringIO) -> None:
    with client() as http:
        http.post(CHAT, json=HELLO, headers={"x-request-id": "one"})
        http.get("/no%1b[2Jwhere?key=secret", headers={"x-request-id": "two"})
        http.get("/health", headers={"x-request-id": "three"})
    access = {line["request_id"]: line for line in lines(log) if line["logger"] == "mingc.access"}
    assert (access["one"]["method"], access["one"]["path"], access["one"]["status"]) == ("POST", CHAT, 200)
    assert access["one"]["client"] == "127.0.0.1" and access["one"]["duration_ms"] > 0
    assert access["two"]["status"] == 404 and "secret" not in json.dumps(access["two"])
    assert (access["one"]["level"], access["three"]["level"]) == ("info", "debug")


def test_times_of_json_lines_are_in_utc(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Test-05:30")  # POSIX: local time is UTC + 5:30
    time.tzset()
    try:
        assert time.localtime(0).tm_hour == 5
        before = datetime.now(UTC).replace(microsecond=0)
        logging.getLogger("mingc.http").info("now")
        after = datetime.now(UTC)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert lines(log)[-1]["time"].endswith("Z")
    assert before <= datetime.fromisoformat(lines(log)[-1]["time"]) <= after


def test_text_lines_show_control_characters(logging_of_other_tests: None) -> None:
    stream = io.StringIO()
    configure_logging("info", "text", stream)
    token = REQUEST_ID.set("trace")
    try:
        logging.getLogger("mingc.http").info("%s", "a\r\nFAKE \x1b[31mred\u202e")
    finally:
        REQUEST_ID.reset(token)
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"INFO mingc.http [trace] a\r\nFAKE \x1b[31mred\u202e")


def test_repeated_lines_are_dropped_and_counted(
    logging_of_other_tests: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    configure_logging("warning", "text", stream)
    now = 0.0
    monkeypatch.setattr("mingc.server.logs.time.monotonic", lambda: now)
    http = logging.getLogger("mingc.http")
    for index in range(1000):
        http.warning("line %d", index)
    http.warning("another line")
    http.info("below the level")
    assert len(stream.getvalue().splitlines()) == 21
    now = 11.0
    http.warning("line %d", 1000)
    assert stream.getvalue().splitlines()[-1].endswith("line 1000 (and 980 like it before)")
    access = logging.getLogger("mingc.access")
    for _ in range(100):
        access.warning("fine", extra={"status": 200})
    assert len(stream.getvalue().splitlines()) == 122


# Metrics


def test_latency_build_and_process_metrics() -> None:
    with client() as http:
        for _ in range(3):
            http.post(CHAT, json=HELLO)
        http.get("/v1/models")
        rows = dict(
            row.rsplit(" ", 1) for row in http.get("/metrics").text.splitlines() if not row.startswith("#")
        )
    assert float(rows["mingc_inter_token_latency_seconds_count"]) == 6  # "You said: hi" has three texts
    assert float(rows['mingc_request_duration_seconds_count{route="/v1/chat/completions"}']) == 3
    assert float(rows["mingc_num_connections"]) == 1
    (build,) = [name for name in rows if name.startswith("mingc_build_info{")]
    assert 'version="0.1.0"' in build
    assert float(rows["process_open_fds"]) == pytest.approx(len(os.listdir("/proc/self/fd")), abs=8)


def test_every_stage_takes_the_time_between_its_moments() -> None:
    metrics = Metrics()
    metrics.observe_stages(
        {
            "preprocessing": 1000.0,
            "prepared": 3000.0,
            "encoded": 7000.0,
            "prefill": 15_000.0,
            "first_token": 31_000.0,
            "first_segment": 63_000.0,
            "first_audio": 127_000.0,
        }
    )
    found = {
        dict(each.labels)["stage"]: each.value
        for each in metrics.samples(ServiceLoad())
        if each.name == "mingc_stage_seconds_sum"
    }
    assert found == {
        "preprocess_queue": 1.0, "preprocess": 2.0, "encode": 4.0, "queue": 8.0, "prefill": 16.0,
        "first_segment": 32.0, "first_patch": 64.0,
    }  # fmt: skip


def test_counters_of_the_engines_show_what_the_engines_counted_at_every_scrape() -> None:
    metrics = Metrics()
    for counted in (5, 8, 8, 9):
        samples = metrics.samples(ServiceLoad(prefilled_tokens=counted))
        found = {each.name: each.value for each in samples}
        assert found["mingc_prefilled_tokens_total"] == counted


def test_latencies_are_those_to_the_first_and_between_neighbouring_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([0.0, 1.0, 3.0, 3.5, 6.0, 10.0])  # the request, then each event
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("mingc.server.metrics.time", clock)
    metrics = Metrics()
    audio = AudioDelta(samples=np.zeros(1, np.float32))
    text = TextDelta(text="a")

    async def answer() -> AsyncIterator[Event]:
        for event in (text, text, audio, text, text):
            yield event

    async def read() -> list[Event]:
        async with metrics.timer().measure(answer()) as events:
            return [event async for event in events]

    assert len(asyncio.run(read())) == 5
    found = {each.name: each.value for each in metrics.samples(ServiceLoad())}
    assert found["mingc_time_to_first_token_seconds_sum"] == 1.0
    assert found["mingc_time_to_first_audio_seconds_sum"] == 3.5
    assert found["mingc_inter_token_latency_seconds_count"] == 3
    assert found["mingc_inter_token_latency_seconds_sum"] == 2.0 + 3.0 + 4.0  # 1 → 3 → 6 → 10


@pytest.mark.parametrize(
    ("host", "is_open"),
    [("127.0.0.1", False), ("127.8.8.8", False), ("::1", False), ("localhost", False), ("0.0.0.0", True),
     ("::", True), ("gpu-host", True), ("10.0.0.1", True)],
)  # fmt: skip
def test_only_a_loopback_address_needs_no_key(
    host: str, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(None, {})
    create_app(FakeService(), ServeOptions(host=host), keys)
    assert any("anyone who can reach" in text for text in caplog.messages) == is_open
    caplog.clear()
    create_app(FakeService(), ServeOptions(host=host), ApiKeys(None, {"MINGC_API_KEYS": "key"}))
    assert not caplog.messages


def test_kinds_of_lines_are_forgotten_when_there_are_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are formatted by their author must not fill the memory."""
    monkeypatch.setattr("mingc.server.logs.time.monotonic", lambda: 5.0)
    limit = RepetitionLimit()

    def passes(message: str) -> bool:
        return bool(limit.filter(logging.LogRecord("http", logging.WARNING, "", 0, message, (), None)))

    assert [passes("first") for _ in range(22)] == [True] * 20 + [False] * 2
    assert all(passes(f"line {index}") for index in range(999))
    assert not passes("first"), "1000 kinds are kept"
    assert passes("one more")
    assert passes("first")


def test_the_file_of_keys_is_looked_at_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at each request nor never."""
    now = 100.0
    monkeypatch.setattr("mingc.server.api_keys.time.monotonic", lambda: now)
    file = tmp_path / "keys"
    file.write_text("one\n")
    keys = ApiKeys(file, {})
    for number, (earlier, later) in enumerate([("one", "two"), ("two", "six")]):
        file.write_text(f"{later}\n")
        os.utime(file, (number, number))
        now += 0.9
        assert (keys.accepts(earlier), keys.accepts(later)) == (True, False)
        now += 0.2
        assert (keys.accepts(earlier), keys.accepts(later)) == (False, True), "earlier keys are gone"
    assert keys.accepts("  six ") and not keys.accepts(" ")
