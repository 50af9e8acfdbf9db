"""Demo: exports the tiny checkpoint, serves it, sends an image and an audio clip, and saves the answer.

Runs the commands a user would, each in its own process, and uses the server over HTTP only.
"""

from __future__ import annotations

import base64
import importlib.metadata
import io
import json
import os
import signal
import struct
import subprocess
import sys
import time
import wave
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import mingc
from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.manifest import FILE_NAME
from mingc.errors import ArtifactError, ConfigError, MingcError, WorkerError

if TYPE_CHECKING:
    import httpx

QUESTION = "What is in this picture, and what does the voice say?"
RANDOM_WEIGHTS = (
    "The tiny model has random weights: its text and speech are meaningless, but every step is real."
)
MAX_TOKENS = 48
_TINY = Path("tests", "data", "tiny-ming")
_START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0
_PICTURE_SIDE = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """Duration of one part of the export or of the answer."""

    stage: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """Files, sizes and durations of a demo run."""

    artifact: Path
    transcript: Path
    reply: Path
    tokens: int
    audio_patches: int
    audio_seconds: float
    sample_rate_hz: int
    note: str
    times: tuple[StageTime, ...]
    text: str = field(metadata={"shown": False})


@dataclass(slots=True)
class _Answer:
    """The answer received so far; times in seconds after the request was sent."""

    text: str = ""
    samples: bytearray = field(default_factory=bytearray)
    first_text_s: float | None = None
    first_audio_s: float | None = None
    total_s: float = 0.0
    finish: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)


def run_demo(output: Path, *, checkpoint: Path | None, again: bool) -> DemoReport:
    """Export if needed (`again`: always), serve, ask, write `reply.wav` and `transcript.txt` under `output`.

    Raises: ConfigError without a checkpoint, WorkerError when export or server fail.
    """
    try:
        import httpx
    except ImportError as error:
        raise ConfigError(
            "the demo needs httpx", where="mingc demo", fix="pip install 'mingc[serve]'"
        ) from error
    source = _find_checkpoint(checkpoint)
    _say(RANDOM_WEIGHTS)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the folder {output}: {error.strerror}",
            where="--output",
            fix="pass another folder",
        ) from error
    artifact = output / "artifact"
    times = [] if not again and _is_usable(artifact, source) else _export(source, artifact)
    started = time.monotonic()
    with _server(artifact, output / "server.log") as url:
        times.append(StageTime(stage="server start", seconds=round(time.monotonic() - started, 2)))
        with httpx.Client(base_url=url, timeout=_ANSWER_TIMEOUT_S, trust_env=False) as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]
            answer = _ask(client, model, _clip(source))
    reply, transcript = output / "reply.wav", output / "transcript.txt"
    _write_wave(reply, bytes(answer.samples), model["sample_rate"])
    transcript.write_text(f"{QUESTION}\n\n{answer.text}\n", encoding="utf-8")
    return DemoReport(
        artifact=artifact,
        transcript=transcript,
        reply=reply,
        tokens=answer.usage.get("completion_tokens", 0),
        audio_patches=answer.usage.get("audio_patches", 0),
        audio_seconds=round(len(answer.samples) / 2 / model["sample_rate"], 2),
        sample_rate_hz=model["sample_rate"],
        note=RANDOM_WEIGHTS,
        times=(*times, *_times(answer)),
        text=answer.text,
    )


def _times(answer: _Answer) -> Iterator[StageTime]:
    """Times measured by the client, then the server's own timings."""
    for stage, seconds in (
        ("first text", answer.first_text_s),
        ("first audio", answer.first_audio_s),
        ("complete answer", answer.total_s),
    ):
        if seconds is not None:
            yield StageTime(stage=stage, seconds=round(seconds, 3))
    for name, milliseconds in answer.finish.get("timings_ms", {}).items():
        yield StageTime(stage=f"server: {name.replace('_', ' ')}", seconds=round(milliseconds / 1000, 3))


def _say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


def _find_checkpoint(given: Path | None) -> Path:
    """The given folder, or the tiny checkpoint of the source tree."""
    places = [given] if given is not None else [_TINY, Path(mingc.__file__).parents[1] / _TINY]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise ConfigError(
        f"no checkpoint in {' or '.join(map(str, places))}",
        where="--checkpoint",
        fix="run from a clone of the repository, or pass a folder with config.json",
    )


def _is_usable(artifact: Path, source: Path) -> bool:
    """Whether an earlier run left an artifact of this mingc, this torch and this checkpoint."""
    try:
        made = open_artifact(artifact).manifest.fingerprint
    except ArtifactError:
        return False
    torch = importlib.metadata.version("torch").split("+")[0]
    # The version of a source tree does not change with its code: export again when code or checkpoint are newer.
    package = Path(mingc.__file__).parent
    inputs = [*package.rglob("*.py"), *(path for path in source.rglob("*") if path.is_file())]
    is_newer = (artifact / FILE_NAME).stat().st_mtime > max(path.stat().st_mtime for path in inputs)
    return made.mingc == mingc.__version__ and made.torch == torch and is_newer


def _export(source: Path, artifact: Path) -> list[StageTime]:
    """Export in a child process, whose progress goes to stderr."""
    jobs = min(4, os.cpu_count() or 1)
    _say(f"exporting {source} with {jobs} job(s); this takes a few minutes")
    options = ["--force", "--jobs", str(jobs), "--cache", str(artifact.parent / "engines"), "--json"]
    with _child("export", str(source), "--output", str(artifact), *options) as (child, stdout):
        document = stdout.read()
        code = child.wait()
    if code != 0:
        raise WorkerError(
            f"the export ended with code {code}", where=str(source), fix="see the messages above"
        )
    report = json.loads(document)
    compiled = [
        StageTime(stage=f"compile {graph['stage']}.{graph['graph']}", seconds=graph["compile_seconds"])
        for graph in report["graphs"]
    ]
    return [*compiled, StageTime(stage="complete export", seconds=round(report["seconds"], 1))]


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "mingc.console.child_main", *words]


