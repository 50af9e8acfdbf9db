"""Parsing of request bodies: valid ones become typed values, errors name the field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
from fake_service import INFO, SPEECH_ONLY, TEXT_ONLY
from hypothesis import given
from hypothesis import strategies as st
from openai.types.audio import speech_create_params
from openai.types.chat import chat_completion_content_part_image_param as image_param
from openai.types.chat import completion_create_params
from openai.types.shared import ReasoningEffort

from mingc.errors import ConfigError, RequestError
from mingc.prompts.conversation import MediaPart, Part, TextPart, ThoughtPart, ToolCall, VideoParams
from mingc.runtime.request import (
    ChatRequest,
    CompletionRequest,
    Constraint,
    SamplingParams,
    ServiceInfo,
    SpeechParams,
)
from mingc.server.audio_format import AudioSpec
from mingc.server.error_objects import error_response
from mingc.server.http.body import MAX_COMMAS, MAX_MEDIA, LongString
from mingc.server.http.parsing import (
    ParsedSpeech,
    ParsedText,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_speech,
    parse_tokenize,
)
from mingc.server.http.request_schemas import CHAT_BODY, SPEECH_BODY
from mingc.server.options import ServeOptions

OPTIONS = ServeOptions()
HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "auto"}}
CLIP = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


def encode(body: object) -> bytes:
    """`body` as JSON; infinity becomes a number that float64 cannot hold."""
    return json.dumps(body).replace("Infinity", "1e400").encode()


def parsed_chat(info: ServiceInfo = INFO, **body: Any) -> ParsedText[ChatRequest]:
    return parse_chat(encode({"model": "ming-omni", "messages": HELLO, **body}), info, OPTIONS)


def chat(info: ServiceInfo = INFO, **body: Any) -> ChatRequest:
    return replace(parsed_chat(info, **body).request, request_id="")


def speech(info: ServiceInfo = INFO, **body: Any) -> ParsedSpeech:
    return parse_speech(encode({"input": "Hello.", **body}), info, OPTIONS)


def spoken(**audio: Any) -> dict[str, Any]:
    return {"modalities": ["text", "audio"], "audio": audio}


def test_defaults() -> None:
    call = chat()
    assert call.sampling == SamplingParams(max_tokens=2048, temperature=0.0, top_p=1.0, top_k=0)
    assert call.messages[0].parts == (TextPart(text="Hello"),)
    assert (call.speech, call.thinking, call.video) == (None, False, VideoParams())
    assert (parsed_chat().audio, parsed_chat().stream) == (None, False)


def test_all_sampling_fields() -> None:
    parsed = parsed_chat(
        max_completion_tokens=5, temperature=1, top_p=0.5, top_k=7, min_p=0.1, repetition_penalty=1.2,
        stop="END", seed=-1, ignore_eos=True, stream=True, stream_options={"include_usage": True}, thinking=True,
        video_fps=1.5, video_max_frames=8, video_min_pixels=1, video_max_pixels=2, video_total_pixels=3,
    )  # fmt: skip
    call = parsed.request
    assert call.sampling == SamplingParams(
        max_tokens=5, temperature=1.0, top_p=0.5, top_k=7, min_p=0.1, repetition_penalty=1.2,
        stop=("END",), ignore_eos=True, seed=(1 << 64) - 1,
    )  # fmt: skip
    assert (parsed.stream, parsed.include_usage, call.thinking) == (True, True, True)
    assert call.video == VideoParams(fps=1.5, max_frames=8, min_pixels=1, max_pixels=2, total_pixels=3)
    for value, expected in (
        ({}, False),
        ({"use_audio_in_video": False}, False),
        ({"use_audio_in_video": True}, True),
    ):
        assert chat(mm_processor_kwargs=value).video == VideoParams(use_audio=expected)


def test_fields_of_log_probabilities_penalties_bias_and_answers() -> None:
    call = chat(
        logprobs=True, top_logprobs=20, presence_penalty=-2, frequency_penalty=1.5, n=3.0,
        logit_bias={"5": -100, "007": 1, "9": 0},
    )  # fmt: skip
    assert call.sampling == SamplingParams(
        presence_penalty=-2.0, frequency_penalty=1.5, logit_bias=((5, -100.0), (7, 1.0)), num_logprobs=20
    )
    assert call.num_answers == 3
    assert chat(logprobs=True).sampling.num_logprobs == 0, "the sampled token's alone"
    nothing = {"n": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "presence_penalty": 0}
    assert chat(**nothing, frequency_penalty=0) == chat() == chat(**dict.fromkeys(nothing))


def test_an_answer_may_be_sent_back_as_it_was_received() -> None:
    answer = {"role": "assistant", "content": "a", "tool_calls": [], "function_call": None}
    chat(messages=[*HELLO, answer, *HELLO])
    assert chat(top_k=-1).sampling.top_k == 0, "off"
    for options in (
        {}, {"include_usage": False}, {"include_usage": None}, {"include_obfuscation": True},
        {"continuous_usage_stats": False},
    ):  # fmt: skip
        assert not parsed_chat(stream=True, stream_options=options).include_usage


TEXT = (TextPart(text="a"),)
HISTORIES: list[tuple[dict[str, Any], tuple[Part, ...]]] = [
    ({"role": "user", "content": "a", "id": "m1", "timestamp": 1.5, "name": "Ann", "metadata": {"x": [1]}}, TEXT),
    ({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}, TEXT),
    ({"role": "assistant", "content": "a", "reasoning": "b", "reasoning_details": [{"type": "x"}],
      "reasoning_content": "b", "thinking_blocks": [{}], "provider_specific_fields": {}, "annotations": [],
      "refusal": None, "tool_calls": None, "function_call": None, "audio": None, "name": "Bot"},
     (ThoughtPart(text="b"), *TEXT)),
    ({"role": "assistant", "content": "a", "audio": {"id": "audio-1"}}, TEXT),
    ({"role": "assistant", "content": "a", "audio": {"id": "x", "data": "AA==", "expires_at": 9, "transcript": "b"}},
     TEXT),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]}, TEXT),
    ({"role": "assistant", "content": None, "refusal": "a"}, TEXT),
    ({"role": "assistant", "content": [{"type": "thinking", "thinking": "b", "signature": "c"},
                                       {"type": "redacted_thinking", "data": "d"}, {"type": "reasoning"},
                                       {"type": "text", "text": "a"}]}, TEXT),
    ({"role": "assistant", "content": None}, ()),
    ({"role": "assistant"}, ()),
    ({"role": "assistant", "content": []}, ()),
    ({"role": "tool", "content": "a", "tool_call_id": "call_1"}, TEXT),
    ({"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "call_1", "name": "f"}, TEXT),
    ({"role": "tool", "content": []}, ()),
    ({"role": "function", "content": "a", "name": "f"}, TEXT),
    ({"role": "assistant", "content": "a", "tool_calls": [
        {"id": "call_1", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"b":1}'}}]},
     (*TEXT, ToolCall(name="f", arguments='{"b":1}'))),
    ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": {"b": "ü"}}},
     (ToolCall(name="f", arguments='{"b": "ü"}'),)),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}, {"function": {"name": "g"}}]},
     (ToolCall(name="f", arguments="{}"), ToolCall(name="g", arguments="{}"))),
]  # fmt: skip


@pytest.mark.parametrize(("message", "parts"), HISTORIES, ids=lambda value: str(value)[:60])
def test_a_history_may_have_what_servers_and_libraries_put_into_it(
    message: dict[str, Any], parts: tuple[Part, ...]
) -> None:
    assert chat(messages=[*HELLO, message, *HELLO]).messages[1].parts == parts


@pytest.mark.parametrize(
    ("url", "part", "body", "server", "limit"),
    [
        ({}, {}, {}, None, None),
        ({"detail": "high"}, {}, {}, None, None),
        ({"detail": "low"}, {}, {}, None, 512 * 512),
        ({"detail": "low", "max_pixels": 4096.0}, {}, {}, None, 4096),
        ({}, {"max_pixels": 9000}, {}, None, 9000),
        ({"detail": "low"}, {"max_pixels": 10**6}, {}, None, 512 * 512),
        ({}, {}, {"image_max_pixels": 8000}, None, 8000),
        ({"detail": "low"}, {}, {"image_max_pixels": 8000}, 7000, 7000),
        ({"detail": "high"}, {}, {"image_max_pixels": 10**9}, 7000, 7000),
    ],
)
def test_the_smallest_limit_of_an_image_counts(
    url: dict[str, Any], part: dict[str, Any], body: dict[str, Any], server: int | None, limit: int | None
) -> None:
    image = {"type": "image_url", "image_url": {"url": "a", **url}, "uuid": "b", **part}
    sent = {"messages": [{"role": "user", "content": [image, CLIP]}], "images": ["c"], **body}
    parsed = parse_chat(encode(sent), INFO, ServeOptions(max_image_pixels=server)).request
    of_all = min((each for each in (body.get("image_max_pixels"), server) if each), default=None)
    limits = [each.max_pixels for each in parsed.messages[0].parts if isinstance(each, MediaPart)]
    assert limits == [of_all, limit, None]


def test_fields_of_vllm_are_served_or_request_nothing() -> None:
    call = chat(stop_token_ids=[5, 7.0], min_tokens=3, max_tokens=4)
    assert call.sampling == SamplingParams(max_tokens=4, stop_token_ids=(5, 7), min_tokens=3)
    assert chat(min_tokens=4, max_tokens=4).sampling.min_tokens == 4
    assert chat(min_tokens=0, stop_token_ids=[], chat_template_kwargs={}) == chat()


def test_messages_keep_their_roles_in_order() -> None:
    """A developer's message counts as the system's, as with OpenAI."""
    roles = ("system", "developer", "user", "assistant", "user")
    messages = chat(messages=[{"role": role, "content": role} for role in roles]).messages
    assert [message.role for message in messages] == ["system", "system", "user", "assistant", "user"]
    assert [message.parts for message in messages] == [(TextPart(text=role),) for role in roles]


def test_parts_keep_their_order_and_path() -> None:
    video = {"type": "video_url", "video_url": {"url": "v.mp4"}}
    spoken_url = {"type": "audio_url", "audio_url": {"url": "a.wav"}}
    content = [IMAGE, {"type": "text", "text": "Hi"}, CLIP, video, spoken_url]
    (message,) = chat(messages=[{"role": "user", "content": content}]).messages
    where = "messages[0].content"
    assert message.parts == (
        MediaPart(kind="image", data="data:image/png;base64,AA==", where=f"{where}[0].image_url.url"),
        TextPart(text="Hi"),
        MediaPart(kind="audio", data="AAAA", where=f"{where}[2].input_audio.data", is_base64=True),
        MediaPart(kind="video", data="v.mp4", where=f"{where}[3].video_url.url"),
        MediaPart(kind="audio", data="a.wav", where=f"{where}[4].audio_url.url"),
    )


@pytest.mark.parametrize("length", [10, 100_000, 9_000_000])
@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_a_part_may_have_a_url_in_the_place_of_its_object(kind: str, length: int) -> None:
    """As older clients send it. Text that looks like such a part stays as it is."""
    text, url = f'"{kind}_url": "a", \\"{kind}_url": "b"', "data:;base64," + "A" * length
    field = f"{kind}_url"
    parts = [
        {"type": field, field: url},
        {"type": "text", "text": text},
        {"type": field, field: {"url": url}},
    ]
    (message,) = chat(messages=[{"role": "user", "content": parts}]).messages
    first, second, third = message.parts
    assert second == TextPart(text=text)
    assert isinstance(first, MediaPart) and isinstance(third, MediaPart)
    sent = [
        bytes(each.data.data).decode() if isinstance(each.data, LongString) else each.data
        for each in (first, third)
    ]
    assert sent == [url, url] and first.kind == kind


def test_media_lists_go_into_the_first_user_message() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Three"},
    ]
    turns = chat(messages=messages, images=["i"], audios=["a", "b"], videos=["v"]).messages
    kinds = [part.kind if isinstance(part, MediaPart) else part.text for part in turns[1].parts]
    assert kinds == ["image", "One", "audio", "audio", "video"]
    assert [len(turn.parts) for turn in turns] == [1, 5, 1, 1]
    params = [part.where for part in turns[1].parts if isinstance(part, MediaPart)]
    assert params == ["images[0]", "audios[0]", "audios[1]", "videos[0]"]


def test_empty_text_is_allowed_with_media() -> None:
    (message,) = chat(messages=[{"role": "user", "content": ""}], audios=["a"]).messages
    assert [type(part) for part in message.parts] == [MediaPart]


def test_speech_of_a_chat() -> None:
    sent = parsed_chat(**spoken(voice="Lina", format="pcm16", guidance=1.5), seed=3)
    assert sent.request.speech == SpeechParams(voice="Lina", guidance=1.5, seed=3)
    assert sent.audio == AudioSpec(format="pcm16", sample_rate=24000, source_rate=44100)
    faster = parsed_chat(**spoken(speed=2, sample_rate=16000.0, voice="Lina"))
    assert faster.audio == AudioSpec(format="wav", sample_rate=16000, source_rate=44100, speed=2.0)
    assert faster.request.speech == SpeechParams(voice="Lina", speech_lead=0), (
        "paced, it would be played out too early"
    )
    assert chat(**spoken(voice={"id": "Lina"}, seed=4), seed=3).speech == SpeechParams(voice="Lina", seed=4)
    plain = parsed_chat(modalities=["audio", "text"])
    assert plain.request.speech == SpeechParams(voice="DB30")
    assert plain.audio == AudioSpec(format="wav", sample_rate=44100, source_rate=44100)


def test_speech_request() -> None:
    call = speech(
        voice="Lina", response_format="pcm", instructions="slow", seed=1, speed=0.5, max_new_tokens=9
    )
    assert call.speech == SpeechParams(voice="Lina", instructions="slow", seed=1, max_steps=9, speech_lead=0)
    assert (call.text, call.delivery) == ("Hello.", "audio")
    assert call.audio == AudioSpec(format="pcm16", sample_rate=24000, source_rate=44100, speed=0.5)
    assert speech().speech.voice == "DB30"
    assert speech(sample_rate=44100, instructions="  ").speech.instructions is None


def test_numbers_of_speech_keep_their_names() -> None:
    given = {"guidance": 1.5, "sigma": 0.4, "temperature": 0.7}
    assert speech(**given, stream=True).speech == SpeechParams(voice="DB30", **given)
    assert chat(**spoken(**given), temperature=0.2).speech == SpeechParams(voice="DB30", **given)


@pytest.mark.parametrize("seed", [-(1 << 63), -1, 0, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])
def test_seeds_of_64_bits_are_accepted_and_differ(seed: int) -> None:
    for parsed in (chat(seed=seed).sampling.seed, speech(seed=seed).speech.seed):
        assert parsed is not None and (parsed - seed) % (1 << 64) == 0 and 0 <= parsed < 1 << 64


def test_the_longest_allowed_speech_is_accepted() -> None:
    options = ServeOptions(max_speech_characters=20, max_instructions_characters=10)
    for text, instructions in (("x" * 20, "y" * 10), ("字" * 20, None)):
        parsed = parse_speech(encode({"input": text, "instructions": instructions}), INFO, options)
        assert (parsed.text, parsed.speech.instructions) == (text, instructions)
    for field, value in (("input", "x" * 21), ("instructions", "y" * 11)):
        with pytest.raises(RequestError) as caught:
            parse_speech(encode({"input": "x", field: value}), INFO, options)
        assert caught.value.param == field


@pytest.mark.parametrize("lacking", ["image", "audio", "video"])
def test_media_that_the_model_cannot_take_are_refused_by_kind(lacking: str) -> None:
    flag = {"image": "has_image", "audio": "has_audio_input", "video": "has_video"}
    info = replace(INFO, **{flag[lacking]: False})
    for kind in flag:
        if kind != lacking:
            chat(info, **{f"{kind}s": ["a"]})
    with pytest.raises(RequestError) as caught:
        chat(info, **{f"{lacking}s": ["a"]})
    assert (caught.value.param, caught.value.code) == (f"{lacking}s[0]", "unsupported_modality")


def test_every_field_of_the_openai_client_is_known() -> None:
    """Fields that the client's types declare: none of them is an unknown parameter."""
    sent = {
        **get_type_hints(completion_create_params.CompletionCreateParamsNonStreaming),
        **get_type_hints(completion_create_params.CompletionCreateParamsStreaming),
    }
    assert {*sent} <= {*CHAT_BODY.__struct_fields__}
    assert {*get_type_hints(speech_create_params.SpeechCreateParams)} <= {*SPEECH_BODY.__struct_fields__}


