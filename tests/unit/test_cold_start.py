"""Cold start: the clock of a server, and the phases and first requests that `mingc probe` takes from one."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mingc.probe import cold_start
from mingc.probe.cold_start import INTERPRETER, measure_cold_start, phases
from mingc.runtime.service import startup_clock
from mingc.runtime.service.startup_clock import StartupClock

SERVER = """#!{python} -SE
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[1:]
assert words[2:4] == ["mingc.console.child_main", "serve"] and words[5:] == [
    "--host", "127.0.0.1", "--port", "0", "--drain-seconds", "0", "--json"], words
asked = []
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def reply(self, body, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        assert self.path == "/v1/models"
        modalities = {modalities!r}
        self.reply(json.dumps({{"data": [{{"id": "tiny", "output_modalities": modalities}}]}}).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        open({log!r}, "a").write(json.dumps([self.path, body]) + "\\n")
        if {status} == 0: os._exit(1)
        self.reply(b"refused" if {status} != 200 else b"answer", {status})
server = HTTPServer(("127.0.0.1", 0), Handler)
open({log!r}, "a").write(json.dumps([words[4], os.getpid()]) + "\\n")
startup = {{"import": 0.002, "load engines": 0.001, "other": 0.004}}
print(json.dumps({{"url": f"http://127.0.0.1:{{server.server_port}}", "startup_s": startup}}), flush=True)
server.serve_forever()
"""
FAILING = """#!{python} -SE
import sys
print("mingc: error: nothing to serve: cfm produces neither text nor speech", file=sys.stderr)
print("  fix: export more", file=sys.stderr)
sys.exit(1)
"""


def fake_python(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, **values: object) -> Path:
    """A program that stands where the interpreter of `mingc serve` would; its log."""
    script, log = folder / "python", folder / "log"
    script.write_text(text.format(python=sys.executable, log=str(log), **values), encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))
    return log


def test_nested_phases_add_up_to_the_time_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 7.0, 8.0, 20.0, 30.0, 31.0, 40.0, 42.0])
    monkeypatch.setattr(startup_clock, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = StartupClock()  # 0
    with clock.phase("outer"):  # 1 to 30
        with clock.phase("inner"):  # 3 to 7
            pass
        with pytest.raises(ValueError), clock.phase("failing"):  # 8 to 20
            raise ValueError
    with clock.phase("inner"):  # 31 to 40
        pass
    seconds = clock.seconds
    assert seconds == {"outer": 29 - 4 - 12, "inner": 4 + 9, "failing": 12, "other": 42 - 29 - 9}


def test_the_first_phase_is_the_time_before_the_servers_clock() -> None:
    rows = phases({"import": 2.0, "other": 0.5}, ready_s=3.25)
    assert [(row.phase, row.seconds, row.until_s) for row in rows] == [
        (INTERPRETER, 0.75, 0.75),
        ("import", 2.0, 2.75),
        ("other", 0.5, 3.25),
    ]


def test_a_server_is_started_asked_twice_for_each_kind_and_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(
        "http_proxy", "http://127.0.0.1:9"
    )  # a proxy does not reach this machine's own servers
    log = fake_python(monkeypatch, tmp_path, SERVER, modalities=["text", "audio"], status=200)
    steps: list[str] = []
    start = measure_cold_start(Path("some artifact"), steps.append)
    assert steps == ["cold start", "first requests"]
    assert [row.phase for row in start.phases] == [INTERPRETER, "import", "load engines", "other"]
    assert [row.seconds for row in start.phases[1:]] == [0.002, 0.001, 0.004]
    assert start.phases[0].seconds > 0 and start.phases[-1].until_s == pytest.approx(
        sum(row.seconds for row in start.phases), abs=2e-3
    )
    assert [row.request for row in start.first_requests] == ["chat, 2 tokens", "speech, 6 characters"]
    assert all(row.first_ms > 0 and row.second_ms > 0 for row in start.first_requests)
    written = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    (path, pid), *asked = written
    assert path == "some artifact"
    assert [each[0] for each in asked] == ["/v1/chat/completions"] * 2 + ["/v1/audio/speech"] * 2
    assert asked[0][1] == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello."}],
        "max_tokens": 2,
    }
    assert asked[3][1] == {"model": "tiny", "input": "Hello.", "response_format": "pcm"}
    assert all("read 0.0" in note for note in start.notes)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_dies_at_a_request_leaves_the_phases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_python(monkeypatch, tmp_path, SERVER, modalities=["audio"], status=0)
    start = measure_cold_start(Path("some"), lambda step: None)
    assert start.phases and not start.first_requests
    assert start.notes[0].startswith("the first request failed")


def test_a_request_that_fails_leaves_the_phases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_python(monkeypatch, tmp_path, SERVER, modalities=["audio"], status=503)
    start = measure_cold_start(Path("some"), lambda step: None)
    assert start.phases and not start.first_requests
    assert "503" in start.notes[0] and "refused" in start.notes[0]


def test_an_artifact_that_is_not_served_is_not_run_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_python(monkeypatch, tmp_path, FAILING)
    start = measure_cold_start(Path("some"), lambda step: None)
    assert not start.phases and not start.first_requests
    assert start.notes == (
        "cold start is not run: mingc serve: nothing to serve: cfm produces neither text nor speech",
    )


def test_bytes_from_the_disk_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "rchar: 9\nread_bytes: 4096\nwrite_bytes: 7\ncancelled_write_bytes: 0\n"
    monkeypatch.setattr(Path, "read_text", lambda path, **_: text if str(path) == "/proc/7/io" else "")
    assert cold_start._disk_bytes(7) == 4096 and cold_start._disk_bytes(8) is None


def test_the_server_is_started_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    class Child:
        def __init__(self, command: list[str], *, env: dict[str, str], **pipes: object) -> None:
            asked.append(command)
            assert "MINGC_API_KEYS" not in env and env["KEPT"] == "1"
            raise OSError("no process is started")

    monkeypatch.setenv("MINGC_API_KEYS", "secret")
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setattr(cold_start.subprocess, "Popen", Child)
    with pytest.raises(OSError, match="no process"):
        measure_cold_start(Path("some"), lambda step: None)
    ((interpreter, *rest),) = asked
    serve = ["-P", "-m", "mingc.console.child_main", "serve", "some"]
    options = ["--host", "127.0.0.1", "--port", "0", "--drain-seconds", "0", "--json"]
    assert interpreter == sys.executable and rest == [*serve, *options]


def test_only_what_the_model_gives_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.0123456, 1.0, 1.002, 5.0, 5.5, 6.0, 6.25])
    monkeypatch.setattr(cold_start.time, "perf_counter", lambda: next(now))
    asked: list[str] = []
    models: list[str] = []

    def request(url: str, body: object) -> bytes:
        if body is None:
            return json.dumps({"data": [{"id": "m", "output_modalities": models}]}).encode()
        asked.append(url)
        return b""

    monkeypatch.setattr(cold_start, "_request", request)
    models[:] = ["text"]
    (chat,) = cold_start._first_requests("http://x")
    assert (chat.first_ms, chat.second_ms) == (12.346, 2.0)
    assert asked == ["http://x/v1/chat/completions"] * 2
    models[:] = ["audio"]
    (speech,) = cold_start._first_requests("http://x")
    assert (speech.request, speech.first_ms, speech.second_ms) == ("speech, 6 characters", 500.0, 250.0)
    assert asked[2:] == ["http://x/v1/audio/speech"] * 2
    models[:] = []
    assert not [*cold_start._first_requests("http://x")]


def test_phases_are_rounded_to_milliseconds() -> None:
    rows = phases({"a": 0.12345, "b": 1.00049}, ready_s=1.0)
    assert [(row.phase, row.seconds, row.until_s) for row in rows] == [
        (INTERPRETER, 0.0, 0.0),  # not below zero, whatever the clocks say
        ("a", 0.123, 0.123),
        ("b", 1.0, pytest.approx(1.123, abs=0.0011)),
    ]
