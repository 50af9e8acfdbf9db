"""The session object of OpenAI's realtime protocol: what `session.update` and `response.create` make of it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from fake_service import INFO, SPEECH_ONLY, TEXT_ONLY
from openai.types.realtime import RealtimeSessionCreateResponse
from pydantic import TypeAdapter

from mingc.errors import RequestError
from mingc.runtime.request import SamplingParams, SpeechParams
from mingc.server.options import ServeOptions
from mingc.server.realtime.session import (
    ResponseFields,
    Served,
    SessionSettings,
    default_settings,
    response_settings,
    session_object,
    transcription_request,
    update,
)

SERVED = Served(
    info=replace(INFO, aliases=("gpt-realtime",), max_model_len=32_768),
    options=ServeOptions(voice_aliases=("alloy=Lina",)),
    voices=("DB30", "Lina", "voice_12ab"),
)
FUNCTION = {
    "type": "function",
    "name": "get_weather",
    "description": "Wetter für <Ort>",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
SERVER_VAD = {
    "type": "server_vad",
    "threshold": 0.5,
    "prefix_padding_ms": 300,
    "silence_duration_ms": 500,
    "idle_timeout_ms": None,
    "create_response": True,
    "interrupt_response": True,
}
SEMANTIC_VAD = {
    "type": "semantic_vad",
    "eagerness": "auto",
    "create_response": True,
    "interrupt_response": True,
}
# The object of a new session, by hand.
DEFAULTS: dict[str, Any] = {
    "object": "realtime.session",
    "type": "realtime",
    "id": "sess_7f3a",
    "model": "ming-omni",
    "expires_at": 1795720000,
    "output_modalities": ["audio"],
    "instructions": "",
    "tools": [],
    "tool_choice": "auto",
    "max_output_tokens": "inf",
    "tracing": None,
    "prompt": None,
    "truncation": "auto",
    "include": None,
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24000},
            "transcription": None,
            "noise_reduction": None,
            "turn_detection": SERVER_VAD,
        },
        "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "DB30", "speed": 1.0},
    },
}


def at(path: str, value: object) -> dict[str, Any]:
    """The object that has `value` at a path: `a.b` → `{"a": {"b": value}}`."""
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def shown(settings: SessionSettings) -> dict[str, Any]:
    """The session object after JSON, which OpenAI's own type accepts and knows all of."""
    text = msgspec.json.encode(session_object(settings, "sess_7f3a", 1795720000))
    found: dict[str, Any] = json.loads(text)
    parsed = TypeAdapter(RealtimeSessionCreateResponse).validate_json(text, strict=True)
    assert set(parsed.model_extra or {}) <= {"parallel_tool_calls"}
    assert parsed.audio is not None and parsed.audio.input is not None and parsed.audio.output is not None
    for part in (parsed.audio, parsed.audio.input, parsed.audio.output, parsed.audio.output.format):
        assert part is not None and not part.model_extra
    return found


def updated(*changes: dict[str, Any]) -> dict[str, Any]:
    settings = default_settings(SERVED)
    for fields in changes:
        before = copy.deepcopy(fields)
        settings = update(settings, fields, SERVED)
        assert fields == before
    return shown(settings)


def expected(path: str, value: object) -> dict[str, Any]:
    """The defaults with another value at a path."""
    found = copy.deepcopy(DEFAULTS)
    *parents, key = path.split(".")
    place = found
    for parent in parents:
        place = place[parent]
    place[key] = value
    return found


def test_a_new_session_is_the_documented_object() -> None:
    assert shown(default_settings(SERVED)) == DEFAULTS
    assert shown(default_settings(SERVED, "gpt-realtime"))["model"] == "gpt-realtime"


