"""Cold start of an artifact: `mingc serve` in a new process, the phases that it measures, and first requests.

Runs before the rest of a probe, so that the server can use as much of a GPU as it would alone.
"""

from __future__ import annotations

import http.client
import json
import re
import select
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mingc.console.serve_child import serve_child
from mingc.errors import ArtifactError, WorkerError
from mingc.probe.report import FirstRequest, StartPhase

INTERPRETER = "start the interpreter, read options"
_START_TIMEOUT_S = 1800.0  # the released weights from a cold disk, and their hashes
_ANSWER_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0
_TOKENS = 2
_TEXT = "Hello."


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdStart:
    """One start of a server. The phases add up to the time from the creation of the process to the open port; without
    phases it was not run, and `notes` say why.
    """

    phases: tuple[StartPhase, ...] = ()
    first_requests: tuple[FirstRequest, ...] = ()
    notes: tuple[str, ...] = ()


def measure_cold_start(
    artifact: Path,
    progress: Callable[[str], None],
) -> ColdStart:
    """Serve `artifact` on a free local port, send each kind of request twice, and stop the server."""
    progress("cold start")
    started = time.perf_counter()
    notes: list[str] = []
    first_requests: list[FirstRequest] = []
    with _server(artifact) as (child, stdout, log):
        try:
            document = _announced(child, stdout, log)
        except ArtifactError as error:
            return ColdStart(notes=(f"cold start is not run: mingc serve: {error.message}",))
        ready_s = time.perf_counter() - started
        disk_bytes = _disk_bytes(child.pid)
        progress("first requests")
        try:
            first_requests += _first_requests(document["url"])
        except WorkerError as error:
            notes.append(error.message)
    if disk_bytes is not None:
        notes.append(
            f"cold start: the server's main process read {disk_bytes / 1e9:.3f} GB from a disk until it was ready; "
            "reads of other ranks are not counted"
        )
    return ColdStart(
        phases=phases(document["startup_s"], ready_s),
        first_requests=tuple(first_requests),
        notes=tuple(notes),
    )


def phases(startup_s: Mapping[str, float], ready_s: float) -> tuple[StartPhase, ...]:
    """Put the time before the server's clock began in front of its phases: `ready_s` is the sum of all."""
    before_s = max(0.0, ready_s - sum(startup_s.values()))
    rows: list[StartPhase] = []
    for name, seconds in {INTERPRETER: before_s, **startup_s}.items():
        until_s = (rows[-1].until_s if rows else 0.0) + seconds
        rows.append(StartPhase(phase=name, seconds=round(seconds, 3), until_s=round(until_s, 3)))
    return tuple(rows)


@contextmanager
def _server(
    artifact: Path,
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]]:
    words = [str(artifact), "--host", "127.0.0.1", "--port", "0", "--drain-seconds", "0", "--json"]
    with (
        tempfile.TemporaryFile() as log,
        serve_child(words, stop_s=_STOP_TIMEOUT_S, log=log) as (child, stdout),
    ):
        yield child, stdout, log


def _announced(child: subprocess.Popen[bytes], stdout: IO[bytes], log: IO[bytes]) -> dict[str, Any]:
    """Read the line that the server prints when its port is open."""
    ready, _, _ = select.select([stdout], [], [], _START_TIMEOUT_S)
    line = stdout.readline() if ready else b""
    try:
        document: dict[str, Any] = json.loads(line)
        if not isinstance(document, dict) or "url" not in document:
            raise ValueError("no address")
    except ValueError:
        if ready:
            with suppress(subprocess.TimeoutExpired):  # `_server` stops it
                child.wait(_STOP_TIMEOUT_S)
        log.seek(0)
        written = log.read().decode(errors="replace")
        reasons = re.findall(r"^mingc: error: (.*)$", written, re.MULTILINE)
        reason = (
            reasons[0]
            if reasons
            else f"no address after {_START_TIMEOUT_S:.0f} s, or exit code {child.poll()}"
        )
        raise ArtifactError(reason, where="mingc serve") from None
    return document


def _disk_bytes(pid: int) -> int | None:
    """Bytes that a process has read from a disk, not from the page cache; None if unknown."""
    try:
        text = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^read_bytes: (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _first_requests(url: str) -> Iterator[FirstRequest]:
    """Send each kind of request that the model takes twice; milliseconds until the complete answer."""
    models = _request(f"{url}/v1/models", None)
    model = json.loads(models)["data"][0]
    bodies: dict[str, tuple[str, dict[str, Any]]] = {}
    if "text" in model["output_modalities"]:
        words = {"messages": [{"role": "user", "content": _TEXT}], "max_tokens": _TOKENS}
        bodies[f"chat, {_TOKENS} tokens"] = ("chat/completions", words)
    if "audio" in model["output_modalities"]:
        bodies[f"speech, {len(_TEXT)} characters"] = (
            "audio/speech",
            {"input": _TEXT, "response_format": "pcm"},
        )
    for name, (path, body) in bodies.items():
        milliseconds = []
        for _ in range(2):
            started = time.perf_counter()
            _request(f"{url}/v1/{path}", {"model": model["id"], **body})
            milliseconds.append(round(1e3 * (time.perf_counter() - started), 3))
        yield FirstRequest(request=name, first_ms=milliseconds[0], second_ms=milliseconds[1])


def _request(url: str, body: Mapping[str, Any] | None) -> bytes:
    """Return the body of the answer. The address is local, so proxy settings of the environment are ignored."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_TIMEOUT_S) as response:
            answer: bytes = response.read()
    except (OSError, http.client.HTTPException) as error:  # also when the server exits during the request
        detail = ""
        if isinstance(error, urllib.error.HTTPError):
            with suppress(OSError, http.client.HTTPException):
                detail = error.read(300).decode(errors="replace")
        raise WorkerError(f"the first request failed: {error} {detail}".strip(), where=url) from error
    return answer
