"""`mingc bench` against servers that answer nonsense, end early or vanish: every one is named, nothing is lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from stand_in_server import stand_in

from mingc.bench import bench as module
from mingc.bench.bench import bench
from mingc.bench.options import BenchOptions
from mingc.bench.records import BenchFile
from mingc.bench.report import report
from mingc.console.report_page import to_markdown
from mingc.errors import BenchError, MingcError

MODELS = b'{"data": [{"id": "m"}]}'
CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
STREAM = "text/event-stream"


def answer(body: bytes, kind: str = "application/json", status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{more}connection: close\r\n\r\n".encode() + body


def events(*found: Any) -> bytes:
    return answer(b"".join(b"data: %s\n\n" % (each if isinstance(each, bytes) else json.dumps(each).encode())
                           for each in found), STREAM)  # fmt: skip


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, **more}]}


GOOD = events(said("a"), said("b", finish_reason="length"), b"[DONE]")


@contextmanager
def scripted(routes: dict[str, bytes | Callable[[], bytes]]) -> Iterator[str]:
    """A server that answers each path with these bytes, and other paths with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            found = routes.get(self.path, answer(b"", status="404 Not Found"))
            self.wfile.write(found if isinstance(found, bytes) else found())
            self.close_connection = True

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def measure(url: str, **options: Any) -> BenchFile:
    given: dict[str, Any] = {"paths": ("text",), "concurrency": (1,), "rounds": 2, "repeats": 1, "tokens": 4}
    asked = BenchOptions(**{**given, "words": 10, "picture": 16, "clip": 0.5, **options})
    return bench((url,), asked, lambda *_: None, command="mingc bench")


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ({"/v1/models": answer(b"", status="307 Moved", more="location: /v2/models\r\n")}, "sends on to /v2/models"),
        ({"/v1/models": answer(b"<html>")}, "names no model"),
        ({"/v1/models": answer(b'{"data": [{"id": 3}]}')}, "names no model"),
        ({"/v1/models": answer(b'{"data": []}')}, "names no model"),
        ({}, "names no model"),
        ({"/v1/models": answer(b"", status="403 Forbidden")}, "API key"),
        ({"/v1/models": b"garbage\r\n\r\n"}, "does not answer"),
    ],
)  # fmt: skip
def test_an_address_that_is_no_api_is_named(routes: dict[str, bytes], words: str) -> None:
    with scripted(routes) as url, pytest.raises(BenchError, match=words):
        measure(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:none", "http://127.0.0.1:99999", "http://[::1", "http://"])
def test_no_address_is_named(url: str) -> None:
    with pytest.raises(BenchError, match="address"):
        measure(url)


@pytest.mark.parametrize(
    ("path", "given", "words"),
    [
        ("text", events(said("a"), b"{"), "another shape|not JSON|truncated"),
        ("text", events(said("a"), said("b")), "ended before"),  # neither its last chunk nor [DONE]
        ("text", events({**said("a"), "usage": {"completion_tokens": "4"}}, b"[DONE]"), "another shape"),
        ("text", events({**said("a"), "usage": {"prompt_tokens_details": 3}}, b"[DONE]"), "another shape"),
        ("text", events({**said("a"), "timings_ms": {"preprocessing": "soon"}}, b"[DONE]"), "another shape"),
        ("text", events(said("a", finish_reason=7), b"[DONE]"), "another shape"),
        ("text", events(b"[DONE]"), "no text"),
        ("text", answer(b"<h1>It works</h1>", "text/html"), "text/html"),
        ("speech", answer(b"<h1>It works, it works</h1>", "text/html"), "text/html"),
        ("speech-stream", answer(b"\xff\xfb\x90" + bytes(999), "audio/mpeg"), "audio/mpeg"),
        ("speech", answer(b"RIFF\0\0\0\0WAVEfmt \xff\xff\xff\x7f" + bytes(999), "audio/wav"), "without samples"),
        ("text", answer(b"", status="302 Found", more="location: /login\r\n"), "sends on to /login"),
        ("text", b"", "disconnected|closed"),
        ("text", answer(b"abc", more="content-length: 9\r\n"), "closed"),
    ],
)  # fmt: skip
def test_an_answer_that_is_wrong_is_named(path: str, given: bytes, words: str) -> None:
    routes: dict[str, bytes | Callable[[], bytes]] = {
        "/v1/models": answer(MODELS),
        SPEECH if path.startswith("speech") else CHAT: given,
    }
    with scripted(routes) as url, pytest.raises(BenchError, match=words):
        measure(url, paths=(path,))


def test_what_a_server_says_beside_its_answers_may_be_anything() -> None:
    routes: dict[str, bytes | Callable[[], bytes]] = {
        "/v1/models": answer(MODELS),
        "/health": answer(b"OK", "text/plain"),
        "/metrics": answer(b"no { metrics =\n", "text/plain"),
        CHAT: GOOD,
    }
    with scripted(routes) as url:
        (run,) = measure(url).runs
    assert [each.error for each in run.samples] == ["", ""] and run.counters == {}


def test_a_server_that_fails_from_then_on_ends_the_measurement_and_what_was_measured_is_kept() -> None:
    """It answers the first load, and no more: the next one's warm-up has no answer."""
    served: list[int] = []

    def chat() -> bytes:
        served.append(1)
        return GOOD if len(served) <= 4 else answer(b"lost", status="500 Error")

    with scripted({"/v1/models": answer(MODELS), CHAT: chat}) as url:
        file = measure(url, concurrency=(1, 2))
    assert [(run.load.concurrency, len(run.samples)) for run in file.runs] == [(1, 2)] and len(served) == 6
    assert not file.is_complete and "The measurement ended early" in to_markdown(report(file))


@pytest.mark.parametrize("phase", ["fields", "warm-up", "counters"])
def test_ctrl_c_between_loads_keeps_what_was_measured(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[str]()

    def progress(done: int, total: int, step: str, seconds: float | None, /) -> None:
        if done == 1 and seconds is None and phase == "warm-up":
            raise KeyboardInterrupt
        steps.append(step)

    if phase == "fields":

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(module, "find_fields", interrupted)
    if phase == "counters":
        counts = iter([{}, {}, {}, None])

        def counters(_: Any) -> Any:
            found = next(counts)
            if found is None:
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(module, "_counters", counters)
    asked = BenchOptions(paths=("text",), concurrency=(1,), rounds=1, repeats=2, tokens=2, words=10)
    with stand_in() as (url, _):
        if phase == "fields":
            with pytest.raises(KeyboardInterrupt):
                bench((url,), asked, progress, command="")
            return
        file = bench((url,), asked, progress, command="")
    assert not file.is_complete and len(file.runs) == (2 if phase == "counters" else 1)
    assert msgspec.json.decode(msgspec.json.encode(file), type=BenchFile) == file


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fields": '{"audio": 3}'}, "--fields"),
        ({"rates": (5000.0,), "duration": 3600.0}, "18,000,000 requests"),
        ({"concurrency": (4096,), "rounds": 1000}, "4,096,000 requests"),
    ],
)
def test_loads_that_cannot_be_sent_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(MingcError, match=words):
        BenchOptions(**options)
