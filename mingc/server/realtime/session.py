"""The settings of a session and of one response: OpenAI's objects, how they are merged, and what they mean here.

`session.update` and `response.create` change settings all or not at all. A field that is absent keeps its value, and so
does one that is null unless null switches it off; objects are merged key by key, unless their `type` changes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from mingc.errors import RequestError
from mingc.prompts.conversation import Message
from mingc.prompts.media_decoder import TurnRules
from mingc.prompts.tools import ToolUse
from mingc.prompts.transcription import MAX_TRANSCRIPT_TOKENS
from mingc.runtime.request import (
    ChatRequest,
    SamplingParams,
    ServiceInfo,
    SpeechParams,
    TranscriptionRequest,
)
from mingc.runtime.voices import voice_not_found
from mingc.server.http.field_errors import invalid, shorten, validation_error
from mingc.server.http.parsing import no_speech, unknown_model
from mingc.server.http.request_schemas import (
    MAX_TOKENS,
    MAX_TOOLS,
    ChatBody,
    FunctionName,
    NamedTool,
    VoiceReference,
)
from mingc.server.http.tools import parse_tools
from mingc.server.http.transcriptions import language_name
from mingc.server.options import ServeOptions
from mingc.server.realtime.input_audio import Encoding

# JSON of a session, an item or another object that events repeat; clients refuse larger messages.
MAX_OBJECT_BYTES = 800_000
_MAX_PROMPT = 4096  # characters, of a transcription
_SILENCE_MS = {"high": 300, "auto": 600, "medium": 600, "low": 1200}  # after which `semantic_vad` ends a turn

Modality = Literal["audio", "text"]

# What OpenAI's beta called a field: where it is now.
_NEW_NAMES = {
    "session.modalities": "session.output_modalities",
    "session.voice": "session.audio.output.voice",
    "session.speed": "session.audio.output.speed",
    "session.input_audio_format": "session.audio.input.format",
    "session.input_audio_transcription": "session.audio.input.transcription",
    "session.input_audio_noise_reduction": "session.audio.input.noise_reduction",
    "session.turn_detection": "session.audio.input.turn_detection",
    "session.output_audio_format": "session.audio.output.format",
    "session.max_response_output_tokens": "session.max_output_tokens",
    "session.temperature": "response.temperature",
    "response.modalities": "response.output_modalities",
    "response.voice": "response.audio.output.voice",
    "response.output_audio_format": "response.audio.output.format",
    "response.max_response_output_tokens": "response.max_output_tokens",
}
# Fields that null switches off.
_NULLABLE = (
    "audio.input.turn_detection",
    "audio.input.turn_detection.idle_timeout_ms",
    "audio.input.transcription",
    "audio.input.noise_reduction",
    "tracing",
    "prompt",
    "include",
)


def new_id(prefix: str) -> str:
    """A unique id: `item_`, `resp_`, `call_` … and 24 hexadecimal digits."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What sessions can ask for. `voices`: names and ids of all that are registered at present."""

    info: ServiceInfo
    options: ServeOptions
    voices: tuple[str, ...] = ()


class PcmFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="audio/pcm"):
    """16 bits, little-endian, mono."""

    rate: Literal[24000] = 24000


class PcmuFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="audio/pcmu"):
    """µ-law, 8 kHz."""


class PcmaFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="audio/pcma"):
    """A-law, 8 kHz."""


AudioFormat = PcmFormat | PcmuFormat | PcmaFormat


class ServerVad(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="server_vad"
):
    """A turn ends after a fixed silence."""

    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=5000)] = 300
    silence_duration_ms: Annotated[int, Meta(ge=100, le=10_000)] = 500
    idle_timeout_ms: Annotated[int, Meta(ge=5000, le=30_000)] | None = None
    create_response: bool = True
    interrupt_response: bool = True

    @property
    def rules(self) -> TurnRules:
        """When turns begin and end."""
        return TurnRules(
            threshold=self.threshold,
            prefix_padding_ms=self.prefix_padding_ms,
            silence_ms=self.silence_duration_ms,
        )


class SemanticVad(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="semantic_vad"
):
    """A turn ends after a silence that `eagerness` selects."""

    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    create_response: bool = True
    interrupt_response: bool = True

    @property
    def idle_timeout_ms(self) -> int | None:
        return None

    @property
    def rules(self) -> TurnRules:
        """When turns begin and end."""
        return TurnRules(silence_ms=_SILENCE_MS[self.eagerness])


