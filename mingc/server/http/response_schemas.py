"""JSON objects of responses: completions, chunks, events, lists, errors. Shapes only, no decisions."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass, field
from typing import TypedDict

from mingc.errors import MingcError, RequestError, ServeError
from mingc.runtime.request import Done, FinishReason, ServiceInfo, Usage
from mingc.server.http.printable import printable

Json = dict[str, object]
_AUDIO_KEPT_S = 0  # audio is not stored: `expires_at` is the time of creation


class ErrorBody(TypedDict):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


def encode_json(value: Json) -> bytes:
    """Compact UTF-8 JSON."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # An error may contain half of a surrogate pair from a client's key: escape it, as JSON does.
    return text.encode(errors="backslashreplace")


def sse(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


def error_body(error: BaseException) -> dict[str, ErrorBody]:
    """OpenAI's error object. mingc's errors show their message, request errors also their fix.

    Other errors show no details.
    """
    if not isinstance(error, MingcError):
        return _error("Internal server error; see the server log.", "server_error", None, "internal_error")
    if not isinstance(error, ServeError):
        return _error(error.message, "server_error", None, None)
    message, param = error.message, error.param
    if isinstance(error, RequestError):
        message = error.message if error.fix is None else f"{error.message}: {error.fix}"
        param = param or error.where  # preprocessing sets `where` to the path of the field
    return _error(message, error.error_type, param, error.code)


def _error(message: str, error_type: str, param: str | None, code: str | None) -> dict[str, ErrorBody]:
    shown = param if param is None else printable(param)
    return {"error": {"message": printable(message), "type": error_type, "param": shown, "code": code}}


def models_list(info: ServiceInfo, created: int) -> Json:
    return {"object": "list", "data": [model_object(info, created, name) for name in info.names]}


def model_object(info: ServiceInfo, created: int, name: str) -> Json:
    """The served model under one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "mingc",
        **modalities(info),
        "sample_rate": info.sample_rate,
    }


def modalities(info: ServiceInfo) -> Json:
    """Capabilities of the artifact: kinds of input and output, and the routes that run it."""
    inputs = {"text": True, "image": info.has_image, "audio": info.has_audio_input, "video": info.has_video}
    outputs = {"text": info.has_text, "audio": info.has_speech}
    routes = {"/v1/chat/completions": info.has_text, "/v1/audio/speech": info.has_speech}
    return {
        "input_modalities": [name for name, able in inputs.items() if able],
        "output_modalities": [name for name, able in outputs.items() if able],
        "routes": [name for name, able in routes.items() if able],
    }


def voices_list(info: ServiceInfo) -> Json:
    return {"object": "list", "voices": list(info.voices), "default": info.default_voice}


def chat_usage(usage: Usage) -> Json:
    """OpenAI's usage of a chat request (text tokens), with audio patches and seconds in fields of their own."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "audio_patches": usage.audio_patches,
        "audio_seconds": usage.audio_seconds,
    }


def speech_usage(usage: Usage) -> Json:
    """OpenAI's usage of a speech request; output tokens are audio patches."""
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.audio_patches,
        "total_tokens": usage.prompt_tokens + usage.audio_patches,
        "audio_seconds": usage.audio_seconds,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatResponseBuilder:
    """Builds the response objects of one chat request, which share id, model and time."""

    request_id: str
    model: str
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, *, text: str, audio: bytes | None, done: Done) -> Json:
        """The complete answer. `audio` is an encoded clip."""
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if audio is not None:
            message["audio"] = self._audio(data=base64.b64encode(audio).decode(), transcript=text)
        choice: Json = {"index": 0, "message": message, "logprobs": None, "finish_reason": done.finish_reason}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": chat_usage(done.usage),
            "timings_ms": done.timings_ms,
        }

    def role_chunk(self) -> Json:
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def text_chunk(self, text: str) -> Json:
        return self._chunk({"content": text})

    def audio_chunk(self, data: str, *, is_first: bool) -> Json:
        """Base64 of a part of the clip. Clients join the fields of all chunks, so the id is in the first one only."""
        return self._chunk({"audio": {"id": self._audio_id(), "data": data} if is_first else {"data": data}})

    def audio_end_chunk(self, transcript: str, *, is_first: bool) -> Json:
        """End of the audio: no data, the complete transcript. `is_first`: the clip is empty."""
        fields: Json = {"expires_at": _expires_at(), "transcript": transcript}
        return self._chunk({"audio": {"id": self._audio_id(), "data": "", **fields} if is_first else fields})

    def finish_chunk(self, done: Done) -> Json:
        return {**self._chunk({}, done.finish_reason), "timings_ms": done.timings_ms}

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": chat_usage(usage)}

    def _chunk(self, delta: Json, finish_reason: FinishReason | None = None) -> Json:
        choice: Json = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk: Json = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self.include_usage else chunk

    def _head(self, name: str) -> Json:
        return {"id": self.request_id, "object": name, "created": self.created, "model": self.model}

    def _audio(self, *, data: str, transcript: str) -> Json:
        return {"id": self._audio_id(), "data": data, "expires_at": _expires_at(), "transcript": transcript}

    def _audio_id(self) -> str:
        return "audio-" + self.request_id.removeprefix("chatcmpl-")


def _expires_at() -> int:
    return int(time.time()) + _AUDIO_KEPT_S


def speech_delta(data: str) -> Json:
    """`data`: base64 of a part of the clip."""
    return {"type": "speech.audio.delta", "audio": data}


def speech_done(usage: Usage) -> Json:
    return {"type": "speech.audio.done", "usage": speech_usage(usage)}
