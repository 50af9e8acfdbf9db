"""Transcripts: fields of the form, and the five formats of the answer."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from mingc.errors import RequestError, WorkerError
from mingc.prompts.media_decoder import TurnRules
from mingc.prompts.tokenizer import TextTokenizer
from mingc.prompts.transcription import LANGUAGES, MAX_TRANSCRIPT_TOKENS
from mingc.runtime.request import (
    SamplingParams,
    ServiceInfo,
    TranscriptDelta,
    TranscriptDone,
    TranscriptEvent,
    TranscriptionRequest,
    TranscriptSegment,
)
from mingc.server.http.field_errors import invalid, shorten
from mingc.server.http.forms import File, decode_form
from mingc.server.http.logprobs import transcript_logprobs
from mingc.server.http.parsing import refuse_all, unknown_model
from mingc.server.http.request_schemas import TRANSCRIPTION_REFUSED, with_other_fields
from mingc.server.http.response_schemas import SSE_DONE, TopLogprob, sse
from mingc.server.options import ServeOptions

Format = Literal["json", "text", "verbose_json", "srt", "vtt"]
_CONTENT_TYPES: dict[Format, str] = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "text/plain; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}
_MAX_SEGMENT_MS = 30_000
_MAX_PROMPT = 4096  # characters
_MAX_KEYWORDS = 256
_MAX_LANGUAGE = 32

_Word = Annotated[str, Meta(max_length=100)]


class ServerVad(Struct, forbid_unknown_fields=True, kw_only=True):
    """How speech is separated from silence."""

    type: Literal["server_vad"]
    threshold: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=2000)] | None = None
    silence_duration_ms: Annotated[int, Meta(ge=100, le=10_000)] | None = None


class TranscriptionBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of `POST /v1/audio/transcriptions`, a form; `TRANSCRIPTION_BODY` has all."""

    file: File
    model: str | None = None
    language: Annotated[str, Meta(max_length=_MAX_LANGUAGE)] | None = None
    prompt: Annotated[str, Meta(max_length=_MAX_PROMPT)] | None = None
    keywords: Annotated[list[_Word], Meta(max_length=_MAX_KEYWORDS)] | None = None
    response_format: Format | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    timestamp_granularities: Annotated[list[Literal["segment"]], Meta(max_length=4)] | None = None
    include: Annotated[list[Literal["logprobs"]], Meta(max_length=4)] | None = None
    chunking_strategy: Literal["auto"] | ServerVad | None = None
    stream: bool | None = None