@pytest.mark.parametrize(
    ("path", "given", "echo"),
    [
        ("type", "realtime", "realtime"),
        ("model", "gpt-realtime", "gpt-realtime"),
        ("output_modalities", ["text"], ["text"]),
        ("output_modalities", ["text", "audio"], ["audio"]),
        ("instructions", "Be short.", "Be short."),
        ("tools", [FUNCTION], [FUNCTION]),
        ("tool_choice", "none", "none"),
        ("max_output_tokens", 4096, 4096),
        ("max_output_tokens", 17.0, 17),
        ("truncation", "disabled", "disabled"),
        (
            "truncation",
            {"type": "retention_ratio", "retention_ratio": 0.8, "token_limits": {"post_instructions": 5000}},
            {"type": "retention_ratio", "retention_ratio": 0.8, "token_limits": {"post_instructions": 5000}},
        ),
        (
            "truncation",
            {"type": "retention_ratio", "retention_ratio": 1},
            {"type": "retention_ratio", "retention_ratio": 1.0},
        ),
        # accepted and ignored
        ("tracing", "auto", None),
        ("tracing", {"workflow_name": "w"}, None),
        ("prompt", None, None),
        ("include", ["item.input_audio_transcription.logprobs"], None),
        ("audio.input.noise_reduction", {"type": "near_field"}, None),
        # null means unchanged, where it does not switch off
        *((name, None, DEFAULTS[name]) for name in ("type", "model", "instructions", "tools", "tool_choice")),
        *((name, None, DEFAULTS[name]) for name in ("output_modalities", "max_output_tokens", "truncation")),
        ("audio", None, DEFAULTS["audio"]),
        ("audio.output.voice", None, "DB30"),
        ("audio.output.speed", 1, 1.0),
        ("audio.output.voice", "voice_12ab", "voice_12ab"),
        ("audio.output.voice", {"id": "Lina"}, "Lina"),
        ("audio.output.voice", "alloy", "alloy"),
        ("audio.output.format", {"type": "audio/pcmu"}, {"type": "audio/pcmu"}),
        ("audio.input.format", {"type": "audio/pcma"}, {"type": "audio/pcma"}),
        ("audio.input.format", {"type": "audio/pcm"}, {"type": "audio/pcm", "rate": 24000}),
        ("audio.input.format", {"rate": 24000}, {"type": "audio/pcm", "rate": 24000}),
        # `transcription` has no other keys, whatever model the client names
        ("audio.input.transcription", {"model": "gpt-4o-mini-transcribe"}, {"model": "ming-omni"}),
        ("audio.input.transcription", {}, {"model": "ming-omni"}),
        (
            "audio.input.transcription",
            {"model": "w", "language": "zh", "prompt": "ships"},
            {"model": "ming-omni", "language": "zh", "prompt": "ships"},
        ),
        # all defaults of turn detection are shown
        ("audio.input.turn_detection", None, None),
        ("audio.input.turn_detection", {"type": "semantic_vad"}, SEMANTIC_VAD),
        (
            "audio.input.turn_detection",
            {"type": "semantic_vad", "eagerness": "low", "model_version": "v2"},
            SEMANTIC_VAD | {"eagerness": "low"},
        ),
        ("audio.input.turn_detection", {"threshold": 0.7}, SERVER_VAD | {"threshold": 0.7}),
        ("audio.input.turn_detection", {"threshold": None}, SERVER_VAD),
        ("audio.input.turn_detection", {"type": "server_vad"}, SERVER_VAD),
        (
            "audio.input.turn_detection",
            {"idle_timeout_ms": 6000, "create_response": False},
            SERVER_VAD | {"idle_timeout_ms": 6000, "create_response": False},
        ),
    ],
)
def test_a_field_changes_itself_alone(path: str, given: object, echo: object) -> None:
    assert updated(at(path, given)) == expected(path, echo)


@pytest.mark.parametrize(
    ("path", "first", "then", "echo"),
    [
        ("instructions", "x", "", ""),
        ("tools", [FUNCTION], [], []),
        ("tools", [FUNCTION], [FUNCTION | {"name": "b"}], [FUNCTION | {"name": "b"}]),
        (
            "audio.input.turn_detection",
            {"threshold": 0.7},
            {"prefix_padding_ms": 0},
            {"prefix_padding_ms": 0},
        ),
        ("audio.input.turn_detection", {"idle_timeout_ms": 6000}, {"idle_timeout_ms": None}, {}),
        ("audio.input.transcription", {"language": "en"}, None, None),
        ("audio.input.transcription", {"language": "en"}, {"language": ""}, {"model": "ming-omni"}),
        (
            "audio.input.transcription",
            {"language": "en"},
            {"prompt": "p"},
            {"model": "ming-omni", "language": "en", "prompt": "p"},
        ),
        (
            "audio.output.format",
            {"type": "audio/pcmu"},
            {"type": "audio/pcm"},
            DEFAULTS["audio"]["output"]["format"],
        ),
        (
            "truncation",
            {"type": "retention_ratio", "retention_ratio": 0.5, "token_limits": {"post_instructions": 9}},
            {"retention_ratio": 0.25},
            {"type": "retention_ratio", "retention_ratio": 0.25, "token_limits": {"post_instructions": 9}},
        ),
        ("truncation", {"type": "retention_ratio", "retention_ratio": 0.5}, "auto", "auto"),
    ],
)
def test_objects_are_merged_key_by_key(path: str, first: object, then: object, echo: object) -> None:
    if path.endswith("turn_detection"):
        assert isinstance(first, dict) and isinstance(then, dict)
        echo = SERVER_VAD | first | then
    assert updated(at(path, first), at(path, then)) == expected(path, echo)


