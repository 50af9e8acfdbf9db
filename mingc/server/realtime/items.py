"""The items of a conversation: how clients send them and see them, and the messages of the next prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mingc.errors import RequestError
from mingc.prompts.conversation import MediaKind, MediaPart, Message, Part, TextPart, ToolCall
from mingc.server.http.field_errors import invalid, shorten
from mingc.server.http.media import decode_data
from mingc.server.http.messages import media_part
from mingc.server.http.request_schemas import (
    LOW_DETAIL_PIXELS,
    MAX_PARTS,
    MAX_TOOL_NAME,
    Media,
)
from mingc.server.realtime.heard import Answer
from mingc.server.realtime.input_audio import Encoding, clip_of
from mingc.server.realtime.session import MAX_OBJECT_BYTES, Served, new_id

MAX_ITEMS = 4096
MAX_MEDIA_BYTES = 64 << 20  # of one session; beside them, the newest item may have any
_ROOT = "root"

Status = Literal["in_progress", "completed", "incomplete"]
Role = Literal["system", "user", "assistant"]
ItemId = Annotated[str, Meta(max_length=128)]


class InputTextPart(Struct, tag_field="type", tag="input_text"):
    text: str


class OutputTextPart(Struct, tag_field="type", tag="output_text"):
    text: str


class PlainTextPart(Struct, tag_field="type", tag="text"):
    """The older name of `output_text`."""

    text: str


class InputAudioPart(Struct, tag_field="type", tag="input_audio"):
    """Sound in the session's input format, or what was said."""

    audio: Media | None = None
    transcript: str | None = None


class InputImagePart(Struct, tag_field="type", tag="input_image"):
    """A `data:` URL."""

    image_url: Media
    detail: Literal["auto", "low", "high", "original"] | None = None


class OutputAudioPart(Struct, tag_field="type", tag="output_audio"):
    """An earlier spoken answer by its transcript; its sound is not read."""

    transcript: str | None = None


class AudioPart(Struct, tag_field="type", tag="audio"):
    """The older name of `output_audio`."""

    transcript: str | None = None


TextPartFields = InputTextPart | OutputTextPart | PlainTextPart
PartFields = TextPartFields | InputAudioPart | InputImagePart | OutputAudioPart | AudioPart


class _ItemFields(Struct, kw_only=True, tag_field="type"):
    """Other fields are ignored: clients send back items as they received them."""

    id: ItemId | None = None


class MessageFields(_ItemFields, kw_only=True, tag="message"):
    role: Role
    content: Annotated[list[PartFields], Meta(max_length=MAX_PARTS)]


class FunctionCallFields(_ItemFields, kw_only=True, tag="function_call"):
    call_id: str | None = None
    name: Annotated[str, Meta(max_length=MAX_TOOL_NAME)]
    arguments: str


class FunctionOutputFields(_ItemFields, kw_only=True, tag="function_call_output"):
    call_id: str
    output: str | None = None


class ItemReference(_ItemFields, kw_only=True, tag="item_reference"):
    """An item of the conversation; in the `input` of a response only."""


ItemFields = MessageFields | FunctionCallFields | FunctionOutputFields
InputFields = ItemFields | ItemReference


@dataclass(kw_only=True, slots=True, eq=False)
class TextContent:
    """A text of the user."""

    text: str

    def wire(self) -> dict[str, Any]:
        return {"type": "input_text", "text": self.text}


@dataclass(kw_only=True, slots=True, eq=False)
class AudioContent:
    """Sound of the user. `media`: None when it was dropped, or never came. `transcript`: None until it is known."""

    media: MediaPart | None
    transcript: str | None = None

    def wire(self) -> dict[str, Any]:
        return {"type": "input_audio", "transcript": self.transcript}


@dataclass(kw_only=True, slots=True, eq=False)
class ImageContent:
    """A picture of the user. `media`: None when it was dropped."""

    media: MediaPart | None

    def wire(self) -> dict[str, Any]:
        return {"type": "input_image"}


UserContent = TextContent | AudioContent | ImageContent


@dataclass(kw_only=True, slots=True, eq=False)
class Item:
    """An item of a conversation. `is_left_out`: no prompt has it any more."""

    id: str = field(default_factory=lambda: new_id("item"))
    is_left_out: bool = False

    def wire(self) -> dict[str, Any]:
        """The object of events, as it is now. What is absent has no key."""
        raise NotImplementedError

    def message(self) -> Message | None:
        """What a prompt has of it; None: nothing."""
        raise NotImplementedError

    def _object(self, kind: str, status: Status, **fields: object) -> dict[str, Any]:
        return {"id": self.id, "object": "realtime.item", "type": kind, "status": status, **fields}


