"""JSON objects of responses, declared once: what the server sends, and what the OpenAPI document says about it."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from mingc import __version__
from mingc.runtime.request import (
    NOTHING_TO_SPEAK,
    Done,
    Event,
    FinishReason,
    ServiceInfo,
    TextDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallFailed,
    Usage,
)
from mingc.runtime.voices import VoiceInfo
from mingc.server.options import ServeOptions
from mingc.server.state import ServerState, Status

_AUDIO_KEPT_S = 0  # audio is not stored: `expires_at` is the time of creation


class Abilities(Struct, kw_only=True):
    """Kinds of input and output of the artifact, the routes that run it, and the limits of media that it takes."""

    input_modalities: list[str]
    output_modalities: list[str]
    routes: list[str]
    media_limits: dict[str, float] | UnsetType = UNSET


class ModelObject(Abilities, tag_field="object", tag="model", forbid_unknown_fields=True, kw_only=True):
    """The served model under one of its names; `routes`: the routes that it can answer."""

    id: str
    created: int
    owned_by: str
    sample_rate: int


class ModelList(Struct, tag_field="object", tag="list", forbid_unknown_fields=True):
    data: list[ModelObject]


class VoiceObject(Struct, tag_field="object", tag="audio.voice", forbid_unknown_fields=True, kw_only=True):
    """A voice. `type`: `built_in` for the model's own. `duration`: seconds of its recording."""

    id: str
    name: str
    created_at: int
    type: Literal["built_in", "audio_sample", "speaker_embedding"]
    ref_text: str | None = None
    duration: float | None = None
    consent: str | UnsetType = UNSET
    speaker_description: str | UnsetType = UNSET
    success: bool | UnsetType = UNSET


class VoiceDeleted(
    Struct, tag_field="object", tag="audio.voice.deleted", forbid_unknown_fields=True, kw_only=True
):
    id: str
    deleted: bool = True
    success: bool = True


class VoiceList(Struct, tag_field="object", tag="list", forbid_unknown_fields=True, kw_only=True):
    """`voices`: all names; `data`: the voices, and those of `uploaded_voices` again.

    `aliases`: further names of voices (`--voice-alias`).
    """

    voices: list[str]
    default: str | None
    aliases: dict[str, str]
    data: list[VoiceObject]
    uploaded_voices: list[VoiceObject]
    has_more: bool = False


def voice_object(voice: VoiceInfo, *, is_new: bool = False) -> VoiceObject:
    """A voice as clients see it; one that was just registered reports success."""
    return VoiceObject(
        id=voice.id,
        name=voice.name,
        created_at=voice.created_at,
        type=voice.kind,
        ref_text=voice.transcript,
        duration=voice.seconds,
        consent=UNSET if voice.consent is None else voice.consent,
        speaker_description=UNSET if voice.description is None else voice.description,
        success=True if is_new else UNSET,
    )


def voice_list(voices: Sequence[VoiceInfo], default: str | None, aliases: Mapping[str, str]) -> VoiceList:
    """The list of all voices."""
    return VoiceList(
        voices=[each.name for each in voices],
        default=default,
        aliases=dict(aliases),
        data=[voice_object(each) for each in voices],
        uploaded_voices=[voice_object(each) for each in voices if each.kind != "built_in"],
    )


class ReadyResponse(Struct, forbid_unknown_fields=True):
    status: Status


class HealthResponse(Abilities, forbid_unknown_fields=True, kw_only=True):
    status: Status
    model: str
    num_requests_running: int
    max_model_len: int | UnsetType = UNSET
    max_total_tokens: int | UnsetType = UNSET
    all_reduce: str | UnsetType = UNSET


class PromptTokensDetails(Struct, forbid_unknown_fields=True):
    cached_tokens: int