TRANSCRIPTION_BODY = with_other_fields(
    TranscriptionBody,
    TRANSCRIPTION_REFUSED,
    str,
    lists=("known_speaker_names", "known_speaker_references", "languages"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTranscription:
    """A parsed form. `request` has no id yet."""

    request: TranscriptionRequest
    format: Format
    stream: bool
    has_logprobs: bool

    @property
    def prompt_text(self) -> str:
        """What the client's fields add to the prompt of every segment."""
        return self.request.topic + "".join(self.request.keywords)


def parse_transcription(
    raw: memoryview, info: ServiceInfo, options: ServeOptions, *, content_type: str
) -> ParsedTranscription:
    """Decode and check the form of a transcription.

    Raises:
        RequestError: with `param` naming the first field that is wrong.
    """
    if not (info.has_text and info.has_audio_input):
        raise RequestError(
            f"Model '{info.model}' cannot transcribe: it was exported without "
            f"{'an encoder for audio input' if info.has_text else 'its thinker'}.",
            param="model",
            code="unsupported_model",
        )
    body = decode_form(raw, content_type, TRANSCRIPTION_BODY)
    refuse_all(body, TRANSCRIPTION_REFUSED)
    if body.model is not None and body.model not in info.names:
        raise unknown_model(body.model, info)
    data = body.file.data
    if len(data) > options.max_media_bytes:
        raise RequestError(
            f"The file is larger than {options.max_media_bytes} bytes.",
            status=413,
            param="file",
            code="media_too_large",
        )
    if not len(data):
        raise RequestError("The file holds no bytes.", param="file", code="empty_media")
    format_ = body.response_format or "json"
    if body.include and format_ != "json":
        raise invalid("include", f"is not possible with 'response_format' '{format_}': use 'json'")
    if body.stream and format_ not in ("json", "text"):
        raise invalid("stream", f"is not possible with 'response_format' '{format_}': use 'json' or 'text'")
    rules = TurnRules(max_ms=_MAX_SEGMENT_MS)
    if isinstance(vad := body.chunking_strategy, ServerVad):
        given: dict[str, Any] = {
            "threshold": vad.threshold,
            "prefix_padding_ms": vad.prefix_padding_ms,
            "silence_ms": vad.silence_duration_ms,
        }
        rules = replace(rules, **{name: value for name, value in given.items() if value is not None})
    return ParsedTranscription(
        request=TranscriptionRequest(
            request_id="",
            audio=data,
            where="file",
            sampling=SamplingParams(
                max_tokens=MAX_TRANSCRIPT_TOKENS,
                temperature=body.temperature or 0.0,
                num_logprobs=0 if body.include or format_ == "verbose_json" else None,
            ),
            language=language_name(body.language),
            topic=body.prompt or "",
            keywords=tuple(body.keywords or ()),
            rules=rules,
        ),
        format=format_,
        stream=body.stream or False,
        has_logprobs=bool(body.include),
    )


def language_name(given: str | None) -> str | None:
    """The model's name of a language: of a code that is known, or what the client calls it."""
    name = (given or "").strip()
    code = name.lower().replace("_", "-").partition("-")[0]
    if not name or code in LANGUAGES:
        return LANGUAGES.get(code)
    if not all(each.isprintable() for each in name):
        raise invalid("language", "is not the name of a language")
    if name.isascii() and len(code) <= 3:
        known = ", ".join(f"'{each}'" for each in LANGUAGES)
        raise RequestError(
            f"The language {shorten(name)} cannot be forced by its code: leave it out, and the model recognizes it, or "
            f"send {known}, or the name that the model writes.",
            param="language",
            code="unsupported_language",
        )
    return name


class TokenDetails(Struct, kw_only=True, forbid_unknown_fields=True):
    text_tokens: int
    audio_tokens: int


class TokenUsage(Struct, tag_field="type", tag="tokens", kw_only=True, forbid_unknown_fields=True):
    input_tokens: int
    input_token_details: TokenDetails
    output_tokens: int
    total_tokens: int


class DurationUsage(Struct, tag_field="type", tag="duration", kw_only=True, forbid_unknown_fields=True):
    seconds: float


class Transcription(Struct, kw_only=True, forbid_unknown_fields=True):
    text: str
    logprobs: list[TopLogprob] | UnsetType = UNSET
    usage: TokenUsage


class SegmentObject(Struct, kw_only=True, forbid_unknown_fields=True):
    """Speech between silences. `start`, `end`: seconds. `seek`: the start in frames of 10 ms.

    `avg_logprob`: mean over `tokens`.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseTranscription(Struct, kw_only=True, forbid_unknown_fields=True):
    task: Literal["transcribe"] = "transcribe"
    language: str
    duration: float
    text: str
    segments: list[SegmentObject]
    usage: DurationUsage


class TextDeltaEvent(Struct, tag_field="type", tag="transcript.text.delta"):
    delta: str
    logprobs: list[TopLogprob] | UnsetType = UNSET


class TextDoneEvent(Struct, tag_field="type", tag="transcript.text.done"):
    text: str
    usage: TokenUsage
    logprobs: list[TopLogprob] | UnsetType = UNSET


async def transcript_events(
    events: AsyncIterator[TranscriptEvent], tokenizer: TextTokenizer | None
) -> AsyncIterator[bytes]:
    """Server-sent events: the deltas, the whole text with its usage, `[DONE]`. `tokenizer`: for log probabilities."""
    text: list[str] = []
    logprobs = _Logprobs(tokenizer)
    async for event in _until_done(events):
        if isinstance(event, TranscriptDelta):
            text.append(event.text)
            yield sse(TextDeltaEvent(event.text, logprobs.add(event)))
        elif isinstance(event, TranscriptDone):
            yield sse(TextDoneEvent("".join(text), _usage(event), logprobs.all))
            yield SSE_DONE


async def whole_transcript(
    events: AsyncIterator[TranscriptEvent], parsed: ParsedTranscription, tokenizer: TextTokenizer | None
) -> tuple[str, bytes]:
    """Content type and body of a whole answer. `tokenizer`: for log probabilities."""
    text: list[str] = []
    segments: list[TranscriptSegment] = []
    logprobs = _Logprobs(tokenizer)
    async for event in _until_done(events):
        if isinstance(event, TranscriptDelta):
            text.append(event.text)
            logprobs.add(event)
        elif isinstance(event, TranscriptSegment):
            segments += [event] if event.text else []
        else:
            done = event
    data = _encode("".join(text), segments, done, parsed, logprobs.all)
    return _CONTENT_TYPES[parsed.format], data


class _Logprobs:
    """Log probabilities of a transcript; absent without a tokenizer."""

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.all: list[TopLogprob] | UnsetType = UNSET if tokenizer is None else []

    def add(self, event: TranscriptDelta) -> list[TopLogprob] | UnsetType:
        """Those of one delta."""
        if self._tokenizer is None or isinstance(self.all, UnsetType):
            return UNSET
        made = transcript_logprobs(event.logprobs, self._tokenizer)
        self.all += made
        return made


def _encode(
    text: str,
    segments: list[TranscriptSegment],
    done: TranscriptDone,
    parsed: ParsedTranscription,
    logprobs: list[TopLogprob] | UnsetType,
) -> bytes:
    match parsed.format:
        case "json":
            return msgspec.json.encode(Transcription(text=text, logprobs=logprobs, usage=_usage(done)))
        case "text":
            return f"{text}\n".encode()
        case "srt":
            return "".join(_srt_cue(*each) for each in enumerate(segments, 1)).encode()
        case "vtt":
            return ("WEBVTT\n\n" + "".join(map(_vtt_cue, segments))).encode()
    temperature = parsed.request.sampling.temperature
    return msgspec.json.encode(
        VerboseTranscription(
            language=_spoken_language(segments),
            duration=done.duration_ms / 1000,
            text=text,
            segments=[_segment_object(*each, temperature) for each in enumerate(segments)],
            usage=DurationUsage(seconds=done.duration_ms / 1000),
        )
    )


async def _until_done(events: AsyncIterator[TranscriptEvent]) -> AsyncIterator[TranscriptEvent]:
    async for event in events:
        yield event
        if isinstance(event, TranscriptDone):
            return
    raise WorkerError("The model stopped before the transcript was complete.", code="unfinished")


def _usage(done: TranscriptDone) -> TokenUsage:
    tokens = done.usage
    return TokenUsage(
        input_tokens=tokens.prompt_tokens,
        input_token_details=TokenDetails(
            text_tokens=tokens.prompt_tokens - done.audio_tokens, audio_tokens=done.audio_tokens
        ),
        output_tokens=tokens.completion_tokens,
        total_tokens=tokens.prompt_tokens + tokens.completion_tokens,
    )


def _spoken_language(segments: list[TranscriptSegment]) -> str:
    """The one that is spoken longest, in small letters as OpenAI has it; empty without speech."""
    spoken: dict[str, int] = {}
    for each in segments:
        name = (each.language or "").lower()
        spoken[name] = spoken.get(name, 0) + each.end_ms - each.start_ms
    return max(spoken, key=lambda name: (bool(name), spoken[name]), default="")


def _segment_object(index: int, segment: TranscriptSegment, temperature: float) -> SegmentObject:
    raw = segment.text.encode()
    return SegmentObject(
        id=index,
        seek=segment.start_ms // 10,
        start=segment.start_ms / 1000,
        end=segment.end_ms / 1000,
        text=segment.text,
        tokens=list(segment.tokens),
        temperature=temperature,
        avg_logprob=segment.avg_logprob,
        compression_ratio=len(raw) / len(zlib.compress(raw)),
        no_speech_prob=1 - segment.speech_probability,
    )


def _srt_cue(number: int, segment: TranscriptSegment) -> str:
    times = f"{_clock(segment.start_ms, ',')} --> {_clock(segment.end_ms, ',')}"
    return f"{number}\n{times}\n{_one_line(segment.text)}\n\n"


def _vtt_cue(segment: TranscriptSegment) -> str:
    text = _one_line(segment.text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"{_clock(segment.start_ms, '.')} --> {_clock(segment.end_ms, '.')}\n{text}\n\n"


def _one_line(text: str) -> str:
    """A blank line would end the cue."""
    return " ".join(text.split())


def _clock(milliseconds: int, point: str) -> str:
    seconds, rest = divmod(milliseconds, 1000)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{point}{rest:03}"
