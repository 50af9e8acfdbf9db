"""Events of OpenAI's realtime protocol: those of the client are parsed and checked, those of the server are structs.

The order of the server's events is the session's matter.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from mingc.errors import RequestError
from mingc.prompts.conversation import MediaPart
from mingc.runtime.request import Usage
from mingc.server.error_objects import error_response
from mingc.server.http.body import decode_body
from mingc.server.http.field_errors import as_integer, missing
from mingc.server.http.media import decode_data
from mingc.server.http.request_schemas import MAX_MESSAGES, Media
from mingc.server.realtime.input_audio import Encoding
from mingc.server.realtime.items import (
    InputFields,
    Item,
    ItemFields,
    ItemId,
    ItemReference,
    make_item,
)
from mingc.server.realtime.session import ResponseFields, Served, new_id, with_new_name

# A client event of more bytes is parsed on a thread: base64 of 15 MiB takes 30 ms.
INLINE_BYTES = 64 * 1024
MAX_APPEND_BYTES = 15 << 20
_MAX_ID = 512  # characters
_MAX_MS = 1 << 40

_EventId = Annotated[str, Meta(max_length=_MAX_ID)]
_Milliseconds = Annotated[int, Meta(ge=0, le=_MAX_MS)] | Annotated[float, Meta(ge=0, le=_MAX_MS)]


class _Identified(Struct):
    event_id: str | None = None


class _Event(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """`event_id`: the client's name of the event, which an error that it causes repeats."""

    event_id: _EventId | None = None


class SessionUpdate(_Event, kw_only=True, tag="session.update"):
    """`session`: for `session.update`."""

    session: dict[str, Any]


class _AppendFields(_Event, kw_only=True, tag="input_audio_buffer.append"):
    audio: Media


class InputAudioBufferCommit(_Event, kw_only=True, tag="input_audio_buffer.commit"):
    pass


class InputAudioBufferClear(_Event, kw_only=True, tag="input_audio_buffer.clear"):
    pass


class _ItemCreateFields(_Event, kw_only=True, tag="conversation.item.create"):
    item: ItemFields
    previous_item_id: ItemId | None = None


class ItemDelete(_Event, kw_only=True, tag="conversation.item.delete"):
    item_id: str


class ItemRetrieve(_Event, kw_only=True, tag="conversation.item.retrieve"):
    item_id: str


class ItemTruncate(_Event, kw_only=True, tag="conversation.item.truncate"):
    """The user heard so much of a spoken answer."""

    item_id: str
    content_index: _Milliseconds
    audio_end_ms: _Milliseconds


class _Response(ResponseFields, kw_only=True):
    input: Annotated[list[InputFields], Meta(max_length=MAX_MESSAGES)] | None = None


class _ResponseCreateFields(_Event, kw_only=True, tag="response.create"):
    response: _Response | None = None


class ResponseCancel(_Event, kw_only=True, tag="response.cancel"):
    response_id: str | None = None


class InputAudioBufferAppend(Struct, kw_only=True):
    """`audio`: in the session's input format; it may end within a sample."""

    event_id: str | None = None
    audio: bytes


class ItemCreate(Struct, kw_only=True):
    """`item`: new; for `Conversation.insert`."""

    event_id: str | None = None
    item: Item
    previous_item_id: str | None = None


class ResponseCreate(Struct, kw_only=True):
    """`response`: for `response_settings`. `input`: new items, and ids of the conversation's; None: all of these."""

    event_id: str | None = None
    response: ResponseFields
    input: tuple[Item | str, ...] | None = None


ClientEvent = (
    SessionUpdate
    | InputAudioBufferAppend
    | InputAudioBufferCommit
    | InputAudioBufferClear
    | ItemCreate
    | ItemDelete
    | ItemRetrieve
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
)

_Fields = (
    SessionUpdate
    | _AppendFields
    | InputAudioBufferCommit
    | InputAudioBufferClear
    | _ItemCreateFields
    | ItemDelete
    | ItemRetrieve
    | ItemTruncate
    | _ResponseCreateFields
    | ResponseCancel
)