@contextmanager
def _child(
    *words: str, errors: IO[bytes] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """`mingc WORDS` as a child, and its stdout; stderr goes to `errors`, or where ours goes.

    It is terminated when the block ends, and when this process ends.
    """
    with ExitStack() as stack:
        child = subprocess.Popen(
            _command(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        assert child.stdin is not None and child.stdout is not None
        stdout = stack.enter_context(child.stdout)
        stack.callback(_end, child, child.stdin)
        yield child, stdout


def _end(child: subprocess.Popen[bytes], parent_pipe: IO[bytes]) -> None:
    parent_pipe.close()
    try:
        child.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextmanager
def _server(artifact: Path, log: Path) -> Iterator[str]:
    """Serve on a free port; yields the address. SIGTERM ends the server, which must exit with 0."""
    words = ("serve", str(artifact), "--host", "127.0.0.1", "--port", "0", "--drain-seconds", "0")
    with log.open("wb") as errors, _child(*words, errors=errors) as (child, stdout):
        yield _address(stdout, log)
        child.send_signal(signal.SIGTERM)
        code = child.wait(_STOP_TIMEOUT_S)
        if code != 0:
            raise WorkerError(f"the server ended with code {code}", where=str(log), fix=_tail(log))
        _say("server stopped")


def _address(stdout: IO[bytes], log: Path) -> str:
    """The address that the server prints when it is ready."""
    import select

    ready, _, _ = select.select([stdout], [], [], _START_TIMEOUT_S)
    line = stdout.readline().decode().strip() if ready else ""
    if not line:
        raise WorkerError("the server did not start", where=str(log), fix=_tail(log))
    _say(f"serving at {line}")
    return line


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-1000:].strip() or "its log is empty"


def _ask(client: httpx.Client, model: dict[str, Any], clip: bytes) -> _Answer:
    """Send all media that the model accepts; print text as it arrives."""
    picture = base64.b64encode(_picture()).decode()
    content: list[dict[str, Any]] = [{"type": "text", "text": QUESTION}]
    if "image" in model["input_modalities"]:
        content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}})
    if "audio" in model["input_modalities"]:
        spoken = {"data": base64.b64encode(clip).decode(), "format": "wav"}
        content.append({"type": "input_audio", "input_audio": spoken})
    request: dict[str, Any] = {
        "model": model["id"],
        "messages": [{"role": "user", "content": content}],
        "modalities": model["output_modalities"],
        "max_tokens": MAX_TOKENS,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if "audio" in model["output_modalities"]:
        request["audio"] = {"format": "pcm16"}
    _say(f"asking with a {_PICTURE_SIDE}×{_PICTURE_SIDE} image and an audio clip: {QUESTION}")
    answer = _Answer()
    started = time.monotonic()
    with client.stream("POST", "/v1/chat/completions", json=request) as response:
        if response.status_code != 200:
            raise _refusal(response.read())
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                _take(answer, json.loads(line.removeprefix("data: ")), time.monotonic() - started)
    answer.total_s = time.monotonic() - started
    print(file=sys.stderr)
    return answer


def _take(answer: _Answer, event: dict[str, Any], now_s: float) -> None:
    if "error" in event:
        raise WorkerError(event["error"]["message"], where="the answer", fix="see server.log")
    answer.usage = event.get("usage") or answer.usage
    for choice in event["choices"]:
        delta = choice["delta"]
        if delta.get("content"):
            answer.first_text_s = now_s if answer.first_text_s is None else answer.first_text_s
            answer.text += delta["content"]
            print(_printable(delta["content"]), end="", file=sys.stderr, flush=True)
        if data := (delta.get("audio") or {}).get("data"):
            answer.first_audio_s = now_s if answer.first_audio_s is None else answer.first_audio_s
            answer.samples += base64.b64decode(data)
        if choice.get("finish_reason"):
            answer.finish = event


def _printable(text: str) -> str:
    """Text without control characters, which a model with random weights may generate."""
    return "".join(character for character in text if character.isprintable() or character == "\n")


def _refusal(body: bytes) -> MingcError:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return WorkerError(f"the server refused the request: {message}", where="/v1/chat/completions")


def _clip(checkpoint: Path) -> bytes:
    """A voice recording of the checkpoint, or one second of a falling tone."""
    voices = sorted((checkpoint / "talker").glob("data/**/*.wav"))
    if voices:
        return voices[0].read_bytes()
    import math

    rate = 16000
    tones = (math.sin(2 * math.pi * (440 - 200 * at / rate) * at / rate) for at in range(rate))
    buffer = io.BytesIO()
    _write_wave(buffer, struct.pack(f"<{rate}h", *(int(8000 * tone) for tone in tones)), rate)
    return buffer.getvalue()


def _picture() -> bytes:
    """A PNG of a red disc on a blue gradient."""
    side = _PICTURE_SIDE
    rows = bytearray()
    for y in range(side):
        rows.append(0)  # no filter
        for x in range(side):
            is_disc = (x - side / 2) ** 2 + (y - side / 2) ** 2 < (side / 3) ** 2
            rows += bytes((220, 40, 40) if is_disc else (2 * x, 2 * x, 255))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _write_wave(target: Path | io.BytesIO, samples: bytes, rate: int) -> None:
    """Write 16-bit mono samples."""
    with wave.open(str(target) if isinstance(target, Path) else target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples)
