"""The `messages` of a chat request, with the top-level `images`, `audios` and `videos` put into the first user message.

Media stay strings (URL, path, base64) with the place they stood at; `mingc.runtime.http.media` turns them into bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mingc.errors import RequestError
from mingc.runtime.http.json_fields import Fields, check_string, missing, nearest, shorten, wrong_type
from mingc.runtime.request import Message, Role, ServiceInfo, TextPart

MediaKind = Literal["image", "audio", "video"]
MAX_MESSAGES = 4096
MAX_PARTS = 1024

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_PART_TYPES = ("text", "image_url", "input_audio", "audio_url", "video_url")
_AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm")


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSource:
    """Where one image, clip or video comes from. `is_base64`: the data itself, with or without a `data:` prefix."""

    kind: MediaKind
    source: str
    param: str
    is_base64: bool = False


def parse_messages(fields: Fields, info: ServiceInfo) -> tuple[Message[MediaSource], ...]:
    """`messages` and the three media lists of a chat body.

    Raises:
        RequestError: for a wrong shape, an unknown role or part, or media that the artifact cannot take.
    """
    items = fields.items("messages", max_items=MAX_MESSAGES)
    if items is None:
        raise missing("messages")
    if not items:
        raise RequestError(
            "'messages' is empty: send at least one message.", param="messages", code="invalid_value"
        )
    messages = [_message(Fields(item, f"messages[{i}]"), info) for i, item in enumerate(items)]
    return tuple(_inject(messages, fields, info))


def _inject(
    messages: list[Message[MediaSource]], fields: Fields, info: ServiceInfo
) -> list[Message[MediaSource]]:
    """Images go before the content of the first user message, audio and video after it (spec serving §2.1)."""
    images = _media_list(fields, "images", "image", info)
    clips = _media_list(fields, "audios", "audio", info)
    videos = _media_list(fields, "videos", "video", info)
    if not (images or clips or videos):
        return messages
    for index, message in enumerate(messages):
        if message.role == "user":
            parts = (*images, *message.parts, *clips, *videos)
            return [*messages[:index], Message(role="user", parts=parts), *messages[index + 1 :]]
    first = (*images, *clips, *videos)[0]
    raise RequestError(
        "Top-level media go into the first user message, but 'messages' has none.",
        param=first.param,
        code="invalid_value",
    )


def _media_list(fields: Fields, name: str, kind: MediaKind, info: ServiceInfo) -> list[MediaSource]:
    sources = fields.strings(name, max_items=MAX_PARTS)
    return [_media(kind, source, f"{name}[{i}]", info) for i, source in enumerate(sources)]


def _message(fields: Fields, info: ServiceInfo) -> Message[MediaSource]:
    name = fields.required_string("role")
    role = _ROLES.get(name)
    if role is None:
        raise RequestError(
            f"Unknown role {shorten(name)}; known are 'system', 'developer', 'user' and 'assistant'.",
            param=fields.path("role"),
            code="invalid_value",
        )
    parts = _content(fields, role, info)
    fields.ignore("name")
    if role == "assistant":
        parts = parts or _spoken_answer(fields)
        for other in ("tool_calls", "function_call"):
            fields.refuse(other, "tool calls are not implemented", unless=([],))
        # an answer sent back as it came carries these
        fields.ignore("refusal", "annotations", "audio", "reasoning_content")
    if fields.value("content") is None and not parts:
        raise missing(fields.path("content"))
    fields.finish()
    return Message(role=role, parts=parts)


def _content(fields: Fields, role: Role, info: ServiceInfo) -> tuple[TextPart | MediaSource, ...]:
    value = fields.value("content")
    if value is None:
        return ()
    if isinstance(value, str):
        text = check_string(value, fields.path("content"))
        return (TextPart(text=text),) if text else ()
    if not isinstance(value, list):
        raise wrong_type(fields.path("content"), "a string or an array of parts", value)
    items = fields.items("content", max_items=MAX_PARTS)
    if not items:
        raise RequestError(
            f"'{fields.path('content')}' has no parts: send a string or at least one part.",
            param=fields.path("content"),
            code="invalid_value",
        )
    return tuple(
        _part(Fields(item, f"{fields.path('content')}[{i}]"), role, info) for i, item in enumerate(items)
    )


def _spoken_answer(fields: Fields) -> tuple[TextPart, ...]:
    """The transcript stands for an earlier spoken answer: audio is not kept on the server."""
    audio = fields.child("audio")
    transcript = None if audio is None else audio.string("transcript")
    if audio is not None and transcript is None:
        raise RequestError(
            "Earlier audio is not kept: send the answer's text as 'content', or 'audio' with its transcript.",
            param=audio.param,
            code="unsupported_parameter",
        )
    return (TextPart(text=transcript),) if transcript else ()


def _part(fields: Fields, role: Role, info: ServiceInfo) -> TextPart | MediaSource:
    part_type = fields.required_string("type")
    if part_type == "text":
        text = fields.required_string("text")
        fields.finish()
        return TextPart(text=text)
    if part_type not in _PART_TYPES:
        listed = ", ".join(repr(known) for known in _PART_TYPES)
        raise RequestError(
            f"Unknown content part {shorten(part_type)}; known are {listed}.{nearest(part_type, _PART_TYPES)}",
            param=fields.path("type"),
            code="invalid_value",
        )
    if role != "user":
        raise RequestError(
            f"A message of the role '{role}' holds text only; put the {part_type!r} part into a user message.",
            param=fields.param,
            code="invalid_value",
        )
    body = fields.child(part_type)
    if body is None:
        raise missing(fields.path(part_type))
    if part_type == "input_audio":
        # The decoder looks at the bytes; this only catches mistakes early.
        body.choice("format", _AUDIO_FORMATS)
        data = body.required_string("data")
        media = _media("audio", data, body.path("data"), info, is_base64=True)
    else:
        kinds: dict[str, MediaKind] = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
        media = _media(kinds[part_type], body.required_string("url"), body.path("url"), info)
        body.choice("detail", ("auto", "low", "high"))  # pictures are sized by the artifact's own rule
    body.finish()
    fields.finish()
    return media


def _media(
    kind: MediaKind, source: str, param: str, info: ServiceInfo, *, is_base64: bool = False
) -> MediaSource:
    able = {"image": info.has_image, "audio": info.has_audio_input, "video": info.has_video}
    if not able[kind]:
        can = ", ".join(["text", *(name for name, yes in able.items() if yes)])
        raise RequestError(
            f"Model '{info.model}' takes no {kind} input; it takes: {can}.",
            param=param,
            code="unsupported_modality",
        )
    return MediaSource(kind=kind, source=check_string(source, param), param=param, is_base64=is_base64)