def parse_event(raw: bytes, served: Served, encoding: Encoding) -> ClientEvent:
    """Decode and check an event of a client. `encoding`: of the session's input.

    Beyond `INLINE_BYTES` call it on a thread, which holds Python's lock for a few milliseconds at a time.

    Raises: RequestError with `param` and `code`.
    """
    try:
        return _parse(raw, served, encoding)
    except RequestError as error:
        if error.param == "body" or error.code in ("invalid_json", "body_too_complex"):
            message = error.message.replace("The request body", "The event").replace("'body'", "The event")
            raise RequestError(message, code="invalid_event") from error
        if error.param == "type":
            is_unknown = error.code == "invalid_value"
            code = "unsupported_event" if is_unknown else "invalid_event"
            raise RequestError(error.message, param="type", code=code) from error
        raise with_new_name(error) from error


def event_id_of(raw: bytes) -> str | None:
    """The id of an event for the error that it causes; None if there is none, or it cannot be found."""
    try:
        found = msgspec.json.decode(raw, type=_Identified).event_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if found is not None and len(found) <= _MAX_ID else None


def _parse(raw: bytes, served: Served, encoding: Encoding) -> ClientEvent:
    event: _Fields = decode_body(raw, cast(Any, _Fields))
    match event:
        case _AppendFields(event_id=event_id, audio=audio):
            part = MediaPart(kind="audio", data=audio, where="audio", is_base64=True)
            data = decode_data(part, audio, MAX_APPEND_BYTES)
            return InputAudioBufferAppend(event_id=event_id, audio=bytes(data))
        case _ItemCreateFields():
            item = make_item(event.item, "item", served, encoding)
            return ItemCreate(event_id=event.event_id, item=item, previous_item_id=event.previous_item_id)
        case _ResponseCreateFields():
            response = event.response or _Response()
            given = None
            if response.input is not None:
                given = tuple(
                    _input(fields, f"response.input[{index}]", served, encoding)
                    for index, fields in enumerate(response.input)
                )
                response.input = None  # has the base64
            return ResponseCreate(event_id=event.event_id, response=response, input=given)
        case ItemTruncate():
            event.content_index = as_integer(event.content_index, "content_index") or 0
            event.audio_end_ms = as_integer(event.audio_end_ms, "audio_end_ms") or 0
    return event


def _input(fields: InputFields, param: str, served: Served, encoding: Encoding) -> Item | str:
    if not isinstance(fields, ItemReference):
        return make_item(fields, param, served, encoding)
    if fields.id is None:
        raise missing(f"{param}.id")
    return fields.id


# Events of the server


class ServerEvent(Struct, kw_only=True, tag_field="type"):
    event_id: str = field(default_factory=lambda: new_id("event"))


class ErrorDetails(Struct, kw_only=True):
    """`event_id`: of the client's event that caused it."""

    type: Literal["invalid_request_error", "server_error"]
    code: str | None
    message: str
    param: str | None = None
    event_id: str | None = None


class ErrorEvent(ServerEvent, kw_only=True, tag="error"):
    """The session goes on."""

    error: ErrorDetails


def error_event(error: Exception, event_id: str | None = None) -> ErrorEvent:
    """The event for an error; a bug shows no details. `event_id`: of the client's event that caused it."""
    found = error_response(error).error
    return ErrorEvent(
        error=ErrorDetails(
            type="invalid_request_error" if found.type == "invalid_request_error" else "server_error",
            code=found.code,
            message=found.message,
            param=found.param,
            event_id=event_id,
        )
    )


class SessionCreated(ServerEvent, kw_only=True, tag="session.created"):
    session: dict[str, Any]


class SessionUpdated(ServerEvent, kw_only=True, tag="session.updated"):
    session: dict[str, Any]