@pytest.mark.parametrize("detail", get_args(get_type_hints(image_param.ImageURL)["detail"]))
def test_every_detail_of_the_openai_client_is_accepted(detail: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "a.png", "detail": detail}}
    (message,) = chat(messages=[{"role": "user", "content": [image]}]).messages
    assert [part.data for part in message.parts if isinstance(part, MediaPart)] == ["a.png"]


@pytest.mark.parametrize(
    "name", ["wav", "mp3", "mpeg", "x-wav", "wave", "WAV", "x-flac", "webm;codecs=opus", "vnd.wave", "", None]
)
def test_clips_of_every_container_are_accepted(name: str | None) -> None:
    clip = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": name}}
    (message,) = chat(messages=[{"role": "user", "content": [clip]}]).messages
    assert [type(part) for part in message.parts] == [MediaPart]


COUNT = ((1, 1 << 24), (0, (1 << 24) + 1))
PIXELS = ((1, 1 << 30), (0, (1 << 30) + 1))


@pytest.mark.parametrize(
    ("name", "ends", "beyond"),
    [
        ("temperature", (0, 2), (-0.01, 2.01)),
        ("top_p", (1e-6, 1), (0, 1.0001)),
        ("top_k", (-1, 1 << 24), (-2, (1 << 24) + 1)),
        ("min_p", (0, 1), (-0.01, 1.01)),
        ("repetition_penalty", (0.01, 10), (0.009, 10.1)),
        ("max_tokens", *COUNT),
        ("max_completion_tokens", *COUNT),
        ("seed", (-(1 << 63), (1 << 64) - 1), (-(1 << 63) - 1, 1 << 64)),
        ("video_fps", (1e-6, 1000), (0, 1000.5)),
        ("video_max_frames", *COUNT),
        ("video_min_pixels", *PIXELS),
        ("video_max_pixels", *PIXELS),
        ("video_total_pixels", *PIXELS),
        ("guidance", (0, 20), (-0.1, 20.1)),
        ("sigma", (0, 10), (-0.1, 10.1)),
        ("audio.temperature", (0, 2), (-0.01, 2.01)),
    ],
)
def test_numbers_are_accepted_up_to_both_ends_of_their_range(
    name: str, ends: tuple[float, float], beyond: tuple[float, float]
) -> None:
    send: Callable[..., object] = speech if name in ("guidance", "sigma", "audio.temperature") else chat
    field = name.removeprefix("audio.")
    for value in ends:
        send(**{field: value})
    for value in beyond:
        with pytest.raises(RequestError) as caught:
            send(**{field: value})
        assert (caught.value.param, caught.value.code) == (field, "invalid_value")