def test_another_type_of_turn_detection_starts_from_its_defaults() -> None:
    path = "audio.input.turn_detection"
    changes = [{"threshold": 0.9, "create_response": False}, {"type": "semantic_vad"}, {"eagerness": "high"}]
    found = updated(*(at(path, change) for change in changes))
    assert found == expected(path, SEMANTIC_VAD | {"eagerness": "high"})
    assert updated(at(path, {"type": "semantic_vad"}), at(path, {"type": "server_vad"})) == DEFAULTS
    # A part of what is switched off switches it on.
    assert updated(at(path, None), at(path, {"threshold": 0.1})) == expected(
        path, SERVER_VAD | {"threshold": 0.1}
    )


def test_what_is_not_set_is_not_shown_and_what_is_set_is() -> None:
    choice = {"type": "function", "name": "get_weather"}
    found = updated(
        {
            "tools": [FUNCTION],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low"},
        }
    )
    assert found == DEFAULTS | {
        "tools": [FUNCTION],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
    }


@pytest.mark.parametrize(
    ("path", "value", "code", "below", "says"),
    [
        ("type", "transcription", "unsupported_value", "", "'realtime'"),
        ("type", "other", "invalid_value", "", "'realtime'"),
        ("model", "gpt-5", "model_not_found", "", "'ming-omni'"),
        ("output_modalities", [], "invalid_value", "", "['audio']"),
        ("output_modalities", ["video"], "invalid_value", "[0]", "'audio', 'text'"),
        ("instructions", 3, "invalid_type", "", "a string"),
        ("tools", [{"type": "mcp", "server_label": "s"}], "unsupported_value", "[0].type", "functions"),
        ("tools", [{"type": "function"}], "missing_required_parameter", "[0].name", "session.tools[0].name"),
        ("tools", [FUNCTION, FUNCTION], "invalid_value", "[1].name", "get_weather"),
        ("tools", [FUNCTION | {"parameters": 3}], "invalid_type", "[0].parameters", "an object"),
        ("tools", [FUNCTION] * 129, "invalid_value", "", "128"),
        ("tools", [FUNCTION | {"description": "x" * 900_000}], "invalid_value", "", "800000 bytes"),
        ("tool_choice", "must", "invalid_value", "", "'required'"),
        ("tool_choice", "required", "invalid_value", "", "no function"),
        ("tool_choice", {"type": "function", "name": "f"}, "invalid_value", "", "'tools'"),
        ("max_output_tokens", 0, "invalid_value", "", "between 1 and"),
        ("max_output_tokens", 32_769, "invalid_value", "", "32768"),
        ("max_output_tokens", 1.5, "invalid_type", "", "an integer"),
        ("reasoning.effort", "most", "invalid_value", "", "'minimal'"),
        ("truncation", {"type": "retention_ratio"}, "missing_required_parameter", ".retention_ratio", ""),
        (
            "truncation",
            {"type": "retention_ratio", "retention_ratio": 2},
            "invalid_value",
            ".retention_ratio",
            "1",
        ),
        ("prompt", {"id": "pmpt_1"}, "unsupported_value", "", "'instructions'"),
        ("audio.input.format", {"type": "audio/ogg"}, "invalid_value", ".type", "'audio/pcmu'"),
        ("audio.input.format.rate", 16_000, "invalid_value", "", "24000"),
        ("audio.output.voice", "Nobody", "voice_not_found", "", "DB30, Lina"),
        ("audio.output.voice", {"id": "Nobody"}, "voice_not_found", "", "voice_12ab, alloy"),
        ("audio.output.speed", 1.5, "unsupported_value", "", "1"),
        ("audio.input.transcription.language", "xx", "unsupported_language", "", "'zh'"),
        ("audio.input.turn_detection.threshold", 2, "invalid_value", "", "between 0 and 1"),
        ("audio.input.turn_detection.eagerness", "low", "unknown_parameter", "", ""),
        ("audio.input.turn_detection.idle_timeout_ms", 10, "invalid_value", "", "5000"),
        ("audio.input.turn_detection.type", "none", "invalid_value", "", "'semantic_vad'"),
        ("audio", [], "invalid_type", "", "an object"),
        ("speech", 1, "unknown_parameter", "", ""),
        ("audio.output.voise", "x", "unknown_parameter", "", "'voice'"),
        # names of the beta
        ("modalities", ["text"], "unknown_parameter", "", "session.output_modalities"),
        ("voice", "DB30", "unknown_parameter", "", "session.audio.output.voice"),
        ("input_audio_format", "pcm16", "unknown_parameter", "", "session.audio.input.format"),
        ("turn_detection", {}, "unknown_parameter", "", "session.audio.input.turn_detection"),
        ("temperature", 0.8, "unknown_parameter", "", "response.temperature"),
    ],
)
def test_a_wrong_field_is_named_and_nothing_is_applied(
    path: str, value: object, code: str, below: str, says: str
) -> None:
    settings = update(default_settings(SERVED), {"instructions": "before"}, SERVED)
    before = shown(settings)
    with pytest.raises(RequestError) as found:
        update(settings, {"instructions": "after"} | at(path, value), SERVED)
    assert (found.value.code, found.value.param) == (code, f"session.{path}{below}")
    assert says in found.value.message
    assert shown(settings) == before


