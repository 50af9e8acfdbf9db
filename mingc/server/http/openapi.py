"""The OpenAPI document of the server, made from the structs of its requests and responses."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from mingc import __version__
from mingc.server.error_objects import ErrorResponse
from mingc.server.http.forms import FORM
from mingc.server.http.pictures import ImagesResponse
from mingc.server.http.request_schemas import (
    CHAT_BODY,
    COMPLETION_BODY,
    DETOKENIZE_BODY,
    IMAGE_BODY,
    IMAGE_EDIT_BODY,
    NEW_VOICE_FORM,
    SPEECH_BODY,
    TOKENIZE_BODY,
    FunctionTool,
)
from mingc.server.http.response_schemas import (
    ChatCompletion,
    Detokenized,
    HealthResponse,
    ModelList,
    ModelObject,
    ReadyResponse,
    TextCompletion,
    TokenList,
    Version,
    VoiceDeleted,
    VoiceList,
    VoiceObject,
)
from mingc.server.http.transcriptions import TRANSCRIPTION_BODY, Transcription, VerboseTranscription

Json = dict[str, Any]


_STRUCTS = (
    CHAT_BODY,
    COMPLETION_BODY,
    SPEECH_BODY,
    IMAGE_BODY,
    IMAGE_EDIT_BODY,
    ImagesResponse,
    TRANSCRIPTION_BODY,
    TOKENIZE_BODY,
    DETOKENIZE_BODY,
    FunctionTool,
    ChatCompletion,
    TextCompletion,
    TokenList,
    Detokenized,
    Version,
    Transcription,
    VerboseTranscription,
    ModelList,
    ModelObject,
    VoiceList,
    NEW_VOICE_FORM,
    VoiceObject,
    VoiceDeleted,
    HealthResponse,
    ReadyResponse,
    ErrorResponse,
)
_ERROR: Json = {"$ref": "#/components/responses/error"}
_TEXT: Json = {"schema": {"type": "string"}}


@functools.cache
def openapi_document() -> bytes:
    """Write the document as JSON."""
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")
    document: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "mingc",
            "version": __version__,
            "summary": "OpenAI-compatible chat, speech and pictures.",
        },
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
    chat, text, pictures = (
        {**_json(each), "text/event-stream": {}} for each in (ChatCompletion, TextCompletion, ImagesResponse)
    )
    kinds = ("mpeg", "ogg", "aac", "flac", "wav", "pcm", "PCMU", "PCMA")
    speech: Json = {name: {} for name in (*(f"audio/{kind}" for kind in kinds), "text/event-stream")}
    either = [_schema(each)["schema"] for each in (Transcription, VerboseTranscription)]
    transcript: Json = {
        "application/json": {"schema": {"anyOf": either}},
        "text/plain": _TEXT,
        "text/vtt": _TEXT,
        "text/event-stream": {},
    }
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/chat/completions": {"post": _generation("Answer a conversation.", CHAT_BODY, chat)},
        "/v1/completions": {"post": _generation("Continue a text.", COMPLETION_BODY, text)},
        "/tokenize": {"post": _generation("Tokens of a prompt.", TOKENIZE_BODY, _json(TokenList))},
        "/detokenize": {"post": _generation("Text of tokens.", DETOKENIZE_BODY, _json(Detokenized))},
        "/version": {"get": _list("Version of mingc.", _json(Version))},
        "/v1/audio/speech": {"post": _generation("Speak a text.", SPEECH_BODY, speech)},
        "/v1/images/generations": {
            "post": _generation("Draw pictures.", IMAGE_BODY, pictures, others=("507",))
        },
        "/v1/images/edits": {
            "post": _generation(
                "Change a picture.", IMAGE_EDIT_BODY, pictures, body_type=FORM, others=("507",)
            )
        },
        "/v1/audio/transcriptions": {
            "post": _generation("Transcribe speech.", TRANSCRIPTION_BODY, transcript, body_type=FORM)
        },
        "/v1/audio/translations": {
            "post": {"summary": "Refused.", "responses": {"400": _ERROR, "401": _ERROR}}
        },
        "/v1/models": {"get": _list("The served model under each of its names.", _json(ModelList))},
        "/v1/models/{model}": {
            "get": {**_list("The served model under one name.", _json(ModelObject)), "parameters": [model]}
        },
        "/v1/audio/voices": {
            "get": _list("Voices.", _json(VoiceList)),
            "post": _generation(
                "Add a voice.", NEW_VOICE_FORM, _json(VoiceObject), body_type=FORM, others=("409", "507")
            ),
        },
        "/v1/audio/voices/{voice}": {
            "delete": {
                **_list("Remove a voice that was added.", _json(VoiceDeleted), others=("400", "403")),
                "parameters": [{**model, "name": "voice"}],
            }
        },
        "/health": {"get": _probe("Whether the server works.", HealthResponse)},
        "/ready": {"get": _probe("Whether to send requests here.", ReadyResponse)},
        "/metrics": {"get": _list("Prometheus metrics.", {"text/plain": _TEXT})},
        "/openapi.json": {
            "get": _list("This document.", {"application/json": {"schema": {"type": "object"}}})
        },
    }


def _generation(
    summary: str,
    body: type[Struct],
    content: Json,
    *,
    body_type: str = "application/json",
    others: Sequence[str] = (),
) -> Json:
    statuses = (
        "400",
        "401",
        *(("403",) if body_type == FORM else ()),
        "404",
        "408",
        "413",
        "415",
        "500",
        "503",
        *others,
    )
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {body_type: _schema(body)}},
        "responses": {
            "200": {"description": "The answer, whole or as a stream.", "content": content},
            **{status: _ERROR for status in statuses},
        },
    }


def _list(summary: str, content: Json, *, others: Sequence[str] = ()) -> Json:
    return {
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": content},
            **{status: _ERROR for status in ("401", "404", *others)},
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
    return {"application/json": _schema(body)}


def _schema(body: type[Struct]) -> Json:
    return {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
