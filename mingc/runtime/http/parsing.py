"""Bodies of `/v1/chat/completions` and `/v1/audio/speech`: parsed, checked against what the artifact can do, typed.

Nothing is fetched or decoded here: media stay the strings the client sent (`mingc.runtime.http.media` reads them).
Fields that OpenAI defines and mingc lacks are refused unless their value asks for nothing (`n: 1`, `tools: []`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, cast

from mingc.errors import RequestError
from mingc.runtime.http.audio_format import AudioFormat
from mingc.runtime.http.json_fields import Fields, check_string, shorten, wrong_type
from mingc.runtime.http.messages import MediaSource, parse_messages
from mingc.runtime.http.options import ServeOptions
from mingc.runtime.request import Message, SamplingParams, ServiceInfo, SpeechParams, VideoParams

Delivery = Literal["whole", "audio", "sse"]
MAX_TOKENS = 1 << 24  # a bound for sanity; the service knows the context length
MAX_PIXELS = 1 << 30
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1000  # how much of an answer may be held back, and looked through at each token
LEAST_PENALTY = 0.01  # logits are divided by it
_FORMAT_HINT = " mp3, opus and aac are not encoded; wav is the default."

# Fields that other APIs define: (why they are refused, values that ask for nothing).
_CHAT_REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "n": ("one choice is generated per request", (1,)),
    "tools": ("tool calls are not implemented", ([],)),
    "tool_choice": ("tool calls are not implemented", ("none", "auto")),
    "parallel_tool_calls": ("tool calls are not implemented", (False, True)),
    "functions": ("tool calls are not implemented", ([],)),
    "function_call": ("tool calls are not implemented", ("none", "auto")),
    "logprobs": ("log probabilities are not returned", (False,)),
    "top_logprobs": ("log probabilities are not returned", (0,)),
    "logit_bias": ("logits are not biased", ({},)),
    "response_format": ("the text is not constrained", ({"type": "text"},)),
    "frequency_penalty": ("use 'repetition_penalty'", (0,)),
    "presence_penalty": ("use 'repetition_penalty'", (0,)),
    "prediction": ("predicted outputs are not used", ()),
    "moderation": ("nothing is moderated here", ()),
    "web_search_options": ("nothing is searched here", ()),
    "reasoning_effort": ("use 'thinking': true or false", ("none",)),
    "verbosity": ("the length is not steered; use 'max_tokens'", ("medium",)),
    "image_generation": ("images are not generated", ()),
    "stage_sampling": ("stages have no sampling of their own", ({},)),
    "stage_params": ("stages have no parameters of their own", ({},)),
}
_SPEECH_REFUSED = (
    "task_type", "language", "ref_audio", "ref_text", "x_vector_only_mode", "speaker_embedding",
    "initial_codec_chunk_frames", "extra_params", "word_timestamps",
)  # fmt: skip
_IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "request_id",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatParams:
    """A parsed chat request. `speech` is None when only text is wanted; media of `messages` are not read yet."""

    messages: tuple[Message[MediaSource], ...]
    sampling: SamplingParams
    speech: SpeechParams | None
    audio_format: AudioFormat
    video: VideoParams
    thinking: bool
    stream: bool
    include_usage: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechCallParams:
    """A parsed speech request. `delivery`: one body with its length, raw chunks, or server-sent events."""

    text: str
    speech: SpeechParams = field(default_factory=SpeechParams)
    audio_format: AudioFormat = "wav"
    delivery: Delivery = "whole"


def parse_chat(body: object, info: ServiceInfo, options: ServeOptions) -> ChatParams:
    """Check the body of a chat request.

    Raises:
        RequestError: with `param` naming the first field that is wrong.
    """
    fields = Fields(body)
    _check_model(fields, info)
    if not info.has_text:
        raise RequestError(
            f"Model '{info.model}' holds no thinker: it speaks, but does not chat. Use /v1/audio/speech.",
            param="model",
            code="unsupported_model",
        )
    messages = parse_messages(fields, info)
    audio_format, speech = _audio(fields, info, options)
    sampling = _sampling(fields)
    if speech is not None and speech.seed is None:
        speech = replace(speech, seed=sampling.seed)
    stream = fields.boolean("stream") or False
    call = ChatParams(
        messages=messages,
        sampling=sampling,
        speech=speech,
        audio_format=audio_format,
        video=_video(fields),
        thinking=fields.boolean("thinking") or False,
        stream=stream,
        include_usage=_include_usage(fields, stream=stream),
    )
    for name, (why, neutral) in _CHAT_REFUSED.items():
        fields.refuse(name, why, unless=neutral)
    fields.ignore(*_IGNORED)
    fields.finish()
    return call


def parse_speech(body: object, info: ServiceInfo, options: ServeOptions) -> SpeechCallParams:
    """Check the body of a speech request.

    Raises:
        RequestError: with `param` naming the first field that is wrong.
    """
    fields = Fields(body)
    _check_model(fields, info)
    if not info.has_speech:
        raise _no_speech(info, "model")
    text = fields.required_string("input", max_length=options.max_speech_characters)
    if not text.strip():
        raise RequestError(
            "'input' is empty: there is nothing to speak.", param="input", code="invalid_value"
        )
    response_format = fields.choice("response_format", ("wav", "pcm", "flac"), hint=_FORMAT_HINT)
    fields.refuse("speed", "speech is made at its natural speed", unless=(1,))
    fields.refuse("sample_rate", f"audio is made at {info.sample_rate} Hz", unless=(info.sample_rate,))
    call = SpeechCallParams(
        text=text,
        speech=_speech_params(fields, info, options),
        audio_format="pcm16" if response_format == "pcm" else cast(AudioFormat, response_format or "wav"),
        delivery=_delivery(fields),
    )
    for name in _SPEECH_REFUSED:
        fields.refuse(name, "the talker has no such input")
    fields.ignore(*_IGNORED)
    fields.finish()
    return call


def unknown_model(name: str, info: ServiceInfo) -> RequestError:
    return RequestError(
        f"The model {shorten(name)} does not exist; this server serves '{info.model}'.",
        status=404,
        param="model",
        code="model_not_found",
    )


def _check_model(fields: Fields, info: ServiceInfo) -> None:
    """A request without a model means the one that is served."""
    model = fields.string("model")
    if model is not None and model != info.model:
        raise unknown_model(model, info)


def _no_speech(info: ServiceInfo, param: str) -> RequestError:
    return RequestError(
        f"Model '{info.model}' holds no talker: it cannot make audio.",
        param=param,
        code="unsupported_modality",
    )


def _audio(
    fields: Fields, info: ServiceInfo, options: ServeOptions
) -> tuple[AudioFormat, SpeechParams | None]:
    """`modalities` and `audio` together say whether speech is made, and how."""
    if fields.value("modalities") == []:
        raise RequestError(
            "'modalities' is empty, but an answer has at least text: send ['text'] or ['text', 'audio'].",
            param="modalities",
            code="invalid_value",
        )
    modalities = fields.strings("modalities", max_items=8) or ("text",)
    for index, modality in enumerate(modalities):
        if modality not in ("text", "audio"):
            raise RequestError(
                f"Modality {shorten(modality)} is not one that this artifact can answer with: use ['text'] or "
                "['text', 'audio'].",
                param=f"modalities[{index}]",
                code="unsupported_modality",
            )
    if "text" not in modalities:
        raise RequestError(
            "'modalities' must hold 'text': speech is made from the text of the answer.",
            param="modalities",
            code="unsupported_modality",
        )
    audio = fields.child("audio")
    if "audio" not in modalities:
        if audio is not None:
            raise RequestError(
                "'audio' is given, but 'modalities' does not ask for audio: send ['text', 'audio'].",
                param="audio",
                code="invalid_value",
            )
        return "wav", None
    if not info.has_speech:
        raise _no_speech(info, "modalities")
    if audio is None:
        return "wav", SpeechParams(voice=info.default_voice)
    audio_format = cast(
        AudioFormat, audio.choice("format", ("wav", "pcm16", "flac"), hint=_FORMAT_HINT) or "wav"
    )
    speech = _speech_params(audio, info, options)
    audio.finish()
    return audio_format, speech


def _speech_params(fields: Fields, info: ServiceInfo, options: ServeOptions) -> SpeechParams:
    """How speech is made: in the `audio` object of a chat, at the top of a speech request."""
    instructions = fields.string("instructions", max_length=options.max_instructions_characters)
    return SpeechParams(
        voice=_voice(fields, info),
        instructions=instructions if instructions and instructions.strip() else None,
        seed=_seed(fields),
        max_steps=_alias(fields, "max_steps", "max_new_tokens"),
        guidance=fields.number("guidance", low=0.0, high=20.0),
        sigma=fields.number("sigma", low=0.0, high=10.0),
        temperature=fields.number("temperature", low=0.0, high=2.0),
    )


def _voice(fields: Fields, info: ServiceInfo) -> str | None:
    """`voice` as a name or as OpenAI's `{"id": name}`."""
    value = fields.value("voice")
    param = fields.path("voice")
    if value is None:
        return info.default_voice
    if isinstance(value, dict):
        reference = Fields(value, param)
        name = reference.required_string("id")
        reference.finish()
    else:
        name = check_string(value, param)
    if name not in info.voices:
        voices = ", ".join(info.voices) or "none"
        raise RequestError(
            f"Unknown voice {shorten(name)}; this artifact has: {voices}.", param=param, code="unknown_voice"
        )
    return name