class SpeechStartedEvent(ServerEvent, kw_only=True, tag="input_audio_buffer.speech_started"):
    """`item_id`: of the user's item that the turn becomes."""

    item_id: str
    audio_start_ms: int


class SpeechStoppedEvent(ServerEvent, kw_only=True, tag="input_audio_buffer.speech_stopped"):
    item_id: str
    audio_end_ms: int


class BufferCommitted(ServerEvent, kw_only=True, tag="input_audio_buffer.committed"):
    item_id: str
    previous_item_id: str | None


class BufferCleared(ServerEvent, kw_only=True, tag="input_audio_buffer.cleared"):
    pass


class TimeoutTriggered(ServerEvent, kw_only=True, tag="input_audio_buffer.timeout_triggered"):
    item_id: str
    audio_start_ms: int
    audio_end_ms: int


class ItemAdded(ServerEvent, kw_only=True, tag="conversation.item.added"):
    """`previous_item_id`: None for the first item only."""

    previous_item_id: str | None
    item: dict[str, Any]


class ItemDone(ServerEvent, kw_only=True, tag="conversation.item.done"):
    previous_item_id: str | None
    item: dict[str, Any]


class ItemDeleted(ServerEvent, kw_only=True, tag="conversation.item.deleted"):
    item_id: str


class ItemRetrieved(ServerEvent, kw_only=True, tag="conversation.item.retrieved"):
    item: dict[str, Any]


class ItemTruncated(ServerEvent, kw_only=True, tag="conversation.item.truncated"):
    item_id: str
    content_index: int
    audio_end_ms: int


class TranscriptionEvent(ServerEvent, kw_only=True):
    item_id: str
    content_index: int = 0


class TranscriptionDelta(
    TranscriptionEvent, kw_only=True, tag="conversation.item.input_audio_transcription.delta"
):
    delta: str


class AudioTextTokens(Struct, kw_only=True):
    text_tokens: int
    audio_tokens: int


class TranscriptionUsage(Struct, kw_only=True, tag_field="type", tag="tokens"):
    total_tokens: int
    input_tokens: int
    input_token_details: AudioTextTokens
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage, audio_tokens: int) -> TranscriptionUsage:
        """`audio_tokens`: of the prompt."""
        return cls(
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            input_tokens=usage.prompt_tokens,
            input_token_details=AudioTextTokens(
                text_tokens=usage.prompt_tokens - audio_tokens, audio_tokens=audio_tokens
            ),
            output_tokens=usage.completion_tokens,
        )


class TranscriptionCompleted(
    TranscriptionEvent, kw_only=True, tag="conversation.item.input_audio_transcription.completed"
):
    transcript: str
    usage: TranscriptionUsage


class FailureDetails(Struct, kw_only=True):
    """What is absent has no key: agents-js does not accept null."""

    type: str
    message: str
    code: str | UnsetType = UNSET

    @classmethod
    def of(cls, error: Exception) -> FailureDetails:
        """A bug shows no details."""
        found = error_event(error).error
        return cls(type=found.type, message=found.message, code=found.code or UNSET)


class TranscriptionFailed(
    TranscriptionEvent, kw_only=True, tag="conversation.item.input_audio_transcription.failed"
):
    error: FailureDetails


class StatusDetails(Struct, kw_only=True):
    """Why a response is not complete."""

    type: Literal["completed", "cancelled", "incomplete", "failed"]
    reason: Literal["turn_detected", "client_cancelled", "max_output_tokens"] | UnsetType = UNSET
    error: FailureDetails | UnsetType = UNSET


class MediaTokens(Struct, kw_only=True):
    text_tokens: int
    audio_tokens: int
    image_tokens: int


class InputTokens(MediaTokens, kw_only=True):
    cached_tokens: int
    cached_tokens_details: MediaTokens