@dataclass(kw_only=True, slots=True, eq=False)
class SystemMessage(Item):
    texts: tuple[str, ...]

    def wire(self) -> dict[str, Any]:
        content = [{"type": "input_text", "text": text} for text in self.texts]
        return self._object("message", "completed", role="system", content=content)

    def message(self) -> Message | None:
        return Message(role="system", parts=tuple(TextPart(text=text) for text in self.texts if text))


@dataclass(kw_only=True, slots=True, eq=False)
class UserMessage(Item):
    content: list[UserContent]

    def wire(self) -> dict[str, Any]:
        content = [part.wire() for part in self.content]
        return self._object("message", "completed", role="user", content=content)

    def message(self) -> Message | None:
        """Sound and pictures where they stand; the transcript in the place of sound that was dropped."""
        parts: list[Part] = []
        for part in self.content:
            if isinstance(part, TextContent):
                parts += [TextPart(text=part.text)] if part.text else []
            elif part.media is not None:
                parts.append(part.media)
            elif isinstance(part, AudioContent) and part.transcript:
                parts.append(TextPart(text=part.transcript))
        is_empty = not parts and any(not isinstance(part, TextContent) for part in self.content)
        return None if is_empty else Message(role="user", parts=tuple(parts))

    @property
    def media(self) -> Iterator[AudioContent | ImageContent]:
        """Its sound and pictures that were not dropped."""
        for part in self.content:
            if not isinstance(part, TextContent) and part.media is not None:
                yield part

    @property
    def num_media_bytes(self) -> int:
        return sum(part.media.size for part in self.media if part.media is not None)


@dataclass(kw_only=True, slots=True, eq=False)
class AssistantMessage(Item):
    """An answer of the model, or one that the client sent, which has `texts` instead of an `answer`."""

    is_spoken: bool
    answer: Answer | None = None
    texts: tuple[str, ...] = ()
    status: Status = "completed"

    @property
    def transcript(self) -> str:
        """What was heard; the text of an answer without sound."""
        return "".join(self.texts) if self.answer is None else self.answer.heard().transcript

    def wire(self) -> dict[str, Any]:
        texts = self.texts if self.answer is None else (self.answer.heard().transcript,)
        kind, key = ("output_audio", "transcript") if self.is_spoken else ("output_text", "text")
        content = [] if self.status == "in_progress" else [{"type": kind, key: text} for text in texts]
        return self._object("message", self.status, role="assistant", content=content)

    def message(self) -> Message | None:
        """None if nothing was heard, or said."""
        parts: tuple[Part, ...]
        if self.answer is None:
            parts = tuple(TextPart(text=text) for text in self.texts if text)
        else:
            parts = self.answer.heard().parts
        return Message(role="assistant", parts=parts) if parts else None


@dataclass(kw_only=True, slots=True, eq=False)
class FunctionCall(Item):
    name: str
    call_id: str = field(default_factory=lambda: new_id("call"))
    arguments: str = ""
    status: Status = "completed"

    def wire(self) -> dict[str, Any]:
        return self._object(
            "function_call", self.status, call_id=self.call_id, name=self.name, arguments=self.arguments
        )

    def message(self) -> Message | None:
        if self.status != "completed":
            return None
        call = ToolCall(name=self.name, arguments=self.arguments or "{}")
        return Message(role="assistant", parts=(call,))


@dataclass(kw_only=True, slots=True, eq=False)
class FunctionOutput(Item):
    call_id: str
    output: str = ""

    def wire(self) -> dict[str, Any]:
        return self._object("function_call_output", "completed", call_id=self.call_id, output=self.output)

    def message(self) -> Message | None:
        return Message(role="tool", parts=(TextPart(text=self.output),) if self.output else ())


def make_item(fields: ItemFields, param: str, served: Served, encoding: Encoding) -> Item:
    """An item that a client sent; its sound and pictures are decoded from base64, which may take long.

    `param`: its path in the event. `encoding`: of its sound.

    Raises: RequestError for content that its role or the artifact does not have, or that is too large.
    """
    item = _item(fields, param, served, encoding)
    if len(msgspec.json.encode(item.wire())) > MAX_OBJECT_BYTES:
        raise RequestError(
            f"The text of '{param}' is larger than {MAX_OBJECT_BYTES} bytes: split it.",
            param=param,
            code="string_too_long",
        )
    return item