class ChatUsage(Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's usage of a chat (tokens of text or pictures), with audio patches and seconds added."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    audio_patches: int
    audio_seconds: float


class AnswerAudio(Struct, forbid_unknown_fields=True, kw_only=True):
    """Speech of an answer; `data` is base64."""

    id: str
    data: str
    expires_at: int
    transcript: str


class CalledFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """`arguments`: a JSON object as text."""

    name: str
    arguments: str


class AnswerCall(Struct, tag_field="type", tag="function", forbid_unknown_fields=True, kw_only=True):
    id: str
    function: CalledFunction


class PictureUrl(Struct, forbid_unknown_fields=True):
    """`url`: a data URL."""

    url: str


class PicturePart(Struct, tag_field="type", tag="image_url", forbid_unknown_fields=True, kw_only=True):
    image_url: PictureUrl


class AnswerMessage(Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True, kw_only=True):
    """`content`: null if the answer has calls and no text; a list if it is a picture."""

    content: str | list[PicturePart] | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    audio: AnswerAudio | UnsetType = UNSET


class TopLogprob(Struct, forbid_unknown_fields=True, kw_only=True):
    """A token, the bytes that it adds to the text's UTF-8 (null for a special token), and its log probability."""

    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, forbid_unknown_fields=True):
    content: list[TokenLogprob]
    refusal: None = None


class Choice(Struct, forbid_unknown_fields=True, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class SpeechError(Struct, forbid_unknown_fields=True, kw_only=True):
    """Why the requested speech of an answer is missing."""

    code: str
    message: str


class ChatCompletion(
    Struct, tag_field="object", tag="chat.completion", forbid_unknown_fields=True, kw_only=True
):
    id: str
    created: int
    model: str
    choices: Annotated[list[Choice], Meta(min_length=1)]
    usage: ChatUsage
    timings_ms: dict[str, float]
    speech_error: SpeechError | UnsetType = UNSET


class DeltaAudio(Struct, kw_only=True):
    """Part of an answer's speech; JSON has base64 of `data`. Clients join the fields of all chunks, so the id is in the
    first one only."""

    id: str | UnsetType = UNSET
    data: bytes | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    transcript: str | UnsetType = UNSET


class DeltaFunction(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class DeltaCall(Struct, kw_only=True):
    """Part of a call. Clients join the fields of all chunks, so id, type and name are in the first one only."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: DeltaFunction


class Delta(Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | list[PicturePart] | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[DeltaCall] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    audio: DeltaAudio | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Struct, tag_field="object", tag="chat.completion.chunk", kw_only=True):
    """One event of a streamed chat."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: ChatUsage | UnsetType | None = UNSET
    timings_ms: dict[str, float] | UnsetType = UNSET
    speech_error: SpeechError | UnsetType = UNSET


class CompletionLogprobs(Struct, forbid_unknown_fields=True, kw_only=True):
    """Lists with one item for each token."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)


class CompletionChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextCompletion(
    Struct, tag_field="object", tag="text_completion", forbid_unknown_fields=True, kw_only=True
):
    """A completion, or one event of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChatUsage | UnsetType | None = UNSET
    timings_ms: dict[str, float] | UnsetType = UNSET


class TokenList(Struct, forbid_unknown_fields=True, kw_only=True):
    """`token_strs`: the tokens as the vocabulary writes them, if they are requested."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct, forbid_unknown_fields=True):
    prompt: str


class Version(Struct, forbid_unknown_fields=True):
    version: str


VERSION = Version(__version__)


class SpeechDelta(Struct, tag_field="type", tag="speech.audio.delta"):
    """`audio`: a part of the clip; JSON has base64."""

    audio: bytes


class SpeechSegment(Struct, tag_field="type", tag="speech.segment", kw_only=True):
    """A segment begins `start` seconds after the clip; `text`: what is said, numbers as words."""

    text: str
    start: float


class SegmentTime(Struct, kw_only=True):
    """When a segment is heard, in seconds of the clip."""

    text: str
    start: float
    end: float


class SpeechUsage(Struct, kw_only=True):
    """OpenAI's usage of a speech request; output tokens are audio patches."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    audio_seconds: float


class SpeechDone(Struct, tag_field="type", tag="speech.audio.done"):
    usage: SpeechUsage
    segments: list[SegmentTime] | UnsetType = UNSET


SSE_DONE = b"data: [DONE]\n\n"


def sse(value: Struct) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def model_object(info: ServiceInfo, options: ServeOptions, created: int, name: str) -> ModelObject:
    """Describe the served model under one of its names."""
    return ModelObject(
        id=name,
        created=created,
        owned_by="mingc",
        sample_rate=info.sample_rate,
        **_abilities(info, options),
    )


def health_response(state: ServerState) -> HealthResponse:
    info = state.service.info
    return HealthResponse(
        status=state.status,
        model=info.model,
        num_requests_running=state.num_running,
        max_model_len=UNSET if info.max_model_len is None else info.max_model_len,
        max_total_tokens=UNSET if info.max_total_tokens is None else info.max_total_tokens,
        all_reduce=UNSET if info.all_reduce is None else info.all_reduce,
        **_abilities(info, state.options),
    )


def _abilities(info: ServiceInfo, options: ServeOptions) -> dict[str, Any]:
    """The fields of `Abilities`."""
    inputs = {"text": True, "image": info.has_image, "audio": info.has_audio_input, "video": info.has_video}
    return {
        "input_modalities": [name for name, is_able in inputs.items() if is_able],
        "output_modalities": ["text"] * info.has_text
        + ["audio"] * info.has_speech
        + ["image"] * info.has_image_output,
        "routes": ["/v1/chat/completions", "/v1/completions"] * info.has_text
        + ["/v1/audio/transcriptions"] * (info.has_text and info.has_audio_input)
        + ["/v1/audio/speech"] * info.has_speech
        + ["/v1/images/generations"] * info.has_image_output
        + ["/v1/images/edits"] * (info.has_image_output and info.has_image),
        "media_limits": {"request_bytes": options.max_media_bytes, **info.media_limits}
        if info.media_limits
        else UNSET,
    }


def chat_usage(usage: Usage) -> ChatUsage:
    num_tokens = usage.completion_tokens + usage.image_tokens
    return ChatUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=num_tokens,
        total_tokens=usage.prompt_tokens + num_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
        audio_patches=usage.audio_patches,
        audio_seconds=usage.audio_seconds,
    )


def speech_done(usage: Usage, segments: list[SegmentTime] | None = None) -> SpeechDone:
    return SpeechDone(
        segments=UNSET if segments is None else segments,
        usage=SpeechUsage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.audio_patches,
            total_tokens=usage.prompt_tokens + usage.audio_patches,
            audio_seconds=usage.audio_seconds,
        ),
    )