def schema_format(**fields: Any) -> dict[str, Any]:
    schema = {"name": "n", "schema": {"b": 1, "a": 2.5}, **fields}
    return {
        "type": "json_schema",
        "json_schema": {key: value for key, value in schema.items() if value is not None},
    }


CHAT_ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "Missing"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": "Hello"}, "messages", "an array"),
    ({"messages": ["Hello"]}, "messages[0]", "an object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "Missing"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "robot"),
    ({"messages": [{"role": "tool"}]}, "messages[0].content", "Missing"),
    ({"messages": [{"role": "tool", "content": [IMAGE]}]}, "messages[0].content[0]", "text only"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role", "a string"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "Missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "a string or an array"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "no parts"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages[0].content[0].text",
     "Missing"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
    ({"messages": [{"role": "user", "content": [{"type": "txt", "text": "x"}]}]}, "messages[0].content[0].type",
     "Did you mean 'text'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url",
     "Missing"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": ["x"]}]}]},
     "messages[0].content[0].image_url", "an object"),
    ({"messages": [{"role": "user", "content": [{**CLIP, "input_audio": {"data": "A", "format": 3}}]}]},
     "messages[0].content[0].input_audio.format", "a string"),
    ({"messages": [{"role": "user", "content": [{**IMAGE, "max_pixels": 0}]}]},
     "messages[0].content[0].max_pixels", "between 1"),
    ({"image_max_pixels": 1.5}, "image_max_pixels", "an integer"),
    ({"messages": [{"role": "system", "content": [IMAGE]}]}, "messages[0].content[0]", "text only"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio", "not kept"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
     "messages[0].tool_calls[0].function", "Missing"),
    ({"messages": [{"role": "assistant", "content": "a", "function_call": {}}]},
     "messages[0].function_call.name", "Missing"),
    ({"messages": [{"role": "system", "content": "x"}], "images": ["a"]}, "images[0]", "none"),
    ({"images": "a.png"}, "images", "an array"),
    ({"images": [1]}, "images[0]", "a string"),
    ({"model": "gpt-4o"}, "model", "gpt-4o"),
    ({"model": 4}, "model", "a string"),
    ({"max_tokens": 0}, "max_tokens", "between 1"),
    ({"max_tokens": 1.5}, "max_tokens", "an integer"),
    ({"max_tokens": True}, "max_tokens", "not a boolean"),
    ({"max_tokens": "5"}, "max_tokens", "an integer"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "send one"),
    ({"temperature": -0.1}, "temperature", "between 0"),
    ({"temperature": 1e400}, "temperature", "between 0"),
    ({"temperature": 10**400}, "temperature", "between 0"),
    ({"temperature": "hot"}, "temperature", "a number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_k": -2}, "top_k", "between -1"),
    ({"min_p": 2}, "min_p", "between 0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "between 0.01 and 10"),
    ({"repetition_penalty": 1e-45}, "repetition_penalty", "between 0.01 and 10"),
    ({"stop": 5}, "stop", "a string or an array"),
    ({"stop": ["a", 5]}, "stop[1]", "a string"),
    ({"stop": ["a", ""]}, "stop", "empty"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": "a" * 1001}, "stop", "the limit is 1000"),
    ({"stop": ["a", "a" * 1001]}, "stop[1]", "the limit is 1000"),
    ({"seed": 1 << 64}, "seed", "between"),
    ({"seed": 10**4200}, "seed", "between"),
    ({"temperature": 10**4200}, "temperature", "between 0"),
    ({"stream": "yes"}, "stream", "a boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "'stream': true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "Unknown"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "last chunk",
    ),
    ({"modalities": ["text", "video"]}, "modalities[1]", "video"),
    ({"modalities": ["audio"]}, "modalities", "text"),
    ({"modalities": "text"}, "modalities", "an array"),
    ({"modalities": []}, "modalities", "empty"),
    ({"audio": {"voice": "DB30"}}, "audio", "modalities"),
    (spoken(ref_text="Hi."), "audio.ref_text", "without 'audio.ref_audio'"),
    (spoken(ref_audio="AAAA", speaker_embedding=[1]), "audio.speaker_embedding", "send one"),
    (spoken(voice=["DB30"]), "audio.voice", "a string"),
    (spoken(format="pcm"), "audio.format", "'aac', 'flac', 'mp3', 'opus', 'pcm16', 'wav'"),
    (spoken(speed=4.5), "audio.speed", "between 0.25 and 4"),
    (spoken(speed=True), "audio.speed", "a number"),
    (spoken(sample_rate=7999), "audio.sample_rate", "between 8000 and 48000"),
    (spoken(sample_rate=44100, format="opus"), "audio.sample_rate", "8000, 12000, 16000, 24000 and 48000"),
    ({"min_tokens": -1}, "min_tokens", "between 0"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "more than 'max_tokens' (5)"),
    ({"min_tokens": 2049}, "min_tokens", "more than 'max_tokens' (2048)"),
    ({"stop_token_ids": 5}, "stop_token_ids", "an array"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "between 0"),
    ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1]", "an integer"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids[0]", "an integer"),
    ({"stop_token_ids": [1] * 17}, "stop_token_ids", "at most 16"),
    ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking", "a boolean"),
    ({"chat_template_kwargs": {"tone": "kind"}}, "chat_template_kwargs.tone", "Unknown"),
    ({"mm_processor_kwargs": {"fps": 1}}, "mm_processor_kwargs.fps", "Unknown"),
    ({"chat_template_kwargs": {"thinking": True}, "thinking": False}, "chat_template_kwargs.thinking", "contradicts"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "no text"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "ends before"),
    ({"echo": True}, "echo", "repeat"),
    ({"best_of": 2}, "best_of", "use 'n'"),
    ({"top_logprobs": 3}, "top_logprobs", "only allowed with 'logprobs': true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"logprobs": 3}, "logprobs", "a boolean"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "the id of a token"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "the id of a token"),
    ({"logit_bias": {"123456789012": 1}}, "logit_bias", "the id of a token"),
    ({"logit_bias": {"1": 100.5}}, "logit_bias.*", "between -100 and 100"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.*", "a number"),
    ({"logit_bias": [1]}, "logit_bias", "an object"),
    ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias", "an object of at most 300 items"),
    ({"chat_template": "{{ x }}"}, "chat_template", "the artifact's own"),
    ({"n": 2, **spoken()}, "n", "only one answer is spoken"),
    ({"n": 129}, "n", "between 1 and 128"),
    ({"n": True}, "n", "an integer"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_object', 'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
    ({"response_format": schema_format(schema=None)}, "response_format.json_schema.schema", "Missing"),
    ({"response_format": schema_format(schema=[])}, "response_format.json_schema.schema", "an object"),
    ({"response_format": schema_format(name=None)}, "response_format.json_schema.name", "Missing"),
    ({"response_format": schema_format(name="n" * 65)}, "response_format.json_schema.name", "64"),
    ({"response_format": schema_format(shema={})}, "response_format.json_schema.shema", "'schema'"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", "a string"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag", "Unknown"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "send one"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "beside 'response_format'"),
    (
        {"guided_regex": "a", "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        "guided_regex",
        "contradicts 'tool_choice'",
    ),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "contradicts 'guided_regex'"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "between -2 and 2"),
    ({"presence_penalty": -2.5}, "presence_penalty", "between -2 and 2"),
    ({"image_generation": {"size": "1024x1024"}}, "image_generation", "send ['image']"),
    ({"temprature": 1}, "temprature", "'temperature'"),
    ({"video_fps": 0}, "video_fps", "above 0"),
]  # fmt: skip

SPEECH_ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "Missing"),
    ({"input": ""}, "input", "empty"),
    ({"input": " \n "}, "input", "empty"),
    ({"input": ["a"]}, "input", "a string"),
    ({"input": "x" * 32_769}, "input", "32768"),
    ({"instructions": "x" * 1001}, "instructions", "1000"),
    ({"ref_text": "Hi."}, "ref_text", "without 'ref_audio'"),
    ({"ref_audio": "AAAA", "ref_text": "a" * 1001}, "ref_text", "1000"),
    ({"ref_audio": 5}, "ref_audio", "string"),
    ({"speaker_embedding": []}, "speaker_embedding", "empty"),
    ({"speaker_embedding": ["a"]}, "speaker_embedding[0]", "number"),
    ({"speaker_embedding": "[1, 2]"}, "speaker_embedding", "array"),
    (
        {"response_format": "ogg"},
        "response_format",
        "'aac', 'flac', 'mp3', 'opus', 'pcm', 'pcma', 'pcmu', 'wav'",
    ),
    ({"speed": 0.24}, "speed", "between 0.25 and 4"),
    ({"sample_rate": 96000}, "sample_rate", "between 8000 and 48000"),
    ({"sample_rate": 44101}, "sample_rate", "mp3"),
    ({"sample_rate": 16000, "response_format": "pcma"}, "sample_rate", "pcma has 8000 only"),
    ({"sample_rate": 24000.5}, "sample_rate", "an integer"),
    ({"timestamp_granularities": ["segment"]}, "timestamp_granularities", "'stream_format': 'sse'"),
    (
        {"timestamp_granularities": ["segment", "word"], "stream_format": "sse"},
        "timestamp_granularities[1]",
        '"word" are not known',
    ),
    ({"word_timestamps": True}, "word_timestamps", "times of words are not known"),
    ({"stream_format": "mp3"}, "stream_format", "'audio', 'sse'"),
    ({"stream": False, "stream_format": "sse"}, "stream", "requests a stream"),
    ({"task_type": "clone"}, "task_type", "no such input"),
    ({"max_new_tokens": 0}, "max_new_tokens", "between 1"),
    ({"vocie": "DB30"}, "vocie", "'voice'"),
    ({"model": "tts-1"}, "model", "tts-1"),
]


@pytest.mark.parametrize(("body", "param", "words"), CHAT_ERRORS, ids=lambda value: str(value)[:40])
def test_wrong_chat_bodies(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**body)
    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.status == (404 if caught.value.code == "model_not_found" else 400)
    assert caught.value.code


@pytest.mark.parametrize(("body", "param", "words"), SPEECH_ERRORS, ids=lambda value: str(value)[:40])
def test_wrong_speech_bodies(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        speech(**body)
    assert caught.value.param == param
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("send", "bodies"), [(chat, CHAT_ERRORS), (speech, SPEECH_ERRORS)], ids=["chat", "speech"]
)
def test_every_error_has_the_form_of_openai(
    send: Callable[..., object], bodies: list[tuple[dict[str, Any], str, str]]
) -> None:
    for body, param, _ in bodies:
        with pytest.raises(RequestError) as caught:
            send(**body)
        error = error_response(caught.value).error
        assert error.message and error.message.isprintable()
        assert (error.type, error.param) == ("invalid_request_error", param)
        assert re.fullmatch("[a-z_]+", error.code or "")


@pytest.mark.parametrize(
    "body", [{}, {"model": "gpt-4o"}, {"messages": [{"role": "user", "content": [IMAGE, CLIP]}]}, {"typo": 1}]
)
def test_an_artifact_without_a_thinker_says_so_on_every_chat(body: dict[str, Any]) -> None:
    with pytest.raises(
        RequestError, match=r"without its thinker: it cannot chat\. It serves /v1/audio/speech"
    ) as e:
        chat(SPEECH_ONLY, **body)
    assert (e.value.param, e.value.code) == ("model", "unsupported_model")


@pytest.mark.parametrize(
    "body", [{}, {"model": "gpt-4o"}, {"voice": ["absent"]}, {"input": None}, {"typo": 1}]
)
def test_an_artifact_without_a_talker_says_so_on_every_speech(body: dict[str, Any]) -> None:
    with pytest.raises(
        RequestError, match=r"without its talker: it cannot speak\. It serves /v1/chat/comp"
    ) as e:
        speech(TEXT_ONLY, **body)
    assert (e.value.param, e.value.code) == ("model", "unsupported_model")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (spoken(format="wav"), "modalities"),
        (spoken(voice="Lina"), "modalities"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"modalities": ["image", "audio"]}, "modalities"),
        ({"audio": {"voice": "DB30"}}, "audio"),
    ],
)
def test_an_artifact_without_a_talker_says_so_on_every_spoken_chat(body: dict[str, Any], param: str) -> None:
    """No error suggests to request audio, which the next one would refuse."""
    with pytest.raises(RequestError, match="without its talker: it cannot speak") as caught:
        chat(TEXT_ONLY, **body)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_modality")