def _seed(fields: Fields) -> int | None:
    """Any signed 64-bit integer, as OpenAI allows; negative ones become their two's complement, so 0 ≤ seed < 2^64."""
    seed = fields.integer("seed", low=-(1 << 63), high=(1 << 64) - 1)
    return None if seed is None else seed % (1 << 64)


def _sampling(fields: Fields) -> SamplingParams:
    """An absent temperature is 0: greedy, the reference's own default (spec thinker §7)."""
    default = SamplingParams()

    def number(
        name: str, fallback: float, high: float, *, low: float = 0.0, above_low: bool = False
    ) -> float:
        value = fields.number(name, low=low, high=high, above_low=above_low)
        return fallback if value is None else value

    return SamplingParams(
        max_tokens=_alias(fields, "max_tokens", "max_completion_tokens") or default.max_tokens,
        temperature=number("temperature", default.temperature, 2.0),
        top_p=number("top_p", default.top_p, 1.0, above_low=True),
        top_k=max(fields.integer("top_k", low=-1, high=MAX_TOKENS) or default.top_k, 0),
        min_p=number("min_p", default.min_p, 1.0),
        repetition_penalty=number("repetition_penalty", default.repetition_penalty, 10.0, low=LEAST_PENALTY),
        stop=_stop(fields),
        ignore_eos=fields.boolean("ignore_eos") or False,
        seed=_seed(fields),
    )


