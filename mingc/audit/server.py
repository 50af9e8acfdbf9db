"""A client of an OpenAI-compatible server that speaks, listens and answers; one request at a time."""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from mingc.audit.sounds import Sound, read_sound
from mingc.console.serve_child import serve_child
from mingc.errors import ConfigError, MingcError

Transcribe = Callable[[Sound], str]

_TIMEOUT_S, _LATER_TIMEOUT_S = 600.0, 30.0  # of an answer; after one that did not come
_MOST_BYTES = 200_000_000  # of an answer: 20 minutes of speech
_COMMAND_S, _MOST_PRINTED = 600.0, 100_000  # of a command that transcribes
_OTHER_SHAPES = (LookupError, TypeError, AttributeError, ValueError)
_ABSENT = (404, 405, 501)
_READ_ALOUD = {"en": "Read this sentence aloud: ", "zh": "请朗读这句话："}
_END_S = 60


class AnswerError(MingcError):
    """A server refused a request, or answered with something else than the API says."""


class AbsentError(AnswerError):
    """A server has no such route."""


class Server:
    """A server at a base URL, with or without `/v1`. The environment's `OPENAI_API_KEY` is sent as the API key.

    Raises: AnswerError when it does not list its models.

    Attributes:
        model: name of the first model.
        sample_rate: of its speech as it lists it; None: it does not say.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            self._client = httpx.Client(
                base_url=self.url, timeout=_TIMEOUT_S, headers=headers, trust_env=False
            )
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ConfigError(
                f"{self.url} cannot be asked: {error}",
                where="mingc audit",
                fix="correct it, or OPENAI_API_KEY",
            ) from error
        try:
            entry = self._get("/v1/models")["data"][0]
            self.model = str(entry["id"])
            self.sample_rate = int(entry.get("sample_rate") or 0) or None
        except _OTHER_SHAPES as error:
            raise AnswerError(
                "the list of models is empty or of another form", where=self.url, fix="name the server's base URL"
            ) from error  # fmt: skip
        self.inputs: Sequence[str] | None = entry.get("input_modalities")
        self._routes: Sequence[str] | None = entry.get("routes")

    def close(self) -> None:
        self._client.close()

    def voices(self) -> list[str | None]:
        """Names of all voices; [None], the server's own choice, if it does not list them."""
        try:
            found = self._get("/v1/audio/voices")
        except AnswerError:
            return [None]
        names = found.get("voices") if isinstance(found, dict) else None
        if not isinstance(names, list) or not names:
            return [None]
        return [str(each.get("name") or each.get("id") if isinstance(each, dict) else each) for each in names]

    def speak(self, text: str, voice: str | None, *, name: str, utterance: str, language: str) -> Sound:
        """Speak `text`; by a chat that is asked to read it aloud where the server has no route for speech."""
        wish: dict[str, Any] = {"model": self.model, "input": text, "response_format": "wav", "stream": False}
        if voice is not None:
            wish["voice"] = voice
        try:
            data, counted = self._speech(wish), None
        except AbsentError:
            if self._routes is not None:
                raise
            sound = {"format": "wav"} | ({"voice": voice} if voice is not None else {})
            message = self._chat(_READ_ALOUD[language] + text, modalities=["text", "audio"], audio=sound)
            with self._shape():
                audio = message["choices"][0]["message"].get("audio") or {}
                if not audio.get("data"):
                    raise AbsentError(
                        "the chat has no audio", where=self.url, fix="serve a model that speaks"
                    ) from None
                data = base64.b64decode(audio["data"])
                counted = (message.get("usage") or {}).get("audio_seconds")
                counted = None if counted is None else float(counted)
        return read_sound(data, name, utterance=utterance, text=text, counted_s=counted)

    def _speech(self, wish: dict[str, Any]) -> bytes:
        try:
            return self._post("/v1/audio/speech", json=wish)
        except AbsentError:
            raise
        except AnswerError as error:
            if "stream" not in error.message:
                raise
        return self._post("/v1/audio/speech", json={k: v for k, v in wish.items() if k != "stream"})

    def transcribe(self, sound: Sound) -> str:
        """Transcribe a file as the model hears it; the server recognizes the language."""
        found = self._post(
            "/v1/audio/transcriptions",
            files={"file": (f"{Path(sound.name).name}", sound.data)},
            data={"model": self.model, "response_format": "json", "temperature": "0"},
        )
        with self._shape():
            return str(self._json(found)["text"])

    def ask(self, text: str, media: Sequence[Mapping[str, Any]] = (), *, max_tokens: int = 128) -> str:
        """Answer greedily to media, in their order, and a text."""
        parts = [*media, {"type": "text", "text": text}]
        answer = self._chat(parts if media else text, max_tokens=max_tokens)
        with self._shape():
            return str(answer["choices"][0]["message"].get("content") or "")

    def _chat(self, content: object, **fields: Any) -> Any:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            **fields,
        }
        return self._json(self._post("/v1/chat/completions", json=body))

    def _get(self, path: str) -> Any:
        return self._json(self._checked("GET", path))

    def _post(self, path: str, **arguments: Any) -> bytes:
        if self._routes is not None and path not in self._routes:
            raise AbsentError(
                f"the server lists no {path}", where=self.url, fix="serve an artifact that has it"
            )
        return self._checked("POST", path, **arguments)

    def _checked(self, method: str, path: str, **arguments: Any) -> bytes:
        """The body of a good answer, as far as it ends in time and is no endless stream."""
        data, until = bytearray(), time.monotonic() + (self._client.timeout.read or 0)
        try:
            with self._client.stream(method, path, **arguments) as found:
                for piece in found.iter_bytes():
                    data += piece
                    if len(data) > _MOST_BYTES or time.monotonic() > until:
                        raise httpx.ReadTimeout(f"the answer does not end ({len(data)} bytes)")
        except httpx.HTTPError as error:
            if isinstance(error, httpx.TimeoutException):  # the next ones would hang as well
                self._client.timeout = httpx.Timeout(min(_TIMEOUT_S, _LATER_TIMEOUT_S))
            raise AnswerError(
                f"{method} {path}: {str(error) or type(error).__name__}",
                where=self.url,
                fix="see whether the server runs there",
            ) from error
        if found.is_success:
            return bytes(data)
        kind = AbsentError if found.status_code in _ABSENT else AnswerError
        raise kind(
            f"{method} {path}: {found.status_code} {data[:300].decode(errors='replace')}",
            where=self.url,
            fix="see the server's log",
        )

    def _json(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise AnswerError(
                f"the answer is no JSON: {data[:100]!r}", where=self.url, fix="name the server's base URL"
            ) from error

    @contextmanager
    def _shape(self) -> Iterator[None]:
        """Names an answer of another shape than the API's."""
        try:
            yield
        except _OTHER_SHAPES as error:
            raise AnswerError(
                f"the answer has another shape than OpenAI's: {error!r}", where=self.url,
                fix="name the server's base URL",
            ) from error  # fmt: skip


def is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def transcriber(choice: str) -> Transcribe:
    """What transcribes sounds: a server's URL, or a command that prints the text of the file named last or as `{}`."""
    if is_url(choice):
        return Server(choice).transcribe
    words = shlex.split(choice)
    if not words:
        raise ConfigError("--transcriber is empty", where="mingc audit", fix="give a URL or a command")

    def run(sound: Sound) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(sound.name).name
            path.write_bytes(sound.data)
            line = [each.replace("{}", str(path)) for each in words]
            try:
                return _printed(line if line != words else [*words, str(path)])
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{words[0]} failed: {error}", where="--transcriber", fix="try the command on one file"
                ) from error

    return run


