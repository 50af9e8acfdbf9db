"""Compiles the tiny checkpoint, serves it, asks about a picture and a voice over HTTP, and saves the answer.

`make demo` runs it. The server is `mingc serve` in a process of its own; the export records no requests for
`mingc verify`, which would take half of its time.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What is in this picture, and what does the voice say?"
MAX_TOKENS = 48
# AOTInductor alone, the default of `mingc export`, takes twice the time: it compiles C++ for every engine.
BACKENDS = ("onnx", "aoti:cfm")
_START_S, _ANSWER_S, _STOP_S = 120.0, 300.0, 30.0
_PROGRESS_S = 10.0  # between lines where they are not overwritten


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("demo"), help="folder of the artifact and the answer"
    )
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "tests" / "data" / "tiny-ming")
    parser.add_argument(
        "--backend",
        action="append",
        help=f"compilers, as for mingc export (default: {' '.join(BACKENDS)}); `--backend aoti` takes twice as long",
    )
    parser.add_argument("--force", action="store_true", help="export again even if the artifact is there")
    given = parser.parse_args()
    if not (given.checkpoint / "config.json").is_file():
        sys.exit(f"demo: no checkpoint in {given.checkpoint}; pass --checkpoint FOLDER")
    _say("compile a tiny Ming, serve it, and ask it about a picture and a voice: about 2 minutes on 2 cores.")
    _say("its weights are random, so it answers gibberish; everything else is real.")
    given.output.mkdir(parents=True, exist_ok=True)
    artifact = given.output / "artifact"
    if given.force or not _is_current(artifact, given.checkpoint):
        export(given.checkpoint, artifact, tuple(given.backend or BACKENDS))
    with serving(artifact, given.output / "server.log") as url:
        answer = ask(url, given.checkpoint)
    (given.output / "transcript.txt").write_text(f"{QUESTION}\n\n{answer.text}\n", encoding="utf-8")
    with wave.open(str(given.output / "reply.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(answer.sample_rate)
        file.writeframes(answer.samples)
    spoken_s = len(answer.samples) / 2 / answer.sample_rate
    print(f"""
{answer.tokens} tokens, the first after {answer.first_text_s:.1f} s; {spoken_s:.1f} s of sound, the first after \
{answer.first_audio_s:.1f} s
  {given.output}/reply.wav         what it says
  {given.output}/transcript.txt    what it writes
  {artifact}          the compiled model
