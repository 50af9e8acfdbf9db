"""The conversation of a chat body: its messages, with top-level media put into the first user message.

Media stay strings (URL, path, base64) with the path of their field; `mingc.server.http.media` reads their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from mingc.errors import RequestError
from mingc.prompts.conversation import (
    MediaKind,
    MediaPart,
    Message,
    Part,
    Role,
    TextPart,
    ThoughtPart,
    ToolCall,
)
from mingc.runtime.request import ServiceInfo
from mingc.server.http.field_errors import as_integer, invalid, missing
from mingc.server.http.request_schemas import (
    LOW_DETAIL_PIXELS,
    AssistantMessage,
    AudioContent,
    AudioUrlContent,
    ChatBody,
    Content,
    ContentPart,
    FunctionMessage,
    ImageContent,
    MessageBody,
    RefusalContent,
    TextContent,
    ToolMessage,
    UserMessage,
    VideoContent,
)
from mingc.server.options import ServeOptions


def parse_messages(body: ChatBody, info: ServiceInfo, options: ServeOptions) -> tuple[Message, ...]:
    """Parse `messages` and the three media lists of a chat body. An image gets the smallest of its limits of pixels.

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
    messages = _carry_pictures(messages)
    limit = _smallest(as_integer(body.image_max_pixels, "image_max_pixels"), options.max_image_pixels)
    return tuple(_limited(message, limit) for message in _inject(messages, body, info))


def _carry_pictures(messages: list[Message]) -> list[Message]:
    """Put the pictures of an earlier answer before the user's next message: only a user's turn can have some."""
    carried: list[MediaPart] = []
    found = []
    for message in messages:
        parts = message.parts
        if message.role == "assistant":
            carried += (part for part in parts if isinstance(part, MediaPart))
            parts = tuple(part for part in parts if not isinstance(part, MediaPart))
        elif message.role == "user":
            parts, carried = (*carried, *parts), []
        found.append(replace(message, parts=parts))
    if carried:
        raise invalid(carried[0].where, "is a picture of an answer that no message of the user follows")
    return found


def _smallest(*limits: int | None) -> int | None:
    return min((each for each in limits if each is not None), default=None)


def _limited(message: Message, max_pixels: int | None) -> Message:
    if max_pixels is None:
        return message
    parts = (
        replace(part, max_pixels=_smallest(part.max_pixels, max_pixels))
        if isinstance(part, MediaPart) and part.kind == "image"
        else part
        for part in message.parts
    )
    return replace(message, parts=tuple(parts))


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
    return [media_part(kind, source, f"{name}[{i}]", info) for i, source in enumerate(sources or ())]


def _message(message: MessageBody, param: str, info: ServiceInfo) -> Message:
    role = _role(message)
    parts = _content(message.content, f"{param}.content", role, info)
    if isinstance(message, AssistantMessage):
        parts = parts or _spoken_answer(message, param)
        if not parts and message.refusal:
            parts = (TextPart(text=message.refusal),)
        parts += _calls(message)
        if message.reasoning_content:
            parts = (ThoughtPart(text=message.reasoning_content), *parts)
    elif message.content is None:
        raise missing(f"{param}.content")
    return Message(role=role, parts=parts)


def _role(message: MessageBody) -> Role:
    match message:
        case UserMessage():
            return "user"
        case AssistantMessage():
            return "assistant"
        case ToolMessage() | FunctionMessage():
            return "tool"
        case _:
            return "system"


def _content(content: Content | None, param: str, role: Role, info: ServiceInfo) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(text=content),) if content else ()
    if content == [] and role in ("user", "system"):
        raise RequestError(
            f"'{param}' has no parts: send a string or at least one part.", param=param, code="invalid_value"
        )
    found = (_part(part, f"{param}[{i}]", role, info) for i, part in enumerate(content or ()))
    return tuple(part for part in found if part is not None)


def _calls(message: AssistantMessage) -> tuple[ToolCall, ...]:
    """Calls of tools, by either of their names. Arguments that are not a text are written as the template does."""
    calls = [call.function for call in message.tool_calls or ()]
    calls += [message.function_call] if message.function_call else []
    return tuple(
        ToolCall(
            name=call.name,
            arguments=call.arguments
            if isinstance(call.arguments, str) and call.arguments
            else json.dumps(call.arguments or {}, ensure_ascii=False),
        )
        for call in calls
    )


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


def _part(part: ContentPart, param: str, role: Role, info: ServiceInfo) -> Part | None:
    """One part of a message; None for thoughts."""
    is_media = isinstance(part, ImageContent | AudioContent | AudioUrlContent | VideoContent)
    is_drawn = isinstance(part, ImageContent) and role == "assistant" and info.has_image_output
    if is_media and role != "user" and not is_drawn:
        raise RequestError(
            f"A message of the role '{role}' has text only; put the {str(part.__struct_config__.tag)!r} part into a "
            "user message.",
            param=param,
            code="invalid_value",
        )
    match part:
        case TextContent(text=text) | RefusalContent(refusal=text):
            return TextPart(text=text)
        case ImageContent(image_url=url):
            limit = _smallest(
                as_integer(part.max_pixels, f"{param}.max_pixels"),
                as_integer(url.max_pixels, f"{param}.image_url.max_pixels"),
                LOW_DETAIL_PIXELS if url.detail == "low" else None,
            )
            image = media_part("image", url.url, f"{param}.image_url.url", info)
            return replace(image, max_pixels=limit)
        case AudioUrlContent(audio_url=url):
            return media_part("audio", url.url, f"{param}.audio_url.url", info)
        case VideoContent(video_url=url):
            return media_part("video", url.url, f"{param}.video_url.url", info)
        case AudioContent(input_audio=audio):
            return media_part("audio", audio.data, f"{param}.input_audio.data", info, is_base64=True)
        case _:
            return None


def media_part(
    kind: MediaKind, source: str, param: str, info: ServiceInfo, *, is_base64: bool = False
) -> MediaPart:
    """A medium as the client sent it. Raises: RequestError if the artifact does not take its kind."""
    able = {"image": info.has_image, "audio": info.has_audio_input, "video": info.has_video}
    if not able[kind]:
        can = ", ".join(["text", *(name for name, yes in able.items() if yes)])
        raise RequestError(
            f"Model '{info.model}' takes no {kind} input; it takes: {can}.",
            param=param,
            code="unsupported_modality",
        )
    return MediaPart(kind=kind, data=source, where=param, is_base64=is_base64)