def test_unsupported_modalities_are_refused() -> None:
    with pytest.raises(RequestError, match="without the stages that draw pictures"):
        chat(TEXT_ONLY, modalities=["text", "image"])
    with pytest.raises(RequestError, match=r"use \['text'\]\.$"):
        chat(TEXT_ONLY, modalities=["text", "video"])
    for part, kind in ((IMAGE, "image"), (CLIP, "audio")):
        with pytest.raises(RequestError, match=f"takes no {kind} input"):
            chat(TEXT_ONLY, messages=[{"role": "user", "content": [part]}])
    with pytest.raises(RequestError, match="takes no video input"):
        chat(TEXT_ONLY, videos=["a.mp4"])


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "line 1 column 1"),
        (b"{", "line 1 column 2"),
        (b'{"n": 1,}', "line 1 column"),
        (b'{"n": NaN}', "NaN"),
        (b'{"n": -Infinity}', "Infinity"),
        (b"\xff\xfe{}", "byte 0 is not UTF-8"),
        (b'{"prediction": ' + b"[" * 200000, "nested too deeply"),
    ],
    ids=lambda value: str(value[:12]),
)
def test_malformed_json(raw: bytes, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat(raw, INFO, OPTIONS)
    assert words in caught.value.message
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": None, "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": None}]}], "messages[0].content[0].type"),
    ],
)
def test_a_null_role_or_type_counts_as_absent(messages: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(messages=messages)
    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", param)


def test_a_role_that_is_no_string_has_the_wrong_type() -> None:
    with pytest.raises(RequestError, match="must be a string") as caught:
        chat(messages=[{"role": 1, "content": "a"}])
    assert caught.value.code == "invalid_type"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model", "a string"),
        ("stop", "a string or an array"),
        ("thinking", "a boolean"),
        ("audio", "an object"),
    ],
)
def test_a_number_too_large_for_float64_has_the_wrong_type_where_no_number_fits(
    name: str, expected: str
) -> None:
    body: dict[str, Any] = {name: float("inf")}
    with pytest.raises(RequestError, match=f"must be {expected}, not a number") as caught:
        chat(**body)
    assert (caught.value.code, caught.value.param) == ("invalid_type", name)


