"""The OpenAPI document of the server, made from the request structs and from structs that describe the responses.

The structs of responses are used only here; tests decode real responses with them, which keeps the document correct.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mingc import __version__
from mingc.server.http.request_schemas import ChatBody, SpeechBody

Json = dict[str, Any]


class ErrorObject(Struct, forbid_unknown_fields=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct, forbid_unknown_fields=True):
    """OpenAI's error."""

    error: ErrorObject


class ModelObject(Struct, forbid_unknown_fields=True):
    """The served model; `routes` are those that it can answer."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    input_modalities: list[str]
    output_modalities: list[str]
    routes: list[str]
    sample_rate: int


class ModelList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[ModelObject]


class VoiceList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    voices: list[str]
    default: str | None


class ReadyResponse(Struct, forbid_unknown_fields=True):
    status: Literal["ready", "not_ready", "draining", "stopping"]


class HealthResponse(Struct, forbid_unknown_fields=True):
    status: Literal["ready", "not_ready", "draining", "stopping"]
    model: str
    num_requests_running: int
    input_modalities: list[str]
    output_modalities: list[str]
    routes: list[str]
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    max_total_tokens: int | msgspec.UnsetType = msgspec.UNSET
    all_reduce: str | msgspec.UnsetType = msgspec.UNSET


class AnswerAudio(Struct, forbid_unknown_fields=True):
    """Speech of an answer; `data` is base64."""

    id: str
    data: str
    expires_at: int
    transcript: str


class AnswerMessage(Struct, forbid_unknown_fields=True):
    role: Literal["assistant"]
    content: str
    refusal: None
    audio: AnswerAudio | msgspec.UnsetType = msgspec.UNSET


class Choice(Struct, forbid_unknown_fields=True):
    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: Literal["stop", "length"]


class PromptTokensDetails(Struct, forbid_unknown_fields=True):
    cached_tokens: int


class ChatUsage(Struct, forbid_unknown_fields=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    audio_patches: int
    audio_seconds: float


class ChatCompletion(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: Annotated[list[Choice], Meta(min_length=1)]
    usage: ChatUsage
    timings_ms: dict[str, float]


_STRUCTS = (
    ChatBody,
    SpeechBody,
    ChatCompletion,
    ModelList,
    ModelObject,
    VoiceList,
    HealthResponse,
    ReadyResponse,
    ErrorResponse,
)
_ERROR: Json = {"$ref": "#/components/responses/error"}
_TEXT: Json = {"schema": {"type": "string"}}


@functools.cache
def openapi_document() -> bytes:
    """The document as JSON."""
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": "mingc", "version": __version__, "summary": "OpenAI-compatible chat and speech."},
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "responses": {"error": {"description": "An error.", "content": _json(ErrorResponse)}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
    return msgspec.json.encode(document)


def _paths() -> Json:
    chat = {**_json(ChatCompletion), "text/event-stream": {}}
    speech: Json = {name: {} for name in ("audio/wav", "audio/pcm", "audio/flac", "text/event-stream")}
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/chat/completions": {"post": _generation("Answer a conversation.", ChatBody, chat)},
        "/v1/audio/speech": {"post": _generation("Speak a text.", SpeechBody, speech)},
        "/v1/models": {"get": _list("The served model under each of its names.", _json(ModelList))},
        "/v1/models/{model}": {
            "get": {**_list("The served model under one name.", _json(ModelObject)), "parameters": [model]}
        },
        "/v1/audio/voices": {"get": _list("Voices.", _json(VoiceList))},
        "/health": {"get": _probe("Whether the server works.", HealthResponse)},
        "/ready": {"get": _probe("Whether to send requests here.", ReadyResponse)},
        "/metrics": {"get": _list("Prometheus metrics.", {"text/plain": _TEXT})},
        "/openapi.json": {
            "get": _list("This document.", {"application/json": {"schema": {"type": "object"}}})
        },
    }


def _generation(summary: str, body: type[Struct], content: Json) -> Json:
    statuses = ("400", "401", "404", "408", "413", "415", "500", "503")
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {
            "200": {"description": "The answer, whole or as a stream.", "content": content},
            **{status: _ERROR for status in statuses},
        },
    }


def _list(summary: str, content: Json) -> Json:
    return {
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": content},
            "401": _ERROR,
            "404": _ERROR,
        },
    }


def _probe(summary: str, body: type[Struct]) -> Json:
    content = _json(body)
    return {
        "summary": summary,
        "security": [{}],
        "responses": {
            "200": {"description": "Yes.", "content": content},
            "503": {"description": "Not ready, draining or stopping.", "content": content},
        },
    }


def _json(body: type[Struct]) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
