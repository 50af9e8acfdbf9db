"""A client of an OpenAI-compatible server that speaks, listens and answers; one request at a time."""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from mingc.audit.sounds import Sound, read_sound
from mingc.errors import ConfigError, MingcError

Transcribe = Callable[[Sound], str]

_TIMEOUT_S = 600.0
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
        self._client = httpx.Client(base_url=self.url, timeout=_TIMEOUT_S, headers=headers, trust_env=False)
        try:
            entry = self._get("/v1/models")["data"][0]
            self.model = str(entry["id"])
        except (LookupError, TypeError) as error:
            raise AnswerError(
                "the list of models is empty or of another form", where=self.url, fix="name the server's base URL"
            ) from error  # fmt: skip
        self.sample_rate: int | None = entry.get("sample_rate") or None
        self.inputs: Sequence[str] | None = entry.get("input_modalities")

    def close(self) -> None:
        self._client.close()

    def voices(self) -> list[str | None]:
        """Names of all voices; [None], the server's own choice, if it does not list them."""
        try:
            found = self._get("/v1/audio/voices")
        except AnswerError:
            return [None]
        names = found.get("voices") if isinstance(found, dict) else None
        return [str(each) for each in names] if names else [None]

    def speak(self, text: str, voice: str | None, *, name: str, utterance: str, language: str) -> Sound:
        """Speak `text`; by a chat that is asked to read it aloud where the server has no route for speech."""
        wish: dict[str, Any] = {"model": self.model, "input": text, "response_format": "wav", "stream": False}
        if voice is not None:
            wish["voice"] = voice
        try:
            data, counted = self._speech(wish), None
        except AbsentError:
            sound = {"format": "wav"} | ({"voice": voice} if voice is not None else {})
            message = self._chat(_READ_ALOUD[language] + text, modalities=["text", "audio"], audio=sound)
            audio = message["choices"][0]["message"].get("audio") or {}
            if not audio.get("data"):
                raise AnswerError(
                    "the chat has no audio", where=self.url, fix="serve a model that speaks"
                ) from None
            data = base64.b64decode(audio["data"])
            counted = (message.get("usage") or {}).get("audio_seconds")
        return read_sound(data, name, utterance=utterance, text=text, counted_s=counted)

    def _speech(self, wish: dict[str, Any]) -> bytes:
        try:
            return self._post("/v1/audio/speech", json=wish).content
        except AbsentError:
            raise
        except AnswerError as error:
            if "stream" not in error.message:
                raise
        return self._post("/v1/audio/speech", json={k: v for k, v in wish.items() if k != "stream"}).content

    def transcribe(self, sound: Sound) -> str:
        """Transcribe a file as the model hears it; the server recognizes the language."""
        found = self._post(
            "/v1/audio/transcriptions",
            files={"file": (f"{Path(sound.name).name}", sound.data)},
            data={"model": self.model, "response_format": "json", "temperature": "0"},
        )
        return str(_json(found)["text"])

    def ask(self, text: str, media: Sequence[Mapping[str, Any]] = (), *, max_tokens: int = 128) -> str:
        """Answer greedily to media, in their order, and a text."""
        parts = [*media, {"type": "text", "text": text}]
        answer = self._chat(parts if media else text, max_tokens=max_tokens)
        return str(answer["choices"][0]["message"].get("content") or "")

    def _chat(self, content: object, **fields: Any) -> Any:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            **fields,
        }
        return _json(self._post("/v1/chat/completions", json=body))

    def _get(self, path: str) -> Any:
        return _json(self._checked("GET", path))

    def _post(self, path: str, **arguments: Any) -> httpx.Response:
        return self._checked("POST", path, **arguments)

    def _checked(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            found = self._client.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise AnswerError(
                f"{method} {path}: {error or type(error).__name__}",
                where=self.url,
                fix="see whether the server runs there",
            ) from error
        if found.is_success:
            return found
        kind = AbsentError if found.status_code in _ABSENT else AnswerError
        raise kind(
            f"{method} {path}: {found.status_code} {found.text[:300]}",
            where=self.url,
            fix="see the server's log",
        )


def _json(found: httpx.Response) -> Any:
    try:
        return found.json()
    except ValueError as error:
        raise AnswerError(
            f"{found.request.url.path} answered no JSON: {found.text[:100]!r}",
            where=str(found.request.url),
            fix="name the server's base URL",
        ) from error


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
                done = subprocess.run(
                    line if line != words else [*words, str(path)], capture_output=True, text=True, check=True
                )
            except (OSError, subprocess.CalledProcessError) as error:
                said = str(getattr(error, "stderr", None) or error).strip()[-300:]
                raise ConfigError(
                    f"{words[0]} failed: {said}", where="--transcriber", fix="try the command on one file"
                ) from error
        return done.stdout.strip()

    return run


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
    child = subprocess.Popen(
        [sys.executable, "-m", "mingc", "serve", target, "--port", "0", "--log-level", "warning"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        url = child.stdout.readline().strip()
        if not url:
            raise MingcError(
                f"mingc serve ended with {child.wait()}", where=target, fix="see its messages above"
            )
        with served(url) as server:
            yield server
    finally:
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