def test_choices_of_several_structs_are_listed_once() -> None:
    with pytest.raises(RequestError) as caught:
        chat(messages=[{"role": "user", "content": [{"type": "txt", "text": "a"}]}])
    assert caught.value.message.count("'image_url'") == 1


def test_a_body_with_too_many_values_is_refused_before_it_is_decoded() -> None:
    def body(num_commas: int) -> bytes:
        return encode({"input": "Hello.", "metadata": "," * (num_commas - 1)})

    assert parse_speech(body(MAX_COMMAS), INFO, OPTIONS).text == "Hello."
    with pytest.raises(RequestError, match="commas; the limit is 262144") as caught:
        parse_speech(body(MAX_COMMAS + 1), INFO, OPTIONS)
    assert (caught.value.status, caught.value.code) == (413, "body_too_complex")


@pytest.mark.parametrize(("more", "code"), [(0, "invalid_value"), (1, "body_too_complex")])
def test_more_media_than_any_request_needs_are_refused_before_they_are_all_read(more: int, code: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "images": [""] * (MAX_MEDIA + more)}
    with pytest.raises(RequestError) as caught:
        parse_chat(json.dumps(body).encode(), INFO, OPTIONS)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("count", "says"), [(1000, None), (5000, "at most 1024 items"), (20_000, "16384 media")]
)
def test_many_small_pictures_are_counted_as_media(count: int, says: str | None) -> None:
    url = "data:image/png;base64," + "QUJD" * 2500
    raw = encode({"messages": HELLO, "images": [url.replace("/", "\\/")] * count}).replace(b"\\\\", b"\\")
    if says is None:
        images = parse_chat(raw, INFO, OPTIONS).request.messages[0].parts[:count]
        assert {image.data for image in images if isinstance(image, MediaPart)} == {url}
        return
    with pytest.raises(RequestError, match=says):
        parse_chat(raw, INFO, OPTIONS)


@pytest.mark.parametrize("name", ["a`b", "x - at `$.model`", "a.b[0]", "k" * 1_000_000])
def test_an_unknown_key_of_any_form_is_named(name: str) -> None:
    with pytest.raises(RequestError, match="Unknown parameter") as caught:
        chat(**{name: 1})
    assert caught.value.param == name[:100]
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stream": "x" * 5000}, "'stream' must be a boolean, not a string."),
        ({"stream": [0] * 5000}, "'stream' must be a boolean, not an array."),
        ({"stream": {"x": "y" * 5000}}, "'stream' must be a boolean, not an object."),
        ({"messages": [{"role": "x" * 5000}]}, f'"{"x" * 58}… is not a supported value'),
    ],
)
def test_large_values_are_shortened_in_errors(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**body)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"priority": 1 << 31}, "'priority' must be between -2147483647 and 2147483647."),
        ({"audio": {"speech_lead": -1}}, "'audio.speech_lead' must be between 0 and 1000000."),
        ({"max_tokens": 0}, "'max_tokens' must be between 1 and 16777216."),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_range(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**body)
    assert (caught.value.message, caught.value.code) == (message, "invalid_value")