@pytest.mark.parametrize(
    ("info", "fields", "code"),
    [
        (TEXT_ONLY, {"output_modalities": ["audio"]}, "unsupported_modality"),
        (TEXT_ONLY, at("audio.input.turn_detection", {"type": "server_vad"}), "unsupported_modality"),
        (SPEECH_ONLY, at("audio.input.transcription", {}), "unsupported_modality"),
        (replace(INFO, has_tools=False), {"tools": [FUNCTION]}, "unsupported_parameter"),
    ],
)
def test_what_the_artifact_lacks_is_refused(info: Any, fields: dict[str, Any], code: str) -> None:
    served = replace(SERVED, info=info)
    with pytest.raises(RequestError) as found:
        update(default_settings(served), fields, served)
    assert found.value.code == code


def test_an_artifact_of_text_alone_has_a_session_of_text_alone() -> None:
    served = replace(SERVED, info=replace(TEXT_ONLY, default_voice=None))
    found = shown(default_settings(served))
    assert found["output_modalities"] == ["text"]
    assert found["audio"]["input"]["turn_detection"] is None
    assert "voice" not in found["audio"]["output"]


# Eagerness high, medium and auto, low.
@pytest.mark.parametrize(
    ("fields", "threshold", "padding_ms", "silence_ms"),
    [
        ({}, 0.5, 300, 500),
        ({"threshold": 0.25, "prefix_padding_ms": 100, "silence_duration_ms": 200}, 0.25, 100, 200),
        ({"type": "semantic_vad", "eagerness": "high"}, 0.5, 300, 300),
        ({"type": "semantic_vad", "eagerness": "medium"}, 0.5, 300, 600),
        ({"type": "semantic_vad", "eagerness": "auto"}, 0.5, 300, 600),
        ({"type": "semantic_vad", "eagerness": "low"}, 0.5, 300, 1200),
    ],
)
def test_turn_detection_has_rules(
    fields: dict[str, Any], threshold: float, padding_ms: int, silence_ms: int
) -> None:
    settings = update(default_settings(SERVED), at("audio.input.turn_detection", fields), SERVED)
    assert settings.turn_detection is not None
    rules = settings.turn_detection.rules
    assert (rules.threshold, rules.prefix_padding_ms, rules.silence_ms) == (threshold, padding_ms, silence_ms)
    assert rules.max_ms is None


@pytest.mark.parametrize(
    ("effort", "thinking"), [("none", False), ("minimal", False), ("low", True), ("high", True)]
)
def test_reasoning_switches_thoughts_on(effort: str, thinking: bool) -> None:
    settings = update(default_settings(SERVED), {"reasoning": {"effort": effort}}, SERVED)
    assert response_settings(settings, SERVED).request("r", ()).thinking is thinking