def _alias(fields: Fields, name: str, other: str) -> int | None:
    """One positive count under two names; both may be given when they agree."""
    first = fields.integer(name, low=1, high=MAX_TOKENS)
    second = fields.integer(other, low=1, high=MAX_TOKENS)
    if first is not None and second is not None and first != second:
        raise RequestError(
            f"'{name}' is {first} and '{other}' is {second}; they mean the same, send one.",
            param=fields.path(other),
            code="invalid_value",
        )
    return first if first is not None else second


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        stop: tuple[str, ...] = (check_string(value, "stop", max_length=MAX_STOP_CHARACTERS),)
    elif isinstance(value, list):
        stop = fields.strings("stop", max_items=MAX_STOP_STRINGS, max_length=MAX_STOP_CHARACTERS)
    else:
        raise wrong_type("stop", "a string or an array of strings", value)
    if "" in stop:
        why = "'stop' holds an empty string, which would stop at once."
        raise RequestError(why, param="stop", code="invalid_value")
    return stop


def _include_usage(fields: Fields, *, stream: bool) -> bool:
    options = fields.child("stream_options")
    if options is None:
        return False
    if not stream:
        raise RequestError(
            "'stream_options' is only allowed with 'stream': true.",
            param="stream_options",
            code="invalid_value",
        )
    include_usage = options.boolean("include_usage") or False
    options.ignore("include_obfuscation")
    options.finish()
    return include_usage


def _video(fields: Fields) -> VideoParams:
    return VideoParams(
        fps=fields.number("video_fps", low=0.0, high=1000.0, above_low=True),
        max_frames=fields.integer("video_max_frames", low=1, high=MAX_TOKENS),
        min_pixels=fields.integer("video_min_pixels", low=1, high=MAX_PIXELS),
        max_pixels=fields.integer("video_max_pixels", low=1, high=MAX_PIXELS),
        total_pixels=fields.integer("video_total_pixels", low=1, high=MAX_PIXELS),
    )


def _delivery(fields: Fields) -> Delivery:
    """`stream_format` asks for a stream (OpenAI's way), and so does `stream: true` (other servers' way)."""
    stream_format = cast(Delivery | None, fields.choice("stream_format", ("audio", "sse")))
    stream = fields.boolean("stream")
    if stream is False and stream_format is not None:
        raise RequestError(
            f"'stream' is false, but 'stream_format' asks for a stream ('{stream_format}').",
            param="stream",
            code="invalid_value",
        )
    return stream_format or ("audio" if stream else "whole")
