"""A client of an OpenAI-compatible server for whole answers, whose times do not count; those in `clients.py` do."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from mingc.errors import BenchError

_TIMEOUT_S, _LATER_TIMEOUT_S = 600.0, 30.0  # of an answer; after one that did not come
_ABOUT_TIMEOUT_S = 30.0  # of what a server says about itself
_MOST_BYTES = 200_000_000  # of an answer: 20 minutes of speech
_OTHER_SHAPES = (LookupError, TypeError, AttributeError, ValueError)
_ABSENT = (404, 405, 501)
_READ_ALOUD = {"en": "Read this sentence aloud: ", "zh": "请朗读这句话："}
_SPEECH = "/v1/audio/speech"


class AnswerError(BenchError):
    """A server refused a request, or answered with something else than the API says."""


class AbsentError(AnswerError):
    """A server has no such route."""


class Server:
    """A server at `url`, with or without `/v1`; the context manager closes its connections.

    Raises: BenchError for what is no address of a server, AnswerError when it does not name its models.

    Attributes:
        url: without the path of the API.
        model: the one that was asked for, or the first one.
        entry: what the list of models says about the first one.
    """

    def __init__(self, url: str, key: str = "", model: str | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
                raise ValueError("wanted http://HOST:PORT")
            self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
            self.key, headers = key, {"authorization": f"Bearer {key}"} if key else {}
            self._client = httpx.Client(
                base_url=self.url, timeout=_TIMEOUT_S, headers=headers, trust_env=False
            )
        except (ValueError, httpx.InvalidURL) as error:
            raise BenchError(
                f"this is no address of a server: {error}", where=url, fix="correct it, or OPENAI_API_KEY"
            ) from None
        self.entry: Mapping[str, Any] = {}
        try:
            self.entry = {**self.get("/v1/models")["data"][0]}
            self.model = model or "" + self.entry["id"]
        except (AnswerError, *_OTHER_SHAPES) as error:
            if model is None:
                self.close()
                why = error.message if isinstance(error, AnswerError) else f"{error!r}"
                fix = error.fix if isinstance(error, AnswerError) else "pass the address of an OpenAI API"
                raise AnswerError(f"/v1/models names no model: {why}", where=self.url, fix=fix) from None
            self.model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def about(self) -> dict[str, Any]:
        """What `/health` says, and the model; others than ours say nothing there, or OK."""
        try:
            found = self.get("/health")
        except AnswerError:
            found = {}
        return {**(found if isinstance(found, dict) else {}), "model": self.model}

    def metrics(self) -> str:
        """What `/metrics` says; empty where there is none."""
        try:
            return self._body("GET", "/metrics", timeout=_ABOUT_TIMEOUT_S).decode()
        except (AnswerError, UnicodeDecodeError):
            return ""

    def voices(self) -> list[str | None]:
        """Names of all voices; [None], the server's own choice, if it does not list them."""
        try:
            found = self.get("/v1/audio/voices")
        except AnswerError:
            return [None]
        names = found.get("voices") if isinstance(found, dict) else None
        if not isinstance(names, list) or not names:
            return [None]
        return [str(each.get("name") or each.get("id") if isinstance(each, dict) else each) for each in names]

    def speak(self, text: str, voice: str | None, language: str) -> tuple[bytes, float | None]:
        """The file in which `text` is spoken, and its seconds as the server counts them, where it does.

        A chat is asked to read it aloud where the server has no route for speech; `language` (en, zh) is the chat's.
        """
        chosen = {} if voice is None else {"voice": voice}
        wish = {"model": self.model, "input": text, "response_format": "wav", **chosen}
        try:
            try:
                return self._post(_SPEECH, json={**wish, "stream": False}), None
            except AnswerError as error:
                if isinstance(error, AbsentError) or "stream" not in error.message:
                    raise
                return self._post(_SPEECH, json=wish), None
        except AbsentError:
            if self._routes is not None:
                raise
        said = self._chat(
            _READ_ALOUD[language] + text, modalities=["text", "audio"], audio={"format": "wav", **chosen}
        )
        with self._shape():
            audio = said["choices"][0]["message"].get("audio") or {}
            if not audio.get("data"):
                raise AbsentError("the chat has no audio", where=self.url, fix="serve a model that speaks")
            counted = (said.get("usage") or {}).get("audio_seconds")
            return base64.b64decode(audio["data"]), None if counted is None else float(counted)

    def transcribe(self, sound: bytes, name: str) -> str:
        """Transcribe a file as the model hears it; the server recognizes the language."""
        found = self._post(
            "/v1/audio/transcriptions", files={"file": (name, sound)},
            data={"model": self.model, "response_format": "json", "temperature": "0"},
        )  # fmt: skip
        with self._shape():
            return str(self._json(found)["text"])

    def ask(self, text: str, media: Sequence[Mapping[str, Any]] = (), *, max_tokens: int = 128) -> str:
        """Answer greedily to media, in their order, and a text."""
        parts = [*media, {"type": "text", "text": text}]
        answer = self._chat(parts if media else text, max_tokens=max_tokens)
        with self._shape():
            return str(answer["choices"][0]["message"].get("content") or "")

    def get(self, path: str) -> Any:
        return self._json(self._body("GET", path, timeout=_ABOUT_TIMEOUT_S))

    def _chat(self, content: object, **fields: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        body = {"model": self.model, "messages": messages, "temperature": 0, **fields}
        return self._json(self._post("/v1/chat/completions", json=body))

    @property
    def _routes(self) -> Sequence[str] | None:
        return self.entry.get("routes")

    def _post(self, path: str, **arguments: Any) -> bytes:
        if self._routes is not None and path not in self._routes:
            raise AbsentError(
                f"the server lists no {path}", where=self.url, fix="serve an artifact that has it"
            )
        return self._body("POST", path, **arguments)

    def _body(self, method: str, path: str, **arguments: Any) -> bytes:
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
                f"the server does not answer {method} {path}: {str(error) or type(error).__name__}",
                where=self.url, fix="start it, or correct the address",
            ) from error  # fmt: skip
        if found.is_success:
            return bytes(data)
        why, fix = f"status {found.status_code} {data[:300].decode(errors='replace')}", "see the server's log"
        if found.status_code in (401, 403):
            fix = "set OPENAI_API_KEY: the server wants an API key"
        if found.has_redirect_location:
            why, fix = f"the server sends on to {found.headers['location']}", "pass that address"
        kind = AbsentError if found.status_code in _ABSENT else AnswerError
        raise kind(f"{method} {path}: {why}", where=self.url, fix=fix)

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