def test_a_response_without_fields_has_the_settings_of_the_session() -> None:
    session = update(
        default_settings(SERVED),
        {
            "tools": [FUNCTION | {"strict": None}],
            "max_output_tokens": 50,
            "audio": {"output": {"voice": "alloy"}},
        },
        SERVED,
    )
    settings = response_settings(session, SERVED)
    assert settings.session == session and settings.instructions is None and not settings.is_out_of_band
    request = settings.request("r", ())
    assert request.sampling == SamplingParams(max_tokens=50)
    assert request.speech == SpeechParams(voice="Lina"), "an alias is resolved"
    assert request.is_live
    # The form that the prompt has: OpenAI's nested one, keys in their order, nothing escaped.
    assert request.tools.tools[0].definition == (
        '{"type": "function", "function": {"name": "get_weather", "description": "Wetter für <Ort>", '
        '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}'
    )
    default = response_settings(default_settings(SERVED), SERVED).request("r", ())
    assert default.sampling.max_tokens == SamplingParams().max_tokens


def fields_of(**given: object) -> ResponseFields:
    return msgspec.convert(given, ResponseFields)


def test_the_fields_of_a_response_replace_those_of_the_session_for_it_alone() -> None:
    session = update(
        default_settings(SERVED),
        {"tools": [FUNCTION], "tool_choice": "required", "instructions": "Be short."},
        SERVED,
    )
    settings = response_settings(
        session,
        SERVED,
        fields_of(
            instructions="Greet.",
            output_modalities=["text"],
            tools=[],
            max_output_tokens=5,
            temperature=0.5,
            metadata={"client_event_id": "response_create_1"},
            conversation="none",
            parallel_tool_calls=False,
            reasoning={"effort": "high"},
        ),
    )
    request = settings.request("r", ())
    assert settings.instructions == settings.session.instructions == "Greet."
    assert request.speech is None and not request.is_live and request.thinking
    assert request.sampling == SamplingParams(max_tokens=5, temperature=0.5)
    assert (request.tools.tools, request.tools.choice, request.tools.is_parallel) == ((), "auto", False)
    assert settings.metadata == {"client_event_id": "response_create_1"} and settings.is_out_of_band
    assert session.instructions == "Be short." and session.tool_choice == "required"


@pytest.mark.parametrize(
    ("fields", "choice", "allowed"),
    [
        ({}, "required", ("get_weather",)),
        ({"tools": [FUNCTION, FUNCTION | {"name": "b"}]}, "required", ("get_weather",)),
        ({"tools": [FUNCTION | {"name": "b"}]}, "auto", None),
        ({"tools": []}, "auto", None),
        ({"tool_choice": "none"}, "none", None),
        ({"tools": [FUNCTION | {"name": "b"}], "tool_choice": "required"}, "required", None),
    ],
)
def test_a_choice_of_the_session_holds_for_other_tools_if_they_have_its_function(
    fields: dict[str, Any], choice: str, allowed: tuple[str, ...] | None
) -> None:
    named = {"type": "function", "name": "get_weather"}
    session = update(default_settings(SERVED), {"tools": [FUNCTION], "tool_choice": named}, SERVED)
    use = response_settings(session, SERVED, fields_of(**fields)).tools
    assert (use.choice, use.allowed) == (choice, allowed)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"audio": {"output": {"voice": "Nobody"}}}, "voice_not_found", "audio.output.voice"),
        ({"tools": [{"type": "mcp"}]}, "unsupported_value", "tools[0].type"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"output_modalities": 3}, "invalid_type", "output_modalities"),
    ],
)
def test_wrong_fields_of_a_response_are_named(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as found:
        response_settings(default_settings(SERVED), SERVED, fields_of(**fields))
    assert (found.value.code, found.value.param) == (code, f"response.{param}")


def test_metadata_has_the_limits_of_openai() -> None:
    largest = {f"{index:064}": "x" * 512 for index in range(16)}
    settings = default_settings(SERVED)
    assert response_settings(settings, SERVED, fields_of(metadata=largest)).metadata == largest
    for wrong in (largest | {"x": ""}, {"x" * 65: ""}, {"x": "y" * 513}):
        with pytest.raises(RequestError) as found:
            response_settings(settings, SERVED, fields_of(metadata=wrong))
        assert (found.value.code, found.value.param) == ("invalid_value", "response.metadata")


def test_a_transcript_is_asked_for_as_the_session_says() -> None:
    given = {"model": "w", "language": "zh-CN", "prompt": "ships"}
    settings = update(default_settings(SERVED), at("audio.input.transcription", given), SERVED)
    assert settings.transcription is not None
    request = transcription_request(settings.transcription, b"RIFF", "item_1")
    assert (request.language, request.topic) == ("Chinese", "ships")
    assert (request.audio, request.where, request.sampling.temperature) == (b"RIFF", "item_1", 0)
