"""The conversation of a chat body: its messages, with top-level media put into the first user message.

Media stay strings (URL, path, base64) with the path of their field; `mingc.server.http.media` reads their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mingc.errors import RequestError
from mingc.prompts.conversation import MediaKind, MediaPart, Message, Role, TextPart
from mingc.runtime.request import ServiceInfo
from mingc.server.http.body import decode_small
from mingc.server.http.field_errors import missing
from mingc.server.http.request_schemas import (
    AssistantMessage,
    AudioContent,
    AudioUrlContent,
    ChatBody,
    Content,
    ImageContent,
    MediaContent,
    MessageBody,
    TextContent,
    UserMessage,
    VideoContent,
)


def parse_messages(body: ChatBody, info: ServiceInfo) -> tuple[Message, ...]:
    """Parse `messages` and the three media lists of a chat body.

    Raises:
        RequestError: for empty content, or media that the artifact or the role of the message does not support.
    """
    if body.messages is None:
        raise missing("messages")
    if not body.messages:
        raise RequestError(
            "'messages' is empty: send at least one message.", param="messages", code="invalid_value"
        )
    messages = [_message(message, f"messages[{i}]", info) for i, message in enumerate(body.messages)]
    return tuple(_inject(messages, body, info))


def _inject(messages: list[Message], body: ChatBody, info: ServiceInfo) -> list[Message]:
    """Put images before the content of the first user message, audio and video after it (spec serving §2.1)."""
    images = _media_list(body.images, "images", "image", info)
    clips = _media_list(body.audios, "audios", "audio", info)
    videos = _media_list(body.videos, "videos", "video", info)
    if not (images or clips or videos):
        return messages
    for index, message in enumerate(messages):
        if message.role == "user":
            parts = (*images, *message.parts, *clips, *videos)
            return [*messages[:index], replace(message, parts=parts), *messages[index + 1 :]]
    first = (*images, *clips, *videos)[0]
    raise RequestError(
        "Top-level media go into the first user message, but 'messages' has none.",
        param=first.where,
        code="invalid_value",
    )


def _media_list(
    sources: Sequence[str] | None, name: str, kind: MediaKind, info: ServiceInfo
) -> list[MediaPart]:
    return [_media(kind, source, f"{name}[{i}]", info) for i, source in enumerate(sources or ())]


def _message(message: MessageBody, param: str, info: ServiceInfo) -> Message:
    role = _role(message)
    parts = _content(message.content, f"{param}.content", role, info)
    if isinstance(message, AssistantMessage):
        parts = parts or _spoken_answer(message, param)
        for name in ("tool_calls", "function_call"):
            if decode_small(getattr(message, name)) not in (None, []):
                raise RequestError(
                    f"'{param}.{name}' is not supported: tool calls are not implemented.",
                    param=f"{param}.{name}",
                    code="unsupported_parameter",
                )
    if message.content is None and not parts:
        raise missing(f"{param}.content")
    return Message(role=role, parts=parts)


def _role(message: MessageBody) -> Role:
    if isinstance(message, UserMessage):
        return "user"
    return "assistant" if isinstance(message, AssistantMessage) else "system"


def _content(
    content: Content | None, param: str, role: Role, info: ServiceInfo
) -> tuple[TextPart | MediaPart, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(text=content),) if content else ()
    if not content:
        raise RequestError(
            f"'{param}' has no parts: send a string or at least one part.", param=param, code="invalid_value"
        )
    return tuple(_part(part, f"{param}[{i}]", role, info) for i, part in enumerate(content))


def _spoken_answer(message: AssistantMessage, param: str) -> tuple[TextPart, ...]:
    """Return the transcript of an earlier spoken answer: the server does not keep its audio."""
    if message.audio is None:
        return ()
    if message.audio.transcript is None:
        raise RequestError(
            "Earlier audio is not kept: send the answer's text as 'content', or 'audio' with its transcript.",
            param=f"{param}.audio",
            code="unsupported_parameter",
        )
    return (TextPart(text=message.audio.transcript),) if message.audio.transcript else ()


def _part(
    part: TextContent | MediaContent, param: str, role: Role, info: ServiceInfo
) -> TextPart | MediaPart:
    if isinstance(part, TextContent):
        return TextPart(text=part.text)
    if role != "user":
        raise RequestError(
            f"A message of the role '{role}' has text only; put the {_part_type(part)!r} part into a user message.",
            param=param,
            code="invalid_value",
        )
    match part:
        case ImageContent(image_url=url):
            return _media("image", url.url, f"{param}.image_url.url", info)
        case AudioUrlContent(audio_url=url):
            return _media("audio", url.url, f"{param}.audio_url.url", info)
        case VideoContent(video_url=url):
            return _media("video", url.url, f"{param}.video_url.url", info)
        case AudioContent(input_audio=audio):
            return _media("audio", audio.data, f"{param}.input_audio.data", info, is_base64=True)


def _part_type(part: MediaContent) -> str:
    return str(part.__struct_config__.tag)


def _media(
    kind: MediaKind, source: str, param: str, info: ServiceInfo, *, is_base64: bool = False
) -> MediaPart:
    able = {"image": info.has_image, "audio": info.has_audio_input, "video": info.has_video}
    if not able[kind]:
        can = ", ".join(["text", *(name for name, yes in able.items() if yes)])
        raise RequestError(
            f"Model '{info.model}' takes no {kind} input; it takes: {can}.",
            param=param,
            code="unsupported_modality",
        )
    return MediaPart(kind=kind, data=source, where=param, is_base64=is_base64)
