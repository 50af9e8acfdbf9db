"""Parsing of request bodies: they are decoded, checked against the artifact, and become requests to the service.

Nothing is fetched or decoded here: media stay the strings the client sent (`mingc.server.http.media` reads them).
Fields that OpenAI defines and mingc lacks are refused unless their value requests nothing (`n: 1`, `functions: []`).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, cast

import msgspec

from mingc.errors import RequestError
from mingc.prompts.conversation import VideoParams
from mingc.runtime.request import (
    MAX_PICTURES,
    ChatRequest,
    CompletionRequest,
    ImageRequest,
    SamplingParams,
    ServiceInfo,
    SpeechParams,
)
from mingc.runtime.voices import NewVoice, VoiceSample
from mingc.server.audio_format import RATES, AudioFormat, AudioSpec, default_rate
from mingc.server.http.body import decode_body, decode_small
from mingc.server.http.constraints import parse_constraint
from mingc.server.http.drawing import cannot_draw, read_drawing
from mingc.server.http.field_errors import as_integer, invalid, missing, shorten, too_long
from mingc.server.http.forms import decode_form
from mingc.server.http.messages import parse_messages
from mingc.server.http.request_schemas import (
    CHAT_BODY,
    CHAT_DRAWING_REFUSED,
    CHAT_REFUSED,
    COMPLETION_BODY,
    COMPLETION_REFUSED,
    DETOKENIZE_BODY,
    MAX_SAMPLE_BYTES,
    MAX_TOKEN_ID,
    NEW_VOICE_FORM,
    SPEECH_BODY,
    SPEECH_REFUSED,
    TOKENIZE_BODY,
    TOKENIZE_REFUSED,
    VOICE_REFUSED,
    ChatAudio,
    ChatBody,
    DetokenizeBody,
    Refused,
    SpeakerEmbedding,
    SpeechBody,
    SpeechFields,
    TextBody,
)
from mingc.server.http.tools import parse_tools
from mingc.server.options import ServeOptions

COMPLETION_TOKENS = 16  # of an answer without `max_tokens`, as with OpenAI

Delivery = Literal["whole", "audio", "sse"]
Request = TypeVar("Request", ChatRequest, CompletionRequest)
_TextBody = TypeVar("_TextBody", bound=TextBody | DetokenizeBody)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedText(Generic[Request]):
    """A parsed chat or completion, and how its answers are delivered. Media of its messages and the recording of a
    voice are not read yet.

    `audio`: the clip of a spoken answer. `drawing`: what to draw instead of a chat's answer, without its messages.
    `shown_prompt`: what is repeated before each answer of a completion.
    """

    request: Request
    audio: AudioSpec | None = None
    drawing: ImageRequest | None = None
    stream: bool = False
    include_usage: bool = False
    shown_prompt: str | tuple[int, ...] = ""


ParsedChat = ParsedText[ChatRequest]
ParsedCompletion = ParsedText[CompletionRequest]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedSpeech:
    """A parsed speech request. The recording of its voice is not read yet.

    `delivery`: one body with its length, raw chunks, or server-sent events; `has_segments`: these have the times of
    segments.
    """

    text: str
    speech: SpeechParams
    audio: AudioSpec
    delivery: Delivery
    has_segments: bool
    priority: int


def parse_chat(raw: bytes | memoryview, info: ServiceInfo, options: ServeOptions) -> ParsedChat:
    """Decode and check the body of a chat request.

    Raises:
        RequestError: with `param` naming the first field that is wrong.
    """
    return _chat(_decode_text(raw, CHAT_BODY, info), info, options, CHAT_REFUSED)


def parse_completion(raw: bytes | memoryview, info: ServiceInfo, options: ServeOptions) -> ParsedCompletion:
    """Decode and check the body of a completion request. Raises: as `parse_chat`."""
    body = _decode_text(raw, COMPLETION_BODY, info)
    prompt = _prompt(body.prompt)
    num_answers = as_integer(body.n, "n") or 1
    if body.best_of is not None and body.best_of != num_answers:
        raise _unsupported("best_of", f"all {num_answers} answers are returned; use 'n'")
    if body.echo and body.logprobs is not None:
        raise _unsupported("echo", "log probabilities of the prompt are not computed; leave 'logprobs' out")
    refuse_all(body, COMPLETION_REFUSED)
    request = CompletionRequest(
        request_id=f"cmpl-{uuid.uuid4().hex[:24]}",
        prompt=prompt,
        sampling=_sampling(
            body,
            max_tokens=as_integer(body.max_tokens, "max_tokens") or COMPLETION_TOKENS,
            num_logprobs=as_integer(body.logprobs, "logprobs"),
        ),
        priority=as_integer(body.priority, "priority") or 0,
        num_answers=num_answers,
    )
    return ParsedText(
        request=request,
        stream=body.stream or False,
        include_usage=_include_usage(body),
        shown_prompt=prompt if body.echo else "",
    )


def parse_tokenize(
    raw: bytes | memoryview, info: ServiceInfo, options: ServeOptions
) -> tuple[str | ChatRequest, bool]:
    """Decode and check the body of a tokenize request. Raises: as `parse_chat`.

    Returns the prompt, and whether the answer has the tokens as the vocabulary writes them.
    """
    body = _decode_text(raw, TOKENIZE_BODY, info)
    if body.prompt is None:
        prompt: str | ChatRequest = _chat(body, info, options, TOKENIZE_REFUSED).request
    elif body.messages is not None:
        raise invalid("prompt", "is given beside 'messages'; send one of them")
    else:
        refuse_all(body, TOKENIZE_REFUSED)
        prompt = body.prompt
    return prompt, body.return_token_strs or False


def parse_detokenize(raw: bytes | memoryview, info: ServiceInfo, options: ServeOptions) -> tuple[int, ...]:
    """Decode and check the body of a detokenize request. Raises: as `parse_chat`."""
    body = _decode_text(raw, DETOKENIZE_BODY, info)
    if body.tokens is None:
        raise missing("tokens")
    return _integers(body.tokens, "tokens")


def _decode_text(raw: bytes | memoryview, body_type: type[_TextBody], info: ServiceInfo) -> _TextBody:
    """Decode a body for a route that needs the thinker."""
    if not info.has_text:
        raise RequestError(
            f"Model '{info.model}' was exported without its thinker: it cannot chat. It serves /v1/audio/speech.",
            param="model",
            code="unsupported_model",
        )
    body = decode_body(raw, body_type)
    check_model(body.model, info)
    return body


def _chat(body: ChatBody, info: ServiceInfo, options: ServeOptions, refused: Refused) -> ParsedChat:
    messages = parse_messages(body, info, options)
    audio, speech = _audio(body, info, options)
    num_answers = as_integer(body.n, "n") or 1
    if speech is not None and num_answers > 1:
        raise _unsupported("n", "only one answer is spoken: leave 'n' or the audio out")
    top_logprobs = as_integer(body.top_logprobs, "top_logprobs") or 0
    if top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "is only allowed with 'logprobs': true")
    sampling = _sampling(
        body,
        max_tokens=_alias(body, "max_tokens", "max_completion_tokens", "") or SamplingParams().max_tokens,
        num_logprobs=top_logprobs if body.logprobs else None,
    )
    if speech is not None and speech.seed is None:
        speech = replace(speech, seed=sampling.seed)
    tools, constraint = parse_tools(body, info), sampling.constraint
    if tools.choice == "required" and constraint is not None and constraint.param != "response_format":
        raise invalid(constraint.param, "contradicts 'tool_choice', by which the answer is a call")
    stream = body.stream or False
    request = ChatRequest(
        request_id=f"chatcmpl-{uuid.uuid4().hex[:24]}",
        messages=messages,
        sampling=sampling,
        speech=speech,
        tools=tools,
        video=_video(body),
        thinking=_thinking(body),
        is_live=stream and audio is not None and audio.is_playable_in_parts,
        priority=as_integer(body.priority, "priority") or 0,
        num_answers=num_answers,
    )
    include_usage = _include_usage(body)
    refuse_all(body, refused)
    drawing = _drawing(body, request)
    return ParsedText(
        request=request, audio=audio, drawing=drawing, stream=stream, include_usage=include_usage
    )


def _drawing(body: ChatBody, request: ChatRequest) -> ImageRequest | None:
    """What to draw, if `modalities` request a picture."""
    objects = {"image_generation": body.image_generation, "extra_body": body.extra_body}
    if "image" not in (body.modalities or ()):
        names = (*objects, "width", "height", "num_inference_steps", "guidance_scale", "negative_prompt")
        for name in names:
            if getattr(body, name) is not None:
                raise invalid(name, "is given, but 'modalities' does not request a picture: send ['image']")
        return None
    sampling, num_pictures = request.sampling, request.num_answers
    for name, is_given in (
        ("tools", bool(request.tools.tools)),
        ("logprobs", sampling.num_logprobs is not None),
        (sampling.constraint.param if sampling.constraint else "", sampling.constraint is not None),
        ("thinking", request.thinking),
    ):
        if is_given:
            raise invalid(name, "is for answers of text, but 'modalities' requests a picture")
    if num_pictures > MAX_PICTURES:
        raise invalid("n", f"is {num_pictures}; a request may have {MAX_PICTURES} pictures")
    sources: list[tuple[str, msgspec.Struct]] = [("", body)]
    for name, fields in objects.items():
        if fields is not None:
            refuse_all(fields, CHAT_DRAWING_REFUSED, f"{name}.")
            sources.append((f"{name}.", fields))
    return ImageRequest(
        request_id=request.request_id,
        messages=(),
        num_pictures=num_pictures,
        priority=request.priority,
        **read_drawing(*sources),
    )


def _prompt(prompt: str | Sequence[str | float | Sequence[float]] | None) -> str | tuple[int, ...]:
    """One prompt: alone, or in an array of its own as some clients send it."""
    if prompt is None:
        raise missing("prompt")
    if isinstance(prompt, str):
        return prompt
    if any(isinstance(each, str | Sequence) for each in prompt):
        if len(prompt) > 1:
            raise _unsupported("prompt", "one prompt is answered per request; send several requests")
        return _prompt(cast(Any, prompt[0]))
    return _integers(cast(Sequence[float], prompt), "prompt")


def parse_speech(raw: bytes | memoryview, info: ServiceInfo, options: ServeOptions) -> ParsedSpeech:
    """Decode and check the body of a speech request.

    Raises:
        RequestError: with `param` naming the first field that is wrong.
    """
    if not info.has_speech:
        raise no_speech(info, "model", "unsupported_model")
    body = decode_body(raw, SPEECH_BODY)
    check_model(body.model, info)
    if body.input is None:
        raise missing("input")
    if len(body.input) > options.max_speech_characters:
        raise too_long("input", options.max_speech_characters)
    if not body.input.strip():
        raise invalid("input", "is empty: there is nothing to speak")
    refuse_all(body, SPEECH_REFUSED)
    speech = _speech_params(body, info, options, "")
    if speech.speech_lead is None and body.stream is None and body.stream_format is None:
        # Whether somebody listens or saves a file is not known: first as early as for a listener, then unpaced.
        speech = replace(speech, speech_lead=0)
    delivery = _delivery(body)
    return ParsedSpeech(
        text=body.input,
        speech=speech,
        audio=_audio_spec(
            body, "pcm16" if body.response_format == "pcm" else body.response_format or "mp3", info, ""
        ),
        delivery=delivery,
        has_segments=_has_segments(body, delivery),
        priority=as_integer(body.priority, "priority") or 0,
    )


def unknown_model(name: str, info: ServiceInfo) -> RequestError:
    return RequestError(
        f"The model {shorten(name)} does not exist; this server serves '{info.model}'.",
        status=404,
        param="model",
        code="model_not_found",
    )


def check_model(model: str | None, info: ServiceInfo) -> None:
    """A request without a model uses the served one."""
    if model is not None and model not in info.names:
        raise unknown_model(model, info)


def no_speech(info: ServiceInfo, param: str, code: str = "unsupported_modality") -> RequestError:
    return RequestError(
        f"Model '{info.model}' was exported without its talker: it cannot speak. It serves /v1/chat/completions "
        'with "modalities": ["text"].',
        param=param,
        code=code,
    )


def _unsupported(param: str, why: str) -> RequestError:
    return RequestError(f"'{param}' is not supported: {why}.", param=param, code="unsupported_parameter")


def refuse_all(body: msgspec.Struct, refused: Refused, prefix: str = "") -> None:
    """Refuse known but unsupported fields, except with a value that requests nothing."""
    for name, (why, neutral) in refused.items():
        value = getattr(body, name)
        if not value:
            continue
        if isinstance(value, msgspec.Raw):
            value = decode_small(value)
        elif isinstance(value, str):  # of a form, where all but texts are JSON
            with suppress(msgspec.DecodeError, RecursionError):
                value = msgspec.json.decode(value)
        # `1 == True` in Python, not in JSON
        is_neutral = any(
            value == good and isinstance(value, bool) == isinstance(good, bool) for good in neutral
        )
        if value is not None and not is_neutral:
            raise _unsupported(prefix + name, why)


def _audio(
    body: ChatBody, info: ServiceInfo, options: ServeOptions
) -> tuple[AudioSpec | None, SpeechParams | None]:
    """Audio and speech parameters from `modalities` and `audio`; None when no audio is requested."""
    if body.modalities == []:
        raise invalid("modalities", "is empty, but an answer has at least text: send ['text']")
    modalities = body.modalities or ["text"]
    if not info.has_speech and ("audio" in modalities or body.audio is not None):
        raise no_speech(info, "modalities" if "audio" in modalities else "audio")
    able = " or ".join(
        ["['text']"] + ["['text', 'audio']"] * info.has_speech + ["['image']"] * info.has_image_output
    )
    for index, modality in enumerate(modalities):
        if modality == "image" and not info.has_image_output:
            raise cannot_draw(info, f"modalities[{index}]", "unsupported_modality")
        if modality not in ("text", "audio", "image"):
            raise RequestError(
                f"This artifact cannot answer with the modality {shorten(modality)}: use {able}.",
                param=f"modalities[{index}]",
                code="unsupported_modality",
            )
    if "image" in modalities:
        if "audio" in modalities or body.audio is not None:
            raise invalid("modalities", "requests a picture and speech: an answer is one of them")
        return None, None
    if "text" not in modalities:
        raise RequestError(
            "'modalities' must contain 'text': speech is generated from the text of the answer.",
            param="modalities",
            code="unsupported_modality",
        )
    audio = body.audio
    if "audio" not in modalities:
        if audio is not None:
            raise invalid(
                "audio", "is given, but 'modalities' does not request audio: send ['text', 'audio']"
            )
        return None, None
    audio = audio or ChatAudio()
    spec = _audio_spec(audio, audio.format or "wav", info, "audio.")
    return spec, _speech_params(audio, info, options, "audio.")


def _audio_spec(fields: SpeechFields, audio_format: AudioFormat, info: ServiceInfo, prefix: str) -> AudioSpec:
    """Format, rate and tempo of the clip."""
    rate = as_integer(fields.sample_rate, f"{prefix}sample_rate")
    rates = RATES.get(audio_format)
    if rate is not None and rates is not None and rate not in rates:
        why = f"is {rate}, but {audio_format} has {', '.join(map(str, rates[:-1]))} and {rates[-1]} only"
        if len(rates) == 1:
            why = f"is {rate}, but {audio_format} has {rates[0]} only"
        raise invalid(f"{prefix}sample_rate", why)
    return AudioSpec(
        format=audio_format,
        sample_rate=rate or default_rate(audio_format, info.sample_rate),
        source_rate=info.sample_rate,
        speed=1.0 if fields.speed is None else fields.speed,
    )


def _speech_params(
    fields: SpeechFields, info: ServiceInfo, options: ServeOptions, prefix: str
) -> SpeechParams:
    """Speech parameters; `prefix` is the path of `fields` in error messages."""
    instructions = fields.instructions
    if instructions is not None and len(instructions) > options.max_instructions_characters:
        raise too_long(f"{prefix}instructions", options.max_instructions_characters)
    return SpeechParams(
        voice=_voice(fields, info, options),
        reference=_reference(fields, prefix),
        instructions=instructions if instructions and instructions.strip() else None,
        seed=_seed(fields.seed, f"{prefix}seed"),
        max_steps=_alias(fields, "max_steps", "max_new_tokens", prefix),
        guidance=fields.guidance,
        sigma=fields.sigma,
        temperature=fields.temperature,
        # Pacing counts playback at speed 1.
        speech_lead=0
        if (fields.speed or 1.0) > 1.0
        else as_integer(fields.speech_lead, f"{prefix}speech_lead"),
    )


def _voice(fields: SpeechFields, info: ServiceInfo, options: ServeOptions) -> str | None:
    """Read `voice`: a name, an alias, or OpenAI's `{"id": name}`. The service knows which there are."""
    if fields.voice is None:
        return info.default_voice
    name = fields.voice if isinstance(fields.voice, str) else fields.voice.id
    return options.aliases_of_voices.get(name, name)