class Answer:
    """Collects what a client gets of an answer besides its speech.

    Attributes:
        calls: those that are complete.
        done: the last event that was added.
    """

    done: Done

    def __init__(self) -> None:
        self._content: list[str] = []
        self._text: list[str] = []
        self._thought: list[str] = []
        self.calls: list[ToolCallDone] = []

    def add(self, event: Event) -> None:
        match event:
            case TextDelta(kind="thought"):
                self._thought.append(event.text)
            case TextDelta():
                self._content.append(event.text)
                self._text.append(event.text)
            case ToolCallDone():
                self.calls.append(event)
            case ToolCallFailed():
                self._content.append(event.text)
            case Done():
                self.done = event

    @property
    def content(self) -> str | None:
        """Its text and what was to be a call; None if it has calls alone."""
        return "".join(self._content) or (None if self.calls else "")

    @property
    def text(self) -> str:
        """Its text alone, which is what its speech says."""
        return "".join(self._text)

    @property
    def thought(self) -> str:
        return "".join(self._thought)

    @property
    def has_only_calls(self) -> bool:
        """Whether it calls tools and says nothing: then it has no clip."""
        return bool(self.calls) and not self.done.usage.audio_patches


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatResponseBuilder:
    """Builds the response objects of one chat request, which share id, model and time.

    `index`: the answer of whose stream it builds chunks.
    """

    request_id: str
    model: str
    include_usage: bool = False
    index: int = 0
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def completion(
        self,
        answers: Sequence[Answer],
        *,
        audio: str | None,
        logprobs: Sequence[ChatLogprobs] | None = None,
    ) -> ChatCompletion:
        """Make the complete answers. `audio`: base64 of the clip of a single one."""
        choices = []
        for index, answer in enumerate(answers):
            calls = [
                AnswerCall(id=_call_id(), function=CalledFunction(name=call.name, arguments=call.arguments))
                for call in answer.calls
            ]
            message = AnswerMessage(
                content=answer.content,
                refusal=None,
                reasoning_content=answer.thought or UNSET,
                tool_calls=calls or UNSET,
            )
            if audio is not None:
                message.audio = AnswerAudio(
                    id=self._audio_id, data=audio, expires_at=_expires_at(), transcript=answer.text
                )
            found = None if logprobs is None else logprobs[index]
            choices.append(
                Choice(index=index, message=message, logprobs=found, finish_reason=answer.done.finish_reason)
            )
        dones = [answer.done for answer in answers]
        return ChatCompletion(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=chat_usage(total_usage(dones)),
            timings_ms=last_timings(dones),
            speech_error=_speech_error(dones[0]),
        )

    def pictures(self, pictures: Sequence[PicturePart], done: Done) -> ChatCompletion:
        """Make answers of a picture each."""
        return ChatCompletion(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=[
                Choice(
                    index=index,
                    message=AnswerMessage(content=[picture], refusal=None),
                    logprobs=None,
                    finish_reason=done.finish_reason,
                )
                for index, picture in enumerate(pictures)
            ],
            usage=chat_usage(done.usage),
            timings_ms=done.timings_ms,
        )

    def end_chunk(self, done: Done) -> ChatChunk:
        """The finish reason, and why there is no speech."""
        chunk = self.chunk(Delta(), done.finish_reason, done.timings_ms)
        return msgspec.structs.replace(chunk, speech_error=_speech_error(done))

    def chunk(
        self,
        delta: Delta,
        finish_reason: FinishReason | None = None,
        timings_ms: dict[str, float] | None = None,
        logprobs: ChatLogprobs | None = None,
    ) -> ChatChunk:
        return ChatChunk(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=[
                ChunkChoice(index=self.index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
            ],
            usage=None if self.include_usage else UNSET,
            timings_ms=UNSET if timings_ms is None else timings_ms,
        )

    def role_chunk(self, *, has_text: bool = True) -> ChatChunk:
        """`has_text`: whether text comes first, not a thought or a call."""
        return self.chunk(Delta(role="assistant", content="" if has_text else None, refusal=None))

    def call_chunk(self, part: ToolCallDelta) -> ChatChunk:
        """The first part of a call, with its name, gives it an id."""
        call = DeltaCall(index=part.index, function=DeltaFunction(arguments=part.arguments))
        if part.name is not None:
            call.id, call.type, call.function.name = _call_id(), "function", part.name
        return self.chunk(Delta(tool_calls=[call]))

    def audio_chunk(self, data: bytes, *, is_first: bool) -> ChatChunk:
        """A part of the clip."""
        return self.chunk(Delta(audio=DeltaAudio(id=self._audio_id if is_first else UNSET, data=data)))

    def audio_end_chunk(self, transcript: str, *, is_first: bool) -> ChatChunk:
        """End of the audio: no data, the complete transcript. `is_first`: the clip is empty."""
        audio = DeltaAudio(expires_at=_expires_at(), transcript=transcript)
        if is_first:
            audio.id, audio.data = self._audio_id, b""
        return self.chunk(Delta(audio=audio))

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return msgspec.structs.replace(self.chunk(Delta()), choices=[], usage=chat_usage(usage))

    @property
    def _audio_id(self) -> str:
        return "audio-" + self.request_id.removeprefix("chatcmpl-")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionResponseBuilder:
    """Builds the response objects of one completion request, which share id, model and time."""

    request_id: str
    model: str
    include_usage: bool = False
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def completion(self, choices: list[CompletionChoice], dones: Sequence[Done]) -> TextCompletion:
        """Make the complete answers."""
        return TextCompletion(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=chat_usage(total_usage(dones)),
            timings_ms=last_timings(dones),
        )

    def chunk(
        self, *choices: CompletionChoice, done: Done | None = None, usage: Usage | None = None
    ) -> TextCompletion:
        """One event of a stream. `done`: the end of its answer."""
        return TextCompletion(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=[*choices],
            usage=chat_usage(usage) if usage else None if self.include_usage else UNSET,
            timings_ms=UNSET if done is None else done.timings_ms,
        )


def total_usage(dones: Sequence[Done]) -> Usage:
    return sum((done.usage for done in dones), Usage())


def last_timings(dones: Sequence[Done]) -> dict[str, float]:
    """The timings of the answer that ended last."""
    return max((done.timings_ms for done in dones), key=lambda timings: timings.get("done", 0.0))


def _speech_error(done: Done) -> SpeechError | UnsetType:
    if not done.has_nothing_to_speak:
        return UNSET
    return SpeechError(code="nothing_to_speak", message=NOTHING_TO_SPEAK)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _expires_at() -> int:
    return int(time.time()) + _AUDIO_KEPT_S