def _printed(line: Sequence[str]) -> str:
    """What a command prints; it and what it started end with it. Raises: OSError, ValueError when it fails."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
        assert child.stdout is not None

        def end() -> None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(_COMMAND_S, end)
        timer.start()
        try:
            said = child.stdout.read(_MOST_PRINTED + 1)
            if len(said) > _MOST_PRINTED:
                raise ValueError(f"it prints more than {_MOST_PRINTED} bytes, a transcript is wanted")
            child.wait()
        finally:
            timer.cancel()
            end()
            child.wait()
            child.stdout.close()
        if child.returncode:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 300))
            why = log.read().decode(errors="replace").strip()
            raise ValueError(f"it ended with {child.returncode} within {_COMMAND_S:g} s: {why}")
    return said.decode(errors="replace").strip()


@contextmanager
def served(target: str) -> Iterator[Server]:
    """The server at a URL; for an artifact `mingc serve` in a child process, which ends with the block."""
    if is_url(target):
        server = Server(target)
        try:
            yield server
        finally:
            server.close()
        return
    with serve_child([target, "--port", "0", "--log-level", "warning"], stop_s=_END_S) as (child, stdout):
        url = stdout.readline().decode().strip()
        if not url:
            raise MingcError(
                f"mingc serve ended with {child.wait()}", where=target, fix="see its messages above"
            )
        with served(url) as server:
            yield server