def _reference(fields: SpeechFields, prefix: str) -> VoiceSample | None:
    """The voice that a request brings along; its recording is not read yet."""
    if fields.ref_audio is not None and fields.speaker_embedding is not None:
        raise invalid(f"{prefix}speaker_embedding", f"is given beside '{prefix}ref_audio': send one")
    if fields.ref_text is not None and fields.ref_audio is None:
        raise invalid(f"{prefix}ref_text", f"is given without '{prefix}ref_audio', whose words it is")
    if fields.ref_audio is None and fields.speaker_embedding is None:
        return None
    if fields.speaker_embedding == []:
        raise invalid(f"{prefix}speaker_embedding", "is empty")
    return VoiceSample(
        recording=fields.ref_audio or b"",
        transcript=fields.ref_text,
        vector=tuple(fields.speaker_embedding or ()),
    )


def parse_voice(raw: memoryview, info: ServiceInfo, options: ServeOptions, *, content_type: str) -> NewVoice:
    """Decode the form of a new voice. Raises: RequestError."""
    form = decode_form(raw, content_type, NEW_VOICE_FORM)
    refuse_all(form, VOICE_REFUSED)
    sample = form.audio_sample
    if (sample is None) == (form.speaker_embedding is None):
        raise invalid("audio_sample", "or 'speaker_embedding' must be given, and only one of them")
    recording, vector = b"", list[float]()
    if sample is not None:
        if len(sample.data) > MAX_SAMPLE_BYTES:
            raise RequestError(
                f"'audio_sample' is larger than {MAX_SAMPLE_BYTES} bytes.",
                status=413,
                param="audio_sample",
                code="media_too_large",
            )
        if not sample.data:
            raise RequestError("'audio_sample' holds no bytes.", param="audio_sample", code="empty_media")
        recording = bytes(sample.data)
    else:
        try:
            vector = msgspec.json.decode(form.speaker_embedding or "", type=SpeakerEmbedding)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise invalid("speaker_embedding", f"is not a JSON array of numbers: {error}") from error
        if not vector:
            raise invalid("speaker_embedding", "is empty")
        if form.ref_text is not None:
            raise invalid("ref_text", "is given without 'audio_sample', whose words it is")
    return NewVoice(
        name=form.name,
        consent=form.consent,
        description=form.speaker_description,
        sample=VoiceSample(
            recording=recording, transcript=form.ref_text, vector=tuple(vector), where="audio_sample"
        ),
    )