def test_a_nested_surrogate_is_a_request_error_at_any_depth() -> None:
    for depth in range(900, 1000):
        with pytest.raises(RequestError):
            parse_chat(b'{"prediction":' + b"[" * depth + b'"\\ud800"' + b"]" * depth + b"}", INFO, OPTIONS)


def test_an_integer_may_be_written_with_a_decimal_point() -> None:
    parsed = chat(max_tokens=5.0, top_k=7.0, seed=3.0, video_max_frames=8.0)
    assert (parsed.sampling.max_tokens, parsed.sampling.top_k, parsed.sampling.seed) == (5, 7, 3)
    assert isinstance(parsed.video.max_frames, int)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "model",
        "messages",
        "modalities",
        "audio",
        "stop",
        "seed",
        "stream_options",
        "images",
        "input",
        "voice",
        "n",
    ]
)


@given(st.dictionaries(NAMES | st.text(max_size=5), JSON, max_size=5) | JSON)
def test_any_json_is_parsed_or_refused(body: object) -> None:
    """No body raises an error other than RequestError."""
    for parse in (parse_chat, parse_speech, parse_completion, parse_tokenize, parse_detokenize):
        try:
            call = parse(encode(body), INFO, OPTIONS)
        except RequestError as error:
            assert 400 <= error.status < 500
        else:
            assert isinstance(call, ParsedText | ParsedSpeech | tuple)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}, "guided_json": None}, None),
        ({"response_format": {"type": "json_object"}}, ("json", '{"type":"object"}', "response_format")),
        *(
            (
                {"response_format": schema_format(strict=strict)},
                ("json", '{"b":1,"a":2.5}', "response_format"),
            )
            for strict in (True, False, None)
        ),
        ({"structured_outputs": {"json_object": False}}, None),
        (
            {"structured_outputs": {"json_object": True}},
            ("json", '{"type":"object"}', "structured_outputs.json_object"),
        ),
        ({"structured_outputs": {"json": " {} "}}, ("json", " {} ", "structured_outputs.json")),
        ({"structured_outputs": {"json": False}}, ("json", "false", "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a*"}}, ("regex", "a*", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["é"]}}, ("choice", '["é"]', "structured_outputs.choice")),
        ({"guided_grammar": 'start: "a"'}, ("grammar", 'start: "a"', "guided_grammar")),
        ({"guided_json": {"type": "null"}}, ("json", '{"type":"null"}', "guided_json")),
    ],
)
def test_constraints(fields: dict[str, Any], expected: tuple[str, str, str] | None) -> None:
    for thinking in (False, True):
        found = chat(**fields, thinking=thinking).sampling.constraint
        assert found == (
            None
            if expected is None
            else Constraint(kind=expected[0], text=expected[1], param=expected[2], thinking=thinking)
        )