class Transcription(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Transcripts of the user's turns. `model`: whatever the client calls it; the served one transcribes."""

    model: str = ""
    language: Annotated[str, Meta(max_length=32)] = ""
    prompt: Annotated[str, Meta(max_length=_MAX_PROMPT)] = ""


class NoiseReduction(Struct, frozen=True, forbid_unknown_fields=True):
    """Accepted, and not done."""

    type: Literal["near_field", "far_field"]


class AudioInput(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sound of the client."""

    format: AudioFormat = PcmFormat()
    transcription: Transcription | None = None
    noise_reduction: NoiseReduction | None = None
    turn_detection: ServerVad | SemanticVad | None = ServerVad()


class AudioOutput(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sound of answers. `voice`: its name, id or alias; only an artifact without voices has none."""

    format: AudioFormat = PcmFormat()
    voice: str | VoiceReference | UnsetType = UNSET
    speed: float = 1.0


class Audio(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sound in both directions."""

    input: AudioInput = AudioInput()
    output: AudioOutput = AudioOutput()


class NamedChoice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """The answer calls this function."""

    name: str


class Reasoning(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model thinks before it answers; it knows no degrees."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] = "none"


class TokenLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of the conversation, without the system block."""

    post_instructions: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | UnsetType = UNSET


class RetentionRatio(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="retention_ratio"
):
    """A conversation that is too long is cut to this part of what fits."""

    retention_ratio: Annotated[float, Meta(ge=0, le=1)]
    token_limits: TokenLimits | UnsetType = UNSET


class SessionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a session, as `session.updated` shows them. `default_settings` and `update` make them."""

    type: Literal["realtime", "transcription"] = "realtime"
    model: str
    output_modalities: tuple[Modality, ...] = ("audio",)
    instructions: str = ""
    tools: Annotated[tuple[dict[str, Any], ...], Meta(max_length=MAX_TOOLS)] = ()
    tool_choice: Literal["auto", "none", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool | UnsetType = UNSET
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | Literal["inf"] = "inf"
    reasoning: Reasoning | UnsetType = UNSET
    tracing: Any = None
    prompt: Any = None
    truncation: Literal["auto", "disabled"] | RetentionRatio = "auto"
    include: Any = None
    audio: Audio = Audio()

    @property
    def has_sound(self) -> bool:
        """Whether answers are spoken."""
        return self.output_modalities == ("audio",)

    @property
    def turn_detection(self) -> ServerVad | SemanticVad | None:
        return self.audio.input.turn_detection

    @property
    def transcription(self) -> Transcription | None:
        return self.audio.input.transcription

    @property
    def input_encoding(self) -> Encoding:
        return encoding_of(self.audio.input.format)

    @property
    def output_encoding(self) -> Encoding:
        return encoding_of(self.audio.output.format)

    @property
    def thinking(self) -> bool:
        """Whether the model thinks before it answers."""
        return self.reasoning is not UNSET and self.reasoning.effort not in ("none", "minimal")


def encoding_of(audio_format: AudioFormat) -> Encoding:
    """The `type` of a format."""
    match audio_format:
        case PcmFormat():
            return "audio/pcm"
        case PcmuFormat():
            return "audio/pcmu"
        case PcmaFormat():
            return "audio/pcma"


def default_settings(served: Served, model: str | None = None) -> SessionSettings:
    """Settings of a new session. `model`: the name by which the client calls the model."""
    info = served.info
    return SessionSettings(
        model=model or info.model,
        output_modalities=("audio",) if info.has_speech else ("text",),
        audio=Audio(
            input=AudioInput(turn_detection=ServerVad() if info.has_audio_input else None),
            output=AudioOutput(voice=info.default_voice or UNSET),
        ),
    )


def update(settings: SessionSettings, fields: Mapping[str, Any], served: Served) -> SessionSettings:
    """Merge the `session` of `session.update` into settings.

    Raises: RequestError whose `param` names the first field that is wrong. The buffer of input audio may refuse a
    change of the format afterwards.
    """
    return _update(settings, fields, served, "session")


def session_object(settings: SessionSettings, session_id: str, expires_at: int) -> dict[str, Any]:
    """The object of `session.created` and `session.updated`."""
    head = {"object": "realtime.session", "id": session_id, "expires_at": expires_at}
    fields: dict[str, Any] = msgspec.to_builtins(settings)
    return head | fields


class ResponseAudio(Struct, kw_only=True, forbid_unknown_fields=True):
    """`audio` of `response.create`."""

    output: dict[str, Any] | None = None


class ResponseFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """`response` of `response.create`, without its `input`. Fields of the session are checked after the merge."""

    instructions: str | None = None
    output_modalities: Any = None
    audio: ResponseAudio | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    max_output_tokens: Any = None
    reasoning: Any = None
    prompt: Any = None
    metadata: dict[str, str] | None = None
    conversation: Literal["auto", "none"] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseSettings:
    """Settings of one response.

    Attributes:
        session: the session's, with what `response.create` says.
        instructions: of `response.create`.
        is_out_of_band: whether the conversation does not get the answer.
        speech: None for a text.
    """

    session: SessionSettings
    tools: ToolUse
    sampling: SamplingParams
    speech: SpeechParams | None
    instructions: str | None = None
    metadata: dict[str, str] | None = None
    is_out_of_band: bool = False

    def request(self, request_id: str, messages: tuple[Message, ...]) -> ChatRequest:
        """The request for its answer."""
        return ChatRequest(
            request_id=request_id,
            messages=messages,
            sampling=self.sampling,
            speech=self.speech,
            tools=self.tools,
            thinking=self.session.thinking,
            is_live=self.speech is not None,
        )


def response_settings(
    settings: SessionSettings, served: Served, fields: ResponseFields | None = None
) -> ResponseSettings:
    """Settings of a response that a turn asks for, or `response.create` with `fields`. Raises: RequestError."""
    fields = fields or ResponseFields()
    metadata = fields.metadata or {}
    if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise invalid("response.metadata", "has more than 16 pairs of at most 64 and 512 characters")
    own = ("metadata", "conversation", "temperature")
    given = {name: getattr(fields, name) for name in ResponseFields.__struct_fields__ if name not in own}
    given = {name: value for name, value in given.items() if value is not None}
    if fields.audio is not None:
        given["audio"] = {"output": fields.audio.output}
    if fields.tools is not None and fields.tool_choice is None and not _fits(settings, fields.tools):
        given["tool_choice"] = "auto"
    session = _update(settings, given, served, "response") if given else settings
    sampling = SamplingParams(temperature=fields.temperature or 0.0)
    if session.max_output_tokens != "inf":
        sampling = replace(sampling, max_tokens=session.max_output_tokens)
    voice = session.audio.output.voice
    name = voice if isinstance(voice, str) else None
    return ResponseSettings(
        session=session,
        tools=_tool_use(session, served.info),
        sampling=sampling,
        speech=SpeechParams(voice=served.options.aliases_of_voices.get(name or "", name))
        if session.has_sound
        else None,
        instructions=fields.instructions,
        metadata=fields.metadata,
        is_out_of_band=fields.conversation == "none",
    )


def transcription_request(settings: Transcription, audio: bytes, where: str) -> TranscriptionRequest:
    """The request for the transcript of a turn. `audio`: an encoded file that has speech."""
    return TranscriptionRequest(
        request_id=new_id("transcription"),
        audio=audio,
        where=where,
        sampling=SamplingParams(max_tokens=MAX_TRANSCRIPT_TOKENS),
        language=language_name(settings.language),
        topic=settings.prompt,
    )


def _update(
    settings: SessionSettings, fields: Mapping[str, Any], served: Served, where: str
) -> SessionSettings:
    with _under(where):
        merged = _merge(msgspec.to_builtins(settings), fields, "")
        try:
            found = msgspec.convert(merged, SessionSettings)
        except msgspec.ValidationError as error:
            raise validation_error(str(error), SessionSettings) from error
        found = _normalized(found, served)
        if len(msgspec.json.encode(found)) > MAX_OBJECT_BYTES:
            raise invalid("tools", f"and 'instructions' are larger than {MAX_OBJECT_BYTES} bytes")
        return found


def _merge(old: Mapping[str, Any], new: Mapping[str, Any], path: str) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        name = path + key
        before = old.get(key)
        if value is None and name not in _NULLABLE:
            continue
        if isinstance(value, dict):
            if name == "audio.input.turn_detection":
                value = {"type": "server_vad"} | value if before is None else dict(value)
                value.pop("model_version", None)
            if not isinstance(before, dict) or value.get("type", before.get("type")) != before.get("type"):
                before = {}
            value = _merge(before, value, name + ".")
        elif isinstance(value, float) and value.is_integer():
            value = int(value)
        merged[key] = value
    return merged


def _normalized(settings: SessionSettings, served: Served) -> SessionSettings:
    """What the model makes of settings. Raises: RequestError."""
    info = served.info
    if settings.type != "realtime":
        raise _unsupported("type", "there are no sessions of transcripts alone; send 'realtime'")
    if settings.model not in info.names:
        raise unknown_model(settings.model, info)
    if settings.prompt is not None:
        raise _unsupported("prompt", "no prompts are stored here; send 'instructions'")
    if not settings.output_modalities:
        raise invalid("output_modalities", "is empty: send ['audio'] or ['text']")
    modality: Modality = "audio" if "audio" in settings.output_modalities else "text"
    if modality == "audio" and not info.has_speech:
        raise no_speech(info, "output_modalities")
    limit = info.max_model_len
    if settings.max_output_tokens != "inf" and limit is not None and settings.max_output_tokens > limit:
        raise invalid("max_output_tokens", f"must be between 1 and {limit}, or 'inf'")
    audio = Audio(input=_input(settings.audio.input, info), output=_output(settings.audio.output, served))
    _tool_use(settings, info)
    return msgspec.structs.replace(
        settings, output_modalities=(modality,), tracing=None, include=None, audio=audio
    )


def _input(audio: AudioInput, info: ServiceInfo) -> AudioInput:
    transcription = audio.transcription
    for name in ("turn_detection", "transcription"):
        if getattr(audio, name) is not None and not (info.has_audio_input and info.has_text):
            raise RequestError(
                f"Model '{info.model}' takes no audio input: send null.",
                param=f"audio.input.{name}",
                code="unsupported_modality",
            )
    if transcription is not None:
        with _under("audio.input.transcription"):
            language_name(transcription.language)
        transcription = msgspec.structs.replace(transcription, model=info.model)
    return msgspec.structs.replace(audio, transcription=transcription, noise_reduction=None)


def _output(audio: AudioOutput, served: Served) -> AudioOutput:
    if audio.speed != 1:
        raise _unsupported("audio.output.speed", "answers are spoken at the speed 1")
    if audio.voice is UNSET:
        return audio
    name = audio.voice if isinstance(audio.voice, str) else audio.voice.id
    known = (*served.info.voices, *served.voices, *served.options.aliases_of_voices)
    if name not in known:
        raise voice_not_found(name, [*dict.fromkeys(known)], param="audio.output.voice")
    return msgspec.structs.replace(audio, voice=name)


def _fits(settings: SessionSettings, tools: Any) -> bool:
    """Whether the session's `tool_choice` has a meaning for other tools."""
    match settings.tool_choice:
        case NamedChoice(name=name):
            return isinstance(tools, list) and any(
                isinstance(tool, dict) and tool.get("name") == name for tool in tools
            )
        case "required":
            return bool(tools)
        case _:
            return True


def _tool_use(settings: SessionSettings, info: ServiceInfo) -> ToolUse:
    for index, tool in enumerate(settings.tools):
        if tool.get("type", "function") != "function":
            raise RequestError(
                f"Tools of the type {shorten(tool['type'])} are not supported: send functions.",
                param=f"tools[{index}].type",
                code="unsupported_value",
            )
    choice = settings.tool_choice
    body = ChatBody(
        tools=[_nested(tool) for tool in settings.tools],
        tool_choice=NamedTool(function=FunctionName(name=choice.name))
        if isinstance(choice, NamedChoice)
        else choice,
        parallel_tool_calls=settings.parallel_tool_calls is not False,
    )
    try:
        return parse_tools(body, info)
    except RequestError as error:
        raise RequestError(
            error.message.replace(".function", ""),
            param=(error.param or "").replace(".function", ""),
            code=error.code,
        ) from error


def _nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form of a chat, which the prompt has."""
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _unsupported(param: str, why: str) -> RequestError:
    return RequestError(f"'{param}' is not supported: {why}.", param=param, code="unsupported_value")


@contextmanager
def _under(where: str) -> Iterator[None]:
    """Errors name fields of the object `where`."""
    try:
        yield
    except RequestError as error:
        message, param = error.message, f"{where}.{error.param}"
        for quote in "'\"":
            message = message.replace(f"{quote}{error.param}", f"{quote}{param}")
        raise with_new_name(RequestError(message, param=param, code=error.code)) from error


def with_new_name(error: RequestError) -> RequestError:
    """The error for an unknown field: of one of OpenAI's beta, it says what to send now."""
    if error.code != "unknown_parameter" or (now := _NEW_NAMES.get(error.param or "")) is None:
        return error
    return RequestError(
        f'Unknown parameter: "{error.param}". Send "{now}".', param=error.param, code=error.code
    )