def _seed(value: int | float | None, param: str) -> int | None:
    """Any signed 64-bit integer, as OpenAI allows; negative ones become their two's complement: 0 ≤ seed < 2^64."""
    seed = as_integer(value, param)
    low, high = -(1 << 63), (1 << 64) - 1
    if seed is None:
        return None
    if not low <= seed <= high:
        raise invalid(param, f"must be between {low} and {high}; it is {shorten(seed)}")
    return seed % (1 << 64)


def _sampling(body: TextBody, *, max_tokens: int, num_logprobs: int | None) -> SamplingParams:
    """Sampling parameters. An absent temperature is 0: greedy, the reference's own default (spec thinker §7)."""
    default = SamplingParams()

    def number(value: float | None, fallback: float) -> float:
        return fallback if value is None else value

    min_tokens = as_integer(body.min_tokens, "min_tokens") or default.min_tokens
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"is {min_tokens}, more than 'max_tokens' ({max_tokens})")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=number(body.temperature, default.temperature),
        top_p=number(body.top_p, default.top_p),
        top_k=max(as_integer(body.top_k, "top_k") or default.top_k, 0),
        min_p=number(body.min_p, default.min_p),
        repetition_penalty=number(body.repetition_penalty, default.repetition_penalty),
        presence_penalty=number(body.presence_penalty, default.presence_penalty),
        frequency_penalty=number(body.frequency_penalty, default.frequency_penalty),
        logit_bias=_biases(body.logit_bias or {}),
        stop=_stop(body.stop),
        stop_token_ids=_integers(body.stop_token_ids or (), "stop_token_ids"),
        min_tokens=min_tokens,
        ignore_eos=body.ignore_eos or False,
        seed=_seed(body.seed, "seed"),
        num_logprobs=num_logprobs,
        constraint=parse_constraint(body, thinking=isinstance(body, ChatBody) and _thinking(body)),
    )