Next:
  .venv/bin/mingc serve {artifact}              an OpenAI-compatible server at http://127.0.0.1:8000
  .venv/bin/mingc bundle inspect {artifact}     what was compiled
  README.md                                     the same with the released weights""")


def _say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


def _is_current(artifact: Path, checkpoint: Path) -> bool:
    """Whether an earlier run left an artifact that is newer than code and checkpoint."""
    manifest = artifact / "manifest.json"
    sources = [*(ROOT / "mingc").rglob("*.py"), *(path for path in checkpoint.rglob("*") if path.is_file())]
    return manifest.is_file() and manifest.stat().st_mtime > max(path.stat().st_mtime for path in sources)


def export(checkpoint: Path, artifact: Path, backend: tuple[str, ...]) -> None:
    """Write the artifact. What torch and compilers print goes to `export.log` beside it."""
    log = artifact.with_name("export.log")
    _say(f"compiling for this CPU (details: {log})")
    with _stderr_to(log) as terminal:
        from mingc.errors import MingcError
        from mingc.export.plan import plan_export
        from mingc.export.recipe import ExportRecipe
        from mingc.export.run import Step, run
        from mingc.runtime.service.voice_registration import open_voices
        from mingc.verify.engine_run import run_engine

        started = shown = time.monotonic()

        def report(step: Step) -> None:
            nonlocal shown
            now = time.monotonic()
            if terminal.isatty():
                terminal.write(f"\rdemo: step {step.done} of {step.total}, {now - started:.0f} s \033[K")
            elif now - shown > _PROGRESS_S:
                shown = now
                terminal.write(f"demo: step {step.done} of {step.total}, {now - started:.0f} s\n")
            terminal.flush()

        try:
            recipe = ExportRecipe(
                checkpoint=checkpoint,
                output=artifact,
                backend=backend,
                batch_sizes=(1,),
                jobs=min(4, os.cpu_count() or 1),
                cache=artifact.with_name("engines"),
                force=True,
            )
            run(plan_export(recipe), run_engine, report, open_voices=open_voices)
        except MingcError as error:
            terminal.write(f"\ndemo: the export failed: {error}\n")
            sys.exit(error.exit_code)
        if terminal.isatty():
            terminal.write("\n")


@contextmanager
def _stderr_to(log: Path) -> Iterator[IO[str]]:
    """Send everything written to stderr, by this process and its children, to `log`; yields the terminal."""
    sys.stderr.flush()
    saved = os.dup(2)
    with log.open("wb") as stream, os.fdopen(saved, "w") as terminal:
        os.dup2(stream.fileno(), 2)
        try:
            yield terminal
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)


@contextmanager
def serving(artifact: Path, log: Path) -> Iterator[str]:
    """`mingc serve` on a free port; yields its address. SIGTERM ends it, and it must exit with 0."""
    words = ("serve", str(artifact), "--port", "0", "--drain-seconds", "0")
    # The server ends with its stdin, however this process ends.
    command = [sys.executable, "-m", "mingc.console.child_main", *words]
    pipe = subprocess.PIPE
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors) as server,
    ):
        assert server.stdout is not None
        try:
            _say("starting the server")
            url = server.stdout.readline().decode().strip()
            if not url:
                sys.exit(f"demo: the server did not start:\n{_tail(log)}")
            yield url
            server.send_signal(signal.SIGTERM)
            if server.wait(_STOP_S) != 0:
                sys.exit(f"demo: the server ended with code {server.returncode}:\n{_tail(log)}")
        finally:
            server.kill()


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-1000:].strip()


@dataclass(slots=True)
class Answer:
    """What has arrived; times in seconds after the request."""

    sample_rate: int
    text: str = ""
    samples: bytearray = field(default_factory=bytearray)
    tokens: int = 0
    first_text_s: float = 0.0
    first_audio_s: float = 0.0


def ask(url: str, checkpoint: Path) -> Answer:
    """Send a picture and a voice with the question; prints text as it arrives."""
    import httpx

    _say(f"asking: {QUESTION}")
    with httpx.Client(base_url=url, timeout=_ANSWER_S, trust_env=False) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]
        answer, started = Answer(sample_rate=model["sample_rate"]), time.monotonic()
        body = request(model["id"], checkpoint, model["sample_rate"])
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                sys.exit(f"demo: the server refused the request: {response.read().decode(errors='replace')}")
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take(answer, json.loads(line.removeprefix("data: ")), time.monotonic() - started)
    print()
    return answer


def request(model: str, checkpoint: Path, sample_rate: int) -> dict[str, Any]:
    """The body of the chat request, as any OpenAI client sends it."""
    clip = next((checkpoint / "talker" / "data").glob("**/*.wav"))
    picture = base64.b64encode(_picture()).decode()
    voice = base64.b64encode(clip.read_bytes()).decode()
    content = [
        {"type": "text", "text": QUESTION},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "input_audio", "input_audio": {"data": voice, "format": "wav"}},
    ]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16", "sample_rate": sample_rate},
        "max_tokens": MAX_TOKENS,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _take(answer: Answer, event: dict[str, Any], now_s: float) -> None:
    if "error" in event:
        sys.exit(f"demo: {event['error']['message']}")
    if event.get("usage"):
        answer.tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        if text := choice["delta"].get("content"):
            answer.first_text_s = answer.first_text_s or now_s
            answer.text += text
            # A model with random weights may write control characters.
            print("".join(filter(str.isprintable, text)), end="", flush=True)
        if audio := choice["delta"].get("audio"):
            answer.first_audio_s = answer.first_audio_s or now_s
            answer.samples += base64.b64decode(audio.get("data", ""))


def _picture() -> bytes:
    """A PNG of a red disc on blue."""
    import io

    from PIL import Image, ImageDraw

    image = Image.new("RGB", (96, 96), (60, 90, 255))
    ImageDraw.Draw(image).ellipse((16, 16, 80, 80), fill=(220, 40, 40))
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


if __name__ == "__main__":
    main()