def _item(fields: ItemFields, param: str, served: Served, encoding: Encoding) -> Item:
    item_id = fields.id or new_id("item")
    if not isinstance(fields, MessageFields) and not served.info.has_tools:
        raise RequestError(
            f"Model '{served.info.model}' cannot call tools: its tokenizer has no tokens for calls.",
            param=f"{param}.type",
            code="unsupported_value",
        )
    match fields:
        case FunctionCallFields():
            return FunctionCall(
                id=item_id,
                call_id=fields.call_id or new_id("call"),
                name=fields.name,
                arguments=fields.arguments,
            )
        case FunctionOutputFields():
            return FunctionOutput(id=item_id, call_id=fields.call_id, output=fields.output or "")
    parts = [(part, f"{param}.content[{index}]") for index, part in enumerate(fields.content)]
    if fields.role == "user":
        return UserMessage(
            id=item_id, content=[_user_part(part, where, item_id, served, encoding) for part, where in parts]
        )
    texts = tuple(_text(part, where, fields.role) for part, where in parts)
    if fields.role == "system":
        return SystemMessage(id=item_id, texts=texts)
    is_spoken = any(isinstance(part, OutputAudioPart | AudioPart) for part in fields.content)
    return AssistantMessage(id=item_id, is_spoken=is_spoken, texts=texts)


def _text(part: PartFields, param: str, role: Role) -> str:
    """The text of a part that is not the user's. Clients send `input_text` for answers too."""
    match part:
        case InputTextPart(text=text):
            return text
        case OutputTextPart(text=text) | PlainTextPart(text=text) if role == "assistant":
            return text
        case OutputAudioPart() | AudioPart() if role == "assistant":
            return part.transcript or ""
        case _:
            raise _wrong_role(part, param, role)


def _user_part(part: PartFields, param: str, item_id: str, served: Served, encoding: Encoding) -> UserContent:
    match part:
        case InputTextPart(text=text):
            return TextContent(text=text)
        case InputAudioPart(audio=None):
            return AudioContent(media=None, transcript=part.transcript)
        case InputAudioPart(audio=str() as audio):
            media, data = _load("audio", audio, f"{param}.audio", served)
            clip = clip_of(bytes(data), encoding)
            if not clip.pcm:
                raise RequestError("The audio holds no sample.", param=f"{param}.audio", code="empty_media")
            media = replace(media, data=clip.wav(), is_base64=False, where=f"{item_id}.content.audio")
            return AudioContent(media=media, transcript=part.transcript)
        case InputImagePart(image_url=url):
            media, data = _load("image", url, f"{param}.image_url", served)
            limits = [served.options.max_image_pixels, LOW_DETAIL_PIXELS if part.detail == "low" else None]
            media = replace(
                media,
                data=data,
                where=f"{item_id}.content.image_url",
                max_pixels=min((each for each in limits if each is not None), default=None),
            )
            return ImageContent(media=media)
        case _:
            raise _wrong_role(part, param, "user")


def _load(kind: MediaKind, source: str, param: str, served: Served) -> tuple[MediaPart, memoryview]:
    """The bytes of base64, or of a data URL for a picture."""
    media = media_part(kind, source, param, served.info, is_base64=kind == "audio")
    if kind == "image" and not source[:5].lower() == "data:":
        raise invalid(param, "must be a data: URL")
    data = decode_data(media, source, served.options.max_media_bytes)
    if not data:
        raise RequestError(f"The {kind} holds no bytes.", param=param, code="empty_media")
    return media, data