def _integers(values: Sequence[float], param: str) -> tuple[int, ...]:
    found = (as_integer(value, f"{param}[{index}]") for index, value in enumerate(values))
    return tuple(value for value in found if value is not None)


def _biases(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Read `logit_bias`, whose keys are token ids."""
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) <= 8 and int(key) <= MAX_TOKEN_ID):
            raise RequestError(
                f"'logit_bias' has the key {shorten(key)}, which is not the id of a token.",
                param="logit_bias",
                code="invalid_value",
            )
    found = {int(key): bias for key, bias in biases.items()}
    return tuple((token, bias) for token, bias in found.items() if bias)


def _alias(fields: ChatBody | SpeechFields, name: str, other: str, prefix: str) -> int | None:
    """Read a positive count that has two names; both may be given when they agree."""
    first = as_integer(getattr(fields, name), prefix + name)
    second = as_integer(getattr(fields, other), prefix + other)
    if first is not None and second is not None and first != second:
        why = f"is {second} and '{prefix}{name}' is {first}; they mean the same, send one"
        raise invalid(prefix + other, why)
    return first if first is not None else second


def _stop(value: str | list[str] | None) -> tuple[str, ...]:
    stop = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if "" in stop:
        raise invalid("stop", "holds an empty string, which would stop at once")
    return stop


def _thinking(body: ChatBody) -> bool:
    """Read `thinking`, `reasoning_effort` or `chat_template_kwargs`; several may be given when they agree."""
    switches = body.chat_template_kwargs
    given = {"thinking": body.thinking}
    if body.reasoning_effort is not None:  # the model knows no degrees
        given["reasoning_effort"] = body.reasoning_effort not in ("none", "minimal")
    if switches is not None:
        given["chat_template_kwargs.enable_thinking"] = switches.enable_thinking
        given["chat_template_kwargs.thinking"] = switches.thinking
    stated = [(name, value) for name, value in given.items() if value is not None]
    for name, value in stated[1:]:
        if value != stated[0][1]:
            raise invalid(name, f"contradicts '{stated[0][0]}'; they mean the same, send one")
    return bool(stated and stated[0][1])


def _include_usage(body: TextBody) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise invalid("stream_options", "is only allowed with 'stream': true")
    if body.stream_options.continuous_usage_stats:
        raise _unsupported("stream_options.continuous_usage_stats", "the last chunk has the usage")
    return body.stream_options.include_usage or False


def _video(body: ChatBody) -> VideoParams:
    return VideoParams(
        fps=body.video_fps,
        max_frames=as_integer(body.video_max_frames, "video_max_frames"),
        min_pixels=as_integer(body.video_min_pixels, "video_min_pixels"),
        max_pixels=as_integer(body.video_max_pixels, "video_max_pixels"),
        total_pixels=as_integer(body.video_total_pixels, "video_total_pixels"),
        use_audio=bool(body.mm_processor_kwargs and body.mm_processor_kwargs.use_audio_in_video),
    )


def _delivery(body: SpeechBody) -> Delivery:
    """A stream of chunks, as with OpenAI, unless `stream` is false (other servers' way)."""
    if body.stream is False and body.stream_format is not None:
        raise invalid("stream", f"is false, but 'stream_format' requests a stream ('{body.stream_format}')")
    is_default = body.stream is None and body.response_format != "flac"  # which is sent at its end anyway
    return body.stream_format or ("audio" if body.stream or is_default else "whole")


def _has_segments(body: SpeechBody, delivery: Delivery) -> bool:
    name = "timestamp_granularities"
    kinds = body.timestamp_granularities or []
    for index, kind in enumerate(kinds):
        if kind != "segment":
            raise RequestError(
                f"The times of {shorten(kind)} are not known: use ['segment'].",
                param=f"{name}[{index}]",
                code="unsupported_value",
            )
    if kinds and delivery != "sse":
        raise invalid(name, "needs 'stream_format': 'sse', because times are sent as events")
    return bool(kinds)