# What other APIs' fields may say because it requests nothing, and one value that asks for something.
REFUSED: dict[str, tuple[list[Any], Any]] = {
    "best_of": ([1], 2),
    "functions": ([[]], [{"name": "f"}]),
    "function_call": (["none", "auto"], {"name": "f"}),
    "prompt_logprobs": ([0], 1),
    "allowed_token_ids": ([], []),
    "bad_words": ([[]], ["a"]),
    "logits_processors": ([[]], ["a"]),
    "length_penalty": ([1, 1.0], 0.9),
    "use_beam_search": ([False], True),
    "prediction": ([], {}),
    "moderation": ([], {}),
    "web_search_options": ([], {}),
    "verbosity": (["medium"], "low"),
    "stage_sampling": ([{}], {"a": 1}),
    "stage_params": ([{}], {"a": 1}),
    "skip_special_tokens": ([True], False),
    "spaces_between_special_tokens": ([True, False], 0),
    "include_stop_str_in_output": ([False], True),
    "truncate_prompt_tokens": ([], 1),
    "echo": ([False], True),
    "add_generation_prompt": ([True], False),
    "continue_final_message": ([False], True),
    "add_special_tokens": ([False], True),
    "chat_template": ([], ""),
    "documents": ([[]], [{}]),
    "return_token_ids": ([False], True),
    "return_tokens_as_token_ids": ([False], True),
    "include_reasoning": ([True], False),
    "separate_reasoning": ([True], False),
    "stream_reasoning": ([True], False),
    "media_io_kwargs": ([{}], {"video": {}}),
    "use_audio_in_video": ([False], True),
    "no_stop_trim": ([False], True),
    "watermarking": ([False], True),
    "return_mm_kwargs": ([True, False], 0),
    "session_params": ([{}], {"id": "a"}),
    "vllm_xargs": ([{}], {"a": 1}),
    "stream_interval": ([1], 2),
    "thinking_token_budget": ([-1], 100),
    "routed_experts_prompt_start": ([0], 1),
    "routed_experts_start_len": ([0], 1),
    **{
        name: ([False], True)
        for name in (
            "return_cached_tokens_details", "return_hidden_states", "return_meta_info", "return_prompt_text",
            "return_prompt_token_ids", "return_routed_experts", "return_token_offsets",
        )
    },
    **{
        name: ([], "a")
        for name in (
            "bootstrap_host", "bootstrap_port", "bootstrap_room", "cache_salt", "custom_logit_processor",
            "custom_params", "data_parallel_rank", "disagg_prefill_dp_rank", "ebnf", "ec_transfer_params", "extra_key",
            "images_config", "input_ids", "kv_transfer_params", "logprob_token_ids", "lora_path", "max_dynamic_patch",
            "min_dynamic_patch", "ngram_corpus_id", "reasoning", "regex", "repetition_detection", "routed_dp_rank",
            "stop_regex", "task", "truncation_side",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_of_another_api_passes_only_with_a_value_that_requests_nothing(name: str) -> None:
    """A value that is not served must not be ignored: the client would take the answer for what it asked for."""
    neutral, asking = REFUSED[name]
    for value in (None, *neutral):
        assert chat(**{name: value}) == chat(), value
    for value in (asking, "x" * 200, {"a": "b" * 200}, [[1]]):
        with pytest.raises(RequestError, match=f"'{name}' is not supported: ") as caught:
            chat(**{name: value})
        assert (caught.value.param, caught.value.code, caught.value.status) == (
            name,
            "unsupported_parameter",
            400,
        )


IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "custom_labels", "rid", "session_id",
)  # fmt: skip


@pytest.mark.parametrize("name", IGNORED)
def test_fields_that_change_no_answer_are_ignored(name: str) -> None:
    for value in (None, True, "x" * 500, {"a": [1]}):
        assert chat(**{name: value}) == chat()
        assert speech(**{name: value}) == speech()


def test_every_field_is_served_refused_or_ignored() -> None:
    served = {
        "model", "messages", "images", "audios", "videos", "modalities", "audio", "stream", "stream_options",
        "thinking", "chat_template_kwargs", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
        "min_p", "repetition_penalty", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "seed", "image_max_pixels",
        "video_fps", "video_max_frames", "video_min_pixels", "video_max_pixels", "video_total_pixels", "priority",
        "mm_processor_kwargs", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort",
        "n", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "logit_bias",
        "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "image_generation", "extra_body", "width", "height", "num_inference_steps", "guidance_scale", "negative_prompt",
    }  # fmt: skip
    assert {*CHAT_BODY.__struct_fields__} == served | {*REFUSED} | {*IGNORED}


@pytest.mark.parametrize(
    "name",
    [
        "task_type", "language", "x_vector_only_mode", "initial_codec_chunk_frames", "extra_params",
    ],
)  # fmt: skip
def test_fields_of_other_speech_apis_are_refused(name: str) -> None:
    assert speech(**{name: None}) == speech()
    for value in ("a", 0, False, [], {}):
        with pytest.raises(RequestError, match=f"'{name}' is not supported: the talker has no such input"):
            speech(**{name: value})


def test_order_and_pace_of_a_request() -> None:
    assert (chat().priority, speech().priority) == (0, 0)
    assert (speech().speech.speech_lead, speech(stream=True).speech.speech_lead) == (0, None)
    for value in (-5, 0, 7.0, (1 << 31) - 1):
        assert chat(priority=value).priority == speech(priority=value).priority == value
    for lead in (0, 3, 10**6):
        found = chat(**spoken(speech_lead=lead)).speech
        assert found is not None and found.speech_lead == speech(speech_lead=lead).speech.speech_lead == lead
    for wrong in ({"priority": 1.5}, {"priority": "high"}, {"priority": 1 << 31}, {"speech_lead": -1}):
        with pytest.raises(RequestError) as caught:
            speech(**wrong)
        assert caught.value.param == next(iter(wrong))


@pytest.mark.parametrize("name", ["max_steps", "max_new_tokens"])
def test_steps_of_speech_have_two_names(name: str) -> None:
    for value in (1, 1 << 24, 7.0):
        assert speech(**{name: value}).speech.max_steps == value
        found = chat(**spoken(**{name: value})).speech
        assert found is not None and found.max_steps == value
    for value in (0, (1 << 24) + 1, 1.5, True):
        with pytest.raises(RequestError) as caught:
            chat(**spoken(**{name: value}))
        assert caught.value.param == f"audio.{name}"
    assert speech(max_steps=3, max_new_tokens=3).speech.max_steps == 3
    with pytest.raises(RequestError, match=r"max_new_tokens' is 4 and 'audio\.max_steps' is 3") as caught:
        chat(**spoken(max_steps=3, max_new_tokens=4))
    assert caught.value.param == "audio.max_new_tokens"


@pytest.mark.parametrize(
    ("fields", "speech_seed", "chat_seed"),
    [
        ({}, None, None),
        ({"seed": 5}, 5, 5),
        ({"seed": 5, "audio": {"seed": 0}}, 0, 5),
        ({"audio": {"seed": 7}}, 7, None),
    ],
)
def test_speech_without_a_seed_takes_that_of_the_chat(
    fields: dict[str, Any], speech_seed: int | None, chat_seed: int | None
) -> None:
    call = chat(modalities=["text", "audio"], **fields)
    assert call.speech is not None
    assert (call.speech.seed, call.sampling.seed) == (speech_seed, chat_seed)


def test_the_transcript_of_an_earlier_answer_is_its_text() -> None:
    def parts(**answer: Any) -> tuple[Any, ...]:
        return chat(messages=[*HELLO, {"role": "assistant", **answer}, *HELLO]).messages[1].parts

    said = {"id": "audio-1", "transcript": "Hi."}
    assert (
        parts(audio=said) == parts(audio=said, content=None) == parts(content="Hi.", audio={"id": "audio-1"})
    )
    assert parts(audio=said) == (TextPart(text="Hi."),)
    assert parts(content="Text.", audio=said) == (TextPart(text="Text."),)
    assert parts(content="") == ()


def test_speech_is_streamed_unless_the_request_wants_it_whole() -> None:
    for fields, delivery in (
        ({}, "audio"),
        ({"response_format": "flac"}, "whole"),
        ({"response_format": "flac", "stream": True}, "audio"),
        ({"stream": False}, "whole"),
        ({"stream": True}, "audio"),
        ({"stream_format": "audio"}, "audio"),
        ({"stream_format": "sse"}, "sse"),
        ({"stream": True, "stream_format": "sse"}, "sse"),
        ({"stream": True, "stream_format": "audio"}, "audio"),
    ):
        assert speech(**fields).delivery == delivery


def test_formats_of_speech() -> None:
    """The rates that no request names: raw PCM as OpenAI defines it, Opus the next one that it has."""
    rates = {"mp3": 44100, "opus": 48000, "aac": 44100, "flac": 44100, "wav": 44100, "pcm16": 24000}
    for name, rate in rates.items():
        expected = AudioSpec(format=name, sample_rate=rate, source_rate=44100)  # type: ignore[arg-type]
        assert speech(response_format=name.removesuffix("16")).audio == expected
        assert parsed_chat(**spoken(format=name)).audio == expected
    law = AudioSpec(format="pcmu", sample_rate=8000, source_rate=44100)
    assert speech(response_format="pcmu").audio == law
    assert (speech().audio.format, parsed_chat().audio) == ("mp3", None)


def test_a_voice_has_further_names() -> None:
    options = ServeOptions(voice_aliases=("alloy=Lina", "nova=DB30"))
    for voice, expected in (("alloy", "Lina"), ({"id": "nova"}, "DB30"), ("Lina", "Lina"), (None, "DB30")):
        assert parse_speech(encode({"input": "x", "voice": voice}), INFO, options).speech.voice == expected
    for wrong in ("alloy", "=Lina", "alloy="):
        with pytest.raises(ConfigError, match="is not `name=voice`"):
            ServeOptions(voice_aliases=(wrong,))


@pytest.mark.parametrize(
    ("fields", "thinks", "param"),
    [
        ({}, False, None),
        ({"thinking": True}, True, None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"thinking": True, "chat_template_kwargs": {"enable_thinking": True, "thinking": True}}, True, None),
        ({"thinking": False, "chat_template_kwargs": {"thinking": False}}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": None, "thinking": True}}, True, None),
        ({"thinking": None, "chat_template_kwargs": {"thinking": True}}, True, None),
        (
            {"thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            None,
            "chat_template_kwargs.enable_thinking",
        ),
        (
            {"thinking": False, "chat_template_kwargs": {"thinking": True}},
            None,
            "chat_template_kwargs.thinking",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": False}},
            None,
            "chat_template_kwargs.thinking",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": True}},
            None,
            "chat_template_kwargs.thinking",
        ),
    ],
)
def test_switches_of_thinking_must_agree(
    fields: dict[str, Any], thinks: bool | None, param: str | None
) -> None:
    if param is None:
        assert chat(**fields).thinking is thinks
        return
    with pytest.raises(RequestError, match="they mean the same, send one") as caught:
        chat(**fields)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def test_tools_keep_the_order_of_their_keys_and_fields_that_nobody_knows() -> None:
    function = {"x-own": 1.0, "parameters": {"b": "é", "a": 10**30}, "name": "f", "strict": True}
    given = {"function": function, "type": "function"}
    use = chat(tools=[given, tool("g")]).tools
    assert [(each.name, each.is_strict) for each in use.tools] == [("f", True), ("g", False)]
    assert use.tools[0].definition == json.dumps(given, ensure_ascii=False)
    assert (use.choice, use.allowed, use.is_parallel) == ("auto", None, True)
    assert not chat(tools=[tool()], parallel_tool_calls=False).tools.is_parallel
    for neutral in ({}, {"tools": None}, {"tools": [], "tool_choice": "auto"}, {"tool_choice": "none"}):
        assert chat(**neutral).tools.tools == ()


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", ("none", None)),
        ("required", ("required", None)),
        (function("g"), ("required", ("g",))),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("f")]}}, ("auto", ("f",))),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function("g"), function("f")]}},
         ("required", ("g", "f"))),
    ],
)  # fmt: skip
def test_tool_choice(choice: Any, expected: tuple[str, tuple[str, ...] | None]) -> None:
    use = chat(tools=[tool("f"), tool("g")], tool_choice=choice).tools
    assert (use.choice, use.allowed) == expected


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "Missing"),
        ({"tools": [tool(), {"type": "custom", "custom": {"name": "c"}}]}, "tools[1].type", "'function'"),
        ({"tools": [tool("")]}, "tools[0].function.name", "is empty"),
        ({"tools": [tool("n" * 129)]}, "tools[0].function.name", "128"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "an object"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters", "of the type 'object'"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name", "earlier tool"),
        ({"tools": [tool(str(i)) for i in range(129)]}, "tools", "128"),
        ({"tools": [tool(parameters={"a": nested(97)})]}, "tools", "more than 100 levels"),
        ({"tools": [tool(parameters={"a": nested(900)})]}, "tools", "more than 100 levels"),
        ({"tools": [tool()], "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "contradicts"),
        ({"tools": {}}, "tools", "an array"),
        ({"tools": [1]}, "tools[0]", "an object"),
        ({"tool_choice": "required"}, "tool_choice", "no function"),
        ({"tool_choice": function("f")}, "tool_choice", "which 'tools' lacks"),
        ({"tools": [tool()], "tool_choice": function("g")}, "tool_choice", 'names "g"'),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "'required'"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function", "Missing"),
        ({"tools": [tool()], "tool_choice": ALLOWED}, "tool_choice.allowed_tools.tools", "is empty"),
        ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls", "a boolean"),
        ({"functions": [{"name": "f"}]}, "functions", "use 'tools'"),
        ({"function_call": {"name": "f"}}, "function_call", "use 'tool_choice'"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'minimal'"),
        ({"reasoning_effort": "low", "thinking": False}, "reasoning_effort", "contradicts"),
        ({"messages": [{"role": "assistant", "reasoning_content": 1}]}, "messages[0].reasoning_content", "a string"),
    ],
)  # fmt: skip
def test_wrong_tools_are_refused_by_name(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        chat(**body)
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_a_model_without_the_tokens_of_calls_refuses_tools() -> None:
    with pytest.raises(RequestError, match="no tokens for calls") as caught:
        chat(replace(INFO, has_tools=False), tools=[tool()])
    assert caught.value.param == "tools"


def test_reasoning_effort_turns_thinking_on() -> None:
    efforts = get_args(get_args(ReasoningEffort)[0])
    assert {each for each in efforts if not chat(reasoning_effort=each).thinking} == {"none", "minimal"}
    assert not chat(reasoning_effort=None).thinking


def completion(**body: Any) -> ParsedText[CompletionRequest]:
    return parse_completion(encode(body), INFO, OPTIONS)


@pytest.mark.parametrize(
    ("sent", "prompt"),
    [
        ("Once", "Once"),
        (["Once"], "Once"),
        ([1, 2.0], (1, 2)),
        ([[1, 2]], (1, 2)),
        ("", ""),
        ([], ()),
        ([[]], ()),
    ],
)
def test_prompts_of_completions(sent: object, prompt: object) -> None:
    parsed = completion(prompt=sent)
    assert (parsed.request.prompt, parsed.shown_prompt) == (prompt, "")
    assert completion(prompt=sent, echo=True).shown_prompt == prompt
    assert parsed.request.sampling == SamplingParams(max_tokens=16)
    assert (parsed.stream, parsed.include_usage, parsed.request.num_answers) == (False, False, 1)


def test_fields_of_completions() -> None:
    fields = {"temperature": 0.5, "stop": "b", "seed": 3, "logit_bias": {"5": 1}, "presence_penalty": 1}
    parsed = completion(
        prompt="a", max_tokens=5, logprobs=5, n=2, best_of=2, stream=True, stream_options={"include_usage": True},
        suffix="", priority=4, add_special_tokens=True, **fields,
    )  # fmt: skip
    assert parsed.request.sampling == replace(chat(**fields).sampling, max_tokens=5, num_logprobs=5)
    assert (parsed.request.num_answers, parsed.request.priority) == (2, 4)
    assert parsed.stream and parsed.include_usage


COMPLETION_ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "Missing required parameter"),
    ({"prompt": None}, "prompt", "Missing required parameter"),
    ({"prompt": ["a", "b"]}, "prompt", "one prompt is answered per request"),
    ({"prompt": [[1], [2]]}, "prompt", "one prompt is answered per request"),
    ({"prompt": [1, "a"]}, "prompt", "one prompt is answered per request"),
    ({"prompt": [1.5]}, "prompt[0]", "an integer"),
    ({"prompt": [-1]}, "prompt[0]", "between 0"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "nothing is inserted"),
    ({"prompt": "a", "best_of": 2}, "best_of", "use 'n'"),
    ({"prompt": "a", "n": 2, "best_of": 1}, "best_of", "use 'n'"),
    ({"prompt": "a", "echo": True, "logprobs": 0}, "echo", "log probabilities of the prompt"),
    ({"prompt": "a", "logprobs": 6}, "logprobs", "between 0 and 5"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "an integer"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens", "more than 'max_tokens' (16)"),
    ({"prompt": "a", "messages": []}, "messages", "Unknown parameter"),
    ({"prompt": "a", "model": "b"}, "model", "does not exist"),
    ({"prompt": "a", "stream_options": {}}, "stream_options", "'stream': true"),
    ({"prompt": "a", "use_beam_search": True}, "use_beam_search", "no beam search"),
]


@pytest.mark.parametrize(("body", "param", "words"), COMPLETION_ERRORS, ids=lambda value: str(value)[:40])
def test_wrong_completion_bodies(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**body)
    assert caught.value.param == param
    assert words in caught.value.message


def test_bodies_of_tokenize_and_detokenize() -> None:
    assert parse_tokenize(encode({"prompt": "a"}), INFO, OPTIONS) == ("a", False)
    body = {"messages": HELLO, "thinking": True, "max_tokens": 5, "add_special_tokens": False}
    request, with_names = parse_tokenize(encode({**body, "return_token_strs": True}), INFO, OPTIONS)
    assert isinstance(request, ChatRequest) and with_names
    assert replace(request, request_id="") == chat(thinking=True, max_tokens=5)
    assert parse_detokenize(encode({"tokens": [1, 2.0]}), INFO, OPTIONS) == (1, 2)
    for parse, wrong, param in (
        (parse_tokenize, {}, "messages"),
        (parse_tokenize, {"prompt": "a", "messages": HELLO}, "prompt"),
        (parse_tokenize, {"prompt": "a", "chat_template": "b"}, "chat_template"),
        (parse_tokenize, {"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        (parse_detokenize, {}, "tokens"),
        (parse_detokenize, {"tokens": [0.5]}, "tokens[0]"),
    ):
        with pytest.raises(RequestError) as caught:
            parse(encode(wrong), INFO, OPTIONS)
        assert caught.value.param == param
    for parse in (parse_completion, parse_tokenize, parse_detokenize):
        with pytest.raises(RequestError, match="without its thinker"):
            parse(encode({"prompt": "a"}), SPEECH_ONLY, OPTIONS)