def _wrong_role(part: PartFields, param: str, role: Role) -> RequestError:
    kind = str(part.__struct_config__.tag)
    return RequestError(
        f"An item of the role '{role}' has no part of the type '{kind}'.", param=param, code="invalid_value"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A message of a prompt, and the items that it says."""

    message: Message
    items: tuple[Item, ...]


def turns_of(items: Iterable[Item]) -> list[Turn]:
    """What a prompt has of items. Calls belong to the message before them, if it is an answer."""
    turns: list[Turn] = []
    for item in items:
        if item.is_left_out or (message := item.message()) is None:
            continue
        last = turns[-1] if turns else None
        if isinstance(item, FunctionCall) and last is not None and last.message.role == "assistant":
            joined = replace(last.message, parts=last.message.parts + message.parts)
            turns[-1] = Turn(message=joined, items=(*last.items, item))
        else:
            turns.append(Turn(message=message, items=(item,)))
    return turns


def prompt_messages(
    turns: Iterable[Turn], instructions: str, request: str | None = None
) -> tuple[Message, ...]:
    """The messages of a prompt: the instructions, then the turns.

    `request`: instructions of the response alone; if nobody has asked anything, they are the user's last turn.
    """
    system = [Message(role="system", parts=(TextPart(text=instructions),))] if instructions else []
    messages = [turn.message for turn in turns]
    spoken = [message for message in messages if message.role != "system"]
    if not spoken or messages[-1].role == "assistant":
        messages.append(Message(role="user", parts=(TextPart(text=request),) if request else ()))
    return (*system, *messages)


class Conversation:
    """Items in their order. Media beyond a limit of memory are dropped, the oldest first.

    Attributes:
        id: of the conversation.
    """

    def __init__(self, *, max_items: int = MAX_ITEMS, max_media_bytes: int = MAX_MEDIA_BYTES) -> None:
        self.id = new_id("conv")
        self._max_items = max_items
        self._max_media_bytes = max_media_bytes
        self._items: list[Item] = []
        self._by_id: dict[str, Item] = {}

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(self._items)

    @property
    def num_media_bytes(self) -> int:
        """Host memory of sound and pictures."""
        return sum(item.num_media_bytes for item in self._items if isinstance(item, UserMessage))

    def find(self, item_id: str) -> Item | None:
        return self._by_id.get(item_id)

    def previous_id(self, item: Item) -> str | None:
        """Id of the item before; None for the first one. `item` is in the conversation."""
        index = self._items.index(item)
        return self._items[index - 1].id if index else None

    @property
    def has_room(self) -> bool:
        """Whether the client, or its sound, may add an item."""
        return len(self._items) < self._max_items

    def check_room(self) -> None:
        """Refuse what would add an item, if there are too many. Raises: RequestError."""
        if not self.has_room:
            raise RequestError(
                f"The conversation has {self._max_items} items, the most that it can hold: delete some.",
                code="too_many_items",
            )

    def append(self, item: Item) -> None:
        """Add an item of the server at the end."""
        assert item.id not in self._by_id
        self._add(len(self._items), item)

    def insert(self, item: Item, previous_item_id: str | None = None, *, taken: str | None = None) -> None:
        """Add an item of the client: after another one, first (`root`), or at the end (None).

        `taken`: id of an item that is to come.

        Raises: RequestError when its id exists, the other one does not, or there is no room.
        """
        if item.id in self._by_id or item.id == taken:
            raise RequestError(
                f"There is already an item {shorten(item.id)}.",
                param="item.id",
                code="item_create_duplicate_item_id",
            )
        self.check_room()
        index = len(self._items)
        if previous_item_id == _ROOT:
            index = 0
        elif previous_item_id is not None:
            before = self._by_id.get(previous_item_id)
            if before is None:
                raise _no_item(previous_item_id, "previous_item_id", "item_create_invalid_previous_item_id")
            index = self._items.index(before) + 1
        self._add(index, item)

    def _add(self, index: int, item: Item) -> None:
        self._items.insert(index, item)
        self._by_id[item.id] = item
        self.limit_media(item)

    def delete(self, item_id: str) -> Item:
        """Remove an item. Raises: RequestError."""
        item = self._by_id.pop(item_id, None)
        if item is None:
            raise _no_item(item_id, "item_id", "item_delete_invalid_item_id")
        self._items.remove(item)
        return item

    def retrieve(self, item_id: str) -> Item:
        """Find an item for a client. Raises: RequestError."""
        item = self._by_id.get(item_id)
        if item is None:
            raise _no_item(item_id, "item_id", "item_retrieve_invalid_item_id")
        return item

    def spoken_item(self, item_id: str, content_index: int) -> AssistantMessage:
        """The item of a `conversation.item.truncate`, so that a running answer can be stopped before it is cut.

        Raises: RequestError for anything but a spoken answer.
        """
        item = self._by_id.get(item_id)
        if item is None:
            raise _no_item(item_id, "item_id", "item_truncate_invalid_item_id")
        if not (isinstance(item, AssistantMessage) and item.is_spoken):
            raise invalid("item_id", f"is {shorten(item_id)}, which is no spoken answer: only these are cut")
        if content_index:
            raise invalid("content_index", f"is {content_index}, but a spoken answer has one part, 0")
        return item

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> int:
        """Cut a spoken answer to what was heard. Returns its length in ms, at most what it was.

        An answer that the client sent has no sound here, and keeps its transcript. Raises: as `spoken_item`.
        """
        item = self.spoken_item(item_id, content_index)
        return 0 if item.answer is None else item.answer.truncate(audio_end_ms)

    def leave_out(self, items: Iterable[Item]) -> None:
        """Leave items out of all later prompts, and drop their media. The items stay."""
        for item in items:
            item.is_left_out = True
            _drop_media(item)

    def limit_media(self, newest: Item | None = None) -> None:
        """Drop the oldest media beyond the limit, but not those of `newest`. To be called when media have grown."""
        excess = self.num_media_bytes - self._max_media_bytes
        for item in self._items:
            if excess <= 0:
                return
            if item is not newest:
                excess -= _drop_media(item)


def _drop_media(item: Item) -> int:
    """Returns the bytes of what was dropped."""
    if not isinstance(item, UserMessage):
        return 0
    num_bytes = item.num_media_bytes
    for part in item.media:
        part.media = None
    return num_bytes


def _no_item(item_id: str, param: str, code: str) -> RequestError:
    return RequestError(f"There is no item {shorten(item_id)}.", param=param, code=code)