class ResponseUsage(Struct, kw_only=True):
    """Tokens of the prompt and of the answer, whose audio tokens are patches."""

    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: InputTokens
    output_token_details: AudioTextTokens

    @classmethod
    def of(
        cls, usage: Usage, *, audio: int = 0, image: int = 0, cached_audio: int = 0, cached_image: int = 0
    ) -> ResponseUsage:
        """`audio`, `image`: how many of the prompt's tokens; `cached_…`: of those that the prefix cache held."""
        num_output = usage.completion_tokens + usage.audio_patches
        return cls(
            total_tokens=usage.prompt_tokens + num_output,
            input_tokens=usage.prompt_tokens,
            output_tokens=num_output,
            input_token_details=InputTokens(
                text_tokens=usage.prompt_tokens - audio - image,
                audio_tokens=audio,
                image_tokens=image,
                cached_tokens=usage.cached_tokens,
                cached_tokens_details=MediaTokens(
                    text_tokens=usage.cached_tokens - cached_audio - cached_image,
                    audio_tokens=cached_audio,
                    image_tokens=cached_image,
                ),
            ),
            output_token_details=AudioTextTokens(
                text_tokens=usage.completion_tokens, audio_tokens=usage.audio_patches
            ),
        )


ResponseStatus = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]


class ResponseObject(Struct, kw_only=True):
    """`audio`: format and voice of a spoken one. `conversation_id`: None for one that is out of band."""

    object: Literal["realtime.response"] = "realtime.response"
    id: str
    status: ResponseStatus
    status_details: StatusDetails | UnsetType = UNSET
    conversation_id: str | None
    output_modalities: tuple[str, ...]
    max_output_tokens: int | Literal["inf"]
    metadata: dict[str, str] | None
    audio: dict[str, Any] | UnsetType = UNSET
    output: list[dict[str, Any]]
    usage: ResponseUsage | UnsetType = UNSET
    timings_ms: dict[str, float] | UnsetType = UNSET


class ResponseCreated(ServerEvent, kw_only=True, tag="response.created"):
    response: ResponseObject


class ResponseDone(ServerEvent, kw_only=True, tag="response.done"):
    response: ResponseObject


class OutputItemEvent(ServerEvent, kw_only=True):
    response_id: str
    output_index: int
    item: dict[str, Any]


class OutputItemAdded(OutputItemEvent, kw_only=True, tag="response.output_item.added"):
    pass


class OutputItemDone(OutputItemEvent, kw_only=True, tag="response.output_item.done"):
    pass


class OutputEvent(ServerEvent, kw_only=True):
    """Part of an item of a response."""

    response_id: str
    item_id: str
    output_index: int


class ContentEvent(OutputEvent, kw_only=True):
    content_index: int = 0


class AudioContentPart(Struct, kw_only=True, tag_field="type", tag="audio"):
    transcript: str = ""


class TextContentPart(Struct, kw_only=True, tag_field="type", tag="text"):
    text: str = ""


class ContentPartAdded(ContentEvent, kw_only=True, tag="response.content_part.added"):
    part: AudioContentPart | TextContentPart


class ContentPartDone(ContentEvent, kw_only=True, tag="response.content_part.done"):
    part: AudioContentPart | TextContentPart


class OutputAudioDelta(ContentEvent, kw_only=True, tag="response.output_audio.delta"):
    """`delta`: base64 in the session's output format."""

    delta: str


class OutputAudioDone(ContentEvent, kw_only=True, tag="response.output_audio.done"):
    pass


class TranscriptDelta(ContentEvent, kw_only=True, tag="response.output_audio_transcript.delta"):
    delta: str


class TranscriptDone(ContentEvent, kw_only=True, tag="response.output_audio_transcript.done"):
    transcript: str


class OutputTextDelta(ContentEvent, kw_only=True, tag="response.output_text.delta"):
    delta: str


class OutputTextDone(ContentEvent, kw_only=True, tag="response.output_text.done"):
    text: str


class ArgumentsDelta(OutputEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    call_id: str
    delta: str


class ArgumentsDone(OutputEvent, kw_only=True, tag="response.function_call_arguments.done"):
    call_id: str
    name: str
    arguments: str
