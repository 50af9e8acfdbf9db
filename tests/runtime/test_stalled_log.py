"""The log of a real server whose stderr nobody reads, and stderr as JSON lines."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from mingc_command import ENVIRONMENT, REPOSITORY, mingc

from mingc.server.logs import LogFormat

QUEUE = 20_000
CHILD = """
import sys, warnings
from mingc.server import log_writer
from mingc.server.app import create_app
from mingc.server.lifecycle import serve
from mingc.server.logs import configure_logging
from mingc.server.options import ServeOptions
from fake_service import FakeService

log_writer._QUEUE_BYTES = int(sys.argv[2])
configure_logging("info", sys.argv[1])
print("starting", file=sys.stderr, flush=True)
warnings.warn("of two\\nlines")
app = create_app(FakeService(), ServeOptions(port=0, drain_s=0.2, shutdown_timeout_s=5))
serve(app, announce=lambda url: print(url, flush=True))
print("ended", file=sys.stderr)
"""
_REQUESTS = 600  # of about 200 bytes in the log: more than a pipe and the queue hold


@contextmanager
def serving(format: LogFormat) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, format, str(QUEUE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests' / 'support'}"},
    )
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], 60)[0], "the server does not start"
        url = process.stdout.readline().decode().strip()
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


def fill(client: httpx.Client) -> None:
    for number in range(_REQUESTS):
        client.get("/v1/models", headers={"x-request-id": f"{number:0100}"})


def metric(client: httpx.Client, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_server_whose_stderr_is_not_read_answers_and_ends() -> None:
    with serving("text") as (process, client):
        fill(client)
        assert client.get("/health").status_code == 200
        assert metric(client, "mingc_log_lines_dropped_total") > 0
        used = metric(client, 'mingc_limit_used{limit="log_bytes"}')
        assert 0.9 * QUEUE < used <= metric(client, 'mingc_limit_max{limit="log_bytes"}') == QUEUE
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_reader_that_returns_learns_how_many_lines_it_missed() -> None:
    with serving("json") as (process, client):
        fill(client)
        dropped = metric(client, "mingc_log_lines_dropped_total")
        process.send_signal(signal.SIGTERM)
        _, written = process.communicate(timeout=30)
    lines = written.decode().splitlines()
    counts = [int(found[1]) for line in lines if (found := re.search(r"(\d+) log lines were dropped", line))]
    assert dropped > 0 and 0 <= sum(counts) - dropped <= 3, "the lines of the shutdown may be dropped as well"
    answered = [line for line in lines if "/v1/models" in line]
    assert len(answered) == _REQUESTS - dropped
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    texts = [record["message"] for record in records]
    assert texts[0] == "starting" and texts[-1] == "ended"
    assert any("of two" in text and "lines" in text for text in texts[:3])
    assert {"time", "level", "logger", "message"} <= set.intersection(*(set(each) for each in records))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("nothing-here",), "nothing-here does not exist"),
        ((".", "--nonsense"), "--nonsense"),
        ((".", "--port", "x"), "--port"),
    ],
)
def test_errors_at_start_are_json_lines(words: tuple[str, ...], error: str, tmp_path: Path) -> None:
    done = mingc("serve", *words, "--log-format", "json")
    assert done.code in (1, 2)
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert any(error in record["message"] for record in records if record["level"] == "error")


def test_every_line_of_a_served_artifact_is_json_and_names_the_stages(
    eager_artifact: Path, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mingc", "serve", eager_artifact, "--port", "0", "--log-format", "json"],
            stdout=subprocess.PIPE,
            stderr=log,
            env=ENVIRONMENT,
        )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().decode().strip()
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    texts = [json.loads(line)["message"] for line in (tmp_path / "log").read_text().splitlines()]
    for stage in ("talker", "cfm", "audio_vae", "thinker", "vision_encoder", "audio_encoder"):
        assert any(text.startswith(f"{stage}: load engines: ") for text in texts)
    assert any(re.fullmatch(rf".* at {url}, ready in \d+\.\d s", text) for text in texts)
    manifest = json.loads((eager_artifact / "manifest.json").read_text())
    (build,) = re.findall(r"^mingc_build_info\{(.*)\} 1.0$", metrics, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', build))
    assert labels["artifact"] in manifest.values() and labels["model"] == manifest["model"]
    assert labels["torch"] == torch.__version__
    limits = dict(re.findall(r'^mingc_limit_max\{limit="(\w+)"\} (\S+)$', metrics, re.MULTILINE))
    assert limits.keys() == set(re.findall(r'^mingc_limit_used\{limit="(\w+)"\}', metrics, re.MULTILINE))
    assert {"requests", "connections", "body_bytes", "answer_bytes", "log_bytes", "chats", "chat_queue", "kv_pages",
            "preprocessing", "speech_slots", "speech_streams"} <= limits.keys()  # fmt: skip
    assert float(limits["requests"]) == 256
